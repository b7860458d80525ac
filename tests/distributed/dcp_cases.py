"""The cases of two ranks for ``test_dcp.py``: training is saved sharded, and continues from the checkpoint."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from mxtensor.distributed.checkpoint import CHECKSUMS, METADATA, Reader, Writer, latest
from mxtensor.recipe import MXFP8BlockScaling
from mxtensor.training.training_weight import TrainingWeight
from tests.distributed.fsdp_cases import ROWS, WIDTH, adamw, local_of, message, net, operands, plain, shard, whole
from tests.helpers.ranks import case

RECIPES = {
    "one copy": MXFP8BlockScaling(single_weight_copy=True),
    "tiles": MXFP8BlockScaling(two_dimensional_weights=True),
    "two copies": MXFP8BlockScaling(),
}
FEATURES, STEPS = 100, 3


def batches(count):
    torch.manual_seed(5)
    return torch.randn(2 * count, ROWS, WIDTH)


def losses(model, optimizer, data, rank=None):
    """The loss of each step over the batch of ``rank``; None: over the batches of both ranks."""
    told = []
    for pair in data.view(-1, 2, ROWS, WIDTH):
        mine = [model(x).square().mean() for x in (pair if rank is None else pair[rank : rank + 1])]
        for loss in mine:
            loss.backward()
        if rank is None:
            for p in model.parameters():
                p.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item() for loss in mine])
    return told


def made(recipe, sharded=True):
    model = net(FEATURES, recipe)
    model = shard(model) if sharded else model
    return model, adamw(model)


def state(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def in_one_process(function, saved, path, **options):
    """``dcp.save`` or ``dcp.load`` without a process group; torch warns about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        function(saved, checkpoint_id=path, no_dist=True, **options)


def load(model, optimizer, path, alone=False):
    """Load a checkpoint as a program does that continues training from it."""
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saved = state(model, optimizer)
    if alone:
        in_one_process(dcp.load, saved, path)
    else:
        dcp.load(saved, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


@case
def saved_and_continued(rank, folder):
    """The losses of steps 4 to 6, without a stop and by a new model from the checkpoint; and what was saved."""
    told = {}
    for name, recipe in RECIPES.items():
        model, optimizer = made(recipe)
        data = batches(2 * STEPS)
        losses(model, optimizer, data[: 2 * STEPS], rank)
        path = f"{folder}/{name}"
        saved = state(model, optimizer)
        kinds = {type(t).__name__ + " " + type(local_of(t)).__name__ for t in saved["model"].values()}
        dcp.save(saved, checkpoint_id=path)
        went_on = losses(model, optimizer, data[2 * STEPS :], rank)
        fresh = made(recipe)
        load(*fresh, path)
        stays = {type(local_of(m.weight)).__name__ for m in (fresh[0][0], fresh[0][2])}
        told[name] = went_on, losses(*fresh, data[2 * STEPS :], rank), kinds, stays, path
    return told


@case
def saved_while_training_goes_on(rank, folder):
    """async_save saves the shards as they are when it is called."""
    model, optimizer = made(RECIPES["one copy"])
    data = batches(2 * STEPS)
    losses(model, optimizer, data[: 2 * STEPS], rank)
    future = dcp.async_save(state(model, optimizer), checkpoint_id=f"{folder}/async", process_group=dist.new_group())
    went_on = losses(model, optimizer, data[2 * STEPS :], rank)
    future.result()
    fresh = made(RECIPES["one copy"])
    load(*fresh, f"{folder}/async")
    return went_on, losses(*fresh, data[2 * STEPS :], rank)


@case
def of_one_process(rank, folder):
    """A checkpoint that one process has written is loaded into shards."""
    path = f"{folder}/one"
    model, optimizer = made(RECIPES["one copy"], sharded=False)
    data = batches(2 * STEPS)
    losses(model, optimizer, data[: 2 * STEPS])
    saved = state(model, optimizer)
    if rank == 0:
        in_one_process(dcp.save, saved, path)
    went_on = [pair[rank] for pair in losses(model, optimizer, data[2 * STEPS :])]
    dist.barrier()
    fresh = made(RECIPES["one copy"])
    load(*fresh, path)
    return went_on, [mine[0] for mine in losses(*fresh, data[2 * STEPS :], rank)]


@case
def whole_state_dicts(rank, folder):
    """Full state dicts are plain tensors on rank 0, and load into shards again; assigned ones keep the recipe."""
    model, _ = made(RECIPES["one copy"])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    kinds = {type(t).__name__ for t in full.values()}
    expected = [whole(plain(p)) for p in model.parameters()]
    other, _ = made(RECIPES["one copy"])
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=options)
    pairs = zip(expected, other.parameters(), strict=True)
    same = [torch.equal(a, whole(plain(b))) for a, b in pairs]
    shards = {name: value.detach().clone() for name, value in model.state_dict().items()}
    other.load_state_dict(shards, assign=True)
    weight = local_of(other[0].weight)
    assigned = isinstance(weight, TrainingWeight) and weight.shard == local_of(model[0].weight).shard
    x = torch.randn(4, WIDTH)
    return kinds, same, assigned, torch.equal(model(x), other(x))


