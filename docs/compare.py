"""What a block-scaled tensor can be asked to do, here and in torchao: ``python -m docs.compare`` (extra ``bench``).

Every case is a user's line of code on an MXFP8 tensor or linear layer on CPU, with the emulated kernels of both. It
returns whether the result is right; what it raises counts as a refusal.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TORCHAO = "0.18"


@dataclass(frozen=True)
class Package:
    """One side of the comparison."""

    tensor: Callable[[Tensor], Any]
    """Quantizes along the last dimension."""
    convert: Callable[[nn.Module], Any]
    """Quantizes the linear layers of a model in place."""
    train: Callable[[nn.Module], Any]
    """Makes the linear layers of a model train in MXFP8, in place."""


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same Gaussian values at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def linear(package: Package, inputs: int = 64, outputs: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A quantized linear layer with bias."""
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    package.convert(layer)
    return layer


def near(out: Tensor, wanted: Tensor) -> bool:
    """Within 10 % by norm: two MXFP8 operands cost about 4 %."""
    return bool((out.float() - wanted).norm() < 0.1 * wanted.norm())


def runs(layer: Any, x: Tensor) -> bool:
    """Whether the layer's result is near the product of the values its weight stands for."""
    return near(layer(x), F.linear(x.float(), layer.weight.dequantize().float(), layer.bias.float()))


def tiny(package: Package) -> bool:
    x = torch.full((1, 32), 2.0**-133, dtype=torch.bfloat16)
    return bool(package.tensor(x).dequantize().equal(x))


def grown(package: Package) -> bool:
    w = package.tensor(values(64, 64))
    return bool(torch.cat([w, w]).dequantize().equal(w.dequantize().repeat(2, 1)))


def loaded(package: Package) -> bool:
    layer, plain = linear(package), nn.Linear(64, 64, dtype=torch.bfloat16)
    layer.load_state_dict(plain.state_dict())
    return bool(layer.weight.dequantize().equal(package.tensor(plain.weight.detach()).dequantize()))


def learns(package: Package) -> bool:
    layer, x, grad = linear(package), values(32, 64).requires_grad_(), values(32, 64)
    layer(x).backward(grad)
    assert x.grad is not None
    return near(x.grad, grad.float() @ layer.weight.dequantize().float())


def transposed(package: Package) -> bool:
    w = package.tensor(values(64, 64))
    return bool(w.t().contiguous().dequantize().equal(w.dequantize().t().contiguous()))


def scaled(package: Package) -> bool:
    w, x, bias = package.tensor(values(64, 64)), values(32, 64), values(64)
    wanted = 0.5 * bias.float() + 2 * x.float() @ w.dequantize().float().t()
    return near(torch.addmm(bias, x, w.t(), beta=0.5, alpha=2), wanted)


def compiled(package: Package) -> bool:
    layer, x = linear(package), values(32, 64)
    return near(torch.compile(layer, fullgraph=True)(x), layer(x).float())


def trained(
    package: Package, rows: int = 32, inputs: int = 64, dtype: torch.dtype = torch.bfloat16, bias: bool = True
) -> bool:
    """Whether a training layer's result and gradients are near those of its high-precision products."""
    layer = nn.Linear(inputs, 96, bias, dtype=dtype)
    w, b = (p.detach().float() if p is not None else None for p in (layer.weight, layer.bias))
    x, grad = values(rows, inputs, dtype=dtype).requires_grad_(), values(rows, 96, dtype=dtype)
    package.train(layer)
    y = layer(x)
    y.backward(grad)
    assert w is not None and x.grad is not None and layer.weight.grad is not None
    right = near(y, F.linear(x.float(), w, b)) and near(x.grad, grad.float() @ w)
    return right and near(layer.weight.grad, grad.float().t() @ x.float())


def trained_compiled(package: Package) -> bool:
    layer, x = nn.Linear(64, 96, False, dtype=torch.bfloat16), values(32, 64)
    package.train(layer)
    return near(torch.compile(layer, fullgraph=True)(x), layer(x).float())


