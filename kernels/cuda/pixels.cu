// The twin of kernels/src/pixels.rs, which holds the contract. A thread takes sixteen bytes.
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    const u8* bytes;
    bf16* y;
    u64 count;
};
static_assert(sizeof(Args) == ARGS_BYTES_pixels);

constexpr u32 RUN = 4096;

__device__ __forceinline__ float pixel(u32 byte) { return div(sub((float)byte, 127.5f), 127.5f); }

extern "C" __global__ void __launch_bounds__(256) pixels(Args a) {
    follow();
    const u64 at = (u64)blockIdx.x * RUN + threadIdx.x * 16;
    if (at >= a.count) return;
    if (at + 16 <= a.count && aligned16(a.bytes) && aligned16(a.y)) {
        const Quad bytes = *(const Quad*)(a.bytes + at);
        Quad two[2];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 pair = bytes.word[i / 2] >> i % 2 * 16;
            two[i / 4].word[i % 4] = narrow_two(pixel(pair & 255), pixel(pair >> 8 & 255));
        }
        ((Quad*)(a.y + at))[0] = two[0];
        ((Quad*)(a.y + at))[1] = two[1];
    } else {
#pragma unroll 1
        for (u32 i = 0; i < 16 && at + i < a.count; ++i) a.y[at + i] = narrow(pixel(a.bytes[at + i]));
    }
}
