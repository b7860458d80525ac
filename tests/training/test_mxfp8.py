"""to_mxfp8, MXFP8Config, MXFP8Linear, and a training loop with them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.numerics.formats import get_format
from mxtensor.recipe import NVFP4BlockScaling
from mxtensor.training.grad_scaler import MXFP8GradientScaler
from mxtensor.training.mxfp8 import MXFP8Config, MXFP8Linear, to_mxfp8
from tests.helpers import oracle
from tests.helpers.compare import assert_same_product, relative_error

BLOCKS = [16, 32, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_oracle(x, element, block):
    """The values of ``x`` (rows, contraction) in MXFP8, by the oracle."""
    format = get_format(f"mxfp8_{element}[1x{block}]")
    values = oracle.as_float32(x)
    return torch.from_numpy(oracle.decode(oracle.encode(values, format), format, values.shape))


# ---------------------------------------------------------------------------------------------- one tensor


@pytest.mark.parametrize("block", [*BLOCKS, 128])
@pytest.mark.parametrize("shape", [(1024,), (33, 65), (2, 3, 100)])
def test_to_mxfp8_is_e4m3_with_one_scale_a_block(shape, block):
    x = torch.randn(shape)
    t = to_mxfp8(x, block_size=block)
    assert isinstance(t, mx.MXTensor) and t.shape == x.shape and t.dtype is x.dtype
    restored = t.dequantize()
    assert type(restored) is torch.Tensor and restored.dtype is x.dtype
    assert torch.equal(restored, by_oracle(x, "e4m3", block))
    assert relative_error(restored, x) < 0.03


@pytest.mark.parametrize("block", BLOCKS)
def test_a_scale_is_one_byte(block):
    """A billion parameters are 1 GB and 31 MB of scales in blocks of 32: 74.2 % less than float32."""
    t = to_mxfp8(torch.randn(64, 1024), block)
    assert t.nbytes == 64 * 1024 * (1 + 1 / block)
    assert 1 - to_mxfp8(torch.randn(64, 1024)).nbytes / (64 * 1024 * 4) == pytest.approx(0.742, abs=5e-4)


def test_e4m3_has_the_precision_and_e5m2_the_range():
    x = torch.randn(64, 64)
    errors = [relative_error(mx.quantize(x, f"mxfp8_{e}").dequantize(), x) for e in ("e4m3", "e5m2")]
    assert errors[0] < 0.6 * errors[1]
    assert get_format("mxfp8_e4m3").element.max == 448 < get_format("mxfp8_e5m2").element.max == 57344


# ---------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("e4m3_forward", [True, False])
@pytest.mark.parametrize("e5m2_backward", [True, False])
def test_the_config_decides_the_cast_of_each_tensor(block, e4m3_forward, e5m2_backward):
    config = MXFP8Config(block_size=block, e4m3_forward=e4m3_forward, e5m2_backward=e5m2_backward)
    linear_recipe, ordinary = config.linear_recipe(), block == 32
    forward, backward = ("e4m3" if e4m3_forward else "e5m2"), ("e5m2" if e5m2_backward else "e4m3")
    suffix = "" if ordinary else f"[1x{block}]"
    names = [
        (r.rowwise.format.name, r.columnwise.format.name)
        for r in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad)
    ]
    assert names == [(f"mxfp8_{e}{suffix}",) * 2 for e in (forward, forward, backward)]
    assert config.mxfp8() and config.block_scaling() and not config.fp8()


def test_the_config_has_the_defaults_and_the_repr_of_a_recipe():
    config = MXFP8Config()
    assert (config.block_size, config.e4m3_forward, config.e5m2_backward) == (32, True, True)
    assert repr(config) == "recipe_type=MXFP8Config, block_size=32, e4m3_forward=True, e5m2_backward=True"


@pytest.mark.parametrize("way", ["layer", "quantize_", "autocast"])
def test_the_config_is_a_recipe_everywhere(way):
    config = MXFP8Config(block_size=16)
    plain, x, g = nn.Linear(40, 24), torch.randn(6, 40), torch.randn(6, 24)
    layer = MXFP8Linear(40, 24, config=config)
    layer.load_state_dict(plain.state_dict())
    expected = layer(x)
    expected.backward(g)
    if way == "quantize_":
        y = mx.quantize_(plain, config)(x)
    elif way == "autocast":
        with mx.autocast(recipe=config):
            y = plain(x)
    else:
        plain = MXFP8Linear(40, 24, block_size=16)
        plain.load_state_dict(layer.state_dict())
        y = plain(x)
    y.backward(g)
    assert torch.equal(y, expected)
    assert torch.equal(plain.weight.grad, layer.weight.grad) and torch.equal(plain.bias.grad, layer.bias.grad)


# ---------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(48, 64), (1, 33), (7, 65), (2, 3, 40)])
def test_the_three_products_are_those_of_the_definition(shape, block, dtype):
    layer = MXFP8Linear(shape[-1], 24, block_size=block, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = layer(x)
    g = torch.randn(y.shape, dtype=dtype)
    y.backward(g)
    rows, grad, w = x.detach().reshape(-1, shape[-1]), g.reshape(-1, 24), layer.weight.detach()
    b = layer.bias.detach()

    def product(a, b, *bias):
        return sum(bias, a @ b.t())

    def cast(t, element):
        return by_oracle(t, element, block)

    assert_same_product(y.detach().reshape(-1, 24), product, cast(rows, "e4m3"), cast(w, "e4m3"), b)
    assert_same_product(x.grad.reshape(rows.shape), product, cast(grad, "e5m2"), cast(w.t(), "e4m3"))
    assert_same_product(layer.weight.grad, product, cast(grad.t(), "e5m2"), cast(rows.t(), "e4m3"))
    assert_same_product(layer.bias.grad, lambda t: t.sum(0), grad)
    assert y.dtype is x.grad.dtype is layer.weight.grad.dtype is dtype


def test_the_layer_is_an_nn_linear():
    layer = MXFP8Linear(40, 24)
    assert isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter
    torch.manual_seed(3)
    mine = MXFP8Linear(40, 24).state_dict()
    torch.manual_seed(3)
    theirs = nn.Linear(40, 24).state_dict()
    assert list(mine) == ["weight", "bias"] and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    nn.Linear(40, 24).load_state_dict(layer.state_dict())
    assert list(MXFP8Linear(40, 24, bias=False, dtype=torch.bfloat16).state_dict()) == ["weight"]
    assert MXFP8Linear(4, 4, device="meta").weight.is_meta
    assert repr(layer) == (
        "MXFP8Linear(in_features=40, out_features=24, bias=True, recipe_type=MXFP8Config, block_size=32, "
        "e4m3_forward=True, e5m2_backward=True)"
    )


def test_an_input_without_rows():
    layer = MXFP8Linear(40, 24)
    x = torch.randn(0, 40, requires_grad=True)
    layer(x).backward(torch.randn(0, 24))
    assert x.grad.shape == (0, 40) and not layer.weight.grad.any() and not layer.bias.grad.any()


def test_no_context_changes_what_the_layer_does():
    layer, x = MXFP8Linear(40, 24), torch.randn(6, 40)
    y = layer(x)
    with mx.autocast(recipe=NVFP4BlockScaling()):
        assert torch.equal(layer(x), y)
    with mx.autocast(enabled=False):
        assert torch.equal(layer(x), y)
    assert not torch.equal(F.linear(x, layer.weight, layer.bias), y)


def test_under_torch_autocast_the_result_is_in_its_dtype():
    layer, x = MXFP8Linear(40, 24), torch.randn(6, 40)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(torch.randn_like(y))
    assert y.dtype is torch.bfloat16 and layer.weight.grad.dtype is torch.float32


def test_an_edited_config_counts_from_the_next_forward_on():
    layer, x = MXFP8Linear(40, 24), torch.randn(6, 40)
    before = layer(x)
    layer.config.e4m3_forward = False
    after = layer(x)
    operands = (by_oracle(t, "e5m2", 32) for t in (x, layer.weight.detach()))
    assert_same_product(after.detach(), F.linear, *operands, layer.bias.detach())
    assert relative_error(after, before) > 0.02


@pytest.mark.parametrize("block", [16, 32])
def test_the_layer_compiles_whole_forward_and_backward(block):
    torch._dynamo.reset()
    layer = MXFP8Linear(65, 24, block_size=block)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x, other = (torch.randn(7, 65).requires_grad_() for _ in range(2))
    other.data.copy_(x.data)
    g = torch.randn(7, 24)
    y, traced = layer(x), compiled(other)
    y.backward(g)
    traced.backward(g)
    assert torch.equal(y, traced) and torch.equal(x.grad, other.grad)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), twin.parameters(), strict=True))


def test_every_step_shows_three_quantized_products():
    model = nn.Sequential(MXFP8Linear(40, 48), nn.GELU(), MXFP8Linear(48, 8))
    with mx.explain() as log:
        model(torch.randn(6, 40).requires_grad_()).backward(torch.randn(6, 8))
    ops = [entry.spec.op for entry in log.entries]
    assert [ops.count(op) for op in ("fprop", "dgrad", "wgrad")] == [2, 2, 2]


# ---------------------------------------------------------------------------------------------- the loop


class MyModel(nn.Module):
    """Returns its loss, as the loop expects."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(MXFP8Linear(40, 96), nn.GELU(), MXFP8Linear(96, 10))

    def forward(self, batch):
        x, label = batch
        return F.cross_entropy(self.body(x), label)


