"""explain(): what is logged, how long it took, and a table that fits a terminal."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import mxtensor as mx
from mxtensor.core import explain
from mxtensor.core.explain import Entry, Log, Timer
from mxtensor.core.kernel import Kernel, Spec, describe
from mxtensor.core.select import dispatch_context, perform, restore_context

BF16_ON_CPU = torch.ops.mkldnn._is_mkldnn_bf16_supported()
CPU = torch.device("cpu")


def spec(op="mm", rows=8, device="cpu", traced=False):
    shapes = ((rows, 64), (16, 64))
    return Spec(op, shapes, ("float32", "mxfp8_e4m3"), torch.float32, torch.device(device), traced)


def kernels_of(log):
    return [entry.kernel for entry in log.entries if entry.spec.op in ("mm", "linear")]


# ---------------------------------------------------------------------------------------------- what is logged


def test_explain_logs_inside_its_block_only_and_nests():
    w, x = mx.quantize(torch.randn(16, 64), "mxfp8"), torch.randn(8, 64)
    with mx.explain() as outer:
        x @ w.t()
        with mx.explain() as inner:
            x @ w.t()
            x @ w.t()
        x @ w.t()
    x @ w.t()
    assert (len(kernels_of(outer)), len(kernels_of(inner))) == (2, 2)


def test_an_empty_log_says_so():
    with mx.explain() as log:
        torch.randn(4, 4) @ torch.randn(4, 4)
    assert str(log) == log.table() == log.table(refused=True) == "no MXTensor operation ran"


def test_each_thread_has_its_own_log():
    w, x, logs = mx.quantize(torch.randn(16, 64), "mxfp8"), torch.randn(8, 64), []

    def other():
        x @ w.t()
        with mx.explain(time=True) as log:
            x @ w.t()
        logs.append(log)

    with mx.explain() as here:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert here.entries == [] and len(kernels_of(logs[0])) == 1 and logs[0].entries[0].ms is not None


def test_a_thread_without_a_log_takes_the_one_that_it_is_given():
    found = []
    with mx.explain() as log, mx.kernels("emulated"):
        context = dispatch_context()

    def other():
        with restore_context(*context):
            found.append(dispatch_context())
        found.append(dispatch_context())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [(log, "emulated"), (None, None)]
    with mx.explain() as inner, mx.kernels("dequant"), restore_context(*context):
        assert dispatch_context() == (inner, "dequant")


def test_describe_names_operands_and_shapes():
    assert describe(spec()) == "float32 8x64, mxfp8_e4m3 16x64"


# ---------------------------------------------------------------------------------------------- time


@pytest.fixture
def clock(monkeypatch):
    """Wall time that only tests move on, in seconds."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("mxtensor.core.explain.time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def sleeping(clock, name, seconds, *inside):
    """A kernel that takes so long, and then performs others."""

    def run():
        clock.seconds += seconds
        for kernel, op in inside:
            perform((kernel,), spec(op))

    return Kernel(name, lambda spec: None, run)


def test_nested_calls_are_counted_once(clock):
    inner = sleeping(clock, "inner", 0.002)
    middle = sleeping(clock, "middle", 0.01, (inner, "cast"))
    outer = sleeping(clock, "outer", 0.1, (middle, "step"), (inner, "cast"))
    with mx.explain(time=True) as log:
        perform((outer,), spec("linear"))
        perform((inner,), spec("cast"))
    times = {entry.kernel: round(entry.ms, 6) for entry in log.entries}
    assert times == {"outer": 100.0, "middle": 10.0, "inner": 2.0}
    assert_expected_inline(
        log.table(),
        """\
calls  ms       op      operands                        kernel
-----  -------  ------  ------------------------------  ------
1      100.000  linear  float32 8x64, mxfp8_e4m3 16x64  outer
1      10.000   step    float32 8x64, mxfp8_e4m3 16x64  middle
3      6.000    cast    float32 8x64, mxfp8_e4m3 16x64  inner""",
    )


