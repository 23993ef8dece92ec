// The twins of kernels/src/sample.rs, which holds the contracts; the numbers of a draw are those of
// kernels/src/sample/draw.rs, step by step.
//
// One block per row. A row with an id past the vocabulary, with options or biases outside their domain is left
// unwritten. Selections walk over all logits a few times: no vocabulary is sorted and nothing is kept.
#include "select.cuh"
#include "state.cuh"

constexpr u32 TOPS = 20;
constexpr u32 BIASES = 512;
constexpr u32 THREADS = 1024;
constexpr u32 BITS = 65536;

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
    bool changes;

    __device__ float raw(u32 id) const { return widen(logits[id]); }
    // The logit after biases and penalties.
    __device__ float changed(u32 id) const {
        float x = raw(id);
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

// A prefix of the order of choice, best first: the ids whose rank is at least the cut. The smallest one whose
// mass reaches `need`, or 0, all ids, if none does. `value(i)` is what orders, `max` the largest, `keep(rank, value)`
// whether an id counts, `mass(value)` how much.
template <class Value, class Keep, class Mass>
__device__ u64 cut_at(u32 ids, float max, Value value, Keep keep, Mass mass, u64 need) {
    __shared__ u32 low[BINS], high[BINS];
    // First by the distance from the best, which spreads; then digit by digit of the rank.
    const auto distance = [&](float x) {
        const float d = mul(sub(max, x), 8.0f);
        return d < 255.0f ? (u32)d : 255u;
    };
    const u32 id_digits = ids <= 1u << 8 ? 1 : ids <= 1u << 16 ? 2 : ids <= 1u << 24 ? 3 : 4;
    u32 level = 0, shift = 64;
    u64 cut = 0, fixed = 0;
    u32 far = 0;
    for (;;) {
        for (u32 b = threadIdx.x; b < BINS; b += THREADS) low[b] = high[b] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < ids; i += THREADS) {
            const float x = value(i);
            const u64 rank = rank_of(x, i);
            const u32 d = distance(x);
            if (level > 0 && (d != far || ((rank ^ cut) & fixed) != 0)) continue;
            if (!keep(rank, x)) continue;
            const u64 content = mass(x);
            const u32 bin = level == 0 ? 255 - d : (u32)(rank >> shift) & 255;
            // A 64-bit sum by halves: whoever makes the low one wrap carries.
            const u32 before = atomicAdd(&low[bin], (u32)content);
            const u32 carry = (u32)(content >> 32) + (before + (u32)content < before);
            if (carry) atomicAdd(&high[bin], carry);
        }
        const Bin found = find_bin([&](u32 b) { return (u64)high[b] << 32 | low[b]; }, need);
        if (!found.found) return 0;
        need -= found.above;
        if (level == 0) {
            far = 255 - found.bin;
        } else {
            cut |= (u64)found.bin << shift;
            fixed |= 255ull << shift;
        }
        __syncthreads();
        if (shift == 0) return cut;
        // The leading digits of an id are the same for all ids.
        if (shift == 32) {
            shift = id_digits * 8;
            const u64 same = 0xffffffffull & ~((1ull << shift) - 1);
            cut |= same;
            fixed |= same;
        }
        shift -= 8;
        ++level;
    }
}

// The id for changed logits, of which the largest is `max`.
__device__ u32 pick(const Row& row, u32 choices, float max, u64 key) {
    const Sampling& o = row.options;
    const auto value = [&](u32 i) { return row.changed(i); };
    const auto weight = [&](float x) { return exp_of(div(sub(x, max), o.temperature)); };
    u64 cut = 0;
    if (o.top_k != 0 && o.top_k < choices)
        cut = cut_at(
            choices, max, value, [](u64, float) { return true; }, [](float) { return 1ull; }, o.top_k);
    if (o.top_p < 1.0f) {
        u64 total = 0;
        for (u32 i = threadIdx.x; i < choices; i += THREADS) {
            const float x = value(i);
            if (rank_of(x, i) >= cut) total += mass_of(weight(x));
        }
        total = block_total(total);
        const u64 need = (u64)ceil(__dmul_rn((double)o.top_p, __ull2double_rn(total)));
        const u64 within_k = cut;
        const u64 within_p = cut_at(
            choices, max, value, [&](u64 rank, float x) { return rank >= within_k && weight(x) >= o.min_p; },
            [&](float x) { return mass_of(weight(x)); }, need);
        cut = within_p > cut ? within_p : cut;
    }
    u64 best = 0;
    float best_rate = -infinity();
    for (u32 i = threadIdx.x; i < choices; i += THREADS) {
        const float x = value(i);
        if (rank_of(x, i) < cut) continue;
        const float w = weight(x);
        if (!(w >= o.min_p)) continue;
        const float u = uniform(key, i);
        // A wait is longer than its uniform, but for rounding: most ids lose without a logarithm.
        if (w < mul(mul(best_rate, u), 0.9999f)) continue;
        const float rate = div(w, wait(u));
        const u64 rank = rank_of(rate, i);
        if (rank > best) {
            best = rank;
            best_rate = rate;
        }
    }
    return id_of(block_max(best));
}

