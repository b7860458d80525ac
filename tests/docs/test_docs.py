"""The documentation is true: its code runs, its tables are current, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mxtensor as mx
from docs.generate import ROOT, pages, public_docs

PAGES = pages()
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """The files of the checkout, or every file of an unpacked archive outside hidden folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]
    hidden = re.compile(r"(?:^|/)(?:\.|__pycache__/|out/)")
    return [p for p in ROOT.rglob("*") if p.is_file() and not hidden.search(p.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_run_and_generated_parts_are_current(page: Path) -> None:
    command = [sys.executable, "-m", "docs.generate", "--check", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


def test_shown_numbers_may_differ_a_little_and_words_may_not() -> None:
    from docs.generate import same

    assert same("a  31.52 dB\n--- 4\n", "a 31.50 dB\n------ 4")
    assert not same("a 31.52 dB", "a 33.52 dB")
    assert not same("a 31.52 dB", "b 31.52 dB")
    assert not same("4 calls", "5 calls")


def anchors(page: Path) -> set[str]:
    """The ids that a heading gets: lower case, words joined by hyphens."""
    headings = HEADING.findall(CODE.sub(lambda m: m[0].strip("`") if "\n" not in m[0] else "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in PAGES if p.parent.name == "docs" and f": {p.name}" not in navigation] == []


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z]+)\b", page.read_text(), re.MULTILINE)
    }
    assert named - targets == set()
    assert {"demo", "test"} <= named


@pytest.mark.parametrize("public", mx.__all__)
def test_public_names_are_documented(public: str) -> None:
    assert public_docs()[public].strip(), f"mx.{public} has no docstring"
    assert any(f"mx.{public}`" in page.read_text() for page in PAGES), f"no page names `mx.{public}`"


def floors() -> dict[str, int]:
    """File or folder of the package -> its place in the table of CONTRIBUTING.md, the lowest first."""
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {name: place for place, name in enumerate(re.findall(r"`(\w+)(?:\.py|/)`", " ".join(rows)))}


def test_the_floors_are_the_files() -> None:
    found = {
        p.relative_to(ROOT / "mxtensor").components[0].removesuffix(".py") for p in (ROOT / "mxtensor").rglob("*.py")
    }
    assert set(floors()) == found - {"__init__"}


def test_a_file_imports_only_from_below() -> None:
    places = floors()
    wrong = []
    for path in (ROOT / "mxtensor").rglob("*.py"):
        here = path.relative_to(ROOT / "mxtensor")
        if here.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level != len(here.components):
                continue  # not of the package, or of a neighbour in the same folder
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            mine = places[here.components[0].removesuffix(".py")]
            wrong += [f"{here} imports {n}" for n in names if places[n] >= mine]
    assert wrong == []


def test_the_bits_in_the_readme() -> None:
    rows = re.findall(r"^\| (`.+?`) \| ([\d., ]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows
    for names, bits in rows:
        formats = re.findall(r"`(\w+)`", names)
        shown = {float(b) for b in bits.split(", ")}
        assert shown == {float(f"{mx.get_format(f).bits_per_value:.4g}") for f in formats}, names


def test_the_version_is_one() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None and version[1] == mx.__version__
    assert f"{mx.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    names = {re.split(r"[^\w-]", d)[0].lower().replace("_", "-") for d in wanted}
    assert names <= pinned, f"constraints.txt does not pin {sorted(names - pinned)}"


FORBIDDEN = {
    "an absolute path of one machine": re.compile(r"(?<![\w./-])/(?:root|home|Users|work|workspace)/\w"),
    "a conflict marker": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    "a debugger call": re.compile(r"^\s*(?:breakpoint|pdb\.set_trace)\(", re.MULTILINE),
    "a note to oneself": re.compile(r"\b(?:FIX" + r"ME|X" + r"XX)\b"),
}


def test_no_file_holds_what_only_its_author_needs() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name(path)}: {what}" for what, pattern in FORBIDDEN.items() if pattern.search(text)]
    assert found == []
