"""Stacked experts do not train quantized: quantize_ names them, explain() logs them, strict() raises."""

import copy
import pickle
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.convert import left_out

transformers = pytest.importorskip("transformers")
RECIPE = mx.recipe.MXFP8BlockScaling()
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "decoder_sparse_step": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
LATENT = {"head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MODELS = {
    # name: what its configuration differs in, and the implementations that it has
    "Mixtral": ({}, ["eager", "batched_mm", "grouped_mm"]),
    "Olmoe": ({}, ["eager", "batched_mm", "grouped_mm"]),
    "Qwen3Moe": ({}, ["eager", "batched_mm", "grouped_mm"]),
    "Glm4Moe": ({}, ["eager", "batched_mm", "grouped_mm"]),
    "DeepseekV3": ({**LATENT, "v_head_dim": 16}, ["eager", "batched_mm", "grouped_mm"]),
    "GptOss": ({}, ["eager", "batched_mm", "grouped_mm"]),
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


def left_in_high_precision(log):
    return [e for e in log.entries if any("stacked experts" in reason for reason in e.refusals.values())]


def quietly(model, recipe=RECIPE):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return mx.quantize_(model, recipe)


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("name", MODELS)
def test_a_warning_names_what_is_left_out(name):
    model = built(name)
    experts = stacks(model)
    number, total = sum(p.numel() for p in experts.values()), sum(p.numel() for p in model.parameters())
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in experts))
    with pytest.warns(UserWarning) as caught:
        mx.quantize_(model, RECIPE)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith(f"quantize_: {', '.join(modules[:3])}") and number / total > 0.5
    assert f"with {number:,} of {total:,} parameters ({number / total:.0%}): they are stacked experts" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.quantize_(built(name), "mxfp8")  # for inference nothing is left out


@pytest.mark.exhaustive(quick=5)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_explain_logs_and_strict_refuses_products_of_a_converted_model(name, way):
    model = quietly(built(name, way))
    with mx.explain() as log:
        model(IDS).logits.sum().backward()
    entries = left_in_high_precision(log)
    assert {e.spec.shapes[1] for e in entries} == {tuple(p.shape) for p in stacks(model).values()}
    assert {e.kernel for e in entries} == {"high precision"} and len(entries) == len(stacks(model))
    assert any(e.spec.op == "fprop" for e in log.entries) and all(p.grad is not None for p in stacks(model).values())
    with mx.strict(), pytest.raises(NotImplementedError, match=r"by a stack of weights \(4, .* in high precision"):
        model(IDS)
    with torch.no_grad(), mx.explain() as log:
        copy.deepcopy(model).eval()(IDS)
    assert len(left_in_high_precision(log)) == len(stacks(model))


@pytest.mark.exhaustive(quick=5)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_explain_logs_and_strict_refuses_products_under_autocast(name, way):
    """A loop of F.linear over slices runs quantized; all other products by a stack do not."""
    model = built(name, way)
    with mx.explain() as log, mx.autocast(recipe=RECIPE):
        model(IDS)
    with torch.no_grad(), mx.explain() as evaluation, mx.autocast(recipe=RECIPE):
        model(IDS)
    loops = way == "eager" and name not in ("GptOss", "Llama4")
    for each in (log, evaluation):
        assert bool(left_in_high_precision(each)) is not loops
    context = nullcontext() if loops else pytest.raises(NotImplementedError, match="by a stack of weights")
    with mx.strict(), mx.autocast(recipe=RECIPE), context:
        model(IDS)
    with mx.strict(), mx.autocast(enabled=False):  # nobody asked for quantized products
        model(IDS)


def test_a_filter_that_passes_only_experts_is_told_the_truth():
    model = built("Mixtral")
    before = dict(model.named_parameters())
    with pytest.warns(
        UserWarning,
        match=r"changed nothing: model.layers.0.mlp.experts stay in .*, with 12,288 of .*, which do not train",
    ):
        mx.quantize_(model, RECIPE, lambda module, fqn: fqn.endswith("experts"))
    assert all(p is before[name] for name, p in model.named_parameters())
    with mx.strict(), pytest.raises(NotImplementedError, match="stack of weights"):
        model(IDS)


