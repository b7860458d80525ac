"""Private torch: each entry of compat does what it says, and no other module reaches in."""

import ast
import enum
import importlib
import inspect
import io
import pickle
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, distribute_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mxtensor
from mxtensor.core import compat, compat_compile, compat_hooks
from mxtensor.core.when_imported import install_pending
from mxtensor.ops import conversions as convert

PACKAGE = Path(mxtensor.__file__).parent
NAMES = ("compat", "compat_hooks", "compat_compile")
COMPAT = tuple(f"core/{name}.py" for name in NAMES)
SOURCES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
OUTSIDE = {name: tree for name, tree in SOURCES.items() if name not in COMPAT}
PRODUCTS = {"torch._scaled_mm", "torch._grouped_mm", "torch._scaled_grouped_mm"}
"""Public ops whose names begin with an underscore: the products that the package is about."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def chain(node):
    """``a.b.c`` as a list of names; empty if it does not begin with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


# ---------------------------------------------------------------------------------------------- nobody else reaches in


def test_no_module_imports_private_torch():
    found = set()
    for file, tree in OUTSIDE.items():
        allowed, names = compat.ELSEWHERE.get(file, ()), []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in allowed:
                names += [f"{node.module}.{a.name}" for a in node.names]
            if isinstance(node, ast.Import):
                names += [a.name for a in node.names]
        found |= {(file, n) for n in names if n.startswith("torch") and any(map(is_private, n.split(".")))}
    assert not found, "give mxtensor/core/compat.py an entry with its reason"


