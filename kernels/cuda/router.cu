// The twin of kernels/src/router.rs, which holds the contract. One warp per row.
#include "common.cuh"
#include "ptx.cuh"

struct Args {
    const float* logits;
    u32* ids;
    float* weights;
    u32 rows, experts, k, norm;
};
static_assert(sizeof(Args) == ARGS_BYTES_route);

// The largest experts of a row, in order; a warp holds a row's logits, HELD of them in the registers of each lane.
template <u32 HELD> __device__ __forceinline__ void choose(const Args& a) {
    const u64 row = blockIdx.x;
    const u32 lane = lane_id();
    const float* const logits = a.logits + row * (a.experts + 1);
    u32* const ids = a.ids + row * a.k;
    float* const weights = a.weights + row * (a.k + 1);

    // A lane owns every 32nd expert; 0 orders behind every logit, NaN too.
    u32 orders[HELD];
    float held[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 id = i * 32 + lane;
        held[i] = id < a.experts ? logits[id] : 0.0f;
    }
    const float shared = logits[a.experts];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) orders[i] = i * 32 + lane < a.experts ? order_of(held[i]) + 1 : 0;

    // The best expert of the warp: of the largest logit the lowest id.
    const auto best = [&] {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < HELD; ++i) largest = orders[i] > largest ? orders[i] : largest;
        const u32 most = __reduce_max_sync(WHOLE_WARP, largest);
        u32 first = NONE;
#pragma unroll
        for (u32 i = HELD; i-- > 0;)
            if (orders[i] == most) first = i * 32 + lane;
        return __reduce_min_sync(WHOLE_WARP, first);
    };
    const float largest = logits[best()];
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i)
        if (i * 32 + lane < a.experts) sum = add(sum, exp_of(sub(held[i], largest)));
    sum = warp_sum(sum);

    float chosen = 0.0f;
    for (u32 from = 0; from < a.k; from += 32) {
        // Choice `from + lane` is this lane's to write.
        const u32 count = least(32, a.k - from);
        u32 id = 0;
        for (u32 j = 0; j < count; ++j) {
            const u32 choice = best();
            if (lane == j) id = choice;
#pragma unroll
            for (u32 i = 0; i < HELD; ++i)
                if (i * 32 + lane == choice) orders[i] = 0;
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

extern "C" __global__ void __launch_bounds__(32) route(Args a) {
    follow();
    if (a.experts <= 512) choose<16>(a);
    else choose<64>(a);
}