def test_a_kernel_that_raises_is_timed_and_leaves_the_next_one_alone(clock):
    def fail():
        clock.seconds += 1.0
        raise ValueError("no")

    with mx.explain(time=True) as log:
        with pytest.raises(ValueError, match="no"):
            perform((Kernel("fails", lambda spec: None, fail),), spec())
        perform((sleeping(clock, "works", 2.0),), spec())
    assert [entry.ms for entry in log.entries] == [1000.0, 2000.0]


def test_without_time_and_when_a_call_is_traced_there_is_none(clock):
    kernel = sleeping(clock, "k", 1.0)
    with mx.explain() as plain:
        perform((kernel,), spec())
    with mx.explain(time=True) as timed:
        perform((kernel,), spec(traced=True))
        perform((kernel,), spec(rows=7))
    assert [entry.ms for entry in plain.entries] == [None]
    assert [entry.ms for entry in timed.entries] == [None, 1000.0]
    assert "ms" not in plain.table()
    timed.entries.pop()
    assert_expected_inline(
        timed.table(),
        """\
calls  ms  op  operands                        kernel
-----  --  --  ------------------------------  ------
1      -   mm  float32 8x64, mxfp8_e4m3 16x64  k""",
    )


def test_entries_without_a_time_come_last(clock):
    kernel = sleeping(clock, "k", 1.0)
    with mx.explain(time=True) as log:
        perform((kernel,), spec("traced", traced=True))
        perform((kernel,), spec("now"))
    assert [line.split()[2] for line in log.table().splitlines()[2:]] == ["now", "traced"]


def test_a_compiled_layer_is_logged_while_it_is_traced_without_a_time():
    torch._dynamo.reset()
    linear = mx.quantize_(nn.Linear(64, 16).bfloat16(), "mxfp8-weight-only")
    compiled, x = torch.compile(linear, backend="aot_eager", fullgraph=True), torch.randn(8, 64).bfloat16()
    with torch.no_grad(), mx.explain(time=True) as first:
        compiled(x)
    with torch.no_grad(), mx.explain(time=True) as second:
        compiled(x)
    assert first.entries and all(entry.spec.traced and entry.ms is None for entry in first.entries)
    assert kernels_of(second) == []


def test_a_training_step_is_timed_forward_and_backward():
    linear, x = nn.Linear(64, 16), torch.randn(8, 64, requires_grad=True)
    with mx.explain(time=True) as log, mx.autocast():
        linear(x).sum().backward()
    timed = {entry.spec.op for entry in log.entries if entry.ms is not None}
    assert timed >= {"fprop", "dgrad", "wgrad", "cast pair"}


def test_an_op_that_dequantizes_is_timed():
    w = mx.quantize(torch.randn(16, 64), "mxfp8")
    with mx.explain(time=True) as log:
        w.sum()
    times = {entry.kernel: entry.ms for entry in log.entries}
    assert times["dequantized"] is not None and all(ms is not None for ms in times.values())


def test_wall_time_of_a_real_call_is_about_what_it_took():
    def run():
        time.sleep(0.02)

    with mx.explain(time=True) as log:
        perform((Kernel("sleeps", lambda spec: None, run),), spec())
    assert 15 < log.entries[0].ms < 2000


class Event:
    """Stands in for a CUDA event: its time is the clock's when it is recorded; read before synchronize, it fails."""

    seconds = 0.0
    waited = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream, self.at, self.done = stream, Event.seconds, False

    def synchronize(self):
        self.done, Event.waited = True, Event.waited + 1

    def elapsed_time(self, stop):
        assert stop.done and stop.stream == self.stream
        return (stop.at - self.at) * 1e3


