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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import mxtensor as mx

from .curves import Curve, plot
from .gpt import SIZES, load_text, split
from .ranks import Ranks, check_ranks, joined
from .recipes import RECIPES, recipe_name, recipe_of
from .run import Run, Settings, products_of, quantized_weights


def train(
    run: Run, text: Tensor, steps: int | None, minutes: float | None, checkpoint: Path | None,
    after: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Train until ``steps`` steps or ``minutes`` are over, with a progress bar; evaluate and save at intervals.

    ``after`` is called after each step.
    """
    from tqdm import tqdm

    learned, held_out = split(text)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if not run.held_out:
        run.evaluate(held_out)
    quiet = None if run.ranks.first else True
    with tqdm(desc=run.settings.recipe, total=steps, initial=len(run.losses), unit="step", disable=quiet) as bar:
        while steps is None or len(run.losses) < steps:
            run.step(learned)
            after()
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
    """The quantized products that ``mx.explain()`` records in one more forward and backward pass.

    It runs eager: of compiled blocks ``explain`` records only what runs while they are compiled.
    """
    with mx.explain() as log, torch.compiler.set_stance("force_eager"):
        run.gradients(split(text)[0])
    counts = products_of(log)
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
    add("--compile", action="store_true", help="compile each block with torch.compile")
    add("--monitor", type=int, metavar="N", help="measure what casts lose in one of N steps, and draw it")
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
    if args.compile and (args.fsdp or args.tp > 1):
        parser.error("--compile: sharded blocks run eager here; leave out --compile, or --fsdp and --tp")
    recipe = recipe_of(args.recipe)
    if args.compile and recipe is not None and recipe.linear_recipe().delayed is not None:
        parser.error(f"--compile: layers that quantize_ gave {args.recipe} run eager; leave out --compile")
    if args.monitor is not None and (args.monitor < 1 or args.compile):
        parser.error("--monitor: it measures one of N steps, 1 or more, of layers that are not compiled")
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
        if args.compile:
            run.compile()
        checkpoint = args.checkpoint
        if checkpoint is not None and runs:
            checkpoint = checkpoint.with_name(f"{checkpoint.stem}-{name}{checkpoint.suffix}")
        if args.resume and checkpoint.is_dir():
            try:
                run.load(checkpoint)
            except (ValueError, FileNotFoundError) as error:
                args.error(f"--resume: {error}")
        if args.monitor is None:
            train(run, args.bytes, steps, minutes, checkpoint)
        else:
            with mx.monitor(run.model, args.monitor) as monitor:
                train(run, args.bytes, steps, minutes, checkpoint, monitor.step)
            if monitor.rows() and ranks.first:
                picture = args.plot.with_stem(f"{args.plot.stem}-casts-{name}")
                print(f"\n{monitor}\n\nAll measurements as a picture: {monitor.plot(picture, title=name)}")
        runs.append(run)
        steps, minutes = len(run.losses), None  # the twin runs the same number of steps
    return runs


if __name__ == "__main__":
    main()
