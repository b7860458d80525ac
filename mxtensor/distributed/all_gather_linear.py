"""A linear layer whose input rows are sharded over ranks, gathered as codes and scales instead of values.

Each rank casts its own rows before the gather, so MXFP8 moves 0.516 of bfloat16's bytes. Blocks are along rows for
fprop and along tokens for wgrad. If the rows of a rank are whole blocks, the gathered operands are bitwise those that
one rank would cast from all rows in their order (rank, then row).

    forward   x.rowwise gathered     -> fprop, all rows by the columns of this rank
    backward  dgrad of all rows      -> summed and scattered to the ranks whose rows they are
              x.columnwise gathered  -> wgrad of the columns of this rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.autograd import remember_input
from ..core.compat import disable_torch_function, nonstrict_trace
from ..core.explain import record
from ..core.kernel import Spec
from ..core.names import dtype_name
from ..core.select import dispatch_context, restore_context
from ..core.torch_autocast import without_autocast
from ..kernels.gemm.spec import Form
from ..numerics.formats import Rounding
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe, recipe_by_key
from ..training.linear import only_once
from ..training.observe import OBSERVERS, LayerCall, notify
from ..training.operands import cached_operands, copies, saved, transposed
from ..training.passes import Options, product
from ..training.training_weight import values_of
from .collectives import Ranks, gathered, sum_scattered


def refuses(linear_recipe: LinearRecipe, rows: int, cols: int) -> str | None:
    """Why an input of ``rows`` x ``cols`` a rank cannot be gathered as codes; None if it can."""
    casts = linear_recipe.input
    for name, cast, dim in (("fprop", casts.rowwise, -2), ("wgrad", casts.columnwise, -1)):
        if cast is None:
            return f"the recipe leaves the input of {name} in high precision"
        format = cast.format
        reason = format.why_not_split(dim, scales_differ=True)
        if reason is not None:
            return f"{reason}, and a rank has a part of it"
        if format.rows_are_blocked:
            return f"{format} has blocks of {format.block[0]} rows, which are cast for both products at once"
        if cast.rounding is Rounding.STOCHASTIC:
            return f"{format} is rounded stochastically, by numbers that would be the same on every rank"
    if casts.signs is not None:
        return "the recipe rotates the input of wgrad across ranks"
    if linear_recipe.delayed is not None:
        return "delayed scaling has one scale for the whole input, and a rank has a part of it"
    assert casts.columnwise is not None
    reason = casts.columnwise.format.why_not_split(-1, rows)
    return None if reason is None else f"{rows} rows a rank: {reason}"


def reason_for_values(
    x: Tensor, linear_recipe: LinearRecipe, dtype: torch.dtype, why: str | None = None
) -> str | None:  # fmt: skip
    """``refuses`` for the rows of this rank (M, K), or ``why``, with the decision in ``explain()``."""
    if why is None:
        why = refuses(linear_recipe, *x.shape)
    spec = Spec("gather", (tuple(x.shape),), (x.dtype,), dtype, x.device)
    if why is None:  # not by truth: Dynamo of torch 2.11 does not branch on a formatted string
        record(spec, "quantized", {})
    else:
        record(spec, "high precision", {"quantized": why})
    return why


def _gathered_rows(t: Tensor, ranks: Ranks) -> Tensor:
    """(n, ...) of each rank as (ranks * n, ...); gathered as bytes, whatever the dtype."""
    return gathered(t.contiguous().view(torch.uint8), ranks).view(t.dtype)


def _gathered_columns(t: Tensor, ranks: Ranks) -> Tensor:
    """(n, m) of each rank as (n, ranks * m)."""
    n, m = t.shape
    return _gathered_rows(t, ranks).view(ranks.size, n, m).transpose(0, 1).reshape(n, ranks.size * m)


def _of_all_rows(mine: Operand, ranks: Ranks) -> Operand:
    rows, cols = mine.shape
    return mine.map_blocks(lambda t: _gathered_rows(t, ranks), (ranks.size * rows, cols))


def _of_all_columns(mine: Operand, ranks: Ranks) -> Operand:
    rows, cols = mine.shape
    return mine.map_blocks(lambda t: _gathered_columns(t, ranks), (rows, ranks.size * cols))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, ranks: Ranks, dtype: torch.dtype
    ) -> Tensor:
        linear_recipe = options.linear_recipe
        with disable_torch_function(), without_autocast(x.device):
            later = Form.CODES if ctx.needs_input_grad[1] else None
            mine, x_col = copies(x, linear_recipe.input, (Form.CODES, later), ())
            assert isinstance(mine, Operand)
            cached = cached_operands(weight, linear_recipe)
            w_row = (
                cached[0]
                if cached is not None
                else copies(values_of(weight), linear_recipe.weight, (Form.CODES, None), ())[0]
            )
            y = product("fprop", _of_all_rows(mine, ranks), w_row, dtype, bias, options.prefer)
        x_saved, x_tensors = saved(x_col)
        ctx.save_for_backward(*x_tensors, weight)
        ctx.saved, ctx.options, ctx.ranks = x_saved, options, ranks
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype
        ctx.dispatch_context = dispatch_context()
        remember_input(ctx, x)
        return y

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *x_tensors, weight = ctx.saved_tensors
        options, ranks = ctx.options, ctx.ranks
        linear_recipe, prefer = options.linear_recipe, options.prefer
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, bias_dtype, dtype = ctx.dtypes
        dx = dw = db = None
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            wants = Form.CODES if need_dx else None, Form.CODES if need_dw else None
            g_row, g_col = copies(grad, linear_recipe.grad, wants, ())
            if need_dx:
                of_all = product("dgrad", g_row, transposed(weight, linear_recipe, Form.CODES, ()), dtype, None, prefer)
                dx = sum_scattered(of_all, ranks).to(x_dtype)
            if need_dw:
                x_col = _of_all_columns(ctx.saved.gemm_operand(iter(x_tensors)), ranks)
                dw = product("wgrad", g_col, x_col, dtype, None, prefer).to(w_dtype)
            if need_db:
                db = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, linear_recipe: LinearRecipe, group: Any, dtype: torch.dtype
) -> Tensor:
    """``x_all @ weight^T + bias``, (ranks * M, N): ``x`` (M, K) are the rows of this rank, ``weight`` (N, K) and
    ``bias`` (N,) its columns, in high precision; ``x_all`` the rows of all ranks of the process group in the order of
    ranks.

    The gradient of ``x`` is summed over the ranks. Raises ValueError if ``refuses`` gives a reason.
    """
    why = refuses(linear_recipe, *x.shape)
    if why is not None:
        raise ValueError(f"gathered_linear: {why}; gather x in high precision")
    name = dtype_name(dtype)
    given = [] if bias is None else [bias]
    run = _traced if torch.compiler.is_dynamo_compiling() else _run
    return run(linear_recipe.key, name, *Ranks.of(group), x, weight, *given)


def _run(key: str, dtype: str, group: str, size: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with disable_torch_function():
        y: Tensor = _Gathered.apply(
            x, weight, bias, Options(recipe_by_key(key)), Ranks(group, size), getattr(torch, dtype)
        )
        if OBSERVERS:
            notify(y, LayerCall(x, weight, recipe_by_key(key), None, None))
    return y


_traced = nonstrict_trace(_run)
"""For Dynamo, which leaves it to AOTAutograd: kernels are chosen as in eager code. It takes tensors and constants."""
