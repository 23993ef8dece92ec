// The twins of kernels/src/experts.rs, which holds the contracts. A row with an id past the experts is left
// unwritten (by experts_up: the places with such an id).
#include "matrix.cuh"

struct Sizes {
    u32 rows, hidden, inner, shared_inner, experts, k;
};

struct UpArgs {
    const bf16* x;
    const u32* ids;
    const bf16* gate_up;
    const bf16* shared_gate_up;
    bf16* a;
    bf16* s;
    Sizes sizes;
};
static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up);

struct DownArgs {
    const bf16* a;
    const bf16* s;
    const u32* ids;
    const float* weights;
    const bf16* down;
    const bf16* shared_down;
    float* p;
    Sizes sizes;
};
static_assert(sizeof(DownArgs) == ARGS_BYTES_experts_down);

constexpr u32 WARPS = 8;
constexpr u32 THREADS = WARPS * 32;
constexpr u32 OUTPUTS = 16;
// Rows up to which every (row, place) has a block of its own; more are grouped by expert.
constexpr u32 ALONE_ROWS = 16;
// Pairs that a block lists before it computes them, and rows of the shared expert per block.
constexpr u32 LISTED = 2048;
constexpr u32 SHARED_ROWS = 64;

// Gate and up products of 16 outputs of one expert for up to 8 * NT inputs: `row(i)` is input i or null,
// `to(i)` is where its activations go.
template <u32 NT, class Row, class To>
__device__ __forceinline__ void activate(const Matrix& gate_up, u32 first, Row row, To to) {
    const u32 inner = gate_up.rows / 2;
    const auto weight = [&](u32 m, u32 i) { return gate_up.row(m * inner + least(first + i, inner - 1)); };
    const bool aligned = gate_up.aligned() && __syncthreads_and(aligned16(row(lane_id() / 4)));
    narrow_product<2, NT, WARPS>(gate_up.columns, aligned, weight, row,
                                 [&](u32, u32 i, u32 r, const float(&sums)[2]) {
                                     if (first + i < inner && row(r))
                                         to(r)[first + i] = narrow(mul(silu(r16(sums[0])), r16(sums[1])));
                                 });
}

// As `activate`, for any number of inputs.
template <class Row, class To>
__device__ __forceinline__ void activate_all(const Matrix& gate_up, u32 first, u32 count, Row row, To to) {
    for (u32 done = 0; done < count; done += 16) {
        const auto here = [&](u32 i) { return done + i < count ? row(done + i) : nullptr; };
        const auto there = [&](u32 i) { return to(done + i); };
        if (count - done <= 8) activate<1>(gate_up, first, here, there);
        else activate<2>(gate_up, first, here, there);
    }
}

// Lists the places that chose `expert` and computes them, as often as the list fills. Their order is free:
// every place has sums of its own.
__device__ __forceinline__ void grouped(const UpArgs& a, const Matrix& gate_up, u32 expert, u32 first) {
    __shared__ u32 list[LISTED + THREADS];
    __shared__ u32 listed;
    const u32 pairs = a.sizes.rows * a.sizes.k;
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    for (u32 from = 0; from < pairs; from += THREADS) {
        const u32 pair = from + threadIdx.x;
        if (pair < pairs && a.ids[pair] == expert) list[atomicAdd(&listed, 1)] = pair;
        if (!__syncthreads_or(listed >= LISTED || from + THREADS >= pairs)) continue;
        activate_all(
            gate_up, first, listed, [&](u32 i) { return a.x + (u64)(list[i] / a.sizes.k) * a.sizes.hidden; },
            [&](u32 i) { return a.a + (u64)list[i] * a.sizes.inner; });
        __syncthreads();
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
    }
}

