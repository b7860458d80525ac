"""amax_epsilon, TransformerEngine's floor of the amax: in the definition and in every kernel, recipe and quantizer."""

import numpy as np
import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor import Cast, get_format
from mxtensor import recipe as R
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize import definition, triton_columns, triton_rows
from mxtensor.kernels.quantize.choose_cast import quantize_operand
from mxtensor.numerics.formats import FULL
from mxtensor.numerics.reference import decode_local, encode
from mxtensor.recipe.linear_recipe import recipe_from_row, recipe_to_row
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.helpers.every_kernel import KERNELS

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # numpy's about NaN
    pytest.mark.usefixtures("one_rounding", "whole_reductions"),
]
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs the kernels")
NAMES = [name for name in mx.FORMATS if name.startswith("float8")]
EPSILON = 2.0**-10 + 2.0**-20
AMAXES = [0.0, -0.0, 2.0**-149, EPSILON / 2, EPSILON - 2.0**-33, EPSILON, EPSILON * 1.01, 3.0, -1e30]


def scale_of(amax, largest, power_of_two, epsilon):
    """(scale, stored scale) by the rule of TransformerEngine for a finite amax."""
    amax = max(np.float32(amax), np.float32(epsilon))
    if amax == 0:
        return np.float32(1), np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(largest) / amax, np.finfo(np.float32).max)
    if power_of_two:
        scale = (scale.view(np.int32) & np.int32(0x7F800000)).view(np.float32)
    return scale, np.float32(1) / scale


@pytest.mark.parametrize("epsilon", [0.0, EPSILON, 100.0, 2.0**-140])
@pytest.mark.parametrize("quantize", KERNELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.pairs
def test_every_kernel_follows_transformer_engine(name, quantize, epsilon):
    format = get_format(name)
    for amax in AMAXES:
        x = torch.zeros(16, 256)
        x[:, 3], x[:, 130], x[:, 5] = amax, -amax, amax * 0.3
        operand = quantize(x, Cast.of(name, amax_epsilon=epsilon))
        largest = float(x.abs().max())
        scale, stored = scale_of(largest, format.element.max, name.endswith("pow2"), epsilon)
        assert operand.scale.eq(float(stored)).all(), (amax, operand.scale, stored)
        y = torch.from_numpy(x.numpy() * scale).clamp(-format.element.max, format.element.max)
        assert operand.data.view(torch.uint8).equal(y.to(format.element.dtype).view(torch.uint8))


@pytest.mark.parametrize("quantize", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_not_raised_to_the_floor(name, quantize):
    for value in (float("nan"), float("inf")):
        operand = quantize(torch.full((4, 256), value), Cast.of(name, amax_epsilon=1.0))
        assert operand.scale.isnan().all() and operand.data.float().isnan().all()


def small(rows=132, cols=260):
    """Blocks with amaxes above and below EPSILON, and blocks of zeros."""
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-14, -8, (rows, 1)).float()
    x[5:9], x[:, 128:], x[9] = 0, x[:, 128:] * 2.0**-6, EPSILON
    return x.bfloat16()


@pytest.mark.exhaustive
@no_device
@pytest.mark.parametrize("name", NAMES)
def test_the_passes_over_columns_values_and_pairs(name):
    x, cast = small(), Cast.of(name, amax_epsilon=EPSILON)
    square = get_format(name).block[0] != 1
    assert not torch.equal(encode(x * 2.0**-6, cast).scale, encode(x * 2.0**-6, Cast.of(name)).scale)
    assert_same_operand(triton_rows.quantize(x.t(), cast), encode(x.t(), cast))
    values, _ = triton_rows.fake_quantize(x, cast, torch.bfloat16)
    assert_same_values(values, decode_local(encode(x, cast)).bfloat16())
    if not square and get_format(name).block[1] != FULL:
        for ours, theirs in zip(triton_columns.pair(x, cast), (x, x.t()), strict=True):
            assert_same_operand(ours, encode(theirs, cast))
    if get_format(name).block == (FULL, FULL):
        rowwise, columnwise = triton_columns.pair(x * 2.0**-6, cast, Form.CODES, Form.CODES, x.dtype, None, None)
        assert_same_operand(rowwise, encode(x * 2.0**-6, cast))
        assert_same_operand(columnwise, encode(x.t() * 2.0**-6, cast))
        given = torch.tensor(2.0**-20)
        rowwise, _ = triton_columns.pair(x, cast, Form.CODES, None, x.dtype, given, None)
        assert_same_operand(rowwise, definition.encode_with_amax(x, cast, given))


def test_traced_code_has_the_floor():
    x = small().float()
    for name in ("float8_tensor", "float8_1x128_pow2"):
        cast, graphs = Cast.of(name, amax_epsilon=EPSILON), []
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, cast=cast: quantize_operand(x, cast).tensors,
            backend=lambda graph, inputs, graphs=graphs: graphs.append(graph) or graph,
            fullgraph=True,
        )
        data, scale = compiled(x)
        assert graphs and torch.equal(scale, encode(x, cast).scale) and torch.equal(data, encode(x, cast).data)


