// The bodies of the twins of kernels/src/experts.rs, which holds the contracts, for every format R of the routed
// experts and S of the shared one. A row with an id past the experts is left unwritten (by experts_up: the places with
// such an id).
#pragma once
#include "items.cuh"
#include "tiles.cuh"

struct Sizes {
    u32 rows, hidden, inner, shared_inner, experts, k, cuts, offset, shared_offset, zero;
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
// Tiles whose sums a block of experts_up keeps at most, and rows of one of the shared expert.
constexpr u32 UP_TILES = 8;
constexpr u32 UP_ROWS = 16;
// How many tiles take about as long as one of the shared expert.
template <class F> constexpr u32 SHARED_TILES = F::QUADS == 1 ? 3 : 2;
// Tiles and rows of a block of experts_down at most, and its warps: one for each of so many places, the last for the
// shared expert.
constexpr u32 DOWN_TILES = 10;
constexpr u32 DOWN_ROWS = 2;
constexpr u32 PLACES = 11;
constexpr u32 DOWN_THREADS = PLACES * 32;
static_assert(DOWN_TILES * DOWN_ROWS * TILE <= DOWN_THREADS);
// Columns of x at most, of which so many fit a block's memory, and of a half of an inner width: past them a and p are
// left unwritten.
constexpr u32 UP_COLUMNS = 10240;
constexpr u32 DOWN_COLUMNS = 512;
// Gate and up rows of eight outputs share a tile.
constexpr u32 PAIRS = TILE / 2;
static_assert(UP_TILES * PAIRS * GROUP == UP_THREADS);

__device__ __forceinline__ bf16 activation(float gate, float up) { return narrow(mul(silu(r16(gate)), r16(up))); }
__device__ __forceinline__ u32 pair_tiles(u32 inner) { return ceil_div(inner, PAIRS); }

// Units of a routed expert that a warp holds: of codes a whole slice or half, of the usual sizes.
template <class F> __device__ constexpr u32 held() { return F::QUADS == 4 ? 2 : F::QUADS == 2 ? 2 : 5; }
// Units of the shared expert that a warp of experts_up holds for so many tiles of rows: as many as registers are left.
template <class R, class S> __device__ constexpr u32 shared_held(u32 nt) {
    return S::QUADS < 4 ? 2 : R::QUADS < 4 && nt == 1 ? 3 : 1;
}

// Tile `tile` of the shared expert's gate and up projections, for up to 8 * NT rows from `first` on.
template <class R, class S, u32 NT> __device__ __forceinline__ void up_shared(const UpArgs& a, u32 tile, u32 first) {
    const Sizes& n = a.sizes;
    const Slices slices(n.hidden, UP_SLICES);
    const Tiles<S> w(a.shared_gate_up, pair_tiles(n.shared_inner), slices.units);
    const Rows rows{a.x + (u64)first * n.hidden, n.hidden, least(n.rows - first, UP_ROWS), n.hidden};
    narrow_product<S, NT, WARPS, shared_held<R, S>(NT), 1>(
        w, tile, 0, rows, slices, 0, slices.count,
        [] {
            wait_for_previous();
            let_next_start();
        },
        [&](u32 g, u32 r, float gate, float up) {
            const u32 output = tile * PAIRS + g;
            if (output < n.shared_inner) a.s[(u64)(first + r) * n.shared_inner + output] = activation(gate, up);
        });
}

// Which tiles of all items a block works on: `all` of them are shared out evenly, but for the first blocks, which have
// a tile of the shared expert each, and take as many less of the others as that takes time.
struct Span {
    u32 at, end;

