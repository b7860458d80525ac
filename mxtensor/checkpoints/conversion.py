"""``convert``: a checkpoint in another layout, tensor by tensor.

mx.checkpoints.convert("model", "out", layout="modelopt", format="nvfp4")
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..convert.configs import DEFAULT, Config, by_name, recipe_of
from ..core.arguments import described
from ..core.names import dtype_name
from ..core.peer_names import refuse_arguments
from ..core.progress import with_progress
from ..core.workers import in_order
from ..numerics.formats import Format, Orientation, Rounding
from ..numerics.reference import SOURCE_DTYPES
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .compressed_tensors import activation_of
from .destination import check_separate
from .layout import MERGES, STATIC, Layout, Written, check_shapes
from .names import Known, check_skip, ends_in, head_modules, is_skipped, model_of, module_of, stays, with_parameters
from .reading import Checkpoint, named_dtype
from .store import (
    SHARD_BYTES,
    config_files,
    layout_of,
    opened,
    store_tensor,
    writable,
)

SHAPES = {2: "matrices", 3: "stacked experts"}
"""Dimensions of a tensor -> what it is."""
PART = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")
"""The end of the name of one file of several."""
INPUT_SCALE = ".pre_quant_scale"
"""What ModelOpt multiplies the inputs of a layer by, after AWQ or SmoothQuant."""
TILES, TILE = 4, (128, 512)
"""Parts of a large matrix whose error is measured: enough for two digits, and fast. They begin at whole blocks."""
SAMPLE = TILES * TILE[0] * TILE[1]
NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""Element -> the first byte, without the sign, that is NaN or Inf. Elements of fewer bits, and integers, have none."""
SIDE_FILE = "hf_quant_config.json"
"""ModelOpt's copy of the configuration."""
SETTINGS = frozenset((
    "input_activations", "output_activations", "input_tensors", "output_tensors", "kv_cache_scheme",
    "kv_cache_quant_algo", "kv_cache_group", "kv_cache_dtype", "activation_scheme",
))  # fmt: skip
"""Names of fields, of any library. Those of the recipe of a layout that is written are made anew."""
USUAL = (None, "", "none", False)
"""Values of fields that say nothing."""
ALGORITHM = "quant_algo"
"""ModelOpt's field: its name is that of the casts of weights and activations."""
WEIGHT_ONLY = ("A16", "_WO")
"""In names of algorithms that leave activations as they are."""
DEEPEST = 8


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
    """Tensors whose codes and scales, or values, were stored bit for bit. A quantized tensor that becomes an ordinary
    one is exact if its dtype holds each decoded float32 value."""
    stepped: list[str] = field(default_factory=list)
    """Tensors whose codes were stored as they were, and whose global scale (NVFP4) is read back as a float32 beside it:
    the layout stores its reciprocal, or the product is rounded in another order. Values may differ by a float32 step,
    and then sometimes by a step of their dtype."""
    dropped: list[str] = field(default_factory=list)
    """Scales of static activations that are not stored, and fields of the configuration about activations and the cache
    of keys and values that no tensor holds: ``config.json: quantization_config.kv_cache_scheme``."""
    unquantized: list[str] = field(default_factory=list)
    """Weights whose cast of activations the layout does not store: its readers take them as weight-only."""
    cast: dict[str, str] = field(default_factory=dict)
    """Weight -> the format to which readers of the layout cast its activations, although it was weight-only, or they
    had another format: the layout has no word for that."""
    retyped: list[str] = field(default_factory=list)
    """Quantized weights whose outer dtype is not that of ``config.json``, which the layout stores for all of them: they
    are read in that one."""
    stacks: list[str] = field(default_factory=list)
    """Experts that would have been quantized, and stay as they were: readers of the layout would not take them."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or Inf that were quantized, and quantized tensors whose scales or codes are NaN or Inf. What is
    quantized of their blocks is NaN or zeros: also the values that share a new block with a NaN of an old one."""
    misread: list[str] = field(default_factory=list)
    """Matrices of experts that transformers 5.23 decodes without their global scale (NVFP4), and without an error."""
    left: list[str] = field(default_factory=list)
    """Other matrices that would have been quantized, and stay as they were: transformers splits or joins them without a
    look at codes, two layers share them, or the layout does not hold matrices (in, out), or those that are not called
    ``weight``."""

    def add_rounding(self, errors: Mapping[str, float]) -> None:
        """Note tensors that were rounded before the source was read, with their relative errors: they are not exact."""
        self.exact = [name for name in self.exact if name not in errors]
        self.errors |= {name: max(error, self.errors.get(name, 0.0)) for name, error in errors.items()}

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name], default=None)
        lines = [f"{self.source} -> {self.layout}: {len(self.exact)} tensors exact, {len(self.errors)} rounded"]
        if worst is not None:
            mean = sum(self.errors.values()) / len(self.errors)
            lines.append(f"relative error: mean {mean:.3g}, largest {self.errors[worst]:.3g} ({worst})")
        for attribute, line in SENTENCES.items():
            found = getattr(self, attribute)
            if found:
                first = next(iter(found))
                cast = found[first] if isinstance(found, dict) else ""
                lines.append(line.format(count=len(found), first=first, cast=cast, layout=self.layout))
        return "\n".join(lines)


