// The twins of kernels/src/tiles.rs, which holds the contract. One block per unit, a warp for each product j.
#include "formats.cuh"

struct Place {
    u8* codes;
    u8* scales;
    u8* globals;
};

struct Args {
    Place from, to;
    u32 outputs, groups, columns, cuts, count, offset;
};
static_assert(sizeof(Args) == ARGS_BYTES_pack);
static_assert(sizeof(Args) == ARGS_BYTES_pack_fp8);
static_assert(sizeof(Args) == ARGS_BYTES_pack_nvfp4);

// The unit of a block: where its numbers come from.
struct Unit {
    u32 width, units_of_cut, units, tiles, per_tile, matrix, tile, unit, groups, outputs, columns, rows;

    __device__ explicit Unit(const Args& a) {
        width = a.columns / a.cuts, units_of_cut = ceil_div(width, UNIT), units = units_of_cut * a.cuts;
        u32 shared_by = 1;
        while (shared_by < a.groups) shared_by *= 2;
        per_tile = TILE / shared_by;
        tiles = ceil_div(a.outputs, per_tile);
        unit = blockIdx.x % units, tile = blockIdx.x / units % tiles, matrix = blockIdx.x / units / tiles;
        groups = a.groups, outputs = a.outputs, columns = a.columns, rows = a.groups * a.outputs;
    }
    // Row g + 8 * upper of the tile in its matrix; false where there is none.
    __device__ bool row(u32 upper, u64& row) const {
        const u32 of_tile = lane_id() / 4 + 8 * upper, group = of_tile / per_tile;
        const u64 output = (u64)tile * per_tile + of_tile % per_tile;
        row = group * (u64)outputs + output;
        return group < groups && output < outputs;
    }
    // Column c of product j of this lane; false where there is none.
    __device__ bool column(u32 j, u32 c, u32& column) const {
        const u32 of_cut = unit % units_of_cut * UNIT + lane_id() % 4 * 16 + j * 4 + c;
        column = unit / units_of_cut * width + of_cut;
        return of_cut < width;
    }
    // The number of this unit among those of all matrices.
    __device__ u64 place() const { return ((u64)matrix * tiles + tile) * units + unit; }
};

extern "C" __global__ void __launch_bounds__(128) pack(Args a) {
    follow();
    const Unit at(a);
    const u32 j = warp_id();
    const bf16* const from = (const bf16*)a.from.codes + (u64)at.matrix * at.rows * at.columns;
    Quad packed = {};
#pragma unroll
    for (u32 e = 0; e < 8; ++e) {
        u64 row;
        u32 column;
        if (!at.row(e / 2 % 2, row) || !at.column(j, e / 4 * 2 + e % 2, column)) continue;
        packed.word[e / 2] |= (u32)from[row * at.columns + column].bits << 16 * (e % 2);
    }
    ((Quad*)a.to.codes)[at.place() * 128 + j * 32 + lane_id()] = packed;
}

extern "C" __global__ void __launch_bounds__(128) pack_fp8(Args a) {
    follow();
    const Unit at(a);
    const u32 j = warp_id(), blocks = ceil_div(a.offset + at.columns, 128);
    const u8* const from = a.from.codes + (u64)at.matrix * at.rows * at.columns;
    u32 words[2] = {};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 c = i / 2, upper = i % 2;
        u64 row;
        u32 column;
        if (!at.row(upper, row) || !at.column(j, c, column)) continue;
        words[c / 2] |= (u32)from[row * at.columns + column] << (16 * (c % 2) + 8 * (1 - upper));
    }
    u32* const to = (u32*)a.to.codes + ((at.place() * 2 + j / 2) * 32 + lane_id()) * 4 + j % 2 * 2;
    to[0] = words[0], to[1] = words[1];
    if (j == 0 && lane_id() == 0) {
        const float* const scales = (const float*)a.from.scales + (u64)at.matrix * at.rows * blocks;
        for (u32 upper = 0; upper < 2; ++upper) {
            u64 row;
            u32 column;
            const bool live = at.row(upper, row) && at.column(0, 0, column);
            ((float*)a.to.scales)[at.place() * 2 + upper] = live ? scales[row * blocks + (a.offset + column) / 128] : 0.0f;
        }
    }
}

// An e4m3 scale as tiles hold it.
__device__ __forceinline__ u32 recoded(u32 e4m3) {
    const u32 exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
    if (exponent > 0) return exponent + 2 << 3 | mantissa;
    if (mantissa == 0) return 0;
    const u32 shift = __clz(mantissa) - 28;
    return 3 - shift << 3 | (mantissa << shift & 7);
}

extern "C" __global__ void __launch_bounds__(128) pack_nvfp4(Args a) {
    follow();
    const Unit at(a);
    const u32 j = warp_id();
    const u8* const from = a.from.codes + (u64)at.matrix * at.rows * (at.columns / 2);
    const u8* const from_scales = a.from.scales + (u64)at.matrix * at.rows * (at.columns / 16);
    u32 word = 0;
    u32 scales[2] = {};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 c = i / 2, upper = i % 2;
        u64 row;
        u32 column;
        if (!at.row(upper, row) || !at.column(j, c, column)) continue;
        const u64 number = row * at.columns + column;
        const u32 code = from[number / 2] >> number % 2 * 4 & 15, scale = from_scales[number / 16];
        scales[upper] = recoded(scale);
        const u32 sign = c / 2 ? (upper ? 14 : 13) : (upper ? 12 : 15);
        const u32 magnitude = c / 2 ? (upper ? 9 : 0) : (upper ? 3 : 6);
        if (scale != 0) word |= (code >> 3 << sign | (code & 7) << magnitude) << 16 * (c % 2);
    }
    ((u32*)a.to.codes)[(at.place() * 32 + lane_id()) * 4 + j] = word;
    if (j > 0) return;
    ((u16*)a.to.scales)[at.place() * 32 + lane_id()] = (u16)(scales[0] | scales[1] << 8);
    if (at.unit > 0 || lane_id() % 4 > 0) return;
    const float* const globals = (const float*)a.from.globals + (u64)at.matrix * at.rows;
    for (u32 upper = 0; upper < 2; ++upper) {
        u64 row;
        const bool live = at.row(upper, row);
        const u64 to = ((u64)at.matrix * at.tiles + at.tile) * TILE + lane_id() / 4 + 8 * upper;
        ((float*)a.to.globals)[to] = live ? mul(128.0f, globals[row]) : 0.0f;
    }
}
