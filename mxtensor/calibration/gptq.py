"""GPTQ for block formats: columns are rounded one by one, and each one's error is made up for by those after it.

The squared error of the outputs of a layer is ``(w - q) H (w - q)^T`` for each row, ``H`` the second moment of its
inputs. With the inverse of ``H`` as ``U^T U``, ``U`` upper triangular (Cholesky), the best change of the columns after
column j is ``-(w_j - q_j) / U_jj * U_j``.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.

A block's scale is chosen when its first column is reached, from values that hold the corrections up to there, with the
error of column j weighted by ``1 / U_jj^2``. Blocks of several rows or of all columns choose theirs before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.elements import pack
from ..numerics.formats import FULL, Format
from ..numerics.operand import Operand
from ..numerics.reference import crop, tensor_amax
from .scales import best_scales, rounded

COLUMNS = 128
"""Columns whose corrections reach the columns after them in one product."""
TRIES = 5
"""How often the damping is multiplied by 10 if the second moment is not positive definite."""


def damped(second_moment: Tensor, damping: float) -> Tensor:
    """``second_moment`` (cols, cols) in float64, with ``damping`` times its mean diagonal added to the diagonal."""
    h = second_moment.to(torch.float64)
    mean = h.diagonal().mean()
    return h + torch.eye(len(h), dtype=h.dtype, device=h.device) * (damping * mean if mean > 0 else 1.0)


def inverse_cholesky(second_moment: Tensor, damping: float) -> Tensor:
    """The upper triangular U with ``U^T U`` the inverse of the damped second moment, float32.

    Raises ValueError for a second moment that is not finite.
    """
    if not second_moment.isfinite().all():
        raise ValueError("the inputs of the layer are not all finite; calibrate with data that the model can read")
    for _ in range(TRIES):
        lower, failed = torch.linalg.cholesky_ex(damped(second_moment, damping))
        if not failed:
            break
        damping *= 10
    inverse = torch.cholesky_inverse(lower)
    found: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return found.to(torch.float32)


def corrected(w: Tensor, cross_moment: Tensor, second_moment: Tensor, damping: float) -> Tensor:
    """The weight whose outputs for the inputs of the quantized model are nearest to those of ``w`` before.

    ``cross_moment``: (cols, cols), the mean of (input before) times (input in the quantized model). Damping pulls the
    result towards ``w``.
    """
    h = damped(second_moment, damping)
    cross = cross_moment.to(torch.float64) + (h - second_moment.to(torch.float64))
    found: Tensor = torch.linalg.solve(h, cross.T @ w.to(torch.float64).T)
    return found.T.to(torch.float32)


def gptq(w: Tensor, upper: Tensor, cast: Cast, multiples: Sequence[float]) -> Operand:
    """``w`` (rows, cols; float32) rounded for inputs with this ``inverse_cholesky``; ``multiples``: see best_scales."""
    format, w, whole_amax = cast.format, w.clone(), tensor_amax(w)
    importance = 1 / upper.diagonal().square()
    width = format.block[1]
    chosen: list[Tensor] = []
    by_block = format.block[0] == 1 and width != FULL
    if by_block:
        group = max(COLUMNS // width, 1) * width
        multiplier, value = torch.empty_like(w), torch.empty_like(w)
    else:
        group, scales = COLUMNS, best_scales(w, cast, whole_amax, importance, multiples)
        multiplier, value, chosen = scales.multiplier, scales.value, [scales.stored]
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    for begin in range(0, w.shape[1], group):
        end = min(begin + group, w.shape[1])
        errors = torch.zeros_like(w[:, begin:end])
        for j in range(begin, end):
            if by_block and (j - begin) % width == 0:
                block = slice(j, min(j + width, end))
                scales = best_scales(w[:, block], cast, whole_amax, importance[block], multiples)
                multiplier[:, block], value[:, block] = scales.multiplier, scales.value
                chosen.append(scales.stored)
            codes[:, j], values = rounded(w[:, j], multiplier[:, j], value[:, j], format)
            errors[:, j - begin] = (w[:, j] - values) / upper[j, j]
            w[:, j + 1 : end] -= errors[:, j - begin, None] * upper[j, None, j + 1 : end]
        w[:, end:] -= errors @ upper[begin:end, end:]
    return operand_of(codes, torch.cat(chosen, -1), scales.global_scale, format)


def nearest(w: Tensor, cast: Cast, multiples: Sequence[float], importance: Tensor | None = None) -> Operand:
    """``w`` (rows, cols; float32), each value rounded to nearest with the best scale of its block."""
    scales = best_scales(w, cast, tensor_amax(w), importance, multiples)
    codes, _ = rounded(w, scales.multiplier, scales.value, cast.format)
    return operand_of(codes, scales.stored, scales.global_scale, cast.format)


def operand_of(codes: Tensor, stored: Tensor, global_scale: Tensor | None, format: Format) -> Operand:
    """The operand with these codes, one uint8 a value, and these scales."""
    element, cols = format.element, codes.shape[-1]
    data = crop(pack(F.pad(codes, (0, -cols % element.packing[0])), element), None, element.data_cols(cols))
    shape = tuple(codes.shape)
    return Operand(data.view(element.dtype), stored.reshape(format.scale_shape(shape)), global_scale, format, shape)
