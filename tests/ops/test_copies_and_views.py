"""Views share memory, whatever layout the codes have: a copy that looks like a view would lose writes."""

import pytest
import torch

import mxtensor as mx
from mxtensor.tensor.dequantized_view import DequantizedView

FORMATS = ["mxfp8", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_e4m3_row", "float8_tensor"]
COPIES = {
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(memory_format=torch.contiguous_format),
    "clone of a clone": lambda t: t.clone().contiguous(),
    "of another dtype": lambda t: torch.ops.aten._to_copy(
        t, dtype=torch.bfloat16, memory_format=torch.contiguous_format
    ),
    "empty_like": lambda t: torch.empty_like(t, device="cpu", memory_format=torch.contiguous_format).copy_(t),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", FORMATS)
def test_views_of_contiguous_copies_are_written_through(format, orientation, copy):
    w = mx.quantize(torch.randn(4, 6, 64, 96), format, orientation=orientation)
    swapped = w.transpose(0, 1)
    made = COPIES[copy](swapped)
    assert made.is_contiguous() and all(t.is_contiguous() for t in made.components)
    assert torch.equal(made.dequantize(), swapped.dequantize(made.dtype))
    before, view = made.dequantize(), made.view(24, 64, 96)
    assert type(view) is mx.MXTensor
    assert torch.equal(view.dequantize(), before.view(24, 64, 96))
    view[3].zero_()
    before[0, 3] = 0
    after = made.dequantize()
    assert after[0, 3].abs().max() == 0 < w.dequantize()[3, 0].abs().max()
    torch.testing.assert_close(after, before, rtol=0.01, atol=0)  # scales of a whole row or tensor round again


def test_codes_of_another_copy_keep_the_order_of_the_outer_tensor():
    swapped = mx.quantize(torch.randn(4, 6, 64, 96), "mxfp8").transpose(0, 1)
    copy = swapped.clone()
    assert [t.stride() for t in (copy, *copy.components)] == [t.stride() for t in (swapped, *swapped.components)]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        copy.view(24, 64, 96)


@pytest.mark.parametrize("change", [lambda t: t.view(24, 64, 96), lambda t: t.reshape(24, 64, 96),
                                    lambda t: t.flatten(0, 1)])  # fmt: skip
def test_codes_that_have_no_such_view_are_decoded_and_not_copied(change):
    data, scale = (t.transpose(0, 1) for t in mx.quantize(torch.randn(4, 6, 64, 96), "mxfp8").components)
    w = mx.MXTensor.from_components(data, scale, "mxfp8", dtype=torch.float32)
    assert w.is_contiguous() and not data.is_contiguous()
    before, view = w.dequantize(), change(w)
    assert type(view) is DequantizedView
    assert torch.equal(view, before.view(24, 64, 96))
    view[3].zero_()
    after = before.clone()
    after[0, 3] = 0
    assert torch.equal(w.dequantize(), after)
    assert type(change(w.clone())) is mx.MXTensor


def test_one_copy_that_has_no_such_view_is_written_with_the_other():
    """A view has the copies that can follow; a write to it reaches the others too."""
    w = mx.quantize(torch.randn(6, 4, 64, 96), "mxfp8", orientation="both")
    w._columnwise = w._columnwise.map(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
    view = w.view(24, 64, 96)
    assert view.copies.label == "rowwise"
    view[3].mul_(-3.0)
    other = w.transpose(-1, -2).dequantize().transpose(-1, -2)
    assert torch.equal(view.dequantize(), w.dequantize().view(24, 64, 96))
    torch.testing.assert_close(other, w.dequantize(), rtol=0.2, atol=0.2)
    assert torch.equal(other[0, 3].sign(), w.dequantize()[0, 3].sign())
