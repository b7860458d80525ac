"""Custom ops of the package: what torch.compile sees of a kernel, ``mxtensor::name``.

``torch.library.custom_op`` does the same with more checks of each call, which take 9 us (torch 2.13): as long as a
launch. An op here must not return an input or a view of one, and has no gradient: torch warns in a backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("mxtensor", "FRAGMENT")
Op = Callable[..., Any]


def define(name: str) -> Callable[[Op], Op]:
    """Make the decorated function the op ``name``, "mxtensor::...", on every device.

    Its annotations are the schema of the op. It must not change its arguments.
    """

    def decorate(function: Op) -> Op:
        space, _, short = name.partition("::")
        schema = torch.library.infer_schema(inspect.unwrap(function), mutates_args=())
        LIBRARY.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(short, function, "CompositeExplicitAutograd")
        op: Op = getattr(getattr(torch.ops, space), short).default
        return op

    return decorate


def fake_of(op: Any) -> Callable[[Op], Op]:
    """Make the decorated function what ``op`` does for fake tensors: results of its shapes and dtypes, no values."""
    return lambda function: torch.library.register_fake(op.name(), function, lib=LIBRARY)
