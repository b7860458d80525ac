"""Every wrong call of a scaled product raises an error that names the tensor, before torch is called."""

import dataclasses
from itertools import product

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import scaled_mm, scaled_mm_contract
from mxtensor.kernels.gemm.scaled_mm_contract import GROUPED_SCALINGS, SCALINGS, check, plan
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.reference import encode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def right_call(name, m=4, n=16, k=128):
    """A valid Product of this scaling, from real operands."""
    scaling = next(s for s in SCALINGS if s.name == name)
    formats = {
        "float8 per tensor": ("float8_tensor",) * 2, "float8 per row": ("float8_row",) * 2,
        "float8 1x128 by 1x128": ("float8_1x128",) * 2, "float8 1x128 by 128x128": ("float8_1x128", "float8_128x128"),
        "float8 128x128 by 1x128": ("float8_128x128", "float8_1x128"), "mxfp8": ("mxfp8",) * 2,
        "mxfp4": ("mxfp4",) * 2, "nvfp4": ("nvfp4",) * 2,
    }[name]  # fmt: skip
    a, b = (Unquantized(torch.randn(rows, k), mx.Cast.of(f)) for rows, f in zip((m, n), formats, strict=True))
    return scaled_mm.product_of(scaling, a, b, torch.randn(n, dtype=BF16) if scaling.bias else None, BF16)


NAMES = sorted({s.name for s in SCALINGS})


@pytest.mark.parametrize("name", NAMES)
def test_a_right_call_passes(name):
    check(right_call(name))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("table", [SCALINGS, GROUPED_SCALINGS], ids=["one", "grouped"])
def test_float32_scales_that_are_powers_of_two_use_the_rows_of_float32(table, capability):
    def chosen(left, right):
        found = plan(table, mx.get_format(left), mx.get_format(right), capability, (13, 0))
        return found.replace("_pow2", "") if isinstance(found, str) else found

    plain = [name for name in mx.FORMATS if name.startswith("float8") and not name.endswith("_pow2")]
    for left, right in product(plain, plain):
        expected = chosen(left, right)
        for pair in ((f"{left}_pow2", right), (left, f"{right}_pow2"), (f"{left}_pow2", f"{right}_pow2")):
            assert chosen(*pair) == expected, pair
    assert "no scaling for" in chosen("float8_row_pow2", "mxfp8")


def fields(**changes):
    return lambda p: dataclasses.replace(p, **{k: v(getattr(p, k), p) for k, v in changes.items()})


def misaligned(t, p):
    flat = torch.empty(t.numel() + 16, dtype=t.dtype)
    return flat[1 : t.numel() + 1].view(t.shape).copy_(t)


def wider(t, p):
    return torch.zeros(t.shape[0], t.shape[1] + 128, dtype=torch.uint8).view(t.dtype)