def test_no_module_names_anything_private_of_torch():
    found = set()
    for file, tree in OUTSIDE.items():
        for names in (chain(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            name = ".".join(names)
            public = name.startswith("torch.ops.aten.") or any(name.startswith(product) for product in PRODUCTS)
            if names and names[0] in ("torch", "F", "Tensor", "dist", "nn", "sys") and not public:
                found |= {(file, name)} if any(map(is_private, names)) else set()
    assert not found, "give mxtensor/core/compat.py an entry with its reason"


def names_of_the_package():
    """Private names that the package itself defines, and those of named tuples."""
    names = {"_replace", "_fields", "_field_defaults", "_asdict"}
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def test_private_attributes_of_torchs_objects_are_in_the_table():
    ours, found = names_of_the_package(), {}
    for file, tree in OUTSIDE.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in ours:
                continue
            if "aten" not in chain(node) and ".".join(chain(node)) not in PRODUCTS:
                found.setdefault(node.attr, file)
    assert set(found) <= set(compat.ATTRIBUTES), found


def statements_at_import(tree):
    return (node for s in tree.body if not isinstance(s, ast.FunctionDef | ast.ClassDef) for node in ast.walk(s))


def test_no_module_changes_a_class_at_import_or_copies_code():
    found = set()
    for file, tree in OUTSIDE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("__code__", "_getframe"):
                found.add((file, ast.unparse(node)))
            if isinstance(node, ast.Name) and node.id == "FunctionType":
                found.add((file, node.id))
        for node in statements_at_import(tree):
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
            if call or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
                found.add((file, ast.unparse(node)))
    assert not found


@pytest.mark.parametrize("file", COMPAT)
def test_compat_stands_on_torch_alone(file):
    assert not [n for n in ast.walk(SOURCES[file]) if isinstance(n, ast.ImportFrom) and n.level > 0]


def test_the_modules_that_import_inductor_are_the_ones_listed():
    def imports(tree):
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        return tuple(sorted(m for m in modules if m.startswith("torch._inductor")))

    assert {name: imports(tree) for name, tree in OUTSIDE.items() if imports(tree)} == {
        name: modules for name, modules in compat.ELSEWHERE.items() if (PACKAGE / name).exists()
    }


# ---------------------------------------------------------------------------------------------- what is read


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"asked about {func}")


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_torch_functions_can_be_switched_off_of_all_and_of_subclasses():
    t = torch.ones(2).as_subclass(Loud)
    with Seen() as seen, compat.disable_torch_function():
        torch.add(t, t)
    assert seen.functions == []
    with compat.disable_subclass_torch_function():
        torch.add(t, t)
        plain = torch.ones(1)
        with Seen() as seen:
            torch.add(plain, 1)
    assert seen.functions == [torch.add]
    with Seen() as seen, compat.disable_torch_function(), compat.enable_torch_function():
        torch.add(plain, 1)
    assert seen.functions == [torch.add]


def test_a_class_without_a_torch_function_is_left_alone_and_its_results_are_plain():
    quiet = type("Quiet", (torch.Tensor,), {"__torch_function__": compat.no_torch_function})
    assert type(torch.ones(2).as_subclass(quiet) + 1) is torch.Tensor


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        out = compat.make_wrapper_subclass(cls, (3, 2), strides=(2, 1), storage_offset=1, dtype=torch.bfloat16)
        out.inner = inner
        return out

    __torch_function__ = compat.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compat.return_and_correct_aliasing(func, args, kwargs or {}, Wrapper(args[0].inner))


def test_a_wrapper_has_the_shape_given_and_its_view_an_alias():
    w = Wrapper(torch.ones(3, 2))
    assert (w.shape, w.stride(), w.storage_offset(), w.dtype) == ((3, 2), (2, 1), 1, torch.bfloat16)
    view = torch.ops.aten.alias.default(w)
    assert type(view) is Wrapper and view.untyped_storage()._cdata == w.untyped_storage()._cdata


def test_trees_are_flattened_in_the_order_of_their_leaves():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = compat.tree_flatten(tree)
    assert leaves == [1, 2, None, 3] == compat.tree_leaves(tree) and compat.tree_unflatten(leaves, spec) == tree
    assert compat.tree_map_only(int, lambda n: n + 1, tree) == {"a": [2, (3, None)], "b": 4}


def test_the_attributes_of_torchs_objects_are_there():
    x, add, attention = torch.ones(4), torch.ops.aten.add_.Tensor, nn.MultiheadAttention(4, 1)
    view, before = x[1:], x._version
    x.add_(1)
    assert x._version == before + 1 and view._base is x and view._is_view() and not x._is_view()
    assert torch.equal(view._view_func(torch.arange(4.0)), torch.tensor([1.0, 2.0, 3.0]))
    assert view._use_count() == 1 and x._use_count() == 2  # the view has it
    assert add._schema.arguments[0].alias_info.is_write and add._overloadname == "Tensor"
    assert add._overloadpacket is torch.ops.aten.add_
    assert torch.ops.aten.linear.default._can_decompose() and not torch.ops.aten.mm.default._can_decompose()
    assert attention._qkv_same_embed_dim and set(attention._parameters) >= {"in_proj_weight", "in_proj_bias"}
    optimizer, scaler, kind = torch.optim.SGD([x]), torch.amp.GradScaler("cpu"), enum.Enum("Kind", "ONE")
    assert kind._member_map_ == {"ONE": kind.ONE} and scaler._enabled and scaler._per_optimizer_states == {}
    assert optimizer._optimizer_load_state_dict_pre_hooks == {} == optimizer._optimizer_load_state_dict_post_hooks
    assert attention._forward_pre_hooks == {} == attention._state_dict_hooks
    assert "_local_tensor" in DTensor.__annotations__
    assert pickle._Unpickler(io.BytesIO(pickle.dumps([1]))).load() == [1]
    assert "module._distribute_module_applied = True" in inspect.getsource(distribute_module)
    for method in ("_apply", "_save_to_state_dict", "_load_from_state_dict"):
        assert inspect.isfunction(getattr(nn.Module, method))
    tested = set(inspect.getsource(test_the_attributes_of_torchs_objects_are_there).replace(".", " ").split())
    assert all(any(name in word for word in tested) for name in compat.ATTRIBUTES)


def test_dispatch_modes_functorch_and_traces_are_noticed():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert compat.dispatch_mode_count() == 0 and compat.functorch_interpreter() is None
    for mode in (Mode(), FakeTensorMode()):
        with mode:
            assert compat.dispatch_mode_count() == 1

    def look(x):
        seen.append((compat.functorch_interpreter() is not None, compat.is_functorch_wrapped_tensor(x)))
        return x * 2

    torch.func.vmap(look)(torch.ones(3))
    look(torch.ones(3))
    assert seen == [(True, True), (False, False)]


def test_a_fake_tensor_is_known():
    assert not compat.is_fake(torch.ones(2))
    with FakeTensorMode():
        assert compat.is_fake(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_jit_trace_is_noticed():
    seen = []
    torch.jit.trace(lambda x: (seen.append(compat.is_jit_tracing()), x + 1)[1], torch.ones(2), check_trace=False)
    assert seen == [True] and not compat.is_jit_tracing()


def test_an_autocast_is_noticed():
    with torch.autocast("cpu", torch.bfloat16):
        assert compat.any_autocast_is_active()
        with torch.autocast("cpu", enabled=False):
            assert not compat.any_autocast_is_active()
    assert not compat.any_autocast_is_active()


def test_function_modes_are_listed_innermost_last():
    with Seen() as outer, Seen() as inner:
        assert compat.function_mode_stack() == [outer, inner]
    assert compat.function_mode_stack() == []


def test_an_export_is_noticed(monkeypatch):
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(compat.is_exporting())
            return x + 1

    torch.export.export(Looks(), (torch.ones(2),), strict=False)
    assert seen and all(seen) and not compat.is_exporting()
    monkeypatch.delattr(torch.compiler, "_is_exporting_flag")
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: "asked")
    assert compat.is_exporting() == "asked"


def test_symbols_know_whether_they_are_ephemeral():
    from torch._dynamo.source import ConstantSource, EphemeralSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = ShapeEnv()
    for source, ephemeral in ((ConstantSource("x"), False), (EphemeralSource("view"), True)):
        symbol = env.create_symbol(7, source, DimDynamic.DYNAMIC)
        number = env.create_symintnode(symbol, hint=7, source=source)
        assert compat.is_ephemeral(number) is ephemeral
    assert not compat.is_ephemeral(SimpleNamespace(node=SimpleNamespace(shape_env=object(), expr=None)))


def test_a_backward_pass_is_noticed():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(compat.in_backward()))
    x.sum().backward()
    assert seen == [True] and not compat.in_backward()


