"""When two results are the same product, and two tensors the same bytes."""

import copy

import torch
from torch import nn

import mxtensor as mx


def relative_error(y, reference):
    """Frobenius norm of the difference over that of the reference, in float64."""
    y, reference = y.double(), reference.double()
    return ((y - reference).norm() / reference.norm()).item()


def assert_same_product(y, product, *gemm_operands):
    """``y`` is ``product(*gemm_operands)`` accumulated in float32 and rounded once to ``y.dtype``.

    ``product`` is multilinear with positive coefficients, so ``product(|gemm_operands|)`` bounds every partial sum: the exact
    (float64) result moved by 2^-21 of that bound, about eight float32 roundings, and rounded, brackets each element. In
    16 bits this allows the two neighbours of a tie and nothing else, except where terms cancel.
    """
    exact = product(*(f.double() for f in gemm_operands))
    bound = product(*(f.double().abs() for f in gemm_operands)) * 2.0**-21
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
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if isinstance(parameter, mx.MXTensor):
                part._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    return module


def components_of(w):
    """Every tensor an MXTensor holds, one-byte dtypes as uint8."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for operand in w.operands for t in operand.tensors]


def same_bytes(a, b):
    """Whether two MXTensors hold the same codes and scales."""
    mine, theirs = components_of(a), components_of(b)
    return len(mine) == len(theirs) and all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
