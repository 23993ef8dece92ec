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

// The best of what a warp holds, one more than its order and its id: of the largest the one with the lowest id.
// Orders of 0 are behind every expert.
template <u32 HELD> struct Best {
    u32 order, id;

    __device__ Best(const u32 (&orders)[HELD], const u32 (&ids)[HELD]) {
        u32 largest = 0, first = NONE;
#pragma unroll
        for (u32 i = 0; i < HELD; ++i) largest = orders[i] > largest ? orders[i] : largest;
        order = __reduce_max_sync(WHOLE_WARP, largest);
#pragma unroll
        for (u32 i = 0; i < HELD; ++i)
            if (orders[i] == order && ids[i] < first) first = ids[i];
        id = __reduce_min_sync(WHOLE_WARP, first);
    }
};

// Chooses with HELD experts in the registers of each lane: every warp finds the best of its own, the first one
// then the best of those.
template <u32 HELD> __device__ __forceinline__ void choose(const Args& a) {
    __shared__ u32 orders_found[WARPS][CHOICES], ids_found[WARPS][CHOICES];
    __shared__ float sums[WARPS];
    const u64 row = blockIdx.x;
    const u32 lane = lane_id(), warp = warp_id();
    const float* const logits = a.logits + row * (a.experts + 1);
    float held[HELD];
    u32 orders[HELD], ids[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        ids[i] = i * WARPS * 32 + threadIdx.x;
        held[i] = ids[i] < a.experts ? logits[ids[i]] : 0.0f;
    }
    const float shared = logits[a.experts];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) orders[i] = ids[i] < a.experts ? order_of(held[i]) + 1 : 0;
#pragma unroll 1
    for (u32 j = 0; j < a.k; ++j) {
        const Best<HELD> best(orders, ids);
        if (lane == 0) {
            orders_found[warp][j] = best.order;
            ids_found[warp][j] = best.id;
        }
#pragma unroll
        for (u32 i = 0; i < HELD; ++i)
            if (ids[i] == best.id) orders[i] = 0;
    }
    __syncthreads();
    u32 most = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) most = orders_found[w][0] > most ? orders_found[w][0] : most;
    const float largest = value_of(most - 1);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i)
        if (ids[i] < a.experts) sum = add(sum, exp_of(sub(held[i], largest)));
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp != 0) return;

    sum = sums[0];
    for (u32 w = 1; w < WARPS; ++w) sum = add(sum, sums[w]);
    u32 found[WARPS], whose[WARPS];
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
        found[w] = lane < a.k ? orders_found[w][lane] : 0;
        whose[w] = lane < a.k ? ids_found[w][lane] : NONE;
    }
    // Choice `lane` is this lane's to write.
    u32 id = 0, order = 0;
#pragma unroll 1
    for (u32 j = 0; j < a.k; ++j) {
        const Best<WARPS> best(found, whose);
        if (lane == j) id = best.id, order = best.order;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w)
            if (whose[w] == best.id) found[w] = 0;
    }
    float weight = lane < a.k ? div(exp_of(sub(value_of(order - 1), largest)), sum) : 0.0f;
    if (a.norm != 0) {
        float chosen = 0.0f;
        for (u32 j = 0; j < a.k; ++j) chosen = add(chosen, __shfl_sync(WHOLE_WARP, weight, j));
        weight = div(weight, chosen);
    }
    if (lane < a.k) {
        a.ids[row * a.k + lane] = id;
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
