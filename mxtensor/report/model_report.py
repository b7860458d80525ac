"""The quantization error of each layer: of its weight, with a plot by format, and of its output.

The error of an output is that of the layer by itself, and that with the errors of all layers before it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.weights import is_lookup
from ..core.arguments import MODULE, TENSOR, TEXT, Kind, check, described, instance
from ..core.called_layers import Copies, in_evaluation, layers_are_called, with_fresh_cache
from ..tensor.mxtensor import MXTensor

REFERENCE = instance(
    (nn.Module, Mapping), "the model before quantize_, or its state dict",
    lambda given: isinstance(given, nn.Module) or all(isinstance(name, str) for name in given),
)  # fmt: skip
VALUES = Kind(
    "a dense real torch.Tensor with values",
    lambda t: isinstance(t, Tensor) and t.layout is torch.strided and not t.is_complex() and not t.is_meta,
)
NAMES = Kind(
    "a list of names of parameters",
    lambda names: isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names),
)
ROWS = Kind(
    "a dictionary from labels to results of layer_errors",
    lambda given: (
        isinstance(given, Mapping)
        and all(
            isinstance(rows, Sequence) and all(isinstance(row, LayerError) for row in rows) for rows in given.values()
        )
    ),
)
FILE = instance((str, os.PathLike), "the path of a file", lambda path: bool(os.fspath(path)))


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB: ``10 * log10(sum(reference^2) / sum((reference - approximation)^2))``.

    Both have one shape and any float dtype; the sums are in float64. 6.02 dB are one bit of precision. ``inf`` if the
    two are equal, ``-inf`` if only the reference is zero, ``nan`` if either has a nan. Raises ValueError if the shapes
    differ, since broadcasting would compare the wrong values.
    """
    check("sqnr_db", "reference", reference, VALUES)
    check("sqnr_db", "approximation", approximation, VALUES)
    if reference.shape != approximation.shape:
        raise ValueError(f"shapes differ: reference {tuple(reference.shape)}, other {tuple(approximation.shape)}")
    wanted = reference.detach().double()
    signal = wanted.square().sum().item()
    noise = (wanted - approximation.detach().to(wanted)).square().sum().item()
    return decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """The ratio of two sums of squares in dB, with the special values of :func:`sqnr_db`."""
    if math.isnan(signal) or math.isnan(noise) or (math.isinf(signal) and math.isinf(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0 or noise == math.inf:
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))  # their ratio may be too small for a float


@dataclass(frozen=True)
class LayerError:
    """One quantized parameter, compared with the tensor that it was quantized from."""

    fqn: str
    """The name of the parameter in ``named_parameters()``."""
    format: str
    shape: tuple[int, ...]
    sqnr_db: float
    """SQNR of the dequantized values; see :func:`sqnr_db`."""
    max_abs_error: float
    """The largest absolute error, in the units of the weight."""
    bits_per_value: float
    """Stored bits per value, including every copy, scales and tails."""
    bytes_before: int
    """Bytes of the reference tensor."""
    bytes_after: int
    """Bytes of all codes and scales."""


def layer_errors(model: nn.Module, reference: nn.Module | Mapping[str, Tensor]) -> list[LayerError]:
    """One row per MXTensor parameter of ``model``, in the order of the model; a shared parameter has one row.

    ``reference``: the model before ``quantize_``, or its state dict; tensors are found by the name of the parameter.
    ``quantize_`` works in place, so make a ``copy.deepcopy(model)`` or a ``state_dict()`` first. Raises ValueError if
    the reference lacks a tensor, has it in another shape, or is quantized itself.
    """
    check("layer_errors", "model", model, MODULE)
    check("layer_errors", "reference", reference, REFERENCE)
    if isinstance(reference, nn.Module):
        reference = dict(reference.named_parameters(remove_duplicate=False))
    return [
        _layer_error(fqn, weight, reference.get(fqn))
        for fqn, weight in model.named_parameters()
        if isinstance(weight, MXTensor)
    ]


