"""Tokens on their way to experts on other ranks, and back: an all-to-all of codes and scales instead of values.

    dispatch_tokens   forward   rows, cast by the recipe's input cast  -> the ranks whose experts take them
                      backward  gradients of the rows, as values       -> the ranks whose rows they are
    combine_tokens    forward   results of the experts, as values      -> the ranks whose rows they are
                      backward  gradients of the results, by its cast  -> the ranks whose experts made them

What a quantized product takes next is sent as codes: the input of fprop and the gradient of dgrad. Their casts have
blocks of one row and scales that are powers of two, so that the layer's own cast of the received values gives the same
values again. The results of experts are not operands of a product: they are sent as values unless
``quantize_combined``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.arguments import DENSE, FLAG, check, described, is_integers
from ..core.autograd import differentiable_once, without_autocast
from ..core.compat import disable_torch_function
from ..core.explain import record
from ..core.kernel import Spec
from ..core.select import dispatch_context, restore_context
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from ..numerics.cast import Cast
from ..numerics.formats import Rounding, ScaleCalculationMode
from ..numerics.operand import Operand
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe, TensorCasts
from ..training.autocast import get_recipe

Group = Any
"""A process group, or a DeviceMesh of one dimension."""
all_to_all = dist.all_to_all_single


def refuses(cast: Cast | None, linear_recipe: LinearRecipe) -> str | None:
    """Why rows are not sent as codes of ``cast``, the recipe's cast of an input or a gradient; None if they are."""
    if cast is None:
        return "the recipe leaves this operand in high precision"
    if linear_recipe.delayed is not None:
        return "delayed scaling has one scale for all rows of a layer"
    format = cast.format
    if format.has_tensor_scale:
        return f"{format} has one scale for the whole tensor"
    if format.rows_are_blocked:
        return f"{format} has blocks of {format.block[0]} rows, which go to different ranks"
    if format.scale.significant_bits != 1:
        return f"the scales of {format} are not powers of two: the layer's own cast would round again"
    if cast.rounding is Rounding.STOCHASTIC and cast.scaling is ScaleCalculationMode.EVEN:
        return "an amax that EVEN rounds up may be rounded down stochastically: the layer's own cast would round again"
    return None


def loses(casts: TensorCasts, trains: bool) -> str | None:
    """Why wgrad would lose bits if it got codes of the rowwise cast instead of the values that its own cast, or none,
    is of; None if it would not."""
    if not trains or casts.from_rowwise or casts.rowwise is None:
        return None
    if casts.columnwise is None:
        return "the recipe leaves this operand of wgrad in high precision"
    rowwise, columnwise = casts.rowwise.format, casts.columnwise.format
    if columnwise.element.mantissa_bits > rowwise.element.mantissa_bits:
        return f"wgrad takes {columnwise}, which is more precise than {rowwise}"
    return None


# ---------------------------------------------------------------------------------------------- what is sent


@dataclass(frozen=True, eq=False)
class Routes:
    """Which rows go to which rank, and the casts that they are sent by."""

    group: Any
    sent: list[int]
    """Rows for each rank."""
    received: list[int]
    """Rows from each rank."""
    order: Tensor
    """int64 (R,): the received row, in the order of arrival, that is at each place when rows are sorted by expert."""
    linear_recipe: LinearRecipe
    quantize_combined: bool

    def cast(self, x: Tensor, casts: TensorCasts, result: bool) -> Cast | None:
        """The cast by which rows are sent; None for values. ``result``: of what experts return. ``explain()`` shows
        the decision."""
        cast = casts.rowwise
        if result:  # no operand of a product
            why = refuses(cast, self.linear_recipe) if self.quantize_combined else "quantize_combined is False"
        else:
            why = refuses(cast, self.linear_recipe) or loses(casts, self.linear_recipe.trains)
        sent = cast if why is None else None
        format: Any = x.dtype if sent is None else (x.dtype, sent.format)
        spec = Spec("all-to-all", (tuple(x.shape),), (format,), x.dtype, x.device)
        record(spec, *(("codes", {}) if why is None else ("high precision", {"codes": why})))
        return sent


