"""Bits over the whole model against KL and perplexity: formats and methods, beside llama.cpp and torchao.

    python -m benchmarks.quality --json benchmarks/results/quality.json

Needs the extra ``peers`` (see ``examples.smollm2`` and ``benchmarks.gguf_quality``). All contenders get the weights of
SmolLM2-135M-Instruct and are run by the same code; only weights are quantized. The model calibrates on text of
``benchmarks.calibration``, and is measured on the same two texts as there, of which no part calibrates. A row that the
record has is not measured anew, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from benchmarks import calibration, gguf_quality, harness
from benchmarks.calibration import Measure
from examples import smollm2
from examples.minilm import columns
from mxtensor.report.quality import WINDOW, Quality

NEAREST, CALIBRATED, PLANNED, BOTH = "nearest", "gptq", "planned", "planned, gptq"
OURS = "mxtensor"
HEAD = "mxint8-weight-only"
"""The format of the head and the tied embedding beside smaller formats; llama.cpp's presets use Q8_0 and Q6_K."""
CHOICES = ("mxfp4-weight-only", "nvfp4-weight-only", "mxfp6_e2m3-weight-only", "mxfp8-weight-only", HEAD)
WHOLE = ("mxfp8", "mxint8", "mxfp6_e2m3")
"""Formats that the head has too."""
SMALL = ("mxfp4", "nvfp4")
BITS = (5.0, 5.5)
"""Budgets of plans of the layers. The head has HEAD."""
PLAN_TOKENS = 6144
TORCHAO = ("int8", "int4, groups of 32")


@dataclass
class Row:
    """One way to store the model."""

    library: str
    format: str
    method: str
    bits: float
    """Stored bits per value over the whole model."""
    sequences: int
    """That calibrated it, or that the plan was measured on; 0: none."""
    quality: dict[str, Quality]
    """By text."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a row is about."""
        return self.library, self.format, self.method


Made = Callable[[], tuple[nn.Module, float]]
"""Makes (the quantized model, its bits per value)."""


