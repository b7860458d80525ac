"""Launches through the driver: the parameters of a signature, the block of arguments, and who launches otherwise."""

import struct
from types import SimpleNamespace

import pytest
import torch

from mxtensor.kernels.runtime import host_calls
from mxtensor.kernels.runtime.host_calls import of_compiled, parameters

X, Y = torch.empty(4), torch.empty(2)
SIGNATURE = {
    "x": "*fp32", "n": "i32", "one": "constexpr", "y": "*fp32", "big": "i64", "none": "constexpr", "C": "constexpr",
    "T": ("constexpr", ("constexpr", "constexpr")),
}  # fmt: skip
ARGUMENTS = (X, 7, 1, Y, 1 << 40, None)
SIZES = [(8, None), (4, 7), (8, None), (8, 1 << 40)]


class Driver:
    """Knows a kernel with parameters of ``sizes``."""

    def __init__(self, sizes=(8, 4, 8, 8, 8, 8)):
        self.sizes = sizes

    def cuFuncGetParamInfo(self, handle, index, offset, size):  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0


def compiled(signature=None, run="CudaLauncher", **facts):
    runner = type(run, (), {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False})()
    for name in ("global_scratch_size", "launch_pdl", "launch_cooperative_grid"):
        setattr(runner, name, facts.pop(name, 0))
    metadata = SimpleNamespace(num_ctas=facts.pop("num_ctas", 1), num_warps=4, shared=1024)
    src = SimpleNamespace(signature=signature or SIGNATURE)
    return SimpleNamespace(run=runner, metadata=metadata, src=src, function=99)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(host_calls, "driver", lambda: driver)
    monkeypatch.setattr(host_calls, "launches", lambda addresses, steps: (addresses, steps))
    return driver


def test_parameters_are_addresses_and_integers_without_constants():
    assert parameters([*SIGNATURE.values()], ARGUMENTS) == SIZES
    assert parameters(["*fp32", "fp32"], (X, 1.5)) is None  # no kernel of ours takes a float
    assert parameters(["*fp32", "*fp32"], (X,)) is None


def test_a_launch_moves_its_addresses_and_keeps_its_integers(driver):
    (addresses, [step]), tensors = of_compiled(compiled(), 5, ARGUMENTS)
    assert tensors == (X, Y) and addresses == 2
    assert (step.kernel, step.x, step.y, step.z, step.threads, step.memory) == (99, 5, 1, 1, 128, 1024)
    assert struct.unpack("<6q", step.block) == (0, 7, 0, 1 << 40, 0, 0)
    assert step.offsets == (0, 8, 16, 24, 32, 40) and step.moved == ((0, 0, 0), (16, 1, 0))


@pytest.mark.parametrize(
    "other",
    [
        {"run": "Stub"}, {"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True},
        {"launch_cooperative_grid": 1}, {"signature": SIGNATURE | {"n": "fp64"}},
    ],
)  # fmt: skip
def test_triton_launches_what_the_block_does_not_describe(driver, other):
    assert of_compiled(compiled(**other), 5, ARGUMENTS) is None


@pytest.mark.parametrize("sizes", [(8, 4, 8, 8), (8, 4, 8, 8, 8, 8, 8), (8, 8, 8, 8, 8, 8)])
def test_triton_launches_kernels_whose_parameters_the_driver_knows_otherwise(driver, sizes):
    driver.sizes = sizes
    assert of_compiled(compiled(), 5, ARGUMENTS) is None


def test_an_older_driver_is_not_asked(monkeypatch):
    monkeypatch.setattr(host_calls, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=None))
    assert of_compiled(compiled(), 5, ARGUMENTS) is None
