"""Quantizes SmolLM2-135M-Instruct to each format, and measures size, quality and speed. Run it with

    make demo
    python -m examples.llm --formats mxfp8-weight-only mxfp4-weight-only+head

``+head`` after a format quantizes the head and the embedding too (``include_head=True``). The text is that of
``examples/sentences.txt``. README shows the table and the picture of ``--json benchmarks/results/llm.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from mxtensor.report import quality
from mxtensor.report.model_report import COLORS
from mxtensor.report.quality import Quality

from . import smollm2
from .minilm import SENTENCES, columns, config_name, load_sentences
from .smollm2 import UNQUANTIZED, Decoder

FORMATS = (
    "mxint8-weight-only", "mxfp8-weight-only", "mxfp8", "mxfp6_e2m3-weight-only", "nvfp4-weight-only",
    "mxfp4-weight-only", "mxfp4", "mxfp8-weight-only+head", "nvfp4-weight-only+head",
)  # fmt: skip
HEAD = "+head"
"""After the name of a format: head and embedding too."""
TOKENS = 1024
QUESTION = "Name three colors of the rainbow."
ANSWER = 24
"""Tokens of a completion."""
ROUNDS, STEPS = 3, 4
"""Rounds of timing, in turn with the unquantized model, and the tokens of one round."""


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    config: str
    bits: float
    """Stored bits per value over the whole model."""
    megabytes: float
    """Of all parameters, as ``torch.save`` writes them."""
    quality: Quality
    tokens_a_second: float
    relative: float
    """Its speed over that of the unquantized model, measured in turn; the median of the rounds."""
    limit: float
    """Tokens a second if reading the weights at the measured bandwidth were all the work."""
    completion: str


def speed(decoder: Decoder, base: Decoder) -> tuple[float, float]:
    """(tokens/s, ratio to ``base``), the medians of rounds in which the two take turns."""
    seconds, ratios = [], []
    for _ in range(ROUNDS):
        theirs = statistics.median(base.step() for _ in range(STEPS))
        ours = statistics.median(decoder.step() for _ in range(STEPS))
        seconds.append(ours)
        ratios.append(theirs / ours)
    return 1 / statistics.median(seconds), statistics.median(ratios)


class Demo:
    """The unquantized model, its predictions and its decoder, beside which each format is measured."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int, done: Any = lambda: None) -> None:
        self.model, self.tokenizer, self.done = model, tokenizer, done
        self.rows = quality.windows(tokenizer, " ".join(load_sentences(SENTENCES)), tokens)
        self.prompt = smollm2.chat_prompt(tokenizer, [{"role": "user", "content": QUESTION}])
        self.bandwidth = smollm2.memory_bandwidth()
        self.reference: Tensor = quality.log_probabilities(model, self.rows, done)

    def measure(self, config: str) -> Result:
        """Quantize a copy of the model, and measure it."""
        small = smollm2.quantized(self.model, config.removesuffix(HEAD), config.endswith(HEAD))
        found = self.reference
        if config != UNQUANTIZED:
            found = quality.log_probabilities(small, self.rows, self.done)
        decoder = Decoder(small, self.prompt)
        while len(decoder.tokens) < ANSWER:
            decoder.step()
        answer = torch.cat(decoder.tokens, 1)[0].tolist()
        end = self.tokenizer.eos_token_id
        text = self.tokenizer.decode(answer[: answer.index(end)] if end in answer else answer).strip()
        rate, relative = speed(decoder, Decoder(self.model, self.prompt))
        size = mx.model_size(small)
        limit = self.bandwidth * 1e9 / smollm2.bytes_a_token(small)
        compared = quality.quality(found, self.reference, self.rows)
        self.done()
        if config == UNQUANTIZED:
            relative = 1.0
        return Result(config, size.bits, size.nbytes / 1e6, compared, rate, relative, limit, " ".join(text.split()))


# ---------------------------------------------------------------------------------------------- what it prints

HEADER = (
    "format", "bits/weight", "MB", "perplexity", "KL", "+-", "same token", "tokens/s", "speedup", "limit",
)  # fmt: skip


def cells(result: Result) -> tuple[str, ...]:
    """A line of the table."""
    q = result.quality
    return (
        result.config, f"{result.bits:.2f}", f"{result.megabytes:.0f}", f"{q.perplexity:.2f}", f"{q.kl:.4f}",
        f"{q.kl_error:.4f}", f"{q.same_token:.1%}", f"{result.tokens_a_second:.1f}", f"{result.relative:.2f}",
        f"{result.limit:.0f}",
    )  # fmt: skip


