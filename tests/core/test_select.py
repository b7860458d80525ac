"""Choosing a kernel: the smallest expected time, else the first that accepts, asked once for each kind of call, unless
one is named."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.core.explain import Entry
from mxtensor.core.kernel import PLANS, Kernel, Spec
from mxtensor.core.select import perform, plan_for
from mxtensor.kernels.gemm.select import GEMM

BF16_ON_CPU = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def spec(op="mm", dtype=torch.float32):
    return Spec(op, ((8, 64), (16, 64)), ("float32", "mxfp8_e4m3"), dtype, torch.device("cpu"))


def kernel(name, reason=None, us=None):
    return Kernel(name, lambda spec, *operands: reason, lambda *operands: name, expected_us=lambda spec, *operands: us)


# ---------------------------------------------------------------------------------------------- choosing


def test_the_first_kernel_that_accepts_runs_and_the_refusals_before_it_are_logged():
    with mx.explain() as log:
        ran = perform((kernel("a", "too tall"), kernel("b", "too wide"), kernel("c"), kernel("d")), spec())
    assert ran == "c"
    assert log.entries == [Entry(spec(), "c", {"a": "too tall", "b": "too wide"})]


def test_the_smallest_expected_time_wins_and_explain_shows_the_others():
    kernels = kernel("a", us=9.8), kernel("b", "too wide", us=1.0), kernel("c", us=7.1), kernel("d", us=8.0)
    with mx.explain() as log:
        assert perform(kernels, spec()) == "c"
    assert log.entries[0].refusals == {
        "b": "too wide", "a": "9.8 us expected, c 7.1 us", "d": "8.0 us expected, c 7.1 us",
    }  # fmt: skip
    assert "a: 9.8 us expected, c 7.1 us" in log.table(refused=True)


def test_a_kernel_without_an_expected_time_is_between_those_before_and_those_after_it():
    for kernels, name in (
        ((kernel("a"), kernel("b", us=1.0)), "a"),
        ((kernel("a", us=9.0), kernel("b"), kernel("c", us=1.0)), "a"),
        ((kernel("a", us=9.0), kernel("b", us=8.0), kernel("c")), "b"),
        ((kernel("a", us=8.0), kernel("b", us=8.0)), "a"),
    ):
        assert perform(kernels, spec()) == name


def test_a_forced_kernel_runs_however_slow_it_is():
    kernels = kernel("emulated", us=9.0), kernel("dequant", us=1.0)
    assert perform(kernels, spec(), prefer="emulated") == "emulated"
    with mx.kernels("emulated"):
        assert perform(kernels, spec()) == "emulated"


def test_sizes_that_torch_compile_does_not_know_reach_no_model_of_time():
    def fails(spec):
        raise AssertionError("asked")

    ran = []

    def product(x):
        asked = Kernel("a", lambda spec: None, lambda: "a", expected_us=fails)
        ran.append(perform((asked, kernel("b", us=1.0)), spec()._replace(shapes=(tuple(x.shape), (16, 64)))))
        return x + 1

    make_fx(product, tracing_mode="symbolic")(torch.ones(8, 64))
    assert ran == ["a"]


def test_when_none_accepts_every_sentence_is_in_the_error():
    message = "no kernel runs mm of float32 8x64, mxfp8_e4m3 16x64 on cpu: a: too tall; b: too wide"
    with mx.explain() as log, pytest.raises(NotImplementedError) as error:
        perform((kernel("a", "too tall"), kernel("b", "too wide")), spec())
    assert str(error.value) == message and log.entries == []


def test_a_kernel_decides_on_the_operands_it_would_run():
    seen = []
    picky = Kernel("picky", lambda spec, *operands: seen.append((spec, operands)), lambda *operands: None)
    perform((picky,), spec(), "left", "right")
    assert seen == [(spec(), ("left", "right"))]


def test_a_kernel_that_refuses_shows_its_sentence_in_the_table(monkeypatch):
    fast = Kernel("fast", lambda spec, *operands: "needs sm100, this device is a cpu", lambda *operands: None)
    monkeypatch.setattr(
        sys.modules["mxtensor.kernels.gemm.select"], "GEMM", (fast, *GEMM)
    )  # mx.kernels is the function
    w, x = mx.quantize(torch.randn(16, 64), "mxfp8"), torch.randn(8, 64)
    with mx.explain() as log:
        y = F.linear(x, w)
    assert "fast: needs sm100, this device is a cpu" in log.table(refused=True)
    assert torch.equal(y, F.linear(x, w))


# ---------------------------------------------------------------------------------------------- plans


@pytest.fixture
def asked():
    """The kernels (a refuses, b accepts) and the specs that a was asked about."""
    seen = []
    a = Kernel("a", lambda spec: seen.append(spec) or "too tall", lambda: "a")
    return (a, kernel("b")), seen


def test_with_all_facts_given_kernels_are_asked_once_and_logged_at_every_call(asked):
    kernels, seen = asked
    with mx.explain() as log:
        assert [perform(kernels, spec(), facts=("bias",)) for _ in range(3)] == ["b"] * 3
    assert seen == [spec()] and log.entries == [Entry(spec(), "b", {"a": "too tall"})] * 3
    assert plan_for(kernels, spec(), facts=("bias",)) is plan_for(kernels, spec(), facts=("bias",))


def test_another_fact_spec_or_preference_is_another_plan(asked):
    kernels, seen = asked
    others = (kernel("c"), *kernels)
    perform(kernels, spec(), facts=("bias",))
    perform(kernels, spec(), facts=("no bias",))
    perform(kernels, spec(dtype=torch.bfloat16), facts=("bias",))
    assert len(seen) == 3 and perform(others, spec(), facts=("bias",)) == "c"
    forced = (kernel("emulated"), kernel("dequant"))
    assert perform(forced, spec(), facts=()) == perform(forced, spec(), prefer="emulated", facts=())
    assert perform(forced, spec(), prefer="dequant", facts=()) == "dequant"
    with mx.kernels("dequant"):
        assert perform(forced, spec(), prefer="emulated", facts=()) == "dequant"
    assert perform(forced, spec(), prefer="emulated", facts=()) == "emulated"


def test_without_facts_and_when_a_call_is_traced_no_plan_is_cached(asked):
    kernels, seen = asked
    for _ in range(2):
        perform(kernels, spec())
        perform(kernels, spec()._replace(traced=True), facts=())
    assert len(seen) == 4 and len(PLANS) == 0


def test_a_refusal_of_all_is_an_error_at_every_call(asked):
    kernels, seen = asked
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="a: too tall"):
            perform(kernels[:1], spec(), facts=())
    assert len(seen) == 1


def test_a_traced_call_runs_the_op_of_a_kernel_that_has_one():
    plain, both = kernel("plain"), replace(kernel("both"), run_traced=lambda: "op")
    found = [perform((k,), spec()._replace(traced=traced)) for k in (plain, both) for traced in (False, True)]
    assert found == ["plain", "plain", "both", "op"]


# ---------------------------------------------------------------------------------------------- kernels()


def test_an_unknown_kernel_lists_the_names():
    with (
        pytest.raises(ValueError, match=r"unknown product kernel 'nope'; the product kernels are .*dequant.*emulated"),
        mx.kernels("nope"),
    ):
        pass


def kernels_of(log):
    return [entry.kernel for entry in log.entries if entry.spec.op in ("mm", "linear")]


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
def test_kernels_nest_and_end_with_their_block():
    w, x = mx.quantize(torch.randn(16, 64).bfloat16(), "mxfp8"), torch.randn(8, 64).bfloat16()
    with mx.explain() as log:
        x @ w.t()
        with mx.kernels("emulated"):
            x @ w.t()
            with mx.kernels("dequant"):
                x @ w.t()
            x @ w.t()
        with pytest.raises(KeyError), mx.kernels("emulated"):
            raise KeyError("an error ends the block too")
        x @ w.t()
    assert kernels_of(log) == ["cpu_codes", "emulated", "dequant", "emulated", "cpu_codes"]


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
def test_a_recipe_may_ask_for_a_kernel_and_kernels_overrules_it():
    linear, x = nn.Linear(64, 16, bias=False).bfloat16(), torch.randn(8, 64).bfloat16()
    mx.quantize_(linear, mx.LinearRecipe.inference("nvfp4", None, "emulated"))
    with mx.explain() as log:
        linear(x)
    assert kernels_of(log) == ["emulated"]
    assert {e.refusals.get("dequant") for e in log.entries if e.spec.op == "linear"} == {"'emulated' was asked for"}
    with (
        mx.kernels("dequant"),
        pytest.raises(NotImplementedError, match=r"dequant: .*emulated: 'dequant' was asked for"),
    ):
        linear.float()(x.float())


def test_a_trace_may_be_the_first_call_of_the_process(monkeypatch):
    monkeypatch.setattr("mxtensor.core.kernel._ELSEWHERE", {})  # as in a new process
    x = torch.randn(8, 64)
    compiled = torch.compile(lambda x: mx.quantize(x, "mxfp8").dequantize(), backend="aot_eager", fullgraph=True)
    assert compiled(x).equal(mx.quantize(x, "mxfp8").dequantize())
