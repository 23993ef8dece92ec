// The twin of DeltaStep of kernels/src/delta.rs. Key heads are at most 256 wide; wider ones are left unwritten.
//
// A warp holds some columns of one head's state in registers and takes a slot's rows in order. What a row sees of
// the state and what it answers come from one pass over the state before the row changes it:
// y = exp(g) * S^T q + (k . q) * d.
#include "delta.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_delta_step);

constexpr u32 STEP_WARPS = 2;

// A lane holds eight rows of the state and four columns: lane / FOURS says which rows, lane % FOURS which of
// its warp's columns.

// What a row brings to a lane.
struct Brought {
    Quad q, k;
    Few<4> v;
    float beta, fade;
};

template <u32 FOURS> __device__ __forceinline__ Brought bring(const Args& a, u64 row, u32 head, u32 column) {
    Brought b;
    b.q = eight(a.query(row, head), lane_id() / FOURS * 8, a.k_width);
    b.k = eight(a.key(row, head), lane_id() / FOURS * 8, a.k_width);
    const bf16* const values = a.value(row, head);
    b.v = load_few<4>(values, column, a.v_width, whole<4>(values, a.v_width));
    b.beta = a.beta(row, head);
    b.fade = a.fade(row, head);
    return b;
}

// The sum over the lanes that hold the same columns.
template <u32 FOURS> __device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (u32 apart = FOURS; apart < 32; apart *= 2) value = add(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
    return value;
}

// Reads or writes `rows` rows of the lane's values of the state, as far as they have `columns`; `stored` is the
// first.
template <bool WRITE>
__device__ __forceinline__ void move(float (&state)[8][4], float* stored, u32 rows, u32 v_width, u32 columns) {
    const bool four = columns == 4 && v_width % 4 == 0 && aligned16(stored);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (i >= rows) continue;
        float* const at = stored + (u64)i * v_width;
        if (four) {
            if (WRITE) *(Four*)at = Four{state[i][0], state[i][1], state[i][2], state[i][3]};
            else {
                const Four held = *(const Four*)at;
#pragma unroll
                for (u32 c = 0; c < 4; ++c) state[i][c] = held.value[c];
            }
        } else {
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                if (c >= columns) continue;
                if (WRITE) at[c] = state[i][c];
                else state[i][c] = at[c];
            }
        }
    }
}

// One row: changes the state, and returns y of the lane's column `answer` in the lanes whose bit 4 is set.
template <u32 FOURS>
__device__ __forceinline__ float recur(float (&state)[8][4], const Brought& row, u32 k_width, u32 answer) {
    float q[8], k[8], qq = 0.0f, kk = 0.0f, key_query = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        q[i] = element(row.q, i), k[i] = element(row.k, i);
        qq = fused(q[i], q[i], qq);
        kk = fused(k[i], k[i], kk);
    }
    const float q_scale = unit_scale(column_sum<FOURS>(qq)), k_scale = unit_scale(column_sum<FOURS>(kk));
    const float width_scale = div(1.0f, root((float)k_width));
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        q[i] = mul(mul(q[i], q_scale), width_scale);
        k[i] = mul(k[i], k_scale);
        key_query = fused(q[i], k[i], key_query);
    }
    key_query = column_sum<FOURS>(key_query);
    const float decay = exp_of(row.fade);

    float seen[4] = {}, out[4] = {};
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            seen[c] = fused(state[i][c], k[i], seen[c]);
            out[c] = fused(state[i][c], q[i], out[c]);
        }
    // Each sum ends in the lanes whose bit 4 says which of the two it is, and whose bits 3 and 2 of which column.
    const bool second = lane_id() & 16, upper = lane_id() & 8, right = lane_id() & 4;
    float four[4], two[2];
#pragma unroll
    for (u32 c = 0; c < 4; ++c)
        four[c] = add(second ? out[c] : seen[c], __shfl_xor_sync(WHOLE_WARP, second ? seen[c] : out[c], 16));
#pragma unroll
    for (u32 c = 0; c < 2; ++c)
        two[c] = add(upper ? four[2 + c] : four[c], __shfl_xor_sync(WHOLE_WARP, upper ? four[c] : four[2 + c], 8));
    float sum = add(right ? two[1] : two[0], __shfl_xor_sync(WHOLE_WARP, right ? two[0] : two[1], 4));
#pragma unroll
    for (u32 apart = FOURS; apart < 4; apart *= 2) sum = add(sum, __shfl_xor_sync(WHOLE_WARP, sum, apart));
    float fresh[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
        const float total = __shfl_sync(WHOLE_WARP, sum, c * 4 + lane_id() % FOURS);
        fresh[c] = mul(sub(row.v.value[c], mul(decay, total)), row.beta);
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
#pragma unroll
        for (u32 c = 0; c < 4; ++c) state[i][c] = fused(k[i], fresh[c], mul(state[i][c], decay));
    const float low = answer & 1 ? fresh[1] : fresh[0], high = answer & 1 ? fresh[3] : fresh[2];
    return fused(key_query, answer & 2 ? high : low, mul(decay, sum));
}

// blockIdx.x: head and tile; blockIdx.y: a row, which leaves unless it is its slot's first.
template <u32 FOURS> __device__ __forceinline__ void step_slot(const Args& a) {
    constexpr u32 COLUMNS = STEP_WARPS * FOURS * 4;
    const u32 tiles = ceil_div(a.v_width, COLUMNS), head = blockIdx.x / tiles;
    const u32 column = blockIdx.x % tiles * COLUMNS + (warp_id() * FOURS + lane_id() % FOURS) * 4;
    const u32 columns = column < a.v_width ? least(4, a.v_width - column) : 0;
    const u32 at = lane_id() / FOURS * 8, rows = at < a.k_width ? least(8, a.k_width - at) : 0;
    // Of the lanes that have a column's answer one gives it.
    const u32 answer = lane_id() / 4 % 4;
    const bool answers = lane_id() / 16 == 1 && lane_id() % 4 < FOURS && answer < columns;

    const u64 first = a.rows.first + blockIdx.y;
    const Fact& fact = a.rows.facts[first];
    const u32 slot = fact.slot, place = fact.place, run = a.rows.run((u32)first);
    const auto stored = [&](u32 slot) { return a.state_of(slot, head) + (u64)at * a.v_width + column; };
    float state[8][4] = {};
    for (u64 row = first; row < first + run; ++row) {
        const Brought brought = bring<FOURS>(a, row, head, column);
        if (row == first) {
            if (place != 0) return;
            move<false>(state, stored(slot), rows, a.v_width, columns);
        }
        const float y = recur<FOURS>(state, brought, a.k_width, answer);
        if (answers) a.y[(row * a.v_heads + head) * a.v_width + column + answer] = narrow(y);
    }
    move<true>(state, stored(afresh(slot)), rows, a.v_width, columns);
}

extern "C" __global__ void __launch_bounds__(STEP_WARPS * 32, 9) delta_step(Args a) {
    let_next_start();
    wait_for_previous();
    if (a.k_width <= 128) step_slot<2>(a);
    else if (a.k_width <= 256) step_slot<1>(a);
}
