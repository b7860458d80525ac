"""The life of a quantized model: copied, saved, shared with workers, loaded, reparametrized, exported, compiled."""

import copy
import io
import pickle
import re
import shutil

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, parametrize
from torch.utils.data import DataLoader, Dataset

import mxtensor as mx
from tests.helpers.compare import dequantized, relative_error, same_bytes

FORMATS = ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxfp8[32x32]", "float8_row"]
JIT = "ignore:`torch.jit.script:DeprecationWarning"  # torch's own, when inductor imports torch.utils.mkldnn


def model(config="mxfp8", seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return mx.quantize_(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), config)


def same_models(a, b):
    """Whether all parameters are the same in every respect."""
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (name, type(p), p.dtype, p.requires_grad) == (other, type(q), q.dtype, q.requires_grad)
        assert same_bytes(p, q) if isinstance(p, mx.MXTensor) else torch.equal(p, q)
    return True


# ---------------------------------------------------------------------------------------------- copies and files


def test_a_copy_lives_on_its_own():
    source, x = model(), torch.randn(5, 64)
    y = source(x)
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert same_models(other, source)
        with torch.no_grad():
            other[0].weight.zero_()
        assert torch.equal(source(x), y) and not torch.equal(other(x), y)
        other.load_state_dict(source.state_dict())
        assert same_models(other, source)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_in_a_file(format, assign, mmap, tmp_path):
    source, target = model(format), model(format)
    torch.save(source.state_dict(), tmp_path / "model.pt")
    target.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap), assign=assign)
    assert same_models(target, source)
    x = torch.randn(5, 64)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_load_from_plain_into_quantized_models_and_back(format, assign):
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    target = model(format)
    recipe = target[0].weight.recipe
    target.load_state_dict(plain.state_dict(), assign=assign)
    assert same_bytes(target[0].weight, mx.quantize(plain[0].weight, format))
    assert isinstance(target[0].weight, nn.Parameter) and target[0].weight.recipe == recipe
    back = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    back.load_state_dict(target.state_dict())
    assert type(back[0].weight) is nn.Parameter and torch.equal(back[0].weight, target[0].weight.dequantize())


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_values_that_do_not_fit_are_refused_and_change_nothing(assign):
    target = model("mxfp8")
    before = copy.deepcopy(target)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        target.load_state_dict({**target.state_dict(), "0.weight": torch.randn(64, 64)}, assign=assign)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        target.load_state_dict({k: v for k, v in target.state_dict().items() if k != "0.weight"}, assign=assign)
    text = (
        "format mismatch for 0.weight: the checkpoint holds mxfp4_e2m1, the model mxfp8_e4m3; quantize the model in "
        "that format, or load the values' dequantize()"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        target.load_state_dict({**target.state_dict(), "0.weight": model("mxfp4")[0].weight}, assign=assign)
    assert "Missing key" not in str(caught.value)
    assert same_models(target, before)


def test_a_format_mismatch_may_be_quantized_again():
    """The error names this way out; ``strict=False`` is about names, not about values."""
    source, target = model("mxfp8"), model("mxfp4")
    with pytest.raises(RuntimeError, match=r"format mismatch for 0\.weight"):
        target.load_state_dict(source.state_dict(), strict=False)
    target.load_state_dict({k: v.dequantize() if "weight" in k else v for k, v in source.state_dict().items()})
    assert same_bytes(target[0].weight, mx.quantize(source[0].weight.dequantize(), "mxfp4"))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_model_without_memory_is_given_some_and_filled(assign):
    source, x = model("nvfp4"), torch.randn(5, 64)
    with torch.device("meta"):
        target = model("nvfp4")
    assert target[0].weight.is_meta and target(x.to("meta")).shape == (5, 32)
    if not assign:
        target.to_empty(device="cpu")
    target.load_state_dict(source.state_dict(), assign=assign)
    assert same_models(target, source) and torch.equal(target(x), source(x))


# ---------------------------------------------------------------------------------------------- processes


def halve(parameter, expected):
    with torch.no_grad():
        parameter.mul_(0.5)
    assert torch.equal(parameter.detach().dequantize(), expected)


class Rows(Dataset):
    """Runs a quantized model in the worker."""

    def __init__(self, module, x):
        self.module, self.x = module, x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        with torch.no_grad():
            return self.module(self.x[i : i + 1])[0]


@pytest.fixture
def forked():
    """Python 3.12 warns of forking with more than one thread alive; these children are short and have one thread."""
    return mp.get_context("fork")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_run_a_quantized_model(forked):
    module, x = model(), torch.randn(8, 64)
    expected = torch.stack([Rows(module, x)[i] for i in range(8)])
    batches = list(DataLoader(Rows(module, x), batch_size=4, num_workers=2, multiprocessing_context=forked))
    assert torch.equal(torch.cat(batches), expected)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_a_write_in_another_process_reaches_a_shared_parameter(forked, format):
    parameter = nn.Parameter(mx.quantize(torch.randn(32, 64), format))
    parameter.share_memory_()
    expected = mx.quantize(parameter.detach().dequantize() * 0.5, format)
    process = forked.Process(target=halve, args=(parameter, expected.dequantize()))
    process.start()
    process.join(timeout=30)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0
    assert torch.equal(parameter.detach().dequantize(), expected.dequantize())


# ---------------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_conversions_change_the_outer_tensor_and_no_code(dtype):
    module = model("nvfp4-weight-only")
    before = copy.deepcopy(module)
    optimizer_view = module[0].weight
    module.to(dtype)
    assert same_bytes(module[0].weight, before[0].weight) and module[0].weight.dtype is dtype
    assert module(torch.randn(5, 64, dtype=dtype)).dtype is dtype
    assert module[0].weight is optimizer_view  # parameters are swapped in place, so references to them stay valid


class Scaled(nn.Module):
    def forward(self, w):
        return w.dequantize() * 2


def test_a_parametrization_reads_the_quantized_weight():
    module, x = model("mxfp8-weight-only"), torch.randn(5, 64)
    dense, bias = module[0].weight.dequantize(), module[0].bias
    parametrize.register_parametrization(module[0], "weight", Scaled())
    assert isinstance(module[0].parametrizations.weight.original, mx.MXTensor)
    assert relative_error(module[0](x), nn.functional.linear(x, 2 * dense, bias)) < 1e-6
    parametrize.remove_parametrizations(module[0], "weight", leave_parametrized=False)
    assert isinstance(module[0].weight, mx.MXTensor)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.out = nn.Linear(64, 48, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_tied_weights_stay_tied():
    module = mx.quantize_(Tied(), "mxfp8-weight-only", filter_fn=lambda m, name: True)
    tokens = torch.tensor([[1, 5, 47]])
    assert module.out.weight is module.embed.weight and len(list(module.parameters())) == 1
    dense = module.embed.weight.dequantize()
    assert relative_error(module(tokens), dense[tokens] @ dense.t()) < 1e-6
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to(torch.bfloat16)):
        assert other.out.weight is other.embed.weight
    with torch.no_grad():
        module.out.weight.zero_()
    assert not module.embed(tokens).any()


def test_gradients_are_clipped_and_parameters_flattened():
    module = model("mxfp8-weight-only").requires_grad_()
    twin = dequantized(module).requires_grad_()
    x = torch.randn(5, 64)
    for m in (module, twin):
        m(x).square().mean().mul(1e4).backward()
    norms = [clip_grad_norm_(m.parameters(), 1.0) for m in (module, twin)]
    assert torch.allclose(*norms) and norms[0] > 1
    grads = [torch.stack([p.grad.norm() for p in m.parameters()]).norm() for m in (module, twin)]
    assert torch.allclose(grads[0], torch.tensor(1.0), atol=1e-3) and torch.allclose(*grads)
    flat = parameters_to_vector(module.parameters())
    values = flat.dequantize() if isinstance(flat, mx.MXTensor) else flat
    assert torch.equal(values, parameters_to_vector(twin.parameters()))


@torch.no_grad()
def test_forward_hooks_and_module_surgery():
    module, seen = model("mxfp8-weight-only"), []
    handle = module[0].register_forward_hook(lambda m, args, out: seen.append(m.weight is module[0].weight) or out + 1)
    x = torch.randn(5, 64)
    hooked = module(x)
    handle.remove()
    assert seen == [True] and not torch.equal(hooked, module(x))
    first = nn.Sequential(*list(module)[:1])
    assert torch.equal(first(x), module[0](x))
    module.register_buffer("table", mx.quantize(torch.randn(4, 64), "mxfp4"))
    assert isinstance(module.half().table, mx.MXTensor) and module.table.dtype is torch.float16


# ---------------------------------------------------------------------------------------------- graphs


@pytest.mark.exhaustive(quick=1)
@pytest.mark.filterwarnings(JIT)
@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4"])
def test_an_exported_model_runs_with_any_batch(config, fresh_dynamo):
    module, x = model(config).eval(), torch.randn(5, 64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    for rows in (5, 9):
        x = torch.randn(rows, 64)
        assert relative_error(program.module()(x), module(x)) < 1e-6


@pytest.mark.filterwarnings(JIT)
def test_make_fx_traces_a_plain_graph():
    module, x = model("mxfp8-weight-only"), torch.randn(5, 64)
    graph = make_fx(module)(x)
    assert relative_error(graph(x), module(x)) < 1e-6
    assert {n.op for n in graph.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}
    other = torch.randn(5, 64)
    assert relative_error(graph(other), module(other)) < 1e-6


def test_batches_of_any_size_share_two_graphs(fresh_dynamo):
    module = model("mxfp8-weight-only")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with torch.no_grad():
        for rows in (5, 8, 13, 31):
            x = torch.randn(rows, 64)
            assert relative_error(compiled(x), module(x)) < 1e-6
    assert 1 <= counter.frame_count <= 2


def test_another_weight_of_the_same_kind_needs_no_graph(fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda w, x: (x @ w.t(), w[:4].abs()), backend=counter, fullgraph=True)
    x = torch.randn(5, 64)
    for _ in range(3):
        w = mx.quantize(torch.randn(32, 64), "mxfp8")
        y, rows = compiled(w, x)
        assert relative_error(y, x @ w.dequantize().t()) < 1e-6 and torch.equal(rows, w[:4].dequantize().abs())
    assert counter.frame_count == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="the C++ that AOTInductor 2.11 writes has no float8 type")
@pytest.mark.filterwarnings(JIT)
def test_an_ahead_of_time_package_runs(tmp_path, fresh_dynamo):
    module, x = model("mxfp8-weight-only").eval(), torch.randn(5, 64)
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        assert relative_error(loaded(x), module(x)) < 1e-6


# ---------------------------------------------------------------------------------------------- jit, Python, numpy


TORCHSCRIPT = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:(You are using the legacy|The feature will be removed)"
)


