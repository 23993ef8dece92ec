// The twins of kernels/src/delta.rs, which holds the contracts. Key heads are at most 256 wide; wider ones are
// left unwritten.
//
// A step holds some columns of one head's state in registers, each warp its own, and takes a slot's rows in order.
// What a row sees of the state and what it answers come from one pass over the state before the row changes it:
// y = exp(g) * S^T q + (k . q) * d.
//
// A chunk takes 16 rows at once on tensor cores. Keys and queries enter as the bf16 that they are, their norms as
// factors of the sums; an f32 enters as the sum of three bf16.
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
    float* ready;
    u32 stride, beta_at, decay_at, k_heads, v_heads, k_width, v_width, zero;

    __device__ const bf16* query(u64 row, u32 head) const {
        return qkv + row * (2 * k_heads * k_width + v_heads * v_width) + head / (v_heads / k_heads) * k_width;
    }
    __device__ const bf16* key(u64 row, u32 head) const { return query(row, head) + k_heads * k_width; }
    __device__ const bf16* value(u64 row, u32 head) const {
        return query(row, 0) + 2 * k_heads * k_width + head * v_width;
    }
    __device__ float* state_of(u32 slot, u32 head) const {
        return state.slot<float>(slot) + (u64)head * k_width * v_width;
    }
    __device__ float beta(u64 row, u32 head) const { return sigmoid(widen(x[row * stride + beta_at + head])); }
    // g.
    __device__ float fade(u64 row, u32 head) const {
        const float a = widen(x[row * stride + decay_at + head]);
        return mul(-expf(a_log[head]), softplus(add(a, dt_bias[head])));
    }
};
static_assert(sizeof(Args) == ARGS_BYTES_delta_step);
static_assert(sizeof(Args) == ARGS_BYTES_delta_ready);
static_assert(sizeof(Args) == ARGS_BYTES_delta_chunk);

// Columns of a block of delta_chunk.
constexpr u32 TILE = 16;
constexpr u32 STEP_WARPS = 2;
constexpr u32 CHUNK_WARPS = 4;
// Rows of the launch per block of delta_chunk, which takes the slots that begin there.
constexpr u32 CHUNK_ROWS = 512;
// Rows that are taken at once, and what a row brings then for a value head.
constexpr u32 SPAN = 16;
constexpr u32 READY = 36;

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Four neighbouring f32.
struct alignas(16) Four {
    float value[4];
};

// Elements `at ..` of a row of `count`; zero past its end.
__device__ __forceinline__ Quad eight(const bf16* row, u32 at, u32 count) {
    if (whole<8>(row, count)) return at < count ? *(const Quad*)(row + at) : Quad{};
    u64 low = 0, high = 0;
#pragma unroll 1
    for (u32 e = 8; e-- > 0;) {
        high = high << 16 | low >> 48;
        low = low << 16 | (at + e < count ? row[at + e].bits : 0);
    }
    return Quad{{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)}};
}
// Starts to copy them to shared memory; zeros if not `live`.
__device__ __forceinline__ void copy_eight(Quad* to, const bf16* row, u32 at, u32 count, bool live) {
    if (whole<8>(row, count)) {
        copy_async(to, row + (at < count ? at : 0), live && at < count);
    } else {
#pragma unroll 1
        for (u32 e = 0; e < 8; ++e) ((bf16*)to)[e] = live && at + e < count ? row[at + e] : bf16{0};
    }
}
__device__ __forceinline__ float element(const Quad& v, u32 e) {
    return e % 2 ? high_of(v.word[e / 2]) : low_of(v.word[e / 2]);
}

__device__ __forceinline__ float unit_scale(float sum_of_squares) {
    return div(1.0f, root(add(sum_of_squares, 1e-6f)));
}

// A step's lane holds eight rows of the state and four columns: lane / FOURS says which rows, lane % FOURS which of
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

// Of the tiles of matrix products over a span, tile q has rows 4t + 2q, 4t + 2q + 1 of the span in lane (g, t)
// where its columns are rows, so that a lane's rows follow each other. `row_of` is the row of column c.
__device__ __forceinline__ u32 row_of(u32 q, u32 c) { return c / 2 * 4 + q * 2 + c % 2; }

// What a span's row i brings for a value head: 16 of T, 16 of B, and four factors.
__device__ __forceinline__ float* ready_of(const Args& a, u64 row, u32 head) {
    return a.ready + (row * a.v_heads + head) * READY;
}

