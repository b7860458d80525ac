"""How far a cache in codes moves the predictions of SmolLM2-135M: the KL divergence from the cache of transformers.

    python -m benchmarks.kv_quality

The text is documentation of Python's standard library, read in windows by one pass each, in which attention reads what
the cache holds. The model stays in float32: only the cache differs.
"""

from __future__ import annotations

import pydoc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from examples import smollm2
from mxtensor.report.quality import Quality, quality, windows

from .harness import Progress, parser, print_table, write_json

FORMATS = ("float8_row", "mxint8", "mxfp8", "mxfp6", "nvfp4", "mxfp4")
SOURCES = ("argparse", "statistics", "decimal", "typing")
"""Modules whose documentation is the text."""


@dataclass
class CacheQuality:
    """One format of the cache."""

    format: str
    bits: float
    """Bits of a value of a long cache."""
    quality: Quality


def text() -> str:
    """The text that the model reads."""
    renderer: Any = pydoc.plaintext  # type: ignore[attr-defined]
    return "\n".join(pydoc.render_doc(name, renderer=renderer) for name in SOURCES)


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


def measured(model: Any, rows: Tensor, formats: tuple[str, ...]) -> list[CacheQuality]:
    """The quality of each format on ``rows`` of token ids."""
    progress, out = Progress(1 + len(formats), "cache"), []
    reference = predictions(model, rows, None)
    progress.step("none")
    for format in formats:
        bits = mx.get_format(format).bits_per_value
        out.append(CacheQuality(format, bits, quality(predictions(model, rows, format), reference, rows)))
        progress.step(format)
    progress.close()
    return out


def main() -> int:
    """Print the table, and write a record with ``--json``."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--tokens", type=int, default=4096, help="tokens of the text")
    options.add_argument("--window", type=int, default=512, help="tokens that are read at once")
    options.add_argument("--formats", nargs="+", default=list(FORMATS))
    args = options.parse_args()
    model, tokenizer = smollm2.load_model(torch.float32)
    rows = measured(model, windows(tokenizer, text(), args.tokens, args.window), tuple(args.formats))
    lines = [
        [r.format, f"{r.bits:.4g}", f"{r.quality.kl:.5f}", f"{r.quality.kl_error:.5f}", f"{r.quality.perplexity:.3f}",
         f"{100 * r.quality.same_token:.1f} %"] for r in rows
    ]  # fmt: skip
    print_table(["cache", "bits", "KL", "error", "perplexity", "same token"], lines)
    if rows:
        print(f"without a cache: perplexity {rows[0].quality.reference_perplexity:.3f}")
    write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
