"""Models of transformers: the rows of benchmarks/models.py are true, and logits are those of the rounded operands."""

import copy
import itertools
import json
from dataclasses import asdict
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from tests.helpers.compare import dequantized, relative_error

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks import models
from benchmarks.models import CASES, TOKENS, built, logits

pytestmark = [
    # torch's own: inductor imports torch.utils.mkldnn, which still uses torch.jit
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


RECORD = dict(zip(CASES, models.recorded(), strict=True))
MACHINE = json.loads(models.RECORD.read_text())[models.SECTION]["machine"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


# peft uses a name that transformers has deprecated
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_model_runs_compiles_and_learns_as_the_record_says(name):
    row = models.row(name)
    assert row.compiled.startswith("same logits" if CASES[name].token_input is None else f"same {TOKENS} tokens")
    assert row.lora
    assert 0 < row.layers <= row.candidates
    assert row.bits == 8.25
    assert 0.01 < row.errors["mxfp8"] < 0.1
    assert all(0.05 < row.errors[four_bits] < 0.3 for four_bits in ("nvfp4", "mxfp4-weight-only"))
    found, shown = asdict(row), RECORD[name] | {"loaded": False}
    errors, recorded = found.pop("errors"), shown.pop("errors")
    if all(version(name) == MACHINE["versions"][name] for name in ("torch", "transformers")):  # they draw the weights
        assert errors == pytest.approx(recorded, rel=0.1)
    assert found == shown, "write the record again: python -m benchmarks models"


@pytest.mark.exhaustive
def test_saved_models_compute_the_same_in_a_new_process():
    assert models.loaded_elsewhere(CASES) == dict.fromkeys(CASES, True)
    assert all(shown["loaded"] for shown in RECORD.values())


@pytest.mark.parametrize("name", CASES)
def test_weight_only_logits_are_those_of_the_dequantized_weights(name):
    for config in ("mxfp8-weight-only", "nvfp4-weight-only"):
        model = built(name, config)
        assert relative_error(logits(name, model), logits(name, dequantized(model))) < 1e-5


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("vit", "resnet")])
@pytest.mark.parametrize("config", ["mxfp8-weight-only", "nvfp4-weight-only"])
def test_logits_with_a_quantized_head_are_those_of_the_dequantized_weights(config, name):
    model = built(name)
    tied = {n for n, p in model.named_parameters(remove_duplicate=False) if "lm_head" in n}
    before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    mx.quantize_(model, config, include_head=True)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(isinstance(after[n], mx.MXTensor) for n in tied)
    for first, second in itertools.combinations(before, 2):  # what was one weight is one
        assert (before[first] == before[second]) == (after[first] is after[second]), (first, second)
    assert relative_error(logits(name, model), logits(name, dequantized(model))) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if name != "mixtral"])
def test_logits_are_those_of_rounded_weights_and_rounded_inputs(name):
    """The definition: a plain model with dequantized weights whose layers round their inputs."""
    model = built(name, "mxfp8")
    plain = dequantized(model)
    for layer, by_hand in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(getattr(layer, "weight", None), mx.MXTensor):
            by_hand.register_forward_pre_hook(lambda _, x: (mx.quantize(x[0], "mxfp8").dequantize(),))
    assert relative_error(logits(name, model), logits(name, plain)) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_no_weight_is_dequantized(name):
    model = built(name, "mxfp8")
    with mx.strict():
        logits(name, model)
        if CASES[name].token_input is not None:
            models.generated(name, model)


WAYS = ("eager", "batched_mm", "grouped_mm")
"""transformers' ways to multiply experts, ``set_experts_implementation``."""


@pytest.mark.parametrize("way", WAYS)
def test_experts_multiply_with_every_implementation_of_transformers(way):
    model = built("mixtral", "mxfp8")
    expected = logits("mixtral", model)
    model.set_experts_implementation(way)
    with mx.explain() as log:
        got = logits("mixtral", model)
    assert relative_error(got, expected) < 1e-5
    assert "dequantized" not in log.table()


def nemotron():
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = NemotronHConfig(
        hidden_size=64, moe_intermediate_size=96, n_routed_experts=4, moe_latent_size=None, layers_block_type=["moe"]
    )
    return NemotronHExperts(config), (torch.randn(6, 64), torch.randint(4, (6, 2)), torch.rand(6, 2))


def inkling():
    from transformers import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingSharedExperts

    config = InklingTextConfig(hidden_size=64, moe_intermediate_size=96, n_shared_experts=2)
    return InklingSharedExperts(config), (torch.randn(2, 3, 64), torch.rand(2, 3, 2))


def jetmoe():
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    return JetMoeParallelExperts(3, 64, 96), (torch.randn(6, 64), [2, 0, 4])


