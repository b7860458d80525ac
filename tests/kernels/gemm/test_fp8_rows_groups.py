"""Groups of row-scaled E4M3: the arguments of torch's grouped product, its result, and when it is chosen.

Without a GPU a strict stand-in takes the place of ``torch._scaled_grouped_mm``; torch's own checks see fake tensors.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.gemm import fp8_rows_grouped, scaled_mm_contract
from mxtensor.kernels.gemm.fp8_rows_grouped import scales_of_groups
from mxtensor.kernels.gemm.scaled_mm_contract import Product
from mxtensor.kernels.gemm.select import GROUPED, GROUPED_WGRAD, grouped_wgrad
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import RowOperand, Unquantized, values_of_rows
from mxtensor.numerics.groups import Groups
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import row_scaled
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
)
from mxtensor.training import passes
from mxtensor.training.casts import layout_of
from mxtensor.training.delayed_scaling import Scales, amax_of
from mxtensor.training.linear import linear
from mxtensor.training.passes import Inputs, Options
from tests.helpers.compare import assert_same_product, relative_error
from tests.helpers.no_sync import no_host_sync
from tests.helpers.stand_in import BF16, BLACKWELL, FP32, HOPPER, spec_of
from tests.kernels.gemm.test_scaled_grouped_mm import product_of_groups

CAST = mx.Cast.of("mxfp8")
RECIPES = {
    "mxfp8": MXFP8BlockScaling,
    "hybrid": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp6": MXFP6BlockScaling,
    "mxfp4": MXFP4BlockScaling,
}
"""Recipes whose weights have a scale for each block of a row."""
SIZES = [5, 0, 40, 32, 1]


@pytest.fixture(autouse=True)
def torch_multiplies(monkeypatch):
    """Codes in E4M3 are multiplied by torch, whatever the expected times; it does not multiply others. Fake tensors of
    a GPU cannot be written in place by a torch without CUDA, as histories are."""
    monkeypatch.setattr(passes, "scales_of", amax_of)
    general = fp8_rows_grouped._tile

    def tile(a, b, *sizes):
        return None if a.dtype is b.dtype is torch.float8_e4m3fn else general(a, b, *sizes)

    monkeypatch.setattr(fp8_rows_grouped, "_tile", tile)


def ends_of(sizes, device="cpu"):
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def rows(x, cast=CAST):
    """The row-scaled operand of a matrix or of a stack, by the definition."""
    operand = encode(x.reshape(-1, x.shape[-1]), cast)
    codes, scale, out_of_range = row_scaled(operand, unlimited_range=True)
    return RowOperand(codes, scale, out_of_range, operand.scale, cast.format, tuple(x.shape))


def columns_of_groups(a, b, scale_a, scale_b, offs=None, bias=None, out_dtype=None, use_fast_accum=False):
    """torch._scaled_grouped_mm of two matrices in float64; scales are at the addresses of GroupMMCommon.cuh."""
    (height, padded), (inner, width), groups = a.shape, b.shape, len(offs)
    assert a.stride() == (padded, 1) and b.stride() == (1, padded) and padded == inner and not padded % 16
    assert a.dtype is b.dtype is torch.float8_e4m3fn and out_dtype is BF16 and not use_fast_accum
    assert scale_a.shape == (groups * height,) and scale_b.shape == (groups * width,) and offs.dtype is torch.int32
    assert scale_a.is_contiguous() and scale_b.is_contiguous() and not width * 2 % 16
    out, start = torch.full((groups, height, width), float("nan"), dtype=BF16), 0
    for i, end in enumerate(offs.tolist()):
        assert end > start and not (end - start) % 16  # the device asserts both
        left = a[:, start:end].double() * scale_a[i * height : (i + 1) * height, None].double()
        right = b.t()[:, start:end].double() * scale_b[i * width : (i + 1) * width, None].double()
        out[i] = (left @ right.t()).to(BF16)
        start = end
    return out


@pytest.fixture
def grouped(monkeypatch):
    """torch's grouped products, which are for CUDA only, in float64."""

    def product(a, b, *rest, **named):
        return (product_of_groups if b.dim() == 3 else columns_of_groups)(a, b, *rest, **named)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)


