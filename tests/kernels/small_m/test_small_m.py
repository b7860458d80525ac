"""Small-M products: the CUDA sources, run on the CPU by ``cuda_on_cpu``, against the reference."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.kernels.gemm.spec import FakeQuantized, GemmArgs, Unquantized
from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.runtime.cuda_macros import ELEMENTS, copy_size
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import SCALES, LaunchConfig, classes_of
from mxtensor.kernels.small_m.heuristics import (
    CLUSTERS_OF_AN_H100,
    COLUMNS,
    FALLBACK,
    ROWS,
    SHARED_BYTES,
    Measured,
    choose_config,
    gpu_of,
    groups_with_rows,
    measured_of,
    most_rows,
    row_of,
    table,
)
from mxtensor.kernels.small_m.shared_memory import RESERVED, Gpu, layout_of, pipelined_bytes
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.element_format import ElementFormat
from mxtensor.numerics.formats import E2M3, E8M0, FORMATS, UE4M3, Format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, encode
from mxtensor.report import tune
from tests.helpers import cuda_on_cpu

pytestmark = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
PIPELINED = LaunchConfig(1, 1, 1, 2, 4, 3, 1, 1, False)
"""Activations in float16 from a previous kernel, copied stage by stage."""
WHOLE = PIPELINED._replace(whole_x=True)
"""All activations at once, cast in the product kernel."""
WIDE = LaunchConfig(2, 2, 2, 1, 8, 2, 1, 2, False)
"""Two tiles of rows and of columns per warp, and two blocks that split K."""
WGMMA = LaunchConfig(1, 1, 4, 1, 4, 4, 1, 1, False, True, 2)
"""One warpgroup of four warps."""
WGMMA_SPLIT = WGMMA._replace(split=2)
"""Two blocks that split K, as a cluster; each reads the sums of the other."""
WGMMA_REDUCE_GLOBAL = WGMMA._replace(wr=8, nt=2, stages=6, ahead=3, split=3, reduce_global=True)
"""Three blocks that split K and reduce through global memory, longer rounds, and two warpgroups along the rows."""
WGMMA_REDUCE_DSMEM = WGMMA._replace(nt=2, split=2, reduce_dsmem=True)
"""Two blocks that send each other their sums through distributed shared memory."""
FOUR_REDUCE_DSMEM = WGMMA_REDUCE_DSMEM._replace(split=4, wr=8)
"""Four such blocks of twice the rows."""
GROUPS = WGMMA._replace(wk=3, nt=2)
"""Three warpgroups that divide the columns of a block."""
GROUPS_REDUCE_DSMEM = GROUPS._replace(wk=2, split=2, reduce_dsmem=True)
"""Two such warpgroups, and two blocks that send each other their sums."""
GROUPS_REDUCE_GLOBAL = GROUPS._replace(wr=8, wk=2, split=2, reduce_global=True)
"""Two groups of eight warps, and two blocks that reduce through global memory."""
WGMMAS = (
    WGMMA,
    WGMMA_SPLIT,
    WGMMA_REDUCE_GLOBAL,
    WGMMA_REDUCE_DSMEM,
    GROUPS,
    GROUPS_REDUCE_DSMEM,
    GROUPS_REDUCE_GLOBAL,
)
DIRECTS = tuple(config._replace(direct=True) for config in WGMMAS if not config.reduce_global)
"""One warpgroup; clusters that read sums; clusters that send them; groups of warps; both."""
PERSISTENT = LaunchConfig(1, 1, 1, 4, 4, 2, 1, 1, False, persistent=1)
"""Activations stay in shared memory; each warp copies its own stages."""
PERSISTENT_CAST = PERSISTENT._replace(whole_x=True, stages=3)
"""The same, cast in the product kernel."""
PERSISTENT_WIDE = LaunchConfig(2, 2, 1, 2, 8, 3, 1, 1, False, persistent=1)
"""The same with two tiles of rows and of columns per warp."""
TOLERANCE = 2e-7
"""Relative error of a float32 result, by norm."""
E3M0 = Format("mxfp4_e3m0", ElementFormat("e3m0", 3, 0, 3, 16.0, torch.uint8, (2, 1)), E8M0, (1, 32))
"""A format without a decoder."""
DECODED = {name: f for name, f in FORMATS.items() if f.element in ELEMENTS and (f.scale, f.block[1]) in SCALES}
"""The formats that the CUDA sources decode; ``refuses`` has a sentence for every other one."""
KINDS = sorted(name for name in DECODED if not name.endswith("_pow2"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)


def weight(format, n, k, octaves=3):
    return mx.quantize(torch.randn(n, k) * 2.0 ** torch.randint(-octaves, octaves, (n, 1)).float(), format).rowwise


def values(x):
    return decode(x, torch.float32).double()


def product(x, w, config, cast=None, bias=None, out=torch.float32, alpha=1.0, beta=1.0, ends=None):
    return products(x, [w], config, cast, [bias], out, alpha, beta, ends)[0]


def products(x, weights, config, cast=None, biases=None, out=torch.float32, alpha=1.0, beta=1.0, ends=None):
    given = [
        launch.Weight(w.data, w.scale, w.global_scale, bias)
        for w, bias in zip(weights, biases or [None] * len(weights), strict=True)
    ]
    f, k = weights[0].format, weights[0].shape[-1]
    return launch.launch(x, given, f, k, None, ends, alpha, beta, out, cast, config)


def error(y, reference):
    return ((y.double() - reference).norm() / reference.norm()).item()


@pytest.mark.exhaustive(quick=5)
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (PIPELINED, torch.bfloat16),
        (WIDE, torch.float16),
        (PERSISTENT, torch.float16),
        (PERSISTENT_WIDE, torch.bfloat16),
    ],
)
def test_every_format_equals_the_decoded_operands(format, config, dtype):
    w, x, bias = weight(format, 40, 320), torch.randn(5, 320).to(dtype), torch.randn(40).to(dtype)
    y = product(x, w, config, bias=bias, alpha=0.5, beta=2.0)
    assert error(y, 0.5 * x.double() @ values(w).t() + 2 * bias.double()) < TOLERANCE


def test_a_format_that_is_not_listed_is_multiplied_and_cast():
    """Two scale levels over 6 bits: the sources read the fields of the row."""
    nvfp6 = Format("nvfp6_e2m3", E2M3, UE4M3, (1, 16), global_scale=True)
    w, x = weight(nvfp6, 40, 320), torch.randn(5, 320).bfloat16()
    for config, cast in ((PIPELINED, None), (PERSISTENT_CAST, Cast(nvfp6)), (WIDE, Cast(nvfp6))):
        rounded = x.double() if cast is None else values(encode(x, cast))
        assert error(product(x, w, config, cast), rounded @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("format", [name for name in KINDS if FORMATS[name].block[1] != 128])
@pytest.mark.parametrize("config", WGMMAS)
def test_every_format_by_wgmma_equals_the_decoded_operands(format, config):
    w, x, bias = weight(format, 140, 640), torch.randn(5, 640).bfloat16(), torch.randn(140).bfloat16()
    y = product(x, w, config, bias=bias, alpha=0.5, beta=2.0)
    assert error(y, 0.5 * x.double() @ values(w).t() + 2 * bias.double()) < TOLERANCE


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("config", [PIPELINED, WHOLE, WIDE, PERSISTENT_WIDE, PERSISTENT_CAST, *WGMMAS])
@pytest.mark.parametrize("activation", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8"])
def test_activations_are_cast_as_the_reference_casts_them(activation, config):
    rows, k = 3 if config.whole_x else 9, 512 if config.wgmma else 300
    w, x = weight("mxfp8", 33, k), torch.randn(rows, k).bfloat16() * 2.0 ** torch.randint(-9, 9, (rows, 1))
    x = x.bfloat16()
    cast = Cast.of(activation)
    assert error(product(x, w, config, cast), values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("activation", ["mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8"])
@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
def test_every_value_is_rounded_as_the_reference_rounds_it(activation, rule):
    """All mantissas and both signs, far from every limit and at the ends of bfloat16, times an identity."""
    top = 253 if activation == "mxint8" else 252  # for the others, rounding up exceeds float32
    bits = torch.arange(256) + torch.tensor([[120 << 7], [top << 7], [0]])  # two binades; and the smallest values
    x = (bits | torch.randint(0, 2, bits.shape) << 15)[:, torch.randperm(256)].short().view(torch.bfloat16)
    cast = Cast.of(activation, rule)
    for row, gemm_operand in zip(x, (1, 2.0**-40, 2.0**40), strict=True):  # so that no sum is near a limit
        y = product(row[None], mx.quantize(torch.eye(256) * gemm_operand, "mxint8").rowwise, PERSISTENT_CAST, cast)
        assert y.double().equal(values(encode(row[None], cast)) * gemm_operand)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("activation", ["nvfp4", "nvfp4_single_level"])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("config", [PIPELINED, WHOLE, PERSISTENT_CAST, WGMMA])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_nvfp4_activations_are_cast_by_the_largest_of_the_whole_tensor(activation, config, split, size):
    config = config._replace(split=split)
    rows, k = 2 if config.whole_x else 13, 640 if config.wgmma else 600
    w, cast = weight("nvfp4", 33, k), Cast.of(activation)
    x = (torch.randn(rows, k) * torch.tensor([0.1 * size, size] * 7)[:rows, None]).bfloat16()
    expected = values(encode(x, cast)) @ values(w).t()
    y = product(x, w, config, cast)
    assert error(y, expected) < TOLERANCE if expected.any() else not y.any()


@pytest.mark.parametrize("config", [PIPELINED, WGMMA])
@pytest.mark.parametrize("rows", [2, 5])  # up to ALONE values each block finds the maximum, above that another kernel
def test_blocks_share_wide_rows_that_are_cast_to_nvfp4(config, rows):
    w, cast, x = weight("nvfp4", 16, 4480), Cast.of("nvfp4"), torch.randn(rows, 4480).bfloat16()
    x[1, -9] = 100.0  # the largest, in columns that not every block writes
    assert error(product(x, w, config, cast), values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("config", [WHOLE, PIPELINED, WGMMA])
def test_nvfp4_activations_with_infinities_are_nan_in_their_blocks_only(config):
    w, cast, x = weight("mxfp8", 16, 128), Cast.of("nvfp4"), torch.randn(2, 128).bfloat16()
    x[1, 20] = float("inf")
    y, reference = product(x, w, config, cast), values(encode(x, cast)) @ values(w).t()
    assert y[1].isnan().all() and error(y[0], reference[0]) < TOLERANCE


@pytest.mark.parametrize("scaling", ["floor", "rceil", "ceil", "even"])
def test_every_scale_rule(scaling):
    w, x = weight("mxfp4", 16, 64), (torch.randn(4, 64) * 1.7).bfloat16()
    cast = Cast.of("mxfp8", scaling)
    assert error(product(x, w, WHOLE, cast), values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 11), st.integers(1, 70), st.integers(1, 150), st.sampled_from(["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
)
def test_tails_and_odd_shapes(m, n, k, format):
    torch.manual_seed(m * n * k)
    w, x = weight(format, n, k), torch.randn(m, k).bfloat16()
    for config in (PIPELINED, WHOLE, PERSISTENT_CAST) if m <= 2 else (PIPELINED, PERSISTENT_WIDE):
        assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive
@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 21), st.integers(1, 200), st.integers(3, 9), st.sampled_from(["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
)
def test_any_number_of_rows_and_chunks_by_wgmma(m, n, chunks, format):
    torch.manual_seed(m * n * chunks)
    w, x = weight(format, n, 128 * chunks), torch.randn(m, 128 * chunks).bfloat16()
    for config in (*WGMMAS, WGMMA._replace(stages=16, ahead=8)):
        if config.split * config.wk > chunks:
            continue
        assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "mxfp6"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_rows_of_several_tiles_whose_blocks_send_each_other_their_sums(format, blocks):
    config = FOUR_REDUCE_DSMEM._replace(wr=4, stages=8, blocks=blocks)
    w, x, bias = weight(format, 70, 576), torch.randn(3 * config.cols - 5, 576).bfloat16(), torch.randn(70).bfloat16()
    y = product(x, w, config, bias=bias, alpha=0.5, beta=2.0)
    assert error(y, 0.5 * x.double() @ values(w).t() + 2 * bias.double()) < TOLERANCE


@pytest.mark.exhaustive
def test_many_rows_by_an_unaligned_weight_use_an_aligned_copy():
    w, x = weight("mxfp8", 16, 128), torch.randn(130, 128).bfloat16()
    shifted = torch.empty(16 * 128 + 3, dtype=torch.uint8)[3:].view(16, 128).view(w.data.dtype).copy_(w.data)
    config = WGMMA._replace(nt=16)
    y = product(x, Operand(shifted, w.scale, None, w.format, w.shape), config)
    assert torch.equal(y, product(x, w, config))
    with pytest.raises(RuntimeError, match="cannot run"):
        product(x[:9], Operand(shifted, w.scale, None, w.format, w.shape), config)


def test_contradictory_configs_are_refused():
    w, x = weight("mxfp8", 16, 512), torch.randn(3, 512).bfloat16()
    for config in (
        WGMMA._replace(whole_x=True),
        PIPELINED._replace(split=2, reduce_global=True),
        WGMMA._replace(reduce_dsmem=True),
    ):
        with pytest.raises(RuntimeError, match="cannot run 16x512"):
            product(x, w, config)


def guarded(w):
    """``w`` with codes and scales at the end of their memory, before bytes that would be NaN: reading on shows."""

    def at_the_end(t):
        t8 = t.view(torch.uint8)
        memory = torch.full((t8.numel() + 256,), 0xFF, dtype=torch.uint8)
        return memory[: t8.numel()].view(t8.shape).copy_(t8).view(t.dtype)

    return replace(w, data=at_the_end(w.data), scale=at_the_end(w.scale))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("k", [32, 160, 320, 352, 736, 1376])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"])
def test_wgmma_takes_columns_that_are_not_whole_chunks(format, k):
    """Scales of rows whose length is odd are not aligned."""
    if format == "mxfp6" and k % 64:
        k += 32
    w, x = guarded(weight(format, 70, k)), torch.randn(9, k).bfloat16()
    for config in (*WGMMAS, WGMMA._replace(stages=16, ahead=8)):
        if config.split <= -(-k // 128) // config.wk:
            assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_a_short_chunk_with_scales_out_of_range(format):
    w, x = guarded(weight(format, 70, 352)), torch.randn(3, 352).bfloat16()
    w.scale[7, 10], w.scale[9, 8], w.scale[69, 10] = 200, 3, 255
    y, exact = product(x, w, WGMMA), x.double() @ values(w).t()
    assert y[:, 69].isnan().all() and error(y[:, :69], exact[:, :69]) < 1e-6


@pytest.mark.parametrize("cast", ["mxfp8", "nvfp4"])
def test_activations_of_a_short_chunk_are_cast(cast):
    w, x = weight(cast, 16, 352), torch.randn(5, 352).bfloat16()
    y = product(x, w, WGMMA, Cast.of(cast))
    assert error(y, values(mx.quantize(x, cast).rowwise) @ values(w).t()) < TOLERANCE


def test_wgmma_needs_aligned_rows_of_codes():
    with pytest.raises(RuntimeError, match=r"cannot run 16x328 in mxfp8_e4m3, 0 groups, aligned to \(8, "):
        product(torch.randn(3, 328).bfloat16(), weight("mxfp8", 16, 328), WGMMA)


def test_float16_activations_by_wgmma():
    w, x, cast = weight("mxfp8", 16, 256), torch.randn(3, 256).half(), Cast.of("mxfp8")
    assert error(product(x, w, WGMMA), x.double() @ values(w).t()) < TOLERANCE
    assert error(product(x, w, WGMMA, cast), values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "config",
    [PIPELINED, WHOLE, WIDE, PERSISTENT, PERSISTENT_CAST, PERSISTENT._replace(wr=2), *WGMMAS, FOUR_REDUCE_DSMEM],
)
def test_several_weights_of_one_input_in_one_launch(config, format, monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: Gpu((9, 0), SHARED_BYTES[9, 0], 5, {}))
    monkeypatch.setattr(launch, "resolve", launch.resolve.__wrapped__)
    x = torch.randn(1 if config.persistent else 3, 640).bfloat16()
    weights = [weight(format, n, 640) for n in (70, 16, 1, 90, 33, 64)]  # more than MOST_WEIGHTS
    biases = [None, torch.randn(16), torch.randn(len(x), 1), None, torch.randn(33).bfloat16(), None]
    made = products(x, weights, config, None, biases, alpha=0.5)
    exact = [0.5 * x.double() @ values(w).t() + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)]
    assert [y.shape for y in made] == [y.shape for y in exact]
    assert error(torch.cat(made, 1), torch.cat(exact, 1)) < TOLERANCE


PERSISTENTS = (
    PERSISTENT, PERSISTENT._replace(stages=4, ahead=1), PERSISTENT_CAST,
    PERSISTENT_CAST._replace(ahead=1, slabs=8), PERSISTENT._replace(wr=2), PERSISTENT_CAST._replace(split=2),
)  # fmt: skip


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("format", ["mxfp8_e5m2", "float8_e4m3_row", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_warps_without_columns_add_nothing_whatever_is_in_shared_memory(format, rows, monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "FILL", 0x86400000)  # as a largest magnitude this would give an infinite scale
    w, x = weight(format, 40, 256), torch.randn(rows, 256).bfloat16()
    for config in (PERSISTENT_CAST, PERSISTENT_CAST._replace(slabs=8, stages=4, ahead=1)):
        assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", PERSISTENTS)
@pytest.mark.parametrize(
    ("rows", "k"), [(1, 1300), (1, 1302), (1, 640), (2, 640), (4, 1304), (7, 640), (1, 4400), (5, 4400)]
)
def test_persistent_configs_of_many_shapes(config, rows, k):
    w, x = weight("nvfp4", 150, k), torch.randn(rows, k + 8).bfloat16()[:, :k]
    x[0, -100:] *= 2.0**20
    for cast in (None, Cast.of("mxfp8"), Cast.of("nvfp4")):
        expected = (x if cast is None else values(encode(x.contiguous(), cast))).double() @ values(w).t()
        assert error(product(x, w, config, cast), expected) < TOLERANCE


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "config", [PERSISTENT_CAST, PERSISTENT_CAST._replace(wk=8, slabs=8), PERSISTENT_CAST._replace(mt=2)]
)
def test_up_to_eight_rows_of_either_dtype_are_read_by_the_warps_that_multiply_them(config, rows, dtype):
    w, x = weight("mxfp4", 40, 1288), (torch.randn(rows, 1288) * 2.0 ** torch.arange(-4, rows - 4)[:, None]).to(dtype)
    for cast in (None, Cast.of("mxfp4"), Cast.of("nvfp4")):
        expected = (x if cast is None else values(encode(x, cast))).double() @ values(w).t()
        y = product(x, w, config, cast)
        assert all(error(of_row, exact) < TOLERANCE for of_row, exact in zip(y, expected, strict=True))


@pytest.mark.parametrize("few", [False, True], ids=["a tile for each block", "blocks with many tiles"])
@pytest.mark.parametrize("config", [PERSISTENT, PERSISTENT._replace(wr=3), PERSISTENT_WIDE._replace(wr=2, split=2)])
@pytest.mark.parametrize("memory", [SHARED_BYTES[9, 0], 64 * 1024], ids=["one round", "rounds"])
def test_blocks_take_their_share_of_the_rows(config, few, memory, monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: Gpu((9, 0), memory, 3 if few else 132, {}))
    monkeypatch.setattr(launch, "resolve", launch.resolve.__wrapped__)
    config = config if memory > 65536 else config._replace(mt=1, slabs=4, stages=2)
    w, x = weight("mxfp4", 530, 1300), torch.randn(7, 1300).bfloat16()
    assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "mxfp8[32x32]"])
@pytest.mark.parametrize(("rows", "most"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1)])
def test_few_rows_leave_columns_of_the_instruction_to_other_blocks(name, rows, most):
    w, x = weight(name, 50, 1300), torch.randn(rows, 1300).bfloat16()
    for slabs in (4, 8, 16) if w.format.element.bits == 4 else (8,):
        config = PERSISTENT._replace(slabs=slabs, whole_x=rows < 3, mt=1 + (slabs == 8))
        assert classes_of(w.format, config, rows) == min(most, config.depth // w.format.block[1])
        assert error(product(x, w, config), x.double() @ values(w).t()) < TOLERANCE


def test_blocks_with_a_part_of_the_columns_look_for_the_largest_of_all():
    w, x, cast = weight("mxfp8", 32, 256), torch.randn(1, 256).bfloat16(), Cast.of("nvfp4")
    x[0, :128] *= 64
    y = product(x, w, PERSISTENT_CAST._replace(split=2), cast)
    assert error(y, values(encode(x, cast)) @ values(w).t()) < TOLERANCE


@pytest.mark.parametrize("value", [-4e34, 4e34, -1e35, 3e38])
def test_activations_beyond_a_bounded_scale_keep_their_sign(value):
    w, cast = mx.quantize(torch.eye(64) * 2.0**-60, "mxint8").rowwise, Cast.of("nvfp4_single_level")
    x = torch.full((1, 64), value).bfloat16()
    assert product(x, w, PERSISTENT_CAST, cast).double().equal(values(encode(x, cast)) * 2.0**-60)


def test_an_infinity_of_one_block_stays_an_infinity():
    w = mx.quantize(torch.ones(16, 256), "mxfp8_e5m2").rowwise
    w.data.view(torch.uint8)[3, 40] = 0x7C
    y = product(torch.ones(1, 256).bfloat16(), w, PERSISTENT._replace(slabs=8, whole_x=True))
    assert y[0, 3] == math.inf
    assert y.isfinite().sum() == 15


def test_a_product_that_does_not_fit_is_refused_with_its_sizes():
    with pytest.raises(
        RuntimeError, match=r"a product of 9x16x64 by LaunchConfig.* does not fit in the shared memory of this device"
    ):
        product(torch.randn(9, 64).bfloat16(), weight("mxfp8", 16, 64), PERSISTENT)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("name", [*ELEMENTS.values()])
def test_every_code_of_every_element(name):
    """A weight with all codes times an identity: the result is the elements, bit for bit."""
    element = next(e for e, text in ELEMENTS.items() if text == name)
    format = next(f for f in FORMATS.values() if f.element is element and f.scale is mx.FORMATS["mxfp8"].scale)
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(element.packing[1]).view(8, -1)
    codes = torch.stack([codes.roll(i, 0) for i in range(2)]).view(16, -1)[:, : element.data_cols(32)].contiguous()
    data = codes if element.packed else codes.view(element.dtype)
    w = Operand(data, torch.full((16, 1), 127, dtype=torch.uint8), None, format, (16, 32))
    expected = decode(w, torch.float32)
    finite = expected.isfinite().all(1)  # a NaN or an infinity affects its whole row
    y = product(torch.eye(32).bfloat16(), w, WIDE._replace(nt=4, split=1)).t()
    assert torch.equal(y[finite], expected[finite]) and finite.any()
    assert not y[~finite].isfinite().all(1).any()
    wide = Operand(w.data.repeat(1, 4), w.scale.repeat(1, 4), None, format, (16, 128))
    for octaves in (0, 16):  # scales with this ratio do not fit in one window
        scale = wide.scale + torch.tensor([0, 0, octaves, 0]).to(torch.uint8)
        some = Operand(wide.data, scale, None, format, (16, 128))
        x = torch.eye(32).repeat(1, 4) * torch.tensor([1, 1, 2.0**-octaves, 1]).repeat_interleave(32) / 4
        y = product(x.bfloat16(), some, WGMMA._replace(nt=4)).t()
        assert torch.equal(y[finite], expected[finite]) and not y[~finite].isfinite().all(1).any()


def test_scales_of_every_power_of_two_and_nan():
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    w = Operand(
        torch.full((256, 32), 0x38).to(torch.uint8).view(torch.float8_e4m3fn),
        scale,
        None,
        mx.FORMATS["mxfp8"],
        (256, 32),
    )
    x = torch.zeros(1, 32).bfloat16()
    x[0, 5] = 1.0
    wide = Operand(w.data.repeat(1, 4), scale.repeat(1, 4), None, w.format, (256, 128))
    exact = torch.exp2(torch.arange(256).double() - 127).float()
    for y in (
        product(x, w, PIPELINED)[0],
        *(product(F.pad(x, (0, 96)), wide, p._replace(split=1))[0] for p in WGMMAS[:2]),
    ):
        assert torch.equal(y[:242], exact[:242]) and y[255].isnan()
        assert torch.equal(
            y[242:255], torch.full((13,), float("inf"))
        )  # 2^13, the row scale of x, times these overflows


@pytest.mark.parametrize("config", [WGMMA, DIRECTS[0]], ids=["converted", "direct"])
@pytest.mark.parametrize("scale", [0x7F, 0xFF, 0x80, 0xB8, 0x00])
def test_nvfp4_scales_with_a_sign_or_a_nan_give_what_the_reference_gives(scale, config):
    w, x = weight("nvfp4", 130, 384), torch.randn(4, 384).bfloat16()
    w.scale[9, 5] = torch.tensor(scale, dtype=torch.uint8).view(w.scale.dtype)
    y, exact = product(x, w, config), x.double() @ values(w).t()
    finite = exact.isfinite()
    assert error(y[finite], exact[finite]) < TOLERANCE and torch.equal(y.isnan(), exact.isnan())


@pytest.mark.exhaustive(quick=12)
@pytest.mark.parametrize("element", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4", "mxint8"])
@pytest.mark.parametrize("config", [*WGMMAS, *DIRECTS])
def test_scales_out_of_range_change_nothing_but_their_row(element, config):
    """The blocks of rows that have one are computed again; the others are not."""
    w, x = weight(element, 130, 768), torch.randn(4, 768).bfloat16()
    usual = product(x, w, config)
    w.scale[7, 3], w.scale[9, 0], w.scale[70, 11], w.scale[129, 5] = 200, 3, 255, 160
    y, exact = product(x, w, config), x.double() @ values(w).t()
    assert y[:, 70].isnan().all() and error(y[:, 7], exact[:, 7]) < 1e-6 and error(y[:, 129], exact[:, 129]) < 1e-6
    same = [i for i in range(130) if i not in (7, 9, 70, 129)]
    assert error(y[:, same], exact[:, same]) < TOLERANCE and error(usual[:, same], exact[:, same]) < TOLERANCE


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"]),
    st.integers(0, 40),
    st.integers(0, 99),
)
def test_scales_of_a_row_may_differ_by_any_number_of_octaves(format, octaves, seed):
    torch.manual_seed(seed)
    w, x = weight(format, 40, 256), torch.randn(3, 256).bfloat16()
    w.scale.add_(torch.randint(-octaves, octaves + 1, w.scale.shape).to(torch.uint8))  # modulo 256
    w.scale.masked_fill_(torch.rand(w.scale.shape) < 0.1, 0)  # as in blocks of zeros
    y, exact = product(x, w, WGMMA), x.double() @ values(w).t()
    bound = x.double().abs() @ values(w).abs().t()
    assert ((y.double() - exact).abs() <= 2.0**-20 * bound).all()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_an_infinity_affects_only_its_own_block_where_scales_are_out_of_range(format):
    w, x = weight(format, 70, 256), torch.randn(3, 256).bfloat16()
    x[1, 40], w.scale[5, 6] = float("inf"), 240
    y, exact = product(x, w, WGMMA), x.double() @ values(w).t()
    assert torch.equal(y[1].isnan(), exact[1].isnan())
    assert torch.equal(y[1][~exact[1].isnan()], exact[1][~exact[1].isnan()].float())


def test_activations_far_below_the_largest_of_their_row_are_exact():
    x = torch.zeros(1, 64).bfloat16()
    x[0, 0], x[0, 40] = 2.0**20, 2.0**-9 * 1.5
    w = Operand(
        torch.zeros(16, 64).to(torch.float8_e4m3fn),
        torch.full((16, 2), 127, dtype=torch.uint8),
        None,
        mx.FORMATS["mxfp8"],
        (16, 64),
    )
    w.data[:, 40] = 1.0
    for config in (PIPELINED, WHOLE):
        assert (product(x, w, config) == 2.0**-9 * 1.5).all()


def test_infinities_and_nans_of_activations_stay_in_their_row():
    w, x = weight("mxfp8", 16, 64), torch.randn(3, 64).bfloat16()
    x[0, 3], x[2, 7] = float("inf"), float("nan")
    y = product(x, w, PIPELINED)
    assert not y[0].isfinite().any() and y[1].isfinite().all() and y[2].isnan().all()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_row"])
def test_each_group_of_rows_is_multiplied_by_its_weight(format):
    w, ends = mx.quantize(torch.randn(3, 40, 96), format).rowwise, torch.tensor([2, 2, 20], dtype=torch.int32)
    x = torch.randn(23, 96).bfloat16()
    y = product(x, w, PIPELINED, ends=ends)
    reference = torch.zeros(23, 40, dtype=torch.float64)
    reference[:2], reference[2:20] = x[:2].double() @ values(w)[0].t(), x[2:20].double() @ values(w)[2].t()
    assert error(y, reference) < TOLERANCE and (y[20:] == 0).all()


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", [PIPELINED, WHOLE])
@pytest.mark.parametrize("groups, rows, tail", [(40, 9, 2), (300, 30, 1), (129, 1, 0), (33, 40, 3), (5, 3, 3)])
def test_groups_without_rows_take_no_block(groups, rows, tail, config, monkeypatch):
    """There are as many blocks as rows, if these are fewer than groups. The memory of results is poisoned."""
    chosen = torch.linspace(groups - 1, 0, rows - tail).round().long().flip(0)  # in all of them, the last one too
    ends = torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)
    w, x = mx.quantize(torch.randn(groups, 24, 64), "mxfp8").rowwise, torch.randn(rows, 64).bfloat16()
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *size, **options: empty(t, *size, **options).fill_(7))
    y = product(x, w, config, ends=ends)
    expected = torch.zeros(rows, 24, dtype=torch.float64)
    if rows > tail:
        expected[: rows - tail] = torch.einsum("mk,mnk->mn", x[: rows - tail].double(), values(w)[chosen])
    assert error(y, expected) < TOLERANCE if rows > tail else not y.any()
    assert not y[rows - tail :].any()


@pytest.mark.parametrize("ends", [[2, 99], [-7, 23], [30, 2], [2**31 - 1, -(2**31)]])
def test_ends_of_groups_never_reach_outside(ends, monkeypatch):
    """The ends are data that the host does not read: no row after the last one of x is read or written."""
    w, x = mx.quantize(torch.randn(2, 40, 96), "mxfp8").rowwise, torch.randn(123, 96).bfloat16()
    whole, new_empty = torch.full((323, 40), 7.0), torch.Tensor.new_empty

    def inside(t, *size, **options):
        return whole[100:123] if size == (23, 40) else new_empty(t, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", inside)
    y = product(x[:23], w, PIPELINED, ends=torch.tensor(ends, dtype=torch.int32))
    assert y.data_ptr() == whole[100:].data_ptr() and (whole[:100] == 7).all() and (whole[123:] == 7).all()


def test_groups_are_cast_to_nvfp4_by_the_largest_of_all_rows():
    w, ends = mx.quantize(torch.randn(4, 40, 256), "mxfp8").rowwise, torch.tensor([1, 2, 2, 4], dtype=torch.int32)
    x = (torch.randn(4, 256) * torch.tensor([[0.1], [1.0], [30.0], [0.3]])).bfloat16()
    cast, group = Cast.of("nvfp4"), torch.tensor([0, 1, 3, 3])
    exact = torch.einsum("mk,mnk->mn", values(encode(x, cast)), values(w)[group])
    for y, expected in zip(product(x, w, None, cast, ends=ends), exact, strict=True):
        assert error(y, expected) < TOLERANCE
    with pytest.raises(RuntimeError, match="cannot run 40x256 in mxfp8_e4m3, 4 groups"):
        product(x, w, WHOLE, cast, ends=ends)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_results_are_rounded_once_and_biases_added_before(out, bias):
    w, x = weight("mxfp8", 24, 64), torch.randn(3, 64).bfloat16()
    added = None if bias is None else torch.randn(3, 24).to(bias)
    exact = x.double() @ values(w).t() + (0 if added is None else added.double())
    y = product(x, w, PIPELINED, bias=added, out=out)
    assert y.dtype is out and error(y, exact) < 2 * torch.finfo(out).eps


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", [PIPELINED, WIDE, PERSISTENT_WIDE, *WGMMAS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [132, 135])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "between"])
def test_biases_of_one_row_or_all_rows_at_any_address(config, dtype, n, shift):
    w, x = weight("mxfp8", n, 512), torch.randn(13, 512).bfloat16()
    exact = x.double() @ values(w).t()
    for shape in ((n,), (13, n)):
        bias = torch.randn(math.prod(shape) + shift).to(dtype)[shift:].view(shape)
        y = product(x, w, config, bias=bias, out=torch.bfloat16, beta=3.0)
        assert error(y, exact + 3 * bias.double()) < torch.finfo(torch.bfloat16).eps / 2


# ---------------------------------------------------------------------------------------------- the kernel


def spec(m, n, k, format="mxfp8", capability=(9, 0)):
    class Device(Spec):
        @property
        def capability(self):
            return capability

    return Device("mm", ((m, k), (n, k)), (torch.bfloat16, mx.FORMATS[format]), torch.bfloat16, torch.device("cuda", 0))


def test_refusals_give_the_reason():
    w, x, args = weight("mxfp8", 32, 64), torch.randn(2, 64).bfloat16(), GemmArgs(torch.bfloat16)

    def why(a=x, b=w, args=args, m=2, capability=(9, 0)):
        return small_m.refuses(spec(m, 32, 64, capability=capability), a, b, args)

    assert why() is None
    assert why(capability=(7, 5)) == "needs sm80, this device is sm75"
    assert why(b=x) == "needs a quantized right operand, this one has no codes"
    assert why(b=weight(E3M0, 32, 64)) == "has no decoder for elements of e3m0"
    assert why(b=weight("mxfp8[1x64]", 32, 64)) == "has no decoder for e8m0 scales of 1x64 blocks"
    assert why(a=x.float()).endswith("in bfloat16 or float16, these are float32")
    assert why(args=GemmArgs(torch.float64)) == "writes bfloat16, float16 or float32, not float64"
    assert why(a=Unquantized(x, Cast.of("float8_row"))).startswith(
        "the values of float8_e4m3_row are not exact in bfloat16"
    )
    unaligned = weight("mxfp8", 32, 72)  # its rows of codes start at multiples of 8 bytes: wgmma cannot run
    assert why(b=unaligned, m=129).startswith("for at most 128 rows") and why(m=129) is None
    assert why(m=513).startswith("for at most 512 rows") and most_rows((9, 0)) == 512
    assert why(m=65, capability=(8, 0)).startswith("for at most 64 rows")
    assert why(m=0) == "no values"


@pytest.mark.parametrize("kind", ["plain", "unquantized", "nvfp4", "fake quantized", "operand", "stack of rows"])
def test_operands_of_every_kind_are_accepted(kind, monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *args, **options: PIPELINED)
    w, x = weight("mxfp4", 32, 64), torch.randn(4, 64).bfloat16()
    cast = Cast.of("nvfp4" if kind == "nvfp4" else "mxfp8")
    cast_values = values(encode(x, cast))
    gemm_operands = {
        "plain": (x, x.double()),
        "unquantized": (Unquantized(x, cast), cast_values),
        "nvfp4": (Unquantized(x, cast), cast_values),
        "fake quantized": (FakeQuantized(cast_values.bfloat16(), None, cast.format), cast_values),
        "operand": (encode(x, cast), cast_values),
        "stack of rows": (x.view(2, 2, 64), x.double()),
    }
    gemm_operand, reference = gemm_operands[kind]
    y = small_m.run(gemm_operand, w, GemmArgs(torch.float32))
    assert y.shape == (*gemm_operand.shape[:-1], 32)
    assert error(y.view(4, 32), reference @ values(w).t()) < TOLERANCE


# ---------------------------------------------------------------------------------------------- the table


H100 = Gpu((9, 0), SHARED_BYTES[9, 0], 132, {2: 66, 4: 30})


def test_the_table_of_sm90_has_every_number_of_rows_and_its_configs_fit():
    lines = table((9, 0))
    assert {line.m for line in lines} == set(ROWS)
    for line in lines:
        assert layout_of(mx.FORMATS[line.format], line.config, line.m, line.n, line.k, H100)
        assert line.config.cols >= min(line.m, 128) or tune.one_wave(line.config, line.m, line.n, H100)
        assert line.config.wr * line.config.wk in (4, 8, 12, 16)


def test_an_unknown_gpu_takes_configs_that_fit_it():
    assert table((12, 0)) == table((10, 0)) == table((8, 0)) == table((9, 0))
    cpu = torch.device("cpu")
    assert gpu_of(cpu) == Gpu((9, 0), SHARED_BYTES[9, 0], 132, CLUSTERS_OF_AN_H100)
    for m, k in ((1, 4096), (40, 14336), (64, 77)):
        config = choose_config(
            cpu, mx.FORMATS["mxfp8"], m, 4096, k, m, lambda config, k=k: not config.wgmma or k % 128 == 0
        )
        assert layout_of(mx.FORMATS["mxfp8"], config, m, 4096, k, gpu_of(cpu))
    smallest = max(pipelined_bytes(f, FALLBACK, 1, 65536) for f in DECODED.values())
    assert smallest <= min(SHARED_BYTES.values()) // 2


def test_rows_that_were_not_measured_take_the_config_of_the_next_larger_number():
    def of(m, k=4096, **options):
        return choose_config(torch.device("cpu"), mx.FORMATS["mxfp8"], m, 14336, k, m, **options)

    assert of(1) != of(2) != of(3) == of(4) != of(5) == of(8) != of(9) == of(16)
    assert of(17).cols >= 17 and of(33).cols >= 33 and of(128).wgmma
    few = of(2, 100_000)  # no block can store two rows of this length
    assert few in {line.config for line in table((9, 0)) if line.m > 2} and not few.whole_x


def test_rows_with_a_cast_take_the_config_measured_with_it_of_the_kind_that_is_fastest_without(monkeypatch):
    fast, of_casts = PERSISTENT._replace(stages=4), PERSISTENT._replace(stages=3)
    lines = [
        Measured("mxfp8_e4m3", False, 4, 4096, 4096, 2.0, fast),
        Measured("mxfp8_e4m3", True, 4, 4096, 4096, 2.5, of_casts),
    ]
    monkeypatch.setattr(sys.modules[choose_config.__module__], "table", lambda capability: lines)

    def of(m, casts):
        cpu, mxfp8 = torch.device("cpu"), mx.FORMATS["mxfp8"]
        return choose_config(cpu, mxfp8, m, 4096, 4096, m, lambda config: not config.direct, casts)

    assert (of(4, False), of(4, True)) == (fast, of_casts)
    lines.append(Measured("mxfp8_e4m3", False, 4, 4096, 4096, 1.9, WGMMA))
    assert of(4, False) == of(4, True) == WGMMA
    lines.append(Measured("mxfp8_e4m3", False, 8, 4096, 4096, 1.0, PIPELINED))
    assert of(8, False) == of(8, True) == PIPELINED


def test_up_to_eight_rows_limited_to_pipelined_take_the_configs_of_four():
    def of(m):
        cpu, mxfp4 = torch.device("cpu"), mx.FORMATS["mxfp4"]
        return choose_config(cpu, mxfp4, m, 14336, 4096, 8 * m, lambda config: config.kind == "pipelined")

    assert of(5) == of(8) == of(4) and of(8).cols == 8 and of(9).cols == 16


def test_a_row_with_other_columns_is_refused():
    row = dict(zip(COLUMNS, row_of(table((9, 0))[0]), strict=True))
    assert measured_of(row) == table((9, 0))[0]
    for wrong in ({"casts": 4}, {"k": 12.3}, {"unknown": 1}):
        with pytest.raises(
            ValueError, match=r"a row of a table of launch configs has the columns format, casts, m, .*"
        ):
            measured_of(row | wrong)
    del row["n"]
    with pytest.raises(ValueError, match=r"not \{'format': .* with python -m mxtensor\.report\.tune"):
        measured_of(row)


def test_configs_have_only_the_columns_that_the_activation_rows_need():
    def of(m, **options):
        return choose_config(torch.device("cpu"), mx.FORMATS["mxfp4"], m, 14336, 4096, m, **options)

    assert [of(m).cols for m in (65, 96, 97, 128, 160, 192)] == [96, 96, 128, 128, 160, 192]
    assert all(of(m).cols * -(-m // of(m).cols) - m < 32 for m in (257, 384, 500, 512))
    assert not of(512, allowed=lambda config: not config.wgmma).wgmma  # a config of fewer rows, used several times


@pytest.mark.parametrize(
    "rows, groups, found", [(8, 128, (8, 1)), (8, 64, (8, 1)), (4, 32, (4, 1)), (2, 8, (2, 1)), (512, 64, (64, 11)),
                            (128, 8, (8, 20)), (0, 8, (1, 1)), (5, 1, (1, 5))]
)  # fmt: skip
def test_rows_of_a_token_are_in_groups_of_their_own(rows, groups, found):
    assert groups_with_rows(rows, groups) == found


def test_the_config_of_groups_is_that_of_a_matrix_as_high_as_the_busy_ones():
    """Small matrices alone would divide K over blocks; 64 of them together fill the GPU."""
    device, kind = torch.device("cpu"), (torch.bfloat16,) * 3
    each = [launch.choose(device, mx.FORMATS["mxfp4"], kind, (rows, 2048, groups), (2048,), (0, 0, 0), None, None)
            for rows, groups in ((512, 64), (8, 0))]  # fmt: skip
    assert each[0].config.split == 1 < each[1].config.split * each[1].config.wk


def test_groups_never_take_a_persistent_config(monkeypatch):
    lines = [line._replace(config=PERSISTENT) if i % 2 else line for i, line in enumerate(table((9, 0)))]
    monkeypatch.setattr(sys.modules[choose_config.__module__], "table", lambda capability: lines)
    for m in ROWS:
        config = choose_config(
            torch.device("cpu"), mx.FORMATS["mxfp8"], m, 4096, 4096, 8 * m, lambda config: not config.persistent
        )
        assert not config.persistent


def test_a_persistent_config_stores_the_sums_of_as_many_tiles_as_fit():
    f, x = mx.FORMATS["mxfp8"], PERSISTENT_WIDE._replace(mt=1, wk=8, slabs=4)
    whole, tight = layout_of(f, x, 16, 14336, 4096, H100), layout_of(f, x, 16, 28672, 4096, H100)
    assert whole.x_width == tight.x_width == 4096 and tight.bytes <= H100.memory
    assert 1 <= tight.round < 14 and whole.round <= 7  # a block has 14 and 7 tiles
    assert layout_of(f, x, 16, 4096, 14336, H100) is None  # 16 rows of 14336 need twice the memory
    assert layout_of(f, x._replace(split=4), 16, 4096, 14336, H100).x_width == 3584
    assert layout_of(f, x, 17, 4096, 4096, H100) is None  # more activation rows than columns
    alone = layout_of(f, PERSISTENT, 1, 4096, 4096, H100)
    assert 2 * (alone.bytes + RESERVED) > H100.memory + RESERVED  # a second block does not fit beside it


def test_clusters_that_a_device_cannot_run_do_not_fit():
    without = H100._replace(clusters={2: 66, 4: 0})
    for config in (PIPELINED, WGMMA, PERSISTENT):
        two, four = (layout_of(mx.FORMATS["mxfp8"], config._replace(split=n), 1, 4096, 4096, without) for n in (2, 4))
        assert two and not four
    assert layout_of(mx.FORMATS["mxfp8"], WGMMA._replace(split=4, reduce_global=True), 1, 4096, 4096, without)


def test_rows_are_copied_in_the_largest_pieces_that_their_alignment_allows():
    assert [copy_size(0, n) for n in (4096, 24, 20, 6, 33)] == [16, 8, 4, 2, 1]
