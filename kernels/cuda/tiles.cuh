// The product of every kernel with a weight matrix: y[r, o] = sum over k of w[o, k] * x[r, k] on tensor cores.
// Weights lie in tiles, as kernels/src/tiles.rs says, in one of the formats of formats.cuh.
//
// One order of summation, a function of the widths alone. The units of a sum are cut into slices of equal
// length, at most so many as the kernel says. A slice is summed unit by unit, a unit in four products of 16
// columns: lane t owns columns 16t .. 16t + 15 and product j takes 16t + 4j .. 16t + 4j + 3. Where units have scales,
// each unit is summed by itself and added to its slice with a fused multiply-add. The slices are then added in order,
// and where rows have numbers, the sum is multiplied by its row's. Columns of x past the last are zero, and so are its
// rows past the last, which are never stored.
//
// Weights are the 16-wide side of a product, rows the 8-wide one. Two ways to walk give the same bits: narrow
// (a warp per slice, few rows: decode rounds) and wide (many tiles by many rows: prompts).
#pragma once
#include "formats.cuh"

// Rows of a narrow product at most.
constexpr u32 NARROW_ROWS = 32;

extern __shared__ Quad pool[];

// The rows of a product, row-major.
struct Rows {
    const bf16* base;
    u64 pitch;
    u32 count, columns;

    __device__ const bf16* row(u32 i) const { return i < count ? base + i * pitch : nullptr; }
    // Whether 16 bytes can be read at every eighth column.
    __device__ bool aligned() const { return aligned16(base) && pitch % 8 == 0; }
};

// How the units of a sum are cut.
struct Slices {
    u32 units, per, count;

    __device__ Slices(u32 columns, u32 most)
        : units(ceil_div(columns, UNIT)), per(ceil_div(units, most)), count(ceil_div(units, per)) {}
    __device__ u32 from(u32 slice) const { return slice * per; }
    __device__ u32 length(u32 slice) const { return slice < count ? least(per, units - slice * per) : 0; }
};

// Sixteen columns of one row: what a lane owns of a unit.
struct Strip {
    Quad half[2];
};

// Columns from .. from + 15 of a row, which can be read in one go; zero for no row and past the last column.
__device__ __forceinline__ Strip strip_of(const bf16* row, u32 from, u32 columns) {
    if (row == nullptr || from >= columns) return Strip{};
    return Strip{((const Quad*)(row + from))[0], ((const Quad*)(row + from))[1]};
}

// As `strip_of`, for rows of any alignment and length. Rare, so its code is short rather than fast.
__device__ __forceinline__ Strip ragged_strip(const bf16* row, u32 from, u32 columns) {
    u64 words[4] = {};
    if (row != nullptr) {
#pragma unroll 1
        for (u32 i = 16; i-- > 0;) {
            const u32 next = from + i < columns ? row[from + i].bits : 0;
            words[3] = words[3] << 16 | words[2] >> 48;
            words[2] = words[2] << 16 | words[1] >> 48;
            words[1] = words[1] << 16 | words[0] >> 48;
            words[0] = words[0] << 16 | next;
        }
    }
    Strip strip;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) strip.half[i / 4].word[i % 4] = (u32)(words[i / 2] >> 32 * (i % 2));
    return strip;
}

// Adds a unit's sum to a slice's: rows g in the first two, rows g + 8 in the others.
template <class F>
__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&part)[4], const typename F::Scale& scale) {
    if constexpr (F::SCALED) {
#pragma unroll
        for (u32 c = 0; c < 4; ++c) sum[c] = __fmaf_rn(part[c], c < 2 ? scale.low : scale.high, sum[c]);
    }
}

// Adds product `j` of a unit.
__device__ __forceinline__ void mma_columns(float (&sum)[4], const Quad& w, const Strip& x, u32 j) {
    const Quad& half = x.half[j / 2];
    mma(sum, w.word[0], w.word[1], w.word[2], w.word[3], half.word[j % 2 * 2], half.word[j % 2 * 2 + 1]);
}

