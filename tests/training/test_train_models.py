"""Models of transformers, unmodified, trained quantized: the loss falls, and every product of a step is counted."""

from collections import Counter

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor import recipe
from mxtensor.training.training_weight import TrainingWeight

pytest.importorskip("transformers")

from benchmarks.models import CASES, VOCABULARY

# transformers 6 renames it
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

PRODUCTS = ("fprop", "dgrad", "wgrad")
MASK = 3
"""A token that stands for those that BERT is to guess."""


def text():
    """The task is to predict each next token."""
    ids = torch.randint(4, VOCABULARY, (4, 16))
    return {"input_ids": ids, "labels": ids}


def masked_text():
    """The task is to predict every fourth token from the others."""
    ids = torch.randint(4, VOCABULARY, (4, 16))
    hidden = torch.arange(16) % 4 == 1
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def images():
    """Eight images of noise, each with a class that the model must memorize."""
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}


# model: (its task, number of quantized layers, linear layers and tied heads that stay plain)
TASKS = {
    "llama": (text, 7, ["lm_head"]),
    "gpt2": (text, 2 * 4, ["lm_head"]),
    "bert": (masked_text, 2 * 6 + 1, ["cls.predictions.decoder"]),
    "vit": (images, 6 + 1, []),
}
"""Not counted: embeddings and ViT's patches, which a convolution makes."""


def is_linear(module):
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def quantized(name, config=None):
    """The model of a case in training mode, its linear layers by ``config`` (MXFP8), and its task."""
    model = CASES[name].build().train()
    return mx.quantize_(model, config or recipe.MXFP8BlockScaling()), TASKS[name][0]()


def weights_of(model):
    """(out, in) of every weight that carries a recipe, and how often it occurs."""
    layers = [m for m in model.modules() if is_linear(m) and isinstance(m.weight, TrainingWeight)]
    return Counter(tuple(m.weight.shape if isinstance(m, nn.Linear) else m.weight.shape[::-1]) for m in layers)


def weight_of(entry):
    """(out, in) of the layer that a logged product belongs to."""
    (a0, a1), (b0, b1) = entry.spec.shapes
    return {"fprop": (b0, b1), "dgrad": (a1, b0), "wgrad": (a0, b0)}[entry.spec.op]


def quantized_products(log):
    """Product -> the (out, in) of the layers whose product of that name ran on two quantized operands."""
    found = {op: Counter() for op in PRODUCTS}
    for entry in log.entries:
        if entry.spec.op in found:
            assert all(isinstance(format, mx.Format) for format in entry.spec.formats), entry
            found[entry.spec.op][weight_of(entry)] += 1
    return found


def explained(model, batch):
    """The quantized products of one forward and backward pass, and the loss."""
    with mx.explain() as log:
        loss = model(**batch).loss
        loss.backward()
    return quantized_products(log), loss.item()


