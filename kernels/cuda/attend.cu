// The twins of kernels/src/attend.rs and kernels/src/attend/parts.rs, which hold the contracts. A block takes a
// row and up to 16 query heads of one key/value head; heads are at most 256 wide, wider ones are left unwritten.
//
// A row's positions are taken a span at a time, in order. Weights are kept relative to the largest score so far,
// and what was summed is scaled when a larger one appears. Weights enter the sum of values as the sum of two
// bf16, so that they keep 16 bits. Positions without a page, and blocks past the row, are skipped. The keys of a
// span are on their way while the values of the span before it are summed, and the other way round.
#include "attention.cuh"
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    RowRange rows;
    Projection projection;
    const bf16* q;
    const u32* chosen;
    Pages pages;
    bf16* out;
    u32 top, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_attend);

struct PartArgs {
    RowRange rows;
    Projection projection;
    const bf16* q;
    const u32* chosen;
    Pages pages;
    float* sums;
    float* marks;
    u32 top, zero;
};
static_assert(sizeof(PartArgs) == ARGS_BYTES_attend_part);

struct JoinArgs {
    RowRange rows;
    Projection projection;
    const float* sums;
    const float* marks;
    Pages pages;
    bf16* out;
    u32 top, zero;
};
static_assert(sizeof(JoinArgs) == ARGS_BYTES_attend_join);

constexpr u32 WARPS = 8;
constexpr u32 HEADS = 16;
constexpr u32 SPAN = 64;
// Columns of a head at most, of a warp, and from one staged row to the next.
constexpr u32 WIDTH = 256;
constexpr u32 COLUMNS = WIDTH / WARPS;
constexpr u32 PITCH = WIDTH + 8;
// Columns of a block of `attend_join`.
constexpr u32 JOINED = 128;
// Parts that it reads at once.
constexpr u32 BATCH = 16;

extern __shared__ Quad pool[];

struct Shared {
    // The keys of two spans' positions in turn, null where there is none.
    const bf16* keys[2][SPAN];
    float scores[HEADS][SPAN + 4];
    bf16 high[HEADS][SPAN + 8], low[HEADS][SPAN + 8];
    float largest[HEADS], sum[HEADS], factor[HEADS];
};

// Starts the copy of ROWS rows, of zeros where there is none. Columns up to the next multiple of 16 are zero. `anywhere`
// is an aligned address.
template <u32 ROWS, class Row>
__device__ __forceinline__ void stage_rows(bf16* to, u32 width, bool aligned, const void* anywhere, Row row) {
    const u32 end = ceil_div(width, 16) * 16, at = lane_id() * 8;
    static_assert(WIDTH <= 32 * 8);
    if (at >= end) return;
    if (aligned) {
#pragma unroll
        for (u32 i = warp_id(); i < ROWS; i += WARPS) {
            const bf16* const from = row(i);
            const bool live = from && at < width;
            copy_async(to + i * PITCH + at, live ? (const void*)(from + at) : anywhere, live);
        }
        return;
    }
#pragma unroll 1
    for (u32 i = warp_id(); i < ROWS; i += WARPS) {
        const bf16* const from = row(i);
#pragma unroll 1
        for (u32 e = at; e < at + 8; ++e) to[i * PITCH + e] = from && e < width ? from[e] : bf16{0};
    }
}

// What a row attends to.
struct Sight {
    u32 blocks, in_blocks, count;

    __device__ Sight(u32 position, u32 ratio, u32 top) {
        blocks = (position + 1) / ratio;
        in_blocks = least(top, blocks) * ratio;
        count = in_blocks + (position + 1) % ratio;
    }
};

// How many spans a row can have.
__device__ u32 spans(u32 ratio, u32 top) { return ceil_div(top * ratio + ratio - 1, SPAN); }

// One key/value head of one row.
struct Line {
    u32 slot, position;
    const u32* chosen;
    const Pages& pages;
    Sight sight;
    u32 kv_head;
    bool aligned;

    // The facts of a round are complete long before any launch that attends.
    __device__ Line(const Fact& fact, const u32* chosen, const Pages& pages, u32 top, u32 kv_head)
        : slot(__ldcg(&fact.slot)), position(__ldcg(&fact.position)), chosen(chosen), pages(pages),
          sight(position, pages.ratio, top), kv_head(kv_head),
          aligned(aligned16(pages.base) && pages.stride % 16 == 0 && pages.width % 8 == 0) {}

    // The keys of the row's position number `at`, null if there are none.
    __device__ const bf16* keys(u32 at) const {
        const u32 ratio = pages.ratio;
        const bool in_block = at < sight.in_blocks;
        const u32 block = in_block ? chosen[at / ratio] : sight.blocks;
        const u32 place = block * ratio + (in_block ? at % ratio : at - sight.in_blocks);
        if (at >= sight.count || block > sight.blocks || place > position) return nullptr;
        const bf16* const page = pages.page(slot, place);
        return page ? page + ((u64)(place % PAGE) * pages.kv_heads + kv_head) * pages.width : nullptr;
    }