CASES: dict[str, Callable[[Package], Any]] = {
    "linear layer, all sizes multiples of 32": lambda p: runs(linear(p), values(32, 64)),
    "input features not a multiple of 32": lambda p: runs(linear(p, 72), values(32, 72)),
    "float16 model": lambda p: runs(linear(p, dtype=torch.float16), values(32, 64, dtype=torch.float16)),
    "non-contiguous 3-D input": lambda p: runs(linear(p), values(8, 4, 64).transpose(0, 1)),
    "`torch.compile(fullgraph=True)`": compiled,
    "gradient to the input of a frozen layer": learns,
    "`load_state_dict` of a bfloat16 checkpoint": loaded,
    "`copy.deepcopy`": lambda p: copy.deepcopy(linear(p)).weight.dequantize() is not None,
    "`torch.addmm` with alpha and beta": scaled,
    "`torch.einsum`": lambda p: torch.einsum("mk,nk->mn", values(32, 64), p.tensor(values(64, 64))).isfinite().all(),
    "`F.embedding`": lambda p: F.embedding(torch.tensor([1]), p.tensor(values(64, 64))).isfinite().all(),
    "`F.embedding_bag`": lambda p: F.embedding_bag(torch.tensor([[1, 2]]), p.tensor(values(64, 64))).isfinite().all(),
    "`w.split(32)`": lambda p: w_equal(p, lambda w: w.split(32)[1]),
    "`w[:, 32:]`": lambda p: w_equal(p, lambda w: w[:, 32:]),
    "`w.transpose(0, 1)`": lambda p: w_equal(p, lambda w: w.transpose(0, 1)),
    "`w.t().contiguous()`": transposed,
    "`w.to(torch.float32).dtype`": lambda p: p.tensor(values(64, 64)).to(torch.float32).dtype is torch.float32,
    "`torch.zeros_like(w)`": lambda p: not torch.zeros_like(p.tensor(values(64, 64))).any(),
    "`torch.cat([w, w])`": grown,
    "`w * 2`": lambda p: w_equal(p, lambda w: w * 2),
    "a block of bfloat16 subnormals keeps its values": tiny,
    "training: a layer without bias, all sizes multiples of 32": lambda p: trained(p, bias=False),
    "training: a layer with bias": trained,
    "training: 33 rows in a batch": lambda p: trained(p, 33, bias=False),
    "training: input features not a multiple of 32": lambda p: trained(p, 32, 72, bias=False),
    "training: float16 model": lambda p: trained(p, dtype=torch.float16, bias=False),
    "training: `torch.compile(fullgraph=True)`": trained_compiled,
}


def w_equal(package: Package, fn: Callable[[Any], Any]) -> bool:
    """Whether ``fn`` of the quantized tensor has the values of ``fn`` of the dequantized one."""
    w = package.tensor(values(64, 64))
    out = fn(w)
    return bool((out.dequantize() if hasattr(out, "dequantize") else out).equal(fn(w.dequantize())))


def verdict(case: Callable[[Package], Any], package: Package) -> str:
    """One of "yes", "wrong" and "raises X"."""
    try:
        return "yes" if bool(case(package)) else "wrong"
    except Exception as error:
        return f"raises {type(error).__name__}"


def here() -> Package:
    """This package."""
    import mxtensor as mx
    from mxtensor.convert.configs import recipe_of
    from mxtensor.tensor.quantize_as import quantize_as

    recipe = recipe_of("mxfp8")
    training = mx.recipe.MXFP8BlockScaling()
    return Package(
        lambda x: quantize_as(x, recipe),
        lambda model: mx.quantize_(model, recipe),
        lambda model: mx.quantize_(model, training),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """torchao warns and logs on import and where it cannot load its CUDA extensions."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def torchao_package() -> Package:
    """torchao's MXTensor. Raises ImportError where the compared version is not installed."""
    import torchao

    if not torchao.__version__.startswith(TORCHAO):
        raise ImportError(f"the comparison is with torchao {TORCHAO}, {torchao.__version__} is installed")
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    emulated, rceil = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
    activation = QuantizeTensorToMXKwargs(scaling_mode=rceil, kernel_preference=emulated)
    config = MXDynamicActivationMXWeightConfig(kernel_preference=emulated, scaling_mode=rceil)
    training = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    return Package(
        lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, 32, rceil, emulated, activation),
        lambda model: quantize_(model, config),
        lambda model: quantize_(model, training),
    )


def table() -> str:
    """The comparison as a Markdown table. Raises ImportError without torchao."""
    with quiet():
        sides = (here(), torchao_package())
        rows = [f"| {name} | {' | '.join(verdict(case, side) for side in sides)} |" for name, case in CASES.items()]
    return "\n".join([f"| on CPU | mxtensor | torchao {TORCHAO} |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
