"""GPTQ of a whole Llama, beside a reference of a few lines that runs the model up to each layer."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.elements import decode_elements
from mxtensor.numerics.reference import encode, scale_to_float

transformers = pytest.importorskip("transformers")

DAMPING = 0.02


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    m = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, p in m.named_parameters():
        if "layers" in name and p.dim() == 2:
            p.mul_(8)
    return m


def inputs(m, name, ids):
    """The inputs of one layer, (tokens, cols)."""
    found = []
    with m.get_submodule(name).register_forward_pre_hook(lambda layer, args: found.append(args[0].flatten(0, -2))):
        m(ids)
    return found[0]


def optimal_brain_quantization(w, h, cast, whole_amax):
    """Each column is rounded, and all columns after it get the least-squares correction: the normal equations anew."""
    left, done = w.double().clone(), torch.zeros_like(w)
    width = cast.format.block[1]
    for j in range(w.shape[1]):
        if j % width == 0:
            block = left[:, j : j + width].float()
            scales = encode(block, cast, whole_amax)
        padded = left[:, j // width * width :][:, :width].float().clone()
        padded[:, : j % width] = done[:, j // width * width : j]
        done[:, j] = round_with(padded, scales, cast)[:, j % width]
        error = w[:, : j + 1].double() - done[:, : j + 1].double()
        if j + 1 < w.shape[1]:
            left[:, j + 1 :] = w[:, j + 1 :] + torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, : j + 1] @ error.T).T
    return done


def round_with(values, scales, cast):
    """``values`` (rows, width) rounded to nearest multiples of the given scales."""
    element = cast.format.element
    every = decode_elements(torch.arange(2**element.bits, dtype=torch.uint8).view(element.dtype), element)
    every = every[every.isfinite()]
    scale = scale_to_float(scales.scale, cast.format.scale)
    scale = scale if scales.global_scale is None else scale * scales.global_scale
    grid = every * scale  # (rows, elements)
    nearest = (values[:, :, None] - grid[:, None]).abs().argmin(-1)
    return grid.gather(1, nearest)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("correct", ["model", "cast", "none"])
@pytest.mark.parametrize("format", ["mxfp4-weight-only", "nvfp4-weight-only", "mxfp8"])
def test_every_layer_has_the_weights_of_the_reference(format, correct):
    m, ids = llama(), torch.randint(0, 50, (8, 32), generator=torch.Generator().manual_seed(1))
    method = mx.GPTQ(damping=DAMPING, search=False, correct=correct)
    got = mx.calibrate(copy.deepcopy(m), [ids], format, method)
    now, weight_only = copy.deepcopy(m), format.endswith("-weight-only")
    cast = Cast.of(format.removesuffix("-weight-only"))
    groups = ["self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj mlp.up_proj",
              "mlp.down_proj"]  # fmt: skip
    for layer in range(2):
        for group in groups:
            names = [f"model.layers.{layer}.{name}" for name in group.split()]
            x = inputs(now, names[0], ids)
            seen = x if weight_only else mx.quantize(x, cast.format).dequantize()
            target = {"model": inputs(m, names[0], ids), "cast": x, "none": seen}[correct]
            h = (seen.T @ seen / len(seen)).double()
            h += DAMPING * h.diagonal().mean() * torch.eye(len(h))
            cross = (target - seen).T.double() @ seen.double() / len(seen)
            for name in names:
                w = m.get_submodule(name).weight
                wanted = (w + w.double() @ cross @ torch.linalg.inv(h)).float()
                stored = got.get_submodule(name).weight
                expected = optimal_brain_quantization(wanted, h, cast, wanted.abs().amax())
                same = torch.isclose(stored.dequantize(), expected, rtol=1e-4, atol=1e-6).float().mean()
                assert same > 0.97, (name, same)  # a column on a tie goes the other way, and those after it follow
                # the next layers are compared on the same inputs
                now.get_submodule(name).weight = nn.Parameter(stored, requires_grad=False)
