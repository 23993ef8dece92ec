// What the twins of the gated delta rule share: arguments and inputs.
#pragma once
#include "few.cuh"
#include "ptx.cuh"
#include "state.cuh"

struct Args {
    RowRange rows;
    const bf16* qkv;
    const bf16* x;
    const float* a_log;
    const float* dt_bias;
    Part state;
    bf16* y;
    float* ready;
    u32 stride, beta_at, decay_at, k_heads, v_heads, k_width, v_width, zero;

    __device__ const bf16* query(u64 row, u32 head) const {
        return qkv + row * (2 * k_heads * k_width + v_heads * v_width) + head / (v_heads / k_heads) * k_width;
    }
    __device__ const bf16* key(u64 row, u32 head) const { return query(row, head) + k_heads * k_width; }
    __device__ const bf16* value(u64 row, u32 head) const {
        return query(row, 0) + 2 * k_heads * k_width + head * v_width;
    }
    __device__ float* state_of(u32 slot, u32 head) const {
        return state.slot<float>(slot) + (u64)head * k_width * v_width;
    }
    __device__ float gate(u64 row, u32 at) const {
        return widen(bf16{__ldcg((const u16*)(x + row * stride + at))});
    }
    __device__ float beta(u64 row, u32 head) const { return sigmoid(gate(row, beta_at + head)); }
    // g.
    __device__ float fade(u64 row, u32 head) const {
        const float a = gate(row, decay_at + head);
        return mul(-expf(a_log[head]), softplus(add(a, dt_bias[head])));
    }
};

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Elements `at ..` of a row of `count`; zero past its end.
__device__ __forceinline__ Quad eight(const bf16* row, u32 at, u32 count) {
    if (whole<8>(row, count)) return at < count ? *(const Quad*)(row + at) : Quad{};
    u64 low = 0, high = 0;
#pragma unroll 1
    for (u32 e = 8; e-- > 0;) {
        high = high << 16 | low >> 48;
        low = low << 16 | (at + e < count ? row[at + e].bits : 0);
    }
    return Quad{{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)}};
}
__device__ __forceinline__ float element(const Quad& v, u32 e) {
    return e % 2 ? high_of(v.word[e / 2]) : low_of(v.word[e / 2]);
}

// Four neighbouring f32.
struct alignas(16) Four {
    float value[4];
};

__device__ __forceinline__ float unit_scale(float sum_of_squares) {
    return div(1.0f, root(add(sum_of_squares, 1e-6f)));
}
