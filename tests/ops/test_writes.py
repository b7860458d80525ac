"""Writing to an MXTensor: the dense op on its values, quantized again into the existing buffers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mxtensor as mx
from mxtensor.numerics.reference import decode
from tests.helpers.compare import components_of, same_bytes

ROWS, COLS = 32, 64
FORMATS = ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxfp8[32x32]", "float8_row", "float8_tensor"]
X = torch.linspace(-2, 3, ROWS * COLS).sin().view(ROWS, COLS)
INDEX = torch.tensor([3, 0, 7])
MASK = X > 0.2
SCATTERED = torch.arange(3 * COLS).view(3, COLS) % ROWS

RETURNING = {
    "add_": lambda w: w.add_(X, alpha=0.5),
    "add_ scalar": lambda w: w.add_(1.5),
    "sub_": lambda w: w.sub_(X),
    "mul_": lambda w: w.mul_(X),
    "div_": lambda w: w.div_(3.0),
    "neg_": lambda w: w.neg_(),
    "pow_": lambda w: w.pow_(2),
    "addcmul_": lambda w: w.addcmul_(X, X, value=0.1),
    "addcdiv_": lambda w: w.addcdiv_(X, X.abs() + 1, value=-0.1),
    "lerp_": lambda w: w.lerp_(X, 0.25),
    "copy_": lambda w: w.copy_(X),
    "copy_ row": lambda w: w.copy_(X[0]),
    "fill_": lambda w: w.fill_(2.5),
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: w.normal_(0.5, 2.0, generator=torch.Generator().manual_seed(3)),
    "uniform_": lambda w: w.uniform_(-1, 2, generator=torch.Generator().manual_seed(3)),
    "clamp_": lambda w: w.clamp_(-0.5, 0.75),
    "clamp_ tensor": lambda w: w.clamp_(max=X),
    "masked_fill_": lambda w: w.masked_fill_(MASK, 1.25),
    "index_fill_": lambda w: w.index_fill_(0, INDEX, 3.0),
    "index_copy_": lambda w: w.index_copy_(0, INDEX, X[10:13]),
    "index_add_": lambda w: w.index_add_(0, INDEX, X[10:13], alpha=2),
    "index_put_": lambda w: w.index_put_((INDEX, INDEX), X[0, :3], accumulate=True),
    "scatter_": lambda w: w.scatter_(0, SCATTERED, X[:3]),
    "scatter_add_": lambda w: w.scatter_add_(0, SCATTERED, X[:3]),
    "masked_scatter_": lambda w: w.masked_scatter_(MASK, X),
    "relu_": lambda w: w.relu_(),
    "tril_": lambda w: w.tril_(),
    "addmm_": lambda w: w.addmm_(X[:, :8], X[:8]),
    "kaiming_": lambda w: nn.init.constant_(w, 0.3),
    "apply_": lambda w: w.apply_(math.cos),
    "map_": lambda w: w.map_(X, math.copysign),
    "map2_": lambda w: w.map2_(X, X * 2, lambda a, b, c: a + b * c),
}  # fmt: skip


def assign(index, value):
    def op(w):
        w[index] = value

    return op


SETITEM = {
    "w[3]": assign(3, 1.0),
    "w[:]": assign(slice(None), X),
    "w[4:9]": assign(slice(4, 9), X[4:9]),
    "w[:, 5]": assign((slice(None), 5), 2.0),
    "w[2:7, 3:40]": assign((slice(2, 7), slice(3, 40)), X[2:7, 3:40]),
    "w[1, 2]": assign((1, 2), -3.0),
    "w[tensor]": assign(INDEX, X[:3]),
    "w[mask]": assign(MASK, 0.0),
    "w[None]": assign(None, X[None]),
    "w[...]": assign(..., 0.5),
    "w[::2]": assign(slice(None, None, 2), X[::2]),
}
FOREACH = {
    "_foreach_add_": lambda ws: torch._foreach_add_(ws, [X] * len(ws), alpha=0.5),
    "_foreach_mul_": lambda ws: torch._foreach_mul_(ws, 0.5),
    "_foreach_addcdiv_": lambda ws: torch._foreach_addcdiv_(ws, [X] * len(ws), [X.abs() + 1] * len(ws), -0.1),
    "_foreach_lerp_": lambda ws: torch._foreach_lerp_(ws, [X] * len(ws), 0.25),
    "_foreach_copy_": lambda ws: torch._foreach_copy_(ws, [X] * len(ws)),
    "_foreach_zero_": lambda ws: torch._foreach_zero_(ws),
}


def state(ws):
    return [torch.zeros(ROWS, COLS) for _ in ws], [torch.zeros(ROWS, COLS) for _ in ws]


def fused_sgd(ws):
    torch._fused_sgd_(ws, [X] * len(ws), [], weight_decay=0.1, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False,
                      maximize=False, is_first_step=True)  # fmt: skip


def fused_adamw(ws):
    steps = [torch.tensor(1.0) for _ in ws]
    torch._fused_adamw_(ws, [X] * len(ws), *state(ws), [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1,
                        eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip


FOREACH |= {"_fused_sgd_": fused_sgd, "_fused_adamw_": fused_adamw}


def orientations(format):
    return ["rowwise"] if mx.get_format(format).square else ["rowwise", "columnwise", "both"]


def assert_written(w, op, dense_op=None):
    """``op(w)`` leaves what quantizing the dense result gives, in the same memory; returns what ``op`` returned."""
    dense, before = w.dequantize(), (repr(w), w.stride(), [t.data_ptr() for t in components_of(w)])
    with mx.explain() as log:
        result = op(w)
    (dense_op or op)(dense)
    assert (repr(w), w.stride(), [t.data_ptr() for t in components_of(w)]) == before
    assert same_bytes(w, mx.quantize(dense, w.format, orientation=w.orientation))
    return result, log


@pytest.mark.parametrize("name", [*RETURNING, *SETITEM])
@pytest.mark.parametrize("format", FORMATS)
def test_a_write_is_the_dense_op_quantized_again(format, name):
    for orientation in orientations(format):
        w = mx.quantize(torch.randn(ROWS, COLS), format, orientation=orientation)
        if name in RETURNING:
            result, _ = assert_written(w, RETURNING[name])
            assert result is w
        else:  # blocks that are not written have their old codes, so that values are compared
            dense, pointers = w.dequantize(), [t.data_ptr() for t in components_of(w)]
            SETITEM[name](w), SETITEM[name](dense)
            expected = mx.quantize(dense, format, orientation=orientation)
            for got, values in zip(w.operands, expected.operands, strict=True):
                assert torch.equal(decode(got, w.dtype), decode(values, w.dtype))
            assert [t.data_ptr() for t in components_of(w)] == pointers


@pytest.mark.parametrize("name", FOREACH)
@pytest.mark.parametrize("format", FORMATS)
def test_a_list_of_tensors_is_written_like_each(format, name):
    ws = [mx.quantize(torch.randn(ROWS, COLS), format, orientation=o) for o in orientations(format)]
    dense = [w.dequantize() for w in ws]
    plain = torch.randn(ROWS, COLS)
    twin = plain.clone()
    pointers = [[t.data_ptr() for t in components_of(w)] for w in ws]
    FOREACH[name]([*ws, plain]), FOREACH[name]([*dense, twin])
    assert torch.equal(plain, twin)  # a plain tensor in the list is written as it is
    for w, values, before in zip(ws, dense, pointers, strict=True):
        assert same_bytes(w, mx.quantize(values, format, orientation=w.orientation))
        assert [t.data_ptr() for t in components_of(w)] == before


@pytest.mark.parametrize("name", FOREACH)
def test_torch_counts_a_write_to_a_list_of_tensors(name):
    """A backward pass that has saved a tensor sees that it has changed, as with plain tensors."""
    whole = mx.quantize(torch.randn(ROWS, COLS), "mxfp8")
    cut = mx.quantize(torch.randn(ROWS + 3, COLS + 1), "mxfp8")[3:, 1:]  # it cuts blocks
    for w in (whole, cut):
        before = w._version
        FOREACH[name]([X.clone(), w])
        assert w._version > before


def test_writes_are_logged_and_refused_under_strict():
    w = mx.quantize(X, "mxfp8")
    _, log = assert_written(w, lambda w: w.add_(1.0))
    assert [(e.spec.op, e.kernel, e.refusals) for e in log.entries if e.kernel == "requantized"] == [
        ("aten.add_.Tensor", "requantized", {"quantized": "writes values"})
    ]
    with (
        mx.strict(),
        pytest.raises(NotImplementedError, match=r"aten\.add_\.Tensor would dequantize \(writes values\)"),
    ):
        w.add_(1.0)
    with mx.strict():
        w.copy_(X)  # a cast is what a copy into a quantized tensor means


def test_an_out_argument_is_written():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8", orientation="both")
    assert torch.add(X, 1.0, out=w) is w
    assert same_bytes(w, mx.quantize(X + 1, "mxfp8", orientation="both"))


@pytest.mark.parametrize("rows", [slice(3, 9), slice(0, 32), slice(1, 30, 4), 5], ids=str)
@pytest.mark.parametrize("orientation", ["rowwise", "both"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_row", "float8_tensor"])
def test_a_write_to_a_view_reaches_all_of_its_base(format, orientation, rows):
    """Also if a view lacks the second copy, or shares its scale with values outside it."""
    for op in (
        lambda v: v.mul_(100.0),
        lambda v: v.copy_(X[-1]),
        lambda v: v[..., 3:5].fill_(0.0),
        lambda v: v.zero_(),
    ):
        w = mx.quantize(torch.randn(ROWS, COLS), format, orientation=orientation)
        dense, pointers = w.dequantize(), [t.data_ptr() for t in components_of(w)]
        view, plain = w[rows], dense[rows]
        if op(view) is not view:
            continue  # a plain copy took the write
        op(plain)
        expected = mx.quantize(dense, format, orientation=orientation)
        assert torch.equal(w.dequantize(), expected.dequantize())
        if len(w.operands) == 2:
            assert torch.equal(w.t().dequantize(), expected.t().dequantize())
            assert torch.equal(w._columnwise.data.view(torch.uint8), expected._columnwise.data.view(torch.uint8))
        assert torch.equal(view.dequantize(), w[rows].dequantize())
        assert [t.data_ptr() for t in components_of(w)] == pointers


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_bytes_copied_into_a_view_keep_the_scale_of_its_base(format):
    w, other = mx.quantize(torch.randn(ROWS, COLS), format), mx.quantize(50 * torch.randn(4, COLS), format)
    dense = w.dequantize()
    w[2:6].copy_(other)
    dense[2:6] = other.dequantize()
    assert torch.equal(w.dequantize(), mx.quantize(dense, format).dequantize())


def test_chains_of_views_and_transposes_write_through():
    w = mx.quantize(torch.randn(ROWS, COLS), "nvfp4", orientation="both")
    dense = w.dequantize()
    w.t()[:, 3:20][:, 2:4].add_(1.0)
    dense[5:7] += 1
    assert same_bytes(w, mx.quantize(dense, "nvfp4", orientation="both"))
    first, second = w.split(16)
    first.mul_(2.0)
    assert torch.equal(second.dequantize(), w[16:].dequantize())
    with torch.no_grad():
        p = nn.Parameter(w)
        p[4] = 1.0
    assert torch.equal(p[4].detach().dequantize(), w[4].dequantize())


# ---------------------------------------------------------------------------------------------- training


def train(optimizer, steps=60, rounding="nearest", format="mxfp8", dtype=torch.float32, **options):
    """First and last loss of a two-layer model whose weights are MXTensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(dtype)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(mx.quantize(layer.weight, format, rounding=rounding))
    step = optimizer(model.parameters(), **options)
    x, target = torch.randn(64, 64, dtype=dtype), torch.randn(64, 32, dtype=dtype)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert isinstance(model[0].weight, mx.MXTensor) and isinstance(model[0].weight, nn.Parameter)
    return losses[0], losses[-1]


