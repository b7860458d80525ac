"""A GGUF file as a folder that transformers loads: its configuration, its tokenizer and its values in bfloat16."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.gguf import CODES, GGUF, WRITTEN
from ..checkpoints.gguf import NAMES as TYPES
from ..checkpoints.gguf_reader import read_quickly
from ..checkpoints.gguf_sink import GGUFSink
from ..checkpoints.registry import layout_of, opened
from ..convert.configs import recipe_of
from ..convert.quantize import quantize_
from ..convert.weights import KINDS
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .output import note, one_line, status
from .quiet import library_output, transformers_quietly

LONGEST = 200
"""Characters of an error of transformers in a message."""


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file at this path, or the only one in this folder; None if there is another checkpoint."""
    with opened(path) as checkpoint:
        return checkpoint.path if layout_of(checkpoint) is GGUF else None


@contextmanager
def temporary(next_to: str | Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end. ``next_to``: next to this path, where there is room for a model."""
    parent = None if next_to is None else Path(next_to).resolve().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mxtensor-gguf-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def without_gguf(path: str | Path, next_to: str | Path | None = None, keeps_codes: bool = True) -> Iterator[Path]:
    """The path; for a GGUF file of an architecture that transformers knows, a temporary folder as it saves the model.

    ``keeps_codes``: a file with CODES stays as it is, so that they stay codes. ``next_to``: as in ``temporary``.
    """
    path = Path(path)
    file = gguf_file(path)
    if file is None:
        yield path
        return
    with opened(file) as checkpoint:
        codes = ", ".join(sorted({stored.dtype for stored in checkpoint.tensors.values()} & CODES.keys()))
    why = f"it holds {codes} codes, which stay codes" if codes and keeps_codes else None
    if why is None:
        with temporary(next_to) as folder:
            why = save_gguf(file, folder)
            if why is None:
                note(f"{file.name} becomes a model of transformers, in bfloat16")
                yield folder
                return
    note(f"{file.name} keeps llama.cpp's names of tensors: {why}")
    yield path


def save_gguf(file: Path, folder: Path) -> str | None:
    """Save a GGUF file as transformers saves its models; why not if transformers cannot read it.

    A tokenizer that transformers cannot read is left out, with a note.
    """
    with opened(file) as checkpoint:
        fields = checkpoint.reader.fields  # type: ignore[attr-defined]
    kind = fields["general.architecture"].contents() if "general.architecture" in fields else "general"
    if f"{kind}.block_count" not in fields:  # transformers would take the sizes of another model
        return f"transformers cannot read it: its header lacks {kind}.block_count, which llama.cpp's converter writes"
    try:
        transformers = transformers_quietly()
    except ImportError:
        return "transformers is not installed (pip install 'mxtensor[cli]')"
    status(f"loading {file.name}")
    try:
        why = _save_model(transformers, file, folder)
    except Exception as error:  # a file that transformers does not expect raises anything
        try:
            with temporary(folder) as place:
                why = _save_model(transformers, _decoded(file, place), folder)
        except Exception:
            why = f"transformers cannot read it ({_as_one_line(error)})"
    if why is not None:
        shutil.rmtree(folder)
        folder.mkdir()
        return why
    if "tokenizer.ggml.model" in fields:
        _save_tokenizer(transformers, file, folder)
    return None


def _save_model(transformers: Any, file: Path, folder: Path) -> str | None:
    """Save the model of a GGUF file; why not if it lacks tensors. Raises anything for a file that is not expected."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with library_output(), read_quickly():
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, about = load(file.parent, output_loading_info=True, **options)
        if about["missing_keys"]:
            return f"transformers cannot read it: it finds no {', '.join(sorted(about['missing_keys'])[:2])}"
        model.save_pretrained(folder)
    return None


def _decoded(file: Path, folder: Path) -> Path:
    """A copy whose tensors are values: transformers reads no MXFP4 of some architectures, such as Qwen 3.5 and LFM2."""
    out = folder / file.name
    with opened(file) as source, GGUFSink(out, 0, source=source) as sink:
        for name, entry in GGUF.read(source).items():
            t = source.load(name, entry)
            t = t.dequantize() if isinstance(t, MXTensor) else t if entry.encoded is None else t.bfloat16()
            sink.add({name: t}, {name: TYPES[t.dtype]})
        sink.finish({})
    return out


def _save_tokenizer(transformers: Any, file: Path, folder: Path) -> None:
    try:
        with library_output(), read_quickly():
            transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:
        note(f"{file.name}: transformers cannot read its tokenizer ({_as_one_line(error)})")


def _as_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:LONGEST]}"


def with_codes(model: nn.Module, path: str | Path) -> None:
    """Quantize the weights of a decoded GGUF file that were codes in it: those whose values stay the same.

    transformers has decoded them, and permuted their rows.
    """
    file = gguf_file(path)
    if file is None:
        return
    with opened(file) as checkpoint:
        kinds = {stored.dtype for stored in checkpoint.tensors.values()}
    for format, (kind, *_) in WRITTEN.items():
        recipe = recipe_of(f"{format}-weight-only")
        exact = {fqn for fqn, m in model.named_modules() if _is_exact(m, recipe)} if kind in kinds else set()
        if exact:
            quantize_(model, recipe, filter_fn=lambda _, fqn, exact=exact: fqn in exact)  # type: ignore[misc]


def _is_exact(module: nn.Module, recipe: LinearRecipe) -> bool:
    kind = next((kind for kind in KINDS if kind.matches(module)), None)
    values = [] if kind is None else [getattr(module, name, None) for name in kind.names]
    return bool(values) and all(
        value is not None
        and not isinstance(value, MXTensor)
        and torch.equal(quantize_as(value.detach(), recipe, kind.orientation).dequantize(), value)  # type: ignore[union-attr]
        for value in values
    )


def stored_size(path: str | Path) -> tuple[float, int] | None:
    """Bits a value and bytes of the tensors of a GGUF file, scales included; None for another checkpoint."""
    file = gguf_file(path)
    if file is None:
        return None
    with opened(file) as checkpoint:
        tensors = checkpoint.reader.tensors  # type: ignore[attr-defined]
    nbytes, values = sum(int(t.n_bytes) for t in tensors), sum(math.prod(map(int, t.shape)) for t in tensors)
    return 8 * nbytes / max(values, 1), nbytes
