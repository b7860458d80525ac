"""No word of a private vocabulary is left: the field has its own words. ``python -m tests.words`` prints what is left.

``NAMES`` are words that no identifier has: a name is split at underscores and capitals, so that ``NEXT_TURN`` and
``NextTurn`` both have the word "turn". ``PROSE`` are words that comments, strings and pages do not have. A row may be
about some files only. What is allowed nevertheless is a row of ``ALLOWED`` with its reason.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = r"mxtensor/kernels/|tests/kernels/|helpers/cuda_"
SMALL_M = r"kernels/(small_m|cuda)/|compile/|report/(test_)?tune|helpers/cuda_|benchmarks/(test_)?(layers|generate)"
"""Files about the kernels for few rows, where words such as "apart" had a private meaning."""
ROW_SCALED = r"row_scaled|fp8_rows|row_operand"
"""Files about row-scaled operands; their glossary is in ``mxtensor/numerics/row_scaled.py``."""


class Row(NamedTuple):
    pattern: str
    say: str
    files: str = ""
    """What a path has to contain."""


NAMES = [
    Row("turned|turns?", "transposed, swizzle"),
    Row("roles?", "recipe, casts"),
    Row("factors?", "operands"),
    Row("uncast", "unquantized"),
    Row("round trips?", "fake quantize"),
    Row("kept", "saved, cached"),
    Row("again", "plan, launch"),
    Row("room", "shared memory", KERNELS),
    Row("plans?|cuts?", "launch config", SMALL_M),
    Row("together", "wgmma", SMALL_M),
    Row("resident", "persistent"),
    Row("staged", "pipelined"),
    Row("apart", "reduce through global memory", SMALL_M),
    Row("sends", "reduce through distributed shared memory", SMALL_M),
    Row("meeting|meets?", "cluster reduce, barrier", r"kernels/|helpers/cuda_"),
    Row("own", "warp activations", r"kernels/(small_m|cuda)/"),
    Row("spread", "small_m mma", r"kernels/(small_m|cuda)/"),
    Row("lies?", "layout, alignment"),
    Row("parts", "components, weight shards"),
    Row("last", "global scale", r"^mxtensor/(kernels|numerics)/"),
    Row("held", "cached operands"),
    Row("settled?|settles", "init state, guard int"),
    Row("surroundings", "dispatch context"),
    Row("resumed", "restore context"),
    Row("facade", "outer"),
    Row("codec", "reference"),
    Row("ambient", "autocast"),
    Row("small batch", "small_m"),
    Row("any distance", "unlimited range"),
    Row("moved|moves?", "rescale", ROW_SCALED),
    Row("beyond", "out of range", ROW_SCALED),
    Row("octaves?", "exponent range, max_range", ROW_SCALED),
    Row("marks|marked", "flags", rf"kernels/.*({ROW_SCALED})"),
    Row("extremes?", "exponents, exponent words", ROW_SCALED),
    Row("places?", "tile map, index", ROW_SCALED),
    Row("one read", "rows first", ROW_SCALED),
    Row("few bits", "sub-byte", ROW_SCALED),
    Row("own (top|up)|top", "row exponent, unchanged, offset, shift", ROW_SCALED),
    Row("facts", "exponents, row scales", ROW_SCALED),
]
"""Words of identifiers, separated by spaces."""

PROSE = [
    Row(r"turned(?! (out|into|on|off|to)\b)", "transposed"),
    Row(r"roles?", "recipe, casts"),
    Row(r"factors?", "operands"),
    Row(r"uncast", "unquantized"),
    Row(r"round[- ]trips?", "fake quantize"),
    Row(r"kept", "saved, cached, stays"),
    Row(r"room", "shared memory", KERNELS),
    Row(r"residents?", "persistent"),
    Row(r"staged", "pipelined"),
    Row(r"sends|apart", "reduction through distributed shared memory, through global memory", SMALL_M),
    Row(r"lies?", "layout, is aligned, is stored"),
    Row(r"held", "cached, stored"),
    Row(r"settle[sd]?", "init state, guard int"),
    Row(r"surroundings", "dispatch context"),
    Row(r"resumed", "restored"),
    Row(r"facades?", "outer tensor, outer dtype"),
    Row(r"codecs?", "reference"),
    Row(r"ambient", "autocast"),
    Row(r"small[- ]batch(es)?", "small_m"),
    Row(r"(own|meeting|words|spread|together|resident)\.cuh?", "the file's name of today"),
    Row(r"(codec|parts|roles|factors|te_names|compiled|again|ambient)\.py", "the file's name of today"),
    Row(r"beyond the bound", "out of range"),
    Row(r"re-express(es|ed|ing)?", "rescale"),
    Row(r"moved?|beyond|octaves?|marked|marks|extremes?", "a term of numerics/row_scaled.py", ROW_SCALED),
    Row(r"that which", "what"),
    Row(r"ere", "before"),
    Row(r"there is none that", "no ..."),
    Row(r"(?<!there )(?:is|are) no (?!longer|more|further)[a-z]+", "is not a ..."),
]
"""Words of comments, docstrings, messages and pages."""

ALLOWED = [
    (r"QuantizerRole", "a class of TransformerEngine"),
    (r"held[-_ ]out", "held-out data is the field's word"),
    (r"['\"]role['\"]", "a key of transformers' chat messages"),
    (r"scal(e|ing)[-_ ]factors?", "a scale factor is the field's word"),
    (r"\b(a|the same|this|some) factor of|by a factor|prime factors?", "a ratio, not an operand of a product"),
    (r"(growth|backoff|divide|interpolation|split)_factor", "names of torch and TransformerEngine"),
    (r"\.parts\b", "pathlib's attribute"),
    (r"_get_field_parts", "a method of gguf's reader"),
]
"""What does not count, and why."""

FREE = {"tests/words.py"}
FOLDERS = ("mxtensor", "tests", "benchmarks", "docs", "examples")
CUDA, PAGES = {".cu", ".cuh", ".h", ".cpp"}, {".md", ".toml", ".yml"}
STRINGS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
NAME_IN_PROSE = re.compile(r"\.?\b[A-Za-z]\w*(?:_|[a-z][A-Z])\w*")


def files() -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in {".py", *CUDA, *PAGES}]
    found += [p for p in ROOT.iterdir() if p.suffix in PAGES or p.name == "Makefile"]
    return sorted(p for p in found if p.relative_to(ROOT).as_posix() not in FREE)


@cache
def words_of(name: str) -> str:
    """``"small m plan"`` for ``SMALL_M_PLAN``, ``small_m_plan`` and ``SmallMPlan``."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()


