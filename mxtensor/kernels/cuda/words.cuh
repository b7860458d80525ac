// Words: sixteen consecutive codes of a row, a piece, as eight words of two bfloat16, times their scale:
// exactly, down to 2^-133.
//
// Sign and magnitude are moved to where bfloat16 has them; its exponent then stands for 2^-LIFT of what it should, which
// the product with the scale makes up for. A scale too large or small for that, a NaN among scales or codes: the block
// sees it in the end and starts again, careful. Which codes share a word is free, if ``index_of_word`` (elements.cuh) says so to x.

constexpr int LIFT = ELEMENT == E4M3 ? 120 : ELEMENT == E5M2 ? 112 : ELEMENT == E3M2 ? 124 : ELEMENT == INT8 ? 0 : 126;
constexpr u32 TWICE = 0x00010001, SIGNS = 0x80008000;         // a number in both halves; the signs of both
constexpr int PLACE = ELEMENT == E4M3 ? 4 : ELEMENT == E5M2 ? 5 : ELEMENT == E3M2 ? 5 : ELEMENT == E2M3 ? 4 : 6;
constexpr u32 MAGNITUDE = ((1u << (BITS - 1)) - 1) << PLACE;  // of a code, in a half
constexpr u32 SPECIAL = ELEMENT == E4M3 ? 0x7F0 : ELEMENT == E5M2 ? 0xF80 : 0x7FFF;  // from here on no number
constexpr u32 ONE = 0x3F80;                                   // as bfloat16

// ---------------------------------------------------------------------------------------------- elements

// Of each half, the code whose sign is bit AT + BITS - 1.
template <int AT> DEVICE u32 moved(u32 codes) {
    constexpr int up = PLACE - AT, sign = 16 - BITS - AT;
    u32 magnitude = (up > 0 ? codes << (up > 0 ? up : 0) : codes >> (up > 0 ? 0 : -up)) & (MAGNITUDE * TWICE);
    return ((sign > 0 ? codes << (sign > 0 ? sign : 0) : codes) & SIGNS) | magnitude;
}

// Four bytes as integers: 128 and the low seven bits, less 128 or, with the sign, 256.
DEVICE u32 integers(u32 bytes, u32 selector) {
    u32 both = bytes_of(bytes, 0x43434343, selector);
    return subtract_pair(both & 0xFF7FFF7F, both & 0xFF80FF80);
}

// Eight codes from ``codes`` as four words; the piece's second eight with SECOND.
template <bool SECOND> DEVICE void widen_eight(u32* out, const u32* codes) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 word = codes[2 * SECOND + i];
            if constexpr (ELEMENT == INT8) out[2 * i] = integers(word, 0x4341), out[2 * i + 1] = integers(word, 0x4240);
            else out[2 * i] = moved<8>(word), out[2 * i + 1] = moved<0>(word);
        }
    } else if constexpr (BITS == 4) {
        u32 word = codes[SECOND];
        out[0] = moved<12>(word), out[1] = moved<8>(word), out[2] = moved<4>(word), out[3] = moved<0>(word);
    } else {  // 48 bits: 0 1 | 4 5, and 2 3 | 6 7 in the upper 12 bits of a half
        u32 first = bytes_of(codes[SECOND], codes[SECOND + 1], SECOND ? 0x6532 : 0x4310);
        u32 second = bytes_of(codes[SECOND], codes[SECOND + 1], SECOND ? 0x7643 : 0x5421);
        out[0] = moved<0>(first), out[1] = moved<6>(first), out[2] = moved<4>(second), out[3] = moved<10>(second);
    }
}

