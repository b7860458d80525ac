"""torch's own modules with MXTensor parameters give the same results as with the dequantized weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from tests.helpers.compare import assert_same_product, dequantized, relative_error

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
ROUNDING = 2e-6
"""Relative: two or three products in float32, in another order of summation."""


def quantized(module, config="mxfp8-weight-only"):
    """``module`` with every weight quantized, and the same module on plain weights of the same values."""
    mx.quantize_(module, config)
    return module, dequantized(module)


def assert_close(got, expected, tolerance=ROUNDING):
    """Assert that the results of a module, one or several, are close."""
    got, expected = ((r if isinstance(r, tuple) else (r,)) for r in (got, expected))
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if e is not None:
            assert type(g) is torch.Tensor and (g.shape, g.dtype) == (e.shape, e.dtype)
            assert relative_error(g, e) < tolerance


# ---------------------------------------------------------------------------------------------- nn.Linear


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("format", mx.FORMATS)
def test_linear(format, bias, mode):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 7, 96).to(dtype)
        for config in (format, f"{format}-weight-only"):
            linear = nn.Linear(96, 80, bias=bias).to(dtype)
            mx.quantize_(linear, config)
            with MODES[mode]():
                y = linear(x)
            rows = mx.quantize(x.flatten(0, 1), format).dequantize(
                torch.float64
            )  # a tile covers rows of the whole call
            inputs = x if config.endswith("only") else rows.view(x.shape)
            operands = [inputs, linear.weight.dequantize(torch.float64), *([linear.bias.detach()] if bias else [])]
            assert_same_product(y, lambda x, w, *b: F.linear(x, w, *b), *operands)


@pytest.mark.parametrize("shape", [(96,), (7, 96), (2, 7, 96), (2, 3, 4, 96), (0, 96)], ids=str)
def test_linear_takes_inputs_of_any_rank_and_stride(shape):
    linear, plain = quantized(nn.Linear(96, 80))
    inputs = [torch.randn(shape), torch.randn(*shape[:-1], 192)[..., ::2], torch.randn(96, *shape[:-1]).movedim(0, -1)]
    for mode in MODES.values():
        with mode():
            for x in inputs:
                if x.numel():
                    assert_close(linear(x), plain(x))
                else:
                    assert linear(x).shape == plain(x).shape


def test_linear_under_autocast():
    for config in ("mxfp8", "mxfp4-weight-only", "nvfp4"):
        linear, x = nn.Linear(96, 80), torch.randn(2, 7, 96)
        mx.quantize_(linear, config)
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, copy.deepcopy(linear).bfloat16()(x.bfloat16()))


# ---------------------------------------------------------------------------------------------- nn.MultiheadAttention


def attention_inputs(batch_first, self_attention, kdim, vdim):
    shapes = [(2, 7, 64)] if self_attention else [(2, 7, 64), (2, 9, kdim or 64), (2, 9, vdim or 64)]
    inputs = [torch.randn(s) if batch_first else torch.randn(s).transpose(0, 1) for s in shapes]
    return inputs * 3 if self_attention else inputs  # torch tells self-attention by the identity of the inputs


KINDS = {
    "self": dict(self_attention=True, kdim=None, vdim=None),
    "cross": dict(self_attention=False, kdim=None, vdim=None),
    "kdim_vdim": dict(self_attention=False, kdim=32, vdim=96),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "seq_first"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind, batch_first, bias, train):
    inputs = attention_inputs(batch_first, **KINDS[kind])
    widths = {name: KINDS[kind][name] for name in ("kdim", "vdim")}
    for config in ("mxfp8-weight-only", "mxfp4-weight-only", "nvfp4-weight-only"):
        attention, plain = quantized(nn.MultiheadAttention(64, 4, bias=bias, batch_first=batch_first, **widths), config)
        attention.train(train), plain.train(train)
        saved = [n for n, p in attention.named_parameters() if isinstance(p, mx.MXTensor)]
        projections = ["in_proj_weight"] if not widths["kdim"] else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        assert saved == [*projections, "out_proj.weight"]
        for mode in MODES.values():
            with mode():
                assert_close(attention(*inputs), plain(*inputs))
                assert_close(attention(*inputs, need_weights=False), plain(*inputs, need_weights=False))
                by_head = dict(average_attn_weights=False)
                assert_close(attention(*inputs, **by_head), plain(*inputs, **by_head))


def masks(queries, keys):
    hidden = torch.zeros(2, keys, dtype=torch.bool)
    hidden[1, keys - 3 :] = True
    causal = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return {
        "padding": dict(key_padding_mask=hidden),
        "float_padding": dict(key_padding_mask=torch.zeros(2, keys).masked_fill(hidden, -torch.inf)),
        "attn": dict(attn_mask=causal),
        "float_attn": dict(attn_mask=torch.randn(queries, keys)),
        "by_head": dict(attn_mask=torch.randn(8, queries, keys)),
        "both": dict(key_padding_mask=hidden, attn_mask=causal),
    }


@pytest.mark.parametrize("name", masks(7, 7))
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention_masks(kind, name):
    q, k, v = attention_inputs(True, **KINDS[kind])
    attention, plain = quantized(nn.MultiheadAttention(64, 4, batch_first=True))
    mask = masks(7, k.shape[1])[name]
    for train in (True, False):
        attention.train(train), plain.train(train)
        for mode in MODES.values():
            with mode():
                for need in (True, False):
                    options = mask | dict(need_weights=need)
                    assert_close(attention(q, k, v, **options), plain(q, k, v, **options))


def test_attention_gradients_reach_the_input_and_the_biases():
    attention, plain = quantized(nn.MultiheadAttention(64, 4, batch_first=True))
    x, g = torch.randn(2, 7, 64), torch.randn(2, 7, 64)
    grads = []
    for module in (attention, plain):
        leaf = x.clone().requires_grad_()
        module(leaf, leaf, leaf)[0].backward(g)
        grads.append((leaf.grad, module.in_proj_bias.grad, module.out_proj.bias.grad))
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, 1e-5)


# ---------------------------------------------------------------------------------------------- encoder layers


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm_first", "norm_last"])
def test_encoder_layer(norm_first, activation, bias):
    layer, plain = quantized(
        nn.TransformerEncoderLayer(
            64, 4, 96, dropout=0.0, activation=activation, norm_first=norm_first, batch_first=True, bias=bias
        )
    )
    x, padding = torch.randn(2, 7, 64), masks(7, 7)["padding"]["key_padding_mask"]
    visible = ~padding
    for train in (True, False):
        layer.train(train), plain.train(train)
        for mode in MODES.values():
            with mode():
                assert_close(layer(x), plain(x))
                got, expected = layer(x, src_key_padding_mask=padding), plain(x, src_key_padding_mask=padding)
                assert_close(got[visible], expected[visible])
    with torch.autocast("cpu", torch.bfloat16):
        layer.train(), plain.train()
        assert_close(layer(x), plain(x), 1e-2)


@pytest.mark.parametrize("config", ["mxfp8-weight-only", "mxfp8", "mxfp4", "nvfp4"])
def test_encoder(config):
    """The fast path (eval, no gradient), the slow path and the stack without nested tensors agree."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder, plain = quantized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), config)
    x, padding = torch.randn(2, 7, 64), masks(7, 7)["padding"]["key_padding_mask"]
    with torch.no_grad():
        slow = encoder.train()(x, src_key_padding_mask=padding)
        fast = encoder.eval()(x, src_key_padding_mask=padding)
    # A code at the edge of a rounding step may fall to the other side when activations are quantized.
    tolerance = ROUNDING if config.endswith("only") else 2e-2
    assert_close(fast[~padding], slow[~padding], tolerance)
    if config.endswith("only"):
        assert_close(fast[~padding], plain.train()(x, src_key_padding_mask=padding)[~padding])


