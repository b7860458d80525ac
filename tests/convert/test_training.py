"""quantize_ for training: which weights carry a recipe, state dicts, and a second quantize_."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import mxtensor as mx
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training.training_weight import TrainingWeight, values_of
from tests.helpers.training_reference import check_step, products

MXFP8, MXFP6 = MXFP8BlockScaling(), MXFP6BlockScaling()
LINEAR = lambda module, fqn: isinstance(module, nn.Linear)  # noqa: E731


class Conv1D(nn.Module):
    """transformers' layer, recognized by its name: a weight (in, out)."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out)), nn.Parameter(torch.randn(n_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A small language model, its head tied to the embedding or not."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.router = nn.Linear(64, 4)
        self.up = Conv1D(96, 64)
        self.down = nn.Linear(96, 64, bias=False)
        self.lm_head = nn.Linear(64, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(x))) * self.router(x).softmax(-1)[..., :1]
        return self.lm_head(x)


def carrying(model):
    return {name for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, TrainingWeight)}


def layer_step(layer, x, g):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


def check_layer(layer, linear_recipe, shape=(20,)):
    """Compare one step of a quantized nn.Linear with the reference."""
    x, g = torch.randn(*shape, layer.in_features), torch.randn(*shape, layer.out_features)
    out = layer_step(layer, x, g)
    check_step(out, x, layer.weight.high_precision, layer.bias, g, linear_recipe)


# ---------------------------------------------------------------------------------------------- which weights


