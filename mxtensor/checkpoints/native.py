"""The layout of this package: bytes of codes and scales in safetensors, the format of each tensor in the metadata.

``X.weight`` is stored as ``X.weight_rowwise_data``, ``X.weight_rowwise_scale`` and, for NVFP4,
``X.weight_rowwise_global_scale``; a columnwise copy likewise. The metadata ``mxtensor.X.weight`` holds the recipe, the
dtype, the shape and the strides as JSON. Every format and orientation is exact, scales and attributes of the recipe
included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from operator import eq
from typing import Any

from torch import Tensor

from ..core.arguments import described
from ..core.shapes import contiguous_stride
from ..recipe.linear_recipe import LinearRecipe, recipe_from_row
from ..tensor.mxtensor import MXTensor
from ..tensor.pickles import rebuild, rebuild_with_attributes
from .layout import MERGES, SPLITS, Layout, format_of_inputs
from .names import names_in_files
from .reading import Checkpoint, Entry

PREFIX = "mxtensor."
_TENSORS = ("data", "scale", "global_scale")
_SIDES = ("_rowwise", "_columnwise")
_ENDS = tuple(f"{side}_data" for side in _SIDES)


def _pickled(t: MXTensor) -> Any:
    """The arguments of ``rebuild``: bytes and words."""
    function, arguments = t.detach().__reduce_ex__(2)
    return arguments[0] if function is rebuild_with_attributes else arguments


def stored_tensors(name: str, t: MXTensor) -> dict[str, Tensor]:
    """The tensors that are stored for ``t``: bytes of codes, scales."""
    components = _pickled(t)[0]
    return {
        f"{name}{side}_{kind}": tensor
        for side, tensors in components.items()
        for kind, tensor in zip(_TENSORS, tensors, strict=False)
    }


def header(name: str, t: MXTensor) -> dict[str, str]:
    """What the metadata says of ``t``."""
    components, row, (dtype, size, stride, _), _ = _pickled(t)
    fields = {"copies": {side: len(tensors) for side, tensors in components.items()}, "recipe": row, "dtype": dtype,
              "shape": list(size), "stride": list(stride)}  # fmt: skip
    return {PREFIX + name: json.dumps(fields)}


def entry_of(name: str, text: str, part: tuple[int, ...] | None = None) -> Entry:
    """The entry of a tensor whose metadata is ``text``; with ``part``, of a part of that shape of each of its tensors.

    Raises ValueError for metadata that is not valid.
    """
    sides, row, (dtype, size, stride, grad) = _fields(name, text)
    if part is not None:
        size, stride = part, contiguous_stride(part)
    sources = tuple(f"{name}{side}_{kind}" for side, kinds in sides.items() for kind in kinds)
    return Entry(sources, partial(_built, sides, row, (dtype, size, stride, grad)))


def recipe_of_entry(name: str, text: str) -> LinearRecipe:
    """The recipe of a tensor whose metadata is ``text``. Raises ValueError for metadata that is not valid."""
    _, row, _ = _fields(name, text)
    return recipe_from_row(row)


def why_not_sharded(name: str, text: str, shards: Mapping[int, int]) -> str | None:
    """Why a rank cannot read the tensor in equal parts, as ``shards`` says, dimension -> number of parts; None if it
    can. A reader slices codes and scales as it would slice the values.
    """
    sides, row, (_, size, *_) = _fields(name, text)
    format = recipe_from_row(row).stored.format
    for dim, count in shards.items():
        if size[dim] % count:
            return f"{size[dim]} values do not divide into {count} equal parts"
        if dim >= len(size) - 2 and "_columnwise" in sides:
            return "a columnwise copy is stored transposed"
        reason = format.why_not_split(dim - len(size), size[dim] // count, scales_differ=True)
        if reason is not None:
            return reason
    return None


def _fields(name: str, text: str) -> tuple[dict[str, tuple[str, ...]], Any, tuple[Any, ...]]:
    """Copy -> kinds of its tensors, the row of the recipe, and the outer tensor, (dtype, size, strides, False)."""
    try:
        fields = json.loads(text)
        copies, row = fields["copies"], fields["recipe"]
        outer = fields["dtype"], tuple(fields["shape"]), tuple(fields["stride"]), False
        if not isinstance(copies, dict) or not copies or not set(copies) <= set(_SIDES):
            raise ValueError(f"copies must be of {', '.join(_SIDES)}, got {described(copies)}")
        if any(type(count) is not int or count not in (2, 3) for count in copies.values()):
            raise ValueError(f"each copy has 2 or 3 tensors, got {described(copies)}")
        return {side: _TENSORS[:count] for side, count in copies.items()}, row, outer
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the metadata of tensor {name} is not valid: {error!r:.200}") from error


def _built(sides: dict[str, tuple[str, ...]], row: Any, outer: tuple[Any, ...], *tensors: Tensor) -> MXTensor:
    rest = iter(tensors)
    return rebuild({side: tuple(next(rest) for _ in kinds) for side, kinds in sides.items()}, row, outer, False)  # type: ignore[no-any-return]


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    ours = {key.removeprefix(PREFIX): text for key, text in checkpoint.metadata.items() if key.startswith(PREFIX)}
    found = {name: entry_of(name, text) for name, text in ours.items()}
    rest = {name for name, entry in found.items() if entry.sources[0] not in checkpoint.tensors}
    stored = [name.removesuffix(end) for name in checkpoint.tensors for end in _ENDS if name.endswith(end)]
    renamed = names_in_files(checkpoint.config, rest, stored)  # after the metadata was made
    for name, entry in found.items():
        if name in rest:
            new = renamed.get(name) or closest(name, stored) or name
            sources = tuple(new + source.removeprefix(name) for source in entry.sources)
            name, entry = new, Entry(sources, entry.build)
        lacks = [source for source in entry.sources if source not in checkpoint.tensors]
        if lacks:
            raise ValueError(f"{checkpoint.path}, tensor {name}: the checkpoint lacks {', '.join(lacks)}")
        entries[name] = entry
    used = {source for entry in entries.values() for source in entry.sources}
    lost = next((name for name in checkpoint.tensors if name.endswith(_ENDS) and name not in used), None)
    if lost is not None:
        raise ValueError(
            f"{checkpoint.place(lost)}: the file has no metadata that says its format: another program has written the "
            "file without it; make the checkpoint again"
        )
    return entries


def closest(name: str, others: list[str]) -> str | None:
    """The one of ``others`` that is ``name`` with renamed components in the middle or the front; None if none is.

    Numbers of layers and the last component stay; the most components at both ends have to agree.
    """
    if name in others:
        return name
    components = name.split(".")
    numbers = [c for c in components if c.isdigit()]
    scores = {}
    for other in others:
        theirs = other.split(".")
        if theirs[-1] == components[-1] and [c for c in theirs if c.isdigit()] == numbers:
            ends = (components, theirs), (components[::-1], theirs[::-1])
            scores[other] = sum([*map(eq, *pair), False].index(False) for pair in ends)
    best = [other for other, score in scores.items() if score == max(scores.values())]
    return best[0] if len(best) == 1 and scores[best[0]] > 1 else None


NATIVE = Layout(
    "native",
    "this package",
    detect=lambda checkpoint: (
        any(key.startswith(PREFIX) for key in checkpoint.metadata)
        or any(name.endswith(_ENDS) for name in checkpoint.tensors)
    ),
    read=_read,
    scales=(),
    write=stored_tensors,
    config=lambda written: {
        "config.json": {"quantization_config": {"quant_method": "mxtensor", "skip": written.others}}
    },
    metadata=lambda name, t: header(name, t) if isinstance(t, MXTensor) else {},
    dims=(2, 3),
    embeddings=True,
    empty=True,
    one_file=True,
    operations=(*MERGES, *SPLITS),
    columnwise=True,
    input_scales=True,
    any_name=True,
    activation=lambda recipe, every: format_of_inputs(recipe),
    own_dtypes=True,
    formats="all, in every orientation",
)
