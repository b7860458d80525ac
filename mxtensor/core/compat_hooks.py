"""Every change to torch's own behaviour: where torch calls what no public hook reaches. ``compat`` reads torch.

Nothing is changed when this file is imported. Each function says why no public API does it, and what happens where this
torch has no such place. All were seen in torch 2.11, 2.13 and 2.15 unless the function says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

# ---------------------------------------------------------------------------------------------- activation checkpoints


def hook_checkpoints(
    wrap: Callable[[Function], Function], first_pass: Callable[[], AbstractContextManager[Any]]
) -> bool:
    """Let ``torch.utils.checkpoint`` run ``wrap(function)`` for each function that it recomputes in backward, and enter
    ``first_pass()`` around the forward pass of a reentrant checkpoint. True if this torch has both places.

    torch restores its own autocast in a recomputation and has no hook for anybody else's context: ``context_fn`` is an
    argument of each call, which belongs to the model. All checkpoints go through these two classes. Missing: nothing is
    changed, and the caller warns.
    """
    import torch.utils.checkpoint as torch_checkpoint

    frame = getattr(torch_checkpoint, "_CheckpointFrame", None)
    reentrant = getattr(torch_checkpoint, "CheckpointFunction", None)
    if frame is None or reentrant is None:
        return False
    make, forward = frame.__init__, reentrant.forward

    @wraps(make)
    def make_wrapped(self: Any, recompute_fn: Function, *args: Any, **kwargs: Any) -> None:
        make(self, wrap(recompute_fn), *args, **kwargs)

    @wraps(forward)
    def forward_wrapped(ctx: Any, run_function: Function, *args: Any) -> Any:
        with first_pass():
            return forward(ctx, wrap(run_function), *args)

    frame.__init__ = make_wrapped
    reentrant.forward = staticmethod(forward_wrapped)
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
    while frame is not None and (
        frame.f_code.co_name in ("__torch_function__", "<listcomp>")
        or frame.f_globals.get("__name__", "").startswith(PACKAGE)
    ):
        frame = frame.f_back
    names = [f"torch.distributed.{module}" for module in modules]
    return frame if frame is not None and frame.f_globals.get("__name__") in names else None


# ---------------------------------------------------------------------------------------------- torch.compile


def run_uncompiled(*functions: Any) -> None:
    """Dynamo does not compile these functions, nor what they call, when eager code calls them after a graph break.

    ``torch.compiler.disable`` would also break each graph that calls them. Missing: nothing happens, and an
    ``autocast`` that is entered between two graphs may not quantize.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return
    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def let_dynamo_intercept(function: Function) -> bool:
    """Let modes and subclasses see calls of a private torch function in code that Dynamo traces, as in eager code. True
    if this Dynamo has the place.

    ``torch.overrides`` lists public functions only, and Dynamo writes a call of any other one to its graph without
    asking. ``torch._grouped_mm`` is what ``F.grouped_mm`` calls. Missing: a grouped product that is compiled inside
    ``autocast`` runs in high precision.
    """
    listed = getattr(sys.modules.get("torch._dynamo.variables.torch"), "get_overridable_functions", None)
    if listed is None:
        return False
    listed().add(function)
    return function in listed()


def hook_kernel_lines(change: Callable[[list[Any], str, str, Any], list[Any]], wanted: Callable[[Any], bool]) -> bool:
    """Let ``change(lines, wait, launch, graph)`` give the lines of each Triton kernel that Inductor writes with early
    starts, where ``wanted(config)``. True if this Inductor has the place.

    ``wait`` is the line that waits for the kernel before, ``launch`` the one that lets the next kernel start, ``graph``
    what Inductor generates code for. Inductor decides by itself where these lines are, and has no setting for it.
    Missing: nothing is changed, and products start when the kernel before them has read its inputs.
    """
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    usual = getattr(TritonKernel, "_filter_pdl", None)
    wait, launch = (getattr(TritonKernel, name, None) for name in ("GDC_WAIT", "GDC_LAUNCH"))
    if usual is None or wait is None or launch is None:
        return False

    @wraps(usual)
    def filter_pdl(self: Any, code: Any) -> None:
        usual(self, code)
        if self._enable_pdl_codegen() and wanted(config):
            code._lines = change(code._lines, wait, launch, V.graph)

    TritonKernel._filter_pdl = filter_pdl  # type: ignore[method-assign]
    return True


def hook_graph_attributes(kind: type, readers: dict[str, Function], constants: tuple[str, ...]) -> bool:
    """Let Dynamo read attributes of a tensor of class ``kind`` that a graph computes. True if Dynamo has the place.

    ``readers[name](tensor)`` is traced in the place of the attribute ``name``; ``constants`` are attributes whose value
    Dynamo holds as an object of the program. An attribute that is None stays with Dynamo.

    Dynamo takes an attribute of such a tensor to be one that ``__tensor_flatten__`` names, or a number: it has no
    public way to say what any other object is made of. Inputs of a graph need no hook. Missing: nothing is changed, and
    Dynamo raises "Unexpected type in sourceless builder".
    """
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    usual = getattr(TensorVariable, "dynamic_getattr", None)
    if usual is None:
        return False

    @wraps(usual)
    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        if self.source or (name not in readers and name not in constants):
            return usual(self, tx, name)
        tensor = self.proxy.node.meta["example_value"]
        if not isinstance(tensor, kind) or (value := getattr(tensor, name)) is None:
            return usual(self, tx, name)
        if name in constants:
            return VariableTracker.build(tx, value, GlobalSource(tx.output.install_global_by_id(name, value)))
        return VariableTracker.build(tx, readers[name]).call_function(tx, [self], {})

    TensorVariable.dynamic_getattr = dynamic_getattr  # type: ignore[method-assign]
    return True


