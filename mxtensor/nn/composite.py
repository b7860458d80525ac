"""What MultiheadAttention and TransformerLayer have in common: modules of several products."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.arguments import Kind, check, described, is_dense_float, optional
from .context_parallel import set_group_of_attention
from .styles import refuse
from .tensor_parallel import set_group_of_modules

SEQUENCE = Kind(
    "a dense floating-point torch.Tensor of 3 dimensions",
    lambda x: isinstance(x, Tensor) and is_dense_float(x),
    lambda x: x.dim() == 3,
)


def check_sequences(owner: str, hidden_states: Any, encoder_output: Any, is_cross: bool, option: str) -> None:
    """Raise TypeError or ValueError unless both are sequences, and ``encoder_output`` is given if ``is_cross`` and only
    then. ``option`` names the argument that decides."""
    check(owner, "hidden_states", hidden_states, SEQUENCE)
    check(owner, "encoder_output", encoder_output, optional(SEQUENCE))
    if (encoder_output is None) is is_cross:
        needs = "needs" if encoder_output is None else "takes no"
        given = "" if encoder_output is None else f", got {described(encoder_output)}"
        raise ValueError(f"{owner}: {option} {needs} encoder_output{given}")


class Composite(nn.Module):
    """A module whose products are modules inside."""

    def split_by_style(self, style: Any, mode: str, mesh: Any) -> Any:
        """Called by the styles of ``mx.parallel``: raises NotImplementedError."""
        refuse(style, self, type(self).__name__, "it has several weights, and a style is for one")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The process group of modules that were made with ``tp_size`` and without ``tp_group``."""
        set_group_of_modules(self, tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """The process group over which sequences are split, as for DotProductAttention; None for none."""
        set_group_of_attention(self, cp_group, cp_comm_type)
