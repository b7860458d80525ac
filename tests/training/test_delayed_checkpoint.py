"""Histories of delayed scaling in state dicts: training that is restored is bitwise training that went on."""

import copy
import io
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.training.delayed_scaling import STATE, delayed_states
from mxtensor.training.state_dict import MAGIC, packed, unpacked

RECIPE = mx.recipe.DelayedScaling(amax_history_len=4)


class Net(nn.Module):
    """Every kind of layer: linear, tied, cross attention, whose weight serves two layers, and a transposed weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.tied = nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied.weight = self.inner.weight
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.out = nn.Linear(64, 32)

    def forward(self, x, memory):
        h = self.tied(self.inner(x).relu())
        h = h + self.attention(h, memory, memory, need_weights=False)[0]
        return self.out(h)


def net(recipe=RECIPE, seed=1):
    torch.manual_seed(seed)
    return mx.quantize_(Net(), recipe) if recipe else Net()


def trained(model, steps, optimizer=None):
    """The losses of these steps; the data of a step depend on its number only."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, memory = (torch.randn(2, n, 64, generator=generator) * (1 + step % 3) for n in (5, 7))
        optimizer.zero_grad()
        loss = model(x, memory).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def histories(model):
    found = {}
    for name, p in model.named_parameters():
        for key, state in delayed_states(p).items():
            found |= {(name, key, k): t.clone() for k, t in state.state_dict().items()}
    return found


def same_histories(a, b):
    mine, theirs = histories(a), histories(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_state_dict_has_a_tensor_of_bytes_for_each_layer():
    model = net()
    trained(model, range(3))
    extra = {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}
    modules = {"inner", "tied", "attention", "attention.out_proj", "out"}
    assert set(extra) == {f"{name}._extra_state" for name in modules}
    assert {(type(value), value.dtype) for value in extra.values()} == {(torch.Tensor, torch.uint8)}
    assert not any("extra" in key for key in mx.quantize_(Net(), mx.recipe.MXFP8BlockScaling()).state_dict())


@pytest.mark.parametrize("way", ["copy", "assign", "meta"])
def test_a_restored_run_is_bitwise_the_one_that_went_on(way):
    straight = net()
    expected = trained(straight, range(8))
    first = net()
    losses = trained(first, range(4))
    state = saved(first.state_dict())
    if way == "meta":
        with torch.device("meta"):
            second = net(seed=9)
    else:
        second = net(seed=9)
        trained(second, range(20, 22))  # other histories
    assert str(second.load_state_dict(state, assign=way != "copy")) == "<All keys matched successfully>"
    if way != "copy":
        second.tied.weight = second.inner.weight  # torch assigns each name a parameter of its own
    assert same_histories(second, first)
    assert losses + trained(second, range(4, 8)) == expected
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), straight.parameters(), strict=True))


PROCESS = """
import sys, torch
from tests.training.test_delayed_checkpoint import net, trained
torch.set_num_threads(1)
model = net(seed=7)
print(model.load_state_dict(torch.load(sys.argv[1], weights_only=True)), file=sys.stderr)
print([loss.hex() for loss in trained(model, range(4, 8))])
"""


@pytest.mark.exhaustive
def test_another_process_resumes(tmp_path):
    expected = trained(net(), range(8))[4:]
    model = net()
    trained(model, range(4))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(tmp_path / "model.pt")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str([loss.hex() for loss in expected])


def test_loading_leaves_the_state_dict_and_the_other_model_alone():
    first, second = net(), net(seed=3)
    trained(first, range(3))
    state = first.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    second.load_state_dict(state)
    frozen = histories(first)
    trained(second, range(3, 5))
    assert all(torch.equal(frozen[key], value) for key, value in histories(first).items())
    assert all(torch.equal(before[key], value) for key, value in state.items())


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_go_on_with_the_histories(copied):
    expected = trained(net(), range(6))
    model = net()
    losses = trained(model, range(4))
    file = io.BytesIO()
    torch.save(model, file)
    twin = copy.deepcopy(model) if copied == "deepcopy" else torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert same_histories(model, twin) and losses + trained(twin, range(4, 6)) == expected


