"""``w.float()`` and ``w.to(dtype)`` are plain values; ``model.float()`` and ``model.to(dtype)`` keep codes."""

import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.core.compat_hooks import FILLS_MODULES, filler
from mxtensor.te.optimizers import FusedAdam

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
METHODS = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}
TENSOR = {
    "method": lambda w, dtype: getattr(w, METHODS[dtype])(),
    "to": lambda w, dtype: w.to(dtype),
    "to by name": lambda w, dtype: w.to(dtype=dtype, copy=True),
    "to a device": lambda w, dtype: w.to("cpu", dtype),
    "to a tensor": lambda w, dtype: w.to(torch.empty(1, dtype=dtype)),
    "type": lambda w, dtype: w.type(dtype),
    "type_as": lambda w, dtype: w.type_as(torch.empty(1, dtype=dtype)),
    "parameter": lambda w, dtype: nn.Parameter(w, requires_grad=False).to(dtype),
    "view": lambda w, dtype: w.t().to(dtype).t(),
    "part of a block": lambda w, dtype: torch.cat((w[:, :5].to(dtype), w[:, 5:].to(dtype)), 1),
}
MODULE = {
    "method": lambda m, dtype: getattr(m, METHODS[dtype])(),
    "to": lambda m, dtype: m.to(dtype),
    "to a device": lambda m, dtype: m.to("cpu", dtype),
    "to a tensor": lambda m, dtype: m.to(torch.empty(1, dtype=dtype)),
    "type": lambda m, dtype: m.type(dtype),
    "_apply": lambda m, dtype: m._apply(lambda t: t.to(dtype)),
}


def layer(dtype=torch.float32, config="mxfp8-weight-only"):
    torch.manual_seed(0)
    return mx.quantize_(nn.Sequential(nn.Linear(64, 32).to(dtype)).eval(), config)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("outer", FLOATS, ids=str)
