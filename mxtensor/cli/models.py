"""Loading a language model with transformers from a checkpoint of any layout, for commands that run it.

transformers loads the layouts native and plain. Every other layout is first converted to native in a temporary folder,
which is exact; a GGUF file of a model that transformers knows becomes a folder with transformers' names.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints import convert
from ..checkpoints.recipes import is_skipped, warn_of_unmatched_skip, with_parameters
from ..checkpoints.registry import layout_of, opened
from ..convert.weights import FilterFn, weights_to_quantize
from ..integrations import TransformersConfig
from ..report.quality import windows
from .gguf_models import gguf_file, save_gguf, temporary, with_codes
from .output import note, one_line, status
from .quiet import library_output, transformers_quietly

LOADED_AS_IT_IS = ("native", "plain")
"""Layouts that transformers loads with this package."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@contextmanager
def loadable(path: str | Path) -> Iterator[Path]:
    """A folder that ``from_pretrained`` loads: the path itself, or a temporary one.

    Raises FileNotFoundError or ValueError for a path that has no model.
    """
    file = gguf_file(path)
    if file is not None:
        with temporary() as folder:
            why = save_gguf(file, folder)
            if why is not None:
                raise ValueError(f"{file} cannot be run: {why}; pass the model as a folder that transformers saved")
            yield folder
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
    warn_of_unmatched_skip(command, skip, with_parameters(model), names)
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


def text_rows(tokenizer: Any, path: str, file: str, text: str, tokens: int | None, window: int) -> torch.Tensor:
    """The first tokens of the text in ``file`` as rows of a window.

    ``path``: the model, for the message if its ``tokenizer`` is None. Raises ValueError that names the file.
    """
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer; pass --tokenizer with a folder that has one")
    try:
        return windows(tokenizer, text, tokens, window)
    except ValueError as error:
        raise ValueError(f"{file if file != '-' else 'standard input'}: {error}") from error
