// The functions of mxtensor/kernels/cuda/machine.cuh and machine_sm90.cuh for a CPU: each thread of a block is a fiber.
// A fiber that waits for others (barrier, matrix instruction, shuffle) lets them run. Blocks of a cluster run
// concurrently. Copies are done at once, so missing waits for copies are not noticed here.

#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };

#define DEVICE static inline
#define KERNEL static
#define BOUNDS(threads, blocks)

// ---------------------------------------------------------------------------------------------- fibers

struct Barrier {
    u32 size = 0, waiting = 0, generation = 0;
};
struct Warp {
    Barrier barrier;
    u32 words[32][6];
};
struct Block {
    u32 x, y, z, size, across, down;
    Barrier barrier, of_some[8];
    std::vector<Warp> warps;
    std::vector<u8> memory;
    bool any = false;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<u8[]> stack;
    Block* block;
    u32 thread, arrived = 0;  // generation of the cluster's barrier at its arrival
    bool done = false;
};

static ucontext_t scheduler;
static Fiber* fiber;  // the running fiber
static std::vector<Block>* cluster;
static Barrier cluster_barrier;
static u64 progress;
static std::function<void()> body;

static void leave(Barrier& barrier) {
    if (barrier.waiting == --barrier.size && barrier.size) barrier.waiting = 0, barrier.generation++;
}
static void run_body() {
    body();
    fiber->done = true, progress++;
    leave(fiber->block->barrier), leave(cluster_barrier);
    swapcontext(&fiber->context, &scheduler);
}

static void arrive_and_wait(Barrier& barrier) {
    u32 generation = barrier.generation;
    progress++;
    if (++barrier.waiting == barrier.size) {
        barrier.waiting = 0, barrier.generation++;
        return;
    }
    while (barrier.generation == generation) swapcontext(&fiber->context, &scheduler);
}

// ``kernel`` in a grid of blocks, those along z as one cluster if they are ``clustered``, or one after the other from the
// last on; shared memory begins as ``fill``, NaNs unless a test wants others.
static u32 fill = 0xFFFFFFFF;
static void launch(std::function<void()> kernel, u32 x, u32 y, u32 depth, bool clustered, u32 threads, u32 bytes) {
    body = kernel;
    u32 z = clustered ? depth : 1;
    for (u32 i = 0; i < x * y * depth / z; i++) {
        std::vector<Block> blocks(z);
        std::vector<Fiber> fibers(z * threads);
        cluster = &blocks, cluster_barrier = {z * threads};
        for (u32 b = 0; b < z; b++) {
            std::vector<u8> memory(bytes + 1024);
            for (u32 i = 0; i < memory.size(); i++) memory[i] = fill >> i % 4 * 8;
            u32 at_z = clustered ? b : depth - 1 - i / (x * y), at = i % (x * y);
            blocks[b] = {at % x, at / x, at_z, threads, x, y, {threads}, {}, std::vector<Warp>(threads / 32), memory};
            for (Warp& warp : blocks[b].warps) warp.barrier = {32};
        }
        for (u32 f = 0; f < fibers.size(); f++) {
            constexpr size_t size = 1 << 16;
            fibers[f].stack.reset(new u8[size]);
            fibers[f].block = &blocks[f / threads], fibers[f].thread = f % threads;
            getcontext(&fibers[f].context);
            fibers[f].context.uc_stack.ss_sp = fibers[f].stack.get(), fibers[f].context.uc_stack.ss_size = size;
            makecontext(&fibers[f].context, run_body, 0);
        }
        for (bool left = true; left;) {
            left = false;
            u64 before = progress;
            for (Fiber& next : fibers)
                if (!next.done) left = true, fiber = &next, swapcontext(&scheduler, &next.context);
            if (left && progress == before) fprintf(stderr, "threads wait for each other for ever\n"), abort();
        }
    }
}

// ---------------------------------------------------------------------------------------------- where a thread is

