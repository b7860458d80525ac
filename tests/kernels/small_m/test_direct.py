"""Direct wgmma kernels, which read bfloat16 activations as they are: the CUDA sources on the CPU, and their choice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtensor as mx
from mxtensor.core import recording
from mxtensor.kernels.expected_time import Cost, costs_of
from mxtensor.kernels.runtime import host_calls, nvrtc
from mxtensor.kernels.small_m import heuristics, launch
from mxtensor.kernels.small_m.config import ELEMENTS, LaunchConfig, registers
from mxtensor.kernels.small_m.heuristics import expected_time
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode
from tests.helpers import cuda_on_cpu
from tests.helpers.small_m import (
    DIRECTS,
    KINDS,
    TOLERANCE,
    WGMMAS,
    error,
    guarded,
    needs_compiler,
    product,
    products,
    values,
    weight,
)

pytestmark = pytest.mark.usefixtures("cuda_sources_on_the_cpu")
ONE = DIRECTS[0]
MANY_COLUMNS = ONE._replace(nt=16, wr=8)
MORE_COLUMNS = ONE._replace(nt=20, stages=8)
ODD_COLUMNS = ONE._replace(nt=3)
"""Columns that are not whole passes of the loading warps."""
FEW_COLUMNS = ONE._replace(nt=1, stages=16, ahead=8)
SHAPES_OF_TILES = (MANY_COLUMNS, MORE_COLUMNS, ODD_COLUMNS, FEW_COLUMNS, ONE._replace(wk=4, nt=8))
IN_BLOCKS = [name for name in KINDS if FORMATS[name].block[1] != 128]
MXFP8, CPU = mx.FORMATS["mxfp8"], torch.device("cpu")


@pytest.fixture
def usual_path_only(nothing_resolved, monkeypatch, tmp_path):
    """Kernels whose second path, for any scales and codes, gives no sums, so that a test notices it."""
    call = "        multiply_any_scales(a, w, sums"
    text = (nvrtc.SOURCES / "wgmma.cu").read_text()
    assert text.count(call) == 1
    changed = text.replace(call, f"        clear(sums);\n    else if (false){call}")
    for source in nvrtc.SOURCES.iterdir():
        (tmp_path / source.name).write_text(changed if source.name == "wgmma.cu" else source.read_text())
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    monkeypatch.setattr(cuda_on_cpu, "library", cuda_on_cpu.library.__wrapped__)


@needs_compiler
@pytest.mark.exhaustive(quick=10)
@pytest.mark.parametrize("format", IN_BLOCKS)
@pytest.mark.parametrize("config", [*DIRECTS, *SHAPES_OF_TILES])
def test_every_format_equals_the_decoded_operands(format, config):
    w, x, bias = weight(format, 140, 640), torch.randn(21, 640).bfloat16(), torch.randn(140).bfloat16()
    y = product(x, w, config, bias=bias, alpha=0.5, beta=2.0)
    assert error(y, 0.5 * x.double() @ values(w).t() + 2 * bias.double()) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4"])
def test_usual_weights_take_the_usual_path(format, usual_path_only):
    w, x = weight(format, 140, 640), torch.randn(5, 640).bfloat16()
    assert error(product(x, w, ONE), x.double() @ values(w).t()) < TOLERANCE
    if format != "nvfp4":
        w.scale[3, 7] = 255
        assert not product(x, w, ONE)[:, 3].any()  # what this test would see of another path


@needs_compiler
@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("name", [*ELEMENTS.values()])
@pytest.mark.parametrize("octaves", [0, 70], ids=["usual path", "any scales"])
def test_every_code_of_every_element(name, octaves):
    """A weight with all codes times an identity: the result is the elements, bit for bit."""
    element = next(e for e, text in ELEMENTS.items() if text == name)
    format = next(f for f in FORMATS.values() if f.element is element and f.scale is MXFP8.scale)
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(element.packing[1]).view(8, -1)
    codes = torch.stack([codes.roll(i, 0) for i in range(2)]).view(16, -1)[:, : element.data_cols(32)].contiguous()
    data = codes if element.packed else codes.view(element.dtype)
    scale = torch.tensor([[127, 127, 127 - octaves, 127]], dtype=torch.uint8).repeat(16, 1)
    w = Operand(data.repeat(1, 4), scale, None, format, (16, 128))
    expected = decode(Operand(data, scale[:, :1], None, format, (16, 32)), torch.float32)
    finite = expected.isfinite().all(1)  # a NaN or an infinity affects its whole row
    x = torch.eye(32).repeat(1, 4) * torch.tensor([1, 1, 2.0**octaves, 1]).repeat_interleave(32) / 4
    y = product(x.bfloat16(), w, ONE._replace(nt=4)).t()
    assert torch.equal(y[finite], expected[finite]) and finite.any()
    assert not y[~finite].isfinite().all(1).any()


@needs_compiler
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "float8_e4m3_row", "float8_e5m2_row", "float8_e4m3_tensor"])
@pytest.mark.parametrize("config", DIRECTS)
def test_one_infinity_or_nan_among_codes_gives_what_the_reference_gives(format, config):
    w, x = weight(format, 130, 768), torch.randn(4, 768).bfloat16()
    codes = w.data.view(torch.uint8)
    for row, column, code in ((7, 3, 0x7F), (64, 500, 0xFF), (129, 767, 0x7E), (99, 40, 0xFC)):
        codes[row, column] = code
    y, exact = product(x, w, config), x.double() @ values(w).t()
    finite = exact.isfinite()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y[exact.isinf()].double(), exact[exact.isinf()])
    assert finite.any() and not finite.all() and error(y[finite], exact[finite]) < 1e-6


@needs_compiler
def test_scales_of_every_power_of_two_and_nan():
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 4)
    codes = torch.full((256, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    w, x = Operand(codes, scale, None, MXFP8, (256, 128)), torch.zeros(1, 128).bfloat16()
    x[0, 5] = 1.0
    y = product(x, w, ONE)[0]
    assert torch.equal(y[:255], torch.exp2(torch.arange(255).double() - 127).float()) and y[255].isnan()


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"]),
    st.integers(0, 90),
    st.integers(0, 99),
)
def test_scales_of_a_row_may_differ_by_any_number_of_octaves(format, octaves, seed):
    torch.manual_seed(seed)
    w, x = weight(format, 40, 256), torch.randn(3, 256).bfloat16()
    w.scale.add_(torch.randint(-octaves, octaves + 1, w.scale.shape).to(torch.uint8))  # modulo 256
    w.scale.masked_fill_(w.scale == 255, 200).masked_fill_(torch.rand(w.scale.shape) < 0.1, 0)
    y, exact = product(x, w, ONE), x.double() @ values(w).t()
    bound = x.double().abs() @ values(w).abs().t()
    assert ((y.double() - exact).abs() <= 2.0**-20 * bound + 2.0**-140).all()


@needs_compiler
@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("k", [64, 160, 320, 352, 736, 1376])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"])
def test_columns_that_are_not_whole_chunks(format, k):
    """Neither x nor the weight is read after its last column, and x after its last row."""
    if format == "mxfp6" and k % 64:
        k += 32
    memory = torch.full((9 * k + 512,), float("nan")).bfloat16()
    w, x = guarded(weight(format, 70, k)), memory[: 9 * k].view(9, k).normal_()
    for config in (*DIRECTS, FEW_COLUMNS, MANY_COLUMNS):
        if config.split <= -(-k // 128) // config.wk:
            assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("config", [ONE, ONE._replace(direct=False), DIRECTS[-1]], ids=["direct", "before", "groups"])
def test_an_infinity_in_a_chunk_that_is_not_whole_stays_an_infinity(config):
    """What the chunk lacks is loaded from its start: it would be an infinity times zero."""
    w, x = weight("mxfp8_e5m2", 70, 544), torch.rand(3, 544).bfloat16() + 0.5
    w.data.view(torch.uint8)[3, 514], w.data.view(torch.uint8)[40, 530] = 0x7C, 0xFC
    y, exact = product(x, w, config), x.double() @ values(w).t()
    assert torch.equal(y[:, 3], torch.full((3,), torch.inf)) and torch.equal(y[:, 40], torch.full((3,), -torch.inf))
    others = [i for i in range(70) if i not in (3, 40)]
    assert error(y[:, others], exact[:, others]) < TOLERANCE


@needs_compiler
@pytest.mark.exhaustive(quick=6)
@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 200), st.integers(4, 9), st.sampled_from(["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
)
def test_any_number_of_rows_and_chunks(m, n, chunks, format):
    torch.manual_seed(m * n * chunks)
    w, x = weight(format, n, 128 * chunks), torch.randn(m, 128 * chunks).bfloat16()
    exact, bound = x.double() @ values(w).t(), x.double().abs() @ values(w).abs().t()
    for config in (*DIRECTS, *SHAPES_OF_TILES):  # a few results may be small differences of large sums
        assert ((product(x, w, config).double() - exact).abs() <= 2.0**-20 * bound).all()


@needs_compiler
def test_activations_of_any_size_and_rows_at_a_distance():
    """No scale per row: rows of every magnitude, infinities that stay in their row, and padded rows."""
    w, memory = weight("mxfp8", 70, 256), torch.randn(9, 264).bfloat16()
    x = memory[:, :256]
    x *= torch.tensor([1, 2.0**-90, 2.0**90, 1, 1, 1, 2.0**-40, 1, 2.0**100])[:, None].bfloat16()
    x[3, 7], x[5, 200], memory[:, 256:] = float("inf"), float("nan"), float("nan")
    y, exact = product(x, w, ONE), x.double() @ values(w).t()
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y[3].double(), exact[3])
    for row in (0, 1, 2, 4, 6, 7, 8):
        assert error(y[row], exact[row]) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("config", DIRECTS)
def test_several_weights_of_one_input_in_one_launch(config, format):
    x = torch.randn(3, 640).bfloat16()
    weights = [weight(format, n, 640) for n in (70, 16, 1, 90)]
    biases = [None, torch.randn(16), torch.randn(3, 1), None]
    made = products(x, weights, config, None, biases, alpha=0.5)
    exact = [0.5 * x.double() @ values(w).t() + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)]
    assert error(torch.cat(made, 1), torch.cat(exact, 1)) < TOLERANCE


# ---------------------------------------------------------------------------------------------- launches and choice


def test_a_product_is_one_launch_without_scratch_memory(kernels_launched, monkeypatch):
    monkeypatch.setattr(launch, "scratch_of", None)
    product(torch.randn(3, 256).bfloat16(), weight("mxfp8", 16, 256), ONE)
    assert [name for name, _ in kernels_launched] == ["wgmma"]


@needs_compiler
def test_a_recorded_product_has_the_bits_of_the_first(nothing_resolved, monkeypatch):
    """With several weights: x is elsewhere in each call, and its map of tiles moves with it."""
    monkeypatch.setattr(host_calls, "packed", cuda_on_cpu.packed_steps)
    monkeypatch.setattr(launch, "choose_config", lambda *args: ONE)
    weights = [weight("mxfp8", n, 256) for n in (40, 90)]
    biases = [torch.randn(w.shape[0]).bfloat16() for w in weights]
    tensors = [t for w, bias in zip(weights, biases, strict=True) for t in (w.data, w.scale, bias)]

    def work(x):
        given = [launch.Weight(w.data, w.scale, None, bias) for w, bias in zip(weights, biases, strict=True)]
        return launch.launch(x, given, MXFP8, 256, None, None, 1.0, 1.0, torch.bfloat16, None)

    x = torch.randn(5, 256).bfloat16()
    _, program = recording.record(lambda: work(x), [x, *tensors], list)
    for size in (1, 100):
        x = torch.randn(5, 256).bfloat16() * size
        first = products(x, weights, ONE, None, biases, torch.bfloat16)
        assert all(map(torch.equal, program(x, *tensors), first))


@pytest.mark.parametrize(
    ("x", "config", "cast"),
    [
        (torch.randn(3, 256).half(), ONE, None),
        (torch.randn(3, 256).bfloat16(), ONE, Cast.of("mxfp8")),
        (torch.randn(3, 260).bfloat16()[:, :256], ONE, None),  # rows at multiples of 8 bytes
        (torch.randn(3 * 256 + 4).bfloat16()[4:].view(3, 256), ONE, None),
        (torch.randn(3, 256).bfloat16(), ONE._replace(split=2, reduce_global=True), None),
        (torch.randn(3, 256).bfloat16(), LaunchConfig(1, 1, 1, 4, 4, 2, 1, 1, False, direct=True), None),
    ],
    ids=["float16", "a cast", "rows", "address", "counters", "not wgmma"],
)
def test_other_activations_are_refused(x, config, cast):
    with pytest.raises(RuntimeError, match="cannot run 16x256 in mxfp8_e4m3"):
        product(x, weight("mxfp8", 16, 256), config, cast)


def test_other_activations_take_a_config_that_another_kernel_converts():
    types, sizes = (torch.bfloat16,) * 3, (96, 768, 0)

    def config(types=types, x=0, cast=None):
        return launch.choose(CPU, MXFP8, types, sizes, (2048,), (0, 0, x), cast, None).config

    assert config().direct
    assert not any(c.direct for c in (config((torch.float16,) * 3), config(x=8), config(cast=Cast.of("mxfp8"))))


def test_registers_of_the_threads_add_up_to_what_a_multiprocessor_has():
    directs = {cost.config for costs in costs_of((9, 0)).values() for cost in costs if cost.config.direct}
    assert directs
    for config in directs:
        r = registers(config)
        assert r.load % 8 == 0 and r.load >= 24
        if r.compute > r.at_start:
            used = r.compute * (config.threads - 128) + r.load * 128
            assert used <= r.at_start * config.threads and used * config.blocks <= 65536


def test_the_expected_time_of_converted_activations_is_that_of_no_direct_config(monkeypatch):
    costs = {(MXFP8.name, False, 64): (Cost(ONE, 1.0, 0.0, 0.0, 0.0), Cost(WGMMAS[0], 2.0, 0.0, 0.0, 0.0))}
    monkeypatch.setattr(heuristics, "costs_of", lambda capability: costs)
    assert expected_time(MXFP8.name, 64, 1536, 2048) == 2.0
