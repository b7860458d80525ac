"""general_gemm: three layouts of quantized and plain matrices, output quantization, accumulation, bias and gelu."""

import math

import pytest
import torch

import mxtensor as mx
from mxtensor.recipe import NVFP4BlockScaling
from mxtensor.te.general_gemm import general_gemm, get_workspace
from mxtensor.te.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    MXQuantizer,
    NVFP4Quantizer,
    quantizers_of,
)
from mxtensor.training.linear import Options, linear
from tests.helpers.compare import assert_same_product, relative_error, same_bytes

E4M3 = DType.kFloat8E4M3


def float8():
    return Float8Quantizer(torch.ones(1).squeeze(), torch.ones(1).squeeze(), E4M3)


def current():
    return Float8CurrentScalingQuantizer(fp8_dtype=E4M3, device="cpu")


def mxfp8():
    return MXFP8Quantizer(fp8_dtype=E4M3)


INPUTS = {"current": current, "mxfp8": mxfp8}
OUTPUTS = {
    "current": current,
    "mxfp8": mxfp8,
    "delayed": float8,
    "nvfp4": NVFP4Quantizer,
    "nvfp4 rotated": lambda: NVFP4Quantizer(with_rht=True),
    "block": Float8BlockQuantizer,
    "mxfp6": lambda: MXQuantizer("mxfp6"),
}
GEMM_OPERANDS = {
    **INPUTS,
    "block 1x128": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block": Float8BlockQuantizer,
    "nvfp4": NVFP4Quantizer,
    "mxfp4": lambda: MXQuantizer("mxfp4"),
    "plain": lambda: lambda x: x,
}
PRODUCTS = {
    "TN": lambda a, b: b @ a.t(),
    "NN": lambda a, b: b @ a,
    "NT": lambda a, b: b.t() @ a,
}
SIDES = {"TN": ("rowwise", "rowwise"), "NN": ("columnwise", "rowwise"), "NT": ("columnwise", "columnwise")}


def shapes(layout, m=37, n=50, k=70):
    return {"TN": ((n, k), (m, k)), "NN": ((n, k), (m, n)), "NT": ((m, k), (m, n))}[layout]


def values(t, side):
    """The dequantized values of this copy."""
    if not isinstance(t, mx.MXTensor):
        return t
    return (
        t.t().replace(t._columnwise, None).dequantize(torch.float32).t() if columns(t, side) else t.float().dequantize()
    )


def columns(t, side):
    return side == "columnwise" and t._columnwise is not None


def gemm_operands(layout, make, dtype=torch.float32):
    return [make()(torch.randn(shape, dtype=dtype)) for shape in shapes(layout)]


# ------------------------------------------------------------------------------------------ seed 000


