// The twins of kernels/src/index.rs and kernels/src/index/split.rs, which hold the contracts. A completed block
// without a page is not pooled, and one that has to be scored counts as 0. `index_select` can choose up to half
// of `HELD` blocks; a row that has to choose among more with a larger `top` is left unwritten.
#include "attention.cuh"
#include "few.cuh"
#include "ptx.cuh"
#include "select.cuh"

struct PoolArgs {
    RowRange rows;
    Projection projection;
    const bf16* gain;
    Part ring, axes;
    Pages pages;
    Rotary rotary;
    float eps;
    u32 zero;
};
static_assert(sizeof(PoolArgs) == ARGS_BYTES_index_pool);

struct SelectArgs {
    RowRange rows;
    Projection projection;
    const bf16* iq;
    u32* chosen;
    Part ring;
    Pages pages;
    u32 top, zero;
};
static_assert(sizeof(SelectArgs) == ARGS_BYTES_index_select);

struct ScoreArgs {
    RowRange rows;
    const bf16* iq;
    float* scores;
    Pages pages;
    u32 heads, top, room, zero;
};
static_assert(sizeof(ScoreArgs) == ARGS_BYTES_index_score);

struct TopArgs {
    RowRange rows;
    Projection projection;
    const float* scores;
    u32* chosen;
    Part ring;
    Pages pages;
    u32 top, room;
};
static_assert(sizeof(TopArgs) == ARGS_BYTES_index_top);

// One block per row.
extern "C" __global__ void __launch_bounds__(64) index_pool(PoolArgs a) {
    follow();
    const Pages& pages = a.pages;
    const u32 width = pages.index_width, ratio = pages.ratio;
    const Fact& fact = a.rows.facts[a.rows.first + blockIdx.x];
    if ((fact.position + 1) % ratio != 0) return;
    const u32 block = fact.position / ratio, first = block * ratio, start = fact.start();
    bf16* const out = pages.pooled(fact.slot, block);
    if (!out) return;
    const bf16* const ring = a.ring.slot<bf16>(fact.slot);
    const u32 key_at = a.projection.index_key_at(pages);
    const auto mean = [&](u32 j) {
        float sum = 0.0f;
        for (u32 p = first; p <= fact.position; ++p) {
            const bool here = p >= start;
            const bf16* const key = here ? a.projection.row(fact.first + (p - start)) + key_at
                                         : ring + (u64)(p % PAGE) * width;
            sum = add(sum, widen(key[j]));
        }
        return r16(div(sum, (float)ratio));
    };
    const i32* const axes = first >= start ? a.rows.facts[fact.first + (first - start)].axes
                                           : a.axes.slot<i32>(fact.slot) + first % PAGE * 3;
    norm_and_turn(mean, width, a.gain, a.eps, a.rotary, axes, out);
}

constexpr u32 THREADS = 512;
// Blocks whose scores are held at once.
constexpr u32 HELD = 5120;

// Sixteen columns of a row, `at ..`: what a lane owns of a unit of 64. Zero past the end, and if there is no row.
struct Strip {
    Quad half[2];

    __device__ Strip(const bf16* row, u32 at, u32 columns, bool aligned) : half{} {
        if (!row || at >= columns) return;
        if (aligned && at + 16 <= columns) {
            half[0] = ((const Quad*)(row + at))[0];
            half[1] = ((const Quad*)(row + at))[1];
        } else {
#pragma unroll
            for (u32 i = 0; i < 16; ++i)
                if (at + i < columns) half[i / 8].word[i % 8 / 2] |= (u32)row[at + i].bits << 16 * (i % 2);
        }
    }
};

