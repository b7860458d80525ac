"""TransformerEngine's quantizers, by its names and arguments: objects that make MXTensors.

Each gives the same bits as ``mxtensor.quantize`` with its format. All except ``Float8Quantizer`` are stateless. Any
shape can be quantized without padding: the last block may be shorter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
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
    checked,
    described,
    instance,
    optional,
)
from ..core.shapes import swapped
from ..kernels.operands import Form
from ..kernels.quantize.choose_cast import quantize_operand
from ..kernels.quantize.choose_pair import cast_pair, quantize_operands
from ..kernels.quantize.hadamard import quantize_rotated
from ..numerics.cast import EPSILON, Cast
from ..numerics.choices import FourOverSix
from ..numerics.formats import FORMATS, Format, Orientation, Rounding, ScaleCalculationMode
from ..numerics.operand import Operand, Rotated
from ..numerics.reference import SOURCE_DTYPES, check_source, tensor_amax
from ..recipe import Recipe
from ..recipe.block_scaling import RANDOM_SIGNS
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.rotated import RotatedTensor
from ..tensor.stored import rotated_shape
from ..training.delayed_scaling import DelayedState
from .attributes import NOOP_FLAG, is_noop

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
POW2: dict[str, Callable[[Any], Any]] = {"force_pow_2_scales": lambda q: q.cast.format.scale.significant_bits == 1}
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
    shown: ClassVar[dict[str, Callable[[Any], Any]]] = {"fp8_dtype": lambda q: q.dtype}
    """Argument -> its value as ``repr`` shows it; None is not shown."""
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
        return self._made(x, self._wanted(x), dtype or x.dtype)

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
        wanted = dst.copies if rotated_copy is None else dst.copies | Orientation.COLUMNWISE
        with torch.no_grad():
            dst.copy_(self._made(src, wanted, dst.dtype, dst.recipe))
        return dst

    def make_empty(
        self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> MXTensor:  # fmt: skip
        """An uninitialized MXTensor with the copies that this quantizer makes, for ``update_quantized``.

        Raises TypeError for a dtype that cannot be quantized, ValueError for a shape without the needed dimensions.
        """
        check("make_empty", "shape", shape, SHAPE)
        check("make_empty", "dtype", dtype, instance(torch.dtype, "a float dtype"))
        check("make_empty", "device", device, optional(DEVICE))
        check("make_empty", "requires_grad", requires_grad, FLAG)
        check("make_empty", "pin_memory", pin_memory, FLAG)
        x = torch.empty(tuple(shape), dtype=dtype, device="meta")
        empty = partial(Operand.empty, self.cast.format, device=device if device is not None else self.device)
        wanted, size = self._wanted(x), tuple(x.shape)
        row, column, rotated = empty(size) if Orientation.ROWWISE in wanted else None, None, None
        if Orientation.COLUMNWISE in wanted and self.signs is None:
            column = empty(swapped(size))
        elif Orientation.COLUMNWISE in wanted:
            rotated = Rotated(empty(rotated_shape(size)), self.signs)  # type: ignore[arg-type]
        out = _tensor(row, column, rotated, self.recipe, dtype, size)
        if pin_memory and torch.accelerator.is_available():
            out = out.pin_memory()  # type: ignore[assignment]
        return out.requires_grad_(bool(requires_grad))  # type: ignore[return-value]

    def _made(self, x: Tensor, wanted: Orientation, dtype: torch.dtype, recipe: LinearRecipe | None = None) -> MXTensor:
        """``x`` quantized to the ``wanted`` copies, without a gradient."""
        x = (x.dequantize() if isinstance(x, MXTensor) else x).detach()
        rotates = self.signs is not None and Orientation.COLUMNWISE in wanted
        row, column = self._operands(x, wanted)
        rotated = quantize_rotated(x, self.cast, self.signs) if rotates else None  # type: ignore[arg-type]
        return _tensor(row, column, rotated, recipe or self.recipe, dtype, tuple(x.shape))

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

    def __repr__(self) -> str:
        shown = {name: value for name, get in self.shown.items() if (value := get(self)) is not None}
        shown |= {"rowwise": self.rowwise, "columnwise": self.columnwise}
        plain = Cast(self.cast.format)
        for name in ("scaling", "rounding", "seed", "amax_epsilon", "four_over_six"):
            if getattr(self.cast, name) != getattr(plain, name) and f"stochastic_{name}" not in shown:
                shown[name] = getattr(self.cast, name)
        words = {
            name: value.name if isinstance(value, DType) else repr(value.value if isinstance(value, Enum) else value)
            for name, value in shown.items()
        }
        return f"{type(self).__name__}({', '.join(f'{name}={word}' for name, word in words.items())})"


def _tensor(
    row: Operand | None, column: Operand | None, rotated: Rotated | None, recipe: LinearRecipe, dtype: torch.dtype,
    size: tuple[int, ...],
) -> MXTensor:  # fmt: skip
    if row is None and rotated is not None:
        return RotatedTensor(rotated, recipe, dtype, size)
    return MXTensor(row, column, recipe, dtype, size, checked=True, rotated=rotated)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> MXTensor:
        ctx.dtype = x.dtype
        return quantizer._made(x, quantizer._wanted(x), dtype or x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def check_no_reduction(name: str, with_amax_reduction: bool, group: Any) -> None:
    """Raise NotImplementedError for TransformerEngine's option to share the amax with other ranks."""
    check(name, "amax_reduction_group", group, GROUP)
    if with_amax_reduction:
        raise NotImplementedError(
            f"{name}: with_amax_reduction=True is not available: the amax is that of this tensor; use tp_group of a "
            "module of mxtensor.te, or a style of mx.parallel, whose ranks share scales"
        )


