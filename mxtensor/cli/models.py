"""Loading a language model with transformers from a checkpoint of any layout, for commands that run it.

transformers loads the layouts native and plain. Every other layout is first converted to native in a temporary folder,
which is exact; a GGUF file of a model that transformers knows becomes a folder with transformers' names.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import store
from ..checkpoints.gguf import CODES
from ..checkpoints.registry import layout_of, opened
from ..integrations import TransformersConfig
from ..report.quality import windows
from .output import note

LOADED_AS_IT_IS = ("native", "plain")
"""Layouts that transformers loads with this package."""


def transformers_quietly() -> Any:
    """The module transformers, without its messages, its progress bars and the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a path on this machine is all that is read
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this command needs transformers: pip install 'mxtensor[cli]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the tables say the bits
    return transformers


# ---------------------------------------------------------------------------------------------- GGUF


def is_gguf(path: Path) -> bool:
    """Whether a GGUF file is at this path, or the only weights in this folder."""
    with opened(path) as checkpoint:
        return layout_of(checkpoint).name == "gguf"


@contextmanager
def without_gguf(path: str | Path, beside: str | Path | None = None) -> Iterator[Path]:
    """The path; for a GGUF file of an architecture that transformers knows, a temporary folder as it saves the model.

    Such a folder has the configuration, the tokenizer and bfloat16 weights with transformers' names. A file with CODES
    stays as it is, so that they stay codes. ``beside``: the temporary folder is made next to this path.
    """
    path = Path(path)
    if not is_gguf(path):
        yield path
        return
    with opened(path) as checkpoint:
        file, kinds = checkpoint.path, {stored.dtype for stored in checkpoint.tensors.values()}
    parent = None if beside is None else Path(beside).resolve().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mxtensor-gguf-", dir=parent) as folder:
        codes = ", ".join(sorted(kinds & CODES.keys()))
        why = f"it holds {codes} codes, which stay codes" if codes else _save_gguf(file, Path(folder))
        if why is None:
            note(f"{file.name} becomes a model of transformers, in bfloat16")
            yield Path(folder)
            return
    note(f"{file.name} keeps llama.cpp's names of tensors: {why}")
    yield path


def _save_gguf(file: Path, folder: Path) -> str | None:
    """Save a GGUF file as transformers saves its models; why not if transformers cannot read it."""
    try:
        transformers = transformers_quietly()
    except ImportError:
        return "transformers is not installed (pip install 'mxtensor[cli]')"
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
            model.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        shutil.rmtree(folder)
        folder.mkdir()
        return f"transformers cannot read it ({' '.join(str(error).split())[:160]})"
    return None


# ---------------------------------------------------------------------------------------------- models


@contextmanager
def loadable(path: str | Path) -> Iterator[Path]:
    """A folder that ``from_pretrained`` loads: the path itself, or a temporary one.

    Raises FileNotFoundError or ValueError for a path that has no model.
    """
    with without_gguf(path) as source:
        with opened(source) as checkpoint:
            layout = layout_of(checkpoint).name
            if not checkpoint.config:
                raise ValueError(f"{path} has no config.json; pass the folder of a model as transformers saves it")
        if layout in LOADED_AS_IT_IS:
            yield source
            return
        with tempfile.TemporaryDirectory(prefix="mxtensor-") as folder:
            note(f"{path} has the layout {layout}; it is converted to native in a temporary folder")
            store.convert(source, Path(folder) / "model", layout="native")
            yield Path(folder) / "model"


def load_model(path: str | Path, device: str, format: str | None = None, skip: Sequence[str] = ()) -> tuple[Any, Any]:
    """(the causal language model of a checkpoint, its tokenizer or None), the model ready to run on ``device``.

    Its weights are quantized to ``format`` while it is loaded; None leaves them as they are. Raises ValueError for a
    checkpoint that is quantized already if there is a format, or that transformers does not load.
    """
    transformers = transformers_quietly()
    options: dict[str, Any] = {} if format is None else {"quantization_config": TransformersConfig(format, skip)}
    with loadable(path) as folder, redirect_stdout(sys.stderr):
        with opened(folder) as checkpoint:
            if format is not None and layout_of(checkpoint).name == "native":
                raise ValueError(f"{path} is quantized already; leave --format out, or pass the model before")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
        except (OSError, KeyError) as error:
            raise ValueError(f"{path} cannot be loaded by transformers: {error}") from error
        tokenizer = load_tokenizer(folder)
    return model.eval().requires_grad_(False).to(device), tokenizer


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a folder; None if it has none."""
    transformers = transformers_quietly()
    if any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return transformers.AutoTokenizer.from_pretrained(folder)
    return None


def read_text(file: str) -> str:
    """The text in a file ("-": standard input). Raises ValueError that names it, or OSError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}") from error


def text_rows(tokenizer: Any, path: str, file: str, text: str, tokens: int | None, window: int) -> torch.Tensor:
    """The first tokens of the text in ``file`` as rows of a window.

    ``path``: the model, for the message if its ``tokenizer`` is None. Raises ValueError that names the file.
    """
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer; pass --tokenizer with a folder that has one")
    try:
        return windows(tokenizer, text, tokens, window)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