@pytest.mark.parametrize("way", TENSOR)
def test_a_converted_tensor_is_plain(way, outer, dtype):
    w = mx.quantize(torch.randn(32, 64).to(outer), "nvfp4")
    found = TENSOR[way](w, dtype)
    assert type(found) is torch.Tensor and found.dtype is dtype
    if way != "part of a block":  # a view of values in the outer dtype
        assert torch.equal(found, w.dequantize(torch.float32).to(dtype))
    found.add_(1)  # and a copy
    assert not torch.equal(found, w.dequantize(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", MODULE)
def test_a_converted_module_stays_quantized(way, dtype):
    model = layer()
    codes = model[0].weight.rowwise.data.view(torch.uint8).clone()
    MODULE[way](model, dtype)
    weight = model[0].weight
    assert isinstance(weight.data, mx.MXTensor) and weight.dtype is model[0].bias.dtype is dtype
    assert torch.equal(weight.rowwise.data.view(torch.uint8), codes)


@pytest.mark.parametrize("context", ["default device", "mode", "swap", "thread", "subclass of Module"])
def test_a_module_is_recognized_inside(context):
    model, done = layer(), []

    class Mine(nn.Sequential):
        def _apply(self, fn, recurse=True):
            return super()._apply(lambda t: fn(t), recurse)

    def convert():
        done.append(model.half())

    if context == "default device":
        with torch.device("cpu"):
            convert()
    elif context == "mode":
        with torch.overrides.BaseTorchFunctionMode():
            convert()
    elif context == "swap":
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            convert()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    elif context == "thread":
        thread = threading.Thread(target=convert)
        thread.start()
        thread.join()
    else:
        model = Mine(*model)
        convert()
    assert isinstance(done[0][0].weight.data, mx.MXTensor) and done[0][0].weight.dtype is torch.float16


def test_the_functions_that_fill_modules_exist():
    for name, home in FILLS_MODULES.items():
        module = pytest.importorskip(home) if not home.startswith("diffusers") else None
        assert module is None or hasattr(getattr(module, "Module", module), name), name
    assert filler() is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", ["method", "to", "to a device", "to a tensor", "type", "type_as"])
def test_compiled(way, dtype):
    torch.compiler.reset()
    w, x = mx.quantize(torch.randn(32, 64), "mxfp8"), torch.randn(4, 64)
    compiled = torch.compile(lambda w: TENSOR[way](w, dtype), fullgraph=True, backend="aot_eager")
    found = compiled(w)
    assert type(found) is torch.Tensor and torch.equal(found, TENSOR[way](w, dtype))
    product = torch.compile(lambda x, w: F.linear(x, w.float()), fullgraph=True, backend="aot_eager")(x, w)
    assert torch.equal(product, F.linear(x, w.dequantize()))


def test_a_gradient_passes():
    w = mx.quantize(torch.randn(32, 64, dtype=torch.bfloat16), "mxfp8").requires_grad_()
    for convert in (lambda: w.float(), lambda: w.to(torch.float64), lambda: w.bfloat16()):
        (grad,) = torch.autograd.grad(convert().square().sum(), w)
        assert grad.dtype is torch.bfloat16 and torch.equal(grad, 2 * w.detach().dequantize())


def test_devices_and_other_arguments_keep_codes():
    w = mx.quantize(torch.randn(32, 64), "mxfp8")
    copies = w.cpu(), w.to("cpu"), w.to("meta"), w.to(device="cpu", dtype=None), w.to("cpu", copy=True), w.contiguous()
    assert all(isinstance(t, mx.MXTensor) for t in copies)
    assert w.with_dtype(torch.float32) is w and w.with_dtype(torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="with_dtype: dtype is 'bfloat16'"):
        w.with_dtype("bfloat16")
    with torch.autocast("cpu", torch.bfloat16), mx.strict():  # an operand of a product keeps its codes
        assert F.linear(torch.randn(4, 64), w).dtype is torch.bfloat16


# ---------------------------------------------------------------------------------------------- weak references


@pytest.mark.parametrize("holder", ["weakref", "export"])
@pytest.mark.parametrize("config", ["mxfp8-weight-only", "nvfp4", "mxfp8[32x32]"])
def test_a_module_is_converted_while_a_weak_reference_lives(config, holder):
    """torch would exchange the parameters, and refuses that; a plain parameter does not mind."""
    model, x = layer(config=config), torch.randn(2, 64)
    weight, bias = model[0].weight, model[0].bias
    weight.mine = 3
    alive = [torch.export.export(model, (x,))] if holder == "export" else [weakref.ref(p) for p in model.parameters()]
    values, reference = weight.dequantize(torch.float32), weakref.ref(weight)
    for way, dtype in ((name, dtype) for name in MODULE if name != "_apply" for dtype in FLOATS):
        MODULE[way](model, dtype)
        assert model[0].weight is weight is reference() and type(weight) is mx.MXTensor and model[0].bias is bias
        assert weight.dtype is bias.dtype is dtype and weight.mine == 3 and isinstance(weight, nn.Parameter)
        assert torch.equal(weight.dequantize(torch.float32), values) and alive
    model.float().cpu().to("cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(x), F.linear(x, values, bias), atol=0.3, rtol=0.3)
        compiled = torch.compile(model, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))
        model.half(), torch.testing.assert_close(compiled(x.half()), model(x.half()))
    torch.export.export(model, (x.half(),))


def test_a_training_weight_is_converted_while_a_weak_reference_lives():
    model, x = layer(config=mx.recipe.MXFP8BlockScaling()).train(), torch.randn(32, 64)
    weight, alive = model[0].weight, [weakref.ref(p) for p in model.parameters()]
    model(x).sum().backward()
    values, kind = weight.high_precision.clone(), type(weight)
    for way, dtype in ((name, dtype) for name in MODULE if name != "_apply" for dtype in FLOATS):
        MODULE[way](model, dtype)
        assert (
            model[0].weight is weight and type(weight) is kind and weight.dtype is weight.grad.dtype is dtype and alive
        )
    model.float()
    assert type(weight) is kind and (weight.high_precision - values).abs().max() < 1e-2
    model(x).sum().backward()


def test_a_parameter_that_trains_keeps_its_gradient():
    model = nn.Sequential(nn.Linear(64, 32))
    model[0].weight = nn.Parameter(mx.quantize(model[0].weight.detach(), "mxfp8"))
    reference, weight = weakref.ref(model[0].weight), model[0].weight
    model(torch.randn(2, 64)).sum().backward()
    grad = weight.grad.clone()
    model.bfloat16()
    assert reference() is weight is model[0].weight and weight.requires_grad and weight.dtype is torch.bfloat16
    assert weight.grad.dtype is torch.bfloat16 and torch.equal(weight.grad, grad.bfloat16())
    model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()


# ---------------------------------------------------------------------------------------------- optimizers


MASTERS = {
    "float": lambda p: p.detach().clone().float(),
    "to": lambda p: p.detach().to(torch.float32, copy=True),
    "to a type": lambda p: p.detach().type(torch.float32),
    "data": lambda p: p.data.float(),
    "promoted": lambda p: p.detach().to(torch.promote_types(p.dtype, torch.float32)),
}


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("way", MASTERS)
def test_a_master_copy_loses_no_update(way, config, outer):
    """Updates that each are far smaller than the rounding of the format."""
    p = nn.Parameter(mx.quantize(torch.rand(32, 64).to(outer) + 1, config))
    master = MASTERS[way](p).requires_grad_()
    assert type(master) is torch.Tensor and master.dtype is torch.float32
    start, optimizer = master.detach().clone(), torch.optim.SGD([master], lr=1e-4)
    for _ in range(1000):
        master.grad = torch.ones_like(master)
        optimizer.step()
        with torch.no_grad():
            p.copy_(master)
    torch.testing.assert_close(master.detach(), start - 0.1, atol=1e-3, rtol=0)
    assert ((p.detach().dequantize(torch.float32) - master).norm() / master.norm()) < 0.15
    assert (p.detach().dequantize(torch.float32).mean() - start.mean() + 0.1).abs() < 0.05


def test_fused_adam_and_a_master_by_hand_train_alike():
    torch.manual_seed(0)
    values, grads = torch.randn(32, 64), [torch.randn(32, 64) for _ in range(20)]
    p, q = (nn.Parameter(mx.quantize(values, "mxfp8")) for _ in range(2))
    master = p.detach().clone().float().requires_grad_()
    by_hand = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.0)
    fused = FusedAdam([q], lr=1e-3, master_weights=True)
    for grad in grads:
        master.grad, q.grad = grad, grad
        by_hand.step(), fused.step()
        p.data.copy_(master.detach())
    torch.testing.assert_close(p.detach().dequantize(), q.detach().dequantize(), atol=0.05, rtol=0.07)
    assert torch.allclose(fused.state[q]["master_param"], master.detach(), atol=1e-5)
