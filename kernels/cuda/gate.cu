// The twin of kernels/src/gate.rs, which holds the contract. One block per row and head.
#include "common.cuh"

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

extern "C" __global__ void __launch_bounds__(64) gated_norm(Args a) {
    const u64 row = blockIdx.x;
    const u64 at = (row * a.heads + blockIdx.y) * a.width;
    const bf16* const o = a.o + at;
    const bf16* const z = a.x + row * a.stride + a.z_at + (u64)blockIdx.y * a.width;
    float squares = 0.0f;
    for (u32 j = threadIdx.x; j < a.width; j += blockDim.x) squares = add(squares, mul(widen(o[j]), widen(o[j])));
    const float scale = inverse_rms(block_sum(squares), a.width, a.eps);
    for (u32 j = threadIdx.x; j < a.width; j += blockDim.x) {
        const float gate = a.gate == SIGMOID ? sigmoid(widen(z[j])) : silu(widen(z[j]));
        a.y[at + j] = narrow(mul(mul(widen(a.gain[j]), mul(widen(o[j]), scale)), gate));
    }
}