// One warp: a span of `count` rows of a value head. As factors of a lane (g, t) rows row_of(p, g) meet 4t + j.
__device__ __forceinline__ void ready_span(const Args& a, u64 first, u32 count, u32 head) {
    __shared__ Four systems[CHUNK_WARPS][SPAN][SPAN / 4];
    __shared__ float sums[CHUNK_WARPS][SPAN], betas[CHUNK_WARPS][SPAN], key_scales[CHUNK_WARPS][SPAN],
        query_scales[CHUNK_WARPS][SPAN];
    const u32 g = lane_id() / 4, t = lane_id() % 4, warp = warp_id();

    // g of every row, added up, and beta.
    const u32 own = lane_id() % SPAN;
    float sum = own < count ? a.fade(first + own, head) : 0.0f;
    if (lane_id() < SPAN) betas[warp][own] = own < count ? a.beta(first + own, head) : 0.0f;
#pragma unroll
    for (u32 apart = 1; apart < SPAN; apart *= 2) {
        const float before = __shfl_up_sync(WHOLE_WARP, sum, apart);
        if (own >= apart) sum = add(sum, before);
    }
    if (lane_id() < SPAN) sums[warp][own] = sum;

    // Products of raw keys and queries, and their squares.
    float kk[2][4] = {}, qk[2][4] = {}, key_squares[2] = {}, query_squares[2] = {};
    for (u32 at = 0; at < a.k_width; at += 32) {
        Quad key[2] = {}, query[2] = {};
#pragma unroll
        for (u32 p = 0; p < 2; ++p) {
            const u64 row = first + row_of(p, g);
            if (row_of(p, g) >= count) continue;
            key[p] = eight(a.key(row, head), at + t * 8, a.k_width);
            query[p] = eight(a.query(row, head), at + t * 8, a.k_width);
        }
#pragma unroll
        for (u32 p = 0; p < 2; ++p)
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                key_squares[p] = fused(element(key[p], e), element(key[p], e), key_squares[p]);
                query_squares[p] = fused(element(query[p], e), element(query[p], e), query_squares[p]);
            }
#pragma unroll
        for (u32 w = 0; w < 4; w += 2)
#pragma unroll
            for (u32 q = 0; q < 2; ++q) {
                const u32 b0 = key[q].word[w], b1 = key[q].word[w + 1];
                mma(kk[q], key[0].word[w], key[1].word[w], key[0].word[w + 1], key[1].word[w + 1], b0, b1);
                mma(qk[q], query[0].word[w], query[1].word[w], query[0].word[w + 1], query[1].word[w + 1], b0, b1);
            }
    }
    const float width_scale = div(1.0f, root((float)a.k_width));
#pragma unroll
    for (u32 p = 0; p < 2; ++p) {
#pragma unroll
        for (u32 apart = 1; apart < 4; apart *= 2) {
            key_squares[p] = add(key_squares[p], __shfl_xor_sync(WHOLE_WARP, key_squares[p], apart));
            query_squares[p] = add(query_squares[p], __shfl_xor_sync(WHOLE_WARP, query_squares[p], apart));
        }
        if (t == 0) {
            key_scales[warp][row_of(p, g)] = unit_scale(key_squares[p]);
            query_scales[warp][row_of(p, g)] = mul(unit_scale(query_squares[p]), width_scale);
        }
    }
    __syncwarp();

    // The system, and how the rows of the span enter its outputs.
#pragma unroll
    for (u32 p = 0; p < 2; ++p) {
        const u32 i = row_of(p, g);
        Four system, output;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 other = t * 4 + j;
            // Lane (g, t) has row g of a product in its first two values, row g + 8 in the others.
            const float same = kk[j / 2][p * 2 + j % 2], mixed = qk[j / 2][p * 2 + j % 2];
            const float decay = other <= i ? exp_of(sub(sums[warp][i], sums[warp][other])) : 0.0f;
            const float scale = mul(key_scales[warp][other], decay);
            const float enters = mul(betas[warp][i], mul(mul(same, key_scales[warp][i]), scale));
            system.value[j] = other < i ? enters : 0.0f;
            output.value[j] = other <= i ? mul(mul(mixed, query_scales[warp][i]), scale) : 0.0f;
        }
        systems[warp][i][t] = system;
        if (i < count) *(Four*)(ready_of(a, first + i, head) + SPAN + t * 4) = output;
    }
    __syncwarp();

    // Column `own` of T, row after row.
    float column[SPAN];
