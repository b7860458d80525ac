"""The monitor of training: its figures by hand, what it sees, and that the training does not notice it."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.numerics import reference
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.report.model_report import sqnr_db
from mxtensor.report.monitor import CastStats, Monitor, grid_of, largest_values, measured, sums_of
from mxtensor.training import linear as observe
from tests.helpers.no_sync import no_host_sync

FLOOR = MXFP8BlockScaling(input_scaling="floor", weight_scaling="floor", grad_scaling="floor")
SIX = [(operand, side) for operand in ("input", "weight", "grad") for side in ("rowwise", "columnwise")]


def model(recipe=None, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    return net if recipe is None else mx.quantize_(net, recipe)


def train(net, steps=1, monitor=None, context=None):
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(48, 64, requires_grad=True)
        with context() if context else torch.enable_grad():
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step()
    return losses


# ---------------------------------------------------------------------------------------------- one cast


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("mxfp8_e5m2", "nvfp4_single_level")])
@pytest.mark.parametrize("scaling", ["floor", "rceil"])
def test_sums_by_the_definition(name, scaling):
    cast = Cast.of(name, scaling)
    x = torch.randn(40, 72) * torch.randn(40, 72).exp()
    x[0, 0], x[1, 5] = 0.0, 1e-12
    operand = reference.encode(x, cast)
    stats, values = CastStats.of(sums_of(x, operand).tolist()), reference.decode(operand, torch.float32)
    assert stats.sqnr_db == pytest.approx(sqnr_db(x, values))
    assert stats.underflowed == ((values == 0) & (x != 0)).sum().item() / x.numel() > 0
    most = largest_values(operand)
    assert (values.abs() <= most).all()
    over = (x.abs() > most).sum().item()
    assert stats.saturated == over / x.numel()
    clipped = (x.abs() > most) & (values.abs() < most)
    assert not clipped.any()
    if FORMATS[name].scale.name == "e8m0":
        assert (over > 0) == (scaling == "floor" and FORMATS[name].element.name != "int8") or name == "mxint8"


def test_a_value_above_the_largest_is_saturated_and_a_tiny_one_underflows():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 1.99, 1.0, 1e-9  # FLOOR: the scale is 2^-8, the largest value 448 / 256
    ((side, format, sums),) = measured(x, FLOOR.linear_recipe().input, None, ("rowwise",))
    assert (side, format) == ("rowwise", "mxfp8_e4m3")
    assert sums.tolist()[:3] == [32.0, 1.0, 1.0]
    stats = CastStats.of(sums.tolist())
    assert (stats.saturated, stats.underflowed) == (1 / 32, 1 / 32)
    assert stats.sqnr_db == pytest.approx(10 * math.log10((1.99**2 + 1) / (1.99 - 1.75) ** 2), abs=1e-4)
    assert CastStats.of([0.0] * 5) == (0.0, 0.0, math.inf)


def test_copies_are_those_that_the_layer_casts():
    x = torch.randn(48, 64)
    both = [CastStats.of(sums.tolist()) for _, _, sums in measured(x, MXFP8BlockScaling().linear_recipe().input)]
    by_hand = [sqnr_db(t, mx.quantize(t, "mxfp8").dequantize()) for t in (x, x.t())]
    assert [stats.sqnr_db for stats in both] == pytest.approx(by_hand)
    recipes = MXFP4BlockScaling(), MXFP4BlockScaling(single_weight_copy=True)
    once, twice = (
        [CastStats.of(sums.tolist()).sqnr_db for *_, sums in measured(x, recipe.linear_recipe().weight)]
        for recipe in recipes
    )
    assert once[0] == twice[0] and once[1] > twice[1] + 0.1  # the second copy is rounded twice
    tiles = [sums.tolist() for *_, sums in measured(x, NVFP4BlockScaling().linear_recipe().weight)]
    assert tiles[0] == pytest.approx(tiles[1])


# ---------------------------------------------------------------------------------------------- what it sees


@pytest.mark.parametrize(
    "recipe",
    [MXFP8BlockScaling(), MXFP6BlockScaling(), MXFP4BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling(),
     Float8BlockScaling(), DelayedScaling(amax_history_len=4)],
    ids=lambda recipe: type(recipe).__name__,
)  # fmt: skip
def test_training_does_not_notice_it(recipe):
    expected = train(model(recipe), 4)
    state = torch.get_rng_state()
    net = model(recipe)
    with mx.monitor(net, every=2) as monitor, mx.explain() as log:
        assert train(net, 4, monitor) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert {row.step for row in monitor.history()} == {0, 2} and {row.step for row in monitor.rows()} == {2}
    rows = monitor.rows()
    assert [(row.fqn, row.operand, row.side) for row in rows] == [
        (fqn, *copy) for fqn in ("0.weight", "2.weight") for copy in SIX
    ]
    assert all(8 < row.sqnr_db < 60 and 0 <= row.saturated < 0.2 and 0 <= row.underflowed < 0.5 for row in rows)
    with mx.explain() as alone:
        train(model(recipe), 4)
    assert len(log) == len(alone)


def test_the_figures_are_those_of_the_tensors_of_the_layer():
    net = model(MXFP8BlockScaling())
    seen = {}
    net[2].register_forward_pre_hook(lambda module, args: seen.update(input=args[0].detach()))
    net[2].register_full_backward_hook(lambda module, grads, outs: seen.update(grad=outs[0]))
    seen["weight"] = net[2].weight.detach().clone()
    monitor = mx.monitor(net)
    train(net)
    for row in monitor.rows():
        if row.fqn == "2.weight":
            t = torch.as_tensor(seen[row.operand] if row.side == "rowwise" else seen[row.operand].t())
            assert row.sqnr_db == pytest.approx(sqnr_db(t, mx.quantize(t.contiguous(), "mxfp8").dequantize()), abs=1e-3)


def test_saturation_of_delayed_scaling_is_that_of_the_amax_of_earlier_steps():
    net = model(DelayedScaling(amax_history_len=2))
    monitor = mx.monitor(net, every=1)
    train(net, 3, monitor)
    with torch.no_grad():
        net[0].weight.mul_(8)
    train(net, 1, monitor)
    found = {(row.step, row.operand): row.saturated for row in monitor.history() if row.fqn == "0.weight"}
    assert found[2, "weight"] < 1e-3 and found[3, "weight"] > 0.5


def test_autocast_and_modules_of_transformer_engine():
    plain = model()
    with mx.monitor(plain) as monitor:
        train(plain, context=lambda: mx.autocast(recipe=NVFP4BlockScaling()))
    assert {(row.fqn, row.format) for row in monitor.rows() if row.operand == "grad"} == {
        ("0.weight", "nvfp4"), ("2.weight", "nvfp4")
    }  # fmt: skip
    theirs = nn.Sequential(te.Linear(64, 96), te.LayerNormLinear(96, 32))
    with mx.monitor(theirs) as monitor:
        train(theirs, context=lambda: mx.autocast(recipe=MXFP8BlockScaling()))
    assert [(row.operand, row.side) for row in monitor.rows() if row.fqn == "1.weight"] == SIX


def test_a_quantized_weight_has_no_rows_of_its_own():
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        net = nn.Sequential(te.Linear(64, 96))
    with mx.monitor(net) as monitor:
        train(net, context=lambda: mx.autocast(recipe=MXFP8BlockScaling()))
    assert [(row.operand, row.side) for row in monitor.rows()] == SIX[:2] + SIX[4:]


def test_stacks_and_slices_have_names():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 64, 32) / 8)

        def forward(self, x):
            all_of_them = torch.bmm(x.view(3, 16, 64), self.stack)
            ends = torch.tensor([8, 8, 48], dtype=torch.int32)
            return all_of_them.view(48, 32) + x @ self.stack[1] + torch._grouped_mm(x, self.stack, offs=ends)

    net = Experts().bfloat16()
    monitor = mx.monitor(net)
    with mx.autocast(recipe=MXFP8BlockScaling()):
        net(torch.randn(48, 64, dtype=torch.bfloat16)).float().sum().backward()
    rows = monitor.rows()
    assert {row.fqn for row in rows} == {"stack", "stack[1]"}
    assert [(row.operand, row.side) for row in rows if row.fqn == "stack[1]"] == SIX
    whole = {(row.operand, row.side) for row in rows if row.fqn == "stack"}
    assert whole == set(SIX)
    other = Experts().bfloat16()
    with mx.monitor(other) as none, mx.autocast(recipe=NVFP4BlockScaling()):
        torch.bmm(torch.randn(3, 16, 64, dtype=torch.bfloat16), other.stack).float().sum().backward()
    assert none.rows() == []  # each matrix has a scale of its own


def test_evaluation_another_model_and_steps_in_between_are_not_measured():
    net, other = model(MXFP8BlockScaling()), model(MXFP8BlockScaling())
    with mx.monitor(net, every=3) as monitor:
        with torch.no_grad():
            net(torch.randn(8, 64))
        train(other)
        assert monitor.rows() == [] and str(monitor) == "no layer has trained quantized in a measured step"
        train(net, 5, monitor)
    assert {row.step for row in monitor.history()} == {0, 3}
    train(net, 3, monitor)
    assert {row.step for row in monitor.history()} == {0, 3}


def test_a_step_of_several_passes_adds_them_up():
    net = model(MXFP8BlockScaling())
    monitor = mx.monitor(net)
    x = torch.randn(2, 48, 64)
    for part in x:
        net(part).sum().backward()
    row = monitor.rows()[0]
    noise = sum((part - mx.quantize(part, "mxfp8").dequantize()).double().square().sum().item() for part in x)
    signal = x.double().square().sum().item()
    assert (row.operand, row.side) == ("input", "rowwise")
    assert row.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)


@pytest.mark.exhaustive
def test_it_ends_when_nobody_references_it_and_holds_no_activation():
    net = model(MXFP8BlockScaling())
    gc.collect()
    before = len(observe.OBSERVERS)
    monitor = mx.monitor(net)
    x = torch.randn(48, 64)
    reference = weakref.ref(x)
    y = net(x)
    del x
    gc.collect()
    assert reference() is None and y.requires_grad
    assert len(observe.OBSERVERS) == before + 1
    del monitor
    gc.collect()
    assert len(observe.OBSERVERS) == before
    y.sum().backward()


@pytest.mark.exhaustive
def test_a_compiled_layer_is_not_seen_and_one_forced_to_be_eager_is():
    net = model(MXFP8BlockScaling())
    compiled = torch.compile(net, backend="aot_eager")
    with mx.monitor(net) as monitor:
        train(compiled, 1)
        assert monitor.rows() == []
        with torch.compiler.set_stance("force_eager"):
            train(compiled, 1)
    assert len(monitor.rows()) == 12


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    net = mx.quantize_(model().cuda(), NVFP4BlockScaling())
    x = torch.randn(48, 64, device="cuda")
    net(x).sum().backward()
    with mx.monitor(net, every=1) as monitor, no_host_sync():
        for _ in range(3):
            net(x).sum().backward()
            monitor.step()
    assert len(monitor.history()) == 36


# ---------------------------------------------------------------------------------------------- what it shows


class Writer:
    """What torch's SummaryWriter has, with what was written."""

    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False):
        self.written[tag, global_step] = scalar_value


