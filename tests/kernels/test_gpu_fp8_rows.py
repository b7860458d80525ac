"""Products of row-scaled E4M3 on a CUDA device: bits of the operands, the bound, graphs, training, what is chosen."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import fp8_rows, fp8_rows_cache
from mxtensor.kernels.gemm.select import gemm, plan_of
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.kernels.quantize.to_row_scaled import matrix_of, rows_of_operand, rows_of_values, why_not_in_one
from mxtensor.kernels.quantize.to_row_scaled_both import rows_of_both
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import row_scaled
from mxtensor.recipe import MXFP8BlockScaling
from tests.helpers.no_sync import no_host_sync
from tests.helpers.row_scaled import STORED, assert_within_the_bound, same

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
PAIRS = [("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp6", "mxfp6"), ("mxfp4", "mxfp4"), ("mxfp8_e5m2", "mxfp8")]


@pytest.fixture(autouse=True)
def tensor_cores():
    if torch.cuda.get_device_capability() < fp8_rows.OLDEST:
        pytest.skip("no FP8 tensor cores")


def values(rows, cols, wide=True):
    """Rows with channel outliers; with ``wide`` some of wide spans, zeros, NaN, an infinity, tiny and huge."""
    x = torch.randn(rows, cols, device="cuda") * torch.exp(1.5 * torch.randn(cols, device="cuda"))
    if wide:
        x[8] *= 2.0 ** torch.randint(-20, 21, (-(-cols // 32),), device="cuda").float().repeat_interleave(32)[:cols]
        x[9, : cols // 2] *= 2.0**-30
        x[10], x[11, 3], x[12, -1] = 0.0, float("nan"), float("inf")
        x[13], x[14] = x[13] * 2.0**-90, x[14] * 2.0**90
    return x.to(BF16)


@pytest.mark.parametrize("cols", [64, 2880, 4096, 5120, 16400])
@pytest.mark.parametrize("name", STORED)
def test_operands_are_the_definition_bit_for_bit(name, cols):
    cast = mx.Cast.of(name)
    for dtype in (BF16, torch.float16, torch.float32):
        x = values(40, cols, cast.format.block[0] == 1).to(dtype)
        operand = encode(x, cast)
        expected = row_scaled(operand)
        made = [rows_of_operand(matrix_of(operand), 16)]
        if why_not_in_one(x, cast) is None:
            made.append(rows_of_values(x, cast))
        for codes, scale, out_of_range, *_ in made:
            used = ~(expected.scale[:, 0].isnan() & ~expected.out_of_range.bool())
            assert torch.equal(codes[:40, :cols][used], expected.codes[used])
            assert same(scale[:40], expected.scale) and torch.equal(out_of_range[:40], expected.out_of_range)


@pytest.mark.parametrize("shape", [(512, 4096), (2048, 96), (48, 2880), (1040, 1040)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "float8_e4m3_1x128_pow2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_operands_of_both_are_those_of_two_casts(dtype, name, shape):
    cast, (rows, cols) = mx.Cast.of(name), shape
    x = values(rows, cols)
    x[:, cols // 2 :] = values(cols - cols // 2, rows).t()
    x = x.to(dtype)
    for made, source in zip(rows_of_both(x, cast), (x, x.t().contiguous()), strict=True):
        operand = encode(source, cast)
        expected = row_scaled(operand, unlimited_range=True)
        used = ~(expected.scale[:, 0].isnan() & ~expected.out_of_range.bool())
        assert torch.equal(made.codes[used], expected.codes[used])
        assert same(made.row_scale, expected.scale) and torch.equal(made.out_of_range, expected.out_of_range)
        out_of_range = expected.out_of_range.bool()
        assert torch.equal(made.scale[out_of_range], operand.scale[out_of_range]) and out_of_range.any()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_blocks_of_both_at_every_distance(name):
    cast, step = mx.Cast.of(name), torch.arange(2048, device="cuda") // 32
    x = (torch.randn(2048, 2048, device="cuda").clamp(-4, 4) * 2.0 ** -(step[:, None] + step).float()).to(BF16)
    for made, source in zip(rows_of_both(x, cast), (x, x.t().contiguous()), strict=True):
        expected = row_scaled(encode(source, cast), unlimited_range=True)
        assert torch.equal(made.codes, expected.codes) and not made.out_of_range.any()


def test_rows_out_of_range_are_multiplied_exactly():
    """Flagged rows on both sides, in any number, are those of the exact product."""
    x, w = values(1024, 2048, False), values(512, 2048, False)
    for count in (1, 63, 64, 65, 700):
        left, right = x.clone(), w.clone()
        left[torch.randperm(1024)[:count], :32] *= 2.0**30
        right[torch.randperm(512)[: count // 2], 32:64] *= 2.0**-30
        a, b = (encode(t, mx.Cast.of("mxfp8")) for t in (left, right))
        assert row_scaled(a).out_of_range.sum() >= count
        assert_within_the_bound(fp8_rows.run(a, b, GemmArgs(BF16)), a, b, sums=2.0**-10)


@pytest.mark.parametrize("shape", [(512, 4096, 4096), (130, 48, 160), (1000, 2880, 2880)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("left, right", PAIRS)
def test_every_product_is_within_the_bound(left, right, wide, shape):
    rows, width, cols = shape
    x, w = values(rows, cols, wide), values(width, cols, wide)
    a, b = encode(x, mx.Cast.of(left)), encode(w, mx.Cast.of(right))
    y = fp8_rows.run(a, b, GemmArgs(BF16))
    exact, fine = assert_within_the_bound(y, a, b, sums=2.0**-10)  # the worst case is HOPPER_SUMS
    if not wide:  # otherwise one value may be the norm of its row
        error, norm = ((t * fine).norm(dim=1) for t in (y.double() - exact, exact))
        assert (error <= 5e-3 * norm).all()
    assert same(fp8_rows.run(Unquantized(x, mx.Cast.of(left)), b, GemmArgs(BF16)), y)
    bias = torch.randn(width, device="cuda", dtype=BF16)
    with_bias = fp8_rows.run(a, b, GemmArgs(BF16, bias))
    assert torch.allclose(with_bias.float(), y.float() + bias.float(), rtol=0.02, atol=0.02, equal_nan=True)


def test_the_layer_takes_it_and_dequant_stays_available():
    layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=BF16)
    mx.quantize_(layer, "mxfp8")
    x = values(1024, 4096)
    with torch.no_grad():
        with mx.explain() as log:
            y = layer(x)
        kernels = [entry.kernel for entry in log.entries]
        assert "fp8_rows" in kernels and "fp8_rows exact" in kernels
        with mx.kernels("dequant"):
            exact = layer(x)
        assert torch.equal(y.isnan(), exact.isnan())
        fine = exact.isfinite()
        assert ((y - exact)[fine].norm() / exact[fine].norm()) < 5e-3


def test_compiled_and_captured_it_finds_the_rows_of_later_values():
    layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=BF16)
    mx.quantize_(layer, "mxfp8")
    narrow, wide = values(512, 4096, False), values(512, 4096, True)
    with torch.no_grad():
        compiled = torch.compile(layer)
        for x in (narrow, wide):  # a graph may take another kernel, because it rescales the weight each time
            y, eager = compiled(x), layer(x)
            assert torch.equal(y.isnan(), eager.isnan())
            fine = eager.isfinite() & y.isfinite()
            y, eager = y[fine].double(), eager[fine].double()
            assert (y - eager).norm() < 5e-3 * eager.norm()
        x, graph = narrow.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for now in (wide, narrow):
            x.copy_(now)
            graph.replay()
            assert same(out, layer(now))
        layer.weight.copy_(torch.randn(4096, 4096, device="cuda"))
        graph.replay()
        assert same(out, layer(narrow))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_layer_looks_its_weight_up_and_follows_writes(mode):
    layer = torch.nn.Linear(4096, 2048, bias=False, device="cuda", dtype=BF16)
    mx.quantize_(layer, "mxfp8")
    x, used = values(512, 4096, False), fp8_rows_cache._bytes.get(torch.device("cuda", 0), 0)
    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    with torch.no_grad(), mx.kernels("fp8_rows"):
        for _ in range(4):  # warm-up, record, replay
            y = compiled(x).clone()
        assert same(y, layer(x))
        assert fp8_rows_cache._bytes[torch.device("cuda", 0)] - used == 2048 * 4096 + 2048 * 5  # one form
        for _ in range(2):
            layer.weight.copy_(torch.randn(2048, 4096, device="cuda"))
            y = compiled(x).clone()
            assert same(y, layer(x))


def test_no_host_sync():
    layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=BF16)
    mx.quantize_(layer, "mxfp8")
    x = values(512, 4096)
    with torch.no_grad():
        layer(x)
        with no_host_sync():
            layer(x)


def test_the_products_of_a_training_step():
    x, w = values(2048, 4096, False), values(2048, 4096, False)
    cast = mx.Cast.of("mxfp8")
    for a, b in ((x, w), (w.t().contiguous(), x.t().contiguous())):
        a, b = Unquantized(a, cast), encode(b, cast)
        assert plan_of("mm", a, b, GemmArgs(BF16)).kernel is fp8_rows.KERNEL
        with mx.kernels("dequant"):
            exact = gemm("mm", a, b, GemmArgs(BF16))
        y = gemm("mm", a, b, GemmArgs(BF16))
        assert ((y - exact).norm() / exact.norm()) < 5e-3


def test_a_training_step_takes_it_for_all_three_products():
    layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=BF16)
    x, grad = values(2048, 4096, False), values(2048, 4096, False)

    def step():
        one = x.clone().requires_grad_()
        layer.zero_grad()
        with mx.autocast(recipe=MXFP8BlockScaling()):
            y = layer(one)
        y.backward(grad)
        return y.detach(), one.grad, layer.weight.grad.clone()

    with mx.explain() as log:
        ours = step()
    ran = {entry.spec.op: entry.kernel for entry in log.entries}
    assert [ran[op] for op in ("fprop", "dgrad", "wgrad")] == ["fp8_rows"] * 3
    with mx.kernels("dequant"):
        exact = step()
    for got, expected in zip(ours, exact, strict=True):
        assert ((got - expected).norm() / expected.norm()) < 5e-3
