"""llama.cpp as a contender of ``benchmarks.llm_cpu``: the model as a GGUF file, and steps of decoding it.

Needs gguf and ``llama-cpp-python`` (``pip install 'mxtensor[peers]'``), which pip builds by CMake and a C++ compiler.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = ("Q8_0", "MXFP4", "Q4_1")
"""Types of weights that are made here: 8.5, 4.25 and 5 bits per weight."""


def write_gguf(model: Any, path: Path, weight_type: str) -> Path:
    """Write a Llama of transformers with its matrices in a type of GGUF, without a tokenizer. Returns ``path``.

    Raises ImportError without gguf. The head is written once if it is tied to the embedding.
    """
    import gguf

    config, arch = model.config, gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names, kind = gguf.get_tensor_name_map(arch, config.num_hidden_layers), gguf.GGMLQuantizationType[weight_type]
    for name, parameter in model.named_parameters():  # a tied head has no name of its own
        values = parameter.detach().float()
        if ".q_proj." in name or ".k_proj." in name:
            values = _interleaved(values, heads if ".q_proj." in name else kv_heads)
        array, stored = values.numpy(), gguf.GGMLQuantizationType.F32
        if values.dim() == 2:
            array, stored = _quantized(array, kind), kind
        named = names.get_name(name, (".weight", ".bias"))
        assert named is not None, f"gguf has no name for {name}"
        writer.add_tensor(named, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantized(array: Any, kind: Any) -> Any:
    """What gguf makes of a matrix, in as many threads as torch has: numpy works in one."""
    import gguf
    import numpy as np

    slices = np.array_split(array, min(torch.get_num_threads(), len(array)))
    with ThreadPoolExecutor(len(slices)) as pool:
        return np.concatenate(list(pool.map(lambda piece: gguf.quants.quantize(piece, kind), slices)))


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours where transformers rotates halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class LlamaCpp:
    """A model in memory, decoding ``batch`` sequences. ``step`` computes the logits of one more token of each.

    A step forgets its token again, so that all steps do the same work.
    """

    def __init__(self, path: Path, batch: int, prompt: int, threads: int, context: int) -> None:
        lib = library()
        self.lib, self.batch, self.position = lib, batch, prompt
        self.places = [(sequence, place) for sequence in range(batch) for place in range(prompt)]
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = batch * context, batch * prompt, batch * prompt
        options.n_seq_max, options.n_threads, options.n_threads_batch = batch, threads, threads
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError(f"llama.cpp has no memory for {batch} sequences of {context} tokens")
        self._decode(self.places)

    def _decode(self, tokens: list[tuple[int, int]]) -> None:
        """Run (sequence, position) pairs of some token; each last position gets logits."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        last = max(place for _, place in tokens)
        for i, (sequence, place) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 7 + i % 89, place, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, place == last
        batch.n_tokens = len(tokens)
        status = self.lib.llama_decode(self.context, batch)
        self.lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def step(self) -> None:
        """One token of each sequence."""
        self._decode([(sequence, self.position) for sequence in range(self.batch)])
        self._forget(self.position)

    def read(self) -> None:
        """The prompt of each sequence, once more."""
        self._forget(0)
        self._decode(self.places)

    def _forget(self, first: int) -> None:
        """Forget the tokens of each sequence from a position on."""
        memory = self.lib.llama_get_memory(self.context)
        for sequence in range(self.batch):
            self.lib.llama_memory_seq_rm(memory, sequence, first, -1)

    def logits(self) -> Tensor:
        """Those of the first sequence in the step before, (vocabulary,)."""
        vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        pointer = self.lib.llama_get_logits_ith(self.context, 0)
        return torch.tensor(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))[:vocabulary])

    def close(self) -> None:
        """Free the memory."""
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


_CALLBACKS: list[Any] = []


@cache
def library() -> Any:
    """llama.cpp, ready and without a log on stderr. Raises ImportError without llama-cpp-python."""
    import llama_cpp as lib
    from llama_cpp import _utils

    for file in (_utils.outnull_file, _utils.errnull_file):  # the package opens them and never closes them
        atexit.register(file.close)
    silent: Callable[..., None] = lambda level, text, data: None  # noqa: E731
    _CALLBACKS.append(lib.llama_log_callback(silent))  # a reference: C calls it later
    lib.llama_log_set(_CALLBACKS[0], ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib
