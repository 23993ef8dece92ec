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

// Warps that add up a row's exponentials; one more chooses.
constexpr u32 WARPS = 4;
// Choices and experts at most; rows with more are left unwritten.
constexpr u32 CHOICES = 32;
constexpr u32 EXPERTS = 2048;
// Experts that can be among the best: a lane's for each of the best lanes.
constexpr u32 CANDIDATES = EXPERTS / 32 * CHOICES;

// What `order_of` orders.
__device__ __forceinline__ float value_of(u32 order) {
    if (order == 0) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// Calls `take(id, logit)` for experts `first`, first + STEP, ...: those of 512 are read at once. `id` may be past the
// last.
template <u32 STEP, class Take>
__device__ __forceinline__ void each_expert(const float* logits, u32 first, u32 experts, Take take) {
#pragma unroll 1
    for (u32 base = 0; base < experts; base += 512) {
        float held[512 / STEP];
#pragma unroll
        for (u32 i = 0; i < 512 / STEP; ++i) {
            const u32 id = base + i * STEP + first;
            held[i] = id < experts ? logits[id] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 512 / STEP; ++i) take(base + i * STEP + first, held[i]);
    }
}

// A warp's choice of the best k of a row: the rank of expert j in lane j. Lane i looks after experts i, i + 32, ...
// What is behind the best of k lanes is not among the best k, so few are left to be counted off against each other.
__device__ __forceinline__ u64 choose(const float* logits, u32 experts, u32 k) {
    __shared__ u64 ranks[CANDIDATES];
    __shared__ u64 chosen[CHOICES];
    const u32 lane = lane_id();
    u64 best = 0;
    each_expert<32>(logits, lane, experts, [&](u32 id, float logit) {
        const u64 rank = rank_of(logit, id);
        if (id < experts && rank > best) best = rank;
    });
    u32 ahead = 0;
#pragma unroll
    for (u32 other = 0; other < 32; ++other) ahead += __shfl_sync(WHOLE_WARP, best, other) > best;
    // Unless there are so few experts that some lanes have none, and all are left.
    const u32 last = __ballot_sync(WHOLE_WARP, ahead + 1 == k);
    const u64 bound = last ? __shfl_sync(WHOLE_WARP, best, __ffs(last) - 1) : 0;
    u32 count = 0;
    each_expert<32>(logits, lane, experts, [&](u32 id, float logit) {
        const u64 rank = rank_of(logit, id);
        const bool left = id < experts && rank >= bound;
        const u32 votes = __ballot_sync(WHOLE_WARP, left);
        if (left) ranks[count + __popc(votes & ((1u << lane) - 1))] = rank;
        count += __popc(votes);
    });
    __syncwarp();
#pragma unroll 1
    for (u32 at = lane; at < count; at += 32) {
        const u64 mine = ranks[at];
        u32 place = 0;
        for (u32 other = 0; other < count; ++other) place += ranks[other] > mine;
        if (place < k) chosen[place] = mine;
    }
    __syncwarp();
    return lane < k ? chosen[lane] : 0;
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32) route(Args a) {
    __shared__ float sums[WARPS];
    __shared__ u32 most[WARPS];
    follow();
    if (a.k > CHOICES || a.experts > EXPERTS) return;
    const u64 row = blockIdx.x;
    const u32 lane = lane_id(), warp = warp_id();
    const float* const logits = a.logits + row * (a.experts + 1);
    u64 rank = 0;
    float shared = 0.0f;
    if (warp == WARPS) {
        shared = sigmoid(logits[a.experts]);
        rank = choose(logits, a.experts, a.k);
    } else {
        // What comes first by `order_of` is the largest, or a NaN if there is nothing else.
        u32 order = 0;
        each_expert<WARPS * 32>(logits, threadIdx.x, a.experts, [&](u32 id, float logit) {
            const u32 mine = order_of(logit);
            if (id < a.experts && mine > order) order = mine;
        });
        order = __reduce_max_sync(WHOLE_WARP, order);
        if (lane == 0) most[warp] = order;
        asm volatile("bar.sync 1,%0;" ::"n"(WARPS * 32) : "memory");
        for (u32 w = 0; w < WARPS; ++w) order = most[w] > order ? most[w] : order;
        const float largest = value_of(order);
        float sum = 0.0f;
        each_expert<WARPS * 32>(logits, threadIdx.x, a.experts, [&](u32 id, float logit) {
            if (id < a.experts) sum = add(sum, exp_of(sub(logit, largest)));
        });
        sum = warp_sum(sum);
        if (lane == 0) sums[warp] = sum;
    }
    __syncthreads();
    if (warp != WARPS) return;

    float sum = sums[0];
    for (u32 w = 1; w < WARPS; ++w) sum = add(sum, sums[w]);
    const float largest = value_of((u32)(__shfl_sync(WHOLE_WARP, rank, 0) >> 32));
    float weight = lane < a.k ? div(exp_of(sub(value_of((u32)(rank >> 32)), largest)), sum) : 0.0f;
    if (a.norm != 0) {
        float chosen = 0.0f;
        for (u32 j = 0; j < a.k; ++j) chosen = add(chosen, __shfl_sync(WHOLE_WARP, weight, j));
        weight = div(weight, chosen);
    }
    if (lane < a.k) {
        a.ids[row * a.k + lane] = id_of(rank);
        a.weights[row * (a.k + 1) + lane] = weight;
    }
    if (lane == 0) a.weights[row * (a.k + 1) + a.k] = shared;
}
