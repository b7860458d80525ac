"""Wrong calls: every public callable, each argument in turn replaced by a value that is not meant.

A wrong call succeeds, or raises ValueError, TypeError or NotImplementedError with a sentence that says what was given.
``python -m tests.docs.wrong_calls`` prints the calls that do neither, and their number.
"""

import contextlib
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.arguments import described
from mxtensor.recipe.linear_recipe import TensorCasts
from mxtensor.report import model_report


class Odd:
    """A class that no argument wants."""


WRONG = {
    "None": lambda: None,
    "3": lambda: 3,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "2**62": lambda: 2**62,
    "10**30": lambda: 10**30,
    "1j": lambda: 1j,
    "True": lambda: True,
    "''": lambda: "",
    "'nonsense'": lambda: "nonsense",
    "b'x'": lambda: b"x",
    "[]": lambda: [],
    "[3, None]": lambda: [3, None],
    "()": lambda: (),
    "{}": lambda: {},
    "object": lambda: object(),
    "class": lambda: Odd,
    "Tensor class": lambda: torch.Tensor,
    "generator": lambda: (n for n in (3, 4)),
    "function": lambda: len,
    "numpy": lambda: np.ones((4, 64), np.float32),
    "int tensor": lambda: torch.arange(64),
    "bool tensor": lambda: torch.ones(4, 64, dtype=torch.bool),
    "complex tensor": lambda: torch.ones(4, 64, dtype=torch.complex64),
    "sparse tensor": lambda: torch.ones(4, 64).to_sparse(),
    "meta tensor": lambda: torch.ones(4, 64, device="meta"),
    "0-d tensor": lambda: torch.tensor(2.0),
    "empty tensor": lambda: torch.ones(0),
    "odd shape": lambda: torch.ones(3, 5, 2),
    "float64 tensor": lambda: torch.ones(4, 64, dtype=torch.float64),
    "MXTensor": lambda: mx.quantize(torch.ones(3, 7), "nvfp4"),
    "int64 dtype": lambda: torch.int64,
    "meta device": lambda: torch.device("meta"),
    "module": lambda: nn.Tanh(),
}
"""Label -> makes a value that hardly any argument means."""
SENSELESS = ("object", "class", "Tensor class", "generator", "1j", "b'x'", "sparse tensor")
"""Values that every argument must refuse, unless its row says that it takes anything."""

BANNED = re.compile(
    r"has no attribute|' object is not|unhashable|subscriptable|unsupported operand|NoneType' |not supported between|"
    r"must be real number|can't be used|got an unexpected|expected .* but got|expected to be in|"
    r"argument '.*' \(position|"
    r"cannot be interpreted|not iterable|INTERNAL ASSERT|python storage|not implemented for '|must have a value|"
    r"invalid combination|only integer|could not convert|invalid literal|bad operand"
)
"""Words of errors that come from inside Python or torch."""


@dataclass
class Row:
    """One public callable."""

    name: str
    make: object
    """() -> (function, the arguments of a right call)."""
    anything: tuple = ()
    """Arguments that take any object."""
    also: tuple = field(default=())
    """Classes of errors that torch raises for the same mistake with plain tensors."""


def tokens(value):
    """What a message may say of ``value``: one is enough."""
    found = {described(value)[:30], repr(value)[:30], str(value)[:30], type(value).__name__}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        found |= {str(tuple(value.shape)), str(list(value.shape)), str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        found |= {
            value.type(),
            f"on {value.device}",
            f"{value.dim()}-dimensional",
            f"has {value.dim()} dim",
            f"is on {value.device}",
        }
    if isinstance(value, torch.Tensor) and value.dtype is torch.int64:
        found.add(str(value.tolist())[:20])
    if isinstance(value, type):
        found.add(value.__name__)
    if value is None:
        found.add("got neither")
    if callable(value):
        found.add(getattr(value, "__name__", ""))
    if isinstance(value, (str, list, tuple, dict)) and not value:
        found |= {"()", "0-dimensional", "empty parameter list", "no rows"}
    if isinstance(value, (list, bytes)) or inspect.isgenerator(value):
        found.add("one of the params is int")
    return {str(t) for t in found if str(t)}


def judged(row, argument, label):
    """Why the wrong call is a fault; None if it is not."""
    function, right = row.make()
    value = WRONG[label]()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            function(**{**right, argument: value})
    except (ValueError, TypeError, NotImplementedError, *row.also) as error:
        text = str(error)
        if isinstance(error, (UnicodeError, re.error)):
            return f"{type(error).__name__}: {text}"
        if BANNED.search(text):
            return f"words from inside: {type(error).__name__}: {text}"
        if isinstance(error, OSError):  # a fact about a file
            return None
        said = {*tokens(value), f"has no {argument}", f"takes no {argument}", f"the {argument} has no"}
        if not any(token in text for token in said):
            return f"does not say what was given: {type(error).__name__}: {text}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if label in SENSELESS and argument not in row.anything:
        return "accepted"
    return None


def arguments(row):
    """The names of the arguments of a row: those of the signature and of the right call."""
    function, right = row.make()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]
    return list(dict.fromkeys([*named, *right]))


