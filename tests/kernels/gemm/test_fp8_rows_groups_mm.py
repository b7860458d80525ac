"""Products of row-scaled E4M3 in groups: Triton's and torch's against exact sums, and which of them runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor  # noqa: F401
from mxtensor.kernels import expected_time
from mxtensor.kernels.gemm import fp8_rows_grouped as groups_mm
from mxtensor.kernels.gemm.fp8_rows_grouped import FEW_VALUES, NARROW, VALUES, WIDE, Tile
from mxtensor.numerics.groups import Groups
from mxtensor.numerics.row_scaled import FLOAT32_SUMS
from tests.helpers.in_bounds import in_bounds
from tests.helpers.stand_in import BF16

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same runs on the device")
E4M3 = torch.float8_e4m3fn
SMALL, HALVES = Tile(32, 32, 1, 32, 2, 4, 2), Tile(32, 16, 2, 64, 1, 4, 2)
SIZES = [5, 0, 70, 33, 0, 1]
HOPPER_PART = 2.0**-10
"""Of sum |a||b|: what the tensor cores of Hopper lose of random values, at most."""


def ends_of(sizes, device="cpu"):
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def codes(*shape, device="cpu", dtype=E4M3):
    return torch.randn(shape, device=device).to(dtype)


def scales(count, device="cpu"):
    return 2.0 ** torch.randint(-3, 4, (count,), device=device).float()


def assert_close(y, a, b, sums):
    """y is a @ b^T, float64, but for sums and one rounding, which is a truncation in Triton's interpreter."""
    exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    rounding = 2.0**-8 if y.is_cuda else 2.0**-7
    assert ((y.double() - exact).abs() <= rounding * exact.abs() + sums * magnitude + 1e-30).all()


def check_rows(y, a, scale_a, b, scale_b, sizes, sums):
    start, (count, width, _) = 0, b.shape
    assert y.dtype is BF16 and y.shape == (a.shape[0], width)
    left = a.double() * scale_a.double()[:, None]
    for i, n in enumerate(sizes):
        right = b[i].double() * scale_b.view(count, width)[i].double()[:, None]
        assert_close(y[start : start + n], left[start : start + n], right, sums)
        start += n
    assert not y[start:].any()


def check_columns(y, a, scale_a, b, scale_b, groups, sums):
    count = groups.number
    assert y.dtype is BF16 and y.shape == (count, a.shape[0], b.shape[0])
    start = 0
    for i, end in enumerate(groups.padded_ends.tolist()):
        left, right = (
            t[:, start:end].double() * s.view(count, -1)[i].double()[:, None] for t, s in ((a, scale_a), (b, scale_b))
        )
        assert_close(y[i], left, right, sums)
        start = end


def rows_case(device, tile, sizes, after, width, inner, sums, dtypes=(E4M3, E4M3)):
    rows, count = sum(sizes) + after, len(sizes)
    a = codes(rows, inner, device=device, dtype=dtypes[0])
    b = codes(count, width, inner, device=device, dtype=dtypes[1])
    scale_a, scale_b = scales(rows, device), scales(count * width, device)
    ends = ends_of(sizes, device)
    run = groups_mm.torch_rows if tile is None else lambda *given: groups_mm.triton_rows(*given, tile)
    check_rows(run(a, scale_a, b, scale_b, ends), a, scale_a, b, scale_b, sizes, sums)


def columns_case(device, tile, sizes, after, height, width, block, sums, dtypes=(E4M3, E4M3)):
    rows, count = sum(sizes) + after, len(sizes)
    groups = Groups(ends_of(sizes, device), rows, block)
    a = codes(height, groups.length, device=device, dtype=dtypes[0])
    b = codes(width, groups.length, device=device, dtype=dtypes[1])
    tail = int(groups.padded_ends[-1])
    for t in (a, b):  # NaN, which no sum may touch
        t[:, tail:] = torch.full((), float("nan")).to(t.dtype)
    scale_a, scale_b = scales(count * height, device), scales(count * width, device)
    run = groups_mm.torch_columns if tile is None else lambda *given: groups_mm.triton_columns(*given, tile)
    check_columns(run(a, scale_a, b, scale_b, groups.given, rows, block), a, scale_a, b, scale_b, groups, sums)


# ---------------------------------------------------------------------------------------------- in the interpreter


