"""Products: each equals the product of the dequantized operands, accumulated in float32 and rounded once."""

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.core import kernel
from mxtensor.core.kernel import PLANS, Spec
from mxtensor.core.select import decide, plan_for
from mxtensor.kernels.gemm.select import GEMM, GROUPED, _spec, gemm, grouped_gemm, plan_of
from mxtensor.kernels.gemm.spec import GemmArgs, facts_of
from mxtensor.kernels.operands import FakeQuantized, Unquantized
from mxtensor.kernels.quantize.choose_cast import fake_quantize, quantize_operand
from mxtensor.tensor.quantize_as import quantize_as
from tests.helpers.compare import assert_same_product, relative_error

FORMATS = list(mx.FORMATS)
EACH_SCALE = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row", "float8_128x128", "mxfp4[32x32]"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BF16_ON_CPU = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def recipe(weight, activation=None):
    return mx.LinearRecipe.inference(mx.Cast.of(weight), None if activation is None else mx.Cast.of(activation))


def cast(x, format):
    """The values of a plain operand after the cast to the activation format."""
    return x if format is None else mx.quantize(x, format).dequantize(torch.float64)


# ---------------------------------------------------------------------------------------------- every format and dtype


@pytest.mark.parametrize("activation", ["weight_only", "both_quantized"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.pairs
def test_mm_and_linear_are_the_product_of_the_dequantized_operands(format, dtype, activation):
    act = format if activation == "both_quantized" else None
    dense, x, bias = torch.randn(48, 160).to(dtype), torch.randn(33, 160).to(dtype), torch.randn(48).to(dtype)
    w = quantize_as(dense, recipe(format, act))
    values, inputs = w.dequantize(torch.float64), cast(x, act)
    y = x @ w.t()
    assert type(y) is torch.Tensor and y.dtype is dtype
    assert_same_product(y, lambda x, w: x @ w.t(), inputs, values)
    assert_same_product(F.linear(x, w, bias), lambda x, w, b: x @ w.t() + b, inputs, values, bias)
    three = F.linear(x.reshape(3, 11, 160), w)
    assert_same_product(three, lambda x, w: x @ w.t(), inputs.reshape(3, 11, 160), values)


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
@pytest.mark.parametrize("format", [*mx.FORMATS, "mxfp8[32x32]", "mxfp4[16x16]"])
def test_large_bfloat16_weights_multiply_slice_by_slice_without_another_rounding(format, monkeypatch):
    monkeypatch.setattr(sys.modules["mxtensor.kernels.gemm.dequant"], "SLICE", 1 << 15)  # several slices of rows
    w = mx.quantize(torch.randn(640, 256, dtype=torch.bfloat16), format)
    x, bias, c = (torch.randn(s, dtype=torch.bfloat16) for s in ((7, 256), (640,), (7, 640)))
    values = w.dequantize(torch.float64)
    assert_same_product(F.linear(x, w), lambda x, w: x @ w.t(), x, values)
    assert_same_product(F.linear(x, w, bias), lambda x, w, b: x @ w.t() + b, x, values, bias)
    scaled = torch.addmm(c, x, w.t(), alpha=0.3, beta=1.7)
    assert_same_product(scaled, lambda x, w, c: 1.7 * c + 0.3 * (x @ w.t()), x, values, c)


# ---------------------------------------------------------------------------------------------- every op

K = 64
PRODUCTS = {
    # name: (op, plain operands, quantized operand, orientation that is blocked along the contraction)
    "mm_right": (lambda w, x: x @ w, [(5, K)], (K, 48), "columnwise"),
    "mm_left": (lambda w, x: w @ x, [(K, 5)], (48, K), "rowwise"),
    "mm_both_transposed": (lambda w, x: x.t() @ w.t(), [(K, 5)], (48, K), "rowwise"),
    "addmm": (lambda w, c, x: torch.addmm(c, x, w, alpha=2, beta=0.5), [(5, 48), (5, K)], (K, 48), "columnwise"),
    "addmm_row": (lambda w, c, x: torch.addmm(c, x, w), [(48,), (5, K)], (K, 48), "columnwise"),
    "addmm_column": (lambda w, c, x: torch.addmm(c, w, x, alpha=0.25), [(48, 1), (K, 5)], (48, K), "rowwise"),
    "bmm_right": (lambda w, x: torch.bmm(x, w), [(3, 5, K)], (3, K, 48), "columnwise"),
    "bmm_left": (lambda w, x: torch.bmm(w, x), [(3, K, 5)], (3, 48, K), "rowwise"),
    "bmm_repeated": (lambda w, x: torch.bmm(x, w.t().expand(3, K, 48)), [(3, 5, K)], (48, K), "rowwise"),
    "baddbmm": (
        lambda w, c, x: torch.baddbmm(c, x, w, alpha=2, beta=3),
        [(3, 5, 48), (3, 5, K)],
        (3, K, 48),
        "columnwise",
    ),
    "mv": (lambda w, v: torch.mv(w, v), [(K,)], (48, K), "rowwise"),
    "mv_vector": (lambda w, x: torch.mv(x, w), [(5, K)], (K,), "rowwise"),
    "addmv": (lambda w, c, v: torch.addmv(c, w, v, alpha=2, beta=3), [(48,), (K,)], (48, K), "rowwise"),
    "dot": (lambda w, v: torch.dot(v, w), [(K,)], (K,), "rowwise"),
    "inner": (lambda w, x: torch.inner(x, w), [(2, 5, K)], (48, K), "rowwise"),
    "tensordot": (lambda w, x: torch.tensordot(x, w, ([2], [1])), [(2, 5, K)], (48, K), "rowwise"),
    "linear_vector": (lambda w, x: F.linear(x, w), [(K,)], (48, K), "rowwise"),
    "linear_4d": (lambda w, x, b: F.linear(x, w, b), [(2, 3, 5, K), (48,)], (48, K), "rowwise"),
    "linear_strided": (lambda w, x: F.linear(x.transpose(0, 2)[:, ::2], w), [(5, 6, 2, K)], (48, K), "rowwise"),
    "linear_transposed_rows": (lambda w, x: F.linear(x.mT, w), [(2, K, 5)], (48, K), "rowwise"),
    "linear_no_rows": (lambda w, x: F.linear(x[:0], w), [(5, K)], (48, K), "rowwise"),
}


def check(op, plain_shapes, shape, orientation, format, dtype):
    operands = [torch.randn(s).to(dtype) for s in plain_shapes]
    w = mx.quantize(torch.randn(shape).to(dtype), format, orientation=orientation)
    with mx.explain() as log:
        y = op(w, *operands)
    assert_same_product(y, op, w.dequantize(torch.float64), *operands)
    assert "high precision" not in log.table()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_op(name, dtype):
    for format in EACH_SCALE:
        check(*PRODUCTS[name], format, dtype)


RANKS = [
    *(((K,), (K,)), ((K,), (K, 6)), ((K,), (3, K, 6)), ((5, K), (K,)), ((5, K), (K, 6)), ((5, K), (3, K, 6))),
    *(((3, 5, K), (K,)), ((3, 5, K), (K, 6)), ((3, 5, K), (3, K, 6)), ((1, 5, K), (3, K, 6)), ((3, 5, K), (1, K, 6))),
    *(((2, 3, 5, K), (K,)), ((2, 3, 5, K), (K, 6)), ((2, 3, 5, K), (3, K, 6)), ((2, 1, 5, K), (2, 3, K, 6))),
    *(((5, K), (2, 3, K, 6)), ((K,), (2, 3, K, 6))),
]


@pytest.mark.parametrize("quantized", ["left", "right"])
@pytest.mark.parametrize(("left", "right"), RANKS, ids=str)
def test_matmul_of_all_ranks(left, right, quantized):
    for format in ("mxfp8", "mxfp4", "nvfp4", "float8_tensor"):
        if quantized == "left":
            check(lambda w, x: torch.matmul(w, x), [right], left, "rowwise", format, torch.float32)
        else:
            orientation = "columnwise" if len(right) > 1 else "rowwise"
            check(lambda w, x: torch.matmul(x, w), [left], right, orientation, format, torch.float32)


def test_out_variants_write_into_a_plain_tensor():
    w, x, c = mx.quantize(torch.randn(48, K), "mxfp8"), torch.randn(5, K), torch.randn(5, 48)
    out = torch.full((5, 48), torch.nan)
    assert torch.mm(x, w.t(), out=out) is out and torch.equal(out, x @ w.t())
    torch.addmm(c, x, w.t(), beta=2, out=out)
    assert torch.equal(out, torch.addmm(c, x, w.t(), beta=2))


def test_beta_zero_ignores_the_input_even_where_it_is_nan():
    w, x = mx.quantize(torch.randn(48, K), "mxfp8"), torch.randn(5, K)
    ignored = torch.full((5, 48), torch.nan)
    assert torch.equal(torch.addmm(ignored, x, w.t(), beta=0), x @ w.t())
    w, x = w.to(torch.bfloat16), x.bfloat16()
    assert torch.equal(torch.addmm(ignored.bfloat16(), x, w.t(), beta=0), x @ w.t())


# ---------------------------------------------------------------------------------------------- einsum

EINSUMS = [
    # equation, plain operand, quantized operand, its orientation
    ("ik,jk->ij", (5, K), (48, K), "rowwise"),
    ("ik,jk", (5, K), (48, K), "rowwise"),
    ("ik,kj->ji", (5, K), (K, 48), "columnwise"),
    ("bik,jk->bij", (2, 5, K), (48, K), "rowwise"),
    ("b i k , j k -> i b j", (2, 5, K), (48, K), "rowwise"),
    ("bhqk,jk->bhqj", (2, 3, 5, K), (48, K), "rowwise"),
    ("bik,bjk->bij", (2, 5, K), (2, 48, K), "rowwise"),
    ("bik,bkj->jbi", (2, 5, K), (2, K, 48), "columnwise"),
    ("becd,efd->becf", (2, 3, 5, K), (3, 48, K), "rowwise"),
    ("bshd,hdm->bsm", (2, 5, 4, K), (4, K, 48), "columnwise"),
    ("k,jk->j", (K,), (48, K), "rowwise"),
    ("ik,k->i", (5, K), (K,), "rowwise"),
]


@pytest.mark.parametrize("order", ["plain_first", "quantized_first", "as_a_list"])
@pytest.mark.parametrize(("equation", "plain", "quantized", "orientation"), EINSUMS, ids=lambda v: str(v))
def test_einsum(equation, plain, quantized, orientation, order):
    x, dense = torch.randn(plain), torch.randn(quantized)
    for format in ("mxfp8", "mxfp4", "nvfp4"):
        w = mx.quantize(dense, format, orientation=orientation)
        text, operands = equation, (x, w)
        if order == "quantized_first" and "->" in equation:
            inputs, output = equation.split("->")
            text, operands = ",".join(reversed(inputs.split(","))) + "->" + output, (w, x)
        y = torch.einsum(text, operands) if order == "as_a_list" else torch.einsum(text, *operands)
        assert_same_product(y, lambda x, w: torch.einsum(equation, x, w), x, w.dequantize(torch.float64))


def test_einsum_casts_activations_like_any_product():
    w, x = quantize_as(torch.randn(48, K), recipe("mxfp8", "mxfp8")), torch.randn(2, 5, K)
    y = torch.einsum("bik,jk->bij", x, w)
    assert_same_product(y, lambda x, w: x @ w.t(), cast(x, "mxfp8"), w.dequantize(torch.float64))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...k,jk->...j", [(2, 5, K)]),
        ("ik,jk,j->i", [(5, K), None, (48,)]),
        ("ik,jk->i", [(5, K)]),
        ("i,jk->ijk", [(5,)]),
        ("ik,jk->ij", [(5, 1)]),
        ("jk->j", []),
    ],
)
def test_an_einsum_that_is_not_one_product_is_dequantized_visibly(equation, shapes):
    w = mx.quantize(torch.randn(48, K), "mxfp8")
    plain = [torch.randn(s) for s in shapes if s is not None]
    place = shapes.index(None) if None in shapes else len(shapes)
    with mx.explain() as log:
        y = torch.einsum(equation, *plain[:place], w, *plain[place:])
    assert torch.equal(y, torch.einsum(equation, *plain[:place], w.dequantize(), *plain[place:]))
    assert any(e.spec.op == "einsum" and e.kernel == "high precision" for e in log.entries)


