"""A Llama-3-8B-shaped model that decodes greedily, by format: ``python -m benchmarks.decode_model --json F``.

transformers' own model with random weights, batch 1, a static cache, one CUDA graph a token; every format is the same
model, converted by ``mx.quantize_``, its decoder layers compiled with ``mx.inference_options()`` (``--eager``: not).
Compiled on a GPU, attention is torch's flex_attention, the fastest of bfloat16's. Beside tokens a second: bytes of the
weights, and the time of a prefill.
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

from .cuda import Target, gpu_arguments, here, print_verdicts
from .harness import Row, print_table, write_json

BASE = "bfloat16"
Figures = Callable[[Sequence[Any]], Iterable[tuple[str, float]]]
CONFIGS = (BASE, "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only", "nvfp4-weight-only")
LLAMA_3_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
TOKENS, PROMPT, PREFILL = 256, 16, 4096
ROUNDS = 3
"""Times TOKENS that are decoded, one after the other; the fastest counts."""


@dataclass
class ModelRow(Row):
    """One config: ``times`` holds milliseconds of a token ("token") and of a prefill ("prefill")."""

    tokens_a_second: float = 0.0
    weight_bytes: int = 0
    """Of the linear layers that quantize_ takes, as they lie on the device."""
    kernels: str = ""


def linears(model: nn.Module) -> list[nn.Linear]:
    """The layers that ``mx.quantize_`` takes by default."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


def build(**changes: Any) -> nn.Module:
    """The model with random weights, in bfloat16 on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**LLAMA_3_8B, **changes}))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


class Decoder:
    """Greedy decoding with a static cache: ``step`` makes one token of the one before, and captures well."""

    def __init__(self, model: nn.Module, length: int) -> None:
        from transformers import StaticCache

        device = next(model.parameters()).device
        self.model = model
        self.cache = StaticCache(config=cast(Any, model.config), max_cache_len=length)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)

    def prefill(self, prompt: Tensor) -> None:
        """The cache of a prompt (1, tokens), and the token after it."""
        position = torch.arange(prompt.shape[1], device=prompt.device).unsqueeze(0)
        self._run(prompt, position)
        self.position.fill_(prompt.shape[1])

    def step(self) -> None:
        """The next token, from the one before."""
        self._run(self.token, self.position)
        self.position.add_(1)

    def _run(self, tokens: Tensor, position: Tensor) -> None:
        out = self.model(
            input_ids=tokens, position_ids=position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))


class OfOneLayer:
    """What a decoder layer sees of the cache: its own part, whatever its number."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def update(self, keys: Tensor, values: Tensor, index: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return self.part.update(keys, values, *rest, **more)  # type: ignore[no-any-return]


def compile_layers(decoder: Decoder) -> None:
    """Compile the decoder layers, all of them as one function: none knows its number, or the address of its cache.

    To be called after a prefill, which makes the cache.
    """
    torch._dynamo.reset()  # what was compiled for models before counts towards its limit
    layers: Any = decoder.model.model.layers  # type: ignore[union-attr]
    run = torch.compile(type(layers[0]).forward, fullgraph=True, dynamic=False, options=mx.inference_options())
    for layer, part in zip(layers, cast(Any, decoder.cache).layers, strict=True):
        for t in vars(part).values():
            if isinstance(t, Tensor):
                torch._dynamo.mark_static_address(t, guard=False)
        layer.self_attn.layer_idx = 0
        layer.forward = partial(_forward, run, layer, OfOneLayer(part))


def _forward(run: Callable[..., Tensor], layer: nn.Module, own: OfOneLayer, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = own
    return run(layer, *args, **kwargs)


def measured(
    config: str, make: Callable[[], nn.Module], device: str, prefill: int = PREFILL, compiles: bool = False
) -> ModelRow:
    """Convert a model and decode with it, its layers compiled or not; on a CPU without a graph."""
    cuda = device == "cuda"
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
    step: Callable[[], Any] = decoder.step
    if cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.step()
        step = graph.replay
    best = float("inf")
    for _ in range(ROUNDS):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TOKENS):
            step()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    row.times["token"] = best / TOKENS * 1e3
    row.tokens_a_second = TOKENS / best
    prompt = torch.randint(0, 1000, (1, prefill), device=device)
    took = []
    for _ in range(4):
        start = time.perf_counter()
        model(input_ids=prompt, use_cache=False, logits_to_keep=1)
        if cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    row.times["prefill"] = min(took) * 1e3
    del decoder, model
    gc.collect()
    return row


# ---------------------------------------------------------------------------------------------- targets


def over_base(
    figure: Callable[[ModelRow], float], *names: str
) -> Callable[[Sequence[ModelRow]], Iterable[tuple[str, float]]]:
    """A figure of these configs over bfloat16's."""

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
    Target("mxfp8, tokens a second over bfloat16", ">=", 1.6, over_base(_speed, "mxfp8", "mxfp8-weight-only")),
    Target("mxfp4, tokens a second over bfloat16", ">=", 2.3, over_base(_speed, "mxfp4-weight-only")),
    Target("mxfp8, bytes of weights over bfloat16", "<=", 0.53, over_base(_bytes, "mxfp8", "mxfp8-weight-only")),
    Target("mxfp4, bytes of weights over bfloat16", "<=", 0.30, over_base(_bytes, "mxfp4-weight-only")),
    Target("prefill of 4096 tokens over bfloat16", "<=", 1.06, over_base(_prefill, *CONFIGS[1:])),
)
HEADER = [
    "config",
    "tokens/s",
    "over bf16",
    "ms a token",
    "weights GB",
    "over bf16",
    "prefill ms",
    "over bf16",
    "kernels",
]


def lines(rows: Sequence[ModelRow]) -> list[list[str]]:
    """A line for each config."""
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
    """Measure every config, then print them beside bfloat16."""
    args = gpu_arguments(__doc__ or "", seconds=240, eager="leave the decoder layers uncompiled")
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
    print(f"\n{here()}\n")
    print_table(HEADER, lines(rows))
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
