// Dot products of codes with AVX-512 and VBMI. A step decodes one register of codes into registers of 32 bfloat16
// values, which hold every element exactly, by table permutes. The order of the values in these registers is that of
// the permutes: x is packed in the same order once a call. All lanes of 32 bits belong to one block each.
#pragma once
#include <immintrin.h>

#include <type_traits>

#include "linear_tiles.h"

namespace {

using Bits = __m512i;
#ifdef __AVX512BF16__
constexpr bool HAS_BFLOAT16 = true;
#else
constexpr bool HAS_BFLOAT16 = false;
#endif
#ifdef __AMX_BF16__
const char* const INSTRUCTIONS = "amx";
#else
const char* const INSTRUCTIONS = HAS_BFLOAT16 ? "avx512bf16" : "avx512";
#endif
constexpr bool DECODES_BFLOAT16 = true;

// A table of bfloat16 values by code, split into low and high bytes.
struct ByteTables {
  alignas(64) uint8_t low[128], high[128];
  ByteTables(int element, int codes) {
    for (int c = 0; c < codes; c++) {
      const uint32_t bits = uint32_t(as_int(tables().value[element][c]));
      low[c] = uint8_t(bits >> 16), high[c] = uint8_t(bits >> 24);
    }
  }
};
template <int ELEMENT, int CODES> inline const ByteTables& byte_tables() {
  static const ByteTables made(ELEMENT, CODES);
  return made;
}

inline __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

// A register of codes is ``spread``, so that no byte has bits of a code of another byte, and then looked up: ``values``.
// Codes of one byte, and of six bits: 64 codes become two registers. In each 128 bits the first holds codes 0 to 7
// and the second codes 8 to 15.
struct OfBytes {
  static constexpr bool TAKES_BFLOAT16 = HAS_BFLOAT16;
  static constexpr int STEP = 64, VECTORS = 2;
  static Bits spread(Bits codes) { return codes; }
  static int code(int vector, int lane, int half) { return lane / 4 * 16 + vector * 8 + lane % 4 * 2 + half; }
  static void join(Bits low, Bits high, Bits* w) {
    w[0] = _mm512_unpacklo_epi8(low, high), w[1] = _mm512_unpackhi_epi8(low, high);
  }
};

template <int ELEMENT> struct Decoder : OfBytes {  // e4m3, e5m2: a table of 128 magnitudes, and the sign
  static constexpr int BYTES = 64;
  Bits low0, low1, high0, high1;
  Decoder() {
    const ByteTables& t = byte_tables<ELEMENT, 128>();
    low0 = _mm512_load_si512(t.low), low1 = _mm512_load_si512(t.low + 64);
    high0 = _mm512_load_si512(t.high), high1 = _mm512_load_si512(t.high + 64);
  }
  void values(Bits codes, Bits* w) const {
    const Bits low = _mm512_permutex2var_epi8(low0, codes, low1);
    const Bits high = _mm512_permutex2var_epi8(high0, codes, high1);
    join(low, _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xF8), w);  // high | codes & 0x80
  }
};

template <> struct Decoder<INT8_ID> : OfBytes {  // a table of 128 magnitudes; -128 has no place in it
  static constexpr int BYTES = 64;
  Bits low0, low1, high0, high1;
  Decoder() {
    const ByteTables& t = byte_tables<INT8_ID, 128>();
    low0 = _mm512_load_si512(t.low), low1 = _mm512_load_si512(t.low + 64);
    high0 = _mm512_load_si512(t.high), high1 = _mm512_load_si512(t.high + 64);
  }
  void values(Bits codes, Bits* w) const {
    const Bits magnitude = _mm512_abs_epi8(codes);
    const Bits low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    Bits high = _mm512_permutex2var_epi8(high0, magnitude, high1);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xF8);
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude), _mm512_set1_epi8(char(0xC0)));  // -2.0
    join(low, high, w);
  }
};