# ---------------------------------------------------------------------------------------------- by kernel


@pytest.mark.parametrize(
    "kernel", ["emulated", pytest.param("dequant", marks=pytest.mark.skipif(not BF16_ON_CPU, reason="no bf16 product"))]
)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8", "mxfp8[32x32]"])
def test_each_kernel_computes_the_same_product_of_bfloat16(format, kernel):
    for act in (None, format):
        w = quantize_as(torch.randn(96, 160, dtype=torch.bfloat16), recipe(format, act))
        x, bias = torch.randn(3, 17, 160, dtype=torch.bfloat16), torch.randn(96, dtype=torch.bfloat16)
        with mx.kernels(kernel), mx.explain() as log:
            y, z = F.linear(x, w, bias), torch.bmm(x, w.t().expand(3, 160, 96))
        assert {e.kernel for e in log.entries if e.spec.op in ("addmm", "linear", "bmm")} == {kernel}
        inputs, values = cast(x, act), w.dequantize(torch.float64)
        assert_same_product(y, lambda x, w, b: x @ w.t() + b, inputs, values, bias)
        assert_same_product(z, lambda x, w: x @ w.t(), inputs, values)


@pytest.mark.parametrize(
    ("format", "dtype", "sentence"),
    [
        ("mxfp8", torch.float32, "computes in bfloat16, the result is float32"),
        ("mxfp8", torch.float16, "computes in bfloat16, the result is float16"),
        ("mxfp8[32x32]", torch.float64, "computes in bfloat16, the result is float64"),
        ("float8_row", torch.bfloat16, "float8_e4m3_row has float32 scales: its values are not exact in bfloat16"),
    ],
)
def test_dequant_refuses_with_its_sentence(format, dtype, sentence):
    w, x = mx.quantize(torch.randn(48, 64).to(dtype), format), torch.randn(5, 64).to(dtype)
    with mx.kernels("dequant"), pytest.raises(NotImplementedError, match=f"dequant: {sentence}"):
        x @ w.t()
    with mx.kernels("emulated"):
        assert (x @ w.t()).shape == (5, 48)


