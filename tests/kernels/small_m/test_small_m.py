"""Small-M products: the CUDA sources, run on the CPU by ``cuda_on_cpu``, against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtensor as mx
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import Gpu, classes_of
from mxtensor.kernels.small_m.heuristics import SHARED_BYTES
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import E2M3, FORMATS, UE4M3, Format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode
from tests.helpers import cuda_on_cpu
from tests.helpers.small_m import (
    FOUR_REDUCE_DSMEM,
    KINDS,
    PERSISTENT,
    PERSISTENT_CAST,
    PERSISTENT_WIDE,
    PERSISTENTS,
    PIPELINED,
    TOLERANCE,
    WGMMA,
    WGMMAS,
    WHOLE,
    WIDE,
    error,
    guarded,
    on_the_cpu,
    product,
    products,
    values,
    weight,
)

pytestmark = on_the_cpu


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
def test_several_weights_of_one_input_in_one_launch(config, format, nothing_resolved, monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: Gpu((9, 0), SHARED_BYTES[9, 0], 5, {}))
    x = torch.randn(1 if config.persistent else 3, 640).bfloat16()
    weights = [weight(format, n, 640) for n in (70, 16, 1, 90, 33, 64)]  # more than MOST_WEIGHTS
    biases = [None, torch.randn(16), torch.randn(len(x), 1), None, torch.randn(33).bfloat16(), None]
    made = products(x, weights, config, None, biases, alpha=0.5)
    exact = [0.5 * x.double() @ values(w).t() + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)]
    assert [y.shape for y in made] == [y.shape for y in exact]
    assert error(torch.cat(made, 1), torch.cat(exact, 1)) < TOLERANCE


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
def test_blocks_take_their_share_of_the_rows(config, few, memory, nothing_resolved, monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: Gpu((9, 0), memory, 3 if few else 132, {}))
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
@pytest.mark.pairs
def test_biases_of_one_row_or_all_rows_at_any_address(config, dtype, n, shift):
    w, x = weight("mxfp8", n, 512), torch.randn(13, 512).bfloat16()
    exact = x.double() @ values(w).t()
    for shape in ((n,), (13, n)):
        bias = torch.randn(math.prod(shape) + shift).to(dtype)[shift:].view(shape)
        y = product(x, w, config, bias=bias, out=torch.bfloat16, beta=3.0)
        assert error(y, exact + 3 * bias.double()) < torch.finfo(torch.bfloat16).eps / 2
