"""The documentation is true: its code runs, its tables are current, its links lead somewhere."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mxtensor as mx
from docs import rooms
from docs.generate import OUTPUT, ROOT, pages, public_docs
from docs.site_hooks import ROOT_FILES, relinked

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


@pytest.mark.exhaustive(quick=1)
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
    """The ids that a heading gets: lower case, words joined by hyphens. A name of the API reference is an id itself."""
    text = page.read_text()
    headings = HEADING.findall(CODE.sub(lambda m: m[0].strip("`") if "\n" not in m[0] else "", text))
    ids = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return ids | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


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


DOCS = ROOT / "docs"
SITE_PAGES = [p for p in PAGES if DOCS in p.parents]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(p.relative_to(DOCS)) for p in SITE_PAGES} | set(ROOT_FILES.values())


@pytest.mark.parametrize("page", SITE_PAGES, ids=name)
def test_a_page_begins_with_its_reader_and_a_block_of_code(page: Path) -> None:
    title, first, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ")
    assert first.startswith("You "), "say what the reader has, and wants to do"
    assert "```" in page.read_text().split("\n## ")[0], "a block of code before the first section"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_row_of_a_table_names_a_file_twice(page: Path) -> None:
    """A second mention is what remains where files have been merged."""
    for row in re.findall(r"^\|.*$", page.read_text(), re.MULTILINE):
        files = re.findall(r"`([\w/]+\.(?:py|cpp|cuh|cu|c|h))`", row)
        assert len(files) == len(set(files)), f"{name(page)}: {row}"


def test_no_shown_output_of_the_readme_is_wider_than_a_terminal() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    assert all(len(line) <= 100 for block in OUTPUT.findall(text) for line in block.splitlines())


def test_every_public_name_is_in_the_reference() -> None:
    pages = " ".join(p.read_text() for p in (DOCS / "reference" / "api").glob("*.md"))
    listed = {path.removeprefix("mxtensor.").split(".")[0] for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    modules = {name for name in mx.__all__ if inspect.ismodule(getattr(mx, name))}
    assert set(mx.__all__) - modules <= listed
    assert all(f"mx.{module}" in pages for module in modules)


def test_the_names_of_the_reference_exist() -> None:
    for page in SITE_PAGES:
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, attribute = path.rpartition(".")
            assert hasattr(pkgutil.resolve_name(module), attribute), f"{name(page)} lists {path}"


def test_the_root_files_link_to_pages_of_the_site() -> None:
    for source in ROOT_FILES:
        for link in LINK.findall(CODE.sub("", relinked((ROOT / source).read_text()))):
            if not link.startswith(("http", "#")):
                path = (DOCS / "develop" / link.partition("#")[0]).resolve()
                assert path.exists() or str(path.relative_to(DOCS)) in ROOT_FILES.values(), link


def test_the_picture_of_the_rooms_is_current() -> None:
    assert rooms.PICTURE.read_text() == rooms.picture(), "run python -m docs.rooms"


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


def test_the_table_of_rooms_is_the_package() -> None:
    """Floors and circles of the imports are checked by tests/floors.py."""
    table = rooms.rooms()
    floors = [floor for floor, _, _ in table]
    assert floors == sorted(floors, reverse=True)
    folders = {p.name for p in (ROOT / "mxtensor").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert {room for _, room, _ in table} == folders | {"__init__"}


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
    names = {re.split(r"[^\w-]", d)[0].lower().replace("_", "-") for d in wanted} - {
        project["name"]
    }  # extras of extras
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