# ---------------------------------------------------------------------------------------------- values already rounded


def rounded(x, format, dtype=torch.float32):
    return FakeQuantized(*fake_quantize(x, mx.Cast.of(format), dtype), mx.get_format(format))


def whole(side):
    """The float64 values of a fake-quantized operand."""
    scale = 1.0 if side.global_scale is None else side.global_scale.double()
    return side.values.double() * scale


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", EACH_SCALE)
def test_rounded_values_multiply_as_the_operand_they_were_rounded_to(format, out_dtype):
    x, w, bias = torch.randn(3, 17, 160), torch.randn(48, 160), torch.randn(48)
    a, b, args = rounded(x, format), rounded(w, format), GemmArgs(out_dtype, bias, 2.0, 0.5)
    operand = quantize_operand(w, mx.Cast.of(format))
    with mx.explain() as log:
        both, mixed = gemm("mm", a, b, args), gemm("mm", a, operand, args)
    assert "emulated" in log.table() and a.shape == (3, 17, 160)
    for y in (both, mixed):
        assert_same_product(y, lambda x, w, b: 2 * (x @ w.t()) + 0.5 * b, whole(a), whole(b), bias)


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "mxfp8[32x32]"])
def test_rounded_bfloat16_values_are_multiplied_in_their_layout(format):
    """Operands in transposed layout are not copied: both operands of wgrad have it."""
    g, x = torch.randn(96, 48).bfloat16(), torch.randn(96, 160).bfloat16()
    a, b = rounded(g.t(), format, torch.bfloat16), rounded(x.t(), format, torch.bfloat16)
    for left, right in ((a, b), (FakeQuantized(a.values.t().contiguous().t(), None, a.format), b)):
        with mx.explain() as log:
            y = gemm("mm", left, right, GemmArgs(torch.bfloat16))
        assert [e.kernel for e in log.entries] == ["dequant"]
        assert_same_product(y, lambda a, b: a @ b.t(), whole(a), whole(b))


