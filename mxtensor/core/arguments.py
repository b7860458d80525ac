"""Checks of arguments from users: the error shows the given value, and what to pass instead.

``check("quantize", "seed", seed, optional(INTEGER))``, or ``@checked()`` for all arguments of a constructor: the
annotation of an argument says its Kind (KINDS), and ``checked(num_gemms=COUNT)`` says more. Calls of a layer are not
decorated: they are the hot path.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .compat_hooks import level_outside
from .names import dtype_name

Function = TypeVar("Function", bound=Callable[..., Any])

PACKAGE = __name__.partition(".")[0]
LARGEST = 2**31 - 1
"""The largest size of a dimension: kernels count in 32-bit integers."""
LONGEST = 60
"""Characters of a value that a message shows."""


def _any_value(value: Any) -> bool:
    return True


@dataclass(frozen=True)
class Kind:
    """What an argument must be."""

    words: str
    """What to pass, as the end of "pass ..."."""
    accepts: Callable[[Any], bool]
    """Whether the type is right; otherwise TypeError."""
    fits: Callable[[Any], bool] = _any_value
    """Whether a value of the right type is right; otherwise ValueError."""


def instance(kind: type | tuple[type, ...], words: str, fits: Callable[[Any], bool] = _any_value) -> Kind:
    """An instance of a class."""
    return Kind(words, lambda value: isinstance(value, kind), fits)


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(
        f"{kind.words}, or None",
        lambda value: value is None or kind.accepts(value),
        lambda value: value is None or kind.fits(value),
    )


def _is_integer(value: Any) -> bool:
    # a number of a traced graph is a SymInt
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def is_integers(values: Iterable[Any]) -> bool:
    """Whether all are integers."""
    return all(map(_is_integer, values))


def is_dense_float(t: Tensor) -> bool:
    """Whether a tensor is floating-point and not sparse."""
    return t.is_floating_point() and t.layout is torch.strided


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (
        isinstance(value, (float, torch.SymFloat, numbers.Real)) and not isinstance(value, bool)
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool_" or (type(value) is int and value in (0, 1))


def _is_positive(value: Any) -> bool:
    return bool(0 < value < (2**63 if _is_integer(value) else 3.4e38))  # torch takes integers of 64 bits


def _names_a_device(value: Any) -> bool:
    if isinstance(value, int) and not torch.accelerator.is_available():
        return False
    try:
        torch.device(value)
    except (RuntimeError, ValueError, TypeError, OverflowError):
        return False
    return True


TENSOR = instance(Tensor, "a torch.Tensor")
DENSE = Kind("a dense torch.Tensor", lambda value: isinstance(value, Tensor) and value.layout is torch.strided)
MODULE = instance(nn.Module, "a torch.nn.Module")
TEXT = instance(str, "a string")
FLAG = Kind("True or False", _is_flag)
INTEGER = Kind("an integer of 64 bits", _is_integer, lambda value: -(2**63) <= value < 2**63)
SIZE = Kind(f"an integer from 0 to {LARGEST}", _is_integer, lambda value: 0 <= value <= LARGEST)
COUNT = Kind(f"an integer from 1 to {LARGEST}", _is_integer, lambda value: 1 <= value <= LARGEST)
NUMBER = Kind("a finite number", _is_number, lambda value: math.isfinite(value))
POSITIVE = Kind("a number above 0 that float32 can hold", _is_number, _is_positive)
SHARE = Kind("a number from 0 to 1", _is_number, lambda value: 0 <= value <= 1)
FLOAT_DTYPE = Kind(
    "one of torch.float32, torch.bfloat16, torch.float16, torch.float64",
    lambda value: isinstance(value, torch.dtype),
    lambda value: value in (torch.float32, torch.bfloat16, torch.float16, torch.float64),
)
DEVICE = Kind(
    "a torch.device or its name, such as 'cpu' or 'cuda:0'",
    lambda value: isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)),
    _names_a_device,
)
FUNCTION = Kind("a function", lambda value: callable(value) and not isinstance(value, (type, nn.Module)))
SHAPE = Kind(
    f"a tuple of integers from 0 to {LARGEST}",
    lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and is_integers(value),
    lambda value: all(0 <= n <= LARGEST for n in value),
)

KINDS = {
    "Tensor": TENSOR, "torch.Tensor": TENSOR, "nn.Module": MODULE, "str": TEXT, "bool": FLAG, "int": INTEGER,
    "float": NUMBER, "torch.dtype": FLOAT_DTYPE, "torch.device | str": DEVICE, "Init": FUNCTION,
    "Callable[..., Any]": FUNCTION,
}  # fmt: skip
"""Annotation -> the Kind of such an argument; " | None" makes it optional, and other annotations are not checked."""


# ---------------------------------------------------------------------------------------------- the check


def _article(word: str) -> str:
    return "an" if (word[0] in "AEIOFHLMNRSX" and word[:2].isupper()) or word[0] in "AEIO" else "a"


def described(value: Any) -> str:
    """``value`` in a few words: a number or string itself, the shape and dtype of a tensor, the class of the rest."""
    if isinstance(value, Tensor):
        where = f" on {value.device}" if value.device.type != "cpu" else ""
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        plain = type(value) in (Tensor, nn.Parameter)
        kind = f"a {layout}tensor" if plain else f"{_article(type(value).__name__)} {type(value).__name__}"
        format = "" if plain or not hasattr(value, "format") else f" in {value.format}"
        return f"{kind} {tuple(value.shape)} of {dtype_name(value.dtype)}{format}{where}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (type(None), bool, str, bytes, numbers.Number, torch.dtype, torch.device, tuple, list, dict)):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({type(value).__name__})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__module__}.{type(value).__name__} {value.shape} of {value.dtype}"
    name = getattr(value, "__name__", None)
    return f"the {type(value).__name__} {name}" if isinstance(name, str) else f"a value of type {type(value).__name__}"


def warn(message: str) -> None:
    """A UserWarning at the line of the user that the call came from: the first one outside of this package."""
    warnings.warn(message, UserWarning, stacklevel=1 + level_outside(PACKAGE))


def quantized_by(t: Any) -> str:
    """The library that has quantized a tensor, and the class: it has its own ``dequantize``. Empty for others."""
    if not isinstance(t, Tensor):
        return ""
    home = next(base for base in type(t).__mro__ if "dequantize" in vars(base) or base is Tensor)
    package = home.__module__.partition(".")[0]
    return "" if package in ("torch", __name__.partition(".")[0]) else f"{package} ({type(t).__name__})"


def check_plain(what: str, t: Tensor) -> None:
    """Raise TypeError for a tensor that another library has quantized."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace this, and compiles no such tensor
        return
    if library := quantized_by(t):
        raise TypeError(
            f"{what} is quantized already, by {library}; pass the original values, or those of its dequantize()"
        )


