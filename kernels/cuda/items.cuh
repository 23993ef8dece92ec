// The pairs of a row and a place, gathered by the expert that they chose, so that its weights are read and decoded once
// for several rows.
#pragma once
#include "common.cuh"

// Pairs of an item at most.
constexpr u32 GROUP = 4;
// Where pairs are fewer, or they or the experts more than there is room for, every pair is an item.
constexpr u32 GATHERED = 40;
constexpr u32 MOST_PAIRS = 640;
constexpr u32 MOST_EXPERTS = 512;

__shared__ u32 pair_ids[MOST_PAIRS];
// The expert of an item, and above it, which of that expert's items it is.
__shared__ u32 item_names[MOST_PAIRS];
constexpr u32 NAME_BITS = 16;

// Items, in the order of the first pair of their experts; those of an expert with many pairs one after another. Where
// pairs are gathered, ids past the experts are no item's.
struct Items {
    const u32* ids;
    u32 pairs, group, count;
    bool gathered;

    // Every pair is an item.
    __device__ Items(const u32* ids, u32 pairs, u32 group) : ids(ids), pairs(pairs), group(group), count(pairs), gathered(false) {}

    __device__ static bool can_gather(u32 pairs, u32 experts) {
        return pairs >= GATHERED && pairs <= MOST_PAIRS && experts <= MOST_EXPERTS;
    }

    // Up to `group` pairs of the same expert are an item. For all threads of a block; `room`: 2 * MOST_EXPERTS words of
    // shared memory that are free again afterwards.
    template <u32 THREADS> __device__ __forceinline__ void gather(u32 experts, u32* room) {
        __shared__ u32 totals[THREADS / 32];
        u32 *const firsts = room, *const counts = room + MOST_EXPERTS;
        for (u32 e = threadIdx.x; e < experts; e += THREADS) firsts[e] = ~0u, counts[e] = 0;
        for (u32 i = threadIdx.x; i < pairs; i += THREADS) pair_ids[i] = __ldcg(ids + i);
        __syncthreads();
        for (u32 i = threadIdx.x; i < pairs; i += THREADS) {
            const u32 id = pair_ids[i];
            if (id >= experts) continue;
            atomicMin(firsts + id, i);
            atomicAdd(counts + id, 1);
        }
        __syncthreads();
        count = 0;
        for (u32 base = 0; base < pairs; base += THREADS) {
            const u32 i = base + threadIdx.x, id = i < pairs ? pair_ids[i] : ~0u;
            const u32 mine = id < experts && firsts[id] == i ? ceil_div(counts[id], group) : 0;
            u32 upto = mine;
#pragma unroll
            for (u32 apart = 1; apart < 32; apart *= 2) {
                const u32 other = __shfl_up_sync(WHOLE_WARP, upto, apart);
                if (lane_id() >= apart) upto += other;
            }
            if (lane_id() == 31) totals[warp_id()] = upto;
            __syncthreads();
            u32 start = count + upto - mine;
#pragma unroll
            for (u32 warp = 0; warp < THREADS / 32; ++warp) {
                const u32 total = totals[warp];
                if (warp < warp_id()) start += total;
                count += total;
            }
            for (u32 q = 0; q < mine; ++q) item_names[start + q] = q << NAME_BITS | id;
            __syncthreads();
        }
        gathered = true;
    }

    __device__ __forceinline__ u32 expert(u32 item) const {
        return gathered ? item_names[item] & ((1u << NAME_BITS) - 1) : __ldcg(ids + item);
    }

    // For all threads of a warp: writes the pairs of an item in ascending order, and says how many there are.
    __device__ __forceinline__ u32 members(u32 item, u32 (&of)[GROUP]) const {
        if (!gathered) {
            if (lane_id() == 0) of[0] = item;
            __syncwarp();
            return 1;
        }
        const u32 id = expert(item), first = (item_names[item] >> NAME_BITS) * group;
        u32 before = 0;
        for (u32 base = 0; base < pairs; base += 32) {
            const u32 i = base + lane_id();
            const bool chose = i < pairs && pair_ids[i] == id;
            const u32 all = __ballot_sync(WHOLE_WARP, chose), place = before + __popc(all & ((1u << lane_id()) - 1)) - first;
            if (chose && place < group) of[place] = i;
            before += __popc(all);
        }
        __syncwarp();
        return least(before - first, group);
    }
};
