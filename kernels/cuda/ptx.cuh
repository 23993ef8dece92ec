// The instructions that C++ has no word for.
#pragma once
#include "common.cuh"

// c += a . b for a of 16 x 16 and b of 16 x 8 bf16, c in f32. Lane (g = lane / 4, t = lane % 4) holds
// a: rows g (a0, a2) and g + 8 (a1, a3); b: column g; c: rows g (c0, c1) and g + 8 (c2, c3), columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(c, a[0], a[1], a[2], a[3], b0, b1); }

// The same of 16 x 8 and 8 x 8: rows g and g + 8 of a in a[0] and a[1].
__device__ __forceinline__ void mma_half(float (&c)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// 8 x 8 matrices of bf16 from shared memory: lane 8i + j says where row j of matrix i is. Lane (g, t) gets columns 2t,
// 2t + 1 of row g of each; turned, rows 2t, 2t + 1 of column g.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&to)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&to)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}

// Transposes an 8 x 8 matrix of bf16, of which lane (g, t) holds columns 2t, 2t + 1 of row g.
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(out) : "r"(v));
    return out;
}

// 16 bytes of a weight: read once by this block, so they need no room in L1.
__device__ __forceinline__ Quad load_weight(const void* from) {
    Quad v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "l"(from));
    return v;
}

// The number by which instructions on shared memory know a place in it: half the registers of a pointer.
__device__ __forceinline__ u32 shared_address(const void* place) { return (u32)__cvta_generic_to_shared(place); }

// Starts a copy of 16 bytes to shared memory, or of zeros if not `live`. `from` must be aligned either way.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool live) {
    const u32 bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool live) {
    copy_async(shared_address(to), from, live);
}

// 16 bytes of shared memory.
__device__ __forceinline__ Quad load_shared(u32 from) {
    Quad v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(from)
                 : "memory");
    return v;
}

// A number to shared memory.
__device__ __forceinline__ void store_shared(u32 to, float v) {
    asm volatile("st.shared.f32 [%0],%1;" ::"r"(to), "f"(v) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `N` groups of this thread are on their way.
template <int N> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The same number, which the compiler does not recognise: it computes what depends on it again instead of
// keeping it in registers.
__device__ __forceinline__ u32 afresh(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Lets the next launch of the stream start: its blocks may come as soon as all of this one's have called this.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all work ahead of this launch is done and can be seen. Whatever depends on it comes behind.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both: how a kernel begins. A block does so before anything else but the reading of weights (experts_down also
// reads lists that are complete by then), and before it returns: a launch that ends while the one ahead of it still runs would let the next one start too early.
__device__ __forceinline__ void follow() {
    let_next_start();
    wait_for_previous();
}
