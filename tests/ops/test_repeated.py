"""``F.linear`` without gradients by the recorded program of an earlier call.

Casts are Triton's, launched by addresses as on a device and interpreted (``helpers/compiled_triton.py``).
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core.repeated import KINDS
from mxtensor.kernels.gemm import select
from mxtensor.ops import functional
from tests.helpers.compare import relative_error
from tests.helpers.compiled_triton import interpreted_launches, launches, torchs_products
from tests.kernels.quantize.conftest import one_rounding, whole_reductions

__all__ = ["interpreted_launches", "launches", "one_rounding", "torchs_products", "whole_reductions"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
CASES = [("float8_e4m3_tensor", True), ("float8_e4m3_row", False), ("mxfp8", True), ("mxfp4-weight-only", False)]
"""Config, and whether the layer has a bias."""


def layer(config, bias=True):
    return mx.quantize_(torch.nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16), config)


def general(linear, x):
    """The result without any plan of ``F.linear``: an observed call asks for its kernel anew."""
    with mx.explain():
        return linear(x)


def kinds():
    return [*KINDS.values()]


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize(("config", "bias"), CASES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 64)])
def test_later_calls_have_the_bits_of_the_general_way(config, bias, mode, shape, launches):
    linear = layer(config, bias)
    with mode():
        for scale in (1.0, 1.0, 30.0):
            x = (torch.randn(shape) * scale).bfloat16()
            assert torch.equal(linear(x), general(linear, x))
    assert [kind.program is not None for kind in kinds()] == [True]


def test_layers_of_one_kind_share_a_program_and_read_their_own_weights(launches):
    layers = [layer("mxfp8-weight-only") for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            for linear in layers:
                x = torch.randn(2, 64).bfloat16()
                assert torch.equal(linear(x), general(linear, x))
        (kind,) = kinds()
        program = kind.program
        layers[0].weight.copy_(torch.randn(32, 64).bfloat16())
        x = torch.randn(2, 64).bfloat16()
        assert torch.equal(layers[0](x), general(layers[0], x))
        assert program is not None and kind.program is program


def test_the_third_call_runs_the_program_of_the_second(launches, monkeypatch):
    linear, x = layer("mxfp8"), torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        linear(x)
        (kind,) = kinds()
        assert kind.program is None
        linear(x)
        program = kind.program
        assert program is not None
        monkeypatch.setattr(select, "plan_of", lambda *a: pytest.fail("asked for a kernel"))
        linear(x), linear(x)
    assert kinds() == [kind] and kind.program is program


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("config", ["float8_e4m3_tensor", "mxfp8"])
def test_inputs_of_other_strides_have_programs_of_their_own(config, launches):
    """The first token of each sequence, in batches of different lengths, and other inputs of one shape."""
    linear = layer(config)
    inputs = [torch.randn(3, length, 64).bfloat16()[:, 0] for length in (5, 2, 9)]
    inputs += [torch.randn(3, 128).bfloat16()[:, ::2], torch.randn(64).bfloat16().expand(3, 64)]
    with torch.no_grad():
        for _ in range(3):
            for x in inputs:
                assert torch.equal(linear(x), general(linear, x))
    assert any(kind.program is not None for kind in kinds())


def test_slices_and_biases_of_other_strides_have_programs_of_their_own(launches):
    whole = mx.quantize(torch.randn(96, 64).bfloat16() * torch.arange(1, 97)[:, None], "float8_e4m3_row")
    values, x = 100 * torch.randn(96).bfloat16(), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            for step in (1, 2, 3):
                rows = slice(None, 32 * step, step)
                expected = F.linear(x, whole.dequantize()[rows])
                assert relative_error(F.linear(x, whole[rows]), expected) < 0.01
                expected = F.linear(x, whole.dequantize()[:32], values[rows])
                assert relative_error(F.linear(x, whole[:32], values[rows]), expected) < 0.01


def test_an_error_of_a_program_comes_from_the_general_way(launches):
    linear, x = layer("mxfp8"), torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        expected = linear(x)
        linear(x), linear(x)
        (kind,) = kinds()
        kind.program = lambda *inputs: 1 / 0
        assert torch.equal(linear(x), expected)


@pytest.mark.exhaustive
def test_nothing_is_recorded_for_another_device(launches, monkeypatch):
    monkeypatch.setattr(functional, "REPEATED", {"cuda"})
    linear, x = layer("mxfp8"), torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert all(torch.equal(linear(x), F.linear(x, linear.weight, linear.bias)) for _ in range(3))
    assert not kinds()
