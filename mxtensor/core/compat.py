"""Every reach into private torch: names that the package reads or calls. ``compat_hooks`` changes torch.

Each entry says why no public API does it and what happens when it is missing. All were seen in torch 2.11, 2.13 and
2.15 unless the entry says otherwise. ``tests/core/test_compat.py`` fails when torch changes one of them, and when any
other module of the package reaches into torch by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.overrides
from torch import Tensor
from torch.utils import _python_dispatch, _pytree

Function = TypeVar("Function", bound=Callable[..., Any])

# ---------------------------------------------------------------------------------------------- tensor subclasses

disable_torch_function = torch._C.DisableTorchFunction
"""Context manager: no ``__torch_function__``, of a class or of a mode, is called inside.

torch documents it in "Extending PyTorch" under this private name only. Missing: ``import mxtensor`` fails.
"""
disable_subclass_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context manager: no ``__torch_function__`` of a class is called inside; modes still are.

torch documents it in "Extending PyTorch" under this private name only. Missing: ``import mxtensor`` fails.
"""
enable_torch_function = torch._C._EnableTorchFunction
"""Context manager: ``__torch_function__`` is called inside, although a context around it forbids it.

torch has no public name for it. Missing: ``import mxtensor`` fails.
"""
no_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that wants none: what ``torch.nn.Parameter`` uses.

A Python method that does the same costs a Python call for each attribute of the tensor. Missing: ``import mxtensor``
fails.
"""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""A tensor subclass without storage of its own. torch's examples of wrapper subclasses use this private name; there is
no public one. Missing: ``import mxtensor`` fails.
"""
return_and_correct_aliasing = _python_dispatch.return_and_correct_aliasing
"""Tells autograd that the result of a rule is a view of its argument, or the argument itself.

torch's own wrapper subclasses import it from the private module. Missing: ``import mxtensor`` fails.
"""
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only
"""Nested arguments as lists of leaves. torch has no public name for its own trees, which Dynamo can trace; optree
would be a dependency. Missing: ``import mxtensor`` fails.
"""

ATTRIBUTES = {
    "_Unpickler": "of pickle: the one in Python; the memo of the one in C is as large as five bytes of its input say",
    "_apply": "of torch.nn.Module: called by .to(), .cuda() and .float(); no hook of the module is",
    "_base": "the tensor that a view was made of; documented under Tensor Views",
    "_can_decompose": "of an op: whether it is a composite; inference mode hands composites over whole",
    "_distribute_module_applied": "of a module: whether distribute_module, and so tensor parallelism, has split it",
    "_enabled": "of torch.amp.GradScaler: is_enabled() asks nothing else",
    "_forward_pre_hooks": "of torch.nn.Module: its hooks, of which one is registered only once",
    "_is_view": "whether autograd regards a tensor as a view",
    "_load_from_state_dict": "of torch.nn.Module; documented as the method to override",
    "_local_tensor": "of a DTensor: the tensor of this rank; to_local() of a parameter is a view of it in torch 2.13",
    "_overloadname": "of an op: the name after the dot",
    "_overloadpacket": "of an op: all overloads of its name",
    "_member_map_": "of enum.Enum: members by name, aliases among them",
    "_optimizer_load_state_dict_post_hooks": "of an optimizer: hooks that a load_state_dict of its own must call",
    "_optimizer_load_state_dict_pre_hooks": "of an optimizer: hooks that a load_state_dict of its own must call",
    "_parameters": "of torch.nn.Module: parameters by their own names, None among them",
    "_per_optimizer_states": "of torch.amp.GradScaler: whether an optimizer's gradients were finite",
    "_qkv_same_embed_dim": "of torch.nn.MultiheadAttention: whether it has one weight for query, key and value",
    "_state_dict_hooks": "of torch.nn.Module: its hooks, of which one is registered only once",
    "_save_to_state_dict": "of torch.nn.Module: saves what the module itself owns",
    "_schema": "of an op: its arguments, defaults and which of them it writes",
    "_use_count": "of a tensor: how many refer to it in C++; torch.utils.swap_tensors asks it",
    "_version": "of a tensor: counts writes; documented under in-place correctness checks",
}
"""Private attributes of torch's objects that the package reads -> what they are. They are documented, or overridden in
torch's own examples, and have no public name. Missing: AttributeError where they are read."""

# ---------------------------------------------------------------------------------------------- who is tracing