def values(*shape):
    return torch.randn(shape) * torch.exp(1.5 * torch.randn(shape[-1]))


def test_each_group_of_rows_meets_its_own_weight(pretend, grouped):
    pretend(HOPPER)
    a, b = rows(values(sum(SIZES) + 2, 64)), rows(values(5, 48, 64))
    y = fp8_rows_grouped.run(a, b, ends_of(SIZES), GemmArgs(BF16))
    x, w, start = values_of_rows(a), values_of_rows(b), 0
    assert w.shape == (5, 48, 64) and y.shape == (80, 48) and y.dtype is BF16
    for i, n in enumerate(SIZES):
        if n:
            assert_same_product(y[start : start + n], lambda p, q: p @ q.t(), x[start : start + n], w[i])
        start += n
    assert not y[start:].any()


def test_each_group_of_columns_gives_a_matrix(pretend, grouped):
    pretend(HOPPER)
    groups = Groups(ends_of(SIZES), sum(SIZES) + 2, 32)
    a, b = (rows(groups.padded(values(80, cols)).t()) for cols in (48, 64))
    y = fp8_rows_grouped.run_wgrad(a, b, groups, GemmArgs(BF16))
    assert y.shape == (5, 48, 64) and y.dtype is BF16 and not y[1].any()
    ends = [0, *groups.padded_ends.tolist()]
    for i, n in enumerate(SIZES):
        left, right = (values_of_rows(side)[:, ends[i] : ends[i] + n] for side in (a, b))
        if n:
            assert_same_product(y[i], lambda p, q: p @ q.t(), left, right)


def test_columns_may_have_scales_of_their_own_in_each_group(pretend, grouped):
    """Bitwise the product of operands of which each group was cast alone."""
    pretend(HOPPER)
    groups = Groups(ends_of([40, 24]), 64, 32)
    x = [values(64, cols) * torch.tensor([1.0, 2.0**20]).repeat_interleave(torch.tensor([40, 24]))[:, None]
         for cols in (48, 64)]  # fmt: skip
    ends = [0, *groups.padded_ends.tolist()]
    sides = []
    for t in x:
        padded = groups.padded(t).t()
        alone = [rows(padded[:, start:end]) for start, end in pairwise(ends)]
        whole = rows(padded)
        codes = torch.cat([one.codes for one in alone] + [whole.codes[:, ends[-1] :]], 1)
        scale, out_of_range = (torch.cat([one[i] for one in alone]) for i in (1, 2))
        sides.append(whole._replace(codes=codes, row_scale=scale, out_of_range=out_of_range, groups=2))
    y = fp8_rows_grouped.run_wgrad(*sides, groups, GemmArgs(BF16))
    for i, (start, end) in enumerate(pairwise(ends)):
        alone = [rows(groups.padded(t).t()[:, start:end]) for t in x]
        left, right = map(values_of_rows, alone)
        assert_same_product(y[i], lambda p, q: p @ q.t(), left, right)


def test_a_row_too_large_for_a_scale_is_nan_and_never_a_number(pretend, grouped):
    pretend(HOPPER)
    x = torch.randn(32, 64)
    x[3] *= 2.0**90
    y = fp8_rows_grouped.run(rows(x), rows(torch.randn(2, 16, 64)), ends_of([16, 16]), GemmArgs(BF16))
    assert y[3].isnan().all() and y.isnan().sum() == 16


# ---------------------------------------------------------------------------------------------- what is chosen


