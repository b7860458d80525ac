"""The command ``generate`` of ``benchmarks.users``: transformers' ``generate`` as a user calls it.

The model is a Llama with random weights in the shape of Llama 3 8B. Each format is a new model with the same weights
after ``mx.quantize_``, in a process of its own; they are compiled side by side and timed in turn (``contenders``).
``static`` is ``cache_implementation="static"``, with which transformers compiles the model. The time of a token is the
time of a long call minus that of a short call, divided by the tokens between them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx

from .contenders import Contenders
from .cuda import print_header
from .decode_model import build, synchronize
from .harness import Progress, Row, print_table, write_json

BASE = "bfloat16"
FORMATS = (BASE, "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only")
BATCHES = (1, 8, 64)
EAGER, STATIC = "eager", "static"
PROMPT, SHORT = 16, 4
"""Tokens of the prompt, and new tokens of the short call."""
TOKENS = 64
"""New tokens of the long call beyond those of the short one."""
TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
TOP = 8
"""Kernels that a profile lists."""


@dataclass
class GenerateRow(Row):
    """``times["token"]`` is the time of a decoding step, ``times["first"]`` that of the short call, in milliseconds.

    ``relative["token"]`` is the time of a step over that of bfloat16 in the same round, the median of all rounds.
    """

    config: str = ""
    mode: str = ""
    batch: int = 0
    compile_s: float = 0.0
    """Seconds of the first call, which compiles, while those of the other formats do."""
    gpu_ms: float = float("nan")
    """The sum of the times of a step's kernels. Kernels that overlap count twice."""
    host_ms: float = float("nan")
    """Host time of a step, without the wait for the GPU."""
    launches: float = float("nan")
    """Kernels of a step."""
    kernels: dict[str, float] = field(default_factory=dict)
    """The kernels with the most time -> microseconds of a step."""

    @property
    def tokens_a_second(self) -> float:
        """Of all sequences of the batch."""
        return self.batch * 1e3 / self.times["token"] if self.times.get("token") else float("nan")


def make_model(config: str, args: argparse.Namespace) -> nn.Module:
    """A new model on the device, with the same weights at each call, quantized to ``config``."""
    torch.manual_seed(0)
    changes: dict[str, Any] = TINY if args.tiny else {"num_hidden_layers": args.layers}
    with torch.device(args.device):
        model = build(**changes)
    return model if config == BASE else mx.quantize_(model, config)


class Generate:
    """Calls of ``generate`` in one mode with one prompt."""

    def __init__(self, model: Any, mode: str, batch: int, device: str) -> None:
        self.model = model
        self.device = device
        self.options: dict[str, Any] = {"cache_implementation": "static"} if mode == STATIC else {}
        self.prompt = torch.randint(3, model.config.vocab_size, (batch, PROMPT), device=device)
        self.mask = torch.ones_like(self.prompt)

    def __call__(self, tokens: int, **more: Any) -> Tensor:
        """Generate this number of new tokens; the result has the prompt too."""
        ids: Tensor = self.model.generate(
            self.prompt, attention_mask=self.mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **self.options, **more,
        )  # fmt: skip
        return ids

    @torch.no_grad()
    def milliseconds(self, tokens: int) -> float:
        """Wall time of a call."""
        synchronize(self.device)
        start = time.perf_counter()
        ids = self(tokens)
        synchronize(self.device)
        assert ids.shape[1] == PROMPT + tokens
        return (time.perf_counter() - start) * 1e3


class StepTimer:
    """A logits processor that measures the host time of each step: it waits for the GPU between steps."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = device, list[float]()
        self.begin: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        if self.begin is not None:
            self.steps.append((time.perf_counter() - self.begin) * 1e3)
        synchronize(self.device)
        self.begin = time.perf_counter()
        return scores


def kernel_times(generate: Generate, tokens: int) -> dict[str, tuple[float, int]]:
    """Kernel -> (microseconds, calls) in one call of ``generate``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(tokens)
        synchronize(generate.device)
    events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
    return {event.key: (event.self_device_time_total, event.count) for event in events}


def profiled(row: GenerateRow, generate: Generate, tokens: int) -> None:
    """Fill in ``host_ms``, and on a GPU ``gpu_ms``, ``launches`` and ``kernels``.

    No call is longer than SHORT and ``tokens``: a longer static cache would be compiled again.
    """
    timer = StepTimer(generate.device)
    generate(SHORT + min(tokens, 16), logits_processor=[timer])
    row.host_ms = statistics.median(timer.steps[2:])
    if generate.device != "cuda":
        return
    steps = min(tokens, 8)
    kernel_times(generate, SHORT)  # the profiler's first run takes longer
    short, long = kernel_times(generate, SHORT), kernel_times(generate, SHORT + steps)
    names = {name: (us - short.get(name, (0, 0))[0], n - short.get(name, (0, 0))[1]) for name, (us, n) in long.items()}
    row.gpu_ms = sum(us for us, _ in names.values()) / steps / 1e3
    row.launches = sum(n for _, n in names.values()) / steps
    slowest = sorted(names.items(), key=lambda item: -item[1][0])[:TOP]
    row.kernels = {f"{n / steps:g} x {name[:90]}": us / steps for name, (us, n) in slowest}


