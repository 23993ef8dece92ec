// A few neighbouring bf16 of a row at a time, as f32.
#pragma once
#include "common.cuh"

template <u32 N> struct Few {
    float value[N];
};

// The bits of two bf16, the first one low.
__device__ __forceinline__ u32 pair(float low, float high) {
    return (u32)narrow(low).bits | (u32)narrow(high).bits << 16;
}
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

template <u32 N> struct alignas(2 * N) Packed {
    u32 word[N / 2];
};

// Whether rows of `count` elements at `pointer` can be read N at a time.
template <u32 N> __device__ __forceinline__ bool whole(const void* pointer, u32 count) {
    return ((u64)pointer & (2 * N - 1)) == 0 && count % N == 0;
}

// Elements `at ..` of a row of `count`; zero past its end. `whole`: as the function says of the row.
template <u32 N> __device__ __forceinline__ Few<N> load_few(const bf16* row, u32 at, u32 count, bool whole) {
    Few<N> few;
    if (whole && at < count) {
        const Packed<N> packed = *(const Packed<N>*)(row + at);
#pragma unroll
        for (u32 i = 0; i < N; ++i) few.value[i] = i % 2 ? high_of(packed.word[i / 2]) : low_of(packed.word[i / 2]);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; ++i) few.value[i] = at + i < count ? widen(row[at + i]) : 0.0f;
    }
    return few;
}

// Rounds and writes elements `at ..`; nothing past the row's end.
template <u32 N>
__device__ __forceinline__ void store_few(bf16* row, u32 at, u32 count, bool whole, const Few<N>& few) {
    if (whole && at < count) {
        Packed<N> packed;
#pragma unroll
        for (u32 i = 0; i < N / 2; ++i) packed.word[i] = pair(few.value[2 * i], few.value[2 * i + 1]);
        *(Packed<N>*)(row + at) = packed;
    } else {
#pragma unroll
        for (u32 i = 0; i < N; ++i)
            if (at + i < count) row[at + i] = narrow(few.value[i]);
    }
}
