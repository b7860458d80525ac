"""Codes, scales and other attributes of an MXTensor, read inside ``torch.compile(fullgraph=True)``; dynamic shapes."""

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


ATTRIBUTES = {
    "rowwise.data": lambda w: w.rowwise.data,
    "rowwise.scale": lambda w: w.rowwise.scale,
    "rowwise.global_scale": lambda w: w.rowwise.global_scale,
    "rowwise.tensors": lambda w: w.rowwise.tensors,
    "rowwise.scale_view": lambda w: w.rowwise.scale_view.view(torch.uint8),
    "columnwise.data": lambda w: w.columnwise.data,
    "columnwise.scale": lambda w: w.columnwise.scale,
    "operands": lambda w: [t for operand in w.operands for t in operand.tensors],
    "components": lambda w: w.components,
    "_data": lambda w: w._data,
    "_rowwise_data": lambda w: w._rowwise_data,
    "_rowwise_scale_inv": lambda w: w._rowwise_scale_inv,
    "_columnwise_data": lambda w: w._columnwise_data,
    "_columnwise_scale_inv": lambda w: w._columnwise_scale_inv,
    "recipe": lambda w: w.rowwise.scale + w.recipe.stored.format.block[1],
    "format": lambda w: w.rowwise.scale + w.format.block[0],
    "orientation": lambda w: w.components[0] if w.orientation is mx.Orientation.BOTH else w.components[1],
    "nbytes": lambda w: w.rowwise.scale + w.nbytes + int(w.bits_per_value) + w.rowwise.nbytes,
    "transposed": lambda w: w.t().columnwise.data,
    "detached": lambda w: w.detach().rowwise.data,
    "rows": lambda w: w[32:].rowwise.scale,
    "other dtype": lambda w: w.with_dtype(torch.bfloat16).rowwise.data,
}


def _as_tuple(out):
    out = out if isinstance(out, (tuple, list)) else (out,)
    return [t if t is None or t.dtype.itemsize > 1 else t.view(torch.uint8) for t in out]


def _check_equal(got, expected):
    got, expected = _as_tuple(got), _as_tuple(expected)
    assert len(got) == len(expected) > 0
    for mine, eager in zip(got, expected, strict=True):
        assert (mine is None) == (eager is None)
        if mine is not None:
            assert mine.dtype is eager.dtype and torch.equal(mine, eager)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp8[32x32]"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_in_a_graph(name, format):
    x = torch.randn(64, 96)

    def quantized_inside(x):
        return ATTRIBUTES[name](mx.quantize(x, format, orientation="both"))

    expected = quantized_inside(x)
    _check_equal(torch.compile(quantized_inside, fullgraph=True, backend="aot_eager")(x), expected)
    w = mx.quantize(x, format, orientation="both")
    _check_equal(torch.compile(ATTRIBUTES[name], fullgraph=True, backend="aot_eager")(w), expected)


MAKERS = {
    "to_mx": lambda x: mx.MXTensor.to_mx(x),
    "to_mxfp8": lambda x: mx.to_mxfp8(x),
    "vector": lambda x: mx.quantize(x.flatten(), "mxfp4"),
    "columnwise": lambda x: mx.quantize(x, "mxfp6", orientation="columnwise"),
    "stack": lambda x: mx.quantize(x.view(4, 16, 96), "float8_e4m3_tensor", orientation="both"),
    "requantized": lambda x: mx.quantize(mx.quantize(x, "mxfp8"), "nvfp4"),
    "from_components": lambda x: mx.MXTensor.from_components(
        x.abs().to(torch.uint8), x[:, :3].abs().to(torch.uint8), "mxfp8"
    ),
    "MXFP8Quantizer": lambda x: te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x),
}


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("name", MAKERS)
def test_every_way_to_make_one(name):
    def components(x):
        w = MAKERS[name](x)
        return [t for operand in (w.rowwise, w.columnwise) if operand is not None for t in operand.tensors]

    x = torch.randn(64, 96)
    _check_equal(torch.compile(components, fullgraph=True, backend="aot_eager")(x), components(x))