def test_a_function_is_left_to_aotautograd():
    seen = []

    @compat.nonstrict_trace
    def look(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    assert torch.equal(torch.compile(look, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_the_current_device_and_stream_are_those_of_torch():
    if hasattr(torch._C, "_cuda_getDevice"):
        assert compat.current_cuda_device is torch._C._cuda_getDevice
        assert compat.current_cuda_stream is torch._C._cuda_getCurrentRawStream
    else:
        assert compat.current_cuda_device is torch.cuda.current_device
        assert compat.current_cuda_stream is compat._public_stream


@pytest.mark.gpu
def test_the_current_device_and_stream_of_a_gpu():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        index = compat.current_cuda_device()
        assert index == torch.cuda.current_device() and compat.current_cuda_stream(index) == stream.cuda_stream
        assert compat._public_stream(index) == stream.cuda_stream


def test_whether_the_cpu_multiplies_bfloat16(monkeypatch):
    assert compat.cpu_multiplies_bfloat16() is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert compat.cpu_multiplies_bfloat16() is False


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_finished_work_need_not_be_waited_for():
    work = compat.finished_work()
    assert work.is_completed() and work.wait() and torch.distributed.Work.unbox(work.boxed()).is_completed()


# ---------------------------------------------------------------------------------------------- what is changed


def test_a_graph_break_at_a_checkpoint_has_a_reason():
    seen = []

    def function(x):
        if torch.compiler.is_dynamo_compiling():
            compat_compile.break_at_checkpoint()
        seen.append(1)
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="inside a checkpoint, layers with delayed scaling run"):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
    assert torch.compile(function, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0] and seen == [1]
    torch._dynamo.reset()


@pytest.fixture
def put_back(monkeypatch):
    """``put_back(owner, *names)``: hooks that the test installs at these names end with it."""

    def remember(owner, *names):
        for name in names:
            monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))

    return remember


