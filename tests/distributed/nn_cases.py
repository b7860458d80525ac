"""The cases of two ranks for ``test_nn_parallel.py``: modules of ``te`` split over a group, and on one rank."""

import contextlib
import copy
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from mxtensor.training.delayed_scaling import delayed_states
from tests.distributed.fsdp_cases import message
from tests.helpers.ranks import DEVICE, case, long_case

TOKENS, BATCH, IN, OUT = 64, 2, 128, 256
MXFP8 = MXFP8BlockScaling()


class Tracker:
    """Gives each rank random numbers of its own, as Megatron's tracker does."""

    def __init__(self, rank):
        self.rank = rank

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.rank)
            yield


def made(kind, *args, parallel=True, **options):
    """A module of one rank, or this rank's part of it; both draw from one seed."""
    torch.manual_seed(3)
    group = {"tp_group": dist.group.WORLD, "tp_size": 2} if parallel else {}
    return kind(*args, **options, **group).to(DEVICE)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def cut(t, dim, rank):
    return t if dim is None else t.chunk(2, dim)[rank]


def gradients(many, one, rank, halves=()):
    """Name -> (gradient of this rank's part, the part of the gradient of one rank). A parameter that each rank has
    whole has, with sequence parallelism, the gradient of a part of the sequence: those are summed, as Megatron does."""
    found = {}
    for (name, p), (_, q) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        grad, wanted = p.grad, q.grad
        if getattr(p, "sequence_parallel", False):
            grad = grad.clone()
            dist.all_reduce(grad)
        if getattr(p, "tensor_model_parallel", False):
            pieces = wanted.chunk(2, 0) if name in halves else (wanted,)
            wanted = torch.cat([cut(piece, p.partition_dim, rank) for piece in pieces])
        found[name] = grad, wanted
    return found


def active(recipe, group=None):
    on = mx.autocast(recipe=recipe, amax_reduction_group=group)
    return contextlib.nullcontext() if recipe is None else on


