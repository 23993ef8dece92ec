// What selections share: where a running count over bins, or over a block's threads, arrives.
#pragma once
#include "common.cuh"

constexpr u32 BINS = 256;

struct Bin {
    u32 bin;
    // What the bins above it hold.
    u64 above;
    // Whether all bins together hold as much as was needed.
    bool found;
};

// The highest bin at which the sum of it and the bins above it reaches `need`; `content(b)` is that of bin b.
template <class Content> __device__ Bin find_bin(Content content, u64 need) {
    __shared__ Bin result;
    __syncthreads();
    if (threadIdx.x == 0) result.found = false;
    __syncthreads();
    if (threadIdx.x < 32) {
        // Lane 0 owns the highest bins.
        constexpr u32 OWN = BINS / 32;
        const u32 highest = BINS - 1 - threadIdx.x * OWN;
        u64 own = 0;
        for (u32 i = 0; i < OWN; ++i) own += content(highest - i);
        u64 upto = own;
        for (u32 apart = 1; apart < 32; apart *= 2) {
            const u64 other = __shfl_up_sync(WHOLE_WARP, upto, apart);
            if (threadIdx.x >= apart) upto += other;
        }
        u64 above = upto - own;
        if (above < need && upto >= need) {
            u32 bin = highest;
            while (above + content(bin) < need) above += content(bin--);
            result = Bin{bin, above, true};
        }
    }
    __syncthreads();
    return result;
}

struct Rank {
    u32 before, total;
};

// How many of the block's threads before this one say `flag`, and how many in all.
__device__ inline Rank block_rank(bool flag) {
    __shared__ u32 counts[32];
    const u32 votes = __ballot_sync(WHOLE_WARP, flag);
    __syncthreads();
    if (lane_id() == 0) counts[warp_id()] = __popc(votes);
    __syncthreads();
    Rank rank{(u32)__popc(votes & ((1u << lane_id()) - 1)), 0};
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) {
        if (warp < warp_id()) rank.before += counts[warp];
        rank.total += counts[warp];
    }
    return rank;
}
