// The twins of kernels/src/delta.rs, which holds the contracts. Both run the recurrence row by row: a block
// holds some columns of one head's state in registers and takes a slot's rows in order. Key heads are at most
// 256 wide; wider ones are left unwritten.
//
// Half of a block's warps hold the state; the other half make the next rows ready meanwhile. What a row sees of
// the state and what it answers come from one pass over the state before the row changes it:
// y = exp(g) * S^T q + (k . q) * d.
#include "few.cuh"
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

// Warps that hold the state, and as many that make rows ready.
constexpr u32 WARPS = 2;
// Values that a lane holds of each of its two columns: runs of four rows of the state.
constexpr u32 RUNS = 4;
// Rows of the launch per block, of which it takes the slots that begin there.
constexpr u32 CHUNK_ROWS = 64;

// For keys of up to WIDTH: rows that are made ready together, lanes that share a pair of columns, such pairs of
// a warp, and columns of a block.
template <u32 WIDTH> constexpr u32 BATCH = 1024 / WIDTH;
template <u32 WIDTH> constexpr u32 PARTS = WIDTH / (RUNS * 4);
template <u32 WIDTH> constexpr u32 PAIRS = 32 / PARTS<WIDTH>;
template <u32 WIDTH> constexpr u32 TILE = WARPS * PAIRS<WIDTH> * 2;

template <u32 WIDTH> struct alignas(16) Batch {
    static constexpr u32 ROWS = BATCH<WIDTH>;
    float q[ROWS][WIDTH], k[ROWS][WIDTH], v[ROWS][TILE<WIDTH>], beta[ROWS], decay[ROWS], key_query[ROWS];
};

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Makes rows ready, one warp a row: unit keys and queries, zero past their width, and what else a row brings.
template <u32 WIDTH>
__device__ void ready(const Args& a, Batch<WIDTH>& batch, u64 row, u32 count, u32 head, u32 tile) {
    const u32 k_head = head / (a.v_heads / a.k_heads), channels = 2 * a.k_heads * a.k_width + a.v_heads * a.v_width;
    const float scale = div(1.0f, root((float)a.k_width));
    const float rate = -expf(a.a_log[head]), bias = a.dt_bias[head];
    const u32 column = tile * TILE<WIDTH> + lane_id();
    const bool mine = lane_id() < TILE<WIDTH> && column < a.v_width;
    for (u32 i = warp_id() - WARPS; i < count; i += WARPS) {
        const bf16* const qkv = a.qkv + (row + i) * channels;
        const bf16* const query = qkv + k_head * a.k_width;
        const bf16* const key = query + a.k_heads * a.k_width;
        const bf16* const x = a.x + (row + i) * a.stride;
        const bool aligned = whole<4>(query, a.k_width) && whole<4>(key, a.k_width);
        Few<4> q[WIDTH / 128], k[WIDTH / 128];
#pragma unroll
        for (u32 j = 0; j < WIDTH / 128; ++j) {
            q[j] = load_few<4>(query, j * 128 + lane_id() * 4, a.k_width, aligned);
            k[j] = load_few<4>(key, j * 128 + lane_id() * 4, a.k_width, aligned);
        }
        const float v = mine ? widen(qkv[2 * a.k_heads * a.k_width + head * a.v_width + column]) : 0.0f;
        const float open = widen(x[a.beta_at + head]), fade = widen(x[a.decay_at + head]);
        float qq = 0.0f, kk = 0.0f;
#pragma unroll
        for (u32 j = 0; j < WIDTH / 128; ++j)
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                qq = add(qq, mul(q[j].value[e], q[j].value[e]));
                kk = add(kk, mul(k[j].value[e], k[j].value[e]));
            }
        const float q_inverse = div(1.0f, root(add(warp_sum(qq), 1e-6f)));
        const float k_inverse = div(1.0f, root(add(warp_sum(kk), 1e-6f)));
        float key_query = 0.0f;
#pragma unroll
        for (u32 j = 0; j < WIDTH / 128; ++j)
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const u32 at = j * 128 + lane_id() * 4 + e;
                const float qn = mul(mul(q[j].value[e], q_inverse), scale), kn = mul(k[j].value[e], k_inverse);
                batch.q[i][at] = qn;
                batch.k[i][at] = kn;
                key_query = fused(qn, kn, key_query);
            }
        key_query = warp_sum(key_query);
        if (lane_id() < TILE<WIDTH>) batch.v[i][lane_id()] = v;
        if (lane_id() == 0) {
            batch.beta[i] = sigmoid(open);
            batch.decay[i] = exp_of(mul(rate, softplus(add(fade, bias))));
            batch.key_query[i] = key_query;
        }
    }
}

