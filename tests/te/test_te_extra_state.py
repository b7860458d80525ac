"""State dicts that TransformerEngine saved: its modules have extra states, empty or with amax histories."""

import dataclasses
import enum
import io
import pickle
import sys
import types
import typing

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import DelayedScaling, Format
from mxtensor.te.extra_state import product_states

EMPTY = torch.empty(0, dtype=torch.uint8)
STEPS = 6


MODULE = "transformer_engine.common.recipe"


class _FormatHelper(typing.NamedTuple):
    max_fwd: float
    max_bwd: float


class Formats(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclasses.dataclass
class Delayed:
    margin: int = 0
    fp8_format: Formats = Formats.HYBRID
    amax_compute_algo: typing.Any = "max"


for kind in (_FormatHelper, Formats, Delayed):
    kind.__module__ = MODULE


def as_bytes(state):
    """A pickle that names classes of TransformerEngine, which is not there when it is read."""
    module = types.ModuleType(MODULE)
    vars(module).update({kind.__name__: kind for kind in (_FormatHelper, Formats, Delayed)})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("transformer_engine", "transformer_engine.common"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, MODULE, module)
        data = pickle.dumps(state)
    assert MODULE.encode() in data
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def of_passes(amaxes, maxima, length, margin):
    """The scales and the history (length, n) that TransformerEngine has after passes with these amaxes (passes, n)."""
    history, scale = torch.zeros(length, amaxes.shape[1]), torch.ones(amaxes.shape[1])
    for amax in amaxes:
        history[0] = amax
        largest = history.amax(0)
        scale = torch.where(largest > 0, maxima / largest / 2.0**margin, scale)
        history = history.roll(-1, 0)
        history[0] = 0
    return scale, history


def trained(layer, recipe, sizes):
    """Steps whose inputs and gradients have these sizes; the amaxes (steps, 3) of each product."""
    found = [[] for _ in range(2)]
    for size in sizes:
        with mx.autocast(recipe=recipe):
            y = layer(size * torch.randn(32, 64))
        y.backward(size * torch.randn(y.shape))
        for amaxes, product in zip(found, layer._products, strict=False):
            amaxes.append(product.delayed.record.clone())
    return [torch.stack(amaxes) for amaxes in found if amaxes]


def saved(products, recipe, length):
    columns = {"fwd": (0, 1, None), "bwd": (2, None)}
    state = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": len(products)}}
    for (key, order), maximum in zip(columns.items(), recipe.fp8_format.value, strict=True):
        amaxes = [amax[:, i] if i is not None else 0 * amax[:, 0] for amax in products for i in order]
        state[f"scale_{key}"], state[f"amax_history_{key}"] = of_passes(
            torch.stack(amaxes, 1), maximum, length, recipe.margin
        )
    return as_bytes(state)


@pytest.mark.parametrize(
    ("make", "ours", "theirs"),
    [
        (lambda: te.Linear(64, 32), DelayedScaling(amax_history_len=4), Delayed()),
        (lambda: te.LayerNormMLP(64, 64), DelayedScaling(amax_history_len=3, margin=2), Delayed(margin=2)),
        (
            lambda: te.LayerNormLinear(64, 32),
            DelayedScaling(amax_history_len=8, fp8_format=Format.E4M3),
            Delayed(fp8_format=Formats.E4M3),
        ),
        (lambda: te.Linear(64, 32), DelayedScaling(amax_history_len=1), Delayed()),
        (
            lambda: te.Linear(64, 32),
            DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
            Delayed(amax_compute_algo=dataclasses.replace),
        ),
    ],
    ids=["hybrid", "two products", "E4M3", "one row", "a function"],
)
@pytest.mark.parametrize("rising", [False, True])
def test_histories_of_delayed_scaling_go_on(make, ours, theirs, rising):
    layer, other = make(), make()
    sizes = [4.0 ** (i if rising else -i) for i in range(STEPS)]
    products = trained(layer, ours, sizes)
    data = saved(products, theirs, ours.amax_history_len)
    state = {key: value for key, value in layer.state_dict().items() if key != "_extra_state"}
    assert str(other.load_state_dict(state | {"_extra_state": data})) == "<All keys matched successfully>"
    if ours.amax_compute_algo == "max":  # a pass without gradients has the scales that are in the state
        x = 1e-3 * torch.randn(32, 64)
        with mx.autocast(recipe=ours), torch.no_grad():
            layer(x), other(x)
        assert len(other._products) == len(products)
        for mine, amaxes in zip(other._products, products, strict=True):
            largest = amaxes[-ours.amax_history_len :].amax(0) * 2.0**ours.margin
            torch.testing.assert_close(mine.delayed.amax, largest)
    for seed in range(3):  # each drops another row
        torch.manual_seed(seed)
        trained(layer, ours, [0.01])
        torch.manual_seed(seed)
        trained(other, ours, [0.01])
        for a, b in zip(layer._products, other._products, strict=True):
            torch.testing.assert_close(a.delayed.amax, b.delayed.amax, rtol=1e-6, atol=0)


STATES = {
    "empty": {},
    "before the first pass": {"recipe": Delayed(), "extra_fp8_variables": {}},
    "another recipe": {"recipe": Formats, "extra_fp8_variables": {"num_gemms": 1}},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_without_histories_has_none(name):
    assert product_states("Linear", as_bytes(STATES[name]) if STATES[name] else EMPTY) == {}
    for state in (None, {}, {"extra_fp8_variables": {}}):
        data = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
        assert product_states("Linear", data) == {}


def test_modules_without_a_state_here_load_theirs():
    layer = te.TransformerLayer(
        32, 64, 4, layer_type="decoder", output_layernorm=True, qk_norm_type="L2Normalization", normalization="RMSNorm"
    )
    state = layer.state_dict()
    theirs = (te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.DotProductAttention)
    names = [name for name, module in layer.named_modules() if isinstance(module, theirs) or name.endswith("norm")]
    assert len(names) == 5 + 6 + 2
    state |= {f"{name}._extra_state": EMPTY for name in names}
    old = "self_attention.core_attention._extra_state"
    for keys in (state, {k.replace(old, old.replace("_extra", "fused_attention._extra")): v for k, v in state.items()}):
        assert str(layer.load_state_dict(keys)) == "<All keys matched successfully>"


class Caller:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize(
    "data",
    [
        torch.tensor(list(b"\x80\x04pickle"), dtype=torch.uint8),
        torch.zeros(3),
        io.BytesIO(b"older than TransformerEngine 1"),
        torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": torch.ones(3)})), dtype=torch.uint8),
        torch.frombuffer(bytearray(pickle.dumps(Caller())), dtype=torch.uint8),
    ],
    ids=["damaged", "float", "a file", "no histories", "a call"],
)
def test_other_states_are_an_error_and_run_no_code(data, capsys):
    layer = te.Linear(64, 32)
    with pytest.raises(ValueError, match=r"neither of this package nor of TransformerEngine.*remove the keys"):
        layer.load_state_dict(layer.state_dict() | {"_extra_state": data})
    assert capsys.readouterr().out == ""
