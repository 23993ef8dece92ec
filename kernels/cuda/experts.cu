// The twins of kernels/src/experts.rs, which holds the contracts. A row with an id past the experts is left
// unwritten (by experts_up: the places with such an id).
#include "tiles.cuh"

struct Sizes {
    u32 rows, hidden, inner, shared_inner, experts, k;
};

struct UpArgs {
    const bf16* x;
    const u32* ids;
    const u32* list;
    const u32* starts;
    const bf16* gate_up;
    const bf16* shared_gate_up;
    bf16* a;
    bf16* s;
    Sizes sizes;
};
static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up);
static_assert(sizeof(UpArgs) == ARGS_BYTES_experts_up_prompt);

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

struct GroupArgs {
    const u32* ids;
    u32* list;
    u32* starts;
    Sizes sizes;
};
static_assert(sizeof(GroupArgs) == ARGS_BYTES_experts_group);

struct ProductsArgs {
    const bf16* a;
    const bf16* s;
    const u32* list;
    const u32* starts;
    const bf16* down;
    const bf16* shared_down;
    float* products;
    Sizes sizes;
};
static_assert(sizeof(ProductsArgs) == ARGS_BYTES_experts_products);

struct SumArgs {
    const float* products;
    const u32* ids;
    const float* weights;
    float* p;
    Sizes sizes;
};
static_assert(sizeof(SumArgs) == ARGS_BYTES_experts_sum);

constexpr u32 WARPS = 8;
// Slices of an up projection at most; a half of a down projection is one.
constexpr u32 UP_SLICES = 8;
// Places that a block of experts_down works on at a time, a warp for each.
constexpr u32 PLACES = 11;
// Gate and up rows of eight outputs share a tile.
constexpr u32 PAIRS = TILE / 2;

// What a prompt's block computes at a time: 128 weight rows by 32 rows.
typedef Wide<8, 32, 8, 4> Part;

__device__ __forceinline__ bf16 activation(float gate, float up) { return narrow(mul(silu(r16(gate)), r16(up))); }
__device__ __forceinline__ u32 pair_tiles(u32 inner) { return ceil_div(inner, PAIRS); }

// Tile `tile` of an expert's gate and up projections, for one input.
template <class Depend>
__device__ __forceinline__ void up_one(const bf16* gate_up, u32 tile, const bf16* x, u32 hidden, u32 inner, bf16* to,
                                       Depend depend) {
    const Slices slices(hidden, UP_SLICES);
    const Rows row{x, hidden, 1, hidden};
    narrow_product<1, WARPS, 1, 1>(Tiles(gate_up, slices.units).unit(tile, 0), row, slices, 0, slices.count, depend,
                                   [&](u32 g, u32, float gate, float up) {
                                       const u32 output = tile * PAIRS + g;
                                       if (output < inner) to[output] = activation(gate, up);
                                   });
}

// blockIdx.x: a tile; blockIdx.y: a place of a row. The next launch may read the lists of chosen experts before it
// waits for this one: it starts when they are complete.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 5) experts_up(UpArgs a) {
    const Sizes& n = a.sizes;
    const u32 tile = blockIdx.x, row = blockIdx.y / (n.k + 1), place = blockIdx.y % (n.k + 1);
    const bf16* const x = a.x + (u64)row * n.hidden;
    if (place == n.k && tile < pair_tiles(n.shared_inner)) {
        up_one(a.shared_gate_up, tile, x, n.hidden, n.shared_inner, a.s + (u64)row * n.shared_inner, [] {
            wait_for_previous();
            let_next_start();
        });
        return;
    }
    wait_for_previous();
    let_next_start();
    if (place == n.k || tile >= pair_tiles(n.inner)) return;
    const u32 pair = row * n.k + place, id = a.ids[pair];
    if (id >= n.experts) return;
    const u64 expert = (u64)pair_tiles(n.inner) * ceil_div(n.hidden, UNIT) * TILE * UNIT;
    up_one(a.gate_up + id * expert, tile, x, n.hidden, n.inner, a.a + (u64)pair * n.inner, [] {});
}

// blockIdx.x: a tile, and above it a row; blockIdx.y: the half of the inner widths.
extern "C" __global__ void __launch_bounds__(PLACES * 32, 3) experts_down(DownArgs a) {
    __shared__ float products[PLACES][TILE];
    const Sizes& n = a.sizes;
    const u32 row = blockIdx.x % n.rows, tile = blockIdx.x / n.rows, cut = blockIdx.y;
    const u32 lane = lane_id(), tiles = ceil_div(n.hidden, TILE);
    const u32* const ids = a.ids + (u64)row * n.k;
    bool waited = false, known = true;
    float sum = 0.0f;
    for (u32 base = 0; base <= n.k; base += PLACES) {
        const u32 held = least(PLACES, n.k + 1 - base), place = base + warp_id();
        const bool shared = place == n.k, mine = place <= n.k;
        const u32 inner = shared ? n.shared_inner : n.inner, half = inner / CUTS, units = ceil_div(half, UNIT);
        const u32 id = mine && !shared ? __ldcg(ids + place) : 0;
        const bool exists = shared || id < n.experts;
        const bf16* const expert = shared ? a.shared_down : a.down + (u64)id * tiles * units * CUTS * TILE * UNIT;
        Stream<1, 0> weights(Tiles(expert, units * CUTS).unit(tile, cut * units), mine && exists ? units : 0);
        if (!waited) {
            let_next_start();
            wait_for_previous();
            waited = true;
        }
        if (mine) {
            const bf16* const from = shared ? a.s + (u64)row * inner : a.a + ((u64)row * n.k + place) * inner;
            const bf16* const x[1] = {lane / 4 == 0 ? from + cut * half : nullptr};
            const bool aligned = aligned16(from) && half % 8 == 0;
            float sums[1][4] = {};
            weights.multiply(sums, x, 0, half, aligned);
            if (lane % 4 == 0) {
                products[warp_id()][lane / 4] = sums[0][0];
                products[warp_id()][lane / 4 + 8] = sums[0][2];
            }
        }
        known = __syncthreads_and(known && exists);
        for (u32 i = 0; threadIdx.x < TILE && i < held; ++i)
            sum = add(sum, mul(a.weights[(u64)row * (n.k + 1) + base + i], products[i][threadIdx.x]));
        __syncthreads();
    }
    const u32 output = tile * TILE + threadIdx.x;
    if (known && threadIdx.x < TILE && output < n.hidden) a.p[((u64)cut * n.rows + row) * n.hidden + output] = sum;
}

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

