// The twins of kernels/src/experts.rs for experts in nvfp4 beside a shared expert in bf16.
#include "experts.cuh"

static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up_nvfp4);
static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up_nvfp4_prompt);
static_assert(sizeof(DownArgs) == ARGS_BYTES_experts_down_nvfp4);
static_assert(sizeof(ProductsArgs) == ARGS_BYTES_experts_products_nvfp4);

extern "C" __global__ void __launch_bounds__(UP_THREADS, 2) experts_up_nvfp4(UpArgs a) { up<Nvfp4, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(DOWN_THREADS, 2) experts_down_nvfp4(DownArgs a) { down<Nvfp4, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(UP_THREADS, 2) experts_up_nvfp4_prompt(UpArgs a) { up_prompt<Nvfp4, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(UP_THREADS, 2) experts_products_nvfp4(ProductsArgs a) { down_products<Nvfp4, Bf16>(a); }
