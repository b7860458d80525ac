"""One case of the sweep over training: what its axes mean, several steps, and the same steps of its twins.

All steps run first and are recorded, because other work between two steps can hide a stale address: its memory may be
given to that work. Then the twins repeat each step from the recorded parameters, inputs and targets:

- ``exact``: float64, not quantized. The results differ by the errors of the formats.
- ``eager``: the same recipe and dtype, without compilation and checkpointing. The results differ by rounding to the
  dtype, after which some values are cast to the neighboring code; where nothing is rounded otherwise, by nothing.
- the optimizer over plain parameters, with the recorded gradients: bitwise identical.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mxtensor as mx
from mxtensor.training.training_weight import values_of
from tests.combinations.covering import Case
from tests.combinations.training_case import (
    KINDS,
    LARGE,
    ROWS,
    STEPS,
    Model,
    Optimizers,
    bound,
    compiled,
    freeze,
    made_input,
    poison,
    precision,
    slack,
)  # fmt: skip

RELOADED = 2
"""The step before which a state dict is loaded."""


class Step(NamedTuple):
    """A step: what went in, and on the CPU what came out."""

    before: dict[str, Tensor]
    inputs: list[tuple[Tensor, Tensor]]
    results: dict[str, Tensor]
    grads: dict[str, Tensor]
    after: dict[str, Tensor]


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters on the CPU: no memory of the device is taken."""
    return {n: on_cpu(values_of(p)) for n, p in model.named_parameters()}


def on_cpu(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def microsteps(
    case: Case, run: Any, inputs: list[tuple[Tensor, Tensor]], device: str, recipe: Any
) -> dict[str, Tensor]:
    """Forward and backward passes of one step: outputs, losses and gradients of inputs, on the CPU."""
    results = {}
    with mx.accumulate() if case["accumulation"] == "mx.accumulate" else contextlib.nullcontext():
        for i, (x, target) in enumerate(inputs):
            if device == "cuda" and case["way"] == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            x.grad = None
            with precision(case, device, recipe):
                y = run(x)
            loss = F.mse_loss(y.to(target.dtype), target, reduction="sum") / max(1, x.numel() // x.shape[-1])
            results |= {f"output {i}": on_cpu(y), f"loss {i}": on_cpu(loss)}
            del y
            loss.backward()
            results[f"grad of input {i}"] = on_cpu(x.grad)
    return results


def reload(model: Model, optimizers: Optimizers, how: str) -> None:
    """Load a state dict whose values are others than those of the model, as a restored run does."""
    state = {n: v * 0.9 if v.is_floating_point() else v for n, v in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state)
    for optimizer in optimizers.each if how == "both" else []:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def subject(case: Case, model: Model, device: str) -> list[Step]:
    """All steps of the case, one after the other."""
    kind, dtype, rows = KINDS[case["recipe"]], getattr(torch, case["dtype"]), ROWS[case["rows"]]
    width, count = int(case["width"]), 1 if case["accumulation"] == "1" else 2
    rows = rows if width < 2048 else (LARGE,) * STEPS
    batches = [[made_input(case, r, width, device, dtype) for _ in range(count)] for r in rows]
    inputs = [[(x, torch.randn_like(x, dtype=torch.float32).contiguous()) for x in batch] for batch in batches]
    if case["by"] == "quantize_":
        mx.quantize_(model, kind.recipe)
    optimizers = Optimizers(case, [p for p in model.parameters() if p.requires_grad])
    run, steps = compiled(model, case["way"], device), []
    for number, batch in enumerate(inputs):
        if number == RELOADED and case["reload"] != "no":
            reload(model, optimizers, case["reload"])
        before = values(model)
        results = microsteps(case, run, batch, device, kind.recipe)
        grads = {n: on_cpu(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        optimizers.step()
        steps.append(Step(before, batch, results, grads, values(model)))
        if case["between"] == "nan":
            poison(device)
    return steps


def put(model: nn.Module, recorded: dict[str, Tensor]) -> None:
    """Give the parameters these values, and no gradients."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.grad = None
            p.copy_(recorded[name])


def twin(case: Case, model: Model, steps: list[Step], device: str, recipe: Any) -> list[dict[str, Tensor]]:
    """The results and gradients of the same steps on another model."""
    dtype, found = next(model.parameters()).dtype, []
    for step in steps:
        put(model, step.before)
        wide = torch.promote_types(dtype, torch.float32)
        inputs = [(x.detach().to(dtype).requires_grad_(), target.to(wide)) for x, target in step.inputs]
        results = microsteps(case, model, inputs, device, recipe)
        found.append(results | {n: on_cpu(p.grad) for n, p in model.named_parameters() if p.requires_grad})
    return found


def error(mine: Tensor, right: Tensor) -> float:
    """The relative error by norm; 0 if both are without values or 0, infinite if only the right ones are 0."""
    assert mine.shape == right.shape
    difference, norm = (mine.double() - right.double()).norm().item(), right.double().norm().item()
    return difference / norm if norm else 0.0 if difference == 0 else torch.inf


def check(case: Case, device: str) -> dict[str, float]:
    """Run the case and its twins, and compare. Returns the largest error beside each twin, for those who set bounds."""
    kind, dtype = KINDS[case["recipe"]], getattr(torch, case["dtype"])
    model = Model(case).to(device)
    for p in model.parameters():
        p.data.copy_(p.data.to(dtype))  # all twins start from the same values
    freeze(model, case["frozen"])
    exact, model = copy.deepcopy(model).double(), model.to(dtype)
    eager, shadow = copy.deepcopy(model), copy.deepcopy(model)
    steps = subject(case, model, device)

    quiet = case | {"checkpointing": "no", "way": "eager", "autocast": "no", "by": "quantize_", "accumulation": "1"}
    for other in (exact, eager):
        for block in other.blocks:
            block.how = "no"
    if case["by"] == "quantize_":
        mx.quantize_(eager, kind.recipe)
    uncompiled = case | {"way": "eager", "accumulation": "1", "checkpointing": "no"}
    right = twin(quiet, exact, steps, device, None)
    same = twin(uncompiled, eager, steps, device, kind.recipe)
    worst = {"exact": 0.0, "eager": 0.0}
    for number, (step, truth, plain) in enumerate(zip(steps, right, same, strict=True)):
        mine = step.results | step.grads
        assert mine.keys() == truth.keys() == plain.keys()
        for name, value in mine.items():
            off, apart = error(value, truth[name]), error(value, plain[name])
            assert off < bound(case), f"step {number}, {name}: {off:.3g} from float64, allowed {bound(case):.3g}"
            worst["exact"] = max(worst["exact"], off)
            if kind.random and after_random_casts(name):
                continue
            assert apart <= slack(case, device), f"step {number}, {name}: {apart:.3g} from eager"
            worst["eager"] = max(worst["eager"], apart)
    check_updates(case, shadow, steps)
    return worst


def after_random_casts(name: str) -> bool:
    """Whether a result depends on gradients that were rounded at random."""
    return not name.startswith(("output", "loss"))


def check_updates(case: Case, shadow: Model, steps: list[Step]) -> None:
    """The optimizer did with the parameters of the case what it does with plain ones, bit for bit."""
    optimizers = Optimizers(case, [p for p in shadow.parameters() if p.requires_grad])
    for number, step in enumerate(steps):
        put(shadow, step.before)
        for name, p in shadow.named_parameters():
            if name in step.grads:
                p.grad = step.grads[name].to(p.device)
        optimizers.step()
        for name, value in values(shadow).items():
            assert step.after[name].equal(value), f"step {number}: the optimizer wrote other values to {name}"