    // Starts the copy of a span's keys, or of what lies `offset` elements behind them.
    __device__ __forceinline__ void stage(bf16* to, const bf16* const (&keys)[SPAN], u64 offset) const {
        stage_rows<SPAN>(to, pages.width, aligned, pages.base,
                         [&](u32 row) { return keys[row] ? keys[row] + offset : nullptr; });
    }
};

// The queries of all heads as the 16-row side of products over 16 columns each, from staged rows.
struct Queries {
    u32 word[WIDTH / 16][4];

    // Columns past the heads' are whatever lies there: `score` does not use them.
    __device__ __forceinline__ explicit Queries(const bf16* rows) {
        const bf16* const mine = rows + lane_id() / 4 * PITCH + lane_id() % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < WIDTH / 16; ++i)
#pragma unroll
            for (u32 part = 0; part < 4; ++part)
                word[i][part] = *(const u32*)(mine + part % 2 * 8 * PITCH + i * 16 + part / 2 * 8);
    }
};

// The scores of this warp's 8 positions of the span.
__device__ __forceinline__ void score(Shared& s, const bf16* keys, const Queries& q, u32 width) {
    const u32 g = lane_id() / 4, t = lane_id() % 4, at = warp_id() * 8;
    const bf16* const key = keys + (at + g) * PITCH + t * 2;
    // Even and odd products apart: two shorter chains.
    float sums[2][4] = {};
#pragma unroll
    for (u32 i = 0; i < WIDTH / 16; ++i)
        if (i * 16 < width)
            mma(sums[i % 2], q.word[i][0], q.word[i][1], q.word[i][2], q.word[i][3], *(const u32*)(key + i * 16),
                *(const u32*)(key + i * 16 + 8));
    const float scale = root((float)width);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) s.scores[g + i / 2 * 8][at + t * 2 + i % 2] = div(add(sums[0][i], sums[1][i]), scale);
}

// Weights of the heads from the scores of a span, a warp for each.
__device__ __forceinline__ void weigh(Shared& s, const bf16* const (&keys)[SPAN], u32 heads) {
#pragma unroll 1
    for (u32 head = warp_id(); head < heads; head += WARPS) {
        const float before = s.largest[head];
        float largest = before;
        for (u32 i = lane_id(); i < SPAN; i += 32)
            if (keys[i] && s.scores[head][i] > largest) largest = s.scores[head][i];
        for (u32 apart = 16; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(WHOLE_WARP, largest, apart);
            largest = other > largest ? other : largest;
        }
        float sum = 0.0f;
        for (u32 i = lane_id(); i < SPAN; i += 32) {
            const float weight = keys[i] ? exp_of(sub(s.scores[head][i], largest)) : 0.0f;
            const bf16 high = narrow(weight);
            s.high[head][i] = high;
            s.low[head][i] = narrow(sub(weight, widen(high)));
            sum = add(sum, weight);
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            const float factor = before == largest ? 1.0f : exp_of(sub(before, largest));
            s.factor[head] = factor;
            s.largest[head] = largest;
            s.sum[head] = add(mul(s.sum[head], factor), sum);
        }
    }
}

// Adds the weighted values of a span, columns `first ..` of 32; lane g owns columns first + 4g .. + 3.
__device__ __forceinline__ void add_values(Shared& s, float (&means)[4][4], const bf16* values, u32 first) {
    const u32 g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) means[i / 4][i % 4] = mul(means[i / 4][i % 4], s.factor[g + i % 4 / 2 * 8]);
#pragma unroll
    for (u32 at = 0; at < SPAN; at += 16) {
        Packed<4> v[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            v[i] = *(const Packed<4>*)(values + (at + t * 2 + i % 2 + i / 2 * 8) * PITCH + first + g * 4);
        const auto weights = [&](bf16(&from)[HEADS][SPAN + 8], u32 head, u32 position) {
            return *(const u32*)&from[head][at + position + t * 2];
        };
        const u32 high[4] = {weights(s.high, g, 0), weights(s.high, g + 8, 0), weights(s.high, g, 8),
                             weights(s.high, g + 8, 8)};
        const u32 low[4] = {weights(s.low, g, 0), weights(s.low, g + 8, 0), weights(s.low, g, 8),
                            weights(s.low, g + 8, 8)};
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            // Column c of two positions in one register.
            const u32 pick = c % 2 ? 0x7632 : 0x5410;
            const u32 b0 = __byte_perm(v[0].word[c / 2], v[1].word[c / 2], pick);
            const u32 b1 = __byte_perm(v[2].word[c / 2], v[3].word[c / 2], pick);
            mma(means[c], high[0], high[1], high[2], high[3], b0, b1);
            mma(means[c], low[0], low[1], low[2], low[3], b0, b1);
        }
    }
}

