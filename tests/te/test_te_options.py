"""Options of TransformerEngine's quantizers and methods of its tensors: what they do here, and what they refuse."""

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te

E4M3 = te.DType.kFloat8E4M3
X, OTHER = torch.randn(2, 64, 96)


def test_quantize_gives_the_dtype_that_is_asked_for():
    quantizer = te.MXFP8Quantizer()
    narrow, plain = quantizer.quantize(X, dtype=torch.bfloat16), quantizer(X)
    assert narrow.dtype is torch.bfloat16 and plain.dtype is torch.float32
    assert torch.equal(narrow.dequantize(torch.float32), plain.dequantize())
    rotated = te.NVFP4Quantizer(with_rht=True)
    assert torch.equal(rotated.quantize(X, dtype=torch.bfloat16)._columnwise_data, rotated(X)._columnwise_data)
    x = X.clone().requires_grad_()
    quantizer.quantize(x, dtype=torch.bfloat16).dequantize().float().square().sum().backward()
    assert torch.equal(x.grad, 2 * plain.dequantize())


@pytest.mark.parametrize("quantizer", [te.MXFP8Quantizer(), te.Float8BlockQuantizer(), te.NVFP4Quantizer()])
def test_a_tensor_is_quantized_in_place_unless_the_flag_is_set(quantizer):
    t = torch.nn.Parameter(quantizer(X))
    assert t.quantize_(OTHER) is t and torch.equal(t.detach().dequantize(), quantizer(OTHER).dequantize())
    t.quantize_(X, noop_flag=torch.ones(1))
    quantizer.update_quantized(X, t.detach(), noop_flag=torch.ones(1, dtype=torch.int32))
    assert torch.equal(t.detach().dequantize(), quantizer(OTHER).dequantize())
    t.quantize_(X, noop_flag=torch.zeros(1))
    assert torch.equal(t.detach().dequantize(), quantizer(X).dequantize())
    with pytest.raises(ValueError, match=r"quantize_: the tensor is \(96,\), this one \(64, 96\); pass one"):
        t.quantize_(X[0])


def test_options_that_ask_for_nothing_change_nothing():
    plain = te.NVFP4Quantizer(with_rht=True)
    theirs = te.NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, with_amax_reduction=False, amax_reduction_group=None
    )
    assert torch.equal(theirs(X)._columnwise_data, plain(X)._columnwise_data)
    theirs.internal = theirs.optimize_for_gemm = True
    assert isinstance(theirs(X), mx.MXTensor) and theirs.copy().internal
    current = te.Float8CurrentScalingQuantizer(E4M3, use_existing_amax=False, with_amax_reduction=False)
    assert torch.equal(current(X)._data, mx.quantize(X, "float8_e4m3_tensor")._data)
    assert current.make_empty((4, 32), pin_memory=False).shape == (4, 32)


def test_others_name_the_way_out():
    for kind in (te.NVFP4Quantizer, te.Float8CurrentScalingQuantizer):
        with pytest.raises(NotImplementedError, match=f"{kind.__name__}: with_amax_reduction=True is not available"):
            kind(with_amax_reduction=True)
    with pytest.raises(NotImplementedError, match="use Float8Quantizer, whose scale you set"):
        te.Float8CurrentScalingQuantizer(use_existing_amax=True)


def test_attributes_of_its_tensors():
    t = te.Float8CurrentScalingQuantizer(E4M3)(X)
    assert torch.equal(t._data.view(torch.float8_e4m3fn).float() * t._scale_inv, t.dequantize())
    assert te.Float8BlockQuantizer()(X)._is_2D_scaled and not te.MXFP8Quantizer()(X)._is_2D_scaled
    for name, ours in (("_fp8_dtype", "tensor.format.element"), ("get_metadata", "mx.MXTensor.from_components")):
        assert not hasattr(t, name)
        with pytest.raises(AttributeError, match=f"no '{name}', as TransformerEngine's tensors have; use .*{ours}"):
            getattr(t, name)
