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

extern "C" __global__ void __launch_bounds__(HEADS * 32) gated_norm(Args a) {
    follow();
    const u64 row = blockIdx.x;
    const u32 head = blockIdx.y * HEADS + warp_id(), width = a.width;
    if (head >= a.heads) return;
    const bf16* const o = a.o + (row * a.heads + head) * width;
    const bf16* const z = a.x + row * a.stride + a.z_at + (u64)head * width;
    bf16* const y = a.y + (row * a.heads + head) * width;
    const bool all_whole = whole<4>(o, width) && whole<4>(z, width) && whole<4>(y, width) && whole<4>(a.gain, width);
    float squares = 0.0f;
    for (u32 at = lane_id() * 4; at < width; at += 128) {
        const Few<4> value = load_few<4>(o, at, width, all_whole);
        for (u32 e = 0; e < 4; ++e) squares = add(squares, mul(value.value[e], value.value[e]));
    }
    const float scale = inverse_rms(warp_sum(squares), width, a.eps);
    for (u32 at = lane_id() * 4; at < width; at += 128) {
        const Few<4> gain = load_few<4>(a.gain, at, width, all_whole), gate = load_few<4>(z, at, width, all_whole);
        Few<4> value = load_few<4>(o, at, width, all_whole);
        for (u32 e = 0; e < 4; ++e) {
            const float open = a.gate == SIGMOID ? sigmoid(gate.value[e]) : silu(gate.value[e]);
            value.value[e] = mul(mul(gain.value[e], mul(value.value[e], scale)), open);
        }
        store_few<4>(y, at, width, all_whole, value);
    }
}
