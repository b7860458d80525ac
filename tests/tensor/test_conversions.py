"""Conversions to another dtype: one rule, ``float32(code) * scale`` and one cast, whatever the way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.numerics.formats import FORMATS
from mxtensor.numerics.reference import decode

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2]
METHODS = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.int32: "int", torch.bool: "bool", torch.complex64: "cfloat",
}  # fmt: skip


KEEP = ("_to_copy", "with_dtype")
"""Ways that keep codes and scales."""


def conversions(w, dtype):
    """Name -> ``w`` in ``dtype``, every way that torch has."""

    def filled(fill):
        out = torch.empty(w.shape, dtype=dtype)
        fill(out)
        return out

    found = {
        "to": w.to(dtype),
        "to, copied": w.to(dtype, copy=True),
        "to a device": w.to("cpu", dtype),
        "to a tensor": w.to(torch.empty(1, dtype=dtype)),
        "type": w.type(dtype),
        "type_as": w.type_as(torch.empty(1, dtype=dtype)),
        "_to_copy": torch.ops.aten._to_copy(w, dtype=dtype, device="cpu"),
        "with_dtype": w.with_dtype(dtype),
        "dequantize": w.dequantize(dtype),
        "to_dtype": w.to_dtype(dtype),
        "copy_": filled(lambda out: out.copy_(w)),
        "_foreach_copy_": filled(lambda out: torch._foreach_copy_([out], [w])),
        "item assignment": filled(lambda out: out.__setitem__(slice(None), w)),
    }
    if dtype in METHODS:
        found["method"] = getattr(w, METHODS[dtype])()
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
@pytest.mark.parametrize("outer", FLOATS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.pairs
def test_every_conversion_rounds_once_from_float32(format, outer, dtype):
    for orientation in ("rowwise", "columnwise"):
        w = mx.quantize((3 * torch.randn(4, 64)).to(outer), format, orientation=orientation)
        exact = (
            decode(w._rowwise, torch.float32) if w._rowwise is not None else decode(w._columnwise, torch.float32).t()
        )
        expected = exact.to(dtype)
        for name, got in conversions(w, dtype).items():
            assert got.dtype is dtype and isinstance(got, mx.MXTensor) == (dtype in FLOATS and name in KEEP), name
            got = got.dequantize() if isinstance(got, mx.MXTensor) else got
            assert torch.equal(got.to(torch.complex128), expected.to(torch.complex128)), name


def test_a_wider_dtype_is_not_limited_by_the_one_before():
    w = mx.quantize(torch.randn(8, 64, dtype=torch.bfloat16), "nvfp4")
    assert not torch.equal(w.float(), w.dequantize().float()) and not torch.equal(w.double(), w.dequantize().double())
    assert torch.equal(w.double(), w.dequantize(torch.float32).double()) and torch.equal(w.bfloat16(), w.dequantize())
    assert torch.equal(w.with_dtype(torch.float16).float(), w.dequantize(torch.float32))


# ---------------------------------------------------------------------------------------------- lazy minus signs


def lazily_negated(*shape):
    """A contiguous tensor whose memory has the opposite sign, and the same values without the lazy sign."""
    x = torch._neg_view(torch.randn(*shape))
    assert x.is_neg() and x.is_contiguous()
    return x, x.resolve_neg().clone()


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_lazy_minus_sign_is_quantized(orientation, rounding):
    x, y = lazily_negated(8, 64)
    for format in ("mxfp8", "nvfp4", "float8_tensor"):
        a, b = (mx.quantize(t, format, orientation=orientation, rounding=rounding, seed=3) for t in (x, y))
        assert torch.equal(a.dequantize(), b.dequantize()) and torch.equal(a.t().dequantize(), b.t().dequantize())
    imaginary = torch.randn(8, 64, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(mx.quantize(imaginary, "mxfp8").dequantize(), mx.quantize(imaginary + 0, "mxfp8").dequantize())


def test_a_lazy_minus_sign_enters_products():
    x, y = lazily_negated(5, 64)
    bias, plain = lazily_negated(8)
    gradient, negative = lazily_negated(5, 8)
    for recipe in ("mxfp8", "mxfp4-weight-only", mx.recipe.MXFP8BlockScaling()):
        layer = mx.quantize_(nn.Linear(64, 8), recipe)
        assert torch.equal(layer(x), layer(y))
        with torch.no_grad():
            assert torch.equal(layer(x), layer(y))
            assert torch.equal(F.linear(x, layer.weight, bias), F.linear(y, layer.weight, plain))
    grads = []
    for g in (gradient, negative):
        z = y.clone().requires_grad_()
        layer.zero_grad()
        layer(z).backward(g)
        grads.append((z.grad, layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_lazy_minus_sign_of_an_mxtensor_and_into_one():
    x, y = lazily_negated(8, 64)
    w = mx.quantize(y, "mxfp8")
    for t in (w, w[:, 3]):
        negated = torch._neg_view(t)
        assert not negated.is_neg() and torch.equal(negated + 0, -t.dequantize())
    assert w.conj() is w.resolve_neg() is w.resolve_conj() is w
    w.zero_()
    assert same_values(w.copy_(x), y)
    w[:, 3:5].copy_(torch._neg_view(torch.ones(8, 2)))
    assert (w.dequantize()[:, 3:5] == -1).all()


def same_values(w, y):
    return torch.equal(w.dequantize(), mx.quantize(y, w.format).dequantize())
