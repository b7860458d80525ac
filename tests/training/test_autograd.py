"""Gradients: through frozen weights, of quantized parameters, twice, forward, under vmap, hooks and recomputation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from tests.helpers.compare import dequantized, relative_error

FORMATS = ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxfp8[32x32]", "float8_row"]


def model(format="mxfp8-weight-only", dtype=torch.float64):
    """Two linears around a smooth function, weights frozen; in float64 so that a comparison can be tight."""
    out = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)).to(dtype)
    return mx.quantize_(out, format)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_close(got, expected):
    assert got.shape == expected.shape and relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_passes_through_frozen_weights(format):
    module = model(f"{format}-weight-only")
    twin, x, g = dequantized(module), leaf(5, 64), torch.randn(5, 32, dtype=torch.float64)
    (got,) = torch.autograd.grad(module(x), x, g)
    (expected,) = torch.autograd.grad(twin(x), x, g)
    assert_close(got, expected)
    assert module[0].weight.grad is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        module.requires_grad_(False)(x.detach()).backward(g)


def test_gradients_agree_with_finite_differences():
    module = model()
    assert torch.autograd.gradcheck(module, (leaf(2, 64),))
    assert torch.autograd.gradgradcheck(module, (leaf(2, 64),))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_asks_gets_a_plain_gradient(format, bias):
    w = mx.quantize(torch.randn(96, 64, dtype=torch.float64), format).requires_grad_()
    dense, b = w.detach().dequantize().requires_grad_(), leaf(96) if bias else None
    x, g = leaf(2, 5, 64), torch.randn(2, 5, 96, dtype=torch.float64)
    got = torch.autograd.grad(F.linear(x, w, b), (x, w), g)
    expected = torch.autograd.grad(F.linear(x, dense, b), (x, dense), g)
    assert type(got[1]) is torch.Tensor
    for a, e in zip(got, expected, strict=True):
        assert_close(a, e)


def plain(t):
    return t.dequantize() if isinstance(t, mx.MXTensor) else t


OPS = {
    "columns": lambda w: w[:, 3:7],
    "row": lambda w: w[2],
    "rows": lambda w: w[::3],
    "picked": lambda w: w[torch.tensor([3, 3, 0])],
    "dequantize": lambda w: plain(w) + 1,
    "product": lambda w: w * w,
    "norm": lambda w: w.norm(dim=1),
    "cat": lambda w: torch.cat([w, 2 * w]),
    "cat rows": lambda w: torch.cat([w[:3], w[5:]]),
    "transposed": lambda w: w.t().sin(),
    "view": lambda w: w.view(8, -1).cumsum(1),
    "embedding": lambda w: F.embedding(torch.tensor([[1, 2], [2, 0]]), w),
    "float": lambda w: w.float().exp(),
    "pad": lambda w: F.pad(w, (0, 3, 1, 0)),
    "repeat": lambda w: w.repeat(2, 1),
    "stack": lambda w: torch.stack([w, w], 1),
    "matmul": lambda w: w @ plain(w.t()),
    "einsum": lambda w: torch.einsum("ij,kj->ik", plain(w[:4]), w),
    "scaled": lambda w: torch.where(w > 0, w, 0.1 * w),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_every_kind_of_op_has_the_dense_gradient(format, name):
    """A quantized result's loss is that of its values: the gradient treats the rounding as if it were not there."""
    w = mx.quantize(torch.randn(32, 64, dtype=torch.float64), format).requires_grad_()
    dense = w.detach().dequantize().requires_grad_()
    grads = []
    for source in (w, dense):
        out = OPS[name](source)
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
        values = plain(out)
        (values * weight.to(values.dtype)).square().mean().backward()
        grads.append(source.grad)
    assert type(grads[0]) is torch.Tensor
    assert relative_error(*grads) < (1e-6 if name == "float" else 1e-12)


