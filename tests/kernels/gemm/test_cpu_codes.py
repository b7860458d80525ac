"""Products of rows with codes on CPU: the op against the definition, for every format, instruction set and number of
rows; the choice of the kernel, the launches of its Plans, and compiled graphs."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.kernels.gemm import cpu_codes
from mxtensor.kernels.gemm.select import gemm, plan_of
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS, get_format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode_local, encode

BLOCKS = ["mxfp8[1x64]", "mxfp4[32x32]", "mxfp6[1x16]", "mxint8[1x128]", "mxfp4[1x128]"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (1, 5, 32), (2, 33, 576), (3, 70, 70), (7, 31, 200), (13, 65, 513), (32, 40, 96), (49, 37, 200), (61, 20, 9000),
]  # fmt: skip
"""Rows of x, rows of w, values. With 20 to 1,024 rows of bfloat16, codes are brought into panels, some thousand values
of a row at a time, where the processor has products of bfloat16."""
EPS = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def exact(operand):
    """The values of an operand in float64."""
    values = decode_local(operand).double()
    return values if operand.global_scale is None else values * operand.global_scale.double()


def assert_product(out, x, w, bias=None):
    """``out`` is x w^T + bias in float32 arithmetic, rounded once; x is (M, K) and w (N, K) in float64."""
    want, size = x @ w.t(), x.abs() @ w.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    normal = want.isfinite()
    assert torch.equal(normal, out.isfinite())
    error = (out.double() - want).abs()[normal]
    assert (error <= size[normal] * 2**-20 + want.abs()[normal] * EPS[out.dtype] + 2**-126).all(), error.max()


def product(x, w, dtype=None, bias=None):
    with mx.kernels("cpu_codes"):
        return gemm("test", x, w, GemmArgs(dtype or x.dtype, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
@pytest.mark.pairs
def test_every_format_is_multiplied_as_the_definition_says(name, shape, dtype):
    m, n, k = shape
    w, x, bias = mx.quantize(torch.randn(n, k), name).rowwise, torch.randn(m, k).to(dtype), torch.randn(n)
    assert_product(product(x, w), x.double(), exact(w))
    assert_product(product(x, w, bias=bias), x.double(), exact(w), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
def test_many_rows_are_multiplied_in_slabs(name, dtype):
    w, x = mx.quantize(torch.randn(300, 132), name).rowwise, torch.randn(70, 132).to(dtype)
    assert_product(product(x, w), x.double(), exact(w))
    bias = torch.randn(300).to(dtype)
    assert_product(product(x, w, bias=bias), x.double(), exact(w), bias)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_weights_are_multiplied_in_several_slabs(dtype):
    w, x = mx.quantize(torch.randn(5000, 1000), "mxfp8").rowwise, torch.randn(50, 1000).to(dtype)
    bias = torch.randn(5000).to(dtype)
    for rows in (40, 50):
        assert_product(product(x[:rows], w), x[:rows].double(), exact(w))
        assert_product(product(x[:rows], w, bias=bias), x[:rows].double(), exact(w), bias)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows", range(1, 70))
def test_every_number_of_rows(rows, dtype):
    for name in ("mxfp4", "mxfp8"):
        w, x = mx.quantize(torch.randn(17, 96), name).rowwise, torch.randn(rows, 96).to(dtype)
        assert_product(product(x, w), x.double(), exact(w))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
@pytest.mark.pairs
def test_the_cast_of_activations_is_the_definition(name, dtype, rows):
    format = get_format(name)
    w, x = mx.quantize(torch.randn(40, 160), "mxfp8").rowwise, torch.randn(rows, 160).to(dtype)
    cast = Cast(format)
    assert cpu_codes._is_cast_here(cast)
    assert_product(product(Unquantized(x, cast), w, dtype), exact(encode(x, cast)), exact(w))


def codes_of(name, k=64):
    """An operand with every code, each with every scale byte: row s holds all codes of the element with scale s."""
    format = get_format(name)
    count = 1 << format.element.bits
    blocks = format.block[1]
    rows = 256
    out = Operand.empty(format, (rows, max(count, blocks)))
    codes = torch.arange(256, dtype=torch.uint8)
    if format.element.bits == 8:
        data = codes.expand(rows, 256)
    elif format.element.bits == 4:
        low = torch.arange(out.shape[1]) % 16
        data = (low[0::2] | low[1::2] << 4).to(torch.uint8).expand(rows, -1)
    else:
        c = torch.arange(64).view(-1, 4)
        word = c[:, 0] | c[:, 1] << 6 | c[:, 2] << 12 | c[:, 3] << 18
        data = torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).flatten().to(torch.uint8).expand(rows, -1)
    out.data.view(torch.uint8).copy_(data)
    out.scale.copy_(codes[:, None].expand_as(out.scale))
    if out.global_scale is not None:
        out.global_scale.fill_(0.75)
    return out


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"])
def test_every_code_with_every_scale(name, dtype):
    """x picks one value of a row at a time: each product is one code times one scale."""
    w = codes_of(name)
    k = w.shape[1]
    x = torch.eye(k, dtype=dtype)
    want = exact(w)
    for start, rows in [*((start, 16) for start in range(0, k, 16)), (0, 32), (0, k)]:  # in registers; in panels
        out = product(x[start : start + rows], w, torch.float32).double()
        values = want.t()[start : start + rows]
        # An infinity or NaN of a row meets the zeros of x: every product of that row is NaN.
        usual = want.isfinite().all(1).expand_as(values)
        rounded = values.float().double()
        assert torch.equal(out[usual], rounded[usual])
        assert not out[~usual].isfinite().any()


UNUSUAL = {"nvfp4": (0, 1, 0x7E, 0x7F, 0x81), "e8m0": (0, 1, 200, 226, 227, 230, 255)}
"""Scale bytes of some rows: zeros, the smallest, the last that need no care, the first that do, NaN, a negative one."""


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33, 50])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "mxfp4[1x16]"])
def test_unusual_scales_among_usual_ones(name, rows):
    """Four rows of w are multiplied together only if none needs care; the last four are not read past the end."""
    for n, k in ((41, 96), (40, 576), (12, 200), (4, 130)):
        w = mx.quantize(torch.randn(n, k), name).rowwise
        scale = w.scale.view(torch.uint8).view(-1)
        for byte in UNUSUAL.get(name, UNUSUAL["e8m0"]):
            scale[torch.randint(len(scale), ())] = byte
        for dtype in DTYPES[:2]:
            x = torch.randn(rows, k).to(dtype)
            assert_product(product(x, w, torch.float32), x.double(), exact(w))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows", [3, 40])
def test_extreme_activations(rows, dtype):
    w = mx.quantize(torch.randn(9, 96), "mxfp8").rowwise
    for scale in (1e-38, 1e-30, 1e30, 1e36):
        x = (torch.randn(rows, 96) * scale).to(dtype)
        assert_product(product(x, w, torch.float32), x.double(), exact(w))
    x = torch.randn(rows, 96).to(dtype)
    x[0, 0], x[1, 5] = float("inf"), float("nan")
    out = product(x, w)
    assert out[2:].isfinite().all() and not out[:2].isfinite().any()


def test_results_do_not_depend_on_threads():
    w = mx.quantize(torch.randn(400, 512), "mxfp4").rowwise
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            x = torch.randn(5, 512, dtype=torch.bfloat16)
            found.append((product(x, w), product(Unquantized(x, Cast.of("nvfp4")), w, torch.bfloat16)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in found[1:] for a, b in zip(found[0], result, strict=True))


# ---------------------------------------------------------------------------------------------- the choice, launches


def test_it_is_chosen_and_named_in_explain():
    layer = torch.nn.Linear(64, 32).bfloat16()
    mx.quantize_(layer, "mxfp8-weight-only")
    with torch.no_grad(), mx.explain() as log:
        layer(torch.randn(2, 64, dtype=torch.bfloat16))
    assert "cpu_codes" in str(log)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "computes with float32, bfloat16 and float16, not float64"),
        ({"rows": 0}, "no values"),
        (
            {"cast": True},
            "its left operand is cast already: the kernels of other forms of this operand give the same bits",
        ),
    ],
)
def test_refusals(change, reason):
    dtype = change.get("dtype", torch.float32)
    w, x = mx.quantize(torch.randn(64, 64), "mxfp8").rowwise, torch.randn(change.get("rows", 2), 64, dtype=dtype)
    if "cast" in change:
        x = mx.quantize(x, "mxfp8").rowwise
    refusals = plan_of("test", x, w, GemmArgs(dtype)).refusals
    assert refusals["cpu_codes"] == reason


def test_codes_that_are_not_contiguous_are_copied():
    w, x = mx.quantize(torch.randn(64, 64), "mxfp8").rowwise, torch.randn(2, 64)
    strided = Operand(w.data.t().contiguous().t(), w.scale, None, w.format, w.shape)
    args = GemmArgs(torch.float32)
    assert plan_of("test", x, strided, args).kernel.name == "cpu_codes"
    assert torch.equal(cpu_codes.run(x, strided, args), cpu_codes.run(x, w, args))


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad", "general_gemm NT"])
def test_training_takes_the_kernel_that_also_multiplies_values(op):
    x, w = torch.randn(2, 64), mx.quantize(torch.randn(32, 64), "mxfp8").rowwise
    plan = plan_of(op, x, w, GemmArgs(torch.float32))
    assert plan.kernel.name == "emulated" and "training multiplies values" in plan.refusals["cpu_codes"]


def test_a_compiled_graph_calls_the_op():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    for config in ("mxfp8-weight-only", "mxfp4"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 48)).bfloat16()
        mx.quantize_(model, config)
        with torch.no_grad():
            want = model(x)
            torch._dynamo.reset()
            got, code = run_and_get_code(torch.compile(model, fullgraph=True), x)
        assert torch.equal(got, want) and "mxtensor.cpu_linear.default" in "".join(code)


FIRST_USE = """
import torch, mxtensor as mx
layer = mx.quantize_(torch.nn.Linear(64, 48), "mxfp4")
x = torch.randn(2, 64)
with torch.no_grad():
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
"""


@pytest.mark.exhaustive
def test_the_first_use_may_be_a_compiled_graph():
    """Neither the build nor its tables are traced. The second process finds the graph in torch's cache."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_graph_from_elsewhere_says_why_it_cannot_run(no_compiler):
    with pytest.raises(RuntimeError, match="was compiled elsewhere, and there is no C"):
        cpu_codes._first_call(torch.zeros(1, 32))