# ---------------------------------------------------------------------------------------------- who passes it


@pytest.mark.parametrize("recipe", [R.Float8CurrentScaling(), R.Float8BlockScaling()], ids=lambda r: type(r).__name__)
def test_recipes_have_a_floor_for_each_tensor(recipe):
    plain = recipe.linear_recipe()
    recipe.fp8_quant_fwd_inp = R.QParams(power_2_scale=True, amax_epsilon=1e-3)
    recipe.fp8_quant_fwd_weight = R.QParams(amax_epsilon=2e-3)
    casts = recipe.linear_recipe()
    assert casts.input.rowwise.amax_epsilon == casts.input.columnwise.amax_epsilon == 1e-3
    assert casts.input.rowwise.format.name.endswith("_pow2")
    assert casts.weight.rowwise.amax_epsilon == 2e-3 and not casts.weight.rowwise.format.name.endswith("_pow2")
    assert casts.grad == plain.grad
    assert "fp8_quant_fwd_inp=QParams(power_2_scale=True, amax_epsilon=0.001)" in repr(recipe)
    recipe.fp8_quant_bwd_grad = 1e-3
    with pytest.raises(ValueError, match=r"fp8_quant_bwd_grad is 0.001; use mxtensor.recipe.QParams\(...\), or None"):
        recipe.linear_recipe()


def test_a_layer_multiplies_by_values_with_the_floor():
    layer, x, params = torch.nn.Linear(128, 128, bias=False), torch.rand(128, 128) * 2.0**-16, R.QParams(False, 1.0)
    with mx.autocast(recipe=R.Float8CurrentScaling(fp8_quant_fwd_inp=params, fp8_quant_fwd_weight=params)):
        y = layer(x)
    floor = Cast.of("float8_tensor", amax_epsilon=1.0)
    values, weight = (decode_local(encode(t, floor)).double() for t in (x, layer.weight))
    exact = values @ weight.t()
    assert (y.double() - exact).norm() < 1e-5 * exact.norm()
    assert (values - x).norm() > 0.1 * x.norm()  # the floor made the scale coarse


@pytest.mark.parametrize("kind", [te.Float8CurrentScalingQuantizer, te.Float8BlockQuantizer])
def test_quantizers_take_it(kind):
    quantizer = kind(amax_epsilon=0.5)
    assert quantizer.amax_epsilon == 0.5 and "amax_epsilon=0.5" in repr(quantizer) and "epsilon" not in repr(kind())
    w = quantizer(torch.full((128, 128), 0.25))
    cast = Cast(quantizer.cast.format, amax_epsilon=0.5)
    assert_same_operand(w.rowwise, encode(torch.full((128, 128), 0.25), cast))
    w.copy_(torch.full((128, 128), 0.125))
    assert_same_operand(w.rowwise, encode(torch.full((128, 128), 0.125), cast))
    assert quantizer.update_quantized(torch.zeros(128, 128), w) is w
    assert_same_operand(w.rowwise, encode(torch.zeros(128, 128), cast))
    with pytest.raises(ValueError, match=r"amax_epsilon is -1\.0; it must be a number from 0 to the largest float32"):
        kind(amax_epsilon=-1.0)


def test_layers_quantizers_and_stored_recipes_carry_it():
    recipe = R.Float8BlockScaling(fp8_quant_fwd_inp=R.QParams(amax_epsilon=1e-12))
    assert [q.amax_epsilon for q in te.quantizers.quantizers_of(recipe, "cpu")["scaling_fwd"]] == [1e-12, 0.0]
    stored = mx.LinearRecipe.inference(Cast.of("float8_row", amax_epsilon=1e-12), "mxfp8")
    assert recipe_from_row(recipe_to_row(stored)) == stored
    row = recipe_to_row(stored) | {"weight_amax_epsilon": "nan"}
    with pytest.raises(ValueError, match="the amax_epsilon of a stored recipe must be a number, got 'nan'"):
        recipe_from_row(row)


def test_other_scales_have_no_floor():
    with pytest.raises(ValueError, match=r"amax_epsilon=1.0 is for float32 scales, and mxfp8_e4m3 has e8m0 scales"):
        Cast.of("mxfp8", amax_epsilon=1.0)
    with pytest.raises(TypeError, match="amax_epsilon is '1'; pass a number"):
        Cast.of("float8_row", amax_epsilon="1")
