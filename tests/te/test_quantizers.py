"""Quantizers: bitwise identical to ``mx.quantize``; their usages, writes and gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor import recipe as R
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize.choose_pair import cast_pair
from mxtensor.kernels.quantize.hadamard import rotated
from mxtensor.numerics.cast import Cast
from mxtensor.recipe.block_scaling import RANDOM_SIGNS
from mxtensor.recipe.linear_recipe import TensorCasts
from mxtensor.te.quantizers import (
    QUANTIZER_OF,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    MXQuantizer,
    NVFP4Quantizer,
    Quantizer,
    quantizers_of,
)
from mxtensor.training.delayed_scaling import DelayedState
from tests.helpers import oracle
from tests.helpers.compare import components_of, same_bytes

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2

STATELESS = {
    "mxfp8_e4m3": lambda **usage: MXFP8Quantizer(E4M3, **usage),
    "mxfp8_e5m2": lambda **usage: MXFP8Quantizer(E5M2, **usage),
    "mxfp8_e4m3[32x32]": lambda **usage: MXFP8Quantizer(E4M3, with_2d_quantization=True, **usage),
    "nvfp4": lambda **usage: NVFP4Quantizer(**usage),
    "nvfp4[16x16]": lambda **usage: NVFP4Quantizer(with_2d_quantization=True, **usage),
    "float8_e4m3_tensor": lambda **usage: Float8CurrentScalingQuantizer(E4M3, device="cpu", **usage),
    "float8_e5m2_tensor_pow2": lambda **usage: Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True, **usage),
    "float8_e4m3_128x128_pow2": lambda **usage: Float8BlockQuantizer(E4M3, **usage),
    "float8_e4m3_1x128": lambda **usage: Float8BlockQuantizer(
        E4M3, force_pow_2_scales=False, block_scaling_dim=1, **usage
    ),
    "float8_e5m2_1x128_pow2": lambda **usage: Float8BlockQuantizer(E5M2, block_scaling_dim=1, **usage),
    "mxfp6_e2m3": lambda **usage: MXQuantizer("mxfp6_e2m3", **usage),
    "mxfp6_e3m2": lambda **usage: MXQuantizer("fp6_e3m2", **usage),
    "mxfp4_e2m1": lambda **usage: MXQuantizer("mxfp4", **usage),
    "mxint8": lambda **usage: MXQuantizer(torch.int8, **usage),
}
"""Format -> its quantizer."""


def delayed(scale=4.0, amax=0.0, dtype=E4M3, **usage):
    return Float8Quantizer(torch.tensor(scale), torch.tensor(amax), dtype, **usage)


EVERY = STATELESS | {"delayed": delayed, "rotated": lambda **usage: NVFP4Quantizer(with_rht=True, **usage)}


def poison(w):
    """Fill the memory of an MXTensor with values that no correct write leaves there."""
    for part in [*w.components, *(w._rotated.operand.tensors if w._rotated else ())]:
        (part.view(torch.uint8) if part.dtype.itemsize == 1 else part).fill_(0xAB)
    return w


def in_order(quantizers):
    """The quantizers of input, weight and grad."""
    return [*quantizers["scaling_fwd"], *quantizers["scaling_bwd"]]


def all_components(w):
    return components_of(w) + [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in rotated_components(w)]


def rotated_components(w):
    return list(w._rotated.operand.tensors) if w._rotated else []


def same(a, b):
    mine, theirs = all_components(a), all_components(b)
    return len(mine) == len(theirs) and all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


# ------------------------------------------------------------------------------------------ seed 000, frames 2A, 4A, 4B


def test_memory_of_mxfp8_weights():
    """8192x2048: 16 MiB of codes and 0.5 MiB of scales per copy."""
    mib = 2**20
    quantizer = MXFP8Quantizer(E4M3, columnwise=False)
    weight = quantizer.make_empty((8192, 2048), dtype=torch.bfloat16)
    assert weight._rowwise_data.numel() == 16 * mib and weight._rowwise_scale_inv.numel() == mib // 2
    assert weight._columnwise_data is None and weight.nbytes == 16.5 * mib
    quantizer.set_usage(columnwise=True)
    assert quantizer.make_empty((8192, 2048), dtype=torch.bfloat16).nbytes == 33 * mib


def test_properties():
    inp = torch.randn(256, 1024, dtype=torch.bfloat16)
    inp_fp8 = MXFP8Quantizer(fp8_dtype=E4M3)(inp)
    assert inp_fp8._data.shape == (256, 1024) and inp_fp8._data.dtype is torch.uint8
    assert inp_fp8._rowwise_data.shape == (256, 1024) and inp_fp8._rowwise_data.dtype is torch.uint8
    assert inp_fp8._rowwise_scale_inv.shape == (256, 32) and inp_fp8._rowwise_scale_inv.dtype is torch.uint8
    assert inp_fp8._columnwise_data.shape == (1024, 256) and inp_fp8._columnwise_data.dtype is torch.uint8
    assert inp_fp8._columnwise_scale_inv.shape == (1024, 8) and inp_fp8._columnwise_scale_inv.dtype is torch.uint8
    assert inp_fp8.dequantize().dtype is torch.bfloat16
    codes = inp_fp8._rowwise_data.view(torch.float8_e4m3fn).float().unflatten(1, (32, 32))
    values = codes * (2.0 ** (inp_fp8._rowwise_scale_inv.float() - 127)).unsqueeze(-1)
    assert torch.equal(inp_fp8.dequantize(torch.float32), values.flatten(1))
    assert inp_fp8._data.data_ptr() == inp_fp8._rowwise.data.data_ptr(), "a view, no copy"


@pytest.mark.parametrize(
    "transpose", [lambda w: w.transpose(), lambda w: w.t(), lambda w: w.transpose(0, 1), lambda w: w.mT]
)
def test_transpose_swaps_the_copies(transpose):
    """TransformerEngine raises here. The columnwise copy was cast from the same high-precision values."""
    inp = torch.randn(96, 160)
    inp_fp8 = MXFP8Quantizer(E4M3)(inp)
    other = transpose(inp_fp8)
    assert other.shape == (160, 96)
    assert torch.equal(other._rowwise_data, inp_fp8._columnwise_data)
    assert torch.equal(other._columnwise_scale_inv, inp_fp8._rowwise_scale_inv)
    assert torch.equal(other.dequantize(), mx.quantize(inp.t(), "mxfp8").dequantize())


def test_a_transpose_is_traced():
    w = MXFP8Quantizer(E4M3)(torch.randn(64, 96))
    x = torch.randn(5, 64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(x, w):
        return torch.nn.functional.linear(x, w.transpose(0, 1))

    assert torch.equal(product(x, w), torch.nn.functional.linear(x, w.transpose(0, 1)))


# ------------------------------------------------------------------------------------------ seed 001, frame 4


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (R.MXFP8BlockScaling(), MXFP8Quantizer),
        (R.MXFP8BlockScaling(two_dimensional_weights=True, input_scaling="floor"), MXFP8Quantizer),
        (R.Float8BlockScaling(), Float8BlockQuantizer),
        (R.Float8BlockScaling(use_f32_scales=True, fp8_format=R.Format.HYBRID), Float8BlockQuantizer),
        (R.DelayedScaling(), Float8Quantizer),
        (R.Float8CurrentScaling(), Float8CurrentScalingQuantizer),
        (R.Float8CurrentScaling(use_power_2_scales=True), Float8CurrentScalingQuantizer),
        (R.NVFP4BlockScaling(), NVFP4Quantizer),
        (R.MXFP6BlockScaling(), MXQuantizer),
        (R.MXFP4BlockScaling(), MXQuantizer),
        (R.CustomRecipe("float8_row", "mxfp8[1x64]", "mxint8"), MXQuantizer),
    ],
    ids=lambda value: str(value),
)
def test_quantizers_of_a_recipe(recipe, kind):
    quantizers = quantizers_of(recipe, torch.device("cpu"))
    assert list(quantizers) == ["scaling_fwd", "scaling_bwd"]
    assert [len(slots) for slots in quantizers.values()] == [2, 1]
    linear_recipe = recipe.linear_recipe()
    x = torch.randn(70, 90)
    for casts, quantizer in zip(
        (linear_recipe.input, linear_recipe.weight, linear_recipe.grad), in_order(quantizers), strict=True
    ):
        assert isinstance(quantizer, kind)
        assert quantizer.rowwise and quantizer.columnwise
        assert quantizer.cast == casts.rowwise
        assert not isinstance(quantizer, Float8Quantizer) or kind is Float8Quantizer
        if casts.rowwise.rounding is mx.Rounding.NEAREST and kind is not Float8Quantizer:
            plain = mx.quantize(x, casts.rowwise.format, casts.rowwise.scaling)
            assert torch.equal(quantizer(x)._rowwise_data, plain._rowwise_data)


def test_only_the_quantizer_of_delayed_scaling_has_state():
    q = Float8Quantizer(scale=torch.tensor([1.0]), amax=torch.tensor([0.0]), fp8_dtype=E4M3)
    assert torch.equal(q.scale, torch.ones(1)) and torch.equal(q.amax, torch.zeros(1)) and q.fp8_dtype is E4M3
    for make in STATELESS.values():
        before = copy.copy(vars(q := make()))
        q(torch.randn(32, 32))
        assert vars(q) == before and not any(isinstance(value, torch.Tensor) for value in before.values())


@pytest.mark.parametrize(
    ("quantizer", "text"),
    [
        (
            MXFP8Quantizer(E4M3, columnwise=False),
            "MXFP8Quantizer(fp8_dtype=kFloat8E4M3, rowwise=True, columnwise=False)",
        ),
        (
            delayed(2.0, 1.0),
            "Float8Quantizer(scale=2.0, amax=1.0, fp8_dtype=kFloat8E4M3, rowwise=True, columnwise=True)",
        ),
        (
            NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
            "NVFP4Quantizer(fp4_dtype=kFloat4E2M1, with_rht=True, with_2d_quantization=False, "
            "stochastic_rounding=True, rowwise=True, columnwise=True)",
        ),
        (
            Float8BlockQuantizer(E5M2),
            "Float8BlockQuantizer(fp8_dtype=kFloat8E5M2, force_pow_2_scales=True, block_scaling_dim=2, rowwise=True, "
            "columnwise=True)",
        ),
        (
            MXQuantizer("mxfp6", scaling="floor", rounding="stochastic", seed=7),
            "MXQuantizer(format='mxfp6_e2m3', rowwise=True, columnwise=True, scaling='floor', "
            "rounding='stochastic', seed=7)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr_names_the_arguments(quantizer, text):
    assert repr(quantizer) == text


# ------------------------------------------------------------------------------------------ what they make


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("shape", [(96, 160), (33, 50), (1, 7), (3, 40, 20), (0, 32)], ids=str)
@pytest.mark.pairs
def test_the_bits_are_those_of_quantize(name, usage, shape):
    quantizer = STATELESS[name](rowwise=usage != "columnwise", columnwise=usage != "rowwise")
    x = torch.randn(shape, dtype=torch.bfloat16)
    mine, theirs = quantizer(x), mx.quantize(x, name, orientation=usage)
    assert mine.format == theirs.format and mine.orientation == theirs.orientation
    assert mine.dtype is x.dtype and same_bytes(mine, theirs)
    assert same_bytes(quantizer.quantize(x), mine)


@pytest.mark.parametrize("name", STATELESS)
def test_transformer_engines_attributes_decode_to_the_values(name):
    """Codes and scales, tails included."""
    x = torch.randn(40, 50)
    w = STATELESS[name]()(x)
    expected, transposed = (values_in(t, name) for t in (x, x.t()))
    assert torch.equal(decoded(w._rowwise_data, w._rowwise_scale_inv, w), expected)
    columnwise = decoded(w._columnwise_data, w._columnwise_scale_inv, w.t())
    assert torch.equal(columnwise, expected.t() if w.format.square else transposed)


def values_in(x, name):
    return mx.quantize(x.contiguous(), name).dequantize(torch.float32)


def decoded(codes, scale, w):
    fp8 = w.format.element.dtype
    last = None if not w.format.global_scale else w.operands[0].global_scale
    return mx.MXTensor.from_components(
        codes.contiguous().view(fp8), scale.contiguous(), w.format, tuple(w.shape), torch.float32, last
    ).dequantize()


def test_attributes_of_a_missing_copy_are_none():
    x = torch.randn(64, 64)
    row, column = MXFP8Quantizer(E4M3, columnwise=False)(x), MXFP8Quantizer(E4M3, rowwise=False)(x)
    assert row._columnwise_data is None and row._columnwise_scale_inv is None
    assert column._data is None and column._rowwise_data is None and column._rowwise_scale_inv is None
    assert column._columnwise_data.shape == (64, 64)


@pytest.mark.parametrize(
    "name", ["float8_e4m3_tensor", "float8_e4m3_128x128_pow2", "mxfp8_e4m3[32x32]", "nvfp4[16x16]"]
)
def test_one_copy_serves_both_usages_of_a_square_block(name):
    x = torch.randn(200, 136)
    tensors = [STATELESS[name](rowwise=r, columnwise=c)(x) for r, c in ((True, True), (True, False), (False, True))]
    for w in tensors:
        assert same_bytes(w, tensors[0]) and w.orientation is mx.Orientation.BOTH
        assert torch.equal(w._columnwise_scale_inv, w._rowwise_scale_inv.t())
    assert tensors[0]._columnwise_data.shape[0] == 136


def test_a_vector_has_a_rowwise_copy_only():
    x = torch.randn(50)
    for make in (*STATELESS.values(), delayed):
        assert make()(x)._columnwise_data is None
    assert same_bytes(MXFP8Quantizer(E4M3)(x), mx.quantize(x, "mxfp8"))
    only = MXFP8Quantizer(E4M3, rowwise=False)
    assert not only.is_quantizable(x)
    with pytest.raises(ValueError, match="needs two dimensions"):
        only(x)


def test_is_quantizable():
    q = MXFP8Quantizer(E4M3)
    for x in (torch.randn(3, 5), torch.randn(7).half(), torch.randn(2, 3, 4).double(), torch.empty(0, 4)):
        assert q.is_quantizable(x) and isinstance(q(x), mx.MXTensor)
    for x, error in ((torch.ones(3, 3, dtype=torch.int32), TypeError), (torch.tensor(1.0), ValueError)):
        assert not q.is_quantizable(x)
        with pytest.raises(error):
            q(x)


def test_an_mxtensor_is_quantized_by_its_values():
    w = mx.quantize(torch.randn(40, 64), "mxfp8_e5m2")
    assert same_bytes(MXFP8Quantizer(E4M3)(w), mx.quantize(w.dequantize(), "mxfp8", orientation="both"))


@pytest.mark.parametrize(
    "dtype", [E4M3, torch.float8_e4m3fn, "e4m3", "kFloat8E4M3", "float8_e4m3fn", "torch.float8_e4m3fn"]
)
def test_elements_by_any_name(dtype):
    assert DType.of(dtype) is E4M3
    for make in (MXFP8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer):
        assert make(dtype).dtype is E4M3
    assert NVFP4Quantizer(torch.float4_e2m1fn_x2).dtype is DType.kFloat4E2M1


def test_a_format_belongs_to_one_class():
    assert set(QUANTIZER_OF.values()) == {
        MXFP8Quantizer,
        NVFP4Quantizer,
        Float8CurrentScalingQuantizer,
        Float8BlockQuantizer,
    }
    assert len(QUANTIZER_OF) == sum(len(kind.formats) for kind in set(QUANTIZER_OF.values()))
    for row, kind in QUANTIZER_OF.items():
        assert row == mx.get_format(row.name) and kind.of(Cast(row), True, True)(torch.randn(4, 4)).format == row


def test_set_usage_changes_the_given_usages():
    q = MXFP8Quantizer(E4M3)
    q.set_usage(columnwise=False)
    assert (q.rowwise_usage, q.columnwise_usage) == (True, False)
    q.set_usage(rowwise=False, columnwise=True)
    assert q(torch.randn(32, 32)).orientation is mx.Orientation.COLUMNWISE
    with pytest.raises(ValueError, match="both False"):
        q.set_usage(columnwise=False)
    assert (q.rowwise, q.columnwise) == (False, True), "an error changes nothing"


def test_a_copy_has_its_own_usages():
    q = delayed()
    other = q.copy()
    other.set_usage(columnwise=False)
    assert q.columnwise and not other.columnwise and type(other) is type(q)
    other(torch.full((4, 4), 3.0))
    assert q.amax == 3.0, "the same amax"


def test_stochastic_rounding_draws_from_the_generator():
    q = NVFP4Quantizer(stochastic_rounding=True)
    x = torch.randn(64, 64)
    torch.manual_seed(3)
    first = q(x)
    torch.manual_seed(3)
    assert same_bytes(first, q(x)) and not same_bytes(first, q(x))


# ------------------------------------------------------------------------------------------ rotated copies


@pytest.mark.parametrize("shape", [(64, 48), (37, 20)], ids=str)
def test_nvfp4_rotates_the_columnwise_copy(shape):
    x = torch.randn(shape)
    w = NVFP4Quantizer(with_rht=True)(x)
    transposed = mx.quantize(rotated(x.t(), RANDOM_SIGNS), "nvfp4")
    assert same_bytes(w, mx.quantize(x, "nvfp4")), "the rowwise copy is as ever"
    assert torch.equal(w._columnwise_data, transposed._rowwise_data)
    assert torch.equal(w._columnwise_scale_inv, transposed._rowwise_scale_inv)


def test_the_rotation_without_random_signs():
    """TransformerEngine's switch: H16 / 4 alone, the Hadamard matrix of Sylvester's construction."""
    x = torch.randn(64, 48)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    hadamard = torch.kron(torch.kron(torch.kron(two, two), two), two) / 4
    groups = (x.t().reshape(48, 4, 16) @ hadamard).reshape(48, 64).bfloat16()
    quantizer = NVFP4Quantizer(with_rht=True, with_random_sign_mask=False)
    w, expected = quantizer(x), mx.quantize(groups, "nvfp4")
    assert torch.equal(w._columnwise_data, expected._rowwise_data)
    assert torch.equal(w._columnwise_scale_inv, expected._rowwise_scale_inv)
    assert w._rotated.signs == 0 and "signs=0" in repr(quantizer)
    y = te.general_gemm(w, quantizer(x), layout="NT")[0]
    assert (y - x.t() @ x).norm() < 0.3 * (x.t() @ x).norm()


def test_results_of_torch_ops_have_no_rotated_copy():
    """A rotated copy has other values, so views of another shape have the rowwise copy only."""
    x = torch.randn(64, 48)
    w = NVFP4Quantizer(with_rht=True)(x)
    plain = mx.quantize(x, "nvfp4")
    assert w.orientation is mx.Orientation.ROWWISE and w.t()._rotated is None
    g = torch.randn(5, 64)
    assert torch.equal(g @ w, g @ plain)
    assert torch.equal(w.t().dequantize(), plain.dequantize().t())


def test_a_rotated_copy_survives_the_gradient():
    x = torch.randn(32, 32, requires_grad=True)
    assert NVFP4Quantizer(with_rht=True)(x)._rotated is not None


# ------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(64, 96), (33, 50), (0, 32), (2, 20, 40)], ids=str)
def test_make_empty_then_update(name, shape):
    q = EVERY[name]()
    x = torch.randn(shape, dtype=torch.bfloat16)
    w = poison(q.make_empty(shape, dtype=torch.bfloat16))
    assert w.shape == shape and w.dtype is torch.bfloat16 and w.device == x.device and not w.requires_grad
    memory = [part.data_ptr() for part in w.components]
    q.update_quantized(x, w)
    assert same(w, q(x)) and [part.data_ptr() for part in w.components] == memory


@pytest.mark.parametrize("name", EVERY)
def test_out_is_written_and_returned(name):
    q = EVERY[name]()
    out = poison(q.make_empty((40, 64)))
    x = torch.randn(40, 64)
    assert q.quantize(x, out=out) is out
    assert same(out, q(x))


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("operands", ["rowwise", "columnwise", "both"])
def test_an_update_writes_every_copy(name, operands):
    """Whatever usages the quantizer has: a copy that is not written would have the old values."""
    q = STATELESS[name](columnwise=False)
    x = torch.randn(64, 96)
    w = mx.quantize(torch.randn(64, 96), name, orientation=operands)
    q.update_quantized(x, w)
    assert same_bytes(w, mx.quantize(x, name, orientation=operands))


def test_an_update_is_seen_through_aliases():
    parameter = nn.Parameter(mx.quantize(torch.randn(64, 96), "mxfp8", orientation="both"))
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter
    transposed, version = parameter.detach().t(), parameter._version
    x = torch.randn(64, 96)
    assert MXFP8Quantizer(E4M3).update_quantized(x, parameter) is parameter is module.weight
    assert parameter.requires_grad and parameter._version > version
    assert torch.equal(transposed.dequantize(), mx.quantize(x.t(), "mxfp8").dequantize())
    other = torch.randn(96, 64)
    MXFP8Quantizer(E4M3).update_quantized(other, transposed)
    assert same_bytes(parameter, mx.quantize(other.t(), "mxfp8", orientation="both"))


@pytest.mark.parametrize("name", ["float8_e4m3_tensor", "mxfp8_e4m3[32x32]", "nvfp4[16x16]"])
def test_a_transposed_square_tensor_is_written_from_the_values(name):
    """The values are rounded once, and not a second time for the transposed copy."""
    x = torch.randn(48, 80)
    w = mx.quantize(torch.randn(80, 48), name)
    STATELESS[name]().update_quantized(x, w.t())
    assert torch.equal(w.dequantize(), mx.quantize(x.t(), name).dequantize())


def test_an_update_uses_the_scale_rule_of_the_quantizer():
    x = torch.randn(32, 64) * 1000
    w = mx.quantize(torch.randn(32, 64), "mxfp8", scaling="floor")
    assert same_bytes(MXFP8Quantizer(E4M3).update_quantized(x, w), mx.quantize(x, "mxfp8"))


def test_make_empty_takes_a_device_and_requires_grad():
    w = MXFP8Quantizer(E4M3).make_empty([8, 32], device="meta", requires_grad=True)
    assert w.device.type == "meta" and w.requires_grad and w.is_leaf and w.dtype is torch.float32
    q = Float8CurrentScalingQuantizer(E4M3, "meta")
    assert q.make_empty((4, 4)).device.type == "meta" and q.make_empty((4, 4), device="cpu").device.type == "cpu"


# ------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_passes_unchanged(name):
    x = torch.randn(48, 64, requires_grad=True)
    w = EVERY[name]()(x)
    assert w.requires_grad and not w.is_leaf
    upstream = torch.randn(48, 64)
    w.dequantize().backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_without_gradients_the_result_has_none():
    x = torch.randn(32, 32, requires_grad=True)
    q = MXFP8Quantizer(E4M3)
    with torch.no_grad():
        assert not q(x).requires_grad
    assert not q(x.detach()).requires_grad
    assert not q.quantize(x, out=q.make_empty((32, 32))).requires_grad


# ------------------------------------------------------------------------------------------ delayed scaling


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-6, 1e4])
def test_values_are_multiplied_by_the_scale_and_saturate(dtype, scale):
    x = torch.randn(33, 50)
    q = delayed(scale, dtype=dtype)
    w = q(x)
    scaled = (x * torch.tensor(scale)).numpy()
    codes = oracle.element_codes(scaled, oracle.ELEMENTS[dtype.value])
    assert torch.equal(w._data, torch.from_numpy(codes))
    assert torch.equal(w._rowwise_scale_inv, torch.full((1, 1), scale).reciprocal())
    assert torch.equal(w._columnwise_data, w._data.t())


def test_amax_records_the_largest_so_far():
    q = delayed(1.0, 0.0)
    seen = 0.0
    for _ in range(4):
        x = torch.randn(20, 30)
        q(x)
        seen = max(seen, x.abs().max().item())
        assert q.amax.item() == seen
    q(torch.zeros(4, 4))
    q(torch.empty(0, 4))
    assert q.amax.item() == seen
    assert q.scale.item() == 1.0


def test_the_tensors_given_are_read_and_written():
    scale, amax = torch.ones(1), torch.zeros(1)
    q = Float8Quantizer(scale, amax, E4M3)
    scale.fill_(2.0)
    assert q(torch.full((2, 2), 3.0))._rowwise_scale_inv.item() == 0.5
    assert amax.item() == 3.0
    assert q.update_quantized(torch.full((2, 2), 5.0), q.make_empty((2, 2))).dequantize()[0, 0] == 5.0
    assert amax.item() == 5.0


def test_each_value_that_is_not_finite_becomes_nan():
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 1e30]])
    q = delayed(1e10)
    values = q(x).dequantize()
    assert torch.isnan(values).tolist() == [[False, True], [True, False]]
    assert values[1, 1] == torch.tensor(448.0) * torch.tensor(1e10).reciprocal() and q.amax.isnan()


def test_quantizers_of_a_delayed_state():
    linear_recipe = R.DelayedScaling().linear_recipe()
    state = DelayedState(linear_recipe, torch.device("cpu"))
    quantizers = in_order(quantizers_of(R.DelayedScaling(), torch.device("cpu"), state))
    values = [torch.randn(40, 64) * 10**i for i in range(3)]
    for q, x in zip(quantizers, values, strict=True):
        assert isinstance(q, Float8Quantizer) and q.scale == 1 and q.amax == 0
        q(x)
    assert torch.equal(state.record, torch.stack([x.abs().max() for x in values]))
    state.step()
    for i, (q, x) in enumerate(zip(quantizers, values, strict=True)):
        assert torch.equal(q.scale, state.scale[i]) and q.amax == 0, "the next step is seen at once"
        record = torch.zeros(())
        layers = cast_pair(x, q.cast, Form.CODES, None, torch.bfloat16, state.amax[i], record)[0]
        assert torch.equal(q(x)._data, layers.data.view(torch.uint8)), "the bits of the layer's own cast"
        assert q.amax == record and repr(q).startswith("Float8Quantizer(scale=")
    assert quantizers[2].dtype is E5M2


def test_a_deep_copy_of_a_layer_has_its_own_state():
    state = DelayedState(R.DelayedScaling().linear_recipe(), torch.device("cpu"))
    layer = {"state": state, "quantizers": in_order(quantizers_of(R.DelayedScaling(), "cpu", state))}
    other = copy.deepcopy(layer)
    other["quantizers"][0](torch.full((2, 2), 5.0))
    assert other["state"].record[0] == 5 and state.record[0] == 0


# ------------------------------------------------------------------------------------------ for a recipe


def test_tensors_in_high_precision_have_no_quantizer():
    quantizers = quantizers_of(R.MXFP8BlockScaling(high_precision_backward=True), "cpu")
    assert quantizers["scaling_bwd"] == [None]
    assert [(q.rowwise, q.columnwise) for q in quantizers["scaling_fwd"]] == [(True, False)] * 2
    quantizers = quantizers_of(R.CustomRecipe(None, "mxfp8", None), "cpu")
    assert quantizers["scaling_fwd"][0] is None and isinstance(quantizers["scaling_fwd"][1], MXFP8Quantizer)


def test_the_quantizer_of_a_tensor_with_two_casts_makes_the_rowwise_one():
    e4m3, e5m2 = Cast.of("mxfp8_e4m3"), Cast.of("mxfp8_e5m2")
    (both, other), (last,) = quantizers_of(
        R.CustomRecipe(TensorCasts(e4m3, e5m2, signs=5), TensorCasts(None, e5m2), TensorCasts(None, e5m2, signs=5)),
        "cpu",
    ).values()
    assert (both.dtype, both.rowwise, both.columnwise) == (E4M3, True, False)
    assert (other.dtype, other.rowwise, other.columnwise) == (E5M2, False, True)
    assert (last.dtype, last.rowwise, last.columnwise, last.signs) == (E5M2, False, True, 5), "a rotated copy alone"


def test_nvfp4_quantizers_have_the_options_of_the_recipe():
    (inp, weight), (grad,) = quantizers_of(R.NVFP4BlockScaling(), "cpu").values()
    assert inp.signs == RANDOM_SIGNS == grad.signs and weight.signs is None
    assert weight.cast.format.block == (16, 16) and grad.cast.rounding is mx.Rounding.STOCHASTIC
    assert isinstance(inp, Quantizer) and replace(inp.cast) == Cast.of("nvfp4")


# ------------------------------------------------------------------------------------------ errors


ERRORS = [
    (lambda: MXFP8Quantizer(E4M3, rowwise=False, columnwise=False), ValueError, "both False"),
    (lambda: MXFP8Quantizer(DType.kFloat4E2M1), ValueError, "DType.kFloat8E4M3 or DType.kFloat8E5M2"),
    (lambda: NVFP4Quantizer("e4m3"), ValueError, "DType.kFloat4E2M1"),
    (lambda: DType.of(torch.int8), ValueError, "torch.int8"),
    (lambda: MXQuantizer("mxfp7"), ValueError, "mxfp7"),
    (lambda: NVFP4Quantizer(with_rht=True, with_2d_quantization=True), ValueError, "use only one of them"),
    (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=3), ValueError, "block_scaling_dim is 3"),
    (lambda: Float8Quantizer(1.0, torch.zeros(1), E4M3), TypeError, "scale is 1.0; pass a torch.Tensor"),
    (lambda: Float8Quantizer(torch.ones(1), torch.zeros(1).half(), E4M3), TypeError, "amax must be a float32 tensor"),
    (lambda: Float8Quantizer(torch.ones(2), torch.zeros(1), E4M3), ValueError, "must be one value"),
    (lambda: delayed()(torch.empty(4, 4, device="meta")), ValueError, "scale is on cpu, the values on meta"),
    (lambda: MXFP8Quantizer(E4M3).make_empty((2, 2), dtype=torch.int32), TypeError, "int32"),
    (lambda: MXFP8Quantizer(E4M3).make_empty(()), ValueError, "0-dimensional"),
    (lambda: MXFP8Quantizer(E4M3).update_quantized(torch.ones(2, 2), torch.ones(2, 2)), TypeError, "make_empty"),
    (
        lambda: MXFP8Quantizer(E4M3).update_quantized(torch.ones(2, 2), mx.quantize(torch.ones(2, 2), "nvfp4")),
        ValueError,
        "mxfp8_e4m3 values of shape",
    ),
    (
        lambda: MXFP8Quantizer(E4M3).update_quantized(torch.ones(2, 3), mx.quantize(torch.ones(2, 2), "mxfp8")),
        ValueError,
        "make_empty",
    ),
    (
        lambda: NVFP4Quantizer(with_rht=True).update_quantized(torch.ones(2, 2), NVFP4Quantizer()(torch.ones(2, 2))),
        ValueError,
        "rotated differently",
    ),
    (
        lambda: NVFP4Quantizer().update_quantized(torch.ones(2, 2), NVFP4Quantizer(with_rht=True)(torch.ones(2, 2))),
        ValueError,
        "rotated differently",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors_name_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_update_changes_nothing():
    w = mx.quantize(torch.randn(32, 32), "mxfp8")
    before = [part.clone() for part in components_of(w)]
    q = delayed()
    for bad in (lambda: MXFP8Quantizer(E5M2).update_quantized(torch.ones(32, 32), w), lambda: q.update_quantized(w, w)):
        with pytest.raises(ValueError):
            bad()
    assert all(torch.equal(a, b) for a, b in zip(before, components_of(w), strict=True)) and q.amax == 0
