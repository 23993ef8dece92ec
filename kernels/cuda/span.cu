// The twin of kernels/src/span.rs, which holds the contract. A block takes 128 rows of a span and one head; a warp 32
// of them, all of whose queries, products and sums it holds in registers. Heads are at most 72 wide, wider ones are
// left unwritten.
//
// The span's rows are taken 64 at a time, in order; while some are used, the next ones' keys and values are on their
// way. The integer that weights are relative to grows with the scores, and what was summed is scaled by the power of
// two between: exact, so the sums are those of weights relative to the last integer.
#include "common.cuh"
#include "ptx.cuh"

struct Args {
    const bf16* x;
    bf16* out;
    u32 total, span, first, rows, heads, width;
};
static_assert(sizeof(Args) == ARGS_BYTES_attend_span);

constexpr u32 WARPS = 4, THREADS = WARPS * 32;
constexpr u32 QUERIES = 128;
constexpr u32 KEYS = 64;
constexpr u32 WIDTH = 72;
// Quads of a staged row: an odd number, so that eight rows' quads meet every bank once.
constexpr u32 QUADS = WIDTH / 8;
// Tiles of 16 rows of a warp, and of eight rows and eight columns of keys and values.
constexpr u32 TILES = QUERIES / WARPS / 16;
constexpr u32 KEY_TILES = KEYS / 8;
static_assert(QUERIES == 2 * KEYS && QUADS == 9);

extern __shared__ Quad pool[];

// Starts the copy of 64 rows, `stride` elements apart, of which `live` are there: zeros instead of the others, and
// past the width of a row. Two threads take every other quad of a row.
__device__ __forceinline__ void stage(Quad* to, const bf16* from, u32 stride, u32 live, u32 width, bool aligned) {
    static_assert(2 * KEYS == THREADS);
    const u32 row = threadIdx.x / 2, first = threadIdx.x % 2;
    const bf16* const mine = from + (u64)(row < live ? row : 0) * stride + first * 8;
    if (aligned) {
        const u32 place = shared_address(to + row * QUADS + first);
        const u32 columns = row < live ? width : 0;
#pragma unroll
        for (u32 i = 0; i < QUADS; i += 2) {
            const bool there = (first + i) * 8 < columns;
            if (first + i < QUADS) copy_async(place + i * 16, there ? mine + i * 8 : from, there);
        }
        return;
    }
#pragma unroll 1
    for (u32 at = first * 8; at < WIDTH; at += at % 8 == 7 ? 9 : 1)
        ((bf16*)to)[row * WIDTH + at] = row < live && at < width ? mine[at - first * 8] : bf16{0};
}

// 2^x for x of at most 1, about: zero where it would be subnormal.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^(from - to) for integers, from at most to; zero where it is no normal number.
__device__ __forceinline__ float step_down(float from, float to) {
    const i32 apart = (i32)fminf(to - from, 127.0f);
    return __uint_as_float((u32)(127 - apart) << 23);
}

// The largest of the four lanes of a row.
__device__ __forceinline__ float most_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

// blockIdx.x: tile of rows of a span; blockIdx.y: head; blockIdx.z: span.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_span(Args a) {
    follow();
    const u32 hidden = a.heads * a.width, stride = 3 * hidden;
    const u32 start = (a.first / a.span + blockIdx.z) * a.span;
    const u32 from = (start > a.first ? start : a.first) + blockIdx.x * QUERIES;
    const u32 end = least(a.first + a.rows, start + a.span);
    if (a.width > WIDTH || from >= end) return;
    const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const bf16* const queries = a.x + (u64)from * stride + blockIdx.y * a.width;
    const bf16* const keys = a.x + (u64)start * stride + hidden + blockIdx.y * a.width;
    const bool aligned = aligned16(a.x) && a.width % 8 == 0;

    // Keys and values of two stages; queries first lie where the second stage comes.
    constexpr u32 STAGE = 2 * KEYS * QUADS;
    const auto stage_keys = [&](u32 at, u32 place) {
        const u32 live = least(a.span - at, KEYS);
        Quad* const to = pool + place * STAGE;
        stage(to, keys + (u64)at * stride, stride, live, a.width, aligned);
        stage(to + KEYS * QUADS, keys + hidden + (u64)at * stride, stride, live, a.width, aligned);
        copy_commit();
    };
    const u32 count = end - from;
    stage(pool + STAGE, queries, stride, count, a.width, aligned);
    stage(pool + STAGE + KEYS * QUADS, queries + (u64)(count > KEYS ? KEYS : 0) * stride, stride,
          count > KEYS ? count - KEYS : 0, a.width, aligned);
    copy_commit();
    stage_keys(0, 0);
    copy_wait<1>();
    __syncthreads();
    u32 q[TILES][4][4], q_last[TILES][2];
    {
        const u32 row = warp_id() * 32 + lane % 16, at = shared_address(pool + STAGE + row * QUADS);
#pragma unroll
        for (u32 m = 0; m < TILES; ++m) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) load_matrices(q[m][i], at + (m * 16 * QUADS + i * 2 + lane / 16) * 16);
            load_matrices(q_last[m], at + (m * 16 * QUADS + 8) * 16);
        }
    }

    const float scale = div(1.44269504088896340736f, root((float)a.width));
    float sums[TILES][QUADS][4] = {}, totals[TILES][4] = {}, most[TILES][2];
#pragma unroll
    for (u32 i = 0; i < TILES * 2; ++i) most[i / 2][i % 2] = -infinity();
    // Where a lane finds its rows of four matrices: of keys, one tile of rows by four quads, and the last quad of four
    // tiles; of values, two tiles of rows by two quads, and by the last.
    const u32 base = shared_address(pool), row = lane % 8, matrix = lane / 8;
    const u32 key_at = base + (row * QUADS + matrix) * 16, last_at = base + ((matrix * 8 + row) * QUADS + 8) * 16;
    const u32 value_at = base + ((KEYS + matrix % 2 * 8 + row) * QUADS + matrix / 2) * 16;
