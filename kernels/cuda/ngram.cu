// The twins of kernels/src/ngram.rs, which holds the contracts.
#include "few.cuh"
#include "history.cuh"
#include "ptx.cuh"

struct GatherArgs {
    RowRange rows;
    const u64* multipliers;
    const u64* primes;
    const u64* offsets;
    const u8* const* shards;
    const u8* const* scales;
    bf16* e;
    u64 table_rows, shard_rows;
    u32 width, ngram_size, heads_per_ngram, boundary;
    float global;
    u32 zero;
};
static_assert(sizeof(GatherArgs) == ARGS_BYTES_ngram_gather);
static_assert(sizeof(GatherArgs) == ARGS_BYTES_ngram_gather_fp8);
static_assert(sizeof(GatherArgs) == ARGS_BYTES_ngram_gather_nvfp4);

struct GateArgs {
    RowRange rows;
    const bf16* keyval;
    const bf16* streams;
    const bf16* norm_key;
    const bf16* norm_query;
    const bf16* norm_conv;
    bf16* gv;
    bf16* cn;
    u32 count, hidden;
    float eps;
    u32 zero;
};
static_assert(sizeof(GateArgs) == ARGS_BYTES_ngram_gate);

struct ConvArgs {
    RowRange rows;
    const bf16* gv;
    const bf16* cn;
    const bf16* weight;
    Part window;
    bf16* streams;
    u32 width, taps, dilation, zero;
};
static_assert(sizeof(ConvArgs) == ARGS_BYTES_ngram_conv);

// Calls `copy(to, shard, row)` with all threads of a block for the row of a token and head: one block each. A head
// without a vocabulary, and a row past the table, are left unwritten.
template <class Copy> __device__ __forceinline__ void gather(const GatherArgs& a, Copy copy) {
    follow();
    const u64 row = a.rows.first + blockIdx.x;
    const u32 head = blockIdx.y, heads = (a.ngram_size - 1) * a.heads_per_ngram;
    const Fact& fact = a.rows.facts[row];
    u64 x = fact.id * a.multipliers[0];
    bool cut = false;
    for (u32 back = 0; back <= head / a.heads_per_ngram; ++back) {
        const u32 previous = fact.previous[back];
        x ^= (cut ? a.boundary : previous) * a.multipliers[back + 1];
        cut |= previous == a.boundary;
    }
    const i64 prime = (i64)a.primes[head];
    if (prime <= 0) return;
    const i64 rest = (i64)x % prime;
    const u64 found = (u64)(rest < 0 ? rest + prime : rest) + a.offsets[head];
    if (found >= a.table_rows) return;
    copy(a.e + (row * heads + head) * a.width, found / a.shard_rows, found % a.shard_rows);
}

// The number of an e4m3 code, and that of an e2m1 code: their bits in the places of an f32, whose exponent is too low.
__device__ __forceinline__ float e4m3(u32 code) {
    return mul(__uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20), __uint_as_float(247u << 23));
}
__device__ __forceinline__ float e2m1(u32 code) {
    return mul(__uint_as_float((code & 8) << 28 | (code & 7) << 22), __uint_as_float(253u << 23));
}

extern "C" __global__ void __launch_bounds__(64) ngram_gather(GatherArgs a) {
    gather(a, [&](bf16* to, u64 shard, u64 row) { copy_row(to, (const bf16*)a.shards[shard] + row * a.width, a.width); });
}

extern "C" __global__ void __launch_bounds__(64) ngram_gather_fp8(GatherArgs a) {
    gather(a, [&](bf16* to, u64 shard, u64 row) {
        const u8* const codes = a.shards[shard] + row * a.width;
        for (u32 i = threadIdx.x; i < a.width; i += 64) to[i] = narrow(mul(e4m3(codes[i]), a.global));
    });
}

extern "C" __global__ void __launch_bounds__(64) ngram_gather_nvfp4(GatherArgs a) {
    gather(a, [&](bf16* to, u64 shard, u64 row) {
        const u8* const codes = a.shards[shard] + row * (a.width / 2);
        const u8* const scales = a.scales[shard] + row * (a.width / 16);
        for (u32 i = threadIdx.x; i < a.width; i += 64) {
            const float code = e2m1(codes[i / 2] >> i % 2 * 4 & 15);
            to[i] = narrow(mul(code, mul(e4m3(scales[i / 16]), a.global)));
        }
    });
}

constexpr u32 GATE_THREADS = 320;
// Runs of eight elements that a thread of ngram_gate holds at most.
constexpr u32 GATE_HELD = 4;

