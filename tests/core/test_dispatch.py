"""The mechanism: tables that refuse a second entry, kernels that refuse with a sentence, and the log of both."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import mxtensor as mx
from mxtensor.core import dispatch
from mxtensor.core.dispatch import (
    FUNCTION_TABLE,
    OP_TABLE,
    Entry,
    Kernel,
    Spec,
    choose,
    describe,
    implements,
    implements_function,
    perform,
)
from mxtensor.kernels.gemm.select import GEMM

aten = torch.ops.aten
BF16_ON_CPU = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def spec(op="mm", dtype=torch.float32):
    return Spec(op, ((8, 64), (16, 64)), ("float32", "mxfp8_e4m3"), dtype, torch.device("cpu"))


def kernel(name, reason=None):
    return Kernel(name, lambda spec, *operands: reason, lambda *operands: name)


# ---------------------------------------------------------------------------------------------- tables


def test_an_op_has_one_rule():
    before = dict(OP_TABLE)
    with pytest.raises(RuntimeError, match=r"aten\.mm\.default already has the rule mxtensor\.ops\.matmul\.mm"):
        implements(aten.mm.default)(lambda func, args, kwargs: None)
    with pytest.raises(RuntimeError, match=r"already has the rule mxtensor\.ops\.einsum\.einsum"):
        implements_function(torch.einsum)(lambda *args: None)
    assert before == OP_TABLE and FUNCTION_TABLE[torch.einsum].__name__ == "einsum"


def test_every_rule_says_what_it_does():
    assert all(rule.__doc__ for rule in (*OP_TABLE.values(), *FUNCTION_TABLE.values()))


def test_a_registered_rule_is_the_one_that_runs(monkeypatch):
    w = mx.quantize(torch.randn(8, 64), "mxfp8")
    with mx.strict(), pytest.raises(NotImplementedError, match=r"aten\.neg\.default would dequantize"):
        torch.neg(w)
    monkeypatch.setitem(OP_TABLE, aten.neg.default, lambda func, args, kwargs: func(args[0].dequantize()))
    with mx.strict():
        assert torch.equal(-w, -w.dequantize())


# ---------------------------------------------------------------------------------------------- choosing


def test_the_first_kernel_that_accepts_runs_and_the_refusals_before_it_are_logged():
    with mx.explain() as log:
        chosen = choose((kernel("a", "too tall"), kernel("b", "too wide"), kernel("c"), kernel("d")), spec())
    assert chosen.name == "c"
    assert log.entries == [Entry(spec(), "c", {"a": "too tall", "b": "too wide"})]


def test_when_none_accepts_every_sentence_is_in_the_error():
    message = "no kernel runs mm of float32 8x64, mxfp8_e4m3 16x64 on cpu: a: too tall; b: too wide"
    with mx.explain() as log, pytest.raises(NotImplementedError) as error:
        choose((kernel("a", "too tall"), kernel("b", "too wide")), spec())
    assert str(error.value) == message and log.entries == []


def test_a_kernel_decides_on_the_operands_it_would_run():
    seen = []
    picky = Kernel("picky", lambda spec, *operands: seen.append((spec, operands)), lambda *operands: None)
    choose((picky,), spec(), "left", "right")
    assert seen == [(spec(), ("left", "right"))]


def test_a_kernel_that_refuses_shows_its_sentence_in_the_table(monkeypatch):
    fast = Kernel("fast", lambda spec, *operands: "needs sm100, this device is a cpu", lambda *operands: None)
    monkeypatch.setattr(
        sys.modules["mxtensor.kernels.gemm.select"], "GEMM", (fast, *GEMM)
    )  # mx.kernels is the function
    w, x = mx.quantize(torch.randn(16, 64), "mxfp8"), torch.randn(8, 64)
    with mx.explain() as log:
        y = F.linear(x, w)
    assert "fast: needs sm100, this device is a cpu" in log.table()
    assert torch.equal(y, F.linear(x, w))


# ---------------------------------------------------------------------------------------------- asked once


@pytest.fixture
def asked(monkeypatch):
    """The kernels (a refuses, b accepts) and the specs that a was asked about; no decision is known yet."""
    monkeypatch.setattr(dispatch, "_decisions", {})
    seen = []
    a = Kernel("a", lambda spec: seen.append(spec) or "too tall", lambda: "a")
    return (a, kernel("b")), seen


def test_with_all_facts_given_kernels_are_asked_once_and_logged_at_every_call(asked):
    kernels, seen = asked
    with mx.explain() as log:
        assert [choose(kernels, spec(), facts=("bias",)).name for _ in range(3)] == ["b"] * 3
    assert seen == [spec()] and log.entries == [Entry(spec(), "b", {"a": "too tall"})] * 3


def test_another_fact_spec_or_preference_is_another_question(asked):
    kernels, seen = asked
    others = (kernel("c"), *kernels)
    choose(kernels, spec(), facts=("bias",))
    choose(kernels, spec(), facts=("no bias",))
    choose(kernels, spec(dtype=torch.bfloat16), facts=("bias",))
    assert len(seen) == 3 and choose(others, spec(), facts=("bias",)).name == "c"
    forced = (kernel("emulated"), kernel("dequant"))
    assert choose(forced, spec(), facts=()).name == choose(forced, spec(), prefer="emulated", facts=()).name
    assert choose(forced, spec(), prefer="dequant", facts=()).name == "dequant"
    with mx.kernels("dequant"):
        assert choose(forced, spec(), prefer="emulated", facts=()).name == "dequant"


def test_without_facts_and_where_a_call_is_traced_kernels_are_asked_again(asked):
    kernels, seen = asked
    for _ in range(2):
        choose(kernels, spec())
        choose(kernels, spec()._replace(traced=True), facts=())
    assert len(seen) == 4


def test_a_refusal_of_all_is_one_at_every_call_and_decisions_do_not_pile_up(asked, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_DECISIONS", 2)
    kernels, seen = asked
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="a: too tall"):
            choose(kernels[:1], spec(), facts=())
    assert len(seen) == 1
    for fact in range(5):
        assert choose(kernels, spec(), facts=(fact,)).name == "b"
    assert len(dispatch._decisions) <= 2


def test_what_is_traced_runs_the_op_of_a_kernel_that_has_one():
    plain, both = kernel("plain"), replace(kernel("both"), run_traced=lambda: "op")
    found = [perform((k,), spec()._replace(traced=traced)) for k in (plain, both) for traced in (False, True)]
    assert found == ["plain", "plain", "both", "op"]


# ---------------------------------------------------------------------------------------------- kernels()


def test_an_unknown_kernel_lists_the_names():
    with (
        pytest.raises(ValueError, match=r"unknown kernel 'nope'; the kernels are .*dequant.*emulated"),
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
    assert kernels_of(log) == ["dequant", "emulated", "dequant", "emulated", "dequant"]


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
def test_a_recipe_may_ask_for_a_kernel_and_kernels_overrules_it():
    linear, x = nn.Linear(64, 16, bias=False).bfloat16(), torch.randn(8, 64).bfloat16()
    mx.quantize_(linear, mx.NVFP4WeightOnlyConfig(kernel_preference="emulated"))
    with mx.explain() as log:
        linear(x)
    assert kernels_of(log) == ["emulated"]
    assert {e.refusals.get("dequant") for e in log.entries if e.spec.op == "linear"} == {"'emulated' was asked for"}
    with (
        mx.kernels("dequant"),
        pytest.raises(NotImplementedError, match=r"dequant: .*emulated: 'dequant' was asked for"),
    ):
        linear.float()(x.float())


# ---------------------------------------------------------------------------------------------- explain()


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
    assert log.table() == "no MXTensor operation ran"


def test_describe_names_operands_and_shapes():
    assert describe(spec()) == "float32 8x64, mxfp8_e4m3 16x64"


def explained(dtype, config="mxfp8"):
    linear = nn.Linear(64, 16).to(dtype)
    mx.quantize_(linear, config)
    with mx.explain() as log, torch.no_grad():
        linear(torch.randn(8, 64).to(dtype))
        linear(torch.randn(8, 64).to(dtype))
    return log.table()


def test_the_table_of_a_small_float32_linear():
    assert_expected_inline(
        explained(torch.float32),
        """\
