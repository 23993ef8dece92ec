// The twin of kernels/src/conv.rs, which holds the contract. One thread per row and channel.
#include "history.cuh"
#include "ptx.cuh"

struct Args {
    RowRange rows;
    const bf16* x;
    const bf16* weight;
    Part window;
    bf16* y;
    u32 channels, taps, stride, zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_conv);

extern "C" __global__ void __launch_bounds__(128) conv(Args a) {
    follow();
    const u32 channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= a.channels) return;
    const bf16* const weight = a.weight + (u64)channel * a.taps;
    each_row(a.rows, a.window, a.x, a.stride, a.channels, channel, a.taps - 1,
             [&](const History& history, u32 place, u64 row) {
                 const float sum = history.convolve(weight, a.taps, 1, place);
                 a.y[row * a.channels + channel] = narrow(silu(r16(sum)));
             });
}