def pieces(path: Path, text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, piece, whether it is a name) of every identifier and of every line of prose."""
    prose: list[tuple[int, str]] = []
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            (line, column), string = token.start, token.string
            if string.startswith("test_"):  # the name of a test is a sentence
                yield line, string.replace("_", " "), False
            elif token.type == tokenize.NAME:
                yield line, f".{string}" if token.line[:column].endswith(".") else string, True
            elif token.type in STRINGS:
                prose += [(line + i, row) for i, row in enumerate(string.splitlines())]
    else:
        prose = list(enumerate(text.splitlines(), 1))
        if path.suffix in CUDA:
            code = C_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
            yield from (
                (n, name, True) for n, row in enumerate(code.splitlines(), 1) for name in re.findall(r"\w+", row)
            )
    for line, row in prose:
        yield line, row, False
        yield from ((line, name, True) for name in NAME_IN_PROSE.findall(row))


@cache
def searched(rows: tuple[Row, ...]) -> re.Pattern[str]:
    """One pattern for all rows: a search of each row alone takes seconds. Group ``_3`` is row 3."""
    every = "|".join(f"(?P<_{i}>{row.pattern})" for i, row in enumerate(rows))
    return re.compile(rf"(?<![\w-])(?:{every})(?![\w-])", re.IGNORECASE)


ALLOWED_NOW = re.compile("|".join(pattern for pattern, _ in ALLOWED), re.IGNORECASE)


def offences(path: Path, text: str) -> list[str]:
    """``file:line: old word in what: say ...`` for the old words of ``text``, as the text of ``path``."""
    place = path.relative_to(ROOT).as_posix()
    names, prose = (tuple(row for row in table if re.search(row.files, place)) for table in (NAMES, PROSE))
    found = {}
    for line, piece, is_name in pieces(path, text):
        for what in found_in(piece, is_name, names if is_name else prose):
            found[f"{place}:{line}: {what}"] = None
    return list(found)


@cache
def found_in(piece: str, is_name: bool, rows: tuple[Row, ...]) -> list[str]:
    """The old words of one piece, each with its context and what to say. Most names occur many times."""
    rest, found = ALLOWED_NOW.sub(" ", piece), []
    for match in searched(rows).finditer(words_of(rest) if is_name else rest):
        say = next(row.say for i, row in enumerate(rows) if match.group(f"_{i}") is not None)
        context = piece if is_name else piece[max(0, match.start() - 30) : match.end() + 30].strip()
        found.append(f"{match[0]!r} in {context!r}: say {say}")
    return found


def left() -> list[str]:
    return [line for path in files() for line in offences(path, path.read_text())]


@pytest.mark.exhaustive
def test_no_old_word_is_left():
    found = left()
    assert found == [], f"{len(found)} old words, see python -m tests.words"


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("a.py", "kept_x = is_turned(x.held_by)", 3),
        ("a.py", "class OldCodec: pass", 1),
        ("a.py", "x = 'the facade' # which is kept", 2),
        ("a.py", "monkeypatch.setattr(m, 'ROUND_TRIP', y)", 1),
        ("a.py", "held_out, scale_factor, path.parts = keep('turned out')", 0),
        ("a.md", "What lies there by a factor of two", 1),
        ("a.md", "This is no recipe, and these are no layers", 2),
        ("a.md", "There is no limit, and it is no longer than that", 0),
        ("kernels/cuda/a.cu", "int resident_plan; // staged\n", 3),
        ("kernels/cuda/a.cu", "int x; /* its own\n lines */ int y;", 0),
        ("kernels/small_m/a.py", "together = 1  # together", 1),
        ("kernels/gemm/fp8_rows_a.py", "own_top = any_distance  # a row beyond the bound, moved by octaves", 5),
        ("kernels/gemm/other.py", "top = moved  # marks of octaves", 0),
    ],
)
def test_an_old_word_would_be_found(file, text, count):
    assert len(offences(ROOT / file, text + "\n")) == count


def test_names_are_split_at_underscores_and_capitals():
    assert [words_of(n) for n in ("SMALL_M_PLAN", "SmallMPlan", "small_m", "HTMLPage")] == [
        "small m plan", "small m plan", "small m", "html page",
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(left()) or "no old word is left")
    sys.exit(bool(left()))
