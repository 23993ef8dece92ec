// The twins of kernels/src/ngram.rs, which holds the contracts.
#include "history.cuh"
#include "ptx.cuh"

struct GatherArgs {
    RowRange rows;
    const u64* multipliers;
    const u64* primes;
    const u64* offsets;
    const bf16* const* shards;
    bf16* e;
    u64 table_rows, shard_rows;
    u32 width, ngram_size, heads_per_ngram, boundary;
};
static_assert(sizeof(GatherArgs) == ARGS_BYTES_ngram_gather);

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

// One block per row and head. A head without a vocabulary, and a row past the table, are left unwritten.
extern "C" __global__ void __launch_bounds__(64) ngram_gather(GatherArgs a) {
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
    const bf16* const from = a.shards[found / a.shard_rows] + found % a.shard_rows * a.width;
    copy_row(a.e + (row * heads + head) * a.width, from, a.width);
}

// One block per row and stream.
extern "C" __global__ void __launch_bounds__(256) ngram_gate(GateArgs a) {
    follow();
    const u64 row = a.rows.first + blockIdx.x, at = (row * a.count + blockIdx.y) * a.hidden;
    const u64 in_row = (u64)blockIdx.y * a.hidden;
    const bf16* const key = a.keyval + row * (a.count + 1) * a.hidden + in_row;
    const bf16* const value = a.keyval + (row * (a.count + 1) + a.count) * a.hidden;
    const bf16* const query = a.streams + at;
    float key_squares = 0.0f, query_squares = 0.0f;
    for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x) {
        key_squares = add(key_squares, mul(widen(key[j]), widen(key[j])));
        query_squares = add(query_squares, mul(widen(query[j]), widen(query[j])));
    }
    const float key_scale = inverse_rms(block_sum(key_squares), a.hidden, a.eps);
    const float query_scale = inverse_rms(block_sum(query_squares), a.hidden, a.eps);
    float products = 0.0f;
    for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x) {
        const float k = normed(widen(key[j]), key_scale, a.norm_key[in_row + j]);
        const float q = normed(widen(query[j]), query_scale, a.norm_query[in_row + j]);
        products = add(products, mul(k, q));
    }
    const float match = div(block_sum(products), root((float)a.hidden));
    const float size = root(fabsf(match) > 1e-6f ? fabsf(match) : 1e-6f);
    const float signed_root = match == 0.0f || is_nan(match) ? match : copysignf(size, match);
    const float open = sigmoid(signed_root);
    float squares = 0.0f;
    for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x) {
        const bf16 gated = narrow(mul(open, widen(value[j])));
        a.gv[at + j] = gated;
        squares = add(squares, mul(widen(gated), widen(gated)));
    }
    const float scale = inverse_rms(block_sum(squares), a.hidden, a.eps);
    for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x)
        a.cn[at + j] = narrow(normed(widen(a.gv[at + j]), scale, a.norm_conv[in_row + j]));
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
