"""Products of row-scaled E4M3: the kernels are bitwise the definition, and every product is within the stated bound.

Without a GPU the Triton kernels run in the interpreter, and a strict stand-in takes the place of ``torch._scaled_mm``.
"""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.core.select import decide
from mxtensor.kernels.gemm import fp8_rows, fp8_rows_cache, scaled_mm, select
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized, format_of
from mxtensor.kernels.quantize.to_row_scaled import matrix_of, rows_of_operand
from mxtensor.numerics import derived
from mxtensor.numerics.formats import get_format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import row_scaled
from tests.helpers.row_scaled import assert_within_the_bound, same, stored, values
from tests.helpers.stand_in import BF16, FP16, FP32, stand_in
from tests.kernels.quantize.conftest import one_rounding

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows.py runs the kernels on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
__all__ = ["one_rounding", "stand_in"]

PAIRS = [
    ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp6", "mxfp6"), ("mxfp4", "mxfp6_e3m2"), ("mxfp8_e5m2", "mxfp8[32x32]"),
    ("float8_e4m3_1x128_pow2", "float8_e5m2_row_pow2"), ("mxfp8_e5m2", "mxfp8_e5m2"),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- products


@pytest.fixture
def small(monkeypatch, one_rounding):
    """Several tiles of the exact product to a small result."""
    for name, size in {"EXACT_TILE": (16, 16, 64, 4), "COUNT_CHUNK": 16, "FIND_STEP": 8}.items():
        monkeypatch.setattr(fp8_rows, name, size)


@pytest.fixture
def captured(monkeypatch):
    """``with captured():`` a CUDA graph is captured."""

    @contextmanager
    def capture():
        with monkeypatch.context() as patch:
            for module in (fp8_rows_cache, derived):
                patch.setattr(module, "is_captured", lambda t: True)
            yield

    return capture


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("left, right", PAIRS)
def test_every_product_is_within_the_bound(pretend, stand_in, small, left, right):
    pretend((9, 0))
    a, b = stored(left, 18, 160), stored(right, 32, 160)
    bias = torch.randn(32, dtype=BF16)
    y = fp8_rows.KERNEL.run(a, b, GemmArgs(BF16, bias))
    assert len(stand_in.calls) == 1 and y.shape == (18, 32) and y.dtype is BF16
    assert_within_the_bound(y, a, b, bias)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_plain_values_are_cast_first(pretend, stand_in, small, dtype):
    pretend((9, 0))
    cast = mx.Cast.of("mxfp8")
    x, b = values(15, 96, dtype), stored("mxfp4", 16, 96)
    y = fp8_rows.KERNEL.run(Unquantized(x.view(3, 5, 96), cast), b, GemmArgs(dtype))
    assert y.shape == (3, 5, 16)
    assert_within_the_bound(y.view(15, 16), encode(x, cast), b)
    assert same(y.view(15, 16), fp8_rows.KERNEL.run(encode(x, cast), b, GemmArgs(dtype)))
    tensor = mx.Cast.of("float8_e5m2_tensor_pow2")  # cannot be cast in one kernel
    y = fp8_rows.KERNEL.run(Unquantized(x[:8], tensor), b, GemmArgs(dtype))
    assert_within_the_bound(y, encode(x[:8], tensor), b)


def test_without_flags_the_exact_product_writes_nothing(pretend, stand_in, small):
    pretend((9, 0))
    a, b = encode(torch.randn(20, 64), mx.Cast.of("mxfp8")), encode(torch.randn(16, 64), mx.Cast.of("mxfp8"))
    sides = [fp8_rows.row_operand(o, False, False) for o in (a, b)]
    out = torch.full((20, 16), 3.0, dtype=BF16)
    fp8_rows.exact_rows(*sides, None, out)
    assert (out == 3).all()
    sides[0].out_of_range[4], sides[1].out_of_range[15] = 1, 1
    fp8_rows.exact_rows(*sides, None, out)
    written = torch.zeros(20, 16, dtype=torch.bool)
    written[4], written[:, 15] = True, True
    assert torch.equal(out != 3, written)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("stored_form", [True, False])
def test_a_trace_holds_few_ops_with_the_same_result(pretend, stand_in, small, monkeypatch, stored_form):
    """The form of a weight is looked up in each call of the graph, or made in it from so many rows on."""
    pretend((9, 0))
    monkeypatch.setattr(fp8_rows_cache, "ON_THE_FLY", 16 if stored_form else 15)
    cast, b = mx.Cast.of("mxfp8"), stored("mxfp8", 16, 96)
    x, bias = values(15, 96, BF16), torch.randn(16, dtype=BF16)

    def product(x, data, scale, bias):
        weight = Operand(data, scale, None, b.format, b.shape)
        return fp8_rows.KERNEL.run_traced(Unquantized(x, cast), weight, GemmArgs(BF16, bias))

    graph = make_fx(product)(x, b.data, b.scale, bias)
    ops = [str(n.target) for n in graph.graph.nodes if "mxtensor" in str(n.target)]
    expected = (
        ("cast_to_rows", "fp8_rows_stored_mm") if stored_form else ("cast_to_rows", "operand_to_rows", "fp8_rows_mm")
    )
    assert ops == [f"mxtensor.{op}.default" for op in expected]
    eager = fp8_rows.KERNEL.run(Unquantized(x, cast), b, GemmArgs(BF16, bias))
    assert same(graph(x, b.data, b.scale, bias), eager)
    with FakeTensorMode() as mode:
        fake = graph(*(mode.from_tensor(t) for t in (x, b.data, b.scale, bias)))
    assert fake.shape == eager.shape and fake.dtype is BF16


def test_the_ops_check_their_arguments():
    operand = encode(torch.randn(16, 64), mx.Cast.of("mxfp8"))
    rows = list(rows_of_operand(operand, 1))
    side = [*rows, operand.scale]
    with pytest.raises(ValueError, match="row scales must have shape"):
        fp8_rows.fp8_rows_mm([rows[0], rows[1][:3], *side[2:]], side, "mxfp8", "mxfp8", 64, None, BF16)
    with pytest.raises(ValueError, match="writes bfloat16 or float16"):
        fp8_rows.fp8_rows_mm(side, side, "mxfp8", "mxfp8", 64, None, FP32)
    with pytest.raises(ValueError, match="powers of two"):
        nvfp4 = encode(torch.randn(16, 64), mx.Cast.of("nvfp4"))
        fp8_rows.operand_to_rows(nvfp4.data, nvfp4.scale, "nvfp4", 64, False)
    with pytest.raises(ValueError, match="casts blocks along rows"):
        fp8_rows.cast_to_rows(torch.randn(16, 64), "mxfp8[32x32]", "rceil", "nearest", None, 0.0, False)


# ---------------------------------------------------------------------------------------------- the cache of weights


def test_a_weight_is_rescaled_once_until_it_is_written_to():
    weight = mx.quantize(torch.randn(16, 64), "mxfp8")

    def form():
        return fp8_rows_cache.weight_rows(weight.rowwise, matrix_of(weight.rowwise))

    assert form()[0] is form()[0]
    before = form()[0].clone()
    weight.copy_(torch.randn(16, 64))
    assert not torch.equal(form()[0], before)
    assert torch.equal(form()[0][:, :64], row_scaled(weight.rowwise).codes)


def test_a_captured_graph_reads_a_form_that_writes_make_again(captured):
    weight = mx.quantize(torch.randn(16, 64), "mxfp8")
    operand = weight.rowwise

    def form():
        return fp8_rows_cache.weight_rows(operand, matrix_of(operand))

    def is_current():
        return torch.equal(found[0][:, :64], row_scaled(operand).codes)

    with captured():
        assert not fp8_rows_cache.is_known(operand)
        assert form()[0] is not form()[0]  # none was made before: each replay makes its own
    found = form()
    with captured():
        assert fp8_rows_cache.is_known(operand) and form()[0] is found[0]
    for _ in range(2):
        weight.copy_(torch.randn(16, 64))  # by a rule: at once
        assert is_current()
        with torch.no_grad():
            weight[8:].copy_(torch.randn(8, 64))
        assert is_current()
    operand.data.view(torch.uint8).copy_(mx.quantize(torch.randn(16, 64), "mxfp8").rowwise.data.view(torch.uint8))
    assert not is_current()
    assert form()[0] is found[0] and is_current()  # around the rules: when it is used next
    operand.scale.add_(1) if operand.scale.dtype is torch.uint8 else operand.scale.view(torch.uint8).add_(1)
    assert form()[0] is found[0] and is_current()
    ended = weakref.ref(found[0])
    weight = operand = found = None
    gc.collect()
    assert ended() is None


def test_the_cache_leaves_memory_free(monkeypatch):
    free = 1 << 20
    monkeypatch.setattr(fp8_rows_cache, "_budget", lambda device: 1 << 30)
    monkeypatch.setattr(fp8_rows_cache, "_free", lambda device: free)
    operand = mx.quantize(torch.randn(16, 64), "mxfp8").rowwise
    before = fp8_rows_cache.weight_rows(operand, operand)[0]
    assert fp8_rows_cache.weight_rows(operand, operand)[0] is not before
    free = 1 << 30
    before = fp8_rows_cache.weight_rows(operand, operand)[0]
    assert fp8_rows_cache.weight_rows(operand, operand)[0] is before


def test_the_cache_stops_at_its_share_of_the_memory_and_counts_what_was_freed(monkeypatch):
    device = torch.device("cpu")
    used = fp8_rows_cache._bytes.get(device, 0)
    monkeypatch.setattr(fp8_rows_cache, "_budget", lambda device: used + 16 * 64 + 16 * 5)
    first, second = (mx.quantize(torch.randn(16, 64), "mxfp8").rowwise for _ in range(2))
    for operand, cached in ((first, True), (second, False)):
        form, later = (fp8_rows_cache.weight_rows(operand, operand)[0] for _ in range(2))
        assert (form is later) == cached
    del form, later, first, operand
    assert fp8_rows_cache._bytes[device] == used
    assert fp8_rows_cache.weight_rows(second, second)[0] is fp8_rows_cache.weight_rows(second, second)[0]


# ---------------------------------------------------------------------------------------------- the choice


def chosen(left, right, m, n, k, args=None, prefer=None, op="mm"):
    with FakeTensorMode():
        x = torch.empty(m, k, dtype=BF16, device="cuda")
        b = Operand.empty(get_format(right), (n, k), "cuda")
        a = x if left is None else Unquantized(x, mx.Cast.of(left))
        args = args or GemmArgs(BF16)
        spec = Spec(op, ((m, k), (n, k)), (format_of(a), b.format), args.out_dtype, x.device)
        return decide(select.GEMM, spec, a, b, args, prefer=prefer)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 1)])
