"""Products that are made again: the bits of the first time, and none where what was found out has changed."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor.core import dispatch
from mxtensor.kernels.gemm import select
from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.ops import again
from tests.helpers import cuda_on_cpu

pytestmark = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
PERSISTENT = LaunchConfig(1, 1, 1, 4, 4, 3, 1, 1, True, persistent=1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Products of few rows run on the CPU, by a plan of one launch; how often one was made again is counted."""
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)
    monkeypatch.setattr(dispatch, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "unknown", lambda capability: None)
    monkeypatch.setattr(launch, "choose_config", lambda *args: PERSISTENT)
    launch.resolve.cache_clear()
    anywhere = replace(small_m.KERNEL, device=None)
    monkeypatch.setattr(select, "GEMM", tuple(anywhere if k is small_m.KERNEL else k for k in select.GEMM))
    monkeypatch.setattr(small_m, "KERNEL", anywhere)
    yield
    launch.resolve.cache_clear()


@pytest.fixture
def made(monkeypatch):
    calls = []
    whole = launch.Again.__call__
    monkeypatch.setattr(launch.Again, "__call__", lambda self, x: calls.append(x) or whole(self, x))
    return calls


def layer(config, bias=True):
    return mx.quantize_(torch.nn.Linear(320, 48, bias=bias, dtype=torch.bfloat16), config)


@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4", "nvfp4-weight-only", "mxfp6"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_second_call_has_the_bits_of_the_first(config, bias, mode, made):
    linear, inputs = layer(config, bias), [torch.randn(*shape, 320).bfloat16() for shape in ((1,), (3,), (1, 2), ())]
    with mode():
        first = [linear(x) for x in inputs]
        assert not made
        second = [linear(x) for x in inputs]
        assert len(made) == len(inputs)
        others = [linear(x + 1) for x in inputs]
    for one, two, other in zip(first, second, others, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
        assert not torch.equal(one, other)


def test_what_has_changed_is_found_out_anew(made):
    linear, other, x = layer("mxfp8"), layer("mxfp8"), torch.randn(2, 320).bfloat16()

    def same(module, *args):
        before = len(made)
        module(*args)
        return len(made) - before

    with torch.no_grad():
        assert [same(linear, x) for _ in range(2)] == [0, 1]
        linear.bias = torch.nn.Parameter(linear.bias + 1)
        assert [same(linear, x) for _ in range(2)] == [0, 1]
        with mx.explain() as log:
            linear(x)
        assert [entry.kernel for entry in log.entries] == ["small_m"] and len(made) == 2
        with mx.kernels("emulated"):
            linear(x)
        assert len(made) == 2
        linear.load_state_dict(other.state_dict())  # into the same memory
        assert same(linear, x) == 1 and torch.equal(linear(x), other(x))
        linear.load_state_dict(layer("mxfp8").state_dict(), assign=True)
        assert same(linear, x) == 0
    assert linear(x.requires_grad_()).requires_grad


def test_few_sizes_are_kept(made, monkeypatch):
    monkeypatch.setattr(again, "MOST", 8)
    linear = layer("mxfp8")
    with torch.no_grad():
        for rows in range(1, 9):
            linear(torch.randn(rows, 320).bfloat16())
        assert len(linear.weight.__dict__[again.KEPT]) == again.MOST
        linear(torch.randn(1, 1, 320).bfloat16())
        assert len(linear.weight.__dict__[again.KEPT]) == 1


@pytest.mark.parametrize("config", ["mxfp8", "mxfp8-weight-only"])
def test_what_is_no_single_launch_is_asked_about_once(config, made, monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *args: PERSISTENT._replace(whole_x=False, stages=2))
    asked, kernel_for = [], again.kernel_for
    monkeypatch.setattr(again, "kernel_for", lambda *args: asked.append(args) or kernel_for(*args))
    linear, x = layer(config), torch.randn(2, 320).bfloat16()
    with torch.no_grad():
        assert torch.equal(linear(x), linear(x)) and len(asked) == 1 and not made


def test_where_the_kernel_does_not_run_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(small_m, "KERNEL", replace(small_m.KERNEL, device="cuda"))
    linear = layer("mxfp8")
    with torch.no_grad():
        linear(torch.randn(2, 320).bfloat16())
    assert again.KEPT not in linear.weight.__dict__


def test_a_copy_of_a_weight_has_no_calls_of_its_own(made):
    linear, x = layer("mxfp4"), torch.randn(1, 320).bfloat16()
    with torch.no_grad():
        y = linear(x)
        for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
            assert again.KEPT not in twin.weight.__dict__ and torch.equal(twin(x), y)
