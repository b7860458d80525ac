"""Models that decode on a GPU, in the shape of Llama 3 8B with random weights: ``python -m benchmarks.generate``.

``decode``: batch 1, greedy, a static cache, one CUDA graph per token; the decoder layers are compiled with
``mx.inference_options()`` and torch's flex_attention, which is the fastest attention for bfloat16.
``transformers``: its ``generate`` with ``cache_implementation="static"``, each format in a process of its own, all in
turn. ``first``: what the first token waits for in a new process, with empty folders of compiled kernels (cold), and in
the next process with the same folders (warm).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import mxtensor as mx

from .contenders import Contenders
from .cuda import synchronize
from .harness import Progress, Row, Section, parser, print_table, run
from .peers import llama

BASE = "bfloat16"
LLAMA_3_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
TOY = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
PROMPT = 16
"""Tokens of the prompt."""


def model_of(config: str, args: argparse.Namespace, **changes: Any) -> nn.Module:
    """A new model on the device, with the same weights at each call, quantized to ``config``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = TOY if args.tiny else LLAMA_3_8B | {"num_hidden_layers": args.layers}
    with torch.device(args.device):
        model: nn.Module = llama(**sizes, **changes)
    return model if config == BASE else mx.quantize_(model, config)


# ---------------------------------------------------------------------------------------------- a CUDA graph per token

DECODED = (BASE, "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only", "nvfp4-weight-only")
TOKENS, PREFILL = 256, 4096
ROUNDS = 3
"""Rounds of TOKENS decoded tokens; the fastest round is reported."""


@dataclass
class ModelRow(Row):
    """One config. ``times["token"]`` and ``times["prefill"]`` are in milliseconds."""

    tokens_a_second: float = 0.0
    weight_bytes: int = 0
    """Bytes on the device of the weights that ``mx.quantize_`` converts, scales included."""


def linears(model: nn.Module) -> list[nn.Linear]:
    """The layers that ``mx.quantize_`` converts by default."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


class Decoder:
    """Greedy decoding with a static cache. ``step`` can be captured in a CUDA graph."""

    def __init__(self, model: nn.Module, length: int) -> None:
        from transformers import StaticCache

        device = next(model.parameters()).device
        self.model = model
        self.cache = StaticCache(config=cast(Any, model.config), max_cache_len=length)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)

    def prefill(self, prompt: Tensor) -> None:
        """Fill the cache with a prompt of shape (1, tokens), and compute the next token."""
        position = torch.arange(prompt.shape[1], device=prompt.device).unsqueeze(0)
        self._run(prompt, position)
        self.position.fill_(prompt.shape[1])

    def step(self) -> None:
        """Compute the next token from the current one."""
        self._run(self.token, self.position)
        self.position.add_(1)

    def _run(self, tokens: Tensor, position: Tensor) -> None:
        out = self.model(
            input_ids=tokens, position_ids=position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))


class OneLayerCache:
    """The cache of one decoder layer, which ignores the index that the layer passes."""

    def __init__(self, layer_cache: Any) -> None:
        self.layer_cache = layer_cache

    def update(self, keys: Tensor, values: Tensor, index: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return self.layer_cache.update(keys, values, *rest, **more)  # type: ignore[no-any-return]


def compile_layers(decoder: Decoder) -> None:
    """Compile one function that serves all decoder layers: it depends on no layer's index nor on its cache's address.

    Call this after a prefill, which allocates the cache.
    """
    torch._dynamo.reset()  # graphs of earlier models count towards Dynamo's limit of recompilations
    layers: Any = decoder.model.model.layers  # type: ignore[union-attr]
    run = torch.compile(type(layers[0]).forward, fullgraph=True, dynamic=False, options=mx.inference_options())
    for layer, layer_cache in zip(layers, cast(Any, decoder.cache).layers, strict=True):
        for t in vars(layer_cache).values():
            if isinstance(t, Tensor):
                torch._dynamo.mark_static_address(t, guard=False)
        layer.self_attn.layer_idx = 0
        layer.forward = partial(_forward, run, layer, OneLayerCache(layer_cache))


def _forward(run: Callable[..., Tensor], layer: nn.Module, cache: OneLayerCache, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = cache
    return run(layer, *args, **kwargs)


def seconds_of(work: Callable[[], Any], calls: int = 1) -> float:
    """Wall time of so many calls."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return time.perf_counter() - start


