"""The layout of this package: bytes of codes and scales in safetensors, the format of each tensor in the metadata.

``X.weight`` is stored as ``X.weight_rowwise_data``, ``X.weight_rowwise_scale`` and, for NVFP4,
``X.weight_rowwise_global_scale``; a columnwise copy likewise. The metadata ``mxtensor.X.weight`` holds the recipe, the
dtype, the shape and the strides as JSON. Every format and orientation is exact, scales and attributes of the recipe
included.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.arguments import described
from ..tensor.mxtensor import MXTensor, rebuild, rebuild_with_attributes
from .layout import Layout, Written, with_others
from .source import Checkpoint, Entry

PREFIX = "mxtensor."
_TENSORS = ("data", "scale", "global_scale")
_SIDES = ("_rowwise", "_columnwise")


def _pickled(t: MXTensor) -> Any:
    """The arguments of ``rebuild``: bytes and words."""
    function, arguments = t.detach().__reduce_ex__(2)
    return arguments[0] if function is rebuild_with_attributes else arguments


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    components = _pickled(t)[0]
    return {
        f"{name}{side}_{kind}": tensor
        for side, tensors in components.items()
        for kind, tensor in zip(_TENSORS, tensors, strict=False)
    }


def _metadata(name: str, t: MXTensor) -> dict[str, str]:
    components, row, (dtype, size, stride, _), _ = _pickled(t)
    fields = {"copies": {side: len(tensors) for side, tensors in components.items()}, "recipe": row, "dtype": dtype,
              "shape": list(size), "stride": list(stride)}  # fmt: skip
    return {PREFIX + name: json.dumps(fields)}


def entry_of(name: str, text: str) -> Entry:
    """The entry of a tensor whose metadata is ``text``. Raises ValueError for metadata that is not valid."""
    try:
        fields = json.loads(text)
        copies, row = fields["copies"], fields["recipe"]
        outer = fields["dtype"], tuple(fields["shape"]), tuple(fields["stride"]), False
        if not isinstance(copies, dict) or not copies or not set(copies) <= set(_SIDES):
            raise ValueError(f"copies must be of {', '.join(_SIDES)}, got {described(copies)}")
        sides = {side: _TENSORS[: int(count)] for side, count in copies.items()}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the metadata of tensor {name} is not valid: {error!r:.200}") from error
    sources = tuple(f"{name}{side}_{kind}" for side, kinds in sides.items() for kind in kinds)
    return Entry(sources, _builder(sides, row, outer))


def _builder(sides: dict[str, tuple[str, ...]], row: Any, outer: tuple[Any, ...]) -> Callable[..., Tensor]:
    def build(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return rebuild({side: tuple(next(rest) for _ in kinds) for side, kinds in sides.items()}, row, outer, False)

    return build


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for key, text in checkpoint.metadata.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            entries[name] = entry = entry_of(name, text)
            lacks = [source for source in entry.sources if source not in checkpoint.tensors]
            if lacks:
                raise ValueError(f"{checkpoint.path}, tensor {name}: the checkpoint lacks {', '.join(lacks)}")
    return with_others(checkpoint, entries)


def _config(written: Written) -> dict[str, Any]:
    if not written.weights:
        return {}
    return {"config.json": {"quantization_config": {"quant_method": "mxtensor", "skip": written.others}}}


NATIVE = Layout(
    "native",
    "this package",
    detect=lambda checkpoint: any(key.startswith(PREFIX) for key in checkpoint.metadata),
    read=_read,
    write=_write,
    config=_config,
    metadata=_metadata,
    formats="all, in every orientation",
)