def compared(many, one, rank, recipe, inputs=None, outputs=None, sequence=False, halves=(), tokens=TOKENS):
    """The errors of result, gradient of the input, and gradients of the parameters, in one step under ``recipe``;
    the gathers. ``inputs`` and ``outputs``: the dimension along which a rank has a part of x and y."""
    inputs = 0 if sequence and inputs is None else inputs
    outputs = 0 if sequence and outputs is None else outputs
    torch.manual_seed(5)
    whole = torch.randn(tokens, BATCH, IN)
    a, b = cut(whole, inputs, rank).clone().requires_grad_(), whole.clone().requires_grad_()
    group = dist.group.WORLD if isinstance(recipe, DelayedScaling) else None
    for _ in range(1 if group is None else 3):  # the first scales of delayed scaling are fixed
        a.grad = b.grad = None
        many.zero_grad(), one.zero_grad()
        with mx.explain() as log:
            with active(recipe, group):
                y = many(a)
            with active(recipe):
                z = one(b)
            grad = torch.randn(z.shape, generator=torch.Generator(DEVICE).manual_seed(6))
            y.backward(cut(grad, outputs, rank))
            z.backward(grad)
    errors = {name: relative(p, q) for name, (p, q) in gradients(many, one, rank, halves).items()}
    errors |= {"y": relative(y, cut(z, outputs, rank)), "x": relative(a.grad, cut(b.grad, inputs, rank))}
    kernels = {e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")}
    return errors, [e.kernel for e in log.entries if e.spec.op == "gather"], kernels


@case(exact=True)
def linear_of_two_ranks(rank, folder):
    """(mode, sequence parallel) -> what ``compared`` found of a Linear under MXFP8."""
    found = {}
    for mode in ("column", "row"):
        for sequence in (False, True):
            many, one = (
                made(te.Linear, IN, OUT, parallel=parallel, parallel_mode=mode, sequence_parallel=sequence)
                for parallel in (True, False)
            )
            inputs, outputs = (None, -1) if mode == "column" else (-1, None)
            found[mode, sequence] = compared(many, one, rank, MXFP8, inputs, outputs, sequence)
    return found


@case(exact=True)
def norms_of_two_ranks(rank, folder):
    """(norm of heads, sequence parallel) -> the same of a layer with norms of queries and keys and after all."""
    found = {}
    for norm in ("RMSNorm", "LayerNorm"):
        options = dict(set_parallel_mode=True, attention_dropout=0.0, hidden_dropout=0.0, bias=False)
        options |= dict(qk_norm_type=norm, output_layernorm=True, qk_norm_before_rope=norm == "LayerNorm")
        for sequence in (False, True):
            many, one = (
                made(te.TransformerLayer, IN, OUT, 4, parallel=parallel, sequence_parallel=sequence, **options)
                for parallel in (True, False)
            )
            found[norm, sequence] = compared(many, one, rank, MXFP8, sequence=sequence)
    return found


@case(exact=True, long=True)
def modules_of_two_ranks(rank, folder):
    """(module, recipe, sequence parallel) -> what ``compared`` found."""
    found = {}
    recipes = {
        "none": None, "mxfp8": MXFP8, "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
        "float8": Float8CurrentScaling(), "delayed": DelayedScaling(),
    }  # fmt: skip
    kinds = {
        "norm": (te.LayerNormLinear, (IN, OUT), {"parallel_mode": "column"}, -1, ()),
        "mlp": (te.LayerNormMLP, (IN, OUT), {"set_parallel_mode": True}, None, ()),
        "gated": (
            te.LayerNormMLP, (IN, OUT), {"set_parallel_mode": True, "activation": "swiglu", "bias": False}, None,
            ("fc1_weight",),
        ),
        "attention": (
            te.MultiheadAttention, (IN, 4),
            {"set_parallel_mode": True, "num_gqa_groups": 2, "attention_dropout": 0.0, "fuse_qkv_params": True},
            None, (),
        ),
        "layer": (
            te.TransformerLayer, (IN, OUT, 4),
            {"set_parallel_mode": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}, None, (),
        ),
    }  # fmt: skip
    for name, (kind, args, options, outputs, halves) in kinds.items():
        for recipe in recipes if name in ("norm", "mlp") else ("none", "mxfp8"):
            for sequence in (False, True):
                many, one = (
                    made(kind, *args, parallel=parallel, sequence_parallel=sequence, **options)
                    for parallel in (True, False)
                )
                told = compared(many, one, rank, recipes[recipe], None, outputs, sequence, halves)
                found[name, recipe, sequence] = told
    return found


@long_case
def options_of_a_split_module(rank, folder):
    """What else a module can do when it is split: errors against one rank, or whether something holds."""
    found, group = {}, dist.group.WORLD
    row = dict(parallel_mode="row")
    # wgrad added to main_grad, and later; the weight quantized once for two microbatches
    many, one = (
        made(te.Linear, IN, OUT, parallel=p, parallel_mode="column", sequence_parallel=True, bias=False,
             fuse_wgrad_accumulation=True, delay_wgrad_compute=True) for p in (True, False)
    )  # fmt: skip
    x = torch.randn(TOKENS, IN, generator=torch.Generator(DEVICE).manual_seed(1))
    for layer, given in ((many, cut(x, 0, rank)), (one, x)):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        for first in (True, False):
            with mx.autocast(recipe=MXFP8):
                layer(given.clone().requires_grad_(), is_first_microbatch=first).sum().backward()
        layer.backward_dw()
    found["main_grad"] = relative(many.weight.main_grad, cut(one.weight.main_grad, 0, rank))
    # the bias is returned, whole
    layer = made(te.Linear, IN, OUT, return_bias=True, **row)
    y, bias = layer(cut(x, -1, rank))
    plain = made(te.Linear, IN, OUT, parallel=False)
    found["return_bias"] = relative(y + bias, plain(x))
    # quantized weights in several parameters
    with te.quantized_model_init(recipe=MXFP8):
        layer = made(te.Linear, IN, OUT, parallel_mode="column", parameters_split=("q", "k"))
        whole = made(te.Linear, IN, OUT, parallel=False, parameters_split=("q", "k"))
    with mx.autocast(recipe=MXFP8):
        y, z = layer(x), whole(x)
    found["quantized"] = relative(y, torch.cat([cut(half, -1, rank) for half in z.chunk(2, -1)], -1))
    # the group comes later; a copy has it too
    late = te.LayerNormMLP(IN, OUT, tp_size=2, set_parallel_mode=True, device=DEVICE)
    found["no group"] = message(lambda: late(x))
    late.set_tensor_parallel_group(group)
    found["late"] = torch.equal(late(x), copy.deepcopy(late)(x))
    # the norm's result, gathered; parts of the sequence in the same order
    layer = made(te.LayerNormLinear, IN, OUT, parallel_mode="column", sequence_parallel=True,
                 return_layernorm_output=True, return_layernorm_output_gathered=True)  # fmt: skip
    found["gathered norm"] = relative(layer(cut(x, 0, rank))[1], torch.nn.functional.layer_norm(x, (IN,)))

    # random numbers of each rank's own
    def tracker():
        return Tracker(rank)

    drawn = te.Linear(IN, OUT, parallel_mode="column", tp_group=group, get_rng_state_tracker=tracker, device=DEVICE)
    first, second = torch.empty_like(drawn.weight), torch.empty_like(drawn.weight)
    dist.all_gather([first, second], drawn.weight.detach())
    found["own numbers"] = torch.equal(first, second)
    # a group of experts: shapes only, the sum is outside
    experts = te.GroupedLinear(2, IN, OUT, bias=False, parallel_mode="row", tp_group=group, device=DEVICE)
    found["experts"] = tuple(experts.weight1.shape)
    return found


def styled(rank, kind, style, recipe, shape, inputs, outputs):
    """The errors of a module that a style splits, in result and gradients, against one rank; twice, with a step of SGD
    between, and with the weights cached for microbatches. ``inputs``, ``outputs``: the dimension along which a rank has
    a part; None: the whole."""
    torch.manual_seed(3)
    one, mesh = kind(), init_device_mesh(DEVICE, (2,))
    many = parallelize_module(torch.nn.Sequential(copy.deepcopy(one)), mesh, {"0": style})
    errors, optimizers = [], [torch.optim.SGD(m.parameters(), lr=0.1) for m in (many, one)]
    # with is_first_microbatch each rank caches its part of an NVFP4 weight with a scale of its own
    for first in (None, True, False, False) if recipe is MXFP8 else (None, None):
        whole = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(5))
        a, b = cut(whole, inputs, rank).clone().requires_grad_(), whole.clone().requires_grad_()
        with mx.autocast(recipe=recipe):
            y, z = many[0](a, is_first_microbatch=first), one(b, is_first_microbatch=first)
        grad = torch.randn(z.shape, generator=torch.Generator(DEVICE).manual_seed(6))
        y.backward(cut(grad, outputs, rank))
        z.backward(grad)
        pairs = zip(many.parameters(), one.parameters(), strict=True)
        grads = [relative(p.grad.full_tensor(), q.grad) for p, q in pairs]
        errors.append(max(relative(y, cut(z, outputs, rank)), relative(a.grad, cut(b.grad, inputs, rank)), *grads))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(errors), {type(p).__name__ for p in many.parameters()}


