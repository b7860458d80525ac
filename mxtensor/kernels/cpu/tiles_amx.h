// The tile registers of AMX, as few functions as linear_amx.h needs. tests/helpers/emulated_tiles.h has the same ones
// for processors without AMX. A register is 16 rows of 64 bytes. 0 to 3 are sums: 2 * i + j belongs to the rows of w in
// register 4 + i and to the rows of x in register 6 + j.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// The compiler does not know that a tile is loaded from memory that was just written.
inline void tiles_fence() { __asm__ volatile("" ::: "memory"); }

// The shape of the registers, as the instruction reads it. A constant: compilers take it for shorter than it is, and may
// leave out what is written to a variable after the first bytes.
struct alignas(64) TileShapes { uint8_t palette, start_row, none[14]; uint16_t row_bytes[16]; uint8_t rows[16]; };
constexpr TileShapes TILE_SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static_assert(sizeof(TileShapes) == 64, "what ldtilecfg reads");

// The registers of this thread, from here to tiles_end; other code may use them in another shape after that.
inline void tiles_begin() { _tile_loadconfig(&TILE_SHAPES); }
inline void tiles_end() { _tile_release(); }

template <int NT, int MT> void tiles_zero() {
  _tile_zero(0);
  if (MT > 1) _tile_zero(1);
  if (NT > 1) _tile_zero(2);
  if (NT > 1 && MT > 1) _tile_zero(3);
}

// Sums from or to memory: ``pitch`` floats from one row of w to the next, 16 from one block of rows of x to the next.
template <int NT, int MT> void tiles_load(const float* c, int64_t pitch) {
  tiles_fence();
  _tile_loadd(0, c, pitch * 4);
  if (MT > 1) _tile_loadd(1, c + 16, pitch * 4);
  if (NT > 1) _tile_loadd(2, c + 16 * pitch, pitch * 4);
  if (NT > 1 && MT > 1) _tile_loadd(3, c + 16 * pitch + 16, pitch * 4);
}
template <int NT, int MT> void tiles_store(float* c, int64_t pitch) {
  _tile_stored(0, c, pitch * 4);
  if (MT > 1) _tile_stored(1, c + 16, pitch * 4);
  if (NT > 1) _tile_stored(2, c + 16 * pitch, pitch * 4);
  if (NT > 1 && MT > 1) _tile_stored(3, c + 16 * pitch + 16, pitch * 4);
  tiles_fence();
}

// Adds the products of ``steps`` steps of 32 values. w: rows of bfloat16, ``w_pitch`` bytes apart. x: a register for each
// step, one after the other; those of the next block of rows come ``x_block`` bytes later.
template <int NT, int MT> void tiles_multiply(const void* w, int64_t w_pitch, const void* x, int64_t x_block, int64_t steps) {
  const char *wt = static_cast<const char*>(w), *xt = static_cast<const char*>(x);
  tiles_fence();
  for (int64_t t = 0; t < steps; t++, wt += 64, xt += 1024) {
    _tile_loadd(6, xt, 64);
    _tile_loadd(4, wt, w_pitch);
    _tile_dpbf16ps(0, 4, 6);
    if (NT > 1) {
      _tile_loadd(5, wt + 16 * w_pitch, w_pitch);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (MT > 1) {
      _tile_loadd(7, xt + x_block, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (NT > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

}  // namespace
