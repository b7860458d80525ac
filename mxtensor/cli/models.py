"""Loading a language model with transformers from a checkpoint of any layout, for commands that run it.

transformers loads the layouts native and plain. Every other layout is first converted to native in a temporary folder,
which is exact. A GGUF file of a model that transformers knows becomes a folder as transformers saves it: its
configuration, its tokenizer and its values in bfloat16. transformers decodes the file in float32, in which all types of
GGUF are exact, and each tensor is rounded once: if it decoded in bfloat16, scales of some types would be rounded before
they multiply. Memory holds 4 bytes a value meanwhile.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoints import convert
from ..checkpoints.conversion import change
from ..checkpoints.gguf import CODES, GGUF, WRITTEN, GGUFSink, read_quickly
from ..checkpoints.gguf import NAMES as TYPES
from ..checkpoints.names import check_skip, is_skipped, loaded_by, with_parameters
from ..checkpoints.store import layout_of, opened
from ..convert.configs import recipe_of
from ..convert.quantize import quantize_
from ..convert.weights import KINDS, FilterFn, weights_to_quantize
from ..integrations import TransformersConfig
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .output import library_output, note, one_line, status, transformers_quietly

LOADED_AS_IT_IS = ("native", "plain")
"""Layouts that transformers loads with this package."""
PREFIX = ".mxtensor-gguf-"
"""Of temporary folders with the model of a GGUF file."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@contextmanager
def loadable(path: str | Path) -> Iterator[Path]:
    """A folder that ``from_pretrained`` loads: the path itself, or a temporary one.

    Raises FileNotFoundError or ValueError for a path that has no model.
    """
    file = gguf_file(path)
    if file is not None:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
            saved = save_gguf(file, Path(name))
            if isinstance(saved, str):
                raise ValueError(f"{file} cannot be run: {saved}; pass the model as a folder that transformers saved")
            yield saved.path
        return
    with opened(path) as checkpoint:
        layout = layout_of(checkpoint).name
        if not checkpoint.config:
            raise ValueError(f"{path} has no config.json; pass the folder of a model as transformers saves it")
    if layout in LOADED_AS_IT_IS:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="mxtensor-") as name:
        note(f"{path} has the layout {layout}; it is converted to native in a temporary folder")
        convert(path, Path(name) / "model", layout="native")
        yield Path(name) / "model"


def load_model(
    path: str | Path, device: str, format: str | None = None, skip: Sequence[str] = (), keeps_codes: bool = True
) -> tuple[Any, Any]:
    """(the causal language model of a checkpoint, its tokenizer or None), the model ready to run on ``device``.

    Its weights are quantized to ``format`` while it is loaded; None leaves them as they are. ``keeps_codes``: codes of
    a GGUF file are codes in the model, not values in bfloat16. Raises ValueError for a
    checkpoint that is quantized already if there is a format, or that transformers does not load.
    """
    transformers = transformers_quietly()
    options: dict[str, Any] = {} if format is None else {"quantization_config": TransformersConfig(format, skip)}
    with loadable(path) as folder:
        with opened(folder) as checkpoint:
            if format is not None and layout_of(checkpoint).name == "native":
                raise ValueError(
                    f"{path} is quantized already; leave --format out, or pass the model before quantization"
                )
        if folder == Path(path):
            status(f"loading {path}")
        with library_output():
            try:
                model, about = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype="auto", output_loading_info=True, **options
                )
                tokenizer = load_tokenizer(folder)
            except ImportError:
                raise
            except Exception as error:  # a folder that transformers does not expect raises anything
                raise ValueError(f"{path} cannot be loaded by transformers: {one_line(error)}") from error
    missing = sorted(about["missing_keys"])
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}: transformers would "
            "fill them with random values"
        )
    model = model.eval().requires_grad_(False)
    if keeps_codes and format is None:
        with_codes(model, path)
    return model.to(device), tokenizer


def filter_without(command: str, model: nn.Module, skip: Sequence[str], include_head: bool = False) -> FilterFn | None:
    """What ``quantize_`` converts without a filter, except for what ``skip`` names; None: nothing is skipped."""
    if not skip:
        return None
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    check_skip(command, skip, with_parameters(model), names)
    found = weights_to_quantize(model, None, include_head)
    taken = {weight.module_name for weight in found if not is_skipped(weight.fqn, skip)}
    return lambda _, fqn: fqn in taken


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a folder; None if it has none. Raises ValueError for one that transformers does not load."""
    transformers = transformers_quietly()
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--tokenizer: {folder} does not exist; pass the folder of a tokenizer or of a model")
    if not any((Path(folder) / name).is_file() for name in TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be loaded by transformers: {one_line(error)}") from error


def read_text(file: str) -> str:
    """The text in a file ("-": standard input). Raises ValueError or OSError that names it."""
    if file != "-" and (Path(file).is_dir() or not Path(file).exists()):  # <(...) of a shell is a pipe, not a file
        what = "is a folder" if Path(file).is_dir() else "does not exist"
        raise FileNotFoundError(f"--text: {file} {what}; pass a text file in UTF-8")
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}") from error


# ---------------------------------------------------------------------------------------------- GGUF files


LONGEST = 200
"""Characters of an error of transformers in a message."""


class Decoded(NamedTuple):
    """A checkpoint without the types of GGUF."""

    path: Path
    rounded: dict[str, float]
    """Tensor -> relative error of its values in bfloat16, of those that bfloat16 does not hold."""


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file at this path, or the only one in this folder; None if there is another checkpoint."""
    with opened(path) as checkpoint:
        return checkpoint.path if layout_of(checkpoint) is GGUF else None


