// The instructions of sm_90 that only the wgmma kernel uses; otherwise like machine.cuh.

// ---------------------------------------------------------------------------------------------- products of four warps

// The asynchronous warpgroup instruction of sm_90 (wgmma): d (64 x COLS) += a (64x16) b (16 x COLS) in 16 bits. a is in
// the registers of four warps, 16 rows each, as above. b is in shared memory: rows of 64 columns of x (128 bytes),
// whose eight pieces of 16 bytes are swizzled to index piece ^ (row % 8). ``x`` is the matrix descriptor; 16 columns
// are 32 bytes.
// WGMMA_TEXT is the text of the instruction and WGMMA_SUMS its sums, for COLS columns.
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

// ---------------------------------------------------------------------------------------------- the copy engine

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
// A map of a tensor, made by the driver (runtime/cuda_driver.py); a kernel parameter.
struct alignas(64) TensorMap {
    u64 words[16];
};
#define GRID_CONSTANT __grid_constant__
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// The copy engine copies the box of a map at these elements, by one thread.
DEVICE void copy_box(void* to, const TensorMap& map, int x0, int x1, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)), "l"(&map), "r"(x0), "r"(x1), "r"(shared_address(barrier)) : "memory");
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

// ---------------------------------------------------------------------------------------------- sums and codes in global memory

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
