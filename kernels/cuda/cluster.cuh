// Blocks that work on one thing together: their number, the barrier between them, and each other's shared memory.
#pragma once
#include "common.cuh"

// Blocks of a cluster, which are neighbours in the grid.
constexpr u32 CLUSTER = 8;

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __attribute__((cluster_dims(8, 1, 1)))
#define CLUSTERED_ALONG_Y __attribute__((cluster_dims(1, 8, 1)))
// How many of a cluster's blocks share the work.
constexpr u32 RANKS = CLUSTER;

// This block's number in its cluster; `place` is its place along the clustered axis of the grid.
__device__ __forceinline__ u32 cluster_rank(u32) {
    u32 rank;
    asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The two halves of a meeting of all threads of all blocks: what was written before the first is seen by all behind
// the second.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where a variable in shared memory lies in another block of the cluster.
template <class T> __device__ __forceinline__ T* peer(T* mine, u32 rank) {
    u64 there;
    asm volatile("mapa.u64 %0,%1,%2;" : "=l"(there) : "l"(mine), "r"(rank));
    return (T*)there;
}
#else
// There are no clusters: the first block of each does all the work, and the others leave.
#define CLUSTERED
#define CLUSTERED_ALONG_Y
constexpr u32 RANKS = 1;

__device__ __forceinline__ u32 cluster_rank(u32 place) { return place % CLUSTER; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <class T> __device__ __forceinline__ T* peer(T* mine, u32) { return mine; }
#endif

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

struct Both {
    u64 first, second;
};

// Exchanges two numbers of each block, which all its threads know, and gives what `join(one, other)` makes of all
// blocks' in their order. `turn` is 0 at first, and belongs to this function.
template <class Join> __device__ Both join_blocks(u32& turn, Both mine, Join join) {
    // In turns: a block may be behind by less than one exchange.
    __shared__ Both slots[2], joined;
    if (threadIdx.x == 0) slots[turn] = mine;
    cluster_sync();
    if (warp_id() == 0) {
        const Both other = *peer(&slots[turn], lane_id() % RANKS);
        Both all = {__shfl_sync(WHOLE_WARP, other.first, 0), __shfl_sync(WHOLE_WARP, other.second, 0)};
        for (u32 rank = 1; rank < RANKS; ++rank)
            all = join(all, Both{__shfl_sync(WHOLE_WARP, other.first, rank), __shfl_sync(WHOLE_WARP, other.second, rank)});
        if (lane_id() == 0) joined = all;
    }
    __syncthreads();
    const Both all = joined;
    // Read by all before it is written again.
    __syncthreads();
    turn = 1 - turn;
    return all;
}
