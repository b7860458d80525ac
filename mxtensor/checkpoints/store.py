"""Every layout by name; ``load``, ``save`` and ``info`` of checkpoints in each.

state = mx.checkpoints.load("model-NVFP4")  # MXTensors, without a detour
mx.checkpoints.save(model, "out", layout="compressed-tensors")
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core import names
from ..core.arguments import check_plain, described
from ..core.compat import is_sharded
from ..core.names import dtype_name
from ..core.progress import with_progress
from ..numerics.formats import FORMATS
from ..tensor.huge_pages import use_huge_pages
from ..tensor.mxtensor import MXTensor
from ..training.prepared_linear import SCALE, has_static_inputs
from ..training.training_weight import values_of
from .compressed_tensors import COMPRESSED_TENSORS
from .deepseek import DEEPSEEK
from .gguf import GGUF, open_gguf
from .global_scale import steps
from .gpt_oss import GPT_OSS
from .layout import Layout, Written, check_scales, check_shapes, is_float_code
from .mlx import MLX
from .modelopt import MODELOPT
from .names import Known, stored_by_others, tied_layers, usual_heads
from .native import NATIVE
from .pickled import ENDINGS, PICKLED, PICKLES, open_pickled
from .plain import PLAIN
from .quark import QUARK
from .reading import DTYPES, Checkpoint, named_dtype, open_checkpoint
from .torchao import TORCHAO
from .writing import Sink

SHARD_BYTES = 1 << 29
QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Keys of a ``config.json`` that describe how its checkpoint is quantized."""

LAYOUTS = {
    layout.name: layout
    for layout in (
        GGUF, PICKLED, NATIVE, TORCHAO, COMPRESSED_TENSORS, GPT_OSS, MODELOPT, DEEPSEEK, QUARK, MLX, PLAIN,
    )
}  # fmt: skip
"""Name -> layout, in the order in which they are asked whether a checkpoint is theirs."""


def get_layout(name: str) -> Layout:
    """The layout called ``name``; case, hyphens and underscores do not matter. Raises ValueError for an unknown one."""
    found = names.find(name, LAYOUTS) if isinstance(name, str) else None
    if found is None:
        choices = names.choices("layouts", name if isinstance(name, str) else "", LAYOUTS)
        if name == "safetensors":
            choices = f"the file is one of safetensors in most of them, such as 'native'; {choices}"
        elif isinstance(name, str) and names.find(name, [*FORMATS, *FORMATS.aliases]):
            choices = f"it is a format: pass format={name!r} to convert, or quantize_ the model before save; {choices}"
        raise ValueError(f"unknown layout {described(name)}; {choices}")
    return LAYOUTS[found]


def layout_of(checkpoint: Checkpoint) -> Layout:
    """The layout of an opened checkpoint. Raises NotImplementedError for one that no row knows."""
    for layout in LAYOUTS.values():
        if layout.detect(checkpoint):
            return layout
    raise NotImplementedError(
        f"{checkpoint.path} has the quant_method {described(checkpoint.method)}, which no layout reads; the layouts "
        f"are {', '.join(LAYOUTS)}"
    )


def opened(path: str | Path) -> Checkpoint:
    """Open a folder or a file. Raises FileNotFoundError or ValueError with the reason."""
    path = Path(path)
    if path.is_dir() and any(path.glob("*.safetensors*")):
        return open_checkpoint(path)
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF files; pass one of them: {files[0].name} ...")
    if files and files[0].is_file():
        return open_gguf(files[0])
    pickled = any((path / name).is_file() for name in PICKLES) or (path.is_file() and path.suffix in ENDINGS)
    return open_pickled(path) if pickled else open_checkpoint(path)


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
        shared = stored_by_others(model)
        state: Mapping[str, Any] = {k: v for k, v in model.state_dict().items() if k not in shared}
    elif isinstance(model, Mapping):
        state = model
    else:
        raise TypeError(f"save takes a module or a state dict, not {described(model)}")
    _check_state(state, chosen)
    written = Written(Known(model if isinstance(model, nn.Module) else None, config=config))
    with chosen.sink(path, max_shard_bytes, overwrite, None, chosen.header) as sink:
        for name, value in state.items():
            store_tensor(sink, chosen, written, name, values_of(value))
        sink.finish(config_files(chosen, written))
    _warn_of_casts(chosen, written)


def _check_state(state: Mapping[str, Any], layout: Layout) -> None:
    """Raise TypeError for what is not a tensor with a name, and NotImplementedError for a tensor of which each rank has
    a part, static scales of inputs that readers of the layout would not apply, codes without their scales, and parts of
    blocks."""
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"save: a state dict holds tensors by name, got {described(value)} for {name!r:.80}")
        if is_sharded(value):
            sharded: Any = value
            raise NotImplementedError(
                f"save: {name} is sharded, {tuple(value.shape)} as {sharded.placements}: no rank has all of it; on "
                "every rank call torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "
                "load the result into a model of one process, and save that"
            )
    weights = {name: state.get(f"{name.removesuffix(SCALE)}weight") for name in state if name.endswith(f".{SCALE}")}
    static = [name for name, w in weights.items() if isinstance(w, MXTensor) and has_static_inputs(w.recipe)]
    if static and not layout.input_scales:
        fit = ", ".join(one.name for one in LAYOUTS.values() if one.input_scales)
        raise NotImplementedError(
            f"save: {static[0]} and {len(static) - 1} others are static scales of inputs, for which the layout "
            f"{layout.name} has no place; use one of the layouts {fit}, or quantize the model without step="
        )
    plain = {k: (dtype_name(v.dtype), v.shape) for k, v in state.items() if not isinstance(v, MXTensor)}
    check_scales(layout.name, plain, (), (), lambda name: f"save: {name}")
    shapes = {k: (v.shape, v.format) for k, v in state.items() if isinstance(v, MXTensor) and v.rowwise is not None}
    check_shapes("save", layout, shapes, "leave {} in high precision (filter_fn of quantize_)")


