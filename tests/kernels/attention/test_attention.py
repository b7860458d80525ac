"""Attention over codes: every kernel is torch's attention of the dequantized values, to float32 rounding."""

import math
import platform
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.kernels.attention import choose_attention, cpu_attention, triton_attention
from mxtensor.kernels.attention.arguments import AttentionArgs, Tokens
from mxtensor.kernels.attention.choose_attention import attention
from mxtensor.kernels.quantize.choose_cast import dequantize_operand
from mxtensor.kernels.runtime import triton_launch
from mxtensor.kernels.runtime.native_build import instruction_sets
from mxtensor.numerics.formats import get_format

FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4", "nvfp4_single_level", "float8_row",
           "mxfp4[1x64]", "mxfp8[1x16]"]  # fmt: skip
CALLS = {
    "one query": (2, 2, 4, 1, 300),
    "no group": (1, 3, 1, 5, 77),
    "one key": (2, 1, 2, 3, 1),
    "long": (1, 2, 2, 1, 700),
}
"""(batch, heads of keys, queries' heads for each, queries, keys)."""
SIZES = [(64, 64), (128, 128), (80, 80), (48, 96), (256, 32), (8, 8)]
"""Values of a key, and of a value."""
STORED = [(format, SIZES[0]) for format in FORMATS] + [(f, size) for f in ("mxfp8", "nvfp4") for size in SIZES[1:]]
"""Every format, and every size in codes of whole and of half bytes."""
MASKED = [("one query", "none"), ("one query", "by head"), ("no group", "bool"), ("one key", "added"), ("long", "bool")]
KERNELS = {"triton": triton_attention.KERNEL, "cpu": cpu_attention.KERNEL, "by heads": choose_attention.BY_HEADS}
needs_compiler = pytest.mark.skipif(isinstance(cpu_attention.library(), str), reason="needs a C++ compiler")


def spec(q):
    return Spec("attention", (), (), q.dtype, q.device)


def one_global_scale(shape, format):
    """Quantized random values: a cache has one global scale for all tokens, and a stack one for each matrix."""
    if not get_format(format).global_scale:
        return mx.quantize(torch.randn(shape), format)
    return mx.quantize(torch.randn(math.prod(shape[:-1]), shape[-1]), format).view(shape)


def tokens(shape, format, first=0):
    """(Tokens, their values in float64)."""
    batch, heads, count, size = shape
    first = min(first, count)
    quantized = one_global_scale((batch, heads, count - first, size), format)
    plain = torch.randn(batch, heads, first, size)
    values = torch.cat((plain.double(), quantized.dequantize(torch.float32).double()), 2)
    codes, one = quantized.rowwise, quantized.rowwise.global_scale
    return Tokens(plain, replace(codes, global_scale=None if one is None else one.reshape(-1)[0])), values


def masks(kind, q, count):
    heads, queries = q.shape[1:3]
    if kind == "bool":
        hidden = torch.rand(q.shape[0], 1, queries, count) > 0.3
        hidden[..., 0] = True  # no row without a key
        return hidden
    return {"none": None, "added": torch.randn(queries, count), "by head": torch.randn(1, heads, 1, count)}[kind]


