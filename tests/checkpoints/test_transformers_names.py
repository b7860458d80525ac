"""Tensors that transformers renames, splits or stacks: lists for readers, what convert quantizes, and metadata."""

import json

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints.names import Loaded, loaded_by, model_of, stays
from tests.helpers.compare import relative_error

pytest.importorskip("transformers")

from tests.helpers.renamed_models import MODELS, built, output

ROW, MX = "float8_row-weight-only", "mxfp8-weight-only"
LISTS = {"compressed-tensors": "ignore", "torchao": "modules_to_not_convert", "modelopt": "ignore", "quark": "exclude"}


def saved(name, path):
    model = built(name)
    model.save_pretrained(path / "plain")
    return model


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def quantized(state):
    return {name for name, value in state.items() if isinstance(value, mx.MXTensor)}


def converted(name, path, layout, format=ROW, **options):
    """The model, the folder that ``convert`` writes, and its report."""
    model = saved(name, path)
    report = mx.checkpoints.convert(
        path / "plain", path / "out", layout=layout, format=format, progress=False, **options
    )
    return model, path / "out", report


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "stored", "wanted"),
    [
        ("neox", "embed_out.weight", Loaded(("lm_head.weight",))),
        ("llava", "language_model.model.embed_tokens.weight", Loaded(("model.language_model.embed_tokens.weight",))),
        ("llava", "model.language_model.embed_tokens.weight", Loaded(("model.language_model.embed_tokens.weight",))),
        ("vit", "vit.encoder.layer.0.output.dense.weight", Loaded(("vit.layers.0.mlp.fc2.weight",))),
        ("phimoe", "model.layers.0.block_sparse_moe.experts.1.w3.weight",
         Loaded(("model.layers.0.mlp.experts.gate_up_proj",), ("MergeModulelist", "Concatenate"),
                ".experts.*.w3.weight")),
        ("nomic_bert", "encoder.layers.0.attn.Wqkv.weight",
         Loaded(tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"), ("Chunk",), "attn.Wqkv")),
        ("gpt2", "h.0.attn.c_attn.weight", Loaded(("transformer.h.0.attn.c_attn.weight",))),
        ("gpt2", "of.another.model.weight", Loaded()),
    ],
)  # fmt: skip
def test_parameters_that_transformers_makes_of_a_stored_tensor(name, stored, wanted):
    assert loaded_by(MODELS[name](), [stored]) == {stored: wanted}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_stored_tensor(name, tmp_path):
    saved(name, tmp_path)
    model = model_of(config_of(tmp_path / "plain"))  # of configurations with an infinity, and of submodels, too
    found = loaded_by(model, mx.checkpoints.load(tmp_path / "plain"))
    assert all(loaded.parameters for loaded in found.values())
    made = {parameter for loaded in found.values() for parameter in loaded.parameters}
    assert {name for name, _ in model.named_parameters()} <= made


# ---------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("layout", LISTS)
def test_lists_have_the_names_in_the_files_and_those_of_modules(layout, tmp_path):
    formats = {"modelopt": "nvfp4-weight-only", "quark": "mxfp4-weight-only"}
    _, out, _ = converted("llava", tmp_path, layout, formats.get(layout, ROW), skip=["down_proj", "v_proj"])
    listed = config_of(out)["quantization_config"][LISTS[layout]]
    wanted = {"language_model.lm_head", "lm_head", "language_model.model.layers.0.mlp.down_proj",
              "model.language_model.layers.0.mlp.down_proj"}  # fmt: skip
    assert wanted <= set(listed) and len(listed) == len(set(listed))
    assert not {name.removesuffix(".weight") for name in quantized(mx.checkpoints.load(out))} & set(listed)
    assert "language_model.model.layers.0.mlp.up_proj" not in listed
    assert "model.language_model.layers.0.mlp.up_proj" not in listed


def test_groups_of_two_formats_have_both_names_too(tmp_path):
    format = {"re:.*self_attn.*": MX, "_default": ROW}
    _, out, _ = converted("llava", tmp_path, "compressed-tensors", format)
    groups = config_of(out)["quantization_config"]["config_groups"].values()
    names = "language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"
    assert sorted(set(names) <= set(group["targets"]) for group in groups) == [False, True]


def test_keys_of_a_plan_may_be_names_of_modules(tmp_path):
    """As in a plan that was made for the model."""
    key = "model.language_model.layers.0.mlp.up_proj"
    _, _, report = converted("llava", tmp_path, "native", {key: MX, f"{key}.weight": MX})
    assert list(report.errors) == ["language_model.model.layers.0.mlp.up_proj.weight"]


def test_stacks_in_high_precision_are_listed(tmp_path):
    _, out, report = converted("llama4", tmp_path, "compressed-tensors")
    module = "model.layers.0.feed_forward.experts"
    listed = config_of(out)["quantization_config"]["ignore"]
    assert {module, r"re:model\.layers\.0\.feed_forward\.experts\..*"} <= set(listed) and len(report.stacks) == 2


def test_a_module_with_quantized_experts_is_not_listed(tmp_path):
    """Its other experts are: a reader would take the name of the module for all of them."""
    _, out, _ = converted("phimoe", tmp_path, "compressed-tensors", skip=["experts.1.w3"])
    listed = config_of(out)["quantization_config"]["ignore"]
    assert "model.layers.0.block_sparse_moe.experts.1.w3" in listed
    assert not any(name.endswith("experts") for name in listed)


READ = [
    (layout, name)
    for layout in ("compressed-tensors", "torchao", "native")
    for name in ("llava", "qwen2_vl", "phimoe", "neox", "vit", "swin", "dinov2", "nomic_bert", "gte", "granite_moe",
                 "qwen3_vl_moe", "gpt2", "zamba2")
    if (layout, name) != ("native", "phimoe")  # refused: its class stacks experts that are stored one by one
    and (layout == "native" or name != "gpt2")  # refused: it is all matrices (in, out), which other readers do not know
]  # fmt: skip


@pytest.mark.exhaustive(quick=12)
@pytest.mark.filterwarnings("ignore")  # of compressed-tensors and torchao
@pytest.mark.parametrize(("layout", "name"), READ)
def test_transformers_reads_what_convert_writes(layout, name, tmp_path):
    if layout != "native":
        pytest.importorskip(layout.replace("-", "_"))
    modules = [f".{fqn}" for fqn, _ in built(name).named_modules()]
    skip = [end for end in ("down_proj", "output.dense") if any(fqn.endswith(f".{end}") for fqn in modules)]
    model, out, report = converted(name, tmp_path, layout, skip=skip)
    read, loading = type(model).from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    mx.checkpoints.convert(out, tmp_path / "decoded", layout="plain", progress=False)
    wanted = type(model).from_pretrained(tmp_path / "decoded").eval()
    assert relative_error(output(read.eval()), output(wanted)) < 1e-4
    assert relative_error(output(wanted), output(model)) < 0.3 and (report.errors or layout != "native")


# ---------------------------------------------------------------------------------------------- what is quantized


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3_vl_moe", "inkling2")])
def test_convert_quantizes_what_quantize_does(name, tmp_path):
    """Not embeddings under any name, nor renamed heads; but a layer whose name looks like a head's."""
    model, _, report = converted(name, tmp_path, "native", MX)
    loaded = loaded_by(model, mx.checkpoints.load(tmp_path / "plain"))
    converts = {parameter for name in report.errors for parameter in loaded[name].parameters}
    shared = set(model.all_tied_weights_keys or {})  # stored by another name
    assert converts == quantized(mx.quantize_(model, MX).state_dict()) - shared and not report.left


@pytest.mark.parametrize("include_head", [False, True])
def test_a_head_that_the_model_names_is_left_or_included(include_head, tmp_path):
    """RWKV calls it ``head``."""
    model, _, report = converted("rwkv", tmp_path, "native", MX, include_head=include_head)
    assert ("head.weight" in report.errors) == include_head
    assert set(report.errors) == quantized(mx.quantize_(model, MX, include_head=include_head).state_dict())


@pytest.mark.parametrize(
    ("name", "module"), [("siglip", "head.attention"), ("llama4", "model.layers.0.feed_forward.experts")]
)
def test_skip_and_keys_name_modules_whose_parameters_have_other_names(name, module, tmp_path):
    """``in_proj_weight`` and stacks of experts, as in ``quantize_``."""
    model, _, report = converted(name, tmp_path, "native", MX, skip=[module.rpartition(".")[2]])
    assert report.errors and not any(name.rpartition(".")[0].endswith(module) for name in report.errors)
    keys = [fqn for fqn, _ in model.named_modules() if fqn.endswith(module)]
    plan, folder = {keys[0]: MX}, tmp_path / "plan"
    report = mx.checkpoints.convert(tmp_path / "plain", folder, format=plan, progress=False)
    wanted = quantized(mx.quantize_(model, plan).state_dict())
    loaded = loaded_by(model, report.errors)
    assert {parameter for name in report.errors for parameter in loaded[name].parameters} == wanted


def test_codes_for_a_transposed_matrix_belong_to_its_columns(tmp_path):
    model, out, _ = converted("gpt2", tmp_path, "native", MX)
    wanted = mx.quantize_(model, MX).state_dict()
    for name, value in mx.checkpoints.load(out).items():
        if isinstance(value, mx.MXTensor):
            assert value.orientation == wanted[name].orientation
            assert torch.equal(value.dequantize(), wanted[name].dequantize())


@pytest.mark.parametrize(
    ("name", "layout", "format", "left"),
    [
        ("nomic_bert", "torchao", ROW, 1),  # transformers' reader of torchao splits no codes
        ("nomic_bert", "compressed-tensors", "nvfp4-weight-only", 1),  # nor a global scale
        ("nomic_bert", "compressed-tensors", "float8_128x128-weight-only", 1),  # nor scales of 128 rows
        ("nomic_bert", "compressed-tensors", ROW, 0),
        ("qwen3_vl_moe", "native", MX, 2),  # its stacks are transposed
        ("inkling2", "native", MX, 1),  # the rows of its stack w13_weight are interleaved
        ("zamba2", "compressed-tensors", ROW, 10),  # two layers share them
        ("siglip", "compressed-tensors", ROW, 1),  # its ``in_proj_weight`` has no codes there
        ("siglip", "torchao", ROW, 1),
    ],
)
def test_matrices_that_readers_would_take_apart_stay_and_are_reported(name, layout, format, left, tmp_path):
    _, out, report = converted(name, tmp_path, layout, format)
    assert len(report.left) == left and not set(report.left) & quantized(mx.checkpoints.load(out))
    assert (f"{left} matrices stay as they were, such as" in str(report)) == bool(left)


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors
@pytest.mark.parametrize("format", ["nvfp4-weight-only", "mxfp4-weight-only"])
def test_experts_whose_global_scales_transformers_leaves_out_are_reported(format, tmp_path):
    pytest.importorskip("compressed_tensors")
    model, out, report = converted("phimoe", tmp_path, "compressed-tensors", format)
    experts = sorted(name for name in report.errors if ".experts." in name)
    wrong = experts if format == "nvfp4-weight-only" else []
    assert sorted(report.misread) == wrong and ("are for vLLM" in str(report)) == bool(wrong)
    mx.checkpoints.convert(out, tmp_path / "decoded", layout="plain", progress=False)
    read, wanted = (type(model).from_pretrained(path).state_dict() for path in (out, tmp_path / "decoded"))
    name = "model.layers.0.mlp.experts.down_proj"  # if this fails, transformers has mended it: drop ``misread``
    assert (relative_error(read[name], wanted[name]) > 10) == bool(wrong)


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_a_model_that_is_all_such_matrices_is_refused(layout, tmp_path):
    match = f"readers of the layout {layout} split, join, transpose or share the 4 matrices of"
    with pytest.raises(ValueError, match=match):  # they know none (in, out)
        converted("gpt2", tmp_path, layout, ROW)


@pytest.mark.parametrize(
    "module",
    ["gpt_neox.embed_out", "vision_tower.embeddings.position_embedding", "gated_positional_embedding.tile_embedding",
     "pre_tile_positional_embedding.embedding", "visual.pos_embedding", "input_embeds_layer", "output"],
)  # fmt: skip
def test_names_decide_where_no_model_is_known(module):
    assert stays(module) and not stays("layers.0.mlp.up_proj")


def test_no_model_is_built_where_none_is_needed(tmp_path, monkeypatch):
    _, out, _ = converted("neox", tmp_path, "native", MX)
    monkeypatch.setattr("mxtensor.checkpoints.conversion.model_of", lambda config: pytest.fail("a model was built"))
    mx.checkpoints.convert(out, tmp_path / "decoded", layout="plain", progress=False)
    assert not quantized(mx.checkpoints.load(tmp_path / "decoded"))


# ---------------------------------------------------------------------------------------------- metadata


def test_the_metadata_of_torchao_has_the_names_of_parameters_too(tmp_path):
    _, out, report = converted("llava", tmp_path, "torchao")
    name, parameter = (f"{front}.layers.0.mlp.up_proj.weight" for front in
                       ("language_model.model", "model.language_model"))  # fmt: skip
    with mx.checkpoints.store.opened(out) as checkpoint:
        assert checkpoint.metadata[name] == checkpoint.metadata[parameter]
        assert {name, parameter} <= set(json.loads(checkpoint.metadata["tensor_names"]))
    assert quantized(mx.checkpoints.load(out)) == set(report.errors)  # under one name


def test_torchao_reads_it_under_the_names_in_the_files(tmp_path):
    """As vLLM does: a name without codes waits for those of the next shard."""
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    from safetensors.torch import load_file

    _, out, _ = converted("llava", tmp_path, "torchao")
    with mx.checkpoints.store.opened(out) as checkpoint:
        metadata = checkpoint.metadata
    state, rest = support.unflatten_tensor_state_dict(load_file(out / "model.safetensors"), metadata)
    assert set(state) == set(mx.checkpoints.load(out)) and not rest
