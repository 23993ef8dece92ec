// The bodies of the twins of kernels/src/experts.rs, which holds the contracts, for every format R of the routed
// experts and S of the shared one. A row with an id past the experts is left unwritten (by experts_up: the places with
// such an id).
#pragma once
#include "tiles.cuh"

struct Sizes {
    u32 rows, hidden, inner, shared_inner, experts, k;
};

struct UpArgs {
    const bf16* x;
    const u32* ids;
    const u32* list;
    const u32* starts;
    const void* gate_up;
    const void* shared_gate_up;
    bf16* a;
    bf16* s;
    Sizes sizes;
};

struct DownArgs {
    const bf16* a;
    const bf16* s;
    const u32* ids;
    const float* weights;
    const void* down;
    const void* shared_down;
    float* p;
    Sizes sizes;
};

struct ProductsArgs {
    const bf16* a;
    const bf16* s;
    const u32* list;
    const u32* starts;
    const void* down;
    const void* shared_down;
    float* products;
    Sizes sizes;
};

constexpr u32 WARPS = 8;
constexpr u32 UP_THREADS = WARPS * 32;
// Slices of an up projection at most; a half of a down projection is one.
constexpr u32 UP_SLICES = 8;
// Places that a block of experts_down works on at a time, a warp for each.
constexpr u32 PLACES = 11;
constexpr u32 DOWN_THREADS = PLACES * 32;
// Gate and up rows of eight outputs share a tile.
constexpr u32 PAIRS = TILE / 2;

__device__ __forceinline__ bf16 activation(float gate, float up) { return narrow(mul(silu(r16(gate)), r16(up))); }
__device__ __forceinline__ u32 pair_tiles(u32 inner) { return ceil_div(inner, PAIRS); }

// Units that a warp holds: of codes a whole slice or half, of the usual sizes.
template <class F> __device__ constexpr u32 held() { return F::QUADS == 4 ? 1 : F::QUADS == 2 ? 2 : 5; }

// Tile `tile` of an expert's gate and up projections, for one input.
template <class F, class Depend>
__device__ __forceinline__ void up_one(const Tiles<F>& w, u32 tile, const bf16* x, u32 hidden, u32 inner, bf16* to,
                                       Depend depend) {
    const Slices slices(hidden, UP_SLICES);
    const Rows row{x, hidden, 1, hidden};
    narrow_product<F, 1, WARPS, held<F>(), 1>(w, tile, 0, row, slices, 0, slices.count, depend,
                                              [&](u32 g, u32, float gate, float up) {
                                                  const u32 output = tile * PAIRS + g;
                                                  if (output < inner) to[output] = activation(gate, up);
                                              });
}

