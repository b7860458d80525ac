"""LayerNormLinear and LayerNormMLP: norms in high precision, every product against the reference."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.te import LayerNormLinear, LayerNormMLP, Linear
from mxtensor.te.contexts import quantized_model_init
from mxtensor.te.module import QuantizedModule
from mxtensor.te.quantizers import Float8Quantizer, MXFP8Quantizer
from tests.helpers.compare import relative_error
from tests.helpers.training_reference import check_step, train_step

MXFP8 = MXFP8BlockScaling()
RECIPES = {
    "mxfp8": MXFP8,
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
}
NORMS = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def exact_norm(x, weight, bias, normalization, centered, eps):
    """The formulas, in float64."""
    x, weight = x.double(), weight.double() + (1 if centered else 0)
    if normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return out if bias is None else out + bias.double()


def scrambled(module):
    """Give the norm random parameters instead of ones and zeros."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("layer_norm"):
                parameter.normal_()
    return module


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


# ---------------------------------------------------------------------------------------------- LayerNormLinear


def test_parameters_have_transformer_engines_names():
    module = LayerNormLinear(40, 24)
    assert list(module.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert (module.layer_norm_weight == 1).all() and (module.layer_norm_bias == 0).all()
    module = LayerNormLinear(40, 24, normalization="RMSNorm", zero_centered_gamma=True, parameters_split=("q", "k"))
    assert list(module.state_dict()) == ["layer_norm_weight", "q_weight", "q_bias", "k_weight", "k_bias"]
    assert (module.layer_norm_weight == 0).all() and module.layer_norm_bias is None


@pytest.mark.parametrize("normalization, centered", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "plain"])
def test_layernorm_linear_gives_the_reference(recipe, dtype, normalization, centered):
    """The result of the norm, the products of that result, and the gradients of the norm."""
    module = scrambled(
        LayerNormLinear(
            100,
            70,
            normalization=normalization,
            zero_centered_gamma=centered,
            params_dtype=dtype,
            eps=1e-3,
            return_layernorm_output=True,
        )
    )
    x, g = leaf(3, 19, 100, dtype=dtype), torch.randn(3, 19, 70).to(dtype)
    with mx.autocast(enabled=recipe is not None, recipe=recipe):
        y, normed = module(x)
    y.backward(g)

    parameters = [p.detach().double().requires_grad_() for n, p in module.named_parameters() if n.startswith("layer")]
    x64 = x.detach().double().requires_grad_()
    exact = exact_norm(x64, *parameters, *([None] * (2 - len(parameters))), normalization, centered, 1e-3)
    assert normed.dtype is dtype and relative_error(normed, exact) < TOLERANCE[dtype]
    linear_recipe = (recipe or MXFP8).linear_recipe()
    if recipe is None:
        rows, grads = normed.detach().double().flatten(0, 1), g.double().flatten(0, 1)
        dnormed = g.double() @ module.weight.detach().double()
        exact_y = rows @ module.weight.detach().double().T + module.bias.detach().double()
        assert relative_error(y.flatten(0, 1), exact_y) < TOLERANCE[dtype]
        assert relative_error(module.weight.grad, grads.T @ rows) < TOLERANCE[dtype]
    else:
        check_step(
            (y, None, module.weight.grad, module.bias.grad), normed, module.weight, module.bias, g, linear_recipe
        )
        dnormed = train_step(normed, module.weight, module.bias, g, linear_recipe).dx
    exact.backward(dnormed)
    norms = 2 * TOLERANCE[dtype]  # torch's derivative rounds several times, depending on its version
    assert relative_error(x.grad, x64.grad) < norms
    for mine, theirs in zip((module.layer_norm_weight, module.layer_norm_bias), parameters, strict=False):
        assert relative_error(mine.grad, theirs.grad) < norms


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_outside_autocast_it_is_torchs_norm_and_linear(normalization):
    module = scrambled(LayerNormLinear(40, 24, normalization=normalization))
    x, w, b = leaf(7, 40), module.layer_norm_weight, module.layer_norm_bias
    normed = F.layer_norm(x, (40,), w, b, 1e-5) if normalization == "LayerNorm" else F.rms_norm(x, (40,), w, 1e-5)
    assert torch.equal(module(x), F.linear(normed, module.weight, module.bias))


def test_parameters_of_another_dtype_norm_in_float32():
    module, x = scrambled(LayerNormLinear(64, 48, return_layernorm_output=True)), leaf(20, 64, dtype=torch.bfloat16)
    for recipe in (MXFP8, None):
        with mx.autocast(enabled=recipe is not None, recipe=recipe):
            y, normed = module(x)
        assert y.dtype is normed.dtype is torch.bfloat16
        exact = exact_norm(x.detach(), module.layer_norm_weight, module.layer_norm_bias, "LayerNorm", False, 1e-5)
        assert relative_error(normed, exact) < 3e-3


