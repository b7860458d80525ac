"""``load``, ``save`` and ``info`` of checkpoints in every layout.

state = mx.checkpoints.load("model-NVFP4")  # MXTensors, without a detour
mx.checkpoints.save(model, "out", layout="compressed-tensors")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ..core.arguments import check_plain, described
from ..core.local import is_sharded
from ..core.names import dtype_name
from ..core.progress import with_progress
from ..tensor.huge_pages import use_huge_pages
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import values_of
from .known import Known
from .layout import Layout, Written, check_shapes
from .recipes import ends_in
from .registry import get_layout, layout_of, opened
from .sink import Sink, merged
from .source import Checkpoint
from .tied import LOOKUPS, tied_layers, usual_heads
from .transformers_names import tied_keys

Item = TypeVar("Item")
SHARD_BYTES = 1 << 29


def load(path: str | Path, layout: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: MXTensors for quantized tensors, ordinary tensors otherwise.

    ``path``: a folder, a ``.safetensors``, a ``.gguf`` or a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``).
    ``layout``: one of ``LAYOUTS``; None: detect it. Codes are loaded without dequantizing them. Raises
    FileNotFoundError, ValueError or NotImplementedError with the names of file and tensor.
    """
    with opened(path) as checkpoint:
        chosen = layout_of(checkpoint) if layout is None else get_layout(layout)
        found = {name: checkpoint.load(name, entry) for name, entry in chosen.entries(checkpoint).items()}
    use_huge_pages(found.values())
    return found


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    layout: str = "native",
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a model or a state dict in a layout, in shards with an index.

    ``path``: a new folder, or a file that ends in ``.safetensors``, or in ``.gguf`` for that layout. For a model of
    transformers, its ``config.json`` is written too. A weight that two modules share is stored once if the model lists
    it as tied, otherwise twice. ``overwrite``: replace the file, or the folder of a checkpoint with all files in it.
    Raises NotImplementedError for a tensor that the layout cannot store and for one that is sharded over ranks,
    FileExistsError for an existing destination.
    """
    chosen = writable(layout, path)
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
    _check_whole(state)
    written = Written(config, Known(model if isinstance(model, nn.Module) else None))
    shapes = {k: (v.shape, v.format) for k, v in state.items() if isinstance(v, MXTensor) and v.rowwise is not None}
    check_shapes("save", chosen, shapes, "leave {} in high precision (filter_fn of quantize_)")
    with sink_of(chosen, path, max_shard_bytes, overwrite, None) as sink:
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise TypeError(f"save: a state dict holds tensors by name, got {described(value)} for {name!r:.80}")
            store_tensor(sink, chosen, written, name, values_of(value))
        sink.finish(merged(config, config_files(chosen, written), None))


def _check_whole(state: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a tensor of which each rank has a part."""
    for name, value in state.items():
        if is_sharded(value):
            raise NotImplementedError(
                f"save: {name} is sharded, {tuple(value.shape)} as {value.placements}: no rank has all of it; on every "
                "rank call torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load "
                "the result into a model of one process, and save that"
            )


def with_bar(items: Iterable[Item], description: str, count: int, shown: bool) -> Iterable[Item]:
    """``items`` with a progress bar, if there are more than a few."""
    return with_progress(items, description, "tensor", count) if shown and count > 100 else items


def sink_of(layout: Layout, path: str | Path, shard_bytes: int, overwrite: bool, source: Checkpoint | None) -> Any:
    """The sink that writes a layout: a context manager with ``add`` and ``finish``. Raises as ``Destination``."""
    if layout.sink is not None:
        return layout.sink(path, shard_bytes, overwrite, source)
    return Sink(path, shard_bytes, overwrite, source, layout.header)


