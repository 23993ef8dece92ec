// The twin of kernels/src/read.rs, which holds the contract. A thread has eight loads under way.
#include "common.cuh"
#include "ptx.cuh"

struct Args {
    const Quad* words;
    u32* sums;
    u64 quads;
    u32 blocks, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_read);

constexpr u32 AT_ONCE = 8;

__device__ __forceinline__ u32 sum_of(Quad q) { return q.word[0] + q.word[1] + q.word[2] + q.word[3]; }

extern "C" __global__ void __launch_bounds__(256) read(Args a) {
    follow();
    const u64 stride = (u64)a.blocks * 256;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    u32 sum = 0;
    for (; at + (AT_ONCE - 1) * stride < a.quads; at += AT_ONCE * stride) {
        Quad q[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) q[i] = a.words[at + i * stride];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) sum += sum_of(q[i]);
    }
    for (; at < a.quads; at += stride) sum += sum_of(a.words[at]);
    const u64 total = block_total(sum);
    if (threadIdx.x == 0) a.sums[blockIdx.x] = (u32)total;
}