__device__ __forceinline__ void mma_unit(float (&sum)[4], const Quad (&w)[4], const Strip& x) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) mma_columns(sum, w[j], x, j);
}

// Adds the product of a unit and a tile of 8 rows.
template <class F>
__device__ __forceinline__ void mma_unit(float (&sum)[4], const Quad (&w)[4], const typename F::Scale& scale, const Strip& x) {
    if constexpr (F::SCALED) {
        float part[4] = {};
        mma_unit(part, w, x);
        add_scaled<F>(sum, part, scale);
    } else {
        mma_unit(sum, w, x);
    }
}

// The same of a unit as it is stored, whose operands are made one after another.
template <class F>
__device__ __forceinline__ void mma_stored(float (&sum)[4], const Quad (&codes)[F::QUADS], const typename F::Scale& scale,
                                           const Strip& x) {
    float part[4] = {};
    float(&to)[4] = F::SCALED ? part : sum;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) mma_columns(to, F::fragment(codes, scale, j), x, j);
    add_scaled<F>(sum, part, scale);
}

// Rows of x in shared memory, whole units of them, `pitch` quads apart: what lanes of their columns read. The others
// read zeros.
struct Staged {
    const Quad* at;
    u32 step;

    __device__ __forceinline__ Staged(const Quad* rows, u32 pitch, u32 count, const Quad* zeros) {
        const u32 row = lane_id() / 4;
        at = row < count ? rows + row * pitch + lane_id() % 4 * 2 : zeros;
        step = row < count ? UNIT / 8 : 0;
    }
    __device__ __forceinline__ Strip strip(u32 unit) const { return Strip{at[unit * step], at[unit * step + 1]}; }
};

// Copies a row to shared memory by `threads` threads, of which this one is number `thread`: zeros past its end, up to
// a whole unit.
__device__ __forceinline__ void stage_row(Quad* to, const bf16* row, u32 columns, u32 thread, u32 threads) {
    const bool smooth = aligned16(row) && columns % 8 == 0;
    for (u32 i = thread; i < ceil_div(columns, UNIT) * (UNIT / 8); i += threads) {
        if (smooth) {
            copy_async(to + i, row + i * 8, i * 8 < columns);
        } else {
#pragma unroll 1
            for (u32 e = 0; e < 8; ++e) ((bf16*)(to + i))[e] = i * 8 + e < columns ? row[i * 8 + e] : bf16{0};
        }
    }
}

// A run of units of one tile on its way through the registers of a warp, DEPTH of them at a time; rows are read LEAD
// units ahead, if there are no more than eight.
template <class F, u32 DEPTH, u32 LEAD = DEPTH> struct Stream {
    Quad held[DEPTH][F::QUADS];
    typename F::Scale scales[DEPTH];
    Run<F> from;
    u32 count;

    // Starts to read `count` units.
    __device__ __forceinline__ Stream(const Run<F>& run, u32 count) : from(run), count(count) { start(from); }

    __device__ __forceinline__ void start(const Run<F>& run) {
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d)
            if (d < count) load(run, d, d);
    }

    __device__ __forceinline__ void load(const Run<F>& run, u32 place, u32 unit) {
        run.load(unit, held[place], scales[place]);
    }

    // The operands of a unit that is held: elements themselves, or what is made of codes.
    __device__ __forceinline__ const Quad (&operands(u32 place, Quad (&made)[4]) const)[4] {
        if constexpr (F::QUADS == 4) {
            return held[place];
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) made[j] = F::fragment(held[place], scales[place], j);
            return made;
        }
    }

    // Adds the products with NT tiles of 8 rows: `x` are this lane's rows g of each, null where there is none;
    // `column` is the first column of the run. Units that are done make place for those of `next`, the same run
    // of another tile, unless that has no codes.
    template <u32 NT>
    __device__ __forceinline__ void multiply(float (&sums)[NT][4], const bf16* const (&x)[NT], u32 column, u32 columns,
                                             bool aligned, const Run<F>& next = Run<F>{}) {
        constexpr u32 AHEAD = NT > 1 ? 0 : LEAD;
        const u32 at = column + lane_id() % 4 * 16;
        const u32 whole = aligned && columns % 16 == 0 ? count : 0;
        const auto strip = [&](u32 n, u32 unit) { return strip_of(x[n], at + unit * UNIT, columns); };
#pragma unroll 1
        for (u32 base = 0; base < whole; base += DEPTH) {
            Strip ahead[AHEAD + 1];
            if constexpr (AHEAD > 0) {
#pragma unroll
                for (u32 d = 0; d < AHEAD; ++d) ahead[d] = strip(0, base + d);
            }
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                const u32 unit = base + d;
                if (unit >= whole) break;
                if constexpr (AHEAD > 0) {
                    mma_stored<F>(sums[0], held[d], scales[d], ahead[d % AHEAD]);
                    if (d + AHEAD < DEPTH) ahead[d % AHEAD] = strip(0, unit + AHEAD);
                } else if constexpr (NT == 1) {
                    mma_stored<F>(sums[0], held[d], scales[d], strip(0, unit));
                } else {
                    Quad made[4];
                    const Quad(&w)[4] = operands(d, made);
#pragma unroll
                    for (u32 n = 0; n < NT; ++n) mma_unit<F>(sums[n], w, scales[d], strip(n, unit));
                }
                if (unit + DEPTH < whole) load(from, d, unit + DEPTH);
                else if (next.codes) load(next, d, d);
            }
        }