#pragma unroll
    for (u32 i = 0; i < SPAN; ++i) {
        float solved = own == i ? 1.0f : 0.0f;
#pragma unroll
        for (u32 j = 0; j < i; ++j) solved = fused(-systems[warp][i][j / 4].value[j % 4], column[j], solved);
        column[i] = solved;
    }
    if (lane_id() < SPAN) {
#pragma unroll
        for (u32 i = 0; i < SPAN; ++i)
            if (i < count) ready_of(a, first + i, head)[own] = mul(column[i], betas[warp][own]);
        if (own < count) {
            const float decay = exp_of(sum), rest = exp_of(sub(sums[warp][count - 1], sum));
            const float key = key_scales[warp][own], query = query_scales[warp][own];
            *(Four*)(ready_of(a, first + own, head) + 2 * SPAN) = {mul(decay, key), mul(decay, query), mul(rest, key), decay};
        }
    }
    __syncwarp();
}

// blockIdx.x: a value head for every warp; blockIdx.y: SPAN rows, of which the block takes the spans that begin
// there.
extern "C" __global__ void __launch_bounds__(CHUNK_WARPS * 32, 5) delta_ready(Args a) {
    let_next_start();
    wait_for_previous();
    const u32 head = blockIdx.x * CHUNK_WARPS + warp_id();
    if (head >= a.v_heads || a.k_width > 256) return;
    const u32 to = least((blockIdx.y + 1) * SPAN, a.rows.count);
    for (u32 at = blockIdx.y * SPAN; at < to;) {
        const Fact& fact = a.rows.facts[a.rows.first + at];
        const u32 in_span = fact.place % SPAN, left = least(SPAN - in_span, fact.count - fact.place);
        if (in_span == 0) ready_span(a, a.rows.first + at, left, head);
        at += left;
    }
}

// A matrix of 16 x 16 f32 as the sum of PARTS matrices of bf16, the largest first, in the order of an `a` of mma.
template <u32 PARTS> struct Parts {
    u32 part[PARTS][4];

    // From two tiles of sums that lie side by side.
    __device__ __forceinline__ Parts(const float (&left)[4], const float (&right)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float low = i < 2 ? left[i * 2] : right[i * 2 - 4], high = i < 2 ? left[i * 2 + 1] : right[i * 2 - 3];
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                part[p][i] = narrow_two(low, high);
                low = sub(low, low_of(part[p][i]));
                high = sub(high, high_of(part[p][i]));
            }
        }
    }
    __device__ __forceinline__ void times(float (&sum)[4], u32 p, u32 b0, u32 b1) const {
        mma(sum, part[p][0], part[p][1], part[p][2], part[p][3], b0, b1);
    }
    // Adds the product with a matrix of which the lane holds these, smaller terms first.
    __device__ __forceinline__ void times(float (&sum)[4], const Four& b) const {
        u32 parts[PARTS][2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            float low = b.value[i * 2], high = b.value[i * 2 + 1];
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                parts[p][i] = narrow_two(low, high);
                low = sub(low, low_of(parts[p][i]));
                high = sub(high, high_of(parts[p][i]));
            }
        }
#pragma unroll
        for (u32 total = PARTS; total-- > 0;)
#pragma unroll
            for (u32 p = 0; p <= total; ++p) times(sum, p, parts[total - p][0], parts[total - p][1]);
    }
};

// What a span brings to a block. A warp has columns 32 * warp .. + 31 of every 128 of keys and queries, and a lane
// (g, t) eight of them of rows row_of(0, g) and row_of(1, g): those it copies and reads alone.
template <u32 GROUPS> struct Taken {
    Quad key[GROUPS][2][CHUNK_WARPS * 32], query[GROUPS][2][CHUNK_WARPS * 32];
    Four solution[SPAN][SPAN / 4], output[SPAN][SPAN / 4], factor[SPAN];
    bf16 v[SPAN][TILE];
};
// Spans that are on their way or in use, and the shared memory that they and a block's sums take.
template <u32 GROUPS> constexpr u32 STAGES = 4 / GROUPS;
// Sums that a block's warps share: of the keys' products two tiles, then of the queries'.
typedef Four Shared[4][CHUNK_WARPS][32];

template <u32 GROUPS> struct Pool {
    Taken<GROUPS> taken[STAGES<GROUPS>];
    Shared shared[2];
};
constexpr u32 CHUNK_SHARED = 60416;
static_assert(sizeof(Pool<1>) <= CHUNK_SHARED && sizeof(Pool<2>) <= CHUNK_SHARED);
extern __shared__ Quad pool[];

__device__ __forceinline__ u32 key_column(u32 group) { return group * 128 + warp_id() * 32 + lane_id() % 4 * 8; }

