"""Ops without a rule use one of two fallbacks.

Reads: every MXTensor is dequantized, the op runs in high precision, and the result is a plain tensor. Writes: the
values are dequantized, the op runs on them, and what it wrote is quantized again into the existing buffers. Both are
logged; inside ``mx.strict()`` both are errors that name the op and the file for a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.autograd import count_writes, mode_of_views
from ..core.compat import tree_flatten, tree_unflatten
from ..core.compat_hooks import PACKAGE, hook_flat_parameters, hook_replicas
from ..core.dispatch import FALLBACK, implements_function, names_written, refuse_if_strict, written
from ..core.explain import Entry, measure, record
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..core.when_imported import after_import
from ..tensor.dequantized_view import Decoded, DequantizedView, View
from ..tensor.mxtensor import MXTensor
from .inplace import write_back

aten = torch.ops.aten
REFUSED: dict[Any, str] = {
    aten.view.dtype: "its bytes are codes and scales, not values of another dtype; use .rowwise.data for the codes "
    "(accelerate stores plain values on the disk: use its cpu_offload)",
    aten.resize_.default: "its blocks cannot store more values; use torch.nn.functional.pad and quantize again",
    aten.resize_as_.default: "its blocks cannot store more values; use torch.nn.functional.pad and quantize again",
}
for _overload in aten.set_.overloads():
    REFUSED[getattr(aten.set_, _overload)] = "its storage is codes and scales; use copy_() to write other values"
"""aten overload -> why no result would be right, and the way out."""
REFUSED_NAMESPACES = {
    "c10d": "it would move a copy of the values; use dequantize() and quantize again, or move each of .components",
}
"""The same for all ops of a namespace: the schemas of collectives do not say what they write."""


def keeps_size(func: Any, args: Any) -> bool:
    """Whether the call resizes a tensor to the size that it has, as random numbers with ``out=`` do."""
    if func is aten.resize_as_.default:
        return bool(args[0].shape == args[1].shape)
    return func is aten.resize_.default and tuple(args[0].shape) == tuple(args[1])


def is_view(func: Any) -> bool:
    """Whether results of ``func`` share the memory of its first argument."""
    return getattr(func, "is_view", False) or getattr(func, "_overloadpacket", None) in _UNSAFE_VIEWS


_UNSAFE_VIEWS = (aten.unsafe_split, aten.unsafe_split_with_sizes)
"""Views that their schemas do not call so."""


def _home(func: Any) -> str:
    """The file in which a rule for ``func`` belongs."""
    if not hasattr(func, "_schema"):
        return "fallback.py"  # a torch function
    if names_written(func):
        return "inplace.py"
    return "view.py" if any(r.alias_info is not None for r in func._schema.returns) else "structure.py"


def note(func: Any, tensors: list[MXTensor], what: str, reason: str) -> Entry | None:
    """Log that MXTensors are dequantized, for ``measure``; raise NotImplementedError inside ``mx.strict()``."""
    op = str(func)
    refuse_if_strict(op, reason, _home(func))
    first = tensors[0]
    shapes, names = tuple(tuple(t.shape) for t in tensors[:3]), tuple(str(t.format) for t in tensors[:3])
    spec = Spec(op, shapes, names, first.dtype, first.device, is_traced(*first.components))
    return record(spec, what, {"quantized": reason})


def run_plain(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func`` of the dequantized values."""
    flat, spec = tree_flatten((args, kwargs))
    plain = [t.dequantize() if isinstance(t, MXTensor) else t for t in flat]
    args, kwargs = tree_unflatten(plain, spec)
    return func(*args, **kwargs)