def captured(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """A step of decoding as a CUDA graph; on a CPU the step itself."""
    if device != "cuda":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def decoded(config: str, args: argparse.Namespace) -> ModelRow:
    """Decode with a quantized model, and time a prefill. A CPU uses no CUDA graph, and compiles nothing."""
    tokens, prefill = (2, 8) if args.tiny else (TOKENS, PREFILL)
    model = model_of(config, args, **({} if args.tiny else {"attn_implementation": "flex_attention"}))
    row = ModelRow(config, {})
    row.weight_bytes = sum(
        sum(t.nbytes for t in w.rowwise.tensors) if isinstance(w := m.weight, mx.MXTensor) and w.rowwise else w.nbytes
        for m in linears(model)
    )
    decoder = Decoder(model, PROMPT + ROUNDS * tokens + 8)
    decoder.prefill(torch.randint(0, 1000, (1, PROMPT), device=args.device))
    with mx.explain() as log:
        decoder.step()
    row.kernels[config] = ", ".join(dict.fromkeys(e.kernel for e in log.entries if e.spec.op == "linear"))
    if not args.tiny:
        compile_layers(decoder)
    decoder.step()
    step = captured(decoder.step, args.device)
    best = min(seconds_of(step, tokens) for _ in range(ROUNDS))
    row.times["token"] = best / tokens * 1e3
    row.tokens_a_second = tokens / best
    prompt = torch.randint(0, 1000, (1, prefill), device=args.device)
    whole_prompt = partial(model, input_ids=prompt, use_cache=False, logits_to_keep=1)
    row.times["prefill"] = 1e3 * min(seconds_of(whole_prompt) for _ in range(4))
    del decoder, model, step, whole_prompt
    gc.collect()
    torch.cuda.empty_cache()
    return row


def decode(args: argparse.Namespace) -> list[ModelRow]:
    """Tokens per second, bytes of the weights, and the time of a prefill of each format."""
    rows, progress = list[ModelRow](), Progress(len(args.formats or DECODED), "formats")
    with torch.no_grad():
        for config in args.formats or DECODED:
            rows.append(decoded(config, args))
            progress.step(f"{config}: {rows[-1].tokens_a_second:.1f} tokens/s")
    progress.close()
    lines = [
        [row.work, f"{row.tokens_a_second:.1f}", f"{row.times['token']:.2f}", f"{row.weight_bytes / 1e9:.2f}",
         f"{row.times['prefill']:.0f}", *row.kernels.values()]
        for row in rows
    ]  # fmt: skip
    print_table(["config", "tokens/s", "ms per token", "weights GB", "prefill ms", "kernels"], lines)
    return rows


# ---------------------------------------------------------------------------------------------- transformers' generate

FORMATS = (BASE, "mxfp8-weight-only", "mxfp4-weight-only")
BATCHES = (1, 8, 64)
EAGER, STATIC = "eager", "static"
SHORT, LONG = 4, 64
"""New tokens of the short call, and those that a long one has beyond them. A step is the difference over LONG."""


@dataclass
class GenerateRow(Row):
    """``times["token"]`` is the time of a decoding step, ``times["first"]`` that of the short call, in milliseconds.

    ``relative["token"]`` is the time of a step over that of bfloat16 in the same round, the median of all rounds.
    """

    config: str = ""
    mode: str = ""
    batch: int = 0
    compile_s: float = 0.0
    """Seconds of the first call, which compiles, while those of the other formats do."""

    @property
    def tokens_a_second(self) -> float:
        """Of all sequences of the batch."""
        return self.batch * 1e3 / self.times["token"] if self.times.get("token") else float("nan")


class Generate:
    """Calls of ``generate`` in one mode with one prompt."""

    def __init__(self, model: Any, mode: str, batch: int, device: str) -> None:
        self.model = model
        self.options: dict[str, Any] = {"cache_implementation": "static"} if mode == STATIC else {}
        self.prompt = torch.randint(3, model.config.vocab_size, (batch, PROMPT), device=device)
        self.mask = torch.ones_like(self.prompt)

    def __call__(self, tokens: int) -> Tensor:
        """Generate this number of new tokens; the result has the prompt too."""
        ids: Tensor = self.model.generate(
            self.prompt, attention_mask=self.mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **self.options,
        )  # fmt: skip
        return ids

    @torch.no_grad()
    def milliseconds(self, tokens: int) -> float:
        """Wall time of a call."""
        synchronize()
        start = time.perf_counter()
        ids = self(tokens)
        synchronize()
        assert ids.shape[1] == PROMPT + tokens
        return (time.perf_counter() - start) * 1e3


class Contender:
    """The model of one format, in its process."""

    def __init__(self, config: str, args: argparse.Namespace) -> None:
        self.args, self.model = args, model_of(config, args)
        if args.device == "cuda":
            torch.cuda.empty_cache()  # other contenders share the GPU
        self.generate: Generate | None = None
        self.long = 4 if args.tiny else LONG

    def prepare(self, mode: str, batch: int) -> float:
        """Compile for this mode and batch. Seconds of the first call."""
        torch._dynamo.reset()  # graphs of earlier rows count towards Dynamo's limit of recompilations
        for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length", "_cache"):
            self.model.__dict__.pop(name, None)  # what transformers caches of earlier rows
        self.generate = None
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()
        generate = self.generate = Generate(self.model, mode, batch, self.args.device)
        seconds = generate.milliseconds(SHORT + self.long) / 1e3  # the long call first: it sets the cache's size
        generate.milliseconds(SHORT)
        return seconds

    def time(self) -> tuple[float, float]:
        """Milliseconds of a short and of a long call, after one that wakes the process up."""
        assert self.generate is not None
        self.generate.milliseconds(SHORT)
        return self.generate.milliseconds(SHORT), self.generate.milliseconds(SHORT + self.long)


def generated(contenders: Contenders, mode: str, batch: int, args: argparse.Namespace) -> list[GenerateRow]:
    """The rows of all formats. An error is recorded in ``failed``."""
    contenders.forgive()
    compile_s = contenders.side_by_side("prepare", mode, batch)
    rounds = [contenders.one_by_one("time") for _ in range(args.repeats)]
    rows, long = [], 4 if args.tiny else LONG
    for config in args.formats or FORMATS:
        row = GenerateRow(f"{config} {mode}, batch {batch}", {}, config=config, mode=mode, batch=batch)
        rows.append(row)
        if config in contenders.failed:
            row.failed["generate"] = contenders.failed[config]
            continue
        tokens = [{name: (end - begin) / long for name, (begin, end) in found.items()} for found in rounds]
        row.compile_s = compile_s[config]
        row.times["first"] = statistics.median(found[config][0] for found in rounds)
        row.times["token"] = statistics.median(found[config] for found in tokens)
        if BASE in tokens[-1]:
            row.relative["token"] = statistics.median(found[config] / found[BASE] for found in tokens)
    return rows


def by_transformers(args: argparse.Namespace) -> list[GenerateRow]:
    """Tokens per second of ``generate``, compiled side by side and timed in turn."""
    rows, batches = list[GenerateRow](), (2,) if args.tiny else args.batches
    mode = EAGER if args.eager or args.tiny else STATIC
    progress = Progress(len(batches), "batches")
    with Contenders(args.formats or FORMATS, Contender, args) as contenders:
        for batch in batches:
            rows += generated(contenders, mode, batch, args)
            progress.step(f"{mode}, batch {batch}")
    progress.close()
    lines = [
        [row.mode, str(row.batch), row.config, f"{row.tokens_a_second:.1f}", f"{row.speedup('token'):.2f}",
         f"{row.times['token']:.2f}", f"{row.times['first']:.1f}", f"{row.compile_s:.1f}"]
        for row in rows if row.times
    ]  # fmt: skip
    header = ["mode", "batch", "format", "tokens/s", "over bf16", "ms per step", f"prompt + {SHORT} tokens ms"]
    print_table([*header, "first call s"], lines)
    return rows


# ---------------------------------------------------------------------------------------------- the first token

FIRST = (BASE, "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only")
FOLDERS = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that name folders of compiled kernels."""
COLD, WARM = "cold", "warm"
TIMES = ("quantize", "first", "second", "steady")
"""``mx.quantize_``, the forward pass of the prompt, that of one more token, and the prompt's again."""


@dataclass
class FirstRow(Row):
    """``times`` are milliseconds, by TIMES."""

    config: str = ""
    cache: str = ""

    @property
    def wait_s(self) -> float:
        """Seconds from a bfloat16 model to its second token."""
        return sum(self.times.get(name, float("nan")) for name in TIMES[:3]) / 1e3


def first_tokens(config: str, args: argparse.Namespace) -> dict[str, float]:
    """The milliseconds of each of TIMES in this process, which has computed nothing before."""
    model: Any = model_of(BASE, args)
    prompt = torch.randint(3, 128, (1, PROMPT), device=args.device)
    times: dict[str, float] = {}

    def clocked(name: str, work: Callable[[], Any]) -> Any:
        synchronize()
        start = time.perf_counter()
        result = work()
        synchronize()
        times[name] = (time.perf_counter() - start) * 1e3
        return result

    with torch.no_grad():
        clocked("quantize", lambda: None if config == BASE else mx.quantize_(model, config))
        out = clocked("first", lambda: model(input_ids=prompt, use_cache=True))
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        clocked("second", lambda: model(input_ids=token, past_key_values=cache, use_cache=True))
        clocked("steady", lambda: model(input_ids=prompt, use_cache=True))
    return times


def in_new_process(config: str, cache: str, folder: Path, args: argparse.Namespace) -> FirstRow:
    """The row of a new process with its caches in ``folder``. An error is recorded in ``failed``."""
    row = FirstRow(f"{config} {cache}", {}, config=config, cache=cache)
    words = ["--child", config, "--layers", str(args.layers), *["--tiny"] * args.tiny]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.generate", *words], capture_output=True, text=True, check=False,
        env=os.environ | {name: str(folder / name.lower()) for name in FOLDERS},
    )  # fmt: skip
    if done.returncode:
        row.failed[config] = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    else:
        row.times = json.loads(done.stdout.splitlines()[-1])
    return row


