"""How a matrix is rounded so that its error is least: the scale of each block, and GPTQ.

**Best scales.** Each block takes the scale with the least squared error, among those that the format's rule gives for
several amax. The rule that casts use maps the amax of a block to the largest element. A smaller amax clips the largest
values and gives the others finer steps; a larger one can put them on better steps, such as 4 instead of 6 as the
largest element of NVFP4 ("four over six"). Every candidate is a scale that the format can store.

**GPTQ.** Columns are rounded one by one, and later columns compensate for the error of earlier ones. The squared error
of the outputs of a layer is ``(w - q) H (w - q)^T`` for each row, ``H`` the second moment of its inputs. With the
inverse of ``H`` as ``U^T U``, ``U`` upper triangular (Cholesky), the best change of the columns after column j is
``-(w_j - q_j) / U_jj * U_j``. A block's scale is chosen when its first column is reached, from values that hold the
corrections up to there, with the error of column j weighted by ``1 / U_jj^2``. Blocks of several rows or of all columns
choose theirs before.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.elements import ElementFormat, ScaleFormat, decode_elements, encode_elements, pack
from ..numerics.formats import E8M0, FP32_POW2, FULL, Format
from ..numerics.operand import Operand
from ..numerics.reference import (
    SCALE_RULES,
    crop,
    join_blocks,
    least_error,
    scale_to_float,
    split_blocks,
    spread,
    tensor_amax,
)

OF_POWERS = (1.0, 0.5, 2.0)
"""What the amax is multiplied by, where scales are powers of two."""
OF_FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 1.1, 1.2, 1.3, 1.5)
"""The same where scales have a mantissa. 1.5 is four over six."""


def multiples_of(scale: ScaleFormat) -> tuple[float, ...]:
    """The candidates for a scale format, as multiples of the amax. The first is the scale that a cast would choose."""
    return OF_POWERS if scale in (E8M0, FP32_POW2) else OF_FRACTIONS


@dataclass(frozen=True)
class ElementTable:
    """The finite values of an element in ascending order: one search finds the nearest elements of many values.

    That takes fewer ops for a column than the definition. The definition makes the table, so that ties and the largest
    value are as in ``encode_elements``.
    """

    values: Tensor
    """float32 (elements,)."""
    codes: Tensor
    """uint8 (elements,)."""
    bounds: Tensor
    """float32 (elements - 1,): the largest value that rounds to each element but the last."""

    def index(self, y: Tensor) -> Tensor:
        """The index of the element nearest to each value, ties to even, saturating: int32 of the shape of ``y``."""
        return torch.bucketize(y.contiguous(), self.bounds, out_int32=True)


@lru_cache(maxsize=64)
def element_table(element: ElementFormat, device: torch.device) -> ElementTable:
    """The table of an element on a device. It has one zero."""
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    every = decode_elements(codes.view(element.dtype), element)
    made = encode_elements(every.clone(), element).view(torch.uint8) == codes  # int8 has a code that is never made
    made &= every.isfinite() & ~((every == 0) & every.signbit())
    values, order = every[made].sort()
    middle = (values[1:] + values[:-1]) / 2
    to_upper = decode_elements(encode_elements(middle.clone(), element), element) == values[1:]
    bounds = torch.where(to_upper, torch.nextafter(middle, torch.full_like(middle, -math.inf)), middle)
    return ElementTable(values.to(device), codes[made][order].to(device), bounds.to(device))


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix (rows, cols) or of a piece of one."""

    stored: Tensor
    """One entry a block, as the operand stores it."""
    multiplier: Tensor
    """float32 (rows, cols): what a value is multiplied by before it is rounded to an element."""
    value: Tensor
    """float32 (rows, cols): what an element is multiplied by, the global scale included."""
    global_scale: Tensor | None


def best_scales(
    w: Tensor, cast: Cast, whole_amax: Tensor, importance: Tensor | None = None, multiples: Sequence[float] = (1.0,)
) -> Scales:
    """The scales of ``w`` (rows, cols; float32, finite), each with the least weighted squared error of its block.

    ``whole_amax``: the amax of the whole matrix, if ``w`` is a piece of it. ``importance``: the weight of each column's
    error, (cols,). ``multiples``: the candidates, as multiples of the amax of a block; of equals the first is chosen.
    """
    format = cast.format
    blocks, dims = split_blocks(w, format)
    magnitudes = blocks.abs()
    amax = magnitudes.amax(dims, keepdim=True) if format.block[0] == FULL else magnitudes.amax(dims)
    weights = None if importance is None else split_blocks(importance.expand_as(w), format)[0]
    element = element_table(format.element, w.device)
    global_scale = None

    def candidate(multiple: float) -> tuple[Tensor, ...]:
        nonlocal global_scale
        stored, multiplier, global_scale = SCALE_RULES[format.scale](amax * multiple, cast, whole_amax)
        value = scale_to_float(stored, format.scale)
        value = value if global_scale is None else value * global_scale
        difference = element.values[element.index(blocks * spread(multiplier, dims))].mul_(spread(value, dims))
        error = difference.sub_(blocks).square_()
        error = (error if weights is None else error.mul_(weights)).sum(dims).reshape(amax.shape)
        return error, stored, multiplier, value

    _, stored, multiplier, value = least_error(map(candidate, multiples))
    rows, cols = w.shape

    def of_values(scale: Tensor) -> Tensor:
        return join_blocks(spread(scale, dims).expand_as(blocks), dims)[..., :rows, :cols]

    return Scales(stored, of_values(multiplier), of_values(value), global_scale)


def nearest(w: Tensor, cast: Cast, multiples: Sequence[float], importance: Tensor | None = None) -> Operand:
    """``w`` (rows, cols; float32), each value rounded to nearest with the best scale of its block."""
    scales = best_scales(w, cast, tensor_amax(w), importance, multiples)
    y = w * scales.multiplier
    if not cast.format.signed_zero:
        y = torch.where(y == 0, 0.0, y)
    codes = encode_elements(y, cast.format.element).view(torch.uint8)
    return operand_of(codes, scales.stored, scales.global_scale, cast.format)


def operand_of(codes: Tensor, stored: Tensor, global_scale: Tensor | None, format: Format) -> Operand:
    """The operand with these codes, one uint8 a value, and these scales."""
    element, cols = format.element, codes.shape[-1]
    data = crop(pack(F.pad(codes, (0, -cols % element.packing[0])), element), None, element.data_cols(cols))
    shape = tuple(codes.shape)
    return Operand(data.view(element.dtype), stored.reshape(format.scale_shape(shape)), global_scale, format, shape)


# ---------------------------------------------------------------------------------------------- GPTQ

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
