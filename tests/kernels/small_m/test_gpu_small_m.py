"""Small-M products on a CUDA device equal the emulation, except for the rounding of float32 accumulation."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import mxtensor as mx
from mxtensor.kernels.gemm.select import gemm, grouped_gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.kernels.small_m.launch import Weight, launch
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import decode, encode
from mxtensor.report import tune

pytestmark = pytest.mark.gpu
FORMATS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "nvfp4_single_level",
    "mxfp8[32x32]", "mxfp4[32x32]", "float8_e4m3_tensor", "float8_e4m3_row", "float8_e5m2_row", "float8_e4m3_1x128",
    "float8_e4m3_128x128",
)  # fmt: skip
SHAPES = (
    (1, 256, 4096),
    (2, 515, 1000),
    (5, 96, 77),
    (16, 1024, 2048),
    (63, 130, 641),
    (128, 515, 1000),
    (40, 515, 1024),
)
TOLERANCE = 1e-6
"""Relative error of a float32 result, by norm: the matrix instruction truncates its sums."""


def relative_error(y, reference):
    return ((y.double() - reference).norm() / reference.norm()).item()


def operand(format, n, k):
    w = torch.randn(n, k, device="cuda") * 2.0 ** torch.randint(-4, 4, (n, 1), device="cuda").float()
    return mx.quantize(w, format).rowwise


def values(x):
    return decode(x, torch.float32).double()


def ran(log):
    return {entry.kernel for entry in log.entries if entry.spec.op in ("test", "linear", "mm", "addmm")}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_equals_the_decoded_operands(format, dtype, shape):
    m, n, k = shape
    w, x = operand(format, n, k), torch.randn(m, k, device="cuda").to(dtype)
    bias = torch.randn(n, device="cuda").to(dtype)
    with mx.explain() as log, mx.kernels("small_m"):
        y = gemm("test", x, w, GemmArgs(torch.float32, bias, alpha=0.5, beta=2.0))
    assert ran(log) == {"small_m"}
    assert relative_error(y, 0.5 * x.double() @ values(w).t() + 2 * bias.double()) < TOLERANCE


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4", "nvfp4", "mxfp6_e3m2", "mxint8", "float8_e5m2_row"])
@pytest.mark.parametrize("shape", [(70, 4096, 1024), (200, 515, 2048), (300, 1030, 512), (500, 256, 4096)])
def test_a_product_of_many_rows_equals_the_decoded_operands(format, shape):
    m, n, k = shape
    w, x = operand(format, n, k), torch.randn(m, k, device="cuda").bfloat16()
    with mx.kernels("small_m"):
        y = gemm("test", x, w, GemmArgs(torch.float32))
    assert relative_error(y, x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 300])
@pytest.mark.parametrize("n", [1024, 1030])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "between"])
def test_biases_of_one_row_or_all_rows_at_any_address(rows, n, shift):
    w, x = operand("mxfp8", n, 1024), torch.randn(rows, 1024, device="cuda").bfloat16()
    exact = x.double() @ values(w).t()
    for shape in ((n,), (rows, n)):
        bias = torch.randn(math.prod(shape) + shift, device="cuda").bfloat16()[shift:].view(shape)
        with mx.kernels("small_m"):
            y = gemm("test", x, w, GemmArgs(torch.bfloat16, bias, beta=3.0))
        assert relative_error(y, exact + 3 * bias.double()) < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("activation", ["mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 7, 40, 300])
def test_activations_are_cast_as_the_reference_casts_them(activation, rows):
    k = 1056 if rows < 40 else 1152
    w, x = operand("mxfp8", 384, k), torch.randn(rows, k, device="cuda").bfloat16()
    cast = Cast.of(activation)
    with mx.kernels("small_m"):
        y = gemm("test", Unquantized(x, cast), w, GemmArgs(torch.float32))
    assert relative_error(y, values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 7, 64, 100, 200])
def test_repeated_products_are_bitwise_identical(format, rows):
    w, x = operand(format, 512, 8192), torch.randn(rows, 8192, device="cuda").bfloat16()
    with mx.kernels("small_m"):
        first = gemm("test", x, w, GemmArgs(torch.bfloat16))
        assert all(torch.equal(first, gemm("test", x, w, GemmArgs(torch.bfloat16))) for _ in range(5))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_each_group_of_rows_is_multiplied_by_its_weight(format):
    ends = torch.tensor([3, 3, 20, 21], dtype=torch.int32, device="cuda")
    w = mx.quantize(torch.randn(4, 200, 512, device="cuda"), format).rowwise
    x = torch.randn(24, 512, device="cuda").bfloat16()
    with mx.kernels("small_m"):
        y = grouped_gemm("test", x, w, ends, GemmArgs(torch.float32))
    reference = torch.zeros(24, 200, dtype=torch.float64, device="cuda")
    for g, (start, end) in enumerate([(0, 3), (3, 3), (3, 20), (20, 21)]):
        reference[start:end] = x[start:end].double() @ values(w)[g].t()
    assert relative_error(y, reference) < TOLERANCE and (y[21:] == 0).all()


@pytest.mark.parametrize("rows", [2, 40])
def test_nan_blocks_and_the_largest_and_smallest_scales(rows):
    w = operand("mxfp8", 64, 256)
    w.scale[3, 2], w.scale[5, :] = 255, 0
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    with mx.kernels("small_m"):
        y = gemm("test", x, w, GemmArgs(torch.float32))
    assert y[:, 3].isnan().all() and not y[:, 4:].isnan().any()
    assert relative_error(y[:, 5], x.double() @ values(w)[5]) < 1e-5


DIRECTS = (
    LaunchConfig(1, 2, 4, 2, 4, 8, 2, 2, False, True, 2, reduce_dsmem=True, direct=True),
    LaunchConfig(1, 4, 4, 3, 4, 8, 1, 2, False, True, 2, direct=True),
    LaunchConfig(1, 16, 8, 1, 4, 8, 1, 1, False, True, 2, direct=True),
    LaunchConfig(1, 32, 8, 1, 4, 4, 1, 1, False, True, 2, direct=True),
)
"""Kernels that read bfloat16 activations as they are."""


def direct_product(x, w, config):
    given = (Weight(w.data, w.scale, w.global_scale, None),)
    return launch(x, given, w.format, x.shape[1], None, None, 1.0, 1.0, torch.float32, None, config)[0]


@pytest.mark.parametrize("format", [f for f in FORMATS if "128" not in f])
@pytest.mark.parametrize("config", DIRECTS)
@pytest.mark.parametrize("shape", [(5, 515, 832), (40, 1024, 2048), (300, 130, 1024)])
def test_activations_that_no_kernel_converts(format, config, shape):
    m, n, k = shape
    w, x = operand(format, n, k), torch.randn(m, k + 8, device="cuda").bfloat16()[:, :k]
    x *= 2.0 ** torch.randint(-60, 60, (m, 1), device="cuda").bfloat16()
    y, exact = direct_product(x, w, config), x.double() @ values(w).t()
    size = exact.norm(dim=1, keepdim=True)
    assert relative_error(y / size, exact / size) < TOLERANCE


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2", "float8_e4m3_row", "float8_e5m2_row"])
@pytest.mark.parametrize("config", DIRECTS)
def test_infinities_and_nans_among_codes_that_become_bfloat16(format, config):
    w, x = operand(format, 200, 1024), torch.randn(9, 1024, device="cuda").bfloat16()
    for row, column, code in ((7, 3, 0x7F), (64, 500, 0xFF), (129, 767, 0x7E), (99, 40, 0xFC)):
        w.data.view(torch.uint8)[row, column] = code
    y, exact = direct_product(x, w, config), x.double() @ values(w).t()
    finite = exact.isfinite()
    assert torch.equal(y.isnan(), exact.isnan()) and not finite.all()
    assert relative_error(y[finite], exact[finite]) < TOLERANCE


def test_a_thread_of_its_own_compiles_and_runs_a_kernel():
    layer = mx.quantize_(torch.nn.Linear(672, 352, device="cuda", dtype=torch.bfloat16), "mxfp8-weight-only")
    x = torch.randn(3, 672, device="cuda", dtype=torch.bfloat16)
    torch.empty_like(x @ x.t())  # the caching allocator has memory: no call of the runtime gives the thread a context
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(layer, x).result(), layer(x))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *(("persistent", shape) for shape in ((1, 4096, 4096), (3, 14336, 1024), (16, 4096, 14336), (24, 2048, 4096))),
        *(("wgmma", shape) for shape in ((4, 4096, 1024), (16, 4096, 2048), (24, 2048, 4096), (130, 4096, 1024))),
    ],
)
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4", "nvfp4", "mxfp6_e3m2"])
def test_configs_that_are_timed(format, kind, shape):
    m, n, k = shape
    w, x = operand(format, n, k), torch.randn(m, k, device="cuda").bfloat16()
    configs = list(tune.candidates(mx.get_format(format), m, n, k, kind))
    assert configs
    rare = (lambda p: p.reduce_dsmem, lambda p: p.wgmma and p.wk > 1, lambda p: p.persistent and p.ahead)
    some = [next(filter(is_rare, configs), configs[0]) for is_rare in rare]
    for config in dict.fromkeys((*configs[:: max(1, len(configs) // 4)], *some)):
        given = Weight(w.data, w.scale, w.global_scale, None), Weight(w.data[:96], w.scale[:96], w.global_scale, None)
        y, part = launch(x, given, w.format, k, None, None, 1.0, 1.0, torch.float32, None, config)
        exact = x.double() @ values(w).t()
        assert relative_error(y, exact) < TOLERANCE and relative_error(part, exact[:, :96]) < TOLERANCE, config


@pytest.mark.parametrize("config", ["mxfp8", "mxfp8-weight-only", "mxfp4", "nvfp4-weight-only", "mxfp6"])
def test_a_layer_runs_under_a_cuda_graph(config):
    layer = torch.nn.Linear(1024, 512, device="cuda", dtype=torch.bfloat16)
    mx.quantize_(layer, config)
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(y, layer(x))
        assert y.shape == expected.shape


EMPTY_GRAPH = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
"""The warm-up of torch's CUDA graph trees captures a graph without kernels, and torch warns about it."""


