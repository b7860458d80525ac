"""What torch's own tensor parallelism sends a weight through: its codes and scales are sent, one after the other.

``distribute_tensor`` cuts a parameter, makes a buffer for a part by ``empty_like``, and scatters; what every rank has
whole it broadcasts. Any other collective is refused: it would move values, or add up codes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.compat import finished_work
from ..core.compat_hooks import distributed_caller
from ..core.dispatch import implements, implements_function
from ..tensor.mxtensor import MXTensor


@implements_function(Tensor.is_complex)
def is_complex(t: MXTensor) -> bool:
    """Never; torch.distributed asks before it hands tensors to C++, which for lists of them (gather, or scatter into a
    plain tensor) asks no more and reads a memory that a wrapper has not."""
    frame = distributed_caller("distributed_c10d")
    if frame is not None and not (
        frame.f_code.co_name in ("broadcast", "scatter") and isinstance(frame.f_locals.get("tensor"), MXTensor)
    ):
        raise NotImplementedError(
            "torch.distributed cannot send an MXTensor; send each of .components, and split layers with "
            "mx.parallel.ColwiseParallel and RowwiseParallel"
        )
    return False


@implements_function(torch.empty_like)
def empty_like(t: MXTensor, **options: Any) -> Tensor:
    """As the op has it; for ``distribute_tensor`` a buffer for codes and scales.

    Raises NotImplementedError there, on every rank alike, where ranks would not hold the same orientations.
    """
    frame = distributed_caller("tensor.placement_types")
    components = [] if frame is None else frame.f_locals.get("scatter_list", [])
    if not components:
        return torch.empty_like(t, **options)
    first = tuple(p.shape for p in t.components)
    if not all(isinstance(p, MXTensor) and tuple(q.shape for q in p.components) == first for p in components):
        raise NotImplementedError(
            f"an MXTensor in {t.format} does not divide into {len(components)} parts that hold the same, such as "
            f"{tuple(t.shape)} {t.copies.label}; use a mesh of fewer ranks, hold one orientation only, or pad the layer"
        )
    return t.map_components(lambda part: part.new_empty(part.shape))


def _part(value: Any, i: int) -> Any:
    """The i-th part of each MXTensor among the arguments of a collective, as bytes."""
    if isinstance(value, list | tuple):
        return type(value)(_part(v, i) for v in value)
    return value.components[i].reshape(-1).view(torch.uint8) if isinstance(value, MXTensor) else value


def sent(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of MXTensors, part by part; the work of the last is that of all.

    Of one that is to be waited for, NCCL gives no work: it runs among what the device does anyway.
    """
    written, work = args[0], None
    for i, part in enumerate(written[0].components):
        if not part.is_contiguous():
            raise NotImplementedError(f"{func} cannot fill an MXTensor whose parts are views; use contiguous()")
        if work is not None:
            work.wait()
        work = Work.unbox(func(*_part(args, i), **kwargs)[1])
    return written, (finished_work() if work is None else work).boxed()


if dist.is_available():
    from torch.distributed.distributed_c10d import Work

    implements(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)(sent)
