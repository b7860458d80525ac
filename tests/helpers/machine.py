"""Fixtures that stand for a machine: its GPUs, its compiler, its threads, its clock and the folder of its caches."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtensor.core import devices, progress, repeated
from mxtensor.kernels.attention import cpu_attention
from mxtensor.kernels.gemm import cpu_codes, cublas, dot_scaled, scaled_mm_contract
from mxtensor.kernels.quantize import cpu_casts, cuda_both
from mxtensor.kernels.runtime import cpu_graph, nvrtc, triton_launch
from mxtensor.kernels.small_m import heuristics, launch
from tests.helpers import cuda_on_cpu

ASK_A_DEVICE = (devices, cublas, cuda_both, dot_scaled, heuristics, nvrtc, triton_launch)
COMPILED = [(cpu_casts, "library"), (cpu_casts, "nvfp4_library"), (cpu_codes, "library"), (cpu_graph, "library"),
            (cpu_attention, "library")]  # fmt: skip


@pytest.fixture
def pretend(monkeypatch):
    """``pretend(capability, toolkit)``: every device is of this compute capability, torch built with this CUDA."""

    def pretend(capability, toolkit=(13, 0)):
        for module in ASK_A_DEVICE:
            monkeypatch.setattr(module, "device_capability", lambda device: capability)
        monkeypatch.setattr(scaled_mm_contract, "toolkit_version", lambda: toolkit)
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


@pytest.fixture
def with_triton(pretend, monkeypatch):
    """``with_triton(capability)``: such a GPU, with Triton."""
    monkeypatch.setattr(triton_launch, "_installed", lambda: True)
    return pretend


@pytest.fixture
def device(with_triton, monkeypatch):
    """``device(capability)``: such a GPU, with Triton and NVRTC."""
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    monkeypatch.setattr(nvrtc, "unknown", lambda capability: None)
    return with_triton


@pytest.fixture
def cuda(with_triton):
    """Tensors without values on a CUDA device of sm_90 that has Triton and no NVRTC."""
    with_triton((9, 0))
    with FakeTensorMode():
        yield torch.device("cuda")


@pytest.fixture
def triton_anywhere(monkeypatch):
    """Kernels of Triton take tensors of the CPU, where the interpreter runs them."""
    monkeypatch.setattr(triton_launch, "missing", lambda spec: None)


@pytest.fixture
def no_compiler(monkeypatch):
    """There is no C++ compiler, and nothing that one has built."""
    for module, name in COMPILED:
        monkeypatch.setattr(module, name, lambda: "there is no C++ compiler")


@pytest.fixture
def threads():
    """``threads(n)``: torch works with n threads, and the package with a pool of its own for them."""
    before, cpu_casts._pool[:] = cpu_casts._pool[:], []
    yield torch.set_num_threads
    torch.set_num_threads(1)
    for pool in cpu_casts._pool:
        pool.shutdown()
    cpu_casts._pool[:] = before


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """The folder of the user's caches is this one, which nobody has made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recorded_on_a_cpu():
    """Repeated calls are recorded on the CPU, too, and no program of another test is found."""
    repeated.KINDS.clear()
    repeated.DEVICES.add("cpu")
    yield
    repeated.DEVICES.discard("cpu")
    repeated.KINDS.clear()


@pytest.fixture
def profiled():
    """``with profiled():`` somebody observes launches, as a profiler of Triton does: no program runs."""

    class Profiled:
        def __enter__(self):
            repeated.WATCHERS.append(self.watches)

        def __exit__(self, *error):
            repeated.WATCHERS.remove(self.watches)

        def watches(self):
            return True

    return Profiled


@pytest.fixture
def bars_at_once(monkeypatch):
    """Work shows its bar at once, however short it is."""
    monkeypatch.setattr(progress, "SECONDS", -1.0)


@pytest.fixture
def nothing_resolved():
    """Launches of products of few rows are resolved anew in this test, and none of its own is left."""
    for resolved in (launch.resolve, launch._activations_kernel):
        resolved.cache_clear()
    yield
    for resolved in (launch.resolve, launch._activations_kernel):
        resolved.cache_clear()


@pytest.fixture
def cuda_sources_on_the_cpu(monkeypatch):
    """Launches of CUDA sources run on the CPU."""
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)


@pytest.fixture
def kernels_launched(nothing_resolved, monkeypatch):
    """(name, constants) of each launch of a CUDA source, which computes nothing."""
    launches = []

    def function(device, sources, constants, name, *rest):
        return lambda *arguments: launches.append((name, constants))

    monkeypatch.setattr(nvrtc, "function", function)
    return launches


@pytest.fixture
def instructions(monkeypatch):
    """``instructions(capability)``: kernels of Triton may use the instructions of such a GPU."""
    return lambda capability: monkeypatch.setattr(triton_launch, "instructions_of", lambda device: capability)


@pytest.fixture
def freed_memory_is_nan():
    """Memory that torch allocates without values is NaN: what reads it before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
