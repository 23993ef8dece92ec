// The twins of kernels/src/hyper.rs, which holds the contracts.
#include "tiles.cuh"

struct DownArgs {
    const bf16* normed;
    const bf16* down;
    float* parts;
    u32* tickets;
    bf16* low;
    float* inject;
    u32 rows, streams, hidden, rank;
};
static_assert(sizeof(DownArgs) == ARGS_BYTES_hyper_down);
static_assert(sizeof(DownArgs) == ARGS_BYTES_hyper_down_prompt);

struct UpArgs {
    const bf16* low;
    const bf16* up;
    const bf16* normed;
    bf16* mixed;
    u32 rows, streams, hidden, rank;
};
static_assert(sizeof(UpArgs) == ARGS_BYTES_hyper_up);
static_assert(sizeof(UpArgs) == ARGS_BYTES_hyper_up_prompt);

constexpr u32 WARPS = 8;
// Slices of the long sum at most: 8 for every block that shares it.
constexpr u32 DOWN_SLICES = 80;
constexpr u32 UP_WARPS = 4;

// Stores one sum of output `output` and row `row`.
__device__ __forceinline__ void put(const DownArgs& a, u32 output, u32 row, float sum) {
    const float mean = div(r16(sum), (float)a.streams);
    if (output < a.rank) a.low[(u64)row * a.rank + output] = narrow(silu(mean));
    else a.inject[(u64)row * a.streams + output - a.rank] = mul(2.0f, sigmoid(mean));
}

// Whether this block is the last of those that share a sum: all their parts can be read then. Ready for the
// next launch afterwards.
__device__ __forceinline__ bool last_to_come(u32* ticket, u32 blocks) {
    __shared__ u32 came;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        came = atomicAdd(ticket, 1);
        if (came + 1 == blocks) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return came + 1 == blocks;
}

// The sum of the parts of one output and row, in order. `outputs` of each row lie together.
__device__ __forceinline__ float whole(const DownArgs& a, u32 output, u32 row, u32 outputs) {
    float sum = 0.0f;
    for (u32 split = 0; split < gridDim.y; ++split) {
        const float part = __ldcg(a.parts + ((u64)split * a.rows + row) * outputs + output);
        sum = split == 0 ? part : add(sum, part);
    }
    return sum;
}

template <u32 NT>
__device__ __forceinline__ void down_some(const DownArgs& a, const Quad* tile, const Rows& x, const Slices& slices,
                                          u32 first_row, u32 outputs) {
    const u32 first = blockIdx.x * TILE;
    narrow_product<NT, WARPS, 2>(tile, x, slices, blockIdx.y * WARPS, Depend(),
                                 [&](u32 g, u32 r, float low, float high) {
                                     const u64 row = first_row + r;
                                     if (gridDim.y == 1) {
                                         if (first + g < outputs) put(a, first + g, row, low);
                                         if (first + g + 8 < outputs) put(a, first + g + 8, row, high);
                                         return;
                                     }
                                     float* const part = a.parts + (blockIdx.y * a.rows + row) * outputs + first + g;
                                     if (first + g < outputs) part[0] = low;
                                     if (first + g + 8 < outputs) part[8] = high;
                                 });
    if (gridDim.y == 1) return;
    if (!last_to_come(a.tickets + blockIdx.z * gridDim.x + blockIdx.x, gridDim.y)) return;
    for (u32 i = threadIdx.x; i < TILE * x.count; i += WARPS * 32) {
        const u32 output = first + i % TILE, row = first_row + i / TILE;
        if (output < outputs) put(a, output, row, whole(a, output, row, outputs));
    }
}

// Tile blockIdx.x, eight slices from 8 * blockIdx.y on, the rows of block blockIdx.z.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) hyper_down(DownArgs a) {
    const u32 width = a.streams * a.hidden, first = blockIdx.z * NARROW_ROWS;
    const u32 outputs = a.rank + (a.inject ? a.streams : 0);
    const Slices slices(width, DOWN_SLICES);
    const Quad* const tile = Tiles(a.down, slices.units).unit(blockIdx.x, 0);
    const Rows x{a.normed + (u64)first * width, width, least(a.rows - first, NARROW_ROWS), width};
    if (x.count <= 8) down_some<1>(a, tile, x, slices, first, outputs);
    else if (x.count <= 16) down_some<2>(a, tile, x, slices, first, outputs);
    else down_some<4>(a, tile, x, slices, first, outputs);
}