@pytest.fixture
def checkpoints(put_back):
    """torch's checkpoint classes without hooks, and as they were afterwards."""
    put_back(torch_checkpoint._checkpoint_hook, "__init__", "__enter__", "__exit__")
    put_back(torch_checkpoint._CheckpointFrame, "__init__")
    put_back(reentrant := torch_checkpoint.CheckpointFunction, "apply")
    del reentrant.apply  # leaves that of its base


def noting(said):
    """A ``start`` for ``hook_checkpoints`` that writes what happens, in its order."""

    @contextmanager
    def first_pass():
        said.append("first pass")
        try:
            yield
        finally:
            said.append("its end")

    def start(given, reentrant):
        said.append(reentrant)
        return lambda *args: said.append("recomputed") or given(*args), first_pass

    return start


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_run_what_the_hook_makes_of_a_function(checkpoints, use_reentrant):
    said = []

    def function(x):
        said.append("called")
        return x.sin()

    assert compat_hooks.hook_checkpoints(noting(said))
    x = torch.ones(2, requires_grad=True)
    y = torch_checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)
    first = ["recomputed", "called"] if use_reentrant else ["called"]
    assert said == [use_reentrant, "first pass", *first, "its end"]
    said.clear()
    y.sum().backward()
    assert said == ["recomputed", "called"]
    assert torch.equal(x.grad, torch.ones(2).cos())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_first_pass_ends_when_its_function_raises(checkpoints, use_reentrant):
    said = []

    def function(x):
        raise KeyError

    assert compat_hooks.hook_checkpoints(noting(said))
    with suppress(KeyError):  # torch 2.11 ends it when the traceback goes
        torch_checkpoint.checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant)
    assert [word for word in said if word != "recomputed"] == [use_reentrant, "first pass", "its end"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_without_gradients_has_no_first_pass(checkpoints, use_reentrant):
    said = []
    assert compat_hooks.hook_checkpoints(noting(said))
    with torch.no_grad():
        torch_checkpoint.checkpoint(torch.sin, torch.ones(2), use_reentrant=use_reentrant)
    assert said in ([], [False])  # the frame of one that is not reentrant is made


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_module_is_checked_before_torchscript_converts_it(put_back):
    import torch.jit._recursive as recursive

    put_back(recursive, "infer_concrete_type_builder")
    seen = []
    assert compat_hooks.hook_torchscript(seen.append)
    module = nn.Sequential(nn.Linear(2, 2))
    torch.jit.script(module)
    assert module in seen and module[0] in seen


def heads(width=8):
    attention = nn.MultiheadAttention(width, 2)
    x = torch.randn(3, 1, width)
    rest = (width, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0)
    return (x, x, x, *rest, attention.out_proj.weight, attention.out_proj.bias)


def test_optimizers_take_a_kind_of_parameter_many_at_a_time(monkeypatch):
    class Kind(torch.Tensor):
        pass

    optimizer = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizer, "_foreach_supported_types", [torch.Tensor])
    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    weights = [torch.ones(2), torch.ones(2).as_subclass(Kind)]
    assert optimizer._default_to_fused_or_foreach(weights, False) == (False, False)
    assert compat_hooks.let_optimizers_take(Kind) and compat_hooks.let_optimizers_take(Kind)
    assert optimizer._foreach_supported_types == [torch.Tensor, Kind]
    assert optimizer._default_to_fused_or_foreach(weights, False) == (False, True)


def test_a_models_state_dict_is_loaded_through_the_hook(put_back):
    place = importlib.import_module("torch.distributed.checkpoint.state_dict")
    put_back(place, "_load_model_state_dict")
    model, seen = nn.Sequential(nn.Linear(2, 2)), []

    def load(usual, given, state_dict, broadcast, name_of):
        seen.append((given is model, broadcast, name_of("0.weight")))
        return usual(state_dict)

    assert compat_hooks.hook_model_state_dicts(load)
    place.set_model_state_dict(model, {key: torch.ones_like(t) for key, t in model.state_dict().items()})
    assert seen == [(True, False, "0.weight")] and model[0].weight.eq(1).all()