# ---------------------------------------------------------------------------------------------- stateless ones


class MXQuantizer(Quantizer):
    """Any format of this package: ``MXQuantizer("mxfp6_e2m3")``. Arguments as in :func:`mxtensor.quantize`."""

    shown: ClassVar[dict[str, Callable[[Any], Any]]] = {"format": lambda q: q.cast.format.name}

    @checked()
    def __init__(
        self,
        format: Format | str | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        scaling: ScaleCalculationMode | str = "rceil",
        rounding: Rounding | str = "nearest",
        seed: int | None = None,
    ) -> None:
        super().__init__(Cast.of(format, scaling, rounding, seed), rowwise, columnwise)


class MXFP8Quantizer(Quantizer):
    """MXFP8: 32 values share a power-of-two scale (RCEIL). ``with_2d_quantization``: a 32x32 tile shares one."""

    formats = tuple(FORMATS[f"mxfp8_{e}"].with_block(block) for e in ("e4m3", "e5m2") for block in (32, (32, 32)))
    shown = Quantizer.shown | {"with_2d_quantization": lambda q: q.cast.format.square or None}

    @checked()
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        row = FORMATS[f"mxfp8_{DType.of(fp8_dtype, FP8).value}"]
        super().__init__(Cast(row.with_block((32, 32)) if with_2d_quantization else row), rowwise, columnwise)


NVFP4_EXCLUDES = (
    ("row_scaled_nvfp4", "with_rht"), ("row_scaled_nvfp4", "stochastic_rounding"),
    ("row_scaled_nvfp4", "with_2d_quantization"),
    ("nvfp4_use_4over6", "with_rht"), ("nvfp4_use_4over6", "stochastic_rounding"),
)  # fmt: skip
"""Options of NVFP4Quantizer that do not go together."""


