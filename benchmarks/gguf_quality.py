"""llama.cpp's formats as contenders of ``benchmarks.quality``: its own quantizer, and what its files make of a model.

Needs gguf and ``llama-cpp-python`` (``pip install 'mxtensor[peers]'``), which pip builds by CMake and a C++ compiler.
The values of a file are put back into a copy of the model, so that all formats are run by the same code.
"""

from __future__ import annotations

import copy
import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama_cpp_peer import library, write_gguf

TYPES = {
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
    options.ftype, options.nthread = TYPES[name], torch.get_num_threads()
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