def scripts(quantized, x):
    """Every way into TorchScript: of a module, of a function that uses a weight, of a weight, of a view of one."""
    weight, view = quantized[0].weight, quantized[0].weight.detach()[:, 3]
    return [
        lambda: torch.jit.trace(quantized, x),
        lambda: torch.jit.script(quantized),
        lambda: torch.jit.trace(lambda y: nn.functional.linear(y, weight), x),
        lambda: torch.jit.trace(lambda y: y @ weight.t(), x),
        lambda: torch.jit.trace(lambda y: y + weight.dequantize()[0], x),
        lambda: torch.jit.trace(lambda y: y + 1, weight),
        lambda: torch.jit.trace(lambda i: nn.functional.embedding(i, weight), torch.tensor([1, 2])),
        lambda: torch.jit.trace(lambda y: mx.quantize(y, "mxfp8").dequantize(), x),
        lambda: torch.onnx.export(quantized, (x,), io.BytesIO(), dynamo=False),
        lambda: torch.jit.trace(lambda y: y[:, 0] + view[0] + weight[:, 3][0], x),
    ]


@TORCHSCRIPT
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4"])
def test_torchscript_is_refused_before_it_records_zeros(config, grad):
    quantized, x = model(config).eval(), torch.randn(5, 64)
    y = quantized(x)
    with torch.set_grad_enabled(grad):
        for way_in in scripts(quantized, x):
            with pytest.raises(
                NotImplementedError, match=r"a saved program would compute with zeros; use torch\.export"
            ):
                way_in()
    assert torch.equal(quantized(x), y) and not torch.jit.is_tracing()


