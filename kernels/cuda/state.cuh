// Rows, resident state and pages: the twin of kernels/src/table.rs and kernels/src/state.rs.
#pragma once
#include "common.cuh"

constexpr u32 PREVIOUS = 4;
constexpr u32 PAGE = 64;
constexpr u32 IN_PROMPT = 1u << 31;

struct Fact {
    u32 slot, place, first, count, id, position;
    i32 axes[3];
    u32 previous[PREVIOUS];

    // The sequence position of the slot's first row in this round.
    __device__ u32 start() const { return position - place; }
};

struct Head {
    u32 length, last_id;
    i32 rope_offset;
    u32 previous_plus_one[PREVIOUS];
};

struct RowRange {
    const Fact* facts;
    u32 first, count;

    // How many rows from covered row `at` on belong to its slot, none past the range.
    __device__ u32 run(u32 at) const { return least(facts[at].count, first + count - at); }
};

struct Part {
    u8* base;
    u64 stride;

    template <class T> __device__ T* slot(u32 slot) const { return (T*)(base + slot * stride); }
};

struct Pages {
    u8* base;
    u64 stride;
    Part tables;
    u32 capacity, pages, kv_heads, width, ratio, index_width;

    // The keys of the page that holds `position` of a slot; null if the slot has no such page.
    __device__ bf16* page(u32 slot, u32 position) const {
        const u32 entry = position / PAGE;
        if (entry >= capacity) return nullptr;
        const u32 number = tables.slot<u32>(slot)[entry];
        return number < pages ? (bf16*)(base + number * stride) : nullptr;
    }
    // Elements of a page's keys, or of its values, which follow them.
    __device__ u64 key_elements() const { return (u64)PAGE * kv_heads * width; }
    // The pooled index key of block `block` of a slot, or null.
    __device__ bf16* pooled(u32 slot, u32 block) const {
        const u32 per_page = PAGE / ratio;
        bf16* const keys = page(slot, block / per_page * PAGE);
        return keys ? keys + 2 * key_elements() + (u64)(block % per_page) * index_width : nullptr;
    }
};
