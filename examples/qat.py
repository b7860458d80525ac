"""Quantization-aware training: SmolLM2 with rounded weights learns to predict what it predicted before.

    python -m examples.qat --format mxfp4-weight-only --minutes 20

Needs the weights of SmolLM2 (see ``examples.smollm2``). The student starts from weights that GPTQ has rounded, and
trains in the format (``QATConfig``, step "prepare"); the teacher is the same model, unquantized. Both read
documentation of Python's modules, and text that the teacher has written. The student is measured on other modules'
documentation and on a novel.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx
from benchmarks import calibration
from examples import smollm2
from examples.minilm import columns
from mxtensor.numerics.formats import E8M0
from mxtensor.report import quality

MODULES = (
    *calibration.CALIBRATION, "ast", "calendar", "configparser", "csv", "ctypes", "datetime", "difflib", "doctest",
    "enum", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "html.parser", "imaplib", "inspect",
    "ipaddress", "itertools", "locale", "mailbox", "multiprocessing", "optparse", "os", "pathlib", "pdb", "pickle",
    "platform", "pprint", "queue", "re", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "sqlite3", "ssl", "string", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tkinter", "trace",
    "traceback", "turtle", "types", "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom",
    "zipfile",
)  # fmt: skip
"""Modules whose documentation trains; none that is measured."""
TOKENS = 128
"""Tokens whose logits are in memory at once."""


def training_rows(model: Any, tokenizer: Any, sampled: int, seed: int = 0) -> Tensor:
    """Rows of token ids, (rows, quality.WINDOW), in random order: documentation, and ``sampled`` rows of the model."""
    rows = [quality.windows(tokenizer, _documentation())]
    if sampled:
        rows += mx.sampled_data(model, sampled, quality.WINDOW, seed=seed)
    every = torch.cat(rows)
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))]


def _documentation() -> str:
    pages = []
    for name in MODULES:
        try:
            pages.append(calibration.documentation((name,)))
        except ImportError:  # a Python without tkinter or sqlite3
            continue
    return "\n".join(pages)


class _Divergence(torch.autograd.Function):
    """The KL divergence of the predictions of two hidden states, a part of the tokens at a time.

    Logits are as large as the whole model here. They are made, used for the loss and for its gradient
    (softmax - teacher's softmax), and forgotten.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        total, gradient = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
        for begin in range(0, len(hidden), TOKENS):
            rows = slice(begin, begin + TOKENS)
            q, p = (F.linear(h[rows], head).float().log_softmax(-1) for h in (hidden, teacher))
            p_exp = p.exp()
            total += (p_exp * p.sub_(q)).sum()
            gradient[rows] = (q.exp_().sub_(p_exp)).to(head.dtype) @ head
        ctx.save_for_backward(gradient.div_(len(hidden)))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None


def divergence(hidden: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
    """The mean KL divergence, in nats, of softmax(hidden head^T) from softmax(teacher head^T).

    ``hidden``, ``teacher``: (tokens, columns); ``head``: (classes, columns), which is not trained.
    """
    out: Tensor = _Divergence.apply(hidden, teacher, head)
    return out


def hidden_states(model: Any, rows: Tensor) -> Tensor:
    """What the head of a language model reads for rows of token ids, (rows * window, columns)."""
    out: Tensor = model.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
    return out


class Distiller:
    """Trains the linear layers of a student to predict as the teacher does, with products in bfloat16."""

    def __init__(self, student: Any, teacher: Any, rate: float) -> None:
        self.student, self.teacher, self.rate = student, teacher, rate
        self.head = teacher.lm_head.weight.detach().bfloat16()
        self.weights = [layer.weight for layer in mx_layers(student)]
        for weight in self.weights:
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def step(self, rows: Tensor, done: float) -> float:
        """One step on rows of token ids; returns the divergence before it. ``done``: the share of training, 0 to 1.

        The rate of learning rises for a tenth of training, and falls like a cosine.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(10 * done + 0.02, 0.5 + 0.5 * math.cos(math.pi * done))
        with torch.autocast(rows.device.type, torch.bfloat16):
            with torch.no_grad():
                expected = hidden_states(self.teacher, rows).bfloat16()
            found = hidden_states(self.student, rows).bfloat16()
        loss = divergence(found, expected, self.head)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def mx_layers(model: nn.Module) -> list[mx.FakeQuantizedLinear]:
    """The prepared layers of a model."""
    return [module for module in model.modules() if isinstance(module, mx.FakeQuantizedLinear)]


def endless(rows: Tensor, batch: int, seed: int = 0) -> Iterator[Tensor]:
    """Batches of rows, each epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (rows[index] for index in torch.randperm(len(rows), generator=generator).split(batch))


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
    rounds, width, found = mx.FakeQuantizer(cast), cast.format.block[1], original.clone()
    width = width if width > 1 and original.shape[1] % width == 0 else original.shape[1]
    random = torch.rand(found.shape, generator=torch.Generator().manual_seed(seed)).to(found.device)

    def same(values: Tensor) -> Tensor:
        return torch.eq(rounds(values), rounded)

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


def train(student: Any, teacher: Any, rows: Tensor, seconds: float, batch: int, rate: float, every: int = 5) -> int:
    """Train until ``seconds`` of CPU time of the process have passed, or until Ctrl-C; returns the number of steps."""
    batches, distiller, losses = endless(rows, batch), Distiller(student, teacher, rate), []
    begin = time.process_time()
    try:
        while (passed := time.process_time() - begin) < seconds:
            losses.append(distiller.step(next(batches), passed / seconds))
            if len(losses) % every == 0:
                recent = sum(losses[-every:]) / every
                print(f"step {len(losses)}, {passed / seconds:.0%} of the time: KL {recent:.4f}", flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(losses)} steps")
    return len(losses)


def main(argv: Sequence[str] | None = None) -> None:
    """Round, calibrate, train; print the quality of each."""
    parser = argparse.ArgumentParser(prog="python -m examples.qat", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--format", default="mxfp4-weight-only", help="what quantize_ takes (%(default)s)")
    add("--minutes", type=float, default=20.0, help="of training, on --threads cores (20)")
    add("--threads", type=int, default=2)
    add("--batch", type=int, default=4, help=f"rows of {quality.WINDOW} tokens in a step (4)")
    add("--rate", type=float, default=2e-5, help="of learning (2e-5)")
    add("--sampled", type=int, default=128, help="rows that the model writes (128)")
    add("--calibration", type=int, default=32, help="rows that calibrate (32); 0: start from the unquantized weights")
    add("--cache", type=Path, help="a file for the rows and the calibrated weights, which take minutes to make")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    logging.getLogger("mxtensor").setLevel(logging.ERROR)
    teacher, tokenizer = smollm2.load_model(torch.float32)
    measure = calibration.Measure(teacher, calibration.evaluation_rows(tokenizer))
    method = ["smooth", mx.GPTQ(correct="cast")] if not args.format.endswith("weight-only") else "gptq"
    student: Any = copy.deepcopy(teacher)
    if args.cache is not None and args.cache.exists():
        rows, state = torch.load(args.cache)
        student.load_state_dict(state)
    else:
        rows = training_rows(teacher, tokenizer, args.sampled)
        student = start(
            teacher, list(rows[: args.calibration].split(8)), args.format, method if args.calibration else None
        )
        if args.cache is not None:
            torch.save((rows, student.state_dict()), args.cache)
    found = {"nearest": measure.quality(mx.quantize_(copy.deepcopy(teacher), args.format))}
    found["calibrated"] = measure.quality(mx.quantize_(copy.deepcopy(student), args.format))
    show(found)
    mx.quantize_(student, mx.QATConfig(args.format, step="prepare"))
    steps = train(student, teacher, rows, 60 * args.minutes * args.threads, args.batch, args.rate)
    mx.quantize_(student, mx.QATConfig(args.format, step="convert"))
    found[f"trained, {steps} steps"] = measure.quality(student)
    show(found)


def show(found: dict[str, dict[str, quality.Quality]]) -> None:
    """Print perplexity and KL by text."""
    texts = list(next(iter(found.values())))
    lines = [
        [name, *(cell for text in texts for cell in (f"{q[text].perplexity:.2f}", f"{q[text].kl:.4f}"))]
        for name, q in found.items()
    ]
    print(columns(["weights", *(f"{text}: {figure}" for text in texts for figure in ("perplexity", "KL"))], lines))


if __name__ == "__main__":
    main()