    __device__ __forceinline__ Span(u32 all, u32 shared, u32 weight) {
        const u32 each = (all + shared * weight) / gridDim.x, light = each > weight ? each - weight : 0;
        if (blockIdx.x < shared) {
            at = blockIdx.x * light, end = at + light;
            return;
        }
        const u32 blocks = gridDim.x - shared, place = blockIdx.x - shared, rest = all - shared * light;
        const u32 some = rest / blocks, more = rest % blocks;
        at = shared * light + place * some + least(place, more);
        end = at + some + (place < more);
    }
};

// A block has a tile of the shared expert, if it is one of the first, and a run of the tiles of all items. A warp goes
// through its slice of a tile; all meet when as many sums are there as threads can add up, and where an item ends.
template <class R, class S> __device__ __forceinline__ void up(const UpArgs& a) {
    const Sizes& n = a.sizes;
    const u32 shared_tiles = pair_tiles(n.shared_inner), shared = shared_tiles * ceil_div(n.rows, UP_ROWS);
    const u32 tiles = pair_tiles(n.inner), pairs = n.rows * n.k;
    const Slices slices(n.hidden, UP_SLICES);
    Items items(a.ids, pairs, least(GROUP, UP_COLUMNS / (slices.units * UNIT)));
    Span span(pairs * tiles, shared, SHARED_TILES<R>);
    u32 item = span.at / tiles, tile = span.at % tiles;
    // The next launch may read the lists of chosen experts before it waits for this one: it starts when they are
    // complete.
    if (blockIdx.x < shared) {
        const u32 tile = blockIdx.x % shared_tiles, first = blockIdx.x / shared_tiles * UP_ROWS;
        if (n.rows - first <= 8) up_shared<R, S, 1>(a, tile, first);
        else up_shared<R, S, 2>(a, tile, first);
        __syncthreads();
    } else {
        wait_for_previous();
        let_next_start();
    }
    if (n.hidden > UP_COLUMNS) return;
    if (Items::can_gather(pairs, n.experts)) {
        items.gather<UP_THREADS>(n.experts, (u32*)pool);
        span = Span(items.count * tiles, shared, SHARED_TILES<R>);
        item = span.at / tiles, tile = span.at % tiles;
    }
    u32 left = span.end - span.at;
    if (left == 0) return;
    const u32 pitch = slices.units * (UNIT / 8) + 1, from = slices.from(warp_id());
    Quad* const zeros = pool + UP_TILES * WARPS * GROUP * TILE / 4;
    Quad* const x = zeros + 2;
    float(*const sums)[WARPS][GROUP][TILE] = (float(*)[WARPS][GROUP][TILE])pool;
    // Every warp has its own.
    __shared__ u32 all_members[WARPS][GROUP];
    u32(&members)[GROUP] = all_members[warp_id()];
    if (threadIdx.x < 2) zeros[threadIdx.x] = Quad{};
    u32 expert = items.expert(item);
    const auto matrix = [&](u32 expert) {
        // An expert that is there, in place of one that is not.
        return Tiles<R>(a.gate_up, tiles, slices.units, n.experts, expert < n.experts ? expert : 0);
    };
    Stream<R, held<R>()> stream(matrix(expert).run(tile, from), slices.length(warp_id()));
    // Lanes of the columns of rows 0 and 1, and of 2 and 3, keep sums.
    const u32 own = shared_address(&sums[0][warp_id()][lane_id() % 4 * 2 % GROUP][lane_id() / 4]);
    for (;;) {
        const u32 rows = items.members(item, members);
        for (u32 r = 0; r < rows; ++r)
            stage_row(x + r * pitch, a.x + (u64)(members[r] / n.k) * n.hidden, n.hidden, threadIdx.x, UP_THREADS);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        const Staged staged(x + from * (UNIT / 8), pitch, rows, zeros);
        bool more;
        do {
            const u32 count = least(least(tiles - tile, left), UP_TILES);
            // Whether the item goes on behind these, and whether anything does.
            left -= count;
            more = tile + count < tiles && left > 0;
            u32 to = own;
#pragma unroll 1
            for (u32 end = own + count * sizeof(sums[0]); to != end;) {
                Run<R> next = {};
                if (to + sizeof(sums[0]) != end || more) next = stream.from.from(slices.units);
                else if (left > 0) next = matrix(items.expert(item + 1)).run(0, from);
                float sum[4] = {};
                stream.multiply(sum, staged, next);
                stream.from = next;
                if (lane_id() % 4 * 2 < rows) store_shared(to, sum[0]), store_shared(to + 32, sum[2]);
                if (lane_id() % 4 * 2 + 1 < rows) store_shared(to + 64, sum[1]), store_shared(to + 96, sum[3]);
                to += sizeof(sums[0]);
            }
            const u32 r = threadIdx.x / (UP_TILES * PAIRS), t = threadIdx.x / PAIRS % UP_TILES, g = threadIdx.x % PAIRS;
            const u32 output = (tile + t) * PAIRS + g;
            const bool adds = r < rows && t < count && output < n.inner && expert < n.experts;
            Halves numbers = {};
            if (adds) numbers = matrix(expert).whole(tile + t, g);
            __syncthreads();
            if (adds) {
                float gate = sums[t][0][r][g], up = sums[t][0][r][g + PAIRS];
                for (u32 slice = 1; slice < slices.count; ++slice) {
                    gate = add(gate, sums[t][slice][r][g]);
                    up = add(up, sums[t][slice][r][g + PAIRS]);
                }
                a.a[(u64)members[r] * n.inner + output] =
                    activation(whole<R>(gate, numbers.low), whole<R>(up, numbers.high));
            }
            __syncthreads();
            tile += count;
        } while (more);
        if (left == 0) return;
        expert = items.expert(++item);
        tile = 0;
    }
}

// Where a block of experts_down has what it keeps in shared memory, in quads: zeros; two rows of each warp of the
// routed experts; the rows of the shared expert, which are a quad apart so that lanes meet every bank once; its weights;
// the products.
constexpr u32 DOWN_ROW = DOWN_COLUMNS / 8;
constexpr u32 DOWN_SHARED_ROW = DOWN_ROW + 1;
constexpr u32 DOWN_OWN = 2;
constexpr u32 DOWN_X = DOWN_OWN + (PLACES - 1) * DOWN_ROWS * DOWN_ROW;
constexpr u32 DOWN_W = DOWN_X + DOWN_ROWS * DOWN_SHARED_ROW;
constexpr u32 DOWN_PRODUCTS = DOWN_W + DOWN_COLUMNS / UNIT * 128;

// The products of `count` tiles of the shared expert's down projection with the rows of a block, over a half: what the
// last warp does.
template <class S>
__device__ __forceinline__ void down_shared(const DownArgs& a, u32 first_tile, u32 count, u32 cut, u32 first, u32 rows,
                                            float (*products)[DOWN_ROWS][PLACES][TILE]) {
    const Sizes& n = a.sizes;
    const u32 half = n.shared_inner / n.cuts, units = ceil_div(half, UNIT), lane = lane_id();
    const Tiles<S> w(a.shared_down, ceil_div(n.hidden, TILE), units * n.cuts);
    const auto copy = [&](u32 tile) {
        const Run<S> run = w.run(first_tile + tile, cut * units);
        for (u32 i = 0; i < units * S::QUADS; ++i) copy_async(pool + DOWN_W + i * 32 + lane, run.codes + i * 32, true);
        copy_commit();
    };
    copy(0);
    follow();
    const bf16* const rows_at = a.s + (u64)first * n.shared_inner + cut * half;
    for (u32 r = 0; r < rows; ++r)
        stage_row(pool + DOWN_X + r * DOWN_SHARED_ROW, rows_at + (u64)r * n.shared_inner, half, lane, 32);
    copy_commit();
    const bool live = lane / 4 < rows;
    const Quad* const x = live ? pool + DOWN_X + lane / 4 * DOWN_SHARED_ROW + lane % 4 * 2 : pool;
    for (u32 tile = 0; tile < count; ++tile) {
        copy_wait<0>();
        __syncwarp();
        const u8* const scales = w.run(first_tile + tile, cut * units).scales;
        float sums[4] = {};
        for (u32 unit = 0; unit < units; ++unit) {
            Quad codes[S::QUADS];
#pragma unroll
            for (u32 i = 0; i < S::QUADS; ++i) codes[i] = pool[DOWN_W + (unit * S::QUADS + i) * 32 + lane];
            const Quad* const strip = x + (live ? unit * (UNIT / 8) : 0);
            mma_stored<S>(sums, codes, S::scale(scales, unit), Strip{strip[0], strip[1]});
        }
        __syncwarp();
        if (tile + 1 < count) copy(tile + 1);
        const Halves numbers = w.whole(first_tile + tile);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 r = lane % 4 * 2 + c % 2;
            const float product = whole<S>(sums[c], c < 2 ? numbers.low : numbers.high);
            if (r < rows) products[tile][r][PLACES - 1][lane / 4 + c / 2 * 8] = product;
        }
    }
}