DEVICE u32 thread() { return fiber->thread; }
DEVICE u32 threads() { return fiber->block->size; }
DEVICE u32 warp_of_block() { return fiber->thread / 32; }
DEVICE u32 lane_of_warp() { return fiber->thread % 32; }
DEVICE u32 block_x() { return fiber->block->x; }
DEVICE u32 block_y() { return fiber->block->y; }
DEVICE u32 block_z() { return fiber->block->z; }
DEVICE u32 blocks_x() { return fiber->block->across; }
DEVICE u32 blocks_y() { return fiber->block->down; }
DEVICE u8* memory_of(Block& block) {
    return reinterpret_cast<u8*>((reinterpret_cast<u64>(block.memory.data()) + 1023) / 1024 * 1024);
}
DEVICE u8* shared_memory() { return memory_of(*fiber->block); }
DEVICE void raise_to(u32* shared, u32 value) { *shared = value > *shared ? value : *shared; }
DEVICE void sync_block() { arrive_and_wait(fiber->block->barrier); }
DEVICE void sync_some(u32 which, u32 count) {
    fiber->block->of_some[which].size = count;
    arrive_and_wait(fiber->block->of_some[which]);
}
DEVICE void sync_cluster() { arrive_and_wait(cluster_barrier); }
DEVICE void arrive_in_cluster() {
    fiber->arrived = cluster_barrier.generation, progress++;
    if (++cluster_barrier.waiting == cluster_barrier.size) cluster_barrier.waiting = 0, cluster_barrier.generation++;
}
DEVICE void wait_for_cluster() {
    while (cluster_barrier.generation == fiber->arrived) swapcontext(&fiber->context, &scheduler);
    progress++;
}
DEVICE float read_of_block(const float* mine, u32 rank) {
    return *reinterpret_cast<const float*>(memory_of((*cluster)[rank]) + (reinterpret_cast<const u8*>(mine) - shared_memory()));
}
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}
DEVICE Warp& warp() { return fiber->block->warps[fiber->thread / 32]; }
DEVICE void sync_warp() { arrive_and_wait(warp().barrier); }
DEVICE u32 from_lane_xor(u32 value, u32 mask) {
    u32 lane = thread() % 32;
    warp().words[lane][0] = value;
    arrive_and_wait(warp().barrier);
    u32 other = warp().words[lane ^ mask][0];
    arrive_and_wait(warp().barrier);
    return other;
}
DEVICE u32 from_lane(u32 value, u32 lane) { return from_lane_xor(value, lane ^ thread() % 32); }
DEVICE u32 votes_of_warp(bool mine) {
    u32 votes = u32(mine) << thread() % 32;
    for (u32 mask = 1; mask < 32; mask *= 2) votes |= from_lane_xor(votes, mask);
    return votes;
}
DEVICE u32 bits_set(u32 word) { return __builtin_popcount(word); }
DEVICE u32 lowest_bit(u32 word) { return __builtin_ctz(word); }

DEVICE u32 largest_of_warp(u32 value) {
    for (u32 mask = 1; mask < 32; mask *= 2) {
        u32 other = from_lane_xor(value, mask);
        value = other > value ? other : value;
    }
    return value;
}

// ---------------------------------------------------------------------------------------------- memory

template <int BYTES> DEVICE void copy(void* to, const void* from, bool there) {
    if (there && (reinterpret_cast<u64>(from) % BYTES || reinterpret_cast<u64>(to) % BYTES))
        fprintf(stderr, "a copy of %d bytes is not aligned\n", BYTES), abort();
    if (there) memcpy(to, from, BYTES);
    else memset(to, 0, BYTES);
}
DEVICE void end_of_stage() {}
template <int LATER> DEVICE void wait_for_stage() {}

template <class T> DEVICE T load_fresh(const T* from) { return *from; }

// ---------------------------------------------------------------------------------------------- words