// For streams of at most GATE_THREADS * HELD * 8 elements; all rows can be read eight at a time if SMOOTH.
template <u32 HELD, bool SMOOTH> __device__ __forceinline__ void gate(const GateArgs& a) {
    const u32 hidden = a.hidden;
    const u64 row = a.rows.first + blockIdx.x, at = (row * a.count + blockIdx.y) * hidden;
    const u64 in_row = (u64)blockIdx.y * hidden;
    const bf16* const key = a.keyval + row * (a.count + 1) * hidden + in_row;
    const bf16* const value = a.keyval + (row * (a.count + 1) + a.count) * hidden;
    const bf16* const query = a.streams + at;
    // Zero past the end.
    const auto held = [&](const bf16* from, u32 i) {
        const u32 column = (i * GATE_THREADS + threadIdx.x) * 8;
        return column < hidden ? load_packed<8>(from, column, hidden, SMOOTH) : Packed<8>{};
    };
    Packed<8> key_gains[HELD], query_gains[HELD], conv_gains[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        key_gains[i] = held(a.norm_key + in_row, i);
        query_gains[i] = held(a.norm_query + in_row, i);
        conv_gains[i] = held(a.norm_conv + in_row, i);
    }
    follow();
    Packed<8> keys[HELD], queries[HELD], values[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) keys[i] = held(key, i), queries[i] = held(query, i), values[i] = held(value, i);
    const auto squares = [&](const Packed<8>(&of)[HELD]) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < HELD; ++i) {
            const Few<8> few = unpacked(of[i]);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) sum = add(sum, mul(few.value[e], few.value[e]));
        }
        return block_sum(sum);
    };
    const float key_scale = inverse_rms(squares(keys), hidden, a.eps);
    const float query_scale = inverse_rms(squares(queries), hidden, a.eps);
    float products = 0.0f;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const Few<8> k = unpacked(keys[i]), q = unpacked(queries[i]);
        const Few<8> k_gain = unpacked(key_gains[i]), q_gain = unpacked(query_gains[i]);
#pragma unroll
        for (u32 e = 0; e < 8; ++e)
            products = add(products, mul(mul(mul(k.value[e], key_scale), add(1.0f, k_gain.value[e])),
                                         mul(mul(q.value[e], query_scale), add(1.0f, q_gain.value[e]))));
    }
    const float match = div(block_sum(products), root((float)hidden));
    const float size = root(fabsf(match) > 1e-6f ? fabsf(match) : 1e-6f);
    const float signed_root = match == 0.0f || is_nan(match) ? match : copysignf(size, match);
    const float open = sigmoid(signed_root);
    const auto put = [&](bf16* to, u32 i, const Packed<8>& packed) {
        const u32 column = (i * GATE_THREADS + threadIdx.x) * 8;
        if (column < hidden) store_packed<8>(to, column, hidden, SMOOTH, packed);
    };
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        Few<8> gated = unpacked(values[i]);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) gated.value[e] = mul(open, gated.value[e]);
        values[i] = packed_of(gated);
        put(a.gv + at, i, values[i]);
    }
    const float scale = inverse_rms(squares(values), hidden, a.eps);
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        Few<8> few = unpacked(values[i]);
        const Few<8> gain = unpacked(conv_gains[i]);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) few.value[e] = mul(mul(few.value[e], scale), add(1.0f, gain.value[e]));
        put(a.cn + at, i, packed_of(few));
    }
}

// One block per row and stream, which holds the stream in registers: wider ones than it can hold are left unwritten.
extern "C" __global__ void __launch_bounds__(GATE_THREADS) ngram_gate(GateArgs a) {
    const bool smooth = a.hidden % 8 == 0 && aligned16(a.keyval) && aligned16(a.streams) && aligned16(a.norm_key) &&
                        aligned16(a.norm_query) && aligned16(a.norm_conv) && aligned16(a.gv) && aligned16(a.cn);
    if (smooth && a.hidden <= GATE_THREADS * 8) gate<1, true>(a);
    else if (a.hidden > GATE_THREADS * GATE_HELD * 8) follow();
    else gate<GATE_HELD, false>(a);
}

// One thread per row and channel.
extern "C" __global__ void __launch_bounds__(128) ngram_conv(ConvArgs a) {
    follow();
    const u32 channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= a.width) return;
    const bf16* const weight = a.weight + (u64)channel * a.taps;
    each_row(a.rows, a.window, a.cn, a.width, a.width, channel, (a.taps - 1) * a.dilation,
             [&](const History& history, u32 place, u64 row) {
                 const float shape = silu(r16(history.convolve(weight, a.taps, a.dilation, place)));
                 bf16& stream = a.streams[row * a.width + channel];
                 stream = narrow(add(widen(stream), add(widen(a.gv[row * a.width + channel]), shape)));
             });
}
