"""Every test starts from one seed on one thread; helpers that say when two results are the same product."""

import copy
import fcntl
import os
import pickle

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.ranks import DEVICE, WORLD, run

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20240613)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def relative_error(y, reference):
    """Frobenius norm of the difference over that of the reference, in float64."""
    y, reference = y.double(), reference.double()
    return ((y - reference).norm() / reference.norm()).item()


def assert_same_product(y, product, *factors):
    """``y`` is ``product(*factors)`` accumulated in float32 and rounded once to ``y.dtype``.

    ``product`` is multilinear with positive coefficients, so ``product(|factors|)`` bounds every partial sum: the exact
    (float64) result moved by 2^-21 of that bound, about eight float32 roundings, and rounded, brackets each element. In
    16 bits this allows the two neighbours of a tie and nothing else, except where terms cancel.
    """
    exact = product(*(f.double() for f in factors))
    bound = product(*(f.double().abs() for f in factors)) * 2.0**-21
    assert y.shape == exact.shape
    low, high = (exact - bound).to(y.dtype), (exact + bound).to(y.dtype)
    assert ((low <= y) & (y <= high)).all()
    if y.numel() == 0:
        return
    if y.dtype is torch.float64:
        assert relative_error(y, exact) < 1e-14
    elif y.dtype is torch.float32:
        assert relative_error(y, exact) < 1e-6
    else:
        differing = (y != exact.to(y.dtype)).double().mean().item()
        assert differing <= max(0.01, 2 / y.numel())


def dequantized(module):
    """A copy of ``module`` whose MXTensor parameters are plain again."""
    module = copy.deepcopy(module)
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if isinstance(parameter, mx.MXTensor):
                part._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    return module


def parts_of(w):
    """Every tensor an MXTensor holds, one-byte dtypes as uint8."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for operand in w.held for t in operand.tensors]


def same_bytes(a, b):
    """Whether two MXTensors hold the same codes and scales."""
    mine, theirs = parts_of(a), parts_of(b)
    return len(mine) == len(theirs) and all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


@pytest.fixture(scope="session")
def all_ranks(tmp_path_factory):
    """What the cases of ``ranks.py`` told, by name and rank: run once, whichever process of pytest-xdist asks first."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "ranks"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / "told"
        if not kept.exists():
            kept.write_bytes(pickle.dumps(run(folder)))
    return pickle.loads(kept.read_bytes())


@pytest.fixture
def on_their_device():
    """Makes tensors where the ranks do, whose random numbers and sums are that device's."""
    with torch.device(DEVICE):
        yield


@pytest.fixture
def ranks(all_ranks):
    """The results of a case on every rank."""

    def results(name):
        failed = [r for told in all_ranks.values() for r in told.values() if isinstance(r, Exception)]
        told = all_ranks.get(name, {})
        if len(told) < WORLD or any(isinstance(r, Exception) for r in told.values()):
            raise next(iter(failed), RuntimeError(f"{name} never ran: see what the ranks printed"))
        return [told[rank] for rank in range(WORLD)]

    return results