@pytest.mark.parametrize("kernel", ["emulated", "dequant"])
def test_rounded_rows_in_groups_meet_rounded_weights(kernel):
    if kernel == "dequant" and not BF16_ON_CPU:
        pytest.skip("no bf16 product")
    a, b = (rounded(torch.randn(shape), "mxfp8", torch.bfloat16) for shape in ((11, 64), (3, 40, 64)))
    y = grouped_gemm("grouped", a, b, torch.tensor([4, 4, 9], dtype=torch.int32), GemmArgs(torch.bfloat16), kernel)
    for rows, i in ((slice(0, 4), 0), (slice(4, 9), 2)):
        assert_same_product(y[rows], lambda a, b: a @ b.t(), whole(a)[rows], whole(b)[i])
    assert not y[9:].any()


def test_kernels_refuse_fake_quantized_operands_with_a_sentence():
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    a, b = rounded(x, "mxfp8", torch.bfloat16), rounded(x, "mxfp8", torch.float32)
    with (
        mx.kernels("dequant"),
        pytest.raises(NotImplementedError, match="the fake-quantized values of an operand are float32"),
    ):
        gemm("mm", a, b, GemmArgs(torch.bfloat16))


@pytest.mark.parametrize("kernel", ["scaled_mm", "dot_scaled"])
@pytest.mark.parametrize("which", [0, 1])
def test_kernels_that_read_codes_refuse_rounded_values(kernel, which, with_triton):
    """On a Blackwell device that accepts the same operands as codes."""
    with_triton((10, 0))
    args, ends = GemmArgs(torch.bfloat16), torch.tensor([32], dtype=torch.int32)
    with FakeTensorMode():
        x = torch.empty(32, 64, dtype=torch.bfloat16, device="cuda")
        operands = [quantize_operand(x, mx.Cast.of("mxfp8")), quantize_operand(x, mx.Cast.of("mxfp8"))]
        (taken,) = [k for k in GEMM if k.name == kernel]
        (grouped,) = [k for k in GROUPED if k.name == kernel]
        spec = Spec("mm", ((32, 64), (32, 64)), tuple(f.format for f in operands), torch.bfloat16, x.device, True)
        assert taken.refuses(spec, *operands, args) is None
        operands[which] = FakeQuantized(x, None, operands[0].format)
        assert taken.refuses(spec, *operands, args) == "needs codes, an operand is rounded values"
        stack = spec._replace(shapes=((32, 64), (1, 32, 64)))
        assert grouped.refuses(stack, *operands, ends, args) == "needs codes, an operand is rounded values"


