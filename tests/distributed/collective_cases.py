"""The cases of two ranks for ``test_collectives.py``: collectives of a quantized weight."""

from unittest import mock

import torch
import torch.distributed as dist

import mxtensor as mx
from mxtensor.numerics.derived import cached_value, known_value
from mxtensor.ops import collectives
from tests.distributed.fsdp_cases import message
from tests.helpers.ranks import case


@case
def other_collectives(rank, folder):
    told = []
    q = mx.quantize(torch.randn(4, 64), "mxfp8")
    told += [message(lambda: dist.all_reduce(q)), message(lambda: dist.all_gather([q, q], torch.randn(4, 64)))]
    same = torch.full((2, 32), 1.0 + rank)
    sent = mx.quantize(same, "mxfp8")
    dist.broadcast(sent, 1)
    with mock.patch.object(collectives, "Work", mock.Mock(unbox=lambda boxed: None)):  # like NCCL, which returns none
        dist.broadcast(sent, 1)
    work = dist.broadcast(received := mx.quantize(same, "mxfp8"), 0, async_op=True)
    work.wait()
    return told, [sent.dequantize().unique().tolist(), received.dequantize().unique().tolist()]


@case
def broadcast_of_a_weight_in_use(rank, folder):
    """Call -> of a weight that a broadcast fills: whether each form that was derived before is gone, whether forms that
    are derived again and views that were made before are those of the values now, and the values."""
    found = {}
    for name, send in {
        "broadcast": lambda w: dist.broadcast(w, 1),
        "async": lambda w: dist.broadcast(w, 1, async_op=True).wait(),
        "scatter": lambda w: dist.scatter(w, [w.clone(), w.clone()] if rank == 1 else None, src=1),
    }.items():
        for format, orientation in (("mxfp8", "rowwise"), ("nvfp4", "both")):
            w = mx.quantize(torch.randn(64, 96) * (1 + 9 * rank), format, orientation=orientation)
            tensors = [*w.components, *(t.view(-1) for t in w.components)]  # one memory, and two entries of the cache
            forms = [cached_value(t, "form", torch.clone) for t in tensors]
            before, views = w.dequantize(), [w[3, :7], w[:5, 3:9]]
            assert torch.equal(views[0], before[3, :7]) and torch.equal(views[1], before[:5, 3:9])
            send(w)
            gone = [known_value(t, "form") is None for t in tensors]
            now = [cached_value(t, "form", torch.clone) for t in tensors]
            new = [torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(now, tensors, strict=True)]
            changed = [not torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(forms, now, strict=True)]
            values = w.dequantize()
            follow = [torch.equal(views[0], values[3, :7]), torch.equal(views[1], values[:5, 3:9])]
            found[name, format] = gone, new, changed, follow, torch.equal(before, values), values.cpu()
    return found


def bytes_of(t):
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
