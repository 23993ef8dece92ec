// Kernels that do one thing each. Every one takes its argument block by value, as its only parameter.

#include "words.cuh"

struct Add {
    u32* to;
    const u32* from;
    u32 count;
    u32 value;
};

struct Note {
    u32* log;
    const u32* from;
    u32 value;
    u32 pad;
};

struct Spin {
    u64 nanoseconds;
};

struct Echo {
    u64* to;
    u64 words[63];
};

struct Turn {
    u32* words;
    u32 count;
    u32 pad;
};

struct Late {
    u32* to;
    u32 value;
    u32 nanoseconds;
};

struct Look {
    u32* to;
    const u32* from;
};

#ifdef ARGS_BYTES_late
static_assert(sizeof(Late) == ARGS_BYTES_late, "the block of `late`");
#endif
#ifdef ARGS_BYTES_look
static_assert(sizeof(Look) == ARGS_BYTES_look, "the block of `look`");
#endif
#ifdef ARGS_BYTES_hasty
static_assert(sizeof(Look) == ARGS_BYTES_hasty, "the block of `hasty`");
#endif
#ifdef ARGS_BYTES_add
static_assert(sizeof(Add) == ARGS_BYTES_add, "the block of `add`");
#endif
#ifdef ARGS_BYTES_note
static_assert(sizeof(Note) == ARGS_BYTES_note, "the block of `note`");
#endif
#ifdef ARGS_BYTES_spin
static_assert(sizeof(Spin) == ARGS_BYTES_spin, "the block of `spin`");
#endif
#ifdef ARGS_BYTES_echo
static_assert(sizeof(Echo) == ARGS_BYTES_echo, "the block of `echo`");
#endif
#ifdef ARGS_BYTES_turn
static_assert(sizeof(Turn) == ARGS_BYTES_turn, "the block of `turn`");
#endif

extern "C" __global__ void add(Add args) {
    u32 i = global_index();
    if (i < args.count) args.to[i] = args.from[i] + args.value;
}

extern "C" __global__ void note(Note args) {
    u32 count = ++args.log[0];
    args.log[count] = args.from ? *args.from : args.value;
}

extern "C" __global__ void spin(Spin args) {
    u64 end = nanoseconds() + args.nanoseconds;
    while (nanoseconds() < end) {
    }
}

extern "C" __global__ void echo(Echo args) {
    if (threadIdx.x < 63) args.to[threadIdx.x] = args.words[threadIdx.x];
}

// Turns a list around, through shared memory that holds all of it.
extern "C" __global__ void turn(Turn args) {
    extern __shared__ u32 words[];
    for (u32 i = threadIdx.x; i < args.count; i += blockDim.x) words[i] = args.words[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < args.count; i += blockDim.x) args.words[i] = words[args.count - 1 - i];
}

static __device__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start, and writes much later.
extern "C" __global__ void late(Late args) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    u64 end = nanoseconds() + args.nanoseconds;
    while (nanoseconds() < end) {
    }
    *(volatile u32*)args.to = args.value;
}

// Waits, then looks.
extern "C" __global__ void look(Look args) {
    wait_for_previous();
    *args.to = *(const volatile u32*)args.from;
}

// Looks, then waits.
extern "C" __global__ void hasty(Look args) {
    u32 seen = *(const volatile u32*)args.from;
    wait_for_previous();
    *args.to = seen;
}
