"""Sub-byte elements as row-scaled E4M3: a value is rounded, and scaled for its row, without a code between.

A word has two bfloat16 values. Each is rounded to a value of its element, which bfloat16 represents, and multiplied by
2^shift; E4M3 represents the product or rounds it. Blocks that are not finite give any codes: the scales of their rows
are NaN. The words are those of the glossary in ``numerics/row_scaled.py``.
"""

import triton
import triton.language as tl

from .elements import dither, float_of
from .quantize import nothing_of, random_words
from .row_scaled import exponent_of, to_e4m3
from .row_scaled_rescale import UNCHANGED_EXPONENT
from .values import round_words, side_by_side
from .words import E4M3_COLUMNS, E4M3_ROW, high_value, low_value


def _without_products(ptx):
    """The instructions of ``words`` for values that need no multiplier."""
    return tl.constexpr("\n".join(line for line in ptx.value.split("\n") if not line.startswith("mul")))


E4M3_OF_COLUMNS, E4M3_OF_ROW = _without_products(E4M3_COLUMNS), _without_products(E4M3_ROW)


@triton.jit
def shift_power(stored, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """2^shift of blocks with these stored scales, float32: rounded values are multiplied by it. ``row_exponent`` is
    that of their row, or UNCHANGED_EXPONENT."""
    exponent, _special = exponent_of(stored, C)
    shift = exponent - row_exponent + R.offset
    shift = tl.where(shift < -UNCHANGED_EXPONENT // 2, 0, tl.minimum(tl.maximum(shift, -126), 15))
    return float_of((shift + 127) << 23)


@triton.jit
def rounded_by(x, multiplier, power, random, C: tl.constexpr):
    """float32 x * multiplier, rounded stochastically to a value of the element, * power."""
    y = dither(x * multiplier, random.to(tl.uint32), C)
    return tl.minimum(tl.maximum(y, -C.max), C.max) * power


@triton.jit
def rounded_word(word, low, high, low_power, high_power, low_random, high_random, C: tl.constexpr):
    """A word of two values, each times its multiplier, rounded and times its power. The random words count if the cast
    rounds stochastically."""
    if C.stochastic:
        return side_by_side(
            rounded_by(low_value(word), low, low_power, low_random, C),
            rounded_by(high_value(word), high, high_power, high_random, C),
        )
    else:
        return round_words(word, side_by_side(low, high), side_by_side(low_power, high_power), C)


@triton.jit
def e4m3_columns(words, R: tl.constexpr):
    """E4M3 codes of four rows of words: one int32 of their low columns, one of their high columns."""
    w0, w1, w2, w3 = words
    if R.float8:
        return tl.inline_asm_elementwise(
            E4M3_OF_COLUMNS, "=r,=r,r,r,r,r", [w0, w1, w2, w3], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        l0, h0 = to_e4m3(low_value(w0), R).to(tl.int32), to_e4m3(high_value(w0), R).to(tl.int32)
        l1, h1 = to_e4m3(low_value(w1), R).to(tl.int32), to_e4m3(high_value(w1), R).to(tl.int32)
        l2, h2 = to_e4m3(low_value(w2), R).to(tl.int32), to_e4m3(high_value(w2), R).to(tl.int32)
        l3, h3 = to_e4m3(low_value(w3), R).to(tl.int32), to_e4m3(high_value(w3), R).to(tl.int32)
        return l0 | (l1 << 8) | (l2 << 16) | (l3 << 24), h0 | (h1 << 8) | (h2 << 16) | (h3 << 24)


@triton.jit
def e4m3_row(word, R: tl.constexpr):
    """E4M3 codes of both values of a word, int16, the low value in the low byte."""
    if R.float8:
        return tl.inline_asm_elementwise(E4M3_OF_ROW, "=r,r,r", [word], tl.int16, is_pure=True, pack=2)
    else:
        low, high = to_e4m3(low_value(word), R).to(tl.int32), to_e4m3(high_value(word), R).to(tl.int32)
        return (low | (high << 8)).to(tl.int16)


# ---------------------------------------------------------------------------------------------- four values a thread


@triton.jit
def rescaled_row_codes(word, multiplier, power, four, seed_ptr, C: tl.constexpr, R: tl.constexpr):
    """Codes of words (Q, W, J, 2) with four values of a row each; multiplier, power (Q, W, J, 1); four (Q, W, J): their
    number in the operand."""
    shape: tl.constexpr = word.shape
    multiplier, power = tl.broadcast_to(multiplier, shape), tl.broadcast_to(power, shape)
    if C.stochastic:
        r0, r1, r2, r3 = random_words(four + tl.max(nothing_of(word), axis=3), seed_ptr, 0, C)
        low_random, high_random = tl.join(r0, r2), tl.join(r1, r3)
    else:
        low_random, high_random = word, word
    return e4m3_row(rounded_word(word, multiplier, multiplier, power, power, low_random, high_random, C), R)


@triton.jit
def rescaled_column_codes(
    words, low, high, low_power, high_power, four, next_four, seed_ptr, C: tl.constexpr, R: tl.constexpr
):
    """Codes of four rows of words: one int32 of their low columns, one of their high columns; four, next_four: the
    numbers of these in the operand of the transpose."""
    w0, w1, w2, w3 = words
    l0, l1, l2, l3 = random_words(four + nothing_of(w0), seed_ptr, 1, C)
    h0, h1, h2, h3 = random_words(next_four + nothing_of(w0), seed_ptr, 1, C)
    w0 = rounded_word(w0, low, high, low_power, high_power, l0, h0, C)
    w1 = rounded_word(w1, low, high, low_power, high_power, l1, h1, C)
    w2 = rounded_word(w2, low, high, low_power, high_power, l2, h2, C)
    w3 = rounded_word(w3, low, high, low_power, high_power, l3, h3, C)
    return e4m3_columns((w0, w1, w2, w3), R)