// Scores of this warp's 16 blocks: those `base ..` of `count` from `first` on. Calls `store(at, score)` for each,
// counted from `first`.
template <class Store>
__device__ __forceinline__ void score_blocks(const Pages& pages, u32 slot, const bf16* queries, u32 heads, u32 first,
                                             u32 base, u32 count, Store store) {
    const u32 width = pages.index_width, g = lane_id() / 4, t = lane_id() % 4;
    const bf16* key[2];
    for (u32 i = 0; i < 2; ++i) key[i] = base + g + i * 8 < count ? pages.pooled(slot, first + base + g + i * 8) : nullptr;
    const bool aligned = aligned16(pages.base) && pages.stride % 16 == 0 && pages.key_elements() % 8 == 0 &&
                         aligned16(queries) && width % 8 == 0;
    float total[2] = {};
    for (u32 head = 0; head < heads; head += 8) {
        const bf16* const query = head + g < heads ? queries + (u64)(head + g) * width : nullptr;
        float sums[4] = {};
#pragma unroll 2
        for (u32 at = t * 16; at - t * 16 < width; at += 64) {
            const Strip low(key[0], at, width, aligned), high(key[1], at, width, aligned);
            const Strip x(query, at, width, aligned);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 h = j / 2, w = j % 2 * 2;
                mma(sums, low.half[h].word[w], high.half[h].word[w], low.half[h].word[w + 1], high.half[h].word[w + 1],
                    x.half[h].word[w], x.half[h].word[w + 1]);
            }
        }
        for (u32 h = 0; h < 8 && head + h < heads; ++h)
            for (u32 i = 0; i < 2; ++i) {
                const float mine = h % 2 ? sums[i * 2 + 1] : sums[i * 2];
                const float dot = __shfl_sync(WHOLE_WARP, mine, g * 4 + h / 2);
                total[i] = add(total[i], dot > 0.0f ? dot : 0.0f);
            }
    }
    // A block without a page has zeros for a key, and so for a score.
    const u32 at = base + g + t * 8;
    if (t < 2 && at < count) store(at, div(t == 0 ? total[0] : total[1], root((float)width)));
}

// Puts the raw key of a row into its slot's ring, if it is one of the last.
__device__ void keep_key(const Part& ring, const Projection& projection, const Pages& pages, const Fact& fact, u64 row) {
    if (fact.place + PAGE >= fact.count)
        copy_row(ring.slot<bf16>(fact.slot) + (u64)(fact.position % PAGE) * pages.index_width,
                 projection.row(row) + projection.index_key_at(pages), pages.index_width);
}

// Chooses all blocks if there are no more than `top`, and says so.
__device__ bool choose_all(u32* chosen, u32 blocks, u32 top) {
    if (blocks > top) return false;
    for (u32 i = threadIdx.x; i < top; i += blockDim.x) chosen[i] = i < blocks ? i : NONE;
    return true;
}

// Keeps the `top` best of more entries, in their order; of equal ones the first.
__device__ void keep_best(u32* scores, u32* ids, u32 count, u32 top) {
    __shared__ u32 bins[BINS];
    u32 bar = 0, need = top;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += THREADS)
            if (shift == 24 || scores[i] >> (shift + 8) == bar >> (shift + 8))
                atomicAdd(&bins[scores[i] >> shift & 255], 1);
        const Bin bin = find_bin([&](u32 b) { return (u64)bins[b]; }, need);
        bar |= bin.bin << shift;
        need -= (u32)bin.above;
        __syncthreads();
    }
    // `need` entries at the bar stay, and all above it.
    u32 kept = 0, equal = 0;
    for (u32 from = 0; from < count; from += THREADS) {
        const u32 i = from + threadIdx.x;
        const u32 score = i < count ? scores[i] : 0, id = i < count ? ids[i] : 0;
        const bool at_bar = i < count && score == bar;
        const Rank among = block_rank(at_bar);
        const bool keep = i < count && (score > bar || (at_bar && equal + among.before < need));
        const Rank place = block_rank(keep);
        if (keep) {
            scores[kept + place.before] = score;
            ids[kept + place.before] = id;
        }
        equal += among.total;
        kept += place.total;
        __syncthreads();
    }
}

// One block per row.
extern "C" __global__ void __launch_bounds__(THREADS) index_select(SelectArgs a) {
    follow();
    __shared__ u32 scores[HELD], ids[HELD];
    const Pages& pages = a.pages;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    keep_key(a.ring, a.projection, pages, fact, row);
    u32* const chosen = a.chosen + row * a.top;
    const u32 blocks = (fact.position + 1) / pages.ratio;
    if (choose_all(chosen, blocks, a.top)) return;
    if (a.top > HELD / 2) return;
    const bf16* const queries = a.iq + row * a.projection.index_heads * pages.index_width;
    u32 kept = 0;
    for (u32 next = 0; next < blocks;) {
        const u32 fresh = least(HELD - kept, blocks - next);
        for (u32 base = warp_id() * 16; base < fresh; base += THREADS / 32 * 16)
            score_blocks(pages, fact.slot, queries, a.projection.index_heads, next, base, fresh,
                         [&](u32 at, float score) { scores[kept + at] = __float_as_uint(score); });
        for (u32 i = threadIdx.x; i < fresh; i += THREADS) ids[kept + i] = next + i;
        __syncthreads();
        keep_best(scores, ids, kept + fresh, a.top);
        kept = a.top;
        next += fresh;
    }
    for (u32 i = threadIdx.x; i < a.top; i += THREADS) chosen[i] = ids[i];
}

