"""Training on a GPU beside bfloat16: layers, experts, whole steps, memory. ``python -m benchmarks.training``.

A step of a layer is ``y = layer(x); y.backward(g)`` with gradients for input and weight; of experts the same with
``F.grouped_mm(x, w, offs=ends)``; of a model it is forward, loss, backward and AdamW.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.convert.training import training_parameter
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

from . import peers
from .cuda import Deadline, event_clock, step_clock
from .harness import Prepare, Progress, Row, Section, Work, parser, print_table, run, timed

BASE, EAGER, COMPILED = "bfloat16", "eager", "compiled"
RECIPES: dict[str, Callable[[], Recipe]] = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8, 32x32 weights": lambda: MXFP8BlockScaling(two_dimensional_weights=True),
    "float8 current": Float8CurrentScaling,
    "float8 delayed": DelayedScaling,
    "float8 block": Float8BlockScaling,
    "mxfp6": MXFP6BlockScaling,
    "mxfp4": MXFP4BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
OF_EXPERTS = ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "float8 current", "float8 block")
OF_STEPS = ("mxfp8",)


@dataclass
class TrainRow(Row):
    """bfloat16, and one recipe eager and compiled, in turn on one shape."""

    contender: str = ""
    shape: str = ""
    """Of a layer MxNxK: rows of activations, rows of the weight, columns of both."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    """Of a layer: peak of a step above what stands before it."""


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Work:
    """Forward and backward with fresh gradients."""
    parameters = list(model.parameters())

    def work() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        model(x).backward(grad)

    return work


def compiled(model: nn.Module) -> nn.Module:
    """The model through torch.compile, as one graph for these shapes alone."""
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=False)  # type: ignore[return-value]


def timed_steps(
    name: str, shape: str, base: Prepare, make: Callable[[], Work], compiles: Prepare | None, args: argparse.Namespace
) -> TrainRow:
    """bfloat16 (eager: compiled it runs the same kernels), the contender eager, and compiled, in turn."""
    row = TrainRow(f"{name} {shape}", {}, contender=name, shape=shape)

    def eager() -> Work:
        work = make()
        with mx.explain() as log:
            work()
        row.kernels[name] = ", ".join(e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad"))
        return work

    contenders: dict[str, Prepare] = {BASE: base, EAGER: eager}
    if compiles is not None and not args.tiny:
        contenders[COMPILED] = compiles
    return timed(row, contenders, args.repeats, clock=event_clock(30.0, max_calls=4), seconds=3.0)


HEADER = ["shape", "contender", "bf16 ms", "eager ms", "over bf16", "compiled ms", "over bf16", "kernels"]


def cells(row: TrainRow) -> list[str]:
    """The line of the printed table."""
    line = [row.shape, row.contender, f"{row.times[BASE]:.3f}" if BASE in row.times else ""]
    for how in (EAGER, COMPILED):
        line += [f"{row.times[how]:.3f}", f"{row.over_base(how):.3f}"] if how in row.times else ["", ""]
    return [*line, row.kernels.get(row.contender, "")]


# ---------------------------------------------------------------------------------------------- one layer

SHAPES = ((8192, 8192, 8192), (8192, 14336, 4096))
"""(M, N, K)"""


@dataclass
class Problem:
    """The tensors of one shape."""

    x: Tensor
    weight: Tensor
    grad: Tensor

    @classmethod
    def of(cls, m: int, n: int, k: int, device: str) -> Problem:
        """x (m, k), weight (n, k) and the gradient of the result (m, n)."""

        def make(rows: int, cols: int) -> Tensor:
            return torch.randn(rows, cols, dtype=torch.bfloat16, device=device)

        return cls(make(m, k).requires_grad_(), make(n, k) * 0.02, make(m, n))

    def layer(self) -> nn.Linear:
        """A plain layer around a copy of the weight."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight.clone())
        return layer

    def step(self, model: nn.Module) -> Work:
        """A step with these tensors."""
        return step(model, self.x, self.grad)


def peak_mib(work: Work) -> float:
    """The most memory that a step takes above what stands before it."""
    if not torch.cuda.is_available():
        return float("nan")
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Autocast(nn.Module):
    """A layer inside ``mx.autocast``: the way in that delayed scaling has under torch.compile."""

    def __init__(self, layer: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x: Tensor) -> Tensor:
        """The layer's."""
        with mx.autocast(recipe=self.recipe):
            return self.layer(x)  # type: ignore[no-any-return]


def ours(name: str, problem: Problem) -> nn.Module:
    """nn.Linear under ``mx.quantize_``; inside ``mx.autocast`` where the recipe has a history."""
    recipe = RECIPES[name]()
    if not recipe.delayed():
        return mx.quantize_(problem.layer(), recipe)
    model = Autocast(problem.layer(), recipe)
    problem.step(model)()  # its first step is eager
    return model


