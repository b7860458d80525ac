"""The three products of a linear layer and their one autograd function.

    fprop  y  = x.rowwise     @ w.rowwise^T       (M, K) by (N, K), bias added in float32
    dgrad  dx = g.rowwise     @ w.columnwise^T    (M, N) by (K, N)
    wgrad  dw = g.columnwise  @ x.columnwise^T    (N, M) by (K, M)

A bias wider than the result is rounded to its dtype first, as torch.autocast has it.

Each tensor is cast once for both products it enters, from its high-precision values. A copy that its kernel will
multiply as values (``gemm.values_dtype``) is written as values; one that waits for the backward pass waits as codes,
about half the bytes of the bfloat16 input that torch would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .codec import Operand
from .dispatch import Spec, forced_kernel, is_traced, record, resumed, surroundings
from .kernels import emulated
from .kernels.cast import cast_pair
from .kernels.gemm import gemm, kernel_for, values_dtype
from .kernels.gemm_spec import Factor, Form, GemmArgs, Uncast, data_of, format_of
from .kernels.rotate import rotated
from .roles import Cast, KernelPreference, Role, Roles, roles_by_key
from .tensor import MXTensor
from .torch_autocast import without_autocast
from .training_weight import values_of

Want = Form | torch.dtype | None
"""How a copy is wanted: Form.CODES, the dtype of its values, or None for not at all."""
WgradHook = Callable[[Callable[[torch.dtype], Tensor]], Tensor | None]


@dataclass(frozen=True)
class Options:
    """How one layer computes its products."""

    roles: Roles
    dtype: torch.dtype | None = None
    """Of the result (torch.autocast's, say); None: that of the input."""
    save_input: bool = False
    """Keep the input itself for wgrad and cast it there: for inputs that somebody keeps anyway."""
    on_wgrad: WgradHook | None = None
    """Called in backward with wgrad as a function of its dtype; what it returns is the weight's gradient."""

    @property
    def prefer(self) -> str | None:
        """The product kernel asked for by name, if one is."""
        preference = self.roles.kernel_preference
        return None if preference is KernelPreference.AUTO else preference.value


class Scales(NamedTuple):
    """Delayed scaling: float32 (3,), one value for each of input, weight and grad."""

    amax: Tensor
    """makes the scales of this step"""
    record: Tensor
    """takes the larger of what it holds and the amax of this step"""


INPUT, WEIGHT, GRAD = range(3)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    scales: Scales | None = None,
    held: tuple[Operand | None, Operand | None] | None = None,
) -> Tensor:
    """``x @ weight^T + bias`` with its gradients, cast as ``options.roles`` says.

    x (..., K), weight (N, K), bias (N,); result (..., N). An MXTensor weight enters as it is; so does ``held``, the
    (rowwise, columnwise) operands of ``weight`` from an earlier call. Raises TypeError for dtypes that have no
    gradient, ValueError where shapes or devices do not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        assert options.on_wgrad is None and held is None, "these options are for eager code"
        tensors = [t for t in (bias, *(scales or ())) if t is not None]
        dtype = str(options.dtype or x.dtype).removeprefix("torch.")
        return _traced(options.roles.key, dtype, options.save_input, bias is not None, x, weight, *tensors)
    return _linear(x, weight, bias, options, scales, held)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Any, held: Any) -> Tensor:
    _check(x, weight, bias)
    if held is None and isinstance(weight, MXTensor):
        held = weight.rowwise, weight.columnwise
        if held[0] is None:
            raise ValueError(
                f"linear: the quantized weight {tuple(weight.shape)} holds no copy blocked along in_features; quantize "
                "it with orientation='both'"
            )
    with torch._C.DisableTorchFunction():  # an autocast around the call has done its part
        return _Linear.apply(x, weight, bias, options, scales, held)  # type: ignore[no-any-return]


@torch._dynamo.nonstrict_trace
def _traced(key: str, dtype: str, save_input: bool, has_bias: bool, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    """``linear`` for Dynamo, which does not look inside but leaves it to AOTAutograd to trace: kernels are chosen, and
    choices logged, as in eager code. Its arguments may be tensors and plain constants only."""
    bias, scales = (rest[0], rest[1:]) if has_bias else (None, rest)
    options = Options(roles_by_key(key), getattr(torch, dtype), save_input)
    return _linear(x, weight, bias, options, Scales(*scales) if scales else None, None)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, t in (("input", x), ("weight", weight), ("bias", bias)):
        if t is not None and not t.dtype.is_floating_point:
            raise TypeError(f"linear: the {name} is {str(t.dtype).removeprefix('torch.')}; convert it to a float dtype")
        if t is not None and t.device != x.device:
            raise ValueError(f"linear: the input is on {x.device}, the {name} on {t.device}; move one with .to()")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: input {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: a weight is (out_features, "
            "in_features), and the input's last dimension is in_features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


# ---------------------------------------------------------------------------------------------- casts and products


def _copy(x: Tensor, cast: Cast, want: Want, side: int, scales: tuple[Tensor, ...]) -> Factor:
    """One copy of a matrix, rowwise (0) or columnwise (1)."""
    form = Form.VALUES if isinstance(want, torch.dtype) else Form.CODES
    dtype = want if isinstance(want, torch.dtype) else torch.bfloat16
    rowwise, columnwise = (form, None) if side == 0 else (None, form)
    factor = cast_pair(x, cast, rowwise, columnwise, dtype, *scales)[side]
    assert factor is not None
    return factor


def _copies(x: Tensor, role: Role, wants: tuple[Want, Want], scales: tuple[Tensor, ...]) -> list[Factor | None]:
    """The factors of a matrix for its two products, in one pass over it where one will do."""
    row, column = role.rowwise, role.columnwise
    if row is not None and row == column and role.signs is None and None not in wants:
        dtypes = {want for want in wants if isinstance(want, torch.dtype)}
        if len(dtypes) < 2:
            first, second = (Form.VALUES if isinstance(want, torch.dtype) else Form.CODES for want in wants)
            return list(cast_pair(x, row, first, second, next(iter(dtypes), torch.bfloat16), *scales))
    out: list[Factor | None] = [None, None]
    if wants[0] is not None:
        out[0] = x if row is None else _copy(x, row, wants[0], 0, scales)
    if wants[1] is not None:
        if column is None:
            out[1] = x.transpose(0, 1)
        elif role.signs is not None:
            out[1] = _copy(rotated(x.transpose(0, 1), role.signs), column, wants[1], 0, scales)
        else:
            out[1] = _copy(x, column, wants[1], 1, scales)
    return out


def _standing_for(x: Tensor, cast: Cast | None) -> Factor:
    """A factor that is yet to be cast, as kernels judge it."""
    return x if cast is None else Uncast(x, cast)


_wants: dict[tuple[Any, ...], Want] = {}
"""Answers of ``_want``; every eager step asks the same three questions, and each asks several kernels."""


def _want(op: str, a: Factor, b: Factor, dtype: torch.dtype, prefer: str | None) -> Want:
    """How the kernel that will run this product wants factors that are cast for it."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return dtype
    if is_traced(data_of(a), data_of(b)):
        return values_dtype(op, a, b, GemmArgs(dtype), prefer) or Form.CODES
    sides = ((type(f), format_of(f), tuple(f.shape), data_of(f).dtype) for f in (a, b))
    key = (op, *sides, dtype, prefer, forced_kernel(), data_of(b).device)
    known = _wants.get(key)
    if known is None:
        if len(_wants) > 4096:  # shapes that never come again
            _wants.clear()
        known = _wants[key] = values_dtype(op, a, b, GemmArgs(dtype), prefer) or Form.CODES
    return known