struct alignas(8) Two {
    float first, second;
};

// The state's values of one lane: RUNS * 4 rows of two columns.
template <u32 WIDTH> struct Held {
    static constexpr u32 STEP = WIDTH / RUNS;
    float value[RUNS][4][2];

    // Run r of a lane is rows r * STEP + part * 4 .. + 3 of the state.
    static __device__ u32 part() { return lane_id() / PAIRS<WIDTH> * 4; }
    // The lane's first column, in the tile.
    static __device__ u32 column() { return (warp_id() * PAIRS<WIDTH> + lane_id() % PAIRS<WIDTH>) * 2; }

    // Reads or writes the values that exist; `stored` is the lane's first column of row 0.
    template <bool WRITE> __device__ __forceinline__ void move(float* stored, u32 k_width, u32 v_width, u32 columns) {
        const bool both = columns == 2 && v_width % 2 == 0 && ((u64)stored & 7) == 0;
#pragma unroll
        for (u32 i = 0; i < RUNS * 4; ++i) {
            const u32 k = i / 4 * STEP + part() + i % 4;
            if (k >= k_width || columns == 0) continue;
            float(&held)[2] = value[i / 4][i % 4];
            float* const at = stored + (u64)k * v_width;
            if (both) {
                if (WRITE) *(Two*)at = Two{held[0], held[1]};
                else held[0] = ((const Two*)at)->first, held[1] = ((const Two*)at)->second;
            } else {
                if (WRITE) at[0] = held[0];
                else held[0] = at[0];
                if (columns == 1) continue;
                if (WRITE) at[1] = held[1];
                else held[1] = at[1];
            }
        }
    }
};

// One row: changes the state, and returns y of one of the lane's columns in the lanes that `answers` says.
template <u32 WIDTH>
__device__ __forceinline__ float recur(Held<WIDTH>& state, const Batch<WIDTH>& batch, u32 row, u32 in_tile) {
    constexpr u32 STEP = WIDTH / RUNS;
    const float decay = batch.decay[row], beta = batch.beta[row];
    float k[RUNS][4], seen[2][2] = {}, out[2][2] = {};
#pragma unroll
    for (u32 r = 0; r < RUNS; ++r) {
        const u32 at = r * STEP + state.part();
        const Quad keys = *(const Quad*)&batch.k[row][at], queries = *(const Quad*)&batch.q[row][at];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            k[r][e] = __uint_as_float(keys.word[e]);
            const float q = __uint_as_float(queries.word[e]);
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                seen[c][e % 2] = fused(state.value[r][e][c], k[r][e], seen[c][e % 2]);
                out[c][e % 2] = fused(state.value[r][e][c], q, out[c][e % 2]);
            }
        }
    }
    // Each sum ends in the lanes whose bit 4 says which of the two it is and whose bit 3 of which column.
    const bool second = lane_id() & 16, right = lane_id() & 8;
    float sums[2];
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
        const float s = add(seen[c][0], seen[c][1]), o = add(out[c][0], out[c][1]);
        sums[c] = add(second ? o : s, __shfl_xor_sync(WHOLE_WARP, second ? s : o, 16));
    }
    float sum = add(right ? sums[1] : sums[0], __shfl_xor_sync(WHOLE_WARP, right ? sums[0] : sums[1], 8));