def _as_bytes(x: Tensor, cast: Cast | None) -> Tensor:
    """Rows as bytes (rows, bytes of a row): the values, or codes and scales side by side."""
    if cast is None:
        return x.contiguous().view(torch.uint8)
    tensors = quantize_operand(x.contiguous(), cast).tensors
    return torch.cat([t.contiguous().view(torch.uint8) for t in tensors], 1)


def _as_values(rows: Tensor, cast: Cast | None, columns: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``_as_bytes``, in ``dtype``; codes and scales are decoded."""
    if cast is None:
        return rows.view(dtype)
    format, shape = cast.format, (rows.shape[0], columns)
    width = format.data_shape(shape)[1] * format.element.dtype.itemsize
    data = rows[:, :width].contiguous().view(format.element.dtype)
    scale = rows[:, width:].contiguous().view(format.scale.dtype)
    return dequantize_operand(Operand(data, scale, None, format, shape), dtype)


def _moved(x: Tensor, routes: Routes, casts: TensorCasts, back: bool) -> Tensor:
    """Rows in the order of this rank -> the rows of the experts of this rank, sorted by expert; ``back``: the inverse,
    of what experts return."""
    cast = routes.cast(x, casts, back)
    rows, sent, received = _as_bytes(x, cast), routes.sent, routes.received
    if back:
        sent, received = received, sent
        rows = torch.empty_like(rows).index_copy_(0, routes.order, rows)
    out = rows.new_empty((sum(received), rows.shape[1]))
    all_to_all(out, rows.contiguous(), received, sent, group=routes.group)
    return _as_values(out if back else out.index_select(0, routes.order), cast, x.shape[1], x.dtype)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, combines: bool) -> Tensor:
        ctx.routes, ctx.combines, ctx.dispatch_context = routes, combines, dispatch_context()
        with without_autocast(x.device):
            return _moved(x, routes, routes.linear_recipe.input, back=combines)

    @staticmethod
    @differentiable_once("dispatch_tokens, combine_tokens: the exchange of tokens", "compute with experts on one rank")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            return _moved(grad, ctx.routes, ctx.routes.linear_recipe.grad, back=not ctx.combines), None, None


# ---------------------------------------------------------------------------------------------- the two functions


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The rows from all ranks that belong to the experts of this rank."""

    tokens: Tensor
    """(R, K): sorted by expert, then by rank, then as they are on their rank."""
    counts: Tensor
    """int64 (experts of this rank,): the rows of each expert, such as the ``m_splits`` of ``te.GroupedLinear``."""
    ends: Tensor
    """int32 (experts of this rank,): where the rows of each expert end, such as the ``offs`` of ``F.grouped_mm``."""
    routes: Routes
    """The way back."""


def _linear_recipe(recipe: Any) -> LinearRecipe:
    """The recipe that is given, that of ``autocast``, or none."""
    recipe = get_recipe() if recipe is None else recipe
    if recipe is None or isinstance(recipe, LinearRecipe):
        return recipe or HIGH_PRECISION
    if not hasattr(recipe, "linear_recipe"):
        raise TypeError(
            f"dispatch_tokens: recipe is {described(recipe)}; pass a recipe of mx.recipe, or None for that of autocast"
        )
    found: LinearRecipe = recipe.linear_recipe()
    return found


def _counts(counts: Any, x: Tensor, world: int) -> Tensor:
    """``counts`` as int64 (ranks, experts of a rank)."""
    if isinstance(counts, Tensor):
        fits = counts.dim() == 1 and not counts.dtype.is_floating_point and counts.dtype is not torch.bool
    else:
        fits = isinstance(counts, Sequence) and not isinstance(counts, (str, bytes)) and is_integers(counts)
    if not fits:
        raise TypeError(f"dispatch_tokens: counts is {described(counts)}; pass the row count of each expert, integers")
    if not len(counts) or len(counts) % world:
        raise ValueError(
            f"dispatch_tokens: {len(counts)} experts do not divide into {world} equal parts; use a group of fewer ranks"
        )
    return torch.as_tensor(counts, device=x.device).to(torch.int64).view(world, -1)


def _routes(x: Tensor, counts: Tensor, group: Any, linear_recipe: LinearRecipe, quantize_combined: bool) -> Any:
    """The Routes, and the row count of each expert of this rank. The counts of all ranks are read on the host here."""
    world, local = counts.shape
    # the same number on two ranks that send rows in the same form
    mine = zlib.crc32(repr((x.shape[1], x.dtype, linear_recipe.key, quantize_combined)).encode())
    message = torch.cat([counts, counts.new_full((world, 1), mine)], 1)
    answer = torch.empty_like(message)
    all_to_all(answer, message, group=group)
    given, found = torch.stack([message, answer]).tolist()
    sent, received = ([sum(row[:-1]) for row in rows] for rows in (given, found))
    if sum(sent) != x.shape[0] or any(n < 0 for row in given for n in row):
        raise ValueError(
            f"dispatch_tokens: the counts sum to {sum(sent)}, and there are {x.shape[0]} rows; pass the number of rows "
            "for each expert, 0 or more"
        )
    others = [rank for rank, row in enumerate(found) if row[-1] != mine]
    if others:
        raise RuntimeError(
            f"dispatch_tokens: ranks {others} of the group send rows in another form than this one ({x.shape[1]} "
            f"columns, {x.dtype}, {linear_recipe}); give all ranks one recipe and tokens of one width and dtype"
        )
    of_rank = answer[:, :-1].contiguous()
    expert = torch.arange(local, device=x.device).repeat(world)
    expert = expert.repeat_interleave(of_rank.flatten(), output_size=sum(received))
    order = expert.argsort(stable=True)
    return Routes(group, sent, received, order, linear_recipe, quantize_combined), of_rank.sum(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch_tokens(
    x: Tensor, counts: Tensor | Sequence[int], group: Group, recipe: Any = None, *, quantize_combined: bool = False
) -> Dispatched:
    """Send rows to the ranks whose experts take them: as codes and scales if the recipe's cast of inputs allows it.

    x (M, K): the rows of this rank, sorted by expert; a row that several experts take is there once for each.
    ``counts``: the number of rows for each expert of all ranks, in the order of experts; rank r of ``group`` (a process
    group, or a DeviceMesh of one dimension) has the r-th part of the experts. ``recipe``: that of the experts' weights,
    by default the one of ``autocast``. ``quantize_combined``: send what experts return as codes too, in both passes.

    The gradient of ``x`` comes back from the same ranks. ``explain()`` shows each exchange as ``all-to-all`` and why
    rows were sent as values. Every rank of the group must call this; the counts of rows are read on the host, which
    waits for the device. A compiled model has a graph break here.

    Raises TypeError and ValueError for counts that do not fit, RuntimeError if ranks would send different forms.
    """
    check("dispatch_tokens", "x", x, DENSE)
    check("dispatch_tokens", "quantize_combined", quantize_combined, FLAG)
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"dispatch_tokens: x is {described(x)}; pass rows of values, (tokens, features)")
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    linear_recipe = _linear_recipe(recipe)
    with disable_torch_function():
        per_rank = _counts(counts, x, dist.get_world_size(group))
        routes, here = _routes(x, per_rank, group, linear_recipe, bool(quantize_combined))
        tokens = _Exchange.apply(x, routes, False)
    return Dispatched(tokens, here, here.cumsum(0).to(torch.int32), routes)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def combine_tokens(y: Tensor, dispatched: Dispatched) -> Tensor:
    """Send the results of experts back: y (R, N) for the rows of ``dispatched`` -> (M, N), in the order of the rows
    that ``dispatch_tokens`` was given on this rank.

    The gradient of the result goes to the experts as codes and scales if the recipe's cast of gradients allows it.
    Raises TypeError for another argument, ValueError for another number of rows.
    """
    check("combine_tokens", "y", y, DENSE)
    if not isinstance(dispatched, Dispatched):
        raise TypeError(f"combine_tokens: dispatched is {described(dispatched)}; pass what dispatch_tokens returned")
    rows = dispatched.routes.order.shape[0]
    if y.dim() != 2 or y.shape[0] != rows:
        raise ValueError(f"combine_tokens: y is {described(y)}; pass one row for each of the {rows} rows received")
    with disable_torch_function():
        combined: Tensor = _Exchange.apply(y, dispatched.routes, True)
    return combined