DEVICE u32 signs_of_bytes(u32 low, u32 high, u32 selector) {
    u64 both = u64(high) << 32 | low;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = selector >> (4 * i) & 15, byte = both >> (8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
DEVICE u32 bytes_of(u32 low, u32 high, u32 selector) {  // __byte_perm reads three bits of each selector
    return signs_of_bytes(low, high, selector & 0x7777);
}
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
DEVICE u32 opaque(u32 value) { return value; }
DEVICE float float_of_bits(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE u32 bits_of_float(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
DEVICE float float_of_half(u32 word) {
    _Float16 half;
    u16 bits = word;
    memcpy(&half, &bits, 2);
    return half;
}
DEVICE u16 half_of(float value) {
    _Float16 half = value;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}
DEVICE u16 bfloat16_of(float value) {
    u32 bits = bits_of_float(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pair_of_halves(float low, float high) { return half_of(low) | u32(half_of(high)) << 16; }
DEVICE u32 larger_halves(u32 a, u32 b) {
    u32 high = a >> 16 > b >> 16 ? a >> 16 : b >> 16, low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return high << 16 | low;
}
DEVICE u32 smaller_halves(u32 a, u32 b) { return ~larger_halves(~a, ~b); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE u32 larger(u32 a, u32 b) { return b > a ? b : a; }
DEVICE float smaller(float a, float b) { return fminf(a, b); }
DEVICE u32 smaller(u32 a, u32 b) { return b < a ? b : a; }
DEVICE float rounded_product(float a, float b) { return a * b; }
DEVICE float magnitude(float value) { return fabsf(value); }
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float value_of_e4m3(u32 code) {
    u32 e = code >> 3 & 15, m = code & 7;
    float value = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, int(e) - 10) : ldexpf(m, -9);
    return code & 128 ? -value : value;
}
DEVICE void halves_of_e4m3(u32& low, u32& high, u32 bytes) {
    low = pair_of_halves(value_of_e4m3(bytes & 255), value_of_e4m3(bytes >> 8 & 255));
    high = pair_of_halves(value_of_e4m3(bytes >> 16 & 255), value_of_e4m3(bytes >> 24));
}
constexpr bool CONVERTS = true;
DEVICE float nearest_float(float value, int mantissa, int emin, float most) {
    if (value == 0 || value != value) return value;
    int step = (ilogbf(value) > emin ? ilogbf(value) : emin) - mantissa;
    return fmaxf(fminf(ldexpf(nearbyintf(ldexpf(value, -step)), step), most), -most);
}
DEVICE u32 nearest_e4m3(float low, float high) {
    return pair_of_halves(nearest_float(low, 3, -6, 448), nearest_float(high, 3, -6, 448));
}
DEVICE u32 nearest_e5m2(float low, float high) {
    return pair_of_halves(nearest_float(low, 2, -14, 57344), nearest_float(high, 2, -14, 57344));
}
DEVICE float half(u32 word, int i) { return float_of_half(word >> (16 * i) & 0xFFFF); }
DEVICE float bfloat16(u32 word, int i) { return float_of_bits(i ? word & 0xFFFF0000 : word << 16); }
DEVICE void floats_of_halves(float& low, float& high, u32 word) { low = half(word, 0), high = half(word, 1); }
DEVICE u32 code_of(float value, int mantissa, int emin, float most) {  // of an 8-bit element
    if (value != value) return 0x7F;
    float magnitude = fabsf(nearest_float(value, mantissa, emin, most));
    return bits_of_float(ldexpf(magnitude, -126 - emin)) >> (23 - mantissa) | bits_of_float(value) >> 31 << 7;
}
DEVICE u32 codes_of_e4m3(float a, float b, float c, float d) {
    return code_of(a, 3, -6, 448) | code_of(b, 3, -6, 448) << 8 | code_of(c, 3, -6, 448) << 16 | code_of(d, 3, -6, 448) << 24;
}
DEVICE u32 codes_of_e5m2(float a, float b, float c, float d) {
    return code_of(a, 2, -14, 57344) | code_of(b, 2, -14, 57344) << 8 | code_of(c, 2, -14, 57344) << 16 |
           code_of(d, 2, -14, 57344) << 24;
}
DEVICE u32 fused_bfloat16s(u32 a, u32 b, u32 c) {  // the double is exact where its rounding to bfloat16 is close
    u32 out = 0;
    for (int i = 0; i < 2; i++)
        out |= u32(bfloat16_of(double(bfloat16(a, i)) * bfloat16(b, i) + bfloat16(c, i))) << 16 * i;
    return out;
}
DEVICE u32 smaller_bfloat16s(u32 a, u32 b) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) out |= u32(bfloat16_of(fminf(bfloat16(a, i), bfloat16(b, i)))) << 16 * i;
    return out;
}
DEVICE u32 multiply_half(u32 a, u32 b) {
    return half_of(half(a, 0) * half(b, 0)) | u32(half_of(half(a, 1) * half(b, 1))) << 16;
}
DEVICE u32 add_half(u32 a, u32 b) {
    return half_of(half(a, 0) + half(b, 0)) | u32(half_of(half(a, 1) + half(b, 1))) << 16;
}

// ---------------------------------------------------------------------------------------------- the product

template <bool BFLOAT16S = false>
DEVICE void multiply_add(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4]) {
    u32 lane = thread() % 32, g = lane / 4, t = lane % 4, mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    Warp& w = warp();
    memcpy(w.words[lane], mine, sizeof mine);
    arrive_and_wait(w.barrier);
    for (int e = 0; e < 4; e++) {
        u32 row = g + e / 2 * 8, col = 2 * t + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {  // word and half of a (row, k) and b (k, col)
            u32 a_word = w.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            u32 b_word = w.words[col * 4 + k % 8 / 2][4 + k / 8];
            sum += BFLOAT16S ? double(bfloat16(a_word, k % 2)) * bfloat16(b_word, k % 2)
                             : double(half(a_word, k % 2)) * half(b_word, k % 2);
        }
        d[e] = sum;
    }
    arrive_and_wait(w.barrier);
}
DEVICE void multiply_add_bfloat16(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4]) {
    multiply_add<true>(d, a, b0, b1, c);
}
DEVICE void multiply(float (&d)[4], const u32* a, u32 b0, u32 b1) { multiply_add(d, a, b0, b1, {0, 0, 0, 0}); }

// ---------------------------------------------------------------------------------------------- products of four warps

DEVICE u64 matrix_descriptor(const u8* x) { return reinterpret_cast<u64>(x); }
DEVICE constexpr u64 descriptor_step(u32 bytes) { return bytes; }
template <bool BFLOAT16S, int N> DEVICE void multiply_warpgroup(float (&d)[N][4], const u32* a, u64 x) {
    u32 lane = thread() % 32, g = lane / 4, t = lane % 4;
    Warp& w = warp();
    memcpy(w.words[lane], a, 16);
    arrive_and_wait(w.barrier);
    const u8* tile = reinterpret_cast<const u8*>(x / 1024 * 1024);
    for (int j = 0; j < N; j++)
        for (int e = 0; e < 4; e++) {
            u32 row = g + e / 2 * 8, col = 8 * j + 2 * t + e % 2;
            double sum = d[j][e];
            for (u32 k = 0; k < 16; k++) {
                u32 at = x % 1024 + 2 * k;
                const u8* piece = tile + col * 128 + ((at / 16) ^ (col % 8)) * 16 + at % 16;
                u32 a_word = w.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
                u32 x_word = *reinterpret_cast<const u16*>(piece);
                sum += BFLOAT16S ? double(bfloat16(a_word, k % 2)) * bfloat16(x_word, 0)
                                 : double(half(a_word, k % 2)) * half(x_word, 0);
            }
            d[j][e] = sum;
        }
    arrive_and_wait(w.barrier);
}
DEVICE void begin_wgmma(u32 (&)[16]) {}
DEVICE void commit_wgmma() {}
template <int COUNT> DEVICE void take_registers() {}
template <int COUNT> DEVICE void give_registers() {}
template <int LATER> DEVICE void wait_for_wgmma() {}
template <int N> DEVICE void fence_sums(float (&)[N][4]) {}

DEVICE u32 multiply_bfloat16(u32 a, u32 b) {
    return bfloat16_of(bfloat16(a, 0) * bfloat16(b, 0)) | u32(bfloat16_of(bfloat16(a, 1) * bfloat16(b, 1))) << 16;
}
DEVICE u32 subtract_bfloat16(u32 a, u32 b) {
    return bfloat16_of(bfloat16(a, 0) - bfloat16(b, 0)) | u32(bfloat16_of(bfloat16(a, 1) - bfloat16(b, 1))) << 16;
}
// An mbarrier: completed phases; arrivals per phase, missing arrivals, and missing bytes.
struct Counted {
    u16 phases;
    u8 count, missing;
    int bytes;
};
DEVICE Counted& counted(u64* barrier) { return *reinterpret_cast<Counted*>(barrier); }
DEVICE void begin_barrier(u64* barrier, u32 count) { counted(barrier) = {0, u8(count), u8(count), 0}; }
DEVICE void publish_barriers() {}
DEVICE void arrived(u64* barrier, int arrivals, int bytes) {
    Counted& b = counted(barrier);
    progress++;
    b.missing -= arrivals, b.bytes += bytes;
    if (b.missing == 0 && b.bytes == 0) b.phases++, b.missing = b.count;
}
using BarrierAddress = u64*;
DEVICE BarrierAddress barrier_address(u64* barriers) { return barriers; }
template <int WHICH> DEVICE void arrive_at(BarrierAddress barriers) {
    if (thread() % 32 == 0) arrived(barriers + WHICH, 1, 0);
}
DEVICE void wait_at(u64* barrier, u32 phase) {
    if (counted(barrier).phases > phase + 1) fprintf(stderr, "a barrier is two phases ahead\n"), abort();
    while (counted(barrier).phases <= phase) swapcontext(&fiber->context, &scheduler);
}
template <int WHICH> DEVICE void wait_at(BarrierAddress barriers, u32 phase) { wait_at(barriers + WHICH, phase); }
DEVICE void expect_bytes(u64* barrier, u32 bytes) { arrived(barrier, 1, bytes); }
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes) % 16)
        fprintf(stderr, "a whole copy is not aligned\n"), abort();
    memcpy(to, from, bytes);
    arrived(barrier, 0, -int(bytes));
}
// A tensor map as cuda_on_cpu.py packs it. Copies a box, swizzled; what the tensor does not have is zero.
struct alignas(64) TensorMap {
    u64 address, sizes[2], stride, box[2], unused[10];
};
#define GRID_CONSTANT
DEVICE void prefetch_map(const TensorMap&) {}
DEVICE void copy_box(void* to, const TensorMap& map, int column, int row, u64* barrier) {
    if (reinterpret_cast<u64>(to) % 1024 || map.address % 16 || map.stride % 16 || map.box[0] != 64)
        fprintf(stderr, "a box is not aligned\n"), abort();
    for (u64 r = 0; r < map.box[1]; r++)
        for (u64 c = 0; c < 64; c++) {
            const u8* from = reinterpret_cast<const u8*>(map.address) + (row + r) * map.stride + 2 * (column + c);
            bool inside = column + c < map.sizes[0] && row + r < map.sizes[1];
            u64 place = r * 128 + (2 * c ^ r % 8 << 4);
            *reinterpret_cast<u16*>(static_cast<u8*>(to) + place) = inside ? *reinterpret_cast<const u16*>(from) : 0;
        }
    arrived(barrier, 0, -int(128 * map.box[1]));
}
DEVICE void fence_for_copy_engine() {}
DEVICE void copy_to_block(void* mine, const void* from, u32 bytes, u64* barrier, u32 rank) {
    auto there = [&](void* at) { return memory_of((*cluster)[rank]) + (reinterpret_cast<u8*>(at) - shared_memory()); };
    if ((reinterpret_cast<u64>(mine) | reinterpret_cast<u64>(from) | bytes) % 16)
        fprintf(stderr, "what is sent is not aligned\n"), abort();
    memcpy(there(mine), from, bytes);
    arrived(reinterpret_cast<u64*>(there(barrier)), 0, -int(bytes));
}
DEVICE void add_four_of_block(float (&sum)[4], const float* mine, u32 rank) {
    for (int i = 0; i < 4; i++) sum[i] += read_of_block(mine + i, rank);
}
DEVICE bool any_of_block(bool mine) {
    Block& block = *fiber->block;
    sync_block();
    block.any |= mine;
    sync_block();
    bool any = block.any;
    sync_block();
    block.any = false;
    sync_block();
    return any;
}
DEVICE void store_four(float* to, const float (&value)[4]) { memcpy(to, value, 16); }
DEVICE void load_four(float (&value)[4], const float* from) { memcpy(value, from, 16); }
DEVICE bool is_final_block(u32* counter, u32 blocks) {
    sync_block();
    return any_of_block(thread() == 0 && (*counter)++ == blocks - 1);
}
template <int BYTES, int AT> DEVICE void load_once(u32* to, const u8* from) {
    from += AT;
    if (reinterpret_cast<u64>(from) % BYTES) fprintf(stderr, "a load of %d bytes is not aligned\n", BYTES), abort();
    memcpy(to, from, BYTES);
}
template <int BYTES, int AT> DEVICE u32 load_scale(const u8* from) {
    from += AT;
    u32 out = 0;
    if (reinterpret_cast<u64>(from) % BYTES) fprintf(stderr, "a scale of %d bytes is not aligned\n", BYTES), abort();
    memcpy(&out, from, BYTES);
    return out;
}
