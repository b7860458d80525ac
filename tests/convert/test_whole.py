"""quantize_ checks every weight before it changes one; what fails later leaves a usable model; originals are freed."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.convert import changes, training
from mxtensor.training.training_weight import TrainingWeight
from tests.helpers.compare import same_bytes

RECIPE = mx.recipe.MXFP8BlockScaling()
CONFIGS = ["mxfp8", "nvfp4-weight-only", RECIPE, mx.recipe.DelayedScaling()]


def net(layers=4):
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


def frozen(t):
    return nn.Parameter(t, requires_grad=False)


UNFIT = {
    "int64": (lambda: frozen(torch.randint(9, (64, 64))), TypeError, "2.weight is int64; weights are float32"),
    "uint8": (lambda: frozen(torch.randint(9, (64, 64)).byte()), TypeError, "2.weight is uint8"),
    "bool": (lambda: frozen(torch.randn(64, 64) > 0), TypeError, "2.weight is bool"),
    "complex": (lambda: frozen(torch.randn(64, 64, dtype=torch.complex64)), TypeError, "2.weight is complex64"),
    "float8": (lambda: frozen(torch.randn(64, 64).to(torch.float8_e4m3fn)), TypeError, "2.weight is float8_e4m3fn"),
    "sparse": (lambda: frozen(torch.randn(64, 64).to_sparse()), ValueError, "2.weight is sparse_coo"),
    "vector": (lambda: frozen(torch.randn(64)), ValueError, r"2.weight has the shape \(64,\)"),
    "scalar": (lambda: frozen(torch.randn(())), ValueError, r"2.weight has the shape \(\)"),
    "lazy": (lambda: nn.UninitializedParameter(), ValueError, "2.weight has no values yet"),
    "freed": (lambda: freed(), ValueError, "the memory of 2.weight is freed"),
}


def freed():
    weight = nn.Parameter(torch.randn(64, 64))
    weight.data.untyped_storage().resize_(0)
    return weight


def state_of(model):
    """Everything of a model that quantize_ could change."""
    parameters = {name: (p, id(p), dict(vars(p))) for name, p in model.named_parameters(remove_duplicate=False)}
    hooks = [(set(m.__dict__), len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks)) for m in model.modules()]
    return parameters, hooks


def assert_unchanged(model, before):
    parameters, hooks = state_of(model)
    assert hooks == before[1] and parameters.keys() == before[0].keys()
    for name, (parameter, _, attributes) in parameters.items():
        assert parameter is before[0][name][0] and attributes.keys() == before[0][name][2].keys()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_weight_in_the_third_layer_changes_nothing(name, config):
    weight, error, message = UNFIT[name]
    model = net()
    model[2].weight = weight()
    before = state_of(model)
    with pytest.raises(error, match=message):
        mx.quantize_(model, config)
    assert_unchanged(model, before)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "weight, others, message",
    [
        (None, ("weight_packed", "weight_scale"), "quantized already, .* as weight_packed, weight_scale"),
        (torch.zeros(64, 64).to(torch.float8_e4m3fn), ("weight_scale_inv",), "library beside weight_scale_inv"),
    ],
    ids=["compressed-tensors", "float8"],
)
def test_codes_of_another_library_in_the_third_layer_change_nothing(config, weight, others, message):
    model = net()
    model[2].weight = None if weight is None else frozen(weight)
    for name in others:
        model[2].register_parameter(name, frozen(torch.zeros(64, 2, dtype=torch.uint8)))
    before = state_of(model)
    with pytest.raises(TypeError, match=rf"2\.weight is .*{message}; convert the checkpoint by mx.checkpoints.convert"):
        mx.quantize_(model, config)
    assert_unchanged(model, before)
    mx.quantize_(model, config, filter_fn=lambda module, name: name == "3")
    assert type(model[3].weight) in (mx.MXTensor, TrainingWeight)


def test_a_shape_that_the_format_refuses_changes_nothing(monkeypatch):
    """No format refuses a matrix today; a new one may."""
    usual = changes.quantize_as

    def refuses(x, recipe, orientation):
        if x.shape[1] == 48:
            raise ValueError("48 columns are not available")
        return usual(x, recipe, orientation)

    monkeypatch.setattr(changes, "quantize_as", refuses)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    before = state_of(model)
    with pytest.raises(ValueError, match=r"2.weight \(64, 48\): 48 columns are not available"):
        mx.quantize_(model, "mxfp8")
    assert_unchanged(model, before)


@pytest.mark.parametrize("format", [*mx.FORMATS, "mxfp8[32x32]", "nvfp4[16x16]"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0, 64), (64, 0), (33, 100), (2, 7, 9)])
def test_the_plan_without_values_accepts_what_the_cast_accepts(format, shape):
    """Every format and shape: a refusal of the cast itself would come too late."""
    module = nn.Linear(1, 1)
    module.weight = frozen(torch.randn(shape))
    mx.quantize_(module, format)
    assert module.weight.shape == shape and isinstance(module.weight, mx.MXTensor)


def test_the_plan_is_not_logged():
    model = net(2)
    with mx.explain() as log:
        mx.quantize_(model, "mxfp8")
    assert len(log) == 2 and all(entry.kernel == "cpu" for entry in log.entries)


# ---------------------------------------------------------------------------------------------- a failure on the way

FAILURES = [KeyboardInterrupt, torch.OutOfMemoryError, MemoryError, RuntimeError("a device failed")]


def failing(function, error, at):
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("error", FAILURES, ids=str)
@pytest.mark.parametrize("at", [1, 3])
def test_a_failure_while_weights_are_quantized_leaves_each_whole_and_a_second_call_finishes(error, at, monkeypatch):
    model = net()
    model[3].weight = model[1].weight
    expected = mx.quantize_(copy.deepcopy(model), "mxfp8")
    values = [layer.weight.detach().clone() for layer in model]
    with monkeypatch.context() as patch, pytest.raises(error if isinstance(error, type) else type(error)):
        patch.setattr(changes, "_parameter", failing(changes._parameter, error, at))
        mx.quantize_(model, "mxfp8")
    done = {1: [False, False, False, False], 3: [True, True, False, True]}[at]
    assert [isinstance(layer.weight, mx.MXTensor) for layer in model] == done
    assert model[3].weight is model[1].weight
    for layer, is_done, value, quantized in zip(model, done, values, expected, strict=True):
        assert same_bytes(layer.weight, quantized.weight) if is_done else torch.equal(layer.weight, value)
    assert model(torch.randn(2, 64)).isfinite().all() and model.state_dict().keys() == expected.state_dict().keys()
    mx.quantize_(model, "mxfp8")
    assert all(same_bytes(a.weight, b.weight) for a, b in zip(model, expected, strict=True))
    assert model[3].weight is model[1].weight


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_a_failure_while_a_model_for_training_is_converted_restores_it(error, monkeypatch):
    model = net()
    model[3].weight = model[1].weight
    parameters = [layer.weight for layer in model]
    monkeypatch.setattr(training, "training_parameter", failing(training.training_parameter, error, 3))
    with pytest.raises(error if isinstance(error, type) else type(error)):
        mx.quantize_(model, RECIPE)
    assert all(layer.weight is parameter for layer, parameter in zip(model, parameters, strict=True))


def test_a_failure_gives_recipes_and_histories_back(monkeypatch):
    model = net()
    mx.quantize_(model, mx.recipe.DelayedScaling())
    x = torch.randn(4, model[0].in_features)
    model(x).sum().backward()
    states = [vars(layer.weight)["_mxtensor_delayed_state"] for layer in model]
    monkeypatch.setattr(training, "change_recipe", failing(training.change_recipe, KeyboardInterrupt, 3))
    with pytest.raises(KeyboardInterrupt):
        mx.quantize_(model, RECIPE)
    recipe = mx.recipe.DelayedScaling().linear_recipe()
    assert all(layer.weight.linear_recipe == recipe for layer in model)
    assert all(vars(layer.weight)["_mxtensor_delayed_state"] is s for layer, s in zip(model, states, strict=True))


class Refuses(nn.Linear):
    """A module that does not take another parameter, the second time."""

    armed = False

    def __setattr__(self, name, value):
        if name == "weight" and self.armed and isinstance(value, (mx.MXTensor, TrainingWeight)):
            raise RuntimeError("this module takes no other weight")
        super().__setattr__(name, value)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_weight_that_is_shared_is_replaced_in_all_places_or_in_none(config):
    model = nn.Sequential(nn.Linear(64, 64), Refuses(64, 64), nn.Linear(64, 64))
    model[2].weight = model[1].weight = model[0].weight
    shared = model[0].weight
    model[1].armed = True
    with pytest.raises(RuntimeError, match="takes no other weight"):
        mx.quantize_(model, config)
    assert all(layer.weight is shared for layer in model)
    model[1].armed = False
    mx.quantize_(model, config)
    assert model[0].weight is model[1].weight is model[2].weight
    assert isinstance(model[0].weight, (mx.MXTensor, TrainingWeight))
    assert (model[0].weight is shared) is isinstance(shared, TrainingWeight)


# ---------------------------------------------------------------------------------------------- memory


def test_each_original_is_freed_before_the_next_weight_is_quantized(monkeypatch):
    model = net(6)
    model[5].weight = model[0].weight
    alive = [weakref.ref(layer.weight) for layer in model[:5]]
    counts, usual = [], changes._parameter

    def counting(*args):
        counts.append(sum(ref() is not None for ref in alive))
        return usual(*args)

    monkeypatch.setattr(changes, "_parameter", counting)
    gc.disable()
    try:
        mx.quantize_(model, "mxfp8")
    finally:
        gc.enable()
    assert counts == [5, 4, 3, 2, 1]  # 0 and 5 are one weight
    assert all(ref() is None for ref in alive)


PEAK = """
import resource, sys, torch, mxtensor as mx
from torch import nn
torch.set_num_threads(1)
mx.quantize_(nn.Linear(512, 512), "mxfp8")  # the library is loaded
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False) for _ in range(12)))  # 32 MiB each
before = rss()
mx.quantize_(model, "mxfp8")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024  # ru_maxrss would be that of the process that started this one
print((peak - before) / 2**20, (rss() - before) / 2**20)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_the_originals_and_one_result():
    """12 weights of 32 MiB: 96 MiB of results if the originals waited, 8 MiB if each is freed."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PEAK], check=True, capture_output=True, text=True)
    peak, after = map(float, done.stdout.split())
    assert peak < 32 and after < -200


# ---------------------------------------------------------------------------------------------- twice


def test_hooks_are_registered_once_and_for_changed_modules_only():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    for config in (RECIPE, RECIPE, "mxfp8"):
        mx.quantize_(model, config, lambda module, fqn: fqn == "0")
    assert [len(m._state_dict_hooks) for m in model] == [1, 0, 0]
    assert [len(m._load_state_dict_pre_hooks) for m in model] == [1, 0, 0]


def test_gradients_and_histories_stay_with_a_weight_for_training():
    model, recipe = net(1), mx.recipe.DelayedScaling()
    with mx.autocast(recipe=recipe):
        model(torch.randn(4, 64)).sum().backward()
    grad, state = model[0].weight.grad, vars(model[0].weight)["_mxtensor_delayed_state"]
    mx.quantize_(model, recipe)
    assert model[0].weight.grad is grad and vars(model[0].weight)["_mxtensor_delayed_state"] is state
