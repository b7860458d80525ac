"""Which format and which scale rule each role of a product gets. Frozen rows, hashable, free of tensors.

``LinearRecipe`` is what a quantized weight carries, ``Roles`` what the three products of a training step are made by;
the recipes that users choose by name (``recipe.py``) are turned into ``Roles``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
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
class LinearRecipe:
    """What a quantized weight does in a product with a plain tensor."""

    weight: Cast
    activation: Cast | None = None
    """The cast applied to the other operand on the fly; None keeps it in high precision (weight-only)."""
    kernel_preference: KernelPreference = KernelPreference.AUTO


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
class Role:
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
    def of(cls, cast: Role | Cast | Format | str | torch.dtype | None) -> Role:
        """One cast for both copies; None for neither. Raises ValueError for a format it does not know."""
        if isinstance(cast, Role):
            return cast
        both = None if cast is None else Cast.of(cast)
        return cls(both, both)


@dataclass(frozen=True)
class Roles:
    """The casts of a linear layer's three products. Raises ValueError where only one factor of one is rotated, and for
    ``from_rowwise`` of anything but a weight.

    ======  ==================  =====================  =====================
    fprop   y = x w^T           input.rowwise          weight.rowwise
    dgrad   dx = g w            grad.rowwise           weight.columnwise
    wgrad   dw = g^T x          grad.columnwise        input.columnwise
    ======  ==================  =====================  =====================
    """

    input: Role
    weight: Role
    grad: Role
    delayed: Delayed | None = None
    """Scales from earlier steps instead of the tensor's own amax; for per-tensor formats."""
    kernel_preference: KernelPreference = KernelPreference.AUTO
    name: str = "CustomRecipe"
    """What messages call it."""
    gather: bool = True
    """Whether sharded training gathers the codes of a weight instead of its values, where that changes no bit."""
    key: str = field(init=False, compare=False, repr=False, default="")
    """Every field as one string: what a traced graph holds in the place of this object (``roles_by_key``)."""

    def __post_init__(self) -> None:
        x, g = (role.signs if role.columnwise is not None else None for role in (self.input, self.grad))
        if x != g or self.weight.signs is not None:
            raise ValueError(
                f"Roles: only wgrad's two factors can be rotated, and only by the same signs; got input {x}, grad {g}, "
                f"weight {self.weight.signs}"
            )
        if self.input.from_rowwise or self.grad.from_rowwise:
            raise ValueError(
                "Roles: only a weight's columnwise copy can be cast from the rowwise one; got from_rowwise of input "
                f"{self.input.from_rowwise}, of grad {self.grad.from_rowwise}"
            )
        object.__setattr__(self, "key", repr(self))
        _by_key.setdefault(self.key, self)

    def __reduce__(self) -> Any:
        """Made anew where it is unpickled, so that ``roles_by_key`` knows it there."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __str__(self) -> str:
        """``MXFP8BlockScaling (mxfp8_e4m3)``, the formats as weight/input/grad where they differ."""
        casts = (self.weight.rowwise, self.input.rowwise, self.grad.rowwise)
        names = ["high precision" if c is None else c.format.name for c in casts]
        return f"{self.name} ({names[0] if len(set(names)) == 1 else '/'.join(names)})"


_by_key: dict[str, Roles] = {}


def roles_by_key(key: str) -> Roles:
    """The first Roles made whose ``key`` this is."""
    return _by_key[key]


HIGH_PRECISION = Roles(Role(), Role(), Role(), name="high precision")
"""No product quantized."""


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The recipe as words, for files: names outlive classes."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for role, cast in (("weight", recipe.weight), ("activation", recipe.activation)):
        row[role] = cast.format.name if cast else None
        row[f"{role}_scaling"] = cast.scaling.value if cast else None
        row[f"{role}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{role}_seed"] = str(cast.seed)
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names this version does not know."""

    def cast(role: str) -> Cast | None:
        name, scaling, rounding = row[role], row[f"{role}_scaling"], row[f"{role}_rounding"]
        if name is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{role}_seed")
        return Cast.of(name, scaling, rounding, None if seed is None else int(seed))

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe(weight, cast("activation"), KernelPreference.of(row["kernel_preference"] or "auto"))
