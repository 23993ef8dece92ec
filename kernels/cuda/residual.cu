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
template <bool SMOOTH> __device__ __forceinline__ Few<8> load_eight(const float* row, u32 at, u32 count) {
    Few<8> few = {};
    if constexpr (SMOOTH) {
        const Quad half[2] = {((const Quad*)(row + at))[0], ((const Quad*)(row + at))[1]};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) few.value[i] = __uint_as_float(half[i / 4].word[i % 4]);
    } else {
#pragma unroll 1
        for (u32 i = 8; i-- > 0;) {
#pragma unroll
            for (u32 e = 7; e > 0; --e) few.value[e] = few.value[e - 1];
            few.value[0] = at + i < count ? row[at + i] : 0.0f;
        }
    }
    return few;
}

// For streams of at most THREADS * HELD * 8 elements; all rows can be read eight at a time if SMOOTH.
template <u32 HELD, bool SMOOTH> __device__ __forceinline__ void write_back(const Args& a) {
    const u64 row = blockIdx.x;
    const u32 stream = blockIdx.y, hidden = a.hidden;
    bf16* const x = a.streams + (row * a.count + stream) * hidden;
    const bf16* const gain = a.gain ? a.gain + (u64)stream * hidden : nullptr;
    Packed<8> gains[HELD], packed[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (gain && at < hidden) gains[i] = load_packed<8>(gain, at, hidden, SMOOTH);
    }

    follow();
    const float* const first = a.partials + row * hidden;
    const float* const second = first + (u64)a.rows * hidden;
    const float inject = a.partials ? a.inject[row * a.count + stream] : 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at < hidden) packed[i] = load_packed<8>(x, at, hidden, SMOOTH);
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= hidden) continue;
        if (a.partials) {
            const Few<8> one = load_eight<SMOOTH>(first, at, hidden), two = load_eight<SMOOTH>(second, at, hidden);
            Few<8> held = unpacked(packed[i]);
#pragma unroll
            for (u32 e = 0; e < 8; ++e)
                held.value[e] = add(held.value[e], mul(r16(add(one.value[e], two.value[e])), inject));
            packed[i] = packed_of(held);
            store_packed<8>(x, at, hidden, SMOOTH, packed[i]);
        }
        const Few<8> held = unpacked(packed[i]);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) squares = add(squares, mul(held.value[e], held.value[e]));
    }
    if (!gain) return;
    const float scale = inverse_rms(block_sum(squares), hidden, a.eps);
    bf16* const n = a.normed + (row * a.count + stream) * hidden;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= hidden) continue;
        Few<8> held = unpacked(packed[i]);
        const Few<8> gain = unpacked(gains[i]);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) held.value[e] = mul(mul(held.value[e], scale), add(1.0f, gain.value[e]));
        store_packed<8>(n, at, hidden, SMOOTH, packed_of(held));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) residual(Args a) {
    const bool smooth = a.hidden % 8 == 0 && aligned16(a.streams) && aligned16(a.partials) && aligned16(a.gain) &&
                        aligned16(a.normed);
    if (smooth && a.hidden <= THREADS * 8) write_back<1, true>(a);
    else if (a.hidden > THREADS * HELD * 8) follow();
    else if (smooth) write_back<HELD, true>(a);
    else write_back<HELD, false>(a);
}