class NVFP4Quantizer(Quantizer):
    """NVFP4: 16 values share an E4M3 scale, the tensor has a float32 global scale.

    ``with_rht``: a random Hadamard transform with these ``signs`` rotates the columnwise copy. Only products of two
    rotated copies, ``general_gemm(..., layout="NT")``, use it, and results of torch ops do not have it.
    ``with_random_sign_mask=False``: the transform without signs, the same as ``signs=0``.
    ``with_2d_quantization``: a 16x16 tile shares a scale. ``stochastic_rounding``: for gradients.
    ``nvfp4_use_4over6``: the amax of each block becomes 6 or 4, by the smaller error, ``nvfp4_4over6_err_mode`` MAE or
    MSE; ``nvfp4_e4m3_max``, 448 or 256, is then the largest block scale for 6. ``row_scaled_nvfp4``: each row has a
    global scale, for a ``CustomRecipe(qfactory=...)``; such a quantizer makes no tensors. ``with_post_rht_amax`` has no
    effect: the amax of the rotated copy is always that of the rotated values.
    """

    formats = tuple(FORMATS["nvfp4"].with_block(block) for block in (16, (16, 16)))
    fp4_dtype = Quantizer.dtype
    shown: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "fp4_dtype": lambda q: q.dtype,
        "with_rht": lambda q: q.signs is not None,
        "with_2d_quantization": lambda q: q.cast.format.square,
        "stochastic_rounding": lambda q: q.cast.rounding is Rounding.STOCHASTIC,
        "signs": lambda q: None if q.signs == RANDOM_SIGNS else q.signs,
        "row_scaled_nvfp4": lambda q: q.cast.format.row_scaled or None,
    }

    @checked()
    def __init__(
        self,
        fp4_dtype: DType | torch.dtype | str = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
        signs: int = RANDOM_SIGNS,
        with_post_rht_amax: bool | None = None,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        check_no_reduction("NVFP4Quantizer", with_amax_reduction, amax_reduction_group)
        DType.of(fp4_dtype, (DType.kFloat4E2M1,))
        if with_rht and with_2d_quantization:
            raise ValueError(
                "NVFP4Quantizer: with_2d_quantization has one copy for both orientations, with_rht rotates one of two; "
                "use only one of them"
            )
        if not with_random_sign_mask and signs not in (0, RANDOM_SIGNS):
            raise ValueError(
                f"NVFP4Quantizer: with_random_sign_mask=False is signs=0, and signs is {signs}; pass only one of them"
            )
        signs = signs if with_random_sign_mask else 0
        wanted = {
            "row_scaled_nvfp4": row_scaled_nvfp4, "nvfp4_use_4over6": nvfp4_use_4over6, "with_rht": with_rht,
            "stochastic_rounding": stochastic_rounding, "with_2d_quantization": with_2d_quantization,
        }  # fmt: skip
        for name, other in NVFP4_EXCLUDES:
            if wanted[name] and wanted[other]:
                raise ValueError(f"NVFP4Quantizer: {name} and {other} do not go together; use only one of them")
        row = FORMATS["nvfp4"].with_block((16, 16) if with_2d_quantization else 16)
        row = row.with_row_scales() if row_scaled_nvfp4 else row
        rounding = Rounding.STOCHASTIC if stochastic_rounding else Rounding.NEAREST
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"NVFP4Quantizer: nvfp4_e4m3_max is {nvfp4_e4m3_max}; choose 448 or 256")
        if nvfp4_4over6_err_mode.upper() not in ("MAE", "MSE"):
            raise ValueError(f"NVFP4Quantizer: nvfp4_4over6_err_mode is {nvfp4_4over6_err_mode!r}; choose MAE or MSE")
        word = nvfp4_4over6_err_mode.lower() + ("_448" if nvfp4_e4m3_max == 448 else "")
        four = FourOverSix.of(word) if nvfp4_use_4over6 else None
        cast = Cast(row, rounding=rounding, four_over_six=four)
        super().__init__(cast, rowwise, columnwise, signs if with_rht else None)


class Float8CurrentScalingQuantizer(Quantizer):
    """Float8 with one float32 scale per tensor, from its own amax. ``force_pow_2_scales``: powers of two only.

    ``amax_epsilon``: a smaller amax counts as this number, also that of zeros.
    """

    formats = tuple(FORMATS[f"float8_{e}_tensor{s}"] for e in ("e4m3", "e5m2") for s in ("", "_pow2"))
    shown = Quantizer.shown | POW2

    @checked(amax_epsilon=EPSILON)
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        check_no_reduction("Float8CurrentScalingQuantizer", with_amax_reduction, amax_reduction_group)
        if use_existing_amax:
            raise NotImplementedError(
                "Float8CurrentScalingQuantizer: use_existing_amax=True is not available: the amax is that of the "
                "values; use Float8Quantizer, whose scale you set"
            )
        row = FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_tensor{'_pow2' if force_pow_2_scales else ''}"]
        super().__init__(Cast(row, amax_epsilon=amax_epsilon or 0), rowwise, columnwise)
        self.device = None if device is None else torch.device(device)


class Float8BlockQuantizer(Quantizer):
    """Float8 with a float32 scale per 128x128 tile (``block_scaling_dim=2``) or per 128 values of a row (1).

    ``amax_epsilon``: a smaller amax counts as this number, also that of a block of zeros.
    """

    formats = tuple(
        FORMATS[f"float8_{e}_{b}{s}"] for e in ("e4m3", "e5m2") for b in ("1x128", "128x128") for s in ("", "_pow2")
    )
    shown = Quantizer.shown | POW2 | {"block_scaling_dim": lambda q: 2 if q.cast.format.square else 1}

    @checked(amax_epsilon=EPSILON)
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: block_scaling_dim is {described(block_scaling_dim)}; use 1 or 2")
        block = "1x128" if block_scaling_dim == 1 else "128x128"
        row = FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_{block}{'_pow2' if force_pow_2_scales else ''}"]
        super().__init__(Cast(row, amax_epsilon=amax_epsilon or 0), rowwise, columnwise)


# ---------------------------------------------------------------------------------------------- delayed scaling


