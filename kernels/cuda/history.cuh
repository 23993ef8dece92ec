// What the rows of a slot see of their past: each other, and the slot's window before them. The twin of
// `History` in kernels/src/conv.rs.
#pragma once
#include "state.cuh"

// One channel of the rows of one slot, whose first row is `x`.
struct History {
    bf16* window;
    const bf16* x;
    u64 stride;
    u32 channels, depth;

    // Row `at`, counted from the start of the window.
    __device__ float row(u32 at) const {
        return widen(at < depth ? window[(u64)at * channels] : x[(at - depth) * stride]);
    }
    // The convolution at row `place`, its sum added tap by tap, oldest first.
    __device__ float convolve(const bf16* weight, u32 taps, u32 dilation, u32 place) const {
        float sum = 0.0f;
        for (u32 tap = 0; tap < taps; ++tap) sum = add(sum, mul(widen(weight[tap]), row(place + tap * dilation)));
        return sum;
    }
    // Makes the window the last rows of what was seen, after `rows` rows.
    __device__ void keep(u32 rows) const {
        for (u32 at = 0; at < depth; ++at) {
            const u32 from = at + rows;
            window[(u64)at * channels] = from < depth ? window[(u64)from * channels] : x[(from - depth) * stride];
        }
    }
};

// Calls `convolve(history, place, row)` for what this thread's channel owes covered row `at`. A row that lies
// deep enough in its slot sees rows alone. The slot's first row does itself and the rows that see the window,
// and then writes the window: nobody else reads it.
template <class Convolve>
__device__ void each_row(const RowRange& rows, const Part& windows, const bf16* x, u64 stride, u32 channels,
                         u32 channel, u32 depth, Convolve convolve) {
    const u64 row = rows.first + blockIdx.x;
    const Fact& fact = rows.facts[row];
    if (fact.place > blockIdx.x) return;
    const u64 first = row - fact.place;
    const History history{windows.slot<bf16>(fact.slot) + channel, x + first * stride + channel, stride, channels,
                          depth};
    if (fact.place == 0) {
        const u32 run = rows.run(row);
        for (u32 place = 0; place < run && (place == 0 || place < depth); ++place)
            convolve(history, place, first + place);
        history.keep(run);
    } else if (fact.place >= depth) {
        convolve(history, fact.place, row);
    }
}
