"""Contenders of torchao and gemlite, beside our own.

If a library is not installed, its contenders raise ImportError, and the record names it under ``failed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cuda import layer_of, rotate_inputs
from .harness import Prepare, Work

Fn = Callable[[Any], Any]


def _require_torchao() -> None:
    """Raise ImportError if torchao is not installed, before another error can hide that."""
    import torchao  # noqa: F401


def eager(make: Callable[[], Fn], inputs: Sequence[Any]) -> Prepare:
    """The work that calls the function of ``make()`` on the rotated inputs."""

    def prepare() -> Work:
        _require_torchao()
        return rotate_inputs(inputs, make())()

    return prepare


def compiled(make: Callable[[], Fn], inputs: Sequence[Any]) -> Prepare:
    """``eager`` with a function that ``torch.compile`` compiles for these static shapes."""

    def prepare() -> Work:
        _require_torchao()
        torch._dynamo.reset()
        return rotate_inputs(inputs, torch.compile(make(), fullgraph=True, dynamic=False))()

    return prepare


# ---------------------------------------------------------------------------------------------- casts


def torchao_cast(x: Tensor, elem: Any) -> Any:
    """torchao's own cast of ``x`` to an element dtype, or to "nvfp4"."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if elem == "nvfp4":
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    return MXTensor.to_mx(x, elem, 32)


def cast(elem: Any, scaling: str) -> Callable[[], Fn]:
    """torchao's cast along the last dimension. ``scaling`` does not apply to NVFP4, which has one scale rule."""

    def make() -> Fn:
        if elem == "nvfp4":
            return lambda x: torchao_cast(x, elem)
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        mode = ScaleCalculationMode(scaling)
        return lambda x: MXTensor.to_mx(x, elem, 32, scaling_mode=mode)

    return make


def cast_columns(elem: Any, scaling: str) -> Callable[[], Fn]:
    """torchao's cast along the first dimension, as a cast of the transpose."""

    def make() -> Fn:
        along_rows = cast(elem, scaling)()
        return lambda x: along_rows(x.t().contiguous())

    return make


def triton_columns() -> Fn:
    """torchao's own Triton kernel for the cast along the first dimension (e4m3, rceil)."""
    from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim1

    return lambda x: triton_to_mxfp8_dim1(x, inner_block_size=32)


def dequantizing(elem: Any, inputs: Sequence[Tensor], run: Callable[..., Prepare]) -> Prepare:
    """torchao's dequantize of the cast inputs, where ``run`` is ``eager`` or ``compiled``."""

    def prepare() -> Work:
        _require_torchao()
        quantized = [torchao_cast(x, elem) for x in inputs]
        return run(lambda: lambda q: q.dequantize(torch.bfloat16), quantized)()

    return prepare


CASTS: dict[str, Any] = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp4_e2m1": torch.float4_e2m1fn_x2, "nvfp4": "nvfp4"}
"""Our format -> torchao's element dtype, or "nvfp4", which is a separate class in torchao."""


def cast_contenders(format: str, work: str, inputs: Sequence[Tensor], compile: bool) -> dict[str, Prepare]:
    """torchao's contenders for the work of one of our rows; empty if torchao has no such cast."""
    if format not in CASTS:
        return {}
    elem, mx = CASTS[format], CASTS[format] != "nvfp4"
    found: dict[str, Prepare] = {}
    if work == "dequantize":
        found["torchao"] = dequantizing(elem, inputs, eager)
        if compile:
            found["torchao compiled"] = dequantizing(elem, inputs, compiled)
        return found
    if work == "rowwise":
        found["torchao"] = eager(cast(elem, "rceil"), inputs)
        if compile:
            found["torchao compiled"] = compiled(cast(elem, "rceil"), inputs)
            if mx:
                found["torchao compiled, floor"] = compiled(cast(elem, "floor"), inputs)
    if work == "columnwise" and elem is torch.float8_e4m3fn:
        found["torchao"] = eager(cast_columns(elem, "rceil"), inputs)
        if compile:
            found["torchao compiled"] = compiled(cast_columns(elem, "rceil"), inputs)
            found["torchao Triton"] = eager(triton_columns, inputs)
    return found


# ---------------------------------------------------------------------------------------------- linear layers


def mx_linear(elem: Any) -> Callable[[nn.Module], Any]:
    """A function that applies torchao's MX inference configuration, with the emulated product (no Blackwell)."""

    def convert(model: nn.Module) -> Any:
        from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        config = MXDynamicActivationMXWeightConfig(
            activation_dtype=elem, weight_dtype=elem, kernel_preference=KernelPreference.EMULATED
        )
        return quantize_(model, config)

    return convert


