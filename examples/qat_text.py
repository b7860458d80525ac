"""The text that ``examples.qat`` trains on: that of installed packages, and text that a model writes.

Nothing of it is measured: the modules and the novel that ``benchmarks.quality`` measures are left out.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from benchmarks import quality
from examples.minilm import SENTENCES, load_sentences

MODULES = (
    *quality.CALIBRATION, "ast", "calendar", "configparser", "csv", "ctypes", "datetime", "difflib", "doctest",
    "enum", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "html.parser", "imaplib", "inspect",
    "ipaddress", "itertools", "locale", "mailbox", "multiprocessing", "optparse", "os", "pathlib", "pdb", "pickle",
    "platform", "pprint", "queue", "re", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "sqlite3", "ssl", "string", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tkinter", "trace",
    "traceback", "turtle", "types", "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom",
    "zipfile",
)  # fmt: skip
"""Modules whose documentation trains; none that is measured."""
PLAIN = (".md", ".rst", ".txt")
BYTES = (500, 300_000)
"""Sizes of files that are read."""
ASCII = 0.97
"""The least share of ASCII characters: other text is English rarely."""
AT_ONCE = 32
"""Documents that are tokenized in one call, and sequences that are sampled at once on a CPU."""


def documentation() -> Iterator[str]:
    """What pydoc prints of each of MODULES that this Python has."""
    for name in MODULES:
        try:
            yield quality.documentation((name,))
        except ImportError:  # a Python without tkinter or sqlite3
            continue


def files(folders: list[Path] | None = None) -> Iterator[str]:
    """The texts of the files of installed packages and the standard library, each once, in an order without meaning.

    Of one in three files of Python the whole source is read, and of the others the docstrings.
    """
    folders = folders or sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")})
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", *PLAIN)}
    measured, novel = set(quality.EVALUATION), load_sentences(SENTENCES)
    seen = set()
    for order, path in sorted((hashlib.sha256(str(path).encode()).digest(), path) for path in found):
        if measured & {*path.parts, path.stem} or not BYTES[0] <= path.stat().st_size <= BYTES[1]:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if path.suffix == ".py" and order[0] % 3:
            text = docstrings(text)
        digest = hashlib.sha256(text.encode()).digest()
        few = len(text) < BYTES[0] or len(text.encode("ascii", "ignore")) < ASCII * len(text)
        if few or digest in seen or any(sentence in text for sentence in novel[::10]):
            continue
        seen.add(digest)
        yield text


def docstrings(source: str) -> str:
    """The names and docstrings of a module, its classes and functions, in their order; "" if it has a syntax error."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    pieces = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                head = ""
                if isinstance(node, ast.ClassDef):
                    head = f"class {node.name}\n"
                elif not isinstance(node, ast.Module):
                    head = f"{node.name}({ast.unparse(node.args)})\n"
                pieces.append(head + text)
    return "\n\n".join(pieces)


def rows_of(tokenizer: Any, texts: Iterator[str], window: int, tokens: int) -> Tensor:
    """The first ``tokens`` tokens of texts, one after another, as (rows, window); fewer if texts end before."""
    pieces: list[Tensor] = []
    have = 0
    while have < tokens:
        some = [text for _, text in zip(range(AT_ONCE), texts, strict=False)]
        if not some:
            break
        for ids in tokenizer(some)["input_ids"]:
            pieces.append(torch.tensor(ids, dtype=torch.int32))
            have += len(ids)
    joined = torch.cat(pieces)[:tokens]
    return joined[: len(joined) // window * window].view(-1, window).long()


def sampled(model: Any, rows: int, window: int, starts: Tensor, at_once: int, seed: int = 0) -> Tensor:
    """Rows that the model writes, (rows, window): one in four begins with its first token, the others with ``starts``.

    The first token of SmolLM2 begins a chat; other tokens begin any text that the model was trained on.
    """
    index = torch.randint(len(starts), (rows,), generator=torch.Generator().manual_seed(seed))
    firsts = torch.where(torch.arange(rows) % 4 == 0, model.config.bos_token_id, starts[index])
    return torch.cat(mx.sampled_data(model, rows, window, start=firsts, seed=seed, at_once=at_once)).cpu()
