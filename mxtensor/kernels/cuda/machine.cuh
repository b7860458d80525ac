// Device functions: one function for each instruction that the kernels use, so that the other sources contain no PTX.
// tests/helpers/cuda_machine.h defines the same functions for a CPU, where the tests run the same kernels. More than
// 350 lines: it is a list, and has no other order than that of the instructions' purposes.

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

// ---------------------------------------------------------------------------------------------- products of four warps

// The asynchronous warpgroup instruction of sm_90 (wgmma): d (64 x COLS) += a (64x16) b (16 x COLS) in 16 bits. a is in
// the registers of four warps, 16 rows each, as above. b is in shared memory: rows of 64 columns of x (128 bytes),
// whose eight pieces of 16 bytes are swizzled to index piece ^ (row % 8). ``x`` is the matrix descriptor; 16 columns
// are 32 bytes.
#ifdef WGMMA_TEXT  // the text of the instruction and its sums, for COLS columns
DEVICE u64 matrix_descriptor(const u8* x) {
    u64 address = shared_address(x);
    // 128-byte swizzle; 1024 bytes from 8 rows to the next 8
    return (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }  // from one descriptor to another
// BFLOAT16S: the text has bfloat16 operands instead of float16.
template <bool BFLOAT16S> DEVICE void multiply_warpgroup(float (&d)[NT][4], const u32* a, u64 x) {
    asm volatile(WGMMA_TEXT : WGMMA_SUMS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
DEVICE void begin_wgmma(u32 (&a)[16]) {  // fence: the words of ``a`` are complete before the instruction reads them
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Sets the registers of each thread of a warpgroup, up or down, from here on.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int LATER> DEVICE void wait_for_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
template <int N> DEVICE void fence_sums(float (&d)[N][4]) {  // keeps reads of the sums behind the wait
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// The same as ``multiply_add`` in bfloat16, and arithmetic of two bfloat16 in a word, which keeps subnormal numbers.
DEVICE void multiply_add_bfloat16(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
DEVICE u32 multiply_bfloat16(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
DEVICE u32 subtract_bfloat16(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}
// mbarriers in shared memory count arrivals and bytes; their phases are numbered from 0.
DEVICE void begin_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// The address of an array of barriers in a register. The compiler would recompute the address at each use.
using BarrierAddress = u32;
DEVICE BarrierAddress barrier_address(u64* barriers) {
    BarrierAddress at;
    asm volatile("mov.u32 %0, %1;" : "=r"(at) : "r"(shared_address(barriers)));
    return at;
}
template <int WHICH> DEVICE void arrive_at(BarrierAddress barriers) {  // one arrival for the whole warp
    if (thread() % 32 == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0 + %1];" ::"r"(barriers), "n"(8 * WHICH) : "memory");
}
template <int WHICH> DEVICE void wait_at(BarrierAddress barriers, u32 phase) {
    asm volatile(
        "{ .reg .pred p;\nRETRY: mbarrier.try_wait.parity.shared::cta.b64 p, [%0 + %2], %1;\n@p bra DONE;\nbra RETRY;\n"
        "DONE: }" ::"r"(barriers), "r"(phase & 1), "n"(8 * WHICH) : "memory");
}
DEVICE void wait_at(u64* barrier, u32 phase) { wait_at<0>(shared_address(barrier), phase); }
// A bulk copy by the copy engine, by one thread; ``barrier`` counts its bytes.
DEVICE void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
DEVICE void add_four_of_block(float (&sum)[4], const float* mine, u32 rank) {  // like ``read_of_block``
    float value[4];
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address_in_block(mine, rank)) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += value[i];
}
// A bulk copy to the same address in another block of the cluster, by one thread; ``barrier`` of that block counts its
// bytes. The fence makes stores of all threads visible to the copy engine first.
DEVICE void fence_for_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void copy_to_block(void* mine, const void* from, u32 bytes, u64* barrier, u32 rank) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address_in_block(mine, rank)), "r"(shared_address(from)), "r"(bytes), "r"(address_in_block(barrier, rank))
        : "memory");
}
// Sums in global memory. Each block stores its sums before it is counted; the last block to be counted sees all.
DEVICE void store_four(float* to, const float (&value)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(value[0], value[1], value[2], value[3]);
}
DEVICE void load_four(float (&value)[4], const float* from) {
    float4 found = __ldcg(reinterpret_cast<const float4*>(from));
    value[0] = found.x, value[1] = found.y, value[2] = found.z, value[3] = found.w;
}
DEVICE bool is_final_block(u32* counter, u32 blocks) {
    bool is_final = false;
    __threadfence();
    __syncthreads();
    if (thread() == 0) is_final = atomicAdd(counter, 1) == blocks - 1;
    is_final = __syncthreads_or(is_final);
    if (is_final) __threadfence();
    return is_final;
}
DEVICE bool any_of_block(bool mine) { return __syncthreads_or(mine); }

// Loads of codes, which are read once: 16 bytes without a place in L1, or 8 bytes that share a sector with a neighbour;
// from byte AT on.
template <int BYTES, int AT> DEVICE void load_once(u32* to, const u8* from) {
    if constexpr (BYTES == 16)
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from), "n"(AT));
    else
        asm volatile("ld.global.nc.L2::256B.v2.u32 {%0, %1}, [%2 + %3];"
                     : "=r"(to[0]), "=r"(to[1]) : "l"(from), "n"(AT));
}
template <int BYTES, int AT> DEVICE u32 load_scale(const u8* from) {
    u32 out;
    if constexpr (BYTES == 4) asm volatile("ld.global.nc.u32 %0, [%1 + %2];" : "=r"(out) : "l"(from), "n"(AT));
    else if constexpr (BYTES == 2)
        asm volatile("{ .reg .u16 h; ld.global.nc.u16 h, [%1 + %2]; cvt.u32.u16 %0, h; }"
                     : "=r"(out) : "l"(from), "n"(AT));
    else
        asm volatile("{ .reg .u16 h; ld.global.nc.u8 h, [%1 + %2]; cvt.u32.u16 %0, h; }"
                     : "=r"(out) : "l"(from), "n"(AT));
    return out;
}
#endif