struct SixBitBytes {  // 48 bytes: eight codes in six bytes, brought into the low bits of eight
  Bits place, shifts;
  SixBitBytes() {
    alignas(64) uint8_t at[64], by[64];
    for (int i = 0; i < 64; i++) at[i] = uint8_t(i / 8 * 6 + smaller(i % 8, 5)), by[i] = uint8_t(i % 8 * 6);
    place = _mm512_load_si512(at), shifts = _mm512_load_si512(by);
  }
  Bits operator()(Bits codes) const {
    return _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(place, codes));
  }
};

template <int ELEMENT> struct SixBits : OfBytes {
  static constexpr int BYTES = 48;
  SixBitBytes bytes;
  Bits low, high;
  SixBits() {
    const ByteTables& t = byte_tables<ELEMENT, 64>();
    low = _mm512_load_si512(t.low), high = _mm512_load_si512(t.high);
  }
  Bits spread(Bits codes) const { return bytes(codes); }
  void values(Bits spread, Bits* w) const {  // a permute looks at the low six bits of a byte only
    join(_mm512_permutexvar_epi8(spread, low), _mm512_permutexvar_epi8(spread, high), w);
  }
};
template <> struct Decoder<E3M2_ID> : SixBits<E3M2_ID> {};
template <> struct Decoder<E2M3_ID> : SixBits<E2M3_ID> {};

template <> struct Decoder<E2M1_ID> {  // 128 codes, four in each 16 bits: one permute decodes every fourth code
  static constexpr bool TAKES_BFLOAT16 = HAS_BFLOAT16;
  static constexpr int STEP = 128, VECTORS = 4, BYTES = 64;
  Bits table;
  Decoder() {
    alignas(64) uint16_t t[32];  // twice the 16 values: a permute looks at five bits
    for (int i = 0; i < 32; i++) t[i] = uint16_t(uint32_t(as_int(tables().value[E2M1_ID][i % 16])) >> 16);
    table = _mm512_load_si512(t);
  }
  static int code(int vector, int lane, int half) { return lane * 8 + half * 4 + vector; }
  static Bits spread(Bits codes) { return codes; }
  void values(Bits codes, Bits* w) const {
    w[0] = _mm512_permutexvar_epi16(codes, table);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

// ------------------------------------------------------------------------------------------ scales

inline bool scales_of(const Problem& p, int64_t start, int64_t blocks, int step, int per_step, int64_t wanted, float* out) {
  const int64_t block = block_cols(p);
  if (p.scale_kind >= FP32 || block * per_step != step) {
    bool plain = true;
    for (int64_t i = 0; i < wanted; i++) {
      const int64_t b = i * (step / per_step) / block;
      out[i] = b < blocks ? scale_at(p, start + b) : 0.0f;
      plain &= is_plain(out[i]);
    }
    return plain;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(p.scale) + start;
  __mmask16 unusual = 0;
  for (int64_t i = 0; i < wanted; i += 16) {
    const __mmask16 there = __mmask16(blocks - i >= 16 ? 0xFFFF : blocks > i ? (1u << (blocks - i)) - 1 : 0);
    const __m128i raw = _mm_maskz_loadu_epi8(there, bytes + i);
    __m512 value;
    if (p.scale_kind == UE4M3) {  // through float16, which has the same subnormal values
      const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7), _mm256_set1_epi16(int16_t(0xBFFF)));
      value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
      unusual |= _mm_cmpeq_epi8_mask(_mm_and_si128(raw, _mm_set1_epi8(0x7F)), _mm_set1_epi8(0x7F));
    } else {
      const Bits exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(raw), 23);
      value = _mm512_castsi512_ps(_mm512_max_epi32(exponent, _mm512_set1_epi32(0x00400000)));
      unusual |= _mm_cmpge_epu8_mask(raw, _mm_set1_epi8(char(227)));
    }
    _mm512_storeu_ps(out + i, _mm512_maskz_mov_ps(there, value));
  }
  return unusual == 0;
}

// ------------------------------------------------------------------------------------------ x in the order of codes

