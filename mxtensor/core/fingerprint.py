"""What compiled graphs depend on besides their tensors: a digest of the package's own sources, and its settings.

torch.compile caches compiled graphs under a key of the tensors, not of the rules and kernels that lowered the graph.
With this digest in the key, another version of the package never runs an old graph.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from .select import forced_kernel

COMPILATION: dict[str, bool] = {}
"""Settings of this process that change what a graph compiles to; torch's cache of compiled graphs tells them apart."""


@cache
def fingerprint() -> str:
    """Hex digest over every source file of the package, computed once a process."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def compilation_state() -> tuple[Any, ...]:
    """What every key of a graph with an op or a tensor of the package has: its version and its settings."""
    return fingerprint(), sorted(COMPILATION.items()), forced_kernel()
