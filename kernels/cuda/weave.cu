// The twin of kernels/src/weave.rs, which holds the contract. blockIdx: a run of a part, the part, the row.
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    const bf16* from;
    bf16* to;
    u32 parts, rows, width, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_weave);

constexpr u32 RUN = 4096;

extern "C" __global__ void __launch_bounds__(256) weave(Args a) {
    follow();
    const u32 part = blockIdx.y, row = blockIdx.z, end = least(a.width, (blockIdx.x + 1) * RUN);
    const bf16* const from = a.from + ((u64)part * a.rows + row) * a.width;
    bf16* const to = a.to + ((u64)row * a.parts + part) * a.width;
    const bool smooth = whole<8>(from, a.width) && whole<8>(to, a.width);
    for (u32 at = blockIdx.x * RUN + threadIdx.x * 8; at < end; at += 256 * 8)
        store_packed<8>(to, at, a.width, smooth, load_packed<8>(from, at, a.width, smooth));
}