// Starts to copy the span of `count` rows at `first`; nothing if `count` is zero.
template <u32 GROUPS>
__device__ __forceinline__ void take(Taken<GROUPS>& taken, const Args& a, u64 first, u32 count, u32 head, u32 tile) {
    if (count > 0) {
#pragma unroll
        for (u32 q = 0; q < 2; ++q) {
            const u32 i = row_of(q, lane_id() / 4);
            const u64 row = first + (i < count ? i : 0);
#pragma unroll
            for (u32 group = 0; group < GROUPS; ++group) {
                const u32 column = key_column(group);
                copy_eight(&taken.key[group][q][threadIdx.x], a.key(row, head), column, a.k_width, i < count);
                copy_eight(&taken.query[group][q][threadIdx.x], a.query(row, head), column, a.k_width, i < count);
            }
        }
        // Two warps copy what the span brings ready, the others its values.
        const u32 part = threadIdx.x % 64 / SPAN, i = threadIdx.x % SPAN;
        const u64 row = first + (i < count ? i : 0);
        if (warp_id() < 2) {
            const float* const ready = ready_of(a, row, head);
            copy_async(&taken.solution[i][part], ready + part * 4, i < count);
            copy_async(&taken.output[i][part], ready + SPAN + part * 4, i < count);
            if (part == 0) copy_async(&taken.factor[i], ready + 2 * SPAN, i < count);
        } else if (part < 2) {
            copy_eight((Quad*)&taken.v[i][part * 8], a.value(row, head), tile * TILE + part * 8, a.v_width, i < count);
        }
    }
    copy_commit();
}

// The transposed state of a warp: 16 columns by its keys. Value e of tile n is column g + e / 2 * 8 of row
// key_column + 2n + e % 2.
template <bool WRITE, u32 GROUPS>
__device__ __forceinline__ void move(float (&state)[GROUPS][4][4], const Args& a, u32 slot, u32 head, u32 tile) {
    float* const stored = a.state_of(slot, head);
    const u32 v_width = afresh(a.v_width);
#pragma unroll
    for (u32 i = 0; i < GROUPS * 16; ++i) {
        const u32 group = i / 16, n = i / 4 % 4, e = i % 4;
        const u32 k = key_column(group) + n * 2 + e % 2, column = tile * TILE + lane_id() / 4 + e / 2 * 8;
        if (k >= a.k_width || column >= v_width) continue;
        float* const at = stored + (u64)k * v_width + column;
        if (WRITE) *at = state[group][n][e];
        else state[group][n][e] = *at;
    }
}

// The products of a span's raw keys and queries with the state, as far as this warp has them.
template <u32 GROUPS>
__device__ __forceinline__ void look(const float (&state)[GROUPS][4][4], const Taken<GROUPS>& taken, Shared& shared) {
    float seen[2][4] = {}, asked[2][4] = {};
#pragma unroll
    for (u32 i = 0; i < GROUPS * 2; ++i) {
        const u32 group = i / 2, w = i % 2 * 2;
        const Parts<3> parts(state[group][w], state[group][w + 1]);
#pragma unroll
        for (u32 q = 0; q < 2; ++q) {
            const Quad key = taken.key[group][q][threadIdx.x], query = taken.query[group][q][threadIdx.x];
#pragma unroll
            for (u32 p = 3; p-- > 0;) parts.times(seen[q], p, key.word[w], key.word[w + 1]);
            // Outputs are rounded to bf16.
#pragma unroll
            for (u32 p = 2; p-- > 0;) parts.times(asked[q], p, query.word[w], query.word[w + 1]);
        }
    }
#pragma unroll
    for (u32 q = 0; q < 2; ++q) {
        shared[q][warp_id()][lane_id()] = Four{{seen[q][0], seen[q][1], seen[q][2], seen[q][3]}};
        shared[2 + q][warp_id()][lane_id()] = Four{{asked[q][0], asked[q][1], asked[q][2], asked[q][3]}};
    }
}

__device__ __forceinline__ void total(float (&sum)[4], const Four (&parts)[CHUNK_WARPS][32]) {
#pragma unroll
    for (u32 w = 0; w < CHUNK_WARPS; ++w) {
        const Four part = parts[w][lane_id()];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) sum[e] = w == 0 ? part.value[e] : add(sum[e], part.value[e]);
    }
}

