"""The command ``first-token`` of ``benchmarks.users``: what the first token waits for.

Each row is a new process that builds a Llama with random weights in the shape of Llama 3 8B, calls ``mx.quantize_``,
and computes the first tokens. ``cold`` begins with empty folders for compiled kernels; ``warm`` is the next process
with the same folders. bfloat16 is measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mxtensor as mx

from .cuda import print_header
from .decode_model import synchronize
from .harness import Progress, Row, print_table, write_json
from .users_generate import BASE, FORMATS, PROMPT, TINY, make_model

FOLDERS = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that name folders of compiled kernels."""
COLD, WARM = "cold", "warm"
TIMES = ("quantize", "first", "second", "steady")
"""``mx.quantize_``, the forward pass of the prompt, that of one more token, and the prompt's again."""


@dataclass
class FirstRow(Row):
    """``times`` are milliseconds, by TIMES."""

    config: str = ""
    cache: str = ""

    @property
    def wait_s(self) -> float:
        """Seconds from a bfloat16 model to its second token."""
        return sum(self.times.get(name, float("nan")) for name in TIMES[:3]) / 1e3


def first_tokens(config: str, args: argparse.Namespace) -> dict[str, float]:
    """The milliseconds of each of TIMES in this process, which has computed nothing before."""
    model: Any = make_model(BASE, args)
    prompt = torch.randint(3, TINY["vocab_size"], (1, PROMPT), device=args.device)
    times: dict[str, float] = {}

    def clocked(name: str, work: Callable[[], Any]) -> Any:
        synchronize(args.device)
        start = time.perf_counter()
        result = work()
        synchronize(args.device)
        times[name] = (time.perf_counter() - start) * 1e3
        return result

    with torch.no_grad():
        clocked("quantize", lambda: None if config == BASE else mx.quantize_(model, config))
        out = clocked("first", lambda: model(input_ids=prompt, use_cache=True))
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        clocked("second", lambda: model(input_ids=token, past_key_values=cache, use_cache=True))
        clocked("steady", lambda: model(input_ids=prompt, use_cache=True))
    return times


def in_new_process(config: str, cache: str, folder: Path, args: argparse.Namespace) -> FirstRow:
    """The row of a new process with its caches in ``folder``. An error is recorded in ``failed``."""
    row = FirstRow(f"{config} {cache}", {}, config=config, cache=cache)
    words = ["--child", config, "--layers", str(args.layers), "--device", args.device, *["--tiny"] * args.tiny]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.users", "first-token", *words], capture_output=True, text=True, check=False,
        env=os.environ | {name: str(folder / name.lower()) for name in FOLDERS},
    )  # fmt: skip
    if done.returncode:
        row.failed[config] = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    else:
        row.times = json.loads(done.stdout.splitlines()[-1])
    return row


HEADER = ["format", "caches", "quantize_ s", "first forward s", "second token s", "sum s", "above bf16 s", "steady ms"]


def lines(rows: Sequence[FirstRow]) -> list[list[str]]:
    """A line for each row; ``above bf16`` is the difference of the sums."""
    base = {row.cache: row.wait_s for row in rows if row.config == BASE}
    return [
        [
            row.config, row.cache, *(f"{row.times[name] / 1e3:.2f}" for name in TIMES[:3]), f"{row.wait_s:.2f}",
            f"{row.wait_s - base.get(row.cache, float('nan')):+.2f}", f"{row.times['steady']:.1f}",
        ]
        for row in rows if row.times
    ]  # fmt: skip


def add_options(options: argparse.ArgumentParser) -> None:
    """The options of this command."""
    options.add_argument("--formats", nargs="+", default=FORMATS, help=f"default: {' '.join(FORMATS)}")
    options.add_argument("--layers", type=int, default=32, help="decoder layers (default: 32)")
    options.add_argument("--child", metavar="FORMAT", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    """The time until the first token, with cold and with warm caches of compiled kernels."""
    if args.child:
        print(json.dumps(first_tokens(args.child, args)))
        return
    progress, rows = Progress(2 * len(args.formats), "processes"), list[FirstRow]()
    for config in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            for cache in (COLD, WARM):
                rows.append(in_new_process(config, cache, Path(folder), args))
                progress.step(f"{rows[-1].work}: {rows[-1].wait_s:.2f} s")
    progress.close()
    print_header()
    print_table(HEADER, lines(rows))
    for row in rows:
        for error in row.failed.values():
            print(f"{row.work}: {error}")
    write_json(args.json, rows)
