"""Does memory grow? Training steps and products of ever new shapes, with the memory of the process after each tenth.

    python -m tests.helpers.soak                                  # 20,000 steps, 10,000 shapes
    python -m tests.helpers.soak --steps 2000 --shapes 1000

The memory after the first tenth may change by 1 %; else the exit status is 1. One ``explain()`` is left open
during all of it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import mxtensor as mx

STEPS, SHAPES = 20_000, 10_000
TENTHS = 10
LIMIT = 0.01
"""Growth of the memory of the process after the first tenth."""
RECIPES = ("MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling", "Float8BlockScaling")
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "mxfp6-weight-only")


@dataclass
class Soak:
    """One soak: the memory of the process in bytes after each tenth, and what an open ``explain()`` has."""

    name: str
    iterations: int
    memory: list[int]
    entries: int
    decisions: int
    seconds: float

    @property
    def growth(self) -> float:
        """The largest difference from the memory after the first tenth, as a share of it."""
        first = self.memory[0]
        return max(abs(later - first) for later in self.memory[1:]) / first

    def __str__(self) -> str:
        mib = " ".join(f"{n / 2**20:.1f}" for n in self.memory)
        return (
            f"{self.name}: {self.iterations:,} iterations in {self.seconds:.0f} s; MiB after each tenth {mib}; "
            f"growth {self.growth:.2%}; explain() counts {self.decisions:,} decisions in {self.entries:,} entries"
        )


def process_bytes() -> int:
    """The memory of this process that is in RAM (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def training(steps: int) -> Iterator[None]:
    """Steps of two small networks for each recipe, one converted by ``quantize_`` and one under ``autocast``."""
    nets = []
    for name in RECIPES:
        recipe = getattr(mx.recipe, name)()
        converted, plain = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        mx.quantize_(converted, recipe)
        for model, block in ((converted, None), (plain, recipe)):
            nets.append((model, block, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    for _, (model, recipe, optimizer) in zip(range(steps), itertools.cycle(nets), strict=False):
        x = torch.randn(32, 64)
        with mx.autocast(enabled=recipe is not None, recipe=recipe) if recipe else torch.enable_grad():
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def shapes(number: int) -> Iterator[None]:
    """Products, casts and reads of weights, each of another shape."""
    sizes = ((rows, cols, batch) for batch in itertools.count(1) for rows in range(1, 65) for cols in range(16, 129, 8))
    for i, (rows, cols, batch) in zip(range(number), sizes, strict=False):
        layer = mx.quantize_(nn.Linear(cols, rows), FORMATS[i % len(FORMATS)])
        with torch.no_grad():
            layer(torch.randn(batch, cols))
            torch.cumsum(mx.quantize(torch.randn(rows, cols), "mxfp8"), 0)
        yield


def soak(name: str, work: Callable[[int], Iterator[None]], iterations: int) -> Soak:
    """Run ``work``, with an ``explain()`` open."""
    memory, tenth, start = [], max(iterations // TENTHS, 1), time.perf_counter()
    with mx.explain() as log:
        for i, _ in enumerate(work(iterations), 1):
            if i % tenth == 0:
                gc.collect()
                memory.append(process_bytes())
        return Soak(name, iterations, memory, len(log.entries), len(log), time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument("--shapes", type=int, default=SHAPES, help="products of different shapes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    done = [soak("training", training, options.steps), soak("shapes", shapes, options.shapes)]
    for each in done:
        print(each, flush=True)
    return int(any(each.growth > LIMIT for each in done))


if __name__ == "__main__":
    sys.exit(main())
