"""The Triton casts as custom ops: real results match what torch.compile is told, for every format."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.quantize import choose_cast, choose_pair, triton_ops
from mxtensor.kernels.quantize.triton_common import slow_in_one_pass
from mxtensor.numerics.formats import FULL
from mxtensor.numerics.reference import decode, decode_local, encode
from tests.helpers.compare import assert_same_operand, assert_same_values

NAMES = [*FORMATS, "mxfp8[32x32]", "mxfp6[1x64]", "nvfp4[16x16]"]
TWO_COPIES = [n for n in NAMES if get_format(n).block[0] == 1 and get_format(n).block[1] != FULL]
KINDS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row", "float8_tensor", "float8_128x128"]

each_format = pytest.mark.parametrize("name", NAMES)
each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def on_the_interpreters_device(interpreted, triton_anywhere, monkeypatch):
    """The Triton casts accept tensors on the CPU, where the interpreter runs them."""
    tuples = {choose_cast: ("QUANTIZE", "FAKE_QUANTIZE", "DEQUANTIZE"), choose_pair: ("QUANTIZE_BOTH", "PAIR")}
    for module, names in tuples.items():
        for name in names:
            kernels = tuple(replace(k, device=None) if k.device == "cuda" else k for k in getattr(module, name))
            monkeypatch.setattr(module, name, kernels)


interpreter = pytest.mark.usefixtures("interpreted")
warns = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # of NaN, from numpy


def words(name, scaling="rceil", rounding="nearest", seed=None):
    return name, scaling, rounding, seed, 0.0


def like(operand):
    return [(t.shape, t.dtype) for t in operand.tensors]


def chosen(log):
    return [(e.spec.op, e.kernel) for e in log.entries]


# ---------------------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize("shape", [(37, 300), (32, 128), (33,), (2, 5, 70)])
@each_format
def test_what_traced_code_sees_has_the_shapes_and_dtypes_of_the_reference(name, shape, cuda):
    x = torch.empty(shape, dtype=torch.bfloat16, device=cuda)
    with mx.explain() as log:
        operand = choose_cast.quantize_operand(x, Cast.of(name))
        values = choose_cast.dequantize_operand(operand, torch.float16)
        rounded, global_scale = choose_cast.fake_quantize(x, Cast.of(name), torch.float32)
    assert chosen(log) == [("quantize", "triton"), ("dequantize", "triton"), ("fake quantize", "triton")]
    expected = encode(torch.empty(shape, device="meta"), Cast.of(name))
    assert like(operand) == like(expected) and operand.shape == shape and operand.format == get_format(name)
    assert {t.device.type for t in operand.tensors} == {"cuda"}
    assert (values.shape, values.dtype, values.device.type) == (shape, torch.float16, "cuda")
    assert (rounded.shape, rounded.dtype) == (shape, torch.float32)
    assert (global_scale is None) == (expected.global_scale is None)


@each_format
def test_two_copies_of_traced_code(name, cuda, monkeypatch):
    without = tuple(kernel for kernel in choose_pair.QUANTIZE_BOTH if kernel.name != "cuda")
    monkeypatch.setattr(choose_pair, "QUANTIZE_BOTH", without)
    x = torch.empty(37, 300, dtype=torch.bfloat16, device=cuda)
    with mx.explain() as log:
        rowwise, columnwise = choose_pair.quantize_operands(x, Cast.of(name), mx.Orientation.BOTH)
    one_pass = [("quantize both", "triton")]
    two = [("quantize both", "two casts"), ("quantize", "triton"), ("quantize", "triton")]
    assert chosen(log) == (one_pass if name in TWO_COPIES and not slow_in_one_pass(Cast.of(name)) else two)
    for operand, shape in ((rowwise, (37, 300)), (columnwise, (300, 37))):
        assert like(operand) == like(encode(torch.empty(shape, device="meta"), Cast.of(name)))
        assert operand.shape == shape


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "float8_row", "mxfp8[32x32]"])
def test_public_calls_take_the_triton_casts(name, cuda):
    x = torch.empty(64, 256, dtype=torch.bfloat16, device=cuda)
    with mx.explain() as log:
        w = mx.quantize(x, name)
        both = mx.quantize(x, name, orientation="both")
        w.dequantize()
    assert {entry.kernel for entry in log.entries} <= {"cuda", "triton", "two casts"}
    assert [e.kernel for e in log.entries if e.spec.op in ("quantize", "dequantize")][-1] == "triton"
    assert both.shape == w.shape == (64, 256)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "float8_row", "mxint8"])
def test_a_linear_casts_its_input_with_triton(name, cuda):
    layer = torch.nn.Linear(256, 64, dtype=torch.bfloat16, device="meta")
    for part, parameter in list(layer.named_parameters()):
        setattr(layer, part, torch.nn.Parameter(torch.empty_like(parameter, device=cuda)))
    mx.quantize_(layer, name)
    with torch.no_grad(), mx.explain() as log:
        y = F.linear(torch.empty(1024, 256, dtype=torch.bfloat16, device=cuda), layer.weight, layer.bias)
    assert y.shape == (1024, 64) and y.dtype == torch.bfloat16
    casts = [e for e in log.entries if e.spec.op in ("quantize", "quantize both", "dequantize", "fake quantize")]
    assert casts and {e.kernel for e in casts} <= {"triton"}


def test_float64_and_empty_tensors_go_on_to_the_reference(cuda):
    for x in (torch.empty(4, 64, dtype=torch.float64, device=cuda), torch.empty(0, 64, device=cuda)):
        with mx.explain() as log:
            choose_cast.quantize_operand(x, Cast.of("mxfp8"))
        (entry,) = log.entries
        assert entry.kernel == "reference" and entry.refusals["triton"] in ("not for float64", "the tensor is empty")


# ---------------------------------------------------------------------------------------------- what is given


@pytest.mark.exhaustive(quick=1)
@interpreter
@warns
@each_kind
def test_the_ops_are_what_torch_asks_of_a_custom_op(name):
    """Schema, no aliasing, fakes equal to results, and the same under AOTAutograd with dynamic shapes."""
    torch.manual_seed(0)
    x = torch.randn(6, 132)
    operand, seeded = encode(x, Cast.of(name)), words(name, rounding="stochastic", seed=7)
    torch.library.opcheck(triton_ops.quantize_op, (x, *words(name)))
    torch.library.opcheck(triton_ops.quantize_op, (x, *seeded))
    torch.library.opcheck(triton_ops.fake_quantize_op, (x, *words(name), torch.float32))
    components = (operand.data, operand.scale, operand.global_scale)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]  # test_schema has no float8
    torch.library.opcheck(triton_ops.dequantize_op, (*components, name, [6, 132], torch.float32), test_utils=tests)
    if name in TWO_COPIES or get_format(name).name in TWO_COPIES:
        torch.library.opcheck(triton_ops.quantize_both_op, (x, *words(name)))


@interpreter
@warns
@each_kind
def test_the_ops_give_what_the_reference_gives(name):
    x, of = torch.randn(6, 132), Cast.of(name, "floor", "stochastic", 2**33 + 1)
    operand = encode(x, of)
    given = triton_ops.quantize_op(x, name, "floor", "stochastic", 2**33 + 1, 0.0)
    for ours, theirs in zip(given, operand.tensors, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) if ours.dim() else ours == theirs
    components = (operand.data, operand.scale, operand.global_scale)
    values = triton_ops.dequantize_op(*components, name, [6, 132], torch.float32)
    assert_same_values(values, decode(operand, torch.float32))
    rounded, *global_scale = triton_ops.fake_quantize_op(x, name, "floor", "stochastic", 2**33 + 1, 0.0, torch.float32)
    assert_same_values(rounded, decode_local(operand))
    assert global_scale == [] if operand.global_scale is None else torch.equal(global_scale[0], operand.global_scale)


@interpreter
@warns
@pytest.mark.parametrize("name", ["mxfp8", "mxint8", "nvfp4"])
def test_compiled_code_calls_the_ops(name, on_the_interpreters_device):
    """A traced graph, run: its casts are the custom ops, with the cast as strings."""
    torch._dynamo.reset()
    of = Cast.of(name, "floor")
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def both(x):
        rowwise, columnwise = choose_pair.quantize_operands(x, of, mx.Orientation.BOTH)
        return rowwise.tensors, columnwise.tensors, choose_cast.fake_quantize(x, of, torch.float32)[0]

    x = torch.randn(12, 140)
    rowwise, columnwise, values = torch.compile(both, backend=keep, fullgraph=True)(x)
    called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "mxtensor" in str(n.target)]
    assert called == ["mxtensor.quantize_both.default", "mxtensor.fake_quantize.default"]
    for got, expected in ((rowwise, encode(x, of)), (columnwise, encode(x.t(), of))):
        for ours, theirs in zip(got, expected.tensors, strict=True):
            assert torch.equal(ours, theirs)
    assert_same_values(values, decode_local(encode(x, of)))


@interpreter
@warns
def test_eager_calls_go_straight_to_the_kernels(on_the_interpreters_device, monkeypatch):
    """A custom op costs more host time than a small cast; the results are the same."""
    for op in ("quantize_op", "quantize_both_op", "fake_quantize_op", "dequantize_op"):
        monkeypatch.setattr(triton_ops, op, None)
    x, of = torch.randn(12, 140, requires_grad=True), Cast.of("mxfp8")
    with mx.explain() as log:
        rowwise, columnwise = choose_pair.quantize_operands(x, of, mx.Orientation.BOTH)
        assert_same_operand(choose_cast.quantize_operand(x, of), rowwise)
        assert_same_operand(columnwise, encode(x.t(), of))
        values, _ = choose_cast.fake_quantize(x, of, torch.float32)
        assert_same_values(choose_cast.dequantize_operand(rowwise, torch.float32), values)
    assert {e.kernel for e in log.entries} == {"triton"}
    assert not any(t.requires_grad for t in (values, *rowwise.tensors, *columnwise.tensors))
