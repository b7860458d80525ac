"""The door: TransformerEngine's names and old names work after one changed import, and nothing else needs the door."""

import subprocess
import sys
import textwrap

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te

WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path, target=None):
        if name == "mxtensor.te" or name.startswith("mxtensor.te."):
            raise ModuleNotFoundError(f"{name} has been deleted")

sys.meta_path.insert(0, Blocked())

import torch
from torch import nn
import mxtensor as mx

torch.manual_seed(0)

def model(width=64):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

x = torch.randn(32, 64)
"""
USES = {
    "every_name": """
        for name in mx.__all__:
            getattr(mx, name)
        assert not [name for name in sys.modules if f"{name}.".startswith("mxtensor.te.")]
    """,
    "quantize_": """
        quantized = mx.quantize_(model(), "mxfp8")
        assert isinstance(quantized[0].weight, mx.MXTensor) and quantized(x).isfinite().all()
        mx.quantize_(mx.quantize_(model(), mx.recipe.MXFP8BlockScaling()), "nvfp4-weight-only")(x)
    """,
    "training": """
        for recipe in (mx.recipe.MXFP8BlockScaling(), mx.recipe.DelayedScaling()):
            layers = model()
            optimizer = mx.optim.AdamW(layers.parameters(), lr=1e-2)
            before = layers[0].weight.detach().clone()
            with mx.explain() as log, mx.autocast(recipe=recipe):
                y = layers(x)
            y.square().mean().backward()
            optimizer.step()
            assert "fprop" in {entry.spec.op for entry in log.entries}
            assert not layers[0].weight.equal(before)
    """,
    "save_and_load": """
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            quantized = mx.quantize_(model(), "mxfp4-weight-only")
            mx.checkpoints.save(quantized, folder)
            state = mx.checkpoints.load(folder)
            assert state["0.weight"].dequantize().equal(quantized[0].weight.dequantize())
            torch.save(quantized.state_dict(), folder + "/state.pt")
            again = mx.quantize_(model(), "mxfp4-weight-only")
            again.load_state_dict(torch.load(folder + "/state.pt"))
            assert again(x).equal(quantized(x))
    """,
    "compile": """
        quantized = mx.quantize_(model(), "mxfp8").requires_grad_(False)
        torch.testing.assert_close(torch.compile(quantized, backend="aot_eager", fullgraph=True)(x), quantized(x))
        summed = torch.compile(lambda w: w.rowwise.data.float().sum(), backend="aot_eager")
        assert summed(quantized[0].weight).numel() == 1
    """,
    "transformers": """
        import tempfile
        from transformers import AutoModelForCausalLM, LlamaConfig
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=mx.TransformersConfig("mxfp8-weight-only")
            )
            assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, mx.MXTensor)
            assert loaded(torch.arange(8)[None]).logits.isfinite().all()
            loaded.save_pretrained(folder + "/quantized")
            again = AutoModelForCausalLM.from_pretrained(folder + "/quantized")
            assert again(torch.arange(8)[None]).logits.equal(loaded(torch.arange(8)[None]).logits)
    """,
}
"""What a user does -> a program that does it, where no module of the door can be imported."""


@pytest.mark.parametrize("uses", [[name for name in USES if name != "transformers"], ["transformers"]], ids=str)
def test_all_else_works_without_the_door(uses):
    if "transformers" in uses:
        pytest.importorskip("transformers")
    program = WITHOUT + "".join(textwrap.dedent(USES[use]) for use in uses)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_the_package_does_not_import_the_door():
    program = "import mxtensor, sys; assert not [n for n in sys.modules if f'{n}.'.startswith('mxtensor.te.')]"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_the_import_lines_of_a_users_program_change():
    """The quick start of TransformerEngine's README, and the names before version 2.9."""
    from mxtensor.te.common.recipe import DelayedScaling, Format

    from mxtensor.te.common import recipe

    assert recipe is te.recipe is mx.recipe and te.common.recipe is recipe
    layer = te.Linear(64, 32, bias=True)
    x = torch.randn(16, 64)
    delayed = DelayedScaling(margin=0, fp8_format=Format.HYBRID)
    with mx.explain() as log, te.fp8_autocast(enabled=True, fp8_recipe=delayed):
        layer(x).sum().backward()
    assert {entry.spec.op for entry in log.entries} >= {"fprop", "wgrad"}
    with te.fp8_model_init(enabled=True, recipe=te.recipe.MXFP8BlockScaling()):
        weight = te.Linear(64, 32).weight
    assert isinstance(weight, mx.MXTensor)
    assert te.optimizers.FusedAdam is te.FusedAdam


def test_autocast_takes_transformer_engines_arguments_in_its_order():
    layer, x = te.Linear(64, 32), torch.randn(16, 64)
    with mx.autocast(recipe=mx.recipe.MXFP8BlockScaling()):
        quantized = layer(x)
    for context in (
        te.autocast(True, False, mx.recipe.MXFP8BlockScaling()),
        te.autocast(recipe=mx.recipe.MXFP8BlockScaling(), amax_reduction_group=None, _graph=False),
        te.fp8_autocast(True, False, mx.recipe.MXFP8BlockScaling(), None),
    ):
        with context:
            assert layer(x).equal(quantized)
    with te.fp8_autocast(enabled=False):
        assert not layer(x).equal(quantized)
    assert te.autocast(recipe=mx.recipe.MXFP8BlockScaling())(layer)(x).equal(quantized)  # a decorator


def test_autocast_is_compiled():
    layer, x, made = te.Linear(64, 32), torch.randn(16, 64), mx.recipe.MXFP8BlockScaling()

    def step(x):
        with te.autocast(enabled=True, recipe=made):
            return layer(x)

    torch.testing.assert_close(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


@pytest.mark.parametrize("context", [te.autocast, te.fp8_autocast])
def test_calibrating_is_not_available(context):
    with pytest.raises(NotImplementedError, match=r"calibrating=True is not available: .* use mx\.calibrate"):
        context(calibrating=True)
