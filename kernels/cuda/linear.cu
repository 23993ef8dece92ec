// The twins of kernels/src/linear.rs, which holds the contracts.
#include "matrix.cuh"

struct Args {
    const bf16* x;
    const bf16* w;
    void* y;
    u32 rows, inner, outputs, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_linear);
static_assert(sizeof(Args) == ARGS_BYTES_linear_wide);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut);

constexpr u32 WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32) linear(Args a) {
    const Matrix w{a.w, a.inner, a.outputs, a.inner}, x{a.x, a.inner, a.rows, a.inner};
    bf16* const y = (bf16*)a.y;
    product_tile<WARPS>(w, x, blockIdx.x, [&](u32, u32 output, u32 row, float sum) {
        y[(u64)row * a.outputs + output] = narrow(sum);
    });
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) linear_wide(Args a) {
    const Matrix w{a.w, a.inner, a.outputs, a.inner}, x{a.x, a.inner, a.rows, a.inner};
    float* const y = (float*)a.y;
    product_tile<WARPS>(w, x, blockIdx.x, [&](u32, u32 output, u32 row, float sum) {
        y[(u64)row * a.outputs + output] = sum;
    });
}

// Half blockIdx.y of the inner width.
extern "C" __global__ void __launch_bounds__(WARPS * 32) linear_cut(Args a) {
    const u32 half = a.inner / CUTS, from = blockIdx.y * half;
    const Matrix w{a.w + from, a.inner, a.outputs, half}, x{a.x + from, a.inner, a.rows, half};
    float* const p = (float*)a.y + (u64)blockIdx.y * a.rows * a.outputs;
    product_tile<WARPS>(w, x, blockIdx.x, [&](u32, u32 output, u32 row, float sum) {
        p[(u64)row * a.outputs + output] = sum;
    });
}
