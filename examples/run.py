"""A training run of ``examples.train_lm`` and ``benchmarks.parity``: model, optimizer, steps and checkpoints."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.core.compat import local_of
from mxtensor.core.explain import Log
from mxtensor.recipe import Recipe
from mxtensor.recipe.linear_recipe import LinearRecipe
from mxtensor.training.interception import delayed_state
from mxtensor.training.training_weight import TrainingWeight

from . import saving
from .gpt import GPT, SIZES, Size, is_linear, paper_layers, windows
from .ranks import ALONE, Ranks, by_mesh, clip
from .recipes import recipe_of

if TYPE_CHECKING:
    from typing_extensions import Self


def quantized_weights(model: nn.Module) -> dict[str, TrainingWeight]:
    """The parameters that carry a recipe, by name; for sharded parameters the local shard."""
    weights = {name: local_of(p) for name, p in model.named_parameters()}
    return {name: p for name, p in weights.items() if isinstance(p, TrainingWeight)}


@dataclass(frozen=True)
class Settings:
    """A run can continue from a checkpoint of another run only if these are equal."""

    recipe: str
    quantize_all: bool
    size: str
    seed: int
    device: str
    text: str
    """A digest of the text."""
    steps: int = 0
    """Length of a run whose learning rate falls as a cosine, to a tenth at its end; 0: it falls with the square root of
    the step, whatever the run's length."""


