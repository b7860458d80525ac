"""``convert``: a checkpoint in another layout, tensor by tensor.

mx.checkpoints.convert("model", "out", layout="modelopt", format="nvfp4")
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convert.configs import Config
from ..core.arguments import described
from ..core.names import dtype_name
from ..core.workers import in_order
from ..numerics.formats import Format, Orientation, Rounding
from ..numerics.reference import SOURCE_DTYPES
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .destination import check_separate
from .known import Known
from .layout import MERGES, Layout, Written, check_shapes
from .recipes import Recipes, ends_in, raise_nothing_quantized
from .registry import layout_of, opened
from .relative_error import relative_error
from .sink import merged
from .source import Checkpoint, Entry
from .stack_scales import StackScales
from .store import SHARD_BYTES, config_files, sink_of, store_tensor, with_bar, writable
from .tied import LOOKUPS, head_modules

SKIPPED = (
    *LOOKUPS, "embed_positions", "wpe", "position_embedding", "position_embeddings", "token_type_embeddings",
    "tile_embedding", "embedding", "input_embeds_layer", "position_embeds_layer", "relative_attention_bias",
    "embed_out", "output", "norm",
)  # fmt: skip
"""Last components of module names whose matrices stay in high precision where no model is known, beside heads and
routers: embeddings, and heads of other libraries."""
STATIC = ("input_scale", "input_global_scale", "k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Scales of static activations, which another layout names and defines in another way."""


PART = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")
"""The end of the name of one file of several."""
INPUT_SCALE = ".pre_quant_scale"
"""What ModelOpt multiplies the inputs of a layer by, after AWQ or SmoothQuant."""


