// The twins of kernels/src/affine.rs, which holds the contract. A block takes 128 outputs of 96 rows: blocks of the
// same outputs come one after another.
#include "few.cuh"
#include "tiles.cuh"

struct Args {
    const bf16* x;
    const void* w;
    const bf16* bias;
    bf16* y;
    u32 rows, inner, outputs, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_affine);
static_assert(sizeof(Args) == ARGS_BYTES_affine_tanh);
static_assert(sizeof(Args) == ARGS_BYTES_affine_erf);
static_assert(sizeof(Args) == ARGS_BYTES_affine_add);

constexpr u32 AFFINE_ROWS = 96;
typedef Wide<Bf16, 8, AFFINE_ROWS, 4, 3, false> Block;

struct Sum {
    static constexpr bool ADDS = false;
    __device__ static float of(float sum, float) { return sum; }
};
struct Tanh {
    static constexpr bool ADDS = false;
    __device__ static float of(float sum, float) { return gelu_tanh(sum); }
};
struct Erf {
    static constexpr bool ADDS = false;
    __device__ static float of(float sum, float) { return gelu_erf(sum); }
};
struct Added {
    static constexpr bool ADDS = true;
    __device__ static float of(float sum, float before) { return add(before, sum); }
};

template <class Finish> __device__ __forceinline__ void layer(const Args& a) {
    const u32 panels = ceil_div(a.rows, Block::ROWS), tiles = ceil_div(a.outputs, TILE);
    const u32 first = blockIdx.x % panels * Block::ROWS, tile = blockIdx.x / panels * Block::TILES;
    const Slices whole_sum(a.inner, 1);
    const Tiles<Bf16> w(a.w, tiles, whole_sum.units);
    const Rows x{a.x + (u64)first * a.inner, a.inner, least(a.rows - first, Block::ROWS), a.inner};
    const float* const sums = Block::product(
        w, tile, tiles - 1, 0, [&](u32 i) { return x.row(i); }, a.inner, x.aligned(), whole_sum, 0, 1, Depend());

    // A lane takes four neighbouring outputs of every eighth row.
    const u32 here = lane_id() * 4, output = tile * TILE + here;
    if (output >= a.outputs) return;
    const Few<4> bias = load_few<4>(a.bias, output, a.outputs, whole<4>(a.bias, a.outputs));
    const bool smooth = whole<4>(a.y, a.outputs);
#pragma unroll 1
    for (u32 r = warp_id(); r < x.count; r += Block::WARPS) {
        bf16* const y = a.y + (u64)(first + r) * a.outputs;
        const float* const sum = sums + r * Block::SUM_PITCH + here;
        Few<4> held = {};
        if constexpr (Finish::ADDS) held = load_few<4>(y, output, a.outputs, smooth);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) held.value[e] = Finish::of(add(sum[e], bias.value[e]), held.value[e]);
        store_few<4>(y, output, a.outputs, smooth, held);
    }
}

constexpr u32 THREADS = Block::THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, 2) affine(Args a) { layer<Sum>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) affine_tanh(Args a) { layer<Tanh>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) affine_erf(Args a) { layer<Erf>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) affine_add(Args a) { layer<Added>(a); }
