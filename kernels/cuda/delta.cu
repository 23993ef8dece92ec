// The twin of DeltaStep of kernels/src/delta.rs. Key heads are at most 256 wide; wider ones are left unwritten.
//
// A warp holds some columns of one head's state in registers and takes a slot's rows in order. What a row sees of
// the state and what it answers come from one pass over the state before the row changes it:
// y = exp(g) * S^T q + (k . q) * d.
// Queries and keys are scaled to unit length after these products, so that all sums are made at once.
//
// The state, and what the row brings beside its queries, keys and values, are read before the launch waits: conv, which
// it follows, lets it start when every launch before conv is complete.
#include "delta.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_delta_step);

constexpr u32 STEP_WARPS = 2;

// Rows of the state that a lane holds, of four columns: lane / FOURS says which rows, lane % FOURS which of its warp's
// columns. So a block reads 64 or 128 bytes of a row.
constexpr u32 ROWS = 16;

// What a row brings to a lane from the convolution.
struct Brought {
    Quad q[ROWS / 8], k[ROWS / 8];
    Few<4> v;
};

template <u32 FOURS> __device__ __forceinline__ Brought bring(const Args& a, u64 row, u32 head, u32 column) {
    const bf16* const values = a.value(row, head);
    Brought brought;
#pragma unroll
    for (u32 i = 0; i < ROWS / 8; ++i) {
        const u32 at = lane_id() / FOURS * ROWS + i * 8;
        brought.q[i] = eight(a.query(row, head), at, a.k_width);
        brought.k[i] = eight(a.key(row, head), at, a.k_width);
    }
    brought.v = load_few<4>(values, column, a.v_width, whole<4>(values, a.v_width));
    return brought;
}

// How a row changes the state.
struct Gates {
    float beta, decay;

    __device__ Gates(const Args& a, u64 row, u32 head) : beta(a.beta(row, head)), decay(exp_of(a.fade(row, head))) {}
};

// The sum over the lanes that hold the same columns.
template <u32 FOURS> __device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (u32 apart = FOURS; apart < 32; apart *= 2) value = add(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
    return value;
}

// Reads or writes `rows` rows of the lane's values of the state, as far as they have `columns`; `stored` is the
// first. The next round comes back for them, past all other states and weights: they are the first to leave L2.
template <bool WRITE>
__device__ __forceinline__ void move(float (&state)[ROWS][4], float* stored, u32 rows, u32 v_width, u32 columns) {
    const bool four = columns == 4 && v_width % 4 == 0 && aligned16(stored);
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        if (i >= rows) continue;
        float* const at = stored + (u64)i * v_width;
        if (!four) continue;
        if (WRITE) __stcs((float4*)at, make_float4(state[i][0], state[i][1], state[i][2], state[i][3]));
        else {
            const float4 held = __ldcs((const float4*)at);
            state[i][0] = held.x, state[i][1] = held.y, state[i][2] = held.z, state[i][3] = held.w;
        }
    }
    if (four) return;
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i)
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            float* const at = stored + (u64)i * v_width + c;
            if (i >= rows || c >= columns) continue;
            if (WRITE) *at = state[i][c];
            else state[i][c] = __ldcg(at);
        }
}

// One row: changes the state, and returns y of the lane's column `answer` in the lanes whose bit 4 is set.
template <u32 FOURS>
__device__ __forceinline__ float recur(float (&state)[ROWS][4], const Brought& row, const Gates& gates, u32 k_width,
                                       u32 answer) {
    float qq = 0.0f, kk = 0.0f, kq = 0.0f, seen[4] = {}, out[4] = {};
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        const float q = element(row.q[i / 8], i % 8), k = element(row.k[i / 8], i % 8);
        qq = fused(q, q, qq);
        kk = fused(k, k, kk);
        kq = fused(k, q, kq);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            seen[c] = fused(state[i][c], k, seen[c]);
            out[c] = fused(state[i][c], q, out[c]);
        }
    }
    // Each sum over the state ends in the lanes whose bit 4 says which of the two it is, and whose bits 3 and 2 of
    // which column.
    const bool second = lane_id() & 16, upper = lane_id() & 8, right = lane_id() & 4;
    float four[4], two[2];
