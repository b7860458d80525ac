// Device functions: one function for each instruction that the kernels use, so that other sources than this one and
// machine_sm90.cuh contain no PTX. tests/helpers/cuda_machine.h defines the same functions for a CPU, where the tests
// run the same kernels.

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
// the compiler sees that it is uniform
DEVICE u32 warp_of_block() { return __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0); }
DEVICE u32 lane_of_warp() {  // volatile: stays in a register; threadIdx would be read and waited for again
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 blocks_y() { return gridDim.y; }
DEVICE u32 blocks_x() { return gridDim.x; }
DEVICE u8* shared_memory() {
    extern __shared__ __align__(1024) u8 memory[];
    return memory;
}
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_some(u32 which, u32 count) {  // ``count`` threads of a block; barrier 0 is that of __syncthreads
    asm volatile("bar.sync %0, %1;" ::"r"(which + 1), "r"(count) : "memory");
}
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 from_lane_xor(u32 value, u32 mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE u32 from_lane(u32 value, u32 lane) { return __shfl_sync(0xFFFFFFFF, value, lane); }
DEVICE u32 votes_of_warp(bool mine) { return __ballot_sync(0xFFFFFFFF, mine); }  // a bit for each lane
DEVICE u32 bits_set(u32 word) { return __popc(word); }
DEVICE u32 lowest_bit(u32 word) { return __ffs(word) - 1; }

DEVICE u32 largest_of_warp(u32 value) { return __reduce_max_sync(0xFFFFFFFF, value); }

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
DEVICE void raise_to(u32* shared, u32 value) {  // atomicMax would first combine values across the warp
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared_address(shared)), "r"(value) : "memory");
}

// A cluster of blocks (sm_90) is along z: its barrier, and access to the shared memory of its other blocks.
DEVICE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The cluster barrier in two steps; every thread must take both. The arrival is relaxed: it does not wait for
// outstanding stores and copies, which would take as long as a memory access.
DEVICE void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
DEVICE u32 address_in_block(const void* mine, u32 rank) {
    u32 there = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
#endif
    return there;
}
DEVICE float read_of_block(const float* mine, u32 rank) {
    float value = *mine;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in_block(mine, rank)) : "memory");
#endif
    return value;
}

// Programmatic dependent launch (sm_90): let_next_start allows the next kernel to start; after wait_for_previous, what
// the previous kernel wrote is visible.
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

// Copies BYTES from global to shared memory, or zeros if ``there`` is false. Asynchronous for 4 bytes and more.
template <int BYTES> DEVICE void copy(void* to, const void* from, bool there) {
    if constexpr (BYTES >= 4) {
        u32 address = shared_address(to), size = there ? BYTES : 0;
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size));
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES),
                         "r"(size));
    } else if constexpr (BYTES == 2) {
        *static_cast<u16*>(to) = there ? *static_cast<const u16*>(from) : 0;
    } else {
        *static_cast<u8*>(to) = there ? *static_cast<const u8*>(from) : 0;
    }
}
DEVICE void end_of_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> DEVICE void wait_for_stage() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

// For activations and everything else that a previous kernel wrote: bypasses L1, which may hold old values.
template <class T> DEVICE T load_fresh(const T* from) { return __ldcg(from); }

// ---------------------------------------------------------------------------------------------- words

DEVICE u32 bytes_of(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
// The same, but a selector of 8 and more gives eight copies of the sign bit of its byte; __byte_perm ignores that bit.
DEVICE u32 signs_of_bytes(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) {  // bits of ``a`` where the mask is 1, else of ``b``; one instruction
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
}
// the same value (blockDim.y is 1), hidden from the compiler's optimizer
DEVICE u32 opaque(u32 value) { return value * blockDim.y; }
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }

// The float16 in the low half of ``word``.
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
DEVICE u32 larger_halves(u32 a, u32 b) { return __vmaxu2(a, b); }  // as unsigned 16-bit numbers
DEVICE u32 smaller_halves(u32 a, u32 b) { return __vminu2(a, b); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE u32 larger(u32 a, u32 b) { return b > a ? b : a; }
DEVICE float smaller(float a, float b) { return fminf(a, b); }
DEVICE u32 smaller(u32 a, u32 b) { return b < a ? b : a; }
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }  // never part of a fused operation
DEVICE float magnitude(float value) { return fabsf(value); }
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }  // a * b + c, rounded once
// Two bfloat16: a * b + c, rounded once; and the smaller of a and b.
DEVICE u32 fused_bfloat16s(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
DEVICE u32 smaller_bfloat16s(u32 a, u32 b) {
    u32 out;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// Four e4m3 bytes as two words of two float16.
DEVICE void halves_of_e4m3(u32& low, u32& high, u32 bytes) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(bytes));
#else  // as float16 bits, 2^-8 times the value; 0x7F is NaN
    u32 nans = ((bytes & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
    u32 even = __byte_perm(bytes, 0, 0x1404), odd = __byte_perm(bytes, 0, 0x3424);
    even = (even & 0x80008000) | ((even >> 1) & 0x3F803F80), odd = (odd & 0x80008000) | ((odd >> 1) & 0x3F803F80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(even), "r"(0x5C005C00));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(odd), "r"(0x5C005C00));
    low |= signs_of_bytes(nans, 0, 0x9988), high |= signs_of_bytes(nans, 0, 0xBBAA);
#endif
}
DEVICE void floats_of_halves(float& low, float& high, u32 word) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high) : "r"(word));
}
// Two values rounded to the nearest finite e4m3 or e5m2, as two float16, by the conversion instructions of sm_89.
#if __CUDA_ARCH__ >= 890
constexpr bool CONVERTS = true;
DEVICE u32 nearest_e4m3(float low, float high) {
    u32 word;
    asm("{ .reg .b16 b; cvt.rn.satfinite.e4m3x2.f32 b, %2, %1; cvt.rn.f16x2.e4m3x2 %0, b; }"
        : "=r"(word) : "f"(low), "f"(high));
    return word;
}
DEVICE u32 nearest_e5m2(float low, float high) {
    u32 word;
    asm("{ .reg .b16 b; cvt.rn.satfinite.e5m2x2.f32 b, %2, %1; cvt.rn.f16x2.e5m2x2 %0, b; }"
        : "=r"(word) : "f"(low), "f"(high));
    return word;
}
// The codes of four values in the bytes of a word; NaN is 0x7F.
DEVICE u32 codes_of_e4m3(float a, float b, float c, float d) {
    u32 word;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; "
        "mov.b32 %0, {l, h}; }" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
DEVICE u32 codes_of_e5m2(float a, float b, float c, float d) {
    u32 word;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, %2, %1; cvt.rn.satfinite.e5m2x2.f32 h, %4, %3; "
        "mov.b32 %0, {l, h}; }" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
#else
constexpr bool CONVERTS = false;
DEVICE u32 nearest_e4m3(float, float) { return 0; }
DEVICE u32 nearest_e5m2(float, float) { return 0; }
DEVICE u32 codes_of_e4m3(float, float, float, float) { return 0; }
DEVICE u32 codes_of_e5m2(float, float, float, float) { return 0; }
#endif
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

// d (16x8) = c + a (16x16) b (16x8), or without c. The float16 fragments are those of PTX mma.m16n8k16.
DEVICE void multiply_add(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
DEVICE void multiply(float (&d)[4], const u32* a, u32 b0, u32 b1) { multiply_add(d, a, b0, b1, {0, 0, 0, 0}); }
