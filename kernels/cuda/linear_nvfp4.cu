// The twins of kernels/src/linear.rs for weights in nvfp4.
#include "linear.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_linear_nvfp4);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_nvfp4);
static_assert(sizeof(Args) == ARGS_BYTES_linear_nvfp4_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_nvfp4_prompt);

constexpr u32 THREADS = WARPS * 32;

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_nvfp4(Args a) { few<Nvfp4, bf16, false, NARROW_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_cut_nvfp4(Args a) { few<Nvfp4, float, true, CUT_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_nvfp4_prompt(Args a) { many<Nvfp4, bf16, false, Part<Nvfp4>>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_cut_nvfp4_prompt(Args a) { many<Nvfp4, float, true, Part<Nvfp4>>(a); }
