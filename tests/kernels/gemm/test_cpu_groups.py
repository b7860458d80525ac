"""Rows in groups times a stack of codes on CPU: each group as a product of its own, for every format and cast."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.kernels.gemm import cpu_codes
from mxtensor.kernels.gemm.select import gemm, grouped_gemm, grouped_plan_of
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.formats import FORMATS, get_format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode_local, encode
from tests.kernels.gemm.test_cpu_codes import BLOCKS, DTYPES, assert_product, exact

COUNTS = [[2, 0, 3, 0], [0, 0, 0, 1], [5, 1, 0, 2], [0, 40, 0, 3], [0, 0, 0, 0]]
NAMES = [name for name in (*FORMATS, *BLOCKS) if get_format(name).scale_shape((4, 33, 96))[0] == 4]
"""The formats that have a scale for each matrix of a stack; the others are decoded by another kernel."""
AFTER = 2
"""Rows after the last group."""


def ends_of(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def product(x, w, ends, dtype, alpha=1.0):
    with mx.kernels("cpu_codes"):
        return grouped_gemm("test", x, w, ends, GemmArgs(dtype, alpha=alpha))


def check(out, x, w, counts, alpha=1.0):
    """x (M, K) and w (G, N, K) in float64."""
    start = 0
    for g, count in enumerate(counts):
        assert_product(out[start : start + count], alpha * x[start : start + count], w[g])
        start += count
    assert out.shape[0] == start + AFTER and not out[start:].any()


@pytest.fixture(autouse=True)
def poisoned():
    """What is freed here is not zero when the op gets it."""
    torch.full((1 << 16,), float("nan"))


@pytest.mark.exhaustive(quick=60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.pairs
def test_each_group_is_multiplied_by_its_weight(name, counts, dtype):
    w = mx.quantize(torch.randn(4, 33, 96), name).rowwise
    x = torch.randn(sum(counts) + AFTER, 96).to(dtype)
    check(product(x, w, ends_of(counts), dtype, 0.5), x.double(), exact(w), counts, 0.5)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("counts", [[2, 0, 3, 0], [0, 40, 0, 3]], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxint8", "nvfp4", "mxfp6", "mxfp4[1x16]"])
def test_the_cast_of_activations_sees_all_rows_at_once(name, counts, dtype):
    w, x = mx.quantize(torch.randn(4, 33, 96), "mxint8").rowwise, torch.randn(sum(counts) + AFTER, 96).to(dtype)
    x[-1] *= 100  # a row of no group: NVFP4's scale is that of all rows
    cast = mx.Cast.of(name)
    check(product(Unquantized(x, cast), w, ends_of(counts), dtype), exact(encode(x, cast)), exact(w), counts)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxint8"])
def test_a_group_has_the_bits_of_its_product_alone(name):
    w, x = mx.quantize(torch.randn(3, 40, 128), name).rowwise, torch.randn(7, 128).bfloat16()
    cast, counts = mx.Cast.of("mxint8"), [1, 4, 2]
    for a in (lambda rows: rows, lambda rows: Unquantized(rows, cast)):
        out, start = product(a(x), w, ends_of(counts), torch.bfloat16), 0
        for g, count in enumerate(counts):
            one = Operand(w.data[g], w.scale[g], None, w.format, w.shape[1:])
            rows = a(x[start : start + count].contiguous())
            assert torch.equal(out[start : start + count], gemm("test", rows, one, GemmArgs(torch.bfloat16)))
            start += count


@pytest.mark.parametrize("ends", [[2, 99], [-7, 5], [4, 2], [2**31 - 1, -(2**31)]])
def test_ends_never_reach_outside(ends):
    w, whole = mx.quantize(torch.randn(2, 40, 96), "mxfp8").rowwise, torch.randn(20, 96)
    out = product(whole[5:10], w, torch.tensor(ends, dtype=torch.int32), torch.float32)
    values = decode_local(w).double()
    allowed = [torch.zeros(5, 40).double(), *(whole[5:10].double() @ values[g].t() for g in range(2))]
    for row in range(5):
        assert any(torch.allclose(out[row].double(), one[row], atol=1e-4) for one in allowed)


def test_threads_change_no_bit():
    w, x = mx.quantize(torch.randn(4, 3000, 96), "mxfp8").rowwise, torch.randn(50, 96)
    ends, before = ends_of([3, 0, 40, 5]), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = product(x, w, ends, torch.float32)
        torch.set_num_threads(2)
        assert torch.equal(product(x, w, ends, torch.float32), one)
    finally:
        torch.set_num_threads(before)


def test_it_is_chosen_in_eager_code_and_in_compiled_graphs():
    from torch._inductor.utils import run_and_get_code

    weight, x, ends = mx.quantize(torch.randn(4, 48, 64).bfloat16(), "mxfp4"), torch.randn(6, 64).bfloat16(), None

    def experts(x, ends):
        return F.grouped_mm(x, weight.mT, offs=ends)

    with torch.no_grad():
        ends = ends_of([1, 0, 3, 2])
        with mx.explain() as log:
            want = experts(x, ends)
        assert [entry.kernel for entry in log.entries] == ["cpu_codes"]
        got, code = run_and_get_code(torch.compile(experts, fullgraph=True), x, ends)
        assert torch.equal(got, want) and "mxtensor.cpu_linear_groups.default" in "".join(code)
        other = ends_of([0, 6, 0, 0])
        assert torch.equal(torch.compile(experts, fullgraph=True)(x, other), experts(x, other))


def test_refusals():
    def reason(op="test", **change):
        w = mx.quantize(torch.randn(2, 64, 64), change.get("format", "mxfp8")).rowwise
        x = torch.randn(change.get("rows", 2), 64, dtype=change.get("dtype", torch.float32))
        return grouped_plan_of(op, x, w, ends_of([1, 1]), GemmArgs(x.dtype)).refusals["cpu_codes"]

    assert reason(dtype=torch.float64) == "computes with float32, bfloat16 and float16, not float64"
    assert reason(rows=0) == "no values"
    assert "has one scale for all groups" in reason(format="float8_e4m3_tensor")
    assert reason("fprop").startswith("training multiplies values in the same way")


BAD = [
    ({"data": torch.zeros(2, 8, 31, dtype=torch.uint8)}, "32 values are 32 contiguous bytes"),
    ({"data": torch.zeros(3, 8, 32, dtype=torch.uint8)}, r"multiplies a contiguous stack .* not \[3, 8, 32\]"),
    ({"scale": torch.zeros(2, 8, 2, dtype=torch.uint8)}, "needs 8 x 1 contiguous scales"),
    ({"ends": torch.zeros(2, dtype=torch.int64)}, "2 weights need as many ends of groups in int32, got Long"),
    ({"ends": torch.zeros(3, dtype=torch.int32)}, r"2 weights need as many ends of groups in int32, got Int \[3\]"),
    ({"cast": (0, 0, 1)}, "there is no cast"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_the_op_checks_what_it_gets(change, reason):
    assert isinstance(cpu_codes.library(), cpu_codes.Library)
    given = {
        "x": torch.zeros(1, 32), "data": torch.zeros(2, 8, 32, dtype=torch.uint8),
        "scale": torch.zeros(2, 8, 1, dtype=torch.uint8), "global_scale": None, "x_global": None,
        "ends": torch.zeros(2, dtype=torch.int32), "format": (0, 0, 1, 32), "alpha": 1.0, "out_dtype": torch.float32,
        "cast": (), "amax_epsilon": 0.0,
    }  # fmt: skip
    assert not cpu_codes.linear_groups(*given.values()).any()
    with pytest.raises(ValueError, match=reason):
        cpu_codes.linear_groups(*(given | change).values())


def test_a_graph_from_elsewhere_says_why_it_cannot_run(no_compiler):
    with pytest.raises(RuntimeError, match="cpu_linear_groups is in a graph that was compiled elsewhere, and there is"):
        cpu_codes._first_call_with_groups(torch.zeros(1, 32))