#pragma unroll 1
        for (u32 unit = whole; unit < count; ++unit) {
            load(from, 0, unit);
            Quad made[4];
            const Quad(&w)[4] = operands(0, made);
#pragma unroll
            for (u32 n = 0; n < NT; ++n)
                mma_unit<F>(sums[n], w, scales[0], ragged_strip(x[n], at + unit * UNIT, columns));
        }
    }

    // As `multiply`, for rows that lie in shared memory.
    __device__ __forceinline__ void multiply(float (&sum)[4], const Staged& x, const Run<F>& next) {
        if (count == DEPTH) {
            // The usual sizes, in a straight line.
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                mma_stored<F>(sum, held[d], scales[d], x.strip(d));
                if (next.codes) load(next, d, d);
            }
            return;
        }
#pragma unroll 1
        for (u32 base = 0; base < count; base += DEPTH) {
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                const u32 unit = base + d;
                if (unit >= count) break;
                mma_stored<F>(sum, held[d], scales[d], x.strip(unit));
                if (unit + DEPTH < count) load(from, d, unit + DEPTH);
                else if (next.codes) load(next, d, d);
            }
        }
    }
};

// What comes between the start of the weights and the rows in a launch that reads no other's lists.
struct Depend {
    __device__ void operator()() const { follow(); }
};

// Adds the sums of a block's warps, `count` slices in order, in buffer `buffer` of shared memory; calls
// `store(g, r, low, high)` for row g and row g + 8 of the tile and row r of x, once by some thread.
template <u32 NT, u32 WARPS, class Store>
__device__ __forceinline__ void add_slices(const float (&sums)[NT][4], u32 buffer, u32 count, u32 rows, Store store) {
    constexpr u32 VALUES = NT * 4;
    const u32 lane = lane_id();
    float* const here = (float*)pool + buffer * WARPS * VALUES * 32;
#pragma unroll
    for (u32 v = 0; v < VALUES; ++v) here[(warp_id() * VALUES + v) * 32 + lane] = sums[v / 4][v % 4];
    __syncthreads();
#pragma unroll
    for (u32 pair = warp_id(); pair < NT * 2; pair += WARPS) {
        const float* const at = here + (pair / 2 * 4 + pair % 2) * 32 + lane;
        float low = at[0], high = at[64];
        for (u32 s = 1; s < count; ++s) {
            low = add(low, at[s * VALUES * 32]);
            high = add(high, at[s * VALUES * 32 + 64]);
        }
        const u32 r = pair / 2 * 8 + lane % 4 * 2 + pair % 2;
        if (r < rows) store(lane / 4, r, low, high);
    }
}