SENTENCES = {
    "stepped": "{count} tensors, such as {first}, keep their codes, and their global scale took a float32 step: the "
    "layout {layout} stores it in another form",
    "dropped": "{count} scales and settings of activations and of the cache were left out, such as {first}",
    "unquantized": "{count} weights, such as {first}, are weight-only now: the layout {layout} does not store how "
    "their activations are cast (the layout native does)",
    "cast": "readers of the layout {layout} cast the activations of {count} weights, such as {first}, to {cast}, "
    "unlike the source (the layout native stores how they are cast)",
    "retyped": "{count} weights, such as {first}, are read in the dtype of config.json, which is not theirs: the "
    "layout {layout} stores one for all (the layout native stores each)",
    "not_finite": "{count} tensors hold NaN or Inf, such as {first}",
    "stacks": "{count} tensors of experts stay as they were, such as {first}: readers of the layout {layout} take none "
    "that are quantized (the layout native holds stacks)",
    "misread": "{count} matrices of experts, such as {first}, are for vLLM: transformers 5.23 decodes them without "
    "their global scale, to garbage (it reads the layout native, or another format)",
    "left": "{count} matrices stay as they were, such as {first}: readers of the layout {layout} split, join, "
    "transpose or share them, or look for other names, and take no codes there",
}
"""Field of a ``Conversion`` -> what it says of the tensors in it."""


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
    **others: Any,
) -> Conversion:
    """Convert a checkpoint to another layout, tensor by tensor: memory holds a few tensors, not the model or a shard.

    ``format``: what ``quantize_`` takes for inference, such as ``"mxfp4-weight-only"``. Matrices in high precision are
    quantized, and those in another format are quantized again. None changes only the layout, which is exact. A ``Plan``
    or a dict of configs may name tensors of the checkpoint or parameters of transformers' model. Stacked experts are
    quantized for layouts that can store them (``Layout.dims``); matrices that transformers joins to one matrix of a
    stack get one global scale (NVFP4), for which they are read twice. Embeddings, heads and routers stay in high
    precision, except those that a plan names. So do the modules that ``skip`` names, with all that is inside them: by
    their names or the ends of these (``"model.layers.0"``, ``"mlp"``). ``include_head`` quantizes heads too, and an
    embedding that shares its weight with one. Other files of the folder, such as the tokenizer, are copied, and so are
    the subfolders of sentence-transformers' modules. The destination is complete or does not exist; what ``overwrite``
    replaces is removed only when the new checkpoint is complete. Each matrix is cast by one thread; their number is
    that of torch's threads.

    Raises what ``load`` and ``save`` raise; ValueError if the destination is the source, is inside it or contains it,
    if a name in ``skip`` matches no module, and if no tensor is quantized although ``format`` is given (and nothing is
    skipped) or the layout requires quantized tensors.
    """
    refuse_arguments("convert", others)
    chosen = writable(layout, destination)
    skip = skip if isinstance(skip, str) else tuple(skip)  # a generator is read twice
    if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
        raise TypeError(f"convert: skip must be names of modules, got {described(skip)}; pass a list")
    with opened(source) as checkpoint:
        check_separate(destination, source, *{stored.file for stored in checkpoint.tensors.values()})
        checkpoint.streams = True
        casts = _Casts(checkpoint, layout_of(checkpoint), chosen, format, skip)
        report, recipes, written = casts.report, casts.recipes, casts.written
        with chosen.sink(destination, max_shard_bytes, overwrite, checkpoint, chosen.header) as sink:
            _check_source(checkpoint.path, casts.entries, report.source, chosen.name)
            recipes.warn_of_unmatched(casts.entries)
            if include_head:
                recipes.heads = head_modules(written.known, casts.entries)
            casts.check_shapes()
            quantized = _convert_tensors(casts, sink, progress)
            if report.not_finite:
                warnings.warn(
                    f"convert: {len(report.not_finite)} tensors hold NaN or Inf, such as {report.not_finite[0]}; what "
                    "is quantized of their blocks is NaN or zeros",
                    UserWarning,
                    stacklevel=2,
                )
            if not quantized and (not chosen.one_file if format is None else not recipes.skips(casts.entries)):
                _raise_nothing_quantized(casts, as_it_is=format is None)
            report.unquantized, report.cast = written.other_casts(chosen.activation)
            files = config_files(chosen, written, checkpoint, configuration(checkpoint) if casts.preserved else {})
            if not chosen.own_dtypes:
                config = {} if chosen.config is None else files.get("config.json") or {}  # GGUF has none
                read = named_dtype(config) or torch.bfloat16
                report.retyped = [name for name, dtype in written.dtypes.items() if dtype is not read]
            sink.finish(files, checkpoint.path)
    return report