// Weighs and sums the row's positions number `from .. to`, at least one, and no more than a span if ONE. Heads of `s`
// hold what the weights sum up to, and `means` the weighted values: value i of this thread is that of head `head_of(i)`,
// column `column_of(i)`. The `heads` queries are staged already, not waited for.
template <bool ONE>
__device__ __forceinline__ void sum_up(Shared& s, const Line& line, u32 heads, u32 from, u32 to, float (&means)[4][4]) {
    const u32 width = line.pages.width, first = warp_id() * COLUMNS;
    const u64 values_at = line.pages.key_elements();
    bf16* const keys = (bf16*)pool;
    bf16* const values = keys + SPAN * PITCH;
    const auto locate = [&](u32 turn, u32 from) {
        const u32 i = threadIdx.x;
        if (i < SPAN) s.keys[turn][i] = from + i < to ? line.keys(from + i) : nullptr;
    };
    if (threadIdx.x < HEADS) {
        s.largest[threadIdx.x] = -infinity();
        s.sum[threadIdx.x] = 0.0f;
    }
    locate(0, from);
    __syncthreads();
    line.stage(keys, s.keys[0], 0);
    copy_commit();
    line.stage(values, s.keys[0], values_at);
    copy_commit();
    copy_wait<2>();
    __syncthreads();
    const Queries queries(values + SPAN * PITCH);
    for (u32 turn = 0; from < to; from += SPAN, turn = 1 - turn) {
        const bool more = !ONE && from + SPAN < to;
        if (more) locate(1 - turn, from + SPAN);
        copy_wait<1>();
        __syncthreads();
        score(s, keys, queries, width);
        __syncthreads();
        if (more) line.stage(keys, s.keys[1 - turn], 0);
        copy_commit();
        weigh(s, s.keys[turn], heads);
        copy_wait<1>();
        __syncthreads();
        if (first < width) add_values(s, means, values, first);
        if (ONE) break;
        __syncthreads();
        if (more) line.stage(values, s.keys[1 - turn], values_at);
        copy_commit();
    }
}
// Starts the copy of a block's queries, as `sum_up` wants them.
__device__ __forceinline__ void stage_queries(const bf16* q, u32 heads, const Pages& pages) {
    const u32 width = pages.width;
    stage_rows<HEADS>((bf16*)pool + 2 * SPAN * PITCH, width, aligned16(q) && width % 8 == 0, pages.base,
                      [&](u32 head) { return head < heads ? q + (u64)head * width : nullptr; });
    copy_commit();
}
__device__ __forceinline__ u32 head_of(u32 i) { return lane_id() / 4 + i % 4 / 2 * 8; }
__device__ __forceinline__ u32 column_of(u32 i) {
    return warp_id() * COLUMNS + (lane_id() % 4 * 2 + i % 2) * 4 + i / 4;
}

// The query heads of a block: `count` from `first` on.
struct Heads {
    u32 kv_head, first, count;

    __device__ Heads(u32 index, u32 q_heads, u32 kv_heads) {
        const u32 group = q_heads / kv_heads, tiles = ceil_div(group, HEADS), tile = index % tiles;
        kv_head = index / tiles;
        first = kv_head * group + tile * HEADS;
        count = least(HEADS, group - tile * HEADS);
    }
};

// blockIdx.x: row; blockIdx.y: key/value head and tile of its query heads.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attend(Args a) {
    follow();
    __shared__ Shared s;
    const u32 width = a.pages.width, q_heads = a.projection.q_heads;
    if (width > WIDTH) return;
    const Heads heads(blockIdx.y, q_heads, a.pages.kv_heads);
    const u64 row = a.rows.first + blockIdx.x;
    const Line line(a.rows.facts[row], a.chosen + row * a.top, a.pages, a.top, heads.kv_head);
    stage_queries(a.q + (row * q_heads + heads.first) * width, heads.count, a.pages);
    float means[4][4] = {};
    sum_up<false>(s, line, heads.count, 0, line.sight.count, means);

    const bf16* const x = a.projection.row(row);
    for (u32 i = 0; i < 16; ++i) {
        const u32 at = head_of(i), column = column_of(i);
        if (at >= heads.count || column >= width) continue;
        const float gate = sigmoid(widen(x[a.projection.gate_at(a.pages, heads.first + at) + column]));
        const float mean = r16(div(means[i / 4][i % 4], s.sum[at]));
        a.out[(row * q_heads + heads.first + at) * width + column] = narrow(mul(mean, gate));
    }
}

