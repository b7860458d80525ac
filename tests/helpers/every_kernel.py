"""The kernels that quantize on this computer, as parameters of a test: each must give the bits of the definition."""

import pytest
import torch

from mxtensor.kernels.quantize import cpu, sliced, triton_rows
from mxtensor.numerics.reference import encode

BUILT = cpu.library()
KERNELS = [
    pytest.param(encode, id="reference"),
    pytest.param(sliced.QUANTIZE.run, id="sliced"),
    pytest.param(cpu.QUANTIZE.run, id="cpu", marks=pytest.mark.skipif(isinstance(BUILT, str), reason=str(BUILT))),
    pytest.param(
        triton_rows.quantize, id="triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py's")
    ),
]
