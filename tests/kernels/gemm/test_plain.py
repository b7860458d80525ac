"""Products of plain values group by group: the ops of traced graphs, and graphs on a CPU that hold them."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import emulated
from mxtensor.kernels.gemm.spec import GemmArgs

ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_groups_of_rows_meet_their_matrix(dtype):
    x, w = torch.randn(12, 8, dtype=dtype), torch.randn(3, 5, 8, dtype=dtype)
    y = emulated.grouped_mm(x, w, ENDS, GemmArgs(dtype))
    assert torch.equal(y[:3], x[:3] @ w[0].t()) and torch.equal(y[3:10], x[3:10] @ w[2].t()) and not y[10:].any()


def test_groups_of_columns_give_a_matrix_each():
    a, b = torch.randn(4, 12), torch.randn(6, 12)
    y = emulated.grouped_wgrad(a, b, ENDS, GemmArgs(FP32))
    assert torch.equal(y[0], a[:, :3] @ b[:, :3].t()) and torch.equal(y[2], a[:, 3:10] @ b[:, 3:10].t())
    assert y.shape == (3, 4, 6) and not y[1].any()


def test_the_ops_are_what_torch_expects_of_an_op():
    x, w = torch.randn(12, 8), torch.randn(3, 5, 8)
    torch.library.opcheck(emulated.grouped_rows, (x, w, ENDS, FP32))
    torch.library.opcheck(emulated.grouped_columns, (torch.randn(4, 12), torch.randn(6, 12), ENDS, FP32))


def test_a_bias_of_a_traced_product_is_refused():
    assert emulated.why_not_traced(GemmArgs(FP32)) is None
    assert emulated.why_not_traced(GemmArgs(FP32, ENDS, 1, 0)) is None
    for args in (GemmArgs(FP32, torch.ones(5)), GemmArgs(FP32, None, 2.0)):
        assert emulated.why_not_traced(args) == "a traced product of groups takes no alpha and no bias"


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("config", ["mxfp8", "mxfp8-weight-only", "nvfp4"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_compiled_product_by_quantized_experts_is_that_of_eager_code(config, dtype):
    """It reads the codes, also on a CPU, where the graph does not know the ends."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = torch.nn.Parameter(torch.randn(3, 32, 64, dtype=dtype))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 64, 32, dtype=dtype))

        def forward(self, x, ends):
            up = torch.nn.functional.grouped_mm(x, self.up_proj.transpose(1, 2), offs=ends)
            return torch.nn.functional.grouped_mm(up, self.down_proj.transpose(1, 2), offs=ends)

    torch._dynamo.reset()
    model, x = mx.quantize_(Experts(), config), torch.randn(12, 64, dtype=dtype)
    with torch.no_grad(), mx.strict(), mx.explain() as log:
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x, ENDS)
        torch.testing.assert_close(y, model(x, ENDS))
    assert not [entry for entry in log.entries if entry.kernel == "high precision"]
    torch._dynamo.reset()
