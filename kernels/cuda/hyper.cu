// The twins of kernels/src/hyper.rs, which holds the contracts.
#include "cluster.cuh"
#include "tiles.cuh"

struct DownArgs {
    const bf16* normed;
    const bf16* down;
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

// Warps of a panel's block.
constexpr u32 WARPS = 8;
// A cluster shares the long sum: each block takes some of its slices, in a decode round a warp for each.
constexpr u32 DOWN_WARPS = 10;
constexpr u32 DOWN_SLICES = CLUSTER * DOWN_WARPS;
// Rows of a block in a decode round.
constexpr u32 DOWN_ROWS = 16;
constexpr u32 UP_WARPS = 4;
// Units that a warp holds.
constexpr u32 UP_UNITS = 5;

// How the long sum is shared: slices of a block, and blocks that have any.
struct Shares {
    Slices slices;
    u32 each, count;

    __device__ Shares(u32 width)
        : slices(width, DOWN_SLICES), each(ceil_div(slices.count, CLUSTER)), count(ceil_div(slices.count, each)) {}
    __device__ u32 from(u32 part) const { return least(part * each, slices.count); }
    __device__ u32 length(u32 part) const { return from(part + 1) - from(part); }
};

// Stores one sum of output `output` and row `row`.
__device__ __forceinline__ void put(const DownArgs& a, u32 output, u32 row, float sum) {
    const float mean = div(r16(sum), (float)a.streams);
    if (output < a.rank) a.low[(u64)row * a.rank + output] = narrow(silu(mean));
    else a.inject[(u64)row * a.streams + output - a.rank] = mul(2.0f, sigmoid(mean));
}

// A tile by up to 8 * NT rows. Every sum is added up by one block, in whose `parts` those of all meet.
template <u32 NT>
__device__ __forceinline__ void down_some(const DownArgs& a, const Rows& x, u32 first_row, u32 outputs,
                                          float (&parts)[CLUSTER][TILE * DOWN_ROWS / RANKS]) {
    const u32 rank = cluster_rank(blockIdx.y), first = blockIdx.x * TILE;
    const Shares shares(x.columns);
    const Tiles<Bf16> w(a.down, gridDim.x, shares.slices.units);
    // A block's memory can be written once it has come.
    cluster_arrive();
    for (u32 part = rank; part < CLUSTER; part += RANKS) {
        const auto depend = [&] {
            follow();
            cluster_wait();
        };
        narrow_product<Bf16, NT, DOWN_WARPS, 2, 2>(w, blockIdx.x, 0, x, shares.slices, shares.from(part), shares.length(part), depend,
                                          [&](u32 g, u32 r, float low, float high) {
                                              const u32 value = r * TILE + g;
                                              float* const to = peer(&parts[part][value / RANKS], value % RANKS);
                                              to[0] = low;
                                              to[8 / RANKS] = high;
                                          });
    }
    cluster_sync();
#pragma unroll 1
    for (u32 i = threadIdx.x; i * RANKS + rank < TILE * x.count; i += DOWN_WARPS * 32) {
        const u32 value = i * RANKS + rank, output = first + value % TILE;
        float sum = parts[0][i];
        for (u32 part = 1; part < shares.count; ++part) sum = add(sum, parts[part][i]);
        if (output < outputs) put(a, output, first_row + value / TILE, sum);
    }
}

// Tile blockIdx.x, the rows of block blockIdx.z.
extern "C" __global__ void CLUSTERED_ALONG_Y __launch_bounds__(DOWN_WARPS * 32, 2) hyper_down(DownArgs a) {
    __shared__ float parts[CLUSTER][TILE * DOWN_ROWS / RANKS];
    if (cluster_rank(blockIdx.y) >= RANKS) return;
    const u32 width = a.streams * a.hidden, first = blockIdx.z * DOWN_ROWS;
    const u32 outputs = a.rank + (a.inject ? a.streams : 0);
    const Rows x{a.normed + (u64)first * width, width, least(a.rows - first, DOWN_ROWS), width};
    if (x.count <= 8) down_some<1>(a, x, first, outputs, parts);
    else down_some<2>(a, x, first, outputs, parts);
}

// Panel blockIdx.x, row panels first.
extern "C" __global__ void CLUSTERED_ALONG_Y __launch_bounds__(WARPS * 32, 2) hyper_down_prompt(DownArgs a) {
    constexpr u32 THREADS = WARPS * 32, OWN = Panel::OUTPUTS * Panel::ROWS / THREADS / RANKS;
    const u32 rank = cluster_rank(blockIdx.y);
    if (rank >= RANKS) return;
    const u32 width = a.streams * a.hidden, panels = ceil_div(a.rows, Panel::ROWS);
    const u32 first_row = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const u32 outputs = a.rank + (a.inject ? a.streams : 0), first = tile * TILE;
    const Shares shares(width);
    const Rows x{a.normed + (u64)first_row * width, width, least(a.rows - first_row, Panel::ROWS), width};
    // The sums that this thread adds up: value i * THREADS + threadIdx.x of those of its block.
    float own[OWN];
    for (u32 part = rank; part < CLUSTER; part += RANKS) {
        float* const sums = Panel::product(
            Tiles<Bf16>(a.down, ceil_div(outputs, TILE), shares.slices.units), tile, ceil_div(outputs, TILE) - 1, 0, [&](u32 i) { return x.row(i); },
            width, x.aligned(), shares.slices, shares.from(part), shares.from(part + 1), Depend());
        cluster_sync();
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            const u32 value = (i * RANKS + rank) * THREADS + threadIdx.x;
            float* const mine = sums + value / Panel::OUTPUTS * Panel::SUM_PITCH + value % Panel::OUTPUTS;
            for (u32 other = part - rank; other < least(part - rank + RANKS, shares.count); ++other) {
                const float sum = *peer(mine, other % RANKS);
                own[i] = other == 0 ? sum : add(own[i], sum);
            }
        }
        // Nobody leaves, or starts anew, while another reads here.
        cluster_sync();
    }
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        const u32 value = (i * RANKS + rank) * THREADS + threadIdx.x;
        const u32 row = value / Panel::OUTPUTS, output = first + value % Panel::OUTPUTS;
        if (row < x.count && output < outputs) put(a, output, first_row + row, own[i]);
    }
}

