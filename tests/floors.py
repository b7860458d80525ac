"""The floors of the package, by AST: a file imports only from lower or equal floors, and stays short."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mxtensor"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    # plain facts: numbers, names, rows
    "shapes": 0,
    "autograd": 0,
    "formats": 0,
    "fingerprint": 0,
    "torch_autocast": 0,
    "tracing": 0,
    # what is made of them
    "linear_recipe": 0.5,
    "elements": 0.5,
    # recipes that users choose by name
    "recipe_base": 0.8,
    "recipe": 0.9,
    # the definition, the mechanism, checks of what comes from outside
    "dispatch": 1,
    "reference": 1,
    "parts": 1,
    # kernels know operands, never the tensor
    "kernels": 2,
    "tensor": 3,
    "gather": 3.1,
    "sharded": 3.1,
    "te_names": 3,
    "training_weight": 3.2,
    # above the tensor: one rule per aten op
    "ops": 4,
    # training: the three products, what decides that they run quantized, how unmodified models are reached
    "factors": 5,
    "linear": 5,
    "grouped": 5.1,
    "gathered_linear": 5.1,
    "delayed": 5.2,
    "recompute": 5,
    "interception": 5.4,
    "ambient": 5.5,
    "quantizer_base": 6,
    "quantizers": 6,
    "te_gemm": 6.5,
    "model_init": 6.5,
    "convert_training": 7,
    "convert": 7.1,
    "optim": 7.5,
    "grad_scaler": 7.5,
    "mxfp8": 7.5,
    "nn": 7.5,
    "parallel": 7.5,
    "checkpoint": 7.5,
    "report": 8,
    "tune": 8,
    "compiled_graph": 8,
    "compiled_launches": 8.1,
    "compiled": 8.2,
    # the face: public names
    "__init__": 9,
}
"""First part of a module's name inside the package -> its floor."""

CORE = {"torch", "numpy"}
"""What every installation has."""
OPTIONAL = {"tqdm", "matplotlib", "triton"}
"""Extras, imported inside the functions that need them."""
DEVICE = ("kernels", "device")
"""The folder of Triton code: imports triton, and is itself imported inside functions only."""
MAX_LINES = 350


def module_of(path):
    """("kernels", "gemm") for mxtensor/kernels/gemm.py; ("ops",) for its __init__; ("__init__",) for the face."""
    components = path.relative_to(PACKAGE).with_suffix("").components
    return components[:-1] if components[-1] == "__init__" and len(components) > 1 else components


def imports(tree, path):
    """(absolute module name, node) of every import, functions included; relative ones start with "mxtensor"."""
    package = ("mxtensor", *path.relative_to(PACKAGE).components[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            if node.module is None:  # from . import codec
                yield from ((".".join((*base, alias.name)), node) for alias in node.names)
            else:
                yield ".".join(base), node


def inside(name):
    """The package's own module that an import names, or None."""
    components = name.split(".")
    return tuple(components[1:]) or ("__init__",) if components[0] == "mxtensor" else None


def offences(path, source):
    """Imports of ``source``, standing at ``path``, that reach upwards."""
    here = module_of(path)[0]
    found = [(inside(name), node) for name, node in imports(ast.parse(source), path)]
    return [
        f"{path.name}:{node.lineno}: floor {FLOORS[here]} imports {'.'.join(target)}, floor {FLOORS[target[0]]}"
        for target, node in found
        if target is not None and FLOORS[target[0]] > FLOORS[here]
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_from_lower_or_equal_floors_only(path):
    assert module_of(path)[0] in FLOORS, f"give {path.name} a floor"
    assert offences(path, path.read_text()) == []


def test_an_upward_import_would_be_found():
    codec = PACKAGE / "codec.py"
    for source in (
        "from .tensor import MXTensor",
        "import mxtensor.ops",
        "from . import tensor",
        "import mxtensor as mx",
    ):
        assert offences(codec, source) and offences(codec, f"def f():\n    {source}")
    gemm = PACKAGE / "kernels" / "gemm.py"
    assert offences(gemm, "from ..tensor import MXTensor") and not offences(gemm, "from . import emulated")
    assert not offences(PACKAGE / "tensor.py", "from .kernels.cast import quantize_operand")


def test_no_file_imports_itself_through_others():
    names = {".".join(module_of(p)): p for p in FILES}
    graph = {
        name: {
            ".".join(t) for n, _ in imports(ast.parse(p.read_text()), p) if (t := inside(n)) and ".".join(t) in names
        }
        for name, p in names.items()
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("formats") < order.index("reference") < order.index("tensor") < order.index("convert")


def test_every_floor_has_a_file():
    assert {module_of(path)[0] for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_one_idea(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES, f"{path.name} has {len(lines)} lines: usually two ideas"
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} does not say what it is"


def at_import(tree):
    """The statements that run when a module is imported: everything outside functions."""
    stack = [tree]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield node
                stack.append(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_importing_needs_torch_numpy_and_the_standard_library_only(path):
    tree = ast.parse(path.read_text())
    early = set(at_import(tree))
    for name, node in imports(tree, path):
        top = name.partition(".")[0]
        target = inside(name) or ()
        if target[:2] == DEVICE and module_of(path)[:2] != DEVICE:
            assert node not in early, f"{path.name}:{node.lineno} imports Triton code at import time"
        if top == "triton" and module_of(path)[:2] == DEVICE:
            continue
        if top in sys.stdlib_module_names or top in CORE or top == "mxtensor":
            continue
        assert top in OPTIONAL, f"{path.name}:{node.lineno} imports {name}, which is no dependency"
        assert node not in early, f"{path.name}:{node.lineno} imports {name} at import time"