calls  op          operands                           kernel    refused
-----  ----------  ---------------------------------  --------  -------
2      linear      mxfp8_e4m3 8x64, mxfp8_e4m3 16x64  emulated  scaled_mm, dot_scaled, small_m: runs on cuda, this tensor is on cpu; dequant: computes in bfloat16, the result is float32
2      quantize    float32->mxfp8_e4m3 8x64           native    triton: runs on cuda, this tensor is on cpu
2      dequantize  mxfp8_e4m3->float32 8x64           native    triton: runs on cuda, this tensor is on cpu
2      dequantize  mxfp8_e4m3->float32 16x64          native    triton: runs on cuda, this tensor is on cpu""",  # noqa: E501
    )


@pytest.mark.skipif(not BF16_ON_CPU, reason="this CPU has no bfloat16 product that accumulates in float32")
def test_the_table_of_a_small_bfloat16_linear():
    assert_expected_inline(
        explained(torch.bfloat16, "mxfp4-weight-only"),
        """\
calls  op          operands                         kernel   refused
-----  ----------  -------------------------------  -------  -------
2      linear      bfloat16 8x64, mxfp4_e2m1 16x64  dequant  scaled_mm, dot_scaled, small_m: runs on cuda, this tensor is on cpu
2      dequantize  mxfp4_e2m1->bfloat16 16x64       native   triton: runs on cuda, this tensor is on cpu""",  # noqa: E501
    )