constexpr u32 SCORE_WARPS = 8;

// blockIdx.x: row; blockIdx.y: some of its blocks, 16 for each warp at a time. Rows that see no more than they
// may choose leave.
extern "C" __global__ void __launch_bounds__(SCORE_WARPS * 32) index_score(ScoreArgs a) {
    follow();
    const Pages& pages = a.pages;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    const u32 blocks = (fact.position + 1) / pages.ratio;
    if (blocks <= a.top || blocks > a.room) return;
    const bf16* const queries = a.iq + row * a.heads * pages.index_width;
    float* const scores = a.scores + row * a.room;
    for (u32 base = (blockIdx.y * SCORE_WARPS + warp_id()) * 16; base < blocks; base += gridDim.y * SCORE_WARPS * 16)
        score_blocks(pages, fact.slot, queries, a.heads, 0, base, blocks,
                     [&](u32 at, float score) { scores[at] = score; });
}

constexpr u32 TOP_THREADS = 1024;

// One block per row. A score is not negative, so its bits order like it. The next launch may read what the launches
// before this one wrote before it waits for this one: it starts when that is complete.
extern "C" __global__ void __launch_bounds__(TOP_THREADS) index_top(TopArgs a) {
    wait_for_previous();
    let_next_start();
    constexpr u32 WARPS = TOP_THREADS / 32;
    __shared__ u32 bins[BINS], above[WARPS], equal[WARPS];
    const Pages& pages = a.pages;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    keep_key(a.ring, a.projection, pages, fact, row);
    u32* const chosen = a.chosen + row * a.top;
    const u32 blocks = (fact.position + 1) / pages.ratio;
    if (choose_all(chosen, blocks, a.top) || blocks > a.room) return;
    const u32* const scores = (const u32*)a.scores + row * a.room;

    // The `top`-th best score, digit by digit; `need` of those equal to it are chosen.
    u32 bar = 0, need = a.top;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < BINS; i += TOP_THREADS) bins[i] = 0;
        __syncthreads();
#pragma unroll 8
        for (u32 i = threadIdx.x; i < blocks; i += TOP_THREADS) {
            const u32 score = scores[i];
            if (shift == 24 || score >> (shift + 8) == bar >> (shift + 8)) atomicAdd(&bins[score >> shift & 255], 1);
        }
        const Bin bin = find_bin([&](u32 b) { return (u64)bins[b]; }, need);
        bar |= bin.bin << shift;
        need -= (u32)bin.above;
        __syncthreads();
    }

    // A warp owns a run of blocks: it counts them, learns what lies before, and writes its choices.
    const u32 run = ceil_div(blocks, TOP_THREADS) * 32, from = warp_id() * run, to = least(from + run, blocks);
    const u32 lane = lane_id(), before_me = (1u << lane) - 1;
    u32 better = 0, ties = 0;
#pragma unroll 8
    for (u32 base = from; base < to; base += 32) {
        const u32 score = base + lane < to ? scores[base + lane] : 0;
        better += __popc(__ballot_sync(WHOLE_WARP, base + lane < to && score > bar));
        ties += __popc(__ballot_sync(WHOLE_WARP, base + lane < to && score == bar));
    }
    if (lane == 0) {
        above[warp_id()] = better;
        equal[warp_id()] = ties;
    }
    __syncthreads();
    better = __reduce_add_sync(WHOLE_WARP, lane < warp_id() ? above[lane] : 0);
    ties = __reduce_add_sync(WHOLE_WARP, lane < warp_id() ? equal[lane] : 0);
#pragma unroll 8
    for (u32 base = from; base < to; base += 32) {
        const u32 score = base + lane < to ? scores[base + lane] : 0;
        const u32 over = __ballot_sync(WHOLE_WARP, base + lane < to && score > bar);
        const u32 tied = __ballot_sync(WHOLE_WARP, base + lane < to && score == bar);
        const u32 ties_here = ties + __popc(tied & before_me);
        const bool keep = (over >> lane & 1) || ((tied >> lane & 1) && ties_here < need);
        if (keep) chosen[better + __popc(over & before_me) + least(ties_here, need)] = base + lane;
        better += __popc(over);
        ties += __popc(tied);
    }
}
