"""The cases of two ranks for ``test_tensor_parallel.py``: layers split by columns and rows, and on one rank."""

import contextlib
import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as plain
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
from mxtensor.core.select import forced_kernel
from mxtensor.distributed import split_linear
from mxtensor.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.distributed.fsdp_cases import message, same_as
from tests.helpers.ranks import DEVICE, case, long_case

TOKENS, IN, HIDDEN = 128, 128, 256
CONFIGS = {
    "mxfp8": mx.ao.MXLinearConfig(),
    "mxfp4": mx.ao.MXLinearConfig(elem_dtype="mxfp4"),
    "mxint8": CustomRecipe(weight="mxint8"),
    "tiles": CustomRecipe(weight="mxint8[32x32]"),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),  # random numbers differ between ranks
    "float8": Float8CurrentScaling(),
    "nvfp4, one copy": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
}


def mesh():
    return init_device_mesh(DEVICE, (2,))


def mlp(config=None, bias=True, seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(IN, HIDDEN, bias=bias), nn.GELU(), nn.Linear(HIDDEN, IN, bias=bias))
    with torch.no_grad():
        for layer in (model[0], model[2]):  # uniform weights would give all blocks the same scale
            layer.weight.mul_(2.0 ** torch.randint(-3, 4, layer.weight.shape))
    return model if config is None else mx.quantize_(model, config)


def full(t):
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return getattr(t, "high_precision", t).detach()


def error(a, b):
    return ((full(a).double() - full(b).double()).norm() / full(b).double().norm()).item()


