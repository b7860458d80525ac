"""Quantizer, the base of all quantizers: an object that makes MXTensors, with TransformerEngine's methods."""

from __future__ import annotations

import copy
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core.arguments import (
    DEVICE,
    FLAG,
    FLOAT_DTYPE,
    INTEGER,
    SHAPE,
    TENSOR,
    Kind,
    check,
    described,
    instance,
    optional,
)
from ..core.shapes import swapped
from ..kernels.quantize.hadamard import quantize_rotated
from ..kernels.quantize.select import quantize_operand
from ..kernels.quantize.select_pair import quantize_operands
from ..numerics.cast import Cast
from ..numerics.formats import Format, Orientation
from ..numerics.operand import Operand, Rotated
from ..numerics.reference import SOURCE_DTYPES, check_source
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.rotated import RotatedTensor
from ..tensor.stored import rotated_shape
from ..tensor.te_attributes import NOOP_FLAG, is_noop

Q = TypeVar("Q", bound="Quantizer")


class DType(Enum):
    """TransformerEngine's names of elements."""

    kFloat8E4M3 = "e4m3"  # noqa: N815
    kFloat8E5M2 = "e5m2"  # noqa: N815
    kFloat4E2M1 = "e2m1"  # noqa: N815

    @classmethod
    def of(cls, value: DType | torch.dtype | str, allowed: tuple[DType, ...] | None = None) -> DType:
        """The member for a member, a torch dtype, TransformerEngine's own member or a name. Raises ValueError."""
        name = str(getattr(value, "name", value)).removeprefix("torch.")
        member = cls._member_map_.get(name) or _OTHER_NAMES.get(name.lower())
        if allowed is not None:
            check("DType.of", "allowed", allowed, MEMBERS)
        choices = allowed or tuple(cls)
        if member not in choices:
            names = " or ".join(f"DType.{m.name}" for m in choices)
            raise ValueError(f"the element {described(value)} is not available here; choose {names}")
        return member


_OTHER_NAMES = {m.value: m for m in DType} | {
    "float8_e4m3fn": DType.kFloat8E4M3,
    "float8_e5m2": DType.kFloat8E5M2,
    "float4_e2m1fn_x2": DType.kFloat4E2M1,
}
MEMBERS = Kind(
    "a tuple of members of DType",
    lambda given: isinstance(given, tuple) and all(isinstance(member, DType) for member in given),
)
CAST = instance(Cast, "a Cast, such as Cast.of('mxfp8')")
FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)
GROUP = optional(Kind("a process group of torch.distributed", lambda given: "ProcessGroup" in type(given).__name__))