def _warn_of_casts(layout: Layout, written: Written) -> None:
    """Warn of weights whose activations readers of the layout cast otherwise than the model."""
    unquantized, cast = written.other_casts(layout.activation)
    if unquantized:
        warnings.warn(
            f"save: the layout {layout.name} does not store how activations are cast, of {len(unquantized)} weights, "
            f"such as {unquantized[0]}: its readers multiply them with activations in high precision (weight-only). "
            "The layout native stores it",
            UserWarning,
            stacklevel=3,
        )
    if cast:
        name, format = next(iter(cast.items()))
        warnings.warn(
            f"save: readers of the layout {layout.name} cast the activations of {len(cast)} weights, such as {name}, "
            f"to {format}, unlike this model. The layout native stores how they are cast",
            UserWarning,
            stacklevel=3,
        )


def writable(layout: str, path: str | Path) -> Layout:
    """The layout called ``layout``. Raises ValueError for an unknown one and for a path that it does not have,
    NotImplementedError for one that can only be read."""
    chosen = get_layout(layout)
    if chosen.sink is Sink and str(path).endswith(".gguf"):
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
        with chosen.sink(path, SHARD_BYTES, overwrite):
            pass
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def store_tensor(sink: Any, layout: Layout, written: Written, name: str, value: Tensor) -> None:
    """Add a tensor to a checkpoint as the layout stores it."""
    assert layout.write is not None
    known = written.known
    if isinstance(value, MXTensor) and not value.numel() and not layout.empty:
        value = value.dequantize()
    if isinstance(value, MXTensor):
        if not layout.embeddings and known.is_lookup(name):
            raise NotImplementedError(
                f"{name} is a quantized embedding, which no reader of the layout {layout.name} decodes; use the layout "
                "native, or leave embeddings in high precision (include_head=False)"
            )
        if not layout.shared and known.is_shared(name):
            raise NotImplementedError(
                f"{name} is the weight of two layers, and readers of the layout {layout.name} look for the scales of "
                "each; use the layout native, or leave both in high precision (filter_fn)"
            )
        if not layout.experts and known.is_expert(name):
            raise NotImplementedError(
                f"{name} is one expert of many, which readers of the layout {layout.name} stack before they decode; "
                "use the layout compressed-tensors or native"
            )
        stored, written.weights[name] = layout.write(name, value), value.recipe
        written.values[value.dtype] += value.numel()
        written.dtypes[name] = value.dtype
        written.stepped += [name] if layout.combine is not None and steps(value, layout.combine) else []
    else:
        check_plain(f"save: {name}", value)
        if layout.scales and is_float_code(dtype_name(value.dtype), value.shape):
            raise NotImplementedError(
                f"{name} is {dtype_name(value.dtype)} without scales, which readers of the layout {layout.name} take "
                "for codes whose scale is lost; store it in bfloat16, or use the layout native"
            )
        stored = {name: value.detach()}
        module, _, leaf = name.rpartition(".")
        if leaf == "input_scale":
            written.static.add(module)
        if value.is_floating_point() and value.dim() == 2 and name.endswith(".weight"):
            written.others.append(name)
        elif value.is_floating_point() and value.dim() == 3 and known.orientation(name, value.shape) is not None:
            written.stacks.append(name)
    parameters = known.names_of(name) if layout.parameter_names else (name,)
    metadata = layout.metadata or (lambda name, value: {})
    sink.add(stored, {k: v for other in parameters for k, v in metadata(other, value).items()})


def config_files(
    layout: Layout, written: Written, source: Checkpoint | None = None, saved: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON files to write: those of the layout, merged into the ``config.json`` of the model and the files of the
    ``source``, without what describes the quantization there. ``saved``: files in the place of those of the layout."""
    known, files = written.known, dict(saved or {})
    if not files:
        if known.model is not None:
            written.others += tied_layers(known.model, {p for name in written.weights for p in known.names_of(name)})
        else:
            written.others += usual_heads(known.config, written.weights, written.others)
        files = layout.config(written) if layout.config is not None and written.weights else {}
        if "config.json" in files and named_dtype(known.config) is None:  # most layouts store a dtype with no tensor
            files["config.json"]["dtype"] = dtype_name(written.values.most_common(1)[0][0])  # of most values
    config = {k: v for k, v in known.config.items() if k not in QUANTIZATION}
    out: dict[str, Any] = {"config.json": config} if config else {}
    for name, content in files.items():
        before = out.get(name) or ({} if source is None else source.json(name))
        out[name] = {**before, **content}
    return out


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
        layout, checkpoint.streams = layout_of(checkpoint), True
        entries = layout.entries(checkpoint)
        items, rows = entries.items(), []
        for name, entry in with_progress(items, "reading", "tensor", len(entries)) if progress else items:
            stored = checkpoint.tensors[entry.sources[0]]
            if entry.encoded is not None:
                rows.append(Row(name, stored.dtype, stored.shape, stored.nbytes))
            elif entry.build is None and stored.dtype in DTYPES:  # its header says all
                rows.append(Row(name, dtype_name(DTYPES[stored.dtype]), stored.shape, stored.nbytes))
            else:
                value = checkpoint.load(name, entry)
                rows.append(Row(name, format_name(value), tuple(value.shape), value.nbytes))
                del value  # so that the next tensor gets its memory
        return Info(checkpoint.path, layout.name, tuple(rows))


def format_name(t: Tensor) -> str:
    """The name of the format, or of the dtype of plain values."""
    return t.format.name if isinstance(t, MXTensor) else dtype_name(t.dtype)
