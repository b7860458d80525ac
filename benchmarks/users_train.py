"""The command ``train`` of ``benchmarks.users``: a whole training step of a GPT.

A step is forward, loss, backward and AdamW. Parameters and the optimizer's state are bfloat16. The models are plain
modules of torch; a recipe is one call of ``mx.quantize_``, which leaves embeddings and the head in bfloat16. All
recipes of a model run in turn.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx

from .cuda import print_failures, print_header
from .harness import Clock, Prepare, Progress, Row, Work, print_table, timed, wall_clock, write_json
from .train_linear import RECIPES

BASE = "bfloat16"
CONTENDERS = (BASE, "mxfp8", "float8 current", "nvfp4")
EAGER, COMPILED = "eager", "compiled"


class Size(NamedTuple):
    """The size of a GPT and of its batch."""

    layers: int
    width: int
    head: int
    batch: int = 16
    length: int = 1024
    vocabulary: int = 50304


SIZES = {"24x1024": Size(24, 1024, 64), "4x4096": Size(4, 4096, 128)}
"""Name -> layers x width; a batch has 16 x 1024 tokens."""
TINY = {"2x64": Size(2, 64, 16, 2, 32, 128)}


class Block(nn.Module):
    """Attention and a feed-forward block, each after a norm and added to its input."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, -1, self.head).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder with learned positions, whose call returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.head) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Token ids and targets, both (batch, length) -> the mean cross entropy."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class StepRow(Row):
    """The recipes of one size in turn, eager or compiled. ``times`` are milliseconds of a step."""

    size: str = ""
    mode: str = ""
    tokens: int = 0
    """Tokens of a step."""
    prepare_s: dict[str, float] = field(default_factory=dict)
    """Contender -> seconds of its first step, which compiles."""


def training_step(name: str, size: Size, mode: str, args: Any) -> Work:
    """The step of a new model with this recipe."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = GPT(size).bfloat16()
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1))
    if name != BASE:
        mx.quantize_(model, RECIPES[name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if mode == COMPILED and args.blocks:
        for block in model.blocks:
            block.compile()
    elif mode == COMPILED:
        model.compile()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()

    return step


def step_clock(device: str) -> Clock:
    """The wall time of a step until the GPU has finished."""

    def clock(run: Work) -> Any:
        def finished() -> None:
            run()
            if device == "cuda":
                torch.cuda.synchronize()

        return wall_clock(finished)

    return clock


def step_row(name: str, size: Size, mode: str, args: Any, progress: Progress) -> StepRow:
    """All recipes of one size, in turn."""
    torch._dynamo.reset()  # graphs of earlier rows count towards Dynamo's limit of recompilations
    row = StepRow(f"{name} {mode}", {}, size=name, mode=mode, tokens=size.batch * size.length)

    def prepare(contender: str) -> Work:
        try:
            step = training_step(contender, size, mode, args)
            row.prepare_s[contender] = step_clock(args.device)(step)() / 1e3
        finally:
            progress.step(f"{row.work}, {contender}")
        return step

    contenders: dict[str, Prepare] = {c: lambda c=c: prepare(c) for c in args.recipes}  # type: ignore[misc]
    timed(row, contenders, args.repeats, warmup=2, clock=step_clock(args.device))
    gc.collect()
    torch.cuda.empty_cache()
    return row


HEADER = ["layers x width", "mode", "recipe", "ms per step", "tokens/s", "over bf16", "over bf16 eager", "first step s"]


def lines(rows: Sequence[StepRow]) -> list[list[str]]:
    """A line for each recipe: speeds over bfloat16 in the same mode, and over bfloat16 eager."""
    found = []
    for row in rows:
        eager = next((r for r in rows if (r.size, r.mode) == (row.size, EAGER)), None)
        for name, ms in row.times.items():
            over_eager = eager.times[BASE] / ms if eager and BASE in eager.times else float("nan")
            found.append([
                row.size, row.mode, name, f"{ms:.1f}", f"{row.tokens / ms * 1e3:,.0f}", f"{row.ratio(name, BASE):.3f}",
                f"{over_eager:.3f}", f"{row.prepare_s[name]:.1f}",
            ])  # fmt: skip
    return found


def add_options(options: argparse.ArgumentParser) -> None:
    """The options of this command."""
    options.add_argument("--eager", action="store_true", help="only eager")
    options.add_argument("--compiled", action="store_true", help="only compiled")
    options.add_argument("--blocks", action="store_true", help="compile each block instead of the whole model")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="layers x width")
    options.add_argument(
        "--recipes", nargs="+", choices=[BASE, *RECIPES], default=CONTENDERS, help=f"default: {', '.join(CONTENDERS)}"
    )


def run(args: argparse.Namespace) -> None:
    """A whole training step of a GPT: forward, loss, backward and AdamW."""
    modes = [mode for mode, flag in ((EAGER, args.eager), (COMPILED, args.compiled)) if flag] or [EAGER, COMPILED]
    sizes = TINY if args.tiny else {name: SIZES[name] for name in args.sizes}
    progress = Progress(len(sizes) * len(modes) * len(args.recipes), "models")
    rows = [step_row(name, size, mode, args, progress) for name, size in sizes.items() for mode in modes]
    progress.close()
    print_header()
    print_table(HEADER, lines(rows))
    print_failures(rows)
    write_json(args.json, rows)