def optimize(model, batch, steps):
    """The loss of each of ``steps`` steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", TASKS)
def test_fifty_steps_learn_the_task(name):
    model, batch = quantized(name)
    losses = optimize(model, batch, 50)
    assert losses[0] > 2  # about the logarithm of the number of classes
    assert sum(losses[-5:]) / 5 < losses[0] / 4


@pytest.mark.parametrize("name", TASKS)
def test_every_layer_except_the_skipped_ones_runs_three_quantized_products_per_step(name):
    model, batch = quantized(name)
    _, layers, skipped = TASKS[name]
    plain = [fqn for fqn, m in model.named_modules() if is_linear(m) and not isinstance(m.weight, TrainingWeight)]
    assert plain == skipped
    assert weights_of(model).total() == layers
    for _ in range(2):
        found, _ = explained(model, batch)
        # Every layer's input depends on a parameter (an embedding, a norm), so every layer has a dgrad.
        assert found == dict.fromkeys(PRODUCTS, weights_of(model))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_whose_input_needs_no_gradient_has_no_dgrad():
    model = mx.quantize_(nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)), recipe.MXFP8BlockScaling())
    with mx.explain() as log:
        model(torch.randn(8, 48)).backward(torch.randn(8, 32))
    both, second = Counter({(64, 48): 1, (32, 64): 1}), Counter({(32, 64): 1})
    assert quantized_products(log) == {"fprop": both, "dgrad": second, "wgrad": both}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_recomputation_stays_quantized(name, use_reentrant):
    """With gradient checkpointing, fprop inside a checkpoint runs twice, and the gradients are the same."""
    torch.manual_seed(0)
    model, batch = quantized(name)
    model.apply(without_dropout)
    _, loss = explained(model, batch)
    expected = {fqn: parameter.grad.clone() for fqn, parameter in model.named_parameters()}
    model.zero_grad()

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    found, recomputed_loss = explained(model, batch)
    outside = {"llama": Counter(), "bert": Counter({(64, 64): 1})}[name]  # BERT's layer before its head
    once = weights_of(model)
    assert found == {"fprop": once + once - outside, "dgrad": once, "wgrad": once}
    assert recomputed_loss == loss
    for fqn, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[fqn]), fqn


def without_dropout(module):
    if isinstance(module, nn.Dropout):
        module.p = 0.0


RECIPES = [
    recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID),
    recipe.MXFP6BlockScaling(),
    recipe.MXFP4BlockScaling(),
    recipe.NVFP4BlockScaling(),
    recipe.Float8CurrentScaling(),
    recipe.DelayedScaling(amax_history_len=16),
    recipe.Float8BlockScaling(),
    recipe.CustomRecipe("mxint8", "mxfp6_e2m3", "mxfp8_e5m2"),
    mx.ao.MXLinearConfig(),
]


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("config", RECIPES, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_recipe_trains(name, config):
    model, batch = quantized(name, config)
    model.apply(without_dropout)
    found, _ = explained(model, batch)
    assert found == dict.fromkeys(PRODUCTS, weights_of(model))
    model.zero_grad()
    losses = optimize(model, batch, 20)
    assert losses[-1] < 0.75 * losses[0]


def test_recomputation_does_not_change_the_state_of_delayed_scaling():
    """One step of a layer is one step of its amax history, however often its fprop runs."""
    amaxes = []
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        torch.manual_seed(0)
        model, batch = quantized("llama", recipe.DelayedScaling(amax_history_len=8))
        if kwargs is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        losses = optimize(model, batch, 3)
        amaxes.append((losses, [state_of(p).history for p in model.parameters() if isinstance(p, TrainingWeight)]))
    (losses, histories), *others = amaxes
    assert all((history != 0).any(1).sum() == 2 for history in histories)  # that of step 3 enters at step 4
    for other_losses, other_histories in others:
        assert other_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(histories, other_histories, strict=True))


def state_of(weight):
    from mxtensor.training.interception import delayed_state

    return delayed_state(weight, weight.linear_recipe)


def test_the_history_of_a_transposed_weight_grows():
    """GPT-2's Conv1D multiplies by a view of its weight, which each call creates."""
    model, batch = quantized("gpt2", recipe.DelayedScaling(amax_history_len=8))
    optimize(model, batch, 3)
    for parameter in model.parameters():
        if isinstance(parameter, TrainingWeight):
            assert (state_of(parameter).history != 0).any(1).sum() == 2


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_torch_autocast_sets_the_dtype_of_unquantized_layers(name):
    model, batch = quantized(name)
    with torch.autocast("cpu", torch.bfloat16), mx.explain() as log:
        loss = model(**batch).loss
    loss.backward()
    entries = [entry for entry in log.entries if entry.spec.op == "fprop"]
    assert {entry.spec.dtype for entry in entries} == {torch.bfloat16}
    assert Counter(map(weight_of, entries)) == weights_of(model)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
