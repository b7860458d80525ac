"""Graphs with quantized products on a CPU: products of one input are one call, attention reads a cache once."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.compile.graph import CPU_ONE, CPU_SHARED
from mxtensor.compile.inference_options import Products
from mxtensor.kernels.attention.cpu_attention import attention_of_values
from mxtensor.kernels.gemm.cpu_codes import numbers_of
from mxtensor.kernels.runtime import native_build

pytestmark = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
USUAL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CAST = (*numbers_of(mx.quantize(torch.randn(1, 32), "mxfp8").rowwise.format), 0, 0, 1)


def passed(f, *inputs):
    """The traced function after the pass."""
    return after_pass(make_fx(f, tracing_mode="fake")(*inputs))


def after_pass(traced):
    Products()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def calls(traced, op):
    return traced.graph.find_nodes(op="call_function", target=op)


# ---------------------------------------------------------------------------------------------- products


def one(x, w, bias=None, cast=()):
    return CPU_ONE(x, w[0], w[1], w[2], None, bias, w[3], 1.0, 1.0, x.dtype, cast, 0.0)


def weights(*rows, format="mxfp4", k=96):
    made = [mx.quantize(torch.randn(n, k), format).rowwise for n in rows]
    return [(w.data, w.scale, w.global_scale, numbers_of(w.format)) for w in made]


@pytest.mark.parametrize("cast", [(), CAST], ids=["plain", "cast"])
@pytest.mark.parametrize("rows", [1, 3, 33, 60])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "mxint8"])
def test_products_of_one_input_are_one_call_with_the_same_bits(format, rows, cast):
    def attention(x, q, k, v, bias):
        y = x.reshape(-1, 96)
        return one(y, q, cast=cast).sin(), one(x.reshape(-1, 96), k, cast=cast), one(y, v, bias, cast)

    x = torch.randn(rows, 96).bfloat16()
    inputs = x, *weights(70, 16, 33, format=format), torch.randn(33).bfloat16()
    traced = passed(attention, *inputs)
    assert not calls(traced, CPU_ONE) and [len(node.kwargs["data"]) for node in calls(traced, CPU_SHARED)] == [3]
    for y, expected in zip(traced(*inputs), attention(*inputs), strict=True):
        assert torch.equal(y, expected)


def test_products_of_other_inputs_or_casts_are_not_merged():
    def f(x, z, q, k):
        return one(x, q), one(z, k), one(x, k, cast=CAST)

    inputs = torch.randn(2, 96), torch.randn(2, 96), *weights(16, 16)
    assert len(calls(passed(f, *inputs), CPU_ONE)) == 3


def test_lists_of_unequal_length_are_refused():
    (data, scale, global_scale, numbers), _ = weights(16, 16)
    with pytest.raises(ValueError, match="2 weights need as many scales"):
        CPU_SHARED(torch.randn(1, 96), [data] * 2, [scale], [global_scale], None, [None], numbers, 1.0, 1.0,
                   torch.float32, (), 0.0)  # fmt: skip


# ---------------------------------------------------------------------------------------------- attention


def repeat(x, times):
    batch, heads, count, size = x.shape
    return x.unsqueeze(2).expand(batch, heads, times, count, size).reshape(batch, heads * times, count, size)


def cache(queries=1, heads=6, groups=2):
    return torch.randn(2, heads, queries, 32), *(torch.randn(2, groups, 80, 32) for _ in range(2))


@pytest.mark.parametrize("queries", [1, 8])
def test_repeated_keys_are_read_once(queries):
    def f(q, k, v, mask):
        return F.scaled_dot_product_attention(q, repeat(k, 3), repeat(v, 3), attn_mask=mask, scale=0.3)

    inputs = *cache(queries), torch.rand(2, 1, queries, 80) < 0.8
    traced = passed(f, *inputs)
    (call,) = calls(traced, attention_of_values)
    assert [node.op for node in call.args[:3]] == ["placeholder"] * 3  # the repeats are gone
    assert not calls(traced, USUAL)
    torch.testing.assert_close(traced(*inputs), f(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiler_and_not_each_call_converts_a_mask(dtype):
    def f(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask * 2)

    inputs = *(t.to(dtype) for t in cache(groups=6)), torch.randn(2, 1, 1, 80, dtype=dtype)
    traced = passed(f, *inputs)
    (call,) = calls(traced, attention_of_values)
    assert call.args[3].meta["val"].dtype is torch.float32
    assert len(calls(traced, torch.ops.prims.convert_element_type.default)) == (dtype is torch.bfloat16)
    expected = attention_of_values(*inputs[:3], inputs[3] * 2, 32**-0.5)
    assert torch.equal(traced(*inputs), expected)


def test_keys_with_a_head_for_each_query_head_stay_as_they_are():
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k * 2, v)

    inputs = cache(groups=6)
    traced = passed(f, *inputs)
    assert len(calls(traced, attention_of_values)) == 1
    torch.testing.assert_close(traced(*inputs), f(*inputs))


def _causal(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4], is_causal=True)


def _with_sums(q, k, v):
    return USUAL(q, k, v)


def _doubles(q, k, v):
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()


@pytest.mark.parametrize(
    ("f", "queries"), [(F.scaled_dot_product_attention, 9), (_causal, 4), (_with_sums, 1), (_doubles, 1)],
    ids=["many queries", "causal", "sums are used", "float64"],
)  # fmt: skip
def test_other_attention_is_left_to_torch(f, queries):
    inputs = cache(queries, groups=6)
    traced = passed(lambda *given: f(*given), *inputs)
    assert not calls(traced, attention_of_values) and len(calls(traced, USUAL)) == 1


class Layer(nn.Module):
    """Attention of one token over a static cache."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(96, n, bias=False) for n in (192, 64, 64))
        self.o = nn.Linear(192, 96, bias=False)

    def forward(self, x, keys, values, place, mask):
        batch = x.shape[0]
        q = self.q(x).view(batch, 1, 6, 32).transpose(1, 2)
        k, v = (f(x).view(batch, 1, 2, 32).transpose(1, 2) for f in (self.k, self.v))
        keys.index_copy_(2, place, k), values.index_copy_(2, place, v)
        out = F.scaled_dot_product_attention(q, repeat(keys, 3), repeat(values, 3), attn_mask=mask)
        return self.o(out.transpose(1, 2).reshape(batch, 1, 192))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, on itself
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_decoding_is_that_of_eager_code(dtype):
    layer = mx.quantize_(Layer().to(dtype), "mxfp4-weight-only")
    place, mask = torch.tensor([5]), (torch.arange(80) < 6)[None, None, None]
    x, *caches = torch.randn(2, 1, 96).to(dtype), *(torch.randn(2, 2, 80, 32).to(dtype) for _ in range(2))
    copies = [t.clone() for t in caches]
    with torch.no_grad():
        want = layer(x, *caches, place, mask)
        out, code = torch._inductor.utils.run_and_get_code(
            torch.compile(layer, fullgraph=True), x, *copies, place, mask
        )
    torch.testing.assert_close(out, want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
    assert code[0].count("cpu_linear_shared.default(") == 1 and code[0].count("cpu_linear.default(") == 1
    assert code[0].count("cpu_attention.default(") == 1 and "assert_size_stride(arg" not in code[0]


@pytest.mark.exhaustive
def test_a_new_process_has_the_ops_of_graphs_from_torchs_cache():
    names = "cpu_linear", "cpu_linear_shared", "cpu_attention"
    code = f"import torch, mxtensor; [getattr(torch.ops.mxtensor, name).default for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True)
