"""The cases of two ranks for ``test_fsdp.py``: models sharded by FSDP2 and the same models in one process."""

import copy
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.compat import local_of, sharded_like
from mxtensor.core.select import forced_kernel
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.helpers.ranks import DEVICE, case, long_case

RECIPES = {
    "two copies": MXFP8BlockScaling(),
    "one copy": MXFP8BlockScaling(single_weight_copy=True),
    "tiles": MXFP8BlockScaling(two_dimensional_weights=True),
    "off": MXFP8BlockScaling(two_dimensional_weights=True, quantized_gather=False),
}
DISTINCT = {
    "two copies, integers": CustomRecipe(weight="mxint8"),
    "one copy, integers": CustomRecipe(weight="mxint8", single_weight_copy=True),
    "tiles, integers": CustomRecipe(weight="mxint8[32x32]"),
}
"""Floating-point codes of a value hardly depend on the scale of its block; these do, and so does a second rounding."""
DIMENSIONS, MORE_DIMENSIONS = (128, 33), (160, 100, 127)
STEPS, WIDTH, ROWS = 5, 64, 24


def net(features, recipe, width=WIDTH, bias=True):
    """Two layers whose weights have ``features`` rows and ``features`` columns, of many magnitudes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, features, bias=bias), nn.GELU(), nn.Linear(features, width, bias=False))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(torch.randn(layer.weight.shape).mul(1.5).exp2())
    return mx.quantize_(model, recipe)


def shard(model, **options):
    """Apply FSDP2 to every linear layer, compiled or not, and to the model."""
    for module in model:
        if next(module.parameters(), None) is not None:
            fully_shard(module, **options)
    options.pop("shard_placement_fn", None)
    return fully_shard(model, **options)


def whole(t):
    """The full tensor of a sharded one, moved back from the CPU if it was offloaded."""
    return t.full_tensor().to(DEVICE) if hasattr(t, "full_tensor") else t


def adamw(model):
    """AdamW with the same rounding for every kind of parameter.

    By default, on a GPU, torch steps plain tensors and DTensors with foreach kernels, but parameters of a subclass, as
    in one process, in a loop.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def same_as(a, b):
    """Whether two results are the same: bitwise on a CPU, and on GPUs in the runs with exact sums.

    On GPUs gathered codes use other kernels than the weight of one process. Their sums are in another order, which
    rounds a code differently now and then.
    """
    if DEVICE == "cpu" or forced_kernel() == "emulated":
        return torch.equal(a, b)
    a, b = a.detach().double(), b.detach().double()
    return a.shape == b.shape and bool((a - b).norm() <= 0.05 * b.norm())


