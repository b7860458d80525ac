"""torchao's ``FqnToConfig``: a config for each module or parameter, by its fully qualified name.

mx.quantize_(model, mx.FqnToConfig({"re:.*experts": "mxfp4", "lm_head": None, "_default": "mxfp8"}))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.arguments import described
from ..recipe.known_fields import KnownFields

DEFAULT = "_default"


@dataclass
class FqnToConfig(KnownFields):
    """A config for each module or parameter, by its fully qualified name (torchao's fields).

    Keys are names of modules or parameters, ``re:`` with a regular expression that matches whole names, or
    ``_default``. Values are what ``quantize_`` takes; None leaves the weights unquantized. A weight takes the first of
    these keys that exists: the name of the parameter, the name of its module, the first expression that matches the
    parameter, the first that matches the module, ``_default``. ``_default`` applies to the layers that ``quantize_``
    would convert without a filter; the other keys apply to embeddings, heads and routers too. As in torchao, the name
    of a module is not a key of the modules inside it: ``"re:layers\\.0\\..*"`` is. Raises TypeError for keys that are
    not strings, ValueError for an invalid regular expression and for two different tables.
    """

    fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    """torchao's former name of the same table."""
    version: int = 1

    def __post_init__(self) -> None:
        self.table()

    def table(self) -> Mapping[str, Any]:
        """The table, checked: it may have changed since the config was made."""
        one, other = self.fqn_to_config, self.module_fqn_to_config
        for table in (one, other):
            if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
                raise TypeError(
                    f"{type(self).__name__} takes a dict of names to configs, with strings as keys, not "
                    f"{described(table)}"
                )
        if one and other and one != other:
            raise ValueError(
                f"{type(self).__name__}: fqn_to_config and module_fqn_to_config differ; pass only one of them"
            )
        for key in one or other:
            _compiled(key)
        return one or other

    def key_of(self, module_name: str, parameter_name: str) -> str | None:
        """The key for a parameter, by the full names of its module and its own; None if only ``_default`` matches."""
        table = self.table()
        for name in (parameter_name, module_name):
            if name in table and name != DEFAULT:
                return name
        for name in (parameter_name, module_name):
            for key in table:
                pattern = _compiled(key)
                if pattern is not None and pattern.fullmatch(name):
                    return key
        return None

    def matches(self, key: str, name: str) -> bool:
        """Whether ``key`` is ``name``, or an expression that matches it."""
        pattern = _compiled(key)
        return key == name if pattern is None else pattern.fullmatch(name) is not None


def _compiled(key: str) -> re.Pattern[str] | None:
    """The expression of a key that begins with ``re:``; None for another key."""
    if not key.startswith("re:"):
        return None
    try:
        return re.compile(key[3:])
    except re.error as error:
        raise ValueError(f"FqnToConfig: {key!r} is not a valid regular expression: {error}") from None
