"""Changes to torch's own behaviour: where torch calls what no public hook reaches. ``compat`` reads torch, and
``compat_compile`` changes torch.compile.

Nothing is changed when this file is imported. Each function says why no public API does it, and what happens where this
torch has no such place. All were seen in torch 2.11, 2.13 and 2.15 unless the function says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib import import_module
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

# ---------------------------------------------------------------------------------------------- activation checkpoints


def hook_checkpoints(
    start: Callable[[Function, bool], tuple[Function, Callable[[], AbstractContextManager[Any]]]],
) -> bool:
    """Let ``start(function, reentrant)`` give, for each function that ``torch.utils.checkpoint`` will recompute in
    backward, what it runs then, and the context of the function's first pass. A reentrant checkpoint runs what it gets
    in the first pass, too. True if this torch has all places.

    torch restores its own autocast in a recomputation and has no hook for anybody else's context: ``context_fn`` is an
    argument of each call, which belongs to the model. All checkpoints go through these classes; ``_checkpoint_hook`` is
    entered around the first pass of those that are not reentrant. Missing: nothing is changed, and the caller warns.
    """
    import torch.utils.checkpoint as torch_checkpoint

    frame = getattr(torch_checkpoint, "_CheckpointFrame", None)
    around = getattr(torch_checkpoint, "_checkpoint_hook", None)
    reentrant = getattr(torch_checkpoint, "CheckpointFunction", None)
    if frame is None or around is None or reentrant is None:
        return False
    make, apply = frame.__init__, reentrant.apply
    prepare, enter, leave = around.__init__, around.__enter__, around.__exit__

    @wraps(make)
    def make_wrapped(self: Any, recompute_fn: Function, *args: Any, **kwargs: Any) -> None:
        recomputed, self._mxtensor_first_pass = start(recompute_fn, False)
        make(self, recomputed, *args, **kwargs)

    @wraps(prepare)
    def prepare_wrapped(self: Any, frame: Any, *args: Any) -> None:
        prepare(self, frame, *args)
        self._mxtensor_first_pass = getattr(frame, "_mxtensor_first_pass", nullcontext)()

    @wraps(enter)
    def enter_wrapped(self: Any) -> Any:
        self._mxtensor_first_pass.__enter__()
        return enter(self)

    @wraps(leave)
    def leave_wrapped(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            self._mxtensor_first_pass.__exit__(*error)

    @wraps(apply)
    def apply_wrapped(run_function: Function, *args: Any) -> Any:
        if not torch.is_grad_enabled():  # torch keeps nothing, and recomputes nothing
            return apply(run_function, *args)
        function, first_pass = start(run_function, True)
        with first_pass():
            return apply(function, *args)

    frame.__init__, reentrant.apply = make_wrapped, staticmethod(apply_wrapped)
    around.__init__, around.__enter__, around.__exit__ = prepare_wrapped, enter_wrapped, leave_wrapped
    return True


# ---------------------------------------------------------------------------------------------- optimizers


def let_optimizers_take(kind: type[torch.Tensor]) -> bool:
    """Let torch's optimizers update parameters of class ``kind`` many at a time, as they do plain ones by default.

    They compare the type of each parameter with a private list, which they share with ``fused``; a subclass costs each
    optimizer step some 14 launches a parameter. True if this torch has the list. Missing: optimizers update one
    parameter at a time unless they get ``foreach=True``.
    """
    kinds = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", None)
    if not isinstance(kinds, list):
        return False
    if kind not in kinds:
        kinds.append(kind)
    return True


# ---------------------------------------------------------------------------------------------- TorchScript


def hook_torchscript(check: Callable[[torch.nn.Module], None]) -> bool:
    """Let ``check(module)`` raise for each module that ``torch.jit.script`` or ``torch.jit.trace`` is about to convert.
    True if this torch has the place.

    TorchScript reads tensors in C++ and asks no subclass. Missing: nothing is changed, and ``torch.jit.save`` of a
    scripted module writes zeros or crashes.
    """
    import torch.jit._recursive as recursive

    usual = getattr(recursive, "infer_concrete_type_builder", None)
    if usual is None:
        return False

    @wraps(usual)
    def infer(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        check(nn_module)
        return usual(nn_module, *args, **kwargs)

    recursive.infer_concrete_type_builder = infer
    return True


# ---------------------------------------------------------------------------------------------- copies of parameters


def hook_flat_parameters(check: Callable[[Iterable[torch.Tensor]], None]) -> bool:
    """Let ``check(parameters)`` raise for parameters that ``FullyShardedDataParallel`` (FSDP1) is about to copy into a
    flat one. True if this torch has the place.

    It replaces them by plain views of the flat one, and asks no subclass. Missing: nothing is changed, and models train
    without their recipes.
    """
    flat = getattr(import_module("torch.distributed.fsdp._flat_param"), "FlatParamHandle", None)

    def wrap(make: Function) -> Function:
        def make_checked(self: Any, params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
            check(params)
            make(self, params, *args, **kwargs)

        return make_checked

    return flat is not None and hook_method(flat, "__init__", wrap)


def hook_replicas(check: Callable[[Iterable[torch.Tensor]], None]) -> bool:
    """Let ``check(parameters)`` raise for the parameters of a module that ``nn.DataParallel`` is about to copy to each
    GPU. True if this torch has the place.

    The copies are plain tensors, made in C++. Missing: nothing is changed, and replicas run without formats and
    recipes.
    """

    def wrap(usual: Function) -> Function:
        def replicate(network: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            check(network.parameters())
            return usual(network, *args, **kwargs)

        return replicate

    return hook_function(
        [f"torch.nn.parallel{name}" for name in ("", ".replicate", ".data_parallel")], "replicate", wrap
    )


def hook_staging(*kinds: type[torch.Tensor]) -> bool:
    """Let ``torch.distributed.checkpoint.async_save`` copy tensors of these wrapper classes to the CPU, tensor by
    tensor inside. True if this torch has the place.

    Its stager copies the storage of a tensor, which a wrapper lacks. Missing: ``async_save`` of such tensors fails.
    """
    stager = getattr(import_module("torch.distributed.checkpoint._state_dict_stager"), "StateDictStager", None)

    def wrap(usual: Function) -> Function:
        def offload(self: Any, x: Any, memo: dict[int, Any], *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, kinds):
                return usual(self, x, memo, *args, **kwargs)
            names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: self._offload_tensor(getattr(x, name), memo, *args, **kwargs) for name in names}
            copied = type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())  # type: ignore[attr-defined]
            memo[id(x)] = copied
            return copied

        return offload

    return stager is not None and hook_method(stager, "_offload_tensor", wrap)


# ---------------------------------------------------------------------------------------------- torch's attention


def attention_over(linear: Function) -> Function:
    """``F.multi_head_attention_forward`` with ``linear`` in the place of ``F.linear``.

    torch's function takes no other linear layer, and calls ``F.linear`` from inside ``torch.nn.functional``, where a
    quantized layer is reached only through ``__torch_function__``, which torch has asked already. The functions are
    copied with a namespace of their own; torch's stay as they are. Missing (one of the private projections): the copies
    call torch's, whose linear layers run as they do outside.
    """
    names: dict[str, Any] = {name: value for name, value in vars(F).items() if name != "__name__"}
    names |= {"linear": linear, "has_torch_function": lambda tensors: False}
    for name in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
        function = getattr(F, name, None)
        if function is not None:
            names[name] = FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
            names[name].__kwdefaults__ = function.__kwdefaults__
    return names["multi_head_attention_forward"]  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- nested tensors


def let_weights_answer(kind: type[torch.Tensor], functions: Container[Any]) -> bool:
    """Let ``kind.__torch_function__`` answer calls of ``functions`` that get a jagged nested tensor before a ``kind``.
    True if this torch has the place.

    torch asks the classes of the arguments from left to right, and that of nested tensors answers every call. Missing:
    the layer runs in high precision.
    """
    nested = getattr(import_module("torch.nested._internal.nested_tensor"), "NestedTensor", None)
    usual = None if nested is None else vars(nested).get("__torch_function__")
    if not isinstance(usual, classmethod):
        return False
    answer = usual.__func__

    @wraps(answer)
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in functions and any(issubclass(t, kind) for t in types):
            return NotImplemented
        return answer(cls, func, types, args, kwargs)

    nested.__torch_function__ = classmethod(torch_function)  # type: ignore[union-attr]
    return True


# ---------------------------------------------------------------------------------------------- torch.distributed

PACKAGE = __name__.partition(".")[0] + "."


def distributed_caller(*modules: str) -> FrameType | None:
    """The frame that called a torch function, if it is of ``torch.distributed.<module>``, one of ``modules``.

    ``torch.distributed`` hands lists of tensors to C++ without asking a subclass, and fills a buffer that it makes by
    ``torch.empty_like`` or ``new_zeros``: a rule learns what the buffer is for from the caller alone. Modes, such as
    the one of a default device, may have taken the call on its way. Missing (the module has another name): None, as for
    others.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    names = [f"torch.distributed.{module}" for module in modules]
    return frame if frame is not None and frame.f_globals.get("__name__") in names else None