def check(owner: str, name: str, value: Any, kind: Kind) -> None:
    """Raise TypeError for an argument of another type, ValueError for another value. ``owner`` names the caller."""
    if not kind.accepts(value):
        raise TypeError(f"{owner}: {name} is {described(value)}; pass {kind.words}")
    if not kind.fits(value):
        raise ValueError(f"{owner}: {name} is {described(value)}; it must be {kind.words}")


def _kind_of(annotation: str) -> Kind | None:
    """The Kind of an annotation; None if it is not in KINDS."""
    kind = KINDS.get(annotation.removesuffix(" | None"))
    return optional(kind) if kind is not None and annotation.endswith(" | None") else kind


@cache
def _kinds_of(function: Callable[..., Any]) -> tuple[Signature, dict[str, Kind]]:
    """The signature of a function, and the Kind of each argument whose annotation is in KINDS."""
    shape, kinds = signature(function), {}
    for name, parameter in shape.parameters.items():
        kind = _kind_of(str(parameter.annotation))
        if kind is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kinds[name] = kind
    return shape, kinds


def check_fields(instance: Any) -> None:
    """``check`` of each field of a dataclass instance whose annotation is in KINDS."""
    for field in fields(instance):
        kind = _kind_of(str(field.type))
        if kind is not None:
            check(type(instance).__name__, field.name, getattr(instance, field.name), kind)


def is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Whether ``value`` is one of the choices; a tensor or an array, whose ``==`` is not a bool, is not."""
    return any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices)


def checked(**special: Kind) -> Callable[[Function], Function]:
    """Check all arguments of the decorated function before it runs; ``special``: Kinds that no annotation says."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                shape, kinds = _kinds_of(function)
                try:
                    given = shape.bind(*args, **kwargs).arguments
                except TypeError:  # missing or unknown arguments: Python's own error names the function too
                    return function(*args, **kwargs)
                owner = function.__qualname__.removesuffix(".__init__")
                for name, value in given.items():
                    kind = special.get(name) or kinds.get(name)
                    if kind is not None:
                        check(owner, name, value, kind)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