#pragma unroll
    for (u32 c = 0; c < 4; ++c)
        four[c] = add(second ? out[c] : seen[c], __shfl_xor_sync(WHOLE_WARP, second ? seen[c] : out[c], 16));
#pragma unroll
    for (u32 c = 0; c < 2; ++c)
        two[c] = add(upper ? four[2 + c] : four[c], __shfl_xor_sync(WHOLE_WARP, upper ? four[c] : four[2 + c], 8));
    float sum = add(right ? two[1] : two[0], __shfl_xor_sync(WHOLE_WARP, right ? two[0] : two[1], 4));
    if constexpr (FOURS == 2) sum = add(sum, __shfl_xor_sync(WHOLE_WARP, sum, 2));
    const float q_scale = div(unit_scale(column_sum<FOURS>(qq)), root((float)k_width));
    const float k_scale = unit_scale(column_sum<FOURS>(kk));
    const float key_query = mul(column_sum<FOURS>(kq), mul(q_scale, k_scale));
    sum = mul(sum, second ? q_scale : k_scale);
    float fresh[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
        const float total = __shfl_sync(WHOLE_WARP, sum, c * 4 + lane_id() % FOURS);
        fresh[c] = mul(sub(row.v.value[c], mul(gates.decay, total)), gates.beta);
    }
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        const float key = mul(element(row.k[i / 8], i % 8), k_scale);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) state[i][c] = fused(key, fresh[c], mul(state[i][c], gates.decay));
    }
    const float low = answer & 1 ? fresh[1] : fresh[0], high = answer & 1 ? fresh[3] : fresh[2];
    return fused(key_query, answer & 2 ? high : low, mul(gates.decay, sum));
}

// blockIdx.x: head and tile; blockIdx.y: a row, which leaves unless it is its slot's first.
template <u32 FOURS> __device__ __forceinline__ void step_slot(const Args& a) {
    constexpr u32 COLUMNS = STEP_WARPS * FOURS * 4;
    const u32 tiles = ceil_div(a.v_width, COLUMNS), head = blockIdx.x / tiles;
    const u32 column = blockIdx.x % tiles * COLUMNS + (warp_id() * FOURS + lane_id() % FOURS) * 4;
    const u32 columns = column < a.v_width ? least(4, a.v_width - column) : 0;
    const u32 at = lane_id() / FOURS * ROWS, rows = at < a.k_width ? least(ROWS, a.k_width - at) : 0;
    // Of the lanes that have a column's answer one gives it.
    const u32 answer = lane_id() / 4 % 4;
    const bool answers = lane_id() / 16 == 1 && lane_id() % 4 < FOURS && answer < columns;

    const u64 first = a.rows.first + blockIdx.y;
    const Fact& fact = a.rows.facts[first];
    const u32 slot = __ldcg(&fact.slot), place = __ldcg(&fact.place), count = __ldcg(&fact.count);
    const auto stored = [&](u32 slot) { return a.state_of(slot, head) + (u64)at * a.v_width + column; };
    float state[ROWS][4] = {};
    if (place == 0) move<false>(state, stored(slot), rows, a.v_width, columns);
    Gates gates(a, first, head);
    follow();
    if (place != 0) return;
    const u64 end = first + least(count, a.rows.count - blockIdx.y);
    for (u64 row = first;;) {
        const float y = recur<FOURS>(state, bring<FOURS>(a, row, head, column), gates, a.k_width, answer);
        if (answers) a.y[(row * a.v_heads + head) * a.v_width + column + answer] = narrow(y);
        if (++row == end) break;
        gates = Gates(a, row, head);
    }
    move<true>(state, stored(afresh(slot)), rows, a.v_width, columns);
}

extern "C" __global__ void __launch_bounds__(STEP_WARPS * 32, 6) delta_step(Args a) {
    if (a.k_width <= 128) step_slot<4>(a);
    else if (a.k_width <= 256) step_slot<2>(a);
    else follow();
}
