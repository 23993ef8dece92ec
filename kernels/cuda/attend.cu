// The twin of kernels/src/attend.rs, which holds the contract. One block per row and up to 16 query heads of one
// key/value head; heads are at most 256 wide, wider ones are left unwritten.
//
// A row's positions are taken 128 at a time, in order. Weights are kept relative to the largest score so far,
// and what was summed is scaled when a larger one appears. Weights enter the sum of values as the sum of two
// bf16, so that they keep 16 bits. Positions without a page, and blocks past the row, are skipped.
#include "attention.cuh"
#include "matrix.cuh"

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

constexpr u32 WARPS = 8;
constexpr u32 HEADS = 16;
constexpr u32 SPAN = WARPS * 16;
constexpr u32 COLUMNS = 32;

struct Shared {
    // The keys of the span's positions, null where there is none.
    const bf16* keys[SPAN];
    float scores[HEADS][SPAN + 4];
    bf16 high[HEADS][SPAN + 8], low[HEADS][SPAN + 8];
    float largest[HEADS], sum[HEADS], factor[HEADS];
};

// The scores of this warp's 16 positions of the span.
__device__ void score(const Args& a, Shared& s, const bf16* q, u32 heads, u32 width) {
    const u32 g = lane_id() / 4, t = lane_id() % 4, at = warp_id() * 16;
    const bf16* const low[1] = {q + (u64)least(g, heads - 1) * width};
    const bf16* const high[1] = {q + (u64)least(g + 8, heads - 1) * width};
    const bf16* const keys[2] = {s.keys[at + g], s.keys[at + 8 + g]};
    const bool mine = aligned16(low[0]) && aligned16(high[0]) && aligned16(keys[0]) && aligned16(keys[1]);
    float sums[1][2][4] = {};
    add_units<1, 2, false>(sums, low, high, keys, 0, ceil_div(width, UNIT), width,
                    __all_sync(WHOLE_WARP, mine && width % 8 == 0));
    const float scale = root((float)width);
    for (u32 i = 0; i < 8; ++i)
        s.scores[g + i % 4 / 2 * 8][at + i / 4 * 8 + t * 2 + i % 2] = div(sums[0][i / 4][i % 4], scale);
}

// Weights of two heads from the scores of a span.
__device__ void weigh(Shared& s) {
    for (u32 head = warp_id() * 2; head < warp_id() * 2 + 2; ++head) {
        const float before = s.largest[head];
        float largest = before;
        for (u32 i = lane_id(); i < SPAN; i += 32)
            if (s.keys[i] && s.scores[head][i] > largest) largest = s.scores[head][i];
        for (u32 apart = 16; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(WHOLE_WARP, largest, apart);
            largest = other > largest ? other : largest;
        }
        float sum = 0.0f;
        for (u32 i = lane_id(); i < SPAN; i += 32) {
            const float weight = s.keys[i] ? exp_of(sub(s.scores[head][i], largest)) : 0.0f;
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
        __syncwarp();
    }
}

// Four columns of a position's values as two words, zero where there is none.
__device__ __forceinline__ void load_values(u32 (&words)[2], const bf16* keys, u64 values, u32 column, u32 width) {
    words[0] = words[1] = 0;
    if (!keys) return;
    const bf16* const from = keys + values + column;
    if (((u64)from & 7) == 0 && column + 4 <= width) {
        const u64 both = *(const u64*)from;
        words[0] = (u32)both;
        words[1] = (u32)(both >> 32);
    } else {
        for (u32 i = 0; i < 4; ++i)
            if (column + i < width) words[i / 2] |= (u32)from[i].bits << 16 * (i % 2);
    }
}

// Adds the weighted values of a span, columns `first ..` of 32; lane g owns columns first + 4g .. + 3.
__device__ void add_values(Shared& s, float (&means)[4][4], u64 values, u32 first, u32 width) {
    const u32 g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) means[i / 4][i % 4] = mul(means[i / 4][i % 4], s.factor[g + i % 4 / 2 * 8]);
#pragma unroll 2
    for (u32 at = 0; at < SPAN; at += 16) {
        u32 v[4][2];
        for (u32 i = 0; i < 4; ++i)
            load_values(v[i], s.keys[at + t * 2 + i % 2 + i / 2 * 8], values, first + g * 4, width);
        const auto weights = [&](bf16(&from)[HEADS][SPAN + 8], u32 head, u32 position) {
            return *(const u32*)&from[head][at + position + t * 2];
        };
        for (u32 c = 0; c < 4; ++c) {
            // Column c of two positions in one register.
            const u32 pick = c % 2 ? 0x7632 : 0x5410;
            const u32 b0 = __byte_perm(v[0][c / 2], v[1][c / 2], pick);
            const u32 b1 = __byte_perm(v[2][c / 2], v[3][c / 2], pick);
            mma(means[c], weights(s.high, g, 0), weights(s.high, g + 8, 0), weights(s.high, g, 8),
                weights(s.high, g + 8, 8), b0, b1);
            mma(means[c], weights(s.low, g, 0), weights(s.low, g + 8, 0), weights(s.low, g, 8),
                weights(s.low, g + 8, 8), b0, b1);
        }
    }
}