def test_parameters_are_checked_before_they_are_flattened(monkeypatch):
    flat = importlib.import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    seen = []
    monkeypatch.setattr(flat, "__init__", lambda self, params, *rest: None)
    assert compat_hooks.hook_flat_parameters(seen.append)
    flat(["p"], nn.Linear(2, 2))
    assert seen == [["p"]]


def test_parameters_are_checked_before_they_are_copied_to_gpus(put_back):
    modules = [importlib.import_module(f"torch.nn.parallel{name}") for name in ("", ".replicate", ".data_parallel")]
    usual = inspect.unwrap(modules[0].replicate)
    for module in modules:
        put_back(module, "replicate")

    def check(parameters):
        if [*parameters]:
            raise ValueError("has parameters")

    assert compat_hooks.hook_replicas(check)
    assert len({module.replicate for module in modules}) == 1 and modules[0].replicate is not usual
    assert len(modules[2].replicate(nn.Identity(), [None])) == 1
    with pytest.raises(ValueError, match="has parameters"):
        modules[1].replicate(nn.Linear(2, 2), [None])


def test_a_function_is_replaced_in_the_modules_that_import_it_by_name(monkeypatch):
    def usual():
        """What it does."""
        return 1

    def other():
        return 2

    modules = [SimpleNamespace(f=usual), SimpleNamespace(f=usual), SimpleNamespace(f=other), SimpleNamespace()]
    for i, module in enumerate(modules):
        monkeypatch.setitem(sys.modules, f"module_{i}", module)
    names = [f"module_{i}" for i in range(4)]
    assert compat_hooks.hook_function(names, "f", lambda f: lambda: f() + 10)
    assert [module.f() for module in modules[:3]] == [11, 11, 2] and modules[0].f.__doc__ == usual.__doc__
    assert not compat_hooks.hook_function(names[::-1], "f", lambda f: f) and not hasattr(modules[3], "f")


def test_attention_runs_over_another_linear_and_torchs_stays():
    called = []

    def linear(*args):
        called.append(args[1].shape)
        return F.linear(*args)

    args = heads()
    original = F.multi_head_attention_forward
    for ours, torchs in zip(compat_hooks.attention_over(linear)(*args), original(*args), strict=True):
        assert torch.equal(ours, torchs)
    assert called == [(24, 8), (8, 8)] and F.multi_head_attention_forward is original


def test_the_caller_inside_torch_distributed_is_found():
    assert compat_hooks.distributed_caller("distributed_c10d") is None
    called = {"distributed_caller": compat_hooks.distributed_caller, "__name__": "torch.distributed.distributed_c10d"}
    exec("def broadcast(tensor):\n    return distributed_caller('distributed_c10d')", called)
    assert called["broadcast"](7).f_locals == {"tensor": 7}

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(compat_hooks.distributed_caller("distributed_c10d"))
            return func(*args, **kwargs or {})

    found, x = [], torch.ones(2)
    asks = {"torch": torch, "__name__": "torch.distributed.distributed_c10d"}
    exec("def broadcast(tensor):\n    return torch.neg(tensor)", asks)
    with Asks(), FlopCounterMode(display=False):  # modes between the call and the rule that asks
        asks["broadcast"](x)
    assert [frame.f_code.co_name for frame in found] == ["broadcast"]
    for module, function in (("distributed_c10d", "scatter"), ("distributed_c10d", "broadcast")):
        assert hasattr(sys.modules[f"torch.distributed.{module}"], function)
    assert "tensor" in inspect.signature(torch.distributed.broadcast).parameters
    from torch.distributed.tensor import placement_types

    frames = inspect.getsource(placement_types)  # a buffer is made by empty_like where scatter_list is at hand
    assert "torch.empty_like(" in frames and "scatter_list" in frames
    for module in convert.MAKE_SHARDS:
        assert ".new_zeros(" in inspect.getsource(importlib.import_module(f"torch.distributed.{module}"))


def test_a_function_that_is_run_uncompiled_is_not_a_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def inner(x):
        return x + 1

    def skipped(x):
        return inner(x)

    def compiled(x):
        return inner(x)

    def with_callees(x):
        return inner(x) - 1 + 1  # only ``inner`` is compiled

    compat_compile.run_uncompiled(skipped)
    compat_compile.run_uncompiled(with_callees, callees=True)
    for function, count_of in ((skipped, 0), (with_callees, 1), (compiled, 2)):
        assert torch.equal(torch.compile(function, backend=count)(torch.ones(2)), torch.full((2,), 2.0))
        assert len(graphs) == count_of, function
    assert [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs] == [1, 1]


