// The twins of kernels/src/linear.rs for weights in bf16.
#include "linear.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_linear);
static_assert(sizeof(Args) == ARGS_BYTES_linear_wide);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut);
static_assert(sizeof(Args) == ARGS_BYTES_linear_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_wide_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_prompt);

constexpr u32 THREADS = WARPS * 32;

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear(Args a) { few<Bf16, bf16, false, NARROW_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_wide(Args a) { few<Bf16, float, false, NARROW_ROWS, 3>(a); }
// Two cuts of few tiles each: all blocks run at once if there are three to a multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, 3) linear_cut(Args a) { few<Bf16, float, true, CUT_ROWS, 2>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_prompt(Args a) { many<Bf16, bf16, false, Panel>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_wide_prompt(Args a) { many<Bf16, float, false, Panel>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_cut_prompt(Args a) { many<Bf16, float, true, Panel>(a); }