def test_on_a_device_a_float32_result_is_the_accumulator_of_a_bfloat16_product(cuda):
    """By torch.mm with ``out_dtype``, which is for CUDA only; test_gpu.py tests the values."""
    with mx.explain() as log:
        a = FakeQuantized(torch.empty(3, 5, 64, dtype=torch.bfloat16, device="cuda"), None, mx.get_format("mxfp8"))
        b = FakeQuantized(torch.empty(64, 40, dtype=torch.bfloat16, device="cuda").t(), None, mx.get_format("mxfp8"))
        y = gemm("mm", a, b, GemmArgs(torch.float32, torch.empty(40, device="cuda")))
    assert [e.kernel for e in log.entries] == ["dequant"]
    assert (y.shape, y.dtype, y.device.type) == ((3, 5, 40), torch.float32, "cuda")


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0), (7, 5), (12, 0)], ids=str)
def test_what_is_decided_once_is_what_the_kernels_say_when_asked_again(capability, device, monkeypatch):
    """``facts_of`` has everything that refusals read: different products never share a decision."""
    device(capability)
    monkeypatch.setattr(kernel, "MAX_PLANS", 1 << 20)
    PLANS.clear()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    with FakeTensorMode():
        x = torch.empty(2, 64, dtype=bf16, device="cuda")
        rows = [x, x.half(), x.float(), x.view(1, 2, 64), torch.empty(200, 64, dtype=bf16, device="cuda")]
        right = [quantize_operand(torch.empty(32, 64, dtype=bf16, device="cuda"), mx.Cast.of(f)) for f in EACH_SCALE]
        left = [
            *rows,
            *(FakeQuantized(t, None, right[0].format) for t in rows[:3]),
            *(quantize_operand(x, mx.Cast.of(f)) for f in EACH_SCALE),
        ]
        left += [Unquantized(t, mx.Cast.of(f)) for t in rows[:3] for f in ("mxfp8", "nvfp4")]
        right += [FakeQuantized(right[0].data.to(bf16), None, right[0].format), right[0].data.to(bf16)]
        bias = torch.empty(32, dtype=bf16, device="cuda")
        biases = (None, bias, bias.float(), torch.empty(2, 32, dtype=bf16, device="cuda"))
        numbers = ((1, 1), (2, 1), (1, 0), (1, 2))
        for a, b, dtype, added, (alpha, beta) in product(left, right, (bf16, fp16, fp32), biases, numbers):
            args = GemmArgs(dtype, added, alpha, beta)
            spec = _spec("mm", a, b, args)._replace(traced=False)
            assert facts_of(a, b, args) is not None
            cached = plan_for(GEMM, spec, a, b, args, facts=facts_of(a, b, args))
            decided = decide(GEMM, spec, a, b, args)
            assert decided.kernel is not None
            assert (cached.kernel, cached.refusals) == (decided.kernel, decided.refusals)


