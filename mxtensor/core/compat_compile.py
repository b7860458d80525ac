"""Changes to what torch.compile does: places of Dynamo, AOTAutograd and Inductor that no public hook reaches.

As in ``compat_hooks``: nothing is changed when this file is imported. Each function says why no public API does it, and
what happens where this torch has no such place. All were seen in torch 2.11, 2.13 and 2.15 unless it says otherwise.
"""

from __future__ import annotations

import ctypes
import dis
import pickle
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from itertools import count
from threading import RLock
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


# ---------------------------------- ways to have Dynamo compile one function that ``torch.compile`` has no options for

# Seen in torch 2.11 and 2.13.


def compiled_alone(function: Any, **options: Any) -> Function:
    """``torch.compile(function, fullgraph=True, **options)`` with graphs that no other call of this takes.

    Dynamo looks for a graph by the code that it compiled. Where guards are skipped, another model of the same class
    would get this one's graph. By the name of the code it notes which sizes differ from call to call, and compiles for
    any: those of another model would count. torch 2.13 has ``torch.compile(isolate_recompiles=True)`` for the graphs,
    torch 2.11 nothing.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own, fullgraph=True, **options)


_numbers = count()


@cache
def compiler_errors() -> tuple[type[Exception], ...]:
    """What a function of ``torch.compile(fullgraph=True)`` raises if it cannot be compiled, before any of it has run.

    No public name tells these from errors of the function. Missing: they are raised as others are.
    """
    names = "Unsupported", "BackendCompilerFailed", "InternalTorchDynamoError", "TorchRuntimeError", "UserError"
    found = (getattr(import_module("torch._dynamo.exc"), name, None) for name in (*names, _LIMIT))
    return tuple(kind for kind in found if kind is not None)


_LIMIT = "FailOnRecompileLimitHit"


def exceeds_limit(error: Exception) -> bool:
    """Whether torch refuses to compile one more graph of a function; those that it has can still be called."""
    return type(error).__name__ == _LIMIT


_symbols = RLock()


@contextmanager
def traced_as_symbols(names: str) -> Iterator[None]:
    """Dynamo takes integers whose names match this regular expression to be different in each call, and compiles no
    graph for their first value.

    It has no such option for one function, only ``torch.compiler.config.dynamic_sources`` for all: one thread at a time
    changes that. Missing: nothing happens, and there is one graph more.
    """
    config = torch.compiler.config
    with _symbols:
        before = getattr(config, "dynamic_sources", None)
        if before is None:
            yield
            return
        config.dynamic_sources = f"{before},{names}" if before else names
        try:
            yield
        finally:
            config.dynamic_sources = before


def size_hint(number: Any) -> int:
    """The size that a SymInt had where torch began to trace, without a guard; a size that is known, as it is.

    torch has no public question without a guard in both 2.11 and 2.13. Missing (no hint): ``int``, which is a guard.
    """
    hint = None if type(number) is int else getattr(getattr(number, "node", None), "hint", None)
    return int(number if hint is None else hint)


# ---------- the keys of torch's caches of compiled graphs on disk: what a key must know of tensors inside other tensors

# Two caches have such keys. AOTAutograd's key pickles the graph of Dynamo and its inputs, which may be subclasses;
# Inductor's key pickles the graph that is left when AOTAutograd has taken them apart. Seen in torch 2.11 and 2.13.

PACKAGE = __name__.partition(".")[0].encode()
"""What is in the pickled graph of each program with an op, a class or a function of the package."""


def hook_cache_keys(state: Callable[[], Any]) -> bool:
    """Let the keys of both caches tell graphs apart by all that this package changes. True if torch has the places.

    - Tensors inside a subclass are part of the key, at any depth. A ``DTensor`` hashes its sharding only, so that
      torch took a graph for one over plain tensors also for one over quantized tensors, and wrote codes as values.
    - A graph that names this package has ``state()`` in its key: the version of the package and its settings, by which
      ops are lowered.
    - torch 2.11 does not ask ``_stable_hash_for_caching``, which is the public way to be in the key; here it does.

    The key of a graph without this package stays what it is, unless subclasses of others are inside of subclasses.
    Missing: the cache of AOTAutograd is not used, so that no program finds a wrong graph.
    """
    module = sys.modules["torch._functorch._aot_autograd.autograd_cache"]
    of_aot: Any = getattr(module, "AOTAutogradCachePickler", None)
    if not isinstance(of_aot, type) or not issubclass(of_aot, pickle.Pickler):
        _use_no_cache()
        return False
    usual = getattr(of_aot, "reducer_override", None)

    def reducer_override(self: Any, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or type(obj) is Tensor:
            return NotImplemented if usual is None else usual(self, obj)
        return _key_of(obj, NotImplemented if usual is None else usual(self, obj))

    of_aot.reducer_override = reducer_override  # type: ignore[method-assign]
    kind: Any
    for kind in of_aot.__mro__:  # the pickler of Inductor's keys, of which AOTAutograd's is a subclass
        if "dumps" in vars(kind):
            kind.dumps = _with_state(vars(kind)["dumps"], state)
            return True
    _use_no_cache()
    return False


def _key_of(t: Tensor, usual: Any) -> Any:
    """What is pickled of a subclass: torch's own key, and the wrapper subclasses inside, each of which is reduced in
    turn. NotImplemented: torch pickles its attributes, among which are the tensors inside."""
    if usual is NotImplemented and hasattr(t, "_stable_hash_for_caching"):
        usual = str, (t._stable_hash_for_caching(),)
    if usual is NotImplemented or not is_traceable_wrapper_subclass(t):
        return usual
    names, _ = t.__tensor_flatten__()
    inside = [(name, getattr(t, name)) for name in names]
    wrappers = [(name, inner) for name, inner in inside if is_traceable_wrapper_subclass(inner)]
    if not wrappers:
        return usual
    function, arguments, *_ = usual
    return _key, (type(t).__qualname__, getattr(function, "__name__", ""), arguments, wrappers)


def _key(*components: Any) -> Any:
    """The name under which the parts of a key are pickled; no key is ever unpickled."""
    return components


def _with_state(dumps: Callable[[Any, Any], bytes], state: Callable[[], Any]) -> Callable[[Any, Any], bytes]:
    @wraps(dumps)
    def dumped(self: Any, obj: Any) -> bytes:
        pickled = dumps(self, obj)
        return pickled + repr(state()).encode() if PACKAGE in pickled else pickled

    return dumped


def _use_no_cache() -> None:
    settings = torch._functorch.config
    if hasattr(settings, "enable_autograd_cache"):
        settings.enable_autograd_cache = False


# ------------------------------- the code that Inductor generates for a graph on a CPU: where it is, and what it calls

# Seen in torch 2.11 and 2.13.

Code = Callable[[list[Any]], Any]

_ALLOCATES = ("empty_strided_cpu",)
_CALLS_OPS = ("torch", "aten", "extern_kernels", "inductor_ops", "alloc_from_pool", "reinterpret_tensor")
"""Names that generated code calls ops of torch by, and one that makes a view."""
_CHECKS = ("assert_size_stride", "assert_alignment")


def compiled_by_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What ``torch.compile`` makes of a graph with its backend "inductor".

    A backend of one's own that changes what Inductor returns has no public way to call it. Missing: ImportError.
    """
    from torch._dynamo import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("inductor")(module, inputs)
    return compiled


