// A few neighbouring bf16 of a row at a time, as f32.
#pragma once
#include "common.cuh"

template <u32 N> struct Few {
    float value[N];
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

template <u32 N> struct alignas(2 * N) Packed {
    u32 word[N / 2];
};

// Whether rows of `count` elements at `pointer` can be read N at a time.
template <u32 N> __device__ __forceinline__ bool whole(const void* pointer, u32 count) {
    return ((u64)pointer & (2 * N - 1)) == 0 && count % N == 0;
}

// Elements `at ..` of a row of `count`; zero past its end. `whole`: as the function says of the row. Rows that are
// not are rare, so the code for them is short rather than fast.
template <u32 N> __device__ __forceinline__ Packed<N> load_packed(const bf16* row, u32 at, u32 count, bool whole) {
    if (whole && at < count) return *(const Packed<N>*)(row + at);
    Packed<N> packed = {};
#pragma unroll 1
    for (u32 i = N; i-- > 0;) {
#pragma unroll
        for (u32 w = N / 2 - 1; w > 0; --w) packed.word[w] = packed.word[w] << 16 | packed.word[w - 1] >> 16;
        packed.word[0] = packed.word[0] << 16 | (at + i < count ? row[at + i].bits : 0);
    }
    return packed;
}
template <u32 N> __device__ __forceinline__ Few<N> unpacked(const Packed<N>& packed) {
    Few<N> few;
#pragma unroll
    for (u32 i = 0; i < N; ++i) few.value[i] = i % 2 ? high_of(packed.word[i / 2]) : low_of(packed.word[i / 2]);
    return few;
}
template <u32 N> __device__ __forceinline__ Few<N> load_few(const bf16* row, u32 at, u32 count, bool whole) {
    return unpacked(load_packed<N>(row, at, count, whole));
}

// The nearest bf16 of a few numbers.
template <u32 N> __device__ __forceinline__ Packed<N> packed_of(const Few<N>& few) {
    Packed<N> packed;
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) packed.word[i] = narrow_two(few.value[2 * i], few.value[2 * i + 1]);
    return packed;
}

// Writes elements `at ..`; nothing past the row's end.
template <u32 N>
__device__ __forceinline__ void store_packed(bf16* row, u32 at, u32 count, bool whole, Packed<N> packed) {
    if (whole && at < count) {
        *(Packed<N>*)(row + at) = packed;
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < N && at + i < count; ++i) {
        row[at + i].bits = (u16)packed.word[0];
#pragma unroll
        for (u32 w = 0; w < N / 2; ++w) packed.word[w] = packed.word[w] >> 16 | (w + 1 < N / 2 ? packed.word[w + 1] << 16 : 0);
    }
}
template <u32 N>
__device__ __forceinline__ void store_few(bf16* row, u32 at, u32 count, bool whole, const Few<N>& few) {
    store_packed<N>(row, at, count, whole, packed_of(few));
}
