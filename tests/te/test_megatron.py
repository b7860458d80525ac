"""What Megatron and code for TransformerEngine read of modules, parameters, tensors and recipes."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
import mxtensor.te as te
from mxtensor import recipe
from mxtensor.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole
from mxtensor.te.norm import L2Norm

MXFP8 = MXFP8BlockScaling()


def trained(layer, x, times=1):
    for _ in range(times):
        with mx.autocast(recipe=MXFP8):
            y = layer(x)
        y.sum().backward()
    return layer


# ---------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("split", [None, ("q", "k")])
def test_megatrons_hook_sees_that_a_gradient_is_in_main_grad(split):
    """The hook of its data parallelism: it needs ``param.grad``, and adds it to ``main_grad`` unless it is there."""
    x = torch.randn(16, 64)
    fused, plain = (
        te.Linear(64, 32, bias=False, fuse_wgrad_accumulation=fuse, parameters_split=split) for fuse in (True, False)
    )
    plain.load_state_dict(fused.state_dict())
    seen = []

    def hook(p):
        assert p.grad is not None
        if not p.grad_added_to_main_grad:
            p.main_grad.add_(p.grad)
        seen.append(p.grad.abs().max().item())
        p.grad = None

    for p in fused.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
        p.register_post_accumulate_grad_hook(hook)
    trained(fused, x, 2), trained(plain, x, 2)
    for p, q in zip(fused.parameters(), plain.parameters(), strict=True):
        assert p.grad_added_to_main_grad is True and torch.equal(p.main_grad, q.grad)
    assert seen == [0.0] * (2 if split is None else 4)


def test_without_the_attribute_there_is_no_gradient_and_overwrite_main_grad_replaces():
    x, layer = torch.randn(16, 64), te.Linear(64, 32, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, 7.0)
    layer.weight.overwrite_main_grad = True
    once = trained(layer, x).weight.main_grad.clone()
    trained(layer, x, 2)
    assert layer.weight.grad is None and torch.equal(layer.weight.main_grad, once) and once.abs().max() > 0
    layer.weight.overwrite_main_grad = False
    assert torch.equal(trained(layer, x).weight.main_grad, 2 * once)


# ---------------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("active", [True, False])
def test_a_recomputed_mlp_has_the_same_gradients_and_saves_less(active):
    made = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        made.append(te.LayerNormMLP(64, 256, checkpoint=recomputes))
    x, saved = torch.randn(8, 64), []
    for layer in made:
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.nbytes), t)[1], lambda t: t)
        with hooks, mx.autocast(enabled=active, recipe=MXFP8):
            y = layer(x.requires_grad_())
        y.square().sum().backward()
        saved.append(sum(sizes))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in made), strict=True))
    assert saved[1] < saved[0] / 2


def test_heads_of_queries_and_keys_are_normalized():
    x = torch.randn(5, 2, 64)
    for kind, function in (
        ("RMSNorm", lambda t: F.rms_norm(t, (16,), eps=1e-6)),
        ("LayerNorm", lambda t: F.layer_norm(t, (16,), eps=1e-6)),
        ("L2Normalization", lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    ):
        made = []
        for norm in (None, kind):
            torch.manual_seed(1)
            made.append(te.MultiheadAttention(64, 4, attention_dropout=0.0, qk_norm_type=norm))
        plain, normed = made
        q, k, v = plain._heads(plain.qkv(x), ("query", "key", "value"))
        wanted = plain.proj(plain.core_attention(function(q), function(k), v))
        torch.testing.assert_close(normed(x), wanted)
        assert ("q_norm.weight" in normed.state_dict()) is (kind != "L2Normalization")
    layer = te.TransformerLayer(64, 128, 4, qk_norm_type="RMSNorm", qk_norm_eps=1e-5)
    assert layer.self_attention.q_norm.weight.shape == (16,) and layer.self_attention.k_norm.eps == 1e-5
    with pytest.raises(ValueError, match="qk_norm_type is 'BatchNorm'; choose one of L2Normalization, LayerNorm"):
        te.MultiheadAttention(64, 4, qk_norm_type="BatchNorm")


def test_norms_before_and_after_the_rotation_differ_only_with_weights():
    angles = te.RotaryPositionEmbedding(16)(5)
    x, found = torch.randn(5, 2, 64), []
    for before in (True, False):
        torch.manual_seed(1)
        layer = te.MultiheadAttention(64, 4, attention_dropout=0.0, qk_norm_type="RMSNorm", qk_norm_before_rope=before)
        found += [layer(x, rotary_pos_emb=angles)]
        with torch.no_grad():
            layer.q_norm.weight.copy_(torch.arange(16.0))
        found += [layer(x, rotary_pos_emb=angles)]
    torch.testing.assert_close(found[0], found[2])  # a rotation changes no norm
    assert (found[1] - found[3]).abs().max() > 1e-3
    half = L2Norm(1e-6)(torch.full((2, 4), 300.0, dtype=torch.float16))
    assert half.dtype is torch.float16 and torch.allclose(half, torch.tensor(0.5, dtype=torch.float16))


# ---------------------------------------------------------------------------------------------- tensors and recipes


def test_update_usage_drops_a_copy_or_requires_one():
    x = torch.randn(64, 96)
    q = te.MXFP8Quantizer()(x)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    column, values = q._columnwise_data.clone(), q.dequantize()
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    q.update_usage(rowwise_usage=False)
    assert q.get_usages() == {"rowwise": False, "columnwise": True} and torch.equal(q._columnwise_data, column)
    assert q.dequantize().shape == values.shape and q._rowwise_data is None
    with pytest.raises(RuntimeError, match=r"rowwise_usage=True: .* has no rowwise copy"):
        q.update_usage(rowwise_usage=True)
    with pytest.raises(ValueError, match="would have no copy left"):
        q.update_usage(columnwise_usage=False)
    q = te.MXFP8Quantizer()(x)
    q.update_usage(columnwise_usage=False)
    assert torch.equal(q.dequantize(), values) and q.copies.label == "rowwise"
    square = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    square.update_usage(rowwise_usage=True, columnwise_usage=False)  # one copy serves both
    assert square.get_usages() == {"rowwise": True, "columnwise": True}
    rotated = te.NVFP4Quantizer(with_rht=True)(x)
    with pytest.raises(ValueError, match="no copy left that torch's ops can read"):
        rotated.update_usage(rowwise_usage=False)
    rotated.update_usage(columnwise_usage=False)
    assert rotated.get_usages() == {"rowwise": True, "columnwise": False}


def test_a_factory_of_quantizers_gives_the_recipe_that_their_casts_are():
    asked = []

    def nvfp4(tensor):
        asked.append(tensor)
        if tensor.tensor_type == "weight":
            return te.NVFP4Quantizer(with_rht=False, with_2d_quantization=True, stochastic_rounding=False)
        return te.NVFP4Quantizer(with_rht=True, stochastic_rounding=tensor.tensor_type == "grad_output")

    made, wanted = CustomRecipe(qfactory=nvfp4).linear_recipe(), NVFP4BlockScaling().linear_recipe()
    assert (made.input, made.weight, made.grad) == (wanted.input, wanted.weight, wanted.grad)
    assert set(asked) == {QuantizerRole("linear", name) for name in ("input", "weight", "grad_output")}
    mixed = CustomRecipe(qfactory=lambda tensor: None if tensor.tensor_type == "grad_output" else "mxfp6_e2m3")
    assert (
        mixed.linear_recipe().grad.rowwise is None and mixed.linear_recipe().weight.rowwise.format.name == "mxfp6_e2m3"
    )
    for kind in (te.MXFP8Quantizer, lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)):
        assert CustomRecipe(qfactory=lambda tensor, kind=kind: kind()).linear_recipe().input.rowwise == kind().cast
    with pytest.raises(ValueError, match=r"returned None for input, weight and grad_output"):
        CustomRecipe(qfactory=lambda which: te.MXFP8Quantizer() if which == "linear_input" else None)
    with pytest.raises(ValueError, match="CustomRecipe: qfactory: "):
        CustomRecipe(qfactory=lambda tensor: 3).linear_recipe()
    stateful = te.Float8Quantizer(torch.ones(1), torch.ones(1), te.DType.kFloat8E4M3)
    with pytest.raises(ValueError, match="qfactory returned a Float8Quantizer for input, whose scale you set"):
        CustomRecipe(qfactory=lambda tensor: stateful).linear_recipe()


def test_transformer_engines_names_of_options():
    override = MXFP8BlockScaling(backward_override="high_precision").linear_recipe()
    assert override == MXFP8BlockScaling(high_precision_backward=True).linear_recipe()
    assert MXFP8BlockScaling(backward_override=None).linear_recipe() == MXFP8.linear_recipe()
    with pytest.raises(ValueError, match="backward_override is 'dequantized'; choose one of None, high_precision"):
        recipe.DelayedScaling(backward_override="dequantized").linear_recipe()
    with pytest.raises(ValueError, match="is 'exact'; choose one of None, high_precision, dequantized"):
        MXFP8BlockScaling(backward_override="exact").linear_recipe()
    tiles = MXFP8BlockScaling(enable_2d_quantization=True).linear_recipe()
    assert tiles == MXFP8BlockScaling(two_dimensional_weights=True).linear_recipe()
    assert recipe.QuantizerRole is QuantizerRole


@pytest.mark.parametrize("kind", [MXFP8BlockScaling, NVFP4BlockScaling, recipe.Float8CurrentScaling])
@pytest.mark.parametrize("stacked", [False, True])
def test_dequantized_gradients_are_products_with_the_values_of_fprop(kind, stacked):
    """One layer, or a stack of two with a matrix of rows for each."""
    made = kind(backward_override="dequantized")
    casts = made.linear_recipe()
    x, w = torch.randn(2, 24, 64).requires_grad_(), torch.nn.Parameter(torch.randn(2, 32, 64))
    if not stacked:
        x, w = x.detach()[0].requires_grad_(), torch.nn.Parameter(w.detach()[0])
    with mx.autocast(recipe=made), mx.explain() as log:
        y = torch.bmm(x, w.mT) if stacked else F.linear(x, w)
        grad = torch.randn_like(y)
        y.backward(grad)
    assert [e.kernel for e in log.entries if e.spec.op in ("dgrad", "wgrad")] == ["high precision"] * 2

    def values(t, cast):
        given = t.detach() if stacked else t.detach().unsqueeze(0)
        return torch.stack([mx.quantize(each, cast.format).dequantize() for each in given])

    a, b = values(x, casts.input.rowwise), values(w, casts.weight.rowwise)
    g = grad if stacked else grad.unsqueeze(0)
    torch.testing.assert_close(x.grad.view_as(a), g @ b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad.view_as(b), g.mT @ a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.detach().view_as(g), a @ b.mT, rtol=1e-5, atol=1e-4)
    assert casts != kind(backward_override="high_precision").linear_recipe()
