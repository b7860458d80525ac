"""Casts where each group has a scale of its own: Triton's are bitwise those of the definition."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.quantize import by_group
from mxtensor.numerics.groups import Groups, amax_of_groups, amax_of_rows, scaled_values_of_groups
from tests.helpers.stand_in import BF16, FP32, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same runs on the device")
FORMATS = [
    "nvfp4", "nvfp4[16x16]", "nvfp4[row_scaled]", "float8_tensor", "float8_e5m2_tensor", "float8_e4m3_tensor_pow2",
]  # fmt: skip
SIZES = [21, 0, 30, 7]


def values(*shape, dtype=BF16):
    """Quantized of very different sizes, zeros, and one part with a value that is not finite."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-9, 10, (*shape[:-1], 1)).float()
    x[..., 3, :] = 0
    x[..., 5, 7] = float("inf")
    return x.to(dtype)


def same(made, expected):
    for one, other in zip(made, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(one.cpu().float().nan_to_num(7.5), other.float().nan_to_num(7.5))


def check(x, cast, amax, device):
    spec = spec_of(x, x, BF16)
    assert device == "cpu" or by_group.BY_GROUP[0].refuses(spec, x, cast, amax) is None
    same(by_group.BY_GROUP[0].run(x.to(device), cast, amax.to(device)), scaled_values_of_groups(x, cast, amax))


def case(name, dtype, device, cast=None):
    cast = cast or mx.Cast.of(name)
    of_groups = amax_of_rows if cast.format.row_scaled else amax_of_groups
    groups = Groups(torch.tensor(SIZES).cumsum(0).to(torch.int32), 64, 16)
    x = values(64, 48, dtype=dtype)
    if not cast.format.rows_are_blocked or cast.format.block[0] > 16:
        check(x, cast, of_groups(x, groups.of_row, groups.number, 0), device)
    padded = groups.padded(x)
    check(padded, cast, of_groups(padded, groups.of_padded_row, groups.number, 0), device)
    for columns in (padded.t(), padded.t().contiguous()):
        check(columns, cast, of_groups(columns, groups.of_padded_row, groups.number, 1), device)
    stack = values(3, 32, 80, dtype=dtype)
    for one in (stack, stack.mT, stack.mT.contiguous()):
        amax = one.float().abs().amax((-1,) if cast.format.row_scaled else (1, 2), keepdim=True)
        check(one, cast, amax, device)


@interpreted
@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_scales_are_those_of_the_definition(name, dtype):
    case(name, dtype, "cpu")


@interpreted
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["nvfp4", "float8_e5m2_tensor"])
def test_random_numbers_are_those_of_the_definition(name):
    case(name, BF16, "cpu", replace(mx.Cast.of(name, rounding="stochastic"), seed=2**35 + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_scales_on_the_gpu(name, dtype):
    case(name, dtype, "cuda")
    if name != "nvfp4[16x16]":
        case(name, dtype, "cuda", replace(mx.Cast.of(name, rounding="stochastic"), seed=2**35 + 1))


def test_what_triton_leaves_to_the_definition():
    x = torch.randn(32, 32).to(BF16)
    four = mx.recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all").linear_recipe().input.rowwise
    for cast, words in ((four, "four over six"), (mx.Cast.of("nvfp4[1x32]"), "casts blocks of 16 values")):
        assert words in by_group.BY_GROUP[0].refuses(spec_of(x, x, BF16), x, cast, torch.ones(32, 1))
    same(by_group.quantized_by_group(x, four, torch.ones(32, 1)), scaled_values_of_groups(x, four, torch.ones(32, 1)))


def test_the_op_checks_its_arguments_and_has_a_fake():
    op, x, amax = torch.ops.mxtensor.quantize_by_group, torch.randn(32, 64).to(BF16), torch.ones(32, 1)
    arguments = ("rceil", "nearest", None, 0.0)
    for words, *given in (
        ("casts formats with a scale of the whole tensor", x, amax, "mxfp8"),
        (r"amax \(16, 1\) does not broadcast to \(32, 64\)", x, amax[:16], "nvfp4"),
        ("amax must have", x, torch.ones(32), "nvfp4"),
    ):
        with pytest.raises(ValueError, match=words):
            op(*given, *arguments)
    for name, dtype in (("nvfp4", BF16), ("float8_tensor", torch.float8_e4m3fn)):
        if not torch.cuda.is_available():
            same(op(x, amax, name, *arguments), scaled_values_of_groups(x, mx.Cast.of(name), amax))
        with FakeTensorMode():
            made = op(torch.empty(32, 64, dtype=BF16), torch.empty(32, 1), name, *arguments)
        assert [(t.shape, t.dtype) for t in made] == [(x.shape, dtype), (amax.shape, FP32)]
