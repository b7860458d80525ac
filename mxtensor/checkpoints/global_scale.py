"""The global scale of NVFP4 in files: one multiplies, the other divides, and each library rounds in its own order.

This package decodes float32(element * scale) * global_scale. Others first combine the two scales in float32, then
multiply by the element, so a value can differ by a float32 step, and then sometimes by a step of its dtype. There are
only 8 elements and 126 scales: all their products are compared, and the global scale is taken, among the float32 next
to it, that gives equal values. For some scales none does, because products are ties of the dtype: of the 128
mantissas of an amax in bfloat16 that is one, for which 42 of the 1008 products differ by a step of bfloat16 (float16:
8 to 11 mantissas, up to 9 products). The stored scale stays with the tensor, so that it can be written as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..tensor.mxtensor import MXTensor

STORED = "_mxtensor_stored_global_scale"
"""The attribute of a loaded tensor: (decoded global scale, how it is stored, stored global scale)."""
STEPS = 4
"""How many float32 steps above and below are tried."""
Combine = Callable[[Tensor, Tensor], Tensor]


divides, multiplies = operator.truediv, operator.mul
"""Of the scale of a block and the stored global scale: compressed-tensors divides, ModelOpt and torchao multiply."""


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """All magnitudes of elements as a column, all finite scales as a row."""
    elements = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return elements[:, None], torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def decoded(stored: Tensor, combine: Combine, dtype: torch.dtype) -> Tensor:
    """The global scale by which this package decodes what another library decodes by ``combine(scale, stored)``, one
    for each matrix of a stack.

    In bfloat16 and float16 the values are those of that library wherever one float32 can give them.
    """
    if stored.numel() > 1:
        return torch.stack([decoded(one, combine, dtype) for one in stored.flatten()]).view(stored.shape)
    stored = stored.reshape(())
    start = 1.0 / stored if combine is divides else stored
    if not (bool(start.isfinite()) and float(start) > 0):
        return start  # refused by ``layout.check_global_scale``
    elements, scales = _tables()
    wanted = elements * combine(scales, stored)
    return _nearest(start, lambda candidate: elements * scales * candidate, wanted, dtype)


def _nearest(start: Tensor, values: Callable[[Tensor], Tensor], wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 near ``start`` whose ``values``, rounded to ``dtype``, differ least often from those wanted."""
    neighbors, low, high = [start], start, start
    for _ in range(STEPS):
        low, high = torch.nextafter(low, torch.zeros(())), torch.nextafter(high, torch.tensor(torch.inf))
        neighbors += [low, high]
    best, fewest, wanted = start, wanted.numel() + 1, wanted.to(dtype)
    for candidate in neighbors:  # the nearest first
        wrong = int((values(candidate).to(dtype) != wanted).sum())
        if wrong < fewest:
            best, fewest = candidate, wrong
        if wrong == 0:
            break
    return best


def steps(t: MXTensor, combine: Combine) -> bool:
    """Whether ``stored_for(t, combine)`` is read back as another global scale: codes stay, and values may differ by
    a float32 step."""
    operand = t.rowwise
    if operand is None or operand.global_scale is None:
        return False
    read_back = decoded(stored_for(t, combine), combine, t.dtype)
    return not bool((read_back.flatten() == operand.global_scale.cpu().flatten()).all())  # a stack may have one for all


def stored_for(t: MXTensor, combine: Combine) -> Tensor:
    """The global scale to store for a library that decodes by ``combine``: the one that was loaded, if it is known; of
    a stack one for each matrix, (..., 1, 1), unless all are equal."""
    operand = t.rowwise
    assert operand is not None and operand.global_scale is not None
    scale = operand.global_scale.cpu()
    loaded: tuple[Tensor, Combine, Tensor] | None = getattr(t, STORED, None)
    if loaded is not None and loaded[1] is combine and torch.equal(loaded[0], scale):
        return loaded[2].reshape(()).clone() if loaded[2].numel() == 1 else loaded[2].clone()
    elements, scales = _tables()
    equal = scale.numel() > 0 and bool((scale == scale.flatten()[0]).all())
    found = []
    for one in scale.flatten()[:1] if equal else scale.flatten():  # one number, as for a matrix
        start = one if combine is multiplies else 1.0 / one
        if not (bool(start.isfinite()) and float(start) > 0):
            raise ValueError(f"the global scale is {float(one)}, which has no reciprocal to store")
        wanted = elements * scales * one
        found.append(_nearest(start, lambda stored: elements * combine(scales, stored), wanted, t.dtype))
    return found[0] if equal else torch.stack(found).view(scale.shape)
