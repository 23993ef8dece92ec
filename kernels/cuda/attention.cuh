// The stacked projection of sparse attention and the rotary table: the twins of `Projection` in
// kernels/src/heads.rs and of kernels/src/rope.rs.
#pragma once
#include "state.cuh"

struct Projection {
    const bf16* base;
    u32 stride, q_heads, index_heads, zero;

    __device__ const bf16* row(u64 row) const { return base + row * stride; }
    __device__ u32 query_at(const Pages& pages, u32 head) const { return 2 * head * pages.width; }
    __device__ u32 gate_at(const Pages& pages, u32 head) const { return query_at(pages, head) + pages.width; }
    __device__ u32 keys_at(const Pages& pages) const { return query_at(pages, q_heads); }
    __device__ u32 values_at(const Pages& pages) const { return keys_at(pages) + pages.kv_heads * pages.width; }
    __device__ u32 index_queries_at(const Pages& pages) const {
        return values_at(pages) + pages.kv_heads * pages.width;
    }
    __device__ u32 index_key_at(const Pages& pages) const {
        return index_queries_at(pages) + index_heads * pages.index_width;
    }
};

struct Rotary {
    const float* frequencies;
    u32 half, height, width, zero;

    // The axis (0 time, 1 height, 2 width) that frequency `i` turns with.
    __device__ u32 axis(u32 i) const {
        if (i % 3 == 1 && i < 3 * height) return 1;
        return i % 3 == 2 && i < 3 * width ? 2 : 0;
    }
};

struct Turn {
    float cosine, sine;
};
// Not inline: the code for large angles is long.
__device__ __noinline__ Turn turn_by(float angle) { return Turn{r16(cosf(angle)), r16(sinf(angle))}; }

// Norms `value(0) .. value(width - 1)` with a zero-centred gain, turns them and writes them. One block.
template <class Value>
__device__ void norm_and_turn(Value value, u32 width, const bf16* gain, float eps, const Rotary& rotary,
                              const i32* axes, bf16* out) {
    float squares = 0.0f;
#pragma unroll 4
    for (u32 j = threadIdx.x; j < width; j += blockDim.x) squares = add(squares, mul(value(j), value(j)));
    // What does not depend on the sum comes before it: few threads turn more than one pair.
    const auto turn_of = [&](u32 i) { return turn_by(mul((float)axes[rotary.axis(i)], rotary.frequencies[i])); };
    Turn turn = {};
    if (threadIdx.x < rotary.half) turn = turn_of(threadIdx.x);
    const float scale = inverse_rms(block_sum(squares), width, eps);
    const auto at = [&](u32 j) { return r16(normed(value(j), scale, gain[j])); };
#pragma unroll 1
    for (u32 i = threadIdx.x; i < rotary.half; i += blockDim.x) {
        if (i != threadIdx.x) turn = turn_of(i);
        const float a = at(i), b = at(i + rotary.half);
        out[i] = narrow(sub(mul(a, turn.cosine), mul(b, turn.sine)));
        out[i + rotary.half] = narrow(add(mul(b, turn.cosine), mul(a, turn.sine)));
    }
#pragma unroll 4
    for (u32 j = 2 * rotary.half + threadIdx.x; j < width; j += blockDim.x) out[j] = narrow(at(j));
}
