"""The torch functions that multiply by a weight, each read as a linear layer: of one weight, or of a stack of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Call(NamedTuple):
    """The arguments of a call, read as a linear layer."""

    input: Any
    weight: Any
    bias: Any = None
    transposed: bool = False
    """The weight, or each one of a stack, is (K, N). Such a call is a layer only if (K, N) is a parameter."""
    ends: Any = None
    """Rows of the input in groups, one for each weight of a stack, end here."""
    flipped: bool = False
    """The result is the transpose of the layer's: the weight was the left operand."""


def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return Call(input, weight, bias)


def _mm(input: Any, mat2: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, mat2, transposed=True)


def _matmul(input: Any, other: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, other, transposed=True)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, **rest: Any) -> Call | None:
    return Call(mat1, mat2, input, transposed=True) if alpha == beta == 1 and not rest else None


CALLS: dict[Any, Callable[..., Call | None]] = {
    F.linear: _linear,
    torch.ops.aten.linear: _linear,
    torch.ops.aten.linear.default: _linear,  # of programs of torch.export
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}
"""torch function -> its arguments as a layer; None if its options make it something else."""


# ---------------------------------------------------------------------------------------------- stacks of weights

IsWeight = Callable[[Tensor], bool]
"""Whether an operand is a weight."""


def _of_batches(a: Tensor, b: Tensor, is_weight: IsWeight, broadcasts: bool) -> Call | None:
    """A product of two batches of matrices of which one is a stack of weights."""
    if b.dim() == 3 and is_weight(b):
        x = _as_batch(a, b.shape[0], broadcasts)
        return None if x is None or is_weight(a) else Call(x, b, transposed=True)
    if a.dim() == 3 and is_weight(a):
        x = _as_batch(b, a.shape[0], broadcasts)
        return None if x is None or is_weight(b) else Call(x.transpose(1, 2), a, flipped=True)
    return None


def _as_batch(x: Tensor, size: int, broadcasts: bool) -> Tensor | None:
    """x as a batch of ``size`` matrices; None if it cannot be one."""
    if x.dim() == 3 and x.shape[0] == size:
        return x
    if broadcasts and (x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)):
        return x.expand(size, x.shape[-2], x.shape[-1])
    return None


def _bmm(is_weight: IsWeight, input: Any, mat2: Any, **rest: Any) -> Call | None:
    return None if rest else _of_batches(input, mat2, is_weight, broadcasts=False)


def _stacked_matmul(is_weight: IsWeight, input: Any, other: Any, **rest: Any) -> Call | None:
    return None if rest or not isinstance(other, Tensor) else _of_batches(input, other, is_weight, broadcasts=True)


def _grouped_mm(
    is_weight: IsWeight, self: Any = None, mat2: Any = None, offs: Any = None, bias: Any = None, out_dtype: Any = None,
    input: Any = None,
) -> Call | None:  # fmt: skip
    a = input if self is None else self
    if bias is not None or out_dtype not in (None, a.dtype):
        return None
    if offs is None:
        return _of_batches(a, mat2, is_weight, broadcasts=False)
    rows_by_stack = a.dim() == 2 and mat2.dim() == 3 and is_weight(mat2) and not is_weight(a)
    return Call(a, mat2, transposed=True, ends=offs) if rows_by_stack else None


def _grouped_mm_fallback(is_weight: IsWeight, input: Any, weight: Any, offs: Any) -> Call | None:
    """transformers' op for the same product, for dtypes that torch's compiler refuses; ends may be int64."""
    return _grouped_mm(is_weight, input, weight, offs.to(torch.int32))


STACK_CALLS: dict[Any, Callable[..., Call | None]] = {
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.matmul: _stacked_matmul,
    Tensor.matmul: _stacked_matmul,
    Tensor.__matmul__: _stacked_matmul,
    torch._grouped_mm: _grouped_mm,
}
"""torch function -> its arguments as a layer of a stack, given what is a weight; None if they are something else."""
FALLBACKS = {"grouped_mm_fallback": _grouped_mm_fallback}
"""Op of the namespace ``transformers`` -> the same."""