def _check_source(path: Path, entries: Iterable[str], before: str, after: str) -> None:
    """Warn if only one file of several is read. Raise NotImplementedError for inputs that are multiplied, which no
    other layout does."""
    part = PART.search(path.name)
    if part is not None and int(part[1]) > 1 and path.is_file():
        warnings.warn(
            f"convert: {path} is one of {int(part[1])} files of a checkpoint, and the others are not read; pass the "
            "folder of all",
            UserWarning,
            stacklevel=3,
        )
    found = next((name for name in entries if name.endswith(INPUT_SCALE)), None)
    if found is not None and after not in (before, "native"):
        raise NotImplementedError(
            f"{found}: the layout {before} multiplies the inputs of this layer, and {after} does not; use the layout "
            "native, or that of the source"
        )


def _convert_tensors(casts: _Casts, sink: Any, progress: bool) -> bool:
    """Convert the tensors, one per thread, and store them in their order in the layout's ``sink``. Returns whether one
    of them is stored quantized."""
    checkpoint, entries, layout = casts.checkpoint, casts.entries, casts.layout
    report, written = casts.report, casts.written
    every = [recipe for recipe in casts.recipes.every if recipe is not None]
    stochastic = any(recipe.stored.rounding is Rounding.STOCHASTIC for recipe in every)

    quantized = False
    with closing(in_order(casts.converted, list(entries), 1 if stochastic else None)) as results:
        for name, (new, error) in with_progress(results, "converting", "tensor", len(entries)) if progress else results:
            if error is None and casts.source is layout and layout.unchanged is not None:
                sink.add(*layout.unchanged(checkpoint, name))
            elif error is None and casts.preserved:
                stored = {source: checkpoint.tensor(source) for source in entries[name].sources}
                sink.add(stored, layout.metadata(name, new) if layout.metadata else {})
            else:
                store_tensor(sink, layout, written, name, new)
            if error is not None:
                report.errors[name] = error
            elif name in written.stepped:
                report.stepped.append(name)
            else:
                report.exact.append(name)
            if isinstance(new, MXTensor):
                quantized = True
                merges = written.known.loaded(name).operations in MERGES
                if merges and new.format.global_scale and not layout.stacks_scales:
                    report.misread.append(name)
    for names in (report.stacks, report.left, report.not_finite, casts.unfit):
        names.sort()  # threads have added to them in any order
    return quantized


