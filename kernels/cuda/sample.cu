// The twins of kernels/src/sample.rs, which holds the contracts; the numbers of a draw are those of
// kernels/src/sample/draw.rs, step by step.
//
// One cluster of blocks per row, each with its share of the vocabulary. A row with an id past the vocabulary,
// with options or biases outside their domain is left unwritten. Selections walk over all logits a few times: no
// vocabulary is sorted and nothing is kept.
#include "cluster.cuh"
#include "few.cuh"
#include "select.cuh"
#include "state.cuh"
#include "ptx.cuh"

constexpr u32 TOPS = 20;
constexpr u32 BIASES = 512;
constexpr u32 THREADS = 1024;
constexpr u32 BITS = 65536;
// Ids of one bin, in all blocks, that are compared each with each.
constexpr u32 LISTED = 256;

struct Sampling {
    u64 seed;
    float temperature, top_p, min_p, presence, frequency, repetition;
    u32 top_k, logprobs, biases, zero;
};
struct Bias {
    u32 id;
    float value;
};
struct Outcome {
    u32 id, status, accepted, tops;
    float logprob;
    u32 top_ids[TOPS];
    float top_logprobs[TOPS];
};

struct Args {
    RowRange rows;
    const Sampling* sampling;
    const bf16* logits;
    Outcome* outcomes;
    Part heads, counts, biases;
    u32 vocab, choices, kind, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_sample);

struct MarkArgs {
    RowRange rows;
    Part counts;
    u32 vocab, zero;
};
static_assert(sizeof(MarkArgs) == ARGS_BYTES_mark);

// One thread per row; a row whose id is past the vocabulary is skipped.
extern "C" __global__ void __launch_bounds__(128) mark(MarkArgs a) {
    follow();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.rows.count) return;
    const Fact& fact = a.rows.facts[a.rows.first + i];
    if (fact.id < a.vocab) atomicOr(&a.counts.slot<u32>(fact.slot)[fact.id], IN_PROMPT);
}

__device__ bool within(float x, float low, float high) { return x >= low && x <= high; }
__device__ bool finite(float x) { return fabsf(x) < infinity(); }

__device__ bool legal(const Sampling& o) {
    const float most = __uint_as_float(0x7f7fffffu);
    return within(o.temperature, 0.0f, most) && o.top_p > 0.0f && o.top_p <= 1.0f && within(o.min_p, 0.0f, 1.0f) &&
           within(o.presence, -2.0f, 2.0f) && within(o.frequency, -2.0f, 2.0f) && o.repetition > 0.0f &&
           finite(o.repetition) && o.logprobs <= TOPS && o.biases <= BIASES;
}

__device__ u64 splitmix64(u64 value) {
    u64 v = value + 0x9E3779B97F4A7C15ull;
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
    return v ^ (v >> 31);
}
__device__ u64 output(u64 state, u32 number) { return splitmix64(state + number * 0x9E3779B97F4A7C15ull); }

__device__ float uniform(u64 key, u32 id) {
    const i64 number = (i64)((output(key, id) >> 1) | 1);
    const float value = mul(__ll2float_rn(number), 1.0842021724855044e-19f);
    const float most = 0.99999994039535522461f;
    return value < most ? value : most;
}

__device__ float twice_atanh(float s) {
    const float square = mul(s, s);
    float sum = 1.0f / 11.0f;
    sum = add(mul(sum, square), 1.0f / 9.0f);
    sum = add(mul(sum, square), 1.0f / 7.0f);
    sum = add(mul(sum, square), 1.0f / 5.0f);
    sum = add(mul(sum, square), 1.0f / 3.0f);
    const float twice = mul(2.0f, s);
    return add(twice, mul(twice, mul(square, sum)));
}
__device__ float ln(float x) {
    const u32 bits = __float_as_uint(x);
    const i32 exponent = (i32)(bits - 0x3f3504f3u) >> 23;
    const float mantissa = __uint_as_float(bits - ((u32)exponent << 23));
    const float n = (float)exponent;
    const float part = twice_atanh(div(sub(mantissa, 1.0f), add(mantissa, 1.0f)));
    return add(mul(n, 0.6933594f), add(mul(n, -2.1219444e-4f), part));
}
__device__ float wait(float uniform) {
    return uniform < 0.25f ? twice_atanh(div(uniform, sub(2.0f, uniform))) : -ln(sub(1.0f, uniform));
}

// A weight of at most 1 in units of 2^-40, to the nearest, ties to even.
__device__ u64 mass_of(float weight) { return __float2ull_rn(mul(weight, 1099511627776.0f)); }

