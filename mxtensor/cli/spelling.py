"""Messages of the package in the words of the command: ``overwrite=True`` is ``--overwrite``.

The package names the arguments of its Python functions, and the command has an option for most of them. Every message
that the command prints is rewritten here, by the options that the subcommand has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VALUE = r"""(?P<value>True|False|None|'[^']*'|"[^"]*"|\d+)?"""

QUOTES = "'\""


def in_options(text: str, options: Mapping[str, str]) -> str:
    """``text`` with ``name=value`` of Python as an option of the command. ``options``: name -> option."""
    if not options:
        return text
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))

    def option(found: re.Match[str]) -> str:
        flag, value = options[found["name"]], found["value"]
        if value == "False":
            return f"without {flag}"
        return flag if value in (None, "True") else f"{flag} {value.strip(QUOTES)}"

    return re.sub(rf"(?<![\w./=-])(?P<name>{names})={VALUE}(?![\w/])", option, text)
