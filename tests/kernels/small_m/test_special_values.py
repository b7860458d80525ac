"""Small-M products of every code, of very different scales, and of infinities and NaN: the CUDA sources on the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtensor as mx
from mxtensor.kernels.runtime.nvrtc import ELEMENTS
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, encode
from tests.helpers.small_m import (
    DIRECTS,
    PERSISTENT,
    PERSISTENT_CAST,
    PIPELINED,
    TOLERANCE,
    WGMMA,
    WGMMAS,
    WHOLE,
    WIDE,
    error,
    on_the_cpu,
    product,
    values,
    weight,
)

pytestmark = on_the_cpu


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
