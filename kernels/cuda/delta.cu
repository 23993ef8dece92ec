// The twins of kernels/src/delta.rs, which holds the contracts. Both run the recurrence row by row: a block
// holds some columns of one head's state in registers and takes a slot's rows in order. Key heads are at most
// 256 wide; wider ones are left unwritten.
#include "ptx.cuh"
#include "state.cuh"

struct Args {
    RowRange rows;
    const bf16* qkv;
    const bf16* x;
    const float* a_log;
    const float* dt_bias;
    Part state;
    bf16* y;
    u32 stride, beta_at, decay_at, k_heads, v_heads, k_width, v_width, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_delta_step);
static_assert(sizeof(Args) == ARGS_BYTES_delta_chunk);

constexpr u32 WARPS = 4;
// Values of the state that a lane holds, all of one column: runs of four.
constexpr u32 RUNS = 8;
// Rows that are made ready together.
constexpr u32 BATCH = 8;

// Columns of the state per warp and per block, for keys of up to WIDTH: the lanes share out the columns' rows.
template <u32 WIDTH> constexpr u32 COLUMNS = 32 * RUNS * 4 / WIDTH;
template <u32 WIDTH> constexpr u32 TILE = WARPS * COLUMNS<WIDTH>;

template <u32 WIDTH> struct Batch {
    float q[BATCH][WIDTH], k[BATCH][WIDTH], v[BATCH][TILE<WIDTH>], beta[BATCH], decay[BATCH];
};

// x / |x| * scale, zero past its width. One warp.
template <u32 WIDTH> __device__ void unit(const bf16* x, u32 width, float scale, float* to) {
    float squares = 0.0f;
    for (u32 j = lane_id(); j < width; j += 32) squares = add(squares, mul(widen(x[j]), widen(x[j])));
    const float inverse = div(1.0f, root(add(warp_sum(squares), 1e-6f)));
    for (u32 j = lane_id(); j < WIDTH; j += 32) to[j] = j < width ? mul(mul(widen(x[j]), inverse), scale) : 0.0f;
}

template <u32 WIDTH>
__device__ void ready(const Args& a, Batch<WIDTH>& batch, u64 row, u32 count, u32 head, u32 tile) {
    const u32 k_head = head / (a.v_heads / a.k_heads), channels = 2 * a.k_heads * a.k_width + a.v_heads * a.v_width;
    const float scale = div(1.0f, root((float)a.k_width));
    for (u32 i = warp_id(); i < count; i += WARPS) {
        const bf16* const qkv = a.qkv + (row + i) * channels;
        unit<WIDTH>(qkv + k_head * a.k_width, a.k_width, scale, batch.q[i]);
        unit<WIDTH>(qkv + (a.k_heads + k_head) * a.k_width, a.k_width, 1.0f, batch.k[i]);
        const u32 column = tile * TILE<WIDTH> + lane_id();
        const bf16* const v = qkv + 2 * a.k_heads * a.k_width + head * a.v_width;
        if (lane_id() < TILE<WIDTH>) batch.v[i][lane_id()] = column < a.v_width ? widen(v[column]) : 0.0f;
        if (lane_id() == 0) {
            const bf16* const x = a.x + (row + i) * a.stride;
            const float g = mul(-expf(a.a_log[head]), softplus(add(widen(x[a.decay_at + head]), a.dt_bias[head])));
            batch.beta[i] = sigmoid(widen(x[a.beta_at + head]));
            batch.decay[i] = exp_of(g);
        }
    }
}

// The sum over the lanes that share a column.
template <u32 WIDTH> __device__ __forceinline__ float column_sum(const float (&parts)[4]) {
    float sum = add(add(parts[0], parts[1]), add(parts[2], parts[3]));
#pragma unroll
    for (u32 apart = COLUMNS<WIDTH>; apart < 32; apart *= 2) sum = add(sum, __shfl_xor_sync(WHOLE_WARP, sum, apart));
    return sum;
}

template <u32 WIDTH> __device__ __forceinline__ void recur(const Args& a, u32 run) {
    __shared__ Batch<WIDTH> batch;
    // Run i of a lane is rows i * STEP + part .. + 3 of the state.
    constexpr u32 STEP = WIDTH / RUNS, SHARED = COLUMNS<WIDTH>;
    const u32 tiles = ceil_div(a.v_width, TILE<WIDTH>), head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const u32 part = lane_id() / SHARED * 4, in_tile = warp_id() * SHARED + lane_id() % SHARED;
    const u32 column = tile * TILE<WIDTH> + in_tile;
    const u64 first = a.rows.first + blockIdx.y;
    const bool live = column < a.v_width;
    float* const stored =
        a.state.slot<float>(a.rows.facts[first].slot) + (u64)head * a.k_width * a.v_width + column;

    float state[RUNS][4];
#pragma unroll
    for (u32 i = 0; i < RUNS * 4; ++i) {
        const u32 k = i / 4 * STEP + part + i % 4;
        state[i / 4][i % 4] = live && k < a.k_width ? stored[(u64)k * a.v_width] : 0.0f;
    }
    for (u32 done = 0; done < run; done += BATCH) {
        const u32 count = least(BATCH, run - done);
        __syncthreads();
        ready<WIDTH>(a, batch, first + done, count, head, tile);
        __syncthreads();
#pragma unroll 1
        for (u32 row = 0; row < count; ++row) {
            const float decay = batch.decay[row];
            float seen[4] = {}, out[4] = {};
#pragma unroll
            for (u32 i = 0; i < RUNS; ++i)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    state[i][e] = mul(state[i][e], decay);
                    seen[e] = add(seen[e], mul(state[i][e], batch.k[row][i * STEP + part + e]));
                }
            const float fresh = mul(sub(batch.v[row][in_tile], column_sum<WIDTH>(seen)), batch.beta[row]);
#pragma unroll
            for (u32 i = 0; i < RUNS; ++i)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    state[i][e] = add(state[i][e], mul(batch.k[row][i * STEP + part + e], fresh));
                    out[e] = add(out[e], mul(state[i][e], batch.q[row][i * STEP + part + e]));
                }
            const float y = column_sum<WIDTH>(out);
            if (live && part == 0) a.y[((first + done + row) * a.v_heads + head) * a.v_width + column] = narrow(y);
        }
    }
    const u32 width = afresh(a.v_width);
#pragma unroll
    for (u32 i = 0; i < RUNS * 4; ++i) {
        const u32 k = i / 4 * STEP + part + i % 4;
        if (live && k < a.k_width) stored[(u64)k * width] = state[i / 4][i % 4];
    }
}

// blockIdx.x: head and tile; blockIdx.y: row. All but a slot's first row leave.
__device__ __forceinline__ void advance_slot(const Args& a) {
    const u32 row = a.rows.first + blockIdx.y;
    if (a.rows.facts[row].place != 0) return;
    const u32 run = a.rows.run(row);
    if (a.k_width <= 128) recur<128>(a, run);
    else if (a.k_width <= 256) recur<256>(a, run);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) delta_step(Args a) { advance_slot(a); }

extern "C" __global__ void __launch_bounds__(WARPS * 32) delta_chunk(Args a) { advance_slot(a); }