def _layer_error(fqn: str, weight: MXTensor, reference: Tensor | None) -> LayerError:
    if reference is None:
        raise ValueError(f"the reference has no tensor {fqn!r}; pass the model before quantize_, or its state dict")
    check("layer_errors", f"{fqn!r} of the reference", reference, TENSOR)
    if isinstance(reference, MXTensor):
        raise ValueError(
            f"{fqn!r} of the reference is quantized itself; quantize_ works in place, so copy.deepcopy the model before"
        )
    if weight.is_meta or reference.is_meta:
        of = "the model" if weight.is_meta else "the reference"
        raise ValueError(f"{fqn!r} of {of} is on the device meta and has no values; load the model, without offload")
    if reference.shape != weight.shape:
        raise ValueError(f"{fqn!r} has shape {tuple(weight.shape)}, the reference {tuple(reference.shape)}")
    with torch.no_grad():
        # float32, not the outer dtype: rounding the values to bfloat16 would add an error that is not the format's
        values = weight.dequantize(torch.float32)
        wanted = reference.detach().to(values.device)
        error = (wanted.double() - values).abs()
        return LayerError(
            fqn,
            weight.format.name,
            tuple(weight.shape),
            sqnr_db(wanted, values),
            error.max().item() if error.numel() else 0.0,
            weight.bits_per_value,
            wanted.numel() * wanted.dtype.itemsize,
            weight.nbytes,
        )


def short_names(fqns: Sequence[str]) -> list[str]:
    """The names without the module path that all of them share, and without a final ``.weight``."""
    check("short_names", "fqns", fqns, NAMES)
    paths = [fqn.removesuffix(".weight").split(".") for fqn in fqns]
    modules = [path[:-1] for path in paths]  # the last name stays, so that no name becomes empty
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))))
    return [".".join(path[shared:]) for path in paths]


# ---------------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True)
class OutputError:
    """The output of one quantized layer, compared with that of the layer before quantization."""

    fqn: str
    """The name of the weight in ``named_parameters()``."""
    alone_db: float
    """SQNR in dB if the layer gets the inputs of the model before quantization: the error of this layer alone."""
    total_db: float
    """SQNR in dB in the quantized model, whose inputs have the errors of the layers before."""