// blockIdx.x: row; blockIdx.y: key/value head and tile of its query heads.
extern "C" __global__ void __launch_bounds__(WARPS * 32) attend(Args a) {
    __shared__ Shared s;
    const Pages& pages = a.pages;
    const u32 width = pages.width, q_heads = a.projection.q_heads, group = q_heads / pages.kv_heads;
    if (width > WARPS * COLUMNS) return;
    const u32 tiles = ceil_div(group, HEADS), kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
    const u32 head = kv_head * group + tile * HEADS, heads = least(HEADS, group - tile * HEADS);
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    const u32* const chosen = a.chosen + row * a.top;
    const bf16* const q = a.q + (row * q_heads + head) * width;

    const u32 blocks = (fact.position + 1) / pages.ratio, in_blocks = least(a.top, blocks) * pages.ratio;
    const u32 count = in_blocks + (fact.position + 1) % pages.ratio;
    const u32 first = warp_id() * COLUMNS;
    float means[4][4] = {};
    if (threadIdx.x < HEADS) {
        s.largest[threadIdx.x] = -infinity();
        s.sum[threadIdx.x] = 0.0f;
    }
    for (u32 from = 0; from < count; from += SPAN) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < SPAN; i += WARPS * 32) {
            const u32 at = from + i;
            const u32 block = at < in_blocks ? chosen[at / pages.ratio] : blocks;
            const u32 position = block * pages.ratio + (at < in_blocks ? at % pages.ratio : at - in_blocks);
            const bool live = at < count && block <= blocks && position <= fact.position;
            const bf16* const keys = live ? pages.page(fact.slot, position) : nullptr;
            const u64 in_page = ((u64)(position % PAGE) * pages.kv_heads + kv_head) * width;
            s.keys[i] = keys ? keys + in_page : nullptr;
        }
        __syncthreads();
        score(a, s, q, heads, width);
        __syncthreads();
        weigh(s);
        __syncthreads();
        if (first < width) add_values(s, means, pages.key_elements(), first, width);
    }
    const bf16* const x = a.projection.row(row);
    const u32 g = lane_id() / 4, t = lane_id() % 4;
    for (u32 i = 0; i < 16; ++i) {
        const u32 at = g + i % 4 / 2 * 8, column = first + (t * 2 + i % 2) * 4 + i / 4;
        if (at >= heads || column >= width) continue;
        const float gate = sigmoid(widen(x[a.projection.gate_at(pages, head + at) + column]));
        const float mean = r16(div(means[i / 4][i % 4], s.sum[at]));
        a.out[(row * q_heads + head + at) * width + column] = narrow(mul(mean, gate));
    }
}
