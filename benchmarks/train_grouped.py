"""Forward and backward of a stack of experts on a GPU beside bfloat16: ``python -m benchmarks.train_grouped``.

Time is that of one step, ``y = F.grouped_mm(x, w, offs=ends); y.backward(g)``, with gradients for input and weights.
Groups are ragged: their sizes are drawn once, and two of them are empty.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.convert.training import training_parameter
from mxtensor.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

from .cuda import GpuRow, Target, event_clock, gpu_arguments, machine_line, print_failures, print_verdicts
from .harness import Prepare, Work, print_table, timed, write_json

RECIPES: dict[str, Callable[[], Recipe]] = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp6": MXFP6BlockScaling,
    "mxfp4": MXFP4BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "float8 current": Float8CurrentScaling,
    "float8 block": Float8BlockScaling,
}
BASE, EAGER, COMPILED = "bfloat16", "eager", "compiled"


class Shape(NamedTuple):
    """Rows of all groups, and the stack of weights."""

    rows: int
    experts: int
    width: int
    """N"""
    cols: int
    """K"""

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.experts}x{self.width}x{self.cols}"


SHAPES = (Shape(16384, 8, 14336, 4096), Shape(32768, 64, 2048, 2048), Shape(32768, 64, 1536, 4096))
"""Mixtral 8x7B's up, OLMoE's gate and up, Qwen 3 235B's up for half of its experts."""


@dataclass
class GroupedRow(GpuRow):
    """bfloat16, and one recipe eager and compiled, in turn on one shape."""

    contender: str = ""
    shape: str = ""

    def over_base(self, how: str) -> float:
        """Median of time over bfloat16's of the same round."""
        return self.relative.get(how, float("nan"))


class Experts(nn.Module):
    """A stack of weights, each multiplied by rows of its own."""

    def __init__(self, weight: nn.Parameter, ends: Tensor) -> None:
        super().__init__()
        self.weight, self.ends = weight, ends

    def forward(self, x: Tensor) -> Tensor:
        """x (M, K) to (M, N)."""
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=self.ends)


def ends_of(rows: int, experts: int, device: str) -> Tensor:
    """Ends of ragged groups that take all rows; the second and the last but one are empty."""
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5
    share[1] = share[-2] = 0
    ends = (share.cumsum(0) / share.sum() * rows).round().to(torch.int32)
    return ends.to(device)


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Work:
    """Forward and backward with fresh gradients."""
    parameters = list(model.parameters())

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        model(x).backward(grad)

    return run


def measured(name: str, shape: Shape, device: str, quick: bool, repeats: int) -> GroupedRow:
    """bfloat16, the recipe in eager code, and compiled, in turn."""
    row = GroupedRow(f"{name}: {shape}", {}, contender=name, shape=str(shape))
    x = torch.randn(shape.rows, shape.cols, dtype=torch.bfloat16, device=device).requires_grad_()
    grad = torch.randn(shape.rows, shape.width, dtype=torch.bfloat16, device=device)
    weight = 0.02 * torch.randn(shape.experts, shape.width, shape.cols, dtype=torch.bfloat16, device=device)
    ends = ends_of(shape.rows, shape.experts, device)

    def experts(recipe: Recipe | None) -> nn.Module:
        parameter = nn.Parameter(weight.clone())
        return Experts(parameter if recipe is None else training_parameter(parameter, recipe.linear_recipe()), ends)

    def eager() -> Work:
        run = step(experts(RECIPES[name]()), x, grad)
        with mx.explain() as log:
            run()
        row.kernels[name] = ", ".join(e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad"))
        return run

    def compiled() -> Work:
        torch._dynamo.reset()
        model: nn.Module = torch.compile(experts(RECIPES[name]()), fullgraph=True, dynamic=False)  # type: ignore[assignment]
        return step(model, x, grad)

    contenders: dict[str, Prepare] = {BASE: lambda: step(experts(None), x, grad), EAGER: eager}
    if not quick:
        contenders[COMPILED] = compiled
    timed(row, contenders, repeats, clock=event_clock(30.0, max_calls=4), seconds=3.0)
    figures = ", ".join(f"{how} {row.over_base(how):.3f}" for how in contenders if how != BASE)
    print(f"{row.work}: {figures} of {row.times[BASE]:.3f} ms; {row.kernels.get(name)}", flush=True)
    return row


def ratios(name: str) -> Callable[[Sequence[GroupedRow]], Iterable[tuple[str, float]]]:
    """Time over bfloat16 of this recipe, eager."""
    return lambda rows: [(row.work, row.over_base(EAGER)) for row in rows if row.contender == name]


TARGETS = (Target("MXFP8 over bfloat16's grouped products, eager", "<=", 0.75, ratios("mxfp8")),)
HEADER = ["shape", "recipe", "bf16 ms", "eager ms", "over bf16", "compiled ms", "over bf16", "kernels"]


def cells(row: GroupedRow) -> list[str]:
    """The line of the printed table."""
    line = [row.shape, row.contender, f"{row.times.get(BASE, float('nan')):.3f}"]
    for how in (EAGER, COMPILED):
        line += [f"{row.times[how]:.3f}", f"{row.over_base(how):.3f}"] if how in row.times else ["", ""]
    return [*line, row.kernels.get(row.contender, "")]


def main() -> None:
    """Time every recipe on every shape."""
    args = gpu_arguments(__doc__ or "", seconds=240)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    shapes = SHAPES[:1] if args.quick else SHAPES
    rows = [measured(name, shape, args.device, args.quick, args.repeats) for shape in shapes for name in RECIPES]
    print(f"\n{machine_line()}\n")
    print_table(HEADER, [cells(row) for row in rows])
    print_failures(rows)
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
