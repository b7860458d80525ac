"""The cases of two ranks for ``test_train_ranks.py``: the training example sharded, and DistributedDataParallel."""

from dataclasses import replace
from functools import wraps
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import mxtensor as mx
from examples.gpt import load_text, split
from examples.ranks import Ranks
from examples.run import Run, Settings
from tests.distributed.fsdp_cases import RECIPES, ROWS, STEPS, WIDTH, adamw, net, operands, same_as, shard
from tests.helpers.ranks import DEVICE, WORLD, case, long_case

SETTINGS = Settings("mxfp8", False, size="tiny", seed=0, device=DEVICE, text="")
SPLIT = replace(SETTINGS, size="small")  # its layers are whole blocks on each of two ranks


def on_cpu(function):
    """Run without a default device, because the example chooses its devices itself."""

    @wraps(function)
    def run(*args):
        with torch.device("cpu"):
            return function(*args)

    return run


@case
@on_cpu
def example_continued(rank, folder):
    """Six steps without a stop, and three steps followed by three more from the checkpoint."""
    learned, held_out = split(load_text(None))
    ranks = Ranks(rank, WORLD)
    run = Run.of(SETTINGS, ranks)
    for _ in range(3):
        run.step(learned)
    path = Path(folder) / "run"
    run.save(path)
    for _ in range(3):
        run.step(learned)
    continued = Run.of(SETTINGS, ranks)
    continued.load(path)
    for _ in range(3):
        continued.step(learned)
    for each in (run, continued):
        each.evaluate(held_out)
    return run.losses, continued.losses, run.held_out == continued.held_out, str(path)


@long_case
@on_cpu
def example_split(rank, folder):
    """Each layer over two ranks: three steps, and three more from the checkpoint."""
    learned, held_out = split(load_text(None))
    run, continued = (Run.of(SPLIT, Ranks(rank, WORLD, split=WORLD)) for _ in range(2))
    for _ in range(3):
        run.step(learned)
    path = Path(folder) / "split"
    run.save(path)
    continued.load(path)
    for each in (run, continued):
        for _ in range(3):
            each.step(learned)
        each.evaluate(held_out)
    return run.losses, continued.losses, run.held_out == continued.held_out, str(path)


def compared(model, reference, rank):
    """For each step whether the loss and every gradient under DDP are those of one process with the data of both."""
    parallel = DistributedDataParallel(model)
    optimizers = [adamw(m) for m in (model, reference)]
    torch.manual_seed(1)
    same = []
    for _ in range(STEPS):
        x = torch.randn(WORLD, ROWS, WIDTH)
        loss = (parallel(x[rank]) - x[rank]).square().mean()
        loss.backward()
        losses = [(reference(batch) - batch).square().mean() for batch in x]
        for each in losses:
            (each / WORLD).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        same.append(same_as(loss, losses[rank]) and all(same_as(a.grad, b.grad) for a, b in pairs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return same


@case
def data_parallel(rank, folder):
    told = {name: compared(net(100, recipe), net(100, recipe), rank) for name, recipe in RECIPES.items()}
    told["mxtensors"] = compared(operands(100, "mxfp8", "both", True), operands(100, "mxfp8", "both", True), rank)
    return told


@case
def monitored(rank, folder):
    """What a monitor sees of a model that FSDP2 shards, and whether its gradients are those without one."""
    told = {}
    for name in ("two copies", "tiles"):  # weights are gathered as values, and as codes
        watched, alone = (shard(net(128, RECIPES[name])) for _ in range(2))
        torch.manual_seed(rank)
        x = torch.randn(ROWS, WIDTH)
        with mx.monitor(watched, every=1) as monitor:
            watched(x).square().mean().backward()
            monitor.step()
        alone(x).square().mean().backward()
        pairs = zip(watched.parameters(), alone.parameters(), strict=True)
        same = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
        told[name] = same, [(row.fqn, row.operand, row.side) for row in monitor.rows()]
    return told
