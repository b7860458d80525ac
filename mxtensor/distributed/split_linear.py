"""A linear layer that is split over ranks: its rows of input are gathered as codes, or ranks share scales.

``gathered_linear``: the rows of the input are sharded, and gathered as codes and scales instead of values. Each rank
casts its own rows before the gather, so MXFP8 moves 0.516 of bfloat16's bytes. Blocks are along rows for fprop and
along tokens for wgrad. If the rows of a rank are whole blocks, the gathered operands are bitwise those that one rank
would cast from all rows in their order (rank, then row).

    forward   x.rowwise gathered     -> fprop, all rows by the columns of this rank
    backward  dgrad of all rows      -> summed and scattered to the ranks whose rows they are
              x.columnwise gathered  -> wgrad of the columns of this rank

``split_linear``: the recipe has scales of whole tensors (NVFP4, float8 per tensor). Such a scale depends on the amax of
the whole tensor. Each rank computes the amax of its part, the largest of all ranks decides, and then each rank casts
its part: its codes and scales are those of one rank that casts the whole, to the bit.

    split by columns   the weight (N, K) along N, so that its parts and those of the gradient (M, N) share a scale
    split by rows      the weight along K, and the input (M, K)

A pass sends one all-reduce of at most four numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.autograd import remember_input, without_autocast
from ..core.compat import disable_torch_function, nonstrict_trace
from ..core.explain import record
from ..core.kernel import Spec
from ..core.names import dtype_name
from ..core.select import dispatch_context, restore_context
from ..core.shapes import as_matrix
from ..kernels.operands import Form, GemmOperand
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from ..kernels.quantize.choose_pair import columnwise_cast
from ..kernels.quantize.hadamard import rotated
from ..numerics.cast import Cast
from ..numerics.formats import Rounding
from ..numerics.operand import Operand
from ..numerics.reference import encode, tensor_amax
from ..recipe.linear_recipe import LinearRecipe, TensorCasts, recipe_by_key
from ..training.casts import cached_operands, copies, rounds_twice, saved, transposed
from ..training.linear import OBSERVERS, LayerCall, notify, only_once
from ..training.passes import Options, product
from ..training.training_weight import values_of
from .collectives import Ranks, gathered, largest, sum_scattered

# ---------------------------------------------------------------------------------------------- rows that are gathered


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
            w_row, _ = cached or copies(values_of(weight), linear_recipe.weight, (Form.CODES, None), ())
            rows, cols = mine.shape
            of_all = mine.map_blocks(lambda t: _gathered_rows(t, ranks), (ranks.size * rows, cols))
            y = product("fprop", of_all, w_row, dtype, bias, options.prefer)
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
                mine = ctx.saved.gemm_operand(iter(x_tensors))
                cols, rows = mine.shape
                x_col = mine.map_blocks(lambda t: _gathered_columns(t, ranks), (cols, ranks.size * rows))
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
    return _call("gathered", x, weight, bias, linear_recipe, group, dtype)


# ---------------------------------------------------------------------------------------------- scales that are shared


def _cast(x: Tensor, cast: Cast | None, amax: Tensor) -> GemmOperand:
    if cast is None:
        return x
    if not cast.format.has_tensor_scale or cast.format.row_scaled:
        return quantize_operand(x.contiguous(), cast)
    return encode(x.contiguous(), cast, amax)


def _copies(tensors: list[tuple[Tensor, TensorCasts, bool]], ranks: Ranks) -> list[GemmOperand]:
    """(rowwise, columnwise) of each matrix in turn; the last of each entry: whether ranks have parts of it. Then the
    amax is that of all ranks. NaN counts as infinity."""
    sources: list[tuple[Tensor, Cast | None]] = []  # what each copy is cast from
    split: list[bool] = []
    for x, casts, is_part in tensors:
        if is_part and casts.rowwise is not None and casts.rowwise.format.row_scaled:
            raise NotImplementedError(
                f"ranks have parts of the rows of a tensor in {casts.rowwise.format}, whose global scales belong to "
                "whole rows; split the layer by columns, or use row_scaled_activation=False"
            )
        column = None if casts.columnwise is None else columnwise_cast(casts.columnwise)
        columns = x.mT if casts.signs is None or column is None else rotated(x.mT, casts.signs)
        sources += [(x, casts.rowwise), (columns, column)]
        split += [is_part, is_part]
    amax = torch.stack([tensor_amax(x) for x, _ in sources])
    amax = torch.where(amax.isnan(), float("inf"), amax)
    of_all = largest(amax, ranks) if any(split) else amax
    each_amax = [(whole if is_part else own) for own, whole, is_part in zip(amax, of_all, split, strict=True)]
    out = [_cast(x, cast, each) for (x, cast), each in zip(sources, each_amax, strict=True)]
    for i, (_, casts, _) in enumerate(tensors):
        first = out[2 * i]
        if rounds_twice(casts) and isinstance(first, Operand):
            exact = dequantize_operand(first, torch.float32).mT
            out[2 * i + 1] = _cast(exact, casts.columnwise, each_amax[2 * i])
    return out


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear_recipe: LinearRecipe, ranks: Ranks,
        by_rows: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        prefer = Options(linear_recipe).prefer
        with disable_torch_function(), without_autocast(x.device):
            given = [(as_matrix(x), linear_recipe.input, by_rows), (values_of(weight), linear_recipe.weight, True)]
            x_row, x_col, w_row, w_col = _copies(given, ranks)
            y = product("fprop", x_row, w_row, dtype, bias, prefer)
        x_saved, x_tensors = saved(x_col if ctx.needs_input_grad[1] else None)
        w_saved, w_tensors = saved(w_col if ctx.needs_input_grad[0] else None)
        ctx.save_for_backward(*x_tensors, *w_tensors)
        ctx.saved, ctx.call = (x_saved, w_saved), (linear_recipe, ranks, by_rows, dtype, prefer, tuple(x.shape))
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.dispatch_context = dispatch_context()
        remember_input(ctx, x)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (x_saved, w_saved) = iter(ctx.saved_tensors), ctx.saved
        linear_recipe, ranks, by_rows, dtype, prefer, shape = ctx.call
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dx = dw = db = None
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            g = as_matrix(grad)
            x_col, w_col = x_saved.gemm_operand(tensors), w_saved.gemm_operand(tensors)
            g_row, g_col = _copies([(g, linear_recipe.grad, not by_rows)], ranks)
            if ctx.needs_input_grad[0]:
                dx = product("dgrad", g_row, w_col, dtype, None, prefer).to(x_dtype).view(shape)
            if ctx.needs_input_grad[1]:
                dw = product("wgrad", g_col, x_col, dtype, None, prefer).to(w_dtype)
            if ctx.needs_input_grad[2]:
                assert bias_dtype is not None
                db = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None


def split_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, linear_recipe: LinearRecipe, group: Any, by_rows: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``x @ weight^T + bias`` by the parts of this rank, with scales that the ranks of a process group share.

    x (..., K), ``weight`` (N, K) in high precision, ``bias`` (N,); result (..., N). ``by_rows``: the weight is split
    along K, and x with it; the results of the ranks have to be added up. Otherwise it is split along N: x is the whole
    input, and its gradients have to be added up.
    """
    return _call("rows" if by_rows else "columns", x, weight, bias, linear_recipe, group, dtype)


# ---------------------------------------------------------------------------------------------- calls


def _call(
    split: str, x: Tensor, weight: Tensor, bias: Tensor | None, linear_recipe: LinearRecipe, group: Any,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Run a layer by names and numbers, which a graph may have as constants."""
    name = dtype_name(dtype)
    given = [] if bias is None else [bias]
    run = _traced if torch.compiler.is_dynamo_compiling() else _run
    return run(split, linear_recipe.key, name, *Ranks.of(group), x, weight, *given)


def _run(
    split: str, key: str, dtype: str, group: str, size: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    linear_recipe, ranks, out = recipe_by_key(key), Ranks(group, size), getattr(torch, dtype)
    y: Tensor
    with disable_torch_function():
        if split != "gathered":
            y = _Split.apply(x, weight, bias, linear_recipe, ranks, split == "rows", out)
            return y
        y = _Gathered.apply(x, weight, bias, Options(linear_recipe), ranks, out)
        if OBSERVERS:
            notify(y, LayerCall(x, weight, linear_recipe, None, None))
        return y


_traced = nonstrict_trace(_run)
"""For Dynamo, which leaves it to AOTAutograd: kernels are chosen as in eager code. It takes tensors and constants."""
