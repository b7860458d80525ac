// The machine: what the kernels use of it, one function an instruction, so that the code above reads without PTX.
// tests/cuda_machine.h has the same functions for a CPU, where the same kernels run in the tests.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

// ---------------------------------------------------------------------------------------------- where a thread is

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u8* shared_memory() {
    extern __shared__ __align__(16) u8 memory[];
    return memory;
}
DEVICE void raise_to(u32* shared, u32 value) { atomicMax(shared, value); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE u32 from_lane_xor(u32 value, u32 mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }

// A cluster of blocks (sm_90) lies along z: rank, barrier, and what another block has in shared memory.
DEVICE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
DEVICE float read_of_block(const float* mine, u32 rank) {
    float value = *mine;
#if __CUDA_ARCH__ >= 900
    u32 address = static_cast<u32>(__cvta_generic_to_shared(mine)), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#endif
    return value;
}

// Launches that overlap (sm_90): the next kernel may start now; what the one before wrote is there after the wait.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------- memory

// Copies of BYTES from global to shared memory, zeros where ``there`` is false; asynchronous from 4 bytes on.
template <int BYTES> DEVICE void copy(void* to, const void* from, bool there) {
    if constexpr (BYTES >= 4) {
        u32 address = static_cast<u32>(__cvta_generic_to_shared(to)), size = there ? BYTES : 0;
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size));
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(size));
    } else if constexpr (BYTES == 2) {
        *static_cast<u16*>(to) = there ? *static_cast<const u16*>(from) : 0;
    } else {
        *static_cast<u8*>(to) = there ? *static_cast<const u8*>(from) : 0;
    }
}
DEVICE void end_of_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> DEVICE void wait_for_stage() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

// ---------------------------------------------------------------------------------------------- words

DEVICE u32 bytes_of(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }

// One float16, in the low half of ``word``.
DEVICE float float_of_half(u32 word) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(word));
    return value;
}
DEVICE u16 half_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE u16 bfloat16_of(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE u32 pair_of_halves(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
// Four e4m3 as two times two float16.
DEVICE void halves_of_e4m3(u32& low, u32& high, u32 bytes) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(bytes));
#else  // 2^-8 times the value as a float16, times 2^8; 0x7F is the NaN
    u32 nans = ((bytes & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
    u32 even = __byte_perm(bytes, 0, 0x1404), odd = __byte_perm(bytes, 0, 0x3424);
    even = (even & 0x80008000) | ((even >> 1) & 0x3F803F80), odd = (odd & 0x80008000) | ((odd >> 1) & 0x3F803F80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(even), "r"(0x5C005C00));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(odd), "r"(0x5C005C00));
    low |= __byte_perm(nans, 0, 0x9988), high |= __byte_perm(nans, 0, 0xBBAA);
#endif
}
DEVICE u32 multiply_half(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
DEVICE u32 add_half(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// ---------------------------------------------------------------------------------------------- the product

// d (16x8) = c + a (16x16) b (16x8), or without c; the fragments of float16 as PTX has them for mma.m16n8k16.
DEVICE void multiply_add(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
DEVICE void multiply(float (&d)[4], const u32* a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {0f00000000,0f00000000,0f00000000,0f00000000};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
