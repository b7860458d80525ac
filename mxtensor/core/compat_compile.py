"""Changes to what torch.compile does: places of Dynamo, AOTAutograd and Inductor that no public hook reaches.

As in ``compat_hooks``: nothing is changed when this file is imported. Each function says why no public API does it, and
what happens where this torch has no such place. All were seen in torch 2.11, 2.13 and 2.15 unless it says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import Any

import torch

Function = Callable[..., Any]

HigherOrderOperator: type = torch._ops.HigherOrderOperator
"""The class of torch's ops that call functions, as Dynamo shows them to modes: ``torch.cond`` is one.

No public name tells them from other functions. Missing: ``import mxtensor`` fails.
"""


def run_uncompiled(*functions: Any, callees: bool = False) -> None:
    """Dynamo does not compile these functions, nor what they call, when eager code calls them: after a graph break, or
    in a module of torch that Dynamo leaves to eager code (``nn.Sequential(...).compile()``). ``callees``: it compiles
    what they call, as usual.

    ``torch.compiler.disable`` would also break each graph that calls them. Missing: nothing happens, and an
    ``autocast`` or a ``strict`` that is open between two graphs may have no effect there.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT if callees else _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, strategy)


def break_at_checkpoint() -> None:
    """While Dynamo traces: a graph break, so that eager code makes the call; with ``fullgraph`` an error.

    The public ``torch.compiler.disable`` imports Dynamo, which is slow, when it decorates a function. Missing: Dynamo
    reports that it cannot trace this line.
    """
    torch._dynamo.graph_break(msg="inside a checkpoint, layers with delayed scaling run uncompiled")


def run_rules_uncompiled(kind: type[torch.Tensor]) -> None:
    """``run_uncompiled`` for the rules of a class of tensors, and for its ``__deepcopy__``. Dynamo would see no
    ``strict`` in them, ask without end for attributes such as ``mT``, whose rule reads the attribute, and compile a
    rule anew for each shape; and it cannot trace that attributes of a user are set on a copy."""
    run_uncompiled(kind.__torch_dispatch__, kind.__torch_function__, kind.__deepcopy__)


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
    """Let Inductor compile each graph under ``settings(graph_module)``, options of its config, but for those that the
    call of ``torch.compile`` names. True if this Inductor has both places.

    ``torch.compile(options=...)`` is an argument of each call, which belongs to the user or to the library that calls
    it, such as ``generate()`` of transformers. Missing: nothing is changed, and graphs are compiled as for any op.
    """
    from torch._inductor import compile_fx, config

    usual, outer = (getattr(compile_fx, name, None) for name in ("_compile_fx_inner", "compile_fx"))
    if usual is None or outer is None:
        return False
    named: ContextVar[frozenset[str]] = ContextVar("named", default=frozenset())

    @wraps(outer)
    def compile_all(*args: Any, **kwargs: Any) -> Any:
        token = named.set(named.get() | frozenset(kwargs.get("config_patches") or ()))
        try:
            return outer(*args, **kwargs)
        finally:
            named.reset(token)

    @wraps(usual)
    def compile_inner(gm: Any, *args: Any, **kwargs: Any) -> Any:
        ours = {name: value for name, value in settings(gm).items() if name not in named.get()}
        with config.patch(ours):
            return usual(gm, *args, **kwargs)

    compile_fx.compile_fx, compile_fx._compile_fx_inner = compile_all, compile_inner
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


def hook_bodies(kind: type | tuple[type, ...], tensors: Callable[[Any], list[torch.Tensor]]) -> bool:
    """Let Dynamo take tensors of class ``kind`` in the bodies of ``cond``, ``while_loop`` and their like: their memory
    is that of ``tensors(x)``. True if this Dynamo has the place.

    It compares the storages of what a body takes and returns. For the operands of ``while_loop`` it raises if one is a
    wrapper subclass, and torch 2.11 does so for those of every op. Missing: nothing is changed, and a weight in such a
    body raises an error of Dynamo.
    """
    name, utils = "get_tensor_storages", import_module("torch._higher_order_ops.utils")
    higher_order_ops = sys.modules.get("torch._dynamo.variables.higher_order_ops")
    usual = getattr(higher_order_ops, name, None)
    if usual is None:
        return False

    @wraps(usual)
    def storages(tensor: Any) -> Any:
        return set().union(*map(storages, tensors(tensor))) if isinstance(tensor, kind) else usual(tensor)

    setattr(higher_order_ops, name, storages)
    collect: Any = getattr(utils, "_collect_fake_inputs", None)
    if collect is None or "is_traceable_wrapper_subclass" in collect.__code__.co_names:  # torch 2.13 takes them apart
        return True

    @wraps(collect)
    def collect_fake_inputs(inputs: Any) -> Any:
        values = [getattr(getattr(i, "node", i), "meta", {}).get("example_value") for i in inputs]
        return [
            t
            for i, value in zip(inputs, values, strict=True)
            for t in (tensors(value) if isinstance(value, kind) else collect([i]))
        ]

    utils._collect_fake_inputs = collect_fake_inputs  # type: ignore[attr-defined]
    return True


def hook_tangents(kind: type[torch.Tensor], values: Callable[[Any], torch.Tensor]) -> bool:
    """Let AOTAutograd expect a plain gradient, as of ``values(x)``, where a graph returns an ``x`` of class ``kind``.
    True if this torch has the place.

    It expects one of the same class, which a subclass may change into another subclass only. Missing: the backward
    pass of such a graph raises "we guessed its metadata incorrectly".
    """
    from torch._functorch._aot_autograd import collect_metadata_analysis, input_output_analysis

    name = "coerce_tangent_and_suggest_memory_format"
    usual = getattr(collect_metadata_analysis, name, None)
    if usual is None:
        return False

    @wraps(usual)
    def coerce(x: Any) -> Any:
        return usual(values(x.detach()) if isinstance(x, kind) else x)

    for place in (collect_metadata_analysis, input_output_analysis):  # which imports it by name
        setattr(place, name, coerce)
    return True


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