def _is_between(frame: FrameType) -> bool:
    """Whether a frame belongs to the package, to a mode, or to torch beside ``torch.distributed``."""
    module = frame.f_globals.get("__name__", "")
    torchs = module.startswith("torch.") and not module.startswith("torch.distributed.")
    modes = frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__", "<listcomp>")
    return torchs or modes or module.startswith(PACKAGE)


# ---------------------------------------------------------------------------------------------- other libraries


def hook_model_state_dicts(load: Callable[[Function, Any, dict[str, Any], bool, Callable[[str], str]], Any]) -> bool:
    """Let ``load(usual, model, state_dict, broadcast, name_of)`` load a model where ``set_model_state_dict`` and
    ``set_state_dict`` of ``torch.distributed.checkpoint`` do. ``usual(state_dict)`` is what they do, ``broadcast`` says
    whether only rank 0 has a state dict, and ``name_of`` gives the name in a state dict for one of the model. True if
    this torch has the place.

    They look for an extra state in the class of a module, and do not ask its hooks. Missing: rank 0 alone loads it, and
    that of a module inside DistributedDataParallel is an unexpected key.
    """
    place = import_module("torch.distributed.checkpoint.state_dict")
    usual, names = getattr(place, "_load_model_state_dict", None), getattr(place, "_get_fqns", None)
    if usual is None or names is None:
        return False

    @wraps(usual)
    def load_model_state_dict(model: Any, state_dict: dict[str, Any], info: Any) -> Any:
        if not info.handle_model:
            return usual(model, state_dict, info)

        def name_of(key: str) -> str:
            return next(iter(names(model, key)))  # type: ignore[no-any-return]

        return load(lambda given: usual(model, given, info), model, state_dict, info.broadcast_from_rank0, name_of)

    place._load_model_state_dict = load_model_state_dict  # type: ignore[attr-defined]
    return True


