// A gather of two ranks over peer memory: each rank pushes its part into the other's buffer and waits for what comes
// into its own.
//
// Every 8 bytes that cross are 4 bytes of data and the 4 bytes of an epoch, stored at once: whoever sees the epoch has
// the data, so there is no flag, no fence and no second trip. A block has a region of each buffer to itself, of two
// slots by the parity of the epoch, and counts its epochs in device memory: a replay needs nothing of the host, and a
// block that a small gather leaves out keeps its count. Both ranks cut a gather by its size alone, so block b of one
// rank meets block b of the other and both count alike.
//
// Why a slot is never overwritten before it was read. A block pushes epoch e + 1 only after all of its threads have read
// all of epoch e (a barrier between two pieces; between two launches the wait for all work ahead, with which each
// begins). So whoever received any of epoch e + 1 knows that the other block has read all of its epoch e. The slot of
// epoch e is next written for e + 2, which comes after a barrier behind the receipt of e + 1; a block has at least one
// unit of every epoch that it counts. That a load which returned is not changed by a later store is all the order that
// this needs.
//
// Why every block gets to run. A block waits for one block of the other device and for none of its own, and this
// launch has at most as many blocks as either device has multiprocessors. What is on the device ahead of it (whose blocks
// may still run when these come) and on other streams ends by itself. The launch behind may start early, but no sooner
// than all blocks of this one have started.
//
// Every wait ends: see `gave_up`. From then on the buffers of both ranks hold anything, so the error word stays, and no
// later launch does anything.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct ExchangeArgs {
    u8* own;    // this rank's part of the gather
    u8* other;  // where the other's goes
    u64* to;    // the other rank's buffer
    u64* from;  // this rank's buffer
    u32* words; // of this device: the error word, and the epochs of blocks from EPOCHS on
    u32* host;  // of the host: the stop word, and at FAILED where it is told of errors
    u64 limit;  // nanoseconds
    u64 bytes;  // of a part
    u32 share;  // units of a block, all but the last one's
    u32 whole;  // whether both parts are whole units at multiples of 8
};
#ifdef ARGS_BYTES_exchange
static_assert(sizeof(ExchangeArgs) == ARGS_BYTES_exchange, "cuda/push.rs says otherwise");
#endif

constexpr u32 THREADS = 256;
// Units (8 bytes of data, 16 that cross) of a thread on their way at once, and of a block: the capacity of a slot.
constexpr u32 HELD = 4;
constexpr u32 PIECE = THREADS * HELD;
constexpr u32 EPOCHS = 32;
constexpr u32 FAILED = 16;
constexpr u32 STOPPED = 1;
constexpr u32 LATE = 2;
constexpr u32 LAST = 0xffffffffu;

struct alignas(8) Pair {
    u32 low, high;
};

__device__ __forceinline__ void push(u64* to, Pair data, u32 epoch) {
    const u64 stamp = (u64)epoch << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0],{%1,%2};" ::"l"(to), "l"(stamp | data.low), "l"(stamp | data.high)
                 : "memory");
}

__device__ __forceinline__ void look(const u64* from, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1},[%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ __forceinline__ u32 load(const u32* from) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store(u32* to, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(to), "r"(v) : "memory");
}

// The epoch after one: never 0, which is what fresh memory holds, and of the other parity also where it starts anew.
__device__ __forceinline__ u32 after(u32 epoch) { return epoch == LAST ? 2 : epoch + 1; }

__device__ __forceinline__ Pair read(const ExchangeArgs& a, u32 unit) {
    if (a.whole) return ((const Pair*)a.own)[unit];
    u32 word[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u64 at = 8ull * unit + i;
        if (at < a.bytes) word[i / 4] |= (u32)a.own[at] << (8 * (i % 4));
    }
    return Pair{word[0], word[1]};
}

__device__ __forceinline__ void write(const ExchangeArgs& a, u32 unit, Pair data) {
    if (a.whole) {
        ((Pair*)a.other)[unit] = data;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u64 at = 8ull * unit + i;
        if (at < a.bytes) a.other[at] = (u8)((i < 4 ? data.low : data.high) >> (8 * (i % 4)));
    }
}

// Whether a wait is over without what it is for: another thread gave up, the host says stop, or the limit is reached.
// The host is told before this launch ends.
__device__ __noinline__ bool gave_up(const ExchangeArgs& a, u32& spins, u64& since) {
    ++spins;
    if (spins % 32 != 0) return false;
    if (load(a.words) != 0) return true;
    if (spins % 1024 != 0) return false;
    u64 now;
    asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(now));
    if (since == 0) since = now;
    const u32 why = load(a.host) != 0 ? STOPPED : now - since > a.limit ? LATE : 0;
    if (why == 0) return false;
    store(a.words, why);
    __threadfence_system();
    store(a.host + FAILED, why);
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS) exchange(const ExchangeArgs a) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    bool failed = load(a.words) != 0;
    u32 epoch = load(a.words + EPOCHS + blockIdx.x);
    const u32 units = (u32)((a.bytes + 7) / 8);
    const u32 begin = blockIdx.x * a.share;
    const u32 end = units - begin < a.share ? units : begin + a.share;

    for (u32 base = begin; base < end; base += PIECE) {
        epoch = after(epoch);
        const u32 first = base + threadIdx.x;
        const u64 slot = 2ull * ((2 * blockIdx.x + epoch % 2) * PIECE + threadIdx.x);
        Pair data[HELD];
#pragma unroll
        for (u32 i = 0; i < HELD; ++i)
            if (first + i * THREADS < end) data[i] = read(a, first + i * THREADS);
        if (!failed) {
#pragma unroll
            for (u32 i = 0; i < HELD; ++i)
                if (first + i * THREADS < end) push(a.to + slot + 2 * i * THREADS, data[i], epoch);
        }
        // All threads have the count; now it may change. It costs nothing here: the other's data is on its way.
        __syncthreads();
        const bool more = base + PIECE < end;
        if (!more && threadIdx.x == 0) store(a.words + EPOCHS + blockIdx.x, epoch);

        u64 low[HELD], high[HELD];
        u32 spins = 0;
        u64 since = 0;
        for (bool all = failed; !all;) {
            all = true;
#pragma unroll
            for (u32 i = 0; i < HELD; ++i)
                if (first + i * THREADS < end) look(a.from + slot + 2 * i * THREADS, low[i], high[i]);
#pragma unroll
            for (u32 i = 0; i < HELD; ++i)
                if (first + i * THREADS < end)
                    all = all && (u32)(low[i] >> 32) == epoch && (u32)(high[i] >> 32) == epoch;
            if (!all && gave_up(a, spins, since)) failed = all = true;
        }
        if (!failed) {
#pragma unroll
            for (u32 i = 0; i < HELD; ++i)
                if (first + i * THREADS < end) write(a, first + i * THREADS, Pair{(u32)low[i], (u32)high[i]});
        }

        // Before epochs start anew both slots are emptied, each while nobody writes it (what is next for it waits for
        // the next push of this block): a unit that no gather has used since must not pass for a new one.
        if (epoch >= LAST - 1) {
#pragma unroll
            for (u32 i = 0; i < HELD; ++i) push(a.from + slot + 2 * i * THREADS, Pair{0, 0}, 0);
            __threadfence_system();
        }
        if (more && __syncthreads_or(failed)) return;
    }
}