def first(args: argparse.Namespace) -> list[FirstRow]:
    """The time until the first token of each format, with cold and with warm caches."""
    formats, rows = args.formats or FIRST, list[FirstRow]()
    progress = Progress(2 * len(formats), "processes")
    for config in formats:
        with tempfile.TemporaryDirectory() as folder:
            for cache in (COLD, WARM):
                rows.append(in_new_process(config, cache, Path(folder), args))
                progress.step(f"{rows[-1].work}: {rows[-1].wait_s:.2f} s")
    progress.close()
    lines = [
        [r.config, r.cache, *(f"{r.times[n] / 1e3:.2f}" for n in TIMES), f"{r.wait_s:.2f}"] for r in rows if r.times
    ]
    print_table(["format", "caches", *(f"{name} s" for name in TIMES), "until the second token s"], lines)
    return rows


SECTIONS = {
    "decode": Section("how fast does a model decode with one CUDA graph per token?", decode, gpu=True),
    "transformers": Section("how fast is transformers' generate with a static cache?", by_transformers, gpu=True),
    "first": Section("how long does the first token take in a new process?", first, gpu=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Time models that decode."""
    options = parser(__doc__ or "", SECTIONS, repeats=7)
    add: Any = options.add_argument
    add("--formats", nargs="+", metavar="NAME", help="what quantize_ takes (those of the section)")
    add("--batches", nargs="+", type=int, default=BATCHES, help="sequences of generate (1 8 64)")
    add("--layers", type=int, default=32, help="decoder layers (%(default)s)")
    add("--eager", action="store_true", help="generate with its default cache, which compiles nothing")
    add("--child", metavar="FORMAT", help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    if args.child:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(json.dumps(first_tokens(args.child, args)))
        return
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
