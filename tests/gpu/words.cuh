// What the test kernels share; included to show that a source may include files of its crate.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u32 global_index() {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
