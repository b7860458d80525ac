"""Ops without a rule use one of two fallbacks.

Reads: every MXTensor is dequantized, the op runs in high precision, and the result is a plain tensor. Writes: the
values are dequantized, the op runs on them, and what it wrote is quantized again into the existing buffers. Both are
logged; inside ``mx.strict()`` both are errors that name the op, a way out and the file for a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.autograd import count_writes, mode_of_views
from ..core.compat import tree_flatten, tree_unflatten
from ..core.compat_hooks import PACKAGE, hook_flat_parameters, hook_replicas, hook_torchscript
from ..core.dispatch import FALLBACK, implements_function, names_written, written
from ..core.explain import measure
from ..core.tracing import refuse_torchscript
from ..core.when_imported import after_import
from ..tensor.dequantized_view import Decoded, DequantizedView, View
from ..tensor.mxtensor import MXTensor
from .inplace import note, write_back

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


def home_of(func: Any) -> str:
    """The file in which a rule for ``func`` belongs."""
    if not hasattr(func, "_schema"):
        return "fallback.py"  # a torch function
    if names_written(func):
        return "inplace.py"
    return "view.py" if any(r.alias_info is not None for r in func._schema.returns) else "structure.py"


def read(func: Any, args: Any, kwargs: Any, reason: str = "no rule of its own") -> Any:
    """The op on the dequantized values. Views are ``DequantizedView``s."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, MXTensor)]
    with measure(note(str(func), home_of(func), tensors, "dequantized", reason)), mode_of_views(func, tensors[0]):
        if is_view(func) and args[0] is tensors[0]:
            decoded = Decoded(tensors[0].same())
            return viewed(func, (decoded.values(), *args[1:]), kwargs, decoded)
        args, kwargs = tree_unflatten([t.dequantize() if isinstance(t, MXTensor) else t for t in flat], spec)
        return func(*args, **kwargs)


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
    with measure(note(str(func), home_of(func), targets, "requantized", "writes values")):
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
        with measure(note(str(func), home_of(func), [target], "requantized", "writes values")):
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


# ---------------------------------------------------------------------------------------------- refused

# FSDP1 and ``nn.DataParallel`` copy parameters to plain tensors, without formats and recipes. TorchScript reads and
# saves the storage of tensors, which a wrapper does not have.

FLATTENED = (
    "FullyShardedDataParallel (FSDP1)",
    "use FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version=2 of accelerate and transformers",
)
REPLICATED = (
    "nn.DataParallel",
    "run a process for each GPU (torchrun, DistributedDataParallel), or show this one a single GPU "
    "(CUDA_VISIBLE_DEVICES=0)",
)


def _refuse(what: str, way_out: str, parameters: Iterable[Tensor]) -> None:
    """Raise NotImplementedError if one of the parameters is of a class of this package."""
    for p in parameters:
        if type(p).__module__.startswith(PACKAGE):
            raise NotImplementedError(
                f"{what} copies parameters to plain tensors, and those of class {type(p).__name__}, such as one "
                f"{tuple(p.shape)}, would be multiplied in high precision; {way_out}"
            )


def _refuse_script(module: torch.nn.Module) -> None:
    """Raise NotImplementedError if ``module`` itself has a tensor of one of the classes of this package."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *vars(module).items())
    for name, t in own:
        if isinstance(t, Tensor) and type(t).__module__.startswith(PACKAGE):
            refuse_torchscript(f"{type(module).__name__}.{name} ({type(t).__name__})")


after_import("torch.distributed.fsdp._flat_param", lambda: hook_flat_parameters(partial(_refuse, *FLATTENED)))
hook_replicas(partial(_refuse, *REPLICATED))
hook_torchscript(_refuse_script)