// The `count` best logits and their log probabilities, best first.
template <class Logprob>
__device__ void report(const Row& row, u32 choices, u32 count, float max, Logprob logprob, Outcome* to) {
    __shared__ u64 ranks[TOPS];
    __shared__ u32 listed;
    if (count == 0) return;
    const auto value = [&](u32 i) { return row.raw(i); };
    u64 cut = 0;
    if (count < choices)
        cut = cut_at(
            choices, max, value, [](u64, float) { return true; }, [](float) { return 1ull; }, count);
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < choices; i += THREADS) {
        const u64 rank = rank_of(value(i), i);
        if (rank >= cut) ranks[atomicAdd(&listed, 1)] = rank;
    }
    __syncthreads();
    // Their place is how many are better.
    if (threadIdx.x >= count) return;
    const u64 mine = ranks[threadIdx.x];
    u32 place = 0;
    for (u32 i = 0; i < count; ++i) place += ranks[i] > mine;
    to->top_ids[place] = id_of(mine);
    to->top_logprobs[place] = logprob(value(id_of(mine)));
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(Args a) {
    __shared__ Bias biases[BIASES];
    __shared__ u32 biased[BITS / 32];
    const Fact& fact = a.rows.facts[a.rows.first + blockIdx.x];
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
    if (a.kind != 0 && threadIdx.x == 0) counts[fact.id] += 1;
    __syncthreads();
    const bool changes = options.biases > 0 || options.presence != 0.0f || options.frequency != 0.0f ||
                         options.repetition != 1.0f;
    const Row row{a.logits + (u64)blockIdx.x * a.vocab, counts, biases, biased, options, changes};

    bool all_finite = true;
    u64 best = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < a.vocab; i += THREADS) {
        const float x = row.raw(i);
        all_finite &= finite(x);
        const u64 rank = rank_of(x, i);
        if (i < a.choices && rank > best) best = rank;
    }
    best = block_max(best);
    all_finite = __syncthreads_and(all_finite);

    Outcome* const to = a.outcomes + blockIdx.x;
    for (u32 i = threadIdx.x; i < sizeof(Outcome) / 4; i += THREADS) ((u32*)to)[i] = 0;
    u32 id = id_of(best);
    __syncthreads();
    if (all_finite) {
        const float max = row.raw(id);
        u64 total = 0;
        for (u32 i = threadIdx.x; i < a.choices; i += THREADS) total += mass_of(exp_of(sub(row.raw(i), max)));
        const float log_sum = ln(mul(__ull2float_rn(block_total(total)), 9.094947017729282e-13f));
        const auto logprob = [&](float logit) { return sub(sub(logit, max), log_sum); };
        const u32 tops = least(options.logprobs, a.choices);
        report(row, a.choices, tops, max, logprob, to);

        float most = max;
        if (changes) {
            u64 changed = 0;
            for (u32 i = threadIdx.x; i < a.choices; i += THREADS) {
                const u64 rank = rank_of(row.changed(i), i);
                changed = rank > changed ? rank : changed;
            }
            id = id_of(block_max(changed));
            most = row.changed(id);
        }
        if (options.temperature != 0.0f)
            id = pick(row, a.choices, most, output(splitmix64(options.seed), fact.position + 1));
        if (threadIdx.x == 0) {
            to->tops = tops;
            to->logprob = logprob(row.raw(id));
        }
    }
    if (threadIdx.x == 0) {
        to->id = id;
        to->status = all_finite ? 0 : 1;
        to->accepted = 1;
        if (fact.place + 1 == fact.count) a.heads.slot<Head>(fact.slot)->last_id = id;
    }
}