WRONG_EVERYWHERE = [
    (fields(a=lambda t, p: t.float()), TypeError, "^a must hold .* codes for .* scaling, got torch.float32"),
    (fields(b=lambda t, p: t.float()), TypeError, "^b must hold .* codes"),
    (fields(a=lambda t, p: t[None]), ValueError, r"^a must have 2 dimensions, got shape \(1, 4, "),
    (fields(b=lambda t, p: t[None]), ValueError, r"^b must have 2 dimensions"),
    (fields(a=lambda t, p: t[:0]), ValueError, r"^a is empty, shape \(0, "),
    (fields(b=lambda t, p: t[:0]), ValueError, r"^b is empty"),
    (fields(b=wider), ValueError, r"^a and b must have rows of one length, got (\d+) and (\d+) bytes"),
    (fields(a=lambda t, p: t[:, :8], b=lambda t, p: t[:, :8]), ValueError, r"^a row of a and b must come in multiples"),
    (fields(b=lambda t, p: t[:15]), ValueError, "^the rows of b must come in multiples of 16 for .* scaling, got 15"),
    (fields(a=lambda t, p: t.t().contiguous().t()), ValueError, "^a must be row-major, got shape .* with strides"),
    (fields(b=lambda t, p: t.t().contiguous().t()), ValueError, "^b must be row-major"),
    (fields(a=misaligned), ValueError, "^a must start at a multiple of 16 bytes, got byte 1 of its storage"),
    (fields(scale_a=lambda t, p: t.to(torch.int32)), TypeError, "^scale_a must be torch.(uint8|float32) .* got"),
    (fields(scale_b=lambda t, p: t.to(torch.int32)), TypeError, "^scale_b must be"),
    (fields(scale_a=lambda t, p: torch.cat((t, t))), ValueError, r"^scale_a must have shape \(.*\) for .* scaling"),
    (fields(scale_b=lambda t, p: torch.cat((t, t))), ValueError, "^scale_b must have shape"),
    (fields(global_scales=lambda t, p: [torch.ones(())]), ValueError, "^global_scales must be none, or one of"),
    (fields(out_dtype=lambda t, p: torch.float64), TypeError, "^out_dtype must be one of .*bfloat16.* torch.float64"),
    (fields(scale_b=lambda t, p: t.to("meta")), ValueError, "^scale_b must be on the device of a, cpu, got meta"),
    (fields(b=lambda t, p: t.to("meta")), ValueError, "^b must be on the device of a"),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("i", range(len(WRONG_EVERYWHERE)))
def test_a_wrong_call_is_named(name, i):
    change, kind, message = WRONG_EVERYWHERE[i]
    with pytest.raises(kind, match=message):
        check(change(right_call(name)))
    with pytest.raises(kind, match=message):
        scaled_mm_contract.launch(change(right_call(name)))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "mxfp4"])
@pytest.mark.parametrize(
    "change, kind, message",
    [
        (fields(bias=lambda t, p: t.half()), TypeError, "^bias must have the dtype of the result, torch.bfloat16, got"),
        (fields(bias=lambda t, p: t[:8]), ValueError, r"^bias must have shape \(16,\), one for each row of b, got "),
        (fields(bias=lambda t, p: t.repeat(2)[::2]), ValueError, "^bias must be row-major"),
        (fields(bias=misaligned), ValueError, "^bias must start at a multiple of 16 bytes, got byte 2"),
        (fields(bias=lambda t, p: t.to("meta")), ValueError, "^bias must be on the device of a"),
    ],
)  # fmt: skip
def test_a_wrong_bias_is_named(name, change, kind, message):
    with pytest.raises(kind, match=message):
        check(change(right_call(name)))


