"""KnownFields: classes whose fields the user edits, and which refuse attributes that are not fields."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any


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
        names |= {name for name, value in vars(base).items() if not _is_code(value)}
    return frozenset(name for name in names if not name.startswith("_"))


def _is_code(value: Any) -> bool:
    """Whether a class attribute is a method or a property without a setter: an instance cannot replace it."""
    if isinstance(value, property):
        return value.fset is None
    return callable(value) or isinstance(value, (staticmethod, classmethod))
