// The twins of kernels/src/random.rs, which holds the contracts. One block per run of 4096 elements.
#include "common.cuh"
#include "ptx.cuh"

struct Args {
    bf16* to;
    u64 count, seed;
    float scale;
    u32 zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_random);

struct BitsArgs {
    u32* to;
    u64 words, seed;
    u32 free, fixed;
};
static_assert(sizeof(BitsArgs) == ARGS_BYTES_bits);

constexpr u32 BLOCK = 4096;

__device__ __forceinline__ u64 mixed(u64 seed, u64 place) {
    u64 z = seed + (place + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ float uniform(u64 seed, u64 place) {
    const i32 steps = (i32)(mixed(seed, place) >> 40) - (1 << 23);
    return mul((float)steps, 1.0f / (float)(1 << 23));
}

extern "C" __global__ void __launch_bounds__(256) random(Args a) {
    follow();
    const u64 first = (u64)blockIdx.x * BLOCK;
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) {
        const u64 place = first + i;
        if (place < a.count) a.to[place] = narrow(mul(a.scale, uniform(a.seed, place)));
    }
}

extern "C" __global__ void __launch_bounds__(256) bits(BitsArgs a) {
    follow();
    const u64 first = (u64)blockIdx.x * BLOCK;
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) {
        const u64 place = first + i;
        if (place < a.words) a.to[place] = ((u32)(mixed(a.seed, place) >> 32) & a.free) | a.fixed;
    }
}
