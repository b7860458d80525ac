"""Rows sorted by expert and put back: the tuples of kernels, and the one function that goes through each.

What each function returns is said in ``definition.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.tracing import is_traced
from . import definition, triton_permute

CHOICES: tuple[Kernel, ...] = (triton_permute.CHOICES, definition.CHOICES)
"""``run(row_id_map, rows, offsets)``: the choice of each row."""
MASK: tuple[Kernel, ...] = (triton_permute.MASK, definition.MASK)
"""``run(routing_map, rows, offsets)``: the row of each choice and the choice of each row."""
CHUNKS: tuple[Kernel, ...] = (triton_permute.CHUNKS, definition.CHUNKS)
"""``run(sizes, index, spans, rows, out_rows)``: the source of each row of the result and the target of each row."""
GATHER: tuple[Kernel, ...] = (triton_permute.GATHER, definition.GATHER)
"""``run(x, choices, per, probs)``: the token of each row, and its weight."""
MERGE: tuple[Kernel, ...] = (triton_permute.MERGE, definition.MERGE)
"""``run(y, row_id_map, offsets, weights, probs)``: the sum of the rows of each token, and its entries of probs."""
SPREAD: tuple[Kernel, ...] = (triton_permute.SPREAD, definition.SPREAD)
"""``run(grad, y, row_id_map, offsets, weights, wants)``: the gradients of y and weights in a merge."""


def _spec(op: str, tensors: Sequence[Tensor | None], *rows: int) -> Spec:
    """The spec of tensors, and of maps of so many rows that are made."""
    given = [t for t in tensors if t is not None]
    shapes = (*(tuple(t.shape) for t in given), *((n,) for n in rows))
    formats = (*(t.dtype for t in given), *["rows"] * len(rows))
    return Spec(op, shapes, formats, given[0].dtype, given[0].device, is_traced(*given))


def choices_of_rows(row_id_map: Tensor, rows: int, offsets: Tensor | None = None) -> Tensor:
    """The choice of each row."""
    out: Tensor = perform(CHOICES, _spec("invert rows", [row_id_map], rows), row_id_map, rows, offsets)
    return out


def rows_of_mask(routing_map: Tensor, rows: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The row of each choice of a mask, sorted by expert; and the choice of each row."""
    row_id_map, choices = perform(MASK, _spec("number rows", [routing_map], rows), routing_map, rows, offsets)
    return row_id_map, choices


def chunk_rows(
    sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int
) -> tuple[Tensor, Tensor]:
    """The source of each row of the result, and the target of each row, of chunks that are sorted or padded."""
    spec = _spec("number rows", [sizes, index, spans], rows, out_rows)
    source, target = perform(CHUNKS, spec, sizes, index, spans, rows, out_rows)
    return source, target


def gather(x: Tensor, choices: Tensor, per: int = 1, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The token of the choice of each row, and its entry of ``probs``; zeros for a row of none."""
    made = [*perform(GATHER, _spec("gather rows", [x, choices, probs]), x, choices, per, probs), None]
    return made[0], made[1]


def merge(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sum of the rows of each token, times ``weights``; and the entries of ``probs`` for its choices."""
    spec = _spec("merge rows", [y, row_id_map, weights, probs])
    made = [*perform(MERGE, spec, y, row_id_map, offsets, weights, probs), None]
    return made[0], made[1]


def spread(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of y and of weights in ``merge`` with weights, each None if it is not wanted."""
    if not any(wants):
        return None, None
    spec = _spec("spread rows", [grad, y, row_id_map, weights])
    made = perform(SPREAD, spec, grad, y, row_id_map, offsets, weights, wants)
    grads: list[Tensor] = [t for t in made if t is not None]
    return grads[0] if wants[0] else None, grads[-1] if wants[1] else None