def test_the_default_filter_accepts_linear_layers_and_attention_but_not_embedding_head_or_router():
    model = Block()
    others = {name: p for name, p in model.named_parameters()}
    assert mx.quantize_(model, MXFP8) is model
    assert carrying(model) == {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight"}
    assert all(p is others[name] for name, p in model.named_parameters() if name not in carrying(model))
    assert [type(m) for m in model.modules()] == [type(m) for m in Block().modules()]


def test_every_quantized_layer_runs_three_products_a_step():
    model = mx.quantize_(Block(), MXFP8)
    with mx.explain() as log:
        y = model(torch.randint(50, (2, 10)))
        y.backward(torch.randn_like(y))
    ops = products(log)
    assert [ops.count(op) for op in ("fprop", "dgrad", "wgrad")] == [4, 4, 4]


def test_filter_fn_sees_every_candidate_by_its_name_and_decides():
    seen = []
    model = mx.quantize_(Block(), MXFP8, lambda module, fqn: seen.append(fqn) or fqn in ("router", "lm_head"))
    assert seen == ["embedding", "attention", "attention.out_proj", "router", "up", "down", "lm_head"]
    assert carrying(model) == {"router.weight", "lm_head.weight"}


def test_a_head_tied_to_the_embedding_is_left_alone_by_default():
    model = mx.quantize_(Block(tied=True), MXFP8)
    assert model.lm_head.weight is model.embedding.weight and not isinstance(model.lm_head.weight, TrainingWeight)


def test_a_head_that_is_asked_for_stays_tied_to_the_embedding():
    """One parameter: the lookup is in high precision, the product quantized, and both gradients add up."""
    model = mx.quantize_(Block(tied=True), MXFP8, LINEAR)
    plain = Block(tied=True)
    plain.load_state_dict(model.state_dict())
    assert model.lm_head.weight is model.embedding.weight and isinstance(model.lm_head.weight, TrainingWeight)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert {type(t) for t in model.state_dict().values()} == {torch.Tensor}
    tokens = torch.randint(50, (2, 10))
    assert torch.equal(model.embedding(tokens), plain.embedding(tokens))
    y = model(tokens)
    y.backward(torch.randn_like(y))
    unused = [i for i in range(50) if i not in tokens]
    assert model.embedding.weight.grad[unused].count_nonzero() > 0  # of the head
    model.load_state_dict(plain.state_dict(), assign=True)
    assert isinstance(model.lm_head.weight, TrainingWeight)


def test_two_layers_that_share_a_weight_share_one_parameter():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    net[2].weight = net[0].weight
    twin = copy.deepcopy(net)
    mx.quantize_(net, MXFP8)
    assert net[0].weight is net[2].weight and len(list(net.parameters())) == 3
    x, g = torch.randn(20, 64), torch.randn(20, 64)
    net(x).backward(g)
    with mx.autocast(recipe=MXFP8):
        y = twin(x)
    y.backward(g)
    assert torch.equal(net[0].weight.grad, twin[0].weight.grad)


def test_parameters_are_those_of_before_over_the_same_memory():
    net = nn.Linear(64, 48)
    before, address = net.weight, net.weight.data_ptr()
    mx.quantize_(net, MXFP8)
    assert net.weight is before and net.weight.high_precision.data_ptr() == address
    assert net.weight.requires_grad


def test_a_frozen_weight_stays_frozen():
    net = nn.Linear(64, 48).requires_grad_(False)
    assert not mx.quantize_(net, MXFP8).weight.requires_grad


def test_embeddings_and_experts_are_not_trained_quantized():
    with pytest.warns(UserWarning, match="quantize_ changed nothing"):
        mx.quantize_(nn.ModuleList([nn.Embedding(9, 64)]), MXFP8, lambda module, fqn: True)


def test_a_model_without_a_matching_layer_warns_and_one_with_does_not():
    with pytest.warns(UserWarning, match="quantize_ changed nothing.*of LayerNorm passed the filter"):
        mx.quantize_(nn.LayerNorm(64), MXFP8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.quantize_(nn.Linear(64, 48), MXFP8)


# ---------------------------------------------------------------------------------------------- configs


RECIPES = {
    "mxfp8": MXFP8,
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp6": MXFP6,
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
    "custom": CustomRecipe("mxfp8", "mxint8", "mxfp6_e3m2"),
    "linear_recipe": MXFP8.linear_recipe(),
}


@pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
def test_every_config_trains_a_layer_as_the_reference(config):
    layer = mx.quantize_(nn.Linear(70, 40), config)
    linear_recipe = config.linear_recipe() if hasattr(config, "linear_recipe") else config
    assert layer.weight.linear_recipe == linear_recipe
    check_layer(layer, linear_recipe)


@pytest.mark.parametrize(
    "shape, k, n", [((1,), 1, 1), ((5,), 33, 31), ((2, 3, 7), 65, 95), ((0,), 64, 32), ((2, 0), 8, 9)]
)
def test_no_size_needs_to_be_a_multiple_of_32(shape, k, n):
    check_layer(mx.quantize_(nn.Linear(k, n), MXFP8), MXFP8.linear_recipe(), shape)


def test_an_edited_recipe_does_not_reach_a_quantized_model():
    """The weight carries the recipe as it was when quantize_ was called."""
    recipe = MXFP8BlockScaling()
    layer = mx.quantize_(nn.Linear(64, 48), recipe)
    recipe.fp8_format = Format.E5M2
    check_layer(layer, MXFP8.linear_recipe())


def test_a_recipe_edited_into_an_impossible_one_changes_nothing():
    recipe, net = MXFP8BlockScaling(), nn.Linear(64, 48)
    recipe.margin, before = 1, net.weight
    with pytest.raises(ValueError, match="margin is 1"):
        mx.quantize_(net, recipe)
    assert net.weight is before


def test_a_recipes_class_is_a_type_error():
    with pytest.raises(TypeError, match=r"cannot quantize with .*MXFP8BlockScaling"):
        mx.quantize_(nn.Linear(64, 48), MXFP8BlockScaling)


# ---------------------------------------------------------------------------------------------- weights it cannot take


@pytest.mark.parametrize("config", [MXFP8, "mxfp8"], ids=["training", "inference"])
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
)
def test_a_weight_that_is_computed_is_an_error_that_changes_nothing(wrap, config):
    net = nn.Sequential(nn.Linear(64, 48), wrap(nn.Linear(48, 32)))
    before = net[0].weight
    with pytest.raises(
        ValueError, match=r"1.weight is not a parameter but computed from others.*filter_fn, or train inside"
    ):
        mx.quantize_(net, config)
    assert net[0].weight is before
    mx.quantize_(net, config, lambda module, fqn: fqn == "0")
    assert net(torch.randn(3, 64)).shape == (3, 32)


@pytest.mark.parametrize("config", [MXFP8, "mxfp8"], ids=["training", "inference"])
def test_a_buffer_as_weight_is_an_error_that_names_the_way_out(config):
    net = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    values = net[1].weight.detach()
    del net[1].weight
    net[1].register_buffer("weight", values)
    with pytest.raises(ValueError, match=r"1.weight is a buffer.*nn.Parameter.*filter_fn, or train inside"):
        mx.quantize_(net, config)
    del net[1].weight
    net[1].weight = nn.Parameter(values, requires_grad=False)
    mx.quantize_(net, config)
    assert net(torch.randn(3, 64)).shape == (3, 32)


def test_a_lazy_module_is_an_error_until_it_has_run():
    net = nn.Sequential(nn.LazyLinear(48))
    with pytest.raises(ValueError, match=r"0.weight has no values yet; run one batch"):
        mx.quantize_(net, MXFP8)
    net(torch.randn(3, 64))
    check_layer(mx.quantize_(net, MXFP8)[0], MXFP8.linear_recipe())


# ---------------------------------------------------------------------------------------------- again, and onward


def test_quantizing_again_replaces_the_recipe():
    net = mx.quantize_(nn.Sequential(nn.Linear(64, 48)), MXFP8)
    memory = net[0].weight.high_precision.data_ptr()
    mx.quantize_(net, MXFP6)
    assert net[0].weight.linear_recipe == MXFP6.linear_recipe() and net[0].weight.high_precision.data_ptr() == memory
    check_layer(net[0], MXFP6.linear_recipe())
    assert type(net.state_dict()["0.weight"]) is torch.Tensor
    net.load_state_dict(net.state_dict(), assign=True)
    assert net[0].weight.linear_recipe == MXFP6.linear_recipe()


@pytest.mark.parametrize("later", [NVFP4BlockScaling(), DelayedScaling(), MXFP6], ids=str)
def test_the_optimizer_goes_on_when_the_recipe_changes(later):
    """The run is that of a model which has had its values and the moments of its optimizer from the start."""

    def made(recipe):
        torch.manual_seed(0)
        net = mx.quantize_(nn.Sequential(nn.Linear(64, 48), Conv1D(32, 48)), recipe)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(net, optimizer):
        torch.manual_seed(1)
        net(torch.randn(20, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (net, optimizer), (twin, fresh) = made(MXFP8), made(later)
    step(net, optimizer)
    twin.load_state_dict(net.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [*net.parameters()]
    mx.quantize_(net, later)
    assert all(p is q for p, q in zip(net.parameters(), before, strict=True))
    assert [net[0].weight.linear_recipe, net[1].weight.linear_recipe] == [
        twin[0].weight.linear_recipe, twin[1].weight.linear_recipe
    ]  # fmt: skip
    for _ in range(2):
        step(net, optimizer)
        step(twin, fresh)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    assert net.state_dict().keys() == twin.state_dict().keys()


def test_a_compiled_model_follows_another_recipe():
    net = mx.quantize_(nn.Linear(64, 48), MXFP8)
    compiled, x = torch.compile(net, backend="aot_eager"), torch.randn(20, 64)
    assert torch.equal(compiled(x), net(x))
    mx.quantize_(net, MXFP6)
    assert torch.equal(compiled(x), net(x))


def test_hooks_of_a_weight_run_after_it_is_quantized():
    net, seen = nn.Linear(64, 48), []
    double = net.weight.register_hook(lambda grad: grad * 2)
    after = net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x, g = torch.randn(20, 64), torch.randn(20, 48)
    mx.quantize_(net, MXFP8)
    net(x).backward(g)
    double.remove()
    after.remove()
    net.weight.grad = None
    net(x).backward(g)
    assert len(seen) == 1 and torch.equal(seen[0], 2 * net.weight.grad)


def test_quantizing_more_of_a_model_leaves_the_rest():
    net = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    mx.quantize_(net, MXFP8, lambda module, fqn: fqn == "0")
    first = net[0].weight
    mx.quantize_(net, MXFP6, lambda module, fqn: fqn == "1")
    assert net[0].weight is first and net[1].weight.linear_recipe == MXFP6.linear_recipe()


def test_another_recipe_of_delayed_scaling_goes_on_from_what_was_recorded():
    net = mx.quantize_(nn.Linear(64, 48), DelayedScaling())
    for _ in range(2):
        net(torch.randn(4, 64)).backward(torch.randn(4, 48))
    state = net.weight._mxtensor_delayed_state
    mx.quantize_(net, DelayedScaling(margin=1))
    other = net.weight._mxtensor_delayed_state
    assert other is not state and torch.equal(other.scale, state.scale / 2) and (state.scale != 1).all()
    assert torch.equal(other.history, state.history) and torch.equal(other.record, state.record)


def test_assigning_a_state_dict_keeps_the_amax_history():
    net = mx.quantize_(nn.Linear(64, 48), DelayedScaling())
    for _ in range(2):
        net(torch.randn(4, 64)).backward(torch.randn(4, 48))
    state = net.weight._mxtensor_delayed_state
    net.load_state_dict(nn.Linear(64, 48).state_dict(), assign=True)
    assert net.weight._mxtensor_delayed_state is state


@pytest.mark.parametrize("config", ["mxfp8", "nvfp4", "mxfp8-weight-only"])
def test_a_trained_model_is_quantized_for_inference(config):
    """It is quantized from its high-precision values, as if it had never been quantized for training."""
    net = mx.quantize_(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)), MXFP8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        net(torch.randn(20, 64)).backward(torch.randn(20, 32))
        optimizer.step()
    plain = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    plain.load_state_dict(net.state_dict())
    x = torch.randn(20, 64)
    trained = net(x).detach()
    mx.quantize_(plain, config)
    mx.quantize_(net, config)
    assert isinstance(net[0].weight, mx.MXTensor) and not net[0].weight.requires_grad
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))
        if config == "mxfp8":
            assert torch.equal(net(x), trained)


def test_a_model_quantized_for_inference_is_not_quantized_for_training():
    """Its high-precision values no longer exist."""
    net = mx.quantize_(nn.Linear(64, 48), "mxfp8")
    weight = net.weight
    with pytest.warns(UserWarning, match="changed nothing"):
        mx.quantize_(net, MXFP8)
    assert net.weight is weight


def test_a_model_trains():
    """The loss of high precision falls tenfold; that of MXFP8 is at most a fifth larger; that of MXFP4 falls too."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(256, 32)
    target = teacher(x).detach()
    losses = {}
    for name, recipe in (("plain", None), ("mxfp8", MXFP8), ("mxfp4", MXFP4BlockScaling())):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        if recipe is not None:
            mx.quantize_(net, recipe)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(60):
            loss = nn.functional.mse_loss(net(x), target)
            losses.setdefault(name, [loss.item()])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name].append(loss.item())
    assert losses["mxfp8"][1] < 1.2 * losses["plain"][1] < 0.1 * losses["plain"][0]
    assert losses["mxfp4"][1] < 0.2 * losses["mxfp4"][0]


def test_a_training_model_loads_the_values_of_a_model_for_inference():
    source, target = (mx.quantize_(nn.Linear(64, 32), c) for c in ("mxfp8", mx.recipe.MXFP8BlockScaling()))
    target.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(values_of(target.weight), source.weight.dequantize())
    target(torch.randn(4, 64)).square().sum().backward()
    torch.optim.SGD(target.parameters(), 0.1).step()
    assert not torch.equal(values_of(target.weight), source.weight.dequantize())


def test_a_model_made_on_meta_has_histories_on_the_device_of_its_values():
    with torch.device("meta"):
        layer = mx.quantize_(nn.Linear(64, 32), mx.recipe.DelayedScaling())
    source = nn.Linear(64, 32)
    layer.load_state_dict(source.state_dict(), assign=True)
    twin, x = mx.quantize_(nn.Linear(64, 32), mx.recipe.DelayedScaling()), torch.randn(4, 64)
    twin.load_state_dict(source.state_dict())
    assert torch.equal(layer(x), twin(x))