def forgetter(module: torch.fx.GraphModule) -> Callable[[], None]:
    """A function that drops the weak references to inputs which torch makes while it compiles this graph; call it when
    torch has compiled it.

    ``torch.utils.swap_tensors``, and so ``model.to()``, refuses a quantized parameter that has a weak reference. torch
    2.13 does this for its own backends; for others only if a setting of the whole process says so
    (``torch._dynamo.config.invalidate_compile_context_weakrefs``). Missing: nothing happens, and ``model.to()`` raises.
    """
    context: Any = torch._guards.TracingContext.try_get()
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    modes = {
        id(mode): mode for holder in (context, *values) if (mode := getattr(holder, "fake_mode", None)) is not None
    }
    found = [getattr(context, "tensor_to_context", None)]
    for mode in modes.values():  # of the backend, and of the code that was traced
        converter = getattr(getattr(mode, "fake_tensor_converter", None), "meta_converter", None)
        found += (
            getattr(getattr(converter, "describer", None), name, None) for name in ("lookup_tensor", "lookup_storage")
        )

    def forget() -> None:
        for references in found:
            if references is not None:
                references.clear()

    return forget


def hook_compiled_graphs(change: Callable[[Code, Collection[int]], Code]) -> bool:
    """Let ``change(code, mutated)`` give what runs in the place of the generated code of each compiled graph, also of
    one from torch's caches. ``code`` takes the list of inputs, which it clears, and returns the outputs; ``mutated``
    are the places of inputs that it writes to. True if this Inductor has the place.

    Inductor wraps code so for CUDA graphs only. Missing: nothing is changed, and generated code runs as it is.
    """
    from torch._inductor import output_code

    kind: Any = getattr(output_code, "CompiledFxGraph", None)
    usual = getattr(kind, "post_compile", None)
    if usual is None:
        return False

    @wraps(usual)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        code, mutated = (getattr(self, name, None) for name in ("current_callable", "mutated_input_idxs"))
        if callable(code) and mutated is not None:
            self.current_callable = change(code, mutated)

    kind.post_compile = post_compile
    return True


def address_of(function: Any) -> int | None:
    """The address of the C++ kernel behind the Python function that Inductor made of it; None for anything else."""
    module = getattr(function, "__self__", None)
    path, name = getattr(module, "__file__", None), getattr(function, "__name__", None)
    if path is None or name != "kernel":
        return None
    found = getattr(ctypes.CDLL(path), name, None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def observed(code: Code, kernel: Callable[[Any, int], Any], allocation: Callable[[Any], Any]) -> Code | str:
    """A copy of generated code that calls ``kernel(function, address)`` in the place of each C++ kernel, and
    ``allocation(function)`` in that of each function that allocates memory. All else that it calls is an op of torch.

    If it may call something else: what it is.
    """
    owner = code.__self__ if isinstance(code, MethodType) else None
    function = code.__func__ if isinstance(code, MethodType) else code
    if not isinstance(function, FunctionType):
        return f"{type(code).__name__} is not generated code"
    names = dict(function.__globals__)
    used = (one.argval for one in dis.get_instructions(function) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for name in dict.fromkeys(used):
        value = names.get(name)
        address = address_of(value)
        if address is not None:
            names[name] = kernel(value, address)
        elif name in _ALLOCATES:
            names[name] = allocation(value)
        elif name not in (*_CALLS_OPS, *_CHECKS) and not isinstance(value, Tensor):
            return f"generated code calls {name}"
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return copy if owner is None else MethodType(copy, owner)
