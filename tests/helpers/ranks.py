"""Cases that need two ranks: one pair of processes runs them all, because torch takes seconds to start.

They use two GPUs and NCCL if there are two, otherwise the CPU and gloo. Four GPUs are two pairs, which share the cases.

A case is a function of ``*_cases.py``, or of ``ranks_case.py``, that both ranks call with their rank and a shared
folder. The ``ranks`` fixture passes its results, or its failure, to the tests. A case that fails or hangs ends its pair
of processes, and a new pair runs the cases after it.

On GPUs a case marked ``exact`` runs twice: with the kernels that a user gets, and with products added up in float64.
One process and two then compute the same bits, whatever the order of the sums.
"""

import contextlib
import datetime
import importlib
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

NAMES = (
    "expert", "nn", "parallel", "prepared", "context", "mesh", "pipeline", "pretrained", "collective", "monitor",
    "dcp", "history", "train", "fsdp", "reload", "bench",
)  # fmt: skip
MODULES = (*(f"tests.distributed.{name}_cases" for name in NAMES), "tests.combinations.ranks_case")
WORLD = 2
PAIRS = max(torch.cuda.device_count() // WORLD, 1)
DEVICE = "cuda" if torch.cuda.device_count() >= WORLD else "cpu"
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
TWO_GPUS = (pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs two GPUs"))
"""The marks of a case for NCCL, for ``pytest.param``."""
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="FSDP2 takes the GPUs, which gloo does not serve")
SUMS = ("of the kernels", pytest.param("exact", marks=TWO_GPUS))
"""The two ways to add up, for ``parametrize``: a test passes one to ``ranks(name, sums)``."""
ONE_CASE, ALL_CASES = (90, 480) if DEVICE == "cuda" else (600, float("inf"))
"""Seconds after which a case hangs, and after which no further case begins."""


class OutOfTimeError(RuntimeError):
    """A case that did not run because the cases before it took too long."""


def case(function=None, *, exact=False, long=False):
    """Mark a function of a module of cases. ``exact``: run it on GPUs a second time, see above."""
    if function is None:
        return lambda given: case(given, exact=exact, long=long)
    function.is_case, function.is_exact, function.is_long = True, exact, long
    return function


def long_case(function):
    """Mark a case that runs for tests marked ``exhaustive`` only."""
    return case(function, long=True)


def cases(long=True):
    """Name -> function, in the order of their definition; without ``long``, only those that are not long."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        found |= {name: f for name, f in vars(module).items() if getattr(f, "is_case", False)}
    return {name: f for name, f in found.items() if long or not f.is_long}


def key_of(name, sums):
    """What a run of a case is called."""
    return name if sums != "exact" else f"{name}, exact"


def runs(long):
    """Key -> function, for every run of every case."""
    found = {}
    for name, function in cases(long).items():
        found[name] = function
        if DEVICE == "cuda" and function.is_exact:
            found[key_of(name, "exact")] = with_exact_sums(function)
    return found


def with_exact_sums(function):
    """The case with products that are added up in float64, in which the order of a sum changes no bit in float32."""

    def call(rank, folder):
        from mxtensor import kernels
        from mxtensor.kernels.gemm import emulated

        with kernels("emulated"), mock.patch.object(emulated, "values_dtype", lambda args: torch.float64):
            return function(rank, folder)

    return call


# ---------------------------------------------------------------------------------------------- one process


@contextlib.contextmanager
def joined(rank, folder, seconds=60, backend=BACKEND, world=WORLD):
    """A rank, on its GPU if the backend has one; tensors are made there."""
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)  # before NCCL starts
        torch.set_default_device(f"cuda:{rank}")
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    yield
    from examples.ranks import leave

    leave()


def work(rank, folder, store, long, keys, place):
    """What each process runs. The first failure ends it, because the other rank may wait for it. ``place``: of the pair
    among PAIRS."""
    if DEVICE == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[WORLD * place :][:WORLD])
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # of importing inductor
    if DEVICE == "cuda":  # torch has other warnings there
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module="mxtensor")
    functions = runs(long)
    with joined(rank, store):
        for key in keys:
            torch.manual_seed(0)
            start = time.monotonic()
            try:
                result = functions[key](rank, folder)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()  # so that a fault of a kernel belongs to its case
            except BaseException:
                save(folder, rank, key, RuntimeError(f"{key} failed on rank {rank}:\n{traceback.format_exc()}"))
                os._exit(1)
            save(folder, rank, key, result)
            if rank == 0:
                print(f"{key}: {time.monotonic() - start:.1f} s", flush=True)


def save(folder, rank, key, result):
    """Write a result; the file appears when it is complete."""
    path = f"{folder}/{key}-{rank}"
    with open(f"{path}.part", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{path}.part", path)


# ---------------------------------------------------------------------------------------------- pairs of processes


def results(folder, key):
    """Rank -> the result of a run, for those that have written one."""
    found = {}
    for rank in range(WORLD):
        path = f"{folder}/{key}-{rank}"
        if os.path.exists(path):
            with open(path, "rb") as file:
                found[rank] = pickle.load(file)
    return found


def failed(found):
    return any(isinstance(result, Exception) for result in found.values())


def pair(folder, long, keys, attempt, end, place):
    """Run ``keys`` in two new processes until one fails or hangs, or the time is over; key -> rank -> result."""
    store = os.path.join(folder, f"pair-{attempt}")
    os.makedirs(store)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, folder, store, long, keys, place)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    told, last, why = {}, time.monotonic(), "the process of a rank ended"
    try:
        while len(told) < len(keys):
            codes = [process.exitcode for process in processes]
            ended = None not in codes or any(codes)
            if any(codes):
                time.sleep(5)  # the other rank may have an error of its own
            while len(told) < len(keys) and len(found := results(folder, keys[len(told)])) == WORLD:
                told[keys[len(told)]], last = found, time.monotonic()
                if failed(found):
                    return told
            if ended:
                break
            if time.monotonic() - last > ONE_CASE:
                why = f"no result within {ONE_CASE} s"
                break
            if time.monotonic() > end:
                return told
            time.sleep(0.02)
        if len(told) < len(keys):
            key = keys[len(told)]
            error = RuntimeError(f"{key}: {why}; exit codes {codes}: see what the ranks printed")
            told[key] = dict.fromkeys(range(WORLD), error) | results(folder, key)
        else:
            for process in processes:
                process.join(60)
        return told
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def run(folder, long=True, pairs=PAIRS):
    """Run the cases in new processes, ``pairs`` at a time; key -> the results of the ranks."""
    every, end = list(runs(long)), time.monotonic() + ALL_CASES

    def part(place):
        told, waiting, attempt, mine = {}, every[place::pairs], 0, os.path.join(folder, str(place))
        os.makedirs(mine)
        while waiting and time.monotonic() < end:
            told |= pair(mine, long, waiting, attempt, end, place)
            waiting, attempt = [key for key in waiting if key not in told], attempt + 1
        return told

    with ThreadPoolExecutor(pairs) as pool:
        told = {key: found for part_of in pool.map(part, range(pairs)) for key, found in part_of.items()}
    for key in every:
        if key not in told:
            told[key] = dict.fromkeys(range(WORLD), OutOfTimeError(f"{key} did not run: the others took {ALL_CASES} s"))
    return told