// Narrow: tile `tile`, its units from `unit` on, by up to 8 * NT rows, a warp per slice, `count` slices from `first`
// on; `store` as `add_slices` says. `depend` is called when weights are on their way and before x is read.
template <class F, u32 NT, u32 WARPS, u32 DEPTH, u32 LEAD, class Depend, class Store>
__device__ __forceinline__ void narrow_product(const Tiles<F>& w, u32 tile, u32 unit, const Rows& x, const Slices& slices,
                                               u32 first, u32 count, Depend depend, Store store) {
    const u32 slice = first + warp_id();
    Stream<F, DEPTH, LEAD> weights(w.run(tile, unit + slices.from(slice)),
                                   warp_id() < count ? slices.length(slice) : 0);
    const Halves numbers = w.whole(tile);
    depend();
    const bf16* rows[NT];
#pragma unroll
    for (u32 n = 0; n < NT; ++n) rows[n] = x.row(n * 8 + lane_id() / 4);
    float sums[NT][4] = {};
    weights.multiply(sums, rows, slices.from(slice) * UNIT, x.columns, x.aligned());
    add_slices<NT, WARPS>(sums, 0, count, x.count, [&](u32 g, u32 r, float low, float high) {
        store(g, r, whole<F>(low, numbers.low), whole<F>(high, numbers.high));
    });
}

// As `narrow_product` with all slices, for tiles `tile`, `tile + stride`, ... below `tiles`: while a tile's slices are
// added up, the next one's units are on their way. `store(tile, g, r, low, high)`.
template <class F, u32 NT, u32 WARPS, u32 DEPTH, u32 LEAD, class Depend, class Store>
__device__ __forceinline__ void narrow_products(const Tiles<F>& w, u32 tile, u32 tiles, u32 stride, u32 unit,
                                                const Rows& x, const Slices& slices, Depend depend, Store store) {
    const u32 lane = lane_id(), start = unit + slices.from(warp_id());
    Stream<F, DEPTH, LEAD> weights(w.run(tile, start), slices.length(warp_id()));
    Halves numbers = w.whole(tile);
    depend();
    const bf16* rows[NT];
#pragma unroll
    for (u32 n = 0; n < NT; ++n) rows[n] = x.row(n * 8 + lane / 4);
    // Rows that must be read piece by piece take registers that units on their way would need.
    const bool smooth = x.aligned() && x.columns % 16 == 0;
    for (u32 turn = 0; tile < tiles; tile += stride, ++turn) {
        weights.from = w.run(tile, start);
        if (!smooth && turn > 0) weights.start(weights.from);
        Run<F> next = {};
        if (smooth && tile + stride < tiles) next = w.run(tile + stride, start);
        if (turn > 0) numbers = w.whole(tile);
        float sums[NT][4] = {};
        weights.multiply(sums, rows, slices.from(warp_id()) * UNIT, x.columns, smooth, next);
        // Two buffers in turn: one is summed while the other fills.
        add_slices<NT, WARPS>(sums, turn % 2, slices.count, x.count, [&](u32 g, u32 r, float low, float high) {
            store(tile, g, r, whole<F>(low, numbers.low), whole<F>(high, numbers.high));
        });
    }
}