@case
def codes_saved(rank, folder):
    """Sharded codes of MXTensor parameters are saved and loaded unchanged."""
    model = shard(operands(128, "mxfp8[32x32]", "rowwise", False))
    saved = {"model": get_model_state_dict(model)}
    dcp.save(saved, checkpoint_id=f"{folder}/codes")
    x = torch.randn(4, WIDTH)
    before = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    changed = model(x)
    saved = {"model": get_model_state_dict(model)}
    dcp.load(saved, checkpoint_id=f"{folder}/codes")
    set_model_state_dict(model, saved["model"])
    kinds = {type(local_of(m.weight)).__name__ for m in (model[0], model[2])}
    return torch.equal(model(x), before), torch.equal(changed, before), kinds, f"{folder}/codes"


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@case
def damaged(rank, folder):
    """How a checkpoint was damaged -> the error of loading it, and what the intact checkpoint before it gives."""
    model, optimizer = made(RECIPES["tiles"])
    parent, expected = Path(folder, "damaged"), []
    for step in (1, 2):
        losses(model, optimizer, batches(1), rank)
        dcp.save(state(model, optimizer), storage_writer=Writer(parent / f"step-{step}"))
        expected.append([whole(plain(p)).clone() for p in model.parameters()])
    told, last = {}, latest(parent)
    files = {
        "data": last / "__0_0.distcp", "other rank's data": last / "__1_0.distcp", "metadata": last / METADATA,
        "checksums": last / CHECKSUMS,
    }  # fmt: skip
    fresh = made(RECIPES["tiles"])
    initial = [plain(p).to_local().clone() for p in fresh[0].parameters()]
    for name, file in files.items():
        for what in ("flipped", "truncated", "gone"):
            dist.barrier()
            intact = file.read_bytes()
            dist.barrier()
            if rank == 0 and what == "flipped":
                flip(file, len(intact) // 2)
            elif rank == 0 and what == "truncated":
                os.truncate(file, len(intact) // 2)
            elif rank == 0:
                file.unlink()
            dist.barrier()
            saved = state(*fresh)
            told[name, what] = message(lambda saved=saved: dcp.load(saved, storage_reader=Reader(last)))
            dist.barrier()
            if rank == 0:
                file.write_bytes(intact)
    dist.barrier()
    same = [torch.equal(a, plain(b).to_local()) for a, b in zip(initial, fresh[0].parameters(), strict=True)]
    load(*fresh, parent / "step-1")  # with torch's own reader
    same += [torch.equal(a, whole(plain(b))) for a, b in zip(expected[0], fresh[0].parameters(), strict=True)]
    saved = state(*fresh)
    loaded = message(lambda: dcp.load(saved, storage_reader=Reader(last)))
    twice = message(lambda: dcp.save(saved, storage_writer=Writer(last)))
    return last.name, told, same, loaded, twice


@case
def saved_over_an_interrupted_attempt(rank, folder):
    """Save into a folder with files of an unfinished attempt; also when ``dcp.save`` names the folder."""
    parent = Path(folder, "attempts")
    if rank == 0:
        (parent / "step-1.part").mkdir(parents=True)
        (parent / "step-1.part" / "__7_0.distcp").write_bytes(b"half")
        (parent / "step-1.part" / CHECKSUMS).write_text("{")
    dist.barrier()
    nothing = message(lambda: latest(parent))
    model, optimizer = made(RECIPES["one copy"])
    dcp.save(state(model, optimizer), storage_writer=Writer(parent / "elsewhere"), checkpoint_id=parent / "step-1")
    names = sorted(path.name for path in (parent / "step-1").iterdir())
    fresh = made(RECIPES["one copy"])
    with torch.no_grad():
        for p in fresh[0].parameters():
            p.zero_()
    saved = state(*fresh)
    dcp.load(saved, storage_reader=Reader(latest(parent)))
    set_model_state_dict(fresh[0], saved["model"])
    pairs = zip(model.parameters(), fresh[0].parameters(), strict=True)
    return (
        nothing,
        names,
        [path.name for path in parent.iterdir()],
        all(torch.equal(whole(plain(a)), whole(plain(b))) for a, b in pairs),
    )
