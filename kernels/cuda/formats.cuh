// How the numbers of a weight matrix are stored, and how they become operands of a product on tensor cores.
// kernels/src/tiles.rs says where each lies in a unit.
//
// A format says how many quads a lane reads of a unit (QUADS), and makes of them and of the unit's scales the four
// registers of product j: bf16 numbers that are exact. What they lack comes later: a scale of the unit's sum (SCALED),
// or a number of the row's whole sum (WHOLE).
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr u32 TILE = 16;
constexpr u32 UNIT = 64;

// Products of two pairs of bf16, exact where they fit; subnormals count.
__device__ __forceinline__ u32 mul_two(u32 a, u32 b) {
    u32 v;
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    return v;
}

// Numbers of the rows g and g + 8 of a tile.
struct Halves {
    float low, high;
};

// Elements as they are.
struct Bf16 {
    static constexpr u32 QUADS = 4, SCALE_BYTES = 0;
    static constexpr bool SCALED = false, WHOLE = false;
    struct Scale {};

    __device__ static Scale scale(const u8*, u32) { return Scale{}; }
    __device__ static Quad fragment(const Quad (&codes)[QUADS], const Scale&, u32 j) { return codes[j]; }
    __device__ static const u8* scale_of_lane(const u8* scales) { return scales; }
};

// e4m3 codes. A word is two columns: of each half the high byte is row g, the low one row g + 8.
struct Fp8 {
    static constexpr u32 QUADS = 2, SCALE_BYTES = 8;
    static constexpr bool SCALED = true, WHOLE = false;
    typedef Halves Scale;

    __device__ static Scale scale(const u8* scales, u32 unit) {
        Halves halves;
        asm("ld.global.nc.v2.f32 {%0,%1},[%2];" : "=f"(halves.low), "=f"(halves.high) : "l"(scales + unit * SCALE_BYTES));
        return halves;
    }
    // Sign, exponent and mantissa in the places of a bf16 whose exponent is 120 too low.
    __device__ static u32 row_low(u32 word) { return mul_two((word >> 4 & 0x07f007f0u) | (word & 0x80008000u), 0x7b807b80u); }
    __device__ static u32 row_high(u32 word) {
        return mul_two((word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u), 0x7b807b80u);
    }
    __device__ static Quad fragment(const Quad (&codes)[QUADS], const Scale&, u32 j) {
        const u32 first = codes[j / 2].word[j % 2 * 2], second = codes[j / 2].word[j % 2 * 2 + 1];
        return Quad{{row_low(first), row_high(first), row_low(second), row_high(second)}};
    }
    __device__ static const u8* scale_of_lane(const u8* scales) { return scales; }
};

// e2m1 codes, a word for each product. A magnitude in bits 8 to 6 of a bf16 is the code times 2^-126; times the
// scale, whose exponent is 119 too high, it is what the row's number makes up for.
struct Nvfp4 {
    static constexpr u32 QUADS = 1, SCALE_BYTES = 64;
    static constexpr bool SCALED = false, WHOLE = true;
    // Those of rows g and g + 8 in the two low bytes.
    typedef u32 Scale;

    __device__ static Scale scale(const u8* scales, u32 unit) {
        u16 bytes;
        asm("ld.global.nc.L1::no_allocate.u16 %0,[%1];" : "=h"(bytes) : "l"(scales + unit * SCALE_BYTES));
        return bytes;
    }
    __device__ static u32 two(u32 byte) { return byte * 0x00100010u + 0x76807680u; }
    __device__ static Quad fragment(const Quad (&codes)[QUADS], Scale scale, u32 j) {
        constexpr u32 PLACES = 0x81c081c0u;
        const u32 word = codes[0].word[j], low = two(scale & 255), high = two(scale >> 8);
        return Quad{{mul_two(word & PLACES, low), mul_two(word << 3 & PLACES, high),
                     mul_two((word & 0x20072007u) * 68 & PLACES, low),
                     mul_two((word >> 3 & 0x01c001c0u) | (word << 1 & 0x80008000u), high)}};
    }
    __device__ static const u8* scale_of_lane(const u8* scales) { return scales + lane_id() * 2; }
};

template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;

// The units of a tile, from some unit on, as a lane reads them.
template <class F> struct Run {
    const Quad* codes;
    const u8* scales;

    __device__ __forceinline__ Run from(u32 unit) const {
        return Run{codes + unit * F::QUADS * 32, scales + unit * F::SCALE_BYTES};
    }
    __device__ __forceinline__ void load(u32 unit, Quad (&to)[F::QUADS], typename F::Scale& scale) const {
#pragma unroll
        for (u32 i = 0; i < F::QUADS; ++i) to[i] = load_weight(codes + unit * (F::QUADS * 32) + i * 32);
        scale = F::scale(scales, unit);
    }
};

// A packed matrix.
template <class F> struct Tiles {
    static constexpr u32 UNIT_QUADS = F::QUADS * 32;
    const Quad* codes;
    const u8* scales;
    const float* wholes;
    // Units of a tile.
    u32 units;

    // Matrix `index` of the `count` at `base`, which have `tiles` tiles of `units` units each.
    __device__ __forceinline__ Tiles(const void* base, u32 tiles, u32 units, u32 count = 1, u32 index = 0) : units(units) {
        const u64 each = (u64)tiles * units, all = each * count, first = each * index;
        codes = (const Quad*)base + first * UNIT_QUADS;
        scales = (const u8*)((const Quad*)base + all * UNIT_QUADS);
        // The next part begins at a multiple of 16 bytes.
        wholes = (const float*)(scales + (all * F::SCALE_BYTES + 15) / 16 * 16) + (u64)index * tiles * TILE;
        scales += first * F::SCALE_BYTES;
    }
    __device__ __forceinline__ Run<F> run(u32 tile, u32 unit) const {
        const u64 at = (u64)tile * units + unit;
        const Quad* const from = codes + at * UNIT_QUADS + lane_id();
        if constexpr (F::SCALE_BYTES == 0) return Run<F>{from, nullptr};
        else return Run<F>{from, F::scale_of_lane(scales + at * F::SCALE_BYTES)};
    }
    // The numbers of rows g and g + 8 of a tile.
    __device__ __forceinline__ Halves whole(u32 tile) const { return whole(tile, lane_id() / 4); }
    __device__ __forceinline__ Halves whole(u32 tile, u32 g) const { return Halves{row(tile, g), row(tile, g + 8)}; }
    // The number of row `at` of a tile.
    __device__ __forceinline__ float row(u32 tile, u32 at) const {
        if constexpr (!F::WHOLE) return 1.0f;
        return __ldg(wholes + (u64)tile * TILE + at);
    }
};

// A row's sum with its number.
template <class F> __device__ __forceinline__ float whole(float sum, float number) {
    if constexpr (F::WHOLE) return mul(sum, number);
    return sum;
}