// Changes the state by a span of `count` rows at `first`, and writes its outputs.
template <u32 GROUPS>
__device__ __forceinline__ void change(float (&state)[GROUPS][4][4], const Taken<GROUPS>& taken, const Shared& shared,
                                       const Args& a, u64 first, u32 count, u32 head, u32 tile) {
    const u32 g = lane_id() / 4, t = lane_id() % 4;
    float wanted[2][4], fresh[2][4] = {};
#pragma unroll
    for (u32 q = 0; q < 2; ++q) {
        total(wanted[q], shared[q]);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u32 i = t * 4 + q * 2 + e % 2;
            wanted[q][e] = fused(-taken.factor[i].value[0], wanted[q][e], widen(taken.v[i][g + e / 2 * 8]));
        }
    }
    const Parts<3> parts(wanted[0], wanted[1]);
#pragma unroll
    for (u32 q = 0; q < 2; ++q) parts.times(fresh[q], taken.solution[row_of(q, g)][t]);

    // Two warps answer, for a tile of rows each.
    const u32 q = warp_id();
    if (q < 2) {
        float y[4];
        total(y, shared[2 + q]);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) y[e] = mul(y[e], taken.factor[t * 4 + q * 2 + e % 2].value[1]);
        Parts<2>(fresh[0], fresh[1]).times(y, taken.output[row_of(q, g)][t]);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u32 i = t * 4 + q * 2 + e % 2, column = tile * TILE + g + e / 2 * 8;
            if (i < count && column < a.v_width)
                a.y[((first + i) * a.v_heads + head) * a.v_width + column] = narrow(y[e]);
        }
    }

#pragma unroll
    for (u32 q = 0; q < 2; ++q)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) fresh[q][e] = mul(fresh[q][e], taken.factor[t * 4 + q * 2 + e % 2].value[2]);
    const Parts<3> added(fresh[0], fresh[1]);
    const float decay = taken.factor[count - 1].value[3];
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
        const Quad low = taken.key[group][0][threadIdx.x], high = taken.key[group][1][threadIdx.x];
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
            float(&held)[4] = state[group][n];
            const u32 b0 = transposed(low.word[n]), b1 = transposed(high.word[n]);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) held[e] = mul(held[e], decay);
#pragma unroll
            for (u32 p = 3; p-- > 0;) added.times(held, p, b0, b1);
        }
    }
}

// The rows of a slot, the first of which is `first`.
template <u32 GROUPS> __device__ __forceinline__ void chunk_slot(const Args& a, u64 first, u32 run, u32 slot) {
    constexpr u32 COUNT = STAGES<GROUPS>;
    const u32 tiles = ceil_div(a.v_width, TILE), head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    Pool<GROUPS>& own = *(Pool<GROUPS>*)pool;
    const auto rows = [&](u32 done) { return done < run ? least(SPAN, run - done) : 0; };
    // The slot before this one is done with the pool.
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < COUNT - 1; ++i) take(own.taken[i], a, first + i * SPAN, rows(i * SPAN), head, tile);
    float state[GROUPS][4][4] = {};
    move<false>(state, a, slot, head, tile);
    for (u32 span = 0, done = 0; done < run; ++span, done += SPAN) {
        const Taken<GROUPS>& taken = own.taken[span % COUNT];
        // Sums are read until all warps have written the next span's, so two take turns.
        Shared& shared = own.shared[span % 2];
        copy_wait<COUNT - 2>();
        look(state, taken, shared);
        __syncthreads();
        // Now nobody reads the span before this one, whose place is free.
        const u32 ahead = done + (COUNT - 1) * SPAN;
        take(own.taken[(span + COUNT - 1) % COUNT], a, first + ahead, rows(ahead), head, tile);
        change(state, taken, shared, a, first + done, rows(done), head, tile);
    }
    move<true>(state, a, slot, head, tile);
}

// blockIdx.x: head and tile; blockIdx.y: CHUNK_ROWS rows, of which the block takes the slots that begin there.
extern "C" __global__ void __launch_bounds__(CHUNK_WARPS * 32, 3) delta_chunk(Args a) {
    let_next_start();
    wait_for_previous();
    const u32 to = least((blockIdx.y + 1) * CHUNK_ROWS, a.rows.count);
    for (u32 at = blockIdx.y * CHUNK_ROWS; at < to;) {
        const u32 row = a.rows.first + at;
        const Fact& fact = a.rows.facts[row];
        if (fact.place == 0) {
            const u32 run = a.rows.run(row);
            if (a.k_width <= 128) chunk_slot<1>(a, row, run, fact.slot);
            else if (a.k_width <= 256) chunk_slot<2>(a, row, run, fact.slot);
        }
        at += fact.count - fact.place;
    }
}