// Where the values of a step go. ``words``: of each packed register of bfloat16, the places in the first or the second 64
// values. ``floats``: of the registers of float32 with the even and the odd ones of these values.
template <typename D> struct Places {
  alignas(64) uint16_t words[D::VECTORS][32];
  alignas(64) int32_t floats[D::VECTORS][2][16];
  uint32_t upper[D::VECTORS];  // bits of the words in the second 64
  Places() {
    for (int v = 0; v < D::VECTORS; v++) {
      upper[v] = 0;
      for (int i = 0; i < 32; i++) {
        const int code = D::code(v, i / 2, i % 2);
        words[v][i] = uint16_t(code % 64), upper[v] |= uint32_t(code >= 64) << i, floats[v][i % 2][i / 2] = code;
      }
    }
  }
};

inline void widen(const float* x, float* out) { _mm512_store_ps(out, _mm512_loadu_ps(x)); }
inline void widen(const BFloat16* x, float* out) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  _mm512_store_si512(out, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void widen(const Half* x, float* out) {
  _mm512_store_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}

template <typename D, typename T> void pack_row(const T* x, int64_t k, bool bfloat16, void* out) {
  static const Places<D> places;
  for (int64_t start = 0; start < k; start += D::STEP) {
    T tail[D::STEP] = {};
    const T* from = x + start;
    if (k - start < D::STEP) {
      std::memcpy(tail, from, size_t(k - start) * sizeof(T));
      from = tail;
    }
    if (bfloat16) {
      Bits in[4];
      for (int i = 0; i < D::STEP / 32; i++) in[i] = _mm512_loadu_si512(reinterpret_cast<const uint16_t*>(from) + i * 32);
      for (int v = 0; v < D::VECTORS; v++) {
        const Bits words = _mm512_load_si512(places.words[v]);
        Bits packed = _mm512_permutex2var_epi16(in[0], words, in[1]);
        if constexpr (D::STEP == 128)
          packed = _mm512_mask_mov_epi16(packed, places.upper[v], _mm512_permutex2var_epi16(in[2], words, in[3]));
        _mm512_storeu_si512(static_cast<uint16_t*>(out) + start + v * 32, packed);
      }
      continue;
    }
    alignas(64) float values[D::STEP];
    for (int i = 0; i < D::STEP; i += 16) widen(from + i, values + i);
    for (int v = 0; v < D::VECTORS; v++)
      for (int half = 0; half < 2; half++)
        _mm512_storeu_ps(static_cast<float*>(out) + start + v * 32 + half * 16,
                         _mm512_i32gather_ps(_mm512_load_si512(places.floats[v][half]), values, 4));
  }
}

// ------------------------------------------------------------------------------------------ decoded rows

// A row of w times its scales, in the order of packed x: float32, or bfloat16 where that is exact.
template <typename D>
void decode_row(const Problem& p, const D& decode, const uint8_t* w, const float* scales, int per_step, void* out) {
  alignas(64) int32_t of_lane[16];
  for (int i = 0; i < 16; i++) of_lane[i] = i * per_step / 16;
  const Bits spread = _mm512_load_si512(of_lane), upper = _mm512_set1_epi32(int(0xFFFF0000));
  for (int64_t at = 0; at < ceil_div(p.k, D::STEP); at++) {
    const int64_t bytes = smaller<int64_t>(D::BYTES, p.row_bytes - at * D::BYTES);
    Bits values[D::VECTORS];
    decode.values(decode.spread(_mm512_maskz_loadu_epi8(first_bytes(bytes), w + at * D::BYTES)), values);
    const __m512 scale = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(scales + at * per_step));
    for (int v = 0; v < D::VECTORS; v++) {
      const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values[v], 16)), scale);
      const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(values[v], upper)), scale);
      const int64_t to = at * D::STEP + v * 32;
      if (p.mode == IN_BFLOAT16) {
        const Bits low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
        _mm512_storeu_si512(static_cast<uint16_t*>(out) + to, _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd), upper)));
      } else {
        _mm512_storeu_ps(static_cast<float*>(out) + to, even);
        _mm512_storeu_ps(static_cast<float*>(out) + to + 16, odd);
      }
    }
  }
}

}  // namespace
