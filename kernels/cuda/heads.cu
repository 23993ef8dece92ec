// The twin of kernels/src/heads.rs, which holds the contract. One block per row and head: query heads, key
// heads, value heads, index query heads. Keys and values of a position without a page are not written.
#include "attention.cuh"
#include "ptx.cuh"

struct Args {
    RowRange rows;
    Projection projection;
    const bf16* q_gain;
    const bf16* k_gain;
    const bf16* iq_gain;
    bf16* q;
    bf16* iq;
    Pages pages;
    Rotary rotary;
    float eps;
    u32 zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_heads);

extern "C" __global__ void __launch_bounds__(64) heads(Args a) {
    follow();
    const Projection& p = a.projection;
    const Pages& pages = a.pages;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    const bf16* const x = p.row(row);
    // A head's place in the projection, its width and gain, and where it goes.
    u32 head = blockIdx.y, from = p.query_at(pages, head), width = pages.width;
    const bf16* gain = a.q_gain;
    bf16* out = a.q + (row * p.q_heads + head) * width;
    if (head >= p.q_heads) {
        head -= p.q_heads;
        if (head < 2 * pages.kv_heads) {
            bf16* const keys = pages.page(fact.slot, fact.position);
            if (!keys) return;
            const bool key = head < pages.kv_heads;
            const u32 in_row = (key ? head : head - pages.kv_heads) * width;
            const u64 at = (u64)(fact.position % PAGE) * pages.kv_heads * width + in_row;
            if (!key) return copy_row(keys + pages.key_elements() + at, x + p.values_at(pages) + in_row, width);
            from = p.keys_at(pages) + in_row;
            gain = a.k_gain;
            out = keys + at;
        } else {
            head -= 2 * pages.kv_heads;
            width = pages.index_width;
            from = p.index_queries_at(pages) + head * width;
            gain = a.iq_gain;
            out = a.iq + (row * p.index_heads + head) * width;
        }
    }
    norm_and_turn([&](u32 j) { return widen(x[from + j]); }, width, gain, a.eps, a.rotary, fact.axes, out);
}
