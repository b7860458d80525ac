"""Decoding with a long cache: milliseconds a token and bytes of the cache, beside transformers' own.

    python -m benchmarks.kv_cache --tokens 4096 8192
    python -m benchmarks.kv_cache --where cuda --tokens 32768 --layers 8 --hidden 4096 --heads 32 --kv-heads 8

A Llama of random weights decodes one token of each sequence. The caches are filled with random keys and values: the
time of a prompt is not measured. Linear layers are not quantized, so that only the cache differs. ``attention`` is
torch's function alone, for one layer, without the rest of the model: its time is what the cache is about.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import mxtensor as mx

from .cuda import event_clock
from .harness import Prepare, Progress, Row, Section, Work, parser, print_table, run, timed, wall_clock

PLAIN = "plain"
"""The contender with transformers' DynamicCache, in the dtype of the model."""
FORMATS = ("mxfp8", "nvfp4", "mxfp4")


@dataclass
class CacheRow(Row):
    """All caches of one length at one piece of work."""

    tokens: int = 0
    batch: int = 0
    cache_bytes: dict[str, int] | None = None
    """Contender -> bytes of keys and values of all layers."""


def _model(args: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
        max_position_embeddings=max(args.tokens) + 1024,
    )  # fmt: skip
    with torch.device(args.where):
        model: Any = LlamaForCausalLM(config)
    return model.to(_dtype(args)).eval().requires_grad_(False)


def _dtype(args: Any) -> torch.dtype:
    return getattr(torch, args.dtype)  # type: ignore[no-any-return]


def _filled(name: str, args: Any, tokens: int) -> Any:
    """A cache with random keys and values of this many tokens in each layer."""
    from transformers import DynamicCache

    cache = DynamicCache() if name == PLAIN else mx.KVCache(name)
    shape = (args.batch, args.kv_heads, tokens, args.head_dim)
    for layer in range(args.layers):
        keys, values = (torch.randn(shape, device=args.where).to(_dtype(args)) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def _bytes(cache: Any) -> int:
    if isinstance(cache, mx.KVCache):
        return cache.nbytes
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def _step(model: Any, name: str, args: Any, tokens: int, sizes: dict[str, int]) -> Work:
    """A step that decodes one token, after which the cache has one more."""
    cache = _filled(name, args, tokens)
    ids = torch.ones(args.batch, 1, dtype=torch.long, device=args.where)
    model(ids, past_key_values=cache)
    sizes[name] = _bytes(cache)
    return lambda: model(ids, past_key_values=cache)


def _attention(name: str, args: Any, tokens: int) -> Work:
    """torch's attention of one query for each head over one layer, as transformers calls it."""
    layer = _filled(name, type(args)(**{**vars(args), "layers": 1}), tokens).layers[0]
    keys, values, group = layer.keys, layer.values, args.heads // args.kv_heads
    q = torch.randn(args.batch, args.kv_heads * group, 1, args.head_dim, device=args.where).to(_dtype(args))
    return lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=group > 1)


def measured(args: argparse.Namespace) -> list[CacheRow]:
    """A row for attention alone and one for a whole step, for each number of tokens."""
    model, names = _model(args), (PLAIN, *args.formats)
    clock = event_clock(0.0, 1) if args.where == "cuda" else wall_clock
    progress, rows = Progress(2 * len(args.tokens), "row"), []
    for tokens in args.tokens:
        sizes: dict[str, int] = {}
        works: dict[str, dict[str, Prepare]] = {
            "attention": {name: partial(_attention, name, args, tokens) for name in names},
            "step": {name: partial(_step, model, name, args, tokens, sizes) for name in names},
        }
        for work, contenders in works.items():
            row = CacheRow(f"{work} {tokens}", {}, tokens=tokens, batch=args.batch)
            with torch.no_grad():
                rows.append(timed(row, contenders, args.repeats, clock=clock))
            row.cache_bytes = dict(sizes) or None
            progress.step(row.work)
    progress.close()
    header = ["work, tokens", "cache", "ms", "speed over plain", "bytes over plain"]
    print_table(header, [line for row in rows for line in cells(row)])
    return rows


def cells(row: CacheRow) -> list[list[str]]:
    """The lines of the table for one row."""
    sizes, out = row.cache_bytes or {}, []
    for name, ms in row.times.items():
        share = f"{sizes[name] / sizes[PLAIN]:.4f}" if PLAIN in sizes and name in sizes else ""
        out.append([row.work, name, f"{ms:.3f}", f"{row.ratio(name, PLAIN):.2f}", share])
    return out


SECTIONS = {"decode": Section("how long does a step with a long cache in codes take, and how much memory?", measured)}


def main(argv: Sequence[str] | None = None) -> None:
    """Time caches."""
    options = parser(__doc__ or "", SECTIONS)
    add = options.add_argument
    add("--where", default="cpu", metavar="DEVICE", help="cpu or cuda (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--tokens", type=int, nargs="+", default=[4096, 8192], help="tokens in the cache")
    add("--batch", type=int, default=1)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=512)
    add("--heads", type=int, default=32, help="heads of queries")
    add("--kv-heads", type=int, default=8, help="heads of keys and values")
    add("--head-dim", type=int, default=64)
    add("--formats", nargs="+", default=list(FORMATS))
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
