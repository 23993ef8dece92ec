// The twin of kernels/src/gate.rs, which holds the contract. One warp per row and head.
#include "few.cuh"
#include "ptx.cuh"

struct Args {
    const bf16* o;
    const bf16* x;
    const bf16* gain;
    bf16* y;
    u32 rows, heads, width, stride, z_at, gate;
    float eps;
    u32 zero;
};
static_assert(sizeof(Args) == ARGS_BYTES_gated_norm);

constexpr u32 SIGMOID = 0;
// Heads of a block.
constexpr u32 HEADS = 4;

// A head of at most 128 columns is read at once; a wider one is read twice.
extern "C" __global__ void __launch_bounds__(HEADS * 32) gated_norm(Args a) {
    const u64 row = blockIdx.x;
    const u32 head = blockIdx.y * HEADS + warp_id(), width = a.width, own = lane_id() * 4;
    const bf16* const o = a.o + (row * a.heads + head) * width;
    const bf16* const z = a.x + row * a.stride + a.z_at + (u64)head * width;
    bf16* const y = a.y + (row * a.heads + head) * width;
    const bool all_whole = whole<4>(o, width) && whole<4>(z, width) && whole<4>(y, width) && whole<4>(a.gain, width);
    const auto read = [&](const bf16* from, u32 at) {
        return at < width ? load_packed<4>(from, at, width, all_whole) : Packed<4>{};
    };
    Packed<4> gain = read(a.gain, own);
    follow();
    if (head >= a.heads) return;
    Packed<4> value = read(o, own), gate = read(z, own);
    float squares = 0.0f;
    const auto square = [&](const Packed<4>& packed) {
        const Few<4> few = unpacked(packed);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) squares = add(squares, mul(few.value[e], few.value[e]));
    };
    square(value);
#pragma unroll 1
    for (u32 at = own + 128; at < width; at += 128) square(read(o, at));
    const float scale = inverse_rms(warp_sum(squares), width, a.eps);
#pragma unroll 1
    for (u32 at = own; at < width; at += 128) {
        if (at > own) gain = read(a.gain, at), gate = read(z, at), value = read(o, at);
        const Few<4> gains = unpacked(gain), gates = unpacked(gate);
        Few<4> few = unpacked(value);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const float open = div(a.gate == SIGMOID ? 1.0f : gates.value[e], add(1.0f, exp_of(-gates.value[e])));
            few.value[e] = mul(mul(gains.value[e], mul(few.value[e], scale)), open);
        }
        store_few<4>(y, at, width, all_whole, few);
    }
}
