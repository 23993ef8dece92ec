// The twin of kernels/src/advance.rs, which holds the contract. One thread per row; the last row of a slot
// writes its head.
#include "state.cuh"
#include "ptx.cuh"

struct Args {
    RowRange rows;
    Part heads, axes;
};
static_assert(sizeof(Args) == ARGS_BYTES_advance);

extern "C" __global__ void __launch_bounds__(128) advance(Args a) {
    follow();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.rows.count) return;
    const Fact fact = a.rows.facts[a.rows.first + i];
    if (fact.place + PAGE >= fact.count) {
        i32* const ring = a.axes.slot<i32>(fact.slot) + fact.position % PAGE * 3;
        for (u32 axis = 0; axis < 3; ++axis) ring[axis] = fact.axes[axis];
    }
    if (fact.place + 1 != fact.count) return;
    Head* const head = a.heads.slot<Head>(fact.slot);
    head->length += fact.count;
    head->previous_plus_one[0] = fact.id + 1;
    for (u32 back = 1; back < PREVIOUS; ++back) head->previous_plus_one[back] = fact.previous[back - 1] + 1;
}
