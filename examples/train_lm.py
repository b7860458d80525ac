"""Trains a small GPT with quantized linear layers on the Python sources of the standard library.

Tokens are bytes, the model is plain torch, nothing is downloaded. About two minutes on two CPU cores:

    python -m examples.train_lm
    python -m examples.train_lm --recipe nvfp4 --compare
    python -m examples.train_lm --text book.txt --minutes 30 --checkpoint out/book.pt     and later also --resume
    torchrun --nproc-per-node 2 -m examples.train_lm --fsdp

after ``pip install 'mxtensor[demo]'``. Set OMP_NUM_THREADS=1 if other programs use the cores.

``--recipe`` takes a name of RECIPES or any format of mxtensor. As in NVIDIA's recipe for MXFP8 pre-training, the four
linear layers of every block are quantized; embeddings, norms, the products of attention, softmax, residuals and the
head stay in high precision.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.training.interception import delayed_state
from mxtensor.training.local import local_of
from mxtensor.training.training_weight import TrainingWeight

from . import saving
from .curves import Curve, plot
from .gpt import GPT, SIZES, Size, is_linear, load_text, paper_layers, split, windows
from .ranks import ALONE, Ranks, by_mesh, check_ranks, clip, joined
from .recipes import RECIPES, recipe_name, recipe_of


def quantized_weights(model: nn.Module) -> dict[str, TrainingWeight]:
    """The parameters that carry a recipe, by name; for sharded parameters the local shard."""
    weights = {name: local_of(p) for name, p in model.named_parameters()}
    return {name: p for name, p in weights.items() if isinstance(p, TrainingWeight)}


# ---------------------------------------------------------------------------------------------- training


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
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss)."""
    seconds: list[float] = field(default_factory=list)
    """The time of each step of this process."""

    @classmethod
    def of(cls, settings: Settings, ranks: Ranks = ALONE) -> Run:
        """Start a run. Sets torch's seed, so that runs with different recipes start with the same weights and text."""
        torch.manual_seed(settings.seed)
        size = SIZES[settings.size]
        model = GPT(size).to(settings.device)
        recipe = recipe_of(settings.recipe)
        if recipe is not None:
            mx.quantize_(model, recipe, is_linear if settings.quantize_all else paper_layers)
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

    def gradients(self, text: Tensor) -> float:
        """One forward and backward pass over random windows; returns the loss."""
        size = self.size
        starts = self.ranks.part(torch.randint(len(text) - size.context, (size.batch,), generator=self.sampler))
        with self.precision():
            loss = self.model.loss(windows(text, starts, size.context + 1).to(self.settings.device))
        loss.backward()
        return self.ranks.mean(loss)

    def step(self, text: Tensor) -> None:
        """Run one training step."""
        began = time.perf_counter()
        size, done = self.size, len(self.losses) + 1
        rate = size.rate * min(done / size.warm_up, (size.warm_up / done) ** 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.gradients(text)
        clip([group["params"] for group in self.optimizer.param_groups], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - began)

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> None:
        """Record the loss over windows at even distances in ``text``; uses no random numbers."""
        size = self.size
        starts = torch.linspace(0, len(text) - size.context - 1, 4 * size.batch).long()
        with self.precision():
            batches = windows(text, starts, size.context + 1).to(self.settings.device).split(size.batch)
            loss = statistics.fmean(self.model.loss(batch).item() for batch in batches)
        self.held_out.append((len(self.losses), loss))

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


def train(run: Run, text: Tensor, steps: int | None, minutes: float | None, checkpoint: Path | None) -> None:
    """Train until ``steps`` steps or ``minutes`` are over, with a progress bar; evaluate and save at intervals."""
    from tqdm import tqdm

    learned, held_out = split(text)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if not run.held_out:
        run.evaluate(held_out)
    quiet = None if run.ranks.first else True
    with tqdm(desc=run.settings.recipe, total=steps, initial=len(run.losses), unit="step", disable=quiet) as bar:
        while steps is None or len(run.losses) < steps:
            run.step(learned)
            if len(run.losses) % run.size.every == 0:
                run.evaluate(held_out)
                if checkpoint is not None:
                    run.save(checkpoint)
            evaluated = f"{run.held_out[-1][1]:.3f}"
            rate = f"{run.size.batch * run.size.context / run.seconds[-1]:,.0f}"
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, held out {evaluated}, {rate} tokens/s", refresh=False)
            bar.update()
            if minutes is not None and run.ranks.any(time.monotonic() > end):
                break
    if run.held_out[-1][0] != len(run.losses):
        run.evaluate(held_out)
    if checkpoint is not None:
        run.save(checkpoint)


# ---------------------------------------------------------------------------------------------- output


def table(runs: Sequence[Run]) -> str:
    """One line per run; the training loss is the mean of the last tenth of its steps."""
    lines = [f"{'recipe':<16}{'steps':>7}{'training':>10}{'held out':>10}{'tokens/s':>10}{'quantized layers':>18}"]
    for run in runs:
        last = run.losses[-max(1, len(run.losses) // 10) :]
        layers = sum(isinstance(module, nn.Linear) for module in run.model.modules())
        numbers = f"{statistics.fmean(last):>10.3f}{run.held_out[-1][1]:>10.3f}{run.tokens_per_second:>10,.0f}"
        quantized = f"{len(quantized_weights(run.model))} of {layers}"
        lines.append(f"{run.settings.recipe:<16}{len(run.losses):>7}{numbers}{quantized:>18}")
    return "\n".join(lines)


def evidence(run: Run, text: Tensor) -> str:
    """The quantized products that ``mx.explain()`` records in one more forward and backward pass."""
    with mx.explain() as log:
        run.gradients(split(text)[0])
    counts = Counter(
        f"{entry.spec.op} by {entry.kernel}"
        for entry in log.entries
        if entry.spec.op in ("fprop", "dgrad", "wgrad") and all(isinstance(f, mx.Format) for f in entry.spec.formats)
    )
    layers, found = len(quantized_weights(run.model)), ", ".join(f"{n} {what}" for what, n in counts.items())
    return f"mx.explain() of one step in {run.settings.recipe}, {layers} quantized layers: {found or 'no product'}"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.train_lm", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recipe", type=recipe_name, default="mxfp8", metavar="NAME", help=f"{', '.join(RECIPES)}, or any format")
    add(
        "--quantize-all",
        action="store_true",
        help="quantize the head too, not only the layers of the paper",
    )
    add("--fsdp", action="store_true", help="shard the model over the ranks of torchrun")
    add("--tp", type=int, nargs="?", const=0, metavar="N", help="split each layer over N of the ranks (all)")
    add("--compare", action="store_true", help="also train the same model unquantized, and plot both")
    add("--text", type=Path, metavar="FILE", help="the text to train on (Python's standard library)")
    add("--size", choices=SIZES, default="base" if cuda else "small", help="of the model (%(default)s)")
    add("--device", choices=("cuda", "cpu") if cuda else ("cpu",), default="cuda" if cuda else "cpu")
    add("--steps", type=int, metavar="N", help="total number of steps (that of the size, unless --minutes is given)")
    add("--minutes", type=float, metavar="N", help="stop each model after N minutes")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    add("--checkpoint", type=Path, metavar="FOLDER", help="where to save at intervals and at the end")
    add("--resume", action="store_true", help="continue from --checkpoint")
    add("--plot", type=Path, default=Path("out/train_lm.png"), metavar="FILE", help="the loss (out/train_lm.png)")
    args = parser.parse_args(argv)
    size = SIZES[args.size]
    if args.steps is None and args.minutes is None:
        args.steps = size.steps
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps: {args.steps} is not positive")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text: there is no file {args.text}")
    args.bytes = load_text(args.text)
    least = 10 * (size.context + 1)
    if len(args.bytes) < least:
        parser.error(f"--text: {args.text} has {len(args.bytes)} bytes; windows of {size.context} need {least} or more")
    if args.resume and args.checkpoint is None:
        parser.error("--resume: name the folder with --checkpoint")
    if args.resume and not args.checkpoint.is_dir():
        parser.error(f"--resume: there is no folder {args.checkpoint}")
    if args.checkpoint is not None and args.checkpoint.exists() and not args.resume:
        parser.error(f"--checkpoint: {args.checkpoint} exists already; add --resume, or name another folder")
    check_ranks(args, parser, size.heads, size.batch)
    args.error = parser.error
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print the table and write the plot."""
    args = parsed(argv)
    try:
        import matplotlib  # noqa: F401  (fail before the training, not after it)
        import tqdm  # noqa: F401
    except ImportError as error:
        raise ImportError("the example needs tqdm and matplotlib: pip install 'mxtensor[demo]'") from error

    with joined(args.device, args.tp) as ranks:
        runs = trained(args, ranks)
        said = evidence(runs[0], args.bytes)
    if not ranks.first:
        return
    source = args.text or "Python's standard library"
    print(f"\n{source}, {len(args.bytes):,} bytes; losses in nats per byte\n\n{table(runs)}\n")
    print(said)
    curves = [Curve(run.settings.recipe, run.losses, run.held_out) for run in runs]
    title = f"A GPT of {sum(p.numel() for p in runs[0].model.parameters()) / 1e6:.2g} million parameters"
    unit = f"{runs[0].size.batch * runs[0].size.context:,} bytes"
    print(f"\nThe losses as a picture: {plot(curves, args.plot, title, unit)}")


def digest(text: Tensor) -> str:
    """A digest of the text, to tell one text from another."""
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]


def trained(args: argparse.Namespace, ranks: Ranks) -> list[Run]:
    """Train the requested run, and with --compare its unquantized twin."""
    names, steps, minutes = [args.recipe], args.steps, args.minutes
    if args.compare:
        names.append("none" if args.device == "cpu" else "bf16")
    runs: list[Run] = []
    for name in dict.fromkeys(names):
        run = Run.of(Settings(name, args.quantize_all, args.size, args.seed, args.device, digest(args.bytes)), ranks)
        checkpoint = args.checkpoint
        if checkpoint is not None and runs:
            checkpoint = checkpoint.with_name(f"{checkpoint.stem}-{name}{checkpoint.suffix}")
        if args.resume and checkpoint.is_dir():
            try:
                run.load(checkpoint)
            except (ValueError, FileNotFoundError) as error:
                args.error(f"--resume: {error}")
        train(run, args.bytes, steps, minutes, checkpoint)
        runs.append(run)
        steps, minutes = len(run.losses), None  # the twin runs the same number of steps
    return runs


if __name__ == "__main__":
    main()
