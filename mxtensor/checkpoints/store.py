"""``load``, ``save`` and ``convert`` of checkpoints in every layout.

state = mx.checkpoints.load("model-NVFP4")  # MXTensors, without a detour
mx.checkpoints.save(model, "out", layout="compressed-tensors")
mx.checkpoints.convert("model", "out", layout="modelopt", format="nvfp4")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ..convert.configs import Config
from ..core.arguments import check_plain, described
from ..core.progress import with_progress
from ..core.workers import in_order
from ..numerics.formats import Orientation, Rounding
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.training_weight import values_of
from .destination import check_apart
from .layout import Layout, Written
from .matrices import matrix_orientation
from .recipes import Recipes, is_skipped
from .registry import get_layout, layout_of, opened
from .sink import Sink, merged
from .source import Checkpoint
from .tied import LOOKUPS, lookups_of, model_of, tied_keys, tied_layers, usual_heads

Item = TypeVar("Item")
SHARD_BYTES = 1 << 29
SKIPPED = (*LOOKUPS, "embed_positions", "wpe", "position_embeddings", "token_type_embeddings", "output", "norm")
"""Last components of module names whose matrices stay in high precision, beside heads and routers: embeddings, and
heads of other libraries."""
TILES, TILE = 4, (128, 512)
"""Parts of a large matrix whose error is measured: enough for two digits, and fast. They begin at whole blocks."""
SAMPLE = TILES * TILE[0] * TILE[1]
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a matrix of one expert."""
STATIC = ("input_scale", "input_global_scale", "k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Scales of static activations, which another layout names and defines in another way."""


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
        return "\n".join(lines)


def load(path: str | Path, layout: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: MXTensors where it holds codes, ordinary tensors otherwise.

    ``path``: a folder, a ``.safetensors``, a ``.gguf`` or a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``).
    ``layout``: one of ``LAYOUTS``; None: the one that the checkpoint has. Codes are not dequantized on the way. Raises
    FileNotFoundError, ValueError or NotImplementedError that names file and tensor.
    """
    with opened(path) as checkpoint:
        chosen = layout_of(checkpoint) if layout is None else get_layout(layout)
        return {name: checkpoint.load(name, entry) for name, entry in chosen.entries(checkpoint).items()}


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    layout: str = "native",
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a model or a state dict in a layout, in shards with an index.

    ``path``: a new folder, or a file that ends in ``.safetensors``, or in ``.gguf`` for that layout. transformers'
    models also write their ``config.json``. A weight that two modules share is stored once if the model knows it as
    tied, otherwise twice. ``overwrite``: replace the file or the folder of a checkpoint, with all files in it.
    Raises NotImplementedError for a tensor that the layout cannot hold, FileExistsError for a folder that is not empty.
    """
    chosen = _writable(layout, path)
    config: dict[str, Any] = {}
    if isinstance(model, nn.Module):
        of_model: Any = getattr(model, "config", None)
        config = of_model.to_diff_dict() if hasattr(of_model, "to_diff_dict") else {}
        if config and hasattr(model, "dtype"):  # as save_pretrained does
            config["dtype"] = str(model.dtype).removeprefix("torch.")
        state: Mapping[str, Any] = {k: v for k, v in model.state_dict().items() if k not in tied_keys(model)}
    elif isinstance(model, Mapping):
        state = model
    else:
        raise TypeError(f"save takes a module or a state dict, not {described(model)}")
    written, known = Written(), model if isinstance(model, nn.Module) else None
    lookups = lookups_of(known)
    with _sink(chosen, path, max_shard_bytes, overwrite, None) as sink:
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise TypeError(f"save: a state dict holds tensors by name, got {described(value)} for {name!r:.80}")
            _store(sink, chosen, written, name, values_of(value), lookups)
        sink.finish(merged(config, _config(chosen, written, known, config), None))


def convert(
    source: str | Path,
    destination: str | Path,
    layout: str = "native",
    format: Config | None = None,
    skip: Sequence[str] = (),
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
) -> Conversion:
    """Convert a checkpoint to another layout, tensor by tensor: memory holds a few tensors, not the model or a shard.

    ``format``: what ``quantize_`` takes for inference, such as ``"mxfp4-weight-only"``: matrices in high precision are
    quantized, and those in another format are quantized again; None only changes the layout, which is exact. A ``Plan``
    or an ``FqnToConfig`` names tensors of the checkpoint. Stacked experts are quantized for the layouts that hold them
    (``Layout.dims``). Embeddings, heads, routers and modules whose name ends in one of ``skip`` stay as they are,
    except those that a plan names and ``skip`` does not. Other files of the
    folder, such as the tokenizer, are copied. The destination is whole or absent, and what ``overwrite`` replaces stays
    until then. Matrices are cast by torch's number of threads, one each. Raises as ``load`` and ``save``, and
    ValueError for a destination that is the source, is inside it or contains it.
    """
    chosen = _writable(layout, destination)
    written = Written()
    with opened(source) as checkpoint:
        check_apart(destination, source, *{stored.file for stored in checkpoint.tensors.values()})
        before, checkpoint.maps = layout_of(checkpoint), True
        known = model_of(checkpoint.config)
        lookups = lookups_of(known)
        recipes = Recipes(format, (*SKIPPED, *lookups, *skip), skip)
        report = Conversion(before.name, chosen.name)
        moves = (before is not chosen or not chosen.static_scales) and before.config is not None
        with _sink(chosen, destination, max_shard_bytes, overwrite, checkpoint) as sink:
            entries = before.entries(checkpoint)
            _check_inputs(entries, before.name, chosen.name)
            report.dropped = [name for name in entries if moves and is_skipped(name, STATIC)]
            rest = {name: entry for name, entry in entries.items() if name not in report.dropped}

            def work(name: str) -> tuple[Tensor, float | None]:
                value = checkpoint.load(name, rest[name])
                side = matrix_orientation(name, value.shape, checkpoint.config)
                recipe, left_out = recipes.of(name)
                if side is None or left_out or not value.numel():
                    return value, None
                alone = not chosen.experts and EXPERT.search(name)
                if value.dim() not in chosen.dims or alone:
                    if recipe is not None and (value.dim() == 3 or alone) and not isinstance(value, MXTensor):
                        report.stacks.append(name)
                    return value, None
                new = _quantized(value, recipe, side)
                return new, None if new is value else _relative_error(value, new)

            recipes.warn_of_unmatched(rest)
            workers = 1 if any(recipe.stored.rounding is Rounding.STOCHASTIC for recipe in recipes.every) else None
            with closing(in_order(work, list(rest), workers)) as results:
                for name, (new, error) in _progress(results, "converting", len(rest), progress):
                    if error is None:
                        report.exact.append(name)
                    else:
                        report.errors[name] = error
                    _store(sink, chosen, written, name, new, lookups)
            report.stacks.sort()
            files = merged(checkpoint.config, _config(chosen, written, known, checkpoint.config), checkpoint.path)
            sink.finish(files, checkpoint.path)
    return report


def _check_inputs(entries: Iterable[str], before: str, after: str) -> None:
    """Raise NotImplementedError for inputs that are multiplied, which no other layout does."""
    found = next((name for name in entries if name.endswith(INPUT_SCALE)), None)
    if found is not None and after not in (before, "native"):
        raise NotImplementedError(
            f"{found}: the layout {before} multiplies the inputs of this layer, and {after} does not; use the layout "
            "native, or that of the source"
        )


def _progress(items: Iterable[Item], description: str, count: int, shown: bool) -> Iterable[Item]:
    return with_progress(items, description, "tensor", count) if shown and count > 100 else items


def _sink(layout: Layout, path: str | Path, shard_bytes: int, overwrite: bool, source: Checkpoint | None) -> Any:
    if layout.sink is not None:
        return layout.sink(path, shard_bytes, overwrite, source)
    return Sink(path, shard_bytes, overwrite, source, layout.header)


def _writable(layout: str, path: str | Path) -> Layout:
    chosen = get_layout(layout)
    if chosen.sink is None and str(path).endswith(".gguf"):
        raise ValueError(f"{path} has the ending of the layout gguf, not of {chosen.name}; pass layout='gguf'")
    if not chosen.one_file and str(path).endswith(".safetensors"):
        raise ValueError(f"the layout {chosen.name} has a config.json; pass a folder, not the file {path}")
    if chosen.write is None:
        raise NotImplementedError(f"the layout {chosen.name} is only read; choose another one to write")
    return chosen


def _store(sink: Any, layout: Layout, written: Written, name: str, value: Tensor, lookups: Sequence[str]) -> None:
    """Add a tensor to a checkpoint as the layout stores it. ``lookups``: embeddings beside LOOKUPS."""
    write: Callable[[str, MXTensor], dict[str, Tensor]] = layout.write  # type: ignore[assignment]
    if isinstance(value, MXTensor) and not value.numel() and not layout.empty:
        value = value.dequantize()
    if isinstance(value, MXTensor):
        if not layout.embeddings and is_skipped(name.removesuffix(".weight"), (*LOOKUPS, *lookups)):
            raise NotImplementedError(
                f"{name} is a quantized embedding, which no reader of the layout {layout.name} decodes; use the layout "
                "native, or leave embeddings in high precision (quantize_ without include_head)"
            )
        if not layout.experts and EXPERT.search(name):
            raise NotImplementedError(
                f"{name} is one expert of many, which readers of the layout {layout.name} stack before they decode; "
                "use the layout compressed-tensors or native"
            )
        stored, written.weights[name] = write(name, value), value.recipe
        written.values[value.dtype] += value.numel()
    else:
        check_plain(f"save: {name}", value)
        stored = {name: value.detach()}
        if value.dim() == 2 and value.is_floating_point() and name.endswith(".weight"):
            written.others.append(name)
    sink.add(stored, layout.metadata(name, value) if layout.metadata else {})


def _config(layout: Layout, written: Written, model: nn.Module | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON files of the layout. ``model``: if it is known; ``config``: its ``config.json``."""
    if model is not None:
        written.others += tied_layers(model, written.weights)
    else:
        written.others += usual_heads(config, written.weights, written.others)
    return layout.files(written, config)


def _quantized(value: Tensor, recipe: LinearRecipe | None, side: Orientation) -> Tensor:
    """``value`` in the format of ``recipe``, if it has another one."""
    if recipe is None or not value.is_floating_point():
        return value
    if isinstance(value, MXTensor):
        if value.format == recipe.stored.format:
            return value
        value = value.dequantize()
    return quantize_as(value, recipe, side)


def _relative_error(before: Tensor, after: Tensor) -> float:
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
        true, rounded = map(_values, tiles)
        noise.append(float((rounded - true).norm()))
        signal.append(float(true.norm()))
    error = math.hypot(*noise) / (math.hypot(*signal) or 1.0)
    return error if math.isfinite(error) else math.inf


def _values(t: Tensor) -> Tensor:
    return (t.dequantize() if isinstance(t, MXTensor) else t).float()


@dataclass(frozen=True)
class Row:
    """One tensor of a checkpoint, for ``info``."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Info:
    """What a checkpoint holds."""

    path: Path
    layout: str
    rows: tuple[Row, ...]

    @property
    def by_format(self) -> dict[str, tuple[int, int, int]]:
        """Format or dtype -> (tensors, values, bytes)."""
        out: dict[str, tuple[int, int, int]] = {}
        for row in self.rows:
            count, values, size = out.get(row.format, (0, 0, 0))
            out[row.format] = count + 1, values + math.prod(row.shape), size + row.nbytes
        return out


def info(path: str | Path, progress: bool = False) -> Info:
    """The layout of a checkpoint and the format, shape and bytes of each tensor, which are read one by one."""
    with opened(path) as checkpoint:
        layout, checkpoint.maps = layout_of(checkpoint), True
        return Info(checkpoint.path, layout.name, tuple(_rows(checkpoint, layout, progress)))


def _rows(checkpoint: Checkpoint, layout: Layout, progress: bool) -> Iterator[Row]:
    entries = layout.entries(checkpoint)
    for name, entry in _progress(entries.items(), "reading", len(entries), progress):
        value = checkpoint.load(name, entry)
        kind = value.format.name if isinstance(value, MXTensor) else str(value.dtype).removeprefix("torch.")
        yield Row(name, kind, tuple(value.shape), value.nbytes)