def read(func: Any, args: Any, kwargs: Any, reason: str = "no rule of its own") -> Any:
    """The op on the dequantized values. Views are ``DequantizedView``s."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, MXTensor)]
    with measure(note(func, tensors, "dequantized", reason)), mode_of_views(func, tensors[0]):
        if is_view(func) and args[0] is tensors[0]:
            decoded = Decoded(tensors[0].same())
            return viewed(func, (decoded.values(), *args[1:]), kwargs, decoded)
        return run_plain(func, args, kwargs)


def viewed(func: Any, args: Any, kwargs: Any, decoded: Decoded | None, before: View | None = None) -> Any:
    """``func``, a view, of decoded values or of the view ``before`` of them: each result as a DequantizedView."""
    out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return _viewed(out, decoded, lambda dense: func(before(dense) if before else dense, *args[1:], **kwargs))

    def piece(i: int) -> View:
        return lambda dense: func(before(dense) if before else dense, *args[1:], **kwargs)[i]

    return [_viewed(t, decoded, piece(i)) for i, t in enumerate(out)]


def _viewed(values: Tensor, decoded: Decoded | None, view: View) -> DequantizedView:
    if values.is_neg():  # kernels do not know a lazy minus sign, and a copy without it cannot be written through
        return DequantizedView(values.resolve_neg(), None, view)
    return DequantizedView(values, decoded, view)


def write(func: Any, args: Any, kwargs: Any) -> Any:
    """The op on the dequantized values; what it wrote is quantized again. Returns the tensors given."""
    targets = [t for t in tree_flatten(written(func, args, kwargs))[0] if isinstance(t, MXTensor)]
    if not targets:
        return read(func, args, kwargs)
    with measure(note(func, targets, "requantized", "writes values")):
        out = _write(func, args, kwargs, targets)
    count_writes(func, targets)
    return out


def _write(func: Any, args: Any, kwargs: Any, targets: list[MXTensor]) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    plain: dict[int, Tensor] = {}
    for t in flat:
        if isinstance(t, MXTensor) and id(t) not in plain:
            plain[id(t)] = t.values_to_write()
    args, kwargs = tree_unflatten([plain.get(id(t), t) for t in flat], spec)
    out = func(*args, **kwargs)
    for target in targets:
        write_back(target, plain[id(target)])
    given = {id(plain[id(target)]): target for target in targets}
    results, shape = tree_flatten(out)
    return tree_unflatten([given.get(id(r), r) for r in results], shape)


def fallback(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule for an op that is not in OP_TABLE. Raises NotImplementedError for those in REFUSED."""
    if keeps_size(func, args):
        return args[0]
    reason = REFUSED.get(func) or REFUSED_NAMESPACES.get(getattr(func, "namespace", ""))
    if reason is not None:
        raise NotImplementedError(f"{func} of an MXTensor is refused: {reason}")
    if names_written(func):
        return write(func, args, kwargs)
    return read(func, args, kwargs)


FALLBACK[:] = [fallback]


@implements_function(torch.linalg.matrix_rank)
def matrix_rank(*args: Any, **kwargs: Any) -> Any:
    """A rule of the function, because torch does not write ``out`` if the input is a tensor subclass."""
    return read(torch.linalg.matrix_rank, args, kwargs)


def _in_python(func: Any) -> Callable[..., Any]:
    def values(*args: Any, **kwargs: Any) -> Any:
        """The dequantized values; torch refuses these functions for a wrapper, which has no storage."""
        return read(func, args, kwargs, "values for Python or numpy")

    return values


for _function in (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__):
    implements_function(_function)(_in_python(_function))


def _for_each_value(func: Any) -> Callable[..., Any]:
    def written_by(target: Tensor, *others: Any) -> Any:
        """A Python function of each value. torch would write to the memory of a wrapper, which has none: a crash."""
        if not isinstance(target, MXTensor):
            return read(func, (target, *others), {}, "values for Python")
        with measure(note(func, [target], "requantized", "writes values")):
            return _write(func, (target, *others), {}, [target])

    return written_by


for _writer in (Tensor.apply_, Tensor.map_, Tensor.map2_):
    implements_function(_writer)(_for_each_value(_writer))


@implements_function(Tensor.data_ptr)
def data_ptr(self: MXTensor) -> int:
    """The address of the first component. A wrapper has none, and torch would say 0 for each: but libraries such as
    accelerate tell parameters apart by it."""
    return self.components[0].data_ptr()


@implements_function(Tensor.storage)
def storage(self: Tensor) -> Any:
    """A TypeError, which safetensors shows: it asks here after the memory of ``untyped_storage()`` was refused."""
    raise TypeError(
        f"{described(self)} has codes and scales and no storage of its own, so safetensors cannot save it; for a "
        "model of transformers call model.save_pretrained(path), for others torch.save(model.state_dict(), path), or "
        "mx.checkpoints.save(model, path) and model.load_state_dict(mx.checkpoints.load(path))"
    )


# ---------------------------------------------------------------------------------------------- plain copies

# FSDP1 and ``nn.DataParallel`` are refused: both copy parameters to plain tensors, without formats and recipes.


def _refuse(parameters: Iterable[Tensor], what: str, way_out: str) -> None:
    """Raise NotImplementedError if one of the parameters is of a class of this package."""
    for p in parameters:
        if type(p).__module__.startswith(PACKAGE):
            raise NotImplementedError(
                f"{what} copies parameters to plain tensors, and those of class {type(p).__name__}, such as one "
                f"{tuple(p.shape)}, would be multiplied in high precision; {way_out}"
            )


def _before_flattening(parameters: Iterable[Tensor]) -> None:
    way_out = "use FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version=2 of accelerate and transformers"
    _refuse(parameters, "FullyShardedDataParallel (FSDP1)", way_out)


def _before_replication(parameters: Iterable[Tensor]) -> None:
    way_out = "run a process for each GPU (torchrun, DistributedDataParallel), or show this one a single GPU"
    _refuse(parameters, "nn.DataParallel", f"{way_out} (CUDA_VISIBLE_DEVICES=0)")


after_import("torch.distributed.fsdp._flat_param", lambda: hook_flat_parameters(_before_flattening))
hook_replicas(_before_replication)
