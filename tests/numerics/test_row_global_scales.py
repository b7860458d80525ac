"""NVFP4 with a global scale for each row: every row is cast as if it were a tensor of its own."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize.choose_cast import dequantize_operand, fake_quantize, quantize_operand
from mxtensor.kernels.quantize.choose_pair import cast_pair
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS, get_format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, encode
from mxtensor.recipe.linear_recipe import LinearRecipe, TensorCasts

ROWS = get_format("nvfp4[row_scaled]")
CASTS = [Cast(ROWS), Cast.of(ROWS, four_over_six="mae")]


def values(*shape, dtype=torch.bfloat16):
    x = torch.randn(shape, dtype=torch.float32)
    return (x * torch.randn(*shape[:-1], 1).mul(3).exp()).to(dtype)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_is_a_tensor_of_its_own(cast, dtype):
    x = values(9, 40, dtype=dtype)
    x[3] = 0
    operand, one = encode(x, cast), Cast.of("nvfp4", four_over_six=cast.four_over_six)
    assert operand.global_scale.shape == (9, 1)
    back = decode(operand, torch.float32)
    for i, row in enumerate(x):
        alone = encode(row[None], one)
        assert torch.equal(operand.data[i], alone.data[0]) and torch.equal(operand.scale[i], alone.scale[0])
        assert operand.global_scale[i, 0] == alone.global_scale
        assert torch.equal(back[i], decode(alone, torch.float32)[0])


@pytest.mark.parametrize("shape", [(40,), (6, 32), (2, 5, 48), (2, 0, 32), (600, 256)])
def test_every_way_of_a_cast_gives_the_bits_of_the_definition(shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    made, wanted = quantize_operand(x, Cast(ROWS)), encode(x, Cast(ROWS))
    empty = Operand.empty(ROWS, shape)
    for a, b, memory in zip(made.tensors, wanted.tensors, empty.tensors, strict=True):
        assert torch.equal(a, b) and memory.shape == a.shape and memory.dtype == a.dtype
    assert torch.equal(dequantize_operand(made, torch.float32), decode(wanted, torch.float32))
    rounded, scale = fake_quantize(x, Cast(ROWS), torch.bfloat16)
    assert torch.equal(rounded.float() * scale, decode(wanted, torch.float32))


def test_one_row_of_nan_or_infinity_leaves_the_others():
    x = values(3, 32)
    x[1, 4], x[2, 20] = torch.nan, torch.inf
    back, alone = decode(encode(x, Cast(ROWS)), torch.float32), decode(encode(x[:1], Cast(ROWS)), torch.float32)
    assert torch.equal(back[:1], alone)
    assert back[1, :16].isnan().all() and back[2, 16:].isnan().all()


def test_the_columnwise_copy_has_a_scale_for_each_column():
    x = values(32, 48)
    row, column = cast_pair(x, Cast(ROWS), Form.CODES, Form.CODES, torch.bfloat16)
    for copy, source in ((row, x), (column, x.t())):
        wanted = encode(source.contiguous(), Cast(ROWS))
        assert all(map(torch.equal, copy.tensors, wanted.tensors))


def test_the_error_of_rows_of_different_sizes_is_smaller():
    x = torch.randn(64, 256) * torch.logspace(-6, 6, 64)[:, None]

    def error(format):
        back = decode(encode(x, Cast.of(format)), torch.float32)
        return ((back - x).norm(dim=1) / x.norm(dim=1)).max()

    assert error(ROWS) < 0.12 and error("nvfp4") == 1  # small rows are zeros under one global scale


# ---------------------------------------------------------------------------------------------- the format


def test_the_format_has_a_name_and_is_not_a_row_of_the_table():
    assert get_format("nvfp4").with_row_scales() == ROWS and str(ROWS) == "nvfp4[row_scaled]"
    assert ROWS not in FORMATS.values() and get_format("nvfp4") != ROWS
    assert ROWS.without_global_scale() is FORMATS["nvfp4_single_level"]
    assert ROWS.global_scale_shape((2, 3, 32)) == (2, 3, 1) and get_format("nvfp4").global_scale_shape((3, 32)) == ()


def test_wrong_formats_are_refused():
    with pytest.raises(ValueError, match=r"mxfp8_e4m3 has no global scale for each row; choose nvfp4"):
        get_format("mxfp8[row_scaled]")
    with pytest.raises(ValueError, match=r"nvfp4\[16x16\] has no global scale for each row"):
        get_format("nvfp4[16x16]").with_row_scales()
    with pytest.raises(ValueError, match=r"only blocks of one row can have a global scale for each row"):
        ROWS.with_block((16, 16))


def test_a_weight_cannot_have_scales_of_rows():
    with pytest.raises(ValueError, match=r"the weight is nvfp4\[row_scaled\], and a weight has one global scale"):
        mx.quantize(torch.randn(4, 32), ROWS)
    with pytest.raises(ValueError, match=r"the weight is nvfp4\[row_scaled\]"):
        LinearRecipe(TensorCasts(), TensorCasts.of(ROWS), TensorCasts())
    with pytest.raises(NotImplementedError, match=r"KVCache: nvfp4\[row_scaled\] has a global scale for each row"):
        mx.KVCache(ROWS)
