"""The sign of zeros: NVFP4 has the codes of TransformerEngine's reference, other formats keep the sign of -0.0.

TransformerEngine gives a scaled value of -0.0 code 0, and a negative value that rounds to zero code 8.
"""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor import Cast, get_format
from mxtensor.kernels.quantize import cpu_casts, triton_columns
from mxtensor.numerics.elements import unpack
from mxtensor.numerics.formats import FORMATS
from mxtensor.numerics.reference import decode, encode
from tests.helpers import oracle
from tests.helpers.every_kernel import KERNELS

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # numpy's about a scale of zero
    pytest.mark.usefixtures("one_rounding", "whole_reductions"),
]
each_kernel = pytest.mark.parametrize("quantize", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)

BY_HAND = [
    (0.0, 0), (-0.0, 0), (0.125, 0), (-0.125, 8), (0.25, 0), (-0.25, 8), (-(2.0**-100), 8), (2.0**-100, 0),
    (-0.375, 9), (0.375, 1), (-0.75, 10), (-1.25, 10), (-2.5, 12), (-5.0, 14), (-6.0, 15), (6.0, 7),
]  # fmt: skip
"""(a scaled value, its code): the intervals of TransformerEngine's NVFP4 reference."""


def codes(operand):
    return torch.stack(unpack(operand.data, operand.format.element), -1).flatten(-2)[..., : operand.shape[-1]]


def scaled_by_one(dtype):
    """(32, 48): tile (0, 0) has BY_HAND in each row, and its multiplier is 1 because another tile has 2688."""
    x = torch.zeros(32, 48, dtype=dtype)
    x[:16, :16] = torch.tensor([value for value, _ in BY_HAND], dtype=dtype)
    x[16, 40] = 2688.0
    return x


@each_dtype
@each_kernel
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4[16x16]"])
def test_codes_by_hand(name, quantize, dtype):
    operand = quantize(scaled_by_one(dtype), Cast.of(name))
    assert codes(operand)[:16, :16].tolist() == [[code for _, code in BY_HAND]] * 16
    oracle.check(operand, scaled_by_one(dtype))


@each_dtype
@each_kernel
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4[16x16]"])
@pytest.mark.parametrize(
    "largest, other",
    [
        (-0.0, -0.0),  # a tensor of zeros
        (1.0, -0.0),
        (3e38, -(2.0**-133)),  # the scaled value underflows to -0.0
        (2.0**-133, -0.0),  # the global scale is at most the largest float32
        (1e30, -1e-30),  # the block scale underflows to zero in blocks without the largest value
    ],
)
@pytest.mark.pairs
def test_zeros_of_every_origin(largest, other, name, quantize, dtype):
    x = torch.full((32, 80), other, dtype=dtype)
    x[3, 5], x[::2, 16:32] = largest, -0.0
    operand = quantize(x, Cast.of(name))
    oracle.check(operand, x)
    assert codes(operand)[::2, 16:32].eq(0).all()


@each_dtype
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py's")
def test_the_columnwise_copy(dtype):
    rowwise, columnwise = triton_columns.pair(scaled_by_one(dtype), Cast.of("nvfp4"))
    oracle.check(rowwise, scaled_by_one(dtype))
    oracle.check(columnwise, scaled_by_one(dtype).t())
    oracle.check(mx.quantize(scaled_by_one(dtype), "nvfp4", orientation="both").columnwise, scaled_by_one(dtype).t())


@each_kernel
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_stochastic_rounding_makes_zeros_without_sign(name, quantize):
    """floor(v / step + u) is +0.0 for -0.0, and also for a negative value that is rounded up to zero."""
    if quantize is cpu_casts.QUANTIZE.run:
        pytest.skip("rounds to nearest only")
    x = torch.zeros(64, 64)
    x[:, ::2], x[:, 1::4], x[:, ::16] = -0.0, -0.1, 6.0
    found = codes(quantize(x, Cast.of(name, rounding="stochastic", seed=3)))
    assert found[:, 2::16].eq(0).all() and set(found[:, 1::4].unique().tolist()) == {0, 9}


@each_kernel
def test_mx_formats_and_single_level_nvfp4_keep_the_sign(quantize):
    x = torch.tensor([[-0.0] * 32, [1.0] + [-0.0] * 31])
    for name in ("mxfp4", "nvfp4_single_level", "mxfp6_e2m3", "float8_1x128"):
        operand = quantize(x, Cast.of(name))
        assert decode(operand, torch.float32)[x == 0].signbit().all(), name


@each_dtype
@each_kernel
@pytest.mark.parametrize("base", ["mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "float8_e4m3_row", "float8_e4m3_tensor"])
def test_every_format_can_drop_the_sign(base, quantize, dtype):
    """A row of the table decides, whatever the element."""
    format = replace(FORMATS[base], name=f"{base}_zero", signed_zero=False)
    x = torch.tensor([1.0, -0.0, 0.0, -(2.0**-120)], dtype=dtype).repeat(8, 40)
    ours, usual = quantize(x, Cast(format)), quantize(x, Cast(get_format(base)))
    values, with_sign = (decode(operand, torch.float32) for operand in (ours, usual))
    assert torch.equal(values, with_sign)
    assert not values[:, 1::4].signbit().any() and with_sign[:, 1::4].signbit().all()
    assert values[:, 3::4].signbit().all()


@pytest.mark.exhaustive
def test_compiled_code_follows():
    x = scaled_by_one(torch.float32)
    compiled = torch.compile(lambda x: encode(x, Cast.of("nvfp4")).tensors, fullgraph=True)(x)
    assert torch.equal(compiled[0], encode(x, Cast.of("nvfp4")).data)
