"""``cast_pair``: both copies of a matrix, on CPU and in traced code."""

import dataclasses
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.operands import FakeQuantized, Form
from mxtensor.kernels.quantize import triton_ops
from mxtensor.kernels.quantize.choose_cast import quantize_operand
from mxtensor.kernels.quantize.choose_pair import cast_pair
from mxtensor.kernels.quantize.definition import encode_with_amax
from mxtensor.kernels.quantize.triton_common import slow_in_one_pass
from mxtensor.numerics.formats import FULL
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode_local, encode
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.kernels.quantize.test_triton_ops import chosen, on_the_interpreters_device  # noqa: F401  (a fixture)

CODES, VALUES = Form.CODES, Form.VALUES
NAMES = [*FORMATS, "mxfp8[32x32]", "mxfp6[1x64]", "nvfp4[16x16]", "mxfp4[64x64]"]
FORMS = [
    (CODES, CODES),
    (VALUES, CODES),
    (CODES, VALUES),
    (VALUES, VALUES),
    (VALUES, None),
    (None, CODES),
    (None, None),
]
KINDS = ["mxfp8", "nvfp4", "float8_row", "float8_tensor", "mxfp8[32x32]"]
ONE_SCALE = [n for n in FORMATS if get_format(n).block == (FULL, FULL)]
warns = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # of NaN, from numpy

each_format = pytest.mark.parametrize("name", NAMES)
each_kind = pytest.mark.parametrize("name", KINDS)
each_form = pytest.mark.parametrize("forms", FORMS, ids=lambda forms: "-".join(f.value if f else "none" for f in forms))


def assert_in_form(copy, form, operand, dtype):
    """``copy`` is ``operand`` in this form."""
    if form is None:
        assert copy is None
    elif form is CODES:
        assert isinstance(copy, Operand)
        assert_same_operand(copy, operand)
    else:
        assert isinstance(copy, FakeQuantized) and copy.format == operand.format and copy.shape == operand.shape
        assert_same_values(copy.values.contiguous(), decode_local(operand).to(dtype))
        assert (copy.global_scale is None) == (operand.global_scale is None)
        assert copy.global_scale is None or torch.equal(copy.global_scale, operand.global_scale)


# ---------------------------------------------------------------------------------------------- the definition


@each_form
@each_format
def test_each_operand_is_the_cast_of_its_side(name, forms):
    cast, x = Cast.of(name), torch.randn(50, 70)
    for dtype in (torch.bfloat16, torch.float32):
        row, column = cast_pair(x, cast, *forms, dtype)
        assert_in_form(row, forms[0], encode(x, cast), dtype)
        assert_in_form(column, forms[1], encode(x.t(), cast), dtype)


@each_kind
def test_stacks_of_matrices_and_sources_of_any_stride(name):
    cast = Cast.of(name)
    for x in (torch.randn(3, 40, 64), torch.randn(64, 40).t(), torch.randn(1, 64).expand(40, 64)):
        row, column = cast_pair(x, cast, VALUES, CODES, torch.float32)
        assert_in_form(row, VALUES, encode(x, cast), torch.float32)
        assert_in_form(column, CODES, encode(x.mT, cast), torch.float32)


@each_form
def test_columns_draw_from_the_seed_after_that_of_rows(forms):
    x, dtype = torch.randn(50, 70), torch.float32
    cast, other = (Cast.of("mxfp8", rounding="stochastic", seed=seed) for seed in (7, 8))
    row, column = cast_pair(x, cast, *forms, dtype)
    assert_in_form(row, forms[0], encode(x, cast), dtype)
    assert_in_form(column, forms[1], encode(x.t(), other), dtype)


@pytest.mark.parametrize("name", ["mxfp8[32x32]", "mxfp4[64x64]", "nvfp4[16x16]", "float8_tensor", "float8_128x128"])
def test_a_square_block_is_rounded_once_and_transposed(name):
    x = torch.randn(70, 50)
    for cast in (Cast.of(name, rounding="stochastic"), Cast.of(name, rounding="stochastic", seed=3)):
        row, column = cast_pair(x, cast, CODES, VALUES, torch.float32)
        assert torch.equal(column.values, decode_local(row).t())
        row, column = cast_pair(x, cast, CODES, CODES, torch.float32)
        assert torch.equal(decode_local(column), decode_local(row).t())
        assert column.data.is_contiguous() and column.scale.is_contiguous()


def test_a_matrix_without_values_has_operands_without_values():
    for shape in ((0, 64), (64, 0)):
        row, column = cast_pair(torch.empty(shape), Cast.of("mxfp8"), CODES, VALUES, torch.bfloat16)
        assert row.shape == shape and column.shape == shape[::-1]


# ---------------------------------------------------------------------------------------------- delayed scaling