// What the choice of one row depends on.
struct Row {
    const bf16* logits;
    const u32* counts;
    const Bias* biases;
    // A bit for every id that may have a bias.
    const u32* biased;
    Sampling options;
    u32 vocab;
    bool changes, whole_logits;

    // Calls `f(id, logit)` for this thread's share of the ids below `ids`.
    template <class F> __device__ __forceinline__ void each(u32 ids, F f) const {
        for (u32 at = (cluster_rank(blockIdx.x) * THREADS + threadIdx.x) * 8; at < ids; at += RANKS * THREADS * 8) {
            const Few<8> few = load_few<8>(logits, at, vocab, whole_logits);
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                if (at + i < ids) f(at + i, few.value[i]);
        }
    }
    __device__ float raw(u32 id) const { return widen(logits[id]); }
    // The logit `x` of an id after biases and penalties.
    __device__ float changed(u32 id, float x) const {
        if (!changes) return x;
        if (biased[id % BITS / 32] >> id % 32 & 1)
            for (u32 i = 0; i < options.biases; ++i)
                if (biases[i].id == id) x = add(x, biases[i].value);
        const u32 count = counts[id], picked = count & ~IN_PROMPT;
        if (count != 0) x = x > 0.0f ? div(x, options.repetition) : mul(x, options.repetition);
        if (picked != 0) x = sub(x, add(options.presence, mul(options.frequency, __uint2float_rn(picked))));
        const float most = __uint_as_float(0x7f7fffffu);
        return x < -most ? -most : x > most ? most : x;
    }
};

__device__ __forceinline__ Both larger(Both a, Both b) {
    return Both{a.first > b.first ? a.first : b.first, a.second > b.second ? a.second : b.second};
}