def notes(bandwidth: float, tokens: int) -> str:
    """What the columns mean, and the sample."""
    return (
        f"bits/weight and MB: over all parameters. The head, which is the embedding too, stays {UNQUANTIZED} except "
        "after\n+head, where it is quantized once for both uses.\n"
        f"perplexity, KL (to {UNQUANTIZED}, in nats per token, +- its standard error) and same token (as the most\n"
        f"likely one): {tokens} tokens of examples/sentences.txt in windows of {quality.WINDOW}.\n"
        f"tokens/s: batch 1, eager, in turn with {UNQUANTIZED}, {torch.get_num_threads()} threads. "
        f"limit: tokens/s if reading weights at the\nmeasured {bandwidth:.1f} GB/s were all the work."
    )


STYLES: tuple[dict[str, Any], ...] = ({"marker": "o"}, {"marker": "s", "markerfacecolor": "none"})
"""Points of weight-only formats, and of those that quantize activations too."""


def plot(results: Sequence[Result], path: Path) -> Path:
    """Draw bits per weight against KL, one point for each format, and write it to ``path``; creates the folder."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shown = [result for result in results if result.quality.kl > 0]
    for i, result in enumerate(shown):
        whole = not result.config.removesuffix(HEAD).endswith("-weight-only")
        color, kl = COLORS[i % len(COLORS)], result.quality.kl
        style = STYLES[whole]
        axes.errorbar(
            result.bits, kl, yerr=result.quality.kl_error, color=color, capsize=3, markersize=7, linestyle="", **style
        )
        axes.annotate(
            result.config.replace("-weight-only", ""),
            (result.bits, kl),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight, over the whole model")
    axes.set_ylabel(f"KL divergence from {UNQUANTIZED} [nats per token]")
    axes.margins(x=0.12, y=0.12)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.12 * (high - low))  # for the labels of the points to the right
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("SmolLM2-135M-Instruct: size and error by format")
    circle, square = (Line2D([], [], color="#000000", linestyle="", **style) for style in STYLES)
    axes.legend([circle, square], ["weights only", "weights and activations"], frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def format_name(name: str) -> str:
    """Check that ``quantize_`` accepts the argument; the end ``+head`` may follow."""
    config_name(name.removesuffix(HEAD))
    return name


def write_record(path: Path, results: Sequence[Result], demo: Demo) -> None:
    """Write the results and the machine, for the documentation."""
    from benchmarks.harness import machine

    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(), "bandwidth": demo.bandwidth, "tokens": demo.rows.numel(),
        "rows": [asdict(result) for result in results],
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_record(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The record of ``write_record``, and its results."""
    record = json.loads(path.read_text())
    rows = [row | {"quality": Quality(**row["quality"])} for row in record["rows"]]
    return record, [Result(**row) for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every format, print the table and the completions, and draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m examples.llm", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    help_formats = f"what quantize_ takes, with {HEAD} after it to include the head"
    add("--formats", nargs="+", type=format_name, default=FORMATS, metavar="NAME", help=help_formats)
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"of text, for perplexity and KL ({TOKENS})")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the plot (out)")
    add("--json", type=Path, metavar="FILE", help="write the results, for the documentation")
    args = parser.parse_args(argv)
    if args.tokens < quality.WINDOW:
        parser.error(f"--tokens: {args.tokens} is less than one window of {quality.WINDOW}")
    begin = time.perf_counter()
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the table has what quantize_ would say of each format
    from tqdm import tqdm  # the demo's dependencies bring it

    print("loading SmolLM2-135M-Instruct ...", flush=True)
    model, tokenizer = smollm2.load_model()
    steps = args.tokens // quality.WINDOW
    with tqdm(total=(len(args.formats) + 1) * (steps + 1), desc=UNQUANTIZED, unit="step") as bar:
        demo = Demo(model, tokenizer, args.tokens, bar.update)
        results = []
        for config in (UNQUANTIZED, *args.formats):
            bar.set_description(config)
            results.append(demo.measure(config))

    print(f"\n{columns(HEADER, [cells(result) for result in results])}\n")
    print(notes(demo.bandwidth, demo.rows.numel()))
    print(f"\n{QUESTION}\n")
    for result in results:
        print(f"{result.config}: {result.completion}")
    layers_only = min((r for r in results if not r.config.endswith(HEAD)), key=lambda result: result.bits).config
    small = smollm2.quantized(model, layers_only, include_head=False)
    print(f"\nWhere the bits of {layers_only} are (mx.model_size)\n\n{mx.model_size(small)}")
    print(f"\nBits a weight against KL, as a picture: {plot(results, args.out / 'llm.png')}")
    if args.json is not None:
        write_record(args.json, results, demo)
    print(f"{time.perf_counter() - begin:.0f} seconds")


if __name__ == "__main__":
    main()
