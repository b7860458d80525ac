"""Whether two results are the same product, two tensors the same bytes, and two operands the same cast."""

import copy

import numpy as np
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.oracle import as_bytes, same_floats


def relative_error(y, reference):
    """Frobenius norm of the difference over that of the reference, in float64."""
    y, reference = y.double(), reference.double()
    return ((y - reference).norm() / reference.norm()).item()


def assert_same_product(y, product, *operands):
    """Assert that ``y`` is ``product(*operands)``, accumulated in float32 and rounded once to ``y.dtype``.

    ``product`` is multilinear with positive coefficients, so ``product(|operands|)`` bounds every partial sum. Each
    element of ``y`` is between the exact (float64) result minus and plus 2^-21 of that bound (about eight float32
    roundings), rounded. In 16 bits this allows only the two neighbours of a tie, unless terms cancel.
    """
    exact = product(*(f.double() for f in operands))
    bound = product(*(f.double().abs() for f in operands)) * 2.0**-21
    assert y.shape == exact.shape
    low, high = (exact - bound).to(y.dtype), (exact + bound).to(y.dtype)
    assert ((low <= y) & (y <= high)).all()
    if y.numel() == 0:
        return
    if y.dtype is torch.float64:
        assert relative_error(y, exact) < 1e-14
    elif y.dtype is torch.float32:
        assert relative_error(y, exact) < 1e-6
    else:
        differing = (y != exact.to(y.dtype)).double().mean().item()
        assert differing <= max(0.01, 2 / y.numel())


def dequantized(module):
    """A copy of ``module`` whose MXTensor parameters are plain again."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if isinstance(parameter, mx.MXTensor):
                layer._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    return module


def components_of(w):
    """Every tensor of codes and scales of an MXTensor, one-byte dtypes as uint8."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for operand in w.operands for t in operand.tensors]


def same_bytes(a, b):
    """Whether two MXTensors have the same codes and scales."""
    mine, theirs = components_of(a), components_of(b)
    return len(mine) == len(theirs) and all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def assert_same_operand(operand, expected):
    """Assert that two operands have the same tensors, bit for bit, and that those of the first are contiguous."""
    assert (operand.shape, operand.format) == (expected.shape, expected.format)
    for ours, theirs in zip(operand.tensors, expected.tensors, strict=True):
        assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
        if ours.dtype == torch.float32:
            assert same_floats(ours.numpy(), theirs.numpy())
        else:
            np.testing.assert_array_equal(as_bytes(ours), as_bytes(theirs))


def assert_same_values(ours, theirs):
    """Assert that two tensors have the same values, with the signs of zeros and with NaN in the same places."""
    assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
    nan = ours.isnan()
    assert torch.equal(nan, theirs.isnan())
    assert torch.equal(ours.masked_fill(nan, 1.0), theirs.masked_fill(nan, 1.0))
    assert torch.equal(ours.signbit() | nan, theirs.signbit() | nan)
