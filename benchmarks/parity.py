"""Whether quantized training reaches the loss of bfloat16: ``python -m benchmarks.parity --arms bf16:2,mxfp8:2,nvfp4``.

Every arm (``parity_record.ARMS``) trains the GPT of ``examples.train_lm`` on real text (``corpus``); a token is a byte.
All arms of a seed start with the same weights and see the same windows in the same order. The four linear layers of
every block are quantized. Everything else runs in bfloat16 under torch.autocast, with float32 parameters and AdamW
states. The learning rate rises linearly, then falls as a cosine to a tenth of its peak at the end of ``--tokens``.

    python -m benchmarks.parity --size medium                      25 million parameters, 33M tokens an arm
    python -m benchmarks.parity --size large --tokens 300M --devices 2 --minutes 9 --folder out/parity

A run writes ``benchmarks/results/parity/SIZE/ARM-seedN.jsonl`` as it goes (``parity_record``). After ``--minutes`` all
runs stop, with a checkpoint if ``--folder`` is given; the same command continues them, and skips finished ones.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import mxtensor as mx
from examples.gpt import GPT, SIZES
from examples.run import Run, Settings, products_of, quantized_weights

from . import corpus
from .harness import machine, print_table
from .parity_record import ARMS, RESULTS, Arm, Header, Point, append, path_of, read, read_all, start, table_of

TOKENS = {"tiny": 0.02e6, "small": 1e6, "medium": 32.768e6, "base": 100e6, "large": 300e6}
"""The default length of an arm by size."""
POINTS = 25
"""Points of a record after the one of step 0."""


@dataclass
class ArmRun(Run):
    """A run of ``examples.train_lm`` as its arm says."""

    arm: Arm = field(default_factory=lambda: ARMS["bf16"])

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The dtype of unquantized operations, the kernel of the arm, and no quantization in its last steps."""
        whole = self.settings.steps
        with ExitStack() as stack:
            stack.enter_context(super().precision())
            if self.arm.kernel is not None:
                stack.enter_context(mx.kernels(self.arm.kernel))
            if self.arm.last and self.done >= whole - round(self.arm.last * whole):
                stack.enter_context(mx.autocast(enabled=False))
            yield

    def unquantized(self, text: Tensor, batches: int | None = None) -> float | None:
        """``loss_on`` of the same weights without quantization; None for an arm without a recipe."""
        if self.arm.recipe is None:
            return None
        with mx.autocast(enabled=False):
            return self.loss_on(text, batches)

    def on_whole(self, text: Tensor) -> dict[str, float | None]:
        """The losses of a last ``Point``: over all of ``text`` but what is left of its last batch."""
        batches = max(len(text) // (self.size.context * self.size.batch), 1)
        return {"whole": self.loss_on(text, batches), "whole_unquantized": self.unquantized(text, batches)}


@dataclass(frozen=True)
class Study:
    """What all runs of one command share."""

    size: str
    steps: int
    device: str
    compiled: bool
    results: Path
    folder: Path | None
    roots: tuple[Path, ...]
    """Folders of the text."""
    cache: Path
    """Of the text: each process reads it."""
    end: float
    """``time.monotonic()`` at which runs stop."""
    repeat: int = 0
    """Of the runs: see ``parity_record``."""

    @property
    def batch_tokens(self) -> int:
        return SIZES[self.size].batch * SIZES[self.size].context

    def record_of(self, task: Task) -> Path:
        """The file of a run."""
        return path_of(self.results, self.size, task.arm, task.seed, self.repeat)

    @property
    def every(self) -> int:
        """Steps from point to point."""
        return max(1, self.steps // POINTS)


@dataclass(frozen=True)
class Task:
    """One run."""

    arm: str
    seed: int


# ---------------------------------------------------------------------------------------------- one run


def train(task: Task, study: Study, text: corpus.Corpus, digest: str) -> None:
    """Train one arm to the end or until ``study.end``.

    Raises ValueError if there is a record, or a checkpoint, of a run with other settings.
    """
    path = study.record_of(task)
    before = read(path) if path.exists() else None
    if before is not None and (before.header.steps, before.header.text) != (study.steps, digest):
        raise ValueError(f"{path} is of {before.header.steps} steps on another text or length; name another --results")
    if before is not None and before.finished:
        say(task, f"has its {study.steps} steps already")
        return
    run = run_of(task, study, digest)
    checkpoint = None if study.folder is None else study.folder / study.size / path.stem
    if before is not None and checkpoint is not None and checkpoint.is_dir():
        run.load(checkpoint)
        points = [point for point in before.points if point.step <= run.done]
        start(path, before.header, points)
        seconds = points[-1].seconds
        say(task, f"continues at step {run.done}")
    else:
        points, seconds = begin(run, task, study, text, digest)
    while run.done < study.steps:
        if time.monotonic() > study.end:
            if checkpoint is not None:
                run.save(checkpoint)
            say(task, f"stops at step {run.done}")
            return
        points.append(next_point(run, points[-1].step, seconds, study, text))
        seconds = points[-1].seconds
        append(path, points[-1])
        say(task, progress(points, study))


def run_of(task: Task, study: Study, digest: str) -> ArmRun:
    """The run of a task before its first step."""
    arm = ARMS[task.arm]
    settings = Settings(task.arm, False, study.size, task.seed, study.device, digest, study.steps)
    recipe = None if arm.recipe is None else arm.recipe()
    run = ArmRun.with_recipe(settings, recipe, unquantized_blocks=arm.blocks)
    run.arm = arm
    if study.compiled:
        run.compile()
    return run


def begin(run: ArmRun, task: Task, study: Study, text: corpus.Corpus, digest: str) -> tuple[list[Point], float]:
    """Run the first step and begin the record: its point of step 0, and the seconds that the step took."""
    run.evaluate(text.held_out)
    points = [Point(0, 0, None, run.held_out[0][1], 0.0, run.unquantized(text.held_out))]
    began = time.perf_counter()
    products = first_step(run, text.training)
    seconds = time.perf_counter() - began
    start(study.record_of(task), described(run, task, study, text, digest, products), points)
    return points, seconds


def next_point(run: ArmRun, first: int, seconds: float, study: Study, text: corpus.Corpus) -> Point:
    """Train from the point of step ``first`` to the next one; ``seconds``: of training before."""
    began = time.perf_counter()
    while run.done < min(first - first % study.every + study.every, study.steps):
        run.update(text.training)
    run.read()
    seconds += time.perf_counter() - began
    run.evaluate(text.held_out)
    losses, tokens = run.losses[first:], run.done * study.batch_tokens
    training, unquantized = math.fsum(losses) / len(losses), run.unquantized(text.held_out)
    whole = run.on_whole(text.held_out) if run.done == study.steps else {}
    return Point(run.done, tokens, training, run.held_out[-1][1], seconds, unquantized, **whole)


def first_step(run: Run, training: Tensor) -> dict[str, int]:
    """Run the first step, and count the products that it took."""
    with mx.explain() as log:
        run.update(training)
    run.read()
    return dict(products_of(log))


def described(run: Run, task: Task, study: Study, text: corpus.Corpus, digest: str, products: dict[str, int]) -> Header:
    """The header of a run."""
    parameters = sum(p.numel() for p in run.model.parameters())
    quantized = sum(w.numel() for w in quantized_weights(run.model).values())
    return Header(
        task.arm, task.seed, study.size, parameters, quantized, study.steps, study.batch_tokens, digest, text.cut,
        len(text.held_out), study.compiled, products, machine(), study.repeat,
    )  # fmt: skip


def progress(points: Sequence[Point], study: Study) -> str:
    """The last point in words."""
    last, before = points[-1], points[-2]
    rate = (last.tokens - before.tokens) / max(last.seconds - before.seconds, 1e-9)
    return (
        f"step {last.step} of {study.steps}, {last.tokens / 1e6:.1f}M tokens, training {last.training:.4f}, held out "
        f"{last.held_out:.4f}, {rate:,.0f} tokens/s, {last.seconds:.0f} s"
    )


def say(task: Task, what: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {task.arm} seed {task.seed}: {what}", flush=True)


# ---------------------------------------------------------------------------------------------- all runs


def work(index: int, study: Study, tasks: Any) -> None:
    """Take tasks until None comes. One process for each device."""
    if study.device == "cuda":
        torch.cuda.set_device(index)
    torch._functorch.config.enable_autograd_cache = False  # explain() sees no product of a graph from that cache
    torch._dynamo.config.recompile_limit = 32  # blocks with and without a recipe, trained and evaluated
    text = corpus.load(study.roots, study.cache)
    digest = text.digest
    for task in iter(tasks.get, None):
        if time.monotonic() < study.end:
            try:
                train(task, study, text, digest)
            except Exception:  # one arm that fails leaves the others their time
                traceback.print_exc()
        gc.collect()
        if study.device == "cuda":
            torch._dynamo.reset()  # the graphs of an arm do not count towards the next one's limit
            torch.cuda.empty_cache()


def run_all(study: Study, tasks: Sequence[Task], digest: str, devices: int) -> list[Task]:
    """Run the tasks, ``devices`` side by side, and return those that have no finished record of this study."""
    from torch.multiprocessing import get_context

    context: Any = get_context("spawn")
    queue = context.Queue()
    for task in [*tasks, *[None] * devices]:
        queue.put(task)
    if devices == 1:
        work(0, study, queue)
    else:
        workers = [context.Process(target=work, args=(i, study, queue)) for i in range(devices)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return [task for task in tasks if not is_finished(task, study, digest)]


def is_finished(task: Task, study: Study, digest: str) -> bool:
    """Whether the run has a finished record of this study."""
    path = study.record_of(task)
    found = read(path) if path.exists() else None
    return found is not None and found.finished and (found.header.steps, found.header.text) == (study.steps, digest)


def number(text: str) -> int:
    """An integer, with K, M or B at its end."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper())
    return round(float(text) if unit is None else float(text[:-1]) * unit)


def tasks_of(text: str, seeds: int) -> list[Task]:
    """``bf16:2,mxfp8`` as tasks, those of seed 0 first. Raises ValueError for a name that is not an arm."""
    counts: dict[str, int] = {}
    for word in text.split(","):
        name, _, count = word.partition(":")
        if name not in ARMS:
            raise ValueError(f"there is no arm {name!r}; the arms are {', '.join(ARMS)}")
        counts[name] = int(count or seeds)
    return [Task(name, seed) for seed in range(max(counts.values())) for name in counts if seed < counts[name]]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--size", choices=TOKENS, default="medium", help="of the model (%(default)s)")
    add("--tokens", type=number, metavar="N", help="of an arm, such as 300M (that of the size)")
    add("--arms", default="bf16:2,mxfp8:2", metavar="A:N,B", help="arms, each with its number of seeds (%(default)s)")
    add("--seeds", type=int, default=1, metavar="N", help="of an arm without a number (%(default)s)")
    add("--repeat", type=int, default=0, metavar="N", help="of these runs, where there are records of the same seeds")
    add("--devices", type=int, default=1, metavar="N", help="runs side by side, one for each GPU (%(default)s)")
    add("--minutes", type=float, default=math.inf, metavar="N", help="stop all runs after N minutes")
    add("--folder", type=Path, help="where runs that stop leave a checkpoint")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of the records (benchmarks/results/parity)")
    add("--text", type=Path, nargs="+", metavar="FOLDER", help="of text (the standard library and packages)")
    add("--cache", type=Path, default=Path("out/parity/corpus.pt"), metavar="FILE", help="of the text (%(default)s)")
    add("--eager", action="store_true", help="do not compile the blocks")
    args = parser.parse_args(argv)
    args.device = "cuda" if cuda else "cpu"
    args.tokens = args.tokens or round(TOKENS[args.size])
    try:
        args.tasks = tasks_of(args.arms, args.seeds)
    except ValueError as error:
        parser.error(f"--arms: {error}")
    if cuda and args.devices > torch.cuda.device_count():
        parser.error(f"--devices: {args.devices}, but torch finds {torch.cuda.device_count()}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run every arm, and print the table. Exit with 1 if a run is not finished."""
    began, args = time.monotonic(), parsed(argv)
    roots = tuple(args.text or corpus.default_roots())
    text = corpus.load(roots, args.cache)
    size = SIZES[args.size]
    study = Study(
        args.size, max(1, round(args.tokens / (size.batch * size.context))), args.device, not args.eager, args.results,
        args.folder, roots, args.cache, began + 60 * args.minutes, args.repeat,
    )  # fmt: skip
    print(
        f"{text.cut:,} bytes of {text.files[0]:,} files for training, {len(text.held_out):,} of {text.files[1]:,} for "
        f"evaluation, {text.digest}; {study.steps} steps of {study.batch_tokens:,} tokens, "
        f"{sum(p.numel() for p in GPT(size).parameters()) / 1e6:.1f}M parameters",
        flush=True,
    )
    unfinished = run_all(study, args.tasks, text.digest, args.devices)
    if (study.results / study.size).is_dir():
        print_table(*table_of(read_all(study.results, study.size)))
    for task in unfinished:
        print(f"not finished: {task.arm} seed {task.seed}")
    sys.exit(1 if unfinished else 0)


if __name__ == "__main__":
    main()