dispatch_mode_count: Callable[[], int] = _python_dispatch._len_torch_dispatch_stack  # type: ignore[attr-defined]
"""How many ``TorchDispatchMode`` (FakeTensorMode, make_fx, a test's counter) see each op.

torch has no public question for it. Missing: ``import mxtensor`` fails.
"""
dispatch_mode: type[Any] = _python_dispatch.TorchDispatchMode
"""The base class of modes that see each op.

torch documents it in "Extending PyTorch" under this private name only. Missing: ``import mxtensor`` fails.
"""
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` is recording ops: it sees no write to memory.

``torch.jit.is_tracing`` asks the same through two Python functions, in each eager call of a layer. Missing: ``import
mxtensor`` fails.
"""
any_autocast_is_active: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether ``torch.autocast`` is active for any type of device.

``torch.is_autocast_enabled`` wants the name of one, which takes longer to make than this takes to answer. Missing:
``import mxtensor`` fails.
"""
functorch_interpreter: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func (vmap, grad) that is running; None outside.

torch.func has no public question for it. Missing: ``import mxtensor`` fails.
"""
is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of torch.func.

torch.func has no public question for it. Missing: ``import mxtensor`` fails.
"""
is_batched_gradient: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is that of ``torch.autograd.grad(is_grads_batched=True)``, which is not a transform of torch.func.

torch has no public question for it. Missing: ``import mxtensor`` fails.
"""
function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The active ``TorchFunctionMode``, the innermost last: Dynamo reads them, and no ContextVar.

torch has no public way to list them. Missing: ``import mxtensor`` fails.
"""
_push_function_mode: Callable[[Any], Any] = torch.overrides._push_mode
_pop_function_mode: Callable[[], Any] = torch.overrides._pop_mode


def remove_function_mode(mode: Any) -> None:
    """Take a ``TorchFunctionMode`` from the stack of this thread, wherever in the stack it is; nothing if it is not.

    ``mode.__exit__`` takes the innermost mode, whichever that is, and a generator may leave its block when others are
    above. torch has no public way to take another one. Missing: ``import mxtensor`` fails.
    """
    if not any(other is mode for other in function_mode_stack()):  # the stack of another thread
        return
    above = []
    while (popped := _pop_function_mode()) is not mode:
        above.append(popped)
    for other in reversed(above):
        _push_function_mode(other)


def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, by the flag behind it where there is one.

    Dynamo of torch 2.11 takes the public function to be true of all that it traces. Missing: the public function.
    """
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def is_ephemeral(number: Any) -> bool:
    """Whether a SymInt stands for an argument of a view that torch makes anew to trace it: no guard can name such a
    symbol.

    Only the shape environment knows where a symbol comes from. Missing (``var_to_sources``): False, and torch raises
    where a guard would need the symbol.
    """
    node = number.node
    sources = getattr(node.shape_env, "var_to_sources", {}).get(node.expr, ())
    return any(source.is_ephemeral() for source in sources)


def is_fake(t: torch.Tensor) -> bool:
    """Whether ``t`` is a FakeTensor: it stands for an input or a result of a graph, and has no values.

    torch has no public question for it. Missing: ImportError where a graph is traced.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, which may recompute a forward pass.

    torch has no public question for it. Missing: False, so that a recomputation counts as a step of its own.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def nonstrict_trace(function: Function) -> Function:
    """Dynamo leaves the function whole to AOTAutograd, which traces it as eager code runs.

    torch exports it from ``torch._dynamo`` only; ``torch.compiler.allow_in_graph`` gives the function fake tensors that
    are not tensor subclasses. Missing: the function as it is, which Dynamo then traces, with graph breaks.
    """
    mark = getattr(torch._dynamo, "nonstrict_trace", None)
    return function if mark is None else mark(function)


functional_collectives = torch.ops._c10d_functional
"""Collectives as ops of a graph, with new tensors as results.

torch's public ones write into a tensor that is given; Dynamo replaces them by these, AOTAutograd does not. Missing: a
layer that is split over ranks raises AttributeError.
"""


def called_while_traced(function: Function) -> Function:
    """Dynamo calls the function with constants instead of tracing it, and takes the result for a constant.

    ``torch.compiler.assume_constant_result`` sets the same attribute, and imports the compiler, which takes a second.
    Missing: Dynamo traces the function, and breaks the graph at a ContextVar.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_address(t: torch.Tensor) -> None:
    """Tell Dynamo that a tensor stays where it is: a CUDA graph that changes it needs no copy of it.

    transformers does the same for its static cache; torch exports it from ``torch._dynamo`` only. Missing: nothing is
    told, and "reduce-overhead" leaves CUDA graphs out for a graph that changes the tensor.
    """
    import torch._dynamo

    mark = getattr(torch._dynamo, "mark_static_address", None)
    if mark is not None:
        mark(t)


# ---------------------------------------------------------------------------------------------- nested tensors


def ragged_dim(x: torch.Tensor) -> int:
    """The dimension of a jagged nested tensor in which its parts differ in length.

    ``torch.nested`` has no public question for it. Missing: AttributeError for a nested tensor.
    """
    return int(x._ragged_idx)  # type: ignore[attr-defined]


def jagged_like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A jagged nested tensor of ``values``, with the parts of ``x``.

    ``torch.nested.nested_tensor_from_jagged`` calls the same function, and refuses to while AOTAutograd traces. Only
    ``x`` knows how long its shortest and longest part are without reading offsets from a GPU. Missing: ImportError or
    AttributeError for a nested tensor.
    """
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    nested: Any = x
    lengths = nested._maybe_min_seqlen, nested._maybe_max_seqlen
    made: torch.Tensor = nested_view_from_values_offsets_lengths(
        values, nested.offsets(), nested.lengths(), ragged_dim(x), *lengths
    )
    return made


# ---------------------------------------------------------------------------------------------- nn.Module


def is_swapped_by_module() -> bool:
    """Whether the caller's attribute is being set by ``torch.utils.swap_tensors`` for ``nn.Module._apply``.

    torch converts a parameter of a wrapper subclass by exchanging it with a new one, and has no hook there. A user's
    own exchange has to take all attributes along. Missing (another name): False, and attributes of users are lost.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None or frame.f_code.co_name == "swap_tensors":
            break
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and caller.f_globals.get("__name__") == torch.nn.Module.__module__


# ---------------------------------------------------------------------------------------------- devices


current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current CUDA device.

``torch.cuda.current_device`` asks first whether CUDA is initialized, at each launch. Missing, as in builds of torch for
the CPU: the public function.
"""


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
"""The handle of the current CUDA stream of a device by its index.

``torch.cuda.current_stream`` makes an object for it at each launch. Missing, as in builds of torch for the CPU: the
handle of that object.
"""


def cpu_multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU and accumulates in float32.

    ``torch.backends.mkldnn`` has no public question for it. Missing: False, and such products are emulated.
    """
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and ask is not None and bool(ask())


# ---------------------------------------------------------------------------------------------- distributed, compiled


def finished_work() -> Any:
    """The ``Work`` of a collective that is over, as rules of c10d ops return it.

    ``torch.distributed`` has no public constructor. Missing: ImportError in a broadcast or scatter of an MXTensor.
    """
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future)


def forget_graphs() -> None:
    """Compile anew whatever was compiled: the guards of graphs take a weight of ours to be as it was (``hook_guards``).

    For a living tensor that got another format, shape or layout, as by ``w.data = other``. Seen in torch 2.11 and 2.13.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not torch.compiler.is_compiling():
        dynamo.reset()


# ---------------------------------------------------------------------------------------------- elsewhere

ELSEWHERE = {
    "compile/inference_options.py": ("torch._inductor", "torch._inductor.custom_graph_pass"),
}
"""File -> private modules that it imports itself: passes are written for Inductor, and its base class and settings have
no public name. Missing: ``mx.inference_options()`` raises ImportError; nothing else imports this file.
"""


# ---------------------------------------------------------------------------------------------- DTensor

# Its local tensor, and one like it, without an import of torch's distributed package.


def local_of(t: Any) -> Any:
    """The local tensor of a DTensor; anything else itself."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only after this import
    return t if module is None or not isinstance(t, module.DTensor) else t._local_tensor


def is_sharded(t: Any) -> bool:
    """Whether this is a DTensor."""
    return local_of(t) is not t


def sharded_like(t: Any, local: Tensor) -> Tensor:
    """A DTensor like ``t`` whose local tensor is ``local``; ``local`` itself if ``t`` is not a DTensor."""
    if not is_sharded(t):
        return local
    kind, size, stride = sys.modules["torch.distributed.tensor"].DTensor, t.shape, t.stride()
    with torch.no_grad():
        out: Tensor = kind.from_local(local, t.device_mesh, t.placements, run_check=False, shape=size, stride=stride)
    return out