@pytest.mark.parametrize("n", [32])
@pytest.mark.parametrize("datatype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("input_quantizer", INPUTS)
@pytest.mark.parametrize("out_quantizer", OUTPUTS)
def test_quantizing_inside_the_product_equals_quantizing_after_it(n, datatype, input_quantizer, out_quantizer):
    """Bitwise."""
    input_quantizer, out_quantizer = INPUTS[input_quantizer](), OUTPUTS[out_quantizer]()
    inp_fp8 = input_quantizer(torch.randn(n, n, dtype=datatype))
    weight_fp8 = input_quantizer(torch.randn(n, n, dtype=datatype))
    quantized_out, *_ = general_gemm(
        weight_fp8,
        inp_fp8,
        get_workspace(),
        torch.float32,
        quantization_params=out_quantizer,
        bias=None,
        use_split_accumulator=False,
    )
    out, *_ = general_gemm(
        weight_fp8,
        inp_fp8,
        get_workspace(),
        torch.float32,
        quantization_params=None,
        bias=None,
        use_split_accumulator=False,
    )
    expected_quantized_out = out_quantizer(out)
    assert out.dtype is torch.float32 and type(out) is torch.Tensor
    torch.testing.assert_close(expected_quantized_out.dequantize(), quantized_out.dequantize())
    assert same_bytes(quantized_out, expected_quantized_out)
    assert torch.equal(quantized_out._columnwise_data, expected_quantized_out._columnwise_data)
    assert_same_product(out, PRODUCTS["TN"], weight_fp8.dequantize(torch.float32), inp_fp8.dequantize(torch.float32))


def test_a_result_in_high_precision():
    inp, weight = torch.randn(40, 64), torch.randn(48, 64)
    quantizer = MXFP8Quantizer(fp8_dtype=E4M3)
    out, *rest = general_gemm(
        quantizer(weight), quantizer(inp), get_workspace(), torch.float32, quantization_params=None, bias=None
    )
    assert out.dtype is torch.float32 and rest == [None, None, None]
    assert relative_error(out, inp @ weight.t()) < 0.04


# ------------------------------------------------------------------------------------------ the three products


@pytest.mark.parametrize("layout", PRODUCTS)
@pytest.mark.parametrize("make", GEMM_OPERANDS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layout_multiplies_its_copies(layout, make, out_dtype):
    a, b = gemm_operands(layout, GEMM_OPERANDS[make])
    sides = SIDES[layout]
    out = general_gemm(a, b, out_dtype=out_dtype, layout=layout).out
    exact = [values(t, side) for t, side in zip((a, b), sides, strict=True)]
    assert out.dtype is out_dtype
    assert_same_product(out, PRODUCTS[layout], *exact)


@pytest.mark.parametrize("layout", PRODUCTS)
@pytest.mark.parametrize("plain", ["A", "B"])
def test_one_operand_may_be_plain(layout, plain):
    a, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes(layout))
    a, b = (a, mxfp8()(b)) if plain == "A" else (mxfp8()(a), b)
    out = general_gemm(a, b, layout=layout, out_dtype=torch.float32).out
    exact = [values(t, side).float() for t, side in zip((a, b), SIDES[layout], strict=True)]
    assert_same_product(out, PRODUCTS[layout], *exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_in_the_dtype_of_b(dtype):
    a, b = (mxfp8()(torch.randn(32, 32, dtype=d)) for d in (torch.float32, dtype))
    assert general_gemm(a, b).out.dtype is dtype


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("make", GEMM_OPERANDS)
def test_leading_dimensions_of_b_are_those_of_the_result(layout, make):
    a_shape, b_shape = shapes(layout)
    q = GEMM_OPERANDS[make]()
    a, b = q(torch.randn(a_shape)), q(torch.randn(3, 5, b_shape[1]))
    out = general_gemm(a, b, layout=layout).out
    rows = b if isinstance(b, torch.Tensor) and not isinstance(b, mx.MXTensor) else b.dequantize()
    exact = values(a, SIDES[layout][0])
    assert out.shape[:2] == (3, 5)
    assert_same_product(out.flatten(0, 1), PRODUCTS[layout], exact, rows.flatten(0, 1))


@pytest.mark.parametrize("shape", [(0, 5, 70), (3, 0, 70)], ids=str)
def test_leading_dimensions_may_be_empty(shape):
    q = mxfp8()
    assert general_gemm(q(torch.randn(50, 70)), q(torch.randn(shape))).out.shape == (*shape[:2], 50)


def test_a_vector_is_one_row():
    a, b = mxfp8()(torch.randn(20, 64)), mxfp8()(torch.randn(64))
    assert_same_product(general_gemm(a, b).out, lambda a, b: b @ a.t(), a.dequantize(), b.dequantize())


@pytest.mark.parametrize("layout", PRODUCTS)
def test_empty_matrices(layout):
    a, b = (mxfp8()(torch.randn(shape)) for shape in shapes(layout, m=0))
    out = general_gemm(a, b, layout=layout).out
    assert torch.equal(out, PRODUCTS[layout](*(torch.randn(shape) for shape in shapes(layout, m=0))))


def test_the_layouts_equal_the_products_of_a_linear_layer():
    """Bitwise, for fprop, dgrad and wgrad of NVFP4, whose wgrad multiplies rotated copies."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    x, w = torch.randn(37, 70, requires_grad=True), torch.randn(50, 70, requires_grad=True)
    g = torch.randn(37, 50)
    y = linear(x, w, None, Options(recipe.linear_recipe()))
    y.backward(g)
    (q_x, q_w), (q_g,) = quantizers_of(recipe, x.device).values()
    xq, wq, gq = q_x(x.detach()), q_w(w.detach()), q_g(g)
    assert torch.equal(general_gemm(wq, xq).out, y)
    assert torch.equal(general_gemm(wq, gq, layout="NN").out, x.grad)
    assert torch.equal(general_gemm(xq, gq, layout="NT").out, w.grad)
    assert relative_error(w.grad, g.t() @ x.detach()) < 0.2


def test_explain_names_the_product():
    with mx.explain() as log:
        general_gemm(mxfp8()(torch.randn(32, 32)), torch.randn(32, 32), layout="NN")
    assert "general_gemm NN" in log.table()


# ------------------------------------------------------------------------------------------ what is added


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_added_before_rounding(out_dtype, bias_dtype):
    a, b = gemm_operands("TN", mxfp8)
    bias = torch.randn(50, dtype=bias_dtype)
    out = general_gemm(a, b, out_dtype=out_dtype, bias=bias).out

    def product(a, b, bias):
        return b @ a.t() + bias

    assert_same_product(out, product, a.dequantize(), b.dequantize(), bias)


@pytest.mark.parametrize("make", ["mxfp8", "plain", "nvfp4"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [None, 0.5, 0.0])
def test_accumulation_into_out(make, out_dtype, beta):
    a, b = gemm_operands("NT", GEMM_OPERANDS[make])
    old = torch.randn(50, 70).to(out_dtype)
    out = old.clone()
    result = general_gemm(a, b, layout="NT", out=out, accumulate=True, beta=beta, alpha=2.0)
    assert result.out is out

    def product(a, b, old):
        return 2 * (b.t() @ a) + (1.0 if beta is None else beta) * old

    assert_same_product(out, product, values(a, "columnwise"), values(b, "columnwise"), old)


def test_microbatches_add_up_in_main_grad():
    main_grad = torch.zeros(50, 70)
    steps = [gemm_operands("NT", mxfp8, torch.bfloat16) for _ in range(3)]
    for x, g in steps:
        general_gemm(x, g, out_dtype=torch.float32, layout="NT", out=main_grad, accumulate=True, grad=True)
    total = sum(values(g, "columnwise").double().t() @ values(x, "columnwise").double() for x, g in steps)
    assert relative_error(main_grad, total) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_overwritten_without_accumulation(dtype):
    a, b = gemm_operands("TN", mxfp8)
    out = torch.full((37, 50), float("nan"), dtype=dtype)
    address = out.data_ptr()
    result = general_gemm(a, b, out=out)
    assert result.out is out and out.data_ptr() == address
    assert torch.equal(out, general_gemm(a, b, out_dtype=dtype).out)


@pytest.mark.parametrize("quantizer", OUTPUTS)
def test_a_quantized_out_is_written_in_place(quantizer):
    quantizer = OUTPUTS[quantizer]()
    a, b = gemm_operands("TN", mxfp8)
    out = quantizer.make_empty((37, 50), dtype=torch.bfloat16)
    for part in out.components:
        (part.view(torch.uint8) if part.dtype.itemsize == 1 else part).fill_(0xAB)
    assert general_gemm(a, b, out=out, quantization_params=quantizer).out is out
    assert same_bytes(out, quantizer(general_gemm(a, b, out_dtype=torch.bfloat16).out))


# ------------------------------------------------------------------------------------------ gradients and gelu


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_the_bias_gradient_sums_the_rows_of_b(quantized, bias_dtype):
    x, g = torch.randn(37, 70), torch.randn(37, 50)
    a, b = (mxfp8()(x), mxfp8()(g)) if quantized else (mxfp8()(x), g)
    bias = torch.full((50,), float("nan"), dtype=bias_dtype)
    result = general_gemm(a, b, layout="NT", grad=True, bias=bias)
    expected = (b.dequantize() if quantized else b).double().sum(0)
    assert result.bias_grad.dtype is bias_dtype
    torch.testing.assert_close(result.bias_grad, expected.to(bias_dtype))
    assert torch.equal(result.out, general_gemm(a, b, layout="NT").out), "the bias itself is not added"


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_gelu_returns_its_input_for_the_derivative(out_dtype):
    a, b = gemm_operands("TN", mxfp8)
    bias = torch.randn(50)
    exact = b.dequantize().double() @ a.dequantize().double().t() + bias
    result = general_gemm(a, b, out_dtype=out_dtype, gelu=True, bias=bias)
    torch.testing.assert_close(result.gelu_input, exact.to(out_dtype))
    torch.testing.assert_close(result.out, torch.nn.functional.gelu(exact, approximate="tanh").to(out_dtype))
    saved = torch.full((37, 50), float("nan"), dtype=out_dtype)
    reused = general_gemm(a, b, out_dtype=out_dtype, gelu=True, gelu_in=saved, bias=bias)
    assert reused.gelu_input is saved and torch.equal(saved, result.gelu_input) and torch.equal(reused.out, result.out)


def test_gelu_in_the_backward_product():
    w, g = gemm_operands("NN", mxfp8)
    z = torch.randn(37, 70)
    result = general_gemm(w, g, layout="NN", gelu=True, gelu_in=z, grad=True)
    leaf = z.double().requires_grad_()
    upstream = g.dequantize().double() @ values(w, "columnwise").double()
    torch.nn.functional.gelu(leaf, approximate="tanh").backward(upstream)
    torch.testing.assert_close(result.out, leaf.grad.float())
    assert result.gelu_input is z


def test_the_result_carries_no_gradient():
    a, b = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    assert not general_gemm(mxfp8()(a), mxfp8()(b)).out.requires_grad


def test_the_workspace_is_empty():
    assert get_workspace().numel() == 0 and math.prod(get_workspace().shape) == 0


# ------------------------------------------------------------------------------------------ errors


def q(*shape, **usage):
    return MXFP8Quantizer(E4M3, **usage)(torch.ones(shape))


ONES = torch.ones
ERRORS = [
    (lambda: general_gemm(ONES(2, 2), ONES(2, 2), layout="TT"), ValueError, "unknown layout 'TT'; choose one of TN"),
    (lambda: general_gemm(ONES(2, 2).int(), ONES(2, 2)), TypeError, "A is int32"),
    (lambda: general_gemm(q(2, 3), q(2, 4)), ValueError, "do not fit; TN is"),
    (lambda: general_gemm(q(2, 3), q(2, 3), layout="NN"), ValueError, "do not fit; NN is"),
    (lambda: general_gemm(q(2, 3), q(3, 3), layout="NT"), ValueError, "do not fit; NT is"),
    (lambda: general_gemm(q(4, 4, columnwise=False), q(4, 4), layout="NN"), ValueError, r"set_usage\(columnwise=True"),
    (lambda: general_gemm(q(4, 4), q(4, 4, columnwise=False), layout="NT"), ValueError, r"set_usage\(columnwise=True"),
    (lambda: general_gemm(q(4, 4), q(4, 4, rowwise=False)), ValueError, r"set_usage\(rowwise=True"),
    (lambda: general_gemm(q(2, 4, 4), q(4, 4)), ValueError, "flatten it before"),
    (lambda: general_gemm(q(4, 4), q(2, 4, 4), layout="NT"), ValueError, "flatten it before"),
    (lambda: general_gemm(q(4, 4), ONES(4, 4, device="meta")), ValueError, "B is on meta, A on cpu"),
    (lambda: general_gemm(q(4, 4), q(4, 4), bias=ONES(3)), ValueError, r"bias is \(3,\).*needs \(4,\)"),
    (lambda: general_gemm(q(4, 4), q(4, 4), out=ONES(3, 4)), ValueError, r"out is \(3, 4\).*needs \(4, 4\)"),
    (lambda: general_gemm(q(4, 4), q(4, 4), gelu=True, gelu_in=ONES(3, 4)), ValueError, r"gelu_in is \(3, 4\)"),
    (lambda: general_gemm(q(4, 4), q(4, 4), out=ONES(4, 4), out_dtype=torch.half), ValueError, "out is float32"),
    (lambda: general_gemm(q(4, 4), q(4, 4), accumulate=True), ValueError, "needs out="),
    (lambda: general_gemm(q(4, 4), q(4, 4), beta=1.0), ValueError, "accumulate=True"),
    (lambda: general_gemm(q(4, 4), q(4, 4), gelu=True, grad=True), ValueError, "needs gelu_in"),
    (
        lambda: general_gemm(q(4, 4), q(4, 4), out=ONES(4, 4), quantization_params=mxfp8()),
        ValueError,
        "needs quantization_params",
    ),
    (lambda: general_gemm(q(4, 4), q(4, 4), out=q(4, 4)), ValueError, "needs quantization_params"),
    (
        lambda: general_gemm(q(4, 4), q(4, 4), out=q(4, 4), quantization_params=mxfp8(), accumulate=True),
        ValueError,
        "round the sum",
    ),
    (
        lambda: general_gemm(NVFP4Quantizer(with_rht=True)(ONES(16, 4)), NVFP4Quantizer()(ONES(16, 4)), layout="NT"),
        ValueError,
        "rotated differently",
    ),
    (
        lambda: general_gemm(NVFP4Quantizer(with_rht=True)(ONES(16, 4)), ONES(4, 16), layout="NN"),
        ValueError,
        "rotated differently",
    ),
    (
        lambda: general_gemm(*(NVFP4Quantizer(with_rht=True)(ONES(rows, 4)) for rows in (16, 12)), layout="NT"),
        ValueError,
        "do not fit",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[f"{i} {e[2]}" for i, e in enumerate(ERRORS)])
def test_errors_name_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_product_changes_nothing():
    out, amax = torch.full((4, 4), 7.0), torch.zeros(1)
    quantizer = Float8Quantizer(torch.ones(1), amax, E4M3)
    with pytest.raises(ValueError, match="do not fit"):
        general_gemm(q(4, 3), q(4, 4), out=out, accumulate=True)
    with pytest.raises(ValueError, match="do not fit"):
        general_gemm(q(4, 3), q(4, 4), quantization_params=quantizer)
    assert (out == 7).all() and amax == 0