# ---------------------------------------------------------------------------------------------- other checkpoints


@pytest.mark.parametrize("recipe", [None, mx.recipe.MXFP8BlockScaling()], ids=str)
def test_a_checkpoint_without_histories_is_complete(recipe):
    model = net()
    trained(model, range(3))
    before = histories(model)
    assert str(model.load_state_dict(net(recipe).state_dict())) == "<All keys matched successfully>"
    assert all(torch.equal(before[key], value) for key, value in histories(model).items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({key: value for key, value in net(recipe).state_dict().items() if "out.bias" not in key})


def test_a_model_with_another_recipe_drops_the_histories():
    state = net().state_dict()
    for recipe in (mx.recipe.MXFP8BlockScaling(), "mxfp8"):
        model = net(recipe)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert not histories(model)


def test_a_plain_model_loads_the_values_if_it_is_not_strict():
    model, state = net(None), net().state_dict()
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == [] and all("_extra_state" in key for key in found.unexpected_keys)
    assert torch.equal(model.out.weight, state["out.weight"])


def test_a_history_of_another_length_is_an_error():
    model, other = net(), net(mx.recipe.DelayedScaling(amax_history_len=8))
    trained(other, range(2))
    before = histories(model)
    with pytest.raises(RuntimeError, match=r"out\._extra_state: .* is \(8, 3\), the recipe's \(4, 3\); use amax_hist"):
        model.load_state_dict(other.state_dict())
    assert all(torch.equal(before[key], value) for key, value in histories(model).items())


def header(entries):
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return torch.tensor(list(MAGIC + len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


DAMAGED = {
    "a dict": {"0.history": torch.zeros(4, 3)},
    "float": torch.zeros(12),
    "TransformerEngine's": torch.tensor(list(b"\x80\x04pickle"), dtype=torch.uint8),
    "short": packed({"weight.history": torch.randn(4, 3)})[:-1],
    "no record": packed({"weight.history": torch.randn(4, 3)}),
    "another record": packed(
        {"weight.history": torch.randn(4, 3), "weight.record": torch.randn(5), "weight.amax": torch.randn(3)}
    ),
    "no JSON": header(b"{"),
    "another JSON": header([1, 2]),
    "negative": header([["weight.history", [-1, 3]]]),
    "huge": header([["weight.history", [1 << 40, 3]]]),
    "empty": torch.empty(0, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_histories_are_an_error_that_changes_no_history(name):
    layer = mx.quantize_(nn.Linear(64, 32), RECIPE)
    trained_once = layer(torch.randn(4, 64))
    trained_once.sum().backward()
    before = histories(layer)
    with pytest.raises(RuntimeError, match=r"_extra_state: .*(histories|delayed scaling)"):
        layer.load_state_dict(layer.state_dict() | {"_extra_state": DAMAGED[name]})
    assert all(torch.equal(before[key], value) for key, value in histories(layer).items())


def test_packing_is_exact():
    tensors = {"a": torch.randn(5, 3), "b": torch.tensor([float("inf"), -0.0, 1e-45]), "c": torch.randn(3, 2).t()}
    back = unpacked(packed(tensors))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k].view(torch.int32), t.contiguous().view(torch.int32)) for k, t in tensors.items())


# ---------------------------------------------------------------------------------------------- with the rest of torch


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_distributed_checkpoints_save_and_load_them(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    expected = trained(net(), range(6))[4:]
    model = net()
    trained(model, range(4))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "dcp")
    for index in range(2):
        other = net(seed=5)
        state = get_model_state_dict(other) if index else other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
        set_model_state_dict(other, state) if index else other.load_state_dict(state)
        assert same_histories(other, model) and trained(other, range(4, 6)) == expected


def test_the_history_of_a_meta_model_starts_when_it_gets_memory():
    with torch.device("meta"):
        model = net()
    assert not any("extra" in key for key in model.state_dict())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) / 8)
    trained(model, range(3))
    history = getattr(model.out.weight, STATE).history
    assert history.device.type == "cpu" and history.count_nonzero() > 0
    assert {key for key in model.state_dict() if "extra" in key} == {
        key for key in net().state_dict() if "extra" in key
    }