def test_dynamo_shows_a_private_function_to_modes():
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return args[0] * 2 if func is torch._grouped_mm else func(*args, **(kwargs or {}))

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    x, ends = torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    functions = importlib.import_module("torch._dynamo.variables.torch").get_overridable_functions()
    for listed in (False, True):
        functions.discard(torch._grouped_mm)
        torch._dynamo.reset()
        assert not listed or compat_compile.let_dynamo_intercept(torch._grouped_mm)
        with Doubles():
            torch.compile(lambda x, w: F.grouped_mm(x, w, offs=ends), backend=keep)(x, torch.ones(2, 8, 8).bfloat16())
    assert "_grouped_mm" in graphs[0] and "_grouped_mm" not in graphs[1]
    torch._dynamo.reset()


def test_kernels_of_inductor_are_written_with_the_lines_that_the_hook_gives(monkeypatch):
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    said = []
    monkeypatch.setattr(TritonKernel, "_filter_pdl", lambda self, code: said.append("torch's own"))
    monkeypatch.setattr(TritonKernel, "GDC_LAUNCH", "launch", raising=False)
    monkeypatch.setattr(TritonKernel, "GDC_WAIT", "wait", raising=False)

    def change(lines, wait, launch, graph):
        return [launch, wait, *lines, graph]

    assert compat_compile.hook_kernel_lines(change, lambda config: config.max_autotune)
    for enabled, wanted, lines in ((True, True, ["launch", "wait", "load", "graph"]), (True, False, ["load"]),
                                   (False, True, ["load"])):  # fmt: skip
        code, kernel = SimpleNamespace(_lines=["load"]), SimpleNamespace(_enable_pdl_codegen=lambda on=enabled: on)
        with V.set_graph_handler("graph"), config.patch(max_autotune=wanted):
            TritonKernel._filter_pdl(kernel, code)
        assert code._lines == lines
    assert said == ["torch's own"] * 3


def test_a_mode_is_taken_from_below_another_one():
    class Mode(TorchFunctionMode):
        pass

    first, second, never = Mode(), Mode(), Mode()
    with second:
        pass
    first.__enter__()
    with second:
        compat.remove_function_mode(never)
        assert compat.function_mode_stack() == [first, second]
        compat.remove_function_mode(first)
        assert compat.function_mode_stack() == [second]
    assert compat.function_mode_stack() == []


def test_an_exchange_by_a_module_is_known():
    seen = []

    class Wrapper(torch.Tensor):
        @property
        def __dict__(self):
            return vars(torch.Tensor)["__dict__"].__get__(self)

        @__dict__.setter
        def __dict__(self, new):
            seen.append(compat.is_swapped_by_module())
            vars(torch.Tensor)["__dict__"].__set__(self, new)

    def tensor():
        return torch.ones(2).as_subclass(Wrapper)

    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(tensor())

    model = Swaps()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert seen == [True, True]
    torch.utils.swap_tensors(tensor(), tensor())
    tensor().__dict__ = {}
    assert seen == [True, True, False, False, False]


def test_dynamo_reads_attributes_of_tensors_that_a_graph_computes(monkeypatch):
    from torch._dynamo.variables.tensor import TensorVariable

    install_pending()  # before the change that the test undoes: each hook is installed once in a process
    monkeypatch.setattr(TensorVariable, "dynamic_getattr", TensorVariable.dynamic_getattr)
    monkeypatch.setattr(mxtensor.MXTensor, "values", 0, raising=False)
    assert compat_compile.hook_graph_attributes(mxtensor.MXTensor, {"values": lambda w: w.numel()}, ())
    x = torch.randn(32, 32)
    scaled = torch.compile(lambda x: x * mxtensor.quantize(x, "mxfp8").values, fullgraph=True, backend="eager")
    assert torch.equal(scaled(x), x * 1024)


