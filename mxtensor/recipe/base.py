"""What all recipe classes share: TransformerEngine's questions and repr, and the options that every recipe takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any, ClassVar, TypeVar

from ..core.arguments import check_fields, described, is_one_of
from ..core.names import find
from .linear_recipe import Delayed, KernelPreference, LinearRecipe, TensorCasts, recipe_by_key

Parsed = TypeVar("Parsed")


class Format(Enum):
    """TransformerEngine's pairs of elements: (of inputs and weights, of gradients)."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")
    E2M1 = ("e2m1", "e2m1")

    @property
    def fwd(self) -> str:
        """The element of inputs and weights."""
        return self.value[0]

    @property
    def bwd(self) -> str:
        """The element of gradients."""
        return self.value[1]


class KnownFields:
    """The base of recipes and configs: setting an attribute that no class declares raises AttributeError.

    A field of a dataclass, an annotated name and a class attribute are declared, also in a user's subclass. Names that
    begin with an underscore are free.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _declared(type(self)):  # type: ignore[arg-type]
            names = sorted(_declared(type(self)))  # type: ignore[arg-type]
            close = get_close_matches(name, names, 1, 0.75)
            hint = f"did you mean {close[0]!r}?" if close else f"its fields are {', '.join(names)}"
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; {hint}")
        object.__setattr__(self, name, value)


@cache
def _declared(kind: type) -> frozenset[str]:
    """The public names that instances of ``kind`` may set."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        names |= {*vars(base).get("__annotations__", ()), *vars(base).get("__slots__", ())}
        for name, value in vars(base).items():
            # an instance cannot replace a method, or a property without a setter
            fixed = callable(value) or isinstance(value, (staticmethod, classmethod))
            if not (value.fset is None if isinstance(value, property) else fixed):
                names.add(name)
    return frozenset(name for name in names if not name.startswith("_"))


@dataclass(repr=False)
class Recipe(KnownFields):
    """The base of all recipe classes: a dataclass whose fields may be edited at any time.

    A subclass defines ``_linear_recipe()``, which checks the fields and returns the casts that they describe. Raises
    ValueError for values that no product can use.
    """

    def __post_init__(self) -> None:
        self._current: LinearRecipe | None = self._interned()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field and update the casts at once: Dynamo can read a LinearRecipe but cannot build one."""
        super().__setattr__(name, value)
        if name != "_current" and "_current" in self.__dict__:
            try:
                self._current = self._interned()
            except (ValueError, TypeError):  # linear_recipe() raises it again, after all fields have been set
                self._current = None

    def linear_recipe(self) -> LinearRecipe:
        """The casts that the fields describe now. Raises ValueError for impossible fields."""
        return self._checked() if self._current is None else self._current

    def _checked(self) -> LinearRecipe:
        try:
            check_fields(self)
        except TypeError as error:
            try:
                self._linear_recipe()
            except Exception as own:
                if isinstance(own, ValueError) and str(own).startswith(type(self).__name__):
                    raise  # it names the choices
            raise ValueError(f"{error}") from None
        return self._linear_recipe()

    def _interned(self) -> LinearRecipe:
        """One LinearRecipe object for all recipes with equal casts."""
        return recipe_by_key(self._checked().key)

    def _linear_recipe(self) -> LinearRecipe:
        raise NotImplementedError(f"{type(self).__name__} must define _linear_recipe(); CustomRecipe takes any formats")

    _kinds: ClassVar[frozenset[str]] = frozenset()
    """The questions below that this class answers with yes."""

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is an NVFP4 recipe."""
        return "nvfp4" in cls._kinds

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is an MXFP8 recipe."""
        return "mxfp8" in cls._kinds

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from earlier steps."""
        return "delayed" in cls._kinds

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is float8 with one scale per tensor, computed from the tensor itself."""
        return "float8_current_scaling" in cls._kinds

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is float8 with one scale per tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is float8 with one float32 scale per 128 values or per 128x128 tile."""
        return "float8_block_scaling" in cls._kinds

    @classmethod
    def fp8(cls) -> bool:
        """Whether this is a float8 recipe without MX blocks."""
        return cls.float8_per_tensor_scaling() or cls.float8_block_scaling()

    @classmethod
    def block_scaling(cls) -> bool:
        """Whether blocks, and not whole tensors, share a scale."""
        return "block_scaling" in cls._kinds

    @classmethod
    def custom(cls) -> bool:
        """Whether this is a CustomRecipe."""
        return "custom" in cls._kinds

    _shown: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(field, label) of the fields that ``repr`` always shows."""

    def __repr__(self) -> str:
        """``recipe_type=...``, the fields that TransformerEngine shows, then the fields that are not the default."""
        shown = dict(type(self)._shown)
        items = [f"recipe_type={type(self).__name__}"]
        for name, label in shown.items():
            items.append(f"{label}={_text(getattr(self, name))}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                items.append(f"{field.name}={_text(value)}")
        return ", ".join(items)


def _text(value: Any) -> str:
    return value.name if isinstance(value, Format) else str(getattr(value, "value", value))


@dataclass(repr=False, kw_only=True)
class BackwardOptions(Recipe):
    """The options that every recipe takes: of the backward pass, of the kernel and of FSDP2."""

    high_precision_backward: bool = False
    """Compute dgrad and wgrad in the input's own dtype."""
    backward_override: str | None = None
    """TransformerEngine's option: ``"high_precision"`` is ``high_precision_backward=True``; with ``"dequantized"``
    dgrad and wgrad run in the input's own dtype too, and multiply the gradient by the values of fprop."""
    high_precision_wgrad: bool = False
    """Compute wgrad in the input's own dtype."""
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    single_weight_copy: bool = False
    """Cast the columnwise copy of a weight from the dequantized rowwise copy, so that FSDP2 can gather the codes of one
    copy. Square tiles have one copy without a second rounding."""
    quantized_gather: bool = True
    """FSDP2 gathers the codes of weights instead of their values when the result is bitwise identical."""

    def with_options(
        self, input: TensorCasts, weight: TensorCasts, grad: TensorCasts, delayed: Delayed | None = None
    ) -> LinearRecipe:
        """The LinearRecipe with these casts, without the casts of products that the options keep in high precision."""
        check_choice(
            self, "backward_override", (None, "high_precision", *(("dequantized",) if delayed is None else ()))
        )
        plain = self.high_precision_backward or self.backward_override is not None
        if plain or self.high_precision_wgrad:
            input, grad = TensorCasts(input.rowwise), TensorCasts(grad.rowwise)
        if plain:
            weight, grad = TensorCasts(weight.rowwise), TensorCasts()
        if self.backward_override == "dequantized":
            input, weight = (TensorCasts(casts.rowwise, from_rowwise=True) for casts in (input, weight))
        weight = one_weight_copy(weight) if self.single_weight_copy else weight
        preference = parse_field(self, "kernel_preference", KernelPreference.of)
        return LinearRecipe(input, weight, grad, delayed, preference, type(self).__name__, self.quantized_gather)