class Contender:
    """The model of one format, in its process."""

    def __init__(self, config: str, args: argparse.Namespace) -> None:
        self.args, self.model = args, make_model(config, args)
        if args.device == "cuda":
            torch.cuda.empty_cache()  # other contenders share the GPU
        self.generate: Generate | None = None

    def prepare(self, mode: str, batch: int) -> float:
        """Compile for this mode and batch. Seconds of the first call."""
        torch._dynamo.reset()  # graphs of earlier rows count towards Dynamo's limit of recompilations
        for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length", "_cache"):
            self.model.__dict__.pop(name, None)  # what transformers caches of earlier rows
        self.generate = None
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()
        generate = self.generate = Generate(self.model, mode, batch, self.args.device)
        seconds = generate.milliseconds(SHORT + self.args.tokens) / 1e3  # the long call first: it sets the cache's size
        generate.milliseconds(SHORT)
        return seconds

    def time(self) -> tuple[float, float]:
        """Milliseconds of a short and of a long call, after one that wakes the process up."""
        assert self.generate is not None
        self.generate.milliseconds(SHORT)
        return self.generate.milliseconds(SHORT), self.generate.milliseconds(SHORT + self.args.tokens)

    def profile(self, row: GenerateRow) -> GenerateRow:
        """The row with the times of the profiler."""
        assert self.generate is not None
        profiled(row, self.generate, self.args.tokens)
        return row


def measured(contenders: Contenders, mode: str, batch: int, args: argparse.Namespace) -> list[GenerateRow]:
    """The rows of all formats. An error is recorded in ``failed``."""
    contenders.forgive()
    compile_s = contenders.together("prepare", mode, batch)
    rounds = [contenders.one_by_one("time") for _ in range(args.repeats)]
    rows = []
    for config in args.formats:
        row = GenerateRow(f"{config} {mode}, batch {batch}", {}, config=config, mode=mode, batch=batch)
        rows.append(row)
        if config in contenders.failed:
            row.failed["generate"] = contenders.failed[config]
            continue
        tokens = [{name: (long - short) / args.tokens for name, (short, long) in found.items()} for found in rounds]
        row.compile_s = compile_s[config]
        row.times["first"] = statistics.median(found[config][0] for found in rounds)
        row.times["token"] = statistics.median(found[config] for found in tokens)
        if BASE in tokens[-1]:
            row.relative["token"] = statistics.median(found[config] / found[BASE] for found in tokens)
    if args.profile:
        rows = [row if row.failed else contenders.one(row.config, "profile", row) or row for row in rows]
    return rows


# ---------------------------------------------------------------------------------------------- the command


HEADER = [
    "mode",
    "batch",
    "format",
    "tokens/s",
    "over bf16",
    "ms per step",
    f"prompt + {SHORT} tokens ms",
    "first call s",
]
PROFILE_HEADER = ["GPU ms", "host ms", "kernels", "bound by"]


def line(row: GenerateRow) -> list[str]:
    """The line of a row under HEADER."""
    if row.failed:
        return [row.mode, str(row.batch), row.config, "fails", *[""] * (len(HEADER) - 4)]
    over = 1 / row.relative.get("token", float("nan"))
    return [
        row.mode, str(row.batch), row.config, f"{row.tokens_a_second:.1f}", f"{over:.2f}",
        f"{row.times['token']:.2f}", f"{row.times['first']:.1f}", f"{row.compile_s:.1f}",
    ]  # fmt: skip


def profile_cells(row: GenerateRow) -> list[str]:
    """The cells of a row under PROFILE_HEADER."""
    bound = "GPU" if row.gpu_ms > row.host_ms else "host" if row.host_ms > row.gpu_ms else ""
    return [f"{row.gpu_ms:.2f}", f"{row.host_ms:.2f}", f"{row.launches:.0f}", bound]


def ordered(rows: Sequence[GenerateRow]) -> Iterator[GenerateRow]:
    """The rows by mode and batch, so that the formats of one question are side by side."""
    yield from sorted(rows, key=lambda row: (row.mode, row.batch))


def add_options(options: argparse.ArgumentParser) -> None:
    """The options of this command."""
    options.add_argument("--eager", action="store_true", help="only the default cache, without compilation")
    options.add_argument("--static", action="store_true", help='only cache_implementation="static"')
    options.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences (default: 1 8 64)")
    options.add_argument("--formats", nargs="+", default=FORMATS, help=f"default: {' '.join(FORMATS)}")
    options.add_argument("--tokens", type=int, default=TOKENS, help=f"timed tokens (default: {TOKENS})")
    options.add_argument("--layers", type=int, default=32, help="decoder layers (default: 32)")
    options.add_argument(
        "--profile", action="store_true", help="also GPU time and host time of a step, and its kernels"
    )


def run(args: argparse.Namespace) -> None:
    """Tokens per second of transformers' generate, eager and with a static cache."""
    modes = [mode for mode, flag in ((EAGER, args.eager), (STATIC, args.static)) if flag] or [EAGER, STATIC]
    rows = list[GenerateRow]()
    progress = Progress(len(modes) * len(args.batches), "batches")
    with Contenders(args.formats, Contender, args) as contenders:
        for mode in modes:
            for batch in args.batches:
                rows += measured(contenders, mode, batch, args)
                speeds = ", ".join(f"{row.config} {row.tokens_a_second:.0f}" for row in rows[-len(args.formats) :])
                progress.step(f"{mode}, batch {batch}: {speeds} tokens/s")
                write_json(args.json, rows)  # a batch takes minutes: those of a run that is stopped are there
    progress.close()
    print_header()
    header = [*HEADER, *PROFILE_HEADER] if args.profile else HEADER
    print_table(header, [line(r) + (profile_cells(r) if args.profile else []) for r in ordered(rows)])
    for row in ordered(rows):
        if row.kernels:
            print(f"\n{row.work}, microseconds of a step:")
            for name, us in row.kernels.items():
                print(f"{us:9.1f}  {name}")
        for error in row.failed.values():
            print(f"{row.work}: {error}")