@pytest.fixture
def monitor():
    net = model(MXFP4BlockScaling())
    with mx.monitor(net, every=2) as found:
        train(net, 5, found)
    return found


def test_the_table_has_a_line_for_each_operand(monitor):
    step, blank, header, rule, *lines = str(monitor).splitlines()
    assert step == "step 4" and blank == "" and set(rule) == {"-", " "}
    assert header.split()[:4] == ["layer", "operand", "format", "rowwise"]
    assert [line.split()[:3] for line in lines] == [
        [name, operand, "mxfp4_e2m1"] for name in ("0", "2") for operand in ("input", "weight", "grad")
    ]
    assert float(lines[0].split()[3]) == pytest.approx(monitor.rows()[0].sqnr_db, abs=0.051)


def test_a_measurement_is_written_once(monitor):
    writer = Writer()
    for _ in range(2):
        monitor.to_tensorboard(writer)
    assert len(writer.written) == 3 * 12
    for row in monitor.rows():
        assert writer.written[f"sqnr_db/{row.fqn}/{row.operand}.{row.side}", 4] == row.sqnr_db
        assert writer.written[f"underflowed/{row.fqn}/{row.operand}.{row.side}", 4] == row.underflowed
    monitor._written = -1
    monitor.to_tensorboard(writer, step=77)
    assert ("saturated/0.weight/input.rowwise", 77) in writer.written
    Monitor(model(), 1).to_tensorboard(writer)


def test_the_heat_map_has_layers_over_steps(monitor, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for row in monitor.history() if (row.operand, row.side) == ("grad", "rowwise")]
    grid = grid_of(rows, "underflowed", ["0.weight", "2.weight"], [0, 2, 4])
    assert grid == [[100 * row.underflowed for row in rows if row.fqn == fqn] for fqn in ("0.weight", "2.weight")]
    for figure in ("sqnr_db", "saturated"):
        path = monitor.plot(tmp_path / "folder" / f"{figure}.png", figure, title="MXFP4")
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_errors(monitor, tmp_path):
    with pytest.raises(ValueError, match="plot: figure is 'error'; choose one of sqnr_db, saturated, underflowed"):
        monitor.plot(tmp_path / "x.png", "error")
    with pytest.raises(ValueError, match="plot: nothing was measured; train a layer with a recipe in eager code"):
        mx.monitor(model()).plot(tmp_path / "x.png")
    with pytest.raises(ValueError, match="every"):
        mx.monitor(model(), every=0)
    with pytest.raises(TypeError, match="model"):
        mx.monitor("model")
