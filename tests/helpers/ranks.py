"""Cases that need two ranks: one spawn of two processes runs them all, because torch takes seconds to start.

They use two GPUs and NCCL if there are two, otherwise the CPU and gloo.

A case is a function of ``*_cases.py`` that both ranks call with their rank and a shared folder. The ``ranks`` fixture
passes its results, or its failure, to the tests.
"""

import datetime
import importlib
import os
import pickle
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

NAMES = ("fsdp", "dcp", "train", "parallel", "expert", "nn", "bench")
MODULES = tuple(f"tests.distributed.{name}_cases" for name in NAMES)
WORLD = 2
DEVICE = "cuda" if torch.cuda.device_count() >= WORLD else "cpu"
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"


def case(function):
    """Mark a function of a module of cases."""
    function.is_case = True
    return function


def long_case(function):
    """Mark a case that runs for tests marked ``exhaustive`` only."""
    function.is_long = True
    return case(function)


def cases(long=True):
    """Name -> function, in the order of their definition; without ``long``, only those that are not long."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        found |= {name: f for name, f in vars(module).items() if getattr(f, "is_case", False)}
    return {name: f for name, f in found.items() if long or not getattr(f, "is_long", False)}


def work(rank, folder, long):
    """What each process runs. The first failure ends both, because the other rank would wait."""
    from examples.ranks import wait_for_sends

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # of importing inductor
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=60)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    results = {}
    for name, function in cases(long).items():
        torch.manual_seed(0)
        try:
            results[name] = function(rank, folder)
        except BaseException:
            results[name] = RuntimeError(f"{name} failed on rank {rank}:\n{traceback.format_exc()}")
            save(folder, rank, results)
            os._exit(1)
    save(folder, rank, results)
    wait_for_sends()
    dist.destroy_process_group()


def save(folder, rank, results):
    with open(f"{folder}/results-{rank}", "wb") as file:
        pickle.dump(results, file)


def run(folder, long=True):
    """Run the cases in new processes; name -> the results of the ranks."""
    import torch.multiprocessing as mp

    try:
        mp.spawn(work, args=(str(folder), long), nprocs=WORLD)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        print(error, file=sys.stderr)
    told = {}
    for rank in range(WORLD):
        path = f"{folder}/results-{rank}"
        if os.path.exists(path):
            with open(path, "rb") as file:
                for name, result in pickle.load(file).items():
                    told.setdefault(name, {})[rank] = result
    return told
