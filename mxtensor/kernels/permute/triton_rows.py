"""The kernel rows ``triton``: rows sorted by expert and put back on a CUDA device, one launch for each copy or sum.

Sums have one order and no atomics, so that results repeat bit for bit. Device code: ``triton_device/permute.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.names import dtype_name
from ..quantize.triton_common import ceil_div
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch, on

SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that sums and their weights may have."""
MOST = 1024
"""Experts, choices of a token, or chunks: each program reads all of them at once."""
LARGEST = 2**31 - 1
"""Programs of a launch, and choices."""
MOST_PROGRAMS = 128
"""Programs that number rows: each reads what all of them have counted."""
ENTRIES = 2048
"""Entries of a mask, or of a comparison of rows with experts or chunks, at a time."""
BYTES = 2048
"""Bytes of a row that a program copies or sums at a time."""
WARPS = 4
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype as which it is copied."""


# ---------------------------------------------------------------------------------------------- what is refused


def _why_not(spec: Spec, *numbers: int) -> str | None:
    """The refusals that all share; ``numbers`` are of experts, choices of a token or chunks."""
    reason = triton_launch.missing(spec)
    if reason is not None:
        return reason
    for n in numbers:
        if n > MOST:
            return f"is for {MOST} experts or chunks, not {n}"
    return "no values" if any(0 in shape for shape in spec.shapes) else None


def _too_many(rows: int, cols: int, dtype: torch.dtype) -> str | None:
    programs = rows * ceil_div(cols, _cols(cols, dtype))
    return f"has {programs} programs, a launch at most {LARGEST}" if programs > LARGEST else None


def unknown_size(*tensors: Tensor | None) -> str | None:
    """Why elements are not copied; None if they are."""
    for t in tensors:
        if t is not None and t.dtype.itemsize not in WORDS:
            return f"copies elements of 1, 2, 4 or 8 bytes, not {dtype_name(t.dtype)}"
    return None


def not_summed(*tensors: Tensor | None) -> str | None:
    """Why values are not summed; None if they are."""
    for t in tensors:
        if t is not None and t.dtype not in SUMMED:
            return f"sums bfloat16, float16 and float32, not {dtype_name(t.dtype)}"
    return None


def refuses_map(spec: Spec, *operands: object) -> str | None:
    """For ``choices_of_rows`` and ``rows_of_mask``, whose first shape is (tokens, experts or choices of a token)."""
    if math.prod(spec.shapes[0]) > LARGEST:
        return f"numbers at most {LARGEST} choices"
    return _why_not(spec, spec.shapes[0][1])


def refuses_chunks(spec: Spec, *operands: object) -> str | None:
    """For ``chunk_rows``, whose first shape is (chunks,)."""
    return _why_not(spec, spec.shapes[0][0])


def refuses_gather(spec: Spec, x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> str | None:
    return _why_not(spec) or unknown_size(x, probs) or _too_many(len(choices), x.shape[1], x.dtype)


def refuses_merge(
    spec: Spec, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> str | None:
    tokens, per = row_id_map.shape
    return _why_not(spec, per) or not_summed(y, weights, probs) or _too_many(tokens, y.shape[1], y.dtype)


def refuses_spread(
    spec: Spec, grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor,
    wants: tuple[bool, bool],
) -> str | None:  # fmt: skip
    tokens, per = row_id_map.shape
    return _why_not(spec, per) or not_summed(grad, y, weights) or _too_many(tokens + len(y), y.shape[1], y.dtype)


# ---------------------------------------------------------------------------------------------- launches


def _power(n: int) -> int:
    """The power of two that is n or the next one above, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def _cols(cols: int, dtype: torch.dtype) -> int:
    """Columns that a program copies or sums at a time."""
    return min(_power(cols), BYTES // dtype.itemsize)


def _integers(t: Tensor) -> Tensor:
    """Integers or bools as kernels read them."""
    t = t.contiguous()
    return t.view(torch.uint8) if t.dtype is torch.bool else t


def _rows(t: Tensor) -> Tensor:
    """A matrix whose rows are contiguous."""
    return t if t.stride(1) == 1 else t.contiguous()


def _words(t: Tensor) -> Tensor:
    """A tensor as integers of the size of its elements."""
    return t.view(WORDS[t.dtype.itemsize])


def choices_of_rows(row_id_map: Tensor, rows: int, offsets: Tensor | None) -> Tensor:
    """``reference.choices_of_rows``."""
    out = torch.full((rows,), -1, dtype=torch.int32, device=row_id_map.device)
    row_id_map = _integers(row_id_map)
    count, block = row_id_map.numel(), 1024
    with on(out.device):
        launch(
            device_code("permute.invert_rows"), ceil_div(count, block),
            (row_id_map, None if offsets is None else _integers(offsets), out, count, row_id_map.shape[1], rows),
            (offsets is not None, block), WARPS,
        )  # fmt: skip
    return out


def rows_of_mask(routing_map: Tensor, rows: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """``reference.rows_of_mask`` in two launches: tokens are counted, then numbered."""
    mask, (tokens, experts) = _integers(routing_map), routing_map.shape
    width = _power(experts)
    height = max(ENTRIES // width, 1)
    length = ceil_div(ceil_div(tokens, MOST_PROGRAMS), height) * height
    programs = ceil_div(tokens, length)
    device = mask.device
    counts = torch.empty((programs, experts), dtype=torch.int32, device=device)
    row_id_map = torch.empty((tokens, experts), dtype=torch.int32, device=device)
    choices = torch.empty((rows,), dtype=torch.int32, device=device)
    has_offsets = offsets is not None
    with on(device):
        launch(
            device_code("permute.count_choices"), programs, (mask, counts, tokens, experts, length),
            (height, width), WARPS,
        )  # fmt: skip
        launch(
            device_code("permute.number_rows"), programs,
            (mask, counts, _integers(offsets) if offsets is not None else None, row_id_map, choices, tokens, experts,
             length, programs, rows, ceil_div(rows, programs)),
            (has_offsets, height, width, min(height, _power(programs)), height), WARPS,
        )  # fmt: skip
    return row_id_map, choices


def chunk_rows(
    sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int
) -> tuple[Tensor, Tensor]:
    """``reference.chunk_rows``."""
    count = len(sizes)
    width = _power(count)
    height = max(ENTRIES // width, 1)
    source = torch.empty((out_rows,), dtype=torch.int32, device=sizes.device)
    target = torch.empty((rows,), dtype=torch.int32, device=sizes.device)
    given = [t if t is None else _integers(t) for t in (sizes, index, spans)]
    with on(sizes.device):
        launch(
            device_code("permute.chunk_rows"), ceil_div(out_rows, height),
            (*given, source, target, rows, out_rows, count),
            (index is not None, spans is not None, width, height), WARPS,
        )  # fmt: skip
    return source, target


def gather(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``reference.gather``, of rows and of their weights in one launch."""
    rows, cols, x = len(choices), x.shape[1], _rows(x)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    out_probs = None if probs is None else torch.empty((rows,), dtype=probs.dtype, device=x.device)
    step = _cols(cols, x.dtype)
    blocks = ceil_div(cols, step)
    with on(x.device):
        launch(
            device_code("permute.gather_rows"), rows * blocks,
            (_words(x), choices.contiguous(), None if probs is None else _words(probs.contiguous()), _words(out),
             None if out_probs is None else _words(out_probs), per, cols, x.stride(0), blocks),
            (probs is not None, step), WARPS,
        )  # fmt: skip
    return out, out_probs


def merge(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``reference.merge`` in one launch: each token adds its rows in order."""
    tokens, per = row_id_map.shape
    rows, cols = y.shape
    y = _rows(y)
    out = torch.empty((tokens, cols), dtype=y.dtype, device=y.device)
    out_probs = None if probs is None else torch.empty((tokens, per), dtype=probs.dtype, device=y.device)
    step = _cols(cols, y.dtype)
    blocks = ceil_div(cols, step)
    with on(y.device):
        launch(
            device_code("permute.merge_rows"), tokens * blocks,
            (y, _integers(row_id_map), None if offsets is None else _integers(offsets),
             None if weights is None else weights.contiguous(), None if probs is None else probs.contiguous(), out,
             out_probs, per, rows, cols, y.stride(0), blocks),
            (offsets is not None, weights is not None, probs is not None, _power(per), step), WARPS,
        )  # fmt: skip
    return out, out_probs


def spread(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``reference.spread``: both gradients in one launch. Those of weights are float32 sums in another order."""
    tokens, per = row_id_map.shape
    rows, cols = y.shape
    grad, y = _rows(grad), _rows(y)
    step = _cols(cols, y.dtype)
    blocks = ceil_div(cols, step)
    y_grad = torch.empty((rows, cols), dtype=y.dtype, device=y.device) if wants[0] else None
    weights_grad = torch.empty((tokens, per), dtype=weights.dtype, device=y.device) if wants[1] else None
    choices = choices_of_rows(row_id_map, rows, offsets) if wants[0] else row_id_map
    row_programs = rows * blocks if wants[0] else 0
    with on(y.device):
        launch(
            device_code("permute.spread_rows"), row_programs + (tokens if wants[1] else 0),
            (grad, y, _integers(row_id_map), None if offsets is None else _integers(offsets), choices,
             weights.contiguous(), y if y_grad is None else y_grad, weights if weights_grad is None else weights_grad,
             per, rows, cols, grad.stride(0), y.stride(0), blocks, row_programs),
            (offsets is not None, _power(per), step), WARPS,
        )  # fmt: skip
    return y_grad, weights_grad
