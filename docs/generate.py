"""Write the generated parts of the documentation, or check that they are current.

    python -m docs.generate                    write them
    python -m docs.generate --check            exit with 1 and name the pages that are out of date
    python -m docs.generate [--check] PAGE...  of these pages only

Two kinds of part are generated in README.md, CONTRIBUTING.md and the pages under docs/. What stands between
``<!-- generated: NAME -->`` and ``<!-- end -->`` is a table made by the function of that name in TABLES. A text block
after ``<!-- output -->`` is what the python block before it prints. The python blocks of a page run in order and in one
namespace, in a process and a working directory of the page's own, with warnings as errors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs import records, records_benchmarks
from docs.devices import devices
from docs.markdown import table
from docs.recipes import recipes

ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"<!-- output -->\n+```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """The files that hold documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def first_line(obj: Any) -> str:
    """The first paragraph of a docstring, on one line, as it may stand in a Markdown table."""
    text = " ".join((inspect.getdoc(obj) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text.replace("``", "`")).replace("|", "\\|")


# ---------------------------------------------------------------------------------------------- tables


def formats() -> str:
    """Every row of FORMATS."""
    import mxtensor as mx

    def block(extent: int) -> str:
        return "all" if extent < 0 else str(extent)

    body = []
    for name, f in mx.FORMATS.items():
        aliases = [a for a, target in mx.FORMATS.aliases.items() if target == name]
        e, scale = f.element, f.scale.name + (" and one float32" if f.global_scale else "")
        body.append(
            (
                f"`{name}`", ", ".join(f"`{a}`" for a in aliases) or "-", e.name, f"{e.max:g}",
                f"{block(f.block[0])} x {block(f.block[1])}", scale, f"{f.bits_per_value:.4g}",
            )
        )  # fmt: skip
    return table("format, other names, element, largest, block, scale, bits per value", body)


def layouts() -> str:
    """Every row of mx.checkpoints.LAYOUTS."""
    from mxtensor.checkpoints import LAYOUTS

    body = [
        (f"`{row.name}`", row.producers, row.formats, "read, written" if row.write else "read", row.exact)
        for row in LAYOUTS.values()
    ]
    return table("layout, who uses it, formats, here, what is exact", body)


def commands() -> str:
    """Every subcommand of ``mxtensor``."""
    from mxtensor.cli.main import COMMANDS

    body = [(f"`{name}`", row.help, f"`{row.examples[0]}`") for name, row in COMMANDS.items()]
    return table("command, what it does, example", body)


def _module(rule: Any) -> str:
    name = rule.__module__.removeprefix("mxtensor.")
    return f"`{name.replace('.', '/')}.py`"


def ops() -> str:
    """Every rule of OP_TABLE with the aten overloads it serves."""
    import mxtensor  # noqa: F401  (fills the table)
    from mxtensor.core.dispatch import OP_TABLE

    served: dict[Any, list[str]] = {}
    for op, rule in OP_TABLE.items():
        served.setdefault(rule, []).append(f"`{str(op).removeprefix('aten.')}`")
    body = [(" ".join(sorted(names)), first_line(rule), _module(rule)) for rule, names in served.items()]
    return table("aten, what the rule does, where", sorted(body, key=lambda row: (row[2], row[0])))


def functions() -> str:
    """Every rule of FUNCTION_TABLE."""
    import mxtensor  # noqa: F401
    from mxtensor.core.dispatch import FUNCTION_TABLE

    def name(function: Any) -> str:
        from torch.overrides import resolve_name

        return f"`{resolve_name(function) or function.__name__}`"

    served: dict[Any, list[str]] = {}
    for function, rule in FUNCTION_TABLE.items():
        served.setdefault(rule, []).append(name(function))
    body = [(" ".join(sorted(names)), first_line(rule), _module(rule)) for rule, names in served.items()]
    return table("torch function, what the rule does, where", sorted(body, key=lambda row: (row[2], row[0])))


def kernels() -> str:
    """The kernels of each kind of work in the order in which they are asked, and what each of them is."""
    from mxtensor.kernels.attention import choose_attention as attention
    from mxtensor.kernels.gemm import select as gemm
    from mxtensor.kernels.permute import choose_permutation as permute
    from mxtensor.kernels.quantize import choose_cast as quantize
    from mxtensor.kernels.quantize import choose_pair

    works = (
        ("product", gemm.GEMM), ("grouped product", gemm.GROUPED), ("wgrad of groups", gemm.GROUPED_WGRAD),
        ("quantize", quantize.QUANTIZE), ("quantize both ways", choose_pair.QUANTIZE_BOTH),
        ("fake quantize", quantize.FAKE_QUANTIZE), ("dequantize", quantize.DEQUANTIZE),
        ("attention", attention.ATTENTION), ("permutation", permute.MERGE),
    )  # fmt: skip
    order = [(work, ", ".join(f"`{kernel.name}`" for kernel in row)) for work, row in works]
    files: dict[tuple[str, str], None] = {}
    for _, row in works:
        for kernel in row:
            if kernel.name == choose_pair.TWO_CASTS_PAIR.name:
                continue  # made of the others
            files[kernel.name, kernel.refuses.__module__] = None
    body = [
        (f"`{name}`", first_line(sys.modules[m]), f"`{m.removeprefix('mxtensor.').replace('.', '/')}.py`")
        for name, m in files
    ]
    return table("work, kernels", order) + "\n\n" + table("kernel, what it is, where", body)


def _literal_docs(source: str) -> dict[str, str]:
    """The string literals that follow module-level assignments."""
    out: dict[str, str] = {}
    body = ast.parse(source).body
    for statement, after in pairwise(body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and isinstance(after.value, ast.Constant):
                out[target.id] = inspect.cleandoc(str(after.value.value))
    return out


@cache
def public_docs() -> dict[str, str]:
    """Every public name, ``quantize`` or ``te.Linear``, with its docstring: for a constant, the literal under it."""
    import mxtensor as mx
    import mxtensor.te as te

    literals: dict[str, str] = {}
    for path in sorted((ROOT / "mxtensor").rglob("*.py")):
        literals |= _literal_docs(path.read_text())
    objects = {name: getattr(mx, name) for name in mx.__all__}
    objects |= {f"te.{name}": getattr(te, name) for name in te.__all__ if not inspect.ismodule(getattr(te, name))}
    return {
        name: inspect.getdoc(obj) or "" if callable(obj) or inspect.ismodule(obj) else literals.get(name, "")
        for name, obj in objects.items()
    }


def api() -> str:
    """The public names."""
    places: dict[str, str] = {}  # a name has an entry; a module has a heading, or entries of its classes
    for page in sorted((ROOT / "docs/reference/api").glob("*.md")):
        text = page.read_text()
        places |= {name: page.name for name in re.findall(r"^::: mxtensor\.(\w+)\.\w+$", text, re.MULTILINE)}
        places |= {name: f"{page.name}#mx{name}" for name in re.findall(r"^## mx\.(\w+)$", text, re.MULTILINE)}
        listed = re.findall(r"^::: mxtensor\.(\w+|te\.\w+)$", text, re.MULTILINE)
        places |= {name: f"{page.name}#mxtensor.{name}" for name in listed}
    docs, body = public_docs(), []
    missing = sorted(docs.keys() - places.keys())
    if missing:
        raise ValueError(f"no page of docs/reference/api has ::: mxtensor.{missing[0]}")
    for name, doc in sorted(docs.items(), key=lambda item: item[0].lower()):
        holder = type("holder", (), {"__doc__": doc})
        shown = name if name.startswith("te.") else f"mx.{name}"
        body.append((f"[`{shown}`]({places[name]})", first_line(holder)))
    return table("name, what it is", body)


def torchao() -> str:
    """The comparison; raises ImportError where torchao is not installed."""
    from docs import compare

    return compare.table()


def models() -> str:
    """What benchmarks/models.py recorded."""
    from benchmarks.models import HEADER, cells, recorded

    return table(", ".join(HEADER), [cells(row) for row in recorded()])


RECORDS = (*records.TABLES, *records_benchmarks.TABLES)
GENERATORS = (layouts, commands, formats, ops, functions, kernels, devices, api, torchao, models, recipes, *RECORDS)
TABLES: dict[str, Callable[[], str]] = {generator.__name__: generator for generator in GENERATORS}


def with_tables(text: str) -> str:
    """``text`` with every generated table made anew; one that needs a package that is missing stays as it is."""

    def fill(match: re.Match[str]) -> str:
        try:
            return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"
        except ImportError:
            return match[0]

    return GENERATED.sub(fill, text)


# ---------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Block:
    """A fenced python block: its text, and where it stands."""

    text: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """The python blocks of a page, in order."""
    return [Block(m[2], m.start(2), m.end()) for m in FENCE.finditer(text) if m[1] == "python"]


def run_here(path: Path) -> list[str]:
    """Run the blocks of a page in this process; what each prints. Tracebacks show the page's own lines."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)  # inside torch.compile
    text = path.read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in blocks(text):
        before = "\n" * text.count("\n", 0, block.start)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(before + block.text, str(path), "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def run(path: Path) -> list[str]:
    """``run_here`` in a fresh process and a temporary directory. Raises RuntimeError with the traceback."""
    if not blocks(path.read_text()):
        return []
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "docs.generate", "--run", str(path.resolve())]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path}: a python block failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


DECIMAL = re.compile(r"-?\d+\.\d+")


def same(shown: str, printed: str) -> bool:
    """Equal words and whole numbers, and decimal numbers within 2 %: machines add up in different orders."""

    def words(text: str) -> str:
        return re.sub(r"-{2,}", "--", " ".join(DECIMAL.sub("#", text).split()))

    pairs = zip(DECIMAL.findall(shown), DECIMAL.findall(printed), strict=False)
    close = all(abs(float(a) - float(b)) <= 0.02 * max(1.0, abs(float(a))) for a, b in pairs)
    return words(shown) == words(printed) and close


def with_outputs(text: str, printed: list[str]) -> str:
    """``text`` with every shown output that differs from what was printed replaced."""
    found = blocks(text)

    def fill(match: re.Match[str]) -> str:
        last = max(i for i, block in enumerate(found) if block.end <= match.start())
        new = "".join(f"{line.rstrip()}\n" for line in printed[last].splitlines())
        return match[0] if same(match[1], new) else f"<!-- output -->\n\n```text\n{new}```"

    return OUTPUT.sub(fill, text)


def current(path: Path) -> str:
    """The page as it should be. Raises RuntimeError where a python block fails."""
    text = path.read_text()
    return with_tables(with_outputs(text, run(path)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, default=pages(), metavar="PAGE", help="all, if none is named")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    parser.add_argument("--run", type=Path, metavar="PAGE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(run_here(args.run)))
        return 0
    stale = [(path, new) for path in args.pages for new in (current(path),) if new != path.read_text()]
    for path, new in stale:
        print(f"{path} {'is out of date: run make docs' if args.check else 'written'}")
        if not args.check:
            path.write_text(new)
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