// The value of a rank.
__device__ __forceinline__ float value_of(u64 rank) {
    const u32 order = (u32)(rank >> 32);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// The contents of bins over all blocks.
struct Bins {
    u32 low[BINS], high[BINS];

    __device__ void clear() {
        for (u32 b = threadIdx.x; b < BINS; b += THREADS) low[b] = high[b] = 0;
    }
    // A 64-bit sum by halves: whoever makes the low one wrap carries.
    __device__ __forceinline__ void put(u32 bin, u64 content) {
        const u32 before = atomicAdd(&low[bin], (u32)content);
        const u32 carry = (u32)(content >> 32) + (before + (u32)content < before);
        if (carry) atomicAdd(&high[bin], carry);
    }
};

// The bin of all blocks' `bins` at which `need` is reached. Every thread of every block calls it.
__device__ inline Bin find_in_all(Bins& bins, u64 need) {
    __shared__ u64 sums[BINS];
    cluster_sync();
    for (u32 b = threadIdx.x; b < BINS; b += THREADS) {
        u64 sum = 0;
        for (u32 rank = 0; rank < RANKS; ++rank) {
            const Bins* const there = peer(&bins, rank);
            sum += (u64)there->high[b] << 32 | there->low[b];
        }
        sums[b] = sum;
    }
    return find_bin([&](u32 b) { return sums[b]; }, need);
}

// The ranks that blocks list, and how many there are.
struct List {
    u64 ranks[LISTED];
    u32 count;

    __device__ __forceinline__ void put(u64 rank) {
        const u32 at = atomicAdd(&count, 1);
        if (at < LISTED) ranks[at] = rank;
    }
};

// Copies what all blocks listed behind each other into `all`, and gives their number: `LISTED` + 1 if there are
// more than it can hold. Every thread of every block calls it.
__device__ inline u32 collect(List& mine, u64 (&all)[LISTED]) {
    cluster_sync();
    u32 total = 0;
    for (u32 rank = 0; rank < RANKS; ++rank) {
        const List* const there = peer(&mine, rank);
        const u32 count = there->count;
        if (total + count > LISTED) total = LISTED + 1;
        else {
            if (threadIdx.x < count) all[total + threadIdx.x] = there->ranks[threadIdx.x];
            total += count;
        }
        if (total > LISTED) break;
    }
    // Nobody changes a list that others still read, and `all` is whole.
    cluster_sync();
    return total;
}

// A prefix of the order of choice, best first: the ids whose rank is at least the cut. The smallest one whose
// mass reaches `need`, or 0, all ids, if none does. `value(id, logit)` is what orders, `max` the largest,
// `keep(rank, value)` whether an id counts, `mass(value)` how much. Every thread of every block calls it.
template <class Value, class Keep, class Mass>
__device__ u64 cut_at(const Row& row, u32 ids, float max, Value value, Keep keep, Mass mass, u64 need) {
    __shared__ Bins bins[2];
    __shared__ List list;
    __shared__ u64 all[LISTED], answer;
    // First by the distance from the best, which spreads.
    const auto distance = [&](float x) {
        const float d = mul(sub(max, x), 8.0f);
        return d < 255.0f ? (u32)d : 255u;
    };
    __syncthreads();
    bins[0].clear();
    if (threadIdx.x == 0) {
        list.count = 0;
        answer = 0;
    }
    __syncthreads();
    row.each(ids, [&](u32 id, float logit) {
        const float x = value(id, logit);
        if (keep(rank_of(x, id), x)) bins[0].put(255 - distance(x), mass(x));
    });
    const Bin found = find_in_all(bins[0], need);
    if (!found.found) return 0;
    need -= found.above;
    const u32 far = 255 - found.bin;

    // Then, if its bin holds few, each against each.
    row.each(ids, [&](u32 id, float logit) {
        const float x = value(id, logit);
        const u64 rank = rank_of(x, id);
        if (distance(x) == far && keep(rank, x)) list.put(rank);
    });
    const u32 count = collect(list, all);
    if (count <= LISTED) {
        if (threadIdx.x < count) {
            const u64 mine = all[threadIdx.x], content = mass(value_of(mine));
            u64 above = 0;
            for (u32 i = 0; i < count; ++i)
                if (all[i] > mine) above += mass(value_of(all[i]));
            if (above < need && above + content >= need) answer = mine;
        }
        __syncthreads();
        return answer;
    }

    // Else digit by digit of the rank. The leading digits of an id are the same for all ids.
    const u32 id_digits = ids <= 1u << 8 ? 1 : ids <= 1u << 16 ? 2 : ids <= 1u << 24 ? 3 : 4;
    const u64 same = 0xffffffffull & ~((1ull << id_digits * 8) - 1);
    u64 cut = same, fixed = same;
    u32 turn = 1;
    for (u32 shift = 64; shift > 0;) {
        shift = shift == 32 ? id_digits * 8 - 8 : shift - 8;
        bins[turn].clear();
        __syncthreads();
        row.each(ids, [&](u32 id, float logit) {
            const float x = value(id, logit);
            const u64 rank = rank_of(x, id);
            if (distance(x) == far && ((rank ^ cut) & fixed) == 0 && keep(rank, x))
                bins[turn].put((u32)(rank >> shift) & 255, mass(x));
        });
        const Bin digit = find_in_all(bins[turn], need);
        need -= digit.above;
        cut |= (u64)digit.bin << shift;
        fixed |= 255ull << shift;
        turn = 1 - turn;
    }
    return cut;
}

// The id for changed logits, of which the largest is `max`.
__device__ u32 pick(const Row& row, u32 choices, float max, u64 key, u32& turn) {
    const Sampling& o = row.options;
    const auto value = [&](u32 id, float logit) { return row.changed(id, logit); };
    const auto weight = [&](float x) { return exp_of(div(sub(x, max), o.temperature)); };
    u64 cut = 0;
    if (o.top_k != 0 && o.top_k < choices)
        cut = cut_at(
            row, choices, max, value, [](u64, float) { return true; }, [](float) { return 1ull; }, o.top_k);
    if (o.top_p < 1.0f) {
        u64 total = 0;
        row.each(choices, [&](u32 id, float logit) {
            const float x = value(id, logit);
            if (rank_of(x, id) >= cut) total += mass_of(weight(x));
        });
        const auto sum = [](Both a, Both b) { return Both{a.first + b.first, 0}; };
        total = join_blocks(turn, Both{block_total(total), 0}, sum).first;
        const u64 need = (u64)ceil(__dmul_rn((double)o.top_p, __ull2double_rn(total)));
        const u64 within_k = cut;
        const u64 within_p = cut_at(
            row, choices, max, value, [&](u64 rank, float x) { return rank >= within_k && weight(x) >= o.min_p; },
            [&](float x) { return mass_of(weight(x)); }, need);
        cut = within_p > cut ? within_p : cut;
    }
    u64 best = 0;
    float best_rate = -infinity();
    row.each(choices, [&](u32 id, float logit) {
        const float x = value(id, logit);
        if (rank_of(x, id) < cut) return;
        const float w = weight(x);
        if (!(w >= o.min_p)) return;
        const float u = uniform(key, id);
        // A wait is longer than its uniform, but for rounding: most ids lose without a logarithm.
        if (w < mul(mul(best_rate, u), 0.9999f)) return;
        const float rate = div(w, wait(u));
        const u64 rank = rank_of(rate, id);
        if (rank > best) {
            best = rank;
            best_rate = rate;
        }
    });
    return id_of(join_blocks(turn, Both{block_max(best), 0}, larger).first);
}

// The `count` best logits and their log probabilities, best first. The first block writes them.
template <class Logprob>
__device__ void report(const Row& row, u32 choices, u32 count, float max, Logprob logprob, Outcome* to) {
    __shared__ List list;
    __shared__ u64 all[LISTED];
    if (count == 0) return;
    u64 cut = 0;
    if (count < choices)
        cut = cut_at(
            row, choices, max, [](u32, float logit) { return logit; }, [](u64, float) { return true; },
            [](float) { return 1ull; }, count);
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    row.each(choices, [&](u32 id, float logit) {
        const u64 rank = rank_of(logit, id);
        if (rank >= cut) list.put(rank);
    });
    collect(list, all);
    // Their place is how many are better.
    if (cluster_rank(blockIdx.x) != 0 || threadIdx.x >= count) return;
    const u64 mine = all[threadIdx.x];
    u32 place = 0;
    for (u32 i = 0; i < count; ++i) place += all[i] > mine;
    to->top_ids[place] = id_of(mine);
    to->top_logprobs[place] = logprob(value_of(mine));
}

// blockIdx.x: row and block of its cluster.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS) sample(Args a) {
    follow();
    __shared__ Bias biases[BIASES];
    __shared__ u32 biased[BITS / 32];
    const u32 in_launch = blockIdx.x / CLUSTER, rank = cluster_rank(blockIdx.x);
    if (rank >= RANKS) return;
    const Fact& fact = a.rows.facts[a.rows.first + in_launch];
    const Sampling options = a.sampling[fact.first];
    if (fact.id >= a.vocab || !legal(options)) return;
    const Bias* const staged = a.biases.slot<Bias>(fact.slot);
    bool fair = true;
    for (u32 i = threadIdx.x; i < BITS / 32; i += THREADS) biased[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < options.biases; i += THREADS) {
        biases[i] = staged[i];
        fair = biases[i].id < a.vocab && finite(biases[i].value);
        atomicOr(&biased[biases[i].id % BITS / 32], 1u << biases[i].id % 32);
    }
    if (!__syncthreads_and(fair)) return;

    u32* const counts = a.counts.slot<u32>(fact.slot);
    const bool first = rank == 0 && threadIdx.x == 0;
    if (a.kind != 0 && first) counts[fact.id] += 1;
    const bf16* const logits = a.logits + (u64)in_launch * a.vocab;
    const bool changes = options.biases > 0 || options.presence != 0.0f || options.frequency != 0.0f ||
                         options.repetition != 1.0f;
    const Row row{logits, counts, biases, biased, options, a.vocab, changes, whole<8>(logits, a.vocab)};
    u32 turn = 0;

    bool all_finite = true;
    u64 best = 0;
    row.each(a.vocab, [&](u32 id, float x) {
        all_finite &= finite(x);
        const u64 rank = rank_of(x, id);
        if (id < a.choices && rank > best) best = rank;
    });
    const u64 broken = !__syncthreads_and(all_finite);
    // The counts are those of this round behind it.
    const Both seen = join_blocks(turn, Both{block_max(best), broken}, larger);
    all_finite = seen.second == 0;
    u32 id = id_of(seen.first);

    Outcome* const to = a.outcomes + in_launch;
    if (rank == 0)
        for (u32 i = threadIdx.x; i < sizeof(Outcome) / 4; i += THREADS) ((u32*)to)[i] = 0;
    __syncthreads();
    if (all_finite) {
        const float max = row.raw(id);
        u64 total = 0, changed = 0;
        row.each(a.choices, [&](u32 id, float x) {
            total += mass_of(exp_of(sub(x, max)));
            const u64 rank = changes ? rank_of(row.changed(id, x), id) : 0;
            changed = rank > changed ? rank : changed;
        });
        const auto sum_and_larger = [](Both a, Both b) { return Both{a.first + b.first, larger(a, b).second}; };
        const Both all = join_blocks(turn, Both{block_total(total), block_max(changed)}, sum_and_larger);
        const float log_sum = ln(mul(__ull2float_rn(all.first), 9.094947017729282e-13f));
        const auto logprob = [&](float logit) { return sub(sub(logit, max), log_sum); };
        const u32 tops = least(options.logprobs, a.choices);
        report(row, a.choices, tops, max, logprob, to);

        if (changes) id = id_of(all.second);
        const float most = changes ? value_of(all.second) : max;
        if (options.temperature != 0.0f)
            id = pick(row, a.choices, most, output(splitmix64(options.seed), fact.position + 1), turn);
        if (first) {
            to->tops = tops;
            to->logprob = logprob(row.raw(id));
        }
    }
    if (first) {
        to->id = id;
        to->status = all_finite ? 0 : 1;
        to->accepted = 1;
        if (fact.place + 1 == fact.count) a.heads.slot<Head>(fact.slot)->last_id = id;
    }
    // No block leaves while another may read its shared memory.
    cluster_sync();
}
