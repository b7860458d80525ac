"""The parser of ``mxtensor``: one subcommand is one row of COMMANDS.

Exit codes: 0 when all is done, 1 when a file, a tensor or a device is refused, 2 for wrong arguments, 130 for an
interrupt, 143 for SIGTERM, 129 for SIGHUP. An error is one line on standard error.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

from ..checkpoints.gguf import headers_cached
from ..core.progress import progress_bars
from . import files, machine, measure
from .arguments import ARGUMENTS
from .output import (
    FAILED,
    INTERRUPTED,
    WRONG,
    any_letters,
    in_options,
    is_terminal,
    message_of,
    note,
    visible,
    warnings_as_notes,
)

NAMES = {"count": "--tokens"}
"""Arguments of functions that an option of the command has another name for."""
NOISY = ("torchao", "torch.utils._pytree")
"""Loggers whose warnings are about the imports of another package, when transformers imports it."""
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError)
"""What a file, a disk or an argument can raise: shown as one line. Anything else is a defect, and has a traceback."""


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
        (*_WRITING, "format", "plan", "head"),
    ),
    "plan": Command(
        measure.make_plan,
        "choose a format for each weight of a language model under a budget of bits, by errors measured on a text",
        (
            "mxtensor plan ./SmolLM2 --text book.txt --tokens 8192 --bits 5.0 -o plan.json",
            "mxtensor plan ./SmolLM2 --text book.txt --format mxfp4-weight-only mxfp8-weight-only --bits 6",
        ),
        ("model", "required_text", "bits", "choices", "skip", "head", "plan_file", *_READING),
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
        ("mxtensor compare ./SmolLM2 ./SmolLM2-mxfp8", "mxtensor compare ./SmolLM2 ./SmolLM2-mxfp8 --all"),
        ("a", "b", "all", "json"),
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
        ("model", "reference", "formats", "skip", "text", "inputs", "page", *_READING),
    ),
    "tune": Command(
        machine.tune,
        "measure which kernels are the fastest for the layers of a checkpoint on this GPU, and store the result",
        (
            "mxtensor tune ./SmolLM2-mxfp8",
            "mxtensor tune ./SmolLM2 --format mxfp8-weight-only --rows 1 8 --dry-run",
        ),
        ("path", "format", "rows", "seconds", "cuda", "dry", "json"),
    ),
    "doctor": Command(
        machine.doctor,
        "show versions, devices, the cache and the kernels that run here, each tested with a product",
        ("mxtensor doctor", "mxtensor doctor --json"),
        ("json",),
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: error: {visible(' '.join(message.split()))}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    try:
        version = metadata.version("mxtensor")
    except metadata.PackageNotFoundError:  # run from a clone
        version = "that is not installed"
    top = Parser(
        prog="mxtensor",
        description="Checkpoints and language models in OCP MX, NVFP4 and float8.",
        epilog="mxtensor COMMAND --help shows the arguments of a command, and examples.",
    )
    top.add_argument("--version", action="version", version=f"mxtensor {version}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {example}" for example in command.examples)
        sub = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}\n\nexit codes: 0 done, 1 an error, 2 wrong arguments",
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
    if chosen.command == "quantize" and chosen.plan is not None and chosen.include_head:
        return "--include-head is for --format; a plan has its own format for the head"
    formats = [name for key in ("format", "formats") if (name := vars(chosen).get(key))]
    if chosen.command in ("eval", "report") and chosen.skip and not formats:
        return "--skip is for --format"
    if chosen.command == "report" and chosen.text is not None and chosen.inputs is not None:
        return "pass --text or --inputs, not both"
    return None


def _options(command: str) -> dict[str, str]:
    """Name of an argument of a function -> the option of this subcommand."""
    rows = [ARGUMENTS[name] for name in COMMANDS[command].arguments]
    found = {
        options.get("dest", flags[-1].removeprefix("--").replace("-", "_")): flags[-1]
        for flags, options in rows
        if flags[-1].startswith("--")
    }
    return found | {name: option for name, option in NAMES.items() if option in found.values()}


ENDING = {
    getattr(signal, name): default
    for name, default in (
        ("SIGTERM", signal.SIG_DFL), ("SIGHUP", signal.SIG_DFL), ("SIGINT", signal.default_int_handler),
    )
    if hasattr(signal, name)
}  # fmt: skip
"""Signal -> its handler if nobody has set one."""
GRACE = 10.0
"""Seconds for removing what was being written: another signal would interrupt that."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit and SIGINT KeyboardInterrupt, so that temporary folders are removed; once in
    GRACE seconds. A signal that is ignored, as by `nohup`, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = {number: default for number, default in ENDING.items() if signal.getsignal(number) is default}
    since: float | None = None

    def end(number: int, frame: Any) -> None:
        nonlocal since
        now = time.monotonic()
        if since is not None and now - since < GRACE:
            return
        since = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, before in taken.items():
            signal.signal(number, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process) and return the exit code."""
    with any_letters():
        top = parser()
        chosen, unknown = top.parse_known_args(arguments)
        wrong = f"unrecognized arguments: {' '.join(unknown)}" if unknown else _usage_of(chosen)
        if wrong is not None:
            Parser(prog=f"{top.prog} {chosen.command}").error(wrong)
        options = _options(chosen.command)
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            with ended_by_signals(), headers_cached(), progress_bars(is_terminal()), warnings_as_notes(options):
                return int(chosen.run(chosen))
        except BrokenPipeError:  # what reads the output, such as head, has enough
            sys.stdout = None  # nothing to flush at the end
            return FAILED
        except MemoryError as error:
            note(f"error: there is not enough memory; {message_of(error)}".removesuffix("; "))
            return FAILED
        except EXPECTED as error:
            note(f"error: {in_options(message_of(error), options)}")
            return FAILED
        except KeyboardInterrupt:
            note("interrupted; the destination was not written" if hasattr(chosen, "output") else "interrupted")
            return INTERRUPTED
