// The twin of kernels/src/router.rs, which holds the contract. One block per row.
#include "common.cuh"

struct Args {
    const float* logits;
    u32* ids;
    float* weights;
    u32 rows, experts, k, norm;
};
static_assert(sizeof(Args) == ARGS_BYTES_route);

extern "C" __global__ void __launch_bounds__(128) route(Args a) {
    const u64 row = blockIdx.x;
    const float* const logits = a.logits + row * (a.experts + 1);
    u32* const ids = a.ids + row * a.k;
    float* const weights = a.weights + row * (a.k + 1);

    // Each choice is the best one behind the choice before it.
    u64 last = ~0ull;
    float largest = 0.0f, sum = 0.0f;
    for (u32 j = 0; j < a.k; ++j) {
        u64 best = 0;
        for (u32 i = threadIdx.x; i < a.experts; i += blockDim.x) {
            const u64 rank = rank_of(logits[i], i);
            if (rank < last && rank > best) best = rank;
        }
        last = block_max(best);
        const float logit = logits[id_of(last)];
        if (j == 0) {
            largest = logit;
            float mine = 0.0f;
            for (u32 i = threadIdx.x; i < a.experts; i += blockDim.x)
                mine = add(mine, exp_of(sub(logits[i], largest)));
            sum = block_sum(mine);
        }
        if (threadIdx.x == 0) {
            ids[j] = id_of(last);
            weights[j] = div(exp_of(sub(logit, largest)), sum);
        }
    }
    if (threadIdx.x != 0) return;
    weights[a.k] = sigmoid(logits[a.experts]);
    if (a.norm == 0) return;
    float chosen = 0.0f;
    for (u32 j = 0; j < a.k; ++j) chosen = add(chosen, weights[j]);
    for (u32 j = 0; j < a.k; ++j) weights[j] = div(weights[j], chosen);
}
