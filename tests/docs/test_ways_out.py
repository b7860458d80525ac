"""The way out that an error names works: what raises is called, then what its message says to call."""

import re

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.docs.error_rows import namespace

ROWS = [
    # quantize
    ("mx.quantize([1.0, 2.0], 'mxfp8')", r"torch.as_tensor\(x\)", "mx.quantize(torch.as_tensor([1.0, 2.0]), 'mxfp8')"),
    ("mx.quantize(torch.randn(()), 'mxfp8')", r"x.reshape\(1\)", "mx.quantize(torch.randn(()).reshape(1), 'mxfp8')"),
    ("mx.quantize(x.to_sparse(), 'mxfp8')", r"to_dense\(\)", "mx.quantize(x.to_sparse().to_dense(), 'mxfp8')"),
    ("mx.quantize(torch.arange(64), 'mxfp8')", "float32", "mx.quantize(torch.arange(64).to(torch.float32), 'mxfp8')"),
    ("mx.get_format('nvfp4[row_scaled]').with_block((16, 16))", r"with_block\(\(16, 16\)\) on the format nvfp4",
     "mx.get_format('nvfp4').with_block((16, 16))"),
    ("mx.get_format('mxfp8[row_scaled]')", "choose nvfp4", "mx.get_format('nvfp4[row_scaled]')"),
    ("mx.Cast.of('nvfp4', rounding='stochastic', four_over_six='mae')", "rounding='nearest'",
     "mx.Cast.of('nvfp4', rounding='nearest', four_over_six='mae')"),
    ("mx.quantize(x[0], 'mxfp8', orientation='both')", "two dimensions", "mx.quantize(x, 'mxfp8', orientation='both')"),
    ("from_components(data, scale.float(), 'mxfp8')", "must be uint8", "from_components(data, scale, 'mxfp8')"),
    ("mx.MXTensor(x)", r"mx.MXTensor.from_components", "mx.MXTensor.from_components(data, scale, 'mxfp8')"),
    # ops
    ("strictly(lambda: w[16:20, 3:5].contiguous() + 1)", "would dequantize", "w.dequantize()[16:20, 3:5] + 1"),
    ("w.view(torch.uint8)", ".rowwise.data for the codes", "w.rowwise.data.view(torch.uint8)"),
    ("mx.quantize(x[None, :, :, None], 'mxfp8', 'rceil', 'columnwise').squeeze_(0).unsqueeze_(3)",
     "use the op without the underscore",
     "mx.quantize(x[None, :, :, None], 'mxfp8', 'rceil', 'columnwise').squeeze(0).unsqueeze(3)"),
    ("mx.quantize(x, 'mxfp8', orientation='columnwise') @ mx.quantize(x.t(), 'mxfp8', orientation='rowwise')",
     "quantize one of them with orientation='both'",
     "mx.quantize(x, 'mxfp8', orientation='both') @ mx.quantize(x.t(), 'mxfp8', orientation='rowwise')"),
    ("x.bfloat16() @ w.t()", r"convert one with .to\(\)", "x.bfloat16() @ w.t().to(torch.bfloat16)"),
    ("F.linear(x, w, torch.randn(64).double())", r"convert it with .to\(\)", "F.linear(x, w, torch.randn(64))"),
    ("x.view(-1)[:64].view(8, 8) @ w", "the contracted dimensions differ", "torch.randn(8, 64) @ w"),
    ("torch.mm(w, torch.tensor(3.0))", "or use torch.matmul", "torch.matmul(w, x.t())"),
    # quantize_
    ("mx.quantize_(x, 'mxfp8')", r"for a tensor use mx.quantize\(x, format\)", "mx.quantize(x, 'mxfp8')"),
    ("mx.quantize_(torch.nn.LazyLinear(64), 'mxfp8')", "run one batch through the lazy module first",
     "mx.quantize_((lambda m: (m(x), m)[1])(torch.nn.LazyLinear(64)), 'mxfp8')"),
    ("mx.quantize_(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64)), 'mxfp8')", "remove that first",
     "mx.quantize_(torch.nn.utils.parametrize.remove_parametrizations(torch.nn.utils.parametrizations.weight_norm("
     "torch.nn.Linear(64, 64)), 'weight'), 'mxfp8')"),
    ("mx.quantize_(model, 'mxfp4', step='prepare', include_head=True)", "pass a filter_fn",
     "mx.quantize_(model, 'mxfp4', lambda module, name: True, step='prepare')"),
    ("mx.quantize_(model, 'mxfp8', lambda m: True)", "a function of two arguments",
     "mx.quantize_(model, 'mxfp8', lambda module, name: True)"),
    ("mx.recipe.NVFP4BlockScaling(row_scaled_activation=True).linear_recipe()", "set disable_rht=True",
     "mx.recipe.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True).linear_recipe()"),
    ("mx.TransformersConfig({'0': 'mxfp8'})", "mx.quantize_ after loading",
     "mx.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), {'0': 'mxfp8'})"),
    # calibration
    ("mx.calibrate(model, 'text')", r"data is .* such as \[data\]", "mx.calibrate(model, [x])"),
    ("mx.calibrate(model, [])", r"\[input_ids, ...\]", "mx.calibrate(model, [x])"),
    ("mx.plan(model, [x], bits=4)", "more bits", "mx.plan(model, [x], bits=4.5)"),
    # training
    ("mx.autocast(recipe='mxfp8')", r"such as MXFP8BlockScaling\(\)",
     "mx.autocast(recipe=mx.recipe.MXFP8BlockScaling())"),
    ("te.quantized_model_init(recipe='mxfp8')", r"such as MXFP8BlockScaling\(\)",
     "te.quantized_model_init(recipe=mx.recipe.MXFP8BlockScaling())"),
    ("te.FusedAdam(model.parameters(), amsgrad=True)", r"use mx.optim.AdamW\(..., amsgrad=True\)",
     "mx.optim.AdamW(model.parameters(), amsgrad=True)"),
    ("te.FusedAdam([w.requires_grad_()])", "pass master_weights=True",
     "te.FusedAdam([w.requires_grad_()], master_weights=True)"),
    # caches and checkpoints
    ("mx.KVCache('mxfp8[32x32]')", "such as mxfp8, nvfp4 or float8_row", "[mx.KVCache(f) for f in ('mxfp8', 'nvfp4')]"),
    ("mx.KVCache(static=True)", "needs config=model.config and max_cache_len",
     "mx.KVCache(static=True, config=LlamaConfig(num_hidden_layers=1), max_cache_len=9)"),
    ("mx.checkpoints.save({'a.weight': mx.quantize(x, 'mxint8')}, place('out'), layout='mlx')", "pass format=",
     "mx.checkpoints.convert((lambda p: (mx.checkpoints.save({'a.weight': mx.quantize(x, 'mxint8')}, p), p)[1])("
     "place('in')), place('out'), layout='mlx', format='mxfp8-weight-only')"),
    ("mx.checkpoints.save({'embed_tokens.weight': w}, place('out'), layout='compressed-tensors')",
     "use the layout native", "mx.checkpoints.save({'embed_tokens.weight': w}, place('out'))"),
    ("mx.checkpoints.save({'a.weight': mx.quantize(x[:, :72], 'mxfp4')}, place('out'), layout='quark')",
     "use the layout native", "mx.checkpoints.save({'a.weight': mx.quantize(x[:, :72], 'mxfp4')}, place('out'))"),
    ("mx.checkpoints.save([w], place('out'))", "module or a state dict", "mx.checkpoints.save({'a': w}, place('out'))"),
    ("mx.checkpoints.save({'a.weight': w}, place('out.gguf'))", "pass layout='gguf'",
     "mx.checkpoints.save({'a.weight': mx.quantize(x, 'mxfp4')}, place('out.gguf'), layout='gguf')"),
    # transformer engine
    ("te.Float8BlockQuantizer(block_scaling_dim=3)(x)", "use 1 or 2",
     "te.Float8BlockQuantizer(block_scaling_dim=2)(x)"),
    ("te.general_gemm(w, x, layout='NN')", "needs a columnwise copy of A",
     "te.general_gemm(mx.quantize(x, 'mxfp8', orientation='both'), torch.randn(8, 64), layout='NN')"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says", "way_out"), ROWS, ids=[row[0] for row in ROWS])
def test_what_a_message_says_to_call_works(call, says, way_out):
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError), match=says):
        eval(call, namespace())
    eval(way_out, namespace())


