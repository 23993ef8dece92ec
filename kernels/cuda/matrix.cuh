// The matrix product of every kernel: y[r, o] = sum over k of w[o, k] * x[r, k] on tensor cores.
//
// One order of summation, a function of the number of columns alone. Columns are cut into units of 64 and
// the units into at most `SLICES` runs of equal length. A slice is summed unit by unit, a unit in four
// products of 16 columns: lane t owns columns 16t .. 16t + 15 and product j takes 16t + 4j .. 16t + 4j + 3.
// The slices are then added in order. Columns past the last are zero.
//
// Weights are the 16-wide side of a product, rows the 8-wide one. Two ways to walk give the same bits:
// narrow (one warp per slice, few rows) and wide (tiles of 64 outputs by 64 rows, all slices in turn).
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr u32 UNIT = 64;
constexpr u32 WIDE = 64;
constexpr u32 PITCH = UNIT + 8;
constexpr u32 NARROW_ROWS = 32;

extern __shared__ Quad pool[];

// A row-major matrix, or some columns of one.
struct Matrix {
    const bf16* base;
    u64 pitch;
    u32 rows, columns;

    __device__ const bf16* row(u32 i) const { return base + i * pitch; }
    // Whether 16 bytes can be read at every eighth column.
    __device__ bool aligned() const { return aligned16(base) && pitch % 8 == 0 && columns % 8 == 0; }
};

// How the columns of a sum are cut.
template <u32 SLICES> struct Slices {
    u32 units, per, count;

    __device__ explicit Slices(u32 columns) {
        units = ceil_div(columns, UNIT);
        per = ceil_div(units, SLICES);
        count = ceil_div(units, per);
    }
};

// Sixteen columns of one row: what a lane owns of a unit.
struct Strip {
    Quad half[2];
};

template <bool STREAM> __device__ __forceinline__ Strip strip_of(const bf16* from) {
    if constexpr (STREAM) return Strip{load_weight(from), load_weight(from + 8)};
    return Strip{((const Quad*)from)[0], ((const Quad*)from)[1]};
}

// As `strip_of`, for rows of any alignment and length, null rows included.
__device__ inline Strip ragged_strip(const bf16* row, u32 from, u32 columns) {
    Strip strip = {};
    if (row == nullptr) return strip;
#pragma unroll
    for (u32 i = 0; i < 16; ++i)
        if (from + i < columns) strip.half[i / 8].word[i % 8 / 2] |= (u32)row[from + i].bits << 16 * (i % 2);
    return strip;
}

__device__ __forceinline__ void add_unit(float (&sum)[4], const Strip& low, const Strip& high, const Strip& x) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        const u32 h = j / 2, w = j % 2 * 2;
        mma(sum, low.half[h].word[w], high.half[h].word[w], low.half[h].word[w + 1], high.half[h].word[w + 1],
            x.half[h].word[w], x.half[h].word[w + 1]);
    }
}

// Adds units `from .. to` to the sums of MT tiles of 16 weight rows by NT tiles of 8 rows. `low` and `high`
// are this lane's weight rows g and g + 8 of each tile, `x` its row g of each row tile, null past the last.
// STREAM: the weights are not read again soon.
template <u32 MT, u32 NT, bool STREAM = true>
__device__ __forceinline__ void add_units(float (&sums)[MT][NT][4], const bf16* const (&low)[MT],
                                          const bf16* const (&high)[MT], const bf16* const (&x)[NT], u32 from, u32 to,
                                          u32 columns, bool aligned) {
    const u32 mine = lane_id() % 4 * 16;
    const u32 whole = aligned ? least(to, columns / UNIT) : from;
    u32 unit = from;
#pragma unroll(MT * NT >= 4 ? 1 : 2)
    for (; unit < whole; ++unit) {
        const u32 at = unit * UNIT + mine;
        Strip lows[MT], highs[MT];
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            lows[m] = strip_of<STREAM>(low[m] + at);
            highs[m] = strip_of<STREAM>(high[m] + at);
        }
#pragma unroll
        for (u32 n = 0; n < NT; ++n) {
            Strip row = {};
            if (x[n]) row = strip_of<false>(x[n] + at);
#pragma unroll
            for (u32 m = 0; m < MT; ++m) add_unit(sums[m][n], lows[m], highs[m], row);
        }
    }
