"""What ``convert`` reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Conversion:
    """What ``convert`` did, tensor by tensor."""

    source: str
    """The layout that was read."""
    layout: str
    errors: dict[str, float] = field(default_factory=dict)
    """Tensor -> relative error (Frobenius norm) of one that was quantized, measured on at most
    262,144 values."""
    exact: list[str] = field(default_factory=list)
    """Tensors whose codes or values were stored as they were."""
    dropped: list[str] = field(default_factory=list)
    """Scales of static activations of another layout, which are not stored."""
    stacks: list[str] = field(default_factory=list)
    """Experts that would have been quantized, and stay as they were: readers of the layout would not take them."""

    left: list[str] = field(default_factory=list)
    """Other matrices that would have been quantized, and stay as they were: transformers splits or joins them without a
    look at codes, two layers share them, or the layout does not hold matrices (in, out)."""

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name], default=None)
        lines = [f"{self.source} -> {self.layout}: {len(self.exact)} tensors exact, {len(self.errors)} rounded"]
        if worst is not None:
            mean = sum(self.errors.values()) / len(self.errors)
            lines.append(f"relative error: mean {mean:.3g}, largest {self.errors[worst]:.3g} ({worst})")
        if self.dropped:
            lines.append(f"{len(self.dropped)} scales of static activations were left out, such as {self.dropped[0]}")
        if self.stacks:
            lines.append(
                f"{len(self.stacks)} tensors of experts stay as they were, such as {self.stacks[0]}: readers of the "
                f"layout {self.layout} take none that are quantized (the layout native holds stacks)"
            )
        if self.left:
            lines.append(
                f"{len(self.left)} matrices stay as they were, such as {self.left[0]}: readers of the layout "
                f"{self.layout} split, join, transpose or share them, and take no codes meanwhile"
            )
        return "\n".join(lines)