def around(call: Callable[..., Any]) -> Callable[[Function], Function]:
    """For ``hook_method`` and ``hook_function``: what is replaced by it calls ``call(usual, *args, **kwargs)``."""

    def wrap(usual: Function) -> Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(usual, *args, **kwargs)

        return wrapped

    return wrap


def hook_method(kind: type, name: str, wrap: Callable[[Function], Function]) -> bool:
    """Replace a method of a class of torch or of another library by ``wrap(method)``. True if the class has it.

    A class method has the class as its first argument. peft 0.21 has no event of a merge, and ``merge_and_unload`` is
    its public method. Missing: nothing is changed.
    """
    method = vars(kind).get(name)
    if method is None:
        return False
    function = method.__func__ if isinstance(method, classmethod) else method
    wrapped = wraps(function)(wrap(function))
    setattr(kind, name, wrapped if function is method else classmethod(wrapped))
    return True


def hook_function(modules: Sequence[str], name: str, wrap: Callable[[Function], Function]) -> bool:
    """Replace a function of torch or of another library by ``wrap(function)``, in the module that defines it, the first
    of ``modules``, and in the others, which import it by name. True if the first has it.

    accelerate 1.15 has no event of a tensor that it puts into a module, and ``set_module_tensor_to_device`` is its
    public function for that. Missing: nothing is changed.
    """
    found = [import_module(module) for module in modules]
    usual = getattr(found[0], name, None)
    if not callable(usual):
        return False
    wrapped = wraps(usual)(wrap(usual))
    for module in found:
        if getattr(module, name, None) is usual:
            setattr(module, name, wrapped)
    return True


# Whether a tensor is converted with its module: ``model.half()`` keeps quantized weights, ``weight.half()`` does not

# ``Module.to``, ``.half()`` and ``.cuda()`` call ``Module._apply(fn)``, and ``fn`` calls ``parameter.half()``: the
# parameter sees the same call as from a user. torch offers no hook for it (``register_*_hook`` is for calls and state
# dicts, ``torch.__future__`` chooses only how the result is stored), and replacing ``_apply`` for the whole process
# would change modules that have nothing to do with this package. So a rule looks whether ``_apply`` is among its
# callers. That holds also for a function of the user (``model._apply(fn)``), below another library's ``_apply`` that
# calls torch's, with modes in between, and in each thread by itself. Libraries that fill modules with parameters have
# such a function too, which gives a tensor the dtype of its place.

FILLS_MODULES = {
    "_apply": "torch.nn.modules.module",
    "set_module_tensor_to_device": "accelerate.utils.modeling",
    "_materialize_copy": "transformers.core_model_loading",
    "load_model_dict_into_meta": "diffusers.models.model_loading_utils",
}
"""Function that puts tensors into modules -> its module. Missing (it has another name): what it puts there is plain
values, and a model that should be quantized is not."""


def filler() -> str | None:
    """The name of the function of FILLS_MODULES that is among the callers; None if there is none.

    None while Dynamo traces: graphs fill no module.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        home = FILLS_MODULES.get(name)
        if home is not None and frame.f_globals.get("__name__") == home:
            return name
        frame = frame.f_back
    return None


def level_outside(package: str) -> int:
    """The ``stacklevel`` of ``warnings.warn`` for the first caller outside of ``package``, seen from the caller.

    Python 3.12 has ``skip_file_prefixes`` for this.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


def can_be_data(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``parameter.data = value`` is possible: not from one device to the meta device, say.

    ``nn.Module._apply`` asks the same. Missing: False, and a parameter with a weak reference is not converted.
    """
    ask = getattr(torch, "_has_compatible_shallow_copy_type", None)
    return ask is not None and bool(ask(parameter, value))