def test_experts_that_the_filter_skips_are_not_named():
    model = built("Mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.quantize_(model, RECIPE, lambda module, fqn: isinstance(module, nn.Linear) and "gate" not in fqn)
    with mx.strict():
        model(IDS)


def test_copies_note_once_and_experts_that_are_quantized_later_are_left_alone():
    model = quietly(quietly(built("Mixtral")))
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with mx.explain() as log:
            twin(IDS)
        assert len(left_in_high_precision(log)) == 2
    quietly(model, "mxfp8")
    with mx.explain() as log, torch.no_grad():
        model(IDS)
    assert not left_in_high_precision(log)


class OddExperts(nn.Module):
    """Experts under names that quantize_ does not know, in one matrix (as DBRX has them)."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4 * 16, 32)), nn.Parameter(torch.randn(4 * 16, 32))
        self.bias = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        w1, w2 = self.w1.view(4, 16, 32), self.w2.view(4, 16, 32)
        return sum((x @ a.t() + b).relu() @ c for a, b, c in zip(w1, self.bias, w2, strict=True))


def test_experts_of_an_unknown_kind_are_named_too():
    model = nn.Sequential(nn.Linear(32, 32), OddExperts())
    with pytest.warns(UserWarning, match=r"quantize_: 1 stay .* 4,096 of 5,216 parameters \(79%\): they are stacked"):
        mx.quantize_(model, RECIPE)
    with mx.explain() as log:
        model(torch.randn(3, 32))
    assert [e.spec.op for e in left_in_high_precision(log)] == ["OddExperts.w1", "OddExperts.w2"]


STACK = nn.Parameter(torch.randn(4, 32, 16))
X, GROUPS = torch.randn(4, 3, 32), torch.tensor([3, 6, 9, 12], dtype=torch.int32)
INDEX = torch.tensor([0, 2, 2, 1])
PRODUCTS = {
    "bmm": lambda w: torch.bmm(X, w),
    "bmm of gathered": lambda w: torch.bmm(X, w[INDEX]),
    "bmm of index_select": lambda w: X.bmm(torch.index_select(w, 0, INDEX)),
    "baddbmm": lambda w: torch.baddbmm(torch.zeros(4, 3, 16), X, w),
    "matmul": lambda w: X @ w,
    "matmul of the transpose": lambda w: torch.matmul(torch.randn(4, 3, 16), w.transpose(1, 2)),
    "left operand": lambda w: torch.bmm(w.mT[INDEX], X.mT),
    "slice": lambda w: X[0] @ w[1],
    "mm": lambda w: torch.mm(X[0], w[1]),
    "addmm": lambda w: torch.addmm(torch.zeros(16), X[0], w[1]),
    "unbound": lambda w: X[0] @ w.unbind()[2],
    "einsum": lambda w: torch.einsum("eti,eio->eto", X, w),
    "cast": lambda w: X.bfloat16() @ w.bfloat16(),
    "grouped": lambda w: torch._grouped_mm(X.reshape(12, 32).bfloat16(), w.bfloat16(), offs=GROUPS),
    "grouped of the transpose": lambda w: F.grouped_mm(
        torch.randn(12, 16).bfloat16(), w.bfloat16().transpose(1, 2), offs=GROUPS
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_product_by_a_stack_is_noted_under_autocast(product):
    with mx.explain() as log, mx.autocast(recipe=RECIPE):
        y = PRODUCTS[product](STACK)
    (entry,) = left_in_high_precision(log)
    assert entry.kernel == "high precision" and re.search(r"experts", log.table(refused=True))
    assert torch.equal(y, PRODUCTS[product](STACK)) or "randn" in product or "transpose" in product
    with mx.strict(), mx.autocast(recipe=RECIPE), pytest.raises(NotImplementedError, match="stack of weights"):
        PRODUCTS[product](STACK)


OTHERS = {
    "attention": lambda: torch.bmm(X, X.mT),
    "of a product": lambda: torch.bmm(X, torch.exp(STACK)),
    "plain": lambda: X @ torch.randn(32, 8),
    "gathered of a matrix": lambda: F.embedding(INDEX, nn.Parameter(torch.randn(8, 4))) @ torch.randn(4, 4),
}


@pytest.mark.parametrize("product", OTHERS)
def test_other_products_are_not_noted(product):
    with mx.explain() as log, mx.strict(), mx.autocast(recipe=RECIPE):
        OTHERS[product]()
    assert log.entries == []


def test_a_compiled_model_runs_as_before():
    model, x = quietly(nn.Sequential(nn.Linear(32, 32), OddExperts())), torch.randn(3, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    bare = nn.Sequential(OddExperts())
    with mx.autocast(recipe=RECIPE):
        torch.testing.assert_close(torch.compile(bare, fullgraph=True, backend="aot_eager")(x), bare(x))
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- compiled


class Stack(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(4, 64, 32)), product

    def forward(self, x):
        return self.product(x, self.weight)


PICKED = torch.tensor([0, 1, 1, 2])
COMPILED = {
    "bmm of a view": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "einsum": lambda x, w: torch.einsum("eth,eih->eti", x, w),
    "matmul of a copy": lambda x, w: x.bfloat16() @ w.mT.to(torch.bfloat16),
    "bmm of what is gathered": lambda x, w: torch.bmm(x, w[PICKED].transpose(1, 2)),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["quantize_", *COMPILED])
def test_compiled_products_are_logged_and_refused(way, fullgraph):
    torch._dynamo.reset()
    model, x = Stack(COMPILED.get(way, COMPILED["bmm of a view"])), torch.randn(4, 3, 32)
    if way == "quantize_":
        left_out.watch(model, "weight")
    around = nullcontext if way == "quantize_" else lambda: mx.autocast(recipe=RECIPE)
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
