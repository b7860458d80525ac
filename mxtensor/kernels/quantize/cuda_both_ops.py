"""The CUDA cast of both copies as a kernel: a direct call in eager code, ``mxtensor::cast_both`` in traced code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...numerics.cast import Cast
from ...numerics.formats import get_format
from ...numerics.operand import Operand
from ..gemm.spec import Form
from ..runtime.check import check_argument, check_device
from ..runtime.recorded_op import recorded
from .cuda_both import quantize_both, refuses, why_not
from .triton_common import SOURCES
from .triton_ops import both_operands, fake_operands, tensors_of


@custom_ops.define("mxtensor::cast_both")
@recorded
def cast_both_op(x: Tensor, format: str, scaling: str) -> list[Tensor]:
    """``cuda_both.quantize_both`` of a matrix: codes and scales of x, those of its transpose, the global scale."""
    op, cast = "mxtensor::cast_both", Cast.of(format, scaling)
    check_argument(op, "x", x, SOURCES, (None, None), x.device)
    check_device(op, x)
    reason = why_not(cast, x.dtype)
    if reason is not None:
        raise ValueError(f"{op} cannot cast to {cast.format}: {reason}")
    return tensors_of(quantize_both(x, cast))


@custom_ops.fake_of(cast_both_op)
def _(x, format, scaling):  # type: ignore[no-untyped-def]
    return fake_operands(x, get_format(format), [tuple(x.shape), (x.shape[1], x.shape[0])])


def _traced(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    return both_operands(cast_both_op(x.detach(), cast.format.name, cast.scaling.value), cast, x.shape)


# ---------------------------------------------------------------------------------------------- pairs of forms


def _refuses_pair(
    spec: Spec, x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> str | None:  # fmt: skip
    if rowwise is not Form.CODES or columnwise is not Form.CODES:
        return "casts to codes, both ways"
    return refuses(spec, x, cast)


def _pair(x: Tensor, cast: Cast, *rest: object) -> tuple[Operand, Operand]:
    return quantize_both(x, cast)


def _traced_pair(x: Tensor, cast: Cast, *rest: object) -> tuple[Operand, Operand]:
    return _traced(x, cast)


QUANTIZE_BOTH = Kernel("cuda", refuses, quantize_both, "cuda", _traced)
PAIR = Kernel("cuda", _refuses_pair, _pair, "cuda", _traced_pair)