OPTIM = torch.optim
TRAINING = [
    ("SGD", dict(lr=0.1, momentum=0.9, foreach=False), 1.5),
    ("SGD", dict(lr=0.1, momentum=0.9, foreach=True), 1.5),
    ("SGD", dict(lr=0.1, momentum=0.9, fused=True), 1.5),
    ("Adam", dict(lr=0.01, foreach=False), 20),
    ("Adam", dict(lr=0.01, foreach=True), 20),
    ("AdamW", dict(lr=0.01, foreach=False), 20),
    ("AdamW", dict(lr=0.01, foreach=True), 20),
    ("AdamW", dict(lr=0.01, fused=True), 20),
    ("RMSprop", dict(lr=0.003), 5),
    ("Adafactor", dict(lr=0.05), 5),
]


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize(
    ("name", "options", "learning_rate"), TRAINING, ids=[f"{n}-{sorted(o)}" for n, o, _ in TRAINING]
)
def test_an_optimizer_trains_a_quantized_parameter(name, options, learning_rate):
    first, last = train(getattr(OPTIM, name), **options)
    assert last < first / learning_rate


def test_training_in_bfloat16_and_in_four_bits():
    first, last = train(OPTIM.AdamW, lr=0.01, dtype=torch.bfloat16)
    assert last < first / 20
    first, last = train(OPTIM.AdamW, lr=0.01, format="mxfp4", rounding="stochastic")
    assert last < first / 2


