"""``Plan``: a format for each weight, chosen by measured errors under a budget of bits.

plan = mx.plan(model, data, bits=5.0)
plan.save("plan.json")
mx.quantize_(model, mx.Plan.load("plan.json"))
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.arguments import POSITIVE, check
from ..core.text_table import text_table
from .budget import Choice, within
from .fqn_config import FqnToConfig

VERSION = 1
KEYS = ("version", "measure", "weights")
"""What the file of a plan has."""
MEASURES = {"kl": "KL", "squared": "error", "layer": "error"}
"""How errors were measured, and the head of their column."""


class PlannedWeight(NamedTuple):
    """What was measured of one weight."""

    values: int
    nbytes: Mapping[str, int]
    """Format -> bytes of codes and scales."""
    errors: Mapping[str, float]
    """Format -> error of the model, or of the layer, with this weight in this format and all others unquantized."""
    estimated: bool = False
    """Whether the errors are estimated from those of the weight: no input of it was seen."""


@dataclass(repr=False)
class Plan(FqnToConfig):
    """A format for each weight by its name, with the errors by which it was chosen. ``print`` shows a table.

    It is an ``FqnToConfig``: ``quantize_`` and ``calibrate`` take it, and an entry of ``fqn_to_config`` can be
    replaced by another format that was measured. Bits are counted over the weights of the plan, scales included.
    """

    weights: Mapping[str, PlannedWeight] = field(default_factory=dict)
    """By the name of the parameter, what was measured."""
    measure: str = "kl"
    """``"kl"``: errors are KL divergences in nats per token; see ``mx.plan``."""

    def _of(self, kind: str) -> list[float]:
        table = self.table()
        for fqn, weight in self.weights.items():
            if table.get(fqn) not in weight.errors:
                raise ValueError(
                    f"Plan: the format of {fqn} is {table.get(fqn)!r}, which was not measured; choose one of "
                    f"{', '.join(weight.errors)}"
                )
        return [getattr(weight, kind)[table[fqn]] for fqn, weight in self.weights.items()]

    @property
    def values(self) -> int:
        """Values of all weights of the plan."""
        return sum(weight.values for weight in self.weights.values())

    @property
    def bits(self) -> float:
        """Stored bits for one value, over the weights of the plan. Raises ValueError for a format not measured."""
        return 8 * sum(self._of("nbytes")) / max(self.values, 1)

    @property
    def error(self) -> float:
        """The sum of the errors of all weights: for ``"kl"`` about the KL divergence, if rounded to nearest."""
        return sum(self._of("errors"))

    def with_bits(self, bits: float) -> Plan:
        """The plan for another budget, from the same errors. Raises ValueError if the formats need more bits."""
        return planned_for(self.weights, bits, self.measure)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which is whole or stays as it was. Links are followed."""
        weights = {
            fqn: {"format": self.table()[fqn], **weight._asdict()} for fqn, weight in self.weights.items()
        }  # fmt: skip
        fields = {"version": VERSION, "measure": self.measure, "bits": self.bits, "weights": weights}
        text, path = json.dumps(fields, indent=1) + "\n", Path(path)
        if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout, must not be replaced
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        new = path.with_name(f"{path.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of ``save``. Raises ValueError for another file, OSError for one that cannot be read."""
        raw = Path(path).read_bytes()
        try:
            fields = json.loads(raw.decode("utf-8"))
            lacks = [key for key in KEYS if key not in fields] if isinstance(fields, dict) else KEYS
            if lacks:
                raise ValueError(f"it has no {' and no '.join(lacks)}")
            if fields["version"] != VERSION or fields["measure"] not in MEASURES:
                raise ValueError(f"version {fields['version']!r}, measure {fields['measure']!r}")
            rows = {fqn: dict(row) for fqn, row in fields["weights"].items()}
            formats = {fqn: str(row.pop("format")) for fqn, row in rows.items()}
            plan = cls(formats, weights={fqn: _checked(row) for fqn, row in rows.items()}, measure=fields["measure"])
            plan._of("errors")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} was not written by mx.Plan.save: {error}; make one by mx.plan or `mxtensor plan`"
            ) from error
        return plan

    def __str__(self) -> str:
        names: dict[str, list[str]] = {}
        for fqn in self.weights:
            names.setdefault(re.sub(r"\.\d+\.", ".*.", fqn), []).append(fqn)
        table, errors = self.table(), dict(zip(self.weights, self._of("errors"), strict=True))
        lines = []
        for pattern, fqns in names.items():
            counts: dict[str, int] = {}
            for fqn in fqns:
                counts[table[fqn]] = counts.get(table[fqn], 0) + 1
            formats = ", ".join(f"{n} {format}" for format, n in sorted(counts.items(), key=lambda item: -item[1]))
            lines.append(self._line(pattern, formats, fqns, errors))
        lines.append(self._line("all", "", list(self.weights), errors))
        header = ("weights", "formats", "values", "bits", MEASURES[self.measure])
        return text_table(header, lines, left=(0, 1))

    __repr__ = __str__

    def _line(
        self, name: str, formats: str, fqns: list[str], errors: Mapping[str, float]
    ) -> tuple[str, str, str, str, str]:
        weights, table = [self.weights[fqn] for fqn in fqns], self.table()
        values = sum(weight.values for weight in weights)
        nbytes = sum(weight.nbytes[table[fqn]] for fqn, weight in zip(fqns, weights, strict=True))
        error = sum(errors[fqn] for fqn in fqns)
        return name, formats, f"{values:,}", f"{8 * nbytes / max(values, 1):.2f}", f"{error:.4f}"


def _checked(row: dict[str, Any]) -> PlannedWeight:
    weight = PlannedWeight(**row)
    numbers = [weight.values, *weight.nbytes.values(), *weight.errors.values()]
    if weight.nbytes.keys() != weight.errors.keys() or not all(isinstance(n, (int, float)) for n in numbers):
        raise ValueError("a weight has a number of bytes and an error for each format")
    return weight


def planned_for(weights: Mapping[str, PlannedWeight], bits: float, measure: str) -> Plan:
    """The plan with the least sum of errors whose weights have at most ``bits`` bits per value, all together."""
    check("plan", "bits", bits, POSITIVE)
    values = sum(weight.values for weight in weights.values())
    choices = {
        fqn: {format: Choice(weight.nbytes[format], error) for format, error in weight.errors.items()}
        for fqn, weight in weights.items()
    }
    sizes = {fqn: weight.nbytes for fqn, weight in weights.items()}
    smallest = check_budget(bits, {fqn: weight.values for fqn, weight in weights.items()}, sizes)
    return Plan(within(max(int(bits * values / 8), smallest), choices), weights=weights, measure=measure)


def check_budget(bits: float, values: Mapping[str, int], sizes: Mapping[str, Mapping[str, int]]) -> int:
    """The bytes of all weights, each in its smallest format (``sizes``: weight -> format -> bytes).

    Raises ValueError if they are more than ``bits`` bits for each of their ``values``.
    """
    smallest, count = sum(min(row.values()) for row in sizes.values()), sum(values.values())
    if bits * count < 8 * smallest:
        raise ValueError(
            f"plan: bits is {bits:g}, and the smallest formats take {8 * smallest / count:.4g} bits per value; "
            "pass more bits, or smaller formats"
        )
    return smallest
