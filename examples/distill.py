"""Distillation: a student with prepared layers learns to predict what its teacher, the unquantized model, predicts."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = {"cpu": 128, "cuda": 4096}
"""Tokens whose logits are in memory at once, by type of device."""
MAX_GRADIENT_NORM = 1.0
"""The largest norm of a gradient."""


def _part(hidden: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the divergences of some tokens, and its gradient for ``hidden``: (softmax - teacher's) head."""
    q, p = (F.linear(h, head).float().log_softmax(-1) for h in (hidden, teacher))
    p_exp = p.exp()
    return (p_exp * (p - q)).sum(), (q.exp() - p_exp).to(head.dtype) @ head


@cache
def _compiled_part() -> Any:
    """``_part`` whose passes over the logits are joined: without, they take a fifth of a step on an H100."""
    return torch.compile(_part, dynamic=False)


class _Divergence(torch.autograd.Function):
    """The KL divergence of the predictions of two hidden states, a part of the tokens at a time.

    Logits are as large as the whole model here. They are made, used for the loss and for its gradient
    (softmax - teacher's softmax), and forgotten.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, teacher: Tensor, head: Tensor, compiled: bool) -> Tensor:
        part, hidden = _compiled_part() if compiled else _part, hidden.detach()
        total, gradient = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
        tokens = TOKENS.get(hidden.device.type, 128)
        for begin in range(0, len(hidden), tokens):
            rows = slice(begin, begin + tokens)
            some, gradient[rows] = part(hidden[rows], teacher[rows], head)
            total += some
        ctx.save_for_backward(gradient.div_(len(hidden)))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


def divergence(hidden: Tensor, teacher: Tensor, head: Tensor, compiled: bool = False) -> Tensor:
    """The mean KL divergence, in nats, of softmax(hidden head^T) from softmax(teacher head^T).

    ``hidden``, ``teacher``: (tokens, columns); ``head``: (classes, columns), which is not trained.
    """
    out: Tensor = _Divergence.apply(hidden, teacher, head, compiled)
    return out


def hidden_states(model: Any, rows: Tensor) -> Tensor:
    """What the head of a language model reads for rows of token ids, (rows * window, columns)."""
    out: Tensor = model.base_model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
    return out


def prepared_layers(model: nn.Module) -> list[nn.Module]:
    """The prepared layers of a model."""
    return [module for module in model.modules() if hasattr(module, "weight_fake_quantizer")]


def in_bfloat16(teacher: Any) -> Any:
    """A copy whose linear layers have weights in bfloat16, as autocast multiplies them; the rest is shared."""
    fast = copy.deepcopy(teacher, {id(parameter): parameter for parameter in teacher.parameters()})
    for module in fast.base_model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().bfloat16(), requires_grad=False)
    return fast


@dataclass
class Distiller:
    """Trains the prepared layers and the norms of a student, with products in bfloat16 and parameters in float32.

    ``compiled``: each block of the student and of the teacher is one compiled graph, and so is the divergence.
    """

    student: Any
    teacher: Any
    rate: float
    """The peak learning rate."""
    compiled: bool = False
    clip: float = MAX_GRADIENT_NORM
    head: Tensor = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.teacher = in_bfloat16(self.teacher)
        self.head = self.teacher.get_output_embeddings().weight.detach().bfloat16()
        trained = [*prepared_layers(self.student), *(m for m in self.student.base_model.modules() if is_norm(m))]
        self.parameters = [module.get_parameter("weight") for module in trained]
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.parameters, self.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        if self.compiled:
            for model in (self.student, self.teacher):
                for block in blocks_of(model):
                    block.compile()

    @torch.no_grad()
    def expected(self, rows: Tensor) -> Tensor:
        """The teacher's hidden states for rows of token ids, (rows * window, columns), in bfloat16."""
        with torch.autocast(rows.device.type, torch.bfloat16):
            return hidden_states(self.teacher, rows).bfloat16()

    def backward(self, rows: Tensor, expected: Tensor | None = None) -> Tensor:
        """Add the gradients for rows of token ids; returns the divergence. ``expected``: the teacher's states."""
        expected = self.expected(rows) if expected is None else expected.flatten(0, -2)
        with torch.autocast(rows.device.type, torch.bfloat16):
            found = hidden_states(self.student, rows).bfloat16()
        loss = divergence(found, expected, self.head, self.compiled)
        loss.backward()
        return loss.detach()

    def step(self, rows: Tensor, done: float, expected: Tensor | None = None) -> Tensor:
        """One step on rows of token ids; returns the divergence before it. ``done``: the share of training, 0 to 1.

        The learning rate rises during the first twentieth of training, then falls like a cosine.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(20 * done + 0.02, 0.5 + 0.5 * math.cos(math.pi * done))
        loss = self.backward(rows, expected)
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def warm_up(self, rows: Tensor) -> None:
        """Compile and allocate what a step needs; nothing is trained."""
        self.backward(rows)
        self.optimizer.zero_grad()


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with a weight."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and "norm" in type(module).__name__.lower()


def blocks_of(model: Any) -> Sequence[nn.Module]:
    """The blocks of a language model of transformers: its longest list of modules."""
    return max((list(module) for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


def endless(rows: Tensor, batch: int, seed: int = 0) -> Iterator[Tensor]:
    """Batches of ``batch`` rows. Every row is in one before any of them is in a second one."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(len(rows), generator=generator)])
        yield rows[order[:batch]]
        order = order[batch:]


class Batches:
    """Endless batches of some of ``rows``, (rows, window), and the teacher's states of them, if they are known."""

    def __init__(self, rows: Tensor, indices: Iterator[Tensor]) -> None:
        self._rows, self._indices = rows, indices
        self._states: Tensor | None = None

    def remember(self, distiller: Distiller, batch: int) -> None:
        """Compute the teacher's hidden states of all rows once: 2 bytes per value on the device of the teacher."""
        device, pieces = next(distiller.teacher.parameters()).device, []
        for new in self._rows.split(batch):
            rows = new if len(new) == batch else self._rows[-batch:]  # of one size, for compiled blocks
            pieces.append(distiller.expected(rows.to(device)).unflatten(0, rows.shape)[-len(new) :])
        self._states = torch.cat(pieces)

    def __next__(self) -> tuple[Tensor, Tensor | None]:
        index = next(self._indices)
        return self._rows[index], None if self._states is None else self._states[index.to(self._states.device)]


@dataclass
class Training:
    """What a run of ``train`` did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, the mean divergence since the entry before)."""


def train(distiller: Distiller, batches: Batches, seconds: float, every: int = 5) -> Training:
    """Train until ``seconds`` have passed, or until Ctrl-C.

    On a CPU, seconds are those of the process, of all threads together; on a GPU they are wall time. Every ``every``
    steps the divergence is read, which waits for the GPU, and printed.
    """
    device = next(distiller.student.parameters()).device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    done, losses, begin = Training(), [], clock()
    try:
        while (passed := clock() - begin) < seconds:
            rows, expected = next(batches)
            losses.append(distiller.step(rows.to(device, non_blocking=True), passed / seconds, expected))
            done.steps, done.tokens = done.steps + 1, done.tokens + rows.numel()
            if done.steps % every == 0:
                done.curve.append((done.steps, float(torch.stack(losses).mean())))
                losses.clear()
                print(f"step {done.steps}, {passed / seconds:.0%} of the time: KL {done.curve[-1][1]:.4f}", flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {done.steps} steps")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    done.seconds = clock() - begin
    return done
