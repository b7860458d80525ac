"""Recorded products of cuBLASLt are torch's, to the bit, for other tensors than those that were recorded."""

import pytest
import torch

from mxtensor.core.recording import record
from mxtensor.kernels.gemm.cublas import CAPABILITY, recorded_product

SHAPES = [(128, 128, 128), (17, 48, 64), (1, 64, 32), (512, 4096, 4096), (2048, 1024, 4096), (16384, 3072, 1024),
          (300, 2880, 2880), (4096, 1024, 16384), (128, 16384, 4096)]  # fmt: skip
"""(M, N, K)."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.gpu


def codes(rows, cols, dtype):
    return torch.randn(rows, cols, device="cuda").to(dtype)


def scales(rows, by_rows):
    return torch.rand((rows, 1) if by_rows else (), device="cuda") + 0.5


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recorded_product_is_that_of_torch(shape, by_rows, a, b, biased):
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("torch multiplies rows by CUTLASS here")
    rows, cols, inner = shape

    def operands():
        out = [codes(rows, inner, a), codes(cols, inner, b), scales(rows, by_rows), scales(cols, by_rows)]
        return [*out, torch.randn(cols, device="cuda", dtype=torch.bfloat16) if biased else None]

    def recorded(x, w, scale_x, scale_w, bias):
        out = recorded_product(x, w, scale_x, scale_w, bias, torch.bfloat16, False)
        assert out is not None
        return out

    first = operands()
    out, program = record(lambda: recorded(*first), first, lambda t: [t])
    for given, mine in ((first, out), *((other, program(*other)[0]) for other in (operands(), operands()))):
        x, w, scale_x, scale_w, bias = given
        expected = torch._scaled_mm(
            x, w.t(), scale_x, scale_w.t() if by_rows else scale_w, bias, out_dtype=torch.bfloat16, use_fast_accum=False
        )
        assert torch.equal(mine, expected)


def test_outside_of_a_recording_torch_multiplies():
    one = torch.ones((), device="cuda")
    assert recorded_product(codes(32, 32, E4M3), codes(32, 32, E4M3), one, one, None, torch.bfloat16, False) is None
