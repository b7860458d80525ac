"""Rows sorted by expert and put back on a CUDA device in Triton, one launch for each copy or sum, and the custom ops.

Sums have one order and no atomics, so that results repeat bit for bit. Device code: ``triton_device/permute.py``. The
ops are what torch.compile sees of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ..quantize.triton_common import ceil_div, power
from ..runtime import triton_launch
from ..runtime.custom_op import check_device
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


def _why_not(
    spec: Spec, number: int = 1, dtypes: str | None = None, rows: int = 0, x: Tensor | None = None
) -> str | None:
    """The refusals that all share. ``number``: experts, choices of a token or chunks; ``dtypes``: ``wrong_dtype`` of
    the values; ``rows``: those that are copied or summed, each as long as those of ``x``."""
    missing = triton_launch.missing(spec)
    if missing is not None:
        return missing
    if number > MOST:
        return f"is for {MOST} experts or chunks, not {number}"
    if any(0 in shape for shape in spec.shapes):
        return "no values"
    programs = 0 if x is None or dtypes is not None else rows * ceil_div(x.shape[1], _cols(x))
    return f"has {programs} programs, a launch at most {LARGEST}" if programs > LARGEST else dtypes


def wrong_dtype(*tensors: Tensor | None, summed: bool = False) -> str | None:
    """Why values are not copied, or not summed; None if they are."""
    for t in tensors:
        if t is not None and summed and t.dtype not in SUMMED:
            return f"sums bfloat16, float16 and float32, not {dtype_name(t.dtype)}"
        if t is not None and t.dtype.itemsize not in WORDS:
            return f"copies elements of 1, 2, 4 or 8 bytes, not {dtype_name(t.dtype)}"
    return None


def refuses_numbers(spec: Spec, *operands: object) -> str | None:
    """For what numbers rows; the first shape is (tokens, experts or choices of a token), or (chunks,)."""
    if math.prod(spec.shapes[0]) > LARGEST:
        return f"numbers at most {LARGEST} choices"
    return _why_not(spec, spec.shapes[0][-1])


def refuses_gather(spec: Spec, x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> str | None:
    return _why_not(spec, 1, wrong_dtype(x, probs), len(choices), x)


def refuses_merge(
    spec: Spec, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> str | None:
    return _why_not(spec, row_id_map.shape[1], wrong_dtype(y, weights, probs, summed=True), len(row_id_map), y)


def refuses_spread(
    spec: Spec, grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor,
    wants: tuple[bool, bool],
) -> str | None:  # fmt: skip
    return _why_not(spec, row_id_map.shape[1], wrong_dtype(grad, y, weights, summed=True), len(row_id_map) + len(y), y)


# ---------------------------------------------------------------------------------------------- launches


def _cols(x: Tensor) -> int:
    """Columns of x that a program copies or sums at a time."""
    return min(power(x.shape[1]), BYTES // x.dtype.itemsize)


def _integers(t: Tensor | None) -> Tensor | None:
    """Integers or bools as kernels read them."""
    if t is None:
        return None
    t = t.contiguous()
    return t.view(torch.uint8) if t.dtype is torch.bool else t


def _rows(t: Tensor) -> Tensor:
    """A matrix whose rows are contiguous."""
    return t if t.stride(1) == 1 else t.contiguous()


def _words(t: Tensor | None) -> Tensor | None:
    """A tensor as integers of the size of its elements."""
    return None if t is None else t.view(WORDS[t.dtype.itemsize])


def choices_of_rows(row_id_map: Tensor, rows: int, offsets: Tensor | None) -> Tensor:
    """``definition.choices_of_rows``."""
    out = torch.full((rows,), -1, dtype=torch.int32, device=row_id_map.device)
    count, block = row_id_map.numel(), 1024
    with on(out.device):
        launch(
            device_code("permute.invert_rows"), ceil_div(count, block),
            (_integers(row_id_map), _integers(offsets), out, count, row_id_map.shape[1], rows),
            (offsets is not None, block), WARPS,
        )  # fmt: skip
    return out


def rows_of_mask(routing_map: Tensor, rows: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """``definition.rows_of_mask`` in two launches: tokens are counted, then numbered."""
    mask, (tokens, experts) = _integers(routing_map), routing_map.shape
    width = power(experts)
    height = max(ENTRIES // width, 1)
    length = ceil_div(ceil_div(tokens, MOST_PROGRAMS), height) * height
    programs = ceil_div(tokens, length)
    device = routing_map.device
    counts = torch.empty((programs, experts), dtype=torch.int32, device=device)
    row_id_map = torch.empty((tokens, experts), dtype=torch.int32, device=device)
    choices = torch.empty((rows,), dtype=torch.int32, device=device)
    with on(device):
        launch(
            device_code("permute.count_choices"), programs, (mask, counts, tokens, experts, length),
            (height, width), WARPS,
        )  # fmt: skip
        launch(
            device_code("permute.number_rows"), programs,
            (mask, counts, _integers(offsets), row_id_map, choices, tokens, experts,
             length, programs, rows, ceil_div(rows, programs)),
            (offsets is not None, height, width, min(height, power(programs)), height), WARPS,
        )  # fmt: skip
    return row_id_map, choices


def chunk_rows(
    sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int
) -> tuple[Tensor, Tensor]:
    """``definition.chunk_rows``."""
    count = len(sizes)
    width = power(count)
    height = max(ENTRIES // width, 1)
    source = torch.empty((out_rows,), dtype=torch.int32, device=sizes.device)
    target = torch.empty((rows,), dtype=torch.int32, device=sizes.device)
    given = map(_integers, (sizes, index, spans))
    with on(sizes.device):
        launch(
            device_code("permute.chunk_rows"), ceil_div(out_rows, height),
            (*given, source, target, rows, out_rows, count),
            (index is not None, spans is not None, width, height), WARPS,
        )  # fmt: skip
    return source, target


def gather(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``definition.gather``, of rows and of their weights in one launch."""
    rows, cols, x = len(choices), x.shape[1], _rows(x)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    out_probs = None if probs is None else torch.empty((rows,), dtype=probs.dtype, device=x.device)
    step = _cols(x)
    blocks = ceil_div(cols, step)
    with on(x.device):
        launch(
            device_code("permute.gather_rows"), rows * blocks,
            (_words(x), choices.contiguous(), None if probs is None else _words(probs.contiguous()), _words(out),
             _words(out_probs), per, cols, x.stride(0), blocks),
            (probs is not None, step), WARPS,
        )  # fmt: skip
    return out, out_probs