#pragma unroll 1
    for (u32 at = 0, place = 0; at < a.span; at += KEYS, place ^= 1) {
        copy_wait<0>();
        __syncthreads();
        if (at + KEYS < a.span) stage_keys(at + KEYS, place ^ 1);
        const u32 shift = place * STAGE * 16;

        float scores[TILES][KEY_TILES][4] = {};
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; ++n) {
            u32 low[4], high[4];
            load_matrices(low, key_at + shift + n * 8 * QUADS * 16);
            load_matrices(high, key_at + shift + (n * 8 * QUADS + 4) * 16);
#pragma unroll
            for (u32 m = 0; m < TILES; ++m) {
                mma(scores[m][n], q[m][0], low[0], low[1]);
                mma(scores[m][n], q[m][1], low[2], low[3]);
                mma(scores[m][n], q[m][2], high[0], high[1]);
                mma(scores[m][n], q[m][3], high[2], high[3]);
            }
        }
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n += 4) {
            u32 last[4];
            load_matrices(last, last_at + shift + n * 8 * QUADS * 16);
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 m = 0; m < TILES; ++m) mma_half(scores[m][n + i], q_last[m], last[i]);
        }
        if (at + KEYS > a.span) {
#pragma unroll
            for (u32 i = 0; i < TILES * KEY_TILES * 4; ++i) {
                const u32 n = i / 4 % KEY_TILES;
                if (at + n * 8 + t * 2 + i % 2 >= a.span) scores[i / 4 / KEY_TILES][n][i % 4] = -infinity();
            }
        }

        // Of each tile, rows g and g + 8.
        bool grown = false;
        float before[TILES][2];
#pragma unroll
        for (u32 i = 0; i < TILES * 2; ++i) {
            const u32 m = i / 2, half = i % 2 * 2;
            float largest = fmaxf(scores[m][0][half], scores[m][0][half + 1]);
#pragma unroll
            for (u32 n = 1; n < KEY_TILES; ++n)
                largest = fmaxf(largest, fmaxf(scores[m][n][half], scores[m][n][half + 1]));
            before[m][i % 2] = most[m][i % 2];
            most[m][i % 2] = fmaxf(most[m][i % 2], ceilf(mul(most_of_row(largest), scale)));
            grown |= most[m][i % 2] != before[m][i % 2];
        }
        if (__any_sync(WHOLE_WARP, grown)) {
#pragma unroll
            for (u32 m = 0; m < TILES; ++m) {
                const float factor[2] = {step_down(before[m][0], most[m][0]), step_down(before[m][1], most[m][1])};
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    totals[m][i] = mul(totals[m][i], factor[i / 2]);
#pragma unroll
                    for (u32 c = 0; c < QUADS; ++c) sums[m][c][i] = mul(sums[m][c][i], factor[i / 2]);
                }
            }
        }

        // Weights of two tiles of keys are an operand; a column of ones adds them up.
        constexpr u32 ONES = 0x3f803f80u;
#pragma unroll
        for (u32 k = 0; k < KEY_TILES / 2; ++k) {
            u32 weights[TILES][4];
#pragma unroll
            for (u32 i = 0; i < TILES * 4; ++i) {
                const u32 m = i / 4, half = i % 2;
                const float* const score = &scores[m][k * 2 + i % 4 / 2][half * 2];
                weights[m][i % 4] = narrow_two(power(__fmaf_rn(score[0], scale, -most[m][half])),
                                               power(__fmaf_rn(score[1], scale, -most[m][half])));
            }
            const u32 rows_at = value_at + shift + k * 16 * QUADS * 16;
#pragma unroll
            for (u32 m = 0; m < TILES; ++m) mma(totals[m], weights[m], ONES, ONES);
#pragma unroll
            for (u32 c = 0; c + 1 < QUADS; c += 2) {
                u32 v[4];
                load_matrices_turned(v, rows_at + c * 16);
#pragma unroll
                for (u32 m = 0; m < TILES; ++m) {
                    mma(sums[m][c], weights[m], v[0], v[1]);
                    mma(sums[m][c + 1], weights[m], v[2], v[3]);
                }
            }
            // The upper half of the lanes says where nothing is read.
            u32 v[2];
            load_matrices_turned(v, rows_at + (QUADS - 1 - matrix / 2) * 16);
#pragma unroll
            for (u32 m = 0; m < TILES; ++m) mma(sums[m][QUADS - 1], weights[m], v[0], v[1]);
        }
    }

    const bool pairs = hidden % 2 == 0 && a.width % 2 == 0 && ((u64)a.out & 3) == 0;
#pragma unroll
    for (u32 i = 0; i < TILES * 2; ++i) {
        const u32 m = i / 2, half = i % 2, at = warp_id() * 32 + m * 16 + half * 8 + g;
        if (from + at >= end) continue;
        bf16* const out = a.out + (u64)(from + at - a.first) * hidden + blockIdx.y * a.width;
        const float total = totals[m][half * 2];
#pragma unroll
        for (u32 c = 0; c < QUADS; ++c) {
            const u32 column = c * 8 + t * 2;
            const float low = div(sums[m][c][half * 2], total), high = div(sums[m][c][half * 2 + 1], total);
            if (pairs && column < a.width) *(u32*)(out + column) = narrow_two(low, high);
            if (!pairs && column < a.width) out[column] = narrow(low);
            if (!pairs && column + 1 < a.width) out[column + 1] = narrow(high);
        }
    }
}
