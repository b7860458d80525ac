"""The Triton kernels of permutations as custom ops, which is what torch.compile sees of them; and as kernel rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel
from ..runtime.check import check_device
from . import triton_rows

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check(
    op: str, matrices: list[Tensor | None], integers: list[Tensor | None], numbers: int, why: str | None
) -> None:
    """Raise TypeError or ValueError for what kernels would read wrongly; ``why``: the refusal of the kernel.

    ``numbers`` experts, choices of a token or chunks. All tensors must have values, on one device.
    """
    given = [t for t in (*matrices, *integers) if t is not None]
    for t in integers:
        if t is not None and t.dtype not in INTEGERS:
            raise TypeError(f"{op}: maps, sizes and offsets are integers, not {t.dtype}; use .to(torch.int32)")
    if any(t.device != given[0].device for t in given) or any(0 in t.shape for t in given):
        found = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in given)
        raise ValueError(f"{op} needs tensors with values on one device, got {found}; use .to()")
    if why is not None or numbers > triton_rows.MOST:
        raise ValueError(f"{op}: the kernel {why or f'takes {triton_rows.MOST} experts or chunks, not {numbers}'}; "
                         "call the function of mx.nn, which has others")  # fmt: skip
    check_device(op, given[0])


def _check_shapes(op: str, wanted: list[tuple[str, Tensor | None, tuple[int, ...]]]) -> None:
    for name, t, shape in wanted:
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{op}: {name} must have shape {shape}, got {tuple(t.shape)}")


@custom_ops.define("mxtensor::choices_of_rows")
def choices_op(row_id_map: Tensor, rows: int, offsets: Tensor | None) -> Tensor:
    """``reference.choices_of_rows``."""
    op = "mxtensor::choices_of_rows"
    _check(op, [], [row_id_map, offsets], row_id_map.shape[1], None)
    _check_shapes(op, [("offsets", offsets, (row_id_map.shape[1],))])
    return triton_rows.choices_of_rows(row_id_map, rows, offsets)


@custom_ops.fake_of(choices_op)
def _(row_id_map, rows, offsets):  # type: ignore[no-untyped-def]
    return row_id_map.new_empty((rows,), dtype=torch.int32)


@custom_ops.define("mxtensor::rows_of_mask")
def mask_op(routing_map: Tensor, rows: int, offsets: Tensor | None) -> list[Tensor]:
    """``reference.rows_of_mask``."""
    op = "mxtensor::rows_of_mask"
    _check(op, [], [routing_map, offsets], routing_map.shape[1], None)
    _check_shapes(op, [("offsets", offsets, (routing_map.shape[1],))])
    return list(triton_rows.rows_of_mask(routing_map, rows, offsets))


@custom_ops.fake_of(mask_op)
def _(routing_map, rows, offsets):  # type: ignore[no-untyped-def]
    empty = routing_map.new_empty
    return [empty(routing_map.shape, dtype=torch.int32), empty((rows,), dtype=torch.int32)]


@custom_ops.define("mxtensor::chunk_rows")
def chunks_op(sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int) -> list[Tensor]:
    """``reference.chunk_rows``."""
    op = "mxtensor::chunk_rows"
    _check(op, [], [sizes, index, spans], len(sizes), None)
    _check_shapes(op, [("index", index, (len(sizes),)), ("spans", spans, (len(sizes),))])
    return list(triton_rows.chunk_rows(sizes, index, spans, rows, out_rows))


@custom_ops.fake_of(chunks_op)
def _(sizes, index, spans, rows, out_rows):  # type: ignore[no-untyped-def]
    return [sizes.new_empty((n,), dtype=torch.int32) for n in (out_rows, rows)]


@custom_ops.define("mxtensor::gather_rows")
def gather_op(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> list[Tensor]:
    """``reference.gather``: rows, and weights if there are ``probs``."""
    op = "mxtensor::gather_rows"
    _check(op, [x, probs], [choices], 1, triton_rows.unknown_size(x, probs))
    _check_shapes(op, [("probs", probs, (x.shape[0], per))])
    out, out_probs = triton_rows.gather(x, choices, per, probs)
    return [out] if out_probs is None else [out, out_probs]


@custom_ops.fake_of(gather_op)
def _(x, choices, per, probs):  # type: ignore[no-untyped-def]
    rows = choices.shape[0]
    return [x.new_empty((rows, x.shape[1])), *([] if probs is None else [probs.new_empty((rows,))])]


@custom_ops.define("mxtensor::merge_rows")
def merge_op(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> list[Tensor]:
    """``reference.merge``: sums of rows, and the entries of ``probs`` if there are any."""
    op, (tokens, per) = "mxtensor::merge_rows", row_id_map.shape
    _check(op, [y, weights, probs], [row_id_map, offsets], per, triton_rows.not_summed(y, weights, probs))
    shapes = [("weights", weights, (tokens, per)), ("offsets", offsets, (per,)), ("probs", probs, (y.shape[0],))]
    _check_shapes(op, shapes)
    out, out_probs = triton_rows.merge(y, row_id_map, offsets, weights, probs)
    return [out] if out_probs is None else [out, out_probs]


@custom_ops.fake_of(merge_op)
def _(y, row_id_map, offsets, weights, probs):  # type: ignore[no-untyped-def]
    out = y.new_empty((row_id_map.shape[0], y.shape[1]))
    return [out, *([] if probs is None else [probs.new_empty(row_id_map.shape)])]


@custom_ops.define("mxtensor::spread_rows")
def spread_op(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, of_y: bool, of_weights: bool
) -> list[Tensor]:
    """``reference.spread``: the gradients that are wanted."""
    op, (tokens, per) = "mxtensor::spread_rows", row_id_map.shape
    _check(op, [grad, y, weights], [row_id_map, offsets], per, triton_rows.not_summed(grad, y, weights))
    shapes = [("weights", weights, (tokens, per)), ("offsets", offsets, (per,)), ("grad", grad, (tokens, y.shape[1]))]
    _check_shapes(op, shapes)
    grads = triton_rows.spread(grad, y, row_id_map, offsets, weights, (of_y, of_weights))
    return [t for t in grads if t is not None]


@custom_ops.fake_of(spread_op)
def _(grad, y, row_id_map, offsets, weights, of_y, of_weights):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t, wanted in ((y, of_y), (weights, of_weights)) if wanted]


# ---------------------------------------------------------------------------------------------- kernels


def _mask(routing_map: Tensor, rows: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    row_id_map, choices = mask_op(routing_map, rows, offsets)
    return row_id_map, choices


def _chunks(
    sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int
) -> tuple[Tensor, Tensor]:
    source, target = chunks_op(sizes, index, spans, rows, out_rows)
    return source, target


def _gather(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    out, *rest = gather_op(x, choices, per, probs)
    return out, rest[0] if rest else None


def _merge(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    out, *rest = merge_op(y, row_id_map, offsets, weights, probs)
    return out, rest[0] if rest else None


def _spread(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    grads = spread_op(grad, y, row_id_map, offsets, weights, *wants)
    return grads[0] if wants[0] else None, grads[-1] if wants[1] else None


CHOICES = Kernel("triton", triton_rows.refuses_map, triton_rows.choices_of_rows, "cuda", choices_op)
MASK = Kernel("triton", triton_rows.refuses_map, triton_rows.rows_of_mask, "cuda", _mask)
CHUNKS = Kernel("triton", triton_rows.refuses_chunks, triton_rows.chunk_rows, "cuda", _chunks)
GATHER = Kernel("triton", triton_rows.refuses_gather, triton_rows.gather, "cuda", _gather)
MERGE = Kernel("triton", triton_rows.refuses_merge, triton_rows.merge, "cuda", _merge)
SPREAD = Kernel("triton", triton_rows.refuses_spread, triton_rows.spread, "cuda", _spread)
