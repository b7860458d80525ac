"""GPTQ for block formats: columns are rounded one by one, and later columns compensate for the error of earlier ones.

The squared error of the outputs of a layer is ``(w - q) H (w - q)^T`` for each row, ``H`` the second moment of its
inputs. With the inverse of ``H`` as ``U^T U``, ``U`` upper triangular (Cholesky), the best change of the columns after
column j is ``-(w_j - q_j) / U_jj * U_j``.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.

A block's scale is chosen when its first column is reached, from values that hold the corrections up to there, with the
error of column j weighted by ``1 / U_jj^2``. Blocks of several rows or of all columns choose theirs before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..numerics.reference import tensor_amax
from .best_scales import best_scales, element_table, operand_of

COLUMNS = 128
"""Columns whose corrections reach the columns after them in one product."""
PIECE = 32
"""Columns whose corrections reach the others of the COLUMNS in one product."""
TRIES = 5
"""How often the damping is multiplied by 10 if the second moment is not positive definite."""


def check_inputs(*sums: Tensor) -> None:
    """Raise ValueError if sums over the inputs of a layer are not finite."""
    if not all(total.isfinite().all() for total in sums):
        raise ValueError("the inputs of the layer are not all finite; calibrate with data that the model can read")


def inverse_cholesky(second_moment: Tensor, damping: float) -> Tensor:
    """The upper triangular U with ``U^T U`` the inverse of the damped second moment (cols, cols), float32.

    ``damping`` times the mean of the diagonal is added to the diagonal. Raises ValueError for a second moment that is
    not finite.
    """
    check_inputs(second_moment)
    h = second_moment.to(torch.float64)
    one, mean = torch.eye(len(h), dtype=h.dtype, device=h.device), h.diagonal().mean()
    for _ in range(TRIES):
        lower, failed = torch.linalg.cholesky_ex(h + one * (damping * mean if mean > 0 else 1.0))
        if not failed:
            break
        damping *= 10
    inverse = torch.cholesky_inverse(lower)
    found: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return found.to(torch.float32)


def corrected(w: Tensor, cross_moment: Tensor, second_moment: Tensor, upper: Tensor) -> Tensor:
    """The weight whose outputs for the inputs of the quantized model are nearest to those of ``w`` before.

    ``cross_moment``: (cols, cols), the mean of (input before) times (input in the quantized model). ``upper``: the
    ``inverse_cholesky`` of the second moment; its damping pulls the result towards ``w``.
    """
    return w + w @ (cross_moment - second_moment) @ upper.T @ upper


def gptq(w: Tensor, upper: Tensor, cast: Cast, multiples: Sequence[float]) -> Operand:
    """``w`` (rows, cols; float32) rounded for inputs with this ``inverse_cholesky``; ``multiples``: see best_scales."""
    format, whole_amax = cast.format, tensor_amax(w)
    importance, pivots = 1 / upper.diagonal().square(), upper.diagonal().tolist()
    element, width = element_table(format.element, w.device), format.block[1]
    by_block = format.block[0] == 1 and width != FULL
    chosen: list[Tensor] = []
    if by_block:
        group = max(COLUMNS // width, 1) * width
        multiplier, value = torch.empty_like(w.T), torch.empty_like(w.T)
    else:
        group = width = COLUMNS
        scales = best_scales(w, cast, whole_amax, importance, multiples)
        multiplier, value = scales.multiplier.T.contiguous(), scales.value.T.contiguous()
        chosen = [scales.stored]
    left = w.T.contiguous()  # (cols, rows): a column is contiguous
    codes = torch.empty(left.shape, dtype=torch.uint8, device=w.device)
    errors = torch.empty(group, len(w), device=w.device)
    for begin in range(0, len(left), group):
        end = min(begin + group, len(left))
        for piece in _pieces(begin, end, width):
            if by_block and (piece.start - begin) % width == 0:
                block = slice(piece.start, min(piece.start + width, end))
                scales = best_scales(left[block].T, cast, whole_amax, importance[block], multiples)
                multiplier[block], value[block] = scales.multiplier.T, scales.value.T
                chosen.append(scales.stored)
            for j in range(piece.start, piece.stop):
                index = element.index(left[j] * multiplier[j])
                torch.index_select(element.codes, 0, index, out=codes[j])
                error = errors[j - begin]
                torch.addcmul(left[j], element.values[index], value[j], value=-1, out=error).div_(pivots[j])
                left[j + 1 : piece.stop].addr_(upper[j, j + 1 : piece.stop], error, alpha=-1)
            done = errors[piece.start - begin : piece.stop - begin]
            left[piece.stop : end].addmm_(upper[piece, piece.stop : end].T, done, alpha=-1)
        left[end:].addmm_(upper[begin:end, end:].T, errors[: end - begin], alpha=-1)
    return operand_of(codes.T.contiguous(), torch.cat(chosen, -1), scales.global_scale, format)


def _pieces(begin: int, end: int, width: int) -> Iterator[slice]:
    """Columns ``begin`` to ``end`` in pieces of at most PIECE columns, each within one block of ``width``."""
    for block in range(begin, end, width):
        for start in range(block, min(block + width, end), PIECE):
            yield slice(start, min(start + PIECE, block + width, end))
