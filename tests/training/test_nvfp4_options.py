"""Training by TransformerEngine's options of NVFP4: the operands of all three products are those of the definition."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.kernel import describe_operand
from mxtensor.kernels.operands import FakeQuantized
from mxtensor.numerics.reference import decode, encode
from mxtensor.recipe import NVFP4BlockScaling
from mxtensor.training import passes as training_products
from tests.helpers.training_reference import check_step, products

NEAREST = {"disable_rht": True, "disable_stochastic_rounding": True}
OPTIONS = {
    "weights": {"nvfp4_4over6": "weights", "disable_stochastic_rounding": True},
    "all": {"nvfp4_4over6": "all", **NEAREST},
    "rows": {"row_scaled_activation": True, **NEAREST},
    "rows, all": {
        "row_scaled_activation": True, "nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE",
        "nvfp4_4over6_e4m3_use_256": "weights", **NEAREST,
    },
    "rows, activations, 1x16": {
        "row_scaled_activation": True, "nvfp4_4over6": "activations", "disable_2d_quantization": True, **NEAREST,
    },
}  # fmt: skip


def layer_by(kind, recipe, dtype):
    """A layer and a function that runs it by the recipe, in each of the ways to say so."""
    layer = te.Linear(64, 48, params_dtype=dtype, device="cpu") if kind == "te" else nn.Linear(64, 48, dtype=dtype)
    if kind == "quantize_":
        return mx.quantize_(layer, recipe), layer

    def run(x):
        with mx.autocast(recipe=recipe):
            return layer(x)

    return layer, run


def exact(side):
    """The float32 values of an operand."""
    if isinstance(side, FakeQuantized):
        return side.values.float() * (1 if side.global_scale is None else side.global_scale)
    return decode(side, torch.float32)


@pytest.mark.parametrize("kind", ["autocast", "te", "quantize_"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_operands_of_a_step_are_those_of_the_definition(name, kind, monkeypatch):
    recipe, seen = NVFP4BlockScaling(**OPTIONS[name]), {}

    def spy(op, a, b, *rest):
        seen[op] = a, b
        return product(op, a, b, *rest)

    product = training_products.product
    monkeypatch.setattr(training_products, "product", spy)
    layer, run = layer_by(kind, recipe, torch.bfloat16)
    x = (torch.randn(40, 64) * torch.logspace(-2, 2, 40)[:, None]).bfloat16().requires_grad_()
    g = torch.randn(40, 48, dtype=torch.bfloat16)
    w = layer.weight.detach().clone()
    y = run(x)
    y.backward(g)
    casts = recipe.linear_recipe()
    given = {
        "fprop": ((x, casts.input.rowwise), (w, casts.weight.rowwise)),
        "dgrad": ((g, casts.grad.rowwise), (w.t(), casts.weight.columnwise)),
        "wgrad": ((g.t(), casts.grad.columnwise), (x.t(), casts.input.columnwise)),
    }
    assert seen.keys() == given.keys()
    for op, sides in given.items():
        if op == "wgrad" and casts.input.signs is not None:
            continue  # rotated: test_linear compares with a rotation of its own
        for mine, (source, cast) in zip(seen[op], sides, strict=True):
            wanted = encode(source.detach().contiguous(), cast)
            if cast.format.square and op == "dgrad":  # rounded once, then transposed
                wanted = encode(source.detach().t().contiguous(), cast)
                assert torch.equal(exact(mine), decode(wanted, torch.float32).t())
            else:
                assert torch.equal(exact(mine), decode(wanted, torch.float32)), op
    check_step((y, x.grad, layer.weight.grad, None), x, w, layer.bias, g, casts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["all", "rows", "rows, all"])
def test_compiled_layers_give_the_reference(name):
    recipe = NVFP4BlockScaling(**OPTIONS[name])
    layer, run = layer_by("autocast", recipe, torch.float32)
    x, g = torch.randn(2, 24, 64, requires_grad=True), torch.randn(2, 24, 48)
    y = torch.compile(run, fullgraph=True)(x)
    y.backward(g)
    found = y.detach(), x.grad, layer.weight.grad, layer.bias.grad
    check_step(found, x, layer.weight, layer.bias, g, recipe.linear_recipe())


def test_explain_names_the_choice_and_the_rows():
    recipe = NVFP4BlockScaling(**OPTIONS["rows, all"])
    _, run = layer_by("autocast", recipe, torch.bfloat16)
    with mx.explain() as log:
        run(torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    casts = {describe_operand(e.spec.formats[0], "") for e in log.entries if e.spec.op == "quantize"}
    assert "bfloat16->nvfp4[row_scaled] four over six (mse_448) " in casts
    assert "bfloat16->nvfp4[16x16] four over six (mse) " in casts
    assert "bfloat16->nvfp4 " in casts  # gradients
    assert products(log) == ["fprop", "dgrad", "wgrad"]
    assert str(recipe.linear_recipe()) == (
        "NVFP4BlockScaling (nvfp4[16x16] four over six (mse)/nvfp4[row_scaled] four over six (mse_448)/nvfp4)"
    )


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override):
    recipe = NVFP4BlockScaling(**OPTIONS["rows, all"], backward_override=override)
    layer, run = layer_by("autocast", recipe, torch.float32)
    x, g = torch.randn(40, 64, requires_grad=True), torch.randn(40, 48)
    run(x).backward(g)
    casts = recipe.linear_recipe()
    left, right = x.detach(), layer.weight.detach()
    if override == "dequantized":
        left = decode(encode(left, casts.input.rowwise), torch.float32)
        right = decode(encode(right, casts.weight.rowwise), torch.float32)
    torch.testing.assert_close(layer.weight.grad, g.t() @ left)
    torch.testing.assert_close(x.grad, g @ right)


def test_a_model_resumes_from_its_state_dict_and_a_pickle_of_the_recipe():
    def steps(layer, recipe, number):
        for i in range(number):
            x = torch.randn(24, 64, generator=torch.Generator().manual_seed(i))
            with mx.autocast(recipe=recipe):
                layer(x).square().mean().backward()
            with torch.no_grad():
                layer.weight -= 0.1 * layer.weight.grad
            layer.weight.grad = None
        return layer

    recipe = NVFP4BlockScaling(**OPTIONS["rows, all"])
    layer = steps(te.Linear(64, 48, device="cpu"), recipe, 1)
    other = te.Linear(64, 48, device="cpu")
    other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
    unpickled = pickle.loads(pickle.dumps(recipe))
    assert unpickled.linear_recipe() == recipe.linear_recipe() and repr(unpickled) == repr(recipe)
    assert copy.deepcopy(recipe).linear_recipe() is recipe.linear_recipe()
    assert torch.equal(steps(layer, recipe, 2).weight, steps(other, unpickled, 2).weight)


def test_a_weight_that_is_stored_keeps_the_choice(tmp_path):
    recipe = NVFP4BlockScaling(**OPTIONS["weights"])
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cpu")
    values, cast = torch.randn(48, 64, dtype=torch.bfloat16), recipe.linear_recipe().weight.rowwise
    with torch.no_grad():
        layer.weight.copy_(values)
    torch.save(layer.weight.detach(), tmp_path / "w.pt")
    for stored in (layer.weight, torch.load(tmp_path / "w.pt")):
        assert all(map(torch.equal, stored.rowwise.tensors, encode(values, cast).tensors))