// Wide: TILES tiles by ROWS rows of x, all slices in turn, or one if not SLICED. Weights and rows pass through a ring
// of stages in shared memory, a unit each.
template <class F, u32 TILES_, u32 ROWS_, u32 WARPS_ALONG_TILES, u32 STAGES, bool SLICED = true> struct Wide {
    static constexpr u32 UNIT_QUADS = Tiles<F>::UNIT_QUADS;
    static constexpr u32 WARPS = 8, THREADS = WARPS * 32, TILES = TILES_, ROWS = ROWS_, OUTPUTS = TILES * TILE;
    static constexpr u32 MT = TILES / WARPS_ALONG_TILES, ALONG_ROWS = WARPS / WARPS_ALONG_TILES;
    static constexpr u32 NT = ROWS / 8 / ALONG_ROWS;
    // A row of a stage, in quads: padded so that a warp's reads meet every bank once.
    static constexpr u32 PITCH = 9;
    static constexpr u32 STAGE = TILES * UNIT_QUADS + ROWS * PITCH;
    static constexpr u32 SUM_PITCH = OUTPUTS + 4;
    static constexpr u32 SHARED = STAGES * STAGE * sizeof(Quad);
    static_assert(ROWS * SUM_PITCH * sizeof(float) <= SHARED);
    static constexpr u32 CHUNKS = ROWS * 8 / THREADS;

    // Tiles `tile ..` (the last of the matrix is `last`), from unit `first` on, slices `slice_from .. slice_to`,
    // by rows `row(0 .. ROWS)`, null where there is none, from column 0 on. Leaves sums in shared memory:
    // [ROWS][SUM_PITCH].
    template <class Row, class Depend>
    __device__ static __forceinline__ float* product(const Tiles<F>& w, u32 tile, u32 last, u32 first, Row row,
                                                           u32 columns, bool aligned, const Slices& slices,
                                                           u32 slice_from, u32 slice_to, Depend depend) {
        const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
        const u32 tile_at = warp_id() % WARPS_ALONG_TILES * MT, row_at = warp_id() / WARPS_ALONG_TILES * NT * 8;
        const u32 unit_from = slices.from(slice_from), unit_to = least(slices.from(slice_to), slices.units);
        const u32 units = unit_to - unit_from, ring = shared_address(pool);

        // Of every unit a thread copies some quads of the weights and some of the rows, always at the same places.
        u32 quads[TILES * UNIT_QUADS / THREADS];
#pragma unroll
        for (u32 i = 0; i < TILES * UNIT_QUADS / THREADS; ++i) {
            const u32 at = i * THREADS + threadIdx.x;
            quads[i] = (least(tile + at / UNIT_QUADS, last) * w.units + first + unit_from) * UNIT_QUADS + at % UNIT_QUADS;
        }
        const auto copy_weights = [&](u32 step, u32 stage) {
#pragma unroll
            for (u32 i = 0; i < TILES * UNIT_QUADS / THREADS; ++i)
                copy_async(ring + (stage * STAGE + i * THREADS + threadIdx.x) * 16,
                           w.codes + quads[i] + step * UNIT_QUADS, true);
        };
#pragma unroll
        for (u32 step = 0; step + 1 < STAGES; ++step)
            if (step < units) copy_weights(step, step);
        depend();
        const bf16* rows[CHUNKS];
#pragma unroll
        for (u32 i = 0; i < CHUNKS; ++i) rows[i] = row(i * (THREADS / 8) + threadIdx.x / 8);
        const auto copy_rows = [&](u32 step, u32 stage) {
            const u32 at = (unit_from + step) * UNIT + threadIdx.x % 8 * 8;
            const u32 to = stage * STAGE + TILES * UNIT_QUADS + threadIdx.x / 8 * PITCH + threadIdx.x % 8;
#pragma unroll
            for (u32 i = 0; i < CHUNKS; ++i) {
                const bool live = rows[i] != nullptr && at < columns;
                const u32 place = to + i * (THREADS / 8) * PITCH;
                if (!live || (aligned && at + 8 <= columns)) {
                    copy_async(ring + place * 16, live ? (const void*)(rows[i] + at) : w.codes, live);
                } else {
#pragma unroll 1
                    for (u32 e = 0; e < 8; ++e)
                        ((bf16*)(pool + place))[e] = at + e < columns ? rows[i][at + e] : bf16{0};
                }
            }
        };
#pragma unroll
        for (u32 step = 0; step + 1 < STAGES; ++step) {
            if (step < units) copy_rows(step, step);
            copy_commit();
        }

        float sums[MT][NT][4] = {}, total[MT][NT][4];
        if constexpr (SLICED) {
            // The one number that adds up with every other to that other, zeros of either sign included.
#pragma unroll
            for (u32 i = 0; i < MT * NT * 4; ++i) total[i / 4 / NT][i / 4 % NT][i % 4] = -0.0f;
        }
        u32 left = slices.per;
        u32 stage = 0, next = STAGES - 1;
        Run<F> runs[MT];
        typename F::Scale scales[MT];
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            runs[m] = w.run(least(tile + tile_at + m, last), first + unit_from);
            scales[m] = F::scale(runs[m].scales, 0);
        }
#pragma unroll 1
        for (u32 step = 0; step < units; ++step) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < units) {
                copy_weights(step + STAGES - 1, next);
                copy_rows(step + STAGES - 1, next);
            }
            copy_commit();
            const u32 tiles = ring + (stage * STAGE + tile_at * UNIT_QUADS + lane) * 16;
            const u32 strips = ring + (stage * STAGE + TILES * UNIT_QUADS + (row_at + g) * PITCH + t * 2) * 16;
            next = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            typename F::Scale ahead[MT];