// blockIdx.x: a tile of outputs, and above it either a (row, place), or a block of shared rows, then an expert.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_up(UpArgs a) {
    const Sizes& n = a.sizes;
    const u32 tiles = ceil_div(n.inner > n.shared_inner ? n.inner : n.shared_inner, OUTPUTS);
    const u32 first = blockIdx.x % tiles * OUTPUTS, group = blockIdx.x / tiles;
    const Matrix shared{a.shared_gate_up, n.hidden, 2 * n.shared_inner, n.hidden};
    const auto routed = [&](u32 id) {
        return Matrix{a.gate_up + (u64)id * 2 * n.inner * n.hidden, n.hidden, 2 * n.inner, n.hidden};
    };
    if (n.rows <= ALONE_ROWS) {
        const u32 r = group / (n.k + 1), place = group % (n.k + 1);
        const bf16* const x = a.x + (u64)r * n.hidden;
        const auto row = [&](u32 i) { return i == 0 ? x : nullptr; };
        if (place == n.k) {
            if (first < n.shared_inner)
                activate<1>(shared, first, row, [&](u32) { return a.s + (u64)r * n.shared_inner; });
        } else {
            const u32 pair = r * n.k + place, id = a.ids[pair];
            if (first < n.inner && id < n.experts)
                activate<1>(routed(id), first, row, [&](u32) { return a.a + (u64)pair * n.inner; });
        }
        return;
    }
    const u32 shared_blocks = ceil_div(n.rows, SHARED_ROWS);
    if (group < shared_blocks) {
        const u32 from = group * SHARED_ROWS;
        if (first < n.shared_inner)
            activate_all(
                shared, first, least(SHARED_ROWS, n.rows - from),
                [&](u32 i) { return a.x + (u64)(from + i) * n.hidden; },
                [&](u32 i) { return a.s + (u64)(from + i) * n.shared_inner; });
    } else if (first < n.inner) {
        grouped(a, routed(group - shared_blocks), group - shared_blocks, first);
    }
}

// Places whose products are held at once.
constexpr u32 HELD = 32;

// blockIdx.x: a tile of outputs, and below it a row; blockIdx.y: the half of the inner widths.
extern "C" __global__ void __launch_bounds__(THREADS) experts_down(DownArgs a) {
    __shared__ float products[HELD][WARPS][OUTPUTS];
    const Sizes& n = a.sizes;
    const u32 row = blockIdx.x % n.rows, first = blockIdx.x / n.rows * OUTPUTS, cut = blockIdx.y;
    const u32 lane = lane_id(), g = lane / 4;
    const u32* const ids = a.ids + (u64)row * n.k;
    for (u32 place = 0; place < n.k; ++place)
        if (ids[place] >= n.experts) return;

    // Slices of a product, routed or shared, at most.
    const u32 most = Slices<WARPS>((n.inner > n.shared_inner ? n.inner : n.shared_inner) / CUTS).count;
    float sum = 0.0f;
    for (u32 base = 0; base <= n.k; base += HELD) {
        const u32 held = least(HELD, n.k + 1 - base);
        for (u32 item = warp_id(); item < held * most; item += WARPS) {
            const u32 place = base + item / most, slice = item % most;
            const bool shared = place == n.k;
            const u32 inner = shared ? n.shared_inner : n.inner, half = inner / CUTS, from = cut * half;
            const Slices<WARPS> slices(half);
            if (slice >= slices.count) continue;
            const bf16* const down = (shared ? a.shared_down : a.down + (u64)ids[place] * n.hidden * n.inner) + from;
            const bf16* const x = (shared ? a.s + (u64)row * inner : a.a + ((u64)row * n.k + place) * inner) + from;
            const Matrix w{down, inner, n.hidden, half};
            const bf16* const low[1] = {w.row(least(first + g, n.hidden - 1))};
            const bf16* const high[1] = {w.row(least(first + g + 8, n.hidden - 1))};
            const bf16* const column[1] = {g == 0 ? x : nullptr};
            const u32 unit = slice * slices.per;
            float sums[1][1][4] = {};
            add_units<1, 1>(sums, low, high, column, unit, least(unit + slices.per, slices.units), half,
                            w.aligned() && aligned16(x));
            if (lane % 4 == 0) {
                products[place - base][slice][g] = sums[0][0][0];
                products[place - base][slice][g + 8] = sums[0][0][2];
            }
        }
        __syncthreads();
        for (u32 i = 0; threadIdx.x < OUTPUTS && i < held; ++i) {
            const u32 place = base + i, half = (place == n.k ? n.shared_inner : n.inner) / CUTS;
            float product = products[i][0][threadIdx.x];
            for (u32 slice = 1; slice < Slices<WARPS>(half).count; ++slice)
                product = add(product, products[i][slice][threadIdx.x]);
            sum = add(sum, mul(a.weights[(u64)row * (n.k + 1) + place], product));
        }
        __syncthreads();
    }
    const u32 output = first + threadIdx.x;
    if (threadIdx.x < OUTPUTS && output < n.hidden) a.p[((u64)cut * n.rows + row) * n.hidden + output] = sum;
}
