import pytest

from mxtensor.kernels.runtime import nvrtc
from tests.helpers import cuda_on_cpu


@pytest.fixture
def cuda_sources_on_the_cpu(monkeypatch):
    """Launches of CUDA sources run on the CPU."""
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)
