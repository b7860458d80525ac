"""FSDP2 training of a 1B-parameter Llama with one rank per GPU: ``python -m benchmarks.fsdp --json F``.

It compares the gather of bfloat16 values with the gather of MXFP8 codes. The model is that of transformers with random
weights, float32 shards, bfloat16 layers (``MixedPrecisionPolicy``) and AdamW. The figures are tokens per second, the
peak of torch's allocated memory, and the bytes that a rank gathers in a step. Without a GPU, ``--tiny`` trains a tiny
model on two ranks over gloo, only to check that the benchmark runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mxtensor as mx
from examples.ranks import leave
from mxtensor.recipe import MXFP8BlockScaling

from .harness import VERDICT_HEADER, Row, Section, Target, parser, print_table, run

Figures = Callable[[Sequence["FsdpRow"]], Iterable[tuple[str, float]]]
BASE, VALUES, CODES = "bfloat16", "mxfp8, values gathered", "mxfp8, codes gathered"
RECIPES = {
    BASE: None,
    VALUES: MXFP8BlockScaling(two_dimensional_weights=True, quantized_gather=False),
    CODES: MXFP8BlockScaling(two_dimensional_weights=True),
}
LLAMA_1B = dict(
    vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
BATCH, LENGTH, STEPS, ROUNDS = 8, 2048, 5, 3


@dataclass
class FsdpRow(Row):
    """One config. ``times["step"]`` is the time of a step in milliseconds, in the fastest round."""

    tokens_a_second: float = 0.0
    """The sum over all ranks."""
    peak_bytes: int = 0
    gathered_bytes: int = 0
    """Bytes of all-gather outputs on one rank in a step."""
    ranks: int = 0


def sharded_model(recipe: Any, sizes: dict[str, int], device: str) -> nn.Module:
    """The model, sharded over the ranks; with a recipe, all its linear layers but the head are quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[arg-type]
    if recipe is not None:
        mx.quantize_(model, recipe, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


@contextmanager
def count_gathered_bytes() -> Iterator[list[int]]:
    """A list that receives the output bytes of each all-gather on this rank."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    old, sizes = getattr(dist, name), []

    def count(output: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(output.nbytes)
        return old(output, *args, **kwargs)

    setattr(dist, name, count)
    try:
        yield sizes
    finally:
        setattr(dist, name, old)


def measured(config: str, sizes: dict[str, int], device: str, batch: int, length: int, steps: int) -> FsdpRow:
    """Train with one config on this rank. All ranks measure the same times, since they wait for each other."""
    cuda, world = device == "cuda", dist.get_world_size()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with count_gathered_bytes() as gathered:
        model = sharded_model(RECIPES[config], sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
        ids = torch.randint(0, sizes["vocab_size"], (batch, length), device=device)

        for _ in range(2):
            step(model, optimizer, ids)
        gathered.clear()
        step(model, optimizer, ids)
        row = FsdpRow(config, {}, gathered_bytes=sum(gathered), ranks=world)
    best = float("inf")
    for _ in range(ROUNDS):
        _synchronize(cuda)
        start = time.perf_counter()
        for _ in range(steps):
            step(model, optimizer, ids)
        _synchronize(cuda)
        best = min(best, (time.perf_counter() - start) / steps)
    row.times["step"] = best * 1e3
    row.tokens_a_second = world * batch * length / best
    row.peak_bytes = torch.cuda.max_memory_allocated() if cuda else 0
    del model, optimizer
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return row


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """One training step: forward, backward, update."""
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _synchronize(cuda: bool) -> None:
    """Wait for the GPU, then for all ranks."""
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


def work(rank: int, world: int, folder: str, device: str, quick: bool, batch: int) -> None:
    """The program of one rank: measure every config. Rank 0 writes the rows to ``folder``."""
    warnings.filterwarnings("ignore")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    sizes, shape = (TINY, (2, 64, 1)) if quick else (LLAMA_1B, (batch, LENGTH, STEPS))
    rows = []
    for config in RECIPES:
        rows.append(measured(config, sizes, device, *shape))
        if rank == 0:
            print(f"{config}: {rows[-1].tokens_a_second:.0f} tokens/s", flush=True)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps([asdict(row) for row in rows]))
    leave()


def on_ranks(world: int, device: str, quick: bool, batch: int = BATCH) -> list[FsdpRow]:
    """Measure every config on ``world`` new processes."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(world, folder, device, quick, batch), nprocs=world)
        return [FsdpRow(**row) for row in json.loads(Path(folder, "rows").read_text())]


# ---------------------------------------------------------------------------------------------- targets


def ratio_to(base: str, figure: Callable[[FsdpRow], float]) -> Figures:
    """The figure of CODES divided by that of the config ``base``."""

    def figures(rows: Sequence[FsdpRow]) -> Iterable[tuple[str, float]]:
        by_name = {row.work: row for row in rows}
        return [(CODES, figure(by_name[CODES]) / (figure(by_name[base]) or float("nan")))]

    return figures


TARGETS = (
    Target("tokens per second over a gather of values", ">=", 1.0, ratio_to(VALUES, lambda row: row.tokens_a_second)),
    Target("peak memory over a gather of values", "<=", 1.0, ratio_to(VALUES, lambda row: row.peak_bytes)),
    Target("bytes gathered over a gather of values", "<=", 0.6, ratio_to(VALUES, lambda row: row.gathered_bytes)),
)
HEADER = ["config", "tokens/s", "over bf16", "ms per step", "peak GB", "gathered MB per step"]


def lines(rows: Sequence[FsdpRow]) -> list[list[str]]:
    """The lines of the table, one for each config."""
    return [
        [
            row.work, f"{row.tokens_a_second:.0f}", f"{row.tokens_a_second / rows[0].tokens_a_second:.2f}",
            f"{row.times['step']:.1f}", f"{row.peak_bytes / 1e9:.2f}", f"{row.gathered_bytes / 1e6:.2f}",
        ]
        for row in rows
    ]  # fmt: skip


def train(args: argparse.Namespace) -> list[FsdpRow]:
    """Every config on all GPUs; a toy size on two ranks of a CPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = torch.cuda.device_count() if args.device == "cuda" else 2
    rows = on_ranks(world, args.device, args.tiny, args.batch)
    print_table(HEADER, lines(rows))
    print_table(VERDICT_HEADER, [target.verdict(rows) for target in TARGETS])
    return rows


SECTIONS = {"train": Section("what does FSDP2 training gain from gathering codes instead of values?", train, gpu=True)}


def main(argv: Sequence[str] | None = None) -> None:
    """Train on all GPUs."""
    options = parser(__doc__ or "", SECTIONS)
    text = f"sequences of {LENGTH} tokens per rank (%(default)s)"
    options.add_argument("--batch", type=int, default=BATCH, help=text)
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
