"""``w.data = value``: an MXTensor gets other operands, as torch gives a tensor other memory."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mxtensor as mx
from mxtensor.core.dispatch import FUNCTION_TABLE
from tests.helpers.compare import components_of, same_bytes

FORMATS = ["mxfp8", "nvfp4", "float8_row"]


def values(rows=8, cols=64):
    return torch.randn(rows, cols)


def tensor(format="mxfp8", **options):
    return mx.quantize(values(), format, **options)


def pointers(w):
    return [t.data_ptr() for t in components_of(w)]


@pytest.mark.parametrize("make", [tensor, lambda format: values()], ids=["MXTensor", "plain"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_was_swapped_out_comes_back(format, make):
    """The swap of an exponential moving average: evaluate with other weights, then restore."""
    p = nn.Parameter(tensor(format))
    original, average = p.detach().clone(), make(format)
    backup = p.data
    p.data = average
    assert same_bytes(p, average if isinstance(average, mx.MXTensor) else mx.quantize(average, format))
    assert isinstance(p, nn.Parameter) and p.requires_grad
    with torch.no_grad():
        p.mul_(2.0)
    p.data = backup
    assert same_bytes(p, original) and pointers(p) == pointers(backup)


def test_two_layers_share_a_weight():
    a, b = (mx.quantize_(nn.Linear(64, 8), "mxfp8") for _ in range(2))
    recipe = a.weight.recipe
    a.weight.data = b.weight.data
    assert pointers(a.weight) == pointers(b.weight) and a.weight.recipe is recipe
    with torch.no_grad():
        b.weight.mul_(2.0)
        assert same_bytes(a.weight, b.weight)
        a.bias.copy_(b.bias)
        x = torch.randn(3, 64)
        assert torch.equal(a(x), b(x))


def test_format_shape_dtype_strides_and_copies_follow():
    p = nn.Parameter(tensor())
    for value in (
        tensor("nvfp4", orientation="both"),
        mx.quantize(values(16, 32).bfloat16(), "mxfp4"),
        tensor("mxfp8").t(),
        tensor("mxfp8")[2:4],
    ):
        p.data = value
        assert repr(p).replace(", requires_grad=True", "") == repr(value)
        assert (p.shape, p.stride(), p.dtype, p.device) == (value.shape, value.stride(), value.dtype, value.device)
        assert p.format is value.format and pointers(p) == pointers(value)
    p = nn.Parameter(tensor("nvfp4", orientation="both"))
    plain = values(3, 32).bfloat16()
    p.data = plain
    assert same_bytes(p, mx.quantize(plain, "nvfp4", orientation="both"))
    p.sum().backward()
    assert p.grad.shape == (3, 32) and p.grad.dtype is torch.bfloat16


def test_a_view_keeps_what_it_was_a_view_of():
    w = tensor("nvfp4")
    rows, column = w[2:4], w[:, 3]
    before, original = (rows.dequantize(), column.clone()), w.dequantize()
    w.data = tensor("nvfp4")
    assert torch.equal(rows.dequantize(), before[0]) and torch.equal(column, before[1])
    new = w.dequantize()
    rows.fill_(1.0), column.fill_(2.0)
    assert torch.equal(w.dequantize(), new)
    view = (base := tensor())[2:4]
    original = base.dequantize()
    view.data = values(2, 64)
    view.fill_(3.0)
    assert torch.equal(base.dequantize(), original)


def test_values_that_no_format_takes_are_refused_and_change_nothing():
    w = tensor()
    original = w.clone()
    for value, error in ((torch.ones(8, 64, dtype=torch.int64), TypeError), (torch.tensor(3.0), ValueError)):
        with pytest.raises(error, match="cannot quantize a"):
            w.data = value
    assert same_bytes(w, original)


def test_a_vector_of_parameters_and_back():
    a, b = nn.Parameter(tensor("mxfp8")), nn.Parameter(torch.randn(5))
    vector = parameters_to_vector([a, b])
    assert torch.equal(vector, torch.cat([a.dequantize().flatten(), b]))
    new, alias = torch.randn(8 * 64 + 5), a.data
    original = alias.clone()
    vector_to_parameters(new, [a, b])
    assert same_bytes(a, mx.quantize(new[: 8 * 64].view(8, 64), "mxfp8")) and torch.equal(b, new[8 * 64 :])
    assert same_bytes(alias, original)


@pytest.mark.parametrize("flag", ["overwrite_module_params_on_conversion", "swap_module_params_on_conversion", None])
def test_a_module_is_converted_by_each_of_torchs_ways(flag, monkeypatch):
    if flag is not None:
        monkeypatch.setattr(torch.__future__, f"_{flag}", True)
    layer = mx.quantize_(nn.Linear(64, 8), "nvfp4")
    exact = layer.weight.dequantize(torch.float32)
    for convert, dtype in ((layer.half, torch.half), (layer.double, torch.double), (layer.float, torch.float)):
        convert()
        assert isinstance(layer.weight, mx.MXTensor) and layer.weight.dtype is layer.bias.dtype is dtype
        assert torch.equal(layer.weight.dequantize(torch.float32), exact)
    layer.to("meta")
    assert layer.weight.is_meta and isinstance(layer.weight, mx.MXTensor)


def test_tensors_are_swapped():
    a, b = nn.Parameter(tensor("mxfp8")), nn.Parameter(tensor("nvfp4"))
    expected = [b.detach().clone(), a.detach().clone()]
    torch.utils.swap_tensors(a, b)
    assert all(same_bytes(t, e) for t, e in zip((a, b), expected, strict=True))
    plain = nn.Parameter(values())
    torch.utils.swap_tensors(a, plain)
    assert type(a) is nn.Parameter and same_bytes(plain, expected[0])


def test_the_data_of_a_training_weight_is_values():
    layer = mx.quantize_(nn.Linear(64, 32), mx.recipe.MXFP8BlockScaling())
    w = mx.quantize(torch.randn(32, 64), "nvfp4")
    layer.weight.data = w
    assert type(layer.weight.high_precision) is torch.Tensor
    assert torch.equal(layer.weight.high_precision, w.dequantize())


def test_torch_asks_no_rule_where_the_target_is_plain(monkeypatch):
    """Why ``set_data`` has no branch for it. The values of such a tensor must not be read: it has no memory."""
    asked = []
    monkeypatch.setitem(FUNCTION_TABLE, torch.Tensor.data.__set__, lambda *given: asked.append(given))
    target = torch.randn(8, 32)
    target.data = mx.quantize(torch.randn(8, 32), "mxfp8")
    assert asked == [] and type(target) is torch.Tensor
    mx.quantize(torch.randn(8, 32), "mxfp8").data = torch.randn(8, 32)
    assert len(asked) == 1
