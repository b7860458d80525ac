"""Hooks of mkdocs: CONTRIBUTING.md and CHANGELOG.md, at the root of the repository, become pages of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOT_FILES = {"CONTRIBUTING.md": "develop/contributing.md", "CHANGELOG.md": "develop/changelog.md"}
"""File at the root -> page of the site."""
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)")


def relinked(text: str) -> str:
    """``text`` of a root file with its links relative to ``docs/develop/``; a link that the site lacks becomes text."""

    def target(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if path.startswith(("http://", "https://")):
            return match[0]
        if path in ROOT_FILES:
            return f"](../{ROOT_FILES[path]}{anchor})"
        return f"](../{path.removeprefix('docs/')}{anchor})" if path.startswith("docs/") else "](#)"

    return LINK.sub(target, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the root files to the pages of the site."""
    from mkdocs.structure.files import File

    for source, page in ROOT_FILES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link of a page to a root file leads to its page of the site."""
    for source, path in ROOT_FILES.items():
        markdown = markdown.replace(f"](../../{source}", f"](../{path}")
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Leave out Sphinx's markup in docstrings, such as ``:func:``, and give each page a class for the style sheet."""
    html = re.sub(r":\w+:(?=<code>)", "", html)
    return f'<div class="page-{Path(page.file.src_path).stem}">{html}</div>'
