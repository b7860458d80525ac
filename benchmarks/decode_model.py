"""Greedy decoding with the shape of Llama 3 8B in each format: ``python -m benchmarks.decode_model --json F``.

The model is that of transformers with random weights, batch 1, a static cache, and one CUDA graph per token. Each
format is the same model after ``mx.quantize_``, and its decoder layers are compiled with ``mx.inference_options()``
(``--eager`` skips this). Compiled layers use torch's flex_attention, which is the fastest attention for bfloat16. The
figures are tokens per second, the bytes of the weights, and the time of a prefill.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import mxtensor as mx

from .cuda import Target, gpu_arguments, machine_line, print_verdicts
from .harness import Row, print_table, write_json
from .llama import llama

BASE = "bfloat16"
Figures = Callable[[Sequence["ModelRow"]], Iterable[tuple[str, float]]]
CONFIGS = (BASE, "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only", "nvfp4-weight-only")
LLAMA_3_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
TOKENS, PROMPT, PREFILL = 256, 16, 4096
ROUNDS = 3
"""Rounds of TOKENS decoded tokens; the fastest round is reported."""


@dataclass
class ModelRow(Row):
    """One config. ``times["token"]`` and ``times["prefill"]`` are in milliseconds."""

    tokens_a_second: float = 0.0
    weight_bytes: int = 0
    """Bytes on the device of the weights that ``mx.quantize_`` converts, scales included."""
    kernels: str = ""


def linears(model: nn.Module) -> list[nn.Linear]:
    """The layers that ``mx.quantize_`` converts by default."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


def build(**changes: Any) -> nn.Module:
    """The model, with random weights."""
    model: nn.Module = llama(**{**LLAMA_3_8B, **changes})
    return model


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


def synchronize(device: str) -> None:
    """Wait for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, calls: int = 1) -> float:
    """Wall time of so many calls."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
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


def measured(
    config: str, make: Callable[[], nn.Module], device: str, prefill: int = PREFILL, compiles: bool = False
) -> ModelRow:
    """Quantize the model of ``make``, decode with it, and time a prefill. A CPU uses no CUDA graph.

    ``prefill`` is its number of tokens; ``compiles`` says whether the decoder layers are compiled.
    """
    model = make()
    row = ModelRow(config, {})
    if config != BASE:
        mx.quantize_(model, config)
    row.weight_bytes = sum(
        sum(t.nbytes for t in w.rowwise.tensors) if isinstance(w := m.weight, mx.MXTensor) and w.rowwise else w.nbytes
        for m in linears(model)
    )
    decoder = Decoder(model, PROMPT + ROUNDS * TOKENS + 8)
    decoder.prefill(torch.randint(0, 1000, (1, PROMPT), device=device))
    with mx.explain() as log:
        decoder.step()
    row.kernels = ", ".join(dict.fromkeys(e.kernel for e in log.entries if e.spec.op == "linear"))
    if compiles:
        compile_layers(decoder)
    decoder.step()
    step = captured(decoder.step, device)
    best = min(seconds_of(step, device, TOKENS) for _ in range(ROUNDS))
    row.times["token"] = best / TOKENS * 1e3
    row.tokens_a_second = TOKENS / best
    prompt = torch.randint(0, 1000, (1, prefill), device=device)
    whole_prompt = partial(model, input_ids=prompt, use_cache=False, logits_to_keep=1)
    row.times["prefill"] = 1e3 * min(seconds_of(whole_prompt, device) for _ in range(4))
    del decoder, model, step, whole_prompt
    gc.collect()
    return row


# ---------------------------------------------------------------------------------------------- targets


def ratio_to_base(figure: Callable[[ModelRow], float], *names: str) -> Figures:
    """The figure of each of these configs divided by that of bfloat16."""

    def figures(rows: Sequence[ModelRow]) -> Iterable[tuple[str, float]]:
        base = next(row for row in rows if row.work == BASE)
        return [(row.work, figure(row) / figure(base)) for row in rows if row.work in names]

    return figures


def _speed(row: ModelRow) -> float:
    return row.tokens_a_second


def _bytes(row: ModelRow) -> float:
    return row.weight_bytes


def _prefill(row: ModelRow) -> float:
    return row.times["prefill"]


TARGETS = (
    Target("mxfp8, tokens per second over bfloat16", ">=", 1.6, ratio_to_base(_speed, "mxfp8", "mxfp8-weight-only")),
    Target("mxfp4, tokens per second over bfloat16", ">=", 2.3, ratio_to_base(_speed, "mxfp4-weight-only")),
    Target("mxfp8, bytes of weights over bfloat16", "<=", 0.53, ratio_to_base(_bytes, "mxfp8", "mxfp8-weight-only")),
    Target("mxfp4, bytes of weights over bfloat16", "<=", 0.30, ratio_to_base(_bytes, "mxfp4-weight-only")),
    Target("prefill of 4096 tokens over bfloat16", "<=", 1.06, ratio_to_base(_prefill, *CONFIGS[1:])),
)
HEADER = [
    "config", "tokens/s", "over bf16", "ms per token", "weights GB", "over bf16", "prefill ms", "over bf16", "kernels",
]  # fmt: skip


def lines(rows: Sequence[ModelRow]) -> list[list[str]]:
    """The lines of the table, one for each config."""
    base = rows[0]
    return [
        [
            row.work, f"{row.tokens_a_second:.1f}", f"{row.tokens_a_second / base.tokens_a_second:.2f}",
            f"{row.times['token']:.2f}", f"{row.weight_bytes / 1e9:.2f}", f"{row.weight_bytes / base.weight_bytes:.3f}",
            f"{row.times['prefill']:.0f}", f"{row.times['prefill'] / base.times['prefill']:.3f}", row.kernels,
        ]
        for row in rows
    ]  # fmt: skip


def main() -> None:
    """Measure every config and print the table and the targets."""
    args = gpu_arguments(__doc__ or "", seconds=240, eager="do not compile the decoder layers")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    changes: dict[str, Any] = {"num_hidden_layers": 2} if args.quick else {}
    if args.device == "cuda" and not args.eager:
        changes["attn_implementation"] = "flex_attention"

    def make() -> nn.Module:
        with torch.device(args.device):
            return build(**changes)

    rows = []
    with torch.no_grad():
        for config in CONFIGS:
            rows.append(measured(config, make, args.device, compiles=not (args.eager or args.quick)))
            torch.cuda.empty_cache()
            print(f"{config}: {rows[-1].tokens_a_second:.1f} tokens/s", flush=True)
    print(f"\n{machine_line()}\n")
    print_table(HEADER, lines(rows))
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
