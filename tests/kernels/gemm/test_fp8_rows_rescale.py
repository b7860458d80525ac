"""The instructions that rescale codes to the exponent of their row: every code by every power of two."""

import importlib

import numpy as np
import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.quantize.to_row_scaled import row_code
from mxtensor.kernels.quantize.triton_common import code_of
from tests.helpers import ptx
from tests.helpers.float8_instructions import rounded

triton = pytest.importorskip("triton")
tl = triton.language
kernels = importlib.import_module("mxtensor.kernels.triton_device.row_scaled")
shift_word = kernels.shift_word
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows compares the operands"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
ROW_EXPONENT = 200
"""The exponent of the row, biased."""


@triton.jit
def shift_words(stored_ptr, out_ptr, exponents_ptr, code: tl.constexpr, constants: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, shift_word(tl.load(stored_ptr + at), tl.load(exponents_ptr + at), code, constants))


def words_of_shifts(name):
    """(shift, its word) of blocks at every distance below the exponent of their row, on sm_90; the last one is of
    a row out of range."""
    cast, device = mx.Cast.of(name), torch.device("cpu")
    code, constants = code_of(cast, device), row_code(cast.format.element, (9, 0))
    assert code.float8

    stored, row_exponents = (
        torch.arange(ROW_EXPONENT - 62, ROW_EXPONENT + 2, dtype=torch.uint8),
        torch.full((64,), ROW_EXPONENT, dtype=torch.int32),
    )
    row_exponents[-1] = kernels.UNCHANGED_EXPONENT.value
    out = torch.full((64,), -7, dtype=torch.int32)
    shift_words[(1,)](stored, out, row_exponents, code, constants)
    return (stored.int() - ROW_EXPONENT + constants.offset).numpy(), out.numpy().view(np.uint32)


@pytest.mark.parametrize("name, element", [("mxfp8", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)])
def test_every_code_by_every_distance_is_rounded_once(name, element, instructions):
    instructions((9, 0))
    which = "E4M3" if element is torch.float8_e4m3fn else "E5M2"
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(element).double().isfinite()
    four = np.repeat(codes.numpy().astype(np.uint32), 4).reshape(256, 4) + np.array([0, 1, 2, 3], np.uint32)
    four &= 0xFF  # four different codes to a word
    word = four[:, 0] | four[:, 1] << 8 | four[:, 2] << 16 | four[:, 3] << 24
    shifts, words = words_of_shifts(name)
    assert (words[-1] == 0xFFFFFFFF) == (which == "E5M2")  # the row out of range; E4M3 is multiplied by one
    shifts[-1] = 0
    for shift, multiplier in zip(shifts, words, strict=True):
        expected = (
            codes
            if multiplier == 0xFFFFFFFF
            else rounded(codes.view(element).double() * 2.0**shift, torch.float8_e4m3fn)
        )
        got = ptx.run(getattr(kernels, f"{which}_RESCALE_FOUR").value, word, np.full(256, multiplier))
        each = torch.from_numpy(np.stack([got >> 8 * i & 0xFF for i in range(4)], 1).astype(np.uint8))
        index = torch.from_numpy(four.astype(np.int64))
        assert torch.equal(each[finite[index]], expected[index][finite[index]]), shift
        two = ptx.run(
            getattr(kernels, f"{which}_RESCALE_TWO").value, word, np.full(256, multiplier), np.full(256, multiplier)
        )
        assert np.array_equal(two, got), shift