def hook_inductor_settings(settings: Callable[[Any], dict[str, Any]]) -> bool:
    """Let Inductor compile each graph under ``settings(graph_module)``, options of its config, beside the user's own.
    True if this Inductor has the place.

    ``torch.compile(options=...)`` is an argument of each call, which belongs to the user or to the library that calls
    it, such as ``generate()`` of transformers. Missing: nothing is changed, and graphs are compiled as for any op.
    """
    from torch._inductor import compile_fx, config

    usual = getattr(compile_fx, "_compile_fx_inner", None)
    if usual is None:
        return False

    @wraps(usual)
    def compile_inner(gm: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(settings(gm)):
            return usual(gm, *args, **kwargs)

    compile_fx._compile_fx_inner = compile_inner
    return True


def hook_unwrapping(kind: type) -> bool:
    """Let compiled graphs take the tensors of a ``kind`` apart at once: ``x.components`` are all its tensors, in order.
    True if this torch has the place.

    Every call of a graph asks each wrapper subclass for its tensors through several Python calls, which takes longer
    than the layer. Missing (torch 2.13 generates such code itself): nothing is changed.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    name = "runtime_unwrap_tensor_subclasses"
    usual = getattr(runtime_wrappers, name, None)
    if usual is None:
        return False

    plain = frozenset((torch.Tensor, torch.nn.Parameter, int))

    @wraps(usual)
    def unwrap(wrapped_args: Any, *, append_symints: bool, subclass_metas: Any = None) -> Any:
        out: list[Any] = []
        x: Any
        for i, x in enumerate(wrapped_args):
            cls = type(x)
            if cls in plain:
                out.append(x)
                continue
            meta = None if subclass_metas is None else subclass_metas[i]
            if cls is kind and (not append_symints or _is_static(meta)):
                out += x.components
            else:
                metas = None if subclass_metas is None else [meta]
                out += usual([x], append_symints=append_symints, subclass_metas=metas)
        return out

    setattr(runtime_wrappers, name, unwrap)
    return True


def _is_static(meta: Any) -> bool:
    """Whether no outer size or stride of a subclass is a symbol, which would be an argument of the graph too.

    The answer is stored with the description, which the graph asks for in each call and never changes.
    """
    try:
        return meta.mxtensor_is_static  # type: ignore[no-any-return]
    except AttributeError:
        sizes = *getattr(meta, "outer_size", (None,)), *getattr(meta, "outer_stride", (None,))
        static = all(type(size) is int for size in sizes)
        if meta is not None:
            meta.mxtensor_is_static = static
        return static


def hook_guards(kind: type) -> bool:
    """Let Dynamo skip the guards of a weight of class ``kind`` as it skips those of a plain one: while no dict between
    the module and the weight was written to. True if this Dynamo has the place.

    Dynamo takes a tensor to be unchanged until it is replaced, but looks at each wrapper subclass in every call, in
    Python: milliseconds a token for a model of hundreds of weights. Whoever changes what the guards compare of a living
    tensor calls ``compat.forget_graphs``. Missing: nothing is changed, and calls take longer.
    """
    from torch._dynamo import guards

    usual = getattr(guards.GuardManagerWrapper, "find_tag_safe_roots", None)
    managers: Any = getattr(guards, "DictGuardManager", None)
    if usual is None or not hasattr(managers, "mark_tag_safe"):
        return False

    def mark(node: Any) -> None:
        if isinstance(node, managers):
            for pair in node.get_key_value_managers().values():
                for manager in pair:
                    if manager is not None:
                        mark(manager)
        if issubclass(node.get_type_of_guarded_value(), kind):
            node.mark_tag_safe()
            return
        for child in node.get_child_managers():
            mark(child)

    @wraps(usual)
    def find_tag_safe_roots(self: Any) -> None:
        mark(self.root)
        usual(self)

    guards.GuardManagerWrapper.find_tag_safe_roots = find_tag_safe_roots  # type: ignore[method-assign]
    return True


# ---------------------------------------------------------------------------------------------- other libraries


def hook_method(kind: type, name: str, wrap: Callable[[Function], Function]) -> bool:
    """Replace a method of another library's class by ``wrap(method)``. True if the class has it.

    peft 0.21 has no event of a merge, and ``merge_and_unload`` is its public method. Missing: nothing is changed.
    """
    method = vars(kind).get(name)
    if method is None:
        return False
    setattr(kind, name, wraps(method)(wrap(method)))
    return True