// Tiles hold the same outputs of all streams: `per` of them, stream by stream.
__device__ __forceinline__ u32 outputs_per_tile(u32 streams) {
    u32 groups = 1;
    while (groups < streams) groups *= 2;
    return TILE / groups;
}

// What a stream brings to an output.
__device__ __forceinline__ float share(float sum, bf16 n) { return mul(sigmoid(r16(sum)), widen(n)); }

// Mixes one output of one row: `sums` are those of the first stream, `pitch` apart for the others.
__device__ __forceinline__ void mix(const UpArgs& a, u32 output, u32 row, const float* sums, u32 pitch) {
    const bf16* const n = a.normed + (u64)row * a.streams * a.hidden + output;
    float mixed = 0.0f;
    for (u32 stream = 0; stream < a.streams; ++stream)
        mixed = add(mixed, share(sums[stream * pitch], n[stream * a.hidden]));
    a.mixed[(u64)row * a.hidden + output] = narrow(div(mixed, (float)a.streams));
}

// A tile per warp, its sum in one slice, by the rows of block blockIdx.y, eight at a time: a lane holds weight rows g
// and g + 8 of the tile by rows 2t and 2t + 1.
extern "C" __global__ void __launch_bounds__(UP_WARPS * 32, 3) hyper_up(UpArgs a) {
    const u32 lane = lane_id(), g = lane / 4, per = outputs_per_tile(a.streams), tiles = ceil_div(a.hidden, per);
    const u32 tile = blockIdx.x * UP_WARPS + warp_id(), shift = __ffs(per) - 1;
    const Slices slices(a.rank, 1);
    Stream<Bf16, UP_UNITS, 3> weights(Tiles<Bf16>(a.up, tiles, slices.units).run(least(tile, tiles - 1), 0), slices.units);
    follow();
    const u32 begin = blockIdx.y * NARROW_ROWS, end = least(a.rows, begin + NARROW_ROWS);
#pragma unroll 1
    for (u32 first = begin; first < end; first += 8) {
        const Rows low{a.low + (u64)first * a.rank, a.rank, end - first, a.rank};
        // Units that were not all held at once, or were read piece by piece, start anew.
        if (first > begin && !(slices.units <= UP_UNITS && a.rank % 16 == 0 && low.aligned())) weights.start(weights.from.from(afresh(0)));
        const bf16* const x[1] = {low.row(g)};
        bf16 normed[4];
#pragma unroll
        for (u32 v = 0; v < 4; ++v) {
            const u32 at = g + v / 2 * 8, stream = at >> shift, output = tile * per + (at & (per - 1));
            const u32 row = first + lane % 4 * 2 + v % 2;
            const bool live = row < end && stream < a.streams && output < a.hidden;
            normed[v] = live ? a.normed[((u64)row * a.streams + stream) * a.hidden + output] : bf16{0};
        }
        float sums[1][4] = {};
        weights.multiply(sums, x, 0, a.rank, low.aligned());
#pragma unroll
        for (u32 v = 0; v < 4; ++v) sums[0][v] = share(sums[0][v], normed[v]);
        // Output `out` of the tile, by two rows: streams in order.
#pragma unroll 1
        for (u32 out = g; out - g < per; out += 8) {
            float mixed[2] = {};
#pragma unroll 1
            for (u32 stream = 0; stream < a.streams; ++stream) {
                const u32 at = stream * per + out, from = at % 8 * 4 + lane % 4;
                float of[4];
#pragma unroll
                for (u32 v = 0; v < 4; ++v) of[v] = __shfl_sync(WHOLE_WARP, sums[0][v], from);
#pragma unroll
                for (u32 r = 0; r < 2; ++r) mixed[r] = add(mixed[r], at < 8 ? of[r] : of[r + 2]);
            }
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 output = tile * per + out, row = first + lane % 4 * 2 + r;
                if (out < per && output < a.hidden && row < end)
                    a.mixed[(u64)row * a.hidden + output] = narrow(div(mixed[r], (float)a.streams));
            }
        }
    }
}

// Panel blockIdx.x, row panels first.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) hyper_up_prompt(UpArgs a) {
    const u32 panels = ceil_div(a.rows, Panel::ROWS), per = outputs_per_tile(a.streams);
    const u32 first_row = blockIdx.x % panels * Panel::ROWS, tile = blockIdx.x / panels * Panel::TILES;
    const Slices slices(a.rank, 1);
    const Rows x{a.low + (u64)first_row * a.rank, a.rank, least(a.rows - first_row, Panel::ROWS), a.rank};
    const float* const sums = Panel::product(
        Tiles<Bf16>(a.up, ceil_div(a.hidden, per), slices.units), tile, ceil_div(a.hidden, per) - 1, 0, [&](u32 i) { return x.row(i); }, a.rank,
        x.aligned(), slices, 0, slices.count, Depend());
    for (u32 r = warp_id(); r < x.count; r += WARPS)
        for (u32 i = lane_id(); i < Panel::TILES * per; i += 32) {
            const u32 output = tile * per + i;
            const float* const of = sums + r * Panel::SUM_PITCH + i / per * TILE + i % per;
            if (output < a.hidden) mix(a, output, first_row + r, of, per);
        }
}