# --------------------------------------------------------------------------------------------- what happens to a tensor


class _Casts:
    """What happens to each tensor of a checkpoint, which has the layout ``source``, by the ``layout`` to write and the
    recipes."""

    def __init__(
        self, checkpoint: Checkpoint, source: Layout, layout: Layout, format: Config | None, skip: Collection[str]
    ) -> None:
        self.checkpoint, self.source, self.layout = checkpoint, source, layout
        every = source.entries(checkpoint)
        needed = format is not None or layout.config is not None  # building a model takes seconds
        known = Known(model_of(checkpoint.config) if needed else None, every, checkpoint.config)
        self.recipes, self.written = Recipes(format, skip, known), Written(known)
        joined = every if layout.stacks else ()
        self.stacks = StackScales(known, joined, lambda name: checkpoint.load(name, every[name]))
        self.preserved = source is layout and format is None and bool(layout.scales)
        """Whether stored tensors whose codes or values stay are copied: scales that have names, and the configuration,
        are written as they are where no codes change."""
        # scales and settings of activations lose what they belong to where another layout names them in another way, or
        # the configuration of requantized tensors is made anew
        requantizes = format is not None and bool(layout.scales)
        loses = source.config is not None and (source is not layout or not layout.static_scales or requantizes)
        self.entries = {name: entry for name, entry in every.items() if not (loses and ends_in(name, STATIC))}
        self.report = Conversion(source.name, layout.name)
        self.report.dropped = [name for name in every if name not in self.entries]
        if loses:
            beside = checkpoint.json(SIDE_FILE).get("quantization")
            self.report.dropped += settings("config.json: quantization_config", checkpoint.quantization)
            self.report.dropped += settings(f"{SIDE_FILE}: quantization", beside)
        self.unfit: list[str] = []
        """Tensors with other numbers of dimensions than the layout stores, except for stacks of experts."""

    def converted(self, name: str) -> tuple[Tensor, float | None]:
        """The tensor that is stored, and its relative error; None for a tensor whose codes or values stay the same."""
        value = self.checkpoint.load(name, self.entries[name])
        new = self._stored(name, value)
        if (new is not value or isinstance(value, MXTensor)) and not is_finite(value):
            self.report.not_finite.append(name)
        if new is not value:
            return new, relative_error(value, new)
        if isinstance(value, MXTensor) and self.layout.decodes:
            return new, change(value.dequantize(torch.float32), value.dequantize())
        return new, None

    def _stored(self, name: str, value: Tensor) -> Tensor:
        """The tensor that is stored: ``value`` itself if it stays as it is. Raises TypeError that names it."""
        side, recipe = self.written.known.orientation(name, value.shape), self.recipes.of(name)
        if recipe is None or not value.is_floating_point() or not value.numel():
            return value
        plain = not isinstance(value, MXTensor)
        if side is None:  # such as a stack whose rows transformers interleaves, under a name that tells nothing
            self.report.left += [name] if plain and self.written.known.quantizes(name) else []
            return value
        others = self._why_left(name, value.dim(), side, recipe) if plain else None
        if others is not None:
            others.append(name)
            return value
        if value.dim() not in self.layout.dims:
            return value
        if isinstance(value, MXTensor):
            if value.format == recipe.stored.format:
                return value
            value = value.dequantize()
        if value.dtype not in SOURCE_DTYPES:  # codes whose scales are not found
            raise TypeError(
                f"convert: {name} is stored as {dtype_name(value.dtype)} without scales that this layout knows; name "
                f"its module in skip=, or store it in one of {', '.join(map(dtype_name, SOURCE_DTYPES))}"
            )
        return self.stacks.quantized(name, value, recipe, side)

    def check_shapes(self) -> None:
        """Raise NotImplementedError for values that would be quantized in shapes that the layout does not hold."""
        found: dict[str, tuple[Sequence[int], Format]] = {}
        for name, entry in self.entries.items():
            shape = self.checkpoint.tensors[entry.sources[0]].shape
            side, recipe = self.written.known.orientation(name, shape), self.recipes.of(name)
            if len(entry.sources) > 1 or side is None or recipe is None or not math.prod(shape):  # more: codes, scales
                continue
            if self._why_left(name, len(shape), side, recipe) is None:
                found[name] = shape, recipe.stored.format
        check_shapes("convert", self.layout, found, "name their modules in skip= ({})")

    def _why_left(self, name: str, dims: int, side: Orientation, recipe: LinearRecipe) -> list[str] | None:
        """The list to which the name of a tensor belongs that the layout, or its readers, do not take as codes."""
        layout, known = self.layout, self.written.known
        if (dims == 3 and 3 not in layout.dims) or (not layout.experts and known.is_expert(name)):
            return self.report.stacks
        if dims not in layout.dims:
            return self.unfit
        transposed = dims == 2 and side is Orientation.COLUMNWISE and not layout.columnwise
        shared = not layout.shared and known.is_shared(name)
        unnamed = dims == 2 and name.rpartition(".")[2] != "weight" and not layout.any_name
        if transposed or shared or unnamed or not layout.takes(known.loaded(name).operations, recipe.stored.format):
            return self.report.left
        return None


