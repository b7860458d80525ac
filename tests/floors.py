"""The rooms and floors of the package, checked by AST. ``python -m tests.floors`` prints them.

A room is a folder of ``mxtensor/``. It imports only from rooms on lower floors, inside functions too. Rooms on one
floor do not import each other.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mxtensor"
FACE = "mxtensor"

ROOMS = {
    "core": (0, "the dispatch table, the log behind explain(), shapes, tracing, what private torch is needed for"),
    "numerics": (1, "elements, formats, how one tensor is cast, the reference, Operand"),
    "recipe": (2, "which tensor is cast to what, for inference and training"),
    "kernels": (2, "casts, products, attention and permutations: Operand in, Operand or Tensor out; never an MXTensor"),
    "tensor": (3, "MXTensor, and how FSDP2 shards and gathers one"),
    "ops": (4, "one rule per aten op"),
    "training": (5, "the autograd function of linear, TrainingWeight, autocast, delayed scaling, optim"),
    "distributed": (6, "tensor and expert parallel, all-gather linear, distributed checkpoint"),
    "compile": (6, "extensions of torch.compile: passes, launches"),
    "convert": (7, "quantize_: which weights of a model are replaced, and by what"),
    "ao": (8, "the door for users of torchao: all that has a name because torchao names it"),
    "calibration": (8, "calibrate: weights rounded for the inputs that layers get; plan: a format for each"),
    "report": (8, "error reports with plots, tuning"),
    "checkpoints": (8, "one file for each on-disk layout: name, detect, read, write"),
    "te": (8, "the door for users of TransformerEngine: all that has a name because TransformerEngine names it"),
    "integrations": (9, "transformers: a quantizer in its registry, a cache; peft"),
    "cli": (10, "the command mxtensor"),
    FACE: (11, "the public API: every mx.NAME, nothing else"),
}
"""Room -> its floor, what it knows."""
DOORS = {"ao", "te"}
"""Rooms for users of a library, which they import by name: no other file does, so that each could be deleted."""

MAX_LINES, LOOSE_FILES = 800, 12
SAYS_WHY = re.compile(rf"longer than (the )?others|{MAX_LINES} lines")
"""A longer file has a sentence with these words in its first lines, which says why it is one file."""
CORE_DEPENDENCIES = {"torch", "numpy"}
"""What every installation has."""
EXTRAS = {"tqdm", "matplotlib", "triton", "safetensors", "gguf", "transformers"}
"""Optional dependencies, imported inside the functions that need them."""
TRITON_CODE = "kernels.triton_device"
"""The only package that imports triton at import time; other packages import it inside functions."""
TRANSFORMERS_CODE = (
    "integrations.transformers",
    "integrations.transformers_load",
    "integrations.attention",
    "integrations.kv_cache",
)
"""The only modules that import transformers at import time: imported when transformers is, and by ``mx.KVCache``."""
NOT_ROOMS = {"helpers", "faults", "benchmarks", "docs", "examples", "combinations"}
"""Folders of ``tests/`` that are about something else than a room."""

FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(p for p in PACKAGE.rglob("*") if p.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"})


def module_of(path: Path) -> str:
    """``kernels.gemm.spec`` for mxtensor/kernels/gemm/spec.py, ``ops`` for its ``__init__.py``, "" for the face."""
    names = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def room_of(module: str) -> str:
    """The room of a module of the package. A file directly in ``mxtensor/`` belongs to the face."""
    room = module.partition(".")[0]
    return room if room in ROOMS else FACE


MODULES = {module_of(path): path for path in FILES}


def imports(tree: ast.AST, path: Path):
    """(absolute name, node) of every import, functions included."""
    package = (FACE, *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                full = ".".join((*base, alias.name))
                yield full if inside(full) in MODULES else ".".join(base), node


def inside(name: str) -> str | None:
    """The module of the package that an absolute name is of, or None. The face is ""."""
    first, _, rest = name.partition(".")
    return rest if first == FACE else None


def at_import(tree: ast.AST) -> set[ast.AST]:
    """The nodes that run when a module is imported: everything outside functions."""
    found, stack = set(), [tree]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                found.add(node)
                stack.append(node)
    return found


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def arrows(path: Path, source: str) -> list[tuple[str, str, str]]:
    """(room, imported room, place) of every import from another room."""
    room, found = room_of(module_of(path)), []
    for name, node in imports(ast.parse(source), path):
        target = inside(name)
        if target is not None and room_of(target) != room:
            found.append((room, room_of(target), where(path, node)))
    return found


def arrows_up(path: Path, source: str) -> list[str]:
    """Imports of ``source``, as the text of ``path``, that are not from a lower floor."""
    return [
        f"{place}: {room} (floor {ROOMS[room][0]}) imports {target} (floor {ROOMS[target][0]})"
        for room, target, place in arrows(path, source)
        if ROOMS[target][0] >= ROOMS[room][0]
    ]


def early_imports(path: Path, source: str) -> list[str]:
    """Imports of ``source`` that an installation with torch and numpy alone could not do, or not at import time."""
    tree, found = ast.parse(source), []
    early, here = at_import(tree), module_of(path)
    for name, node in imports(tree, path):
        top, target = name.partition(".")[0], inside(name) or ""
        triton_code = f"{here}.".startswith(f"{TRITON_CODE}.")
        if f"{target}.".startswith(f"{TRITON_CODE}.") and not triton_code and node in early:
            found.append(f"{where(path, node)} imports Triton code at import time")
        if top in sys.stdlib_module_names or top in CORE_DEPENDENCIES | {FACE} or (top == "triton" and triton_code):
            continue
        if top == "transformers" and here in TRANSFORMERS_CODE:
            continue
        if top not in EXTRAS:
            found.append(f"{where(path, node)} imports {name}, which is not a dependency")
        elif node in early:
            found.append(f"{where(path, node)} imports {name} at import time")
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of one circle of the graph, the first one repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def graph_of_modules() -> dict[str, set[str]]:
    graph = {}
    for module, path in MODULES.items():
        targets = {inside(name) for name, _ in imports(ast.parse(path.read_text()), path)}
        graph[module] = {t for t in targets if t in MODULES and t != module}
    return graph


def graph_of_rooms() -> dict[str, set[str]]:
    graph = defaultdict(set)
    for path in FILES:
        for room, target, _ in arrows(path, path.read_text()):
            graph[room].add(target)
    return graph


def too_long(path: Path, text: str) -> bool:
    lines = text.splitlines()
    return len(lines) > MAX_LINES and not SAYS_WHY.search(" ".join(lines[:30]))


def test_every_folder_is_a_room_and_every_room_a_folder():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders == set(ROOMS) - {FACE}


def test_no_room_imports_from_its_own_floor_or_a_higher_one():
    assert [line for path in FILES for line in arrows_up(path, path.read_text())] == []


def test_no_room_imports_a_door():
    found = [arrow for path in FILES for arrow in arrows(path, path.read_text())]
    assert [place for _, target, place in found if target in DOORS] == []


def test_there_is_no_circle_of_rooms():
    assert circle(graph_of_rooms()) == []


def test_there_is_no_circle_of_modules():
    assert circle(graph_of_modules()) == []


def test_the_package_has_few_files_of_its_own():
    assert len(list(PACKAGE.glob("*.py"))) <= LOOSE_FILES


def test_a_file_is_one_idea():
    longer = [f"{p.relative_to(ROOT)} has {len(p.read_text().splitlines())} lines" for p in SOURCES
              if too_long(p, p.read_text())]  # fmt: skip
    assert longer == [], f"split it, or say in its first lines why it has more than {MAX_LINES} lines"


def test_a_file_says_what_it_is():
    modules = [p for p in FILES if p.read_text().strip()]
    assert [str(p.relative_to(ROOT)) for p in modules if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_importing_needs_torch_numpy_and_the_standard_library_only():
    assert [line for path in FILES for line in early_imports(path, path.read_text())] == []


def test_tests_have_the_folders_of_the_package():
    rooms = {str(p.parent.relative_to(PACKAGE)) for p in FILES} - {"."}
    tests = {str(p.parent.relative_to(ROOT / "tests")) for p in (ROOT / "tests").rglob("*.py")} - {"."}
    assert {t for t in tests if t.partition("/")[0] not in NOT_ROOMS} == rooms


@pytest.mark.parametrize(
    "source",
    ["from ..tensor import mxtensor", "import mxtensor.ops", "from .. import tensor", "import mxtensor as mx",
     "from ..recipe.base import Recipe", "from ..recipe import base"],
)  # fmt: skip
def test_an_import_from_above_would_be_found(source):
    kernel = PACKAGE / "kernels" / "kernel.py"
    assert arrows_up(kernel, source) and arrows_up(kernel, f"def f():\n    {source}")
    assert not arrows_up(PACKAGE / "report" / "tune.py", source.replace("import mxtensor as mx", ""))


@pytest.mark.parametrize(
    ("source", "early", "in_function"),
    [
        ("import pandas", 1, 1),
        ("import matplotlib.pyplot", 1, 0),
        ("import triton", 1, 0),
        ("from .triton_device import values", 1, 0),
        ("import torch, numpy, math", 0, 0),
    ],
)
def test_an_import_of_what_may_be_missing_would_be_found(source, early, in_function):
    kernel = PACKAGE / "kernels" / "kernel.py"
    assert len(early_imports(kernel, source)) == early
    assert len(early_imports(kernel, f"def f():\n    {source}")) == in_function
    assert early_imports(PACKAGE / "kernels" / "triton_device" / "values.py", "import triton") == []


def test_a_circle_would_be_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != [] == circle({"a": {"b", "c"}, "b": {"c"}})


def test_a_long_file_would_be_found():
    text = "x = 1\n" * (MAX_LINES + 1)
    assert too_long(PACKAGE / "x.py", text)
    assert not too_long(PACKAGE / "x.py", f'"""The only file of more than {MAX_LINES} lines: one table."""\n' + text)


def main() -> None:
    """Print rooms, floors, files, lines, the longest files, and every import that breaks the order."""
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    print(f"{'floor':>5}  {'room':<12} {'files':>5} {'lines':>6}  what it knows")
    for room, (floor, knows) in sorted(ROOMS.items(), key=lambda row: row[1][0]):
        mine = [n for path, n in lines.items() if room_of(path.relative_to(PACKAGE).parts[0]) == room]
        print(f"{floor:>5}  {room:<12} {len(mine):>5} {sum(mine):>6}  {knows}")
    print(f"{'':>5}  {'all':<12} {len(lines):>5} {sum(lines.values()):>6}")
    print(f"\nfiles in mxtensor/ itself: {len(list(PACKAGE.glob('*.py')))}")
    print("longest files:")
    for path, n in sorted(lines.items(), key=lambda row: -row[1])[:5]:
        print(f"{n:>5}  {path.relative_to(ROOT)}")
    found = [line for path in FILES for line in arrows_up(path, path.read_text())]
    circles = [c for c in (circle(graph_of_rooms()), circle(graph_of_modules())) if c]
    print(f"\narrows up: {len(found)}, circles: {len(circles)}")
    print("\n".join([*found, *(" -> ".join(c) for c in circles)]))


if __name__ == "__main__":
    main()