def output_errors(
    model: nn.Module,
    reference: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    done: Callable[[], object] = lambda: None,
) -> list[OutputError]:
    """One row per quantized linear layer of ``model`` that ran, in the order of the model.

    ``reference``: the model before ``quantize_``, another object, on the same device. ``inputs``: the keyword arguments
    of each call, such as ``{"input_ids": ids}``; both models run once for each, in evaluation mode. Memory holds the
    outputs of all quantized layers of one call. ``done`` is called after each. Stacked experts have no row. A layer
    that routing gives other rows in the two models has nan as its total. Raises ValueError if the reference lacks a
    layer, TypeError for inputs that are not dicts.
    """
    check("output_errors", "model", model, MODULE)
    check("output_errors", "reference", reference, MODULE)
    small = _quantized_layers(model)
    modules = dict(reference.named_modules())
    plain: dict[str, nn.Module] = {}
    for fqn, layer in small.items():
        path = fqn.rpartition(".")[0]
        if path not in modules or modules[path] is layer:
            raise ValueError(
                f"the reference has no layer {path!r} of its own; pass a copy.deepcopy of the model before"
            )
        plain[fqn] = modules[path]
    if isinstance(inputs, (Mapping, str)):
        raise TypeError(f"output_errors: inputs is {described(inputs)}; pass a list of dicts, such as [inputs] for one")
    sums = {fqn: [0.0, 0.0, 0.0] for fqn in small}  # squares of the output, of its error alone, and of that in total
    ran: set[str] = set()
    outputs: dict[str, list[Tensor]] = {fqn: [] for fqn in small}

    def before(fqn: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """The output of a layer before quantization, and that of the quantized one for the same input."""
        ran.add(fqn)
        sums[fqn][0] += _squares(out)
        sums[fqn][1] += _squares(small[fqn](*args, **kwargs) - out)
        outputs[fqn].append(out.clone())  # what follows may write into it

    def after(fqn: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """The output of the quantized layer in the quantized model, call by call."""
        ran.add(fqn)
        wanted = outputs[fqn].pop(0) if outputs[fqn] else None
        sums[fqn][2] += math.nan if wanted is None or wanted.shape != out.shape else _squares(out - wanted)

    for given in inputs:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"output_errors: inputs has {described(given)}; pass the keyword arguments of each call as a dict, "
                "such as {'input_ids': ids}"
            )
        for calls in outputs.values():
            calls.clear()
        with torch.no_grad(), in_evaluation(model, reference), layers_are_called():
            for whole, layers, hook in ((reference, plain, before), (model, small, after)):
                copies: Copies = {}
                with ExitStack() as hooks:
                    for fqn, layer in layers.items():
                        hooks.enter_context(layer.register_forward_hook(partial(hook, fqn), with_kwargs=True))
                    whole(**{name: with_fresh_cache(value, copies) for name, value in given.items()})
        done()
    return [
        OutputError(fqn, decibels(signal, alone), decibels(signal, total))
        for fqn, (signal, alone, total) in sums.items()
        if fqn in ran
    ]


def _squares(t: Tensor) -> float:
    return float(t.detach().double().square().sum())


def _quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name of the weight -> module, of linear layers; a module that is used twice has its first name."""
    found = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, MXTensor) and weight.dim() == 2 and not is_lookup(module):
            found[f"{path}.weight" if path else "weight"] = module
    return found


# ---------------------------------------------------------------------------------------------- the plot

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Okabe and Ito's palette, which is readable with every kind of color vision."""
MARKERS = "osD^vPX*"


def new_figure(caller: str) -> Any:
    """The class of matplotlib's figures, without pyplot: no global state, no display. Raises ImportError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: pip install 'mxtensor[plot]'") from error
    return Figure


def style_of(number: int) -> dict[str, Any]:
    """Color and marker of the line with this number; the second round gives each color another marker.

    Lines that are equal overlap; outlines leave both visible.
    """
    marker = MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
    return {"color": COLORS[number % len(COLORS)], "marker": marker, "markerfacecolor": "none"}


def light(axes: Any) -> None:
    """A light grid, and no lines at the top and on the right."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def file_of_plot(path: str | os.PathLike[str]) -> Path:
    """The file that matplotlib writes for a path, in a folder that exists: without a suffix it adds ``.png``.

    Raises IsADirectoryError for a folder, beside which it would write.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"plot: {path} is a folder; pass the name of a file, such as {path / 'plot.png'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path if path.suffix else path.with_name(f"{path.name}.png")


def plot_layer_errors(
    rows_by_format: Mapping[str, Sequence[LayerError]],
    path: str | os.PathLike[str],
    title: str = "Weight error by layer and format",
) -> Path:
    """Draw the SQNR of each layer, with one row of dots per layer and one color per format, and write it to ``path``.

    ``rows_by_format``: legend label -> the result of :func:`layer_errors` for that format; the legend adds the stored
    bits per value. The suffix of ``path`` selects the file type (png, svg, pdf; png if there is none); its folder is
    created. A layer without a finite SQNR has no dot. Returns the path. Raises ValueError if there is nothing to draw,
    IsADirectoryError for a folder, ImportError without matplotlib.
    """
    figure_of = new_figure("plot_layer_errors")
    check("plot_layer_errors", "rows_by_format", rows_by_format, ROWS)
    check("plot_layer_errors", "path", path, FILE)
    check("plot_layer_errors", "title", title, TEXT)
    fqns = list(dict.fromkeys(row.fqn for rows in rows_by_format.values() for row in rows))
    if not fqns:
        raise ValueError("no rows to plot: no model had an MXTensor parameter")
    position = {fqn: i for i, fqn in enumerate(fqns)}
    figure = figure_of(figsize=(10, 2.2 + 0.24 * len(fqns)), layout="constrained")
    axes = figure.add_subplot()
    for i, (label, rows) in enumerate(rows_by_format.items()):
        finite = [row for row in rows if math.isfinite(row.sqnr_db)]
        values = sum(math.prod(row.shape) for row in rows)
        bits = 8 * sum(row.bytes_after for row in rows) / max(values, 1)
        axes.plot(
            [row.sqnr_db for row in finite],
            [position[row.fqn] for row in finite],
            linestyle="",
            markersize=6.5,
            markeredgewidth=1.4,
            label=f"{label}, {bits:.3g} bits",
            **style_of(i),
        )
    axes.set_yticks(range(len(fqns)), short_names(fqns), fontsize=8)
    axes.set_ylim(len(fqns) - 0.4, -0.6)  # the first layer on top
    axes.set_xlabel("SQNR of the weights [dB], higher is better")
    light(axes)
    figure.suptitle(title, fontsize=13)
    figure.legend(loc="outside lower center", ncols=min(len(rows_by_format), 3), frameon=False)
    path = file_of_plot(path)
    figure.savefig(path, dpi=150)
    return path
