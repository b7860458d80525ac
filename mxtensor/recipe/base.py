"""What all recipes share: questions about their kind, their repr, the options of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from ..recipe.linear_recipe import KernelPreference
from .linear_recipe import Delayed, LinearRecipe, TensorCasts, recipe_by_key

Parsed = TypeVar("Parsed")


class Format(Enum):
    """(element of inputs and weights, element of gradients)."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")
    E2M1 = ("e2m1", "e2m1")

    @property
    def fwd(self) -> str:
        """The element of what the forward pass casts."""
        return self.value[0]

    @property
    def bwd(self) -> str:
        """The element of gradients."""
        return self.value[1]


def choice(recipe: Recipe, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        names = ", ".join(str(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}: {name} is {value!r}; choose one of {names}")


def parsed(recipe: Recipe, name: str, parse: Callable[[Any], Parsed]) -> Parsed:
    """What ``parse`` makes of a field; its complaint, with the name of the field before it, becomes a ValueError."""
    try:
        return parse(getattr(recipe, name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(recipe).__name__}: {name}: {error}") from None


@dataclass(repr=False)
class Recipe:
    """What all recipes share: questions about their kind, and the options of the backward pass.

    Raises ValueError for values that no product can have.
    """

    def __post_init__(self) -> None:
        self._now: LinearRecipe | None = self._one_of_its_kind()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field. The roles follow at once, for Dynamo can read them but not make them."""
        object.__setattr__(self, name, value)
        if name != "_now" and "_now" in self.__dict__:
            try:
                self._now = self._one_of_its_kind()
            except ValueError:  # said by roles(), when all fields have been set
                self._now = None

    def linear_recipe(self) -> LinearRecipe:
        """The casts that this recipe stands for now. Raises ValueError for impossible fields."""
        return self._linear_recipe() if self._now is None else self._now

    def _one_of_its_kind(self) -> LinearRecipe:
        """The roles as one object for all recipes that say the same."""
        return recipe_by_key(self._linear_recipe().key)

    def _linear_recipe(self) -> LinearRecipe:
        raise NotImplementedError(f"{type(self).__name__} must define _roles(); CustomRecipe takes any formats")

    _kinds: ClassVar[frozenset[str]] = frozenset()
    """Which of the questions below have the answer yes."""

    def nvfp4(self) -> bool:
        """Whether this is an NVFP4 recipe."""
        return "nvfp4" in self._kinds

    def mxfp8(self) -> bool:
        """Whether this is an MXFP8 recipe."""
        return "mxfp8" in self._kinds

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return "delayed" in self._kinds

    def float8_current_scaling(self) -> bool:
        """Whether this is float8 with one scale a tensor, from the tensor itself."""
        return "float8_current_scaling" in self._kinds

    def float8_per_tensor_scaling(self) -> bool:
        """Whether this is float8 with one scale a tensor."""
        return self.delayed() or self.float8_current_scaling()

    def float8_block_scaling(self) -> bool:
        """Whether this is float8 with float32 scales of blocks of 128."""
        return "float8_block_scaling" in self._kinds

    def fp8(self) -> bool:
        """Whether this is a float8 recipe, MX not counted."""
        return self.float8_per_tensor_scaling() or self.float8_block_scaling()

    def block_scaling(self) -> bool:
        """Whether blocks share scales, rather than whole tensors."""
        return "block_scaling" in self._kinds

    def custom(self) -> bool:
        """Whether this is a CustomRecipe."""
        return "custom" in self._kinds

    _shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(field, label) of what ``repr`` always shows."""

    def __repr__(self) -> str:
        """``recipe_type=..., `` then the fields that TransformerEngine shows, then those that are not the default."""
        shown = dict(type(self)._shown)
        components = [f"recipe_type={type(self).__name__}"]
        for name, label in shown.items():
            components.append(f"{label}={_text(getattr(self, name))}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                components.append(f"{field.name}={_text(value)}")
        return ", ".join(components)


def _text(value: Any) -> str:
    return value.name if isinstance(value, Format) else str(getattr(value, "value", value))


def no_attention(recipe: Any) -> None:
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name):
            raise ValueError(
                f"{type(recipe).__name__}: {name}=True is not available: attention's own products stay in high "
                "precision, as NVIDIA's pre-training papers keep them; leave it False"
            )


@dataclass(repr=False, kw_only=True)
class BackwardOptions(Recipe):
    """The options of the backward pass, and of the kernel, that every recipe takes."""

    high_precision_backward: bool = False
    """dgrad and wgrad in the input's own dtype."""
    high_precision_wgrad: bool = False
    """wgrad in the input's own dtype."""
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    single_weight_copy: bool = False
    """dgrad's copy of a weight is cast from the rounded values of fprop's, not from high precision: what FSDP2 needs to
    gather one copy in codes. Square tiles are one copy anyway, without a second rounding."""
    quantized_gather: bool = True
    """FSDP2 gathers the codes of weights instead of their values, where that changes no bit."""

    def finished(
        self, input: TensorCasts, weight: TensorCasts, grad: TensorCasts, delayed: Delayed | None = None
    ) -> LinearRecipe:
        """Roles of these casts without those of the products that are to stay in high precision."""
        if self.high_precision_backward or self.high_precision_wgrad:
            input, grad = TensorCasts(input.rowwise), TensorCasts(grad.rowwise)
        if self.high_precision_backward:
            weight, grad = TensorCasts(weight.rowwise), TensorCasts()
        weight = one_weight_copy(weight) if self.single_weight_copy else weight
        preference = parsed(self, "kernel_preference", KernelPreference.of)
        return LinearRecipe(input, weight, grad, delayed, preference, type(self).__name__, self.quantized_gather)


def one_weight_copy(weight: TensorCasts) -> TensorCasts:
    """The role of a weight with dgrad's copy made of fprop's; as it was where one of the two is in high precision."""
    both = weight.rowwise is not None and weight.columnwise is not None
    return replace(weight, from_rowwise=True) if both else weight
