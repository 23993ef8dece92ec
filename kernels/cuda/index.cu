// The twins of kernels/src/index.rs, which holds the contracts. A completed block without a page is not
// pooled, and one that has to be scored counts as 0. A row can choose up to half of `HELD` blocks; a row that
// has to choose among more with a larger `top` is left unwritten.
#include "attention.cuh"
#include "matrix.cuh"
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

// One block per row.
extern "C" __global__ void __launch_bounds__(64) index_pool(PoolArgs a) {
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

// Scores of `count` blocks from `first` on, as numbers that order like them: a score is not negative.
__device__ void score_blocks(const SelectArgs& a, const Fact& fact, u64 row, u32 first, u32 count, u32* scores) {
    const Pages& pages = a.pages;
    const u32 width = pages.index_width, heads = a.projection.index_heads, g = lane_id() / 4, t = lane_id() % 4;
    const bf16* const queries = a.iq + row * heads * width;
    for (u32 base = warp_id() * 16; base < count; base += THREADS / 32 * 16) {
        const bf16* key[2];
        bool live[2];
        for (u32 i = 0; i < 2; ++i) {
            const u32 at = base + g + i * 8;
            key[i] = at < count ? pages.pooled(fact.slot, first + at) : nullptr;
            live[i] = key[i];
            if (!live[i]) key[i] = queries;
        }
        const bool mine = aligned16(key[0]) && aligned16(key[1]) && aligned16(queries) && width % 8 == 0;
        const bool aligned = __all_sync(WHOLE_WARP, mine);
        float total[2] = {};
        for (u32 head = 0; head < heads; head += 8) {
            const bf16* const low[1] = {key[0]};
            const bf16* const high[1] = {key[1]};
            const bf16* const query[1] = {head + g < heads ? queries + (u64)(head + g) * width : nullptr};
            float sums[1][1][4] = {};
            add_units<1, 1>(sums, low, high, query, 0, ceil_div(width, UNIT), width, aligned);
            for (u32 h = 0; h < 8 && head + h < heads; ++h)
                for (u32 i = 0; i < 2; ++i) {
                    const float mine = h % 2 ? sums[0][0][i * 2 + 1] : sums[0][0][i * 2];
                    const float dot = __shfl_sync(WHOLE_WARP, mine, g * 4 + h / 2);
                    total[i] = add(total[i], dot > 0.0f ? dot : 0.0f);
                }
        }
        const u32 at = base + g + t * 8;
        if (t < 2 && at < count)
            scores[at] = live[t] ? __float_as_uint(div(total[t], root((float)width))) : 0;
    }
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
    __shared__ u32 scores[HELD], ids[HELD];
    const Pages& pages = a.pages;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    if (fact.place + PAGE >= fact.count)
        copy_row(a.ring.slot<bf16>(fact.slot) + (u64)(fact.position % PAGE) * pages.index_width,
                 a.projection.row(row) + a.projection.index_key_at(pages), pages.index_width);

    u32* const chosen = a.chosen + row * a.top;
    const u32 blocks = (fact.position + 1) / pages.ratio;
    if (blocks <= a.top) {
        for (u32 i = threadIdx.x; i < a.top; i += THREADS) chosen[i] = i < blocks ? i : NONE;
        return;
    }
    if (a.top > HELD / 2) return;
    u32 kept = 0;
    for (u32 next = 0; next < blocks;) {
        const u32 fresh = least(HELD - kept, blocks - next);
        score_blocks(a, fact, row, next, fresh, scores + kept);
        for (u32 i = threadIdx.x; i < fresh; i += THREADS) ids[kept + i] = next + i;
        __syncthreads();
        keep_best(scores, ids, kept + fresh, a.top);
        kept = a.top;
        next += fresh;
    }
    for (u32 i = threadIdx.x; i < a.top; i += THREADS) chosen[i] = ids[i];
}