// A word of ``widen_eight`` whose infinities and NaNs are bfloat16's, lifted.
DEVICE u32 lifted(u32 word) {
    u32 out = multiply_pair(word, (ONE + (LIFT << 7)) * TWICE);
    if constexpr (SPECIAL != 0x7FFF) {
#pragma unroll
        for (int i = 0; i < 32; i += 16) {
            u32 magnitude = word >> i & MAGNITUDE;
            bool infinite = ELEMENT == E5M2 && magnitude == SPECIAL;
            if (magnitude >= SPECIAL) out = (out & ~(0x7FFFu << i)) | (infinite ? 0x7F80u : 0x7FFFu) << i;
        }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------- scales

constexpr int SCALE_BYTES = SCALE == E8M0 ? (BITS == 8 ? 4 : 1) : SCALE == UE4M3 ? 2 : 0;  // a thread's, of 128 columns
constexpr int SCALES_A_CHUNK = SCALE == E8M0 ? 4 : SCALE == UE4M3 ? 8 : 0;                 // of a row
constexpr int DOWN = SCALE == E8M0 || SCALE == UE4M3 ? (ELEMENT == INT8 ? 0 : SCALE == UE4M3 ? 9 : 8) : 0;
// 2^-DOWN of the values is multiplied, so that scales up to 2^(135 - LIFT + DOWN) and from 2^-127 of that on fit.
constexpr u32 OFFSET = ELEMENT == INT8 ? 112 : LIFT - DOWN + 1;  // brings the scales that fit to 128 and more

DEVICE constexpr u32 place_of_scales(u32 t) { return BITS == 8 ? 0 : SCALE == UE4M3 ? 2 * t : t; }

// The scale of piece ``h``.
DEVICE u32 scale_of_piece(u32 scales, u32 h, u32 t) {
    if constexpr (SCALE == UE4M3) return h ? scales >> 8 : scales & 0xFF;
    else if constexpr (BITS == 8) return bytes_of(scales, 0, 0x4440 + 2 * h + t / 2);
    else return scales;
}

// Bits that are ones where a scale among ``scales`` is out of range, under SCALES_SHOW.
constexpr u32 SCALES_SHOW = SCALE == E8M0 ? (BITS == 8 ? 0x80808080 : 0x80) : SCALE == UE4M3 ? 0x8080 : 0;
DEVICE u32 shown_by(u32 scales) {
    if constexpr (SCALE == E8M0) return ~(scales + OFFSET * (SCALE_BYTES == 4 ? 0x01010101 : 1));
    else return scales | ((scales & 0x7F7F) + 0x0101);  // a NaN, or a sign
}

// 2^EXPONENT times the value of an e4m3 in both halves, its sign in bit 15 and the rest from bit 4 on.
template <int EXPONENT> DEVICE u32 scaled_e4m3(u32 moved) {
    return multiply_pair(multiply_pair(moved, (ONE + (120 << 7)) * TWICE), (ONE + EXPONENT * 128) * TWICE);
}

// What multiplies the words of a piece with this scale.
DEVICE u32 multiplier(u32 scale) {
    if constexpr (SCALE == E8M0) return scale * (TWICE << 7) + u32((LIFT - DOWN) << 7) * TWICE;
    else if constexpr (SCALE == UE4M3) return scaled_e4m3<LIFT - DOWN>(scale * (TWICE << 4));
    else return (ONE + (LIFT << 7)) * TWICE;
}

// The same for lifted words.
DEVICE u32 careful_multiplier(u32 scale) {
    if constexpr (SCALE == E8M0) return (scale == 0 ? 0x0040 : scale == 255 ? 0x7FFF : scale << 7) * TWICE;
    else if constexpr (SCALE == UE4M3) {
        u32 moved = (scale & 0x7F) * (TWICE << 4) | (scale & 0x80) * (TWICE << 8);
        return (scale & 0x7F) == 0x7F ? 0x7FFF * TWICE : scaled_e4m3<-DOWN>(moved);
    }
    else return ONE * TWICE;
}

// ---------------------------------------------------------------------------------------------- both

struct Seen {  // what there was among codes and scales so far
    u32 magnitudes, scales;
};
DEVICE bool is_special(const Seen& seen) {
    bool special = (seen.scales & SCALES_SHOW) != 0;
    if constexpr (SPECIAL != 0x7FFF)
        special |= (seen.magnitudes & 0xFFFF) >= SPECIAL || seen.magnitudes >> 16 >= SPECIAL;
    return special;
}

// Words 2 j and 2 j + 1 of half a fragment of step j of four, from the codes of a piece: a[4 j + half] and two further.
template <bool CAREFUL> DEVICE void decode_piece(u32 (&a)[16], int half, const u32* codes, u32 scale, Seen& seen) {
    u32 factor = CAREFUL ? careful_multiplier(scale) : multiplier(scale), words[8];
    widen_eight<false>(words, codes), widen_eight<true>(words + 4, codes);
    if constexpr (SPECIAL != 0x7FFF && !CAREFUL)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            seen.magnitudes =
                largest_halves(seen.magnitudes, words[i] & (MAGNITUDE * TWICE), words[i + 1] & (MAGNITUDE * TWICE));
#pragma unroll
    for (int i = 0; i < 8; i++)
        a[i / 2 * 4 + i % 2 * 2 + half] = multiply_pair(CAREFUL ? lifted(words[i]) : words[i], factor);
}