@contextmanager
def without_gguf(path: str | Path, next_to: str | Path | None = None, keeps_codes: bool = True) -> Iterator[Decoded]:
    """The path; for a GGUF file of an architecture that transformers knows, a temporary folder as it saves the model.

    ``keeps_codes``: a file with CODES stays as it is, so that they stay codes. ``next_to``: the folder is beside this
    path, where there is room for a model.
    """
    path = Path(path)
    file = gguf_file(path)
    if file is None:
        yield Decoded(path, {})
        return
    with opened(file) as checkpoint:
        codes = ", ".join(sorted({stored.dtype for stored in checkpoint.tensors.values()} & CODES.keys()))
    why = f"it holds {codes} codes, which stay codes" if codes and keeps_codes else None
    if why is None:
        parent = None if next_to is None else Path(next_to).resolve().parent
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as folder:
            saved = save_gguf(file, Path(folder))
            if isinstance(saved, Decoded):
                note(f"{file.name} becomes a model of transformers, in bfloat16")
                yield saved
                return
            why = saved
    note(f"{file.name} keeps llama.cpp's names of tensors: {why}")
    yield Decoded(path, {})


def save_gguf(file: Path, folder: Path) -> Decoded | str:
    """Save a GGUF file as transformers saves its models; why not if transformers cannot read it.

    A tokenizer that transformers cannot read is left out, with a note.
    """
    with opened(file) as checkpoint:
        fields = checkpoint.reader.fields
    kind = fields["general.architecture"].contents() if "general.architecture" in fields else "general"
    if f"{kind}.block_count" not in fields:  # transformers would take the sizes of another model
        return f"transformers cannot read it: its header lacks {kind}.block_count, which llama.cpp's converter writes"
    try:
        transformers = transformers_quietly()
    except ImportError:
        return "transformers is not installed (pip install 'mxtensor[cli]')"
    status(f"loading {file.name}")
    try:
        saved = _save_model(transformers, file, folder)
    except Exception as error:  # a file that transformers does not expect raises anything
        try:
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder.resolve().parent) as place:
                saved = _save_model(transformers, _decoded(file, Path(place)), folder)
        except Exception:
            saved = f"transformers cannot read it ({type(error).__name__}: {one_line(error)[:LONGEST]})"
    if isinstance(saved, str):
        shutil.rmtree(folder)
        folder.mkdir()
        return saved
    if "tokenizer.ggml.model" in fields:
        try:
            with library_output(), read_quickly():
                transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)[:LONGEST]}"
            note(f"{file.name}: transformers cannot read its tokenizer ({why})")
    return saved


def _save_model(transformers: Any, file: Path, folder: Path) -> Decoded | str:
    """Save the model of a GGUF file; why not if it lacks tensors. Raises anything for a file that is not expected."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with library_output(), read_quickly():
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, about = load(file.parent, output_loading_info=True, **options)
        if about["missing_keys"]:
            return f"transformers cannot read it: it finds no {', '.join(sorted(about['missing_keys'])[:2])}"
        errors = _round(model)
        model.save_pretrained(folder)
    with opened(folder) as checkpoint:
        made_of = {name: loaded.parameters for name, loaded in loaded_by(model, checkpoint.tensors).items()}
    found = {name: [errors[one] for one in (name, *names) if one in errors] for name, names in made_of.items()}
    return Decoded(folder, {name: max(each) for name, each in found.items() if each})


def _round(model: nn.Module) -> dict[str, float]:
    """Round the parameters to bfloat16, but for those that transformers keeps in float32. Returns the relative errors
    of those that bfloat16 does not hold, by all their names."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    errors: dict[int, float | None] = {}
    names: dict[str, float] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in errors:
            stays = not parameter.is_floating_point() or any(f".{module}." in f".{name}." for module in strict)
            rounded = parameter.data if stays else parameter.data.bfloat16()
            errors[id(parameter)] = change(parameter.data, rounded)
            parameter.data = rounded
        error = errors[id(parameter)]
        names |= {} if error is None else {name: error}
    return names


def _decoded(file: Path, folder: Path) -> Path:
    """A copy whose tensors are values: transformers reads no MXFP4 of some architectures, such as Qwen 3.5 and LFM2."""
    out = folder / file.name
    with opened(file) as source, GGUFSink(out, 0, source=source) as sink:
        for name, entry in GGUF.entries(source).items():
            t = source.load(name, entry)
            t = t.dequantize(torch.float32) if isinstance(t, MXTensor) else t
            sink.add({name: t}, {name: TYPES[t.dtype]})
        sink.finish({})
    return out


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
        tensors = checkpoint.reader.tensors
    nbytes, values = sum(int(t.n_bytes) for t in tensors), sum(math.prod(map(int, t.shape)) for t in tensors)
    return 8 * nbytes / max(values, 1), nbytes
