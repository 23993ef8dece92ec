// The twins of kernels/src/patch.rs, which holds the contracts. One block per row.
#include "few.cuh"
#include "ptx.cuh"

struct Patches {
    u32 first, rows, height, width, merge, zero;

    // The line and the column of a row's patch.
    __device__ void place(u32 row, u32& line, u32& column) const {
        const u32 at = (u32)(((u64)first + row) % (height * width)), squares = width / merge;
        const u32 square = at / (merge * merge), inside = at % (merge * merge);
        line = square / squares * merge + inside / merge;
        column = square % squares * merge + inside % merge;
    }
};

struct PositionArgs {
    Patches patches;
    bf16* x;
    const bf16* table;
    u32 side, hidden;
};
static_assert(sizeof(PositionArgs) == ARGS_BYTES_add_positions);

struct TurnArgs {
    Patches patches;
    bf16* x;
    const float* frequencies;
    u32 heads, width, stride, zero;
};
static_assert(sizeof(TurnArgs) == ARGS_BYTES_turn_patches);

constexpr u32 THREADS = 128;
// Columns of a head at most.
constexpr u32 TURNED = 256;

// Two neighbours along an axis, and how near each is.
struct Between {
    u32 entry[2];
    float share[2];

    __device__ Between(u32 at, u32 count, u32 side) {
        const float place = div((float)(at * (side - 1)), (float)(count > 1 ? count - 1 : 1)), low = floorf(place);
        entry[0] = (u32)low;
        entry[1] = least(entry[0] + 1, side - 1);
        share[1] = sub(place, low);
        share[0] = sub(1.0f, share[1]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) add_positions(PositionArgs a) {
    follow();
    u32 line, column;
    a.patches.place(blockIdx.x, line, column);
    const Between y(line, a.patches.height, a.side), z(column, a.patches.width, a.side);
    const bf16* near[4];
    float share[4];
    bool smooth = whole<4>(a.x, a.hidden) && whole<4>(a.table, a.hidden);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        near[i] = a.table + ((u64)y.entry[i / 2] * a.side + z.entry[i % 2]) * a.hidden;
        share[i] = mul(y.share[i / 2], z.share[i % 2]);
    }
    bf16* const x = a.x + (u64)blockIdx.x * a.hidden;
    for (u32 at = threadIdx.x * 4; at < a.hidden; at += THREADS * 4) {
        Few<4> held = load_few<4>(x, at, a.hidden, smooth), sum = {};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const Few<4> entry = load_few<4>(near[i], at, a.hidden, smooth);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const float part = mul(entry.value[e], share[i]);
                sum.value[e] = i == 0 ? part : add(sum.value[e], part);
            }
        }
#pragma unroll
        for (u32 e = 0; e < 4; ++e) held.value[e] = add(held.value[e], r16(sum.value[e]));
        store_few<4>(x, at, a.hidden, smooth, held);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) turn_patches(TurnArgs a) {
    follow();
    __shared__ float cosines[TURNED / 2], sines[TURNED / 2];
    if (a.width > TURNED) return;
    const u32 half = a.width / 2, quarter = a.width / 4;
    u32 line, column;
    a.patches.place(blockIdx.x, line, column);
    for (u32 i = threadIdx.x; i < half; i += THREADS) {
        const float angle = mul((float)(i < quarter ? line : column), a.frequencies[i % quarter]);
        cosines[i] = cosf(angle);
        sines[i] = sinf(angle);
    }
    __syncthreads();
    bf16* const x = a.x + (u64)blockIdx.x * a.stride;
    for (u32 at = threadIdx.x; at < 2 * a.heads * half; at += THREADS) {
        const u32 i = at % half;
        bf16* const v = x + at / half * a.width + i;
        const float from = widen(v[0]), to = widen(v[half]);
        v[0] = narrow(sub(mul(from, cosines[i]), mul(to, sines[i])));
        v[half] = narrow(add(mul(to, cosines[i]), mul(from, sines[i])));
    }
}
