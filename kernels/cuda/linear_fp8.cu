// The twins of kernels/src/linear.rs for weights in fp8.
#include "linear.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_linear_fp8);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_fp8);
static_assert(sizeof(Args) == ARGS_BYTES_linear_fp8_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_fp8_prompt);

constexpr u32 THREADS = WARPS * 32;

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_fp8(Args a) { few<Fp8, bf16, false, NARROW_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_cut_fp8(Args a) { few<Fp8, float, true, CUT_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_fp8_prompt(Args a) { many<Fp8, bf16, false, Part<Fp8>>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_cut_fp8_prompt(Args a) { many<Fp8, float, true, Part<Fp8>>(a); }
