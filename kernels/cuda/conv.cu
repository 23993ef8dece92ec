// The twin of kernels/src/conv.rs, which holds the contract. One thread per row and channel.
#include "few.cuh"
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

// The usual row: the only one of its slot, under four taps whose weights are `packed`. Everything is read at once.
__device__ __forceinline__ void alone(const Args& a, const Fact& fact, u64 row, u32 channel, const Packed<4>& packed) {
    bf16* const window = a.window.slot<bf16>(fact.slot) + channel;
    const bf16 seen[4] = {window[0], window[a.channels], window[2 * (u64)a.channels], a.x[row * a.stride + channel]};
    const Few<4> weight = unpacked(packed);
    float sum = 0.0f;
#pragma unroll
    for (u32 tap = 0; tap < 4; ++tap) sum = add(sum, mul(weight.value[tap], widen(seen[tap])));
    a.y[row * a.channels + channel] = narrow(silu(r16(sum)));
#pragma unroll
    for (u32 at = 0; at < 3; ++at) window[(u64)at * a.channels] = seen[at + 1];
}

// The next launch may read what the launches before this one wrote before it waits for this one: it starts when that is
// complete.
extern "C" __global__ void __launch_bounds__(128) conv(Args a) {
    const u32 channel = blockIdx.y * blockDim.x + threadIdx.x;
    const bf16* const weight = a.weight + (u64)channel * a.taps;
    const bool usual = a.taps == 4 && whole<4>(a.weight, 4);
    Packed<4> packed = {};
    if (usual && channel < a.channels) packed = *(const Packed<4>*)weight;
    wait_for_previous();
    let_next_start();
    if (channel >= a.channels) return;
    const u64 row = a.rows.first + blockIdx.x;
    const Fact& fact = a.rows.facts[row];
    if (usual && fact.place == 0 && a.rows.run((u32)row) == 1) return alone(a, fact, row, channel, packed);
    each_row(a.rows, a.window, a.x, a.stride, a.channels, channel, a.taps - 1,
             [&](const History& history, u32 place, u64 row) {
                 const float sum = history.convolve(weight, a.taps, 1, place);
                 a.y[row * a.channels + channel] = narrow(silu(r16(sum)));
             });
}
