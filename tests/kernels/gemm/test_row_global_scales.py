"""Products of operands with a global scale for each row."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm.global_scales import has_row_global_scales, without_global_scales
from mxtensor.kernels.gemm.select import gemm, grouped_gemm, plan_of, wanted_form
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import FakeQuantized, Form, Unquantized
from mxtensor.kernels.quantize.choose_cast import fake_quantize, quantize_operand
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import decode

ROWS, WEIGHT = Cast.of("nvfp4[row_scaled]"), Cast.of("nvfp4[16x16]")


def sides(*shape):
    x = torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[-2])[:, None].bfloat16()
    return x, torch.randn(40, shape[-1], dtype=torch.bfloat16)


def in_form(x, form):
    if form == "unquantized":
        return Unquantized(x, ROWS)
    if form == "codes":
        return quantize_operand(x, ROWS)
    return FakeQuantized(*fake_quantize(x, ROWS, torch.float32), ROWS.format)


def exact(x, cast):
    return decode(quantize_operand(x, cast), torch.float64)


def close(y, wanted, dtype):
    error = (y.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return y.dtype is dtype and error.max() < (1e-6 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["unquantized", "codes", "values"])
@pytest.mark.parametrize("shape", [(24, 64), (2, 24, 64)])
def test_each_row_of_the_result_is_multiplied_by_its_scale(shape, form, dtype):
    x, w = sides(*shape)
    y = gemm("mm", in_form(x, form), quantize_operand(w, WEIGHT), GemmArgs(dtype))
    assert close(y, exact(x, ROWS) @ exact(w, WEIGHT).T, dtype)


def test_of_a_right_operand_the_columns_are():
    x, w = sides(24, 64)
    a, b = quantize_operand(w, WEIGHT), in_form(x, "codes")
    assert close(gemm("mm", a, b, GemmArgs(torch.float32)).T, exact(x, ROWS) @ exact(w, WEIGHT).T, torch.float32)
    both = gemm("mm", b, b, GemmArgs(torch.float32))
    assert close(both, exact(x, ROWS) @ exact(x, ROWS).T, torch.float32)


def test_alpha_and_bias_come_after_the_scales_and_the_result_is_rounded_once():
    x, w = sides(24, 64)
    bias = torch.randn(40, dtype=torch.bfloat16)
    a, b = in_form(x, "codes"), quantize_operand(w, WEIGHT)
    product = gemm("mm", a, b, GemmArgs(torch.float32))
    y = gemm("mm", a, b, GemmArgs(torch.bfloat16, bias, 0.5, 2))
    assert torch.equal(y, (product * 0.5 + bias.float() * 2).bfloat16())


def test_groups_of_rows():
    x, _ = sides(24, 64)
    stack = torch.randn(3, 40, 64, dtype=torch.bfloat16)
    ends = torch.tensor([5, 5, 20], dtype=torch.int32)
    w = quantize_operand(stack, Cast.of("nvfp4"))
    y = grouped_gemm("grouped_mm", in_form(x, "unquantized"), w, ends, GemmArgs(torch.bfloat16))
    left, right = exact(x, ROWS), decode(w, torch.float64)
    assert close(y[:5], left[:5] @ right[0].T, torch.bfloat16)
    assert close(y[5:20], left[5:20] @ right[2].T, torch.bfloat16)
    assert not y[20:].any()


def test_the_plan_is_that_of_the_product_without_the_scales():
    x, w = sides(24, 64)
    a, b, args = Unquantized(x, ROWS), quantize_operand(w, WEIGHT), GemmArgs(torch.bfloat16)
    assert has_row_global_scales(a) and not has_row_global_scales(b) and not has_row_global_scales(x)
    unscaled = without_global_scales(a, b, args)
    assert unscaled.args.out_dtype is torch.float32 and [tuple(s.shape) for s in unscaled.scales] == [(24, 1)]
    assert unscaled.a.format.name == "nvfp4_single_level" and unscaled.b is b
    assert plan_of("mm", a, b, args).kernel.name == "emulated"
    assert wanted_form("mm", a, b, args) in (torch.float32, Form.CODES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("four", [None, "mse"])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4[row_scaled]"])
def test_inference_casts_activations_so(format, four, dtype):
    weight, activation = Cast.of("nvfp4[16x16]", four_over_six="mae"), Cast.of(format, four_over_six=four)
    layer = mx.quantize_(torch.nn.Linear(64, 40, dtype=dtype), mx.LinearRecipe.inference(weight, activation))
    assert layer.weight.recipe.stored == weight and layer.weight.recipe.activation == activation
    for shape in ((3, 64), (2, 24, 64), (64,)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad(), mx.explain() as log:
            y = layer(x)
        values = exact(x.reshape(-1, 64), activation).view(shape)  # a global scale belongs to all rows
        product = values @ decode(layer.weight.rowwise, torch.float64).T + layer.bias.double()
        assert close(y, product, dtype)
        assert any("row_scaled" in str(e.spec.formats) for e in log.entries) == activation.format.row_scaled
