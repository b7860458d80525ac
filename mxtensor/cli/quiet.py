"""transformers without its messages, its network and, where standard error is not a terminal, its progress bars."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from .output import is_terminal

NOISY = ("torchao", "torch.utils._pytree")
"""Loggers whose warnings are about the imports of another package."""


def quiet_imports() -> None:
    """Leave out what packages say about themselves when transformers imports them."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def transformers_quietly() -> Any:
    """The module transformers, without its messages, its progress bars and the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a path on this machine is all that is read
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the tables say the bits
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this command needs transformers: pip install 'mxtensor[cli]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def library_output() -> Iterator[None]:
    """What a library prints goes to standard error if that is a terminal, and is dropped otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"mxtensor\.")
        target = sys.stderr if is_terminal() else io.StringIO()
        with redirect_stdout(target), redirect_stderr(target):
            yield