def quantized(made, way, config, dtype=torch.float32):
    experts, inputs = made()
    experts.to(dtype)
    inputs = [x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    for weight in experts.parameters():
        nn.init.normal_(weight)
    if way is not None:
        experts.config._experts_implementation = way
    return mx.quantize_(experts, config), inputs


@pytest.mark.parametrize("made, way", [*((nemotron, way) for way in WAYS), (inkling, None), (jetmoe, None)])
def test_experts_of_other_layouts_multiply_quantized(made, way):
    experts, inputs = quantized(made, way, "mxfp8-weight-only")
    assert all(w.orientation is mx.Orientation.ROWWISE for w in experts.parameters())
    with torch.no_grad():
        with mx.strict():
            got = experts(*inputs)
        assert relative_error(got, dequantized(experts)(*inputs)) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("made, way", [*((nemotron, way) for way in WAYS), (inkling, None), (jetmoe, None)])
def test_compiled_experts_give_the_same(made, way, dtype):
    """With eager experts, each expert is a view of the weight that crosses from graph to graph. In these dtypes
    transformers compiles its own grouped product in place of torch's."""
    torch._dynamo.reset()
    experts, inputs = quantized(made, way, "mxfp8", dtype)
    with torch.no_grad():
        assert relative_error(torch.compile(experts, backend="aot_eager")(*inputs), experts(*inputs)) < 1e-6


def test_experts_stored_in_by_out_are_quantized_along_the_contraction():
    class Experts(nn.Module):
        is_transposed = True

        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 64, 96))
            self.down_proj = nn.Parameter(torch.randn(3, 48, 64))

    experts = mx.quantize_(nn.ModuleDict({"experts": Experts()}), "mxfp8")["experts"]
    assert experts.gate_up_proj.orientation is mx.Orientation.COLUMNWISE
    x, offs = torch.randn(7, 64), torch.tensor([2, 2, 7], dtype=torch.int32)
    rows, w = mx.quantize(x, "mxfp8").dequantize(), experts.gate_up_proj.dequantize()
    expected = torch.cat([rows[:2] @ w[0], rows[2:] @ w[2]])
    assert relative_error(F.grouped_mm(x, experts.gate_up_proj, offs=offs), expected) < 1e-6
    leaf = x.clone().requires_grad_()
    F.grouped_mm(leaf, experts.gate_up_proj, offs=offs).sum().backward()
    assert relative_error(leaf.grad, torch.cat([w[0].sum(1).expand(2, -1), w[2].sum(1).expand(5, -1)])) < 1e-6


def test_conv1d_stores_one_copy_blocked_along_its_inputs():
    model = built("gpt2", "mxfp8")
    weight = model.transformer.h[0].attn.c_attn.weight
    assert tuple(weight.shape) == (64, 192) and weight.orientation is mx.Orientation.COLUMNWISE
    with mx.explain() as log:
        logits("gpt2", model)
    assert "high precision" not in log.table() and "dequantized" not in log.table()


@pytest.mark.parametrize("name", ["gpt2", "bert", "whisper"])
def test_a_head_that_shares_the_weight_of_an_embedding_keeps_it(name):
    plain = built(name)
    model = mx.quantize_(copy.deepcopy(plain), "mxfp8")
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    assert torch.equal(embedding, plain.get_input_embeddings().weight)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name, layer", [("llama", "model.layers.0.mlp.up_proj"), ("gpt2", "transformer.h.0.mlp.c_fc")])
def test_a_merged_adapter_is_rounded_into_the_weight(name, layer):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=[layer], fan_in_fan_out=name == "gpt2", init_lora_weights=False)
    adapted = get_peft_model(built(name, "mxfp8"), config)
    adapter = adapted.base_model.model.get_submodule(layer)
    weight = adapter.get_base_layer().weight
    expected = weight.dequantize() + adapter.get_delta_weight("default")
    expected = mx.quantize(expected, "mxfp8", orientation=weight.orientation).dequantize()
    with pytest.warns(UserWarning, match="merge_and_unload: 1 weights are in mxfp8_e4m3"):
        merged = adapted.merge_and_unload().get_submodule(layer).weight
    assert isinstance(merged, mx.MXTensor) and torch.equal(merged.dequantize(), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_quantized_experts_learn():
    from peft import LoraConfig, get_peft_model

    model, inputs = built("mixtral", "mxfp8"), CASES["mixtral"].inputs()
    before = models.stored_bytes(model)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=experts)).eval()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    first = adapted(**inputs, labels=inputs["input_ids"]).loss
    first.backward()
    optimizer.step()
    assert adapted(**inputs, labels=inputs["input_ids"]).loss < first
    assert all(torch.equal(a, b) for a, b in zip(before, models.stored_bytes(model), strict=True))


def test_another_module_of_that_name_is_not_a_linear_layer():
    class Conv1D(nn.Conv1d):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Conv1D(64, 64, 3))
    mx.quantize_(model, "mxfp8")
    assert isinstance(model[0].weight, mx.MXTensor) and not isinstance(model[1].weight, mx.MXTensor)
