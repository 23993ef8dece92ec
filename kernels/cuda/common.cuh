// Types and numbers of every kernel: the twin of kernels/src/numerics.rs.
//
// Sums run in an order that depends on the width and the block size alone. Multiplications and additions
// that the host rounds separately are `mul` and `add`, which are never fused.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

struct alignas(16) Quad {
    u32 word[4];
};

constexpr u32 NONE = 0xffffffffu;
constexpr u32 WHOLE_WARP = 0xffffffffu;

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__host__ __device__ constexpr u32 least(u32 a, u32 b) { return a < b ? a : b; }
__host__ __device__ constexpr u32 ceil_div(u32 a, u32 b) { return a / b + (a % b != 0); }

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// The nearest bf16, ties to even; a NaN stays one.
__device__ __forceinline__ bf16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(bits) : "f"(value));
    return bf16{bits};
}
// Two of them, the first one low.
__device__ __forceinline__ u32 narrow_two(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ __forceinline__ float r16(float value) { return widen(narrow(value)); }

// e^x, step by step as the host's.
__device__ __forceinline__ float exp_of(float x) {
    const float rounder = 12582912.0f;
    const float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
    const float shifted = add(mul(clamped, 1.44269504088896340736f), rounder);
    const float n = sub(shifted, rounder);
    const float r = sub(sub(clamped, mul(n, 0.6933594f)), mul(n, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = add(mul(p, r), 1.3981999e-3f);
    p = add(mul(p, r), 8.333452e-3f);
    p = add(mul(p, r), 4.1665796e-2f);
    p = add(mul(p, r), 1.6666665e-1f);
    p = add(mul(p, r), 0.5f);
    float y = add(add(mul(p, mul(r, r)), r), 1.0f);
    const i32 exponent = (i32)(__float_as_uint(shifted) - __float_as_uint(rounder));
    const i32 first = exponent >> 1;
    y = mul(y, __uint_as_float((u32)(first + 127) << 23));
    y = mul(y, __uint_as_float((u32)(exponent - first + 127) << 23));
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.7f ? infinity() : y;
    return is_nan(x) ? x : y;
}

__device__ __forceinline__ float sigmoid(float x) { return div(1.0f, add(1.0f, exp_of(-x))); }
__device__ __forceinline__ float silu(float x) { return div(x, add(1.0f, exp_of(-x))); }
__device__ __forceinline__ float gelu_tanh(float x) {
    const float u = mul(0.7978846f, add(x, mul(0.044715f, mul(mul(x, x), x))));
    return div(x, add(1.0f, exp_of(mul(-2.0f, u))));
}
__device__ __forceinline__ float gelu_erf(float x) {
    const float z = mul(x < 0.0f ? -x : x, 0.70710678118654752440f);
    const float t = div(1.0f, add(1.0f, mul(0.3275911f, z)));
    float p = 1.0614054f;
    p = add(mul(p, t), -1.453152f);
    p = add(mul(p, t), 1.4214138f);
    p = add(mul(p, t), -0.28449674f);
    p = add(mul(p, t), 0.2548296f);
    const float tail = mul(0.5f, mul(mul(p, t), exp_of(-mul(z, z))));
    return mul(x, x < 0.0f ? tail : sub(1.0f, tail));
}
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The order of a choice as a number: the larger value is the larger number, then the lower id; NaN last.
__device__ __forceinline__ u32 order_of(float value) {
    const u32 bits = __float_as_uint(value);
    if (is_nan(value)) return 0;
    if (value == 0.0f) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 rank_of(float value, u32 id) { return (u64)order_of(value) << 32 | (u32)~id; }
__device__ __forceinline__ u32 id_of(u64 rank) { return ~(u32)rank; }

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / 32; }

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
    for (u32 apart = 16; apart > 0; apart /= 2) value = add(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
    return value;
}

// The sum over a block, in every thread: warps in order.
__device__ inline float block_sum(float value) {
    __shared__ float parts[32];
    value = warp_sum(value);
    __syncthreads();
    if (lane_id() == 0) parts[warp_id()] = value;
    __syncthreads();
    float sum = parts[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) sum = add(sum, parts[warp]);
    return sum;
}

// What `join` makes of a number of every thread of a block, in any order, in every thread.
template <class Join> __device__ __forceinline__ u64 block_joined(u64 value, Join join) {
    __shared__ u64 parts[32], whole;
    for (u32 apart = 16; apart > 0; apart /= 2) value = join(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
    __syncthreads();
    if (lane_id() == 0) parts[warp_id()] = value;
    __syncthreads();
    if (warp_id() == 0) {
        value = lane_id() < blockDim.x / 32 ? parts[lane_id()] : Join::none;
        for (u32 apart = 16; apart > 0; apart /= 2) value = join(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
        if (lane_id() == 0) whole = value;
    }
    __syncthreads();
    return whole;
}
struct Add {
    static constexpr u64 none = 0;
    __device__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Larger {
    static constexpr u64 none = 0;
    __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
// The sum of integers over a block, and the largest number of a block.
__device__ inline u64 block_total(u64 value) { return block_joined(value, Add()); }
__device__ inline u64 block_max(u64 value) { return block_joined(value, Larger()); }

// 1 / sqrt(mean of squares + eps).
__device__ __forceinline__ float inverse_rms(float sum_of_squares, u32 width, float eps) {
    return div(1.0f, root(add(div(sum_of_squares, (float)width), eps)));
}

// A normed value with a zero-centred gain.
__device__ __forceinline__ float normed(float x, float scale, bf16 gain) {
    return mul(mul(x, scale), add(1.0f, widen(gain)));
}

__device__ __forceinline__ bool aligned16(const void* pointer) { return ((u64)pointer & 15) == 0; }

// Copies `count` elements with all threads of the block.
__device__ inline void copy_row(bf16* to, const bf16* from, u32 count) {
    if (aligned16(to) && aligned16(from) && count % 8 == 0) {
        for (u32 i = threadIdx.x; i < count / 8; i += blockDim.x) ((Quad*)to)[i] = ((const Quad*)from)[i];
    } else {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
    }
}