def float8_linear(granularity: str) -> Callable[[nn.Module], Any]:
    """A function that applies torchao's dynamic float8 configuration, ``PerTensor`` or ``PerRow``."""

    def convert(model: nn.Module) -> Any:
        from torchao import quantization as q

        return q.quantize_(model, q.Float8DynamicActivationFloat8WeightConfig(granularity=getattr(q, granularity)()))

    return convert


LINEARS: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "torchao mxfp8": (mx_linear(torch.float8_e4m3fn), True),
    "torchao mxfp4": (mx_linear(torch.float4_e2m1fn_x2), False),
    "torchao float8_tensor": (float8_linear("PerTensor"), True),
    "torchao float8_row": (float8_linear("PerRow"), True),
}
"""Contender -> (conversion of a model, whether it is also timed under ``torch.compile``)."""


def linear(convert: Callable[[nn.Module], Any], pairs: Sequence[tuple[Tensor, Tensor]], compile: bool) -> Prepare:
    """The work of torchao's linear layers on the rotated pairs (x, weight)."""

    def prepare() -> Work:
        _require_torchao()
        converted = []
        for x, weight in pairs:
            model = nn.Sequential(layer_of(weight.clone()))  # torchao converts the children of a module, not the module
            convert(model)
            converted.append((x, model[0].weight))
        return (compiled if compile else eager)(lambda: lambda pair: F.linear(*pair), converted)()

    return prepare


def torchao_linear(weight: Tensor, elem: Any) -> Fn:
    """torchao's emulated linear layer with weight and activation in one MX format."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization.quantize_.common import KernelPreference

    kwargs = QuantizeTensorToMXKwargs(elem_dtype=elem, block_size=32, kernel_preference=KernelPreference.EMULATED)
    w = MXTensor.to_mx(weight, elem, 32, kernel_preference=KernelPreference.EMULATED, act_quant_kwargs=kwargs)
    return lambda x: F.linear(x, w)


# ---------------------------------------------------------------------------------------------- training


def mx_training(model: nn.Module) -> Any:
    """Apply torchao's MXFP8 training configuration, with the emulated product (no Blackwell)."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    return quantize_(model, config, filter_fn=lambda module, fqn: isinstance(module, nn.Linear))


def float8_training(recipe: str) -> Callable[[nn.Module], Any]:
    """A function that applies torchao's float8 training recipe ``tensorwise`` or ``rowwise``."""

    def convert(model: nn.Module) -> Any:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))

    return convert


TRAINING: dict[str, Callable[[nn.Module], Any]] = {
    "torchao float8 tensorwise": float8_training("tensorwise"),
    "torchao float8 rowwise": float8_training("rowwise"),
    "torchao mxfp8": mx_training,
}
"""Contender -> conversion of a model."""


# ---------------------------------------------------------------------------------------------- decoding

Calls = list[Work]


def gemlite_mxfp(bits: int, dynamic: bool) -> Callable[[Sequence[Tensor], Tensor], Calls]:
    """The calls of gemlite's MX layers with these weights on ``x``. gemlite tunes a layer at its first call."""

    def make(weights: Sequence[Tensor], x: Tensor) -> Calls:
        from gemlite import helper

        kind = helper.A8W8_MXFP_dynamic if dynamic else helper.A16W8_MXFP if bits == 8 else helper.A16W4_MXFP
        layers = []
        for weight in weights:
            layers.append(kind(device="cuda:0", dtype=torch.bfloat16).from_linear(layer_of(weight.clone())))
        return [lambda layer=layer: layer(x) for layer in layers]  # type: ignore[misc]

    return make


def torchao_mx(elem: Any) -> Callable[[Sequence[Tensor], Tensor], Calls]:
    """The calls of torchao's compiled MX inference layers, with the emulated product (no Blackwell)."""

    def make(weights: Sequence[Tensor], x: Tensor) -> Calls:
        _require_torchao()
        converted = []
        for weight in weights:
            model = nn.Sequential(layer_of(weight.clone()))
            mx_linear(elem)(model)
            converted.append(model[0].weight)
        torch._dynamo.reset()
        run = torch.compile(F.linear, fullgraph=True, dynamic=False)
        return [lambda w=w: run(x, w) for w in converted]  # type: ignore[misc]

    return make


DECODE: dict[str, Callable[[Sequence[Tensor], Tensor], Calls]] = {
    "gemlite mxfp8-weight-only": gemlite_mxfp(8, False),
    "gemlite mxfp4-weight-only": gemlite_mxfp(4, False),
    "gemlite mxfp8": gemlite_mxfp(8, True),
    "torchao mxfp8, compiled": torchao_mx(torch.float8_e4m3fn),
}
"""Contender -> the function of (weights, x) that returns one call for each weight."""


# ---------------------------------------------------------------------------------------------- a model


def llama(**sizes: Any) -> Any:
    """transformers' ``LlamaConfig(**sizes)`` with random weights: in bfloat16, on the default device, for inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
