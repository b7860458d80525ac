"""Custom ops that anybody can call: arguments of wrong sizes, dtypes and devices raise, and no kernel gets them."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import cublas, dequant, dot_scaled, scaled_mm_contract  # noqa: F401  (define ops)
from mxtensor.kernels.quantize import amax_history, triton_ops  # noqa: F401
from mxtensor.kernels.runtime import custom_op
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.kernels.small_m.launch import Weight
from mxtensor.numerics.reference import decode

OPS = torch.ops.mxtensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs: in its interpreter without a device
ERRORS = (TypeError, ValueError)


def x(*size, dtype=torch.bfloat16):
    return torch.randn(*size, device=DEVICE).to(dtype)


def operand(format="mxfp8", size=(64, 128)):
    return mx.quantize(x(*size), format).rowwise


def cut(t):
    return t[:-1]


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


CHANGES = {
    "cut": cut,
    "flat": torch.flatten,
    "empty": lambda t: t[:0],
    "int64": lambda t: t.to(torch.int64),
    "sparse": lambda t: t.view(torch.uint8).to_sparse(),
    "freed": freed,
}


@pytest.mark.parametrize("bad", ["no dimensions", "int32", "sparse", "an unknown format", "an unknown rounding"])
def test_encode(bad):
    good = (torch.randn(8, 64), "mxfp8", "floor", "nearest", 0.0)
    changes = {
        "no dimensions": (torch.randn(()), *good[1:]), "int32": (torch.ones(8, 64).int(), *good[1:]),
        "sparse": (torch.eye(64).to_sparse(), *good[1:]), "an unknown format": (good[0], "mxfp9", *good[2:]),
        "an unknown rounding": (*good[:3], "down", 0.0),
    }  # fmt: skip
    with pytest.raises(ERRORS):
        OPS.encode(*changes[bad])
    assert [t.shape for t in OPS.encode(*good)] == [(8, 64), (8, 2), (0,)]


@pytest.mark.parametrize("bad", CHANGES)
@pytest.mark.parametrize("which", ["a", "data", "scale"])
def test_sliced_mm(which, bad):
    w = mx.quantize(torch.randn(64, 128), "mxfp8").rowwise
    good = {"a": torch.randn(3, 128).bfloat16(), "data": w.data, "scale": w.scale}

    def call(a, data, scale, scales=()):
        return OPS.sliced_mm(a, data, scale, "mxfp8_e4m3", list(scales), None, 1.0, 1.0)

    assert torch.equal(call(**good), torch.mm(good["a"], decode(w, torch.bfloat16).t()))
    if (which, bad) != ("a", "cut"):  # fewer rows are another product
        with pytest.raises(ERRORS):
            call(**good | {which: CHANGES[bad](good[which])})
    with pytest.raises(ERRORS):
        call(**good, scales=[torch.ones(2)])
    with pytest.raises(ERRORS):
        call(good["a"][:, :96].contiguous(), w.data, w.scale)


@pytest.mark.parametrize("bad", CHANGES)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp6", "float8_tensor"])
def test_dequantize(format, bad):
    o = operand(format)

    def call(data=o.data, scale=o.scale, global_scale=o.global_scale, shape=o.shape, dtype=torch.float32):
        return OPS.dequantize(data, scale, global_scale, o.format.name, list(shape), dtype)

    assert torch.equal(call(), decode(o, torch.float32))
    for change in (
        {"data": CHANGES[bad](o.data)},
        {"scale": CHANGES[bad](o.scale)} if bad != "cut" or o.scale.numel() > 1 else {"shape": ()},
    ):
        with pytest.raises(ERRORS):
            call(**change)
    for shape in ((640, 128), (64, 129), (-64, 128), (64,), ()):
        with pytest.raises(ERRORS):
            call(shape=shape)
    with pytest.raises(ERRORS):
        call(global_scale=torch.ones(2, device=DEVICE))
    with pytest.raises(ERRORS):
        call(dtype=torch.float64)


def test_the_casts_take_matrices_with_values():
    cast = ("mxfp8_e4m3", "floor", "nearest", None, 0.0)
    pair = (*cast, "codes", "codes", torch.bfloat16)
    assert len(OPS.quantize(x(8, 64), *cast)) == 2 and len(OPS.cast_pair(x(32, 64), *pair, None, False)) == 4
    for t in (
        x(0, 64),
        x(8, 64, dtype=torch.float64),
        torch.randn((), device=DEVICE),
        x(8, 64).to_sparse(),
        freed(x(8, 64)),
    ):
        for call in (
            lambda t: OPS.quantize(t, *cast),
            lambda t: OPS.quantize_both(t, *cast),
            lambda t: OPS.fake_quantize(t, *cast, torch.bfloat16),
            lambda t: OPS.cast_pair(t, *pair, None, False),
        ):
            with pytest.raises(ERRORS):
                call(t)
    for call in (
        lambda: OPS.quantize_both(x(2, 8, 64), *cast),
        lambda: OPS.quantize_both(x(8, 64), "mxfp8[32x32]", *cast[1:]),
        lambda: OPS.fake_quantize(x(8, 64), *cast, torch.float64),
        lambda: OPS.cast_pair(x(64), *pair, None, False),
        lambda: OPS.cast_pair(x(8, 64), *cast, "codes", None, torch.bfloat16, None, False),
        lambda: OPS.cast_pair(x(8, 64), *cast, "shapes", "codes", torch.bfloat16, None, False),
        lambda: OPS.cast_pair(x(8, 64), "float8_tensor", *cast[1:], "values", "codes", torch.bfloat16, None, False),
        lambda: OPS.cast_pair(x(8, 64), "float8_tensor", *pair[1:], torch.ones(0, device=DEVICE), False),
        lambda: OPS.cast_pair(x(8, 64), "float8_tensor", *pair[1:], torch.ones(1, device=DEVICE).int(), False),
    ):
        with pytest.raises(ERRORS):
            call()


def test_advance_history():
    good = {"history": torch.rand(16, 3), "record": torch.rand(3), "amax": torch.rand(3)}
    good = {name: t.to(DEVICE) for name, t in good.items()}

    def call(**changes):
        return OPS.advance_history(*(good | changes).values(), 1.0, False)

    assert call()[0].shape == (16, 3)
    for change in (
        {"history": good["history"][:0]}, {"history": good["record"]}, {"record": good["record"][:2]},
        {"amax": good["amax"][:0]}, {"amax": good["amax"].double()}, {"history": torch.rand(5000, 3, device=DEVICE)},
    ):  # fmt: skip
        with pytest.raises(ERRORS):
            call(**change)


@pytest.mark.parametrize("bad", CHANGES)
@pytest.mark.parametrize("which", ["a", "a_scale", "b", "b_scale", "bias", "ends"])
def test_dot_scaled(which, bad):
    left, right = operand(size=(32, 128)), operand(size=(2, 64, 128))
    good = {
        "a": left.data.view(torch.uint8), "a_scale": left.scale,
        "b": right.data.view(torch.uint8), "b_scale": right.scale,
        "bias": x(64), "ends": torch.tensor([8, 32], dtype=torch.int32, device=DEVICE),
    }  # fmt: skip

    def call(changes, cols=128, formats=("mxfp8_e4m3", "mxfp8_e4m3"), out=torch.float32):
        t = good | changes
        codes = t["a"], t["a_scale"], t["b"], t["b_scale"]
        return OPS.dot_scaled(*codes, *formats, cols, None, None, t["bias"], t["ends"], 1.0, 1.0, out)

    if bad == "flat" and which in ("bias", "ends"):
        return  # as they are
    with pytest.raises(ERRORS):
        call({which: CHANGES[bad](good[which])})
    for arguments in ({"cols": 256}, {"cols": -128}, {"formats": ("mxfp8_e4m3", "nvfp4")}, {"out": torch.float64}):
        with pytest.raises(ERRORS):
            call({}, **arguments)


# ---------------------------------------------------------------------------------------------- CUDA only


def small_m_arguments(format="mxfp8", **changes):
    o = mx.quantize(torch.randn(64, 128), format).rowwise
    values = {
        "x": torch.randn(4, 128).bfloat16(), "data": o.data, "scale": o.scale, "global_scale": o.global_scale,
        "bias": torch.randn(64).bfloat16(), "cols": 128, "ends": None, "out": torch.bfloat16, "cast": None,
    } | changes  # fmt: skip
    weight = Weight(values["data"], values["scale"], values["global_scale"], values["bias"])
    rest = values["cols"], None, values["ends"], values["out"], values["cast"]
    return "mxtensor::small_m", values["x"], [weight], o.format, *rest


@pytest.mark.parametrize("bad", CHANGES)
@pytest.mark.parametrize("which", ["x", "data", "scale", "bias"])
def test_small_m(which, bad):
    small_m.check_arguments(*small_m_arguments())
    good = dict(
        zip(
            ("x", "data", "scale", "bias"),
            (torch.randn(4, 128).bfloat16(), *operand_on_cpu(), torch.randn(64)),
            strict=True,
        )
    )
    if (which, bad) in {("x", "cut"), ("bias", "flat")}:
        return  # other valid arguments
    with pytest.raises(ERRORS):
        small_m.check_arguments(*small_m_arguments(**{which: CHANGES[bad](good[which])}))


def operand_on_cpu():
    o = mx.quantize(torch.randn(64, 128), "mxfp8").rowwise
    return o.data, o.scale


def test_small_m_refuses_other_sizes_layouts_and_formats():
    ends = torch.tensor([4], dtype=torch.int32)
    for changes in (
        {"cols": 256}, {"cols": 127}, {"out": torch.float64}, {"bias": torch.randn(())}, {"bias": torch.randn(3, 64)},
        {"x": torch.randn(128, 4).bfloat16().t()}, {"x": torch.randn(1, 128).bfloat16().expand(4, 128)},
        {"x": torch.randn(4, 128)}, {"ends": ends}, {"data": operand_on_cpu()[0].mT.contiguous().mT},
        {"global_scale": torch.ones(0)}, {"cast": mx.Cast.of("mxfp8[32x32]")},
    ):  # fmt: skip
        with pytest.raises(ERRORS):
            small_m.check_arguments(*small_m_arguments(**changes))
    with pytest.raises(ERRORS, match="cannot multiply"):
        small_m.check_arguments(
            *small_m_arguments("float8_e4m3_128x128", cols=128)[:3],
            mx.get_format("mxfp8[1x64]"),
            128,
            None,
            None,
            torch.bfloat16,
            None,
        )


def test_ops_for_cuda_refuse_tensors_on_other_devices(monkeypatch):
    data, scale = operand_on_cpu()
    a, rest = torch.randn(4, 128).bfloat16(), (1.0, 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="needs tensors on a CUDA device"):
        OPS.small_m(a, data, scale, "mxfp8_e4m3", 128, None, None, None, None, *rest, "", "")
    with pytest.raises(ValueError, match="needs tensors on a CUDA device"):
        OPS.small_m_shared(a, [data], [scale], "mxfp8_e4m3", 128, None, [None], [None], *rest, "", "")
    for lists in (([], [], [], []), ([data], [scale, scale], [None], [None])):
        with pytest.raises(ValueError, match="must have one length"):
            OPS.small_m_shared(a, *lists[:2], "mxfp8_e4m3", 128, None, *lists[2:], *rest, "", "")
    with pytest.raises(ValueError, match="needs cuBLAS and tensors on a CUDA device"):
        OPS.device_scaled_mm(a, a, [torch.ones(())], None, *rest)
    monkeypatch.setattr(custom_op, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="needs tensors on a CUDA device"):
        OPS.quantize(a, "mxfp8_e4m3", "floor", "nearest", None, 0.0)
    with pytest.raises(ValueError, match="needs tensors on a CUDA device"):
        OPS.dequantize(data, scale, None, "mxfp8_e4m3", [64, 128], torch.float32)


@pytest.mark.parametrize(("row", "scales"), [(-1, 2), (99, 2), (0, 0), (0, 1)])
def test_scaled_mm_refuses_rows_of_no_scaling(row, scales):
    data, scale = operand_on_cpu()
    with pytest.raises(ValueError, match="row must be from 0 to"):
        OPS.scaled_mm(data, data, [scale] * scales, None, None, row, torch.bfloat16)