def calls(row):
    """(argument, label of the wrong value) of every wrong call of a row."""
    return [(argument, label) for argument in arguments(row) for label in WRONG]


# ---------------------------------------------------------------------------------------------- the public callables


def x(*shape):
    return torch.randn(*(shape or (64, 128)))


def plain(function, **right):
    """A row whose arguments can be shared by all calls."""
    return lambda: (function, dict(right))


def entered(manager):
    """``with manager(...)`` around a layer, under the signature of ``manager``."""

    def call(**given):
        with manager(**given):
            nn.functional.linear(torch.ones(4, 32), torch.ones(8, 32))

    call.__signature__ = inspect.signature(manager)
    return call


def module(kind, *calls_with, **right):
    """The constructor of a module, and then a call with what ``calls_with`` gives."""

    def call(**given):
        made = kind(**given)
        values = [p.detach() for p in made.parameters()]
        if calls_with and not any(p.is_meta for p in values):
            with torch.no_grad():
                made(*(make() for make in calls_with))

    call.__signature__ = inspect.signature(kind)
    return lambda: (call, dict(right))


def forward(kind, right, **options):
    """The call of a module."""

    def make():
        made = kind(**options)
        return made.forward, {name: value() for name, value in right.items()}

    return make


def method(owner, name, **right):
    """A method of the object that ``owner`` makes."""
    return lambda: (getattr(owner(), name), {key: value() for key, value in right.items()})


def recipe(kind):
    """The constructor of a recipe, and the casts that it describes."""

    def call(**given):
        kind(**given).linear_recipe()

    call.__signature__ = inspect.signature(kind)
    return plain(call)


def mxtensor():
    return mx.quantize(x(), "mxfp8")


def operand():
    return mxtensor().rowwise


def quantizer():
    return te.MXFP8Quantizer()


def components(**changes):
    w = mxtensor()
    return {"data": w.rowwise.data, "scale": w.rowwise.scale, "format": "mxfp8"} | changes


def constructor(**given):
    return mx.MXTensor(**given)


def product(function, **right):
    """A product with an MXTensor on the right, whose other operand is wrong."""
    return lambda: (function, {name: value() for name, value in right.items()})


def columns():
    return mx.quantize(torch.randn(64, 64), "mxfp8", orientation="both")


