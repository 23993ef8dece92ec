// The twin of kernels/src/router.rs, which holds the contract. One block per row.
#include "common.cuh"
#include "ptx.cuh"

struct Args {
    const float* logits;
    u32* ids;
    float* weights;
    u32 rows, experts, k, norm;
};
static_assert(sizeof(Args) == ARGS_BYTES_route);

constexpr u32 WARPS = 4;
// Choices and experts at most; rows with more are left unwritten.
constexpr u32 CHOICES = 32;
constexpr u32 EXPERTS = 2048;

// What `order_of` orders.
__device__ __forceinline__ float value_of(u32 order) {
    if (order == 0) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// One row, HELD experts to a thread. Expert i lies in column i % 32. What is behind the best of k columns is not among
// the best k, so few candidates are left to be counted off against each other.
template <u32 HELD> __device__ __forceinline__ void choose(const Args& a) {
    __shared__ u32 best[WARPS][32], count;
    __shared__ float sums[WARPS];
    __shared__ u64 ranks[HELD * WARPS * 32], chosen[CHOICES];
    const u64 row = blockIdx.x;
    const u32 lane = lane_id(), warp = warp_id();
    const float* const logits = a.logits + row * (a.experts + 1);
    float held[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 id = i * WARPS * 32 + threadIdx.x;
        held[i] = id < a.experts ? logits[id] : 0.0f;
    }
    const float shared = logits[a.experts];
    // An order of 0 is behind every expert's.
    u32 orders[HELD], mine = 0;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        orders[i] = i * WARPS * 32 + threadIdx.x < a.experts ? order_of(held[i]) + 1 : 0;
        mine = orders[i] > mine ? orders[i] : mine;
    }
    best[warp][lane] = mine;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    u32 column = 0, ahead = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) column = best[w][lane] > column ? best[w][lane] : column;
#pragma unroll
    for (u32 other = 0; other < 32; ++other) ahead += __shfl_sync(WHOLE_WARP, column, other) > column;
    const u32 bar = __reduce_min_sync(WHOLE_WARP, ahead < a.k ? column : NONE);
    const float largest = value_of(__reduce_max_sync(WHOLE_WARP, column) - 1);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 id = i * WARPS * 32 + threadIdx.x;
        if (id >= a.experts) continue;
        if (orders[i] >= bar) ranks[atomicAdd(&count, 1)] = rank_of(held[i], id);
        sum = add(sum, exp_of(sub(held[i], largest)));
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp != 0) return;

    for (u32 at = lane; at < count; at += 32) {
        const u64 candidate = ranks[at];
        u32 place = 0;
        for (u32 other = 0; other < count; ++other) place += ranks[other] > candidate;
        if (place < a.k) chosen[place] = candidate;
    }
    __syncwarp();
    // Choice `lane` is this lane's to write.
    const u64 rank = lane < a.k ? chosen[lane] : 0;
    sum = sums[0];
    for (u32 w = 1; w < WARPS; ++w) sum = add(sum, sums[w]);
    float weight = lane < a.k ? div(exp_of(sub(value_of((u32)(rank >> 32)), largest)), sum) : 0.0f;
    if (a.norm != 0) {
        float all = 0.0f;
        for (u32 j = 0; j < a.k; ++j) all = add(all, __shfl_sync(WHOLE_WARP, weight, j));
        weight = div(weight, all);
    }
    if (lane < a.k) {
        a.ids[row * a.k + lane] = id_of(rank);
        a.weights[row * (a.k + 1) + lane] = weight;
    }
    if (lane == 0) a.weights[row * (a.k + 1) + a.k] = sigmoid(shared);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) route(Args a) {
    follow();
    if (a.k > CHOICES) return;
    if (a.experts <= WARPS * 32 * 4) choose<4>(a);
    else if (a.experts <= EXPERTS) choose<16>(a);
}
