"""torchao's own config objects, by the names of their classes and fields; torchao is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

KERNELS = ("torch", "mslk", "triton")
"""torchao's kernel preferences that name a library: here ``auto`` finds the kernel."""


def from_torchao(config: Any, kinds: Mapping[str, type]) -> Any:
    """The config of ``kinds`` that has the name and the fields of ``config``; None if no class has its name.

    Raises ValueError for a field that is not available here, unless it has its default.
    """
    kind = next((kinds[base.__name__] for base in type(config).__mro__ if base.__name__ in kinds), None)
    if kind is None:
        return None
    ours = {field.name for field in fields(kind)}
    for field in fields(config) if is_dataclass(config) else ():
        value = getattr(config, field.name, field.default)
        if field.name not in ours and field.default is not MISSING and value != field.default:
            raise ValueError(
                f"{kind.__name__}: {field.name}={value!r} is not available; leave it at its default, {field.default!r}"
            )
    given = {name: getattr(config, name) for name in ours if hasattr(config, name)}
    if getattr(given.get("kernel_preference"), "value", None) in KERNELS:
        given["kernel_preference"] = "auto"
    return kind(**given)
