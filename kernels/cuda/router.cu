// The twin of kernels/src/router.rs, which holds the contract. One warp per row.
#include "common.cuh"

struct Args {
    const float* logits;
    u32* ids;
    float* weights;
    u32 rows, experts, k, norm;
};
static_assert(sizeof(Args) == ARGS_BYTES_route);

// The largest number of a warp, in every lane.
__device__ __forceinline__ u64 warp_max(u64 value) {
    const u32 high = __reduce_max_sync(WHOLE_WARP, (u32)(value >> 32));
    const u32 low = __reduce_max_sync(WHOLE_WARP, (u32)(value >> 32) == high ? (u32)value : 0);
    return (u64)high << 32 | low;
}

extern "C" __global__ void __launch_bounds__(32) route(Args a) {
    const u64 row = blockIdx.x;
    const u32 lane = lane_id();
    const float* const logits = a.logits + row * (a.experts + 1);
    u32* const ids = a.ids + row * a.k;
    float* const weights = a.weights + row * (a.k + 1);
    const float shared = logits[a.experts];

    // A lane owns every 32nd expert and knows its best one behind the last choice.
    const auto best_behind = [&](u64 last) {
        u64 best = 0;
#pragma unroll 16
        for (u32 i = lane; i < a.experts; i += 32) {
            const u64 rank = rank_of(logits[i], i);
            if (rank < last && rank > best) best = rank;
        }
        return best;
    };
    u64 best = best_behind(~0ull);
    const float largest = logits[id_of(warp_max(best))];
    float sum = 0.0f;
#pragma unroll 16
    for (u32 i = lane; i < a.experts; i += 32) sum = add(sum, exp_of(sub(logits[i], largest)));
    sum = warp_sum(sum);

    float chosen = 0.0f;
    for (u32 from = 0; from < a.k; from += 32) {
        // Choice `from + lane` is this lane's to write.
        const u32 count = least(32, a.k - from);
        u32 id = 0;
        for (u32 j = 0; j < count; ++j) {
            const u64 choice = warp_max(best);
            if (lane == j) id = id_of(choice);
            if (best == choice) best = best_behind(choice);
        }
        const float weight = div(exp_of(sub(logits[id], largest)), sum);
        for (u32 j = 0; j < count; ++j) chosen = add(chosen, __shfl_sync(WHOLE_WARP, weight, j));
        if (lane < count) {
            ids[from + lane] = id;
            weights[from + lane] = weight;
        }
    }
    if (a.norm != 0)
        for (u32 j = lane; j < a.k; j += 32) weights[j] = div(weights[j], chosen);
    if (lane == 0) weights[a.k] = sigmoid(shared);
}