def test_a_gpu_is_timed_by_events_that_are_read_when_the_table_is_printed(monkeypatch):
    capturing = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))

    def run():
        Event.seconds += 0.5

    kernel = Kernel("k", lambda spec: None, run)
    with mx.explain(time=True) as log:
        perform((kernel,), spec(device="cuda:0"))
        capturing.append(True)
        perform((kernel,), spec(device="cuda:0"))
        assert Event.waited == 0
    assert [entry.ms for entry in log.entries] == [500.0, None] and Event.waited == 1


@pytest.mark.gpu
def test_a_gpu_is_timed_without_a_wait_inside_the_block():
    w, x = mx.quantize(torch.randn(4096, 4096, device="cuda"), "mxfp8"), torch.randn(4096, 4096, device="cuda")
    F.linear(x, w)
    with mx.explain(time=True) as log:
        F.linear(x, w)
    assert all(entry.ms > 0 for entry in log.entries)


# ---------------------------------------------------------------------------------------------- the table


def explained(model, *inputs, refused=False):
    with mx.explain() as log, torch.no_grad():
        for x in inputs:
            model(x)
    return log.table(refused=refused)


def test_the_table_of_a_small_float32_linear():
    linear, x = mx.quantize_(nn.Linear(64, 16), "mxfp8"), torch.randn(8, 64)
    assert_expected_inline(
        explained(linear, x, x, refused=True),
        """\
calls  op      operands                           kernel
-----  ------  ---------------------------------  ---------
2      linear  mxfp8_e4m3 8x64, mxfp8_e4m3 16x64  cpu_codes
    scaled_mm, dot_scaled, fp8_rows, small_m: runs on cuda, this tensor is on cpu""",
    )


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
def test_the_table_of_a_model_joins_layers_of_one_kind_for_any_number_of_rows():
    block = [nn.Linear(128, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)]
    model = mx.quantize_(nn.Sequential(*block, *[nn.Linear(128, 128) for _ in range(4)]).bfloat16(), "mxfp8")
    assert_expected_inline(
        explained(model, *(torch.randn(rows, 128).bfloat16() for rows in (64, 1, 2, 3))),
        """\
calls  op      operands                                    kernel
-----  ------  ------------------------------------------  ---------
20     linear  mxfp8_e4m3 {1..64}x128, mxfp8_e4m3 128x128  cpu_codes
4      linear  mxfp8_e4m3 {1..64}x128, mxfp8_e4m3 512x128  cpu_codes
4      linear  mxfp8_e4m3 {1..64}x512, mxfp8_e4m3 128x512  cpu_codes""",
    )


def logged(*entries):
    return Log([Entry(spec, kernel, refusals) for spec, kernel, refusals in entries])


def test_up_to_three_numbers_of_rows_are_listed_and_more_are_a_range():
    assert "{1,8,64}x64" in logged(*((spec(rows=n), "k", {}) for n in (64, 1, 8, 8))).table()
    assert "{1..64}x64" in logged(*((spec(rows=n), "k", {}) for n in (64, 1, 8, 9))).table()
    batches = [spec()._replace(shapes=((2, n, 64), (16, 64))) for n in (3, 4)]
    assert "2x3x64" in logged((batches[0], "k", {})).table()
    assert "{6,8}x64" in logged(*((batch, "k", {}) for batch in batches)).table()


def test_other_operands_ops_and_kernels_are_other_lines():
    base = spec()
    others = [
        base._replace(op="linear"),
        base._replace(shapes=((8, 32), (16, 32))),
        base._replace(shapes=((8, 64), (32, 64))),
        base._replace(formats=("bfloat16", "mxfp8_e4m3")),
    ]
    table = logged((base, "k", {}), *((other, "k", {}) for other in others), (base, "j", {})).table()
    assert len(table.splitlines()) == 2 + 6
    vectors = [base._replace(shapes=((n,),), formats=("mxfp8_e4m3",)) for n in (3, 4)]
    assert len(logged(*((vector, "k", {}) for vector in vectors)).table().splitlines()) == 2 + 2


