"""The arguments of the subcommands: one is one row of ARGUMENTS. Types check a value before anything is read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from ..calibration.planner import FORMATS
from ..checkpoints import store
from ..checkpoints.store import LAYOUTS, get_layout
from ..convert.configs import recipe_of
from ..report.quality import WINDOW
from ..report.tune import TUNED_ROWS

_WRITABLE = tuple(name for name, layout in LAYOUTS.items() if layout.write is not None)
DEVICES = ("cpu", "cuda")


def _format(name: str) -> str:
    """The name of a format for inference."""
    try:
        recipe = recipe_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
    if recipe.trains:
        raise argparse.ArgumentTypeError(f"{name} trains, and stores no codes; pass a format such as mxfp8-weight-only")
    return name


def _layout(name: str) -> str:
    """The name of a layout that can be written."""
    try:
        layout = get_layout(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
    if layout.write is None:
        raise argparse.ArgumentTypeError(
            f"the layout {layout.name} can only be read; choose one of {', '.join(_WRITABLE)}"
        )
    return layout.name


def _device(name: str) -> str:
    """The name of a device."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name!r} is not a device; pass cpu or cuda") from error
    if found.type not in DEVICES:
        raise argparse.ArgumentTypeError(f"{name!r} is not a device of this command; pass cpu or cuda")
    return str(found)


def _positive(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return count


def _path(text: str) -> str:
    """A path; ``~`` is the home folder, which a shell leaves alone in ``--output=~/model`` and in quotes."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path; is a variable of the shell empty?")
    return text if os.path.lexists(text) else os.path.expanduser(text)


Argument = tuple[tuple[str, ...], dict[str, Any]]
CHECKPOINT = "a folder, a .safetensors or a .gguf file"
FORMAT = "such as mxfp8, mxfp4-weight-only, nvfp4-weight-only"
ARGUMENTS: dict[str, Argument] = {
    "source": (("source",), {"type": _path, "metavar": "SRC", "help": CHECKPOINT}),
    "path": (("path",), {"type": _path, "metavar": "PATH", "help": CHECKPOINT}),
    "model": (
        ("path",), {"type": _path, "metavar": "MODEL", "help": "the folder of a language model, or its .gguf file"},
    ),
    "a": (("a",), {"type": _path, "metavar": "A", "help": "the checkpoint with the true values"}),
    "b": (("b",), {"type": _path, "metavar": "B", "help": "the checkpoint to compare with them"}),
    "output": (
        ("-o", "--output"),
        {"required": True, "type": _path, "metavar": "DST", "help": "a new folder; a .gguf file for gguf"},
    ),
    "page": (
        ("-o", "--output"),
        {"type": _path, "default": "report.html", "metavar": "FILE", "help": "the page to write (%(default)s)"},
    ),
    "layout": (
        ("--layout",),
        {"type": _layout, "default": "native", "metavar": "LAYOUT",
         "help": f"one of {', '.join(_WRITABLE)} (%(default)s)"},
    ),
    "format": (("--format",), {"type": _format, "metavar": "FORMAT", "help": f"a format, {FORMAT}"}),
    "plan": (
        ("--plan",),
        {"type": _path, "metavar": "FILE",
         "help": "instead of --format: a file of the command plan, with a format for each weight"},
    ),
    "formats": (
        ("--format",),
        {"type": _format, "nargs": "+", "default": [], "dest": "formats", "metavar": "FORMAT",
         "help": "quantize MODEL to each of these, in memory"},
    ),
    "choices": (
        ("--format",),
        {"type": _format, "nargs": "+", "default": [], "dest": "formats", "metavar": "FORMAT",
         "help": f"the formats to choose from ({' '.join(FORMATS)})"},
    ),
    "bits": (
        ("--bits",),
        {"type": _positive, "default": 5.0, "metavar": "N", "help": "budget: bits per value, scales included (5.0)"},
    ),
    "head": (
        ("--include-head",),
        {"action": "store_true", "help": "quantize the head too, and the embedding that shares its weight"},
    ),
    "plan_file": (
        ("-o", "--output"),
        {"type": _path, "default": "plan.json", "metavar": "FILE", "help": "the plan to write (%(default)s)"},
    ),
    "skip": (
        ("--skip",),
        {"action": "extend", "nargs": "+", "default": [], "metavar": "NAME",
         "help": "modules that stay in high precision, with all that is inside them: their names or the ends of these"},
    ),
    "shard": (
        ("--max-shard-bytes",),
        {"type": _at_least(1), "default": store.SHARD_BYTES, "metavar": "N",
         "help": "the largest size of a file in bytes (536870912)"},
    ),
    "overwrite": (("--overwrite",), {"action": "store_true", "help": "replace the destination if it exists"}),
    "all": (("--all",), {"action": "store_true", "help": "print all tensors, not only those with the lowest SQNR"}),
    "tensors": (("--tensors",), {"action": "store_true", "help": "print a line for each tensor"}),
    "reference": (
        ("--reference",),
        {"type": _path, "metavar": "MODEL", "help": "the model before quantization, to compare with"},
    ),
    "text": (("--text",), {"type": _path, "metavar": "FILE", "help": "a text in UTF-8 that both models read"}),
    "inputs": (
        ("--inputs",),
        {"type": _path, "metavar": "FILE",
         "help": "a .safetensors file of the inputs of both models, such as input_ids"},
    ),
    "required_text": (
        ("--text",),
        {"required": True, "type": _path, "metavar": "FILE", "help": "a text in UTF-8; - is standard input"},
    ),
    "tokens": (
        ("--tokens",),
        {"type": _at_least(1), "metavar": "N", "help": "use only the first N tokens of the text (all)"},
    ),
    "window": (
        ("--window",),
        {"type": _at_least(2), "default": WINDOW, "metavar": "N", "help": "tokens per window (%(default)s)"},
    ),
    "tokenizer": (
        ("--tokenizer",),
        {"type": _path, "metavar": "DIR", "help": "the folder of a tokenizer, if MODEL has none"},
    ),
    "device": (("--device",), {"type": _device, "default": "cpu", "metavar": "NAME", "help": "cpu or cuda (cpu)"}),
    "cuda": (("--device",), {"type": _device, "default": "cuda", "metavar": "NAME", "help": "the GPU (%(default)s)"}),
    "rows": (
        ("--rows",),
        {"type": _at_least(1), "nargs": "+", "default": list(TUNED_ROWS), "metavar": "N",
         "help": "numbers of activation rows to measure (1 to 128)"},
    ),
    "seconds": (
        ("--seconds",),
        {"type": _positive, "default": 60.0, "metavar": "S", "help": "about how long to measure (60)"},
    ),
    "dry": (("--dry-run",), {"action": "store_true", "help": "measure nothing; list the products"}),
    "json": (("--json",), {"action": "store_true", "help": "print JSON"}),
}  # fmt: skip
