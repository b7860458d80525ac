"""Language models that decode on a CPU, beside torch, torchao and llama.cpp: ``python -m benchmarks.llm_cpu``.

The models are SmolLM2-135M-Instruct and a Llama of 1.2 billion random weights (the shape of Llama 3.2 1B). All
contenders of a row take turns in one process: bfloat16, float32, torchao's int8 weights, our formats (head included),
and llama.cpp with files of the same weights. A step decodes one token of each sequence of the batch after a prompt.

    python -m benchmarks.llm_cpu --modes prompt --prompt 512 --batches 1 --add --json FILE

times the prompt instead, and adds its rows to the record.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mxtensor as mx
from examples import smollm2
from mxtensor.compile.cpu_recording import components_of
from mxtensor.core.compat_compile import compiled_alone

from .harness import (
    MEGABYTES,
    Clock,
    Prepare,
    Progress,
    Row,
    Section,
    Work,
    cpu_clock,
    parser,
    print_table,
    read_json,
    readers,
    run,
    take_bandwidth,
    timed,
    wall_clock,
    write_json,
)
from .llama_cpp import LlamaCpp, write_gguf
from .peers import llama

PLAIN = ("bfloat16", "float32")
TORCHAO = "torchao int8"
READING = "prompt"
"""The mode in which a step is not a token, but the whole prompt."""
PROMPT, ROOM = 16, 240
"""Tokens of the prompt, and places of the cache after them."""
LLAMA_1B = dict(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
TINY = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- models


def load(name: str) -> Any:
    """The unquantized model of a name."""
    if name == "smollm2":
        return smollm2.load_model()[0]
    return llama(**(TINY if name == "tiny" else LLAMA_1B))


def variant(model: Any, contender: str, include_head: bool) -> Any:
    """The model as a contender has it; what it has in common with ``model`` is shared."""
    if contender == "float32":
        return copy.deepcopy(model).float()
    if contender == TORCHAO:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        small = smollm2.quantized(model, smollm2.UNQUANTIZED, False)
        quantize_(small, Int8WeightOnlyConfig())
        return small
    return smollm2.quantized(model, contender, include_head)


def read_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: those of linear layers, and the rest without embeddings."""
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    total = 0
    for parameter in model.parameters():
        if id(parameter) in lookups and id(parameter) not in products:
            continue
        total += sum(t.nbytes for t in components_of(parameter))
    return total


# ---------------------------------------------------------------------------------------------- contenders