// blockIdx.x: a run of tiles, and above it DOWN_ROWS rows; blockIdx.y: the cut of the inner widths. A warp takes a
// place of each row in turn, all tiles of it; the last one takes the shared expert of all rows.
template <class R, class S> __device__ __forceinline__ void down(const DownArgs& a) {
    float(*const products)[DOWN_ROWS][PLACES][TILE] = (float(*)[DOWN_ROWS][PLACES][TILE])(pool + DOWN_PRODUCTS);
    __shared__ u32 chosen[DOWN_ROWS][PLACES];
    constexpr u32 ROUTED = PLACES - 1;
    const Sizes& n = a.sizes;
    const u32 tiles = ceil_div(n.hidden, TILE), runs = gridDim.x / ceil_div(n.rows, DOWN_ROWS);
    const u32 run = blockIdx.x % runs, first_tile = run * tiles / runs, count = (run + 1) * tiles / runs - first_tile;
    const u32 cut = blockIdx.y, lane = lane_id();
    const u32 first = blockIdx.x / runs * DOWN_ROWS, rows = least(n.rows - first, DOWN_ROWS);
    if (n.inner / n.cuts > DOWN_COLUMNS || n.shared_inner / n.cuts > DOWN_COLUMNS) {
        follow();
        return;
    }
    Quad* const zeros = pool;
    if (threadIdx.x < 2) zeros[threadIdx.x] = Quad{};
    __syncthreads();
    if (warp_id() == ROUTED) down_shared<S>(a, first_tile, count, cut, first, rows, products);
    const u32 half = n.inner / n.cuts, units = ceil_div(half, UNIT);
    // What this thread adds up: an output of a row.
    const u32 at = threadIdx.x % TILE, row = threadIdx.x / TILE % DOWN_ROWS, tile = threadIdx.x / TILE / DOWN_ROWS;
    const bool adds = row < rows && tile < count;
    bool known = true;
    float sum = 0.0f;
    for (u32 base = 0; base < n.k; base += ROUTED) {
        const u32 place = base + warp_id();
        if (warp_id() < ROUTED && place < n.k) {
            const u32 id = lane < rows ? __ldcg(a.ids + (u64)(first + lane) * n.k + place) : 0;
            if (lane < rows) chosen[lane][warp_id()] = id;
            const auto matrix = [&](u32 r) {
                // An expert that is there, in place of one that is not.
                const u32 expert = __shfl_sync(WHOLE_WARP, id < n.experts ? id : 0, r);
                return Tiles<R>(a.down, tiles, units * n.cuts, n.experts, expert).run(first_tile, cut * units);
            };
            Stream<R, held<R>()> stream(matrix(0), units);
            if (base == 0) follow();
            Quad* const mine = pool + DOWN_OWN + warp_id() * DOWN_ROWS * DOWN_ROW;
            for (u32 r = 0; r < rows; ++r)
                stage_row(mine + r * DOWN_ROW, a.a + ((u64)(first + r) * n.k + place) * n.inner + cut * half, half, lane, 32);
            copy_commit();
            copy_wait<0>();
            __syncwarp();
#pragma unroll 1
            for (u32 r = 0; r < rows; ++r) {
                const Staged x(mine + r * DOWN_ROW, 0, 1, zeros);
                u32 to = shared_address(&products[0][r][warp_id()][lane / 4]);
#pragma unroll 1
                for (u32 end = to + count * sizeof(products[0]); to != end;) {
                    Run<R> next = {};
                    if (to + sizeof(products[0]) != end) next = stream.from.from(units * n.cuts);
                    else if (r + 1 < rows) next = matrix(r + 1);
                    float sums[4] = {};
                    stream.multiply(sums, x, next);
                    stream.from = next;
                    if (lane % 4 == 0) store_shared(to, sums[0]), store_shared(to + 32, sums[2]);
                    to += sizeof(products[0]);
                }
            }
        } else if (base == 0 && warp_id() < ROUTED) {
            follow();
        }
        __syncthreads();
        const float* const weights = a.weights + (u64)(first + row) * (n.k + 1) + base;
        for (u32 i = 0; adds && i < least(ROUTED, n.k - base); ++i) {
            const u32 id = chosen[row][i];
            known = known && id < n.experts;
            const Tiles<R> w(a.down, tiles, units * n.cuts, n.experts, id < n.experts ? id : 0);
            sum = add(sum, mul(weights[i], whole<R>(products[tile][row][i][at], w.row(first_tile + tile, at))));
        }
        if (base + ROUTED < n.k) __syncthreads();
    }
    const u32 output = (first_tile + tile) * TILE + at;
    if (!adds || !known || output >= n.hidden) return;
    const float weight = a.weights[(u64)(first + row) * (n.k + 1) + n.k];
    a.p[((u64)cut * n.rows + first + row) * n.hidden + output] = add(sum, mul(weight, products[tile][row][ROUTED][at]));
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
    const u32 half = inner / n.cuts;
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

// blockIdx.x: a run of tiles, and above it the work; blockIdx.y: the cut of the inner widths.
template <class R, class S> __device__ __forceinline__ void down_products(const ProductsArgs& a) {
    follow();
    const Sizes& n = a.sizes;
    constexpr u32 TILES = Part<Bf16>::TILES;
    const u32 tiles = ceil_div(n.hidden, TILE), runs = ceil_div(tiles, TILES), cut = blockIdx.y;
    const Work work(blockIdx.x / runs, n, a.starts);
    const u32 tile = blockIdx.x % runs * TILES;
    const u32 inner = work.shared ? n.shared_inner : n.inner, units = ceil_div(inner / n.cuts, UNIT) * n.cuts;
    if constexpr (SAME<R, S>) {
        const Tiles<R> w(work.shared ? a.shared_down : a.down, tiles, units, work.shared ? 1 : n.experts, work.expert);
        products_rows<R>(a, w, tile, cut, work, inner);
    } else if (work.shared) {
        products_rows<S>(a, Tiles<S>(a.shared_down, tiles, units), tile, cut, work, inner);
    } else {
        products_rows<R>(a, Tiles<R>(a.down, tiles, units, n.experts, work.expert), tile, cut, work, inner);
    }
}