#pragma unroll 1
    for (; unit < to; ++unit) {
        const u32 at = unit * UNIT + mine;
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            const Strip lows = ragged_strip(low[m], at, columns), highs = ragged_strip(high[m], at, columns);
#pragma unroll
            for (u32 n = 0; n < NT; ++n) add_unit(sums[m][n], lows, highs, ragged_strip(x[n], at, columns));
        }
    }
}

// Narrow: MT tiles of 16 outputs by 8 * NT rows, one warp per slice. `weight(m, i)` is the weight row of output
// i of tile m, any readable row if there is none; `row(i)` is row i, null if there is none. Calls
// `store(slot, i, r, sums)` for output i of every tile and row r, once by some thread whose `slot`-th it is.
template <u32 MT, u32 NT, u32 WARPS, class Weight, class Row, class Store>
__device__ __forceinline__ void narrow_product(u32 columns, bool aligned, Weight weight, Row row, Store store) {
    const u32 lane = lane_id(), g = lane / 4;
    const Slices<WARPS> slices(columns);
    const bf16 *low[MT], *high[MT], *x[NT];
    float sums[MT][NT][4] = {};
#pragma unroll
    for (u32 m = 0; m < MT; ++m) {
        low[m] = weight(m, g);
        high[m] = weight(m, g + 8);
    }
#pragma unroll
    for (u32 n = 0; n < NT; ++n) x[n] = row(n * 8 + g);
    const u32 from = warp_id() * slices.per;
    add_units<MT, NT>(sums, low, high, x, from, least(from + slices.per, slices.units), columns, aligned);

    constexpr u32 VALUES = NT * 4;
    float* const partial = (float*)pool;
#pragma unroll
    for (u32 m = 0; m < MT; ++m)
#pragma unroll
        for (u32 v = 0; v < VALUES; ++v)
            partial[((warp_id() * MT + m) * VALUES + v) * 32 + lane] = sums[m][v / 4][v % 4];
    __syncthreads();
    constexpr u32 SLOTS = ceil_div(VALUES, WARPS);
#pragma unroll
    for (u32 slot = 0; slot < SLOTS; ++slot) {
        const u32 v = slot * WARPS + warp_id();
        if (v >= VALUES) continue;
        float total[MT];
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            total[m] = partial[(m * VALUES + v) * 32 + lane];
            for (u32 slice = 1; slice < slices.count; ++slice)
                total[m] = add(total[m], partial[((slice * MT + m) * VALUES + v) * 32 + lane]);
        }
        store(slot, g + v % 4 / 2 * 8, v / 4 * 8 + lane % 4 * 2 + v % 2, total);
    }
    __syncthreads();
}

// Starts the copy of one unit of 64 rows of `m`, from row `first` on, into shared memory.
template <u32 THREADS>
__device__ __forceinline__ void stage(bf16* to, const Matrix& m, u32 first, u32 unit, bool aligned) {
#pragma unroll
    for (u32 i = 0; i < WIDE * 8 / THREADS; ++i) {
        const u32 chunk = i * THREADS + threadIdx.x, row = first + chunk / 8, at = unit * UNIT + chunk % 8 * 8;
        bf16* const place = to + chunk / 8 * PITCH + chunk % 8 * 8;
        const bool inside = row < m.rows;
        if (aligned) {
            const bool live = inside && at < m.columns;
            copy_async(place, live ? m.row(row) + at : m.base, live);
        } else {
            for (u32 e = 0; e < 8; ++e)
                place[e] = inside && at + e < m.columns ? m.row(row)[at + e] : bf16{0};
        }
    }
}