def steps(model, x, count=3, clip=None):
    """The losses and the last gradients of some AdamW steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(count):
        optimizer.zero_grad()
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        loss = (y - x.roll(1, 0)).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, [full(p.grad) for p in model.parameters()]


def same_gradients(two, one):
    return [same_as(full(p.grad), q.grad) for p, q in zip(two.parameters(), one.parameters(), strict=True)]


def gradient_errors(two, one):
    return [error(p.grad, q.grad) for p, q in zip(two.parameters(), one.parameters(), strict=True)]


def products(log):
    return [(e.spec.op, e.kernel) for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad", "gather")]


@contextlib.contextmanager
def counted():
    """The bytes that gathers give and that scattered sums take."""
    bytes, old = {"gathered": 0, "sum_scattered": 0}, {}

    def wrap(name):
        def call(given, ranks):
            out = old[name](given, ranks)
            bytes[name] += (out if name == "gathered" else given).nbytes
            return out

        return call

    for name in bytes:
        old[name] = getattr(split_linear, name)
        setattr(split_linear, name, wrap(name))
    try:
        yield bytes
    finally:
        for name, function in old.items():
            setattr(split_linear, name, function)


@case
def columns_and_rows(rank, folder):
    """Config -> losses here, losses of one rank, errors of the gradients, the products of one step."""
    found = {}
    for name, config in CONFIGS.items():
        for bias in (True, False):
            one = mlp(config, bias)
            two = parallelize_module(
                copy.deepcopy(one), mesh(), {"0": mx.parallel.ColwiseParallel(), "2": mx.parallel.RowwiseParallel()}
            )
            torch.manual_seed(2)
            x = torch.randn(TOKENS, IN)
            with mx.explain() as log:
                losses, grads = steps(two, x, clip=1.0)
            alone, reference = steps(one, x, clip=1.0)
            errors = [error(a, b) for a, b in zip(grads, reference, strict=True)]
            found[name, bias] = losses, alone, errors, products(log)[:6]
    return found


def split(model, styles, mesh):
    return parallelize_module(model, mesh, {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()})


@long_case
def prepared_layers(rank, folder):
    """Format -> the largest error of the gradients of layers prepared for quantization-aware training; the error for a
    format with a scale of the whole weight."""
    found = {}
    for name in ("mxfp4", "mxint8-weight-only", "mxfp8[32x32]-weight-only"):
        one = mx.quantize_(mlp(), name, step="prepare")
        two = split(copy.deepcopy(one), mx.parallel, mesh())
        torch.manual_seed(2)
        x = torch.randn(TOKENS, IN)
        for model in (one, two):
            model(x).square().mean().backward()
        found[name] = max(error(a.grad, b.grad) for a, b in zip(two.parameters(), one.parameters(), strict=True))
    whole_scale = mx.quantize_(mlp(), "nvfp4", step="prepare")
    refused = message(lambda: parallelize_module(whole_scale, mesh(), {"0": mx.parallel.ColwiseParallel()}))
    return found, refused


@case(exact=True)
def columns_alone(rank, folder):
    """Config -> of a layer split by columns whether result and gradients of weight and bias are bitwise those of one
    rank, and the error of the gradient of x."""
    found = {}
    rows = NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True, nvfp4_4over6="all"
    )
    configs = {name: CONFIGS[name] for name in ("mxfp8", "nvfp4", "nvfp4, one copy", "float8")} | {"rows": rows}
    for name, config in configs.items():
        one = mx.quantize_(nn.Sequential(nn.Linear(IN, HIDDEN)), config)
        for p in one.parameters():
            dist.broadcast(p.detach(), 0)
        style = mx.parallel.ColwiseParallel(output_layouts=Replicate())
        two = parallelize_module(copy.deepcopy(one), mesh(), {"0": style})
        x = torch.randn(TOKENS, IN)
        dist.broadcast(x, 0)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = two(a), one(b)
        y.square().sum().backward(), z.square().sum().backward()
        same = [same_as(y, z), *same_gradients(two, one)]
        if "float8" not in name and "mxfp8" not in name and forced_kernel() == "emulated":
            # float64 shows where the global scale is multiplied: one rank's fake-quantized values have it beside them
            same = [each < 1e-6 for each in (error(y, z), *gradient_errors(two, one))]
        found[name] = same, error(a.grad, b.grad)
    return found


@case(exact=True)
def sequence_parallel(rank, folder):
    """Shape of x -> what is the same as on one rank, errors, the gather, its bytes relative to bfloat16 values."""
    found = {}
    for shape, dim in (((TOKENS, IN), 0), ((2, TOKENS, IN), 1), ((TOKENS, 3, IN), 0), ((40, IN), 0)):
        one = mx.quantize_(nn.Sequential(nn.Linear(IN, HIDDEN)), CONFIGS["mxfp8"])
        for p in one.parameters():
            dist.broadcast(p.detach(), 0)
        style = mx.parallel.ColwiseParallel(input_layouts=Shard(dim), output_layouts=Replicate())
        two = parallelize_module(copy.deepcopy(one), mesh(), {"0": style})
        x = torch.randn(shape)
        dist.broadcast(x, 0)
        a, b = x.chunk(2, dim)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        with mx.explain() as log, counted() as bytes:
            y = two(a)
            forward = bytes["gathered"]
            y.square().sum().backward()
        z = one(b)
        z.square().sum().backward()
        errors = [error(a.grad, b.grad.chunk(2, dim)[rank]), *gradient_errors(two, one)]
        same = [same_as(y, z), *same_gradients(two, one)]
        gathers = [(e.kernel, e.refusals) for e in log.entries if e.spec.op == "gather"]
        found[shape] = same, errors, gathers, forward / (2 * x.numel()), products(log)
    return found


@case
def sequence_parallel_of_one_copy(rank, folder):
    """dgrad's copy of the weight is cast from fprop's: the errors of the gradient of x against one rank with the same
    recipe, and against one rank whose copy is cast from high precision."""
    found = []
    for given in (CustomRecipe(weight="mxint8", single_weight_copy=True), CustomRecipe(weight="mxint8")):
        one = mlp(given)[:1]
        style = mx.parallel.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        two = parallelize_module(mlp(CustomRecipe(weight="mxint8", single_weight_copy=True))[:1], mesh(), {"0": style})
        torch.manual_seed(2)
        x = torch.randn(TOKENS, IN)
        a, b = x.chunk(2)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        two(a).square().sum().backward()
        one(b).square().sum().backward()
        found.append(error(a.grad, b.grad.chunk(2)[rank]))
    return found


@case
def torchs_own_styles(rank, folder):
    """The errors of torch's own styles for a training weight, and of weights that users make DTensors."""
    x, messages = torch.randn(4, IN), []
    dist.broadcast(x, 0)

    def local(name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            part = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            module.register_parameter(key, nn.Parameter(part))

    ways = {
        "columns": lambda layer: parallelize_module(layer, mesh(), plain.ColwiseParallel()),
        "rows": lambda layer: parallelize_module(layer, mesh(), plain.RowwiseParallel(input_layouts=Replicate())),
        "replicated": lambda layer: distribute_module(layer, mesh()),
        "from_local": lambda layer: distribute_module(layer, mesh(), local),
    }
    for name, split in ways.items():
        layer = split(mx.quantize_(nn.Linear(IN, IN), CONFIGS["mxfp8"]))
        given = x if name in ("columns", "rows") else DTensor.from_local(x, mesh(), [Replicate()])
        try:
            layer(given)
            messages.append("")
        except RuntimeError as e:
            messages.append(str(e))
    weight = layer.weight
    square = (weight @ weight.t()).full_tensor()  # a product that is not a layer, as in a penalty
    return messages, torch.equal(square, full(weight) @ full(weight).t())


@long_case
def frozen_weights(rank, folder):
    """The errors of layers with MXTensor weights, split by our styles and by torch's own, and the types of the local
    weights. All ranks get the weights of rank 0."""
    x, errors, kinds = torch.randn(4, IN), {}, set()
    dist.broadcast(x, 0)
    for styles in (mx.parallel, plain):
        for config in ("mxfp8-weight-only", "mxfp8", "mxfp4-weight-only", "mxint8", "nvfp4-weight-only"):
            for bias in (True, False):
                one = mlp(config, bias)
                plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
                two = parallelize_module(mlp(config, bias, seed=1 + rank), mesh(), plan)
                kinds |= {type(m.weight.to_local()).__name__ for m in (two[0], two[2])}
                with torch.no_grad():
                    errors[styles.__name__, config, bias] = error(two(x), one(x))
    return errors, kinds


@case
def frozen_weights_of_uneven_shards(rank, folder):
    """(features out, in) -> the result of torch's own style for shards of different sizes, or shards that would cut
    blocks: the error of the product and the type of the local weight, or the message."""
    found = {}
    for out, into, style in (
        (33, 64, plain.ColwiseParallel(output_layouts=Replicate())),
        (64, 96, plain.RowwiseParallel(input_layouts=Replicate())),
        (64, 127, plain.RowwiseParallel(input_layouts=Replicate())),
    ):
        torch.manual_seed(3)
        one = mx.quantize_(nn.Sequential(nn.Linear(into, out)), "mxfp8-weight-only")
        two, x = copy.deepcopy(one), torch.randn(4, into)
        with torch.device(DEVICE):  # a mode that intercepts every call first
            text = message(lambda two=two, style=style: parallelize_module(two, mesh(), {"0": style}))
        found[out, into] = text or (error(two(x), one(x)), type(two[0].weight.to_local()).__name__)
    return found


@case
def what_does_not_divide(rank, folder):
    """The error of each layer that a style cannot split."""
    found = []
    for out, into, style in (
        (96, 64, mx.parallel.ColwiseParallel()), (64, 96, mx.parallel.RowwiseParallel()),
        (33, 64, mx.parallel.ColwiseParallel()), (64, 33, mx.parallel.RowwiseParallel()),
    ):  # fmt: skip
        layer = mx.quantize_(nn.Sequential(nn.Linear(into, out)), CONFIGS["mxfp8"])
        try:
            parallelize_module(layer, mesh(), {"0": style})
            found.append("")
        except ValueError as e:
            found.append(str(e))
    for recipe in (DelayedScaling(), CustomRecipe(weight="float8_e4m3_row")):
        layer = mx.quantize_(nn.Sequential(nn.Linear(IN, IN)), recipe)
        found.append(
            message(lambda layer=layer: parallelize_module(layer, mesh(), {"0": mx.parallel.ColwiseParallel()}))
        )
    return found


@case
def two_dimensions(rank, folder):
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other: what FSDP2 gathered, the products, the
    errors of result and gradients."""
    warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)  # to_local, of torch's styles
    told = {}
    for shape in ((1, 2), (2, 1)):
        grid = init_device_mesh(DEVICE, shape, mesh_dim_names=("shard", "parallel"))
        one = mlp(MXFP8BlockScaling(two_dimensional_weights=True))
        two = mlp(MXFP8BlockScaling(two_dimensional_weights=True))
        plan = {"0": mx.parallel.ColwiseParallel(), "2": mx.parallel.RowwiseParallel()}
        parallelize_module(two, grid["parallel"], plan)
        for layer in (two[0], two[2]):
            fully_shard(layer, mesh=grid["shard"])
        fully_shard(two, mesh=grid["shard"])
        torch.manual_seed(2)
        x = torch.randn(TOKENS, IN)
        with mx.explain() as log:
            y = two(x)
            y.square().mean().backward()
        z = one(x)
        z.square().mean().backward()
        gathered = {e.kernel for e in log.entries if e.spec.op == "all-gather"}
        told[shape] = gathered, products(log), [error(y, z), *gradient_errors(two, one)]
    return told


@long_case
def compiled(rank, folder):
    """``compiled_as`` of MXFP8."""
    return compiled_as(("mxfp8",), rank)


@long_case
def compiled_others(rank, folder):
    """``compiled_as`` of other recipes."""
    return compiled_as(("tiles", "no backward", "frozen", "nvfp4"), rank)


def compiled_as(names, rank):
    """{(config, sequence parallel): (largest error of y, of gradients)} of compiled layers against eager ones."""
    found = {}
    configs = CONFIGS | {"frozen": "mxfp8", "no backward": MXFP8BlockScaling(high_precision_backward=True)}
    for name in names:
        for sequence in (False, True):
            torch._dynamo.reset()
            layouts = {"input_layouts": Shard(0)} if sequence else {}
            styles = {
                "0": mx.parallel.ColwiseParallel(**layouts),
                "2": mx.parallel.RowwiseParallel(**({"output_layouts": Shard(0)} if sequence else {})),
            }
            eager = parallelize_module(mlp(configs[name]), mesh(), dict(styles))
            other = parallelize_module(mlp(configs[name]), mesh(), dict(styles))
            traced = torch.compile(other, fullgraph=True, backend="aot_eager")
            torch.manual_seed(3 + rank * sequence)
            x = torch.randn(TOKENS, IN)
            ys = []
            for model in (eager, traced):
                with warnings.catch_warnings():  # Dynamo makes an object of each autograd function that it traces
                    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
                    ys.append(model(x))
                if name != "frozen":
                    ys[-1].square().sum().backward()
            pairs = zip(eager.parameters(), other.parameters(), strict=True)
            errors = [error(b.grad, a.grad) for a, b in pairs if a.grad is not None]
            found[name, sequence] = error(ys[1], ys[0]), errors
    return found


@case
def quantized_dtensors(rank, folder):
    """{(format, orientation, dim): whether codes and scales are those of the whole tensor, or the message}."""
    torch.manual_seed(5)
    values, found = torch.randn(128, 192), {}
    for format in (
        "mxfp8",
        "mxfp4",
        "mxfp8[32x32]",
        "float8_e4m3_row",
        "nvfp4",
        "nvfp4_single_level",
        "float8_e4m3_tensor",
    ):
        for orientation in ("rowwise", "columnwise", "both"):
            for dim in (0, 1, None):
                placement = Replicate() if dim is None else Shard(dim)
                x = distribute_tensor(values, mesh(), [placement])
                try:
                    w = mx.quantize(x, format, orientation=orientation)
                except NotImplementedError as refused:
                    found[format, orientation, dim] = str(refused)
                    continue
                assert isinstance(w, DTensor) and isinstance(w.to_local(), mx.MXTensor) and w.placements == x.placements
                whole = mx.quantize(values, format, orientation=orientation).dequantize()
                mine = whole if dim is None else whole.chunk(2, dim)[rank]
                same = torch.equal(w.to_local().dequantize(), mine)
                found[format, orientation, dim] = same and w.shape == values.shape
    odd = distribute_tensor(torch.randn(128, 80), mesh(), [Shard(1)])
    partial = DTensor.from_local(values, mesh(), [Partial()])
    found["cut"], found["partial"] = (message(lambda t=t: mx.quantize(t, "mxfp8")) for t in (odd, partial))
    return found
