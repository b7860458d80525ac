"""Single elements over their whole domains: rounding and decoding against ml_dtypes, gfloat and the oracle; packing."""

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo
from gfloat import formats as gf

from mxtensor import FORMATS
from mxtensor.numerics.elements import (
    decode_elements,
    decode_packed,
    encode_elements,
    pack,
    random_words,
    round_stochastically,
    uniform,
    unpack,
)
from tests.helpers import oracle
from tests.helpers.oracle import as_bytes, same_floats

ELEMENTS = {f.element.name: f.element for f in FORMATS.values()}
PACKED = {name: element for name, element in ELEMENTS.items() if element.packed}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def gfloat_info(element):
    """gfloat's own description of a published element; of another finite element, one with the fields of its row."""
    published = getattr(gf, f"format_info_ocp_{element.name}", None)
    if published is not None or not element.packed:
        return published
    return FormatInfo(
        element.name, element.bits, element.significant_bits, bias=element.bias, is_signed=True, domain=Domain.Finite,
        has_nz=True, num_high_nans=0, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip


GFLOAT = {name: info for name, e in ELEMENTS.items() if (info := gfloat_info(e)) is not None}

each_element = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
each_packed = pytest.mark.parametrize("element", PACKED.values(), ids=PACKED)


def check_codes(x, element):
    """Check the codes of the float32 tensor ``x`` (no NaN) against all oracles; their inputs are clipped first."""
    codes = as_bytes(encode_elements(x.clone(), element))
    np.testing.assert_array_equal(codes, oracle.element_codes(x.numpy(), oracle.element_of(element)))
    clipped = np.clip(x.numpy(), -element.max, element.max)
    if element.name in GFLOAT:
        info = GFLOAT[element.name]
        rounded = gfloat.round_ndarray(info, clipped.astype(np.float64), sat=True)
        np.testing.assert_array_equal(codes, gfloat.encode_ndarray(info, rounded).astype(np.uint8))
    if element.name in ML_DTYPES:
        np.testing.assert_array_equal(codes, clipped.astype(ML_DTYPES[element.name]).view(np.uint8))
    return codes


@each_element
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(dtype, element):
    x = oracle.every_16_bit_value(dtype).float()
    codes = check_codes(x[~x.isnan()], element)
    reachable = 2**element.bits - 2 * len(oracle.element_of(element).specials) - element.is_integer
    assert len(np.unique(codes)) == reachable  # all but NaN, Inf and int8's -128


@each_element
def test_neighbours_of_every_value_and_of_every_tie(element):
    values = oracle.element_of(element).magnitudes
    corners = np.concatenate([values, (values[:-1] + values[1:]) / 2, [element.max * 1.5, 2.0**127]])
    bits = corners.astype(np.float32).view(np.int32)[:, None] + np.arange(-2, 3)
    x = np.maximum(bits, 0).astype(np.int32).view(np.float32).ravel()
    check_codes(torch.from_numpy(np.concatenate([x, -x])), element)


@each_element
def test_float32_values_of_every_exponent(element):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.standard_normal(200_000) * element.max / 4).astype(np.float32)
    check_codes(torch.from_numpy(np.concatenate([x[~np.isnan(x)], near])), element)


def test_nan_becomes_nan_where_there_is_one():
    for name in ("e4m3", "e5m2"):
        code = encode_elements(torch.tensor([1.0, float("nan"), -float("nan")]), ELEMENTS[name])
        assert code.float().isnan().tolist() == [False, True, True]


@each_element
def test_every_code_decodes(element):
    codes = np.arange(2**element.bits, dtype=np.uint8)
    values = decode_elements(torch.from_numpy(codes).view(element.dtype), element).numpy()
    assert same_floats(values, oracle.element_values(oracle.element_of(element)).astype(np.float32))
    if element.name in GFLOAT:
        assert same_floats(values, gfloat.decode_ndarray(GFLOAT[element.name], codes).astype(np.float32))
    if element.name in ML_DTYPES:
        assert same_floats(values, codes.view(ML_DTYPES[element.name]).astype(np.float32))
        finite = np.isfinite(values)
        encoded = as_bytes(encode_elements(torch.from_numpy(values[finite]), element))
        np.testing.assert_array_equal(encoded, codes[finite])


# ---------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("index", "seed", "word"),
    [
        (0, 0, 0x6627E8D5),
        (0x85A308D3243F6A88, 0x299F31D0A4093822, None),
        ((1 << 64) - 1, (1 << 64) - 1, None),
        (123456789, 987654321, None),
        ((1 << 40) + 3, (1 << 33) + 5, None),
        (5, -1, None),
    ],
)
def test_random_words_are_philox(index, seed, word):
    """Philox 4x32-10, compared with plain integers; the published answer for zeros begins with 6627e8d5."""
    signed = index - (1 << 64) if index >> 63 else index
    expected = philox(index, seed % (1 << 64))
    assert word is None or expected[0] == word
    assert random_words(seed, torch.tensor([signed])).tolist() == [expected]


def philox(index, seed):
    """The words of Philox 4x32-10 for counter (low, high, 0, 0) and key (low, high), as in the paper."""
    low = 0xFFFFFFFF
    counter, key = [index & low, index >> 32, 0, 0], [seed & low, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (2, 3, 5), (1, 1), (0, 4), (6,), ()])
