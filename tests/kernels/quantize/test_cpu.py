"""The C++ casts are bitwise the reference for all values, shapes, threads and modes."""

import dataclasses
import math
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.quantize import cpu_casts
from mxtensor.kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from mxtensor.numerics import reference
from mxtensor.numerics.choices import ScaleCalculationMode

pytestmark = pytest.mark.skipif(isinstance(cpu_casts.library(), str), reason=str(cpu_casts.library()))
FORMATS = [
    *mx.FORMATS,
    *("mxfp8[1x16]", "mxfp6_e2m3[1x128]", "mxfp8[32x32]", "mxfp6[16x16]", "mxfp4[128x128]", "mxint8[64x64]"),
    *("nvfp4[1x32]", "nvfp4[16x16]", "nvfp4_single_level[64x64]", "float8_1x128[1x64]", "float8_1x128[32x32]"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_format = pytest.mark.parametrize("format", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(count, dtype, cols):
    """Every bit pattern with equal probability, also NaN, infinities and subnormals."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, (count // cols, cols), dtype=torch.int64).to(integers).view(dtype)


def every(dtype, cols):
    return torch.arange(65536).to(torch.int16).view(dtype).view(-1, cols)


def finite(x):
    return torch.where(x.isfinite(), x, 1.0)


def magnitudes(rows, cols):
    return torch.randn(rows, cols) * 2.0 ** torch.randint(-149, 120, (rows, 1)).float()


def specials(rows, cols, values):
    """Ordinary values, some blocks of zeros of both signs, and some of ``values``."""
    x = torch.randn(rows, cols)
    x[: rows // 4, : cols // 2] *= 0.0
    for value in values:
        x[torch.randint(rows, (5,)), torch.randint(cols, (5,))] = value
    return x


LARGEST, NAN, INF = torch.finfo(torch.float32).max, float("nan"), float("inf")
SOURCES = {
    "float32 bits": lambda: bits(1 << 16, torch.float32, 512),
    "float32 bits, finite": lambda: finite(bits(1 << 16, torch.float32, 512)),
    "bfloat16, every value": lambda: every(torch.bfloat16, 128),
    "bfloat16, every finite value": lambda: finite(every(torch.bfloat16, 128)),
    "bfloat16, every value alone": lambda: every(torch.bfloat16, 1),
    "float16, every value": lambda: every(torch.float16, 64),
    "float16, every finite value": lambda: finite(every(torch.float16, 256)),
    "magnitudes, ragged": lambda: magnitudes(301, 37),
    "bfloat16, ragged": lambda: magnitudes(77, 131).bfloat16(),
    "many columns": lambda: magnitudes(3, 2100),
    "largest floats": lambda: specials(150, 200, [LARGEST, -LARGEST]),
    "some NaN": lambda: specials(150, 200, [NAN, -NAN]),
    "some infinities": lambda: specials(150, 200, [INF, -INF]).bfloat16(),
    "subnormals only": lambda: torch.randn(70, 150) * 2.0**-145,
    "the smallest float among zeros": lambda: specials(70, 150, [2.0**-149]) * 2.0**-149,
    "zeros of both signs": lambda: torch.randn(40, 140) * 0.0,
    "one dimension": lambda: torch.randn(77),
    "four dimensions": lambda: torch.randn(2, 3, 37, 70).half(),
    "no rows": lambda: torch.randn(0, 64),
    "no columns": lambda: torch.randn(5, 0),
    "transposed": lambda: specials(300, 333, [NAN, INF, LARGEST]).t(),
    "transposed, magnitudes": lambda: magnitudes(200, 140).bfloat16().t(),
    "transposed, small": lambda: torch.randn(5, 3).half().t(),
    "transposed, a stack": lambda: torch.randn(3, 2, 133, 70).bfloat16().transpose(-1, -2),
}
each_source = pytest.mark.parametrize("source", SOURCES)


@pytest.fixture(autouse=True)
def poison():
    """Memory from torch.empty is full of NaN and largest integers, so that a missing write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def casts(format):
    """The format with each of its scale rules; power-of-two scales have four."""
    modes = ScaleCalculationMode if mx.get_format(format).scale.significant_bits == 1 else ["rceil"]
    return [mx.Cast.of(format, mode) for mode in modes]


def same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(ours, expected):
    assert (ours.shape, ours.format) == (expected.shape, expected.format)
    assert same(ours.data, expected.data)
    assert same(ours.scale, expected.scale)
    assert (ours.global_scale is None) == (expected.global_scale is None)
    assert ours.global_scale is None or same(ours.global_scale.reshape(-1), expected.global_scale.reshape(-1))


def same_values(a, b):
    nan = a.isnan()
    return (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(nan, b.isnan())
        and torch.equal(a[~nan], b[~nan])
        and torch.equal(a[~nan].signbit(), b[~nan].signbit())
    )


@each_format
@each_source
def test_casts_equal_the_reference_bit_for_bit(format, source):
    x = SOURCES[source]()
    for cast in casts(format):
        with mx.explain() as log:
            ours = quantize_operand(x, cast)
        assert [e.kernel for e in log.entries] == ["cpu"]
        expected = reference.encode(x, cast)
        assert_same(ours, expected)
    for dtype in DTYPES:
        with mx.explain() as log:
            values = dequantize_operand(ours, dtype)
        assert [e.kernel for e in log.entries] == ["cpu"]
        assert same_values(values, reference.decode(expected, dtype))


@each_dtype
@each_format
def test_any_code_under_any_scale_decodes_as_the_reference_does(format, dtype):
    fmt, shape = mx.get_format(format), (512, 600)
    data = torch.randint(0, 256, fmt.data_shape(shape), dtype=torch.uint8).view(fmt.element.dtype)
    if fmt.scale.dtype is torch.uint8:
        scale = torch.randint(0, 256, fmt.scale_shape(shape), dtype=torch.uint8)
    else:
        scale = bits(math.prod(fmt.scale_shape(shape)), torch.float32, 1).view(fmt.scale_shape(shape))
    operand = reference.Operand(data, scale, torch.tensor(0.37) if fmt.global_scale else None, fmt, shape)
    assert same_values(cpu_casts._dequantize(operand, dtype), reference.decode(operand, dtype))


@pytest.mark.parametrize("byte", range(0, 256, 5))
def test_one_scale_byte_throughout(byte):
    """Every code of every MX element, in every target."""
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8", "nvfp4_single_level"):
        fmt = mx.get_format(name)
        data = torch.arange(768).to(torch.uint8).view(4, 192).view(fmt.element.dtype)
        shape = (4, 192 * fmt.element.packing[0] // fmt.element.packing[1])
        scale = torch.full(fmt.scale_shape(shape), byte, dtype=torch.uint8)
        operand = reference.Operand(data, scale, None, fmt, shape)
        for dtype in DTYPES:
            assert same_values(cpu_casts._dequantize(operand, dtype), reference.decode(operand, dtype))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("format", ["mxfp6", "mxfp8[32x32]", "nvfp4", "float8_tensor", "float8_row"])
def test_spans_of_rows_meet_without_a_seam(format, count, threads):
    threads(count)
    x, cast = torch.randn(1001, 384), mx.Cast.of(format)
    ours, expected = cpu_casts._quantize(x, cast), reference.encode(x, cast)
    assert_same(ours, expected)
    transposed = x.t().contiguous().t()
    assert_same(cpu_casts._quantize(transposed, cast), expected)
    part = cpu_casts.decode_rows(ours, 160, 801, torch.full((801, 384), float("nan")))
    assert torch.equal(part, reference.decode(expected, torch.float32)[160:961])


@each_format
def test_rows_of_a_stack_are_counted_through_its_matrices(format):
    """Each matrix of the stack ends in a short block."""
    x, cast = torch.randn(3, 70, 96), mx.Cast.of(format)
    ours, expected = cpu_casts._quantize(x, cast), reference.decode(reference.encode(x, cast), torch.bfloat16)
    part = cpu_casts.decode_rows(ours, 67, 100, torch.full((100, 96), float("nan"), dtype=torch.bfloat16))
    assert torch.equal(part, expected.view(210, 96)[67:167])


def test_it_refuses_in_a_sentence_what_it_cannot_do():
    x, odd = torch.randn(64, 128), dataclasses.replace(mx.get_format("mxfp8"), block=(1, 8))
    reasons = {}
    for name, source, cast in (
        ("float64", x.double(), mx.Cast.of("mxfp8")),
        ("strides", torch.randn(64, 256)[:, ::2], mx.Cast.of("mxfp8")),
        ("part of a row", torch.randn(64, 256)[:, :128], mx.Cast.of("nvfp4")),
        ("stochastic", x, mx.Cast.of("mxfp8", rounding="stochastic")),
        ("odd blocks", x, mx.Cast(odd)),
    ):
        with mx.explain() as log:
            operand = quantize_operand(source, cast)
        reasons[name] = log.entries[0].refusals["cpu"]
        if name != "stochastic":
            assert_same(operand, reference.encode(source, cast))
    assert reasons == {
        "float64": "not for float64",
        "strides": "neither contiguous nor the transpose of a contiguous tensor",
        "part of a row": "neither contiguous nor the transpose of a contiguous tensor",
        "stochastic": "rounds to nearest only",
        "odd blocks": "not for e8m0 scales of 1x8 blocks",
    }


def test_it_refuses_to_decode_parts_and_double_precision():
    operand = quantize_operand(torch.randn(64, 256), mx.Cast.of("nvfp4"))
    part = dataclasses.replace(operand, data=operand.data[:, :64], scale=operand.scale[:, :8], shape=(64, 128))
    for given, dtype, reason in (
        (part, torch.float32, "not contiguous"),
        (operand, torch.float64, "not for float64"),
    ):
        with mx.explain() as log:
            values = dequantize_operand(given, dtype)
        assert log.entries[0].refusals["cpu"] == reason
        assert same_values(values, reference.decode(given, dtype))


def test_without_a_compiler_the_other_casts_do_the_work(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    assert cpu_casts.library.__wrapped__().startswith("quantize.cpp did not build: ")


DEFAULTS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "meta": torch.device("meta"),
}


@pytest.mark.parametrize("without", [None, "a compiler"])
@pytest.mark.parametrize("default", DEFAULTS)
def test_what_torch_makes_tensors_of_by_default_changes_nothing(default, without, request, monkeypatch):
    if without:
        request.getfixturevalue("no_compiler")
    monkeypatch.setattr(cpu_casts, "_FORMATS", {})
    x, w = (torch.randn(rows, 320, dtype=torch.float16) for rows in (5, 288))

    def made():
        components = []
        for name in ("mxfp8", "mxfp4", "nvfp4", "float8_tensor", "float8_128x128"):
            operand = quantize_operand(w, mx.Cast.of(name))
            components += [*operand.tensors, dequantize_operand(operand, torch.float16)]
            components.append(torch.nn.functional.linear(x, mx.quantize(w, name)))
        return components

    expected = made()
    cpu_casts._FORMATS.clear()
    if default == "meta":
        with torch.device(default):
            found = made()
    else:
        torch.set_default_dtype(DEFAULTS[default])
        try:
            found = made()
        finally:
            torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(reference_bytes(ours), reference_bytes(theirs))


def reference_bytes(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.exhaustive
def test_a_forked_child_casts_on():
    """A forked child process does not have the threads of its parent."""
    code = (
        "import os, torch, mxtensor as mx\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(1024, 512)\n"
        "expected = mx.quantize(x, 'mxfp8').dequantize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(mx.quantize(x, 'mxfp8').dequantize(), expected) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


LATE = """
import atexit, os, threading, time, torch, mxtensor as mx
torch.set_num_threads(2)
x = torch.randn(1024, 512)
expected = bytes(mx.quantize(x, 'mxfp8').dequantize().numpy())

def cast(name):
    # in Python: torch's own threads do not survive a fork
    print(name, bytes(mx.quantize(x, 'mxfp8').dequantize().numpy()) == expected, flush=True)

def outlives():
    threading.main_thread().join()
    time.sleep(0.1)
    cast('thread after the main thread')

def at_exit():
    cast('atexit')
    child = os.fork()
    if child == 0:
        cast('child that was forked in atexit')
        os._exit(0)
    os.waitpid(child, 0)

atexit.register(at_exit)
threading.Thread(target=outlives).start()
daemon = threading.Thread(target=cast, args=('daemon thread',), daemon=True)
daemon.start()
daemon.join()
child = os.fork()
if child == 0:
    cast('child')
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.exhaustive
def test_casts_run_while_the_interpreter_shuts_down():
    """The pool takes no work then: the thread that casts does all of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE], check=True, timeout=120, capture_output=True, text=True
    )
    names = ["daemon thread", "child", "thread after the main thread", "atexit", "child that was forked in atexit"]
    assert done.stdout.splitlines() == [f"{name} True" for name in names] and done.stderr == ""


class Pool:
    """Takes ``accepted`` pieces of work, then shuts down."""

    def __init__(self, accepted):
        self.accepted, self.taken = accepted, []

    def shutdown(self):
        self.accepted = 0

    def submit(self, run, *memory):
        if len(self.taken) == self.accepted:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.taken.append((run, memory))


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_pool_that_shuts_down_leaves_the_work_to_the_caller(accepted, threads):
    threads(4)
    cpu_casts._pool.append(Pool(accepted))
    x, cast = torch.randn(1001, 384), mx.Cast.of("nvfp4")
    assert_same(cpu_casts._quantize(x, cast), reference.encode(x, cast))
    for run, memory in cpu_casts._pool[0].taken:  # a thread that comes late finds nothing to do
        run(*memory)


def test_an_interrupted_cast_leaves_its_memory_to_the_threads_that_write_to_it(threads):
    threads(2)
    cpu_casts._pool.append(ThreadPoolExecutor(1))
    started, finish, alive = threading.Event(), threading.Event(), []

    class Memory:
        pass

    memory = Memory()
    there = weakref.ref(memory)

    def work(first, end):
        if threading.current_thread() is threading.main_thread():
            assert started.wait(10)
            raise KeyboardInterrupt
        started.set()
        assert finish.wait(10)
        alive.append(there() is not None)
        return 0

    with pytest.raises(KeyboardInterrupt):
        cpu_casts.in_spans(work, 2, 1 << 20, memory)
    del memory
    finish.set()
    cpu_casts._pool[0].shutdown()
    assert alive == [True]


def test_an_error_in_a_thread_is_raised(threads):
    threads(2)
    cpu_casts._pool.append(ThreadPoolExecutor(1))
    other = threading.Event()

    def work(first, end):
        if threading.current_thread() is not threading.main_thread():
            other.set()
            raise ValueError("in a thread")
        assert other.wait(10)
        return 0

    with pytest.raises(ValueError, match="in a thread"):
        cpu_casts.in_spans(work, 2, 1 << 20)
