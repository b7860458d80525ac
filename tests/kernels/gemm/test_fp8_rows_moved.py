"""The instructions that move codes under the exponent of their row: every code by every power of two."""

import importlib

import numpy as np
import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm.fp8_rows_operand import constants_of
from mxtensor.kernels.quantize.triton_common import code_of
from mxtensor.kernels.runtime import triton_launch
from tests.helpers import ptx
from tests.helpers.float8_instructions import rounded

triton = pytest.importorskip("triton")
tl = triton.language
kernels = importlib.import_module("mxtensor.kernels.triton_device.row_scaled_both")
shift_word = kernels.shift_word
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows compares the operands"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
TOP = 200
"""The exponent of the row, biased."""


@triton.jit
def shift_words(stored_ptr, out_ptr, top, C: tl.constexpr, R: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, shift_word(tl.load(stored_ptr + at), top, C, R, at < 0))


def shifts_of(name, monkeypatch):
    """(up, the word of the shift) of blocks at every distance below the top of their row, on sm_90."""
    monkeypatch.setattr(triton_launch, "instructions_of", lambda device: (9, 0))
    cast, device = mx.Cast.of(name), torch.device("cpu")
    code, constants = code_of(cast, device), constants_of(cast.format.element, device)
    assert code.float8

    stored = torch.arange(TOP - 63, TOP + 1, dtype=torch.uint8)
    out = torch.full((64,), -1, dtype=torch.int32)
    shift_words[(1,)](stored, out, TOP, code, constants)
    return (stored.int() - TOP + constants.up).numpy(), out.numpy().view(np.uint32)


@pytest.mark.parametrize("name, element", [("mxfp8", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)])
def test_every_code_by_every_distance_is_rounded_once(name, element, monkeypatch):
    which = "E4M3" if element is torch.float8_e4m3fn else "E5M2"
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(element).double().isfinite()
    four = np.repeat(codes.numpy().astype(np.uint32), 4).reshape(256, 4) + np.array([0, 1, 2, 3], np.uint32)
    four &= 0xFF  # four different codes to a word
    word = four[:, 0] | four[:, 1] << 8 | four[:, 2] << 16 | four[:, 3] << 24
    for up, shift in zip(*shifts_of(name, monkeypatch), strict=True):
        expected = rounded(codes.view(element).double() * 2.0**up, torch.float8_e4m3fn)
        got = ptx.run(getattr(kernels, f"{which}_MOVED_FOUR").value, word, np.full(256, shift))
        each = torch.from_numpy(np.stack([got >> 8 * i & 0xFF for i in range(4)], 1).astype(np.uint8))
        places = torch.from_numpy(four.astype(np.int64))
        assert torch.equal(each[finite[places]], expected[places][finite[places]]), up
        two = ptx.run(getattr(kernels, f"{which}_MOVED_TWO").value, word, np.full(256, shift), np.full(256, shift))
        assert np.array_equal(two, got), up
