"""The parser of ``mxtensor``: one subcommand is one row of COMMANDS, one argument one row of ARGUMENTS.

Exit codes: 0 when all is done, 1 when a file, a tensor or a device is refused, 2 for a wrong call, 130 for an
interrupt. An error is one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ..calibration.planner import FORMATS
from ..checkpoints import store
from ..checkpoints.registry import LAYOUTS, get_layout
from ..convert.configs import recipe_of
from ..report.quality import WINDOW
from ..report.tune_model import TUNED_ROWS
from . import doctor, files, measure, plan, tune
from .output import FAILED, INTERRUPTED, WRONG, note

_WRITABLE = tuple(name for name, layout in LAYOUTS.items() if layout.write is not None)
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError)
"""What a file, a disk or an argument can raise: shown as one line. Anything else is a defect, and has a traceback."""


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
        raise argparse.ArgumentTypeError(f"the layout {layout.name} is only read; choose one of {', '.join(_WRITABLE)}")
    return layout.name


def _device(name: str) -> str:
    """The name of a device."""
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device; pass cpu or cuda") from error


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return count


Argument = tuple[tuple[str, ...], dict[str, Any]]
CHECKPOINT = "a folder, a .safetensors or a .gguf file"
FORMAT = "such as mxfp8, mxfp4-weight-only, nvfp4-weight-only"
ARGUMENTS: dict[str, Argument] = {
    "source": (("source",), {"metavar": "SRC", "help": CHECKPOINT}),
    "path": (("path",), {"metavar": "PATH", "help": CHECKPOINT}),
    "model": (("path",), {"metavar": "MODEL", "help": "the folder of a language model, or its .gguf file"}),
    "a": (("a",), {"metavar": "A", "help": "the checkpoint with the true values"}),
    "b": (("b",), {"metavar": "B", "help": "the checkpoint to compare with them"}),
    "output": (("-o", "--output"), {"required": True, "metavar": "DST", "help": "a new folder"}),
    "page": (
        ("-o", "--output"),
        {"type": Path, "default": Path("report.html"), "metavar": "FILE", "help": "the page to write (%(default)s)"},
    ),
    "layout": (
        ("--layout",),
        {"type": _layout, "default": "native", "metavar": "LAYOUT",
         "help": f"one of {', '.join(_WRITABLE)} (%(default)s)"},
    ),
    "format": (("--format",), {"type": _format, "metavar": "FORMAT", "help": FORMAT}),
    "plan": (
        ("--plan",),
        {"metavar": "FILE", "help": "in place of --format: what the command plan wrote, a format for each weight"},
    ),
    "formats": (
        ("--format",),
        {"type": _format, "nargs": "+", "default": [], "dest": "formats", "metavar": "FORMAT",
         "help": "quantize MODEL to each of these, in memory"},
    ),
    "choices": (
        ("--format",),
        {"type": _format, "nargs": "+", "default": [], "dest": "formats", "metavar": "FORMAT",
         "help": f"what to choose from ({' '.join(FORMATS)})"},
    ),
    "bits": (
        ("--bits",),
        {"type": float, "default": 5.0, "metavar": "N", "help": "the budget: bits a value, scales included (5.0)"},
    ),
    "head": (("--include-head",), {"action": "store_true", "help": "plan the head too, and the embedding tied to it"}),
    "plan_file": (
        ("-o", "--output"),
        {"type": Path, "default": Path("plan.json"), "metavar": "FILE", "help": "the plan to write (%(default)s)"},
    ),
    "skip": (
        ("--skip",),
        {"action": "append", "default": [], "metavar": "NAME", "help": "a module that stays as it is; may be repeated"},
    ),
    "shard": (
        ("--max-shard-bytes",),
        {"type": _at_least(1), "default": store.SHARD_BYTES, "metavar": "N", "help": "the largest file (512 MiB)"},
    ),
    "overwrite": (("--overwrite",), {"action": "store_true", "help": "replace the destination if it exists"}),
    "tensors": (("--tensors",), {"action": "store_true", "help": "a line for each tensor"}),
    "reference": (
        ("--reference",),
        {"metavar": "MODEL", "help": "the model before quantization, to compare with"},
    ),
    "text": (("--text",), {"metavar": "FILE", "help": "a text in UTF-8 that both models read"}),
    "inputs": (
        ("--inputs",),
        {"metavar": "FILE", "help": "a .safetensors file of what both models are called with, such as input_ids"},
    ),
    "required_text": (("--text",), {"required": True, "metavar": "FILE", "help": "a text in UTF-8; - reads the input"}),
    "tokens": (("--tokens",), {"type": _at_least(1), "metavar": "N", "help": "the first N tokens of the text (all)"}),
    "window": (
        ("--window",),
        {"type": _at_least(2), "default": WINDOW, "metavar": "N", "help": "tokens that are read at once (%(default)s)"},
    ),
    "tokenizer": (("--tokenizer",), {"metavar": "DIR", "help": "the folder of a tokenizer, if MODEL has none"}),
    "device": (("--device",), {"type": _device, "default": "cpu", "metavar": "NAME", "help": "cpu or cuda (cpu)"}),
    "cuda": (("--device",), {"type": _device, "default": "cuda", "metavar": "NAME", "help": "the GPU (%(default)s)"}),
    "rows": (
        ("--rows",),
        {"type": _at_least(1), "nargs": "+", "default": list(TUNED_ROWS), "metavar": "N",
         "help": "numbers of activation rows to measure (1 to 128)"},
    ),
    "seconds": (("--seconds",), {"type": float, "default": 60.0, "metavar": "S", "help": "how long, about (60)"}),
    "dry": (("--dry-run",), {"action": "store_true", "help": "only say what would be measured"}),
    "json": (("--json",), {"action": "store_true", "help": "print JSON"}),
}  # fmt: skip


class Command(NamedTuple):
    """A subcommand."""

    run: Callable[[argparse.Namespace], int]
    help: str
    examples: tuple[str, ...]
    arguments: tuple[str, ...]
    """Names of ARGUMENTS."""


_WRITING = ("source", "output", "layout", "skip", "shard", "overwrite", "json")
_READING = ("tokens", "window", "tokenizer", "device", "json")
COMMANDS = {
    "quantize": Command(
        files.convert,
        "quantize the matrices of a checkpoint",
        (
            "mxtensor quantize ./SmolLM2 -o ./SmolLM2-mxfp8 --format mxfp8-weight-only",
            "mxtensor quantize ./model -o ./model-nvfp4 --format nvfp4-weight-only --layout compressed-tensors",
            "mxtensor quantize ./model.gguf -o ./model-mxfp4 --format mxfp4-weight-only",
            "mxtensor quantize ./SmolLM2 -o ./SmolLM2-5-bits --plan plan.json",
        ),
        (*_WRITING, "format", "plan"),
    ),
    "plan": Command(
        plan.make_plan,
        "choose a format for each weight of a language model under a budget of bits, by errors on a text",
        (
            "mxtensor plan ./SmolLM2 --text book.txt --tokens 8192 --bits 5.0 -o plan.json",
            "mxtensor plan ./SmolLM2 --text book.txt --format mxfp4-weight-only mxfp8-weight-only --bits 6",
        ),
        ("model", "required_text", "bits", "choices", "head", "plan_file", *_READING),
    ),
    "convert": Command(
        files.convert,
        "convert a checkpoint to another layout",
        (
            "mxtensor convert ./model-NVFP4 -o ./model-modelopt --layout modelopt",
            "mxtensor convert ./model.gguf -o ./model --layout plain",
        ),
        (*_WRITING, "format"),
    ),
    "inspect": Command(
        files.inspect,
        "show the layout of a checkpoint and the formats of its tensors",
        ("mxtensor inspect ./SmolLM2-mxfp8", "mxtensor inspect ./SmolLM2-mxfp8 --tensors --json"),
        ("path", "tensors", "json"),
    ),
    "compare": Command(
        files.compare,
        "compare the values of two checkpoints, tensor by tensor",
        ("mxtensor compare ./SmolLM2 ./SmolLM2-mxfp8",),
        ("a", "b", "json"),
    ),
    "eval": Command(
        measure.eval_model,
        "measure the perplexity of a language model on a text, and the KL divergence from a reference",
        (
            "mxtensor eval ./SmolLM2-mxfp8 --text book.txt",
            "mxtensor eval ./SmolLM2-mxfp8 --text book.txt --tokens 4096 --reference ./SmolLM2",
            "mxtensor eval ./SmolLM2 --format nvfp4-weight-only --text book.txt --reference ./SmolLM2",
        ),
        ("model", "required_text", "reference", "format", "skip", *_READING),
    ),
    "report": Command(
        measure.report,
        "write a page with plots: the error of the weight and of the output of each layer",
        (
            "mxtensor report ./SmolLM2-mxfp4 --reference ./SmolLM2 --text book.txt --tokens 1024 -o report.html",
            "mxtensor report ./SmolLM2 --format mxfp8-weight-only mxfp4-weight-only --text book.txt --tokens 1024",
        ),
        ("model", "reference", "formats", "text", "inputs", "page", *_READING),
    ),
    "tune": Command(
        tune.tune,
        "measure which kernels are the fastest for the layers of a checkpoint on this GPU, and keep the result",
        (
            "mxtensor tune ./SmolLM2-mxfp8",
            "mxtensor tune ./SmolLM2 --format mxfp8-weight-only --rows 1 8 --dry-run",
        ),
        ("path", "format", "rows", "seconds", "cuda", "dry", "json"),
    ),
    "doctor": Command(
        doctor.doctor,
        "show versions, devices, the cache and which kernels run here, each checked by a product",
        ("mxtensor doctor", "mxtensor doctor --json"),
        ("json",),
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = Parser(
        prog="mxtensor",
        description="Checkpoints and language models in OCP MX, NVFP4 and float8.",
        epilog="mxtensor COMMAND --help shows the arguments of a command, and examples.",
    )
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {example}" for example in command.examples)
        sub = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}\n\nexit codes: 0 done, 1 refused, 2 wrong call",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in command.arguments:
            flags, options = ARGUMENTS[argument]
            sub.add_argument(*flags, **options)
        sub.set_defaults(run=command.run)
    return top


def _usage_of(chosen: argparse.Namespace) -> str | None:
    """What is wrong with arguments that are right one by one."""
    if chosen.command == "report" and (chosen.reference is None) == (not chosen.formats):
        return "pass either --reference with the model before, or --format with what to try"
    if chosen.command == "quantize" and (chosen.format is None) == (chosen.plan is None):
        return "pass either --format, or --plan with the file of a plan"
    if chosen.command == "report" and chosen.text is not None and chosen.inputs is not None:
        return "pass --text or --inputs, not both"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process) and return the exit code."""
    top = parser()
    chosen = top.parse_args(arguments)
    wrong = _usage_of(chosen)
    if wrong is not None:
        top.error(wrong)
    try:
        return int(chosen.run(chosen))
    except BrokenPipeError:  # what reads the output, such as head, has enough
        sys.stdout = None  # nothing to flush at the end
        return FAILED
    except EXPECTED as error:
        note(f"error: {' '.join(str(error).split())}")
        return FAILED
    except KeyboardInterrupt:
        note("interrupted; the destination was not written" if hasattr(chosen, "output") else "interrupted")
        return INTERRUPTED