@each_form
@pytest.mark.parametrize("name", ONE_SCALE)
def test_a_given_amax_makes_the_scale(name, forms):
    cast, x, dtype = Cast.of(name), torch.randn(50, 70), torch.float32
    for amax in (torch.tensor(2.0), torch.tensor([100.0])):
        row, column = cast_pair(x, cast, *forms, dtype, amax)
        assert_in_form(row, forms[0], encode(x, cast, amax.reshape(())), dtype)
        assert_in_form(column, forms[1], encode(x.t(), cast, amax.reshape(())), dtype)


def test_values_beyond_a_given_amax_saturate_and_those_not_finite_become_nan():
    """Otherwise an infinity would be dequantized to an ordinary large number."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -2.0, 48.0, -48.0, inf, -inf, nan, -nan, 0.0]])
    for name in ONE_SCALE:
        top = get_format(name).element.max
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            operand = encode_with_amax(x.to(dtype), Cast.of(name), torch.tensor(top))
            assert decode_local(operand).nan_to_num(12345.0).tolist() == [[1, -2, 48, -48, *[12345.0] * 4, 0]]
            assert operand.data.view(torch.uint8)[0, 4:8].tolist() == [0x7F] * 4
        operand = encode_with_amax(x, Cast.of(name), torch.tensor(8.0))
        largest = (operand.scale * top).item()
        assert decode_local(operand)[0, 2:4].tolist() == [largest, -largest] and 8 <= largest < 16


@pytest.mark.parametrize("amax", [None, 3.0])
def test_the_record_takes_the_larger_amax_and_nan_above_all(amax):
    cast, given = Cast.of("float8_tensor"), None if amax is None else torch.tensor(amax)
    record = torch.zeros(3)
    for values, expected in (([1.0, -4.0], 4.0), ([2.0, 0.5], 4.0), ([-5.0, 0.0], 5.0), ([float("inf"), 0], torch.inf)):
        cast_pair(torch.tensor([values]), cast, CODES, CODES, torch.float32, given, record[1])
        assert record.tolist() == [0.0, expected, 0.0]
    cast_pair(torch.tensor([[1.0, float("nan")]]), cast, None, CODES, torch.float32, given, record[1:2])
    cast_pair(torch.tensor([[1.0, 2.0]]), cast, CODES, None, torch.float32, given, record[1:2])
    assert record[1].isnan()


def test_what_delayed_scaling_does_not_take_is_refused():
    x, one = torch.randn(32, 64), torch.tensor(1.0)
    with pytest.raises(ValueError, match="mxfp8_e4m3 has a scale for each block: amax is for formats with one scale"):
        cast_pair(x, Cast.of("mxfp8"), CODES, None, x.dtype, one)
    with pytest.raises(ValueError, match="nvfp4 has a scale for each block: record is for formats with one scale"):
        cast_pair(x, Cast.of("nvfp4"), CODES, None, x.dtype, None, one)
    with pytest.raises(TypeError, match=r"amax must be one float32, got bfloat16 \(\)"):
        cast_pair(x, Cast.of("float8_tensor"), CODES, None, x.dtype, one.bfloat16())
    with pytest.raises(TypeError, match=r"record must be one float32, got float32 \(2,\)"):
        cast_pair(x, Cast.of("float8_tensor"), CODES, None, x.dtype, one, torch.ones(2))
    with pytest.raises(ValueError, match="amax is on meta, the values on cpu"):
        cast_pair(x, Cast.of("float8_tensor"), CODES, None, x.dtype, one.to("meta"))
    with pytest.raises(ValueError, match=r"cast_pair needs a matrix or a stack of matrices, got shape \(64,\)"):
        cast_pair(x[0], Cast.of("mxfp8"), CODES, None, x.dtype)
    with pytest.raises(TypeError, match="cannot quantize a tensor of dtype int32"):
        cast_pair(x.int(), Cast.of("mxfp8"), CODES, None, x.dtype)


# ---------------------------------------------------------------------------------------------- traced


def tensors(copies):
    components = []
    for copy in copies:
        if isinstance(copy, FakeQuantized):
            components += [copy.values, copy.global_scale]
        elif copy is not None:
            components += copy.tensors
    return [t for t in components if t is not None]


def both(cast, forms, x):
    return tensors(cast_pair(x, cast, *forms, torch.float32))


@each_kind
def test_it_traces_on_cpu(name):
    cast, x = Cast.of(name), torch.randn(40, 70)
    for forms in ((VALUES, CODES), (CODES, VALUES)):
        run = functools.partial(both, cast, forms)
        for ours, theirs in zip(make_fx(run)(x)(x), run(x), strict=True):
            assert torch.equal(ours.float(), theirs.float())
        real = run(x)
        with FakeTensorMode() as mode:
            fake = run(mode.from_tensor(x))
        assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@each_form
@pytest.mark.parametrize("name", [n for n in NAMES if not (get_format(n).square and get_format(n).element.packed)])
def test_what_traced_code_sees_on_a_device_has_the_shapes_of_the_reference(name, forms, cuda):
    x = torch.empty(36, 134, dtype=torch.bfloat16, device=cuda)
    with mx.explain() as log:
        row, column = cast_pair(x, Cast.of(name), *forms, torch.bfloat16)
    assert {e.kernel for e in log.entries} <= {"cuda", "triton", "two casts"}
    first = log.entries[0].kernel
    assert None in forms or first == "cuda" or (first == "triton") == one_pass(name, forms)
    for copy, form, shape in ((row, forms[0], (36, 134)), (column, forms[1], (134, 36))):
        expected = encode(torch.empty(shape, device="meta"), Cast.of(name))
        if form is VALUES:
            assert (copy.shape, copy.values.dtype, copy.format) == (
                shape,
                torch.bfloat16,
                expected.format,
            )
            assert (copy.global_scale is None) == (expected.global_scale is None)
        elif form is CODES:
            assert [(t.shape, t.dtype) for t in copy.tensors] == [(t.shape, t.dtype) for t in expected.tensors]
            assert copy.shape == shape


def one_pass(name, forms):
    block = get_format(name).block
    if forms[1] is CODES and slow_in_one_pass(Cast.of(name)):
        return False
    return forms == (CODES, CODES) if block == (FULL, FULL) else block[0] == 1 and block[1] != FULL


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted")
@warns
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "nvfp4", "float8_tensor"])
def test_the_op_is_what_torch_asks_of_a_custom_op(name):
    """Schema, no aliasing, fakes equal to results, and the same under AOTAutograd with dynamic shapes."""
    x, words = torch.randn(8, 132), (get_format(name).name, "rceil", "nearest", None, 0.0)
    pairs = (
        [("codes", "codes")]
        if name == "float8_tensor"
        else [("values", "codes"), ("codes", "values"), (None, "values")]
    )
    for pair in pairs:
        torch.library.opcheck(triton_ops.cast_pair_op, (x, *words, *pair, torch.float32, None, False))
    if name == "float8_tensor":
        arguments = (x, *words, "codes", None, torch.float32, torch.tensor(1.0), True)
        torch.library.opcheck(triton_ops.cast_pair_op, arguments)


@pytest.mark.usefixtures("interpreted")
@warns
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "float8_tensor"])
def test_compiled_code_calls_the_op(name, on_the_interpreters_device):  # noqa: F811
    torch._dynamo.reset()
    of, graphs = Cast.of(name), []
    forms = (CODES, CODES) if name == "float8_tensor" else (VALUES, CODES)
    delayed = (torch.tensor(2.0), torch.tensor(0.25)) if name == "float8_tensor" else ()

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def both(x, *delayed):
        return tensors(cast_pair(x, of, *forms, torch.float32, *delayed))

    x = torch.randn(12, 140)
    got = torch.compile(both, backend=keep, fullgraph=True)(x, *delayed)
    called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "mxtensor" in str(n.target)]
    assert called == ["mxtensor.cast_pair.default"]
    if delayed:
        assert delayed[1] == x.abs().amax()
        sides = encode_with_amax(x, of, delayed[0]), encode_with_amax(x.t(), of, delayed[0])
        expected = [*sides[0].tensors, *sides[1].tensors]
    else:
        row, column = encode(x, of), quantize_operand(x.t(), of)
        global_scale = [] if row.global_scale is None else [row.global_scale]
        expected = [decode_local(row), *global_scale, *column.tensors]
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.usefixtures("interpreted")
@warns
def test_values_of_a_transposed_source_are_the_columns_of_the_stored_matrix(on_the_interpreters_device):  # noqa: F811
    from mxtensor.kernels.quantize.choose_cast import fake_quantize

    x, of = torch.randn(40, 134), Cast.of("mxfp8")
    with mx.explain() as log:
        row, column = cast_pair(x, of, None, VALUES, torch.float32)
    assert row is None and column.values.t().is_contiguous()
    assert chosen(log) == [("cast pair", "two casts"), ("fake quantize", "triton")]
    traced, _ = fake_quantize(x.t(), of, torch.float32), torch._dynamo.reset()
    compiled = torch.compile(lambda x: fake_quantize(x.t(), of, torch.float32)[0], backend="aot_eager", fullgraph=True)(
        x
    )
    for values in (column.values, traced[0], compiled):
        assert torch.equal(values, decode_local(encode(x.t(), of)))


@pytest.mark.usefixtures("interpreted")
@warns
def test_eager_calls_go_straight_to_the_kernel(on_the_interpreters_device, monkeypatch):  # noqa: F811
    monkeypatch.setattr(triton_ops, "cast_pair_op", None)
    x, of = torch.randn(12, 140, requires_grad=True), Cast.of("mxfp8")
    with mx.explain() as log:
        row, column = cast_pair(x, of, VALUES, CODES, torch.float32)
    assert chosen(log) == [("cast pair", "triton")]
    assert not any(t.requires_grad for t in (row.values, *column.tensors))
    assert dataclasses.astuple(row)[0] is not None
    assert_same_operand(column, encode(x.detach().t(), of))
