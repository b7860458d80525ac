"""Products on CPU of integer codes with activations that are cast to integers, by instructions for products of bytes
where the processor has them. The sum of a block is exact."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.elements import decode_elements
from mxtensor.numerics.formats import get_format
from mxtensor.numerics.reference import decode_local, encode

from . import test_cpu_groups as groups
from .test_cpu_codes import DTYPES, assert_product, exact, product

CASTS = ("mxint8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxint8[1x16]", "mxfp4[1x64]")
"""Casts of activations: codes that are integers times a unit, in blocks of a row."""
WEIGHTS = ("mxint8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxint8[1x128]", "mxfp4[1x16]", "mxfp4[32x32]")
ELEMENTS = ("mxint8", "mxfp4", "mxfp6_e2m3")
SHAPES = [
    (1, 5, 32),
    (2, 37, 576),
    (3, 70, 70),
    (4, 9, 200),
    (9, 31, 513),
    (31, 65, 96),
    (77, 40, 200),
    (130, 33, 9000),
]
"""Rows of x, rows of w, values. From 8 to 20 rows of x on, codes are brought into panels of 32 rows of w, 8,192 values
of a row at a time, where the processor has products of bytes."""


def cast_of(name):
    return Cast.of(get_format(name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.pairs
def test_integer_codes_times_activations_cast_to_integers(name, shape, dtype):
    m, n, k = shape
    cast, bias = cast_of(name), torch.randn(n)
    x = (torch.randn(m, k) * torch.exp(torch.randn(m, k) - 1)).to(dtype)
    for weights in WEIGHTS:
        w = mx.quantize(torch.randn(n, k) * torch.exp(torch.randn(n, k)), weights).rowwise
        if w.format.element.is_integer:
            w.data.view(torch.int8)[-1, ::3] = -128
        a = exact(encode(x, cast))
        assert_product(product(Unquantized(x, cast), w, dtype, bias), a, exact(w), bias)


def all_values(name):
    """Every value of an element, each block of 32 with the largest, so that a cast finds the same codes."""
    element = get_format(name).element
    values = decode_elements(torch.arange(1 << element.bits, dtype=torch.uint8).view(element.dtype), element)
    values = values[values.abs() <= element.max]
    rows = values.repeat(2)[: 31 * (len(values) // 31 + 1)].view(-1, 31)
    return torch.cat([rows, torch.full((len(rows), 1), float(element.max))], 1)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 12, 33])
@pytest.mark.parametrize("weights", ELEMENTS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_times_every_code_is_exact(name, weights, rows):
    cast, x, w_values = cast_of(name), all_values(name), all_values(weights)
    assert torch.equal(decode_local(encode(x, cast)), x)
    for shift in range(0, 32, 5):
        w = mx.quantize(w_values.roll(shift, 1), weights).rowwise
        for first in range(0, len(x), rows):
            some = x[first : first + rows].repeat(-(-rows // len(x)), 1)
            out = product(Unquantized(some, cast), w, x.dtype)
            assert torch.equal(out.double(), some.double() @ exact(w).t())


@pytest.mark.parametrize("rows", [1, 3, 4, 13, 35])
@pytest.mark.parametrize("weights", ELEMENTS)
def test_the_sum_of_a_block_of_integers_is_exact(weights, rows):
    cast, x = cast_of("mxint8"), torch.randint(-127, 128, (rows, 32)).float()
    w = mx.quantize(torch.randint(-127, 128, (40, 32)).float(), weights).rowwise
    if w.format.element.is_integer:
        w.data.view(torch.int8)[3] = -128
    out = product(Unquantized(x, cast), w, x.dtype)
    assert torch.equal(out.double(), exact(encode(x, cast)) @ exact(w).t())


@pytest.mark.parametrize("weights", ELEMENTS)
def test_blocks_of_zeros_stay_zero_with_the_largest_scales(weights):
    cast, x = cast_of("mxint8"), torch.full((2, 64), 2.0**59)
    w = mx.quantize(torch.zeros(9, 64), weights).rowwise
    w.scale.fill_(127 + 99)
    assert torch.equal(product(Unquantized(x, cast), w, x.dtype), torch.zeros(2, 9))


@pytest.mark.parametrize("rows", [3, 14])
@pytest.mark.parametrize("power", [-140, -120, -60, 50, 70, 120])
@pytest.mark.parametrize("weights", ELEMENTS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_integers_with_scales_of_any_size(name, weights, power, rows):
    cast, x = cast_of(name), torch.randn(rows, 160) * 2.0 ** (power / 2) * 2.0 ** (power - power // 2 - power / 2)
    x[1], x[2, :32] = torch.randn(160), torch.randn(32)
    w = mx.quantize(torch.randn(11, 160), weights).rowwise
    w.scale[2, 1], w.scale[5, 0], w.scale[7] = 250 if power < 0 else 140, 255, 0
    assert_product(product(Unquantized(x, cast), w, x.dtype), exact(encode(x, cast)), exact(w))


@pytest.mark.parametrize("rows", [1, 15])
@pytest.mark.parametrize("power", [-41, -39, 0, 57, 61])
@pytest.mark.parametrize("weights", ELEMENTS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_rows_of_integers_with_every_scale_of_weights(name, weights, power, rows):
    """Scales of x and w are multiplied by adding exponents, which must leave neither end of those of float32."""
    cast, x = cast_of(name), torch.ldexp(torch.rand(rows, 160) + 1, torch.tensor(power))
    x[:, 32:64] = 0
    w = mx.quantize(torch.randn(255, 160), weights).rowwise
    w.scale.copy_(torch.arange(255).clamp(max=230 - power)[:, None].expand(255, 5))  # the results are finite
    w.scale[3::4] = 127  # four rows at a time
    assert_product(product(Unquantized(x, cast), w, x.dtype), exact(encode(x, cast)), exact(w))


@pytest.mark.parametrize("rows", [4, 16, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mxint8", "mxfp4"])
def test_a_row_that_is_not_finite_changes_no_other_row_of_integers(name, value, rows):
    cast, x = cast_of(name), torch.randn(rows, 96)
    w = mx.quantize(torch.randn(9, 96), name).rowwise
    expected = product(Unquantized(x, cast), w, x.dtype)
    x[1, 5] = value
    out = product(Unquantized(x, cast), w, x.dtype)
    others = [i for i in range(rows) if i != 1]
    assert out[1].isnan().all() and torch.allclose(out[others], expected[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASTS)
def test_groups_of_rows_share_the_integers_of_one_cast(name):
    cast, counts = cast_of(name), (5, 0, 17, 1)
    x, w = torch.randn(23 + groups.AFTER, 96), mx.quantize(torch.randn(4, 9, 96), "mxfp4").rowwise
    out = groups.product(Unquantized(x, cast), w, groups.ends_of(counts), x.dtype)
    groups.check(out, exact(encode(x, cast)), exact(w), counts)