def test_one_counter_gives_the_numbers_of_four_neighbours_in_a_row(shape):
    cols = shape[-1] if shape else 1
    fours, rows = -(-cols // 4), math.prod(shape[:-1])
    words = [philox(i, 11) for i in range(rows * fours)]
    expected = [(words[r * fours + c // 4][c % 4] >> 8) * 2.0**-24 for r in range(rows) for c in range(cols)]
    assert uniform(11, torch.empty(shape)).flatten().tolist() == expected


def test_uniform_numbers_depend_on_seed_and_index_only():
    flat = uniform(7, torch.empty(3 * 5000))
    assert torch.equal(flat, uniform(7, torch.empty(3, 5000, dtype=torch.bfloat16)).flatten())
    assert torch.equal(flat, uniform(7, torch.empty(5000, 3).t()).flatten())
    assert torch.equal(flat[:100], uniform(7, torch.empty(100)))
    assert (flat != uniform(8, torch.empty(3 * 5000))).float().mean() > 0.99


def test_uniform_numbers_are_24_bits_of_the_words_evenly_spread():
    numbers = uniform(3, torch.empty(1 << 16))
    words = random_words(3, torch.arange(1 << 14)).flatten()
    assert words.min() >= 0 and words.max() < 1 << 32 and words.unique().numel() > 65_530
    assert numbers.dtype is torch.float32
    assert torch.equal(numbers.double(), (words >> 8).double() * 2.0**-24)
    counts = torch.histc(numbers, 64, 0, 1)
    assert ((counts - 1024).square() / 1024).sum() < 63 + 5 * (2 * 63) ** 0.5  # chi squared of 63 degrees, 5 sigma


@each_element
def test_stochastic_rounding_goes_up_where_the_noise_reaches_the_next_value(element):
    """A quarter above the lower neighbour: noise of 3/4 and more rounds up; the result is always one of the two."""
    values = torch.from_numpy(oracle.element_of(element).magnitudes).float()
    lower, upper = values[:-1], values[1:]
    y = lower + (upper - lower) / 4
    for noise, expected in ((0.0, lower), (0.7499, lower), (0.75, upper), (1 - 2.0**-24, upper)):
        got = round_stochastically(y.clone(), element, torch.full_like(y, noise))
        assert torch.equal(got, expected)
    assert torch.equal(round_stochastically(values.clone(), element, torch.full_like(values, 0.9999)), values)
    negative = round_stochastically(-y, element, torch.full_like(y, 0.25))  # up is towards zero, three quarters likely
    assert torch.equal(negative, -lower)
    assert torch.equal(round_stochastically(-y, element, torch.full_like(y, 0.2499)), -upper)


# ---------------------------------------------------------------------------------------------- packing


def every_byte(size):
    """(size, 256, size) bytes: row i has every byte value at position i of a group and random bytes at the others."""
    data = np.random.default_rng(0).integers(0, 256, (size, 256, size), dtype=np.uint8)
    for place in range(size):
        data[place, :, place] = np.arange(256)
    return torch.from_numpy(data)


@each_packed
def test_pack_and_unpack_are_inverse(element):
    reference, rng = oracle.element_of(element), np.random.default_rng(0)
    group, size = element.packing
    codes = rng.integers(0, 2**element.bits, (3, 1024 * group), dtype=np.uint8)
    data = pack(torch.from_numpy(codes), element)
    assert data.dtype == torch.uint8 and data.shape == (3, 1024 * size)
    np.testing.assert_array_equal(data.numpy(), oracle.pack(codes, reference))
    for place, unpacked in enumerate(unpack(data, element)):
        np.testing.assert_array_equal(unpacked.flatten(1).numpy(), codes[:, place::group])
    data = every_byte(size)
    codes = torch.stack(unpack(data, element), -1).flatten(-2)
    np.testing.assert_array_equal(codes.numpy(), oracle.unpack(data.numpy(), reference, group))
    assert torch.equal(pack(codes, element), data)


@each_packed
def test_pack_accepts_any_strides(element):
    """A tensor with a dimension of size 1 is contiguous whatever the stride of that dimension is."""
    group = element.packing[0]
    codes = torch.arange(1, 1 + 3 * group).to(torch.uint8)
    assert pack(codes[:group, None].t(), element).tolist() == [pack(codes[:group], element).tolist()]
    assert torch.equal(pack(codes.view(group, 3).t(), element), pack(codes.view(group, 3).t().clone(), element))
    assert torch.equal(pack(codes.repeat_interleave(2)[::2], element), pack(codes, element))


def test_packed_layouts_by_hand():
    assert pack(torch.tensor([0x1, 0xF, 0x8, 0x2]).to(torch.uint8), ELEMENTS["e2m1"]).tolist() == [0xF1, 0x28]
    word = 0x3F | 0x01 << 6 | 0x20 << 12 | 0x15 << 18
    codes = torch.tensor([0x3F, 0x01, 0x20, 0x15]).to(torch.uint8)
    assert pack(codes, ELEMENTS["e3m2"]).tolist() == list(word.to_bytes(3, "little"))
    plain = torch.arange(7).to(torch.uint8)
    assert pack(plain, ELEMENTS["e4m3"]) is plain


@each_packed
def test_packed_bytes_decode_in_order(element):
    group, size = element.packing
    data, reference = every_byte(size), oracle.element_of(element)
    expected = oracle.element_values(reference)[oracle.unpack(data.numpy(), reference, group)].astype(np.float32)
    values = decode_packed(data, element)
    assert values.dtype == torch.bfloat16  # exact: a value has at most 4 significant bits
    assert same_floats(values.float().numpy(), expected)
