// The twin of kernels/src/rows.rs, which holds the contract. One thread per row; the first block also applies
// the page edits. What the host reports is left unwritten: a row that does not fit the table, an edit past the
// slab, and all edits if more are staged than there is room for.
#include "state.cuh"
#include "ptx.cuh"

struct Header {
    u32 rows, edits;
};
struct Row {
    u32 slot, place, first, count;
};
struct PromptRow {
    u32 id;
    i32 axes[3];
};
struct PageEdit {
    u32 slab, slot, index, page;
};

struct Args {
    const Header* header;
    const Row* rows;
    const PageEdit* page_edits;
    const void* sampling;
    const PromptRow* prompt;
    Part heads, page_tables;
    Fact* facts;
    u32 first, count, slab, slots, pages, edits, boundary, kind;
};
static_assert(sizeof(Args) == ARGS_BYTES_rows);

// A thread applies all edits of the entries that are its own, in order: the last one stands.
__device__ void edit_tables(const Args& a) {
    const u32 edits = a.header->edits;
    if (edits > a.edits) return;
    for (u32 i = 0; i < edits; ++i) {
        const PageEdit edit = a.page_edits[i];
        const bool mine = (edit.slot + edit.index) % blockDim.x == threadIdx.x;
        if (mine && edit.slab == a.slab && edit.slot < a.slots && edit.index < a.pages)
            a.page_tables.slot<u32>(edit.slot)[edit.index] = edit.page;
    }
}

extern "C" __global__ void __launch_bounds__(128) rows(Args a) {
    follow();
    if (blockIdx.x == 0) edit_tables(a);
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    const Row row = a.rows[a.first + i];
    const bool follows = row.first >= a.first && row.first - a.first + row.place == i;
    if (!follows || row.slot >= a.slots || row.place >= row.count) return;
    const bool prompt = a.kind == 0;
    if (!prompt && row.place != 0) return;

    const Head head = *a.heads.slot<Head>(row.slot);
    Fact fact;
    fact.slot = row.slot;
    fact.place = row.place;
    fact.first = row.first;
    fact.count = row.count;
    fact.position = head.length + row.place;
    if (prompt) {
        const PromptRow staged = a.prompt[a.first + i];
        fact.id = staged.id;
        for (u32 axis = 0; axis < 3; ++axis) fact.axes[axis] = staged.axes[axis];
    } else {
        fact.id = head.last_id;
        for (u32 axis = 0; axis < 3; ++axis) fact.axes[axis] = (i32)fact.position + head.rope_offset;
    }
    for (u32 back = 0; back < PREVIOUS; ++back) {
        if (back < row.place) {
            fact.previous[back] = a.prompt[a.first + i - back - 1].id;
        } else {
            const u32 plus_one = head.previous_plus_one[back - row.place];
            fact.previous[back] = plus_one == 0 ? a.boundary : plus_one - 1;
        }
    }
    a.facts[a.first + i] = fact;
}
