"""KernelPreference: the product kernel that a recipe requires."""

from __future__ import annotations

from enum import Enum

from ..numerics.choices import member


class KernelPreference(Enum):
    """The product kernel that a recipe requires (names and values are torchao's)."""

    AUTO = "auto"
    """the fastest kernel that accepts the product"""
    EMULATED = "emulated"
    """the definition: decode to float32, multiply, round once"""

    @classmethod
    def of(cls, value: KernelPreference | str) -> KernelPreference:
        """The member with this name; members of torchao's own enum are accepted by their value. Raises ValueError."""
        return member(cls, "kernel_preference", value)