class Quantizer:
    """A cast, and the copies that it makes (``rowwise``, ``columnwise``).

    Calling a quantizer is ``quantize``. If ``x`` requires a gradient, the result does too, and the gradient passes
    through unchanged. Formats with square blocks or one scale per tensor have one copy for both orientations; a 1-D
    tensor has the rowwise copy only.
    """

    formats: ClassVar[tuple[Format, ...]] = ()
    """The formats of this class."""
    device: torch.device | None = None
    """The default device of ``make_empty``."""
    internal = False
    """TransformerEngine's option, without effect: a result is always an MXTensor."""
    optimize_for_gemm = False
    """The same: scales are stored as products read them."""

    def __init__(self, cast: Cast, rowwise: bool, columnwise: bool, signs: int | None = None) -> None:
        name = type(self).__name__
        check(name, "cast", cast, CAST)
        check(name, "signs", signs, optional(INTEGER))
        self.cast, self.signs = cast, signs
        self.recipe = HIGH_PRECISION if cast.format.row_scaled else LinearRecipe.inference(cast)  # makes no tensors
        self.rowwise = self.columnwise = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @classmethod
    def of(cls: type[Q], cast: Cast, rowwise: bool, columnwise: bool, signs: int | None = None) -> Q:
        """A quantizer of this class for any cast to one of its formats."""
        self = cls.__new__(cls)
        Quantizer.__init__(self, cast, rowwise, columnwise, signs)
        return self

    # ------------------------------------------------------------------------------------------ quantizing

    def __call__(self, x: Tensor) -> MXTensor:
        return self.quantize(x)

    def quantize(self, x: Tensor, out: MXTensor | None = None, *, dtype: torch.dtype | None = None) -> MXTensor:
        """``x`` (float32, bfloat16, float16 or float64) quantized. Given ``out``, writes to it, without a gradient.

        ``dtype``: that of the result, whose codes and scales are the same; None takes that of ``x``.

        Raises TypeError for other dtypes, ValueError for a tensor without the dimensions that the copies need.
        """
        if out is not None:
            return self.update_quantized(x, out)
        if not isinstance(x, Tensor):
            check(type(self).__name__, "x", x, TENSOR)
        check(type(self).__name__, "dtype", dtype, optional(FLOAT_DTYPE))
        if x.requires_grad and torch.is_grad_enabled():
            return _StraightThrough.apply(x, self, dtype)  # type: ignore[no-any-return]
        return self._made(x, dtype)

    def update_quantized(self, src: Tensor, dst: MXTensor, *, noop_flag: Tensor | None = None) -> MXTensor:
        """Quantize ``src`` in place into every copy of ``dst``; returns ``dst``.

        ``noop_flag``: one number; unless it is zero, nothing is written. On a GPU, reading it synchronizes.
        Raises TypeError if ``dst`` is not an MXTensor, ValueError if it has another format, shape or rotation.
        """
        check(type(self).__name__, "src", src, TENSOR)
        if not isinstance(dst, MXTensor):
            raise TypeError(f"can only update an MXTensor, got {described(dst)}; make one with make_empty()")
        if dst.format != self.cast.format or dst.shape != src.shape:
            raise ValueError(
                f"cannot write {self.cast.format} values of shape {tuple(src.shape)} into {dst!r}; use make_empty"
                f"({tuple(src.shape)}, dtype={dst.dtype})"
            )
        check(type(self).__name__, "noop_flag", noop_flag, NOOP_FLAG)
        if is_noop(noop_flag):
            return dst
        rotated_copy = dst._rotated
        if (rotated_copy.signs if rotated_copy else self.signs) != self.signs or (
            self.signs is not None and dst._columnwise is not None
        ):
            raise ValueError(f"{self!r} and the columnwise copy of out are rotated differently; use make_empty()")
        x = _plain(src)
        row, column = (None, None) if isinstance(dst, RotatedTensor) else self._operands(x, dst.copies)
        rotated = None if rotated_copy is None else quantize_rotated(x, self.cast, rotated_copy.signs)
        with torch.no_grad():
            dst.copy_(_tensor(row, column, rotated, dst.recipe, dst.dtype, tuple(dst.shape)))
        return dst

    def make_empty(
        self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> MXTensor:  # fmt: skip
        """An uninitialized MXTensor with the copies that this quantizer makes, for ``update_quantized``.

        Raises TypeError for a dtype that cannot be quantized, ValueError for a shape without the needed dimensions.
        """
        given = (
            ("shape", shape, SHAPE),
            ("dtype", dtype, instance(torch.dtype, "a float dtype")),
            ("device", device, optional(DEVICE)),
        )
        flags = ("requires_grad", requires_grad, FLAG), ("pin_memory", pin_memory, FLAG)
        for name, value, kind in (*given, *flags):
            check("make_empty", name, value, kind)
        x = torch.empty(tuple(shape), dtype=dtype, device="meta")
        empty = partial(Operand.empty, self.cast.format, device=device if device is not None else self.device)
        wanted, size = self._wanted(x), tuple(x.shape)
        row = empty(size) if Orientation.ROWWISE in wanted else None
        column = empty(swapped(size)) if Orientation.COLUMNWISE in wanted and self.signs is None else None
        is_rotated = self.signs is not None and Orientation.COLUMNWISE in wanted
        rotated = Rotated(empty(rotated_shape(size)), self.signs) if is_rotated else None  # type: ignore[arg-type]
        out = _tensor(row, column, rotated, self.recipe, dtype, size)
        if pin_memory and torch.accelerator.is_available():
            out = out.pin_memory()  # type: ignore[assignment]
        return out.requires_grad_(bool(requires_grad))  # type: ignore[return-value]

    def _made(self, x: Tensor, dtype: torch.dtype | None = None) -> MXTensor:
        x = _plain(x)
        wanted = self._wanted(x)
        rotated = None
        row, column = self._operands(x, wanted)
        if self.signs is not None and Orientation.COLUMNWISE in wanted:
            rotated = quantize_rotated(x, self.cast, self.signs)
        return _tensor(row, column, rotated, self.recipe, dtype or x.dtype, tuple(x.shape))

    def _wanted(self, x: Tensor) -> Orientation:
        """The copies to make of ``x``."""
        if self.cast.format.row_scaled:
            raise NotImplementedError(
                f"{type(self).__name__}: a tensor has one global scale, and {self.cast.format} has one for each row; "
                "use NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True), whose inputs are cast so"
            )
        check_source(x)
        if x.dim() == 1 and not self.rowwise:
            raise ValueError("a columnwise copy needs two dimensions, this tensor has 1; use set_usage(rowwise=True)")
        if x.dim() == 1 or self.cast.format.square or not self.columnwise:
            return Orientation.ROWWISE
        return Orientation.BOTH if self.rowwise else Orientation.COLUMNWISE

    def _operands(self, x: Tensor, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
        if self.signs is not None:
            return (quantize_operand(x, self.cast) if Orientation.ROWWISE in orientation else None), None
        return quantize_operands(x, self.cast, orientation)

    # ------------------------------------------------------------------------------------------ settings

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set the copies that later calls make; None leaves one unchanged. Raises ValueError if both are False."""
        check(type(self).__name__, "rowwise", rowwise, optional(FLAG))
        check(type(self).__name__, "columnwise", columnwise, optional(FLAG))
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        if not rowwise and not columnwise:
            raise ValueError(f"{type(self).__name__}: rowwise and columnwise are both False; a tensor needs one copy")
        self.rowwise, self.columnwise = rowwise, columnwise

    @property
    def rowwise_usage(self) -> bool:
        """TransformerEngine's name for ``rowwise``."""
        return self.rowwise

    @property
    def columnwise_usage(self) -> bool:
        """TransformerEngine's name for ``columnwise``."""
        return self.columnwise

    @property
    def amax_epsilon(self) -> float:
        """A smaller amax counts as this number, in float32 scales."""
        return self.cast.amax_epsilon

    @property
    def dtype(self) -> DType | str:
        """The element: a DType, or its name if TransformerEngine has no DType for it."""
        return _OTHER_NAMES.get(self.cast.format.element.name, self.cast.format.element.name)

    fp8_dtype = dtype

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether ``quantize`` accepts ``x``: its dtype and number of dimensions; sizes do not matter."""
        check(type(self).__name__, "x", x, TENSOR)
        return x.layout is torch.strided and x.dtype in SOURCE_DTYPES and x.dim() >= (1 if self.rowwise else 2)

    def copy(self: Q) -> Q:
        """A quantizer with the same settings; a Float8Quantizer shares the tensors ``scale`` and ``amax``."""
        return copy.copy(self)

    def _arguments(self) -> dict[str, Any]:
        """The settings that ``repr`` shows before the usages."""
        return {"fp8_dtype": self.dtype}

    def __repr__(self) -> str:
        shown = self._arguments() | {"rowwise": self.rowwise, "columnwise": self.columnwise}
        plain = Cast(self.cast.format)
        for name in ("scaling", "rounding", "seed", "amax_epsilon", "four_over_six"):
            if getattr(self.cast, name) != getattr(plain, name) and f"stochastic_{name}" not in shown:
                shown[name] = getattr(self.cast, name)
        text = (f"{name}={value.name if isinstance(value, DType) else _word(value)}" for name, value in shown.items())
        return f"{type(self).__name__}({', '.join(text)})"


def _word(value: Any) -> str:
    return repr(value.value if isinstance(value, Enum) else value)


def _tensor(
    row: Operand | None, column: Operand | None, rotated: Rotated | None, recipe: LinearRecipe, dtype: torch.dtype,
    size: tuple[int, ...],
) -> MXTensor:  # fmt: skip
    if row is None and rotated is not None:
        return RotatedTensor(rotated, recipe, dtype, size)
    return MXTensor(row, column, recipe, dtype, size, checked=True, rotated=rotated)


def _plain(x: Tensor) -> Tensor:
    return (x.dequantize() if isinstance(x, MXTensor) else x).detach()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> MXTensor:
        ctx.dtype = x.dtype
        return quantizer._made(x, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def check_no_reduction(name: str, with_amax_reduction: bool, group: Any) -> None:
    """Raise NotImplementedError for TransformerEngine's option to share the amax with other ranks."""
    check(name, "amax_reduction_group", group, GROUP)
    if with_amax_reduction:
        raise NotImplementedError(
            f"{name}: with_amax_reduction=True is not available: the amax is that of this tensor; use tp_group of a "
            "module of mx.nn, or a style of mx.parallel, whose ranks share scales"
        )
