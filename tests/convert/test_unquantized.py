"""What ``quantize_`` leaves in high precision is said: kinds of modules, their share, bits of the model, a way out."""

import copy
import re

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te


class UNet(nn.Module):
    """Convolutions down and up, and one linear layer for the time step, as in UNets of diffusion."""

    def __init__(self, width=32):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width)
        self.time, self.up = nn.Linear(32, width), nn.ConvTranspose2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        return self.up(self.norm(self.down(x)) + self.time(t)[:, :, None, None])


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 32),
    )  # fmt: skip


def classifier():
    return nn.Sequential(nn.Embedding(300, 64), nn.Flatten(), nn.Linear(64, 32))


class Own(nn.Module):
    """A layer with a class of its own, whose weight no kind describes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))


def pretrained(name):
    transformers = pytest.importorskip("transformers")
    if name == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    if name == "efficientnet":
        sizes = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 64}
        return transformers.EfficientNetForImageClassification(transformers.EfficientNetConfig(**sizes))
    sizes = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 16}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes))


def share_of(model, kind):
    values = sum(p.numel() for module in model.modules() if type(module) is kind for p in module.parameters(False))
    return f"({values / sum(p.numel() for p in model.parameters()):.0%})"


MODELS = {
    "resnet": (resnet, nn.Conv2d), "unet": (UNet, nn.Conv2d), "embedding": (classifier, nn.Embedding),
    "own": (lambda: nn.Sequential(Own(), nn.Linear(64, 32)), Own),
    **{f"transformers {n}": (lambda n=n: pretrained(n), nn.Conv2d) for n in ("resnet", "efficientnet", "convnext")},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_convolutions_and_all_else_that_stays_are_named(name, logged):
    make, kind = MODELS[name]
    model = mx.quantize_(make(), "mxfp8")
    said, bits = logged.records[0].getMessage(), mx.model_size(model).bits
    assert len(logged.records) == 1
    assert f"{bits:.2f} bits over the whole model" in said and "stay float32" in said and share_of(model, kind) in said
    assert kind is nn.Embedding or kind.__name__ in said
    # a way out is tried: what it says makes the model smaller
    if "model.bfloat16()" in said:
        smaller = mx.quantize_(make().bfloat16(), "mxfp8")
        assert (
            "stay bfloat16" in logged.records[1].getMessage()
            and "model.bfloat16()" not in logged.records[1].getMessage()
        )
    else:
        assert "filter_fn=lambda module, name: isinstance(module, torch.nn.Embedding)" in said
        smaller = mx.quantize_(model, "mxfp8", filter_fn=lambda module, name: isinstance(module, torch.nn.Embedding))
    assert mx.model_size(smaller).bits < 0.65 * bits


@pytest.mark.parametrize("name", ["resnet", "unet", "own"])
def test_for_training_the_share_of_values_is_said(name, logged):
    make, kind = MODELS[name]
    mx.quantize_(make(), mx.recipe.MXFP8BlockScaling())
    (record,) = logged.records
    assert "train quantized" in record.getMessage() and kind.__name__ in record.getMessage()
    assert "torch.autocast runs it in bfloat16" in record.getMessage()


def test_the_way_out_for_training_runs():
    model = mx.quantize_(UNet(), mx.recipe.MXFP8BlockScaling())
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(2, 3, 8, 8), torch.randn(2, 32))
    y.float().square().mean().backward()
    assert model.down.weight.grad is not None and model.time.weight.grad is not None


@pytest.mark.parametrize(
    ("make", "config", "options"),
    [
        # little stays: norms, biases, a small convolution
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 128), nn.LayerNorm(128)), "mxfp8", {}),
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), mx.recipe.MXFP8BlockScaling(), {}),
        # heads and embeddings save no memory in training
        (classifier, mx.recipe.MXFP8BlockScaling(), {}),
        # the user has chosen
        (resnet, "mxfp8", {"filter_fn": lambda module, name: isinstance(module, nn.Linear)}),
        (resnet, {"6": "mxfp8"}, {}),
        (resnet, mx.recipe.MXFP8BlockScaling(), {"filter_fn": lambda module, name: True}),
    ],
)
def test_nothing_is_said_where_little_stays_or_the_user_has_chosen(make, config, options, logged):
    mx.quantize_(make(), config, **options)
    assert not logged.records


def test_modules_of_te_have_a_warning_of_their_own(logged):
    with pytest.warns(UserWarning, match="modules of mxtensor.te stay as they are"):
        mx.quantize_(nn.Sequential(nn.Linear(64, 64), te.Linear(64, 64)), "mxfp8")
    assert not logged.records


def test_steps_of_static_scales_and_of_training_say_it_when_they_convert(logged):
    model = resnet().bfloat16()
    static = copy.deepcopy(model)
    mx.quantize_(static, "nvfp4", step="observe")
    static(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16))
    assert not logged.records
    mx.quantize_(static, "nvfp4", step="convert")
    mx.quantize_(model, "mxfp8", step="prepare")
    mx.quantize_(model, "mxfp8", step="convert")
    assert len(logged.records) == 2
    assert all(re.search(r"of 2 Conv2d stay bfloat16: 1\d\.\d\d bits", one.getMessage()) for one in logged.records)