class Steps:
    """Decoding with a static cache; each step writes the same places, so that all steps do the same work.

    In the mode ``prompt`` a step reads the prompt.
    """

    def __init__(self, model: Any, batch: int, mode: str, prompt: int = PROMPT) -> None:
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=prompt + ROOM)
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(5, model.config.vocab_size - 1, (batch, prompt), generator=generator)
        self.forward, self.position = _forward, torch.arange(prompt)[None]
        self._run(self.prompt, self.position)
        self.start, self.ids = 0, self.prompt
        if mode == READING:
            return
        self.start, self.ids, self.position = prompt, self.prompt[:, :1], torch.full((1, 1), prompt)
        if mode == "attention":
            model.set_attn_implementation("mxtensor")
        if mode == "compiled":  # contenders do not share torch's cache of graphs
            self.forward = compiled_alone(_forward, dynamic=False)
        if mode == "decoding":
            mx.compile_decoding(model)

    @torch.no_grad()
    def _run(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.forward(self.model, ids, position, self.cache)

    def step(self) -> torch.Tensor:
        """One token of each sequence, or its prompt; the logits."""
        for layer in self.cache.layers:  # forget the tokens of the step before
            if hasattr(layer, "cumulative_length"):
                _set(layer, "cumulative_length", self.start)
        return self._run(self.ids, self.position)

    def restore(self) -> None:
        """Give the model torch's attention and its own forward again."""
        self.model.set_attn_implementation("sdpa")
        vars(self.model).pop("forward", None)


def _forward(model: Any, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
    out = model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits  # type: ignore[no-any-return]


def _set(layer: Any, name: str, value: int) -> None:
    before = getattr(layer, name)
    if isinstance(before, torch.Tensor):
        before.fill_(value)
    else:
        setattr(layer, name, value)


def torch_contender(model: Any, batch: int, mode: str, prompt: int, ready: list[Steps]) -> Prepare:
    """The work of one step; ``ready`` gets what has to be restored after the row."""

    def prepare() -> Work:
        ready.append(steps := Steps(model, batch, mode, prompt))
        return steps.step

    return prepare


def llama_cpp_contender(path: Path, batch: int, threads: int, mode: str, prompt: int, ready: list[LlamaCpp]) -> Prepare:
    """The work of one step of llama.cpp; ``ready`` gets what has to be closed after the row."""

    def prepare() -> Work:
        ready.append(peer := LlamaCpp(path, batch, prompt, threads, prompt + ROOM))
        return peer.read if mode == READING else peer.step

    return prepare


# ---------------------------------------------------------------------------------------------- rows

CAST = "mxfp4-weight-mxint8-activation"
FORMATS = ("mxfp8-weight-only", "mxfp4-weight-only", "nvfp4-weight-only", "mxint8", CAST)
EQUAL_BITS = {
    "mxfp8-weight-only": "llama.cpp Q8_0", "mxint8": "llama.cpp Q8_0",
    "mxfp4-weight-only": "llama.cpp MXFP4", CAST: "llama.cpp MXFP4",
}  # fmt: skip
"""Our format -> the type of llama.cpp at about the same bits per weight (8.25 and 8.5; 4.25 and 4.25). llama.cpp casts
activations to integers of 8 bits, as ``mxint8`` and the last one do."""
MODELS, MODES = ("smollm2", "llama-1b"), ("eager", "attention", "compiled", "decoding")
"""``attention``: eager, our formats with ``attn_implementation="mxtensor"``. ``compiled``: the model as one graph.
``decoding``: the same by ``mx.compile_decoding``, which leaves out Dynamo's checks of modules.

Another mode is ``prompt``: eager, and a step is the whole prompt."""


@dataclass
class LlmRow(Row):
    """One model, number of threads, batch and mode. ``times`` are those of a step."""

    model: str = ""
    threads: int = 1
    batch: int = 1
    mode: str = "eager"
    prompt: int = PROMPT
    """Tokens before those of the steps."""
    read: dict[str, int] = field(default_factory=dict)
    """Contender -> bytes of weights that a step reads."""
    bandwidth: float = 0.0
    """GB/s at which this process reads memory with these threads, in turn with the contenders."""
    load: float = 0.0
    """The system's load average of the last minute when the row was finished: this benchmark alone is about 1."""

    def tokens_a_second(self, name: str) -> float:
        tokens = self.batch * (self.prompt if self.mode == READING else 1)
        return 1e3 * tokens / self.times[name] if name in self.times else math.nan

    def over_plain(self, name: str) -> float:
        """The speed over that of the faster of bfloat16 and float32."""
        plain = [self.times[base] for base in PLAIN if base in self.times]
        return min(plain) / self.times[name] if plain and name in self.times else math.nan

    def share(self, name: str) -> float:
        """The share of the memory bandwidth that reading the weights takes."""
        return self.read.get(name, 0) / self.times[name] / 1e6 / self.bandwidth if name in self.times else math.nan


def _work(model: str, threads: int, batch: int, mode: str, prompt: int) -> str:
    work = f"{model}, {threads} threads, batch {batch}, {mode}"
    if mode == READING:
        return f"{work} of {prompt} tokens"
    return work if prompt == PROMPT else f"{work}, after {prompt} tokens"


class Bench:
    """All contenders of one model, in memory together."""

    def __init__(self, name: str, formats: Sequence[str], include_head: bool, peers: bool, folder: Path) -> None:
        self.name, base = name, load(name)
        self.failed: dict[str, str] = {}
        self.variants: dict[str, Any] = {}
        for contender in (*PLAIN, *((TORCHAO,) if peers else ()), *formats):
            self._add(contender, partial(variant, base, contender, include_head), self.variants)
        self.files: dict[str, Path] = {}
        if name == "smollm2" and peers:
            self.files["llama.cpp Q4_1"] = smollm2.gguf_path()
        for kind in ("Q8_0", "MXFP4") if peers else ():
            path = folder / f"{name}-{kind}.gguf"
            self._add(f"llama.cpp {kind}", partial(write_gguf, base, path, kind), self.files)

    def _add(self, name: str, make: Callable[[], Any], found: dict[str, Any]) -> None:
        try:
            found[name] = make()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]

    def row(
        self, threads: int, batch: int, mode: str, repeats: int, seconds: float, fastest: bool = False,
        clock: Clock = wall_clock, prompt: int = PROMPT,
    ) -> LlmRow:  # fmt: skip
        """Time a step of every contender, in turn; ``fastest``: the fastest step counts, not the median."""
        row = LlmRow(_work(self.name, threads, batch, mode, prompt), {})
        row.model, row.threads, row.batch, row.mode, row.prompt = self.name, threads, batch, mode, prompt
        row.failed = dict(self.failed)
        steps: list[Steps] = []
        peers: list[LlamaCpp] = []
        others = "eager" if mode == "attention" else mode
        contenders = {
            name: torch_contender(model, batch, others if name in (*PLAIN, TORCHAO) else mode, prompt, steps)
            for name, model in self.variants.items()
        }
        contenders |= {n: llama_cpp_contender(p, batch, threads, mode, prompt, peers) for n, p in self.files.items()}
        megabytes = 8 if self.name == "tiny" else MEGABYTES
        contenders |= readers(megabytes)
        row.read = {n: read_bytes(m) for n, m in self.variants.items()}
        row.read |= {n: p.stat().st_size for n, p in self.files.items()}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            summary = min if fastest else statistics.median
            timed(row, contenders, repeats, 2, clock, seconds, summary)
            row.bandwidth = take_bandwidth(row, megabytes)
            return row
        finally:
            row.load = os.getloadavg()[0]
            torch.set_num_threads(before)
            for step in steps:
                step.restore()
            for peer in peers:
                peer.close()
            torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- the command

HEADER = ["work", "contender", "ms per step", "tokens/s", "over plain", "over llama.cpp", "of bandwidth"]


def lines(rows: Sequence[LlmRow]) -> list[list[str]]:
    """One line for every contender of every row; the rows in which our formats gain least come first."""

    def worst(row: LlmRow) -> float:
        ours = [row.over_plain(name) for name in row.times if name.startswith(("mx", "nv", "float8"))]
        return min([ratio for ratio in ours if not math.isnan(ratio)], default=math.inf)

    def number(value: float, digits: int = 2) -> str:
        return "" if math.isnan(value) else f"{value:.{digits}f}"

    return [
        [
            row.work, name, number(row.times[name]), number(row.tokens_a_second(name), 1),
            number(row.over_plain(name)), number(row.ratio(name, EQUAL_BITS.get(name, ""))), number(row.share(name)),
        ]
        for row in sorted(rows, key=worst)
        for name in sorted(row.times, key=row.over_plain)
    ]  # fmt: skip


def wanted(args: argparse.Namespace) -> list[tuple[str, int, int, str]]:
    """What these arguments measure, in its order: (model, threads, batch, mode)."""
    batches = {mode: args.batches for mode in args.modes}
    if args.compiled_batches is not None and "compiled" in batches:
        batches["compiled"] = args.compiled_batches
    return [
        (model, threads, batch, mode)
        for model, mode, threads in product(args.models, args.modes, args.threads)
        for batch in batches[mode]
    ]


def saved_rows(path: Path, args: argparse.Namespace) -> list[LlmRow]:
    """The rows of a record that these arguments do not measure."""
    if not path.exists():
        return []
    _, rows = read_json(path, LlmRow, DECODE)
    repeated = {(*each, args.prompt) for each in wanted(args)}
    return [row for row in rows if (row.model, row.threads, row.batch, row.mode, row.prompt) not in repeated]


def decode(args: argparse.Namespace) -> list[LlmRow]:
    """Every model, number of threads, batch and mode; the record is written after each row."""
    saved = saved_rows(args.json, args) if args.add else []
    work, clock = wanted(args), cpu_clock if args.cpu_time else wall_clock
    rows, progress = list[LlmRow](), Progress(len(work), "row")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            bench = Bench(name, args.formats, not args.no_head, not args.no_peers, Path(folder))
            for _, threads, batch, mode in (found for found in work if found[0] == name):
                rows.append(
                    bench.row(threads, batch, mode, args.repeats, args.seconds, args.fastest, clock, args.prompt)
                )
                progress.step(rows[-1].work)
                write_json(args.json, [*saved, *rows], DECODE)
            del bench
    progress.close()
    print_table(HEADER, lines([*saved, *rows]))
    return [*saved, *rows]


DECODE = "decode"
SECTIONS = {DECODE: Section("how many tokens per second do language models decode on a CPU, beside llama.cpp?", decode)}


def main(argv: Sequence[str] | None = None) -> None:
    """Time language models on this CPU."""
    options = parser(__doc__ or "", SECTIONS, repeats=9)
    add = options.add_argument
    add("--models", nargs="+", default=MODELS, choices=(*MODELS, "tiny"), help="(both)")
    add("--threads", nargs="+", type=int, default=(1, 2), help="numbers of threads (1 2)")
    add("--batches", nargs="+", type=int, default=(1, 4, 16), help="sequences that are decoded together (1 4 16)")
    add("--modes", nargs="+", default=MODES, choices=(*MODES, READING), help="(all but prompt); llama.cpp has one")
    add("--compiled-batches", nargs="+", type=int, help="batches of the mode compiled, which takes minutes (--batches)")
    add("--prompt", type=int, default=PROMPT, help="tokens before those of the steps, or of a step (%(default)s)")
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="what quantize_ takes")
    add("--seconds", type=float, default=20, help="for the rounds of one row (%(default)s)")
    add("--fastest", action="store_true", help="the fastest step counts, not the median: for a machine in use")
    add("--no-peers", action="store_true", help="without torchao and llama.cpp")
    add("--no-head", action="store_true", help="leave head and embedding in bfloat16")
    add("--cpu-time", action="store_true", help="the CPU time of this process, on one thread: for a machine in use")
    add("--add", action="store_true", help="keep the rows of the record that are not measured again")
    args = options.parse_args(argv)
    if args.add and args.json is None:
        options.error("--add needs --json, the record to add to")
    if args.cpu_time and set(args.threads) != {1}:
        options.error("--cpu-time needs --threads 1: threads that wait for each other use CPU time too")
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
