"""llama.cpp as a contender: a model as a GGUF file, steps of decoding it, its own quantizer and what its files hold.

Needs gguf and ``llama-cpp-python`` (``pip install 'mxtensor[peers]'``), which pip builds by CMake and a C++ compiler.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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


# ---------------------------------------------------------------------------------------------- its quantizer

PRESETS = {
    "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "Q4_0": 2, "MXFP4": 2,
}  # fmt: skip
"""Names of llama.cpp's presets -> members of ``enum llama_ftype``."""
GGML_MXFP4 = 39
"""``GGML_TYPE_MXFP4`` of ``enum ggml_type``. llama.cpp's preset of this name quantizes experts only."""


def quantize(source: Path, target: Path, name: str) -> Path:
    """Quantize a GGUF file by llama.cpp's quantizer to the preset ``name``. Returns ``target``.

    Raises RuntimeError if llama.cpp refuses it, ImportError without llama-cpp-python.
    """
    lib = library()
    options = lib.llama_model_quantize_default_params()
    options.ftype, options.nthread = PRESETS[name], torch.get_num_threads()
    if name == "MXFP4":  # every matrix, the embedding too: there is no preset of it for a dense model
        kinds = (lib.llama_cpp.llama_model_tensor_override * 2)()
        kinds[0].pattern, kinds[0].type = rb".*\.weight", GGML_MXFP4
        options.tt_overrides = ctypes.cast(kinds, type(options.tt_overrides))
        options.token_embedding_type = options.output_tensor_type = GGML_MXFP4
    status = lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status} for {name}")
    return target


def values_of(path: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of a GGUF file of a Llama by transformers' names, in float32."""
    import gguf

    config, reader = model.config, gguf.GGUFReader(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for name, parameter in model.named_parameters():
        tensor = stored[str(names.get_name(name, (".weight", ".bias")))]
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        if ".q_proj." in name or ".k_proj." in name:
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        found[name] = value
    return found


def quantized(model: Any, folder: Path, name: str) -> tuple[Any, float, str]:
    """A copy of a Llama with the values of the preset ``name``, its bits per value, and the types of its matrices."""
    import gguf

    source = folder / "model.F32.gguf"
    if not source.exists():
        write_gguf(model, source, "F32")
    target = quantize(source, folder / f"model.{name}.gguf", name)
    small = copy.deepcopy(model)
    values = values_of(target, model)
    for parameter_name, parameter in small.named_parameters():
        parameter.data.copy_(values[parameter_name])
    tensors = gguf.GGUFReader(target).tensors
    bits = 8 * sum(int(t.n_bytes) for t in tensors) / sum(math.prod(map(int, t.shape)) for t in tensors)
    kinds = dict.fromkeys(sorted(t.tensor_type.name for t in tensors if len(t.shape) > 1))
    target.unlink()
    return small, bits, ", ".join(kinds)
