"""Attention of few queries in graphs for a GPU: one op reads keys as the cache stores them."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.kernels.attention import triton_attention
from mxtensor.kernels.attention.triton_attention import attention_of_values
from mxtensor.kernels.runtime import triton_launch

from .test_cpu_decoding import Layer, after_pass, calls, repeat

aten = torch.ops.aten
CUDNN, EFFICIENT, FLASH = (
    getattr(aten, f"_scaled_dot_product_{name}_attention").default for name in ("cudnn", "efficient", "flash")
)
USUAL = {
    "cudnn": lambda q, k, v, mask, **more: CUDNN(q, k, v, mask, False, **more)[0],
    "efficient": lambda q, k, v, mask, **more: EFFICIENT(q, k, v, mask, False, **more)[0],
    "flash": lambda q, k, v, mask, **more: FLASH(q, k, v, **more)[0],
}  # fmt: skip


def passed(f, *inputs):
    """The function as a graph for a GPU, after the pass."""
    with FakeTensorMode():
        fakes = [
            None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for t in inputs
        ]
        return after_pass(make_fx(f)(*fakes))


def cache(dtype=torch.float32, batch=2, heads=6, groups=2, count=80, size=32, out=24, queries=1):
    q = torch.randn(batch, queries, heads, size).transpose(1, 2)
    k, v = torch.randn(batch, groups, count, size), torch.randn(batch, groups, count, out)
    return tuple(t.to(dtype) for t in (q, k, v))


def hiding(batch=2, count=80, dtype=torch.float32):
    """Summands that hide the last keys of each sequence."""
    seen = torch.arange(count) < torch.tensor([[count - 7], [5]])[:batch]
    return torch.zeros(batch, 1, 1, count, dtype=dtype).masked_fill_(~seen[:, None, None], -torch.inf)


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton_launch, "missing", lambda spec: None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", USUAL)
def test_repeated_keys_are_read_once(name, scale, queries, monkeypatch):
    def f(q, k, v, mask):
        summands = None if mask is None else mask.expand(2, 6, queries, 80)
        return USUAL[name](q, repeat(k, 3), repeat(v, 3), summands, scale=scale)

    inputs = *cache(out=32, queries=queries), None if name == "flash" else hiding()
    traced = passed(f, *inputs)
    (call,) = calls(traced, attention_of_values)
    assert [node.op for node in call.args[:3]] == ["placeholder"] * 3  # the repeats are gone
    assert not any(calls(traced, op) for op in (CUDNN, EFFICIENT, FLASH))
    q, k, v, mask = inputs
    monkeypatch.setattr(call, "target", triton_attention.attend)  # the op takes tensors of a GPU
    traced.recompile()
    expected = F.scaled_dot_product_attention(
        q.double(), repeat(k, 3).double(), repeat(v, 3).double(), None if mask is None else mask.double(), scale=scale
    )
    torch.testing.assert_close(traced(*inputs).double(), expected, rtol=1e-5, atol=1e-5)


def test_strides_that_a_graph_takes_for_granted_stay_torchs():
    def f(q, k, v, mask):
        return torch.as_strided(USUAL["cudnn"](q, k, v, mask), (2, 4, 1, 32), (192, 32, 32, 1)).sin()

    traced = passed(f, *cache(groups=6, out=32), None)
    assert len(calls(traced, CUDNN)) == 1 and not calls(traced, attention_of_values)


@pytest.mark.parametrize("what", ["65 queries", "causal", "dropout", "sums are used", "a head of 12"])
def test_other_attention_is_left_to_torch(what):
    def f(q, k, v, mask):
        more = {"is_causal": what == "causal", "dropout_p": 0.1 * (what == "dropout")}
        out, sums, *_ = CUDNN(q, k, v, mask, what == "sums are used", **more)
        return (out, sums) if what == "sums are used" else out

    queries, size = 65 if what == "65 queries" else 4, 12 if what == "a head of 12" else 32
    inputs = *cache(groups=6, size=size, out=size, queries=queries), None
    traced = passed(f, *inputs)
    assert len(calls(traced, CUDNN)) == 1 and not calls(traced, attention_of_values)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("count", [20, 85, 1100, 5000])
@pytest.mark.parametrize("batch", [1, 9])
def test_a_compiled_layer_is_that_of_eager_code(batch, count, mode):
    torch.manual_seed(count)
    torch._dynamo.reset()
    layer = mx.quantize_(Layer().to("cuda", torch.bfloat16), "mxfp4-weight-only")
    place, mask = torch.tensor([5], device="cuda"), (torch.arange(count, device="cuda") < count - 3)[None, None, None]
    caches = [torch.randn(batch, 2, count, 32, device="cuda").bfloat16() for _ in range(2)]
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(batch, 1, 96, device="cuda").bfloat16()
            copies = [t.clone() for t in caches]
            want = layer(x, *caches, place, mask)
            if step == 0:
                out, code = torch._inductor.utils.run_and_get_code(compiled, x, *copies, place, mask)
                assert "torch.ops.aten._scaled_dot_product" not in code[0] and "cuda_attention" in code[0]
            else:
                out = compiled(x, *copies, place, mask)
            torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
            assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
