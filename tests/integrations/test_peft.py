"""peft: adapters train over frozen codes, and a merge says how much of them the rounding takes."""

import copy
import gc
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mxtensor as mx
from mxtensor.integrations import peft as of_peft
from tests.integrations.test_transformers import IDS, MODELS, quantized

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
MERGED = r"{}: 4 weights are in {}, and their sums .* the rounding has [0-9.e-]+ of the norm"


def adapted(path, format, **more):
    MODELS["Llama"]().save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=mx.TransformersConfig(format))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **more))


@pytest.mark.parametrize("format", ["mxfp8-weight-only", "nvfp4-weight-only", "mxfp8"])
def test_adapters_train_and_codes_stay(format, tmp_path):
    model = adapted(tmp_path, format)
    before = {n: p.dequantize().clone() for n, p in model.named_parameters() if isinstance(p, mx.MXTensor)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(4):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] and len(before) == 14
    assert all(torch.equal(p.dequantize(), before[n]) for n, p in model.named_parameters() if n in before)
    assert {p.requires_grad for p in model.parameters() if isinstance(p, mx.MXTensor)} == {False}


@pytest.mark.parametrize("format", ["mxfp8-weight-only", "nvfp4-weight-only"])
def test_a_merge_says_what_it_rounds(format, tmp_path):
    model = adapted(tmp_path, format, init_lora_weights=False)
    layer = model.base_model.model.model.layers[1].self_attn.v_proj
    change, wanted = layer.get_delta_weight("default"), layer.weight.dequantize() + layer.get_delta_weight("default")
    name = mx.get_format(format.removesuffix("-weight-only")).name
    with pytest.warns(UserWarning, match=MERGED.format("merge_and_unload", name)) as caught:
        merged = model.merge_and_unload()
    weight = merged.model.layers[1].self_attn.v_proj.weight
    lost = float(((weight.dequantize() - wanted).norm() / change.norm()).detach())
    said = str(caught[0].message).split("change, ")[1].split(" in ")
    assert len(quantized(merged)) == 14 and lost <= 1.001 * float(said[0]) + 0.01 and "self_attn" in said[1]


def test_a_merge_of_adapters_in_place_warns_too(tmp_path):
    model = adapted(tmp_path, "mxfp8-weight-only", init_lora_weights=False)
    with pytest.warns(UserWarning, match=MERGED.format("merge_adapter", "mxfp8_e4m3")):
        model.merge_adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Already following adapters were merged|All adapters are already merged")
        model.merge_adapter()


def codes_of(model):
    return {n: p.dequantize().clone() for n, p in model.named_parameters() if isinstance(p, mx.MXTensor)}


def changed(model, codes):
    """The weights whose values differ from ``codes``."""
    return {n for n, p in model.named_parameters() if n in codes and not torch.equal(p.dequantize(), codes[n])}


TUNERS = {
    "lora": lambda: peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, use_dora=True, init_lora_weights=False),
    "parameters": lambda: peft.LoraConfig(
        target_modules=[], target_parameters=["q_proj.weight"], r=2, init_lora_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2, init_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, init_weights=False),
}


@pytest.mark.filterwarnings("ignore:merge_adapter. .* weights are in:UserWarning")
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8-weight-only"])
@pytest.mark.parametrize("name", TUNERS)
def test_merged_adapters_leave_the_codes_as_they_were(name, format):
    """Also where a forward pass without adapters takes them out, and in a copy of a merged model."""
    model = peft.get_peft_model(mx.quantize_(MODELS["Llama"](), format), TUNERS[name]()).eval()
    codes = codes_of(model)
    for _ in range(2):
        model.merge_adapter()
        assert changed(model, codes)
        model.unmerge_adapter()
        assert not changed(model, codes)
    model.merge_adapter()
    other = copy.deepcopy(model)
    with model.disable_adapter():
        model(IDS)
    other.unmerge_adapter()
    assert not changed(model, codes) and not changed(other, codes)