#pragma unroll
            for (u32 m = 0; m < MT; ++m) ahead[m] = F::scale(runs[m].scales, step + 1 < units ? step + 1 : step);
            // Elements come a product at a time; codes, which are fewer, all at once.
            Quad codes[MT][F::QUADS];
            if constexpr (F::QUADS < 4) {
#pragma unroll
                for (u32 m = 0; m < MT; ++m)
#pragma unroll
                    for (u32 i = 0; i < F::QUADS; ++i) codes[m][i] = load_shared(tiles + (m * UNIT_QUADS + i * 32) * 16);
            }
            float parts[MT][NT][4] = {};
            float(&to)[MT][NT][4] = F::SCALED ? parts : sums;
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                Quad x[NT];
#pragma unroll
                for (u32 n = 0; n < NT; ++n) x[n] = load_shared(strips + (n * 8 * PITCH + h) * 16);
#pragma unroll
                for (u32 m = 0; m < MT; ++m)
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        Quad a;
                        if constexpr (F::QUADS == 4) a = load_shared(tiles + (m * UNIT_QUADS + (h * 2 + j) * 32) * 16);
                        else a = F::fragment(codes[m], scales[m], h * 2 + j);
#pragma unroll
                        for (u32 n = 0; n < NT; ++n)
                            mma(to[m][n], a.word[0], a.word[1], a.word[2], a.word[3], x[n].word[j * 2],
                                x[n].word[j * 2 + 1]);
                    }
            }
#pragma unroll
            for (u32 m = 0; m < MT; ++m) {
#pragma unroll
                for (u32 n = 0; n < NT; ++n) add_scaled<F>(sums[m][n], parts[m][n], scales[m]);
                scales[m] = ahead[m];
            }
            if (SLICED && (--left == 0 || step + 1 == units)) {
#pragma unroll
                for (u32 i = 0; i < MT * NT * 4; ++i) {
                    float &sum = total[i / 4 / NT][i / 4 % NT][i % 4], &slice = sums[i / 4 / NT][i / 4 % NT][i % 4];
                    sum = add(sum, slice);
                    slice = 0.0f;
                }
                left = slices.per;
            }
        }
        const float(&made)[MT][NT][4] = SLICED ? total : sums;
        copy_wait<0>();
        __syncthreads();
        float* const out = (float*)pool;
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            const Halves numbers = w.whole(least(tile + tile_at + m, last));
#pragma unroll
            for (u32 i = 0; i < NT * 4; ++i) {
                const u32 n = i / 4, c = i % 4;
                out[(row_at + n * 8 + t * 2 + c % 2) * SUM_PITCH + (tile_at + m) * TILE + g + c / 2 * 8] =
                    whole<F>(made[m][n][c], c < 2 ? numbers.low : numbers.high);
            }
        }
        __syncthreads();
        return out;
    }
};

// The usual form: 128 outputs by 64 rows.
typedef Wide<Bf16, 8, 64, 4, 3> Panel;
// 128 outputs by 32 rows: where the operands take more registers, or rows are few.
template <class F> using Part = Wide<F, 8, 32, 8, 4>;