def trainer(folder, steps, resume=None):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, vocab_size=64, **sizes))
    mx.quantize_(model, RECIPE)
    generator = torch.Generator().manual_seed(3)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (32, 8), generator=generator)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, seed=1, learning_rate=1e-2,
    )  # fmt: skip
    run = transformers.Trainer(model, arguments, train_dataset=data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train(resume_from_checkpoint=resume)
    return model, [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_trainer_resumes_bitwise(tmp_path):
    straight, losses = trainer(tmp_path, 6)
    restored, restored_losses = trainer(tmp_path, 6, str(tmp_path / "checkpoint-3"))
    assert losses == restored_losses and len(losses) == 6 and same_histories(straight, restored)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), restored.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- under autocast


def under_autocast(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        with mx.autocast(recipe=RECIPE):
            losses += trained(model, [step], optimizer)
    return losses


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_under_autocast_is_tracked_on_request(assign):
    expected = under_autocast(net(None), range(6))
    first = mx.track_delayed_scaling(net(None))
    losses = under_autocast(first, range(4))
    state = saved(first.state_dict())
    assert {key for key in state if "extra" in key} == {key for key in net().state_dict() if "extra" in key}
    second = mx.track_delayed_scaling(net(None, seed=8))
    assert str(second.load_state_dict(copy.deepcopy(state), assign=assign)) == "<All keys matched successfully>"
    if assign:
        second.tied.weight = second.inner.weight
    assert all(torch.equal(a, b) for a, b in zip(saved(second.state_dict()).values(), state.values(), strict=True))
    assert losses + under_autocast(second, range(4, 6)) == expected
    used = mx.track_delayed_scaling(net(None, seed=8))  # one that has histories
    under_autocast(used, range(11, 13))
    used.load_state_dict(state)
    assert losses + under_autocast(used, range(4, 6)) == expected


def test_copies_of_a_tracked_model_go_on_with_the_histories():
    expected = under_autocast(net(None), range(6))
    model = mx.track_delayed_scaling(net(None))
    losses = under_autocast(model, range(4))
    for _ in range(2):  # a copy of a copy
        model = copy.deepcopy(model)
        twin = copy.deepcopy(model)
        assert same_histories(model, twin) and losses + under_autocast(twin, range(4, 6)) == expected
    assert histories(model) and "out._extra_state" in model.state_dict()


def test_a_model_that_is_not_tracked_has_plain_state_dicts():
    model = net(None)
    under_autocast(model, range(2))
    assert str(net(None).load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    with pytest.raises(TypeError, match="track_delayed_scaling takes a module, not a Tensor"):
        mx.track_delayed_scaling(model.out.weight.data)


def test_modules_of_mxtensor_nn_have_their_histories_without_a_call():
    def made(seed):
        torch.manual_seed(seed)
        return mx.track_delayed_scaling(nn.Sequential(te.Linear(64, 64), te.LayerNormMLP(64, 128)))

    def steps(model, numbers):
        losses = []
        for number in numbers:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
            with mx.autocast(recipe=RECIPE):
                loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses

    expected, model, other = steps(made(0), range(5)), made(0), made(4)
    losses = steps(model, range(3))
    other.load_state_dict(saved(model.state_dict()))
    twin = copy.deepcopy(model)
    assert losses + steps(other, range(3, 5)) == expected == losses + steps(twin, range(3, 5))


def test_a_model_of_quantized_model_init_has_them_too():
    def made():
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPE):
            return te.Linear(64, 64)

    def steps(model, numbers):
        results = []
        for number in numbers:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)) * number
            with mx.autocast(recipe=RECIPE):
                y = model(x)
            y.sum().backward()
            results.append(y.detach())
        return results

    model, other = made(), made()
    steps(model, range(1, 4))
    other.load_state_dict(saved(model.state_dict()))
    assert all(map(torch.equal, steps(other, range(4, 6)), steps(model, range(4, 6))))
