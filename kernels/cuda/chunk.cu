// The twins of DeltaReady and DeltaChunk of kernels/src/delta.rs. Key heads are at most 256 wide; wider ones are
// left unwritten.
//
// Spans of 16 rows on tensor cores. Keys and queries enter as the bf16 that they are, their norms as factors of
// the sums; an f32 enters as the sum of three bf16.
#include "delta.cuh"

static_assert(sizeof(Args) == ARGS_BYTES_delta_ready);
static_assert(sizeof(Args) == ARGS_BYTES_delta_chunk);

constexpr u32 WARPS = 4;
// Columns of a block of delta_chunk.
constexpr u32 TILE = 16;
// Rows of the launch per block of delta_chunk, which takes the slots that begin there.
constexpr u32 CHUNK_ROWS = 512;
// Rows that are taken at once, and what a row brings then for a value head.
constexpr u32 SPAN = 16;
constexpr u32 READY = 36;

// Starts to copy elements `at ..` of a row of `count` to shared memory: zeros past its end, or if not `live`.
__device__ __forceinline__ void copy_eight(Quad* to, const bf16* row, u32 at, u32 count, bool live) {
    if (whole<8>(row, count)) {
        copy_async(to, row + (at < count ? at : 0), live && at < count);
    } else {
#pragma unroll 1
        for (u32 e = 0; e < 8; ++e) ((bf16*)to)[e] = live && at + e < count ? row[at + e] : bf16{0};
    }
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
    __shared__ Four systems[WARPS][SPAN][SPAN / 4];
    __shared__ float sums[WARPS][SPAN], betas[WARPS][SPAN], key_scales[WARPS][SPAN], query_scales[WARPS][SPAN];
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
            const Four factors = {{mul(decay, key), mul(decay, query), mul(rest, key), decay}};
            *(Four*)(ready_of(a, first + own, head) + 2 * SPAN) = factors;
        }
    }
    __syncwarp();
}

// blockIdx.x: a value head for every warp; blockIdx.y: SPAN rows, of which the block takes the spans that begin
// there.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 5) delta_ready(Args a) {
    let_next_start();
    wait_for_previous();
    const u32 head = blockIdx.x * WARPS + warp_id();
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
    Quad key[GROUPS][2][WARPS * 32], query[GROUPS][2][WARPS * 32];
    Four solution[SPAN][SPAN / 4], output[SPAN][SPAN / 4], factor[SPAN];
    bf16 v[SPAN][TILE + 8]; // So that rows lie in different banks.
};
// Spans that are on their way or in use, and the shared memory that they and a block's sums take.
template <u32 GROUPS> constexpr u32 STAGES = 4 / GROUPS;
// Sums that a block's warps share: of the keys' products two tiles, then of the queries'.
typedef Four Shared[4][WARPS][32];

template <u32 GROUPS> struct Pool {
    Taken<GROUPS> taken[STAGES<GROUPS>];
    Shared shared[2];
};
constexpr u32 CHUNK_SHARED = 61440;
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

__device__ __forceinline__ void total(float (&sum)[4], const Four (&parts)[WARPS][32]) {
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
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
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) delta_chunk(Args a) {
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