@pytest.mark.parametrize(
    "left, right", [("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp6", "mxfp6"), ("mxfp4", "mxfp4")]
)
def test_large_products_of_two_quantized_operands_take_it(device, capability, left, right):
    device(capability)
    native = capability >= (10, 0) and left == right == "mxfp8"  # these tensor cores multiply it with its scales
    assert chosen(left, right, 4096, 4096, 4096).kernel is (scaled_mm if native else fp8_rows).KERNEL
    assert chosen(left, right, 64, 4096, 4096).kernel is not fp8_rows.KERNEL
    assert chosen(None, right, 4096, 4096, 4096).kernel is not fp8_rows.KERNEL


def test_what_it_refuses(device):
    device((9, 0))

    def reason(*args, **kwargs):
        return chosen(*args, **kwargs).refusals["fp8_rows"]

    assert "for at least 128 rows, this product has 96 rows" in reason("mxfp8", "mxfp8", 96, 65536, 4096)
    assert " us expected, small_m " in reason("mxfp8", "mxfp8", 128, 2880, 2048)
    assert " us expected, dequant " in reason("mxfp8", "mxfp4", 1024, 2880, 2880, op="fprop")
    assert "multiples of 16, got 4096 and 4100" in reason("mxfp8", "mxfp8", 4096, 4100, 4096)
    assert "multiples of 16, got 4104 and 4096" in reason("mxfp8", "mxfp8", 4096, 4096, 4104)
    assert "not float32" in reason("mxfp8", "mxfp8", 4096, 4096, 4096, GemmArgs(FP32))
    assert "alpha is 2" in reason("mxfp8", "mxfp8", 4096, 4096, 4096, GemmArgs(BF16, alpha=2))
    assert "nvfp4 has ue4m3 scales" in reason("mxfp8", "nvfp4", 4096, 4096, 4096)
    assert "'dequant' was asked for" in reason("mxfp8", "mxfp8", 4096, 4096, 4096, prefer="dequant")
    assert "bias" in reason("mxfp8", "mxfp8", 4096, 4096, 4096, GemmArgs(BF16, torch.empty(4096, 4096, dtype=BF16)))
    device((8, 9))
    assert "for at least 128 rows and 1572864 values of the result" in reason("mxfp8", "mxfp8", 128, 4096, 4096)
    device((8, 0))
    assert "needs sm89" in reason("mxfp8", "mxfp8", 4096, 4096, 4096)
    device((10, 0))
    assert chosen("mxfp8", "mxfp8", 4096, 4096, 4096).kernel.name == "scaled_mm"
    assert chosen("mxfp6", "mxfp6", 4096, 4096, 4096).kernel is fp8_rows.KERNEL


def test_explain_tells_of_rows_out_of_range(pretend, stand_in, small):
    pretend((9, 0))
    a, b = stored("mxfp8", 18, 64), encode(torch.randn(16, 64), mx.Cast.of("mxfp8"))
    with mx.explain() as log:
        fp8_rows.KERNEL.run(a, b, GemmArgs(BF16))
    (entry,) = log.entries
    assert entry.kernel == "fp8_rows exact" and entry.spec.shapes[0][0] == row_scaled(a).out_of_range.sum()
    with mx.explain() as log:
        fp8_rows.KERNEL.run(b, b, GemmArgs(BF16))
    assert not log.entries
