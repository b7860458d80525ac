"""The kernels that quantize on this computer, as parameters of a test: each must give the bits of the definition."""

import pytest
import torch

from mxtensor.kernels.quantize import cpu_casts, definition, triton_rows
from mxtensor.numerics.reference import encode

BUILT = cpu_casts.library()
KERNELS = [
    pytest.param(encode, id="reference"),
    pytest.param(definition.QUANTIZE_SLICES.run, id="sliced"),
    pytest.param(cpu_casts.QUANTIZE.run, id="cpu", marks=pytest.mark.skipif(isinstance(BUILT, str), reason=str(BUILT))),
    pytest.param(
        triton_rows.quantize, id="triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py's")
    ),
]
