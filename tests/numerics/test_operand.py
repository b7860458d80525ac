"""Operand: from_tensors as the inverse of tensors, empty and zero operands, and functions of every tensor."""

import pytest
import torch

from mxtensor import FORMATS, Operand, get_format, quantize
from mxtensor.numerics.reference import decode

ALL = [*FORMATS, "mxfp8[32x32]", "mxfp6[1x16]"]


def operand_of(format, shape=(40, 100)):
    return quantize(torch.randn(shape), format).rowwise


def same(a, b):
    pairs = zip(a.tensors, b.tensors, strict=True)
    return (a.format, a.shape) == (b.format, b.shape) and all(
        torch.equal(*(t.reshape(-1).view(torch.uint8) for t in p)) for p in pairs
    )


@pytest.mark.parametrize("format", ALL)
def test_from_tensors_is_the_inverse_of_tensors(format):
    operand = operand_of(format)
    assert len(operand.tensors) == (3 if operand.format.global_scale else 2)
    assert same(Operand.from_tensors(operand.tensors, operand.format, list(operand.shape)), operand)


@pytest.mark.parametrize("format", ALL)
def test_an_empty_operand_has_the_shapes_and_dtypes_of_a_quantized_one(format):
    operand = operand_of(format)
    empty = Operand.empty(operand.format, operand.shape)
    assert [(t.shape, t.dtype) for t in empty.tensors] == [(t.shape, t.dtype) for t in operand.tensors]
    assert all(t.is_meta for t in Operand.empty(operand.format, operand.shape, "meta").tensors)


@pytest.mark.parametrize("format", ALL)
def test_zeros_decode_to_zeros(format):
    zeros = operand_of(format).new_zeros((3, 70))
    assert zeros.shape == (3, 70) and torch.equal(decode(zeros, torch.float32), torch.zeros(3, 70))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_row"])
def test_map_reaches_every_tensor_and_map_blocks_leaves_the_global_scale(format):
    operand = operand_of(format)
    copy = operand.map(torch.clone)
    assert same(copy, operand)
    assert not {t.data_ptr() for t in copy.tensors} & {t.data_ptr() for t in operand.tensors}
    rows = operand.map_blocks(lambda t: t[8:24], (16, 100))
    assert rows.shape == (16, 100) and rows.global_scale is operand.global_scale
    assert torch.equal(decode(rows, torch.float32), decode(operand, torch.float32)[8:24])


def test_with_blocks_leaves_format_and_global_scale():
    operand = operand_of("nvfp4")
    out = operand.with_blocks(operand.data[:5], operand.scale[:5], [5, 100])
    assert out.format is get_format("nvfp4") and out.shape == (5, 100) and out.global_scale is operand.global_scale