class Float8Quantizer(Quantizer):
    """Float8 with one given scale per tensor: values are multiplied by ``scale`` and saturate.

    ``scale`` and ``amax``: tensors with one float32 each. Each call reads ``scale`` and sets ``amax`` to the maximum of
    itself and the amax of the values. Raises TypeError or ValueError for other tensors.
    """

    scale: Tensor
    amax: Tensor
    shown = {"scale": lambda q: q.scale.tolist(), "amax": lambda q: q.amax.tolist()} | Quantizer.shown

    @checked()
    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(Cast(FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_tensor"]), rowwise, columnwise)
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, Tensor) or value.dtype is not torch.float32:
                raise TypeError(f"Float8Quantizer: {name} must be a float32 tensor, got {described(value)}")
            if value.numel() != 1:
                raise ValueError(f"Float8Quantizer: {name} must be one value, got {tuple(value.shape)}")
        self.scale, self.amax, self.device = scale.detach(), amax.detach(), scale.device

    def _operands(self, x: Tensor, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
        if x.device != self.scale.device:
            raise ValueError(f"Float8Quantizer: scale is on {self.scale.device}, the values on {x.device}")
        if orientation is Orientation.COLUMNWISE:
            return None, self._operands(x.transpose(-1, -2), Orientation.ROWWISE)[0]
        operand = self._under_scale(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        shape = tuple(x.shape)
        scale = operand.scale.reshape(self.cast.format.scale_shape(shape))
        return replace(operand, data=operand.data.view(shape), scale=scale, shape=shape), None

    def _under_scale(self, x: Tensor) -> Operand:
        """The operand of a matrix; its stored scale is 1 / ``scale``."""
        self.amax.copy_(torch.maximum(self.amax, tensor_amax(x).reshape(self.amax.shape)))
        largest = self.cast.format.element.max
        x, bound = x.to(torch.float32), torch.finfo(torch.float32).max
        scaled = torch.where(x.isfinite(), (x * self.scale.reshape(())).clamp(-bound, bound), float("nan"))
        full = torch.full((), largest, dtype=torch.float32, device=x.device)  # the amax for which the scale is 1
        operand = cast_pair(scaled, self.cast, Form.CODES, None, torch.bfloat16, full)[0]
        assert isinstance(operand, Operand)
        return replace(operand, scale=self.scale.reciprocal().expand_as(operand.scale).clone())


class _LayerQuantizer(Float8Quantizer):
    """A Float8Quantizer over the amax histories of a layer: it casts and records as the layer's own products do."""

    def __init__(self, cast: Cast, state: DelayedState, index: int, rowwise: bool, columnwise: bool) -> None:
        Quantizer.__init__(self, cast, rowwise, columnwise)
        self.state, self.index, self.device = state, index, state.record.device

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The scale of this step: a new tensor, since the state makes a new amax at each step."""
        return self.state.scale[self.index]

    @property
    def amax(self) -> Tensor:  # type: ignore[override]
        """A view of the state's record."""
        return self.state.record[self.index]

    def _under_scale(self, x: Tensor) -> Operand:
        mine = self.state.amax[self.index], self.amax
        operand = cast_pair(x, self.cast, Form.CODES, None, torch.bfloat16, *mine)[0]
        assert isinstance(operand, Operand)
        return operand

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, Float8Quantizer.__name__)


# ---------------------------------------------------------------------------------------------- for a recipe

_STATELESS = (MXFP8Quantizer, NVFP4Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer)
QUANTIZER_OF: dict[Format, type[Quantizer]] = {row: kind for kind in _STATELESS for row in kind.formats}
"""Format -> its class; MXQuantizer takes all others."""


def quantizers_of(
    recipe: Recipe | LinearRecipe, device: torch.device | str, state: DelayedState | None = None
) -> dict[str, list[Quantizer | None]]:
    """The quantizers of a linear layer: ``{"scaling_fwd": [input, weight], "scaling_bwd": [grad]}``.

    Each makes the copies that the layer's products need; None for a tensor that stays in high precision. If the two
    copies have different casts, the quantizer makes the rowwise one. Delayed scaling: Float8Quantizers over ``state``,
    or over a new state with scale 1 and amax 0.
    """
    linear_recipe, device = recipe if isinstance(recipe, LinearRecipe) else recipe.linear_recipe(), torch.device(device)
    if linear_recipe.delayed is not None and state is None:
        state = DelayedState(linear_recipe, device)
    made: list[Quantizer | None] = []
    for index, casts in enumerate((linear_recipe.input, linear_recipe.weight, linear_recipe.grad)):
        cast = casts.rowwise or casts.columnwise
        copies = casts.rowwise is not None, casts.columnwise is not None and casts.columnwise == cast
        if cast is None:
            made.append(None)
        elif state is not None:
            made.append(_LayerQuantizer(cast, state, index, *copies))
        else:
            kind = NVFP4Quantizer if cast.format.row_scaled else QUANTIZER_OF.get(cast.format, MXQuantizer)
            made.append(kind.of(cast, *copies, casts.signs))
            made[-1].device = device  # type: ignore[union-attr]
    return {"scaling_fwd": made[:2], "scaling_bwd": made[2:]}
