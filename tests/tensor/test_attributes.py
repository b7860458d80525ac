"""Attributes that users set on parameters: what torch keeps of a plain one, a quantized one keeps."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.tensor.attributes import INTERNAL, user_attributes
from mxtensor.training.training_weight import TrainingWeight

RECIPES = {"mxfp8": mx.recipe.MXFP8BlockScaling(), "delayed": mx.recipe.DelayedScaling()}


def plain():
    return nn.Linear(64, 32)


def by_hand():
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(mx.quantize(layer.weight, "nvfp4", orientation="both"), requires_grad=False)
    return layer


def created():
    with te.quantized_model_init():
        return te.Linear(64, 32)


LAYERS = {
    "by hand": by_hand,
    "inference": lambda: mx.quantize_(nn.Linear(64, 32), "mxfp8"),
    "training": lambda: mx.quantize_(nn.Linear(64, 32), RECIPES["mxfp8"]),
    "delayed": lambda: mx.quantize_(nn.Linear(64, 32), RECIPES["delayed"]),
    "quantized_model_init": created,
}


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


WAYS = {
    "cpu": lambda layer: layer.cpu().weight,
    "half": lambda layer: layer.half().weight,
    "bfloat16": lambda layer: layer.bfloat16().weight,
    "to dtype": lambda layer: layer.to(torch.float64).weight,
    "to device": lambda layer: layer.to("cpu", torch.float16).weight,
    "in a parent": lambda layer: nn.Sequential(nn.Sequential(layer)).double()[0][0].weight,
    "twice": lambda layer: layer.half().float().weight,
    "to_empty": lambda layer: layer.to_empty(device="cpu").weight,
    "share_memory": lambda layer: layer.share_memory().weight,
    "requires_grad_": lambda layer: layer.requires_grad_(False).weight,
    "eval": lambda layer: layer.eval().weight,
    "load_state_dict": lambda layer: (layer.load_state_dict(layer.state_dict()), layer.weight)[1],
    "assign": lambda layer: (layer.load_state_dict(layer.state_dict(), assign=True), layer.weight)[1],
    "deepcopy of the layer": lambda layer: copy.deepcopy(layer).weight,
    "deepcopy": lambda layer: copy.deepcopy(layer.weight),
    "deepcopy of a tensor": lambda layer: copy.deepcopy(with_attributes(layer.weight.detach())),
    "pickle of the layer": lambda layer: pickle.loads(pickle.dumps(layer)).weight,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)),
    "pickle of a tensor": lambda layer: pickle.loads(pickle.dumps(with_attributes(layer.weight.detach()))),
    "torch.save": lambda layer: saved(layer.weight, weights_only=False),
    "detach": lambda layer: layer.weight.detach(),
    "clone": lambda layer: layer.weight.clone(),
    "half of the weight": lambda layer: layer.weight.half(),
    "a parameter of it": lambda layer: nn.Parameter(layer.weight, False),
    "a parameter of another dtype": lambda layer: nn.Parameter(layer.weight.half(), False),
    "data": lambda layer: layer.weight.data,
    "transposed": lambda layer: layer.weight.t(),
}


def with_attributes(t):
    t.main_grad, t.tensor_model_parallel, t.partition = torch.arange(3.0), True, {"dim": 0}
    return t


def found(t):
    attributes = {name: getattr(t, name, None) for name in ("main_grad", "tensor_model_parallel", "partition")}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in attributes.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_attributes_stay_where_torch_keeps_them(layer, way):
    reference, quantized = plain(), LAYERS[layer]()
    for each in (reference, quantized):
        with_attributes(each.weight)
    assert found(WAYS[way](quantized)) == found(WAYS[way](reference))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_converted_parameter_is_the_same_object_with_the_same_attributes(layer):
    layer = LAYERS[layer]()
    weight, main_grad = layer.weight, with_attributes(layer.weight).main_grad
    values = weight.detach().clone()
    layer.half()
    assert layer.weight is weight and weight.main_grad is main_grad and weight.dtype is torch.float16
    dense = weight.dequantize() if isinstance(weight, mx.MXTensor) else weight.detach()
    before = values.dequantize() if isinstance(values, mx.MXTensor) else values
    torch.testing.assert_close(torch.Tensor(dense.float()), torch.Tensor(before.float()), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("config", ["mxfp8", *RECIPES.values()], ids=str)
def test_quantize_keeps_attributes(config):
    layer = plain()
    attributes = vars(with_attributes(layer.weight)).copy()
    twin = nn.Sequential(layer, nn.Linear(64, 32))
    mx.quantize_(twin, config)
    assert user_attributes(layer.weight) == attributes and user_attributes(twin[1].weight) == {}
    if config != "mxfp8":
        mx.quantize_(twin, mx.recipe.NVFP4BlockScaling())
        assert user_attributes(layer.weight) == attributes


def test_a_method_of_the_old_parameter_does_not_keep_it():
    layer = plain()
    old = layer.weight
    old.loader = old.add_  # as vLLM has it
    mx.quantize_(layer, "mxfp8")
    assert not hasattr(layer.weight, "loader")


@pytest.mark.parametrize("layer", LAYERS)
def test_the_class_of_a_parameter_makes_one_as_that_of_plain_parameters_does(layer):
    """accelerate calls the class of a parameter, under ``init_empty_weights`` with everything in its ``__dict__``."""
    weight = with_attributes(LAYERS[layer]().weight)
    for requires_grad in (False, True):
        made = type(weight)(weight, requires_grad=requires_grad)
        assert type(made) is type(weight) and isinstance(made, nn.Parameter) and made.data_ptr() == weight.data_ptr()
        assert made.requires_grad is requires_grad and made.is_leaf and user_attributes(made) == {}
    made = type(weight)(weight.to("meta"), **vars(weight) | {"requires_grad": False})
    assert type(made) is type(weight) and made.is_meta and user_attributes(made) == user_attributes(weight)


def test_other_arguments_of_the_classes_are_refused():
    weight = LAYERS["inference"]().weight
    with pytest.raises(TypeError, match=r"MXTensor\(\) got an unexpected keyword argument 'shape'"):
        mx.MXTensor(weight.rowwise, None, weight.recipe, weight.dtype, shape=(32, 64))
    with pytest.raises(TypeError, match=r"TrainingWeight\(\) got an unexpected keyword argument 'requires_grad'"):
        TrainingWeight(torch.ones(2, 2), RECIPES["mxfp8"].linear_recipe(), requires_grad=True)
    with pytest.raises(TypeError, match=r"not Tensor and NoneType; mx\.quantize_"):
        TrainingWeight(torch.ones(2, 2), requires_grad=True)


def test_weights_only_loads_attributes_that_it_allows():
    weight = with_attributes(LAYERS["inference"]().weight)
    assert found(saved({"weight": weight}, weights_only=True)["weight"]) == found(weight)


def test_a_file_cannot_set_what_belongs_to_the_tensor():
    weight = LAYERS["inference"]().weight
    rebuild, (arguments, attributes) = with_attributes(weight).__reduce_ex__(2)
    made_up = dict.fromkeys([*INTERNAL, "_mxtensor_delayed_state"], "made up")
    loaded = rebuild(arguments, attributes | made_up)
    assert "made up" not in vars(loaded).values() and found(loaded) == found(weight)


def test_a_users_own_exchange_takes_all_attributes_along():
    a, b = LAYERS["inference"]().weight, LAYERS["inference"]().weight
    a.letter, b.number = "a", 7
    torch.utils.swap_tensors(a, b)
    assert user_attributes(a) == {"number": 7} and user_attributes(b) == {"letter": "a"}


def test_gradients_stay_too():
    layer = LAYERS["training"]()
    layer(torch.randn(4, 64)).sum().backward()
    grad = layer.weight.grad.clone()
    layer.double()
    assert layer.weight.grad.dtype is torch.float64 and torch.equal(layer.weight.grad.float(), grad)


def test_a_compiled_model_reads_attributes():
    layer, x = with_attributes_on(LAYERS["training"]()), torch.randn(4, 64)
    torch._dynamo.reset()

    def step(x):
        return layer(x) * layer.weight.partition["dim"] + layer.weight.main_grad.sum()

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
    torch._dynamo.reset()


def with_attributes_on(layer):
    with_attributes(layer.weight)
    return layer