def wanted(q, k, v, args):
    """The definition, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    mask = args.mask if args.mask is None or args.mask.dtype is torch.bool else args.mask.double()
    return F.scaled_dot_product_attention(q.double(), k, v, mask, 0.0, args.causal, scale=args.scale)


def on_device(tokens, device):
    return Tokens(tokens.first.to(device), tokens.codes.map(lambda t: t.to(device)))


@pytest.mark.exhaustive(quick=6)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(("call", "mask"), MASKED)
@pytest.mark.parametrize(("format", "size"), STORED)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.pairs
def test_a_kernel_is_attention_of_the_values(kernel, format, call, size, mask):
    batch, heads, group, queries, count = CALLS[call]
    q = torch.randn(batch, heads * group, queries, size[0])
    (k, k_values), (v, v_values) = (tokens((batch, heads, count, n), format, first=count % 16) for n in size)
    args = AttentionArgs(size[0] ** -0.5, masks(mask, q, count))
    if kernel == "cpu" and isinstance(cpu_attention.library(), str):
        pytest.skip(cpu_attention.library())
    if kernel == "triton":
        pytest.importorskip("triton")
        if max(size) > triton_attention.MOST_VALUES[False]:
            return check_refused(q, k, v, args)
    device = "cuda" if kernel == "triton" and torch.cuda.is_available() else "cpu"
    mask = None if args.mask is None else args.mask.to(device)
    sides = (on_device(side, device) for side in (k, v))
    out = KERNELS[kernel].run(q.to(device), *sides, AttentionArgs(args.scale, mask)).cpu()
    expected = wanted(q, k_values, v_values, args)
    assert out.dtype is q.dtype and (out - expected).abs().max() <= 4e-6 * expected.abs().max()


def check_refused(q, k, v, args):
    with mock.patch.object(triton_launch, "missing", lambda spec: None):
        sentence = triton_attention.KERNEL.refuses(spec(q), q, k, v, args)
    assert sentence == f"is for heads of a multiple of 8 up to 128 values, not {max(k.shape[3], v.shape[3])}"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_once(dtype):
    q = torch.randn(1, 4, 1, 64).to(dtype)
    (k, k_values), (v, v_values) = (tokens((1, 2, 50, 64), "mxfp8", 3) for _ in range(2))
    args = AttentionArgs(0.125)
    out, expected = cpu_attention.run(q, k, v, args), wanted(q, k_values, v_values, args)
    assert out.dtype is dtype
    steps = (out.double() - expected).abs() / torch.finfo(dtype).eps / expected.abs().clamp(min=2**-10)
    assert steps.max() <= 0.51


@needs_compiler
def test_views_of_larger_memory_are_read_where_they_are():
    k, v = (mx.quantize(torch.randn(2, 3, 100, 64), "mxfp4").rowwise for _ in range(2))
    some = [o.map_blocks(lambda t: t.narrow(2, 10, 40), (2, 3, 40, 64)) for o in (k, v)]
    copies = [o.map_blocks(torch.Tensor.contiguous, o.shape) for o in some]
    q, none = torch.randn(2, 6, 2, 64), torch.empty(2, 3, 0, 64)
    results = [cpu_attention.run(q, *(Tokens(none, o) for o in pair), AttentionArgs(0.1)) for pair in (some, copies)]
    assert torch.equal(*results)


@needs_compiler
def test_ranges_of_keys_are_joined(threads):
    q = torch.randn(1, 2, 1, 64) * 3
    (k, k_values), (v, v_values) = (tokens((1, 1, 2000, 64), "mxfp8", 5) for _ in range(2))
    mask = torch.randn(1, 1, 1, 2000) * 10
    mask[..., :700] = -math.inf  # a whole range
    threads(4)
    out = cpu_attention.run(q, k, v, args := AttentionArgs(0.125, mask))
    expected = wanted(q, k_values, v_values, args)
    assert (out - expected).abs().max() <= 4e-6 * expected.abs().max()


@needs_compiler
@pytest.mark.parametrize("setting", ["device", "dtype"])
def test_the_defaults_of_torch_do_not_matter(setting):
    q, mask = torch.randn(1, 4, 2, 64), torch.randn(1, 1, 2, 300)
    (k, _), (v, _) = (tokens((1, 2, 300, 64), "mxfp8", 5) for _ in range(2))
    expected = cpu_attention.run(q, k, v, args := AttentionArgs(0.125, mask))
    change, usual, other = {
        "device": (torch.set_default_device, None, "meta"),
        "dtype": (torch.set_default_dtype, torch.float32, torch.bfloat16),
    }[setting]
    change(other)
    try:
        out = cpu_attention.run(q, k, v, args)
    finally:
        change(usual)
    assert out.device.type == "cpu" and torch.equal(out, expected)


@needs_compiler
def test_a_row_without_keys_is_zero_and_a_nan_stays_one():
    q = torch.randn(1, 1, 2, 32)
    (k, _), (v, _) = (tokens((1, 1, 20, 32), "mxfp8") for _ in range(2))
    mask = torch.ones(1, 1, 2, 20, dtype=torch.bool)
    mask[:, :, 1] = False
    out = cpu_attention.run(q, k, v, AttentionArgs(0.1, mask))
    assert out[0, 0, 0].isfinite().all() and (out[0, 0, 1] == 0).all()
    k.codes.scale[0, 0, 3] = 255
    assert cpu_attention.run(q, k, v, AttentionArgs(0.1)).isnan().all()


def test_memory_holds_the_values_of_some_heads_only(monkeypatch):
    monkeypatch.setattr(choose_attention, "VALUES", 50 * 64)
    decoded = []

    def noted(operand, dtype):
        decoded.append(operand.shape)
        return dequantize_operand(operand, dtype)

    monkeypatch.setattr(choose_attention, "dequantize_operand", noted)
    q = torch.randn(2, 6, 30, 64)
    (k, k_values), (v, v_values) = (tokens((2, 3, 30, 64), "mxfp8", 4) for _ in range(2))
    args = AttentionArgs(0.125, torch.randn(2, 6, 30, 30))
    out = choose_attention.by_heads(q, k, v, args)
    assert {shape[:2] for shape in decoded} == {(1, 1)} and len(decoded) == 12
    expected = wanted(q, k_values, v_values, args)
    assert (out - expected).abs().max() <= 4e-6 * expected.abs().max()
    out = choose_attention.by_heads(q, k, v, causal := AttentionArgs(0.125, None, True))
    assert (out - wanted(q, k_values, v_values, causal)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"queries": 65}, "is for 64 rows"), ({"causal": True, "queries": 2}, "takes a mask"),
        ({"size": 12}, "a multiple of 8"), ({"size": 1024}, "up to 512"), ({"dtype": torch.float64}, "not float64"),
        ({"count": 0}, "no values"), ({"format": "float8_128x128"}, "no decoder"),
    ],
)  # fmt: skip
def test_what_the_kernel_leaves_to_torch(change, sentence):
    call = {"queries": 1, "size": 64, "count": 9, "dtype": torch.float32, "format": "mxfp8", "causal": False} | change
    q = torch.randn(1, 1, call["queries"], call["size"], dtype=call["dtype"])
    shape, none = (1, 1, call["count"], call["size"]), torch.empty(1, 1, 0, call["size"])
    side = Tokens(none, mx.quantize(torch.randn(shape), call["format"]).rowwise)
    args = AttentionArgs(0.1, None, call["causal"])
    assert sentence in cpu_attention.KERNEL.refuses(spec(q), q, side, side, args)
    if call["count"]:
        with mx.explain() as log:
            assert attention(q, side, side, args).shape == q.shape
        assert [e.kernel for e in log.entries if e.spec.op == "attention"] == ["by heads"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None), ({"queries": 65}, "is for 64 rows"), ({"causal": True, "queries": 2}, "takes a mask"),
        ({"size": 12}, "a multiple of 8"), ({"dtype": torch.float64}, "not float64"), ({"count": 0}, "no values"),
        ({"format": "float8_128x128"}, "no decoder"),
    ],
)  # fmt: skip
def test_what_the_kernel_for_devices_takes(change, sentence, triton_anywhere):
    call = {"queries": 1, "size": 64, "count": 9, "dtype": torch.float32, "format": "mxfp8", "causal": False} | change
    q = torch.randn(1, 1, call["queries"], call["size"], dtype=call["dtype"])
    shape, none = (1, 1, call["count"], call["size"]), torch.empty(1, 1, 0, call["size"])
    side = Tokens(none, mx.quantize(torch.randn(shape), call["format"]).rowwise)
    found = triton_attention.KERNEL.refuses(spec(q), q, side, side, AttentionArgs(0.1, None, call["causal"]))
    assert found is sentence is None or sentence in found
    traced = triton_attention.KERNEL.refuses(spec(q)._replace(traced=True), q, side, side, AttentionArgs(0.1))
    assert traced == "being traced: torch's attention of decoded values fuses better"


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_ranges_on_a_device_are_joined_and_masked_rows_are_zero():
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 2, 2, 32)
    (k, k_values), (v, v_values) = (tokens((1, 1, 700, 32), "nvfp4", 5) for _ in range(2))
    mask = torch.randn(1, 1, 2, 700)
    mask[..., :300], mask[:, :, 1] = -math.inf, -math.inf  # a whole range, and a whole row
    args = AttentionArgs(0.2, mask.to(device))
    assert triton_attention.ranges(1, 700, torch.device("cpu")) > 2
    out = triton_attention.run(q.to(device), on_device(k, device), on_device(v, device), args).cpu()
    expected = wanted(q, k_values, v_values, AttentionArgs(0.2, mask))
    assert (out[:, :, 1] == 0).all() and (out - expected)[:, :, 0].abs().max() <= 4e-6 * expected[:, :, 0].abs().max()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names levels of x86")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_other_instruction_sets_give_the_same(level, monkeypatch):
    """With conversions of float16 and without: the vectors of the compiler become narrower ones."""
    if level == "x86-64-v3" and not {"avx2", "fma", "f16c"} <= instruction_sets():
        pytest.skip("this processor has no AVX2")
    flags = tuple(f"-march={level}" if flag == "-march=native" else flag for flag in cpu_attention.FLAGS)
    monkeypatch.setattr(cpu_attention, "FLAGS", flags)
    monkeypatch.setattr(cpu_attention, "library", cache(cpu_attention.library.__wrapped__))
    for format, size in (("mxfp8", 80), ("nvfp4", 64), ("mxfp6", 48), ("mxint8", 64), ("mxfp8_e5m2", 40)):
        q = torch.randn(2, 6, 1, size)
        (k, k_values), (v, v_values) = (tokens((2, 2, 150, size), format, 7) for _ in range(2))
        out, expected = cpu_attention.run(q, k, v, args := AttentionArgs(0.2)), wanted(q, k_values, v_values, args)
        assert (out - expected).abs().max() <= 4e-6 * expected.abs().max()


@needs_compiler
def test_threads_share_heads_and_ranges(threads):
    q = torch.randn(1, 4, 1, 64)
    (k, _), (v, _) = (tokens((1, 2, 3000, 64), "mxfp8", 7) for _ in range(2))
    one = cpu_attention.run(q, k, v, AttentionArgs(0.2))
    threads(3)
    assert torch.allclose(cpu_attention.run(q, k, v, AttentionArgs(0.2)), one, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("format", "size"), [("mxfp8", 128), ("nvfp4", 128), ("mxfp4", 64), ("mxfp6", 80)])
@pytest.mark.parametrize(("queries", "count"), [(1, 5000), (7, 333)])
def test_a_gpu_gives_what_the_definition_gives(format, size, queries, count, dtype):
    """bfloat16 rounds each probability once before it multiplies values, and the result once."""
    q = torch.randn(2, 8, queries, size).to(dtype)
    (k, k_values), (v, v_values) = (tokens((2, 2, count, size), format, first=5) for _ in range(2))
    args = AttentionArgs(size**-0.5, masks("added", q, count).cuda())
    k, v = (on_device(side, "cuda") for side in (k, v))
    assert (
        triton_attention.KERNEL.refuses(Spec("attention", (), (), dtype, torch.device("cuda")), q.cuda(), k, v, args)
        is None
    )
    out = triton_attention.run(q.cuda(), k, v, args).cpu()
    expected = wanted(q, k_values, v_values, AttentionArgs(args.scale, args.mask.cpu()))
    bound = 4e-6 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
    assert out.dtype is dtype and (out - expected).abs().max() <= bound * expected.abs().max()
