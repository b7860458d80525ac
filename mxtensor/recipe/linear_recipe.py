"""LinearRecipe: how the tensors of one linear layer are cast. The one recipe type, for training and for inference.

A quantized weight carries one, the autograd function of training runs by one, and the recipe classes of ``mx.recipe``
and other configs make one by their method ``linear_recipe()``. It is frozen, hashable and holds no tensors. Files
and pickles of an MXTensor store that of inference as a row of words, since names outlive classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.arguments import FLAG, INTEGER, TEXT, check, instance, optional
from ..numerics.cast import Cast
from ..numerics.choices import member
from ..numerics.formats import Format, Rounding


class KernelPreference(Enum):
    """The product kernel that a recipe requires (names and values are torchao's)."""

    AUTO = "auto"
    """the fastest kernel that accepts the product"""
    EMULATED = "emulated"
    """the definition: decode to float32, multiply, round once"""

    @classmethod
    def of(cls, value: KernelPreference | str) -> KernelPreference:
        """The member with this name; members of torchao's own enum are accepted by their value. Raises ValueError."""
        return member(cls, "kernel_preference", value)


@dataclass(frozen=True)
class Delayed:
    """Scales from the amax of earlier steps (TransformerEngine's delayed scaling)."""

    margin: int = 0
    """The amax is multiplied by 2^margin before the scale is computed."""
    history_len: int = 1024
    """Number of steps in the amax history."""
    amax_of: str | Callable[[Tensor], Tensor] = "max"
    """``max`` or ``most_recent`` of the history, or a function of it: (history_len,) float32, newest first -> ()."""
    scale_of: Callable[..., Tensor] | None = None
    """(amax, scale, fp8_max, recipe) -> the scale that maps amax to fp8_max; None: fp8_max / amax / 2^margin."""
    reduce: bool = True
    """Whether the process group of ``autocast``, if there is one, shares the largest amax."""


CAST = optional(instance(Cast, "a Cast, or use TensorCasts.of, which takes names of formats"))


@dataclass(frozen=True)
class TensorCasts:
    """How one tensor of a linear layer is cast for each of its two products.

    The ``rowwise`` copy has its blocks along the last dimension, the ``columnwise`` copy along the one before it. None
    leaves that operand in high precision.
    """

    rowwise: Cast | None = None
    columnwise: Cast | None = None
    signs: int | None = None
    """If set, the columnwise copy is rotated along the contraction before the cast: each group of 16 values times
    diag(signs) * H16 / 4, where bit i of ``signs`` is the sign of row i. Both operands of wgrad are rotated alike."""
    from_rowwise: bool = False
    """For a weight: the columnwise copy is cast from the dequantized rowwise copy, not from high precision. A layer
    then needs the rowwise copy only. Without a cast of the columnwise copy, which an input may have too, dgrad or wgrad
    multiplies by the dequantized rowwise copy."""

    def __post_init__(self) -> None:
        check("TensorCasts", "rowwise", self.rowwise, CAST)
        check("TensorCasts", "columnwise", self.columnwise, CAST)
        check("TensorCasts", "signs", self.signs, optional(INTEGER))
        check("TensorCasts", "from_rowwise", self.from_rowwise, FLAG)

    @property
    def one_copy(self) -> bool:
        """Whether the rowwise copy alone gives both products, bitwise: true for a square block and ``from_rowwise``."""
        if self.rowwise is None or self.columnwise is None:
            return False
        return self.from_rowwise or (self.rowwise == self.columnwise and self.rowwise.format.square)

    @classmethod
    def of(cls, cast: TensorCasts | Cast | Format | str | torch.dtype | None) -> TensorCasts:
        """The same cast for both copies; None for no cast. Raises ValueError for an unknown format."""
        if isinstance(cast, TensorCasts):
            return cast
        both = None if cast is None else Cast.of(cast)
        return cls(both, both)


CASTS = instance(TensorCasts, "TensorCasts, or use LinearRecipe.inference('mxfp8'), which takes names of formats")
FIELDS = (
    ("input", CASTS), ("weight", CASTS), ("grad", CASTS), ("delayed", optional(instance(Delayed, "a Delayed"))),
    ("name", TEXT), ("quantized_gather", FLAG), ("trains", FLAG),
)  # fmt: skip


@dataclass(frozen=True)
class LinearRecipe:
    """How the tensors of one linear layer are cast: the three products of training, or fprop alone for inference.

    | product | formula    | first operand   | second operand    |
    | ------- | ---------- | --------------- | ----------------- |
    | fprop   | y = x w^T  | input.rowwise   | weight.rowwise    |
    | dgrad   | dx = g w   | grad.rowwise    | weight.columnwise |
    | wgrad   | dw = g^T x | grad.columnwise | input.columnwise  |

    Raises ValueError if only one operand of a product is rotated, for ``from_rowwise`` of an input or a gradient, and
    for a weight in a row-scaled format; TypeError for fields of other types.
    """

    input: TensorCasts
    weight: TensorCasts = None  # type: ignore[assignment]  # required: without it the error says what to pass
    grad: TensorCasts = None  # type: ignore[assignment]
    delayed: Delayed | None = None
    """Scales from earlier steps instead of the tensor's own amax; for formats with one scale per tensor."""
    kernel_preference: KernelPreference = KernelPreference.AUTO
    """Or its value as a string, such as ``"emulated"``."""
    name: str = "CustomRecipe"
    """The name in messages."""
    quantized_gather: bool = True
    """Whether FSDP2 gathers the codes of a weight instead of its values when the result is bitwise identical."""
    trains: bool = True
    """False for inference: the weight is stored quantized and frozen, and there is no gradient to cast."""
    key: ClassVar[str] = ""
    """All fields as one string: what a traced graph stores instead of the object (``recipe_by_key``), and what caches
    compare. Empty for an inference recipe that was made inside a traced graph. No dataclass field, because Dynamo
    passes all fields to the constructor."""

    def __post_init__(self) -> None:
        for name, kind in FIELDS:
            check("LinearRecipe", name, getattr(self, name), kind)
        if not isinstance(self.kernel_preference, KernelPreference):
            object.__setattr__(self, "kernel_preference", KernelPreference.of(self.kernel_preference))
        for cast in (self.weight.rowwise, self.weight.columnwise):
            if cast is not None and cast.format.row_scaled:
                raise ValueError(
                    f"LinearRecipe: the weight is {cast.format}, and a weight has one global scale; use "
                    f"{cast.format.name.split('[')[0]} for the weight, and this format for inputs or gradients"
                )
        x, g = (casts.signs if casts.columnwise is not None else None for casts in (self.input, self.grad))
        if x != g or self.weight.signs is not None:
            raise ValueError(
                "LinearRecipe: only the two operands of wgrad can be rotated, and both by the same signs; got input "
                f"{x}, grad {g}, weight {self.weight.signs}"
            )
        if (self.input.from_rowwise and self.input.columnwise is not None) or self.grad.from_rowwise:
            raise ValueError(
                "LinearRecipe: only the columnwise copy of a weight can be cast from the rowwise copy; got "
                f"from_rowwise of input {self.input.from_rowwise}, of grad {self.grad.from_rowwise}"
            )
        if self.trains:
            object.__setattr__(self, "key", repr(self))
            _by_key.setdefault(self.key, self)

    @staticmethod
    def inference(
        weight: Cast | Format | str | torch.dtype,
        activation: Cast | Format | str | torch.dtype | None = None,
        kernel_preference: KernelPreference | str = KernelPreference.AUTO,
    ) -> LinearRecipe:
        """The recipe of a stored, frozen weight. ``activation``: the cast of the other operand; None: weight-only.

        Equal arguments give the same object. Raises ValueError for an unknown format or preference.
        """
        casts = Cast.of(weight), None if activation is None else Cast.of(activation)
        # Dynamo warns of functools caches that it traces through.
        make = _inference if torch.compiler.is_dynamo_compiling() else _cached_inference
        return make(*casts, KernelPreference.of(kernel_preference))

    @property
    def stored(self) -> Cast:
        """The cast of a weight that is stored quantized. Raises ValueError if weights stay in high precision."""
        if self.weight.rowwise is None:
            raise ValueError(f"{self} keeps weights in high precision: there is no format to store one in")
        return self.weight.rowwise

    @property
    def activation(self) -> Cast | None:
        """The cast of the other operand of fprop; None keeps it in high precision (weight-only)."""
        return self.input.rowwise

    @property
    def required_kernel(self) -> str | None:
        """The name of the product kernel that must run; None: the fastest one."""
        auto = self.kernel_preference is KernelPreference.AUTO
        return None if auto else str(self.kernel_preference.value)

    @property
    def has_tensor_scales(self) -> bool:
        """Whether a cast takes a scale of the whole tensor from its amax in this step (NVFP4, float8 with current
        scaling); False for delayed scaling, whose scales come from earlier steps."""
        if self.delayed is not None:
            return False
        tensors = self.input, self.weight, self.grad
        casts = [cast for casts in tensors for cast in (casts.rowwise, casts.columnwise) if cast is not None]
        return any(cast.format.has_tensor_scale for cast in casts)

    @property
    def draws_forward(self) -> bool:
        """Whether a forward pass draws random numbers: to round inputs or weights stochastically."""
        casts = (self.input.rowwise, self.input.columnwise, self.weight.rowwise, self.weight.columnwise)
        return any(cast is not None and cast.rounding is Rounding.STOCHASTIC for cast in casts)

    def __reduce__(self) -> Any:
        """Unpickling calls the constructor, which enters ``key`` in the table of that process."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def __deepcopy__(self, memo: object) -> LinearRecipe:
        """Itself, since it is frozen: guards of compiled graphs compare a deep copy in every call."""
        return self

    def __str__(self) -> str:
        """``MXFP8BlockScaling (mxfp8_e4m3)``; if the formats differ, ``NAME (weight/input/grad)``."""
        casts = (self.weight.rowwise, self.input.rowwise, self.grad.rowwise)[: 3 if self.trains else 2]
        names = ["high precision" if c is None else c.label for c in casts]
        return f"{self.name} ({names[0] if len(set(names)) == 1 else '/'.join(names)})"


def _inference(weight: Cast, activation: Cast | None, preference: KernelPreference) -> LinearRecipe:
    casts = TensorCasts(activation), TensorCasts(weight, weight), TensorCasts()
    return LinearRecipe(*casts, kernel_preference=preference, name="inference", trains=False)


@lru_cache(maxsize=1024)
def _cached_inference(weight: Cast, activation: Cast | None, preference: KernelPreference) -> LinearRecipe:
    """One object for equal arguments, since every ``quantize()`` asks for one. Bounded: each seed is another recipe."""
    recipe = _inference(weight, activation, preference)
    object.__setattr__(recipe, "key", repr(recipe))
    return recipe


_by_key: dict[str, LinearRecipe] = {}


def recipe_by_key(key: str) -> LinearRecipe:
    """The first recipe for training that was made with this ``key``."""
    return _by_key[key]


HIGH_PRECISION = LinearRecipe(TensorCasts(), TensorCasts(), TensorCasts(), name="high precision")
"""No product quantized."""

# ---------------------------------------------------------------------------------------------- rows of words

_OF_A_CAST = ("", "_scaling", "_rounding")
_WORDS = ("kernel_preference", *(name + part for name in ("weight", "activation") for part in _OF_A_CAST))
_SEED = re.compile(r"-?[0-9]{1,40}")
_EPSILON = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?")


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The casts and the kernel preference of an inference recipe, as words."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for name, cast in (("weight", recipe.stored), ("activation", recipe.activation)):
        row[name] = cast.format.name if cast else None
        row[f"{name}_scaling"] = cast.scaling.value if cast else None
        row[f"{name}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{name}_seed"] = str(cast.seed)
        if cast and cast.amax_epsilon:
            row[f"{name}_amax_epsilon"] = repr(float(cast.amax_epsilon))
        if cast and cast.four_over_six is not None:
            row[f"{name}_four_over_six"] = cast.four_over_six.value
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names that this version does not know, TypeError for
    anything but a dict of strings."""
    if not isinstance(row, dict) or any(type(v) is not str and v is not None for v in row.values()):
        raise TypeError(f"a recipe is stored as a dict of strings, not as {row!r:.80}")
    missing = [name for name in _WORDS if name not in row]
    if missing:
        raise ValueError(f"the stored recipe lacks {', '.join(missing)}: {row!r:.80}")

    def cast(name: str) -> Cast | None:
        format, scaling, rounding = row[name], row[f"{name}_scaling"], row[f"{name}_rounding"]
        if format is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{name}_seed")
        if seed is not None and not _SEED.fullmatch(seed):
            raise ValueError(f"the seed of a stored recipe must be an integer, got {seed!r:.80}")
        epsilon = row.get(f"{name}_amax_epsilon") or "0"
        if not _EPSILON.fullmatch(epsilon):
            raise ValueError(f"the amax_epsilon of a stored recipe must be a number, got {epsilon!r:.80}")
        four = row.get(f"{name}_four_over_six")
        return Cast.of(format, scaling, rounding, None if seed is None else int(seed), float(epsilon), four)

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe.inference(weight, cast("activation"), row["kernel_preference"] or "auto")