def test_refusals_are_printed_on_request_each_reason_once():
    log = logged(
        (spec(rows=1), "k", {"a": "too tall", "b": "too tall", "c": "for at most 128 rows"}),
        (spec(rows=2), "k", {"a": "too tall", "c": "for at most 128 rows"}),
    )
    assert "too tall" not in log.table()
    assert_expected_inline(
        log.table(refused=True),
        """\
calls  op  operands                            kernel
-----  --  ----------------------------------  ------
2      mm  float32 {1,2}x64, mxfp8_e4m3 16x64  k
    a, b: too tall
    c: for at most 128 rows""",
    )


def test_no_line_is_wider_than_a_terminal():
    shapes = ((12345, 123456, 1234), (1234567, 123456))
    long = Spec("aten.some_very_long_name_of_an_op.default", shapes, (torch.bfloat16, "mxfp8_e4m3[32x32]"), 0, CPU)
    log = logged((spec(), "k", {}), (long, "a kernel of some name", {"other": "because " * 30}))
    assert max(map(len, log.table(refused=True).splitlines())) <= 100
    assert_expected_inline(
        log.table(),
        """\
calls  op                      operands                                        kernel
-----  ----------------------  ----------------------------------------------  ---------------------
1      mm                      fp32 8x64, mxfp8_e4m3 16x64                     k
1      some_very_long_name...  bf16 12345x123456x1234, mxfp8_e4m3[32x32] 1...  a kernel of some name""",
    )


def test_a_timer_of_a_cpu_reads_the_wall():
    timer = Timer(CPU)
    timer.end()
    assert timer.ms() >= 0


# ---------------------------------------------------------------------------------------------- a log left open


@pytest.fixture
def small_logs(monkeypatch):
    for name, most in {"MAX_ENTRIES": 20, "MAX_LINES": 3, "MAX_PENDING": 8, "MAX_REASONS": 5}.items():
        monkeypatch.setattr(explain, name, most)


def test_a_log_that_is_left_open_is_bounded_and_counts_all(small_logs):
    with mx.explain() as log:
        for i in range(100):
            explain.record(spec(rows=8 + i % 7), "k", {"a": "refused"})
    assert len(log.entries) == 20 and len(log) == 100 and len(log.later) == 1
    assert_expected_inline(
        log.table(refused=True),
        """\
calls  op  operands                              kernel
-----  --  ------------------------------------  ------
100    mm  float32 {8..14}x64, mxfp8_e4m3 16x64  k
    a: refused
log.entries holds the first 20 of 100 decisions; the table counts all of them""",
    )


def test_a_log_of_ever_new_kinds_is_bounded_too(small_logs):
    with mx.explain() as log:
        for i in range(100):
            explain.record(spec(op=f"op{i}"), "k", {})
    assert len(log) == 100 and len(log.entries) == 20 and len(log.later) == 3 and log.unlisted == 77
    assert log.table().splitlines()[-1] == (
        "log.entries holds the first 20 of 100 decisions; the table counts all but 77 of further kinds"
    )
    assert sum(int(line.split()[0]) for line in log.table().splitlines()[2:-1]) == 23


def test_reasons_of_a_line_are_bounded(small_logs):
    with mx.explain() as log:
        for i in range(100):
            explain.record(spec(), "k", {"a": f"reason {i}"})
    assert len(next(iter(log.later.values())).refusals) == 5


def test_times_are_added_up_beyond_the_entries_of_a_log(small_logs, clock):
    slow = sleeping(clock, "slow", 0.25)
    with mx.explain(time=True) as log:
        for _ in range(100):
            perform((slow,), spec())
    (later,) = log.later.values()
    assert len(later._timers) <= 8
    for _ in range(2):  # a table changes nothing
        (line,) = [line for line in log.table().splitlines() if "slow" in line]
        assert line.split()[:2] == ["100", "25000.000"]


def test_a_log_is_true_even_if_it_is_empty():
    with mx.explain() as log:
        pass
    assert log and len(log) == 0
