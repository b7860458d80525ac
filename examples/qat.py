"""Quantization-aware training: SmolLM2 with rounded weights learns to predict what it predicted before.

    python -m examples.qat --format mxfp4-weight-only --minutes 20
    python -m examples.qat --device cuda --minutes 5 --batch 64 --sampled 8192 --text-tokens 16000000

Needs the weights of SmolLM2 (see ``examples.smollm2``), or another model as ``--model``. The student starts from
weights that GPTQ has rounded, and trains in the format (``step="prepare"``); the teacher is the same model,
unquantized. Both read documentation of Python's modules and other text of installed packages, and text that the teacher
has written (``examples.qat_text``). The student is measured on other modules' documentation and on a novel.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from benchmarks import harness
from benchmarks import quality as benchmark
from examples import distill, qat_text, smollm2
from examples.minilm import columns, config_name
from mxtensor.numerics.formats import E8M0
from mxtensor.report import quality


@dataclass
class Row:
    """The model after one stage."""

    weights: str
    seconds: float
    """Of the stage: wall time, on a CPU the time of all threads for training."""
    quality: dict[str, quality.Quality]
    """By text."""


def start(model: Any, data: Sequence[Tensor], format: str, method: Any) -> Any:
    """A copy whose weights round to those that a calibration chose, at places spread over what rounds to them.

    The rounded weights themselves would all need many steps to reach another code.
    """
    student = copy.deepcopy(model)
    if method is None:
        return student
    mx.calibrate(student, data, format, method)
    originals = dict(model.named_parameters())
    for fqn, parameter in list(student.named_parameters()):
        if isinstance(parameter, mx.MXTensor):
            module, _, name = fqn.rpartition(".")
            near = nearest_that_rounds(originals[fqn].detach(), parameter.dequantize(), parameter.recipe.stored)
            setattr(student.get_submodule(module), name, nn.Parameter(near, requires_grad=False))
    return student


def nearest_that_rounds(original: Tensor, rounded: Tensor, cast: mx.Cast, halvings: int = 6, seed: int = 0) -> Tensor:
    """``original`` where the cast rounds it to ``rounded``; elsewhere random values that it rounds to ``rounded``.

    Between ``rounded`` and ``original`` bisection finds the last such value, and a random one before it is taken: if
    all were the last ones, a small step of training would move them across the edge all at once. For the same reason
    the largest values of a block are made smaller by 2 to 12 %: a block whose amax is exactly that of its scale would
    get the next scale with any growth. A block that this changes is 0.99 times ``rounded``. Other scales than powers
    of two follow the amax: ``rounded`` is returned.
    """
    if cast.format.scale is not E8M0:
        return rounded
    width, found = cast.format.block[1], original.clone()
    width = width if width > 1 and original.shape[1] % width == 0 else original.shape[1]
    random = torch.rand(found.shape, generator=torch.Generator().manual_seed(seed)).to(found.device)

    def same(values: Tensor) -> Tensor:
        return torch.eq(mx.quantize(values, cast.format, cast.scaling).dequantize(), rounded)

    def of_block(values: Tensor, largest: bool) -> Tensor:
        blocks = values.unflatten(1, (-1, width))
        of_each: Tensor = blocks.amax(2, keepdim=True) if largest else blocks.all(2, keepdim=True)
        return of_each.expand_as(blocks).flatten(1)

    for _ in range(halvings):
        found = torch.where(same(found), found, (found + rounded) / 2)
    found = torch.where(found != original, rounded + random * (found - rounded), found)
    size = rounded.abs()
    is_top = (size >= 0.999 * of_block(size, largest=True)) & (found.abs() > 0.98 * size)
    found = torch.where(is_top, (0.98 - 0.1 * random) * rounded, found)
    return torch.where(of_block(same(found), largest=False), found, 0.99 * rounded)


def mixed(texts: int, written: int, batch: int, share: float = 0.5, seed: int = 0) -> Iterator[Tensor]:
    """Endless batches of ``batch`` indices of rows, of which ``texts`` come first and ``written`` ones after them.

    A ``share`` of a batch is written by the model; if there are rows of one kind only, all of it is of that kind.
    """
    own = batch if not texts else round(batch * share) if written else 0
    kinds = ((torch.arange(texts), batch - own), (torch.arange(texts, texts + written), own))
    for indices in zip(*(distill.endless(rows, count, seed) for rows, count in kinds if count), strict=True):
        yield torch.cat(indices)


def data_of(args: argparse.Namespace, teacher: Any, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """(rows of texts, rows that the model wrote), in random order."""
    texts = chain(qat_text.documentation(), qat_text.files())
    rows = qat_text.rows_of(tokenizer, texts, args.window, args.text_tokens)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    if not args.sampled:
        return rows, rows[:0]
    writer = copy.deepcopy(teacher).bfloat16() if args.device != "cpu" else teacher
    at_once = qat_text.AT_ONCE if args.device == "cpu" else 2048
    return rows, qat_text.sampled(writer, args.sampled, args.window, rows[:, 0], at_once)


def evaluation_rows(args: argparse.Namespace, tokenizer: Any) -> dict[str, Tensor]:
    """The tokens that are measured, of ``--texts`` if that file exists; else it is written."""
    if args.texts is not None and args.texts.exists():
        rows: dict[str, Tensor] = torch.load(args.texts)
        return rows
    rows = benchmark.evaluation_rows(tokenizer)
    if args.texts is not None:
        copies = {name: tokens.clone() for name, tokens in rows.items()}  # of a view, the whole storage would be saved
        torch.save(copies, args.texts)
    return rows


def existing(path: str) -> Path:
    """A file or a folder that exists, as an argument of a program."""
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {path}")
    return Path(path)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m examples.qat", description=(__doc__ or "").partition("\n")[0])
    add = made.add_argument
    add("--model", type=existing, help="a GGUF file, or a folder of transformers (SmolLM2)")
    add(
        "--format",
        type=config_name,
        default="mxfp4-weight-only",
        metavar="NAME",
        help="what quantize_ takes (%(default)s)",
    )
    add("--minutes", type=float, default=20.0, help="of training, on --threads cores (20)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--threads", type=int, default=2, help="of the CPU (2)")
    add("--batch", type=int, default=4, help="rows in a step (4)")
    add("--window", type=int, default=quality.WINDOW, help=f"tokens in a row ({quality.WINDOW})")
    add("--rate", type=float, default=1e-4, help="of learning, at its largest (1e-4)")
    add("--compile", action="store_true", help="compile the blocks of both models")
    add("--remember", action="store_true", help="run the teacher once over all rows, and keep its hidden states")
    add("--text-tokens", type=int, default=500_000, help="of documentation and other text (500000)")
    add("--sampled", type=int, default=128, help="rows that the model writes (128)")
    add("--share", type=float, default=0.5, help="of a batch that the model has written (0.5)")
    add("--calibration", type=int, default=32, help="rows that calibrate (32); 0: start from the unquantized weights")
    add("--cache", type=Path, help="a file for the rows and the calibrated weights, which take minutes to make")
    add("--texts", type=Path, help="a file of the tokens that are measured; made if it does not exist")
    add("--every", type=int, default=5, help="steps between two lines of progress (5)")
    add("--json", type=Path, help="the record")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Round, calibrate, train; print the quality of each."""
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    logging.getLogger("mxtensor").setLevel(logging.ERROR)
    teacher, tokenizer = smollm2.load_model(torch.float32, args.model)
    teacher.to(args.device)
    measured = {name: rows.to(args.device) for name, rows in evaluation_rows(args, tokenizer).items()}
    measure = benchmark.Measure(teacher, measured)
    begin = time.perf_counter()
    student: Any = copy.deepcopy(teacher)
    if args.cache is not None and args.cache.exists():
        texts, written, state = torch.load(args.cache, map_location="cpu")
        student.load_state_dict(state)
        made = middle = begin
    else:
        texts, written = data_of(args, teacher, tokenizer)
        made = time.perf_counter()
        print(f"{texts.numel():,} tokens of text, {written.numel():,} written: {made - begin:.0f} s", flush=True)
        if args.calibration:
            data = [rows.to(args.device) for rows in torch.cat(calibrating(args, texts, written)).split(8)]
            student = start(teacher, data, args.format, method_of(args.format))
        middle = time.perf_counter()
        if args.cache is not None:
            torch.save((texts, written, student.state_dict()), args.cache)
    rows = [Row("nearest", 0.0, measure.quality(mx.quantize_(copy.deepcopy(teacher), args.format)))]
    if args.calibration:
        calibrated = mx.quantize_(copy.deepcopy(student), args.format)
        rows.append(Row("calibrated", middle - made, measure.quality(calibrated)))
    show(rows)
    mx.quantize_(student, args.format, step="prepare")
    distiller = distill.Distiller(student, teacher, args.rate, args.compile)
    batches = distill.Batches(torch.cat([texts, written]), mixed(len(texts), len(written), args.batch, args.share))
    middle = time.perf_counter()
    distiller.warm_up(next(batches)[0].to(args.device))
    compiled = time.perf_counter() - middle
    print(f"the first pass took {compiled:.0f} s", flush=True)
    seconds, reading = 60 * args.minutes * (args.threads if args.device == "cpu" else 1), 0.0
    middle = time.perf_counter()
    if args.remember:
        batches.remember(distiller, args.batch)
        reading = time.perf_counter() - middle
        print(f"the teacher has read all rows: {reading:.0f} s of the time", flush=True)
    done = distill.train(distiller, batches, seconds - reading, args.every)
    student = copy.deepcopy(student)  # a copy is not compiled
    mx.quantize_(student, args.format, step="convert")
    rows.append(Row("trained", done.seconds + reading, measure.quality(student)))
    show(rows)
    print(f"{done.steps} steps, {done.tokens:,} tokens in {done.seconds:.0f} s")
    named = {name: f"{value}" for name, value in vars(args).items()}
    more = {"text": texts.numel(), "written": written.numel(), "data_seconds": made - begin, "first_pass": compiled}
    harness.write_json(args.json, rows, arguments=named, training=asdict(done), **more)


def calibrating(args: argparse.Namespace, texts: Tensor, written: Tensor) -> list[Tensor]:
    """The rows that calibrate: half of texts, half written, as far as there are as many."""
    half = min(args.calibration // 2, len(written))
    return [texts[: args.calibration - half], written[:half]]


def method_of(format: str) -> Any:
    """The best method of calibration for a format (docs/guide/calibration.md)."""
    return "gptq" if format.endswith("weight-only") else ["smooth", mx.GPTQ(correct="cast")]


def show(rows: Sequence[Row]) -> None:
    """Print perplexity and KL by text."""
    texts = list(rows[0].quality)
    lines = [
        [row.weights, f"{row.seconds:.0f}",
         *(cell for text in texts for cell in (f"{row.quality[text].perplexity:.2f}", f"{row.quality[text].kl:.4f}"))]
        for row in rows
    ]  # fmt: skip
    figures = (f"{text}: {figure}" for text in texts for figure in ("perplexity", "KL"))
    print(columns(["weights", "seconds", *figures], lines), flush=True)


if __name__ == "__main__":
    main()