def test_a_shared_weight_has_its_codes_when_the_last_layer_has_taken_its_adapter_out():
    net = MODELS["Llama"]()
    net.config.tie_word_embeddings = True
    net.tie_weights()
    config = peft.LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"], r=2, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(mx.quantize_(net, "mxfp8-weight-only", include_head=True), config)
        codes = codes_of(model)
        model.merge_adapter()
    assert any("embed_tokens" in name for name in changed(model, codes))
    model.unmerge_adapter()
    assert not changed(model, codes)


@pytest.mark.filterwarnings("ignore:merge_adapter. .* weights are in:UserWarning")
@pytest.mark.parametrize("dora", [False, True])
def test_the_sum_of_several_adapters_is_rounded_once(dora):
    """Merged one after the other or together, and with DoRA, which takes the others out in between."""
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(mx.quantize_(MODELS["Llama"](), "mxfp4"), config)
    model.add_adapter("other", config)
    codes, twin = codes_of(model), copy.deepcopy(model)
    for module in twin.modules():
        for name, p in [*module._parameters.items()]:
            if isinstance(p, mx.MXTensor):
                setattr(module, name, torch.nn.Parameter(p.dequantize(), requires_grad=False))
    twin.merge_adapter(["default", "other"])
    wanted = twin.base_model.model.model.layers[0].self_attn.q_proj.weight
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    for calls in ([["default", "other"]], [["default"], ["other"]]):
        for names in calls:
            model.merge_adapter(names)
        assert torch.equal(layer.weight.dequantize(), mx.quantize(wanted.detach(), "mxfp4").dequantize())
        model.unmerge_adapter()
        assert not changed(model, codes)


@pytest.mark.filterwarnings("ignore:merge_adapter. .* weights are in:UserWarning")
def test_a_model_that_is_quantized_after_it_has_adapters_is_restored_too():
    model = peft.get_peft_model(MODELS["Llama"](), TUNERS["lora"]())
    mx.quantize_(model, "mxfp8", lambda module, fqn: fqn.endswith("base_layer"))
    codes = codes_of(model)
    model.merge_adapter()
    assert len(changed(model, codes)) == len(codes) == 14
    model.unmerge_adapter()
    assert not changed(model, codes)


@pytest.mark.filterwarnings("ignore:Already following adapters were merged:UserWarning")
def test_layers_that_are_not_quantized_merge_as_without_this_package():
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config)
    model.add_adapter("other", config)
    layer = model.base_model.model[0]
    wanted = layer.weight.clone()
    for name in ("default", "other"):
        wanted += layer.get_delta_weight(name)
        model.merge_adapter([name])
    assert torch.equal(layer.weight, wanted) and not any(name.startswith("_mxtensor") for name in vars(layer))


def test_a_change_of_the_last_rows_alone_is_merged():
    net = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(mx.quantize_(net, "mxfp8"), config)
    layer = model.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight[: of_peft.ROWS] = 0
    wanted = layer.weight.dequantize() + layer.get_delta_weight("default")
    model.merge_adapter()
    assert torch.equal(layer.weight.dequantize(), mx.quantize(wanted.detach(), "mxfp8").dequantize())


@pytest.mark.parametrize("name", ["dora", "loha", "oft"])
def test_merges_of_other_tuners_say_what_they_round(name):
    model = peft.get_peft_model(mx.quantize_(MODELS["Llama"](), "mxfp4"), TUNERS[name]())
    with pytest.warns(UserWarning, match="merge_and_unload: [24] weights are in mxfp4_e2m1, .* of the norm of what"):
        model.merge_and_unload()