@TORCHSCRIPT
def test_torchscript_takes_no_training_and_still_takes_plain_models():
    trained, x = model(mx.recipe.MXFP8BlockScaling()), torch.randn(5, 64)
    for convert in (lambda: torch.jit.trace(trained, x), lambda: torch.jit.script(trained)):
        with pytest.raises(NotImplementedError, match=r"cannot record \w+\.weight \(TrainingWeight\): a saved program"):
            convert()
    plain = nn.Linear(64, 32)
    refused = pytest.raises(NotImplementedError, match="cannot record a layer that trains quantized")
    with mx.autocast(recipe=mx.recipe.MXFP8BlockScaling()), refused:
        torch.jit.trace(plain, x)
    with pytest.raises(NotImplementedError, match=r"FakeQuantizer: torch\.jit\.trace cannot record"):
        torch.jit.trace(mx.quantize_(nn.Linear(64, 32), "mxfp8", step="prepare"), x)
    for converted in (torch.jit.script(plain), torch.jit.trace(plain, x)):
        assert torch.equal(converted(x), plain(x))


def test_values_for_python_and_numpy():
    weight = model("nvfp4")[0].weight
    values = weight.dequantize()
    assert torch.equal(torch.from_numpy(weight.numpy()), values) and weight.tolist() == values.tolist()
    assert (weight.numpy() == weight.__array__()).all()
    with mx.strict(), pytest.raises(NotImplementedError, match="values for Python or numpy"):
        weight.numpy()


@pytest.mark.parametrize("config", ["mxfp8", mx.recipe.MXFP8BlockScaling()], ids=["inference", "training"])
def test_a_layer_of_no_columns_takes_inputs_of_any_shape(config):
    with pytest.warns(UserWarning, match="zero-element"):
        layer = mx.quantize_(nn.Linear(0, 4), config)
    for shape in ((0,), (3, 0), (2, 3, 0)):
        assert torch.equal(layer(torch.randn(shape)), layer.bias.expand(*shape[:-1], 4))


def test_accelerate_offloads_a_model_and_runs_it():
    accelerate = pytest.importorskip("accelerate")
    quantized, x = model("mxfp4"), torch.randn(5, 64)
    y = quantized(x)
    accelerate.cpu_offload(quantized, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert {(type(p), p.device.type) for p in (quantized[0].weight, quantized[2].weight)} == {(mx.MXTensor, "meta")}
        assert torch.equal(quantized(x), y)