@pytest.mark.exhaustive
def test_a_small_step_is_lost_to_nearest_rounding_and_survives_stochastic():
    """A step of 1e-4 is far less than the gap between two codes: rounded to the nearest it never happened."""
    _, nearest = train(OPTIM.AdamW, steps=200, lr=1e-4)
    _, stochastic = train(OPTIM.AdamW, steps=200, rounding="stochastic", lr=1e-4)
    assert nearest > 1.05 and stochastic < 0.8


def test_an_average_of_models():
    model = mx.quantize_(nn.Linear(64, 32), "mxfp8")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)
    expected = model.weight.dequantize()
    with torch.no_grad():
        model.weight.add_(1.0), model.bias.add_(1.0)
    average.update_parameters(model)
    expected = expected + (model.weight.dequantize() - expected) * 0.25
    got = average.module.weight
    assert isinstance(got, mx.MXTensor) and torch.equal(got.dequantize(), mx.quantize(expected, "mxfp8").dequantize())


# ---------------------------------------------------------------------------------------------- stochastic rounding


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e3m2", "mxint8", "nvfp4", "float8_row"])
def test_stochastic_rounding_draws_a_neighbour_and_is_right_on_average(format):
    """With n draws of a two-valued variable of spread gap, the mean errs by at most gap / (2 sqrt n) per deviation."""
    n, x = 400, torch.randn(16, 64)
    draws = torch.stack([mx.quantize(x, format, rounding="stochastic").dequantize() for _ in range(n)]).double()
    low, high = draws.amin(0), draws.amax(0)
    assert ((draws == low) | (draws == high)).all()  # two values at most
    nearest = mx.quantize(x, format).dequantize().double()
    assert ((nearest == low) | (nearest == high)).double().mean() > 0.98  # a rare neighbour may not be drawn
    saturated = x.abs() >= draws.abs().amax(0)
    drawn = (high > low) & ~saturated
    assert drawn.double().mean() > 0.75
    error, gap = (draws.mean(0) - x)[drawn], (high - low)[drawn]
    assert (error.abs() <= 5 * gap / (2 * math.sqrt(n)) + 1e-9).all()
    standard_error = gap.square().sum().sqrt() / (2 * math.sqrt(n) * gap.numel())
    assert error.mean().abs() < 4 * standard_error


def test_stochastic_rounding_follows_the_seed():
    x = torch.randn(300, 256)  # large enough for the sliced kernel
    tensors = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        tensors.append(mx.quantize(x, "mxfp4", rounding="stochastic"))
    assert same_bytes(tensors[0], tensors[1]) and not same_bytes(tensors[0], tensors[2])
    assert same_bytes(mx.quantize(x, "mxfp4"), mx.quantize(x, "mxfp4"))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6_e2m3", "mxfp4", "mxint8"])
def test_values_of_the_format_are_not_moved_by_stochastic_rounding(format):
    w = mx.quantize(torch.randn(64, 64), format)
    assert torch.equal(mx.quantize(w, format, rounding="stochastic").dequantize(), w.dequantize())
    target = mx.quantize(torch.randn(64, 64), format, rounding="stochastic")
    values = target.dequantize()
    target[3:5] += 0.3
    assert torch.equal(target.dequantize()[5:], values[5:]) and not torch.equal(target.dequantize()[3:5], values[3:5])
