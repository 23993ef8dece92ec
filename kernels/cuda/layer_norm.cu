// The twin of kernels/src/layer_norm.rs, which holds the contract. One block per row, which it holds in registers:
// wider ones than it can hold are left unwritten.
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    const bf16* x;
    const bf16* gain;
    const bf16* bias;
    bf16* y;
    u32 rows, width;
    float eps;
    u32 zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_layer_norm);

constexpr u32 THREADS = 160;
// Runs of eight elements that a thread holds at most.
constexpr u32 HELD = 4;

template <u32 HELD, bool SMOOTH> __device__ __forceinline__ void norm_row(const Args& a) {
    const u32 width = a.width;
    const bf16* const x = a.x + (u64)blockIdx.x * width;
    bf16* const y = a.y + (u64)blockIdx.x * width;
    Few<8> held[HELD];
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= width) continue;
        held[i] = load_few<8>(x, at, width, SMOOTH);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) sum = add(sum, held[i].value[e]);
    }
    const float mean = div(block_sum(sum), (float)width);
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= width) continue;
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
            if (!SMOOTH && at + e >= width) continue;
            held[i].value[e] = sub(held[i].value[e], mean);
            squares = add(squares, mul(held[i].value[e], held[i].value[e]));
        }
    }
    const float scale = inverse_rms(block_sum(squares), width, a.eps);
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 at = (i * THREADS + threadIdx.x) * 8;
        if (at >= width) continue;
        const Few<8> gain = load_few<8>(a.gain, at, width, SMOOTH), bias = load_few<8>(a.bias, at, width, SMOOTH);
#pragma unroll
        for (u32 e = 0; e < 8; ++e)
            held[i].value[e] = add(mul(mul(held[i].value[e], scale), gain.value[e]), bias.value[e]);
        store_few<8>(y, at, width, SMOOTH, held[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(Args a) {
    follow();
    const bool smooth = a.width % 8 == 0 && aligned16(a.x) && aligned16(a.gain) && aligned16(a.bias) && aligned16(a.y);
    if (smooth && a.width <= THREADS * 8) norm_row<1, true>(a);
    else if (a.width > THREADS * HELD * 8) return;
    else if (smooth) norm_row<HELD, true>(a);
    else norm_row<HELD, false>(a);
}