def test_inductor_compiles_a_graph_under_settings_of_ours(monkeypatch):
    from torch._inductor import compile_fx, config

    seen = []
    monkeypatch.setattr(compile_fx, "_compile_fx_inner", lambda gm, *args: seen.append(config.max_autotune))
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, config_patches: compile_fx._compile_fx_inner(gm))
    assert compat_compile.hook_inductor_settings(lambda gm: {"max_autotune": gm == "with products"})
    compile_fx._compile_fx_inner("with products", "an input")
    compile_fx._compile_fx_inner("without", "an input")
    assert seen == [True, False]
    for patches, expected in ((None, True), ({"max_autotune": False}, False), ({"size_asserts": True}, True)):
        compile_fx.compile_fx("with products", config_patches=patches)  # what a call of torch.compile names wins
        assert seen.pop() is expected


def test_a_compiled_graph_takes_a_tensor_apart_at_once(monkeypatch):
    from torch._functorch._aot_autograd import runtime_wrappers

    name, usual_got = "runtime_unwrap_tensor_subclasses", []
    monkeypatch.setattr(
        runtime_wrappers, name, lambda args, *, append_symints, subclass_metas: usual_got.append(args) or args
    )
    assert compat_compile.hook_unwrapping(mxtensor.MXTensor)
    unwrap = getattr(runtime_wrappers, name)
    w, x = mxtensor.quantize(torch.randn(4, 64), "nvfp4"), torch.randn(4)
    static, symbolic = SimpleNamespace(outer_size=(4, 64), outer_stride=(64, 1)), SimpleNamespace(outer_size=(None, 64))
    found = unwrap([x, w, 3], append_symints=True, subclass_metas=[None, static, None])
    assert all(a is b for a, b in zip(found, [x, *w.components, 3], strict=True)) and usual_got == []
    unwrap([w], append_symints=True, subclass_metas=[symbolic])
    assert len(usual_got) == 1 and usual_got[0][0] is w


def test_guards_of_a_weight_are_skipped_where_dynamo_skips_those_of_a_plain_one(monkeypatch):
    from torch._dynamo import config, guards

    install_pending()
    marked = []
    usual = guards.GuardManagerWrapper.find_tag_safe_roots

    def noting(self):
        usual(self)
        marked.extend(line for line in str(self).splitlines() if "MXTensor" in line and "tag_safe=(True" in line)

    monkeypatch.setattr(guards.GuardManagerWrapper, "find_tag_safe_roots", noting)
    layer = mxtensor.quantize_(nn.Linear(64, 64, bias=False), "mxfp8-weight-only")
    x = torch.randn(2, 64)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad(), config.patch(use_recursive_dict_tags_for_guards=True):
        assert torch.equal(compiled(x), layer(x)) and marked
        layer.weight.data = mxtensor.quantize(torch.randn(64, 64), "mxfp4")
        assert torch.equal(compiled(x), layer(x))


def test_dynamo_takes_the_memory_of_a_weight_in_a_body():
    import torch._dynamo.variables.higher_order_ops as higher_order_ops
    import torch._higher_order_ops.utils as utils

    w = mxtensor.quantize(torch.randn(64, 64), "mxfp8")
    w.__tensor_flatten__()
    inside = [w.rowwise.data, w.rowwise.scale]
    assert higher_order_ops.get_tensor_storages(w) == set().union(*map(higher_order_ops.get_tensor_storages, inside))
    node = torch.fx.Graph().placeholder("w")
    node.meta["example_value"] = fake = FakeTensorMode().from_tensor(w)
    assert utils._collect_fake_inputs([node])[0] is fake.rowwise.data and utils._collect_fake_inputs([3]) == [3]


def test_a_graph_that_returns_a_weight_expects_a_plain_gradient():
    from torch._functorch._aot_autograd import collect_metadata_analysis, input_output_analysis

    name = "coerce_tangent_and_suggest_memory_format"
    layer = mxtensor.quantize_(nn.Linear(4, 4), mxtensor.recipe.MXFP8BlockScaling())
    torch.compile(layer, backend="aot_eager")(torch.randn(2, 4))
    for module in (collect_metadata_analysis, input_output_analysis):
        assert type(getattr(module, name)(layer.weight)[0]) is torch.Tensor
        assert getattr(module, name)(3)[0] == 3


