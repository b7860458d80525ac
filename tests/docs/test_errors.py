"""docs/errors.md is true and complete: every row raises what it says, whole text, and every raise has a row."""

import ast
import builtins
import re
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import mxtensor as mx
from mxtensor.core.kernel import Kernel
from mxtensor.kernels.gemm import select
from mxtensor.training import recompute
from mxtensor.training.training_weight import values_of
from tests.helpers.compare import components_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
ROW = re.compile(r"^\| `(.+?)` \| (\w+) \| `(.+?)` \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
SETUP = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
KINDS = (
    ValueError, TypeError, NotImplementedError, RuntimeError, ImportError, AttributeError, FileExistsError,
    FileNotFoundError, UserWarning,
)  # fmt: skip

NEVER_SEEN = {
    # raised and caught inside ops/einsum.py; they show as the reason in explain()
    "not one product",
    "a shared dimension differs in size",
    # raised inside a kernel; it shows as the end of "the kernel ... failed"
    "cublasGemmEx returned status {value}",
    # needs two ranks: tests/test_fsdp.py
    "ranks do not gather the weight {value} alike: {value}; give quantize_ the same recipe on every rank",
    # of a disk that is full, or not shared: tests/test_dcp.py
    "{value} of {value} items were not written to {value}",
    "{value} has no {value}, which another rank has written; give all ranks a folder that they share",
    # of a config that `python -m mxtensor.report.tune` chooses itself; the heuristics choose one that fits
    "a product of {value}x{value}x{value} by {value} does not fit in the shared memory of this device "
    "({value} bytes a block)",
    "{value} cannot run {value}x{value} in {value}, {value} groups, aligned to {value} bytes; "
    "leave the config out to have one chosen",
    # torch.jit.trace warns that it is deprecated: tests/test_life.py
    "linear: torch.jit.trace cannot record a layer that trains quantized; use torch.export or torch.compile, "
    "or trace a model that was quantized for inference",
    # a table of configs that another version has written: tests/kernels/small_m/test_small_m.py
    "a row of a table of launch configs has the columns {value}, not {value}; "
    "measure the table again with python -m mxtensor.report.tune",
}


def pattern(message):
    """A message whose {words} stand for any text."""
    return ".+?".join(map(re.escape, re.split(r"\{\w+\}", message)))


def forced(kernel, call):
    with mx.kernels(kernel):
        return call()


def strictly(call):
    with mx.strict():
        return call()


def without(package, call):
    """``call`` where ``package`` is not installed."""

    def find(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    original, builtins.__import__ = builtins.__import__, find
    try:
        return call()
    finally:
        builtins.__import__ = original


def failing(message, call):
    """``call`` where the first product kernel fails with ``message`` after it accepted."""

    def run(*operands):
        raise RuntimeError(message)

    original, select.GEMM = select.GEMM, (Kernel("broken", lambda *operands: None, run), *select.GEMM)
    try:
        return call()
    finally:
        select.GEMM = original


def inside(recipe, call):
    with mx.autocast(recipe=recipe):
        return call()


def traced(call):
    """``call`` as torch.compile's tracing sees it."""
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        return call()


def other_torch(call):
    """``call`` where torch's checkpoints are made of other classes."""
    with mock.patch.multiple(recompute, torch_checkpoint=SimpleNamespace(), _installed=[]):
        return call()


def alone(call):
    """``call`` in a process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return call()
    finally:
        torch.distributed.destroy_process_group()


def ranked(world, call):
    """``call`` with the mesh of so many ranks, the others not there: what is sent is nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return call(torch.distributed.device_mesh.init_device_mesh("cpu", (world,)))
    finally:
        torch.distributed.destroy_process_group()


def saved(call):
    """``call`` with the path of a checkpoint."""
    from torch.distributed import checkpoint as dcp

    from tests.distributed.dcp_cases import in_one_process

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        in_one_process(dcp.save, {"x": torch.ones(4)}, path, storage_writer=mx.checkpoint.Writer(path))
        return call(path)


HELPERS = (forced, strictly, without, failing, inside, traced, other_torch, alone, ranked, saved)


@pytest.fixture
def names():
    """What the page sets up, and the helpers."""
    space = {helper.__name__: helper for helper in HELPERS}
    exec(SETUP, space)
    return space


def state(names):
    """Every tensor of the namespace, and each model's parameters by identity."""
    tensors = [values_of(v) for v in names.values() if isinstance(v, torch.Tensor)]
    plain = [t for v in tensors for t in (components_of(v) if isinstance(v, mx.MXTensor) else [v.clone()])]
    components = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in plain]
    modules = [v for v in names.values() if isinstance(v, torch.nn.Module)]
    return [t.clone() for t in components], [id(p) for module in modules for p in module.parameters()]


# ---------------------------------------------------------------------------------------------- each row


def test_the_page_has_its_rows():
    assert len(ROWS) == len(set(call for call, *_ in ROWS)) == PAGE.count("\n| `") >= 40


@pytest.mark.parametrize(("call", "kind", "message"), [row[:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_call_raises_exactly_this_and_changes_nothing(call, kind, message, names):
    expected = {k.__name__: k for k in KINDS}[kind]
    before = state(names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(expected) as error:
            eval(call, names)
    assert type(error.value) is expected
    assert re.fullmatch(pattern(message), str(error.value), re.DOTALL), str(error.value)
    after = state(names)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert not (ROOT / "errors.png").exists()


# ---------------------------------------------------------------------------------------------- nothing is missing


def raised():
    """(file:line, message) of every raise and warning of the package, values as {value}."""
    for path in sorted((ROOT / "mxtensor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            is_warning = isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn"
            if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or is_warning):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text_of(call.args[0])


def text_of(node):
    if isinstance(node, ast.Constant):
        return node.value
    assert isinstance(node, ast.JoinedStr), ast.unparse(node)
    return "".join(v.value if isinstance(v, ast.Constant) else "{value}" for v in node.values)


def test_every_raise_of_the_package_has_a_row():
    messages = [re.sub(r"\{\w+\}", "VALUE", message) for _, _, message, _ in ROWS]
    found = [(place, text) for place, text in raised() if text not in NEVER_SEEN]
    missing = [f"{place}: {text}" for place, text in found if not any(re.fullmatch(pattern(text), m) for m in messages)]
    assert len(found) >= 30 and missing == []


def test_every_message_ends_with_a_way_out():
    assert all(way_out.strip(" -") for *_, way_out in ROWS)


# ---------------------------------------------------------------------------------------------- beyond one line


def test_a_failing_write_changes_nothing():
    w = mx.quantize(torch.randn(64, 128), "mxfp8", orientation="both")
    before = [t.clone() for t in components_of(w)]
    for bad in (torch.randn(64, 96), torch.randn(63, 128), torch.randn(2, 64, 128), torch.randn(64, 128) * 1j):
        with pytest.raises((RuntimeError, TypeError)):
            w.copy_(bad)
    assert all(torch.equal(a, b) for a, b in zip(components_of(w), before, strict=True))


def test_an_error_inside_a_forced_block_ends_the_force():
    w, x = mx.quantize(torch.randn(64, 128), "mxfp8"), torch.randn(5, 128)
    with pytest.raises(NotImplementedError):
        forced("dequant", lambda: x @ w.t())
    assert (x @ w.t()).shape == (5, 64)