@interpreted
@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("sizes, after", [(SIZES, 20), ([0, 0, 64], 0), ([0, 0], 32), ([90], 0)])
@pytest.mark.parametrize("width, inner", [(48, 64), (80, 48)])
@pytest.mark.parametrize("tile", [SMALL, HALVES], ids=["one", "halves"])
def test_rows_meet_the_matrix_of_their_group(freed_memory_is_nan, tile, width, inner, sizes, after):
    rows_case("cpu", tile, sizes, after, width, inner, FLOAT32_SUMS)


@interpreted
@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("sizes, after", [(SIZES, 20), ([0, 0, 64], 0), ([90], 0)])
@pytest.mark.parametrize("height, width, block", [(48, 64, 32), (64, 16, 64), (16, 80, 128)])
@pytest.mark.parametrize("tile", [SMALL, HALVES], ids=["one", "halves"])
def test_the_columns_of_each_group_give_a_matrix(freed_memory_is_nan, tile, height, width, block, sizes, after):
    columns_case("cpu", tile, sizes, after, height, width, block, FLOAT32_SUMS)


TILES_OF = {False: (NARROW, WIDE), True: (VALUES, FEW_VALUES)}
"""Whether values are multiplied -> the tiles."""
OTHERS = [(torch.float8_e5m2, E4M3), (E4M3, torch.float8_e5m2), (BF16, BF16)]


@interpreted
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtypes", OTHERS, ids=["e5m2 left", "e5m2 right", "bfloat16"])
def test_other_codes_and_values_are_multiplied_too(freed_memory_is_nan, dtypes, block):
    rows_case("cpu", SMALL, SIZES, 20, 48, 80, FLOAT32_SUMS, dtypes)
    columns_case("cpu", SMALL, SIZES, 20, 48, 64, block, FLOAT32_SUMS, dtypes)


@interpreted
def test_a_scale_that_is_nan_gives_nan_in_its_row_alone():
    a, b = codes(32, 32), codes(2, 16, 32)
    scale_a, scale_b = scales(32), scales(32)
    scale_a[3] = float("nan")
    y = groups_mm.triton_rows(a, scale_a, b, scale_b, ends_of([16, 16]), SMALL)
    assert y[3].isnan().all() and y.isnan().sum() == 16


@interpreted
@pytest.mark.parametrize("sizes, after", [([5, 0, 70], 53), ([0, 0], 40), ([30, 34], 0)])
def test_rows_after_the_last_end_are_zeros_and_the_others_stay(sizes, after):
    y = torch.randn(sum(sizes) + after, 600).to(BF16)
    expected = y.clone()
    expected[sum(sizes) :] = 0
    assert torch.equal(groups_mm.zero_after(y, ends_of(sizes)), expected)


@interpreted
@pytest.mark.parametrize("ends", [[5, 5, 75], [0, 0, 0], [90, 10, 200], [-4, 300, 100]])
@pytest.mark.parametrize("block", [32, 128])
def test_padded_ends_are_those_of_the_definition(ends, block):
    given = torch.tensor(ends, dtype=torch.int32)
    made = groups_mm.padded_ends(given, 96, block)
    assert torch.equal(made, Groups(given, 96, block).padded_ends) and made.dtype is torch.int32


@interpreted
@pytest.mark.parametrize("ends", [[60, 10], [100, 300], [-5, 32]])
def test_ends_that_are_not_ends_write_nothing_outside(ends):
    given = torch.tensor(ends, dtype=torch.int32)
    with in_bounds() as checked:
        groups_mm.triton_rows(codes(64, 32), scales(64), codes(2, 32, 32), scales(64), given, SMALL)
    assert checked.accesses > 0


# ---------------------------------------------------------------------------------------------- which one runs


def test_the_tiles_of_torch_are_known():
    """The three shapes of benchmarks/training.py: rows of a group, N, K."""
    figures = expected_time.figures_of((9, 0))
    tiles = {
        (2048, 14336, 4096): "128x128", (512, 2048, 2048): "128x128", (512, 1536, 4096): "128x256",
        (128, 4096, 4096): "64x128", (4096, 64, 4096): "64x128",
    }  # fmt: skip
    for sizes, tile in tiles.items():
        expected = expected_time.grouped(figures, f"torch {tile}", *sizes)
        assert expected_time.grouped(figures, "torch", *sizes) == expected > 0


def test_the_faster_product_runs():
    def tile(m, n, k):
        return groups_mm._tile(codes(1), codes(1), m, n, k)

    assert tile(2048, 14336, 4096) is None  # torch's tile is the best there
    assert tile(512, 1536, 4096) == tile(512, 2048, 2048) == WIDE
    assert tile(1536, 4096, 512) == tile(128, 768, 2048) == NARROW


