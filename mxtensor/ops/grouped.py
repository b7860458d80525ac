"""Products with a stack of weights whose codes are read once: ``F.grouped_mm``, and ``bmm`` of few rows.

Experts that decode call ``F.grouped_mm`` twice a layer, with groups that differ in each call. Their ends stay on the
device; later calls of a kind run the program of an earlier one. transformers' ``generate`` picks the matrix of each
token out of the stack instead (``batched_mm``) and calls ``bmm``: groups of equal sizes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.dispatch import arguments_of, implements
from ..core.shapes import as_matrix
from ..core.tracing import is_captured, is_traced
from ..core.when_imported import after_import
from ..kernels.gemm import cpu_codes, select
from ..kernels.gemm.spec import GemmArgs
from ..kernels.small_m import kernel as small_m
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .functional import repeated_product
from .matmul import Side, check_dims, first_of_repeats, gemm_operands, implements_product, preference, product

aten = torch.ops.aten
READ_CODES = small_m.GROUPED.name, cpu_codes.GROUPED.name
"""Kernels of groups that decode in registers."""
NO_GROUPS = "not rows for a stack of weights, in groups"


@implements(aten._grouped_mm.default)
def grouped_mm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(M, K) @ (G, K, N) with ``offs``, the end of each group's rows."""
    given = arguments_of(func, args, kwargs)
    a, b, offs = given["self"], given["mat2"], given.get("offs")
    plain_call = given.get("bias") is None and given.get("out_dtype") in (None, a.dtype)
    if not plain_call or offs is None or not _are_groups(a, b):
        return read(func, args, kwargs, NO_GROUPS)  # type: ignore[no-any-return]
    return _grouped_mm(a, b, offs)


def _fallback(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The same by transformers' op, which its compiled models call in other dtypes than bfloat16; ends may be int64."""
    given = arguments_of(func, args, kwargs)
    a, b, offs = given["input"], given["weight"], given["offs"]
    if not _are_groups(a, b):
        return read(func, args, kwargs, NO_GROUPS)  # type: ignore[no-any-return]
    return _grouped_mm(a, b, offs.to(torch.int32))


def _enter_fallback() -> None:
    op = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if op is not None:
        implements(op.default)(_fallback)


after_import("transformers.integrations.moe", _enter_fallback)


def _are_groups(a: Any, b: Any) -> bool:
    return isinstance(b, MXTensor) and b.dim() == 3 and a.dim() == 2


def _grouped_mm(a: Tensor, b: MXTensor, offs: Tensor) -> Tensor:
    def work() -> Tensor:
        sides = gemm_operands("_grouped_mm", Side(a, False), Side(b, True))
        args = GemmArgs(a.dtype)
        return select.grouped_gemm("_grouped_mm", *sides, offs, args, prefer=preference(b))

    if is_traced(a, offs) or a.is_neg() or a.device != offs.device or offs.dtype is not torch.int32:
        return work()
    operand = b._columnwise  # of the transposed stack: that of the stack itself, blocked along the contraction
    return repeated_product("groups", b, operand, a, offs, None, work)


# ---------------------------------------------------------------------------------------------- groups of equal sizes


@implements_product(aten.bmm.default)
def bmm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(B, M, K) @ (B, K, N); a weight that the batch repeats is multiplied once, with all rows."""
    a, b = args
    check_dims("bmm", (a, 3), (b, 3))
    one = first_of_repeats(b)
    if one is not None and not isinstance(a, MXTensor) and a.shape[0] == b.shape[0]:
        return product("bmm", Side(as_matrix(a), False), Side(one, True)).view(*a.shape[:-1], b.shape[-1])
    out = _as_groups(a, b)
    return product("bmm", Side(a, False), Side(b, True)) if out is None else out


def _as_groups(a: Tensor, b: Tensor) -> Tensor | None:
    """The product of a stack of codes with the other side's rows, those of each matrix a group; None if no kernel reads
    the codes of such groups once."""
    left = isinstance(a, MXTensor)
    if left == isinstance(b, MXTensor) or a.dtype != b.dtype or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[1]):
        return None
    stack, x = (Side(a, False), b.transpose(1, 2)) if left else (Side(b, True), a)
    batch, each, inner = x.shape
    repeated = batch > 1 and stack.tensor.stride(0) == 0
    if stack.operand is None or repeated or 0 in x.shape:
        return None
    assert stack.mx is not None
    rows = x.reshape(batch * each, inner)
    fresh = is_traced(rows) or is_captured(rows)
    ends = (_ends_of if fresh else _cached_ends)(batch, each, x.device)
    sides, given = gemm_operands("bmm", Side(rows, False), stack), (ends, GemmArgs(a.dtype))
    plan = select.grouped_plan_of("bmm", *sides, *given, preference(stack.mx))
    if plan.kernel is None or plan.kernel.name not in READ_CODES:
        return None
    out = select.grouped_gemm("bmm", *sides, *given, prefer=preference(stack.mx)).view(batch, each, -1)
    return out.transpose(1, 2).contiguous() if left else out


def _ends_of(batch: int, each: int, device: torch.device) -> Tensor:
    """The ends of ``batch`` groups of ``each`` rows."""
    return torch.arange(each, batch * each + 1, each, dtype=torch.int32, device=device)


_cached_ends = lru_cache(maxsize=64)(_ends_of)
