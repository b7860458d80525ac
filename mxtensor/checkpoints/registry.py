"""Every layout by name, and the choice of the one that a checkpoint has."""

from __future__ import annotations

from pathlib import Path

from ..core import names
from ..core.arguments import described
from .compressed_tensors import COMPRESSED_TENSORS
from .deepseek import DEEPSEEK
from .gguf import GGUF, open_gguf
from .gpt_oss import GPT_OSS
from .layout import Layout
from .mlx import MLX
from .modelopt import MODELOPT
from .native import NATIVE
from .pickled import PICKLED, is_pickled, open_pickled
from .plain import PLAIN
from .quark import QUARK
from .source import Checkpoint, open_checkpoint
from .torchao import TORCHAO

LAYOUTS = {
    layout.name: layout
    for layout in (
        GGUF, PICKLED, NATIVE, TORCHAO, COMPRESSED_TENSORS, GPT_OSS, MODELOPT, DEEPSEEK, QUARK, MLX, PLAIN,
    )
}  # fmt: skip
"""Name -> layout, in the order in which they are asked whether a checkpoint is theirs."""


def get_layout(name: str) -> Layout:
    """The layout called ``name``; case, hyphens and underscores do not matter. Raises ValueError for an unknown one."""
    found = names.find(name, LAYOUTS) if isinstance(name, str) else None
    if found is None:
        choices = names.choices("layouts", name if isinstance(name, str) else "", LAYOUTS)
        raise ValueError(f"unknown layout {described(name)}; {choices}")
    return LAYOUTS[found]


def layout_of(checkpoint: Checkpoint) -> Layout:
    """The layout of an opened checkpoint. Raises NotImplementedError for one that no row knows."""
    for layout in LAYOUTS.values():
        if layout.detect(checkpoint):
            return layout
    raise NotImplementedError(
        f"{checkpoint.path} has the quant_method {described(checkpoint.method)}, which no layout reads; the layouts "
        f"are {', '.join(LAYOUTS)}"
    )


def opened(path: str | Path) -> Checkpoint:
    """Open a folder or a file. Raises FileNotFoundError or ValueError with the reason."""
    path = Path(path)
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return open_gguf(files[0])
        if files:
            raise ValueError(f"{path} has {len(files)} GGUF files; pass one of them: {files[0].name} ...")
        if is_pickled(path):
            return open_pickled(path)
    if path.is_file() and is_pickled(path):
        return open_pickled(path)
    return open_gguf(path) if path.is_file() and path.suffix == ".gguf" else open_checkpoint(path)
