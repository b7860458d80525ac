"""Products: each is ``gemm(left.rowwise, right.columnwise)``; plain operands are cast as the weight's recipe says."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.dispatch import Rule, implements
from ..core.shapes import as_matrix
from ..kernels.gemm.select import gemm
from ..kernels.gemm.spec import GemmArgs
from ..kernels.operands import GemmOperand, Unquantized
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .inplace import note

# ---------------------------------------------------------------------------------------------- checks of products

# Checks of the operands of a product, before any kernel sees them.
#
# Each raises RuntimeError, as torch does for plain tensors, with the shapes, the format and the way out. (``@`` would
# replace a TypeError by "unsupported operand type(s)".)


def has_other_layout(t: Any) -> bool:
    """Whether ``t`` is a tensor whose values are not at the strides of one memory: sparse, nested, of oneDNN.

    Not a subclass, which defines its own products; for an MXTensor, reading the layout would take microseconds.
    """
    if not isinstance(t, Tensor) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return t.layout is not torch.strided or t.is_nested


def check_dims(op: str, *wanted: tuple[Tensor, int]) -> None:
    """Raise unless each tensor has its number of dimensions."""
    if any(t.dim() != dims for t, dims in wanted):
        given = " and ".join(described(t) for t, _ in wanted)
        dims = " and ".join(str(dims) for _, dims in wanted)
        raise RuntimeError(f"{op}: needs tensors of {dims} dimensions, got {given}; reshape them, or use torch.matmul")


def check_product(op: str, a: Tensor, b: Tensor, transposed: bool, bias: Tensor | None) -> None:
    """Raise unless ``a`` (..., M, K) and ``b``, (..., K, N) if ``transposed`` and else (..., N, K), make a product.

    ``bias`` is None or broadcasts to the product.
    """
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"{op}: the operands must have one dtype, got {a.dtype} and {b.dtype}; convert one with .to() "
            f"({_both(a, b)})"
        )
    if a.device != b.device:
        raise RuntimeError(
            f"{op}: left operand on {a.device}, right operand on {b.device}; move one with .to() ({_both(a, b)})"
        )
    if a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(
            f"{op}: the dimensions before the last two must be equal, got {tuple(a.shape)} and {tuple(b.shape)} "
            f"({_both(a, b)})"
        )
    n, k = (b.shape[-1], b.shape[-2]) if transposed else (b.shape[-2], b.shape[-1])
    if a.shape[-1] != k:
        raise RuntimeError(
            f"{op}: the contracted dimensions differ: {tuple(a.shape)} has {a.shape[-1]} columns, the other operand "
            f"{k} rows ({_both(a, b)})"
        )
    if bias is not None:
        _check_bias(op, a, b, n, bias)


def _check_bias(op: str, a: Tensor, b: Tensor, n: Any, bias: Tensor) -> None:
    if bias.dtype != a.dtype:
        raise RuntimeError(
            f"{op}: the bias is {described(bias)}, and must have the operands' dtype, {a.dtype}; convert it with .to() "
            f"({_both(a, b)})"
        )
    if bias.device != a.device:
        raise RuntimeError(
            f"{op}: bias on {bias.device}, right operand on {b.device}; move one with .to() ({_both(a, b)})"
        )
    shape = (*a.shape[:-1], n)
    if bias.dim() > len(shape) or any(
        have != 1 and have != want for have, want in zip(reversed(bias.shape), reversed(shape), strict=False)
    ):
        raise RuntimeError(
            f"{op}: the bias is {described(bias)} and does not broadcast to the result {shape}; use one of ({n},) "
            f"({_both(a, b)})"
        )


def _both(a: Tensor, b: Tensor) -> str:
    """Both operands, with formats; a matrix that was transposed for the product has its shape in the product."""
    return f"of {described(a)} and {described(b)}"


# ---------------------------------------------------------------------------------------------- matmul

aten = torch.ops.aten


class Side:
    """One side of a product: a tensor, and how it is contracted.

    ``transposed``: the contracted dimension is the one before the last, as on the right of ``mm``. ``operand``: the
    copy blocked along the contraction, which is what products can use; None if there is none.
    """

    def __init__(self, tensor: Tensor, transposed: bool) -> None:
        self.tensor, self.transposed = tensor, transposed
        self.mx = tensor if isinstance(tensor, MXTensor) else None
        self.operand: Operand | None = None
        if self.mx is not None:
            self.operand = self.mx.columnwise if transposed else self.mx.rowwise

    def plain(self) -> Tensor:
        values = self.mx.dequantize() if self.mx is not None else self.tensor
        return values.transpose(-1, -2) if self.transposed else values


def gemm_operands(op: str, left: Side, right: Side) -> tuple[GemmOperand, GemmOperand]:
    """Both operands as kernels take them. Raises ValueError for two MXTensors of which neither can be used."""
    a, b = left.operand, right.operand
    if left.mx is not None and right.mx is not None and a is None and b is None:
        raise ValueError(
            f"{op}: neither operand is blocked along the contracted dimension: {left.mx!r} and {right.mx!r}; quantize "
            "one of them with orientation='both', or call .dequantize() on it"
        )
    if b is not None and left.mx is None:
        return _activation(left, right), b
    if a is not None and right.mx is None:
        return a, _activation(right, left)
    for side in (left, right):
        if side.mx is not None and side.operand is None:
            reason = f"is stored {side.mx.orientation.label}, not blocked along the contraction"
            way_out = "quantize with orientation='both', or call .dequantize() first"
            note(op, "matmul.py", [side.mx], "high precision", reason, way_out)
    return a if a is not None else left.plain(), b if b is not None else right.plain()


def _activation(side: Side, weight: Side) -> GemmOperand:
    """The plain operand beside a quantized one: with the cast of the weight's recipe, which the kernel carries out, or
    as it is (weight-only)."""
    assert weight.mx is not None
    cast = weight.mx.recipe.activation
    return side.plain() if cast is None else Unquantized(side.plain(), cast)


def preference(weight: MXTensor | None) -> str | None:
    """The name of the product kernel that the recipe of a weight requires; None if it requires none."""
    return None if weight is None else weight.recipe.required_kernel


def product(op: str, left: Side, right: Side, bias: Tensor | None = None, alpha: float = 1, beta: float = 1) -> Tensor:
    """``alpha * left @ right^T + beta * bias``, each side (..., rows, contracted); plain, in the outer dtype."""
    a, b = left.tensor, right.tensor
    if isinstance(bias, MXTensor):
        note(op, "matmul.py", [bias], "high precision", "is the bias, which is added in high precision")
        bias = bias.dequantize()
    check_product(op, a, b, right.transposed, bias)
    weight = right.mx if right.mx is not None else left.mx
    args = GemmArgs(a.dtype, bias, alpha, beta)
    return gemm(op, *gemm_operands(op, left, right), args, prefer=preference(weight))


def first_of_repeats(t: Tensor) -> Tensor | None:
    """The one matrix that a batch repeats with stride 0, as torch expands a weight for ``bmm``, or None."""
    if isinstance(t, MXTensor) and t.shape[0] > 1 and t.stride(0) == 0:
        return aten.select.int(t, 0, 0)  # type: ignore[no-any-return]
    return None


# ---------------------------------------------------------------------------------------------- rules

OTHER_LAYOUT = "the other operand is sparse or nested"


def implements_product(*ops: Any) -> Callable[[Rule], Rule]:
    """``implements`` for products: with a sparse or nested operand, torch multiplies the dequantized values."""

    def register(rule: Rule) -> Rule:
        @wraps(rule)
        def checked(func: Any, args: Any, kwargs: Any) -> Any:
            if any(map(has_other_layout, args)):
                return read(func, args, kwargs, OTHER_LAYOUT)
            return rule(func, args, kwargs)

        return implements(*ops)(checked)

    return register


@implements_product(aten.mm.default)
def mm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(M, K) @ (K, N)."""
    check_dims("mm", (args[0], 2), (args[1], 2))
    return product("mm", Side(args[0], False), Side(args[1], True))


