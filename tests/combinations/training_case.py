"""What the axes of training mean: models, inputs, optimizers, ways to compile, and the errors that are allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mxtensor as mx
import mxtensor.te as te
from tests.combinations.covering import Case

STEPS = 4


class Kind(NamedTuple):
    """A recipe, and the relative error of a product of two of its operands that are normally distributed."""

    recipe: Any
    error: float
    random: bool = False
    """Gradients are rounded stochastically: no two steps have the same."""


KINDS = {
    "MXFP8": Kind(mx.recipe.MXFP8BlockScaling(), 0.04),
    "MXFP6": Kind(mx.recipe.MXFP6BlockScaling(), 0.04),
    "MXFP4": Kind(mx.recipe.MXFP4BlockScaling(), 0.3, random=True),
    "NVFP4": Kind(mx.recipe.NVFP4BlockScaling(), 0.2, random=True),
    "NVFP4-nearest": Kind(
        mx.recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        0.15,
    ),
    "Float8Block": Kind(mx.recipe.Float8BlockScaling(), 0.04),
    "Float8Current": Kind(mx.recipe.Float8CurrentScaling(), 0.06),
    "Delayed": Kind(mx.recipe.DelayedScaling(), 0.1),
    "Custom": Kind(mx.recipe.CustomRecipe("mxfp8_e4m3", "mxfp6_e2m3", grad="mxfp8_e5m2"), 0.06),
}
ROWS = {"same": (64,) * STEPS, "changing": (24, 65, 1, 128), "none": (8, 0, 33, 0)}
LARGE = 1024
"""Rows of width 2048: results of two million values."""


class Block(nn.Module):
    """Two products with a residual; LoRA adds two thin ones beside the first."""

    def __init__(self, width: int, case: Case, lora: bool):
        super().__init__()
        bias, self.how = case["bias"] == "yes", case["checkpointing"]
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)
        self.a, self.b = (nn.Linear(width, 8, bias=False), nn.Linear(8, 2 * width, bias=False)) if lora else (None,) * 2

    def inner(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(
            x.dtype, torch.float32
        )  # torch's own norm takes no mixture of 16-bit dtypes on a CPU
        norm = self.norm
        normed = F.layer_norm(x.to(wide), norm.normalized_shape, norm.weight.to(wide), norm.bias.to(wide)).to(x.dtype)
        hidden = self.up(normed)
        if self.a is not None:
            hidden = hidden + self.b(self.a(normed))
        return x + self.down(F.gelu(hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no":
            return self.inner(x)
        if self.how == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True)
        contexts = {"context_fn": selected} if self.how == "selective" else {}
        return checkpoint(self.inner, x, use_reentrant=False, **contexts)


def _policy(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.gelu.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


selected = partial(create_selective_checkpoint_contexts, _policy)


class Model(nn.Module):
    """Blocks; ``tied``: the first and the last layer share their weight."""

    def __init__(self, case: Case):
        super().__init__()
        width, lora = int(case["width"]), case["frozen"] == "lora"
        self.blocks = nn.ModuleList([Block(width, case, lora) for _ in range(int(case["layers"]))])
        self.first = self.last = None
        if case["tied"] == "yes":
            self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width)
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)


def freeze(model: Model, how: str) -> None:
    if how == "first":
        model.blocks[0].up.requires_grad_(False)
    if how == "lora":
        for name, p in model.named_parameters():
            p.requires_grad_(".a." in name or ".b." in name)


def made_input(case: Case, rows: int, width: int, device: str, dtype: torch.dtype) -> Tensor:
    """Random values in the layout of the case; they need a gradient, as activations do."""
    how = case["input"]
    if how == "2d":
        x = torch.randn(rows, width, device=device, dtype=dtype)
    elif how == "3d":
        x = torch.randn(2, rows, width, device=device, dtype=dtype)
    elif how == "transposed":
        x = torch.randn(rows, 3, width, device=device, dtype=dtype).transpose(0, 1)
    else:
        x = torch.randn(rows, width + 24, device=device, dtype=dtype)[:, 16 : 16 + width]
    return x.detach().requires_grad_()


class Optimizers:
    """The optimizer of a case; Muon takes matrices only, so that fused AdamW has the other parameters.

    A step changes outputs by about as much at each width: where gradients grow by 20 times, delayed scaling saturates.
    """

    def __init__(self, case: Case, params: list[Tensor]):
        kind, rate = case["optimizer"], 2e-3 * min(1.0, 256 / int(case["width"]))
        eps = 1e-4 if any(p.dtype is torch.float16 for p in params) else 1e-8  # 1e-8 is 0 in float16
        adam = partial(torch.optim.AdamW, lr=rate, eps=eps)
        narrow = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
        if kind == "Muon":
            rest = [p for p in params if p.ndim != 2]
            self.each = [torch.optim.Muon([p for p in params if p.ndim == 2], lr=rate)]
            self.each += [adam(rest, fused=True)] if rest else []
        elif kind.startswith("FusedAdam"):
            self.each = [te.FusedAdam(params, lr=rate, **(narrow if "8bit" in kind else {}))]
        else:
            self.each = [adam(params, **{kind: True})]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()
            optimizer.zero_grad()


def poison(device: str) -> None:
    """Fill freed memory of many sizes with NaN: what is read after it was freed shows."""
    sizes = [2**i for i in range(6, 24 if device == "cuda" else 19)]
    buffers = [torch.full((size,), torch.nan, device=device) for size in sizes for _ in range(2)]
    buffers += [torch.full((size + size // 2,), torch.nan, device=device, dtype=torch.bfloat16) for size in sizes]
    del buffers


@contextlib.contextmanager
def precision(case: Case, device: str, recipe: Any = None) -> Iterator[None]:
    """torch's autocast and the package's, as the case has them."""
    with contextlib.ExitStack() as stack:
        if case["autocast"] != "no":
            stack.enter_context(torch.autocast(device, getattr(torch, case["autocast"])))
        if recipe is not None and case["by"] == "autocast":
            stack.enter_context(mx.autocast(recipe=recipe))
        yield


def compiled(model: Model, way: str, device: str) -> Any:
    """The model to call, compiled as the case has it. On a CPU aot_eager stands for Inductor, which takes 10 s."""
    backend = {"backend": "inductor" if device == "cuda" else "aot_eager"}
    if way == "blocks":
        for block in model.blocks:
            block.compile(**backend)
    if way in ("eager", "blocks"):
        return model
    options = {"dynamic": {"dynamic": True}, "reduce-overhead": {"mode": "reduce-overhead"}}.get(way, {})
    return torch.compile(model, **backend, **options)


def bound(case: Case) -> float:
    """How far a result may be from float64: each product on its path adds its error, and a dtype its rounding."""
    products = 2 * int(case["layers"]) + (2 if case["tied"] == "yes" else 0)
    low = case["autocast"] != "no" or case["dtype"] == "bfloat16"
    return 1.5 * KINDS[case["recipe"]].error * (2 * products) ** 0.5 + (0.04 if low else 0.01)


def slack(case: Case, device: str) -> float:
    """How far a result may be from eager mode. Inductor rounds less often between two layers."""
    if case["way"] == "eager" or device == "cpu":
        return 0.0
    low = case["autocast"] != "no" or case["dtype"] != "float32"
    return 0.3 * bound(case) if low else 0.05 * bound(case)