// blockIdx.x: a tile; blockIdx.y: a place of a row. The next launch may read the lists of chosen experts before it
// waits for this one: it starts when they are complete.
template <class R, class S> __device__ __forceinline__ void up(const UpArgs& a) {
    const Sizes& n = a.sizes;
    const u32 tile = blockIdx.x, row = blockIdx.y / (n.k + 1), place = blockIdx.y % (n.k + 1);
    const u32 units = ceil_div(n.hidden, UNIT);
    const bf16* const x = a.x + (u64)row * n.hidden;
    if (place == n.k && tile < pair_tiles(n.shared_inner)) {
        const Tiles<S> shared(a.shared_gate_up, pair_tiles(n.shared_inner), units);
        up_one<S>(shared, tile, x, n.hidden, n.shared_inner, a.s + (u64)row * n.shared_inner, [] {
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
    const Tiles<R> routed(a.gate_up, pair_tiles(n.inner), units, n.experts, id);
    up_one<R>(routed, tile, x, n.hidden, n.inner, a.a + (u64)pair * n.inner, [] {});
}

// Tile `tile` of the down projection of expert `id` over half `cut` of place `place` of a row, or of the shared expert:
// the sums of the tile's rows, of whatever if the row has no such place or expert. The first one waits for the previous
// launch when weights are on their way.
template <class F>
__device__ __forceinline__ void down_one(const DownArgs& a, u32 row, u32 place, bool shared, u32 id, bool exists, u32 tile,
                                         u32 cut, bool first, float (&products)[TILE]) {
    const Sizes& n = a.sizes;
    const u32 inner = shared ? n.shared_inner : n.inner, half = inner / CUTS, units = ceil_div(half, UNIT);
    const Tiles<F> w(shared ? a.shared_down : a.down, ceil_div(n.hidden, TILE), units * CUTS, shared ? 1 : n.experts, id);
    Stream<F, held<F>(), 0> weights(w.run(tile, cut * units), place <= n.k && exists ? units : 0);
    if (first) {
        let_next_start();
        wait_for_previous();
    }
    if (place > n.k) return;
    const bf16* const from = shared ? a.s + (u64)row * inner : a.a + ((u64)row * n.k + place) * inner;
    const bf16* const x[1] = {lane_id() / 4 == 0 ? from + cut * half : nullptr};
    const bool aligned = aligned16(from) && half % 8 == 0;
    float sums[1][4] = {};
    weights.multiply(sums, x, 0, half, aligned);
    const Halves numbers = w.whole(tile);
    if (lane_id() % 4 == 0) {
        products[lane_id() / 4] = whole<F>(sums[0][0], numbers.low);
        products[lane_id() / 4 + 8] = whole<F>(sums[0][2], numbers.high);
    }
}

// blockIdx.x: a tile, and above it a row; blockIdx.y: the half of the inner widths.
template <class R, class S> __device__ __forceinline__ void down(const DownArgs& a) {
    __shared__ float products[PLACES][TILE];
    const Sizes& n = a.sizes;
    const u32 row = blockIdx.x % n.rows, tile = blockIdx.x / n.rows, cut = blockIdx.y;
    const u32* const ids = a.ids + (u64)row * n.k;
    bool known = true;
    float sum = 0.0f;
    for (u32 base = 0; base <= n.k; base += PLACES) {
        const u32 held = least(PLACES, n.k + 1 - base), place = base + warp_id();
        const bool shared = place == n.k;
        const u32 id = place < n.k ? __ldcg(ids + place) : 0;
        const bool exists = shared || id < n.experts;
        if (SAME<R, S> || !shared)
            down_one<R>(a, row, place, SAME<R, S> && shared, exists ? id : 0, exists, tile, cut, base == 0, products[warp_id()]);
        else
            down_one<S>(a, row, place, true, 0, true, tile, cut, base == 0, products[warp_id()]);
        known = __syncthreads_and(known && exists);
        for (u32 i = 0; threadIdx.x < TILE && i < held; ++i)
            sum = add(sum, mul(a.weights[(u64)row * (n.k + 1) + base + i], products[i][threadIdx.x]));
        __syncthreads();
    }
    const u32 output = tile * TILE + threadIdx.x;
    if (known && threadIdx.x < TILE && output < n.hidden) a.p[((u64)cut * n.rows + row) * n.hidden + output] = sum;
}

// Which rows a prompt's block works on: 32 of the shared expert, or all of a routed one.
struct Work {
    bool shared;
    u32 from, to, expert;

    __device__ Work(u32 group, const Sizes& n, const u32* starts) {
        constexpr u32 ROWS = Part<Bf16>::ROWS;
        const u32 chunks = ceil_div(n.rows, ROWS);
        shared = group < chunks;
        expert = shared ? 0 : group - chunks;
        from = shared ? group * ROWS : starts[expert];
        to = shared ? least(n.rows, from + ROWS) : starts[expert + 1];
    }
};

// A run of tiles of the gate and up projections `w`, of a prompt's rows.
template <class F>
__device__ __forceinline__ void up_rows(const UpArgs& a, const Tiles<F>& w, u32 tile, const Work& work, u32 inner) {
    typedef Part<F> Part;
    const Sizes& n = a.sizes;
    const Slices slices(n.hidden, UP_SLICES);
    for (u32 from = work.from; from < work.to; from += Part::ROWS) {
        const u32 rows = least(work.to - from, Part::ROWS);
        const auto input = [&](u32 i) -> const bf16* {
            if (i >= rows) return nullptr;
            return a.x + (u64)(work.shared ? from + i : a.list[from + i] / n.k) * n.hidden;
        };
        const bool aligned = aligned16(a.x) && n.hidden % 8 == 0;
        const float* const sums = Part::product(w, tile, pair_tiles(inner) - 1, 0, input, n.hidden, aligned, slices, 0,
                                                slices.count, [] {});
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

// blockIdx.x: a run of tiles, and above it the work.
template <class R, class S> __device__ __forceinline__ void up_prompt(const UpArgs& a) {
    follow();
    const Sizes& n = a.sizes;
    constexpr u32 TILES = Part<Bf16>::TILES;
    const u32 runs = ceil_div(pair_tiles(n.inner > n.shared_inner ? n.inner : n.shared_inner), TILES);
    const Work work(blockIdx.x / runs, n, a.starts);
    const u32 inner = work.shared ? n.shared_inner : n.inner, tiles = pair_tiles(inner), units = ceil_div(n.hidden, UNIT);
    const u32 tile = blockIdx.x % runs * TILES;
    if (tile >= tiles) return;
    if constexpr (SAME<R, S>) {
        const Tiles<R> w(work.shared ? a.shared_gate_up : a.gate_up, tiles, units, work.shared ? 1 : n.experts,
                         work.expert);
        up_rows<R>(a, w, tile, work, inner);
    } else if (work.shared) {
        up_rows<S>(a, Tiles<S>(a.shared_gate_up, tiles, units), tile, work, inner);
    } else {
        up_rows<R>(a, Tiles<R>(a.gate_up, tiles, units, n.experts, work.expert), tile, work, inner);
    }
}

// A run of tiles of the down projections `w` over half `cut`, of a prompt's rows.
template <class F>
__device__ __forceinline__ void products_rows(const ProductsArgs& a, const Tiles<F>& w, u32 tile, u32 cut,
                                              const Work& work, u32 inner) {
    typedef Part<F> Part;
    const Sizes& n = a.sizes;
    const u32 half = inner / CUTS;
    const Slices slices(half, 1);
    for (u32 from = work.from; from < work.to; from += Part::ROWS) {
        const u32 rows = least(work.to - from, Part::ROWS);
        const bf16* const base = (work.shared ? a.s : a.a) + cut * half;
        const auto input = [&](u32 i) -> const bf16* {
            if (i >= rows) return nullptr;
            return base + (u64)(work.shared ? from + i : a.list[from + i]) * inner;
        };
        const bool aligned = aligned16(base) && inner % 8 == 0;
        const float* const sums = Part::product(w, tile, ceil_div(n.hidden, TILE) - 1, cut * slices.units, input, half,
                                                aligned, slices, 0, slices.count, [] {});
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

// blockIdx.x: a run of tiles, and above it the work; blockIdx.y: the half of the inner widths.
template <class R, class S> __device__ __forceinline__ void down_products(const ProductsArgs& a) {
    follow();
    const Sizes& n = a.sizes;
    constexpr u32 TILES = Part<Bf16>::TILES;
    const u32 tiles = ceil_div(n.hidden, TILE), runs = ceil_div(tiles, TILES), cut = blockIdx.y;
    const Work work(blockIdx.x / runs, n, a.starts);
    const u32 tile = blockIdx.x % runs * TILES;
    const u32 inner = work.shared ? n.shared_inner : n.inner, units = ceil_div(inner / CUTS, UNIT) * CUTS;
    if constexpr (SAME<R, S>) {
        const Tiles<R> w(work.shared ? a.shared_down : a.down, tiles, units, work.shared ? 1 : n.experts, work.expert);
        products_rows<R>(a, w, tile, cut, work, inner);
    } else if (work.shared) {
        products_rows<S>(a, Tiles<S>(a.shared_down, tiles, units), tile, cut, work, inner);
    } else {
        products_rows<R>(a, Tiles<R>(a.down, tiles, units, n.experts, work.expert), tile, cut, work, inner);
    }
}