@implements(aten.matmul.default)
def matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Inference mode alone hands it over whole."""
    if any(t.dim() == 0 for t in args):
        given = " and ".join(map(described, args))
        raise RuntimeError(f"matmul: both operands need 1 dimension or more, got {given}; use * for a number")
    return func.decompose(*args, **kwargs)  # type: ignore[no-any-return]


@implements_product(aten.addmm.default)
def addmm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """beta * input + alpha * (M, K) @ (K, N)."""
    bias, a, b = args
    check_dims("addmm", (a, 2), (b, 2))
    return product("addmm", Side(a, False), Side(b, True), bias, kwargs.get("alpha", 1), kwargs.get("beta", 1))


@implements_product(aten.baddbmm.default)
def baddbmm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """beta * input + alpha * (B, M, K) @ (B, K, N)."""
    bias, a, b = args
    check_dims("baddbmm", (a, 3), (b, 3))
    return product("baddbmm", Side(a, False), Side(b, True), bias, kwargs.get("alpha", 1), kwargs.get("beta", 1))


@implements_product(aten.mv.default)
def mv(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(M, K) @ (K,)."""
    a, vector = args
    check_dims("mv", (a, 2), (vector, 1))
    return product("mv", Side(a, False), Side(vector.unsqueeze(0), False)).squeeze(-1)


@implements_product(aten.dot.default)
def dot(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(K,) @ (K,)."""
    check_dims("dot", (args[0], 1), (args[1], 1))
    a, b = (v.unsqueeze(0) for v in args)
    return product("dot", Side(a, False), Side(b, False)).reshape(())


@implements_product(aten.addmv.default)
def addmv(func: Any, args: Any, kwargs: Any) -> Tensor:
    """beta * input + alpha * (M, K) @ (K,)."""
    bias, a, vector = args
    check_dims("addmv", (a, 2), (vector, 1))
    scales = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    return product("addmv", Side(a, False), Side(vector.unsqueeze(0), False), bias.unsqueeze(-1), *scales).squeeze(-1)


@implements_product(aten.linear.default)
def linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(..., K) @ (N, K)^T + bias, as inference mode hands it over whole."""
    x, weight, bias = (*args, None)[:3] if len(args) > 1 else (args[0], kwargs["weight"], kwargs.get("bias"))
    if x.dim() == 0 or weight.dim() != 2:
        check_dims("linear", (x, max(x.dim(), 1)), (weight, 2))
    later = bias if bias is not None and bias.dim() > 1 and x.dim() != 2 else None  # it has leading dimensions of x
    out = product("linear", Side(as_matrix(x), False), Side(weight, False), bias if later is None else None)
    out = out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])
    return out if later is None else out + later


@implements(aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out, aten.mv.out)
def out_variant(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The product, written into a plain ``out``, which takes its shape."""
    out = kwargs.pop("out")
    result = func._overloadpacket.default(*args, **kwargs)
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)  # type: ignore[no-any-return]
