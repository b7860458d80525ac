"""The contenders of ``benchmarks.llm_cpu``: language models in torch, with torchao's weights and with ours, and in
llama.cpp. A step decodes one token of each sequence of a batch after a prompt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mxtensor as mx
from examples import smollm2
from mxtensor.compile.cpu_recording import components_of
from mxtensor.core.compat_dynamo import compiled_alone

from .harness import Prepare, Work
from .llama import llama
from .llama_cpp_peer import LlamaCpp

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