// Panel blockIdx.x, row panels first, eight slices from 8 * blockIdx.y on.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) hyper_down_prompt(DownArgs a) {
    const u32 width = a.streams * a.hidden, panels = ceil_div(a.rows, Panel::ROWS);
    const u32 first_row = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const u32 outputs = a.rank + (a.inject ? a.streams : 0), first = tile * TILE;
    const Slices slices(width, DOWN_SLICES);
    const Rows x{a.normed + (u64)first_row * width, width, least(a.rows - first_row, Panel::ROWS), width};
    const float* const sums = Panel::product(
        Tiles(a.down, slices.units), tile, ceil_div(outputs, TILE) - 1, 0, [&](u32 i) { return x.row(i); }, width,
        x.aligned(), slices, blockIdx.y * WARPS, least(blockIdx.y * WARPS + WARPS, slices.count), Depend());
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 o = lane_id(); o < Panel::OUTPUTS && first + o < outputs; o += 32)
            a.parts[((u64)blockIdx.y * a.rows + first_row + r) * outputs + first + o] = sums[r * Panel::SUM_PITCH + o];
    if (!last_to_come(a.tickets + blockIdx.x, gridDim.y)) return;
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 o = lane_id(); o < Panel::OUTPUTS && first + o < outputs; o += 32)
            put(a, first + o, first_row + r, whole(a, first + o, first_row + r, outputs));
}

// Tiles hold the same outputs of all streams: `per` of them, stream by stream.
__device__ __forceinline__ u32 outputs_per_tile(u32 streams) {
    u32 groups = 1;
    while (groups < streams) groups *= 2;
    return TILE / groups;
}

// Mixes one output of one row: `sums` are those of the first stream, `pitch` apart for the others.
__device__ __forceinline__ void mix(const UpArgs& a, u32 output, u32 row, const float* sums, u32 pitch) {
    const bf16* const n = a.normed + (u64)row * a.streams * a.hidden + output;
    float mixed = 0.0f;
    for (u32 stream = 0; stream < a.streams; ++stream)
        mixed = add(mixed, mul(sigmoid(r16(sums[stream * pitch])), widen(n[stream * a.hidden])));
    a.mixed[(u64)row * a.hidden + output] = narrow(div(mixed, (float)a.streams));
}

// A tile per warp, its sum in one slice.
template <u32 NT> __device__ __forceinline__ void up_some(const UpArgs& a, u32 first_row, u32 rows) {
    const u32 lane = lane_id(), per = outputs_per_tile(a.streams), tiles = ceil_div(a.hidden, per);
    const u32 tile = blockIdx.x * UP_WARPS + warp_id();
    const Slices slices(a.rank, 1);
    Stream<NT == 1 ? 5 : NT == 2 ? 4 : 3> weights(Tiles(a.up, slices.units).unit(least(tile, tiles - 1), 0), slices.units);
    follow();
    const Rows low{a.low + (u64)first_row * a.rank, a.rank, rows, a.rank};
    const bf16* x[NT];
#pragma unroll
    for (u32 n = 0; n < NT; ++n) x[n] = low.row(n * 8 + lane / 4);
    float sums[NT][4] = {};
    weights.multiply(sums, x, 0, a.rank, low.aligned());
    if (tile >= tiles) return;

    constexpr u32 PITCH = NT * 8 + 1;
    float* const mine = (float*)pool + warp_id() * TILE * PITCH;
#pragma unroll
    for (u32 v = 0; v < NT * 4; ++v)
        mine[(lane / 4 + v % 4 / 2 * 8) * PITCH + v / 4 * 8 + lane % 4 * 2 + v % 2] = sums[v / 4][v % 4];
    __syncwarp();
    for (u32 i = lane; i < per * rows; i += 32) {
        const u32 r = i / per, o = i % per;
        if (tile * per + o < a.hidden) mix(a, tile * per + o, first_row + r, mine + o * PITCH + r, per * PITCH);
    }
}

// Four tiles by the rows of block blockIdx.y.
extern "C" __global__ void __launch_bounds__(UP_WARPS * 32, 4) hyper_up(UpArgs a) {
    const u32 first = blockIdx.y * NARROW_ROWS, rows = least(a.rows - first, NARROW_ROWS);
    if (rows <= 8) up_some<1>(a, first, rows);
    else if (rows <= 16) up_some<2>(a, first, rows);
    else up_some<4>(a, first, rows);
}

// Panel blockIdx.x, row panels first.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) hyper_up_prompt(UpArgs a) {
    const u32 panels = ceil_div(a.rows, Panel::ROWS), per = outputs_per_tile(a.streams);
    const u32 first_row = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const Slices slices(a.rank, 1);
    const Rows x{a.low + (u64)first_row * a.rank, a.rank, least(a.rows - first_row, Panel::ROWS), a.rank};
    const float* const sums = Panel::product(
        Tiles(a.up, slices.units), tile, ceil_div(a.hidden, per) - 1, 0, [&](u32 i) { return x.row(i); }, a.rank,
        x.aligned(), slices, 0, slices.count, Depend());
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 i = lane_id(); i < Panel::TILES * per; i += 32) {
            const u32 output = tile * per + i;
            const float* const of = sums + r * Panel::SUM_PITCH + i / per * TILE + i % per;
            if (output < a.hidden) mix(a, output, first_row + r, of, per);
        }
}