def one_weight_copy(weight: TensorCasts) -> TensorCasts:
    """The casts of a weight with ``from_rowwise`` set; unchanged if one of the two copies is in high precision."""
    both = weight.rowwise is not None and weight.columnwise is not None
    return replace(weight, from_rowwise=True) if both else weight


# ---------------------------------------------------------------------------------------------- checks of fields


def check_choice(recipe: Recipe, name: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless the field ``name`` has one of the ``allowed`` values."""
    value = getattr(recipe, name)
    if not is_one_of(value, allowed):
        names = ", ".join(str(a) for a in allowed)
        raise ValueError(f"{type(recipe).__name__}: {name} is {described(value)}; choose one of {names}")


def matching_choice(recipe: Recipe, name: str, allowed: Iterable[str]) -> str:
    """The one of ``allowed`` that equals the field ``name`` except for case, hyphens and underscores.

    Raises ValueError if there is none.
    """
    value, choices = getattr(recipe, name), tuple(allowed)
    found = find(value, choices) if isinstance(value, str) else None
    if found is None:
        check_choice(recipe, name, choices)
    return value if found is None else found


def parse_field(recipe: Recipe, name: str, parse: Callable[[Any], Parsed]) -> Parsed:
    """``parse`` of the field ``name``. Its TypeError or ValueError becomes a ValueError that names the field."""
    try:
        return parse(getattr(recipe, name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(recipe).__name__}: {name}: {error}") from None


def check_no_attention(recipe: Any) -> None:
    """Raise ValueError for ``fp8_dpa`` and ``fp8_mha``."""
    for name in ("fp8_dpa", "fp8_mha"):
        value = getattr(recipe, name)
        if value:
            raise ValueError(
                f"{type(recipe).__name__}: {name}={described(value)} is not available: attention's own products stay "
                "in high precision, as in NVIDIA's pre-training papers; leave it False"
            )
