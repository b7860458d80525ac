"""Products of groups that have global scales of their own: NVFP4, and float8 with one scale for each group."""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import dequant, emulated, fp8_rows_grouped, global_scales
from mxtensor.kernels.gemm.fp8_rows_grouped import Tile
from mxtensor.kernels.gemm.global_scales import times_global_scales, without_global_scales
from mxtensor.kernels.gemm.select import gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import FakeQuantized, has_group_scales
from mxtensor.numerics.formats import get_format
from mxtensor.recipe import DelayedScaling, Float8CurrentScaling, Format, NVFP4BlockScaling
from mxtensor.training.casts import copies_of, layout_of
from tests.helpers.compare import relative_error
from tests.helpers.stand_in import BF16, FP32

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_stacks.py runs the recipes on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
RECIPES = {
    "nvfp4": (NVFP4BlockScaling(disable_stochastic_rounding=True), dequant),
    "nvfp4 rows": (
        NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, row_scaled_activation=True), dequant
    ),
    "float8": (Float8CurrentScaling(), fp8_rows_grouped),
    "float8 e4m3": (Float8CurrentScaling(fp8_format=Format.E4M3), fp8_rows_grouped),
    "float8 in bfloat16": (Float8CurrentScaling(), dequant),
    "float8 delayed": (DelayedScaling(), fp8_rows_grouped),
    "float8 delayed in bfloat16": (DelayedScaling(), dequant),
}  # fmt: skip
SIZES = [5, 0, 40, 33]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(fp8_rows_grouped, "_tile", lambda *_: Tile(32, 32, 1, 32, 2, 4, 2))


def values(*shape):
    return (torch.randn(shape) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1)).float()).to(BF16)


@pytest.mark.parametrize("name", RECIPES)
def test_all_three_products_are_those_of_the_values_times_their_scales(name):
    recipe, kernel = RECIPES[name]
    recipe, ends = recipe.linear_recipe(), torch.tensor(SIZES).cumsum(0).to(torch.int32)
    x, w, g = values(sum(SIZES) + 3, 64), values(4, 48, 64), values(sum(SIZES) + 3, 48)
    groups = layout_of(ends, len(x), recipe)
    scales = () if recipe.delayed is None else (torch.tensor(20.0), torch.zeros(()))
    (x_row, x_col), (w_row, w_col), (g_row, g_col) = (
        copies_of(t, casts, (FP32, FP32), scales, of, True)
        for t, casts, of in ((x, recipe.input, groups), (w, recipe.weight, None), (g, recipe.grad, groups))
    )
    assert all(map(has_group_scales, (x_row, x_col, w_row, w_col, g_row, g_col)))
    for a, b in ((x_row, w_row), (g_row, w_col)):
        run = kernel.run_grouped if kernel is dequant else kernel.run
        y, expected = run(a, b, ends, GemmArgs(BF16)), emulated.run_grouped(a, b, ends, GemmArgs(FP32))
        assert y.dtype is BF16 and y[: sum(SIZES)].any() and relative_error(y.float(), expected) < 5e-3
        assert not y[sum(SIZES) :].any()
    dw = kernel.run_wgrad(g_col, x_col, groups, GemmArgs(BF16))
    expected = emulated.run_wgrad(g_col, x_col, groups, GemmArgs(FP32))
    assert dw.shape == w.shape and relative_error(dw.float(), expected) < 5e-3 and dw[0].any() and not dw[1].any()


def test_a_scale_belongs_to_each_row_of_each_group():
    format, ends = get_format("nvfp4"), torch.tensor([20, 20, 50], dtype=torch.int32)
    groups = layout_of(ends, 50, RECIPES["nvfp4"][0].linear_recipe())
    rows = FakeQuantized(torch.zeros(50, 32), torch.arange(50.0)[:, None], format)
    assert torch.equal(global_scales.rows_with_scales(rows)[1], torch.arange(50.0))
    stack = FakeQuantized(torch.zeros(3, 2, 32), torch.tensor([1.0, 2.0, 3.0])[:, None, None], format)
    assert global_scales.rows_with_scales(stack)[1].tolist() == [1, 1, 2, 2, 3, 3]
    assert groups.padded_ends.tolist() == [32, 48, 80]
    place = torch.arange(float(groups.length))
    for one in (rows, stack):  # Triton reads memory
        shared = global_scales.rows_with_scales(replace(one, global_scale=torch.full((1,) * len(one.shape), 7.0)))[1]
        expected = torch.full_like(global_scales.rows_with_scales(one)[1], 7.0)
        assert shared.is_contiguous() and torch.equal(shared, expected)
    columns = FakeQuantized(torch.zeros(2, groups.length), torch.stack([place, 100 + place]), format)
    assert global_scales.columns_with_scales(columns, groups)[1].tolist() == [0, 100, 32, 132, 48, 148]
    shared = FakeQuantized(columns.values, place[None], format)
    assert global_scales.columns_with_scales(shared, groups)[1].tolist() == [0, 0, 32, 32, 48, 48]


@pytest.mark.parametrize("where", ["left", "right", "both"])
def test_matrices_of_a_stack_are_multiplied_by_their_scales(where):
    """Where a kernel cannot, the definition does."""
    scale, format = torch.tensor([1.0, 3.0])[:, None, None], get_format("nvfp4")
    a, b = torch.randn(2, 16, 32).to(BF16), torch.randn(2, 8, 32).to(BF16)
    left = FakeQuantized(a, scale, format) if where != "right" else a
    right = FakeQuantized(b, 0.5 * scale, format) if where != "left" else b
    with mx.explain() as log:
        y = gemm("bmm", left, right, GemmArgs(FP32))
    assert [entry.kernel for entry in log.entries] == ["emulated"]
    expected = {"left": scale, "right": 0.5 * scale, "both": 0.5 * scale * scale}[where]
    assert relative_error(y, expected * (a.float() @ b.float().mT)) < 1e-6
    unscaled = without_global_scales(left, right, GemmArgs(FP32))
    product = torch.matmul(
        *(t.values if isinstance(t, FakeQuantized) else t for t in (unscaled.a, unscaled.b.mT))
    ).float()
    assert relative_error(times_global_scales(product, unscaled.scales, GemmArgs(FP32)), y) < 1e-2