@case(exact=True, long=True)
def styles_of_modules(rank, folder):
    """(module, style, recipe) -> what ``styled`` found; and the error of each module that a style cannot split."""
    found = {}
    recipes = {"mxfp8": MXFP8, "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)}
    linear, normed = (
        partial(te.Linear, IN, OUT, device=DEVICE),
        partial(te.LayerNormLinear, IN, OUT, device=DEVICE),
    )
    split = partial(linear, parameters_split=("q", "k"))
    columns, rows = mx.parallel.ColwiseParallel, mx.parallel.RowwiseParallel
    short, long = (TOKENS, IN), (BATCH, TOKENS, IN)
    for name, recipe in recipes.items():
        for what, *arguments in (
            ("columns", linear, columns(), short, None, -1),
            ("columns, whole", linear, columns(output_layouts=Replicate()), short, None, None),
            ("columns of a sequence", linear, columns(input_layouts=Shard(1)), long, 1, -1),
            ("columns of rows", linear, columns(input_layouts=Shard(-1)), long, -1, -1),
            ("norm", normed, columns(), long, None, -1),
            ("norm of a sequence", normed, columns(input_layouts=Shard(0)), short, 0, -1),
            ("norm of the second dimension", normed, columns(input_layouts=Shard(1)), long, 1, -1),
            ("rows", linear, rows(), short, -1, None),
            ("rows of the whole", linear, rows(input_layouts=Replicate()), short, None, None),
            ("rows, split weight", split, rows(), short, -1, None),
            ("rows to a sequence", linear, rows(output_layouts=Shard(1)), long, -1, 1),
            ("rows to columns", linear, rows(output_layouts=Shard(-1)), long, -1, -1),
        ):  # fmt: skip
            kind, style, shape, inputs, outputs = arguments
            if name == "nvfp4" and 1 in (inputs, outputs):
                continue  # modules take (sequence, batch), and blocks of tokens in that order have other scales
            found[what, name] = styled(rank, kind, style, recipe, shape, inputs, outputs)
    return found


@long_case
def styles_compiled_and_sharded(rank, folder):
    """(style) -> the errors, against the same modules in eager code, of two compiled into one graph; and of the two
    with FSDP2 over the other dimension of a mesh, against one rank."""
    warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)  # to_local, as of torch's styles
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo
    found = {}
    for layout in (None, Shard(1)):
        plan = {
            "0": mx.parallel.ColwiseParallel(input_layouts=layout),
            "1": mx.parallel.RowwiseParallel(output_layouts=layout),
        }
        torch.manual_seed(3)
        one = torch.nn.Sequential(te.LayerNormLinear(IN, OUT, device=DEVICE), te.Linear(OUT, IN, device=DEVICE))
        x = torch.randn(BATCH, TOKENS, IN, generator=torch.Generator(DEVICE).manual_seed(5))
        part = cut(x, None if layout is None else 1, rank)
        torch._dynamo.reset()
        eager, other = (parallelize_module(copy.deepcopy(one), init_device_mesh(DEVICE, (2,)), plan) for _ in range(2))
        with mx.autocast(recipe=MXFP8):
            y, z = torch.compile(other, fullgraph=True, backend="aot_eager")(part), eager(part)
        for each in (y, z):
            each.square().sum().backward()
        pairs = zip(other.parameters(), eager.parameters(), strict=True)
        errors = [relative(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs]
        found["compiled", layout] = relative(y, z), *errors
        for shape in ((1, 2), (2, 1)):
            grid = init_device_mesh(DEVICE, shape, mesh_dim_names=("shard", "parallel"))
            many = parallelize_module(copy.deepcopy(one), grid["parallel"], plan)
            for module in (*many, many):
                fully_shard(module, mesh=grid["shard"])
            one.zero_grad()
            with mx.autocast(recipe=MXFP8):
                y, z = many(part if shape == (1, 2) else x), one(x)
            y.square().sum().backward(), z.square().sum().backward()
            pairs = zip(many.parameters(), one.parameters(), strict=True)
            errors = [relative(p.grad.full_tensor(), q.grad) for p, q in pairs]
            z = cut(z, None if layout is None or shape == (2, 1) else 1, rank)
            found["sharded", layout, shape] = relative(y, z), *errors
    return found


@case
def styles_that_do_not_fit(rank, folder):
    """The error of each module of te that a style cannot split, and of calls that do not fit."""
    mesh, group = init_device_mesh(DEVICE, (2,)), dist.group.WORLD
    columns, rows = mx.parallel.ColwiseParallel, mx.parallel.RowwiseParallel
    layer = partial(te.TransformerLayer, IN, OUT, 4)
    whole = te.Linear(IN, OUT)

    def split(module, style, path="0"):
        return message(lambda: parallelize_module(torch.nn.Sequential(module), mesh, {path: style}))

    told = {
        "mlp": split(te.LayerNormMLP(IN, OUT), columns()),
        "experts": split(te.GroupedLinear(2, IN, OUT), rows()),
        "layer": split(layer(), columns()),
        "attention": split(te.MultiheadAttention(IN, 4), rows()),
        "part": split(layer(), columns(), "0.self_attention.proj"),
        "norm": split(te.LayerNormLinear(IN, OUT), rows()),
        "main_grad": split(te.Linear(IN, OUT, fuse_wgrad_accumulation=True), columns()),
        "bias": split(te.Linear(IN, OUT, return_bias=True), columns()),
        "group": split(te.Linear(IN, OUT, tp_group=group, parallel_mode="row"), rows()),
        "uneven": split(te.Linear(IN, 33), columns()),
        "pieces": split(te.Linear(IN, OUT, parameters_split=("q", "k")), columns(output_layouts=Replicate())),
        "torch's": split(te.Linear(IN, OUT), TorchColwise()),
        "DTensor": message(lambda: whole(DTensor.from_local(torch.randn(4, IN), mesh, [Replicate()]))),
    }
    with te.quantized_model_init(recipe=MXFP8):
        told["quantized"] = split(te.Linear(IN, OUT), columns())
    twice = parallelize_module(torch.nn.Sequential(te.Linear(IN, OUT)), mesh, {"0": columns(input_layouts=Shard(1))})
    told["again"] = message(lambda: parallelize_module(twice, mesh, {"0": columns()}))
    told["features"] = message(lambda: twice(torch.randn(4, IN // 2)))
    return told


@case
def amax_of_all_ranks(rank, folder):
    """Delayed scaling: the records of two layers, converted and of ``te``, before and after they are shared, and
    whether a second call changes them."""
    torch.manual_seed(rank)
    recipe = DelayedScaling()
    model = torch.nn.Sequential(mx.quantize_(torch.nn.Linear(IN, OUT), recipe), te.Linear(OUT, IN))
    with mx.autocast(recipe=recipe):
        model(torch.randn(4, IN) * (rank + 1)).sum().backward()
    states = [*delayed_states(model[0].weight).values(), model[1]._products[0].delayed]
    before = torch.stack([state.record for state in states])
    mx.parallel.share_amax(model)
    after = torch.stack([state.record for state in states])
    mx.parallel.share_amax(model)
    mx.parallel.share_amax(torch.nn.Linear(2, 2))  # no histories
    return before.cpu(), after.cpu(), torch.equal(after, torch.stack([state.record for state in states]))


@long_case
def compiled_modules(rank, folder):
    """(module, sequence parallel) -> the errors of a compiled module, in one graph, against the eager one."""
    found = {}
    for sequence in (False, True):
        for kind, args, options in (
            (te.LayerNormMLP, (IN, OUT), {"set_parallel_mode": True}),
            (te.Linear, (IN, OUT), {"parallel_mode": "row"}),
            (te.MultiheadAttention, (IN, 4, None, 0.0), {"set_parallel_mode": True, "qk_norm_type": "RMSNorm"}),
        ):
            torch._dynamo.reset()
            eager = made(kind, *args, sequence_parallel=sequence, **options)
            other = made(kind, *args, sequence_parallel=sequence, **options)
            traced = torch.compile(other, fullgraph=True, backend="aot_eager")
            last = -1 if kind is te.Linear else (0 if sequence else None)
            x = cut(torch.randn(TOKENS, BATCH, IN, generator=torch.Generator(DEVICE).manual_seed(1)), last, rank)
            ys = []
            for model in (eager, traced):
                with warnings.catch_warnings(), mx.autocast(recipe=MXFP8):
                    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
                    ys.append(model(x))
                ys[-1].square().sum().backward()
            errors = [relative(q.grad, p.grad) for p, q in zip(eager.parameters(), other.parameters(), strict=True)]
            found[kind.__name__, sequence] = relative(ys[1], ys[0]), max(errors)
    return found
