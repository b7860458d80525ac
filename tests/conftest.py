"""Every test starts from one seed on one thread; helpers that say when two results are the same product."""

import fcntl
import gc
import importlib.util
import logging
import os
import pickle
import sys

import pytest
import torch

from tests.helpers.interpreter import hurry
from tests.helpers.ranks import DEVICE, WORLD, OutOfTimeError, key_of, run
from tests.helpers.selection import SUITES, choose

ON_GPUS = {"ranks", "on_their_device"}
"""Fixtures whose tests run on GPUs if there are two."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet

from tests.helpers.machine import (  # noqa: E402, F401  (fixtures; imports the package, which may import triton)
    bars_at_once,
    cuda,
    cuda_sources_on_the_cpu,
    device,
    freed_memory_is_nan,
    instructions,
    kernels_launched,
    no_compiler,
    nothing_resolved,
    own_cache,
    pretend,
    profiled,
    recorded_on_a_cpu,
    threads,
    triton_anywhere,
    with_triton,
)

torch.set_num_threads(1)
gc.set_threshold(20_000, 10, 50)  # thousands of test items live as long as the process: look through them rarely


STATE = 1, torch.float32, True
"""Threads, default dtype, and whether gradients are on."""


@pytest.fixture(autouse=True)
def state(request):
    """A seed and STATE before each test. In the quick suite a test that leaves another state behind is an error."""
    torch.manual_seed(20240613)
    yield
    left = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    if left != STATE:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if request.config.getoption("--suite") == "quick":
            pytest.fail(f"the test left {left} behind, not {STATE}")


@pytest.fixture(autouse=True)
def no_plans():
    """Tests that replace a kernel or a device find no plan that was made without."""
    if "mxtensor.core.kernel" in sys.modules:
        sys.modules["mxtensor.core.kernel"].forget_decisions()


@pytest.fixture
def fresh_dynamo():
    """No graphs of torch.compile that another test has left; none are left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def messages():
    """Examples and benchmarks that a test runs may silence messages; later tests hear them."""
    logger = logging.getLogger("mxtensor")
    level, disabled = logger.level, logging.root.manager.disable
    yield
    logger.setLevel(level)
    logging.disable(disabled)


class Logged(logging.Handler):
    """The records of a logger."""

    def __init__(self):
        super().__init__(0)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def text(self):
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def logged():
    """What the package logs from INFO on: ``records`` and ``text``. The level is set back by ``messages``."""
    handler, logger = Logged(), logging.getLogger("mxtensor")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


def pytest_addoption(parser):
    parser.addoption(
        "--suite", choices=SUITES, default="quick", help="quick (make test), rest (what quick leaves out), or all"
    )


def pytest_configure(config):
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
        hurry(check_overflow=config.getoption("suite") != "quick")


@pytest.hookimpl(tryfirst=True)  # before -k and -m: a sample does not depend on them
def pytest_collection_modifyitems(config, items):
    suite = config.getoption("suite")
    chosen = choose(items, suite, config.args, config.rootpath)
    left_out = [item for item, mine in zip(items, chosen, strict=True) if not mine]
    items[:] = [item for item, mine in zip(items, chosen, strict=True) if mine]
    config.hook.pytest_deselected(items=left_out)
    if DEVICE == "cuda":  # the tests of two ranks run on two GPUs
        for item in items:
            if not ON_GPUS.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(scope="session")
def all_ranks(request, tmp_path_factory):
    """What the cases of ``ranks.py`` told, by name and rank: run once, whichever process of pytest-xdist asks first."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "ranks"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        saved = folder / "told"
        if not saved.exists():
            mine = (item for item in request.session.items if "ranks" in getattr(item, "fixturenames", ()))
            long = any(item.get_closest_marker("exhaustive") for item in mine)
            saved.write_bytes(pickle.dumps(run(folder, long)))
    return pickle.loads(saved.read_bytes())


@pytest.fixture
def on_their_device():
    """Makes tensors where the ranks do, whose random numbers and sums are that device's."""
    with torch.device(DEVICE):
        yield


@pytest.fixture
def ranks(all_ranks):
    """The results of a case on every rank."""

    def results(name, sums="of the kernels"):
        key = key_of(name, sums)
        failed = [r for told in all_ranks.values() for r in told.values() if isinstance(r, Exception)]
        told = all_ranks.get(key, {})
        if any(isinstance(r, OutOfTimeError) for r in told.values()):
            pytest.skip(str(told[0]))
        mine = [r for r in told.values() if isinstance(r, Exception)]
        if len(told) < WORLD or mine:
            raise next(iter(mine or failed), RuntimeError(f"{key} never ran: see what the ranks printed"))
        return [told[rank] for rank in range(WORLD)]

    return results