@pytest.mark.exhaustive
def test_attributes_with_dynamic_shapes_and_inductor():
    def codes(x):
        w = mx.quantize(x, "mxfp8", orientation="both")
        return w.rowwise.data.view(torch.uint8), w.columnwise.scale, w.rowwise.shape[0] * x

    compiled = torch.compile(codes, fullgraph=True)
    for rows in (32, 64, 96):
        x = torch.randn(rows, 64)
        _check_equal(compiled(x), codes(x))


def test_a_tensor_and_its_codes_leave_one_graph():
    def both(x):
        w = mx.quantize(x, "mxfp8")
        return w, w.rowwise.data, x @ w.t()

    x = torch.randn(64, 64)
    w, codes, y = torch.compile(both, fullgraph=True, backend="aot_eager")(x)
    _check_equal(w.rowwise.data, mx.quantize(x, "mxfp8").rowwise.data)
    _check_equal(codes, w.rowwise.data)
    torch.testing.assert_close(y, x @ mx.quantize(x, "mxfp8").t())


# ---------------------------------------------------------------------------------------------- dynamic shapes


SHAPES = [(64, 96), (33, 50), (1, 32)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", ["mxfp8", "mxfp6_e2m3", "mxint8", "nvfp4", "float8_tensor", "mxfp8[32x32]"])
def test_quantize_with_dynamic_shapes(format):
    def quantized(x):
        w = mx.quantize(x * 2, format, orientation="both")
        return w, w.dequantize(), x @ w.t()

    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in SHAPES:
        x = torch.randn(shape)
        (w, *rest), (expected, *values) = compiled(x), quantized(x)
        _check_equal(w.components, expected.components)
        torch.testing.assert_close(rest, values)


def test_quantize_with_marked_dimensions():
    compiled = torch.compile(lambda x: mx.quantize(x, "mxfp8"), backend="aot_eager", fullgraph=True)
    for shape in SHAPES[:2]:
        x = torch.randn(shape)
        torch._dynamo.mark_dynamic(x, 0), torch._dynamo.mark_dynamic(x, 1)
        _check_equal(compiled(x).components, mx.quantize(x, "mxfp8").components)


@pytest.mark.exhaustive
def test_a_second_format_is_not_an_argument_of_the_graph():
    def scale(x, format):
        return mx.quantize(x, format).rowwise.scale

    compiled, x = torch.compile(scale, backend="aot_eager", fullgraph=True), torch.randn(64, 96)
    for format in ("mxfp8", "mxfp4", "mxfp6", "nvfp4", "float8_row"):
        _check_equal(compiled(x, format), scale(x, format))


@pytest.mark.exhaustive
def test_amax_epsilon_is_a_constant():
    quantizer = te.Float8CurrentScalingQuantizer(amax_epsilon=1e-3)
    compiled = torch.compile(quantizer, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in SHAPES:
        x = torch.randn(shape) * 1e-5
        _check_equal(compiled(x).components, quantizer(x).components)
        assert compiled(x).recipe == quantizer(x).recipe


WAYS = {
    "format": (mx.get_format("mxfp4"), lambda x, format: mx.quantize(x, format)),
    "quantizer": (te.NVFP4Quantizer(with_rht=True), lambda x, quantizer: quantizer(x)),
    "format of another": (mx.quantize(torch.randn(32, 32), "nvfp4"), lambda x, w: mx.quantize(x, w.format)),
    "seed": (3, lambda x, seed: mx.quantize(x, "mxfp8", rounding="stochastic", seed=seed)),
}


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_an_argument_are_constants(way):
    given, quantized = WAYS[way]
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in SHAPES[:2]:
        x = torch.randn(shape)
        w, expected = compiled(x, given), quantized(x, given)
        _check_equal(w.components, expected.components)
        assert w.recipe == expected.recipe and w.format == expected.format
