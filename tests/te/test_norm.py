"""``te.LayerNorm`` and ``te.RMSNorm``: the norms of TransformerEngine as modules, with its defaults."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxtensor.te import LayerNorm, RMSNorm, TransformerLayer


def expected(kind, x, weight, bias, dims):
    x = x.double()
    if kind is LayerNorm:
        x = x - x.mean(dims, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-5) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [24, (3, 8)])
def test_values_and_gradients_are_those_of_the_formula(kind, centered, shape):
    module, dims = kind(shape, zero_centered_gamma=centered), (-1,) if shape == 24 else (-2, -1)
    assert torch.equal(module.weight, torch.full_like(module.weight, 0.0 if centered else 1.0))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = (1e-2 * torch.randn(5, 2, *module.normalized_shape)).requires_grad_()  # so small that eps counts
    y, grad = module(x), torch.randn(5, 2, *module.normalized_shape)
    leaves = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    weight = leaves[1] + 1 if centered else leaves[1]
    reference = expected(kind, leaves[0], weight, leaves[2] if kind is LayerNorm else None, dims)
    torch.testing.assert_close(y.double(), reference, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(y, (x, *module.parameters()), grad)
    wanted = torch.autograd.grad(reference, leaves, grad.double())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-3)


def test_eps_is_not_that_of_torch():
    x = 1e-3 * torch.randn(4, 32)
    assert torch.equal(RMSNorm(32)(x), F.rms_norm(x, (32,), torch.ones(32), 1e-5))
    assert not torch.allclose(RMSNorm(32)(x), nn.RMSNorm(32)(x), rtol=0.5)


@pytest.mark.parametrize(("kind", "torchs"), [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)])
def test_state_dicts_of_torch_and_of_transformer_engine_load(kind, torchs):
    module, other = kind(16, params_dtype=torch.bfloat16, device="cpu"), torchs(16)
    nn.init.normal_(other.weight)
    state = other.state_dict() | {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert module.weight.dtype is torch.bfloat16 and torch.equal(module.weight, other.weight.bfloat16())
    assert list(module.state_dict()) == list(other.state_dict())
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(16))


def test_megatron_reads_an_attribute():
    assert all(p.sequence_parallel is True for p in LayerNorm(8, sequence_parallel=True).parameters())
    assert not hasattr(RMSNorm(8).weight, "sequence_parallel")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_inside_a_layer_are_initialized_after_to_empty(kind):
    layer = TransformerLayer(
        32, 64, 4, output_layernorm=True, qk_norm_type=kind, normalization=kind, zero_centered_gamma=True, device="meta"
    )
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float("nan"))
    for module in layer.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert not layer.layernorm.weight.any() and layer.self_attention.q_norm.weight.eq(1).all()
