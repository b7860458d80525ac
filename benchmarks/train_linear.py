"""Forward and backward of a linear layer on a GPU beside bfloat16 and torchao: ``python -m benchmarks.train_linear``.

Time is that of one step, ``y = layer(x); y.backward(g)``, with gradients for input and weight. Memory is the peak of a
step: of one layer, above what stands before it (x, g, weight), and of a chain of layers, all of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

from . import peers
from .cuda import Deadline, GpuRow, Target, event_clock, gpu_arguments, machine_line, print_failures, print_verdicts
from .harness import Prepare, Work, print_table, timed, write_json

RECIPES: dict[str, Callable[[], Recipe]] = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8, 32x32 weights": lambda: MXFP8BlockScaling(two_dimensional_weights=True),
    "float8 current": Float8CurrentScaling,
    "float8 delayed": DelayedScaling,
    "float8 block": Float8BlockScaling,
    "mxfp4": MXFP4BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
SHAPES = ((8192, 8192, 8192), (8192, 14336, 4096))
"""(M, N, K)"""
CHAIN = 8
"""Layers of the chain whose memory is measured, 8192 wide."""
BASE = "bfloat16"


EAGER, COMPILED = "eager", "compiled"


@dataclass
class TrainRow(GpuRow):
    """bfloat16, and one contender eager and compiled, in turn on one shape."""

    contender: str = ""
    shape: str = ""
    """MxNxK: rows of activations, rows of the weight, columns of both."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    """Peak of a step above what stands before it."""

    def over_base(self, how: str) -> float:
        """Median of time over bfloat16's of the same round."""
        return self.relative.get(how, float("nan"))


@dataclass
class Problem:
    """The tensors of one shape."""

    x: Tensor
    weight: Tensor
    grad: Tensor

    @classmethod
    def of(cls, m: int, n: int, k: int, device: str) -> Problem:
        def make(rows: int, cols: int) -> Tensor:
            return torch.randn(rows, cols, dtype=torch.bfloat16, device=device)

        return cls(make(m, k).requires_grad_(), make(n, k) * 0.02, make(m, n))

    @property
    def shape(self) -> str:
        (m, n), k = self.grad.shape, self.x.shape[1]
        return f"{m}x{n}x{k}"

    def layer(self) -> nn.Linear:
        """A plain layer around a copy of the weight."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight.clone())
        return layer


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> Work:
    """Forward and backward with fresh gradients."""
    parameters = list(layer.parameters())

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        layer(x).backward(grad)

    return run


def peak_mib(run: Work) -> float:
    """The most memory that a step takes above what stands before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compiled(layer: nn.Module) -> nn.Module:
    """The layer through torch.compile, as one graph for these shapes alone."""
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, dynamic=False)  # type: ignore[return-value]


Make = Callable[[Problem], nn.Module]


class Autocast(nn.Module):
    """A layer inside ``mx.autocast``: the way in that delayed scaling has under torch.compile."""

    def __init__(self, layer: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x: Tensor) -> Tensor:
        """The layer's."""
        with mx.autocast(recipe=self.recipe):
            return self.layer(x)  # type: ignore[no-any-return]


def ours(name: str) -> Make:
    """nn.Linear under ``mx.quantize_``; inside ``mx.autocast`` where the recipe has a history."""

    def make(problem: Problem) -> nn.Module:
        recipe = RECIPES[name]()
        if not recipe.delayed():
            return mx.quantize_(problem.layer(), recipe)
        model = Autocast(problem.layer(), recipe)
        step(model, problem.x, problem.grad)()  # its first step is eager
        return model

    return make


def theirs(convert: Callable[[nn.Module], Any]) -> Make:
    """torchao's layer, which it converts as a child of what it is given."""

    def make(problem: Problem) -> nn.Module:
        model = nn.Sequential(problem.layer())
        return convert(model) or model

    return make