def _product(
    op: str, a: Factor | None, b: Factor | None, dtype: torch.dtype, bias: Tensor | None, prefer: str | None
) -> Tensor:
    """``a @ b^T + bias`` in ``dtype``: by a product kernel, or by torch where both factors are plain."""
    assert a is not None and b is not None
    bias = None if bias is None else bias.to(dtype)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        a, b = (f.to(dtype) if isinstance(f, Tensor) else f for f in (a, b))
        return gemm(op, a, b, GemmArgs(dtype, bias), prefer=prefer)
    reason = {"quantized": "the recipe leaves this product in high precision"}
    record(Spec(op, (tuple(a.shape), tuple(b.shape)), (a.dtype, b.dtype), dtype, a.device), "high precision", reason)
    return torch.nn.functional.linear(a.to(dtype), b.to(dtype), bias)


def _runs_fast(a: Any, b: Any, dtype: torch.dtype, prefer: str | None) -> bool:
    """Whether a result in ``dtype`` costs no more than one in the dtype of the layer. Hopper has float32 results of
    float8 factors by emulation only; rounding them to bfloat16 on the way is what they can have."""
    if data_of(a).device.type != "cuda" or (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    return kernel_for("wgrad", a, b, GemmArgs(dtype), prefer) != emulated.KERNEL.name


class _Kept(NamedTuple):
    """What ``save_for_backward`` holds of a factor: so many tensors, of this format and shape."""

    tensors: int
    format: Any = None
    shape: tuple[int, ...] = ()

    def factor(self, saved: Iterator[Tensor]) -> Any:
        mine = [next(saved) for _ in range(self.tensors)]
        if self.format is None:
            return mine[0] if mine else None
        return Operand(mine[0], mine[1], mine[2] if len(mine) > 2 else None, self.format, self.shape)


def _kept(factor: Factor | None) -> tuple[_Kept, list[Tensor]]:
    if factor is None:
        return _Kept(0), []
    if isinstance(factor, Tensor):
        return _Kept(1), [factor]
    assert isinstance(factor, Operand)
    tensors = [factor.data, factor.scale] + ([] if factor.global_scale is None else [factor.global_scale])
    return _Kept(len(tensors), factor.format, factor.shape), tensors


# ---------------------------------------------------------------------------------------------- the function


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
        held: tuple[Operand | None, Operand | None] | None,
    ) -> Tensor:  # fmt: skip
        roles, prefer, rows = options.roles, options.prefer, x.reshape(-1, x.shape[-1])
        dtype = options.dtype or x.dtype
        need_dx, need_dw, _ = ctx.needs_input_grad[:3]
        w = values_of(weight)  # of a quantized weight ``held`` is used
        with without_autocast(x.device):
            grad_like = _of_shape(rows.shape[0], weight.shape[0], dtype, rows)
            b_row: Any = held[0] if held is not None else _standing_for(w, roles.weight.rowwise)
            want = _want("fprop", _standing_for(rows, roles.input.rowwise), b_row, dtype, prefer)
            dgrad_want: Want = None
            if need_dx:
                b_col: Any = held[1] if held is not None else _standing_for(w.t(), roles.weight.columnwise)
                if b_col is None:  # ``_values_turned``, which backward makes
                    b_col = _of_shape(weight.shape[1], weight.shape[0], weight.dtype, rows)
                dgrad_want = _want("dgrad", _standing_for(grad_like, roles.grad.rowwise), b_col, dtype, prefer)

            later = Form.CODES if need_dw and roles.input.columnwise is not None and not options.save_input else None
            x_row, x_col = _copies(rows, roles.input, (want, later), _scales_of(scales, INPUT))
            w_row: Factor | None
            w_col: Factor | None
            if held is not None:
                w_row, w_col = held
            else:
                # Codes wait for dgrad; values, twice as large, are made of the weight again, which is there anyway.
                now = Form.CODES if dgrad_want is Form.CODES and roles.weight.columnwise is not None else None
                w_row, w_col = _copies(w, roles.weight, (want, now), _scales_of(scales, WEIGHT))
            y = _product("fprop", x_row, w_row, dtype, bias, prefer)
        x_kept, x_tensors = _kept(x_col if x_col is not None else x if need_dw else None)
        w_kept, w_tensors = _kept(w_col if w_col is not None else weight)
        ctx.save_for_backward(*x_tensors, *w_tensors)
        ctx.kept, ctx.options, ctx.scales, ctx.dgrad_want = (x_kept, w_kept), options, scales, dgrad_want
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype
        ctx.shape, ctx.surroundings = tuple(x.shape), surroundings()
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_kept, w_kept), options, tensors = ctx.kept, ctx.options, iter(ctx.saved_tensors)
        roles, prefer = options.roles, options.prefer
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, bias_dtype, dtype = ctx.dtypes
        dx = dw = db = None
        with torch._C.DisableTorchFunction(), without_autocast(grad.device), resumed(*ctx.surroundings):
            x_col, weight = x_kept.factor(tensors), w_kept.factor(tensors)
            g = grad.reshape(-1, grad.shape[-1])
            wgrad_want: Want = None
            if need_dw:
                if x_kept.format is None:
                    rows = x_col.reshape(-1, x_col.shape[-1])
                    x_col = _standing_for(rows.t(), roles.input.columnwise)
                wgrad_want = _want("wgrad", _standing_for(g.t(), roles.grad.columnwise), x_col, dtype, prefer)
            g_row, g_col = _copies(g, roles.grad, (ctx.dgrad_want, wgrad_want), _scales_of(ctx.scales, GRAD))
            if need_dx:
                if w_kept.format is not None:
                    w_col = weight
                elif isinstance(weight, MXTensor):
                    w_col = _values_turned(weight)
                else:
                    wants = (None, ctx.dgrad_want)
                    w_col = _copies(values_of(weight), roles.weight, wants, _scales_of(ctx.scales, WEIGHT))[1]
                dx = _product("dgrad", g_row, w_col, dtype, None, prefer).to(x_dtype).view(ctx.shape)
                del g_row, w_col
            if need_dw:
                if x_kept.format is None:
                    wants = (None, wgrad_want)
                    x_col = _copies(rows, roles.input, wants, _scales_of(ctx.scales, INPUT))[1]

                def wgrad(result: torch.dtype) -> Tensor:
                    as_asked = result is dtype or _runs_fast(g_col, x_col, result, prefer)
                    return _product("wgrad", g_col, x_col, result if as_asked else dtype, None, prefer).to(result)

                dw = wgrad(dtype).to(w_dtype) if options.on_wgrad is None else options.on_wgrad(wgrad)
            if need_db:
                db = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None


def _of_shape(rows: int, cols: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """What stands for a plain matrix that is yet to come where kernels are asked: a value of memory."""
    return like.new_empty((1, 1), dtype=dtype).expand(rows, cols)


def _values_turned(weight: Tensor) -> Tensor:
    """The values of a weight without a columnwise copy: exact, where a second cast would round again."""
    values = weight.dequantize() if isinstance(weight, MXTensor) else values_of(weight)
    return values.detach().t()


def weight_copies(weight: Tensor, roles: Roles, scales: Scales | None = None) -> tuple[Operand | None, Operand | None]:
    """The (rowwise, columnwise) operands of a high-precision weight (N, K), for later calls to be given as ``held``."""
    column = None if roles.weight.columnwise is None else Form.CODES
    copies = _copies(values_of(weight).detach(), roles.weight, (Form.CODES, column), _scales_of(scales, WEIGHT))
    return copies[0], copies[1]  # type: ignore[return-value]


def _scales_of(scales: Scales | None, index: int) -> tuple[Tensor, ...]:
    return () if scales is None else (scales.amax[index], scales.record[index])