# ---------------------------------------------------------------------------------------------- another torch

INDUCTOR, COMPILE_FX = "torch._inductor.codegen.triton:TritonKernel", "torch._inductor.compile_fx"
CHECKPOINT = "torch.utils.checkpoint"
WITHOUT = [
    *((CHECKPOINT, name, lambda: compat_hooks.hook_checkpoints(lambda function, reentrant: (function, nullcontext)))
      for name in ("_CheckpointFrame", "CheckpointFunction", "_checkpoint_hook")),
    *((COMPILE_FX, name, lambda: compat_compile.hook_inductor_settings(lambda gm: {}))
      for name in ("_compile_fx_inner", "compile_fx")),
    (INDUCTOR, "_filter_pdl", lambda: compat_compile.hook_kernel_lines(list, bool)),
    (INDUCTOR, "GDC_LAUNCH", lambda: compat_compile.hook_kernel_lines(list, bool)),
    (INDUCTOR, "GDC_WAIT", lambda: compat_compile.hook_kernel_lines(list, bool)),
    ("torch._C", "_current_graph_task_id", lambda: compat.in_backward()),
    ("torch._dynamo", "nonstrict_trace", lambda: compat.nonstrict_trace(len) is not len),
    ("torch._dynamo.guards:GuardManagerWrapper", "find_tag_safe_roots",
     lambda: compat_compile.hook_guards(mxtensor.MXTensor)),
    ("torch._dynamo.variables.higher_order_ops", "get_tensor_storages",
     lambda: compat_compile.hook_bodies(mxtensor.MXTensor, list)),
    ("torch._dynamo.variables.tensor:TensorVariable", "dynamic_getattr",
     lambda: compat_compile.hook_graph_attributes(mxtensor.MXTensor, {}, ())),
    ("torch._dynamo.variables.torch", "get_overridable_functions",
     lambda: compat_compile.let_dynamo_intercept(torch._grouped_mm)),
    ("torch._functorch._aot_autograd.collect_metadata_analysis", "coerce_tangent_and_suggest_memory_format",
     lambda: compat_compile.hook_tangents(mxtensor.MXTensor, lambda w: w)),
    ("torch._functorch._aot_autograd.runtime_wrappers", "runtime_unwrap_tensor_subclasses",
     lambda: compat_compile.hook_unwrapping(mxtensor.MXTensor)),
    ("torch._inductor.output_code", "CompiledFxGraph",
     lambda: compat_compile.hook_compiled_graphs(lambda code, mutated: code)),
    ("torch.distributed.checkpoint._state_dict_stager:StateDictStager", "_offload_tensor",
     lambda: compat_hooks.hook_staging(nn.Parameter)),
    ("torch.distributed.checkpoint.state_dict", "_get_fqns", lambda: compat_hooks.hook_model_state_dicts(list)),
    ("torch.distributed.fsdp._flat_param", "FlatParamHandle", lambda: compat_hooks.hook_flat_parameters(list)),
    ("torch.jit._recursive", "infer_concrete_type_builder", lambda: compat_hooks.hook_torchscript(list)),
    ("torch.nn.functional", "_in_projection", lambda: len(compat_hooks.attention_over(F.linear)(*heads())) != 2),
    ("torch.nn.parallel", "replicate", lambda: compat_hooks.hook_replicas(list)),
    ("torch.optim.optimizer", "_foreach_supported_types", lambda: compat_hooks.let_optimizers_take(nn.Parameter)),
]  # fmt: skip
"""A place, a private name of it, and something that is false where torch does not have the name."""


@pytest.mark.parametrize(("place", "name", "relies"), WITHOUT, ids=[name for _, name, _ in WITHOUT])
def test_a_torch_without_a_private_name_is_left_alone(place, name, relies, monkeypatch):
    module, _, owner = place.partition(":")
    owner = getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)
    monkeypatch.delattr(owner, name, raising=name not in ("GDC_LAUNCH", "GDC_WAIT"))
    assert not relies()