def test_the_op_is_for_the_cpu():
    with pytest.raises(ValueError, match="mxtensor::cpu_linear needs tensors on the CPU, not on cuda"):
        cpu_codes._first_call(mock.Mock(device=torch.device("cuda")))


BAD = [
    ({"data": torch.zeros(8, 31, dtype=torch.uint8)}, "32 values are 32 contiguous bytes"),
    ({"scale": torch.zeros(8, 2, dtype=torch.uint8)}, "needs 8 x 1 contiguous scales"),
    ({"format": (9, 0, 1, 32)}, "there is no format"),
    ({"bias": torch.zeros(7)}, "a bias is"),
    ({"global_scale": torch.zeros(2)}, "a global scale is one float32"),
    ({"x": torch.zeros(1, 32, dtype=torch.float64)}, "takes float32, bfloat16 and float16"),
    ({"cast": (0, 0, 1)}, "there is no cast"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_the_op_checks_what_it_gets(change, reason):
    assert isinstance(cpu_codes.library(), cpu_codes.Library)
    given = {
        "x": torch.zeros(1, 32), "data": torch.zeros(8, 32, dtype=torch.uint8),
        "scale": torch.zeros(8, 1, dtype=torch.uint8), "global_scale": None, "x_global": None, "bias": None,
        "format": (0, 0, 1, 32), "alpha": 1.0, "beta": 1.0, "out_dtype": torch.float32, "cast": (), "amax_epsilon": 0.0,
    }  # fmt: skip
    assert not cpu_codes.linear(*given.values()).any()
    with pytest.raises(ValueError, match=reason):
        cpu_codes.linear(*(given | change).values())


@pytest.mark.exhaustive
def test_without_a_compiler_the_plain_path_runs(tmp_path):
    script = (
        "import torch, mxtensor as mx\n"
        "from mxtensor.kernels.gemm import cpu_codes\n"
        "l = torch.nn.Linear(64, 32); mx.quantize_(l, 'mxfp8-weight-only')\n"
        "with torch.no_grad(), mx.explain() as log: l(torch.randn(1, 64))\n"
        "assert 'emulated' in str(log), log\n"
        "assert 'did not build' in cpu_codes.library()\n"
    )
    environment = {**os.environ, "CXX": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("plain path") == 1, done.stderr


def test_a_weight_changed_in_place_is_seen():
    w, x = mx.quantize(torch.randn(8, 32), "mxfp8"), torch.randn(1, 32)
    with torch.no_grad():
        F.linear(x, w), F.linear(x, w)
        w.copy_(torch.randn(8, 32))
        assert_product(F.linear(x, w), x.double(), exact(w.rowwise))


# ---------------------------------------------------------------------------------------------- threads

THREADS = """
import os, time, torch, mxtensor as mx
from mxtensor.kernels.gemm.cpu_codes import library
w, x = mx.quantize(torch.randn(2048, 256), "mxfp8"), torch.randn(2, 256)
library()
torch.set_num_threads(2)
time.sleep(0.3)  # the threads that built the library end
before = len(os.listdir("/proc/self/task"))
torch.nn.functional.linear(x, w)
print(len(os.listdir("/proc/self/task")) - before, len({l.split()[-1] for l in open("/proc/self/maps") if "gomp" in l}))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch has other threads")
def test_the_op_runs_on_torchs_own_threads():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr  # one thread more, and one OpenMP
