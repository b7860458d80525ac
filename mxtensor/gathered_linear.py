"""A linear layer whose input rows are spread over ranks, gathered as codes and scales instead of values.

Each rank casts its own rows before they travel, so that MXFP8 sends 0.516 of bfloat16's bytes. Rows are rounded by
themselves for fprop, tokens in blocks for wgrad; as long as the rows of a rank are whole blocks, what arrives is what
one rank would have made of all rows in their order (rank, then row).

    forward   x.rowwise gathered     -> fprop, all rows by the columns of this rank
    backward  dgrad of all rows      -> summed and scattered to the ranks whose rows they are
              x.columnwise gathered  -> wgrad of the columns of this rank
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .codec import Operand
from .formats import FULL, Rounding
from .kernels.cast import cast_pair
from .kernels.gemm import gemm
from .kernels.gemm_spec import Form, GemmArgs
from .roles import Cast, KernelPreference, Role, Roles
from .training_weight import values_of

Group = Any
"""A process group."""
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The names of torch 2.13, or those before."""


def refuses(roles: Roles, rows: int, cols: int) -> str | None:
    """Why rows of this recipe cannot travel as codes, ``rows`` x ``cols`` a rank; None where they can."""
    for name, cast in (("fprop", roles.input.rowwise), ("wgrad", roles.input.columnwise)):
        if cast is None:
            return f"the recipe leaves the input of {name} in high precision"
        f = cast.format
        if f.global_scale or FULL in f.block:
            return f"{f} has one scale for more than one rank holds"
        if f.block[0] != 1:
            return f"{f} has blocks of {f.block[0]} rows, which are cast for both products at once"
        if cast.rounding is Rounding.STOCHASTIC:
            return f"{f} is rounded stochastically, by numbers that would be the same on every rank"
    if roles.input.signs is not None:
        return "the recipe rotates the input of wgrad across ranks"
    if roles.delayed is not None:
        return "delayed scaling has one scale for more than one rank holds"
    assert roles.input.columnwise is not None
    block = roles.input.columnwise.format.block[1]
    if rows % block:
        return f"{rows} rows a rank are not whole blocks of {block}"
    return None


def _gathered_rows(t: Tensor, world: int, group: Group) -> Tensor:
    """(n, ...) of each rank as (world * n, ...); any dtype travels as bytes."""
    mine = t.contiguous().view(torch.uint8)
    out = mine.new_empty((world * mine.shape[0], *mine.shape[1:]))
    all_gather(out, mine, group=group)
    return out.view(t.dtype)


def _gathered_columns(t: Tensor, world: int, group: Group) -> Tensor:
    """(n, m) of each rank as (n, world * m)."""
    n, m = t.shape
    return _gathered_rows(t, world, group).view(world, n, m).transpose(0, 1).reshape(n, world * m)


def _operand(x: Tensor, cast: Cast, side: int) -> Operand:
    rowwise, columnwise = (Form.CODES, None) if side == 0 else (None, Form.CODES)
    factor = cast_pair(x, cast, rowwise, columnwise, torch.bfloat16)[side]
    assert isinstance(factor, Operand)
    return factor


def _factor(x: Tensor, role: Role, side: int) -> Operand | Tensor:
    """A matrix, or its transpose, for one product: cast, or as it is where the role says so."""
    cast = role.rowwise if side == 0 else role.columnwise
    if cast is None:
        return x if side == 0 else x.t()
    return _operand(x, cast, side)


def _product(op: str, a: Any, b: Any, dtype: torch.dtype, bias: Tensor | None, prefer: str | None) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.nn.functional.linear(a.to(dtype), b.to(dtype), bias)
    a, b = (f.to(dtype) if isinstance(f, Tensor) else f for f in (a, b))
    return gemm(op, a, b, GemmArgs(dtype, bias), prefer=prefer)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, roles: Roles, group: Group, dtype: torch.dtype
    ) -> Tensor:
        world, (rows, cols) = dist.get_world_size(group), x.shape
        preference = roles.kernel_preference
        prefer = None if preference is KernelPreference.AUTO else preference.value
        assert roles.input.rowwise is not None and roles.input.columnwise is not None
        mine = _operand(x, roles.input.rowwise, 0)
        data, scale = (_gathered_rows(t, world, group) for t in (mine.data, mine.scale))
        everything = Operand(data, scale, None, mine.format, (world * rows, cols))
        bias = None if bias is None else bias.to(dtype)
        y = _product("fprop", everything, _factor(values_of(weight), roles.weight, 0), dtype, bias, prefer)
        later = _operand(x, roles.input.columnwise, 1)
        ctx.save_for_backward(later.data, later.scale, weight)
        ctx.roles, ctx.group, ctx.world, ctx.prefer, ctx.later = roles, group, world, prefer, later.format
        ctx.shape, ctx.dtypes = (rows, cols), (x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, scale, weight = ctx.saved_tensors
        roles, group, world, prefer = ctx.roles, ctx.group, ctx.world, ctx.prefer
        (rows, cols), (x_dtype, w_dtype, bias_dtype, dtype) = ctx.shape, ctx.dtypes
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            product = _product(
                "dgrad", _factor(grad, roles.grad, 0), _factor(values_of(weight), roles.weight, 1), dtype, None, prefer
            )
            dx = product.new_empty(rows, cols)
            reduce_scatter(dx, product.contiguous(), group=group)
            dx = dx.to(x_dtype)
        if ctx.needs_input_grad[1]:
            data, scale = (_gathered_columns(t, world, group) for t in (data, scale))
            x_col = Operand(data, scale, None, ctx.later, (cols, world * rows))
            dw = _product("wgrad", _factor(grad, roles.grad, 1), x_col, dtype, None, prefer).to(w_dtype)
        if ctx.needs_input_grad[2]:
            db = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, roles: Roles, group: Group, dtype: torch.dtype
) -> Tensor:
    """``x_all @ weight^T + bias``, (world * M, N): ``x`` (M, K) are the rows of this rank, ``weight`` (N, K) and
    ``bias`` (N,) its columns, in high precision; ``x_all`` the rows of all ranks of ``group`` in the order of ranks.

    The gradient of ``x`` is summed over the ranks. Raises ValueError where ``refuses`` has a reason.
    """
    why = refuses(roles, *x.shape)
    if why is not None:
        raise ValueError(f"gathered_linear: {why}; gather x in high precision")
    with torch._C.DisableTorchFunction():
        return _Gathered.apply(x, weight, bias, roles, group, dtype)  # type: ignore[no-any-return]
