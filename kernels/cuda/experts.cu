// The twins of kernels/src/experts.rs for experts in bf16 beside a shared expert in bf16, and those without weights.
#include "experts.cuh"

struct GroupArgs {
    const u32* ids;
    u32* list;
    u32* starts;
    Sizes sizes;
};
static_assert(sizeof(GroupArgs) == ARGS_BYTES_experts_group);

struct SumArgs {
    const float* products;
    const u32* ids;
    const float* weights;
    float* p;
    Sizes sizes;
};
static_assert(sizeof(SumArgs) == ARGS_BYTES_experts_sum);

static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up);
static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up_prompt);
static_assert(sizeof(DownArgs) == ARGS_BYTES_experts_down);
static_assert(sizeof(ProductsArgs) == ARGS_BYTES_experts_products);

extern "C" __global__ void __launch_bounds__(UP_THREADS, 4) experts_up(UpArgs a) { up<Bf16, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(DOWN_THREADS, 2) experts_down(DownArgs a) { down<Bf16, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(UP_THREADS, 2) experts_up_prompt(UpArgs a) { up_prompt<Bf16, Bf16>(a); }
extern "C" __global__ void __launch_bounds__(UP_THREADS, 2) experts_products(ProductsArgs a) { down_products<Bf16, Bf16>(a); }

// One block per expert, which lists the places that chose it in order.
extern "C" __global__ void __launch_bounds__(256) experts_group(GroupArgs a) {
    __shared__ u32 counts[8];
    follow();
    const u32 expert = blockIdx.x, pairs = a.sizes.rows * a.sizes.k;
    u32 before = 0;
    for (u32 pair = threadIdx.x; pair < pairs; pair += 256) before += a.ids[pair] < expert;
    u32 next = (u32)block_total(before);
    if (threadIdx.x == 0) a.starts[expert] = next;
    for (u32 base = 0; base < pairs; base += 256) {
        const u32 pair = base + threadIdx.x;
        const bool chosen = pair < pairs && a.ids[pair] == expert;
        const u32 votes = __ballot_sync(WHOLE_WARP, chosen);
        if (lane_id() == 0) counts[warp_id()] = __popc(votes);
        __syncthreads();
        u32 ahead = 0, all = 0;
        for (u32 warp = 0; warp < 8; ++warp) {
            if (warp < warp_id()) ahead += counts[warp];
            all += counts[warp];
        }
        if (chosen) a.list[next + ahead + __popc(votes & ((1u << lane_id()) - 1))] = pair;
        next += all;
        __syncthreads();
    }
    if (threadIdx.x == 0 && expert + 1 == a.sizes.experts) a.starts[expert + 1] = next;
}

// blockIdx.x: a row; blockIdx.y: the half of the inner widths.
extern "C" __global__ void __launch_bounds__(256) experts_sum(SumArgs a) {
    follow();
    const Sizes& n = a.sizes;
    const u64 row = blockIdx.x, at = (u64)blockIdx.y * n.rows + row;
    for (u32 place = 0; place < n.k; ++place)
        if (a.ids[row * n.k + place] >= n.experts) return;
    const float* const weights = a.weights + row * (n.k + 1);
    const float* const products = a.products + at * (n.k + 1) * n.hidden;
    for (u32 output = threadIdx.x; output < n.hidden; output += 256) {
        float sum = 0.0f;
#pragma unroll 4
        for (u32 place = 0; place <= n.k; ++place)
            sum = add(sum, mul(weights[place], products[(u64)place * n.hidden + output]));
        a.p[at * n.hidden + output] = sum;
    }
}
