"""The door for torchao's users: nothing needs it, ``mx`` says where it is, and its names are torchao's."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor import ao
from mxtensor.core.peer_names import MODULE

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys, tempfile
sys.modules["mxtensor.ao"] = None  # importing it raises ImportError
import torch
from torch import nn
import mxtensor as mx

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

x = torch.randn(4, 64)
for config in ("mxfp8", mx.LinearRecipe.inference("nvfp4"), {"0": "mxfp4", "re:2.*": None}, torch.float8_e4m3fn):
    assert isinstance(mx.quantize_(model(), config)[0].weight, mx.MXTensor)
m = mx.quantize_(model(), "mxfp4", step="prepare")
m(x).sum().backward()
assert isinstance(mx.quantize_(m, "mxfp4", step="convert")[0].weight, mx.MXTensor)
m = mx.quantize_(model(), "nvfp4", step="observe")
m(x)
static = mx.quantize_(m, "nvfp4", step="convert")
trained = mx.quantize_(model(), mx.recipe.MXFP8BlockScaling())
optimizer = torch.optim.AdamW(trained.parameters())
trained(x).square().sum().backward()
optimizer.step()
with mx.autocast(recipe=mx.recipe.NVFP4BlockScaling()):
    model()(x).sum().backward()
assert isinstance(mx.calibrate(model(), [x], "mxfp4")[0].weight, mx.MXTensor)
plan = mx.plan(model(), [x], bits=6.0, formats=("mxfp4-weight-only", "mxfp8-weight-only"), measure="layer")
mx.quantize_(model(), plan)
with tempfile.TemporaryDirectory() as folder:
    mx.checkpoints.save(static, folder + "/out")
    assert mx.checkpoints.load(folder + "/out")
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    llama.save_pretrained(folder + "/llama")
    loaded = LlamaForCausalLM.from_pretrained(folder + "/llama", quantization_config=mx.TransformersConfig("mxfp8"))
    assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, mx.MXTensor)
try:
    mx.QATConfig
except AttributeError as error:
    assert "mx.ao.QATConfig" in str(error) and "step='prepare'" in str(error)
"""


def run(code):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.exhaustive(quick=1)
def test_everything_else_works_without_it():
    pytest.importorskip("transformers")
    run(WITHOUT)


def test_importing_mxtensor_does_not_import_it():
    run("import sys, mxtensor; assert 'mxtensor.ao' not in sys.modules; mxtensor.ao.QATConfig")


def test_mx_has_none_of_its_names_and_says_where_they_are():
    shared = {"MXTensor", "config_of", "quantize_"}
    assert {*ao.__all__} & {*mx.__all__} == shared - {"config_of"}
    for name in {*ao.__all__} - shared:
        assert MODULE[name].startswith(f"mx.ao.{name}")
        with pytest.raises(AttributeError, match=rf"; use mx\.ao\.{name}"):
            getattr(mx, name)
        with pytest.raises(ImportError, match=rf"; use mx\.ao\.{name}"):
            exec(f"from mxtensor import {name}")


def test_names_that_torchao_has_and_the_door_has_not():
    for name, message in (
        ("ModuleFqnToConfig", "use mx.ao.FqnToConfig"), ("Int8WeightOnlyConfig", "use the format mxint8"),
        ("nonsense", "has no attribute 'nonsense'$"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=message):
            getattr(ao, name)
    with pytest.raises(ImportError, match=r"use mx\.ao\.FqnToConfig"):
        exec("from mxtensor.ao import ModuleFqnToConfig")
    with pytest.raises(ImportError, match=r"from mxtensor\.ao import quantize_"):
        exec("from mxtensor.ao.float8 import convert_to_float8_training")
    with pytest.raises(ImportError, match=r"from mxtensor\.ao import quantize_"):
        exec("import mxtensor.ao.quantization.qat")


def test_an_import_line_is_all_that_changes():
    """Code of torchao's documentation."""
    from mxtensor.ao import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8LinearConfig,
        PerRow,
        convert_to_float8_training,
        quantize_,
    )

    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)).bfloat16()
    quantize_(m, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), device="cpu")
    assert m[0].weight.recipe.activation.format.name == "float8_e4m3_row"
    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)).bfloat16()
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(m, config=config, module_filter_fn=lambda module, fqn: fqn != "1")
    m(torch.randn(4, 64, dtype=torch.bfloat16)).sum().backward()
    assert m[0].weight.linear_recipe == config.linear_recipe() and type(m[1].weight) is nn.Parameter
    m = ao.quantize_(nn.Linear(64, 32), ao.Float8WeightOnlyConfig(granularity=ao.PerBlock((128, 128))), device="meta")
    assert m.weight.format.name == "float8_e4m3_128x128" and m.weight.is_meta


def test_a_table_with_the_names_of_torchaos_fields():
    for config in (ao.FqnToConfig({"0": "mxfp4"}), ao.FqnToConfig(module_fqn_to_config={"0": "mxfp4"})):
        for quantize_ in (mx.quantize_, ao.quantize_):
            m = quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config)
            assert isinstance(m[0].weight, mx.MXTensor) and type(m[1].weight) is nn.Parameter
    for call, error, message in (
        (lambda: ao.FqnToConfig("mxfp8"), TypeError, "takes a dict of names"),
        (lambda: ao.FqnToConfig({3: "mxfp8"}), TypeError, "with strings as keys"),
        (lambda: ao.FqnToConfig({"a": "mxfp8"}, {"a": "mxfp4"}), ValueError, "differ; pass only one of them"),
        (lambda: mx.quantize_(nn.Linear(64, 64), {"": ao.FqnToConfig()}), TypeError, "config of '': .*pass one"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_config_of_torchao_is_for_the_door():
    class Float8WeightOnlyConfig:
        granularity = "PerRow"

    theirs = Float8WeightOnlyConfig()
    with pytest.raises(TypeError, match=r"type Float8WeightOnlyConfig; use mx\.ao\.Float8WeightOnlyConfig"):
        mx.quantize_(nn.Linear(64, 64), theirs)
    assert ao.quantize_(nn.Linear(64, 64), theirs).weight.format.name == "float8_e4m3_row"
    m = mx.calibrate(nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)], ao.config_of(theirs))
    assert m[0].weight.format.name == "float8_e4m3_row"
    nested = ao.QATConfig(ao.FqnToConfig({"0": theirs}))
    m = ao.quantize_(nn.Sequential(nn.Linear(64, 64)), nested)
    assert str(m[0].weight_fake_quantizer) == "FakeQuantizer(float8_e4m3_row)"
