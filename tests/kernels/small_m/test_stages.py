"""The swizzle of codes in shared memory: the reads of a warp have no bank conflicts."""

import pytest

import mxtensor as mx
from mxtensor.kernels.small_m.config import SWIZZLES, codes_per_read, swizzle_of_codes

FORMATS = {8: "mxfp8", 6: "mxfp6", 4: "mxfp4"}
BANKS, LANES = 32, range(32)


def classes(bits, run):
    """The number of classes with which a thread reads ``run`` codes of this format (blocks of 32) at a time."""
    return next(c for c in (1, 2, 4, 8) if codes_per_read(mx.get_format(FORMATS[bits]), c) == run)


def reads(bits, run, depth):
    """(bytes that a thread reads at a time, offsets in a row of the reads of four threads) of a stage."""
    words = run * bits // 32
    if run == 8:  # a slab of 32 codes; two words hold a thread's 6-bit codes
        for slab in range(0, depth * bits // 8, 4 * bits):
            if bits == 6:
                yield from ((4, [slab + (6 * t & ~3) + word for t in range(4)]) for word in (0, 4))
            else:
                yield bits, [slab + bits * t for t in range(4)]
        return
    width = 16 if words % 4 == 0 else 8 if words % 2 == 0 else 4
    for first in range(0, depth, 4 * run):
        for piece in range(0, 4 * words, width):
            yield width, [(first + t * run) * bits // 8 + piece for t in range(4)]


def most_in_a_bank(addresses, width):
    """The most words of one bank that one read touches: 128 bytes are read at a time."""
    threads, most = 128 // width, 0
    for first in range(0, len(addresses), threads):
        words = {a // 4 + i for a in addresses[first : first + threads] for i in range(width // 4)}
        most = max(most, max(sum(word % BANKS == bank for word in words) for bank in range(BANKS)))
    return most


@pytest.mark.parametrize("depth", [128, 256, 512, 1024])
@pytest.mark.parametrize(("bits", "run"), SWIZZLES)
def test_reads_of_codes_have_no_bank_conflicts(bits, run, depth):
    row_bytes = depth * bits // 8
    first, mask, pieces = swizzle_of_codes(mx.get_format(FORMATS[bits]), classes(bits, run), depth)
    swizzle = [(row >> first & mask) * 16 * pieces for row in range(8)]
    assert {place ^ t for place in range(0, row_bytes, 16) for t in swizzle} == set(range(0, row_bytes, 16))
    for width, places in reads(bits, run, depth):
        addresses = [lane // 4 * row_bytes + (places[lane % 4] ^ swizzle[lane // 4]) for lane in LANES]
        assert most_in_a_bank(addresses, width) == (2 if (bits, run) == (6, 8) else 1)