// blockIdx.x: row; blockIdx.y: span, key/value head and tile of its query heads. Spans past the row's leave. Queries
// are read before the launch waits, and what attend_join reads early is complete when this has: index_top and this let
// the next launch start late.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attend_part(PartArgs a) {
    __shared__ Shared s;
    const u32 width = a.pages.width, q_heads = a.projection.q_heads, most = spans(a.pages.ratio, a.top);
    const Heads heads(blockIdx.y / most, q_heads, a.pages.kv_heads);
    const u32 span = blockIdx.y % most, from = span * SPAN;
    const u64 row = a.rows.first + blockIdx.x;
    const Line line(a.rows.facts[row], a.chosen + row * a.top, a.pages, a.top, heads.kv_head);
    const u32 count = line.sight.count;
    const bool idle = from >= count || width > WIDTH;
    if (!idle) stage_queries(a.q + (row * q_heads + heads.first) * width, heads.count, a.pages);
    wait_for_previous();
    let_next_start();
    if (idle) return;
    float means[4][4] = {};
    sum_up<true>(s, line, heads.count, from, least(from + SPAN, count), means);

    const auto part = [&](u32 head) { return (row * q_heads + heads.first + head) * most + span; };
    // A thread holds runs of four columns.
    const bool quads = width % 4 == 0 && aligned16(a.sums);
#pragma unroll
    for (u32 run = 0; run < 4; ++run) {
        const u32 head = head_of(run), column = column_of(run);
        if (head >= heads.count) continue;
        float* const to = a.sums + part(head) * width + column;
        Quad quad;
#pragma unroll
        for (u32 c = 0; c < 4; ++c) quad.word[c] = __float_as_uint(means[c][run]);
        if (quads && column < width) *(Quad*)to = quad;
        for (u32 c = 0; !quads && c < 4; ++c)
            if (column + c < width) to[c] = means[c][run];
    }
    if (threadIdx.x < heads.count) {
        float* const marks = a.marks + part(threadIdx.x) * 2;
        marks[0] = s.largest[threadIdx.x];
        marks[1] = s.sum[threadIdx.x];
    }
}

// One warp per row, query head and run of columns. blockIdx.x: row; blockIdx.y: head and run. The gate is read before
// the launch waits.
extern "C" __global__ void __launch_bounds__(32) attend_join(JoinArgs a) {
    const u32 width = a.pages.width, q_heads = a.projection.q_heads, most = spans(a.pages.ratio, a.top);
    const u32 runs = ceil_div(width, JOINED), head = blockIdx.y / runs, lane = lane_id();
    const u32 column = blockIdx.y % runs * JOINED + lane * 4;
    const u64 row = a.rows.first + blockIdx.x, line = row * q_heads + head;
    const bf16* const gates = a.projection.row(row) + a.projection.gate_at(a.pages, head);
    float gate[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c)
        gate[c] = column + c < width ? sigmoid(widen(bf16{__ldcg((const u16*)(gates + column + c))})) : 0.0f;
    const u32 count = ceil_div(Sight(__ldcg(&a.rows.facts[row].position), a.pages.ratio, a.top).count, SPAN);
    const float* const marks = a.marks + line * most * 2;
    const float* const sums = a.sums + line * most * width + column;
    const bool quads = width % 4 == 0 && aligned16(a.sums);
    follow();

    float largest = -infinity();
    for (u32 i = lane; i < count; i += 32) largest = marks[i * 2] > largest ? marks[i * 2] : largest;
    for (u32 apart = 16; apart > 0; apart /= 2) {
        const float other = __shfl_xor_sync(WHOLE_WARP, largest, apart);
        largest = other > largest ? other : largest;
    }
    float total = 0.0f, mean[4] = {};
#pragma unroll 1
    for (u32 from = 0; from < count; from += BATCH) {
        Quad parts[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const float* const part = sums + (u64)(from + i) * width;
            const bool live = from + i < count && column < width;
            parts[i] = Quad{};
            if (live && quads) parts[i] = *(const Quad*)part;
            else if (live)
                for (u32 c = 0; c < least(4, width - column); ++c) parts[i].word[c] = __float_as_uint(part[c]);
        }
        const bool mine = lane < BATCH && from + lane < count;
        const float factor = mine ? exp_of(sub(marks[(from + lane) * 2], largest)) : 0.0f;
        const float sum = mine ? mul(factor, marks[(from + lane) * 2 + 1]) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            if (from + i >= count) break;
            const float weight = __shfl_sync(WHOLE_WARP, factor, i);
            total = add(total, __shfl_sync(WHOLE_WARP, sum, i));
#pragma unroll
            for (u32 c = 0; c < 4; ++c) mean[c] = add(mean[c], mul(weight, __uint_as_float(parts[i].word[c])));
        }
    }
    for (u32 c = 0; c < 4; ++c)
        if (column + c < width) a.out[line * width + column + c] = narrow(mul(r16(div(mean[c], total)), gate[c]));
}