@dataclass
class Run:
    """A model in training: the state that the next step depends on, and the losses so far."""

    settings: Settings
    model: GPT
    optimizer: torch.optim.Optimizer
    sampler: torch.Generator
    """Chooses the windows."""
    ranks: Ranks = ALONE
    losses: list[float] = field(default_factory=list)
    """The loss of each step, before its update."""
    unread: list[Tensor] = field(default_factory=list)
    """The losses of the steps since then, on the device: the host has not waited for them."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss)."""
    seconds: list[float] = field(default_factory=list)
    """The time of each step of this process."""

    @classmethod
    def of(cls, settings: Settings, ranks: Ranks = ALONE) -> Self:
        """Start a run with the recipe that the settings name."""
        return cls.with_recipe(settings, recipe_of(settings.recipe), ranks)

    @classmethod
    def with_recipe(
        cls, settings: Settings, recipe: Recipe | LinearRecipe | None, ranks: Ranks = ALONE, unquantized_blocks: int = 0
    ) -> Self:
        """Start a run with this recipe; None: unquantized. Sets torch's seed, so that runs with different recipes start
        with the same weights and text. ``unquantized_blocks``: so many of the last blocks stay unquantized; the first
        does not."""
        torch.manual_seed(settings.seed)
        size = SIZES[settings.size]
        model = GPT(size).to(settings.device)
        if recipe is not None:
            wanted = is_linear if settings.quantize_all else paper_layers
            first = max(1, size.layers - unquantized_blocks)
            left_out = tuple(f"blocks.{i}." for i in range(first, size.layers))
            mx.quantize_(model, recipe, lambda module, fqn: wanted(module, fqn) and not fqn.startswith(left_out))
        ranks.shard(model, model.blocks, settings.device)
        groups = [{"params": group} for group in by_mesh(model.parameters())]
        optimizer = torch.optim.AdamW(groups, size.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        return cls(settings, model, optimizer, torch.Generator().manual_seed(settings.seed), ranks)

    @property
    def size(self) -> Size:
        return SIZES[self.settings.size]

    @property
    def tokens_per_second(self) -> float:
        """From the median step of this process; nan if there was none."""
        size = self.size
        return size.batch * size.context / statistics.median(self.seconds) if self.seconds else math.nan

    def precision(self) -> AbstractContextManager[Any]:
        """torch.autocast for the unquantized operations, if they run in bfloat16."""
        device, name = self.settings.device, self.settings.recipe
        half = name == "bf16" or (name != "none" and device != "cpu")
        return torch.autocast(device, torch.bfloat16) if half else nullcontext()

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self.losses) + len(self.unread)

    def compile(self) -> None:
        """Compile each block. The blocks share one graph, embeddings and head stay eager."""
        for block in self.model.blocks:
            block.compile(dynamic=False)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1: a linear warm-up, then ``Settings.steps``."""
        size, whole = self.size, self.settings.steps
        if step <= size.warm_up:
            return size.rate * step / size.warm_up
        if not whole:
            return size.rate * math.sqrt(size.warm_up / step)
        part = min((step - size.warm_up) / max(whole - size.warm_up, 1), 1.0)
        return size.rate * (0.55 + 0.45 * math.cos(math.pi * part))

    def on_device(self, batch: Tensor) -> Tensor:
        """``batch`` on the device of the model. The host does not wait for the copy."""
        device = self.settings.device
        return batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch

    def gradients(self, text: Tensor) -> Tensor:
        """One forward and backward pass over random windows; returns the loss, on the device."""
        size = self.size
        starts = self.ranks.part(torch.randint(len(text) - size.context, (size.batch,), generator=self.sampler))
        with self.precision():
            loss = self.model.loss(self.on_device(windows(text, starts, size.context + 1)))
        loss.backward()
        return loss.detach()

    def update(self, text: Tensor) -> None:
        """Run one training step without waiting for the device."""
        rate = self.rate(self.done + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.gradients(text)
        clip([group["params"] for group in self.optimizer.param_groups], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.unread.append(loss)

    def read(self) -> None:
        """Wait for the device, and read the losses of all steps."""
        if self.unread:
            self.losses += self.ranks.means(torch.stack(self.unread))
            self.unread.clear()

    def step(self, text: Tensor) -> None:
        """Run one training step and wait for it."""
        began = time.perf_counter()
        self.update(text)
        self.read()
        self.seconds.append(time.perf_counter() - began)

    @torch.no_grad()
    def loss_on(self, text: Tensor, batches: int | None = None) -> float:
        """The loss over windows at even distances in ``text``: ``batches`` of them, or as the size says. Uses no random
        numbers."""
        size = self.size
        count = (batches or size.evaluated) * size.batch
        starts = torch.linspace(0, len(text) - size.context - 1, count, dtype=torch.float64)
        with self.precision():
            each = self.on_device(windows(text, starts.long(), size.context + 1)).split(size.batch)
            losses = torch.stack([self.model.loss(batch) for batch in each])
        return statistics.fmean(losses.tolist())

    def evaluate(self, text: Tensor) -> None:
        """Record ``loss_on(text)``."""
        self.held_out.append((self.done, self.loss_on(text)))

    def rest(self) -> dict[str, Any]:
        """The state beside model and optimizer that the next step depends on, and the losses so far."""
        delayed = {n: w for n, w in quantized_weights(self.model).items() if w.linear_recipe.delayed is not None}
        random = {"cpu": torch.get_rng_state(), "sampler": self.sampler.get_state()}
        if self.settings.device == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "settings": asdict(self.settings),
            "delayed": {name: delayed_state(w, w.linear_recipe).state_dict() for name, w in delayed.items()},
            "random": random,
            "losses": self.losses,
            "held_out": self.held_out,
        }

    def save(self, folder: Path) -> None:
        """Write a checkpoint on every rank. The one before it is deleted only after the new one is complete."""
        saving.save(folder, len(self.losses), self.model, self.optimizer, self.rest())

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint as if the run had never stopped.

        Bitwise identical on a CPU with the same number of threads and ranks; on a GPU as far as torch's own kernels are
        deterministic. Raises ValueError if the settings differ or the checkpoint is damaged.
        """
        rest = saving.load(folder, self.model, self.optimizer, self.rest())
        weights = quantized_weights(self.model)
        for name, amaxes in rest["delayed"].items():
            delayed_state(weights[name], weights[name].linear_recipe).load_state_dict(amaxes)
        torch.set_rng_state(rest["random"]["cpu"])
        self.sampler.set_state(rest["random"]["sampler"])
        if self.settings.device == "cuda":
            torch.cuda.set_rng_state(rest["random"]["cuda"].cpu())
        self.losses, self.held_out = list(rest["losses"]), list(rest["held_out"])


def products_of(log: Log) -> Counter[str]:
    """How often ``mx.explain()`` has recorded each quantized product, such as ``fprop by fp8_rows``."""
    return Counter(
        f"{entry.spec.op} by {entry.kernel}"
        for entry in log.entries
        if entry.spec.op in ("fprop", "dgrad", "wgrad") and all(isinstance(f, mx.Format) for f in entry.spec.formats)
    )
