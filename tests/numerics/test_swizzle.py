"""Scales in tiles of 128x4, compared with the layout in the cuBLAS manual; the cache of swizzled scales."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtensor.numerics.derived import swizzle, swizzle_groups, swizzled_shape, unswizzle
from tests.helpers.slow_swizzle import scales, slowly, slowly_back

SHAPES = [(1, 1), (128, 4), (128, 8), (256, 4), (3, 5), (127, 3), (129, 4), (130, 9), (300, 31)]


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_the_layout_is_the_manuals_and_padding_is_zero(rows, cols):
    scale = scales(rows, cols)
    assert torch.equal(swizzle(scale), slowly(scale))
    assert swizzle(scale).shape == (swizzled_shape(rows, cols)[0] * swizzled_shape(rows, cols)[1],)


def test_a_tile_as_the_manual_draws_it():
    scale = torch.arange(512).reshape(128, 4)
    wide = torch.zeros(512, dtype=torch.int64)
    wide[:] = swizzle(scale)
    assert wide[:20].tolist() == [0, 1, 2, 3, 128, 129, 130, 131, 256, 257, 258, 259, 384, 385, 386, 387, 4, 5, 6, 7]


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_unswizzle_is_the_inverse(rows, cols):
    scale = scales(rows, cols)
    assert torch.equal(unswizzle(swizzle(scale), rows, cols), scale)
    assert torch.equal(slowly_back(swizzle(scale), rows, cols), scale)


def test_unswizzle_names_the_length_it_wants():
    with pytest.raises(ValueError, match="5x5 scales are 1024 bytes when swizzled, got 512"):
        unswizzle(scales(512), 5, 5)


def test_a_stack_is_swizzled_matrix_by_matrix():
    stack = scales(2, 3, 130, 5)
    expected = torch.stack([torch.stack([slowly(m) for m in row]) for row in stack])
    assert torch.equal(swizzle(stack), expected)
    assert torch.equal(unswizzle(swizzle(stack), 130, 5), stack)


def test_strided_scales_are_read_by_their_strides():
    scale = scales(9, 300)[:, ::2].t()
    assert torch.equal(swizzle(scale), slowly(scale.contiguous()))


def test_it_runs_on_fake_tensors_and_compiles():
    with FakeTensorMode():
        fake = torch.empty(130, 5, dtype=torch.uint8, device="cuda")
        assert swizzle(fake).shape == (256 * 8,)
        assert unswizzle(swizzle(fake), 130, 5).shape == (130, 5)
    scale = scales(130, 5)
    compiled = torch.compile(swizzle, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(scale), slowly(scale))


# ---------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    "sizes, after",
    [([5], 0), ([128, 128], 0), ([0, 3, 0, 200, 129, 0], 0), ([1, 1, 1], 7), ([0, 0], 4), ([300, 5], 260), ([127], 1)],
)
def test_every_group_starts_a_row_of_tiles(sizes, after):
    rows = sum(sizes) + after
    scale = scales(rows, 5)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    got = swizzle_groups(scale, ends)
    expected = torch.cat([slowly(rows) for rows in scale[: sum(sizes)].split(sizes) if len(rows)] or [scales(0)])
    assert got.shape == (-(-(rows + 127 * len(sizes)) // 128) * 128, 8)
    assert torch.equal(got.flatten()[: expected.numel()], expected)
    assert sorted(got.flatten().tolist()) == sorted(scale.flatten().tolist() + [0] * (got.numel() - scale.numel()))


def test_groups_need_no_value_of_their_ends():
    with FakeTensorMode():
        scale = torch.empty(10, 5, dtype=torch.uint8, device="cuda")
        assert swizzle_groups(scale, torch.empty(3, dtype=torch.int32, device="cuda")).shape == (512, 8)