def compare(model, reference, rank, steps=STEPS, call=None, its_call=None, dtype=torch.float32, micro=1):
    """Train ``model`` with AdamW on different data on each rank, and ``reference`` on the data of all ranks.

    Returns for each step whether the loss and every gradient are the same (``same_as``), then whether all parameters
    are.
    """
    call, its_call, world = call or model, its_call or reference, dist.get_world_size()
    optimizers = [adamw(m) for m in (model, reference)]
    torch.manual_seed(1)
    same = []
    for _ in range(steps):
        x = torch.randn(world, micro, ROWS, reference[0].in_features).to(dtype)
        losses = {}
        for i in range(micro):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == micro - 1)
            losses["mine", i] = (call(x[rank, i]) - x[rank, i]).square().mean()
            losses["mine", i].backward()
        sums = [torch.zeros_like(its) for its in reference.parameters()]
        for each in range(world):
            for i in range(micro):
                losses[each, i] = (its_call(x[each, i]) - x[each, i]).square().mean()
                losses[each, i].backward()
            for total, its in zip(sums, reference.parameters(), strict=True):
                total += its.grad
                its.grad = None
        same.append(all(same_as(losses["mine", i], losses[rank, i]) for i in range(micro)))
        for mine, its, total in zip(model.parameters(), reference.parameters(), sums, strict=True):
            its.grad = total / world
            same[-1] &= same_as(whole(mine.grad), its.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        same.append(same_as(values(whole(plain(mine))), values(its)))
    return same


def values(t):
    """The high-precision values of a weight."""
    return getattr(t, "high_precision", t).detach()


def plain(parameter):
    """A sharded weight as a DTensor of its high-precision values."""
    return sharded_like(parameter, values(local_of(parameter)))


def gathers(log):
    """(shape, what was gathered, why not codes) of every all-gather that ``explain()`` saw."""
    entries = [e for e in log.entries if e.spec.op == "all-gather"]
    return sorted({(e.spec.shapes[0], e.kernel, *e.refusals.values()) for e in entries})


def trained(recipe, features, rank, **options):
    """The result of ``compare`` for one model, and what was gathered."""
    with mx.explain() as log:
        same = compare(shard(net(features, recipe), **options), net(features, recipe), rank)
    return same, gathers(log)


def of_sizes(sizes, rank):
    recipes = RECIPES | DISTINCT
    return {(name, n): trained(recipe, n, rank) for name, recipe in recipes.items() for n in sizes}


@case(exact=True)
def five_steps(rank, folder):
    return of_sizes(DIMENSIONS, rank)


@case(exact=True, long=True)
def five_steps_of_more_sizes(rank, folder):
    return of_sizes(MORE_DIMENSIONS, rank)


@case(exact=True, long=True)
def weights_stay_gathered(rank, folder):
    return {name: trained(recipe, 127, rank, reshard_after_forward=False) for name, recipe in RECIPES.items()}


def wire(model):
    """The bytes of a rank's inputs of the all-gathers in one forward pass."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original, sent = getattr(dist, name), []

    def counted(output_tensor, input_tensor, *args, **kwargs):
        sent.append(input_tensor.numel() * input_tensor.itemsize)
        return original(output_tensor, input_tensor, *args, **kwargs)

    setattr(dist, name, counted)
    try:
        with torch.no_grad():
            model(torch.randn(4, model[0].in_features, dtype=next(model.parameters()).dtype))
    finally:
        setattr(dist, name, original)
    return sum(sent)


@case
def bytes_on_the_wire(rank, folder):
    def sent(recipe, **options):
        return wire(shard(net(256, recipe, width=512, bias=False).bfloat16(), **options))

    in_bfloat16 = 2 * 512 * 256 * 2 // 2  # two weights, two bytes per value, half of it on each rank
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    masters = shard(net(256, RECIPES["off"], width=512, bias=False), mp_policy=policy)
    return in_bfloat16, {name: sent(recipe) for name, recipe in RECIPES.items()}, wire(masters)


@case(exact=True, long=True)
def hybrid_meshes(rank, folder):
    """Meshes of (replicas, shards); in the second each group of shards has one rank."""
    told = {}
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        told |= {(shape, name): trained(recipe, 96, rank, mesh=mesh) for name, recipe in RECIPES.items()}
    return told


@case
def replicas(rank, folder):
    """Each rank stores the whole weights, and gathers nothing: torch's ``replicate`` over FSDP2."""
    told = {}
    for name, recipe in RECIPES.items():
        model = net(100, recipe)
        for module in (model[0], model[2], model):
            replicate(module, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
        told[name] = compare(model, net(100, recipe), rank)
    return told


@case
def mixed_precision(rank, folder):
    """Codes are cast from the float32 weights, as under torch.autocast; values are gathered and cast in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    told = {}
    for name, recipe in RECIPES.items():
        model, reference = (net(128, recipe, bias=False) for _ in range(2))

        def autocast(x, reference=reference):
            with torch.autocast(DEVICE, torch.bfloat16):
                return reference(x)

        def rounded(x, reference=reference):
            weights = {name: p.bfloat16() for name, p in reference.named_parameters()}
            return torch.func.functional_call(reference, weights, x)

        its_call = autocast if name in ("one copy", "tiles") else rounded
        told[name] = compare(shard(model, mp_policy=policy), reference, rank, its_call=its_call, dtype=torch.bfloat16)
    return told


@long_case
def offloaded_checkpointed_accumulated(rank, folder):
    recipe, told = RECIPES["one copy"], {}
    offload = shard(net(100, recipe), offload_policy=CPUOffloadPolicy(pin_memory=False))
    same = compare(offload, net(100, recipe), rank)
    told["offload"] = same if DEVICE == "cpu" else same[:1]  # AdamW rounds differently on a CPU and on a GPU
    for name in ("one copy", "tiles", "two copies"):
        recipe = RECIPES[name]
        model = shard(net(128, recipe))
        call = partial(checkpoint, model, use_reentrant=False)
        told["checkpoint", name] = compare(model, net(128, recipe), rank, call=call)
        model = shard(net(128, recipe))
        told["accumulate", name] = compare(model, net(128, recipe), rank, micro=2, steps=3)
    return told


@case(exact=True, long=True)
def other_formats(rank, folder):
    """Packed codes, float32 scales, and recipes whose scales are of whole weights."""
    recipes = {
        "mxfp4 tiles": MXFP4BlockScaling(two_dimensional_weights=True, stochastic_rounding=False),
        "mxfp4 one copy": MXFP4BlockScaling(single_weight_copy=True, stochastic_rounding=False),
        "float8 tiles": Float8BlockScaling(),
        "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
        "torchao": mx.ao.MXLinearConfig(single_weight_copy=True),
        "high precision backward": MXFP8BlockScaling(high_precision_backward=True),
    }
    return {name: trained(recipe, 256, rank) for name, recipe in recipes.items()}


class Attention(nn.Module):
    """torch's self-attention, whose projection is one product, and cross-attention, whose projection is split."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.attention = mx.quantize_(nn.MultiheadAttention(WIDTH, 2, batch_first=True), recipe)

    def forward(self, x):
        y = self.attention(x, x, x, need_weights=False)[0]
        return x + self.attention(y, x, x, need_weights=False)[0]


@case
def attention(rank, folder):
    told = {}
    for name in ("one copy", "tiles"):
        model, reference = Attention(RECIPES[name]), Attention(RECIPES[name])
        fully_shard(model)
        x = torch.randn(2, 3, ROWS, WIDTH)
        with mx.explain() as log:
            model(x[rank]).square().mean().backward()
        for batch in x:
            (reference(batch).square().mean() / 2).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        told[name] = all(same_as(whole(a.grad), b.grad) for a, b in pairs), gathers(log)
    return told


class Experts(nn.Module):
    """Three experts: one grouped product, and one of matrices that are gathered for each row."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x):
        ends = torch.tensor([5, 5, ROWS], dtype=torch.int32, device=x.device)
        up = nn.functional.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends)[:, :WIDTH]
        index = torch.arange(ROWS, device=x.device) % 3
        return torch.bmm(self.down_proj[index], up.unsqueeze(-1)).squeeze(-1).clone()


@case
def stacked_experts(rank, folder):
    torch.manual_seed(0)
    model = mx.quantize_(Experts(), MXFP8BlockScaling())
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.randn(2, ROWS, WIDTH)
    with mx.explain() as log, mx.strict():
        model(x[rank]).square().mean().backward()
    for batch in x:
        (reference(batch).square().mean() / 2).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(same_as(whole(a.grad), b.grad) for a, b in pairs), gathers(log)


@case(exact=True)
def delayed_scaling(rank, folder):
    """The same data on each rank, because each rank has its own amax histories; shards have them too."""
    recipe = DelayedScaling(amax_history_len=4)
    model, reference = shard(net(64, recipe)), net(64, recipe)
    torch.manual_seed(3)
    same = []
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        for each in (model, reference):
            each.zero_grad()
            each(x).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        same.append(all(same_as(whole(a.grad), b.grad) for a, b in pairs))
    return same


@case
def delayed_scaling_restored(rank, folder):
    """The histories of a sharded model are in its state dict, and go on in another one."""
    recipe = DelayedScaling(amax_history_len=4)

    def steps(model, numbers):
        grads = []
        for number in numbers:
            torch.manual_seed(number)
            model.zero_grad()
            model(torch.randn(ROWS, WIDTH) * number).square().mean().backward()
            grads.append([whole(p.grad).clone() for p in model.parameters()])
        return grads

    straight, first, second = (shard(net(64, recipe)) for _ in range(3))
    expected = steps(straight, (1, 2, 3, 4, 5))[3:]
    steps(first, (1, 2, 3))
    steps(second, (9,))  # other histories, also of the gathered weights
    state = first.state_dict()
    second.load_state_dict(state)
    found = steps(second, (4, 5))
    return (
        sum(key.endswith("_extra_state") for key in state),
        all(
            same_as(a, b) for mine, other in zip(found, expected, strict=True) for a, b in zip(mine, other, strict=True)
        ),
    )


@case
def shards_of_columns(rank, folder):
    told = {}
    for name in ("one copy", "tiles"):
        recipe = RECIPES[name]
        model = net(64, recipe, bias=False)
        reference = net(64, recipe, bias=False)
        with mx.explain() as log:
            shard(model, shard_placement_fn=lambda p: Shard(1))
            x = torch.randn(2, ROWS, WIDTH)
            model(x[rank]).square().mean().backward()
            for batch in x:
                reference(batch).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        told[name] = all(same_as(whole(a.grad), b.grad / 2) for a, b in pairs), gathers(log)
    return told


@case
def clipped(rank, folder):
    model, reference = shard(net(100, RECIPES["one copy"])), net(100, RECIPES["one copy"])
    x = torch.randn(2, ROWS, WIDTH)
    model(x[rank]).square().mean().backward()
    for batch in x:
        (reference(batch).square().mean() / 2).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, reference)]
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    close = [torch.allclose(whole(a.grad), b.grad, rtol=1e-5, atol=1e-9) for a, b in pairs]
    return float(whole(norms[0])), float(norms[1]), close


@case
def from_meta(rank, folder):
    """Models made on meta, sharded, then filled: the recipe stays, and training gives the same results."""
    told = {}
    for name in ("one copy", "tiles"):
        reference = net(128, RECIPES[name])
        with torch.device("meta"):
            model = net(128, RECIPES[name])
        shard(model).to_empty(device=DEVICE)
        with torch.no_grad():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
                for module in (model[0], model[2]):
                    module.reset_parameters()
            finite = all(bool(p.to_local().isfinite().all()) for p in model.parameters())
            for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
                mine.copy_(distribute_tensor(values(its), mine.device_mesh, mine.placements))
        with mx.explain() as log:
            told[name] = finite, compare(model, reference, rank, steps=2), gathers(log)
    return told


@long_case
def compiled_layers(rank, folder):
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
    )  # a warning of Dynamo
    told = {}
    for name, backend in (*((name, "aot_eager") for name in RECIPES), ("tiles", "inductor")):
        model, reference = net(128, RECIPES[name]), net(128, RECIPES[name])
        for i in (0, 2):
            model[i] = torch.compile(model[i], backend=backend, fullgraph=True)
            if backend == "inductor":  # its products use other loops than eager code
                reference[i] = torch.compile(reference[i], fullgraph=True)
        told[name, backend] = compare(shard(model), reference, rank, steps=3)
        torch._dynamo.reset()
    return told


def operands(features, format, orientation, trained):
    """A model whose weights are MXTensors."""
    model = net(features, RECIPES["two copies"])
    for layer in (model[0], model[2]):
        w = mx.quantize(values(layer.weight), format, orientation=orientation)
        layer.weight = nn.Parameter(w, requires_grad=trained)
    return model


OPERANDS = [
    ("mxfp8", "rowwise", 127, True), ("mxfp8", "rowwise", 33, True), ("mxfp8", "both", 128, True),
    ("mxfp8[32x32]", "rowwise", 128, True), ("mxfp4", "rowwise", 100, True), ("float8_row", "rowwise", 128, True),
    ("nvfp4_single_level", "rowwise", 100, True), ("mxfp8", "rowwise", 100, False), ("mxfp6", "rowwise", 160, False),
]  # fmt: skip


@case(exact=True, long=True)
def quantized_parameters(rank, folder):
    """MXTensor parameters that are frozen, or stepped in place by AdamW."""
    told = {}
    for format, orientation, features, trains in OPERANDS:
        model, reference = (operands(features, format, orientation, trains) for _ in range(2))
        shard(model)
        kinds = {type(layer.weight.to_local()).__name__ for layer in (model[0], model[2])}
        optimizers = [adamw(m) for m in (model, reference)]
        torch.manual_seed(1)
        same = []
        for _ in range(3):
            x = torch.randn(2, ROWS, WIDTH)
            loss = model(x[rank]).square().mean()
            loss.backward()
            losses = [reference(batch).square().mean() for batch in x]
            for each in losses:
                each.backward()
            same.append(same_as(loss, losses[rank]))
            for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
                if its.requires_grad:
                    its.grad.div_(2)
                    same[-1] &= same_as(whole(mine.grad), its.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        told[format, orientation, features, trains] = same, kinds
    return told


@case
def master_weights(rank, folder):
    """mx.optim with shards of MXTensors, and with whole ones."""
    fused = partial(te.FusedAdam, master_weights=True, exp_avg_dtype=torch.bfloat16)
    return [masters(rank, mx.optim.AdamW, "master_weight"), masters(rank, fused, "master_param")]


def masters(rank, kind, name):
    """Whether gradients, and the master weights after three steps, are the same with shards and without."""
    model, reference = (operands(100, "mxfp8", "rowwise", True) for _ in range(2))
    shard(model)
    optimizers = [kind(m.parameters(), lr=1e-3) for m in (model, reference)]
    same = []
    for _ in range(3):
        x = torch.randn(2, ROWS, WIDTH)
        model(x[rank]).square().mean().backward()
        for batch in x:
            (reference(batch).square().mean() / 2).backward()
        pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
        same.append(all(same_as(whole(a.grad), b.grad) for a, b in pairs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = zip(optimizers, (model, reference), strict=True)
    mine, its = (optimizer.state[m[0].weight][name].detach() for optimizer, m in states)
    return same, same_as(whole(mine), its)


def modules(**options):
    """Two modules of te with weights of many magnitudes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        te.LayerNormLinear(WIDTH, 100, **options), nn.GELU(), te.LayerNormMLP(100, 96, **options),
        te.Linear(100, WIDTH, bias=False, **options),
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.randn(p.shape).mul(1.5).exp2())
    return model


def through(model, x, first):
    """The outputs of the modules for the first microbatch, which quantizes the weights, or for a later one."""
    with mx.autocast(recipe=RECIPES["two copies"]):
        for module in model:
            x = module(x) if isinstance(module, nn.GELU) else module(x, is_first_microbatch=first)
    return x


def outputs_and_gradients(reference, batches, first):
    """What one process computes of the batches of all ranks: each output, and the mean of the gradients."""
    outputs, sums = [], [torch.zeros_like(p) for p in reference.parameters()]
    for x in batches:
        outputs.append(through(reference, x, first))
        outputs[-1].square().mean().backward()
        for total, p in zip(sums, reference.parameters(), strict=True):
            total += p.grad
            p.grad = None
    return outputs, [total / len(batches) for total in sums]


def backward(model, x, first):
    """The output of a microbatch on this rank, after its backward pass."""
    y = through(model, x, first)
    y.square().mean().backward()
    for module in model:
        if hasattr(module, "backward_dw"):
            module.backward_dw()
    return y


def stepped_alike(rank, options, into_main_grad):
    """Whether outputs, gradients and parameters of two steps are those of one process, in order."""
    model, reference = shard(modules(**options)), modules()
    optimizers = [adamw(m) for m in (model, reference)]
    same = []
    torch.manual_seed(1)
    for step in range(2):
        expected = [torch.zeros_like(p) for p in reference.parameters()]
        for p in model.parameters():
            if into_main_grad and p.dim() == 2:
                p.main_grad = torch.zeros_like(p)
        for micro, batches in enumerate(torch.randn(2, 2, ROWS, WIDTH)):
            first = step == micro == 0  # later microbatches notice that the weights have been stepped
            y = backward(model, batches[rank], first)
            outputs, gradients = outputs_and_gradients(reference, batches, first)
            same.append(same_as(y, outputs[rank]))
            for total, gradient in zip(expected, gradients, strict=True):
                total += gradient
        for total, a, b in zip(expected, model.parameters(), reference.parameters(), strict=True):
            fused = hasattr(a, "main_grad")
            same.append(fused == (into_main_grad and a.dim() == 2) and not (fused and a.grad is not None))
            a.grad, b.grad = a.main_grad if fused else a.grad, total
            same.append(same_as(whole(a.grad), total))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [*same, *(same_as(whole(a), b) for a, b in pairs)]


@case(exact=True, long=True)
def modules_of_transformer_engine(rank, folder):
    """te under autocast, two microbatches a step: gradients in ``grad``, in ``main_grad``, and delayed."""
    fused, delayed = {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}
    every = {"grad": {}, "main_grad": fused, "later": delayed, "main_grad later": fused | delayed}
    return {name: stepped_alike(rank, options, "main_grad" in name) for name, options in every.items()}


@case
def modules_between_steps(rank, folder):
    """Modules of te under FSDP2 start on meta, notice writes to a shard, and name mistakes."""
    with torch.device("meta"):
        model = modules(fuse_wgrad_accumulation=True)
    shard(model).to_empty(device=DEVICE)
    torch.manual_seed(rank)
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    weight = model[3].weight
    drawn = whole(weight).detach()
    filled = [float(drawn.std()), bool(drawn.isfinite().all())]
    x, sharded = torch.randn(ROWS, WIDTH), [p for p in model.parameters() if p.dim() == 2]
    told = [message(lambda: through(model, x, None))]
    model = shard(modules(fuse_wgrad_accumulation=True))
    for p in model.parameters():
        if p.dim() == 2:
            p.main_grad = torch.zeros(p.shape)
    told.append(message(lambda: through(model, x, None)))
    late = shard(modules(delay_wgrad_compute=True).bfloat16(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    through(late, x.bfloat16(), True).square().mean().backward()
    for module in late:
        if hasattr(module, "backward_dw"):
            module.backward_dw()
    dtypes = {p.grad.dtype for p in late.parameters()}
    with torch.no_grad():
        before = through(late, x.bfloat16(), True)
        for module in late:
            if hasattr(module, "reshard"):
                module.reshard()
        for p in late.parameters():
            p.to_local().mul_(0.5)
        stale = torch.equal(before, through(late, x.bfloat16(), False))
    return filled, len(sharded), told, dtypes, stale


def message(call):
    """The type and text of the error that ``call`` raises."""
    try:
        call()
    except (Exception, CheckpointException) as error:  # which is none
        return type(error).__name__, str(error)
    return None


@case
def mistakes(rank, folder):
    model = shard(net(128, RECIPES["one copy"]))
    told = {"again": message(lambda: mx.quantize_(copy.copy(model), RECIPES["tiles"], lambda m, fqn: True))}
    model.unshard()
    model[0].unshard()
    told["values"] = message(lambda: model[0].weight.norm())
    with mx.autocast(recipe=RECIPES["tiles"]):
        told["autocast"] = message(lambda: model[0](torch.randn(4, WIDTH)))
    told["tiles"] = message(lambda: shard(operands(100, "mxfp8[32x32]", "rowwise", True)))
    told["global scale"] = message(lambda: shard(operands(128, "nvfp4", "rowwise", False)))
    return told


@case
def different_recipes(rank, folder):
    """The error on each rank if ranks give a weight different recipes, or one gathers codes and the other values."""
    told = []
    for mine in ((RECIPES["tiles"], RECIPES["one copy"]), (MXFP8BlockScaling(), CustomRecipe(weight="mxfp4"))):
        model = shard(net(128, mine[rank]))
        told.append(message(lambda model=model: model(torch.ones(32, 128))))
    return told
