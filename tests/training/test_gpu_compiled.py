"""Compiled steps and products on a GPU: right in each step, whatever was in memory, for every number of rows."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.kernels.gemm import cublas
from mxtensor.kernels.quantize import hadamard, triton_common
from mxtensor.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
BF16 = torch.bfloat16


class Blocks(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        return x


def poisoned():
    """Fill memory that is free with NaN, so that who reads it gives NaN."""
    gc.collect()
    torch.cuda.synchronize()
    for size in (1 << 12, 1 << 20, 1 << 24, 1 << 26):
        buffers = [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
        del buffers


def steps(model, run, x, target, count, autocast):
    """Losses and gradients of some steps of SGD."""
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(count):
        poisoned()
        with torch.autocast("cuda", BF16, enabled=autocast):
            loss = F.mse_loss(run(x).float(), target)
        loss.backward()
        out += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return out


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("rows, width, layers", [(1024, 2048, 3), (96, 256, 2)])
def test_compiled_steps_of_layers_of_one_kind_are_those_of_eager_code(rows, width, layers, dtype, recipe):
    with torch.device("cuda"):
        model = mx.quantize_(Blocks(width, layers).to(dtype), recipe())
        x, target = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width)
    twin = copy.deepcopy(model)
    torch.cuda.manual_seed(0)
    ours = steps(model, torch.compile(model), x, target, 4, dtype is torch.float32)
    torch.cuda.manual_seed(0)
    eager = steps(twin, twin, x, target, 4, dtype is torch.float32)
    for mine, other in zip(ours, eager, strict=True):
        assert torch.isfinite(mine).all()
        # The compiler computes norms and activations in another order, so that codes differ, and gradients of later
        # steps by more; stochastic rounding draws other numbers.
        assert (mine.float() - other.float()).norm() <= (0.5 if recipe is NVFP4BlockScaling else 0.15) * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_compiled_step_of_any_number_of_rows_has_one_graph_and_the_gradients_of_eager_code(dtype):
    with torch.device("cuda"):
        model = mx.quantize_(
            nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)).to(dtype), MXFP8BlockScaling()
        )
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for rows in (64, 1, 300, 4096, 17, 64):
        x, grad = torch.randn(rows, 512, device="cuda", dtype=dtype), torch.randn(rows, 512, device="cuda", dtype=BF16)
        found = []
        for run in (compiled, model):
            poisoned()
            model.zero_grad()
            with torch.autocast("cuda", BF16, enabled=dtype is torch.float32):
                y = run(leaf := x.clone().requires_grad_())
            y.backward(grad)
            found.append([y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())])
        for mine, other in zip(*found, strict=True):
            assert (mine.float() - other.float()).norm() <= 5e-3 * other.float().norm(), rows  # bfloat16
    assert counter.frame_count <= 2  # one row is a graph of its own


@pytest.mark.parametrize(
    "format", ["mxfp8", "mxfp8-weight-only", "mxfp4", "mxfp4-weight-only", "mxfp6", "nvfp4", "float8_row"]
)
def test_a_compiled_product_of_any_number_of_rows_has_one_graph_and_the_bits_of_eager_code(format):
    with torch.device("cuda"):
        model = mx.quantize_(nn.Sequential(nn.Linear(1024, 1536), nn.Linear(1536, 1024, bias=False)).to(BF16), format)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for rows in (64, 1, 300, 4096, 17, 128, 32, 2, 64):
            x = torch.randn(rows, 1024, device="cuda", dtype=BF16)
            poisoned()
            assert torch.equal(compiled(x), model(x)), rows
    assert counter.frame_count <= 3  # the first size, one row, and all others


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling])
def test_what_a_first_call_caches_is_not_in_the_memory_of_a_cuda_graph(recipe):
    """A constant of cuBLAS, zeros for amaxes, a rotation: torch refuses a graph whose memory they would be in."""
    cublas._constants.clear()
    triton_common._zeros.clear()
    hadamard._cached_matrix.cache_clear()
    with torch.device("cuda"):
        model, x = mx.quantize_(Blocks(256, 1).bfloat16(), recipe()), torch.randn(64, 256, dtype=BF16)
    compiled, losses = torch.compile(model, mode="reduce-overhead"), []
    for _ in range(4):
        model.zero_grad()  # gradients are in the memory of the graph, which the next step writes again
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        poisoned()
    assert max(losses) - min(losses) <= 1e-2 * losses[0]