@dataclass
class Conversion:
    """What ``convert`` did, tensor by tensor."""

    source: str
    """The layout that was read."""
    layout: str
    errors: dict[str, float] = field(default_factory=dict)
    """Tensor -> relative error (Frobenius norm) of one that was quantized, measured on at most
    262,144 values."""
    exact: list[str] = field(default_factory=list)
    """Tensors whose codes or values were stored as they were."""
    dropped: list[str] = field(default_factory=list)
    """Scales of static activations of another layout, which are not stored."""
    stacks: list[str] = field(default_factory=list)
    """Experts that would have been quantized, and stay as they were: readers of the layout would not take them."""

    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or Inf that were quantized: the blocks that have one decode to NaN or zeros."""

    misread: list[str] = field(default_factory=list)
    """Matrices of experts that transformers 5.23 decodes without their global scale (NVFP4), and without an error."""

    left: list[str] = field(default_factory=list)
    """Other matrices that would have been quantized, and stay as they were: transformers splits or joins them without a
    look at codes, two layers share them, or the layout does not hold matrices (in, out), or those that are not called
    ``weight``."""

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name], default=None)
        lines = [f"{self.source} -> {self.layout}: {len(self.exact)} tensors exact, {len(self.errors)} rounded"]
        if worst is not None:
            mean = sum(self.errors.values()) / len(self.errors)
            lines.append(f"relative error: mean {mean:.3g}, largest {self.errors[worst]:.3g} ({worst})")
        if self.dropped:
            lines.append(f"{len(self.dropped)} scales of static activations were left out, such as {self.dropped[0]}")
        if self.stacks:
            lines.append(
                f"{len(self.stacks)} tensors of experts stay as they were, such as {self.stacks[0]}: readers of the "
                f"layout {self.layout} take none that are quantized (the layout native holds stacks)"
            )
        if self.misread:
            lines.append(
                f"{len(self.misread)} matrices of experts, such as {self.misread[0]}, are for vLLM: transformers 5.23 "
                "decodes them without their global scale, to garbage (it reads the layout native, or another format)"
            )
        if self.left:
            lines.append(
                f"{len(self.left)} matrices stay as they were, such as {self.left[0]}: readers of the layout "
                f"{self.layout} split, join, transpose or share them, or look for other names, and take no codes there"
            )
        return "\n".join(lines)


@dataclass
class _Casts:
    """What happens to the values of a tensor, by the layout and the recipes."""

    layout: Layout
    recipes: Recipes
    written: Written
    report: Conversion
    stacks: StackScales
    unfit: list[str] = field(default_factory=list)
    """Tensors with other numbers of dimensions than the layout stores, except for stacks of experts."""

    def of(self, name: str, value: Tensor) -> Tensor:
        """The tensor that is stored: ``value`` itself if it stays as it is."""
        side, recipe = self._cast(name, value.shape)
        if recipe is None or not value.is_floating_point() or not value.numel():
            return value
        plain, fits = not isinstance(value, MXTensor), value.dim() in self.layout.dims
        if side is None:  # such as a stack whose rows transformers interleaves, under a name that tells nothing
            self.report.left += [name] if plain and self.written.known.quantizes(name) else []
            return value
        others = self._why_left(name, value.dim(), side, recipe) if plain else None
        if others is not None:
            others.append(name)
            return value
        return self._quantized(name, value, recipe, side) if fits else value

    def converted(self, name: str, value: Tensor) -> tuple[Tensor, float | None]:
        """The tensor that is stored, and its relative error; None for a tensor that stays as it is."""
        new = self.of(name, value)
        if new is value:
            return new, None
        if not isinstance(value, MXTensor) and not value.sum(dtype=torch.float32).isfinite():  # one fast pass
            self.report.not_finite += [] if value.isfinite().all() else [name]
        return new, relative_error(value, new)

    def _quantized(self, name: str, value: Tensor, recipe: LinearRecipe, side: Orientation) -> Tensor:
        """``value`` in the format of ``recipe``, if it has another one. Raises TypeError that names it."""
        if isinstance(value, MXTensor):
            if value.format == recipe.stored.format:
                return value
            value = value.dequantize()
        if value.dtype not in SOURCE_DTYPES:  # codes whose scales are not found
            raise TypeError(
                f"convert: {name} is stored as {dtype_name(value.dtype)} without scales that this layout knows; name "
                f"its module in skip=, or store it in one of {', '.join(map(dtype_name, SOURCE_DTYPES))}"
            )
        if self.layout.stacks and self.stacks.applies(name, recipe):
            return self.stacks.quantized(name, value, recipe, side)
        return quantize_as(value, recipe, side)

    def _cast(self, name: str, shape: Sequence[int]) -> tuple[Orientation | None, LinearRecipe | None]:
        """How a tensor of this name and shape would be quantized; None for one that stays as it is."""
        recipe, left_out = self.recipes.of(name)
        return self.written.orientation(name, shape), None if left_out else recipe

    def check_shapes(self, checkpoint: Checkpoint, entries: Mapping[str, Entry]) -> None:
        """Raise NotImplementedError for values that would be quantized in shapes that the layout does not hold."""
        found: dict[str, tuple[Sequence[int], Format]] = {}
        for name, entry in entries.items():
            stored = checkpoint.tensors[entry.sources[0]]
            shape = stored.shape if entry.encoded is None else entry.encoded.shape
            side, recipe = self._cast(name, shape)
            if len(entry.sources) > 1 or side is None or recipe is None or not math.prod(shape):  # more: codes, scales
                continue
            if self._why_left(name, len(shape), side, recipe) is None:
                found[name] = shape, recipe.stored.format
        check_shapes("convert", self.layout, found, "name their modules in skip= ({})")

    def is_misread(self, name: str, value: MXTensor) -> bool:
        """Whether transformers leaves out the global scale of a matrix that it stacks."""
        merges = self.written.known.loaded(name).operations in MERGES
        return merges and value.format.global_scale and not self.layout.stacks_scales

    def _why_left(self, name: str, dims: int, side: Orientation, recipe: LinearRecipe) -> list[str] | None:
        """The list to which the name of a tensor belongs that the layout, or its readers, do not take as codes."""
        layout, known = self.layout, self.written.known
        if (dims == 3 and 3 not in layout.dims) or (not layout.experts and self.written.is_expert(name)):
            return self.report.stacks
        if dims not in layout.dims:
            return self.unfit
        transposed = dims == 2 and side is Orientation.COLUMNWISE and not layout.columnwise
        shared = not layout.shared and known.is_shared(name)
        unnamed = dims == 2 and name.rpartition(".")[2] != "weight" and not layout.any_name
        if transposed or shared or unnamed or not layout.takes(known.loaded(name).operations, recipe.stored.format):
            return self.report.left
        return None


def convert(
    source: str | Path,
    destination: str | Path,
    layout: str = "native",
    format: Config | None = None,
    skip: Sequence[str] = (),
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
    include_head: bool = False,
) -> Conversion:
    """Convert a checkpoint to another layout, tensor by tensor: memory holds a few tensors, not the model or a shard.

    ``format``: what ``quantize_`` takes for inference, such as ``"mxfp4-weight-only"``. Matrices in high precision are
    quantized, and those in another format are quantized again. None changes only the layout, which is exact. A ``Plan``
    or an ``FqnToConfig`` may name tensors of the checkpoint or parameters of transformers' model. Stacked experts are
    quantized for layouts that can store them (``Layout.dims``); matrices that transformers stacks get one global scale
    (NVFP4), for which they are read twice. Embeddings, heads and routers stay in high precision, except those that a
    plan names. So do the modules that ``skip`` names, with all that is inside them: by their names or the ends of these
    (``"model.layers.0"``, ``"mlp"``). ``include_head`` quantizes heads too, and an embedding that shares its weight
    with one. Other files of the folder, such as the tokenizer, are copied, and so are the subfolders of
    sentence-transformers' modules. The destination is complete or does not exist; what ``overwrite`` replaces is
    removed only when the new checkpoint is complete. Each matrix is cast by one thread; their number is that of torch's
    threads.

    Raises what ``load`` and ``save`` raise; ValueError if the destination is the source, is inside it or contains it,
    and if no tensor is quantized although ``format`` is given (and ``skip`` matches no tensor) or the layout requires
    quantized tensors.
    """
    chosen = writable(layout, destination)
    skip = skip if isinstance(skip, str) else tuple(skip)  # a generator is read twice
    if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
        raise TypeError(f"convert: skip must be names of modules, got {described(skip)}; pass a list")
    with opened(source) as checkpoint:
        check_separate(destination, source, *{stored.file for stored in checkpoint.tensors.values()})
        _warn_of_one_of_several(checkpoint.path)
        before, checkpoint.maps = layout_of(checkpoint), True
        report = Conversion(before.name, chosen.name)
        entries = before.entries(checkpoint)
        needed = format is not None or chosen.config is not None  # building a model takes seconds
        known = Known.of(checkpoint.config, entries) if needed else Known(None)
        recipes, written = Recipes(format, SKIPPED, skip, known), Written(checkpoint.config, known)
        stacks = StackScales(known, entries, lambda name: checkpoint.load(name, entries[name]))
        casts = _Casts(chosen, recipes, written, report, stacks)
        with sink_of(chosen, destination, max_shard_bytes, overwrite, checkpoint) as sink:
            _check_inputs(entries, before.name, chosen.name)
            moves = (before is not chosen or not chosen.static_scales) and before.config is not None
            rest = {name: entry for name, entry in entries.items() if not (moves and ends_in(name, STATIC))}
            report.dropped = [name for name in entries if name not in rest]
            recipes.warn_of_unmatched(rest)
            recipes.heads = head_modules(known, rest, checkpoint.config) if include_head else set()
            casts.check_shapes(checkpoint, rest)
            quantized = _convert_tensors(checkpoint, rest, casts, sink, before, progress)
            _warn_of_not_finite(report)
            if not quantized and (not chosen.one_file if format is None else not recipes.skips(rest)):
                unfit = report.stacks + casts.unfit
                raise_nothing_quantized(checkpoint.path, chosen, format is None, unfit, report.left)
            sink.finish(merged(checkpoint.config, config_files(chosen, written), checkpoint.path), checkpoint.path)
    return report


def _convert_tensors(
    checkpoint: Checkpoint, entries: Mapping[str, Entry], casts: _Casts, sink: Any, before: Layout, progress: bool
) -> bool:
    """Convert the tensors, one per thread, and store them in their order in ``sink``, which ``sink_of`` made. Returns
    whether one of them is stored quantized."""
    chosen, report = casts.layout, casts.report
    stochastic = any(recipe.stored.rounding is Rounding.STOCHASTIC for recipe in casts.recipes.every)

    def work(name: str) -> tuple[Tensor, float | None]:
        return casts.converted(name, checkpoint.load(name, entries[name]))

    quantized = False
    with closing(in_order(work, list(entries), 1 if stochastic else None)) as results:
        for name, (new, error) in with_bar(results, "converting", len(entries), progress):
            if error is None:
                report.exact.append(name)
            else:
                report.errors[name] = error
            if error is None and before is chosen and chosen.unchanged is not None:
                sink.add(*chosen.unchanged(checkpoint, name))
            else:
                store_tensor(sink, chosen, casts.written, name, new)
            if isinstance(new, MXTensor):
                quantized = True
                report.misread += [name] if casts.is_misread(name, new) else []
    for names in (report.stacks, report.left, report.not_finite, casts.unfit):
        names.sort()  # threads have added to them in any order
    return quantized


def _warn_of_not_finite(report: Conversion) -> None:
    """Warn of values that no format stores."""
    if report.not_finite:
        warnings.warn(
            f"convert: {len(report.not_finite)} tensors hold NaN or Inf, such as {report.not_finite[0]}; what "
            "is quantized of their blocks is NaN or zeros",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_one_of_several(path: Path) -> None:
    """Warn if only one file of several is read."""
    found = PART.search(path.name)
    if found is not None and int(found[1]) > 1 and path.is_file():
        warnings.warn(
            f"convert: {path} is one of {int(found[1])} files of a checkpoint, and the others are not read; pass the "
            "folder of all",
            UserWarning,
            stacklevel=3,
        )


def _check_inputs(entries: Iterable[str], before: str, after: str) -> None:
    """Raise NotImplementedError for inputs that are multiplied, which no other layout does."""
    found = next((name for name in entries if name.endswith(INPUT_SCALE)), None)
    if found is not None and after not in (before, "native"):
        raise NotImplementedError(
            f"{found}: the layout {before} multiplies the inputs of this layer, and {after} does not; use the layout "
            "native, or that of the source"
        )
