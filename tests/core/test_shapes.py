"""Shapes and strides as numbers, beside torch's own."""

import pytest
import torch

from mxtensor.core.shapes import as_matrix, contiguous_stride, readable_size, swapped

SHAPES = [(), (3,), (0,), (2, 3), (2, 0), (0, 3), (4, 0, 5), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_of_a_fresh_tensor_are_torchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (4, 0, 5), (2, 3, 4, 5)], ids=str)
def test_leading_dimensions_become_rows(shape):
    x = torch.randn(shape)
    matrix = as_matrix(x)
    assert matrix.shape == (torch.Size(shape[:-1]).numel(), shape[-1])
    assert matrix.view(shape).equal(x) and matrix.data_ptr() == x.data_ptr()


def test_the_last_two_dimensions_are_exchanged():
    assert swapped((2, 3)) == (3, 2) and swapped((5, 2, 3)) == (5, 3, 2)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 40, "5120 GiB")],
)
def test_sizes_are_read_in_powers_of_1024(nbytes, text):
    assert readable_size(nbytes) == text
