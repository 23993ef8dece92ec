// The body of the twins of kernels/src/linear.rs, which holds the contracts, for every format of the weights.
#pragma once
#include "tiles.cuh"

struct Args {
    const bf16* x;
    const void* w;
    void* y;
    u32 rows, inner, outputs, stride, cuts, offset;
};

constexpr u32 WARPS = 8;
constexpr u32 SLICES = 8;
// Rows of a block of linear_cut.
constexpr u32 CUT_ROWS = 16;

__device__ __forceinline__ void put(bf16* y, float sum) { *y = narrow(sum); }
__device__ __forceinline__ void put(float* y, float sum) { *y = sum; }

// Units that a warp holds for so many tiles of rows: as many as there are registers for.
template <class F> __device__ constexpr u32 depth(u32 nt, u32 wanted) { return F::QUADS == 4 ? nt > 2 ? 2 : wanted : nt > 2 ? 3 : 5; }

// Tiles blockIdx.x, blockIdx.x + gridDim.x, ... by up to 8 * NT rows of `x`, for cut blockIdx.y.
template <class F, class Y, u32 NT, u32 DEPTH>
__device__ __forceinline__ void some(const Args& a, const Tiles<F>& w, const Rows& x, const Slices& slices, Y* y) {
    narrow_products<F, NT, WARPS, DEPTH, least(DEPTH, 3)>(
        w, blockIdx.x, ceil_div(a.outputs, TILE), gridDim.x, blockIdx.y * slices.units, x, slices, Depend(),
        [&](u32 tile, u32 g, u32 r, float low, float high) {
            const u32 output = tile * TILE + g;
            Y* const to = y + (u64)r * a.stride + output;
            if (output < a.outputs) put(to, low);
            if (output + 8 < a.outputs) put(to + 8, high);
        });
}

// The tiles of this block by the MOST rows of block blockIdx.z, for cut blockIdx.y where a layer is CUT, with WANTED
// units of elements on their way in each warp.
template <class F, class Y, bool CUT, u32 MOST, u32 WANTED> __device__ __forceinline__ void few(const Args& a) {
    const u32 cuts = CUT ? a.cuts : 1, width = a.inner / cuts, cut = CUT ? blockIdx.y : 0, first = blockIdx.z * MOST;
    const Slices slices(width, SLICES);
    const Tiles<F> w(a.w, ceil_div(a.outputs, TILE), slices.units * cuts);
    const Rows x{a.x + (u64)first * a.inner + cut * width, a.inner, least(a.rows - first, MOST), width};
    Y* const y = (Y*)a.y + ((u64)cut * a.rows + first) * a.stride;
    if (x.count <= 8) some<F, Y, 1, depth<F>(1, WANTED)>(a, w, x, slices, y);
    else if (x.count <= 16) some<F, Y, 2, depth<F>(2, WANTED)>(a, w, x, slices, y);
    else if constexpr (MOST > 16) some<F, Y, 4, depth<F>(4, WANTED)>(a, w, x, slices, y);
}

// Panel blockIdx.x, row panels first, for cut blockIdx.y where a layer is CUT.
template <class F, class Y, bool CUT, class Panel> __device__ __forceinline__ void many(const Args& a) {
    const u32 cuts = CUT ? a.cuts : 1, width = a.inner / cuts, cut = CUT ? blockIdx.y : 0, panels = ceil_div(a.rows, Panel::ROWS);
    const u32 first = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const Slices slices(width, SLICES);
    const Tiles<F> w(a.w, ceil_div(a.outputs, TILE), slices.units * cuts);
    const Rows x{a.x + (u64)first * a.inner + cut * width, a.inner, least(a.rows - first, Panel::ROWS), width};
    const float* const sums = Panel::product(
        w, tile, ceil_div(a.outputs, TILE) - 1, cut * slices.units, [&](u32 i) { return x.row(i); }, width,
        x.aligned(), slices, 0, slices.count, Depend());
    Y* const y = (Y*)a.y + ((u64)cut * a.rows + first) * a.stride;
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 o = lane_id(); o < Panel::OUTPUTS && tile * TILE + o < a.outputs; o += 32)
            put(y + (u64)r * a.stride + tile * TILE + o, sums[r * Panel::SUM_PITCH + o]);
}