// Which rows a prompt's block works on: 32 of the shared expert, or all of a routed one.
struct Work {
    bool shared;
    u32 from, to, expert;

    __device__ Work(u32 group, const Sizes& n, const u32* starts) {
        const u32 chunks = ceil_div(n.rows, Part::ROWS);
        shared = group < chunks;
        expert = shared ? 0 : group - chunks;
        from = shared ? group * Part::ROWS : starts[expert];
        to = shared ? least(n.rows, from + Part::ROWS) : starts[expert + 1];
    }
};

// blockIdx.x: a run of tiles, and above it the work.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) experts_up_prompt(UpArgs a) {
    follow();
    const Sizes& n = a.sizes;
    const u32 runs = ceil_div(pair_tiles(n.inner > n.shared_inner ? n.inner : n.shared_inner), Part::TILES);
    const Work work(blockIdx.x / runs, n, a.starts);
    const u32 inner = work.shared ? n.shared_inner : n.inner, tiles = pair_tiles(inner);
    const u32 tile = blockIdx.x % runs * Part::TILES;
    if (tile >= tiles) return;
    const Slices slices(n.hidden, UP_SLICES);
    const u64 expert = (u64)work.expert * tiles * slices.units * TILE * UNIT;
    const Tiles w(work.shared ? a.shared_gate_up : a.gate_up + expert, slices.units);
    for (u32 from = work.from; from < work.to; from += Part::ROWS) {
        const u32 rows = least(work.to - from, Part::ROWS);
        const auto input = [&](u32 i) -> const bf16* {
            if (i >= rows) return nullptr;
            return a.x + (u64)(work.shared ? from + i : a.list[from + i] / n.k) * n.hidden;
        };
        const bool aligned = aligned16(a.x) && n.hidden % 8 == 0;
        const float* const sums =
            Part::product(w, tile, tiles - 1, 0, input, n.hidden, aligned, slices, 0, slices.count, [] {});
        for (u32 r = warp_id(); r < rows; r += WARPS) {
            bf16* const to = work.shared ? a.s + (u64)(from + r) * inner : a.a + (u64)a.list[from + r] * inner;
            for (u32 i = lane_id(); i < Part::TILES * PAIRS; i += 32) {
                const u32 output = tile * PAIRS + i;
                const float* const of = sums + r * Part::SUM_PITCH + i / PAIRS * TILE + i % PAIRS;
                if (output < inner) to[output] = activation(of[0], of[PAIRS]);
            }
        }
        __syncthreads();
    }
}

// blockIdx.x: a run of tiles, and above it the work; blockIdx.y: the half of the inner widths.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) experts_products(ProductsArgs a) {
    follow();
    const Sizes& n = a.sizes;
    const u32 tiles = ceil_div(n.hidden, TILE), runs = ceil_div(tiles, Part::TILES), cut = blockIdx.y;
    const Work work(blockIdx.x / runs, n, a.starts);
    const u32 tile = blockIdx.x % runs * Part::TILES;
    const u32 inner = work.shared ? n.shared_inner : n.inner, half = inner / CUTS;
    const Slices slices(half, 1);
    const u64 expert = (u64)work.expert * tiles * slices.units * CUTS * TILE * UNIT;
    const Tiles w(work.shared ? a.shared_down : a.down + expert, slices.units * CUTS);
    for (u32 from = work.from; from < work.to; from += Part::ROWS) {
        const u32 rows = least(work.to - from, Part::ROWS);
        const bf16* const base = (work.shared ? a.s : a.a) + cut * half;
        const auto input = [&](u32 i) -> const bf16* {
            if (i >= rows) return nullptr;
            return base + (u64)(work.shared ? from + i : a.list[from + i]) * inner;
        };
        const bool aligned = aligned16(base) && inner % 8 == 0;
        const float* const sums = Part::product(w, tile, tiles - 1, cut * slices.units, input, half, aligned, slices, 0,
                                                slices.count, [] {});
        for (u32 r = warp_id(); r < rows; r += WARPS) {
            const u32 pair = work.shared ? 0 : a.list[from + r];
            const u64 row = work.shared ? from + r : pair / n.k, place = work.shared ? n.k : pair % n.k;
            float* const to = a.products + (((u64)cut * n.rows + row) * (n.k + 1) + place) * n.hidden;
            for (u32 i = lane_id(); i < Part::OUTPUTS && tile * TILE + i < n.hidden; i += 32)
                to[tile * TILE + i] = sums[r * Part::SUM_PITCH + i];
        }
        __syncthreads();
    }
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