@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=EMPTY_GRAPH)])
def test_a_compiled_layer_gives_the_bits_of_the_eager_one(mode):
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    mx.quantize_(layers, "mxfp8")
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(layers, mode=mode, fullgraph=True)
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), layers(x))


def test_a_layer_of_any_size_uses_it_without_being_told():
    layer = torch.nn.Linear(640, 320, device="cuda", dtype=torch.bfloat16)
    weight = layer.weight.detach().clone()
    mx.quantize_(layer, "mxfp8-weight-only")
    x = torch.randn(2, 3, 640, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), mx.explain() as log:
        y = layer(x)
    assert ran(log) == {"small_m"}
    assert relative_error(y, F.linear(x.double(), weight.double(), layer.bias.double())) < 0.05


def test_too_many_rows_are_refused_with_a_reason():
    w, x = operand("mxfp8", 64, 64), torch.randn(600, 64, device="cuda").bfloat16()
    with mx.explain() as log:
        gemm("test", x, w, GemmArgs(torch.bfloat16))
    assert "for at most 512 rows" in log.table(refused=True) and "small_m" not in ran(log)


# ---------------------------------------------------------------------------------------------- weights of one x


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_products_of_one_input_read_it_only_once_it_is_there(format, rows):
    """In a graph, between kernels that compute x and kernels that use all results, many times."""
    operands = [operand(format, n, 4096) for n in (4096, 1024, 1024, 250)]
    given = [Weight(w.data, w.scale, w.global_scale, None) for w in operands]
    base, cast = torch.randn(rows, 4096, device="cuda").bfloat16(), Cast.of(format)
    rest = operands[0].format, 4096, None, None, 1.0, 1.0, torch.float32, cast

    def step(i, *sets):
        x = (base.float() * 2.0 ** (i % 3)).roll(i, 1).bfloat16()
        return torch.cat([y for some in sets for y in launch(x, some, *rest)], dim=1) * 2

    def steps(count):
        return [step(i, given) for i in range(count)]

    steps(2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps(12)
    for _ in range(20):
        for y in found:
            y.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    for i, y in enumerate(found):
        assert torch.equal(y, step(i, given))
        assert relative_error(y, step(i, *([w] for w in given)).double()) < TOLERANCE


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [3, 16, 64])
def test_products_in_quick_succession_read_their_own_activations(format, rows):
    """Kernels of several calls overlap, and a call's buffers reuse the memory of the previous call."""
    w, cast = operand(format, 512, 2048), Cast.of(format)
    given, rest = (
        (Weight(w.data, w.scale, w.global_scale, None),),
        (w.format, 2048, None, None, 1.0, 1.0, torch.float32),
    )
    inputs = [torch.randn(rows, 2048, device="cuda").bfloat16() * 8.0 ** (i % 5 - 2) for i in range(16)]

    def steps(how):
        return [launch(x, given, *rest, how)[0] for x in inputs]

    for how in (None, cast):
        one_by_one = []
        for x in inputs:
            one_by_one.append(launch(x, given, *rest, how)[0])
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = steps(how)
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, one_by_one))


def test_compiled_layers_of_one_input_are_one_call():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(1024, n, bias=n == 256) for n in (1024, 256, 512))

        def forward(self, x):
            x = F.rms_norm(x, (1024,))
            return self.q(x).sin(), self.k(x), self.v(x)

    model = mx.quantize_(Attention().cuda().bfloat16(), "mxfp4-weight-only")
    x = torch.randn(1, 1, 1024, device="cuda").bfloat16()
    with torch.no_grad():
        compiled = torch.compile(model, options=mx.inference_options())
        found, codes = run_and_get_code(compiled, x)
        for _ in range(2):
            for y, first, expected in zip(compiled(x), found, model(x), strict=True):
                assert torch.equal(y, first)
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    if torch.cuda.get_device_capability() >= (9, 0):  # products load their weights while the norm runs
        norm = codes[0].split("@triton.jit")[1]
        assert norm.index("gdc_launch_dependents") < norm.index("gdc_wait")
    assert codes[0].count("small_m_shared.default(") == 1 and "small_m.default(" not in codes[0]