@pytest.mark.filterwarnings("ignore:merge_a.*:UserWarning", "ignore:All adapters are already merged:UserWarning")
def test_codes_of_before_are_freed_and_do_not_replace_what_was_loaded():
    model = peft.get_peft_model(mx.quantize_(MODELS["Llama"](), "mxfp8"), TUNERS["lora"]())
    loaded = {n: p.detach().clone() for n, p in model.named_parameters() if isinstance(p, mx.MXTensor)}
    model.merge_adapter()
    assert len(of_peft._before) == len(loaded)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in loaded:
                p.copy_(loaded[name])
    model.unmerge_adapter()
    assert len(changed(model, {n: w.dequantize() for n, w in loaded.items()})) == len(loaded)
    model.merge_adapter()
    model.merge_and_unload()
    del model
    gc.collect()
    assert not of_peft._before


def test_what_changes_nothing_and_what_is_not_quantized_does_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
        adapted(tmp_path, "mxfp8-weight-only").merge_and_unload()  # new adapters are zero
        plain = peft.get_peft_model(MODELS["Llama"](), peft.LoraConfig(target_modules=["q_proj"], r=2,
                                                                      init_lora_weights=False))  # fmt: skip
        plain.merge_and_unload()


@pytest.mark.parametrize("modules", [["up_proj"], ["embed_tokens", "lm_head"]], ids=" ".join)
def test_modules_that_an_adapter_saves_train_in_high_precision(modules, tmp_path):
    """Rounded to codes after each step, small updates would be lost."""

    def made():
        torch.manual_seed(0)
        return mx.quantize_(MODELS["Llama"](), "mxfp8-weight-only", include_head=True)

    config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=modules)
    model = peft.get_peft_model(made(), config)
    copies = {n: p for n, p in model.named_parameters() if "modules_to_save" in n}
    before = {n: p.detach().clone() for n, p in copies.items()}
    codes = {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, mx.MXTensor)}
    assert copies and all(type(p) is torch.nn.Parameter and p.requires_grad for p in copies.values())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.0)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    moved = [(p.detach() - before[n]).abs().mean() for n, p in copies.items() if "embed" not in n]
    assert all(1e-5 < float(mean) < 3e-5 for mean in moved)
    assert all(torch.equal(p.dequantize(), codes[n]) for n, p in model.named_parameters() if n in codes)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(made(), tmp_path)
    assert torch.equal(loaded.eval()(IDS).logits, model.eval()(IDS).logits)


def test_rows_of_an_embedding_that_an_adapter_trains_are_in_high_precision(tmp_path):
    def made():
        torch.manual_seed(0)
        net = MODELS["Llama"]()
        net.config.tie_word_embeddings = True
        net.tie_weights()
        return mx.quantize_(net, "mxfp8-weight-only", include_head=True)

    base = made()
    assert isinstance(base.get_input_embeddings().weight, mx.MXTensor)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2, 3]))
    (rows,) = (p for n, p in model.named_parameters() if "trainable_tokens_delta" in n)
    before = rows.detach().clone()
    assert type(rows) is torch.nn.Parameter and torch.equal(before, base.get_input_embeddings().weight[[1, 2, 3]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.0)
    ids = torch.arange(1, 9)[None]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert 1e-5 < float((rows.detach() - before).abs().mean()) < 3e-5
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(made(), tmp_path)
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_the_quantized_head_that_an_adapter_targets_is_saved_with_its_values(tmp_path):
    """peft adds the weights of targeted heads and embeddings to its file, which holds no codes."""

    def made():
        torch.manual_seed(0)
        return mx.quantize_(MODELS["Llama"](), "mxfp4-weight-only", include_head=True)

    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(made(), config).eval()
    with pytest.warns(UserWarning, match="embedding layers found"):
        model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    head = model.get_output_embeddings().base_layer.weight
    assert torch.equal(stored["base_model.model.lm_head.base_layer.weight"], head.dequantize())
    loaded = peft.PeftModel.from_pretrained(made(), tmp_path).eval()
    assert isinstance(loaded.get_output_embeddings().base_layer.weight, mx.MXTensor)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