def test_double_backward_through_weight_only():
    module = model()
    twin, x = dequantized(module), leaf(5, 64)
    results = []
    for m in (module, twin):
        (first,) = torch.autograd.grad(m(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append(second)
    assert_close(*results)


class LoRA(nn.Module):
    """A frozen quantized weight and a low-rank update, by hand."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def test_a_low_rank_adapter_learns_beside_a_frozen_weight():
    module = LoRA(mx.quantize_(nn.Linear(64, 32).double(), "mxfp4-weight-only"))
    twin = LoRA(dequantized(module.base))
    twin.down.data.copy_(module.down.data)
    before = module.base.weight.dequantize()
    x, target = torch.randn(40, 64, dtype=torch.float64), torch.randn(40, 32, dtype=torch.float64)
    losses = []
    for m in (module, twin):
        optimizer = torch.optim.Adam([m.down, m.up], lr=0.02)
        for _ in range(60):
            loss = F.mse_loss(m(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[59] < 0.75 * losses[0] and abs(losses[59] - losses[119]) < 1e-9
    assert torch.equal(module.base.weight.dequantize(), before)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["recorded", "reentrant"])
@pytest.mark.parametrize("config", ["mxfp8", "mxfp8-weight-only", "nvfp4"])
def test_recomputation_gives_the_same_gradients(config, use_reentrant):
    module = model(config, torch.float32)
    x, g, grads = torch.randn(5, 64), torch.randn(5, 32), []
    for call in (module, lambda x: checkpoint(module, x, use_reentrant=use_reentrant)):
        source = x.clone().requires_grad_()
        module.zero_grad()
        call(source).backward(g)
        grads.append((source.grad, module[0].bias.grad, module[2].bias.grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b) and a.norm() > 0


# ---------------------------------------------------------------------------------------------- torch.func


def test_functional_call_takes_other_quantized_weights():
    module, x = model(), leaf(5, 64)
    others = {n: p * 2 if not isinstance(p, mx.MXTensor) else mx.quantize(-p, "mxfp4") for n, p in
              module.named_parameters()}  # fmt: skip
    twin = dequantized(module)
    plain = {n: p.dequantize() if isinstance(p, mx.MXTensor) else p for n, p in others.items()}
    assert_close(functional_call(module, others, (x,)), functional_call(twin, plain, (x,)))
    assert_close(module(x), twin(x))


def test_vmap_over_activations():
    module, x = model(), torch.randn(7, 5, 64, dtype=torch.float64)
    assert_close(vmap(module)(x), module(x))
    assert_close(vmap(lambda row: module(row))(x[:, 0]), module(x[:, 0]))
    assert_close(vmap(module, in_dims=1, out_dims=1)(x), module(x))
    assert_close(vmap(lambda a, b: module(a * b), in_dims=(0, None))(x, x[0]), module(x * x[0]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, on its first jvp
def test_grad_and_jacobian_products():
    module = model()
    twin = dequantized(module)
    x, t = torch.randn(5, 64, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
    for transform in (
        lambda m: jvp(m, (x,), (t,))[1],
        lambda m: vjp(m, x)[1](m(x))[0],
        lambda m: grad(lambda x: m(x).square().mean())(x),
        lambda m: vmap(grad(lambda row: m(row).square().mean()))(x),
    ):
        assert_close(transform(module), transform(twin))


# ---------------------------------------------------------------------------------------------- hooks


def test_hooks_see_plain_gradients_and_may_change_them():
    w = nn.Parameter(mx.quantize(torch.randn(32, 64), "mxfp8"))
    seen, x = [], torch.randn(5, 64)
    w.register_hook(lambda g: seen.append(g) or 2 * g)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    y = F.linear(x, w)
    y.retain_grad()
    y.square().mean().backward()
    assert type(seen[0]) is torch.Tensor and seen[1] is w
    assert torch.equal(w.grad, 2 * seen[0]) and relative_error(seen[0], y.grad.t() @ x) < 1e-6


def test_module_hooks_run():
    module, calls = model(dtype=torch.float32), []
    module[0].register_forward_pre_hook(lambda m, args: calls.append("before"))
    module[0].register_forward_hook(lambda m, args, out: calls.append("after") or out * 2)
    module[0].register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    x = torch.randn(5, 64, requires_grad=True)
    module(x).square().mean().backward()
    assert calls == ["before", "after", "backward"] and x.grad.norm() > 0


def test_gradients_accumulate_over_micro_batches():
    w = nn.Parameter(mx.quantize(torch.randn(32, 64, dtype=torch.float64), "mxfp8"))
    x = torch.randn(8, 64, dtype=torch.float64)
    F.linear(x, w).square().sum().backward()
    whole, w.grad = w.grad, None
    for rows in x.split(2):
        F.linear(rows, w).square().sum().backward()
    assert_close(w.grad, whole)


def test_a_saved_weight_that_is_written_is_noticed():
    w = nn.Parameter(mx.quantize(torch.randn(32, 64), "mxfp8"))
    y = w * w
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().mean().backward()
