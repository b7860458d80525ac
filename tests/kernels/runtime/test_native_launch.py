"""Launches through the driver: the parameters of a signature, the block of arguments, and who launches otherwise."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from mxtensor.kernels.runtime import native_launch
from mxtensor.kernels.runtime.native_launch import NativeLaunch, parameters, prepared

X, Y = torch.empty(4), torch.empty(2)
SIGNATURE = {
    "x": "*fp32", "n": "i32", "one": "constexpr", "y": "*fp32", "big": "i64", "none": "constexpr", "C": "constexpr",
    "T": ("constexpr", ("constexpr", "constexpr")),
}  # fmt: skip
ARGUMENTS = (X, 7, 1, Y, 1 << 40, None)
SIZES = [(8, None), (4, 7), (8, None), (8, 1 << 40)]


class Driver:
    """Notes what is launched; knows a kernel with parameters of ``sizes``."""

    def __init__(self, sizes=(8, 4, 8, 8, 8, 8), result=0):
        self.sizes, self.result, self.launched = sizes, result, []

    def cuFuncGetParamInfo(self, handle, index, offset, size):  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, settings, handle, pointers, extra):  # noqa: N802
        kinds = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        values = [kinds[n].from_address(pointers[i]).value for i, n in enumerate(self.sizes)]
        s = settings._obj
        self.launched.append(((s.x, s.y, s.z, s.threads, s.memory, s.stream), handle.value, values))
        return self.result


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
    monkeypatch.setattr(native_launch, "driver", lambda: driver)
    return driver


def test_parameters_are_addresses_and_integers_without_constants():
    assert parameters([*SIGNATURE.values()], ARGUMENTS) == SIZES
    assert parameters(["*fp32", "fp32"], (X, 1.5)) is None  # no kernel of ours takes a float
    assert parameters(["*fp32", "*fp32"], (X,)) is None


def test_a_launch_writes_its_addresses_and_keeps_its_integers(driver):
    launch, tensors = prepared(compiled(), 5, ARGUMENTS)
    assert tensors == (X, Y)
    for stream, addresses in ((3, (10, 20)), (4, (30, 40))):
        launch(stream, *addresses)
        settings, handle, values = driver.launched[-1]
        assert settings == (5, 1, 1, 128, 1024, stream) and handle == 99
        assert values == [addresses[0], 7, addresses[1], 1 << 40, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        {"run": "Stub"}, {"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True},
        {"launch_cooperative_grid": 1}, {"signature": SIGNATURE | {"n": "fp64"}},
    ],
)  # fmt: skip
def test_triton_launches_what_the_block_does_not_describe(driver, other):
    assert prepared(compiled(**other), 5, ARGUMENTS) is None


@pytest.mark.parametrize("sizes", [(8, 4, 8, 8), (8, 4, 8, 8, 8, 8, 8), (8, 8, 8, 8, 8, 8)])
def test_triton_launches_kernels_whose_parameters_the_driver_knows_otherwise(driver, sizes):
    driver.sizes = sizes
    assert prepared(compiled(), 5, ARGUMENTS) is None


def test_an_older_driver_is_not_asked(monkeypatch):
    monkeypatch.setattr(native_launch, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=None))
    assert prepared(compiled(), 5, ARGUMENTS) is None


def test_an_error_of_the_driver_is_raised(driver, monkeypatch):
    driver.result = 701
    monkeypatch.setattr(native_launch, "check_error", lambda code: (_ for _ in ()).throw(RuntimeError(f"error {code}")))
    launch = NativeLaunch(99, 1, 128, 0, SIZES)
    with pytest.raises(RuntimeError, match="error 701"):
        launch(0, 1, 2)