def merge(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``definition.merge`` in one launch: each token adds its rows in order."""
    tokens, per = row_id_map.shape
    rows, cols = y.shape
    y = _rows(y)
    out = torch.empty((tokens, cols), dtype=y.dtype, device=y.device)
    out_probs = None if probs is None else torch.empty((tokens, per), dtype=probs.dtype, device=y.device)
    step = _cols(y)
    blocks = ceil_div(cols, step)
    with on(y.device):
        launch(
            device_code("permute.merge_rows"), tokens * blocks,
            (y, _integers(row_id_map), _integers(offsets),
             None if weights is None else weights.contiguous(), None if probs is None else probs.contiguous(), out,
             out_probs, per, rows, cols, y.stride(0), blocks),
            (offsets is not None, weights is not None, probs is not None, power(per), step), WARPS,
        )  # fmt: skip
    return out, out_probs


def spread(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``definition.spread``: both gradients in one launch. Those of weights are float32 sums in another order."""
    tokens, per = row_id_map.shape
    rows, cols = y.shape
    grad, y = _rows(grad), _rows(y)
    step = _cols(y)
    blocks = ceil_div(cols, step)
    y_grad = torch.empty((rows, cols), dtype=y.dtype, device=y.device) if wants[0] else None
    weights_grad = torch.empty((tokens, per), dtype=weights.dtype, device=y.device) if wants[1] else None
    choices = choices_of_rows(row_id_map, rows, offsets) if wants[0] else row_id_map
    row_programs = rows * blocks if wants[0] else 0
    with on(y.device):
        launch(
            device_code("permute.spread_rows"), row_programs + (tokens if wants[1] else 0),
            (grad, y, _integers(row_id_map), _integers(offsets), choices,
             weights.contiguous(), y if y_grad is None else y_grad, weights if weights_grad is None else weights_grad,
             per, rows, cols, grad.stride(0), y.stride(0), blocks, row_programs),
            (offsets is not None, power(per), step), WARPS,
        )  # fmt: skip
    return y_grad, weights_grad


# ---------------------------------------------------------------------------------------------- custom ops


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check(
    op: str, matrices: list[Tensor | None], integers: list[Tensor | None], numbers: int, why: str | None,
    shapes: Sequence[tuple[str, Tensor | None, tuple[int, ...]]],
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for what kernels would read wrongly; ``why``: the refusal of the kernel.

    ``numbers`` experts, choices of a token or chunks. All tensors must have values, on one device. ``shapes``: names,
    tensors and the shapes that they must have.
    """
    given = [t for t in (*matrices, *integers) if t is not None]
    for t in integers:
        if t is not None and t.dtype not in INTEGERS:
            raise TypeError(f"{op}: maps, sizes and offsets are integers, not {t.dtype}; use .to(torch.int32)")
    if any(t.device != given[0].device for t in given) or any(0 in t.shape for t in given):
        found = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in given)
        raise ValueError(f"{op} needs tensors with values on one device, got {found}; use .to()")
    if why is not None or numbers > MOST:
        raise ValueError(f"{op}: the kernel {why or f'takes {MOST} experts or chunks, not {numbers}'}; "
                         "call the function of mxtensor.te, which has others")  # fmt: skip
    check_device(op, given[0])
    for name, t, shape in shapes:
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{op}: {name} must have shape {shape}, got {tuple(t.shape)}")


@custom_ops.define("mxtensor::choices_of_rows")
def choices_op(row_id_map: Tensor, rows: int, offsets: Tensor | None) -> Tensor:
    """``definition.choices_of_rows``."""
    op = "mxtensor::choices_of_rows"
    _check(op, [], [row_id_map, offsets], row_id_map.shape[1], None, [("offsets", offsets, (row_id_map.shape[1],))])
    return choices_of_rows(row_id_map, rows, offsets)


@custom_ops.fake_of(choices_op)
def _(row_id_map, rows, offsets):  # type: ignore[no-untyped-def]
    return row_id_map.new_empty((rows,), dtype=torch.int32)


@custom_ops.define("mxtensor::rows_of_mask")
def mask_op(routing_map: Tensor, rows: int, offsets: Tensor | None) -> list[Tensor]:
    """``definition.rows_of_mask``."""
    op = "mxtensor::rows_of_mask"
    _check(op, [], [routing_map, offsets], routing_map.shape[1], None, [("offsets", offsets, (routing_map.shape[1],))])
    return list(rows_of_mask(routing_map, rows, offsets))


@custom_ops.fake_of(mask_op)
def _(routing_map, rows, offsets):  # type: ignore[no-untyped-def]
    empty = routing_map.new_empty
    return [empty(routing_map.shape, dtype=torch.int32), empty((rows,), dtype=torch.int32)]


@custom_ops.define("mxtensor::chunk_rows")
def chunks_op(sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int) -> list[Tensor]:
    """``definition.chunk_rows``."""
    op = "mxtensor::chunk_rows"
    shapes = [("index", index, (len(sizes),)), ("spans", spans, (len(sizes),))]
    _check(op, [], [sizes, index, spans], len(sizes), None, shapes)
    return list(chunk_rows(sizes, index, spans, rows, out_rows))


@custom_ops.fake_of(chunks_op)
def _(sizes, index, spans, rows, out_rows):  # type: ignore[no-untyped-def]
    return [sizes.new_empty((n,), dtype=torch.int32) for n in (out_rows, rows)]


@custom_ops.define("mxtensor::gather_rows")
def gather_op(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> list[Tensor]:
    """``definition.gather``: rows, and weights if there are ``probs``."""
    op = "mxtensor::gather_rows"
    _check(op, [x, probs], [choices], 1, wrong_dtype(x, probs), [("probs", probs, (x.shape[0], per))])
    out, out_probs = gather(x, choices, per, probs)
    return [out] if out_probs is None else [out, out_probs]


@custom_ops.fake_of(gather_op)
def _(x, choices, per, probs):  # type: ignore[no-untyped-def]
    rows = choices.shape[0]
    return [x.new_empty((rows, x.shape[1])), *([] if probs is None else [probs.new_empty((rows,))])]


@custom_ops.define("mxtensor::merge_rows")
def merge_op(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> list[Tensor]:
    """``definition.merge``: sums of rows, and the entries of ``probs`` if there are any."""
    op, (tokens, per) = "mxtensor::merge_rows", row_id_map.shape
    shapes = [("weights", weights, (tokens, per)), ("offsets", offsets, (per,)), ("probs", probs, (y.shape[0],))]
    _check(op, [y, weights, probs], [row_id_map, offsets], per, wrong_dtype(y, weights, probs, summed=True), shapes)
    out, out_probs = merge(y, row_id_map, offsets, weights, probs)
    return [out] if out_probs is None else [out, out_probs]


@custom_ops.fake_of(merge_op)
def _(y, row_id_map, offsets, weights, probs):  # type: ignore[no-untyped-def]
    out = y.new_empty((row_id_map.shape[0], y.shape[1]))
    return [out, *([] if probs is None else [probs.new_empty(row_id_map.shape)])]


@custom_ops.define("mxtensor::spread_rows")
def spread_op(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, of_y: bool, of_weights: bool
) -> list[Tensor]:
    """``definition.spread``: the gradients that are wanted."""
    op, (tokens, per) = "mxtensor::spread_rows", row_id_map.shape
    shapes = [("weights", weights, (tokens, per)), ("offsets", offsets, (per,)), ("grad", grad, (tokens, y.shape[1]))]
    _check(op, [grad, y, weights], [row_id_map, offsets], per, wrong_dtype(grad, y, weights, summed=True), shapes)
    grads = spread(grad, y, row_id_map, offsets, weights, (of_y, of_weights))
    return [t for t in grads if t is not None]


@custom_ops.fake_of(spread_op)
def _(grad, y, row_id_map, offsets, weights, of_y, of_weights):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t, wanted in ((y, of_y), (weights, of_weights)) if wanted]


# ---------------------------------------------------------------------------------------------- kernels


CHOICES = Kernel("triton", refuses_numbers, choices_of_rows, "cuda", choices_op)
MASK = Kernel("triton", refuses_numbers, rows_of_mask, "cuda", mask_op)
CHUNKS = Kernel("triton", refuses_numbers, chunk_rows, "cuda", chunks_op)
GATHER = Kernel("triton", refuses_gather, gather, "cuda", gather_op)
MERGE = Kernel("triton", refuses_merge, merge, "cuda", merge_op)
# An op returns the tensors that there are; ``choose_permutation`` knows which.
SPREAD = Kernel("triton", refuses_spread, spread, "cuda", lambda *operands: spread_op(*operands[:-1], *operands[-1]))
