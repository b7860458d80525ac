"""Rows in groups: where padding puts them, and that each group is cast as if it were a matrix of its own."""

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.groups import Groups, amax_of_groups, block_of, padded_length, scaled_values_of_groups
from mxtensor.numerics.reference import decode, encode

SIZES = [[5, 0, 40, 32, 1], [0, 0, 64], [1], [0], [16, 16, 16, 16], [130, 3]]


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def pieces(sizes, ends):
    """(start, length, start in the padded matrix) of each group that has rows."""
    starts, padded = [0, *ends_of(sizes).tolist()], [0, *ends.tolist()]
    return [(starts[i], n, padded[i]) for i, n in enumerate(sizes) if n]


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_group_starts_at_a_whole_block_and_the_rest_is_zeros(sizes, after):
    rows = sum(sizes) + after
    groups = Groups(ends_of(sizes), rows, 16)
    x = torch.randn(rows, 3)
    padded = groups.padded(x)
    lengths = torch.diff(groups.padded_ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert lengths == [max(-(-n // 16), 1) * 16 for n in sizes]  # never a product of nothing
    assert padded.shape == (padded_length(rows, len(sizes), 16), 3) and groups.padded_ends[-1] <= len(padded)
    expected = torch.zeros_like(padded)
    for start, n, place in pieces(sizes, groups.padded_ends):
        expected[place : place + n] = x[start : start + n]
    assert torch.equal(padded, expected)
    assert torch.equal(groups.unpadded(padded)[: sum(sizes)], x[: sum(sizes)])
    assert groups.of_row.tolist() == [i for i, n in enumerate(sizes) for _ in range(n)] + [len(sizes)] * after


def test_what_follows_the_last_group_is_not_read():
    x = torch.full((40, 2), float("nan"))
    x[:10] = 1
    padded = Groups(ends_of([4, 6]), 40, 16).padded(x)
    assert padded.isfinite().all() and padded.sum() == 20


@pytest.mark.parametrize("ends", [[40, 100], [40, 0, 40], [-5, 40], [40, 40, 3]])
def test_wrong_ends_reach_no_other_memory(ends):
    groups = Groups(torch.tensor(ends, dtype=torch.int32), 40, 16)
    assert groups.ends.min() >= 0 and groups.ends.max() <= 40
    assert (
        groups.padded_ends.max() <= groups.length and 0 <= groups.places.min() <= groups.places.max() <= groups.length
    )
    groups.padded(torch.randn(40, 2))


def test_groups_are_padded_to_the_blocks_of_all_casts():
    cast = mx.Cast.of
    assert block_of(cast("mxfp8"), cast("nvfp4")) == 32 and block_of(cast("float8_1x128"), cast("mxfp8")) == 128
    assert block_of(cast("float8_tensor"), None) == 16  # what rotations and 16 bytes need


CASTS = ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "float8_tensor", "float8_e5m2_tensor_pow2", "nvfp4[16x16]"]


def values(rows, cols):
    """Groups of very different sizes of values, so that a scale of two groups would show."""
    return torch.randn(rows, cols) * 2.0 ** torch.arange(rows).div(7, rounding_mode="floor").remainder(9).unsqueeze(1)


def values_of_groups(x, cast, amax):
    """The float32 values of x, each part of which has its own ``amax``."""
    elements, scale = scaled_values_of_groups(x, cast, amax)
    return elements.to(torch.float32) * scale


def cast_in_groups(x, cast, groups, dim):
    if not cast.format.has_tensor_scale:
        return decode(encode(x, cast), torch.float32)
    group = groups.of_padded_row
    return values_of_groups(x, cast, amax_of_groups(x, group, groups.number, dim))


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("sizes", SIZES[:2])
def test_a_group_of_a_padded_matrix_is_cast_as_if_it_were_alone(sizes, name):
    """Bit for bit, in both orientations."""
    cast, x = mx.Cast.of(name), values(sum(sizes) + 3, 40)
    groups = Groups(ends_of(sizes), len(x), block_of(cast))
    padded = groups.padded(x)
    rowwise = cast_in_groups(padded, cast, groups, 0)
    columnwise = cast_in_groups(padded.t(), cast, groups, 1)
    for start, n, place in pieces(sizes, groups.padded_ends):
        alone = x[start : start + n]
        assert torch.equal(rowwise[place : place + n], decode(encode(alone, cast), torch.float32))
        assert torch.equal(columnwise[:, place : place + n], decode(encode(alone.t(), cast), torch.float32))


@pytest.mark.parametrize("name", ["nvfp4", "float8_tensor"])
def test_a_group_with_a_value_that_is_not_finite_spoils_itself_only(name):
    cast = mx.Cast.of(name)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(8, 32)
        x[3, 5] = bad
        groups = Groups(ends_of([4, 4]), 8, 16)
        made = values_of_groups(x, cast, amax_of_groups(x, groups.of_row, 2, 0))
        assert torch.equal(made[4:], decode(encode(x[4:], cast), torch.float32))
        assert torch.equal(made[:4].isnan(), decode(encode(x[:4], cast), torch.float32).isnan())
        assert made[:4].isnan().any()


@pytest.mark.parametrize("name", ["nvfp4", "float8_tensor", "nvfp4[16x16]"])
def test_matrices_of_a_stack_have_scales_of_their_own(name):
    cast, stack = mx.Cast.of(name), values(24, 33).view(3, 8, 33)
    made = values_of_groups(stack, cast, stack.abs().amax((1, 2), keepdim=True))
    for one, alone in zip(made, stack, strict=True):
        assert torch.equal(one, decode(encode(alone, cast), torch.float32))