def test_on_a_cpu_a_weight_that_is_not_contiguous_is_another_question():
    """A global scale needs the sliced product, and that needs contiguous codes."""
    x, args = torch.randn(2, 64).bfloat16(), GemmArgs(torch.bfloat16)
    whole = quantize_operand(torch.randn(64, 128), mx.Cast.of("nvfp4"))
    part = replace(whole, data=whole.data[::2, :32], scale=whole.scale[::2, :4], shape=(32, 64))
    alone = replace(part, data=part.data.contiguous(), scale=part.scale.contiguous())
    assert facts_of(x, part, args) != facts_of(x, alone, args)
    for operand in (part, alone, part):
        cached = plan_of("mm", x, operand, args)
        decided = decide(GEMM, cached.spec, x, operand, args)
        assert (cached.kernel, cached.refusals) == (decided.kernel, decided.refusals)


# ---------------------------------------------------------------------------------------------- against no rounding


def test_the_error_of_one_and_of_two_mxfp8_operands_is_the_published_one():
    dense, x = torch.randn(512, 1024), torch.randn(512, 1024)
    exact = x.double() @ dense.double().t()
    one = x @ quantize_as(dense, recipe("mxfp8")).t()
    two = x @ quantize_as(dense, recipe("mxfp8", "mxfp8")).t()
    assert abs(relative_error(one, exact) - 0.0265) < 0.002
    assert abs(relative_error(two, exact) - 0.037) < 0.002