// Wide: outputs `first_output ..` by rows `first_row ..`, 64 of each. Calls `store(slot, output, row, sum)` for
// those that exist.
template <u32 WARPS, class Store>
__device__ __forceinline__ void wide_product(const Matrix& w, const Matrix& x, u32 first_output, u32 first_row,
                                             Store store) {
    // Four warps lie along the rows, 16 each; the others along the outputs.
    constexpr u32 MT = WIDE / 16 * 4 / WARPS, NT = 2, THREADS = WARPS * 32;
    constexpr u32 TILE = WIDE * PITCH;
    const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const u32 output_at = warp_id() / 4 * MT * 16, row_at = warp_id() % 4 * 16;
    const Slices<WARPS> slices(w.columns);
    const bool w_aligned = w.aligned(), x_aligned = x.aligned();
    bf16* const tiles = (bf16*)pool;

    float total[MT][NT][4] = {}, sums[MT][NT][4] = {};
    stage<THREADS>(tiles, w, first_output, 0, w_aligned);
    stage<THREADS>(tiles + TILE, x, first_row, 0, x_aligned);
    copy_commit();
    for (u32 unit = 0; unit < slices.units; ++unit) {
        if (unit + 1 < slices.units) {
            bf16* const next = tiles + (unit + 1) % 2 * 2 * TILE;
            stage<THREADS>(next, w, first_output, unit + 1, w_aligned);
            stage<THREADS>(next + TILE, x, first_row, unit + 1, x_aligned);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        const bf16* const weights = tiles + unit % 2 * 2 * TILE + (output_at + g) * PITCH + t * 16;
        const bf16* const rows = tiles + unit % 2 * 2 * TILE + TILE + (row_at + g) * PITCH + t * 16;
        Strip strips[NT];
#pragma unroll
        for (u32 n = 0; n < NT; ++n) strips[n] = strip_of<false>(rows + n * 8 * PITCH);
#pragma unroll
        for (u32 m = 0; m < MT; ++m) {
            const Strip low = strip_of<false>(weights + m * 16 * PITCH);
            const Strip high = strip_of<false>(weights + (m * 16 + 8) * PITCH);
#pragma unroll
            for (u32 n = 0; n < NT; ++n) add_unit(sums[m][n], low, high, strips[n]);
        }
        const bool first = unit < slices.per;
        if ((unit + 1) % slices.per == 0 || unit + 1 == slices.units) {
#pragma unroll
            for (u32 i = 0; i < MT * NT * 4; ++i) {
                float &whole = total[i / 8][i / 4 % 2][i % 4], &slice = sums[i / 8][i / 4 % 2][i % 4];
                whole = first ? slice : add(whole, slice);
                slice = 0.0f;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < MT * NT * 4; ++i) {
        const u32 m = i / 8, n = i / 4 % 2, c = i % 4;
        const u32 output = first_output + output_at + m * 16 + g + c / 2 * 8;
        const u32 row = first_row + row_at + n * 8 + t * 2 + c % 2;
        if (output < w.rows && row < x.rows) store(i, output, row, total[m][n][c]);
    }
}

// Values that one thread stores of a tile at most.
constexpr u32 SLOTS = 16;

// Outputs per tile of a product of so many rows; rows per tile. The host's grid counts the same tiles.
__device__ __forceinline__ u32 tile_outputs(u32 rows) { return rows <= NARROW_ROWS ? 16 : WIDE; }
__device__ __forceinline__ u32 row_tiles(u32 rows) { return rows <= NARROW_ROWS ? 1 : ceil_div(rows, WIDE); }

template <u32 NT, u32 WARPS, class Store>
__device__ __forceinline__ void narrow_tile(const Matrix& w, const Matrix& x, u32 first_output, Store store) {
    const auto weight = [&](u32, u32 i) { return w.row(least(first_output + i, w.rows - 1)); };
    const auto row = [&](u32 i) { return i < x.rows ? x.row(i) : nullptr; };
    narrow_product<1, NT, WARPS>(w.columns, w.aligned() && x.aligned(), weight, row,
                                 [&](u32 slot, u32 i, u32 r, const float(&sum)[1]) {
                                     const u32 output = first_output + i;
                                     if (output < w.rows && r < x.rows) store(slot, output, r, sum[0]);
                                 });
}

// Tile `tile` of all outputs and rows, row tiles first.
template <u32 WARPS, class Store>
__device__ __forceinline__ void product_tile(const Matrix& w, const Matrix& x, u32 tile, Store store) {
    if (x.rows <= 8) {
        narrow_tile<1, WARPS>(w, x, tile * 16, store);
    } else if (x.rows <= 16) {
        narrow_tile<2, WARPS>(w, x, tile * 16, store);
    } else if (x.rows <= NARROW_ROWS) {
        narrow_tile<4, WARPS>(w, x, tile * 16, store);
    } else {
        const u32 along = row_tiles(x.rows);
        wide_product<WARPS>(w, x, tile / along * WIDE, tile % along * WIDE, store);
    }
}