def writable(layout: str, path: str | Path) -> Layout:
    """The layout called ``layout``. Raises ValueError for an unknown one and for a path that it does not have,
    NotImplementedError for one that can only be read."""
    chosen = get_layout(layout)
    if chosen.sink is None and str(path).endswith(".gguf"):
        raise ValueError(f"{path} has the ending of the layout gguf, not of {chosen.name}; pass layout='gguf'")
    if not chosen.one_file and str(path).endswith(".safetensors"):
        raise ValueError(f"the layout {chosen.name} has a config.json; pass a folder, not the file {path}")
    if chosen.write is None:
        raise NotImplementedError(f"the layout {chosen.name} can only be read; choose another one to write")
    return chosen


def check_destination(path: str | Path, layout: str, overwrite: bool) -> None:
    """Raise what ``convert`` would raise for a destination that cannot be written, before a source is loaded."""
    chosen = writable(layout, path)
    try:
        with sink_of(chosen, path, SHARD_BYTES, overwrite, None):
            pass
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def store_tensor(sink: Any, layout: Layout, written: Written, name: str, value: Tensor) -> None:
    """Add a tensor to a checkpoint as the layout stores it."""
    write: Callable[[str, MXTensor], dict[str, Tensor]] = layout.write  # type: ignore[assignment]
    if isinstance(value, MXTensor) and not value.numel() and not layout.empty:
        value = value.dequantize()
    if isinstance(value, MXTensor):
        lookup = written.known.is_lookup(name) or ends_in(name.removesuffix(".weight"), LOOKUPS)
        if not layout.embeddings and lookup:
            raise NotImplementedError(
                f"{name} is a quantized embedding, which no reader of the layout {layout.name} decodes; use the layout "
                "native, or leave embeddings in high precision (include_head=False)"
            )
        if not layout.shared and written.known.is_shared(name):
            raise NotImplementedError(
                f"{name} is the weight of two layers, and readers of the layout {layout.name} look for the scales of "
                "each; use the layout native, or leave both in high precision (filter_fn)"
            )
        if not layout.experts and written.is_expert(name):
            raise NotImplementedError(
                f"{name} is one expert of many, which readers of the layout {layout.name} stack before they decode; "
                "use the layout compressed-tensors or native"
            )
        stored, written.weights[name] = write(name, value), value.recipe
        written.values[value.dtype] += value.numel()
    else:
        check_plain(f"save: {name}", value)
        stored = {name: value.detach()}
        written.note_plain(name, value)
    names = [name, *(written.known.loaded(name).parameters if layout.parameter_names else ())]
    sink.add(
        stored, {k: v for other in names for k, v in layout.metadata(other, value).items()} if layout.metadata else {}
    )


def config_files(layout: Layout, written: Written) -> dict[str, Any]:
    """The JSON files of the layout."""
    model = written.known.model
    if model is not None:
        parameters = (p for name in written.weights for p in (name, *written.known.loaded(name).parameters))
        written.others += tied_layers(model, set(parameters))
    else:
        written.others += usual_heads(written.config, written.weights, written.others)
    return layout.files(written, written.config)


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
    """The layout of a checkpoint, and the format, shape and bytes of each tensor. Tensors are read one by one."""
    with opened(path) as checkpoint:
        layout, checkpoint.maps = layout_of(checkpoint), True
        return Info(checkpoint.path, layout.name, tuple(_rows(checkpoint, layout, progress)))


def format_name(t: Tensor) -> str:
    """The name of the format, or of the dtype of plain values."""
    return t.format.name if isinstance(t, MXTensor) else dtype_name(t.dtype)


def _rows(checkpoint: Checkpoint, layout: Layout, progress: bool) -> Iterator[Row]:
    entries = layout.entries(checkpoint)
    for name, entry in with_bar(entries.items(), "reading", len(entries), progress):
        if entry.encoded is not None:
            yield Row(name, entry.encoded.kind, entry.encoded.shape, entry.encoded.nbytes)
            continue
        value = checkpoint.load(name, entry)
        yield Row(name, format_name(value), tuple(value.shape), value.nbytes)