def report():
    done = mx.quantize_(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
    return model_report.layer_errors(done, {"0.weight": torch.randn(64, 64), "0.bias": torch.randn(64)})


FLOAT_RECIPES = [Row(f"recipe.{kind.__name__}", recipe(kind)) for kind in mx.recipe.RECIPES]
CONFIGS = [
    Row(kind.__name__, recipe(kind))
    for kind in (
        mx.ao.MXDynamicActivationMXWeightConfig,
        mx.ao.NVFP4DynamicActivationNVFP4WeightConfig,
        mx.ao.NVFP4WeightOnlyConfig,
        mx.ao.MXLinearConfig,
        mx.MXFP8Config,
    )
]
NN = te
SIZES = {"in_features": 64, "out_features": 32}
LAYOUTS = dict.fromkeys(("input_layouts", "output_layouts", "use_local_output"), None) | {"use_local_output": True}

ROWS = [
    Row("quantize", plain(mx.quantize, x=x(), format="mxfp8")),
    Row("quantize_", lambda: (mx.quantize_, {"model": nn.Sequential(nn.Linear(64, 64)), "config": "mxfp8"})),
    Row("get_format", plain(mx.get_format, name="mxfp8")),
    Row("to_mxfp8", plain(mx.to_mxfp8, x=x())),
    Row("Format.with_block", plain(mx.FORMATS["mxfp8"].with_block, block=16)),
    Row("Orientation.of", plain(mx.Orientation.of, value="both")),
    Row("Rounding.of", plain(mx.Rounding.of, value="nearest")),
    Row("FourOverSix.of", plain(mx.FourOverSix.of, value="mae")),
    Row("ScaleCalculationMode.of", plain(mx.ao.ScaleCalculationMode.of, value="rceil")),
    Row("KernelPreference.of", plain(mx.ao.KernelPreference.of, value="auto")),
    Row("DType.of", plain(te.DType.of, value="e4m3")),
    Row("Cast", plain(mx.Cast, format=mx.FORMATS["mxfp8"])),
    Row("Cast.of", plain(mx.Cast.of, format="mxfp8")),
    Row("TensorCasts", plain(TensorCasts)),
    Row("TensorCasts.of", plain(TensorCasts.of, cast="mxfp8")),
    Row("LinearRecipe", plain(mx.LinearRecipe, input=TensorCasts(), weight=TensorCasts(), grad=TensorCasts())),
    Row("LinearRecipe.inference", plain(mx.LinearRecipe.inference, weight="mxfp8")),
    Row(
        "MXTensor",
        lambda: (
            constructor,
            {
                "rowwise": operand(),
                "columnwise": None,
                "recipe": mxtensor().recipe,
                "dtype": torch.float32,
                "size": (64, 128),
                "stride": (128, 1),
                "offset": 0,
            },
        ),
    ),
    Row("MXTensor.to_mx", plain(mx.MXTensor.to_mx, data_hp=x())),
    Row("MXTensor.from_components", lambda: (mx.MXTensor.from_components, components(shape=(64, 128)))),
    Row("MXTensor.dequantize", method(mxtensor, "dequantize")),
    Row("MXTensor.to_dtype", method(mxtensor, "to_dtype", dtype=lambda: torch.bfloat16)),
    Row("autocast", plain(entered(mx.autocast)), ("amax_reduction_group",)),
    Row("quantized_model_init", plain(entered(te.quantized_model_init))),
    Row("kernels", plain(entered(mx.kernels), name="emulated")),
    Row("explain", plain(entered(mx.explain))),
    Row("explain().table", lambda: (_log().table, {})),
    *FLOAT_RECIPES,
    *CONFIGS,
    Row("MXLinearConfig.from_recipe_name", plain(mx.ao.MXLinearConfig.from_recipe_name, name="mxfp8_cublas")),
    Row("MXFP8GradientScaler", plain(mx.MXFP8GradientScaler, device="cpu", init_scale=2.0, growth_interval=3)),
    Row("MXFP8Linear", module(mx.MXFP8Linear, lambda: x(4, 64), **SIZES)),
    Row("MXFP8Linear.forward", forward(mx.MXFP8Linear, {"input": lambda: x(4, 64)}, **SIZES)),
    Row("nn.Linear", module(NN.Linear, lambda: x(4, 64), **SIZES)),
    Row("nn.Linear.forward", forward(NN.Linear, {"inp": lambda: x(4, 64)}, **SIZES)),
    Row("nn.LayerNormLinear", module(NN.LayerNormLinear, lambda: x(4, 64), **SIZES)),
    Row("nn.LayerNormLinear.forward", forward(NN.LayerNormLinear, {"inp": lambda: x(4, 64)}, **SIZES)),
    Row("nn.LayerNormMLP", module(NN.LayerNormMLP, lambda: x(4, 64), hidden_size=64, ffn_hidden_size=32)),
    Row(
        "nn.LayerNormMLP.forward",
        forward(NN.LayerNormMLP, {"inp": lambda: x(4, 64)}, hidden_size=64, ffn_hidden_size=32),
    ),
    Row("nn.GroupedLinear", module(NN.GroupedLinear, lambda: x(4, 64), lambda: [1, 3], num_gemms=2, **SIZES)),
    Row(
        "nn.GroupedLinear.forward",
        forward(NN.GroupedLinear, {"inp": lambda: x(4, 64), "m_splits": lambda: [1, 3]}, num_gemms=2, **SIZES),
    ),
    Row(
        "nn.DotProductAttention",
        module(NN.DotProductAttention, *[lambda: x(5, 2, 4, 32)] * 3, num_attention_heads=4, kv_channels=32),
    ),
    Row(
        "nn.DotProductAttention.forward",
        forward(
            NN.DotProductAttention,
            {f"{name}_layer": lambda: x(5, 2, 4, 32) for name in ("query", "key", "value")},
            num_attention_heads=4,
            kv_channels=32,
        ),
    ),
    Row(
        "nn.MultiheadAttention",
        module(NN.MultiheadAttention, lambda: x(5, 2, 64), hidden_size=64, num_attention_heads=4),
    ),
    Row(
        "nn.MultiheadAttention.forward",
        forward(NN.MultiheadAttention, {"hidden_states": lambda: x(5, 2, 64)}, hidden_size=64, num_attention_heads=4),
    ),
    Row(
        "nn.MultiheadAttention.from_torch",
        lambda: (NN.MultiheadAttention.from_torch, {"module": nn.MultiheadAttention(64, 4)}),
    ),
    Row(
        "nn.TransformerLayer",
        module(NN.TransformerLayer, lambda: x(5, 2, 64), hidden_size=64, ffn_hidden_size=96, num_attention_heads=4),
    ),
    Row(
        "nn.TransformerLayer.forward",
        forward(
            NN.TransformerLayer,
            {"hidden_states": lambda: x(5, 2, 64)},
            hidden_size=64,
            ffn_hidden_size=96,
            num_attention_heads=4,
        ),
    ),
    Row(
        "nn.TransformerLayer.from_torch",
        lambda: (NN.TransformerLayer.from_torch, {"module": nn.TransformerEncoderLayer(64, 4, 96, norm_first=True)}),
    ),
    Row("nn.Fp8Padding", module(NN.Fp8Padding, lambda: x(4, 64), lambda: [1, 3], num_gemms=2)),
    Row(
        "nn.Fp8Padding.forward",
        forward(NN.Fp8Padding, {"inp": lambda: x(4, 64), "m_splits": lambda: [1, 3]}, num_gemms=2),
    ),
    Row(
        "nn.Fp8Unpadding.forward",
        forward(NN.Fp8Unpadding, {"inp": lambda: x(32, 64), "m_splits": lambda: [1, 3]}, num_gemms=2),
    ),
    Row("nn.RotaryPositionEmbedding", module(NN.RotaryPositionEmbedding, lambda: 5, dim=16)),
    Row("nn.RotaryPositionEmbedding.forward", forward(NN.RotaryPositionEmbedding, {"max_seq_len": lambda: 5}, dim=16)),
    Row(
        "nn.apply_rotary_pos_emb",
        plain(NN.apply_rotary_pos_emb, t=x(5, 2, 4, 32), freqs=NN.RotaryPositionEmbedding(16)(5)),
    ),
    *(
        Row(kind.__name__, plain(kind))
        for kind in (
            te.MXFP8Quantizer,
            te.NVFP4Quantizer,
            te.Float8CurrentScalingQuantizer,
            te.Float8BlockQuantizer,
        )
    ),
    Row("MXQuantizer", plain(te.MXQuantizer, format="mxfp6_e2m3")),
    Row("Float8Quantizer", plain(te.Float8Quantizer, scale=torch.ones(1), amax=torch.zeros(1))),
    Row("Quantizer", plain(te.Quantizer, cast=mx.Cast.of("mxfp8"), rowwise=True, columnwise=True)),
    Row("Quantizer.of", plain(te.MXQuantizer.of, cast=mx.Cast.of("mxfp8"), rowwise=True, columnwise=True)),
    Row("Quantizer.quantize", method(quantizer, "quantize", x=x)),
    Row("Quantizer()", method(quantizer, "__call__", x=x)),
    Row("Quantizer.update_quantized", method(quantizer, "update_quantized", src=x, dst=lambda: quantizer()(x()))),
    Row("Quantizer.make_empty", method(quantizer, "make_empty", shape=lambda: (64, 64))),
    Row("Quantizer.set_usage", method(quantizer, "set_usage")),
    Row("Quantizer.is_quantizable", method(quantizer, "is_quantizable", x=x), ("x",)),  # the answer is False
    Row("general_gemm", plain(te.general_gemm, A=x(), B=x()), ("workspace",)),
    Row(
        "optim.MasterWeights",
        lambda: (
            mx.optim.MasterWeights,
            {
                "optimizer_class": torch.optim.SGD,
                "params": [nn.Parameter(columns())],
            },
        ),
    ),
    Row("optim.AdamW", lambda: (mx.optim.AdamW, {"params": [nn.Parameter(columns())], "master_weights_for": "all"})),
    Row("optim.SGD.step", lambda: (mx.optim.SGD([nn.Parameter(columns())], lr=0.1).step, {})),
    Row(
        "optim.SGD.add_param_group",
        lambda: (
            mx.optim.SGD([nn.Parameter(columns())], lr=0.1).add_param_group,
            {"param_group": {"params": [nn.Parameter(columns())]}},
        ),
    ),
    Row(
        "optim.SGD.load_state_dict",
        lambda: (_loading, {"state_dict": mx.optim.SGD([nn.Parameter(columns())], lr=0.1).state_dict()}),
    ),
    Row(
        "checkpoint.Writer",
        lambda: (lambda path: mx.checkpoint.Writer(path), {"path": Path(tempfile.gettempdir()) / "w"}),
    ),
    Row("checkpoint.Reader", lambda: (lambda path: mx.checkpoint.Reader(path), {"path": tempfile.gettempdir()})),
    Row("checkpoint.latest", lambda: (mx.checkpoint.latest, {"folder": "."}), also=(FileNotFoundError,)),
    Row("parallel.ColwiseParallel", plain(mx.parallel.ColwiseParallel, **LAYOUTS)),
    Row("parallel.RowwiseParallel", plain(mx.parallel.RowwiseParallel, **LAYOUTS)),
    Row("parallel.share_amax", plain(mx.parallel.share_amax, model=nn.Linear(2, 2))),
    Row("parallel.ExpertParallel", plain(mx.parallel.ExpertParallel, quantize_combined=False)),
    Row("report.sqnr_db", plain(model_report.sqnr_db, reference=x(), approximation=x())),
    Row(
        "report.layer_errors",
        lambda: (
            model_report.layer_errors,
            {
                "model": mx.quantize_(nn.Sequential(nn.Linear(64, 64)), "mxfp8"),
                "reference": {"0.weight": torch.randn(64, 64)},
            },
        ),
    ),
    Row("report.short_names", plain(model_report.short_names, fqns=["a.b.weight", "a.c.weight"])),
    Row("monitor", lambda: (mx.monitor, {"model": nn.Linear(64, 64), "every": 10})),
    Row("Monitor.plot", lambda: (_monitored().plot, {"path": "monitor.png", "figure": "saturated", "title": "title"})),
    Row("Monitor.to_tensorboard", lambda: (_monitored().to_tensorboard, {"writer": _Writer(), "step": 3})),
    Row("report.plot_layer_errors", lambda: (_plotted, {"rows_by_format": {"mxfp8": report()}, "title": "title"})),
]
"""Every public callable."""


def _log():
    with mx.explain() as log:
        nn.functional.linear(x(4, 128), mxtensor())
    return log


class _Writer:
    def add_scalar(self, tag, value, step):
        """What a SummaryWriter does with a figure."""


def _monitored():
    net = mx.quantize_(nn.Linear(64, 64), mx.recipe.MXFP8BlockScaling())
    with mx.monitor(net) as monitor:
        net(x(4, 64)).sum().backward()
    return monitor


def _loading(state_dict):
    mx.optim.SGD([nn.Parameter(columns())], lr=0.1).load_state_dict(state_dict)


def _plotted(rows_by_format, path=None, title=""):
    with tempfile.TemporaryDirectory() as folder:
        model_report.plot_layer_errors(rows_by_format, Path(folder) / "p.png" if path is None else path, title)


def main():
    os.chdir(tempfile.mkdtemp())  # some calls write a file
    only, counts, total = sys.argv[1:], Counter(), 0
    for row in ROWS:
        if only and not any(word in row.name for word in only):
            continue
        for argument, label in calls(row):
            total += 1
            why = judged(row, argument, label)
            if why is not None:
                counts[row.name] += 1
                print(f"{row.name}({argument}={label}): {why[:230]}".replace("\n", " "), flush=True)
    print(f"{total} calls, {sum(counts.values())} faults", dict(counts))


if __name__ == "__main__":
    main()
