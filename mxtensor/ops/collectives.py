"""The collectives that torch's tensor parallelism runs on a weight: codes and scales are sent one after the other.

``distribute_tensor`` splits a parameter, makes a buffer for one shard by ``empty_like`` and scatters; a replicated
parameter it broadcasts. Any other collective is refused: it would move values, or add up codes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.autograd import note_write
from ..core.compat import finished_work
from ..core.compat_hooks import distributed_caller
from ..core.dispatch import implements, implements_function
from ..numerics.derived import forget
from ..tensor.mxtensor import MXTensor


@implements_function(Tensor.is_complex)
def is_complex(t: MXTensor) -> bool:
    """False. torch.distributed asks it before it hands tensors to C++.

    For a list of tensors (gather, or scatter into a plain tensor) C++ asks nothing more and reads storage that a
    wrapper does not have: these calls raise NotImplementedError here.
    """
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
    """The rule of the op; for ``distribute_tensor`` a buffer for codes and scales.

    Raises NotImplementedError for such a buffer, on every rank, if the shards would not store the same orientations.
    """
    frame = distributed_caller("tensor.placement_types")
    shards = [] if frame is None else frame.f_locals.get("scatter_list", [])
    if not shards:
        return torch.empty_like(t, **options)
    shapes = tuple(component.shape for component in t.components)
    if not all(isinstance(s, MXTensor) and tuple(c.shape for c in s.components) == shapes for s in shards):
        raise NotImplementedError(
            f"an MXTensor in {t.format} does not divide into {len(shards)} shards that store the same, such as "
            f"{tuple(t.shape)} {t.copies.label}; use a mesh of fewer ranks, store one orientation, or pad the layer"
        )
    return t.map_components(lambda component: component.new_empty(component.shape))


def _component(value: Any, i: int) -> Any:
    """Each MXTensor among the arguments of a collective replaced by its i-th component, as bytes."""
    if isinstance(value, list | tuple):
        return type(value)(_component(v, i) for v in value)
    return value.components[i].reshape(-1).view(torch.uint8) if isinstance(value, MXTensor) else value


def send_components(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of MXTensors, component by component; the ``Work`` of the last one stands for all.

    NCCL returns no ``Work`` for a synchronous collective: it runs on the current stream.
    """
    written, work = args[0], None
    for i, component in enumerate(written[0].components):
        if not component.is_contiguous():
            raise NotImplementedError(f"{func} cannot fill an MXTensor whose components are views; use contiguous()")
        if work is not None:
            work.wait()
        work = Work.unbox(func(*_component(args, i), **kwargs)[1])
        note_write(component)
        forget(component)
    return written, (finished_work() if work is None else work).boxed()


if dist.is_available():
    from torch.distributed.distributed_c10d import Work

    implements(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)(send_components)
