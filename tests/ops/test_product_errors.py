"""Products that torch refuses raise torch's class of error, with the shapes and the format of the quantized operand."""

import re

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx

FORMATS = ("mxfp8", "nvfp4", "float8_row")


def plain(*shape, dtype=torch.float32, device=None):
    return torch.randn(shape, dtype=torch.float64).to(device or "cpu", dtype)


CASES = {
    "mm by 0-d": (lambda w: torch.mm(w, plain()), (64, 64)),
    "0-d by mm": (lambda w: torch.mm(plain(), w), (64, 64)),
    "mm by 1-d": (lambda w: torch.mm(w, plain(64)), (64, 64)),
    "1-d by mm": (lambda w: torch.mm(plain(64), w), (64, 64)),
    "mm by 3-d": (lambda w: torch.mm(w, plain(2, 64, 5)), (64, 64)),
    "3-d by mm": (lambda w: torch.mm(plain(2, 5, 64), w), (64, 64)),
    "mm inner": (lambda w: torch.mm(plain(5, 32), w), (64, 64)),
    "mm inner right": (lambda w: torch.mm(w, plain(32, 5)), (64, 64)),
    "mm dtype": (lambda w: torch.mm(plain(5, 64, dtype=torch.bfloat16), w), (64, 64)),
    "mm int": (lambda w: torch.mm(torch.ones(5, 64, dtype=torch.int64), w), (64, 64)),
    "mm bool": (lambda w: torch.mm(torch.ones(5, 64, dtype=torch.bool), w), (64, 64)),
    "mm complex": (lambda w: torch.mm(plain(5, 64).to(torch.complex64), w), (64, 64)),
    "matmul 0-d": (lambda w: w @ plain(), (64, 64)),
    "0-d matmul": (lambda w: plain() @ w, (64, 64)),
    "matmul inner": (lambda w: plain(5, 32) @ w, (64, 64)),
    "matmul vector inner": (lambda w: plain(32) @ w, (64, 64)),
    "matmul inner vector": (lambda w: w @ plain(32), (64, 64)),
    "matmul batch": (lambda w: plain(3, 5, 64) @ w, (2, 64, 64)),
    "matmul dtype": (lambda w: plain(5, 64, dtype=torch.bfloat16) @ w, (64, 64)),
    "addmm inner": (lambda w: torch.addmm(plain(64), plain(5, 32), w), (64, 64)),
    "addmm bias": (lambda w: torch.addmm(plain(63), plain(5, 64), w), (64, 64)),
    "addmm bias dim": (lambda w: torch.addmm(plain(2, 5, 64), plain(5, 64), w), (64, 64)),
    "addmm 1-d": (lambda w: torch.addmm(plain(64), plain(64), w), (64, 64)),
    "linear inner": (lambda w: F.linear(plain(5, 32), w), (48, 64)),
    "linear 3-d inner": (lambda w: F.linear(plain(2, 5, 32), w), (48, 64)),
    "linear 1-d inner": (lambda w: F.linear(plain(32), w), (48, 64)),
    "linear 0-d": (lambda w: F.linear(plain(), w), (48, 64)),
    "linear 3-d weight": (lambda w: F.linear(plain(5, 64), w), (2, 48, 64)),
    "linear dtype": (lambda w: F.linear(plain(5, 64, dtype=torch.bfloat16), w), (48, 64)),
    "linear int": (lambda w: F.linear(torch.ones(5, 64, dtype=torch.int64), w), (48, 64)),
    "linear bool": (lambda w: F.linear(torch.ones(5, 64, dtype=torch.bool), w), (48, 64)),
    "linear bias shape": (lambda w: F.linear(plain(5, 64), w, plain(47)), (48, 64)),
    "linear bias dim": (lambda w: F.linear(plain(5, 64), w, plain(3, 5, 48)), (48, 64)),
    "linear 3-d bias shape": (lambda w: F.linear(plain(2, 5, 64), w, plain(47)), (48, 64)),
    "linear bias int": (lambda w: F.linear(plain(5, 64), w, torch.ones(48, dtype=torch.int64)), (48, 64)),
    "bmm 2-d": (lambda w: torch.bmm(plain(2, 5, 64), w), (64, 64)),
    "bmm inner": (lambda w: torch.bmm(plain(2, 5, 32), w), (2, 64, 64)),
    "bmm batch": (lambda w: torch.bmm(plain(3, 5, 64), w), (2, 64, 64)),
    "bmm 2-d left": (lambda w: torch.bmm(plain(5, 64), w), (2, 64, 64)),
    "bmm dtype": (lambda w: torch.bmm(plain(2, 5, 64, dtype=torch.bfloat16), w), (2, 64, 64)),
    "baddbmm bias": (lambda w: torch.baddbmm(plain(2, 5, 63), plain(2, 5, 64), w), (2, 64, 64)),
    "mv inner": (lambda w: torch.mv(w, plain(32)), (64, 64)),
    "mv 2-d": (lambda w: torch.mv(w, plain(64, 1)), (64, 64)),
    "mv dtype": (lambda w: torch.mv(w, plain(64, dtype=torch.bfloat16)), (64, 64)),
    "mv 0-d": (lambda w: torch.mv(w, plain()), (64, 64)),
    "addmv bias": (lambda w: torch.addmv(plain(63), w, plain(64)), (64, 64)),
    "dot length": (lambda w: torch.dot(plain(32), w), (64,)),
    "dot 2-d": (lambda w: torch.dot(plain(64, 1), w), (64,)),
    "einsum inner": (lambda w: torch.einsum("bk,nk->bn", plain(5, 32), w), (48, 64)),
    "einsum letters": (lambda w: torch.einsum("bkq,nk->bn", plain(5, 64), w), (48, 64)),
    "einsum dtype": (lambda w: torch.einsum("bk,nk->bn", plain(5, 64, dtype=torch.bfloat16), w), (48, 64)),
    "einsum equation": (lambda w: torch.einsum("bk,nk->bz", plain(5, 64), w), (48, 64)),
    "conv1d channels": (lambda w: F.conv1d(plain(2, 4, 9), w), (8, 5, 3)),
    "conv2d dim": (lambda w: F.conv2d(plain(9), w), (8, 5, 3, 3)),
    "conv2d dtype": (lambda w: F.conv2d(plain(2, 5, 9, 9, dtype=torch.bfloat16), w), (8, 5, 3, 3)),
    "conv bias": (lambda w: F.conv1d(plain(2, 5, 9), w, plain(7)), (8, 5, 3)),
}
"""Name -> (a call that torch refuses, the shape of its quantized operand)."""
TORCHS_OWN = {name for name in CASES if name.startswith(("einsum", "conv"))} | {
    "matmul 0-d",
    "0-d matmul",
    "matmul batch",
    "linear 0-d",
    "linear 3-d weight",
}
"""Calls that torch itself refuses, before a rule of the package sees them or on dequantized values."""


def error_of(call, weight):
    try:
        call(weight)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("inference", [True, False])
def test_the_error_is_of_torchs_class_and_says_shapes_and_format(name, format, inference):
    call, shape = CASES[name]
    values = torch.randn(shape)
    orientation = "both" if len(shape) > 1 else "rowwise"
    with torch.inference_mode() if inference else torch.enable_grad():
        theirs, ours = error_of(call, values), error_of(call, mx.quantize(values, format, orientation=orientation))
    if theirs is None:  # torch takes it: then so does the package
        assert ours is None, ours
        return
    assert isinstance(ours, type(theirs)), (theirs, ours)
    if name not in TORCHS_OWN:
        assert str(mx.get_format(format)) in str(ours) and re.search(r"\(\d*,?.*\) of \w+", str(ours)), ours


@pytest.mark.parametrize(
    "call", [lambda w: plain(5, 64, device="meta") @ w, lambda w: F.linear(plain(5, 64, device="meta"), w)]
)
def test_another_device_is_named(call):
    with pytest.raises(RuntimeError, match=r"meta.*cpu"):
        call(mx.quantize(plain(64, 64), "mxfp8", orientation="both"))