def test_a_whole_transformer():
    model = nn.Transformer(64, 4, 1, 1, 96, dropout=0.0, batch_first=True)
    model, plain = quantized(model)
    source, target = torch.randn(2, 9, 64), torch.randn(2, 7, 64)
    for train in (True, False):
        model.train(train), plain.train(train)
        for mode in MODES.values():
            with mode():
                assert_close(model(source, target), plain(source, target))


# ---------------------------------------------------------------------------------------------- torch's fused ops


def fused_attention(module, q, k, v, mask, need_weights, average, mask_type):
    return torch._native_multi_head_attention(
        q, k, v, 64, 4, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias,
        mask, need_weights, average, mask_type,
    )  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "padding", "attn"])
def test_the_fused_attention_op_of_the_fast_path(mask):
    """Eager MXTensors do not use it; torch.compile does."""
    attention, plain = quantized(nn.MultiheadAttention(64, 4, batch_first=True).eval())
    x = torch.randn(2, 7, 64)
    given = {
        "none": None,
        "padding": masks(7, 7)["padding"]["key_padding_mask"],
        "attn": masks(7, 7)["attn"]["attn_mask"],
    }
    kind = {"none": None, "padding": 1, "attn": 0}[mask]
    with torch.no_grad():
        for need, average in ((True, True), (True, False), (False, True)):
            got = fused_attention(attention, x, x, x, given[mask], need, average, kind)
            expected = fused_attention(plain, x, x, x, given[mask], need, average, kind)
            assert_close(got[0], expected[0])
            if need:
                assert_close(got[1], expected[1])
            else:
                assert got[1].numel() == 0
        q, k, v = torch.randn(3, 2, 7, 64)
        crossed = fused_attention(attention, q, k, v, given[mask], False, True, kind)[0]
        assert_close(crossed, fused_attention(plain, q, k, v, given[mask], False, True, kind)[0])


@pytest.mark.parametrize("use_gelu", [True, False], ids=["gelu", "relu"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm_first", "norm_last"])
def test_the_fused_encoder_op_of_the_fast_path(norm_first, use_gelu):
    layer, plain = quantized(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval())
    x = torch.randn(2, 7, 64)

    def fused(m):
        a = m.self_attn
        return torch._transformer_encoder_layer_fwd(
            x, 64, 4, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias, use_gelu, norm_first,
            1e-5, m.norm1.weight, m.norm1.bias, m.norm2.weight, m.norm2.bias, m.linear1.weight, m.linear1.bias,
            m.linear2.weight, m.linear2.bias,
        )  # fmt: skip

    with torch.no_grad():
        assert_close(fused(layer), fused(plain))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_padded_rows_of_an_encoder_are_those_of_torch_without_its_fast_path():
    """As docs/guide/models.md says: torch's fast path makes them zeros, and a mean leaves them out."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    fast = nn.TransformerEncoder(layer, 2).eval()
    slow = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    slow.load_state_dict(fast.state_dict())
    x, mask = torch.randn(2, 6, 64), torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    with torch.no_grad():
        zeros = fast(x, src_key_padding_mask=mask)
        found = mx.quantize_(copy.deepcopy(fast), "mxint8-weight-only")(x, src_key_padding_mask=mask)
        slow.layers[0].self_attn.in_proj_weight.requires_grad_()
        with torch.enable_grad():
            wanted = slow(x, src_key_padding_mask=mask).detach()
    assert not zeros[mask].any() and found[mask].any()
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
    means = [(out * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True) for out in (found, zeros)]
    torch.testing.assert_close(*means, atol=0.05, rtol=0.05)