# ---------------------------------------------------------------------------------------------- which operand is used


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_row", "mxfp8[32x32]"])
def test_two_quantized_operands(format):
    a = mx.quantize(torch.randn(33, 96), format)
    b = mx.quantize(torch.randn(96, 65), format, orientation="columnwise")
    assert_same_product(a @ b, torch.matmul, a.dequantize(torch.float64), b.dequantize(torch.float64))


def test_one_usable_operand_of_two_multiplies_with_the_other_dequantized_visibly():
    a, b = mx.quantize(torch.randn(33, 96), "mxfp8"), mx.quantize(torch.randn(96, 65), "mxfp4")
    with mx.explain() as log:
        y = a @ b
    assert_same_product(y, torch.matmul, a.dequantize(torch.float64), b.dequantize(torch.float64))
    (entry,) = [e for e in log.entries if e.kernel == "high precision"]
    assert entry.refusals == {"quantized": "is stored rowwise, not blocked along the contraction"}


def test_two_operands_of_which_neither_is_usable_are_refused():
    a = mx.quantize(torch.randn(32, 96), "mxfp8", orientation="columnwise")
    b = mx.quantize(torch.randn(96, 64), "mxfp8")
    with pytest.raises(
        ValueError, match=r"neither operand is blocked along the contracted dimension: .*orientation='both'"
    ):
        a @ b
    assert_same_product(a @ b.dequantize(), torch.matmul, a.dequantize(torch.float64), b.dequantize(torch.float64))


def test_both_copies_multiply_from_their_own_side():
    dense = torch.randn(96, 160)
    w = quantize_as(dense, recipe("mxfp8", "mxfp8"), mx.Orientation.BOTH)
    x, z = torch.randn(5, 96), torch.randn(5, 160)
    row, col = (mx.quantize(dense, "mxfp8", orientation=o).dequantize(torch.float64) for o in ("rowwise", "columnwise"))
    with mx.explain() as log:
        right, left = x @ w, z @ w.t()
    assert_same_product(right, torch.matmul, cast(x, "mxfp8"), col)
    assert_same_product(left, lambda z, w: z @ w.t(), cast(z, "mxfp8"), row)
    assert "high precision" not in log.table()
    assert not torch.equal(col, row)  # two roundings of the same values


def test_a_plain_operand_of_another_dtype_is_refused():
    w = mx.quantize(torch.randn(48, 64), "mxfp8")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for op in (torch.mm, torch.matmul, lambda x, w: x @ w, lambda x, w: F.linear(x, w.t())):
        with pytest.raises(RuntimeError, match=r"must have one dtype, got torch\.bfloat16 and torch\.float32"):
            op(x, w.t())
    assert (x @ w.t().to(torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("op", [torch.mm, torch.bmm])
def test_shapes_that_torch_refuses_are_refused(op):
    w = mx.quantize(torch.randn(3, 48, 64), "mxfp8")
    for x in (torch.randn(2, 5, 64), torch.randn(5, 64)):
        with pytest.raises((ValueError, RuntimeError)):
            op(x, w.mT)
        with pytest.raises(RuntimeError):
            op(x, w.mT.dequantize())


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("orientation", ["rowwise", "both"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_128x128"])
def test_the_gradient_flows_through_a_frozen_weight(format, orientation):
    w = mx.quantize(torch.randn(48, 160), format, orientation=orientation)
    x, bias = torch.randn(3, 5, 160, requires_grad=True), torch.randn(48, requires_grad=True)
    y, g = F.linear(x, w, bias), torch.randn(3, 5, 48)
    y.backward(g)
    used = w.columnwise if orientation == "both" else w.rowwise
    values = w.replace(None, used, (48, 160)) if orientation == "both" else w
    assert_same_product(x.grad, torch.matmul, g, values.dequantize(torch.float64))
    assert_same_product(bias.grad, lambda g: g.sum((0, 1)), g)
    assert w.grad is None
