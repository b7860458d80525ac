"""The parser of ``mxtensor``: one subcommand is one row of COMMANDS.

Exit codes: 0 when all is done, 1 when a file or a tensor is refused, 2 for a wrong call, 130 for an interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..checkpoints import store
from ..checkpoints.registry import LAYOUTS
from . import commands

FAILED, INTERRUPTED = 1, 130
_WRITABLE = tuple(name for name, layout in LAYOUTS.items() if layout.write is not None)
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError)
"""What a file, a disk or an argument can raise: shown as one line. Anything else is a defect, and has a traceback."""


class Command(NamedTuple):
    """A subcommand."""

    run: Callable[[argparse.Namespace], int]
    help: str
    examples: tuple[str, ...]
    arguments: tuple[str, ...]
    """Names of ARGUMENTS."""


ARGUMENTS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "source": (("source",), {"metavar": "SRC", "help": "a folder, a .safetensors or a .gguf file"}),
    "path": (("path",), {"metavar": "PATH", "help": "a folder, a .safetensors or a .gguf file"}),
    "a": (("a",), {"metavar": "A", "help": "the checkpoint with the true values"}),
    "b": (("b",), {"metavar": "B", "help": "the checkpoint to compare with them"}),
    "output": (("-o", "--output"), {"required": True, "metavar": "DST", "help": "a new folder"}),
    "layout": (("--layout",), {"default": "native", "metavar": "LAYOUT", "help": f"one of {', '.join(_WRITABLE)}"}),
    "format": (("--format",), {"metavar": "FORMAT", "help": "such as mxfp8, mxfp4-weight-only, nvfp4-weight-only"}),
    "required_format": (("--format",), {"required": True, "metavar": "FORMAT", "help": "such as mxfp4-weight-only"}),
    "skip": (
        ("--skip",),
        {"action": "append", "default": [], "metavar": "NAME", "help": "a module that stays as it is; may be repeated"},
    ),
    "shard": (
        ("--max-shard-bytes",),
        {"type": int, "default": store.SHARD_BYTES, "metavar": "N", "help": "the largest file (default: 512 MiB)"},
    ),
    "overwrite": (("--overwrite",), {"action": "store_true", "help": "replace the destination if it exists"}),
    "tensors": (("--tensors",), {"action": "store_true", "help": "a line for each tensor"}),
    "json": (("--json",), {"action": "store_true", "help": "print JSON"}),
}
_WRITING = ("source", "output", "layout", "skip", "shard", "overwrite", "json")
COMMANDS = {
    "quantize": Command(
        commands.convert,
        "quantize the matrices of a checkpoint",
        (
            "mxtensor quantize ./SmolLM2-135M -o ./SmolLM2-mxfp4 --format mxfp4-weight-only",
            "mxtensor quantize ./model -o ./model-nvfp4 --format nvfp4-weight-only --layout compressed-tensors",
        ),
        (*_WRITING, "required_format"),
    ),
    "convert": Command(
        commands.convert,
        "convert a checkpoint to another layout",
        (
            "mxtensor convert ./model-NVFP4 -o ./model-modelopt --layout modelopt",
            "mxtensor convert ./model.gguf -o ./model-bf16 --layout plain",
        ),
        (*_WRITING, "format"),
    ),
    "info": Command(
        commands.info,
        "show the layout of a checkpoint and the formats of its tensors",
        ("mxtensor info ./SmolLM2-mxfp4", "mxtensor info ./SmolLM2-mxfp4 --tensors --json"),
        ("path", "tensors", "json"),
    ),
    "compare": Command(
        commands.compare,
        "compare the values of two checkpoints, tensor by tensor",
        ("mxtensor compare ./SmolLM2-135M ./SmolLM2-mxfp4",),
        ("a", "b", "json"),
    ),
    "doctor": Command(
        commands.doctor,
        "show versions, devices and which kernels run here",
        ("mxtensor doctor",),
        ("json",),
    ),
}
ALIASES = {"inspect": "info"}


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(prog="mxtensor", description="Checkpoints in OCP MX, NVFP4 and float8.")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        examples = "\n".join(f"  {example}" for example in command.examples)
        sub = subparsers.add_parser(
            name,
            aliases=aliases,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in command.arguments:
            flags, options = ARGUMENTS[argument]
            sub.add_argument(*flags, **options)  # type: ignore[arg-type]
        sub.set_defaults(run=command.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process) and return the exit code."""
    chosen = parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except BrokenPipeError:  # what reads the output, such as head, has enough
        sys.stdout = None  # nothing to flush at the end
        return FAILED
    except EXPECTED as error:
        text = " ".join(str(error).split())
        print(f"mxtensor: error: {text}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("mxtensor: interrupted; the destination was not written", file=sys.stderr)
        return INTERRUPTED