class Net(nn.Module):
    """A model of no library, whose config is a dict, as those of diffusers."""

    def __init__(self):
        super().__init__()
        self.layer, self.convolution, self.config = nn.Linear(64, 64), nn.Conv2d(3, 3, 3), {"_class_name": "Net"}


@pytest.mark.parametrize("way", ["torch.save", "mx.checkpoints"])
def test_a_model_that_safetensors_cannot_save_is_saved_and_loaded(way, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    choose = {"filter_fn": lambda module, name: isinstance(module, nn.Linear)}
    model, second = (mx.quantize_(Net(), "mxfp8", **choose) for _ in range(2))
    with pytest.raises(TypeError, match=re.escape("for others torch.save(model.state_dict(), path), or")):
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    if way == "torch.save":
        torch.save(model.state_dict(), tmp_path / "model.pt")
        second.load_state_dict(torch.load(tmp_path / "model.pt"))
    else:
        mx.checkpoints.save(model, tmp_path / "out")
        second.load_state_dict(mx.checkpoints.load(tmp_path / "out"))
    x = torch.randn(3, 64)
    assert torch.equal(second.layer(x), model.layer(x))
    assert torch.equal(second.convolution.weight, model.convolution.weight)


def test_a_model_of_transformers_that_safetensors_cannot_save_has_save_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=97, num_hidden_layers=1)
    model = mx.quantize_(transformers.LlamaForCausalLM(config).eval(), "mxfp8")
    with pytest.raises(TypeError, match=r"of transformers call model.save_pretrained\(path\)"):
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.save_pretrained(tmp_path / "out")
    reloaded, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(9)[None]
    assert torch.equal(reloaded(ids).logits, model(ids).logits)