def measured(name: str, problem: Problem, make: Make, args: Any, guard: Callable[[Prepare], Prepare]) -> TrainRow:
    """bfloat16 (eager: compiled it runs the same kernels), the contender eager, and compiled, in turn."""
    row = TrainRow(f"{name} {problem.shape}", {}, contender=name, shape=problem.shape)

    def work(how: str, model: nn.Module) -> Work:
        run = step(model, problem.x, problem.grad)
        with mx.explain() as log:
            run()
        products = [e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")]
        if how == EAGER:
            row.kernels[name] = ", ".join(products)
        row.peak_mib[how] = peak_mib(run)
        return run

    contenders: dict[str, Prepare] = {BASE: lambda: work(BASE, problem.layer())}
    contenders[EAGER] = guard(lambda: work(EAGER, make(problem)))
    if not args.quick:
        contenders[COMPILED] = guard(lambda: work(COMPILED, compiled(make(problem))))
    timed(row, contenders, args.repeats, clock=event_clock(30.0, max_calls=4), seconds=3.0)
    figures = ", ".join(f"{how} {row.over_base(how):.3f}" for how in (EAGER, COMPILED))
    print(f"{row.work}: {figures} of {row.times.get(BASE, float('nan')):.3f} ms", flush=True)
    return row


# ---------------------------------------------------------------------------------------------- memory of a chain


MEMORY_HEADER = [
    "rows", "recipe", "saved MiB", "over bf16", "peak MiB", "over bf16", "peak, new gradients", "over bf16"
]  # fmt: skip


def chain_memory(device: str, rows: int, width: int = 8192) -> list[list[str]]:
    """Lines: rows of activations, recipe; MiB that wait for backward; the peak of a step whose gradients are there
    before it (accumulated, or in the buckets of data parallelism), and of one that allocates them; all over bfloat16's.
    """
    before = torch.cuda.memory_allocated()
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    found: dict[str, list[float]] = {}
    for name, make in {BASE: None, **RECIPES}.items():
        layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(CHAIN)]
        model = nn.Sequential(*layers)
        if make is not None:
            mx.quantize_(model, make())
        figures: list[float] = []
        for new in (True, False):
            for _ in range(2):
                model.zero_grad(set_to_none=new)
                x.grad = None
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
                y = model(x * 1)  # an activation, as in a network, which nobody keeps but the layer
                saved = torch.cuda.memory_allocated() - start - y.nbytes
                y.backward(torch.randn_like(y))
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                del y
            figures = [saved / 2**20, peak / 2**20, *figures[1:]]
        found[name] = figures
        del model, layers
    base = found[BASE]
    return [
        [str(rows), name, *(text for f, b in zip(figures, base, strict=True) for text in (f"{f:.0f}", f"{f / b:.3f}"))]
        for name, figures in found.items()
    ]


# ---------------------------------------------------------------------------------------------- targets


def ratios(name: str) -> Callable[[Sequence[TrainRow]], Iterable[tuple[str, float]]]:
    """Time over bfloat16 of this contender, eager."""
    return lambda rows: [(row.work, row.over_base(EAGER)) for row in rows if row.contender == name]


def compiled_over_eager(rows: Sequence[TrainRow]) -> Iterable[tuple[str, float]]:
    """Time of each of our contenders compiled over its time eager."""
    for row in rows:
        if row.contender in RECIPES and COMPILED in row.relative:
            yield row.work, row.over_base(COMPILED) / row.over_base(EAGER)


TARGETS = (
    Target("MXFP8 over bfloat16, eager", "<=", 1.08, ratios("mxfp8")),
    Target("float8 current scaling over bfloat16, eager", "<=", 0.65, ratios("float8 current")),
    Target("float8 delayed scaling over bfloat16, eager", "<=", 0.62, ratios("float8 delayed")),
    Target("compiled over eager", "<=", 1.00, compiled_over_eager),
)

HEADER = ["shape", "contender", "bf16 ms", "eager ms", "over bf16", "compiled ms", "over bf16", "peak MiB", "bf16 peak"]


def cells(row: TrainRow) -> list[str]:
    """The line of the printed table."""
    line = [row.shape, row.contender, f"{row.times.get(BASE, float('nan')):.3f}"]
    for how in (EAGER, COMPILED):
        timed = how in row.times
        line += [f"{row.times[how]:.3f}", f"{row.over_base(how):.3f}"] if timed else ["fails", ""]
    return line + [f"{row.peak_mib.get(how, float('nan')):.0f}" for how in (EAGER, BASE)]


def main() -> None:
    """Time every recipe on every shape, then torchao's while there is time; then memory."""
    args = gpu_arguments(__doc__ or "", seconds=240)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    deadline = Deadline(args.seconds)
    rows: list[TrainRow] = []
    shapes = SHAPES[:1] if args.quick else SHAPES
    warm = Problem.of(*SHAPES[0], args.device)
    run = step(warm.layer(), warm.x, warm.grad)
    for _ in range(20 if args.quick else 500):  # to the clock of a long training
        run()
    del warm, run
    for shape in shapes:
        problem = Problem.of(*shape, args.device)
        rows += [measured(name, problem, ours(name), args, lambda prepare: prepare) for name in RECIPES]
    for shape in () if args.quick else shapes:
        problem = Problem.of(*shape, args.device)
        for name, convert in peers.TRAINING.items():
            rows.append(measured(name, problem, theirs(convert), args, deadline.guard))
    del problem
    memory = [line for tokens in (8192, 32768) for line in chain_memory(args.device, tokens)]
    print(f"\n{machine_line()}\n")
    print_table(HEADER, [cells(row) for row in rows])
    print(f"\na step of {CHAIN} layers 8192x8192, parameters and gradients in bfloat16\n")
    print_table(MEMORY_HEADER, memory)
    print_failures(rows)
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows, chain_memory=memory)


if __name__ == "__main__":
    main()
