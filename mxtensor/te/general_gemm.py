"""``general_gemm``: a product of quantized or plain matrices, with TransformerEngine's arguments."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import checked, described, instance, optional
from ..core.names import dtype_name
from ..kernels.gemm.select import gemm
from ..kernels.gemm.spec import GemmArgs
from ..kernels.operands import GemmOperand
from ..tensor.mxtensor import MXTensor
from .quantizers import Quantizer


class Layout(NamedTuple):
    """Which copy of each matrix a product contracts."""

    a: str
    b: str
    formula: str


LAYOUTS = {
    "TN": Layout("rowwise", "rowwise", "B @ A^T, with A (N, K) and B (M, K)"),
    "NN": Layout("columnwise", "rowwise", "B @ A, with A (N, K) and B (M, N)"),
    "NT": Layout("columnwise", "columnwise", "B^T @ A, with A (M, K) and B (M, N)"),
}
"""BLAS letters of A, then of B, for column-major matrices: fprop, dgrad and wgrad."""


class GemmResult(NamedTuple):
    """The results of ``general_gemm``; None for those that were not requested."""

    out: Tensor
    bias_grad: Tensor | None
    gelu_input: Tensor | None
    extra_output: Tensor | None


def get_workspace() -> Tensor:
    """An empty tensor: the kernels of this package allocate what they need."""
    return torch.empty(0, dtype=torch.uint8)


@checked(quantization_params=optional(instance(Quantizer, "a quantizer, such as MXFP8Quantizer()")))
@torch.no_grad()
def general_gemm(
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    workspace: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantization_params: Quantizer | None = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> GemmResult:
    """A product of A (the weight) and B (the input), accumulated in float32 and rounded once to ``out_dtype``.

    - TN: ``B @ A^T`` (fprop; A (N, K), B (..., K)).
    - NN: ``B @ A`` (dgrad; A (N, K), B (..., N)).
    - NT: ``B^T @ A`` (wgrad; A (M, K), B (M, N)).

    A and B are MXTensors with the copy that the layout contracts, or plain tensors. For TN and NN the result has the
    leading dimensions of B. ``out_dtype`` defaults to the dtype of ``out``, else of B.

    The result is alpha times the product, plus ``bias`` (N,), plus ``beta`` (default 1) times ``out`` with
    ``accumulate``. ``gelu`` applies the tanh form and returns its argument as ``gelu_input``. With ``grad``, ``bias``
    is not added: ``bias_grad`` is the sum of the rows of B in the dtype of ``bias``, and ``gelu`` multiplies by its
    derivative at ``gelu_in``. ``quantization_params`` quantizes the result, with the same bits as a later call would
    give. ``workspace`` and ``use_split_accumulator`` have no effect. The result has no gradient.

    Raises ValueError or TypeError for arguments that do not fit.
    """
    if layout not in LAYOUTS:
        formulas = "; ".join(f"{name}: {row.formula}" for name, row in LAYOUTS.items())
        raise ValueError(f"general_gemm: unknown layout {described(layout)}; choose one of {formulas}")
    if beta is not None and not accumulate:
        raise ValueError(f"general_gemm: beta is {beta} without accumulate; use accumulate=True with out=")
    if gelu and grad and gelu_in is None:
        raise ValueError("general_gemm: the derivative of gelu needs gelu_in, the gelu_input of the forward product")
    dtype = out_dtype or (out.dtype if out is not None else B.dtype)
    added = None if grad else bias
    others = {"bias": added, "out": out, "gelu_in": gelu_in}
    for name, t in {"A": A, **others}.items():
        if t is not None and t.device != B.device:
            raise ValueError(f"general_gemm: B is on {B.device}, {name} on {t.device}; move one with .to()")
    _check_out(out, dtype, quantization_params, accumulate)
    a, b = _gemm_operands(A, B, layout)
    shape = (b.shape[0], a.shape[0]) if layout == "NT" else (*B.shape[:-1], a.shape[0])
    for name, t in others.items():
        wanted = shape[-1:] if name == "bias" else shape
        if t is not None and tuple(t.shape) != wanted:
            raise ValueError(f"general_gemm: {name} is {tuple(t.shape)}, the result of {layout} needs {wanted}")

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # The kernel must not round if more is added to its result.
    unfused = gelu or accumulate or (added is not None and added.dtype is not dtype)
    args = GemmArgs(wide if unfused else dtype, None if unfused else added, float(alpha))
    y = gemm(f"general_gemm {layout}", b, a, args).view(shape)
    if unfused and added is not None:
        y = y + added.to(wide)
    if accumulate and out is not None:
        y = y + (1.0 if beta is None else beta) * out.to(wide)
    gelu_input = None
    if gelu and grad and gelu_in is not None:
        gelu_input = gelu_in
        y = torch.ops.aten.gelu_backward(y, gelu_in.to(wide), approximate="tanh")
    elif gelu:
        gelu_input = y.to(dtype) if gelu_in is None else gelu_in.copy_(y)
        y = F.gelu(y, approximate="tanh")
    y = y.to(dtype)
    if quantization_params is not None:
        y = quantization_params.quantize(y, out)  # type: ignore[arg-type]
    elif out is not None:
        y = out.copy_(y)
    bias_grad = None
    if grad and bias is not None:
        rows = B.dequantize(torch.float32) if isinstance(B, MXTensor) else B
        bias_grad = rows.reshape(-1, B.shape[-1]).sum(0, dtype=wide).to(bias.dtype)
    return GemmResult(y, bias_grad, gelu_input, None)


# ---------------------------------------------------------------------------------------------- checks and copies


def _check_out(out: Tensor | None, dtype: torch.dtype, quantizer: Quantizer | None, accumulate: bool) -> None:
    if accumulate and quantizer is not None:
        raise ValueError(
            "general_gemm: accumulate=True with quantization_params would round the sum at every step; accumulate in "
            "high precision and quantize the last sum"
        )
    if out is None:
        if accumulate:
            raise ValueError("general_gemm: accumulate=True needs out=, the tensor to add to")
        return
    if isinstance(out, MXTensor) != (quantizer is not None):
        raise ValueError(
            "general_gemm: a quantized out= needs quantization_params, and quantization_params need a quantized out=; "
            f"make one with quantization_params.make_empty(shape); out is {described(out)}"
        )
    if out.dtype != dtype:
        raise ValueError(f"general_gemm: out is {dtype_name(out.dtype)}, out_dtype {dtype_name(dtype)}; omit out_dtype")


def _gemm_operands(a: Tensor, b: Tensor, layout: str) -> list[GemmOperand]:
    """The copies of A and B that ``layout`` contracts, (rows, contraction) each."""
    row = LAYOUTS[layout]
    sides = (("A", a, row.a), ("B", b, row.b))
    for name, t, _ in sides:
        if not t.dtype.is_floating_point:
            raise TypeError(
                f"general_gemm: {name} is {dtype_name(t.dtype)}; convert it to a float dtype or quantize it"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"general_gemm: {name} is {described(t)}; convert it with .to_dense()")
    rotated = [t._rotated if side == "columnwise" and isinstance(t, MXTensor) else None for _, t, side in sides]
    if len({None if found is None else found.signs for found in rotated}) > 1:
        raise ValueError(
            f"general_gemm {layout}: A's {row.a} and B's {row.b} copy are rotated differently; quantize both with "
            "the same with_rht and signs, and use rotated copies with layout 'NT' only"
        )
    operands = [_gemm_operand(name, t, side, layout) for name, t, side in sides]
    of_a, of_b = (t.shape[-1] if side == "rowwise" else t.shape[0] for _, t, side in sides)
    if of_a != of_b:
        raise ValueError(
            f"general_gemm: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit; {layout} is {row.formula}"
        )
    return operands


def _gemm_operand(name: str, t: Tensor, side: str, layout: str) -> GemmOperand:
    """The copy of a matrix whose last dimension is contracted; leading dimensions become rows."""
    least = 2 if name == "A" or layout == "NT" else 1
    if t.dim() < least or (least == 2 and t.dim() > 2):
        formula = LAYOUTS[layout].formula
        raise ValueError(
            f"general_gemm: {name} is {tuple(t.shape)}; {layout} is {formula}: flatten it before quantizing it"
        )
    if isinstance(t, MXTensor):
        operand = t.rowwise if side == "rowwise" else t._rotated.operand if t._rotated is not None else t.columnwise
        if operand is None:
            raise ValueError(
                f"general_gemm {layout} needs a {side} copy of {name}, {t!r} has none; quantize it after "
                f"quantizer.set_usage({side}=True)"
            )
        if t.dim() == 2:
            return operand
        t = t.replace(operand, None, tuple(t.shape))
    flat = t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
    if isinstance(flat, MXTensor):
        assert flat.rowwise is not None
        return flat.rowwise
    return flat if side == "rowwise" else flat.t()