def test_the_results_and_their_order():
    x = leaf(7, 40)
    y = LayerNormLinear(40, 24)(x)
    assert y.shape == (7, 24)
    y, bias = LayerNormLinear(40, 24, return_bias=True)(x)
    assert y.shape == (7, 24) and bias.shape == (24,)
    y, bias, normed = LayerNormLinear(40, 24, return_bias=True, return_layernorm_output=True)(x)
    assert bias.shape == (24,) and normed.shape == (7, 40)
    y, bias, normed = LayerNormMLP(40, 24, return_bias=True, return_layernorm_output=True)(x)
    assert y.shape == (7, 40) and bias.shape == (40,) and normed.shape == (7, 40)


@pytest.mark.parametrize("shape", [(1, 33), (0, 64), (2, 3, 5, 31), (40,)], ids=str)
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_any_shape(kind, shape):
    module, x = kind(shape[-1], 17), leaf(*shape)
    with mx.autocast():
        y = module(x)
    y.backward(torch.randn_like(y))
    assert y.shape[:-1] == shape[:-1] and x.grad.shape == shape and x.grad.isfinite().all()
    assert all(p.grad.shape == p.shape and p.grad.isfinite().all() for p in module.parameters())
    if y.numel():
        assert relative_error(y, module(x)) < 0.08


# ---------------------------------------------------------------------------------------------- LayerNormMLP

ACTIVATIONS = {
    "gelu_erf": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def exact_mlp(module, x):
    """The MLP in float64 without quantization."""
    p = {name: parameter.double() for name, parameter in module.named_parameters()}
    normed = exact_norm(x, module.layer_norm_weight, module.layer_norm_bias, module.normalization, False, 1e-5)
    inner = normed @ p["fc1_weight"].T + p.get("fc1_bias", 0)
    if module.activation in ACTIVATIONS:
        inner = ACTIVATIONS[module.activation](inner)
    else:
        first, second = inner.split(module.ffn_hidden_size, -1)
        inner = ACTIVATIONS[GATED[module.activation]](first) * second
    return inner @ p["fc2_weight"].T + p.get("fc2_bias", 0)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_every_activation_forward_and_backward(activation):
    """Unquantized against float64; under MXFP8 by norm. Rounding flips some gradients of a relu between 0 and 1."""
    module = scrambled(LayerNormMLP(96, 128, activation=activation, normalization="RMSNorm"))
    assert module.fc1_weight.shape == (256 if activation in GATED else 128, 96)
    x, g = leaf(50, 96), torch.randn(50, 96)
    x64 = x.detach().double().requires_grad_()
    exact = exact_mlp(module, x64)
    wanted = torch.autograd.grad(exact, [x64, *module.parameters()], g.double())
    for recipe, limit in ((None, (1e-5, 1e-5)), (MXFP8, (0.08, 0.2 if "re" in activation else 0.1))):
        with mx.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        got = torch.autograd.grad(y, [x, *module.parameters()], g)
        assert relative_error(y, exact) < limit[0]
        assert all(relative_error(mine, theirs) < limit[1] for mine, theirs in zip(got, wanted, strict=True))


def test_glu_is_gated_by_a_sigmoid():
    module, x = LayerNormMLP(32, 48, activation="glu", bias=False), leaf(7, 32)
    first, second = F.linear(F.layer_norm(x, (32,)), module.fc1_weight).chunk(2, -1)
    assert torch.allclose(module(x), F.linear(first.sigmoid() * second, module.fc2_weight), atol=1e-6)


@pytest.mark.parametrize("params", [None, {}, {"limit": 1.5, "alpha": 2.0, "glu_linear_offset": 0.0}, {"limit": 2}])
def test_clamped_swiglu_is_that_of_gpt_oss(params):
    module = LayerNormMLP(32, 48, activation="clamped_swiglu", activation_params=params, bias=False)
    nn.init.normal_(module.fc1_weight)  # most values are beyond the limits
    x, given = leaf(7, 32), {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0} | (params or {})
    x64 = x.detach().double().requires_grad_()
    first, second = F.linear(F.layer_norm(x64, (32,)), module.fc1_weight.double()).chunk(2, -1)
    first, second = first.clamp(max=given["limit"]), second.clamp(-given["limit"], given["limit"])
    gate = first / (1 + torch.exp(-given["alpha"] * first))
    exact = F.linear(gate * (second + given["glu_linear_offset"]), module.fc2_weight.double())
    y, g = module(x), torch.randn(7, 32)
    assert relative_error(y, exact) < 1e-5
    leaves = x, module.fc1_weight
    wanted = torch.autograd.grad(exact, (x64, module.fc1_weight), g.double())
    for mine, theirs in zip(torch.autograd.grad(y, leaves, g), wanted, strict=True):
        assert relative_error(mine, theirs) < 1e-4
    copied = pickle.loads(pickle.dumps(module))
    assert torch.equal(copied(x), y)


def test_a_transformer_layer_passes_the_parameters_of_its_activation():
    layer = te.TransformerLayer(32, 48, 4, activation="clamped_swiglu", activation_params={"limit": 1.0})
    assert layer.layernorm_mlp.activation_params == {"limit": 1.0}
    for activation, params in (("swiglu", {"limit": 1.0}), ("clamped_swiglu", {"gamma": 1.0})):
        with pytest.raises(ValueError, match=r"activation_params has '.*clamped_swiglu takes limit, alpha, glu"):
            LayerNormMLP(32, 48, activation=activation, activation_params=params)


def test_parameters_of_the_mlp():
    module = LayerNormMLP(40, 24, activation="swiglu")
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "layer_norm_weight": (40,), "layer_norm_bias": (40,), "fc1_weight": (48, 40), "fc1_bias": (48,),
        "fc2_weight": (40, 24), "fc2_bias": (40,),
    }  # fmt: skip
    module = LayerNormMLP(40, 24, bias=False, normalization="RMSNorm", init_method=lambda t: nn.init.constant_(t, 1),
                          output_layer_init_method=lambda t: nn.init.constant_(t, 2))  # fmt: skip
    assert list(module.state_dict()) == ["layer_norm_weight", "fc1_weight", "fc2_weight"]
    assert (module.fc1_weight == 1).all() and (module.fc2_weight == 2).all() and module.fc1_bias is None
    assert repr(module) == "LayerNormMLP(hidden_size=40, ffn_hidden_size=24, normalization=RMSNorm, activation=gelu)"


