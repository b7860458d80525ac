"""The rows of tests/docs/error_rows.md, and what their calls need. Run as a script, it writes the messages anew:

python -m tests.docs.error_rows          write the rows whose message has changed
python -m tests.docs.error_rows --check  print them, and exit with 1 if there are any
"""

import atexit
import builtins
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch

import mxtensor as mx
from mxtensor.core.kernel import Kernel
from mxtensor.kernels.gemm import select
from mxtensor.training import recompute

PATH = Path(__file__).with_suffix(".md")
PAGE = PATH.read_text()
ROW = re.compile(r"^\| `(.+?)` \| (\w+) \| `(.+?)` \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
"""(call, class of the error, message, way out)."""
SETUP = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[-1]
"""The names in the calls: the last python block."""


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
    with mock.patch("torch.compiler.is_dynamo_compiling", lambda: True):
        return call()


def other_torch(call):
    """``call`` where torch's checkpoints have other classes."""
    with mock.patch.multiple(recompute, hook_checkpoints=lambda *functions: False, _installed=[]):
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


FOLDERS = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, FOLDERS, ignore_errors=True)
TEMPORARY = re.compile(re.escape(str(FOLDERS)) + r"[\w./-]*")
"""A path in FOLDERS, which the page shows as ``{path}``."""


def place(name=""):
    """A path in a new folder."""
    return Path(tempfile.mkdtemp(dir=FOLDERS)) / name


HELPERS = (place, forced, strictly, without, failing, inside, traced, other_torch, alone, ranked, saved)


def namespace():
    """What the page sets up, and the helpers."""
    space = {helper.__name__: helper for helper in HELPERS}
    exec(SETUP, space)
    return space


def raised_by(call):
    """The class and the text of what ``call`` raises; an empty class if it raises nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            eval(call, namespace())
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def main():
    """Replace each message that the call no longer raises by the text that it raises now."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as in tests/conftest.py
    page = PAGE
    for call, kind, message, way_out in ROWS:
        now, text = raised_by(call)
        if now == kind and re.fullmatch(pattern(message), text, re.DOTALL):
            continue
        text = TEMPORARY.sub("{path}", text)
        print(f"{call}\n  was {kind}: {message}\n  now {now}: {text}")
        if now == kind:
            page = page.replace(
                f"| `{call}` | {kind} | `{message}` | {way_out} |", f"| `{call}` | {now} | `{text}` | {way_out} |"
            )
    if "--check" in sys.argv:
        return int(page != PAGE)
    PATH.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