def theirs(convert: Callable[[nn.Module], Any], problem: Problem) -> nn.Module:
    """torchao's layer, which it converts as a child of what it is given."""
    model = nn.Sequential(problem.layer())
    return convert(model) or model


def layer_row(
    name: str, problem: Problem, make: Callable[[Problem], nn.Module], args: argparse.Namespace,
    guard: Callable[[Prepare], Prepare] = lambda prepare: prepare,
) -> TrainRow:  # fmt: skip
    """One recipe on one shape: times, and the peak of memory."""
    peaks: dict[str, float] = {}

    def work(how: str, model: nn.Module) -> Work:
        found = problem.step(model)
        peaks[how] = peak_mib(found)
        return found

    (m, n), k = problem.grad.shape, problem.x.shape[1]
    row = timed_steps(
        name, f"{m}x{n}x{k}", lambda: work(BASE, problem.layer()), guard(lambda: work(EAGER, make(problem))),
        guard(lambda: work(COMPILED, compiled(make(problem)))), args,
    )  # fmt: skip
    row.peak_mib = peaks
    return row


def layer(args: argparse.Namespace) -> list[TrainRow]:
    """Every recipe on every shape, then torchao's while there is time."""
    deadline, rows = Deadline(args.seconds), list[TrainRow]()
    shapes = ((32, 64, 96),) if args.tiny else SHAPES
    warm = Problem.of(*shapes[0], args.device)
    work = warm.step(warm.layer())
    for _ in range(2 if args.tiny else 500):  # to the clock of a long training
        work()
    recipes = args.recipes or [name for name in RECIPES if name != "mxfp6"]
    progress = Progress(len(shapes) * len(recipes), "recipes")
    for shape in shapes:
        problem = Problem.of(*shape, args.device)
        for name in recipes:
            rows.append(layer_row(name, problem, lambda problem, name=name: ours(name, problem), args))  # type: ignore[misc]
            progress.step(rows[-1].work)
    progress.close()
    for shape in () if args.tiny else shapes:
        problem = Problem.of(*shape, args.device)
        for name, convert in peers.TRAINING.items():
            make = lambda problem, convert=convert: theirs(convert, problem)  # noqa: E731
            rows.append(layer_row(name, problem, make, args, deadline.guard))
    print_table(HEADER, [cells(row) for row in rows])
    return rows


# ---------------------------------------------------------------------------------------------- memory of a chain

CHAIN = 8
"""Layers of the chain whose memory is measured, 8192 wide."""


@dataclass
class MemoryRow:
    """MiB of one recipe, and over those of bfloat16: what waits for backward (``saved``); the peak of a step whose
    gradients are there before it (accumulated, or in the buckets of data parallelism: ``peak``), and of one that
    allocates them (``new``)."""

    tokens: int
    recipe: str
    mib: dict[str, float]
    over_bf16: dict[str, float]


def chain(recipe: Callable[[], Recipe] | None, x: Tensor) -> dict[str, float]:
    """MiB of a chain of layers, by the names of MemoryRow."""
    x.grad = None
    width, before = x.shape[1], torch.cuda.memory_allocated() - x.nbytes
    layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=x.device) for _ in range(CHAIN)]
    model = nn.Sequential(*layers)
    if recipe is not None:
        mx.quantize_(model, recipe())
    mib: dict[str, float] = {}
    for kind, fresh in (("new", True), ("peak", False)):
        for _ in range(2):
            model.zero_grad(set_to_none=fresh)
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            y = model(x * 1)  # an activation, as in a network, which nobody keeps but the layer
            mib["saved"] = (torch.cuda.memory_allocated() - start - y.nbytes) / 2**20
            y.backward(torch.randn_like(y))
            torch.cuda.synchronize()
            mib[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del y
    return mib


def memory(args: argparse.Namespace) -> list[MemoryRow]:
    """The memory of a step of CHAIN layers, parameters and gradients in bfloat16."""
    if not torch.cuda.is_available():
        return []  # a toy size: there is nothing that counts
    rows = []
    for tokens in (8192, 32768):
        x = torch.randn(tokens, 8192, dtype=torch.bfloat16, device=args.device, requires_grad=True)
        base = chain(None, x)
        for name in (BASE, *(args.recipes or [name for name in RECIPES if name != "mxfp6"])):
            mib = base if name == BASE else chain(RECIPES[name], x)
            over = {kind: round(value / base[kind], 3) for kind, value in mib.items()}
            rows.append(MemoryRow(tokens, name, {kind: round(value) for kind, value in mib.items()}, over))
    kinds = ("saved", "peak", "new")
    lines = [[str(r.tokens), r.recipe, *(f"{r.mib[k]:.0f} ({r.over_bf16[k]:.3f})" for k in kinds)] for r in rows]
    print_table(["rows", "recipe", *(f"{kind} MiB (over bf16)" for kind in kinds)], lines)
    return rows


# ---------------------------------------------------------------------------------------------- experts


class Stack(NamedTuple):
    """Rows of all groups, and the stack of weights."""

    rows: int
    experts: int
    width: int
    """N"""
    cols: int
    """K"""

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.experts}x{self.width}x{self.cols}"


