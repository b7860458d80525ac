"""Which format and which scale rule each role of a product gets. Frozen rows, hashable, free of tensors.

``LinearRecipe`` is what a quantized weight carries, ``LinearRecipe`` what the three products of a training step are made by;
the recipes that users choose by name (``recipe.py``) are turned into ``LinearRecipe``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.formats import Format, member


class KernelPreference(Enum):
    """Which product kernel a tensor asks for (names and values as torchao has them)."""

    AUTO = "auto"
    """the fastest kernel that accepts the product"""
    EMULATED = "emulated"
    """the definition: decode to float32, multiply, round once"""

    @classmethod
    def of(cls, value: KernelPreference | str) -> KernelPreference:
        """The member named by ``value``; torchao's own enum members are accepted by their value."""
        return member(cls, "kernel_preference", value)


@dataclass(frozen=True)
class Delayed:
    """Scales from the amax of earlier steps (TransformerEngine's delayed scaling)."""

    margin: int = 0
    """The amax counts 2^margin times as large."""
    history_len: int = 1024
    """Steps remembered."""
    amax_of: str | Callable[[Tensor], Tensor] = "max"
    """``max`` or ``most_recent`` of the history, or a function of it: (history_len,) float32, newest first -> ()."""
    scale_of: Callable[..., Tensor] | None = None
    """(amax, scale, fp8_max, recipe) -> the factor that takes amax to fp8_max; None: fp8_max / amax / 2^margin."""
    reduce: bool = True
    """Whether a process group, where one is given, shares the largest amax."""


@dataclass(frozen=True)
class TensorCasts:
    """How one tensor of a linear layer is cast for each of the two products that it enters.

    ``rowwise`` blocks its last dimension, ``columnwise`` the one before it; None leaves that factor in high precision.
    """

    rowwise: Cast | None = None
    columnwise: Cast | None = None
    signs: int | None = None
    """With a number, the columnwise copy is rotated before it is cast: along the contraction, each 16 values times
    diag(signs) * H16 / 4, the signs being the 16 bits. Both factors of a product must be."""
    from_rowwise: bool = False
    """Of a weight: the columnwise copy is cast from the rounded values of the rowwise one, not from high precision, so
    that the rowwise copy is all of it that a layer needs."""

    @property
    def one_copy(self) -> bool:
        """Whether both products can be made of the rowwise copy alone, to the bit: a square block serves both."""
        if self.rowwise is None or self.columnwise is None:
            return False
        return self.from_rowwise or (self.rowwise == self.columnwise and self.rowwise.format.square)

    @classmethod
    def of(cls, cast: TensorCasts | Cast | Format | str | torch.dtype | None) -> TensorCasts:
        """One cast for both copies; None for neither. Raises ValueError for a format it does not know."""
        if isinstance(cast, TensorCasts):
            return cast
        both = None if cast is None else Cast.of(cast)
        return cls(both, both)


