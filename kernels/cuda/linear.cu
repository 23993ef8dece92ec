// The twins of kernels/src/linear.rs, which holds the contracts.
#include "tiles.cuh"

struct Args {
    const bf16* x;
    const bf16* w;
    void* y;
    u32 rows, inner, outputs, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_linear);
static_assert(sizeof(Args) == ARGS_BYTES_linear_wide);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut);
static_assert(sizeof(Args) == ARGS_BYTES_linear_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_wide_prompt);
static_assert(sizeof(Args) == ARGS_BYTES_linear_cut_prompt);

constexpr u32 WARPS = 8;
constexpr u32 SLICES = 8;
// Rows of a block of linear_cut.
constexpr u32 CUT_ROWS = 16;

__device__ __forceinline__ void put(bf16* y, float sum) { *y = narrow(sum); }
__device__ __forceinline__ void put(float* y, float sum) { *y = sum; }

// Tiles blockIdx.x, blockIdx.x + gridDim.x, ... by up to 8 * NT rows of `x`, for cut blockIdx.y.
template <class Y, u32 NT, u32 DEPTH>
__device__ __forceinline__ void some(const Args& a, const Tiles& w, const Rows& x, const Slices& slices, Y* y) {
    narrow_products<NT, WARPS, DEPTH, DEPTH>(w, blockIdx.x, ceil_div(a.outputs, TILE), gridDim.x,
                                             blockIdx.y * slices.units, x, slices, Depend(),
                                             [&](u32 tile, u32 g, u32 r, float low, float high) {
                                                 const u32 output = tile * TILE + g;
                                                 Y* const to = y + (u64)r * a.outputs + output;
                                                 if (output < a.outputs) put(to, low);
                                                 if (output + 8 < a.outputs) put(to + 8, high);
                                             });
}

// The tiles of this block by the MOST rows of block blockIdx.z, for cut blockIdx.y of `CUT`, with DEPTH units of
// weights on their way in each warp.
template <class Y, u32 CUT, u32 MOST, u32 DEPTH> __device__ __forceinline__ void few(const Args& a) {
    const u32 width = a.inner / CUT, cut = blockIdx.y, first = blockIdx.z * MOST;
    const Slices slices(width, SLICES);
    const Tiles w(a.w, slices.units * CUT);
    const Rows x{a.x + (u64)first * a.inner + cut * width, a.inner, least(a.rows - first, MOST), width};
    Y* const y = (Y*)a.y + ((u64)cut * a.rows + first) * a.outputs;
    if (x.count <= 8) some<Y, 1, DEPTH>(a, w, x, slices, y);
    else if (x.count <= 16) some<Y, 2, DEPTH>(a, w, x, slices, y);
    else if constexpr (MOST > 16) some<Y, 4, 2>(a, w, x, slices, y);
}

// Panel blockIdx.x, row panels first, for cut blockIdx.y of `cuts`.
template <class Y> __device__ __forceinline__ void many(const Args& a, u32 cuts) {
    const u32 width = a.inner / cuts, cut = blockIdx.y, panels = ceil_div(a.rows, Panel::ROWS);
    const u32 first = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const Slices slices(width, SLICES);
    const Tiles w(a.w, slices.units * cuts);
    const Rows x{a.x + (u64)first * a.inner + cut * width, a.inner, least(a.rows - first, Panel::ROWS), width};
    const float* const sums = Panel::product(
        w, tile, ceil_div(a.outputs, TILE) - 1, cut * slices.units, [&](u32 i) { return x.row(i); }, width,
        x.aligned(), slices, 0, slices.count, Depend());
    Y* const y = (Y*)a.y + ((u64)cut * a.rows + first) * a.outputs;
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 o = lane_id(); o < Panel::OUTPUTS && tile * TILE + o < a.outputs; o += 32)
            put(y + (u64)r * a.outputs + tile * TILE + o, sums[r * Panel::SUM_PITCH + o]);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) linear(Args a) { few<bf16, 1, NARROW_ROWS, 3>(a); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) linear_wide(Args a) { few<float, 1, NARROW_ROWS, 3>(a); }
// Two cuts of few tiles each: all blocks run at once if there are three to a multiprocessor.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) linear_cut(Args a) { few<float, CUTS, CUT_ROWS, 2>(a); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) linear_prompt(Args a) { many<bf16>(a, 1); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) linear_wide_prompt(Args a) { many<float>(a, 1); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) linear_cut_prompt(Args a) { many<float>(a, CUTS); }