def spied(monkeypatch):
    """(input, weight, bias, output) of every product, with their gradients."""
    seen, product = [], QuantizedModule.product

    def spy(self, index, x, components, bias, now):
        x = x.view_as(x)  # its gradient comes from this product only
        x.retain_grad()
        out = product(self, index, x, components, bias, now)
        out.retain_grad()
        seen.append((x, components[0], bias, out))
        return out

    monkeypatch.setattr(QuantizedModule, "product", spy)
    return seen


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_both_products_of_the_mlp_give_the_reference(monkeypatch, recipe, dtype, activation):
    module = scrambled(LayerNormMLP(72, 100, activation=activation, params_dtype=dtype))
    seen = spied(monkeypatch)
    with mx.autocast(recipe=recipe):
        y = module(leaf(3, 13, 72, dtype=dtype))
    y.backward(torch.randn_like(y))
    assert len(seen) == 2
    for (x, weight, bias, out), name in zip(seen, ("fc1", "fc2"), strict=True):
        assert weight is getattr(module, f"{name}_weight")
        check_step((out, x.grad, weight.grad, bias.grad), x.detach(), weight, bias, out.grad, recipe.linear_recipe())


# ---------------------------------------------------------------------------------------------- what they share


def run(module, x, g, recipe=MXFP8, **arguments):
    x = x.detach().requires_grad_()
    with mx.autocast(recipe=recipe):
        y = module(x, **arguments)
    y.backward(g)
    return y.detach(), x.grad


def weights(module):
    return [p for n, p in module.named_parameters() if p.dim() == 2]


KINDS = [lambda **kw: LayerNormLinear(64, 64, **kw), lambda **kw: LayerNormMLP(64, 96, **kw)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["LayerNormLinear", "LayerNormMLP"])


@kinds
@pytest.mark.parametrize("recipe", [MXFP8, DelayedScaling()], ids=["mxfp8", "delayed"])
def test_delayed_and_fused_wgrads(kind, recipe):
    """Two microbatches: bitwise identical for float32 parameters, in grad and in main_grad."""
    plain, later, fused = kind(), kind(delay_wgrad_compute=True), kind(fuse_wgrad_accumulation=True)
    for module in (later, fused):
        module.load_state_dict(plain.state_dict())
    for weight in weights(fused):
        weight.main_grad = torch.zeros_like(weight)
    for _ in range(2):
        x, g = leaf(20, 64), torch.randn(20, 64)
        outs = [run(module, x, g, recipe) for module in (plain, later, fused)]
        assert all(torch.equal(out[i], outs[0][i]) for out in outs for i in range(2))
    assert all(weight.grad is None for weight in weights(later) + weights(fused))
    later.backward_dw()
    for a, b, c in zip(weights(plain), weights(later), weights(fused), strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(a.grad, c.main_grad)
    assert torch.equal(plain.layer_norm_weight.grad, later.layer_norm_weight.grad)


@kinds
def test_microbatches_share_quantized_weights(kind):
    module, other = kind(), kind()
    other.load_state_dict(module.state_dict())
    for first in (True, False, False):
        x, g = leaf(20, 64), torch.randn(20, 64)
        mine, theirs = run(module, x, g, is_first_microbatch=first), run(other, x, g)
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(mine, theirs, strict=True))