def step(recipe, m=2048, shape=(4, 128, 256)):
    """Kernels of a training step of groups on a GPU, of fake tensors: they have no values that the host could read."""
    linear_recipe, needs = recipe.linear_recipe(), (True, True, False)
    with FakeTensorMode(), mx.explain() as log:
        scales = None
        if linear_recipe.delayed is not None:
            scales = Scales(torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"))
        x, w = (torch.empty(s, dtype=BF16, device="cuda") for s in ((m, shape[2]), shape))
        groups = layout_of(torch.empty(shape[0], dtype=torch.int32, device="cuda"), m, linear_recipe)
        y, saved, how = passes.forward(x, w, None, Options(linear_recipe), scales, None, needs, groups)
        inputs = Inputs(needs, tuple(x.shape), (BF16, BF16, None, BF16), True)
        grad = torch.empty(m, shape[1], dtype=BF16, device="cuda")
        dx, dw, _ = passes.backward(grad, saved, how, inputs, Options(linear_recipe), scales, groups)
    assert y.shape == grad.shape and dx.shape == x.shape and dw.shape == w.shape
    assert all(t.dtype is BF16 and t.device.type == "cuda" for t in (y, dx, dw))
    return [e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")], saved


@pytest.mark.parametrize("recipe", [*RECIPES, "float8 block"])
def test_hopper_multiplies_all_three_products_in_one_launch_each(pretend, recipe):
    """Nothing waits for the ends of the groups."""
    pytest.importorskip("triton")
    pretend(HOPPER)
    kernels, saved = step(RECIPES.get(recipe, Float8BlockScaling)())
    assert kernels == ["fp8_rows"] * 3
    made = [t for t in saved if t.dtype is not BF16]  # the weights are saved without a copy, and cast again
    if recipe != "float8 block":  # beside the largest scales of their columns, so that they are read once
        assert [t.shape for t in made if t.dtype is torch.int32] == [(4 * 256,)]
    padded = 2048 + 4 * (128 if recipe == "float8 block" else 32)
    assert sum(t.nbytes for t in made) < 1.1 * padded * 256 and len(saved) == len(made) + 1  # a byte a value


@pytest.mark.parametrize("capability, kernel", [(HOPPER, "fp8_rows"), ((8, 0), "dequant")])
@pytest.mark.parametrize("format", [Format.HYBRID, Format.E4M3], ids=["hybrid", "e4m3"])
def test_the_scale_of_a_history_is_beside_the_codes(pretend, format, capability, kernel):
    """One launch for each product with delayed scaling, too, and the input is saved as codes."""
    pytest.importorskip("triton")
    pretend(capability)
    kernels, saved = step(DelayedScaling(fp8_format=format))
    assert kernels == [kernel] * 3
    codes, scale, weight = saved
    assert codes.dtype is torch.float8_e4m3fn and codes.shape == (256, 2048 + 4 * 16) and scale.shape == (1, 1)
    assert weight.shape == (4, 128, 256)


def test_a_batch_runs_as_with_current_scaling(pretend):
    pytest.importorskip("triton")
    pretend(HOPPER)
    ran = []
    for recipe in (Float8CurrentScaling().linear_recipe(), DelayedScaling().linear_recipe()):
        needs, options = (True, True, False), Options(recipe)
        with FakeTensorMode(), mx.explain() as log:
            x, w = (torch.empty(s, dtype=BF16, device="cuda") for s in ((4, 64, 256), (4, 128, 256)))
            scales = None if recipe.delayed is None else Scales(torch.ones(3, device="cuda"), x)
            _, saved, how = passes.forward(x, w, None, options, scales, None, needs)
            inputs = Inputs(needs, tuple(x.shape), (BF16, BF16, None, BF16), True)
            passes.backward(torch.empty(4, 64, 128, dtype=BF16, device="cuda"), saved, how, inputs, options, scales)
        ran.append([e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")])
    assert saved[0].dtype is torch.float8_e4m3fn and saved[0].shape == (4, 256, 64)
    assert ran[0] == ran[1] and len(ran[0]) == 3 and "emulated" not in ran[0]


@pytest.mark.parametrize(
    ("recipe", "m", "shape", "capability"),
    [
        (MXFP8BlockScaling(), 2040, (4, 128, 256), HOPPER),  # rows in no multiple of 16
        (MXFP8BlockScaling(), 256, (4, 128, 256), HOPPER),  # few rows
        (MXFP8BlockScaling(), 2048, (4, 136, 256), HOPPER),  # columns in no multiple of 16
        (MXFP8BlockScaling(), 2048, (4, 128, 256), (8, 0)),
    ],
    ids=["rows", "few", "columns", "ampere"],
)
def test_elsewhere_torchs_grouped_product_in_bfloat16_runs(pretend, recipe, m, shape, capability):
    pytest.importorskip("triton")
    pretend(capability)
    kernels, _ = step(recipe, m, shape)
    assert kernels[0] == "dequant" and set(kernels) <= {"dequant", "fp8_rows"}


def test_blackwell_multiplies_codes(pretend):
    pytest.importorskip("triton")
    pretend(BLACKWELL)
    kernels, _ = step(MXFP8BlockScaling())
    assert kernels == ["scaled_mm", "scaled_mm", "dequant"]


def refusal(a, b, args=None, out_dtype=BF16):
    args = args or GemmArgs(out_dtype)
    return fp8_rows_grouped.refuses(spec_of(a, b, out_dtype), a, b, ends_of([128, 128]), args)


def test_each_refusal_says_why(pretend):
    pytest.importorskip("triton")
    pretend(HOPPER)
    x, w = Unquantized(torch.randn(256, 64, dtype=BF16), CAST), Unquantized(torch.randn(2, 32, 64, dtype=BF16), CAST)
    for reason, words in (
        (refusal(x, encode(w.x, CAST)), "multiplies operands that are cast for it in training"),
        (refusal(Unquantized(x.x[:32], CAST), w), "for at least 128 rows a group, this product has 32 in 2 groups"),
        (refusal(x, Unquantized(w.x[:, :24], CAST)), "needs K and N in multiples of 16, got 64 and 24"),
        (refusal(x, w, out_dtype=FP32), "returns bfloat16, the result is float32"),
        (refusal(x, w, GemmArgs(BF16, None, 2.0)), "before an alpha or a bias could be applied"),
        (refusal(x, Unquantized(w.x, mx.Cast.of("nvfp4"))), "needs scales that are powers of two"),
        (refusal(x, Unquantized(w.x, mx.Cast.of("mxfp4[1x16]"))), "casts blocks of 32 values or more"),
    ):
        assert reason is not None and words in reason, reason
    many = spec_of(x, w, BF16)._replace(shapes=((1 << 18, 64), (1024, 32, 64)))
    reason = fp8_rows_grouped.refuses(many, x, w, ends_of([1]), GemmArgs(BF16))
    assert "at most 1023 groups, got 1024" in reason


def test_the_contract_of_groups_of_columns_is_checked(pretend):
    pretend(HOPPER)
    groups = Groups(ends_of([20, 20]), 40, 32)
    a, b = (rows(groups.padded(values(40, cols)).t()) for cols in (16, 32))
    codes = (side.codes.view(torch.float8_e4m3fn) for side in (a, b))
    scales = (scales_of_groups(side, 2) for side in (a, b))
    product = Product(scaled_mm_contract.GROUPED_SCALINGS[0], *codes, *scales, [], None, BF16, groups.padded_ends)
    scaled_mm_contract.check(product)
    assert product.shape == (2, 16, 32)
    for change, words in (
        ({"scale_a": a.row_scale}, r"scale_a must have shape \(32,\) for float8 per row scaling"),
        ({"ends": groups.padded_ends.long()}, r"ends must be int32 of shape \(2,\)"),
        (
            {"scaling": scaled_mm_contract.GROUPED_SCALINGS[1]},
            "groups of columns need scales of rows",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            scaled_mm_contract.check(replace(product, **change))


def test_the_kernels_are_asked_in_this_order():
    assert [k.name for k in GROUPED] == [
        "scaled_mm",
        "dot_scaled",
        "fp8_rows",
        "small_m",
        "cpu_codes",
        "dequant",
        "emulated",
    ]
    assert [k.name for k in GROUPED_WGRAD] == ["fp8_rows", "dequant", "emulated"]


def test_a_wgrad_of_other_shapes_is_refused():
    groups = Groups(ends_of([20, 20]), 40, 32)
    a = Unquantized(torch.randn(16, 96), CAST)
    with pytest.raises(
        ValueError, match=r"needs \(N, P\) and \(K, P\) with P = 96 columns in groups, got \(16, 96\) and"
    ):
        grouped_wgrad("wgrad", a, Unquantized(torch.randn(16, 64), CAST), groups, GemmArgs(FP32))


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("format", [Format.E4M3, Format.HYBRID])
@pytest.mark.parametrize("sizes, after", [([700, 0, 513, 1024, 3], 16), ([0, 0, 2048], 0), ([256] * 8, 0)])
def test_a_step_on_the_gpu_is_that_of_the_reference(sizes, after, format):
    recipe = MXFP8BlockScaling(fp8_format=format).linear_recipe()
    m = sum(sizes) + after
    m += -m % 16
    x = torch.randn(m, 512, device="cuda", dtype=BF16) * torch.exp(torch.randn(512, device="cuda")).to(BF16)
    w = torch.randn(len(sizes), 256, 512, device="cuda", dtype=BF16)
    g = torch.randn(m, 256, device="cuda", dtype=BF16) * 1e-3
    ends = ends_of(sizes, "cuda")

    def run(*block):
        one, other = x.clone().requires_grad_(), w.clone().requires_grad_()
        with mx.explain() as log:
            y = linear(one, other, None, Options(recipe), None, None, ends)
            y.backward(g)
        return (y.detach(), one.grad, other.grad), [
            e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")
        ]

    got, kernels = run()
    if torch.cuda.get_device_capability() == HOPPER:
        assert kernels == ["fp8_rows"] * 3
    with mx.kernels("dequant"):
        halves, _ = run()
    with mx.kernels("emulated"):
        exact, _ = run()
    for one, two, three in zip(got, halves, exact, strict=True):
        assert one.isfinite().all() and relative_error(two, three) < 4e-3 and relative_error(one, three) < 7e-3
    for i, n in enumerate(sizes):
        assert n or not got[2][i].any()
    assert not got[0][sum(sizes) :].any() and not got[1][sum(sizes) :].any()


@pytest.mark.gpu
def test_a_step_on_the_gpu_never_waits_and_can_be_captured():
    recipe = MXFP8BlockScaling().linear_recipe()
    x = torch.randn(2048, 512, device="cuda", dtype=BF16).requires_grad_()
    w = torch.randn(4, 256, 512, device="cuda", dtype=BF16).requires_grad_()
    g, ends = torch.randn(2048, 256, device="cuda", dtype=BF16), ends_of([1000, 0, 40, 1000], "cuda")

    def once():
        y = linear(x, w, None, Options(recipe), None, None, ends)
        return (y.detach(), *torch.autograd.grad(y, (x, w), g))  # a graph that lives on would keep its stream

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    with no_host_sync():
        expected = once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    for new in ([1000, 0, 40, 1000], [0, 2048, 0, 0]):
        ends.copy_(ends_of(new, "cuda"))
        graph.replay()
        expected = once()
        for one, other in zip(captured, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["MXFP4BlockScaling", "MXFP6BlockScaling", "NVFP4BlockScaling", "Float8CurrentScaling", "Float8BlockScaling"],
)
def test_other_recipes_run_on_the_gpu(name):
    options = {"stochastic_rounding": False} if name == "MXFP4BlockScaling" else {}
    options |= {"disable_stochastic_rounding": True} if name == "NVFP4BlockScaling" else {}
    recipe = getattr(mx.recipe, name)(**options).linear_recipe()
    sizes = [300, 0, 212]
    x, w, g = torch.randn(512, 256), torch.randn(3, 128, 256), torch.randn(512, 128)

    def run(device):
        one, other = (t.to(device, BF16).requires_grad_() for t in (x, w))
        y = linear(one, other, None, Options(recipe), None, None, ends_of(sizes, device))
        y.backward(g.to(device, BF16))
        return [t.detach().float().cpu() for t in (y, one.grad, other.grad)]

    for one, other in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(one, other) < 2e-2
