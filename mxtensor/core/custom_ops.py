"""Custom ops of the package: what torch.compile sees of a kernel, ``mxtensor::name``.

``torch.library.custom_op`` does the same with more checks of each call, which take 9 us (torch 2.13): as long as a
launch. An op here must not return an input or a view of one, and has no gradient: torch warns in a backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .kernel import Spec
from .plan import PLANS, Plan

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


# ---------------------------------------------------------------------------------------------- repeated calls


def launch_of(key: Hashable) -> tuple[bool, Callable[..., Any] | None]:
    """Whether a call of this kind was seen, and the launch that ``cache_launch`` cached for it."""
    plan = PLANS.get(key)
    return (False, None) if plan is None else (True, plan.launch)


def cache_launch(key: Hashable, spec: Spec, launch: Callable[..., Any] | None) -> None:
    """Later calls of this kind run ``launch``; None: they run as the first one did."""
    PLANS.put(key, Plan(spec, None, {}, launch))
