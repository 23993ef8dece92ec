// The twin of kernels/src/residual.rs, which holds the contract. One block per row and stream.
#include "common.cuh"

struct Args {
    bf16* streams;
    const float* partials;
    const float* inject;
    const bf16* gain;
    bf16* normed;
    u32 rows, count, hidden;
    float eps;
};
static_assert(sizeof(Args) == ARGS_BYTES_residual);

extern "C" __global__ void __launch_bounds__(256) residual(Args a) {
    const u64 row = blockIdx.x;
    const u32 stream = blockIdx.y;
    bf16* const x = a.streams + (row * a.count + stream) * a.hidden;
    float squares = 0.0f;
    if (a.partials) {
        const float* const first = a.partials + row * a.hidden;
        const float* const second = first + (u64)a.rows * a.hidden;
        const float inject = a.inject[row * a.count + stream];
        for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x) {
            const float y = r16(add(first[j], second[j]));
            const bf16 sum = narrow(add(widen(x[j]), mul(y, inject)));
            x[j] = sum;
            squares = add(squares, mul(widen(sum), widen(sum)));
        }
    } else {
        for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x)
            squares = add(squares, mul(widen(x[j]), widen(x[j])));
    }
    if (!a.gain) return;
    const float scale = inverse_rms(block_sum(squares), a.hidden, a.eps);
    const bf16* const gain = a.gain + (u64)stream * a.hidden;
    bf16* const n = a.normed + (row * a.count + stream) * a.hidden;
    for (u32 j = threadIdx.x; j < a.hidden; j += blockDim.x) n[j] = narrow(normed(widen(x[j]), scale, gain[j]));
}