class Recipes:
    """The recipes of ``format``: one for all tensors, or, for a dict of configs, one for each name.

    ``skip``: modules that are left out in any case; others as ``known`` decides, or their names where it does not.
    Names are those in the files, or those of transformers' modules. Raises what ``recipe_of`` raises, and ValueError
    for a recipe that trains.
    """

    def __init__(self, format: Config | None, skip: Collection[str], known: Known) -> None:
        self._skip, self._table, self._known = skip, by_name(format), known
        self.heads: Collection[str] = ()
        """Modules that are quantized although they are heads or embeddings."""
        one = None if format is None or self._table is not None else recipe_of(format)
        self._recipes = {DEFAULT: one} if self._table is None else self._table.recipes
        self.every = self._recipes.values()
        """All recipes; None for tensors that are not quantized."""
        for recipe in self.every:
            if recipe is not None and recipe.trains:
                raise ValueError(
                    f"convert: {recipe} trains, and stores no codes; pass a format such as 'mxfp8-weight-only'"
                )

    def of(self, name: str) -> LinearRecipe | None:
        """The recipe of a tensor; None: it stays as it is."""
        if self.skips((name,)):
            return None
        if self._table is not None:
            for other in self._known.names_of(name):
                key = self._table.key_of(other.rpartition(".")[0], other)
                if key is not None:
                    return self._recipes[key]
        taken = module_of(name) in self.heads or self._known.quantizes(name)
        if taken is None:
            taken = not stays(module_of(name))
        return self._recipes.get(DEFAULT) if taken else None

    def skips(self, names: Iterable[str]) -> bool:
        """Whether a tensor stays as it is because the caller has named its module."""
        return any(is_skipped(other, self._skip) for name in names for other in self._known.names_of(name))

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Warn of names that match no tensor, of a table or to be skipped: they may be those of another checkpoint.

        The checkpoint does not store weights that its model shares. Raises ValueError if no name of a table matches,
        and nothing else is to be quantized.
        """
        parameters = dict.fromkeys(other for name in names for other in self._known.names_of(name))
        modules = list(dict.fromkeys(m for name in parameters for m in (module_of(name), name.rpartition(".")[0])))
        check_skip("convert", self._skip, [*modules, *with_parameters(self._known.model)], parameters)
        if self._table is None:
            return
        unmatched = self._table.unmatched([*parameters, *modules])
        if unmatched and not self._recipes.keys() - {*unmatched}:
            raise ValueError(
                f"convert: no tensor of the checkpoint has a name of the plan, such as {unmatched[0]!r}; its names are "
                f"such as {next(iter(names), '')!r}: pass a plan that was made for this checkpoint"
            )
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            warnings.warn(
                f"convert: no tensor of the checkpoint has the name {', '.join(map(repr, unmatched[:3]))}{more} of the "
                "dict of configs",
                UserWarning,
                stacklevel=3,
            )


class StackScales:
    """Quantizes matrices as they would be in their stack, bit for bit: each matrix of a stack has one global scale,
    also of the parts that transformers joins (``gate_proj`` and ``up_proj`` of an expert).

    ``load(name)`` gives a tensor of the checkpoint: all parts of a matrix are read before the first one is quantized.
    It may be called by several threads.
    """

    def __init__(self, known: Known, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        self._load = load
        self._matrix_of: dict[str, tuple[str, str]] = {}
        self._members: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in names:
            loaded = known.loaded(name)
            if loaded.operations in MERGES and loaded.parameters:
                components = name.split(".")
                last = max((i for i, word in enumerate(components) if word.isdigit()), default=len(components))
                self._matrix_of[name] = loaded.parameters[0], ".".join(components[: last + 1])  # ...experts.3
                self._members[self._matrix_of[name]].append(name)
        self._locks = {matrix: Lock() for matrix in self._members}
        self._amax: dict[tuple[str, str], Tensor] = {}

    def quantized(self, name: str, value: Tensor, recipe: LinearRecipe, side: Orientation) -> Tensor:
        """``value`` in the format of ``recipe``. Of a part of a matrix (rows, columns) whose format has a global scale,
        one more row has the amax of the whole matrix."""
        matrix = self._matrix_of.get(name)
        if matrix is None or len(self._members[matrix]) < 2 or not recipe.stored.format.global_scale:
            return quantize_as(value, recipe, side)
        row = value.new_zeros(1, value.shape[1])
        with self._locks[matrix]:
            if matrix not in self._amax:
                pieces = map(self._load, self._members[matrix])
                values = (piece.dequantize() if isinstance(piece, MXTensor) else piece for piece in pieces)
                self._amax[matrix] = torch.stack([value.abs().amax() for value in values]).amax()
        row[0, 0] = self._amax[matrix]
        return quantize_as(torch.cat([value, row]), recipe, side)[:-1].clone()


def _raise_nothing_quantized(casts: _Casts, as_it_is: bool) -> NoReturn:
    """Raise ValueError for a conversion that would write no quantized tensor. ``as_it_is``: it was to quantize none."""
    path, layout = casts.checkpoint.path, casts.layout
    left, unfit = casts.report.left, casts.report.stacks + casts.unfit
    if as_it_is:
        raise ValueError(
            f"convert: {path} has no quantized tensor, and the layout {layout.name} requires them; pass format=, or "
            "the layout plain"
        )
    if left:
        raise ValueError(
            f"convert: nothing was quantized: readers of the layout {layout.name} split, join, transpose or share the "
            f"{len(left)} matrices of {path}, such as {left[0]}, before they look for codes; choose another layout, "
            "such as native"
        )
    if unfit:
        holds = " and ".join(SHAPES[dims] for dims in layout.dims)
        raise ValueError(
            f"convert: nothing was quantized: the layout {layout.name} holds {holds} only, and {path} has {len(unfit)} "
            f"other tensors, such as {unfit[0]}; choose another layout, such as native"
        )
    raise ValueError(
        f"convert: nothing was quantized: {path} has no matrix of a layer, except for embeddings, heads and routers "
        "(include_head=True quantizes the head)"
    )


# ---------------------------------------------------------------------------------------------- settings of the source


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """The JSON files that describe the quantization of a checkpoint, by name: to be written beside the same tensors."""
    side = checkpoint.json(SIDE_FILE)
    described = bool(checkpoint.quantization or checkpoint.config.get("quantization") or side)
    return {"config.json": checkpoint.config} | ({SIDE_FILE: side} if side else {}) if described else {}


def settings(place: str, fields: object, depth: int = DEEPEST) -> Iterator[str]:
    """The fields of a configuration about activations and the cache, by ``place`` and path: no tensor holds them once
    it is read."""
    if not isinstance(fields, Mapping) or not depth:
        return
    for name, value in fields.items():
        path = f"{place}.{name}"
        if name == ALGORITHM:
            yield from [path] if isinstance(value, str) and value and not any(w in value for w in WEIGHT_ONLY) else []
        elif name not in SETTINGS:
            yield from settings(path, value, depth - 1)
        elif value and value not in USUAL and not (name == "input_activations" and activation_of(dict(fields))):
            yield path


# ---------------------------------------------------------------------------------------------- errors


def relative_error(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||before|| of the whole matrix, or of TILES along its diagonal if it is large.

    Of a stack, the first matrix is measured.
    """
    if after.dim() > 2:
        before, after = before[0], after[0]
    places: list[tuple[int, int]] = [(0, 0)]
    sizes = tuple(after.shape)
    if after.numel() > SAMPLE:
        sizes = tuple(min(n, most) for n, most in zip(sizes, TILE, strict=True))
        rows, columns = after.shape[0] - sizes[0], after.shape[1] - sizes[1]
        places = [(rows * i // (TILES - 1) // 128 * 128, columns * i // (TILES - 1) // 128 * 128) for i in range(TILES)]
    noise, signal = [], []
    for row, column in places:
        tiles = (t.narrow(0, row, sizes[0]).narrow(1, column, sizes[1]) for t in (before, after))
        true, rounded = ((t.dequantize() if isinstance(t, MXTensor) else t).float() for t in tiles)
        noise.append(float((rounded - true).norm()))
        signal.append(float(true.norm()))
    error = math.hypot(*noise) / (math.hypot(*signal) or 1.0)
    return error if math.isfinite(error) else math.inf


def change(before: Tensor, after: Tensor) -> float | None:
    """||after - before|| / ||before||, in float32 or more; None if all values are equal, NaN to NaN."""
    after = after.to(before.dtype)
    same = (after == before) | (after.isnan() & before.isnan())
    if bool(same.all()):
        return None
    noise, signal = (after - before).masked_fill(same, 0.0), before.masked_fill(~before.isfinite(), 0.0)
    error = float(noise.norm(dtype=torch.float64)) / (float(signal.norm(dtype=torch.float64)) or 1.0)
    return error if math.isfinite(error) else math.inf


def is_finite(t: Tensor) -> bool:
    """Whether no value is NaN or Inf; of a quantized tensor, none of its scales and codes."""
    if not isinstance(t, MXTensor):
        return bool(t.sum(dtype=torch.float32).isfinite()) or bool(t.isfinite().all())  # one fast pass
    for operand in (t.rowwise, t.columnwise):
        if operand is None:
            continue
        scales = [operand.scale_view, *([] if operand.global_scale is None else [operand.global_scale])]
        if not all(bool(scale.to(torch.float32).isfinite().all()) for scale in scales):
            return False
        first = NOT_FINITE.get(operand.format.element.dtype)
        if first is not None and bool((operand.data.view(torch.uint8) & 0x7F >= first).any()):
            return False
    return True
