"""Plans: one decision for all calls of a kind, the bits of the first call, and no plan for what has changed."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core import kernel as plan
from mxtensor.core.kernel import PLANS, Cache, Plan, Spec
from mxtensor.kernels.gemm import select
from mxtensor.kernels.operands import Form

# ---------------------------------------------------------------------------------------------- the cache


def a_plan(name="mm"):
    return Plan(Spec(name, (), (), torch.float32, torch.device("cpu")), None, {})


@pytest.fixture
def small_caches(monkeypatch):
    """Caches hold four plans."""
    monkeypatch.setattr(plan, "MAX_PLANS", 4)


def test_the_older_half_is_dropped_when_the_cache_is_full(small_caches):
    cache, plans = Cache(), {key: a_plan() for key in "abcde"}
    for key, one in plans.items():
        cache.put(key, one)
    assert [cache.get(key) for key in "abcde"] == [None, None, plans["c"], plans["d"], plans["e"]]
    cache.put("c", plans["a"])
    assert cache.get("c") is plans["a"] and len(cache) == 3
    cache.clear()
    assert len(cache) == 0 and cache.get("c") is None


def test_the_cache_of_the_process_is_bounded(small_caches):
    weight = mx.quantize(torch.randn(16, 64), "mxfp8")
    for rows in range(1, 20):
        F.linear(torch.randn(rows, 64), weight)
    assert 0 < len(PLANS) <= 4


def test_threads_share_the_cache(small_caches):
    cache, wrong, plans = Cache(), [], {key: a_plan() for key in range(12)}

    def use(first):
        try:
            for i in range(20_000):
                key = (first * 7 + i * i) % 12
                found = cache.get(key)
                if found is None:
                    cache.put(key, plans[key])
                elif found is not plans[key]:
                    wrong.append(key)
                if i % 1000 == 0:
                    cache.clear()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(cache) <= 4


# ---------------------------------------------------------------------------------------------- one plan for each kind


def test_a_second_training_step_asks_no_kernel(monkeypatch):
    linear, x, asked = torch.nn.Linear(64, 48), torch.randn(32, 64, requires_grad=True), []

    def watched(kernel):
        return replace(kernel, refuses=lambda spec, *rest: asked.append(spec) or kernel.refuses(spec, *rest))

    monkeypatch.setattr(select, "GEMM", tuple(map(watched, select.GEMM)))
    counts = []
    for _ in range(3):
        with mx.autocast():
            linear(x).sum().backward()
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1] == counts[2]
    assert {spec.op for spec in asked} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize(("kernel", "form"), [("emulated", torch.float32), ("cpu_codes", Form.CODES)])
def test_the_same_plan_says_which_form_a_kernel_wants_and_runs_the_product(kernel, form):
    x, w = torch.randn(2, 64), mx.quantize(torch.randn(48, 64), "mxfp8")
    args = select.GemmArgs(torch.float32)
    assert select.wanted_form("mm", x, w.rowwise, args, kernel) is form
    asked = len(PLANS)
    select.gemm("mm", x, w.rowwise, args, kernel)
    assert select.plan_of("mm", x, w.rowwise, args, kernel).kernel.name == kernel and len(PLANS) == asked