def test_the_training_loop_runs_as_it_was_written():
    x = torch.randn(256, 40)
    labels = (x @ torch.randn(40, 10)).argmax(-1)
    dataloader = [(x[i : i + 32], labels[i : i + 32]) for i in range(0, 256, 32)] * 8
    losses = []

    config = MXFP8Config(
        block_size=32,
        e4m3_forward=True,  # E4M3 for forward
        e5m2_backward=True,  # E5M2 for backward
    )

    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = MXFP8GradientScaler(config)

    for batch in dataloader:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert scaler.config is config and (scaler.total_steps, scaler.skipped_steps) == (0, 0)


# ---------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block 24 is not available; choose one of 16, 32, 64, 128"):
        to_mxfp8(torch.randn(8, 48), block_size=24)
    with pytest.raises(ValueError, match="block 8 is not available"):
        MXFP8Config(block_size=8)
    with pytest.raises(ValueError, match="block 8 is not available"):
        MXFP8Linear(4, 4, block_size=8)
    with pytest.raises(TypeError, match="int64"):
        to_mxfp8(torch.arange(32))
    with pytest.raises(TypeError, match=r"is not an MXFP8Config; for other recipes use te\.Linear, or quantize_"):
        MXFP8Linear(4, 4, config=NVFP4BlockScaling())
    with pytest.raises(ValueError, match="block_size is 64, that of config 16; pass only one of them"):
        MXFP8Linear(4, 4, block_size=64, config=MXFP8Config(16))


def test_a_wrong_call_changes_nothing_and_the_next_works():
    layer, x = MXFP8Linear(40, 24), torch.randn(6, 40)
    y = layer(x)
    for wrong, error in (
        (torch.randn(6, 41), ValueError),
        (x.bfloat16(), ValueError),
        (torch.ones(6, 40, dtype=torch.int64), TypeError),
    ):
        with pytest.raises(error, match="linear: "):
            layer(wrong)
    assert torch.equal(layer(x), y)
    layer.config.block_size = 5
    with pytest.raises(ValueError, match="block 5 is not available"):
        layer(x)
    layer.config.block_size = 32
    assert torch.equal(layer(x), y)
