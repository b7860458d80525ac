"""transformers' stacked experts train quantized, as each of its implementations runs them; what cannot is named."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.convert import training
from mxtensor.training.training_weight import TrainingWeight

transformers = pytest.importorskip("transformers")
RECIPE = mx.recipe.MXFP8BlockScaling()
NVFP4 = mx.recipe.NVFP4BlockScaling()
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "decoder_sparse_step": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
LATENT = {"head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EVERY = ["eager", "batched_mm", "grouped_mm"]
MODELS = {
    # name: what its configuration differs in, and the implementations that it has
    "Mixtral": ({}, EVERY),
    "Olmoe": ({}, EVERY),
    "Qwen3Moe": ({}, EVERY),
    "Glm4Moe": ({}, EVERY),
    "DeepseekV3": ({**LATENT, "v_head_dim": 16}, EVERY),
    "GptOss": ({}, EVERY),
    "GraniteMoe": ({}, ["eager"]),
    "Llama4": ({}, ["eager"]),
    "JetMoe": ({}, ["eager"]),
}
CASES = [(name, way) for name, (_, ways) in MODELS.items() for way in ways]
IDS = torch.arange(16).reshape(2, 8)


def built(name, way="eager"):
    config = getattr(transformers, {"Llama4": "Llama4TextConfig"}.get(name, f"{name}Config"))
    model = getattr(transformers, f"{name}ForCausalLM")(config(**{**SIZES, **MODELS[name][0]}))
    if len(MODELS[name][1]) > 1:
        model.set_experts_implementation(way)
    return model


def stacks(model):
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


def quietly(model, recipe=RECIPE, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return mx.quantize_(model, recipe, *args)


def left_in_high_precision(log):
    return [e for e in log.entries if any("stacked experts" in reason for reason in e.refusals.values())]


# ---------------------------------------------------------------------------------------------- which parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_expert_carries_the_recipe_and_routers_and_heads_do_not(name):
    model = quietly(built(name))
    weights = {name: isinstance(p, TrainingWeight) for name, p in model.named_parameters()}
    assert stacks(model) and all(weights[name] for name in stacks(model))
    for name, carries in weights.items():
        if "router" in name or name.endswith(
            ("lm_head.weight", "mlp.gate.weight", "embed_tokens.weight", "norm.weight")
        ):
            assert not carries, name
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(n for name, n in numbers.items() if weights[name]) > 0.7 * sum(numbers.values())


def test_a_filter_decides_about_experts_too():
    model = quietly(built("Mixtral"), RECIPE, lambda module, fqn: fqn.endswith("experts"))
    assert {n for n, p in model.named_parameters() if isinstance(p, TrainingWeight)} == set(stacks(model))
    model = quietly(built("Mixtral"), RECIPE, lambda module, fqn: isinstance(module, nn.Linear))
    assert not any(isinstance(p, TrainingWeight) for p in stacks(model).values())
    with mx.strict():  # nobody asked for quantized experts
        model(IDS)


def test_copies_train_and_experts_are_quantized_for_inference_later():
    model = quietly(quietly(built("Mixtral")))
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with mx.strict():
            twin(IDS).logits.sum().backward()
        assert all(p.grad.any() for p in stacks(twin).values())
    mx.quantize_(model, "mxfp8")
    assert all(isinstance(p, mx.MXTensor) for p in stacks(model).values())
    with torch.no_grad(), mx.strict():
        model(IDS)


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_histories_of_stacks_and_of_slices_are_in_the_state_dict(way):
    recipe = mx.recipe.DelayedScaling(amax_history_len=4)
    model = quietly(built("Mixtral", way), recipe)
    for _ in range(2):
        model(IDS).logits.square().sum().backward()
    loaded = quietly(built("Mixtral", way), recipe)
    loaded.load_state_dict(model.state_dict())
    for each in (model, loaded):
        each.zero_grad()
        each(IDS).logits.square().sum().backward()
    for one, other in zip(stacks(model).values(), stacks(loaded).values(), strict=True):
        assert torch.equal(one.grad, other.grad) and one.grad.any()


# ---------------------------------------------------------------------------------------------- products


def ways_in(name, way, recipe, path):
    """A model and the block in which its experts run quantized."""
    model = built(name, way)
    if path == "quantize_":
        return quietly(model, recipe), nullcontext
    return model, lambda: mx.autocast(recipe=recipe)


@pytest.mark.exhaustive(quick=5)
@pytest.mark.parametrize("path", ["quantize_", "autocast"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_explain_names_every_product_and_strict_accepts_them(name, way, path):
    model, block = ways_in(name, way, RECIPE, path)
    with mx.strict(), mx.explain() as log:
        with block():
            y = model(IDS).logits
        y.square().sum().backward()
    assert not [e for e in log.entries if e.kernel == "high precision"]
    ops = [e.spec.op for e in log.entries]
    assert ops.count("fprop") == ops.count("dgrad") == ops.count("wgrad")
    multiplied = [e.spec.shapes[1][-2:] for e in log.entries if e.spec.op == "fprop"]
    for stack in stacks(model).values():
        assert stack.grad.any()
        matrix = tuple(stack.shape[1:])
        assert matrix in multiplied or matrix[::-1] in multiplied
    if way != "eager" or name == "Llama4":  # one product for all experts
        whole = [e for e in log.entries if e.spec.op == "fprop" and len(e.spec.shapes[1]) == 3]
        assert len(whole) == len(stacks(model))
    with torch.no_grad(), mx.strict(), block():
        model.eval()(IDS)


def captured(model):
    """Inputs and gradients of the modules of experts in a step in high precision."""
    calls = {}

    def note(module, args, kwargs, y):
        calls[module] = [args, kwargs, None]
        y.register_hook(lambda grad: calls[module].__setitem__(2, grad.clone()))

    modules = [m for m in model.modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))]
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in modules]
    model(IDS).logits.square().sum().backward()
    for hook in hooks:
        hook.remove()
    return {name: calls[m] for name, m in model.named_modules() if m in calls}


def one_step(module, args, kwargs, grad, block):
    module.zero_grad()
    x = args[0].detach().clone().requires_grad_()
    with block():
        y = module(x, *(a.detach() if isinstance(a, torch.Tensor) else a for a in args[1:]), **kwargs)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.dim() == 3)]


LIMITS = [(RECIPE, 0.12), (mx.recipe.MXFP6BlockScaling(), 0.12), (mx.recipe.Float8CurrentScaling(), 0.14), (NVFP4, 0.5)]


def check_gradients(name, way, path, recipe, limit):
    """Inputs and routing are those of a twin in high precision. Two products and the rounding of their operands: an
    MXFP8 product differs by 3.7 % and more for values that are not Gaussian."""
    model = built(name, way)
    calls = captured(model)
    twin = copy.deepcopy(model)
    if path == "quantize_":
        quietly(model, recipe)
    for fqn, (args, kwargs, grad) in calls.items():
        exact = one_step(twin.get_submodule(fqn), args, kwargs, grad, nullcontext)
        block = nullcontext if path == "quantize_" else lambda: mx.autocast(recipe=recipe)
        got = one_step(model.get_submodule(fqn), args, kwargs, grad, block)
        for one, other in zip(got, exact, strict=True):
            error = ((one - other).norm() / other.norm()).item()
            assert 0 < error < limit, f"{fqn}: {error:.3f}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ["quantize_", "autocast"])
@pytest.mark.parametrize(("recipe", "limit"), LIMITS, ids=["mxfp8", "mxfp6", "float8", "nvfp4"])
@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.pairs
def test_gradients_are_within_quantization_error_of_high_precision(name, way, recipe, limit, path):
    check_gradients(name, way, path, recipe, limit)


@pytest.mark.parametrize("case", [("Mixtral", "grouped_mm"), ("GptOss", "batched_mm"), ("Llama4", "eager")])
def test_gradients_of_one_model_for_each_mechanism(case):
    check_gradients(*case, "quantize_", RECIPE, 0.12)


def test_the_implementations_agree():
    """Grouped and looped products cast the same groups of rows; gathered ones cast each row alone in wgrad."""
    model = quietly(built("Mixtral", "eager"))
    looped = model(IDS).logits
    model.set_experts_implementation("grouped_mm")
    torch.testing.assert_close(model(IDS).logits, looped, rtol=1e-4, atol=1e-5)
    model.set_experts_implementation("batched_mm")
    torch.testing.assert_close(model(IDS).logits, looped, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize("path", ["quantize_", "autocast"])
@pytest.mark.parametrize("way", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_trains_as_in_eager_code(way, path, dtype):
    """In float32 transformers compiles its own grouped product in place of torch's."""
    torch._dynamo.reset()
    model, block = ways_in("Mixtral", way, RECIPE, path)
    model = model.to(dtype)
    twin = copy.deepcopy(model)
    with block():
        expected = twin(IDS).logits
    expected.float().square().sum().backward()
    with block(), mx.strict(), mx.explain() as log:
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS).logits
    y.float().square().sum().backward()
    torch.testing.assert_close(y, expected)
    assert any(len(e.spec.shapes[1]) == 3 for e in log.entries if e.spec.op == "fprop")
    for one, other in zip(stacks(model).values(), stacks(twin).values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- experts of no kind


class OddExperts(nn.Module):
    """Experts under names that quantize_ does not know, in one matrix (as DBRX has them)."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4 * 16, 32)), nn.Parameter(torch.randn(4 * 16, 32))
        self.bias = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        w1, w2 = self.w1.view(4, 16, 32), self.w2.view(4, 16, 32)
        return sum((x @ a.t() + b).relu() @ c for a, b, c in zip(w1, self.bias, w2, strict=True))


def test_experts_of_an_unknown_kind_are_named():
    model = nn.Sequential(nn.Linear(32, 32), OddExperts())
    with pytest.warns(UserWarning, match=r"quantize_: 1 stay .* 4,096 of 5,216 parameters \(79%\): they are stacked"):
        mx.quantize_(model, RECIPE)
    with mx.explain() as log:
        model(torch.randn(3, 32))
    assert [e.spec.op for e in left_in_high_precision(log)] == ["OddExperts.w1", "OddExperts.w2"]
    with mx.strict(), pytest.raises(NotImplementedError, match=r"OddExperts.w1 would multiply by a stack of weights"):
        model(torch.randn(3, 32))


def test_a_model_of_unknown_experts_changes_nothing():
    with pytest.warns(
        UserWarning, match=r"^quantize_ changed nothing: OddExperts stay in high precision, with 4,096 of"
    ):
        mx.quantize_(OddExperts(), RECIPE)


OTHERS = {
    "attention": lambda: torch.bmm(torch.ones(4, 3, 32), torch.ones(4, 32, 3)),
    "of a product": lambda: torch.bmm(torch.ones(4, 3, 32), torch.exp(nn.Parameter(torch.randn(4, 32, 16)))),
    "plain": lambda: torch.ones(4, 3, 32) @ torch.randn(32, 8),
}


@pytest.mark.parametrize("product", OTHERS)
def test_products_without_a_stack_are_left_alone(product):
    with mx.explain() as log, mx.strict(), mx.autocast(recipe=RECIPE):
        OTHERS[product]()
    assert log.entries == []


@pytest.mark.exhaustive
def test_a_compiled_model_runs_as_before():
    model, x = nn.Sequential(nn.Linear(32, 32), OddExperts()), torch.randn(3, 32)
    with pytest.warns(UserWarning):
        mx.quantize_(model, RECIPE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    bare = nn.Sequential(OddExperts())
    with mx.autocast(recipe=RECIPE):
        torch.testing.assert_close(torch.compile(bare, fullgraph=True, backend="aot_eager")(x), bare(x))
    torch._dynamo.reset()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 32))

    def forward(self, x):
        return torch.einsum("eth,eih->eti", x, self.weight)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["watched", "autocast"])
def test_compiled_products_in_high_precision_are_logged_and_refused(way, fullgraph):
    torch._dynamo.reset()
    model, x = Stack(), torch.randn(4, 3, 32)
    if way == "watched":
        training.watch(model, "weight")
    around = nullcontext if way == "watched" else lambda: mx.autocast(recipe=RECIPE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    with around(), mx.explain() as log:
        expected = compiled(x)
    assert len(left_in_high_precision(log)) == 1
    refused = (NotImplementedError, torch._dynamo.exc.Unsupported)
    with around(), mx.strict(), pytest.raises(refused, match="stack of weights"):
        compiled(x)
    with around():
        torch.testing.assert_close(compiled(x), expected)


def test_a_compiled_model_without_stacks_is_not_refused():
    model, x = nn.Linear(32, 32), torch.randn(3, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with mx.autocast(recipe=RECIPE), mx.strict(), mx.explain() as log:
        compiled(x).sum().backward()
    assert left_in_high_precision(log) == []