@dataclass(frozen=True)
class LinearRecipe:
    """How the tensors of one linear layer are cast: the three products of training, or fprop alone for inference.

    ======  ==================  =====================  =====================
    fprop   y = x w^T           input.rowwise          weight.rowwise
    dgrad   dx = g w            grad.rowwise           weight.columnwise
    wgrad   dw = g^T x          grad.columnwise        input.columnwise
    ======  ==================  =====================  =====================

    Frozen and hashable. Recipes that users edit (``mx.recipe``) and torchao's configs make one of these. Raises
    ValueError where only one operand of a product is rotated, and for ``from_rowwise`` of anything but a weight.
    """

    input: TensorCasts
    weight: TensorCasts
    grad: TensorCasts = TensorCasts()
    delayed: Delayed | None = None
    """Scales from earlier steps instead of the tensor's own amax; for formats with one scale a tensor."""
    kernel_preference: KernelPreference = KernelPreference.AUTO
    name: str = "CustomRecipe"
    """The name in messages."""
    quantized_gather: bool = True
    """Whether FSDP2 gathers the codes of a weight instead of its values when the result is bitwise identical."""
    trains: bool = True
    """False for inference: the weight is stored quantized and frozen, and there is no gradient to cast."""
    key: str = field(init=False, compare=False, repr=False, default="")
    """Every field as one string. A traced graph holds it in place of this object (``recipe_by_key``)."""

    def __post_init__(self) -> None:
        x, g = (casts.signs if casts.columnwise is not None else None for casts in (self.input, self.grad))
        if x != g or self.weight.signs is not None:
            raise ValueError(
                "LinearRecipe: only the two operands of wgrad can be rotated, and both by the same signs; got input "
                f"{x}, grad {g}, weight {self.weight.signs}"
            )
        if self.input.from_rowwise or self.grad.from_rowwise:
            raise ValueError(
                "LinearRecipe: only the columnwise copy of a weight can be cast from the rowwise copy; got from_rowwise "
                f"of input {self.input.from_rowwise}, of grad {self.grad.from_rowwise}"
            )
        object.__setattr__(self, "key", repr(self))
        _by_key.setdefault(self.key, self)

    @staticmethod
    def inference(
        weight: Cast | Format | str | torch.dtype,
        activation: Cast | Format | str | torch.dtype | None = None,
        kernel_preference: KernelPreference | str = KernelPreference.AUTO,
    ) -> LinearRecipe:
        """The recipe of a stored, frozen weight. ``activation``: the cast of the other operand; None: weight-only."""
        cast = None if activation is None else Cast.of(activation)
        return _inference(Cast.of(weight), cast, KernelPreference.of(kernel_preference))

    @property
    def stored(self) -> Cast:
        """The cast of a weight that is stored quantized. Raises ValueError where weights stay in high precision."""
        if self.weight.rowwise is None:
            raise ValueError(f"{self} keeps weights in high precision: there is no format to store one in")
        return self.weight.rowwise

    @property
    def activation(self) -> Cast | None:
        """The cast of the other operand of fprop; None keeps it in high precision (weight-only)."""
        return self.input.rowwise

    def __reduce__(self) -> Any:
        """Built again where it is unpickled, so that ``recipe_by_key`` finds it there."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __str__(self) -> str:
        """``MXFP8BlockScaling (mxfp8_e4m3)``; the formats as weight/input/grad where they differ."""
        casts = (self.weight.rowwise, self.input.rowwise, self.grad.rowwise)[: 3 if self.trains else 2]
        names = ["high precision" if c is None else c.format.name for c in casts]
        return f"{self.name} ({names[0] if len(set(names)) == 1 else '/'.join(names)})"


@lru_cache(maxsize=1024)
def _inference(weight: Cast, activation: Cast | None, preference: KernelPreference) -> LinearRecipe:
    casts = TensorCasts(activation), TensorCasts(weight, weight)
    return LinearRecipe(*casts, kernel_preference=preference, name="inference", trains=False)


_by_key: dict[str, LinearRecipe] = {}


def recipe_by_key(key: str) -> LinearRecipe:
    """The first LinearRecipe made with this ``key``."""
    return _by_key[key]


HIGH_PRECISION = LinearRecipe(TensorCasts(), TensorCasts(), TensorCasts(), name="high precision")
"""No product quantized."""


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """An inference recipe as words, for files: names outlive classes."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for name, cast in (("weight", recipe.stored), ("activation", recipe.activation)):
        row[name] = cast.format.name if cast else None
        row[f"{name}_scaling"] = cast.scaling.value if cast else None
        row[f"{name}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{name}_seed"] = str(cast.seed)
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names this version does not know."""

    def cast(name: str) -> Cast | None:
        format, scaling, rounding = row[name], row[f"{name}_scaling"], row[f"{name}_rounding"]
        if format is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{name}_seed")
        return Cast.of(format, scaling, rounding, None if seed is None else int(seed))

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe.inference(weight, cast("activation"), row["kernel_preference"] or "auto")
