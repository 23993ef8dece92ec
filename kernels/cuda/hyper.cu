// The twins of kernels/src/hyper.rs, which holds the contracts.
#include "matrix.cuh"

struct DownArgs {
    const bf16* normed;
    const bf16* down;
    const bf16* injection;
    bf16* low;
    float* inject;
    u32 rows, streams, hidden, rank;
};
static_assert(sizeof(DownArgs) == ARGS_BYTES_hyper_down);

struct UpArgs {
    const bf16* low;
    const bf16* up;
    const bf16* normed;
    bf16* mixed;
    u32 rows, streams, hidden, rank;
};
static_assert(sizeof(UpArgs) == ARGS_BYTES_hyper_up);

constexpr u32 DOWN_WARPS = 16;
constexpr u32 UP_WARPS = 8;

// The tiles of `down` come first, then those of `injection`.
extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32) hyper_down(DownArgs a) {
    const u32 width = a.streams * a.hidden;
    const float streams = (float)a.streams;
    const Matrix x{a.normed, width, a.rows, width};
    const u32 down_tiles = ceil_div(a.rank, tile_outputs(a.rows)) * row_tiles(a.rows);
    const bool down = blockIdx.x < down_tiles;
    const Matrix w{down ? a.down : a.injection, width, down ? a.rank : a.streams, width};
    const u32 tile = down ? blockIdx.x : blockIdx.x - down_tiles;
    product_tile<DOWN_WARPS>(w, x, tile, [&](u32, u32 output, u32 row, float sum) {
        const float mean = div(r16(sum), streams);
        if (down) a.low[(u64)row * a.rank + output] = narrow(silu(mean));
        else a.inject[(u64)row * a.streams + output] = mul(2.0f, sigmoid(mean));
    });
}

// A tile covers columns of a stream; the block takes the streams in turn.
extern "C" __global__ void __launch_bounds__(UP_WARPS * 32) hyper_up(UpArgs a) {
    const u32 width = a.streams * a.hidden;
    const Matrix x{a.low, a.rank, a.rows, a.rank};
    float mixed[SLOTS] = {};
    for (u32 stream = 0; stream < a.streams; ++stream) {
        const Matrix w{a.up + (u64)stream * a.hidden * a.rank, a.rank, a.hidden, a.rank};
        const bool last = stream + 1 == a.streams;
        product_tile<UP_WARPS>(w, x, blockIdx.x, [&](u32 slot, u32 j, u32 row, float sum) {
            const float n = widen(a.normed[(u64)row * width + stream * a.hidden + j]);
            mixed[slot] = add(mixed[slot], mul(sigmoid(r16(sum)), n));
            if (last) a.mixed[(u64)row * a.hidden + j] = narrow(div(mixed[slot], (float)a.streams));
        });
    }
}
