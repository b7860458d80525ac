"""AMD Quark: MXFP4 and MXFP6, ``weight`` U8 with ``weight_scale`` U8 (E8M0).

The configuration names the element; the bytes that one scale covers have to agree with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..core.arguments import described
from .layout import (
    Layout,
    Written,
    beside,
    columns_of_blocks,
    companions,
    float8_weight,
    format_of_inputs,
    weight,
)
from .reading import Checkpoint, Entry

NAME = "quark"
ENDS = ("weight", "weight_scale")
FORMATS_BY_DTYPE = {
    "fp4": "mxfp4_e2m1",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp8_e4m3": "mxfp8_e4m3",
}
DTYPES = {format: dtype for dtype, format in FORMATS_BY_DTYPE.items() if dtype != "fp8_e4m3"}


def _dtype_of(checkpoint: Checkpoint, module: str) -> str:
    """Quark's name of the element of a module's weight. Raises ValueError for a configuration without one."""
    quantization = checkpoint.quantization
    layers = quantization.get("layer_quant_config")
    config = layers.get(module) if isinstance(layers, dict) else None
    config = config or quantization.get("global_quant_config")
    cast = config.get("weight") if isinstance(config, dict) else None
    if isinstance(cast, list):
        cast = cast[0] if cast else None
    dtype = cast.get("dtype") if isinstance(cast, dict) else None
    if not isinstance(dtype, str) or dtype not in FORMATS_BY_DTYPE:
        raise ValueError(
            f"{checkpoint.path}, module {module}: the configuration gives the weight the dtype {described(dtype)}; "
            f"supported are {', '.join(FORMATS_BY_DTYPE)}"
        )
    return dtype


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for module, names in companions(checkpoint, "weight", "weight_scale"):
        format, dtype = FORMATS_BY_DTYPE[_dtype_of(checkpoint, module)], checkpoint.dtype
        packed = checkpoint.tensors[names[0]].dtype == "U8"
        build = partial(weight, format=format, dtype=dtype) if packed else partial(float8_weight, dtype=dtype)
        entries[names[0]] = Entry(names, build)
    return entries


def _cast(format: str, dynamic: bool) -> dict[str, Any]:
    return {
        "dtype": DTYPES[format], "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "is_dynamic": dynamic,
        "scale_format": "e8m0", "scale_calculation_mode": "even", "symmetric": None, "round_method": "half_even",
        "scale_type": "float", "observer_cls": "PerBlockMXObserver", "is_scale_quant": False, "zero_point_type": None,
        "mx_element_dtype": None,
    }  # fmt: skip


def _config(written: Written) -> dict[str, Any]:
    kinds = {(recipe.stored.format.name, format_of_inputs(recipe)) for recipe in written.weights.values()}
    if len(kinds) > 1:
        raise NotImplementedError(
            f"the layout quark is written with one format in a checkpoint, got {sorted(map(str, kinds))}: pass format="
        )
    format, activation = kinds.pop()
    inputs = _cast(activation, dynamic=True) if activation in DTYPES else None
    casts = {"weight": _cast(format, dynamic=False), "input_tensors": inputs, "output_tensors": None, "bias": None}
    quantization = {
        "quant_method": "quark", "global_quant_config": casts, "layer_quant_config": {}, "layer_type_quant_config": {},
        "exclude": written.skipped, "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip
    return {"config.json": {"quantization_config": quantization}}


QUARK: Layout = Layout(
    NAME,
    "AMD Quark; vLLM and SGLang read it",
    detect=lambda checkpoint: checkpoint.method == "quark",
    read=_read,
    write=lambda name, t: beside(name, t, QUARK, DTYPES, *ENDS),
    whole=columns_of_blocks,
    config=_config,
    activation=lambda recipe, every: found if (found := format_of_inputs(recipe)) in DTYPES else None,
    scales=ENDS[1:],
    formats=", ".join(DTYPES),
)