@pytest.mark.parametrize(
    "name, change, kind, message",
    [
        ("float8 per tensor", fields(a=lambda t, p: t.to(torch.float8_e5m2), b=lambda t, p: t.to(torch.float8_e5m2)),
         TypeError, "a and b are both e5m2"),
        ("float8 per tensor", fields(out_dtype=lambda t, p: FP32), TypeError, "float32 result takes no bias"),
        ("float8 per row", fields(scale_a=lambda t, p: t.t()), ValueError, r"scale_a must have shape \(4, 1\)"),
        ("float8 1x128 by 1x128", fields(a=lambda t, p: t[:3]), ValueError, "rows of a must come in multiples of 4"),
        ("float8 1x128 by 128x128", fields(scale_b=lambda t, p: t[:, :1]), ValueError, r"scale_b must have shape"),
        ("float8 128x128 by 1x128", fields(out_dtype=lambda t, p: FP16), TypeError, "got torch.float16"),
        ("mxfp8", fields(a=lambda t, p: t[:, :16].contiguous(), b=lambda t, p: t[:, :16].contiguous()), ValueError,
         "a row of a and b must come in multiples of 32 for mxfp8 scaling, got 16"),
        ("mxfp8", fields(scale_a=lambda t, p: t[:256]), ValueError, r"must have shape \(512,\) .* got \(256,\)"),
        ("mxfp8", fields(scale_a=lambda t, p: t.view(torch.float8_e8m0fnu)), TypeError, "scale_a must be torch.uint8"),
        ("mxfp8", fields(global_scales=lambda t, p: [torch.ones(()), torch.ones(())]), ValueError, "got 2 for mxfp8"),
        ("mxfp4", fields(bias=lambda t, p: torch.ones(16, dtype=BF16)), ValueError, "mxfp4 scaling takes no bias"),
        ("nvfp4", fields(global_scales=lambda t, p: [torch.ones(2), torch.ones(())]), ValueError,
         r"global_scales\[0\] must be one float32, got torch.float32 of shape \(2,\)"),
        ("nvfp4", fields(global_scales=lambda t, p: [torch.ones(()), torch.ones((), dtype=BF16)]), ValueError,
         r"global_scales\[1\] must be one float32, got torch.bfloat16"),
        ("nvfp4", fields(global_scales=lambda t, p: [torch.ones(()), torch.ones((), device="meta")]), ValueError,
         r"global_scales\[1\] must be on the device of a"),
    ],
)  # fmt: skip
def test_what_only_one_scaling_asks_is_named(name, change, kind, message):
    with pytest.raises(kind, match=message):
        check(change(right_call(name)))


# ---------------------------------------------------------------------------------------------- grouped


def right_group(name):
    scaling = next(s for s in GROUPED_SCALINGS if s.name == name)
    cast = mx.Cast.of("mxfp8" if scaling.swizzled else "float8_row")
    a, b = Unquantized(torch.randn(9, 64), cast), encode(torch.randn(3, 32, 64), cast)
    return scaled_mm.grouped_product_of(scaling, a, b, torch.tensor([2, 2, 8], dtype=torch.int32))


@pytest.mark.parametrize("name", ["float8 per row", "mxfp8"])
@pytest.mark.parametrize(
    "change, kind, message",
    [
        (fields(a=lambda t, p: t.to(torch.float8_e5m2)), TypeError, "^a must hold float8_e4m3fn codes"),
        (fields(b=lambda t, p: t[0]), ValueError, "^(scale_a must have shape|groups of columns need scales of rows)"),
        (fields(b=lambda t, p: t[:, :15]), ValueError, "^the rows of b must come in multiples of 16"),
        (fields(scale_a=lambda t, p: t[:1]), ValueError, "^scale_a must have shape"),
        (fields(scale_b=lambda t, p: t[:1]), ValueError, r"^scale_b must have shape \(3, "),
        (fields(out_dtype=lambda t, p: FP32), TypeError, "^out_dtype must be one of torch.bfloat16 for"),
        (fields(bias=lambda t, p: torch.ones(32, dtype=BF16)), ValueError, "scaling takes no bias"),
        (fields(ends=lambda t, p: t.long()), ValueError, r"^ends must be int32 of shape \(3,\), .* got torch.int64"),
        (fields(ends=lambda t, p: t[:2]), ValueError, r"^(ends must be int32 of shape|scale_a must have shape)"),
        (fields(ends=lambda t, p: t.to("meta")), ValueError, "^ends must be on the device of a, cpu, got meta"),
    ],
)  # fmt: skip
def test_a_wrong_grouped_call_is_named(name, change, kind, message):
    check(right_group(name))
    with pytest.raises(kind, match=message):
        check(change(right_group(name)))


def test_the_number_of_groups_is_limited():
    p = right_group("float8 per row")
    many = fields(
        b=lambda t, p: t.view(torch.uint8)[:1].repeat(1024, 1, 1).view(t.dtype),
        scale_b=lambda t, p: t[:1].repeat(1024, 1),
        ends=lambda t, p: t[:1].repeat(1024),
    )
    with pytest.raises(ValueError, match="at most 1023 groups, got 1024"):
        check(many(p))