#pragma unroll
    for (u32 apart = PAIRS<WIDTH>; apart < 8; apart *= 2) sum = add(sum, __shfl_xor_sync(WHOLE_WARP, sum, apart));
    float fresh[2];
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
        const float total = __shfl_sync(WHOLE_WARP, sum, c * 8 + lane_id() % PAIRS<WIDTH>);
        fresh[c] = mul(sub(batch.v[row][in_tile + c], mul(decay, total)), beta);
    }
#pragma unroll
    for (u32 r = 0; r < RUNS; ++r)
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
#pragma unroll
            for (u32 c = 0; c < 2; ++c)
                state.value[r][e][c] = fused(k[r][e], fresh[c], mul(state.value[r][e][c], decay));
    return fused(batch.key_query[row], right ? fresh[1] : fresh[0], mul(decay, sum));
}

// The rows of a slot, the first of which is `first`.
template <u32 WIDTH> __device__ __forceinline__ void take_slot(const Args& a, u64 first, u32 run, u32 slot) {
    __shared__ Batch<WIDTH> batches[2];
    const u32 tiles = ceil_div(a.v_width, TILE<WIDTH>), head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const bool holds = warp_id() < WARPS;
    const u32 in_tile = Held<WIDTH>::column(), column = tile * TILE<WIDTH> + in_tile;
    const u32 columns = holds && column < a.v_width ? least(2, a.v_width - column) : 0;
    float* const stored = a.state.slot<float>(slot) + (u64)head * a.k_width * a.v_width + column;
    // Bit 3 of a lane says which of its columns it answers for; of the lanes with the same sum one does.
    const u32 right = lane_id() / 8 % 2, answer = column + right;
    const bool answers = columns > right && lane_id() / 16 == 1 && lane_id() % 8 < PAIRS<WIDTH>;

    Held<WIDTH> state = {};
    if (holds) state.template move<false>(stored, a.k_width, a.v_width, columns);
    else ready<WIDTH>(a, batches[0], first, least(BATCH<WIDTH>, run), head, tile);
    __syncthreads();
    for (u32 done = 0; done < run; done += BATCH<WIDTH>) {
        const u32 turn = done / BATCH<WIDTH> % 2, count = least(BATCH<WIDTH>, run - done), next = done + count;
        if (!holds) {
            if (next < run) ready<WIDTH>(a, batches[1 - turn], first + next, least(BATCH<WIDTH>, run - next), head, tile);
        } else {
#pragma unroll 1
            for (u32 row = 0; row < count; ++row) {
                const float y = recur<WIDTH>(state, batches[turn], row, in_tile);
                if (answers) a.y[((first + done + row) * a.v_heads + head) * a.v_width + answer] = narrow(y);
            }
        }
        __syncthreads();
    }
    if (holds) state.template move<true>(stored, a.k_width, afresh(a.v_width), columns);
}

// blockIdx.x: head and tile; blockIdx.y: `ROWS` rows, of which the block takes the slots that begin there.
template <u32 ROWS> __device__ __forceinline__ void advance_slots(const Args& a) {
    const u32 to = least((blockIdx.y + 1) * ROWS, a.rows.count);
    for (u32 at = blockIdx.y * ROWS; at < to;) {
        const u32 row = a.rows.first + at;
        const Fact& fact = a.rows.facts[row];
        if (fact.place == 0) {
            const u32 run = a.rows.run(row);
            if (a.k_width <= 128) take_slot<128>(a, row, run, fact.slot);
            else if (a.k_width <= 256) take_slot<256>(a, row, run, fact.slot);
        }
        at += fact.count - fact.place;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 64) delta_step(Args a) {
    follow();
    advance_slots<1>(a);
}

extern "C" __global__ void __launch_bounds__(WARPS * 64) delta_chunk(Args a) {
    follow();
    advance_slots<CHUNK_ROWS>(a);
}