def test_what_torch_does_not_multiply_takes_a_tile_of_this_package(instructions):
    (e4m3, e5m2, values), sizes = (
        (torch.empty(1, dtype=t) for t in (E4M3, torch.float8_e5m2, BF16)),
        (2048, 14336, 4096),
    )
    assert groups_mm._tile(e4m3, e4m3, *sizes) is None
    assert groups_mm._tile(e5m2, e4m3, *sizes) == groups_mm._tile(e4m3, e5m2, *sizes) == WIDE
    for capability, tile in (((9, 0), VALUES), ((8, 9), FEW_VALUES)):
        instructions(capability)
        assert groups_mm._tile(values, values, *sizes) == tile


@interpreted
def test_the_op_is_the_product_and_checks_its_arguments(monkeypatch):
    monkeypatch.setattr(groups_mm, "_tile", lambda *_: SMALL)
    op = torch.ops.mxtensor.fp8_rows_grouped_mm
    ends = ends_of([20, 20])
    a, b, scale_a, scale_b = codes(48, 64), codes(2, 32, 64), scales(48), scales(64)
    y = op(a, scale_a, b, scale_b, ends, 48, 0)
    assert torch.equal(y, groups_mm.triton_rows(a, scale_a, b, scale_b, ends, SMALL))
    p, q, scale_p, scale_q = codes(16, 96), codes(32, 96), scales(32), scales(64)
    dw = op(p, scale_p, q, scale_q, ends, 48, 32)
    assert torch.equal(dw, groups_mm.triton_columns(p, scale_p, q, scale_q, ends, 48, 32, SMALL))
    for words, *given in (
        (r"a must have shape \(40, 64\)", a, scale_a, b, scale_b, ends, 40, 0),
        (r"b must have shape \(2, 'any', 64\)", a, scale_a, b[:1], scale_b, ends, 48, 0),
        (r"scales of b must have shape \(64,\)", a, scale_a, b, scale_b[:32], ends, 48, 0),
        (r"scales of a must have shape \(32,\)", p, scale_p[:16], q, scale_q, ends, 48, 32),
        ("a block of multiples of 16", p, scale_p, q, scale_q, ends, 48, 24),
        ("contiguous tensors", a.view(torch.uint8).t().contiguous().t().view(E4M3), scale_a, b, scale_b, ends, 48, 0),
    ):
        with pytest.raises(ValueError, match=words):
            op(*given)
    with pytest.raises(TypeError, match="ends"):
        op(a, scale_a, b, scale_b, ends.long(), 48, 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (a, scale_a, b, scale_b, ends)]
        out = op(*fake, 48, 0)
        assert (out.shape, out.dtype) == (y.shape, y.dtype)
        fake = [mode.from_tensor(t) for t in (p, scale_p, q, scale_q, ends)]
        assert op(*fake, 48, 32).shape == dw.shape


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for sm90")


TILES = [None, NARROW, WIDE, Tile(128, 128, 1, 128, 16, 8, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, after", [([700, 0, 513, 1024, 3], 32), ([0, 0, 2048], 0), ([300] * 70, 1000)])
@pytest.mark.parametrize("width, inner", [(512, 4096), (1040, 272), (2048, 1536)])
@pytest.mark.parametrize("tile", TILES, ids=["torch", "square", "wide", "low"])
def test_rows_on_the_gpu(hopper, tile, width, inner, sizes, after):
    rows_case("cuda", tile, sizes, after, width, inner, HOPPER_PART)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile, dtypes",
    [(tile, dtypes) for dtypes in OTHERS for tile in TILES_OF[dtypes[0] is BF16]],
)
def test_other_codes_and_values_on_the_gpu(hopper, tile, dtypes):
    rows_case("cuda", tile, [700, 0, 513, 1024, 3], 32, 1040, 272, HOPPER_PART, dtypes)
    for block in (16, 128):
        columns_case("cuda", tile, [700, 0, 513, 1024, 3], 32, 1040, 272, block, HOPPER_PART, dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, after", [([700, 0, 513, 1024, 3], 32), ([0, 0, 2048], 0), ([300] * 70, 1000)])
@pytest.mark.parametrize("height, width, block", [(512, 1024, 32), (1040, 272, 32), (256, 2048, 128)])
@pytest.mark.parametrize("tile", TILES, ids=["torch", "square", "wide", "low"])
def test_columns_on_the_gpu(hopper, tile, height, width, block, sizes, after):
    columns_case("cuda", tile, sizes, after, height, width, block, HOPPER_PART)