STACKS = (Stack(16384, 8, 14336, 4096), Stack(32768, 64, 2048, 2048), Stack(32768, 64, 1536, 4096))
"""Mixtral 8x7B's up, OLMoE's gate and up, Qwen 3 235B's up for half of its experts."""


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


def experts_row(name: str, stack: Stack, args: argparse.Namespace) -> TrainRow:
    """One recipe on one stack."""
    x = torch.randn(stack.rows, stack.cols, dtype=torch.bfloat16, device=args.device).requires_grad_()
    grad = torch.randn(stack.rows, stack.width, dtype=torch.bfloat16, device=args.device)
    weight = 0.02 * torch.randn(stack.experts, stack.width, stack.cols, dtype=torch.bfloat16, device=args.device)
    ends = ends_of(stack.rows, stack.experts, args.device)

    def experts(recipe: Recipe | None) -> nn.Module:
        parameter = nn.Parameter(weight.clone())
        return Experts(parameter if recipe is None else training_parameter(parameter, recipe.linear_recipe()), ends)

    return timed_steps(
        name, str(stack), lambda: step(experts(None), x, grad), lambda: step(experts(RECIPES[name]()), x, grad),
        lambda: step(compiled(experts(RECIPES[name]())), x, grad), args,
    )  # fmt: skip


def experts(args: argparse.Namespace) -> list[TrainRow]:
    """Every recipe on every stack of experts, with ragged groups, two of them empty."""
    stacks, recipes = (Stack(96, 4, 32, 32),) if args.tiny else STACKS, args.recipes or OF_EXPERTS
    rows, progress = list[TrainRow](), Progress(len(stacks) * len(recipes), "recipes")
    for stack in stacks:
        for name in recipes:
            rows.append(experts_row(name, stack, args))
            progress.step(rows[-1].work)
    progress.close()
    print_table(HEADER, [cells(row) for row in rows])
    return rows


# ---------------------------------------------------------------------------------------------- a whole step


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


def training_step(name: str, size: Size, mode: str, args: argparse.Namespace) -> Work:
    """The step of a new model with this recipe: forward, loss, backward and AdamW, all states in bfloat16."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = GPT(size).bfloat16()
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1))
    if name != BASE:
        mx.quantize_(model, RECIPES[name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if mode == COMPILED:
        for block in model.blocks:
            block.compile()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def work() -> None:
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()

    return work


def step_row(name: str, size: Size, mode: str, args: argparse.Namespace) -> StepRow:
    """All recipes of one size, in turn."""
    torch._dynamo.reset()  # graphs of earlier rows count towards Dynamo's limit of recompilations
    row = StepRow(f"{name} {mode}", {}, size=name, mode=mode, tokens=size.batch * size.length)

    def prepare(contender: str) -> Work:
        work = training_step(contender, size, mode, args)
        row.prepare_s[contender] = step_clock(work)() / 1e3
        return work

    contenders: dict[str, Prepare] = {c: lambda c=c: prepare(c) for c in (BASE, *(args.recipes or OF_STEPS))}  # type: ignore[misc]
    timed(row, contenders, args.repeats, warmup=2, clock=step_clock)
    gc.collect()
    torch.cuda.empty_cache()
    return row


def steps(args: argparse.Namespace) -> list[StepRow]:
    """Whole training steps of two GPTs; embeddings and the head stay in bfloat16, blocks are compiled one by one."""
    sizes, modes = (TINY, (EAGER,)) if args.tiny else (SIZES, (EAGER, COMPILED))
    rows, progress = list[StepRow](), Progress(len(sizes) * len(modes), "models")
    for name, size in sizes.items():
        for mode in modes:
            rows.append(step_row(name, size, mode, args))
            progress.step(rows[-1].work)
    progress.close()
    lines = [
        [row.size, row.mode, name, f"{ms:.1f}", f"{row.tokens / ms * 1e3:,.0f}", f"{row.ratio(name, BASE):.3f}",
         f"{row.prepare_s[name]:.1f}"]
        for row in rows for name, ms in row.times.items()
    ]  # fmt: skip
    print_table(["layers x width", "mode", "recipe", "ms", "tokens/s", "over bf16", "first step s"], lines)
    return rows


SECTIONS = {
    "layer": Section("how long do forward and backward of a linear layer take?", layer, gpu=True),
    "memory": Section("how much memory does a step of eight layers take?", memory, gpu=True),
    "experts": Section("how long do forward and backward of a stack of experts take?", experts, gpu=True),
    "step": Section("how long does a whole training step of a GPT take?", steps, gpu=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Time training."""
    options = parser(__doc__ or "", SECTIONS, repeats=7)
    options.add_argument("--recipes", nargs="+", choices=RECIPES, metavar="NAME", help="(those of the section)")
    options.add_argument("--seconds", type=float, default=240, help="skip torchao after this time (%(default)s)")
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