class Contenders:
    """Every row, by its key, as a function that makes the model."""

    def __init__(self, model: Any, tokenizer: Any, sequences: int, folder: Path) -> None:
        self.model, self.tokenizer, self.sequences, self.folder = model, tokenizer, sequences, folder
        self._data: list[Tensor] = []
        self._plan: mx.Plan | None = None
        self.rows: dict[tuple[str, str, str], Made] = {
            **{(OURS, f, NEAREST): self._ours(lambda f=f: f"{f}-weight-only", True) for f in WHOLE},  # type: ignore[misc]
            **{(OURS, f, m): self._ours(lambda f=f: self._with_head(f), m == NEAREST)  # type: ignore[misc]
               for f in SMALL for m in (NEAREST, CALIBRATED)},
            **{(OURS, f"{bits:g} bits", m): self._ours(lambda bits=bits: self._planned(bits), m == PLANNED)  # type: ignore[misc]
               for bits in BITS for m in (PLANNED, BOTH)},
            **{("llama.cpp", name, NEAREST): self._of_llama_cpp(name) for name in gguf_quality.TYPES},
            **{("torchao", name, NEAREST): self._of_torchao(name) for name in TORCHAO},
        }  # fmt: skip

    @property
    def data(self) -> list[Tensor]:
        """What calibrates."""
        if not self._data:
            self._data = calibration.calibration_data(self.model, self.tokenizer, self.sequences)
        return self._data

    def _with_head(self, format: str) -> mx.FqnToConfig:
        return mx.FqnToConfig({"lm_head": HEAD, "_default": f"{format}-weight-only"})

    def _planned(self, bits: float) -> mx.FqnToConfig:
        if self._plan is None:
            rows = torch.cat(self.data)
            even = rows[torch.linspace(0, len(rows) - 1, min(PLAN_TOKENS // WINDOW, len(rows))).long()]
            self._plan = mx.plan(self.model, list(even.split(4)), BITS[0], CHOICES)
        return mx.FqnToConfig({"lm_head": HEAD, **self._plan.with_bits(bits).fqn_to_config})

    def _ours(self, config: Callable[[], Any], nearest: bool) -> Made:
        def make() -> tuple[nn.Module, float]:
            small, chosen = copy.deepcopy(self.model), config()
            if nearest:
                mx.quantize_(small, chosen, include_head=isinstance(chosen, str))
            else:
                mx.calibrate(small, self.data, chosen, "gptq")
            return small, mx.model_size(small).bits

        return make

    def _of_llama_cpp(self, name: str) -> Made:
        return lambda: gguf_quality.quantized(self.model, self.folder, name)[:2]

    def _of_torchao(self, name: str) -> Made:
        def make() -> tuple[nn.Module, float]:
            small, nbits = copy.deepcopy(self.model), 0.0
            for _, layer in small.named_modules():
                if isinstance(layer, nn.Linear):
                    nbits += _by_torchao(layer, TORCHAO[0] if layer is small.lm_head else name)
            small.model.embed_tokens.weight = small.lm_head.weight
            rest = sum(p.numel() for p in small.parameters() if p.dim() == 1)
            return small, (nbits + 32 * rest) / sum(p.numel() for p in small.parameters())

        return make


def _by_torchao(layer: nn.Linear, name: str) -> float:
    """Give a layer the values that torchao stores for it; returns their bits, with scales of 16 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    int4: Any = torch.int4  # type: ignore[attr-defined]
    group, bits = 32, 4
    config: Any = IntxWeightOnlyConfig(int4, PerGroup(32))
    if name == TORCHAO[0]:
        group, bits, config = layer.in_features, 8, Int8WeightOnlyConfig()
    holder = nn.Sequential(copy.deepcopy(layer))
    quantize_(holder, config)
    stored: Any = holder[0].weight
    layer.weight = nn.Parameter(stored.dequantize(), requires_grad=False)
    return layer.weight.numel() * (bits + 16 / group)


def read(path: Path) -> list[Row]:
    """The rows of a record."""
    rows = json.loads(path.read_text())["rows"]
    return [Row(**row | {"quality": {name: Quality(**q) for name, q in row["quality"].items()}}) for row in rows]


TEXTS = tuple(calibration.WINDOWS)
HEADER = [
    "library", "format", "method", "sequences", "bits/value",
    *(f"{name}: {figure}" for name in TEXTS for figure in ("perplexity", "KL")),
]  # fmt: skip


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each row, the most bits first."""
    lines = []
    for row in sorted(rows, key=lambda row: (-row.bits, row.key)):
        line = [row.library, row.format, row.method, f"{row.sequences or ''}", f"{row.bits:.2f}"]
        for name in TEXTS:
            q = row.quality[name]
            line += [f"{q.perplexity:.2f}", f"{q.kl:.4f} +- {q.kl_error:.4f}"]
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every contender that the record lacks, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--json", type=Path, help="the record: rows that it has stay")
    add("--sequences", type=int, default=32, help=f"of {WINDOW} tokens, for calibration (32)")
    add("--threads", type=int, default=1)
    add("--only", metavar="TEXT", default="", help="measure rows whose library, format or method has this text")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    logging.getLogger("mxtensor").setLevel(logging.ERROR)
    model, tokenizer = smollm2.load_model(torch.float32)
    measure = Measure(model, calibration.evaluation_rows(tokenizer))
    perplexities = {name: q.perplexity for name, q in measure.quality(model).items()}
    rows = read(args.json) if args.json is not None and args.json.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(model, tokenizer, args.sequences, Path(folder))
        for key, make in contenders.rows.items():
            if any(row.key == key for row in rows) or args.only not in " ".join(key):
                continue
            small, bits = make()
            used = 0 if key[2] == NEAREST else args.sequences
            rows.append(Row(*key, bits, used, measure.quality(small)))
            print(columns(HEADER, cells(rows[-1:])), flush=True)
            harness.write_json(args.json, rows, window=WINDOW, perplexity=perplexities)
    print(f"\n{columns(HEADER, cells(rows))}")


if __name__ == "__main__":
    main()
