"""Linear layers whose ``forward`` has to run, even where torch would multiply by their weights without calling them."""

from __future__ import annotations

from typing import Any

from torch import nn


class CalledLinear(nn.Linear):
    """An nn.Linear with a ``forward`` of its own.

    In evaluation without gradients ``nn.TransformerEncoderLayer`` gives the weights of its layers to one fused op, and
    calls no layer. It calls them if one of them has a hook.
    """

    def _must_be_called(self) -> None:
        """Call it once after the class was changed to this one."""
        if not hasattr(self, "_called"):
            self._called = self.register_forward_pre_hook(_nothing)

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, with the parameters that it has."""
        if hasattr(self, "_called"):
            self._called.remove()
            del self._called
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that changes nothing."""
