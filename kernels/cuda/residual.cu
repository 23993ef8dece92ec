// The twin of kernels/src/residual.rs, which holds the contract. One block per row and stream, which holds the
// stream in registers: wider ones than it can hold are left unwritten.
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    bf16* streams;
    const float* partials;
    const float* inject;
    const bf16* gain;
    bf16* normed;
    u32 rows, count, hidden;
    float eps;
};
static_assert(sizeof(Args) == ARGS_BYTES_residual);

constexpr u32 THREADS = 320;
// Runs of eight elements that a thread holds at most.
constexpr u32 HELD = 4;

// Eight f32 from element `at` on; zero past the end.
__device__ __forceinline__ Few<8> load_eight(const float* row, u32 at, u32 count, bool whole) {
    Few<8> few;
    if (whole && at < count) {
        const Quad half[2] = {((const Quad*)(row + at))[0], ((const Quad*)(row + at))[1]};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) few.value[i] = __uint_as_float(half[i / 4].word[i % 4]);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) few.value[i] = at + i < count ? row[at + i] : 0.0f;
    }
    return few;
}

// For streams of at most THREADS * HELD * 8 elements.
template <u32 HELD> __device__ __forceinline__ void write_back(const Args& a) {
    const u64 row = blockIdx.x;
    const u32 stream = blockIdx.y, hidden = a.hidden;
    bf16* const x = a.streams + (row * a.count + stream) * hidden;
    const bf16* const gain = a.gain ? a.gain + (u64)stream * hidden : nullptr;
    const bool gain_whole = whole<8>(gain, hidden), x_whole = whole<8>(x, hidden);
    Few<8> gains[HELD], held[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (gain && at < hidden) gains[i] = load_few<8>(gain, at, hidden, gain_whole);
    }

    follow();
    const float* const first = a.partials + row * hidden;
    const float* const second = first + (u64)a.rows * hidden;
    const bool parts_whole = aligned16(first) && aligned16(second) && hidden % 8 == 0;
    const float inject = a.partials ? a.inject[row * a.count + stream] : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= hidden) continue;
        held[i] = load_few<8>(x, at, hidden, x_whole);
        if (a.partials) {
            const Few<8> one = load_eight(first, at, hidden, parts_whole);
            const Few<8> two = load_eight(second, at, hidden, parts_whole);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                const float y = r16(add(one.value[e], two.value[e]));
                held[i].value[e] = r16(add(held[i].value[e], mul(y, inject)));
            }
            store_few<8>(x, at, hidden, x_whole, held[i]);
        }
#pragma unroll
        for (u32 e = 0; e < 8; ++e) squares = add(squares, mul(held[i].value[e], held[i].value[e]));
    }
    if (!gain) return;
    const float scale = inverse_rms(block_sum(squares), hidden, a.eps);
    bf16* const n = a.normed + (row * a.count + stream) * hidden;
    const bool n_whole = whole<8>(n, hidden);
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= hidden) continue;
#pragma unroll
        for (u32 e = 0; e < 8; ++e)
            held[i].value[e] = mul(mul(held[i].value[e], scale), add(1.0f, gains[i].value[e]));
        store_few<8>(n, at, hidden, n_whole, held[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) residual(Args a) {
    if (a.hidden <= THREADS * 8) write_back<1>(a);
    else if (a.hidden <= THREADS * HELD * 8) write_back<HELD>(a);
    else follow();
}
