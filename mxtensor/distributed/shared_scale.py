"""A linear layer that is split over ranks, by a recipe with scales of whole tensors (NVFP4, float8 per tensor).

Such a scale depends on the amax of the whole tensor. Each rank computes the amax of its part, the largest of all ranks
decides, and then each rank casts its part: its codes and scales are those of one rank that casts the whole, to the bit.

    split by columns   the weight (N, K) along N, so that its parts and those of the gradient (M, N) share a scale
    split by rows      the weight along K, and the input (M, K)

A pass sends one all-reduce of at most four numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.autograd import remember_input
from ..core.compat import disable_torch_function, nonstrict_trace
from ..core.names import dtype_name
from ..core.select import dispatch_context, restore_context
from ..core.shapes import as_matrix
from ..core.torch_autocast import without_autocast
from ..kernels.gemm.spec import GemmOperand
from ..kernels.quantize.hadamard import rotated
from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..kernels.quantize.two_casts import columnwise_cast
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from ..numerics.reference import encode, tensor_amax
from ..recipe.linear_recipe import LinearRecipe, TensorCasts, recipe_by_key
from ..training.linear import only_once
from ..training.operands import rounds_twice, saved
from ..training.passes import Options, product
from ..training.training_weight import values_of
from .collectives import Ranks, largest


def _sources(x: Tensor, casts: TensorCasts) -> list[tuple[Tensor, Cast | None]]:
    """What the rowwise and the columnwise copy of a matrix are cast from, and their casts."""
    column = None if casts.columnwise is None else columnwise_cast(casts.columnwise)
    columns = x.mT if casts.signs is None or column is None else rotated(x.mT, casts.signs)
    return [(x, casts.rowwise), (columns, column)]


def _largest(sources: list[tuple[Tensor, Cast | None]], split: list[bool], ranks: Ranks) -> list[Tensor]:
    """The amax of each source; of all ranks where ranks have parts of it. NaN counts as infinity."""
    amax = torch.stack([tensor_amax(x) for x, _ in sources])
    amax = torch.where(amax.isnan(), float("inf"), amax)
    of_all = largest(amax, ranks) if any(split) else amax
    pairs = zip(amax.unbind(), of_all.unbind(), split, strict=True)
    return [whole if is_part else own for own, whole, is_part in pairs]


def _cast(x: Tensor, cast: Cast | None, amax: Tensor) -> GemmOperand:
    if cast is None:
        return x
    if not cast.format.has_tensor_scale or cast.format.row_scaled:
        return quantize_operand(x.contiguous(), cast)
    return encode(x.contiguous(), cast, amax)


def _copies(tensors: list[tuple[Tensor, TensorCasts, bool]], ranks: Ranks) -> list[GemmOperand]:
    """(rowwise, columnwise) of each matrix in turn; the last of each entry: whether ranks have parts of it."""
    for _, casts, split in tensors:
        if split and casts.rowwise is not None and casts.rowwise.format.row_scaled:
            raise NotImplementedError(
                f"ranks have parts of the rows of a tensor in {casts.rowwise.format}, whose global scales belong to "
                "whole rows; split the layer by columns, or use row_scaled_activation=False"
            )
    sources = [source for x, casts, _ in tensors for source in _sources(x, casts)]
    amax = _largest(sources, [split for *_, split in tensors for _ in range(2)], ranks)
    out = [_cast(x, cast, each) for (x, cast), each in zip(sources, amax, strict=True)]
    for i, (_, casts, _) in enumerate(tensors):
        first = out[2 * i]
        if rounds_twice(casts) and isinstance(first, Operand):
            exact = dequantize_operand(first, torch.float32).mT
            out[2 * i + 1] = _cast(exact, casts.columnwise, amax[2 * i])
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
    name = dtype_name(dtype)
    given = [] if bias is None else [bias]
    run = _traced if torch.compiler.is_dynamo_compiling() else _run
    return run(linear_recipe.key, name, *Ranks.of(group), by_rows, x, weight, *given)


def _run(
    key: str, dtype: str, group: str, size: int, by_rows: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    with disable_torch_function():
        y: Tensor = _Split.apply(
            x, weight, bias, recipe_by_key(key), Ranks(group, size), by_rows, getattr(torch, dtype)
        )
    return y


_traced = nonstrict_trace(_run)
"""As that of ``all_gather_linear``."""
