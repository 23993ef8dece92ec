// The twin of kernels/src/tiles.rs, which holds the contract. One block per unit.
#include "tiles.cuh"

struct Args {
    const bf16* from;
    bf16* to;
    u32 outputs, groups, columns, cuts;
};
static_assert(sizeof(Args) == ARGS_BYTES_pack);

extern "C" __global__ void __launch_bounds__(128) pack(Args a) {
    follow();
    const u32 width = a.columns / a.cuts, units_of_cut = ceil_div(width, UNIT), units = units_of_cut * a.cuts;
    const u32 unit = blockIdx.x % units, tile = blockIdx.x / units;
    u32 groups = 1;
    while (groups < a.groups) groups *= 2;
    const u32 per_tile = TILE / groups, lane = lane_id(), j = warp_id();

    Quad packed = {};
#pragma unroll
    for (u32 e = 0; e < 8; ++e) {
        const u32 row = lane / 4 + e / 2 % 2 * 8, group = row / per_tile;
        const u64 output = (u64)tile * per_tile + row % per_tile;
        const u32 column = unit % units_of_cut * UNIT + lane % 4 * 16 + j * 4 + e % 2 + e / 4 * 2;
        if (group >= a.groups || output >= a.outputs || column >= width) continue;
        const u64 at = (group * a.outputs + output) * a.columns + unit / units_of_cut * width + column;
        packed.word[e / 2] |= (u32)a.from[at].bits << 16 * (e % 2);
    }
    ((Quad*)a.to)[(u64)blockIdx.x * UNIT_QUADS + j * 32 + lane] = packed;
}
