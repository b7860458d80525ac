// The functions of kernels/cpu/tiles_amx.h in plain C++, with the arithmetic of Intel's manual (Architecture Instruction
// Set Extensions, TDPBF16PS): sums of the even and of the odd products of a tile apart, fused, and then their sum is added
// to what there was; subnormal values count as zero, as operands and as results. Compiled with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

int64_t multiplied = 0;  // steps of all calls, for tests that ask whether tiles were used

struct Tile { float sums[16][16]; };
thread_local Tile tile_sums[4];
thread_local bool tiles_ready = false;

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float of_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return flushed(x);
}

inline void tiles_begin() {
  tiles_ready = true;
  for (Tile& tile : tile_sums)
    for (auto& row : tile.sums)
      for (float& sum : row) sum = std::nanf("");
}
inline void tiles_end() { tiles_ready = false; }

template <int NT, int MT, typename F> void each_tile(F work) {
  if (!tiles_ready) __builtin_trap();
  for (int i = 0; i < NT; i++)
    for (int j = 0; j < MT; j++) work(tile_sums[2 * i + j], i, j);
}

template <int NT, int MT> void tiles_zero() {
  each_tile<NT, MT>([](Tile& tile, int, int) { std::memset(&tile, 0, sizeof tile); });
}
template <int NT, int MT> void tiles_load(const float* c, int64_t pitch) {
  each_tile<NT, MT>([&](Tile& tile, int i, int j) {
    for (int n = 0; n < 16; n++) std::memcpy(tile.sums[n], c + (16 * i + n) * pitch + 16 * j, 64);
  });
}
template <int NT, int MT> void tiles_store(float* c, int64_t pitch) {
  each_tile<NT, MT>([&](Tile& tile, int i, int j) {
    for (int n = 0; n < 16; n++) std::memcpy(c + (16 * i + n) * pitch + 16 * j, tile.sums[n], 64);
  });
}

template <int NT, int MT> void tiles_multiply(const void* w, int64_t w_pitch, const void* x, int64_t x_block, int64_t steps) {
  __atomic_fetch_add(&multiplied, steps, __ATOMIC_RELAXED);
  for (int64_t t = 0; t < steps; t++)
    each_tile<NT, MT>([&](Tile& tile, int i, int j) {
      for (int n = 0; n < 16; n++) {
        uint16_t of_w[32], of_x[16][2];
        std::memcpy(of_w, static_cast<const char*>(w) + (16 * i + n) * w_pitch + t * 64, 64);
        float sums[16][2] = {};
        for (int lane = 0; lane < 16; lane++) {
          std::memcpy(of_x, static_cast<const char*>(x) + j * x_block + t * 1024 + lane * 64, 64);
          for (int m = 0; m < 16; m++)
            for (int half = 0; half < 2; half++)
              sums[m][half] = flushed(std::fma(of_bfloat16(of_w[2 * lane + half]), of_bfloat16(of_x[m][half]), sums[m][half]));
        }
        for (int m = 0; m < 16; m++)
          tile.sums[n][m] = flushed(flushed(tile.sums[n][m]) + flushed(sums[m][0] + sums[m][1]));
      }
    });
}

}  // namespace

extern "C" int64_t mx_emulated_steps() { return multiplied; }