@kinds
def test_quantizers_change_with_the_recipe(kind):
    module, products = kind(), 2 if kind is KINDS[1] else 1
    x, g = leaf(20, 64), torch.randn(20, 64)
    for _ in range(3):
        run(module, x, g, DelayedScaling())
    assert all(type(q).__mro__[1] is Float8Quantizer or type(q) is Float8Quantizer
               for q in module.quantizers["scaling_fwd"])  # fmt: skip
    assert [len(module.quantizers[key]) for key in ("scaling_fwd", "scaling_bwd")] == [2 * products, products]
    with pytest.warns(UserWarning, match=f"Recipe type changed .* for {type(module).__name__}") as caught:
        run(module, x, g)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, x, g)
    assert all(isinstance(q, MXFP8Quantizer) for q in module.quantizers["scaling_fwd"])


@kinds
def test_the_histories_of_each_product_resume(kind):
    module, other, recipe = kind(), kind(), DelayedScaling()
    for _ in range(3):
        run(module, leaf(20, 64), torch.randn(20, 64), recipe)
    products = 2 if kind is KINDS[1] else 1
    assert sum(key.endswith("history") for key in module.state_dict()["_extra_state"]) == products
    other.load_state_dict(module.state_dict())
    x, g = leaf(20, 64), torch.randn(20, 64)
    assert all(map(torch.equal, run(other, x, g, recipe), run(module, x, g, recipe)))


@kinds
@pytest.mark.parametrize("recipe", [MXFP8, Float8CurrentScaling(), DelayedScaling()], ids=str)
def test_quantized_weights_train(kind, recipe):
    with quantized_model_init(recipe=recipe):
        module = kind()
    assert all(isinstance(weight, mx.MXTensor) for weight in weights(module))
    x, g = leaf(20, 64), torch.randn(20, 64)
    y, _ = run(module, x, g, recipe)
    assert all(type(p.grad) is torch.Tensor and p.grad.isfinite().all() for p in module.parameters())
    with torch.no_grad():
        assert relative_error(y, module(x)) < 0.1  # outside autocast: the weights' values, unquantized inputs
    with pytest.raises(RuntimeError, match=f"Recipe mismatch for {type(module).__name__}"):
        run(module, x, g, NVFP4BlockScaling())


@pytest.mark.exhaustive(quick=1)
@kinds
@pytest.mark.parametrize("operands", [False, True], ids=["plain weights", "quantized weights"])
def test_forward_and_backward_compile_to_one_graph(kind, operands):
    torch._dynamo.reset()
    with quantized_model_init(enabled=operands):
        module = kind(normalization="RMSNorm", zero_centered_gamma=True)
    x, g = leaf(20, 64), torch.randn(20, 64)
    results = []
    for call in (torch.compile(module, fullgraph=True, backend="aot_eager"), module):
        module.zero_grad()
        results.append((*run(call, x, g), *(p.grad for p in module.parameters())))
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


def test_layernorm_linear_equals_a_norm_and_a_linear():
    """Its state dict is the union of theirs, and its result is bitwise identical."""
    norm, linear = nn.LayerNorm(64), Linear(64, 48)
    module = LayerNormLinear(64, 48)
    theirs = {f"layer_norm_{name}": value for name, value in scrambled(norm).state_dict().items()}
    module.load_state_dict(theirs | linear.state_dict())
    x, g = leaf(20, 64), torch.randn(20, 48)
    assert all(map(torch.equal, run(module, x, g), run(nn.Sequential(norm, linear), x, g)))


@kinds
def test_errors_name_the_argument_and_change_nothing(kind):
    module = kind()
    with pytest.raises(ValueError, match=r"input \(20, 63\) does not fit"):
        run(module, leaf(20, 63), None)
    with pytest.raises(TypeError, match="int32"), mx.autocast():
        module(torch.ones(4, 64, dtype=torch.int32))
    assert module.quantizers["scaling_fwd"] == []
    run(module, leaf(20, 64), torch.randn(20, 64))
    with pytest.raises(ValueError, match="normalization is 'BatchNorm'; choose one of LayerNorm, RMSNorm"):
        kind(normalization="BatchNorm")
    with pytest.raises(TypeError, match="tp_group is 'a group'; pass a process group"):
        kind(tp_group="a group")


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match="activation is 'tanh'; choose one of gelu, "):
        LayerNormMLP(32, 32, activation="tanh")
