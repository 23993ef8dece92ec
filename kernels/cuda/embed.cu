// The twins of kernels/src/embed.rs, which holds the contracts. One block per row; a row whose id is past the
// vocabulary is left unwritten.
#include "state.cuh"
#include "ptx.cuh"

struct Args {
    RowRange rows;
    const bf16* table;
    bf16* streams;
    u32 vocab, hidden, count, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_embed);

struct FeatureArgs {
    const bf16* features;
    bf16* streams;
    u32 rows, hidden, count, zero;
};
static_assert(sizeof(FeatureArgs) == ARGS_BYTES_embed_features);

extern "C" __global__ void __launch_bounds__(128) embed(Args a) {
    follow();
    const u64 row = a.rows.first + blockIdx.x;
    const u32 id = a.rows.facts[row].id;
    if (id >= a.vocab) return;
    bf16* const streams = a.streams + row * a.count * a.hidden;
    for (u32 s = 0; s < a.count; ++s) copy_row(streams + (u64)s * a.hidden, a.table + (u64)id * a.hidden, a.hidden);
}

extern "C" __global__ void __launch_bounds__(128) embed_features(FeatureArgs a) {
    follow();
    const u64 row = blockIdx.x;
    bf16* const streams = a.streams + row * a.count * a.hidden;
    for (u32 s = 0; s < a.count; ++s) copy_row(streams + (u64)s * a.hidden, a.features + row * a.hidden, a.hidden);
}
