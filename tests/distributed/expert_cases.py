"""The cases of several ranks for ``test_expert_parallel.py``: experts on all ranks, and on one."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
from mxtensor.distributed import all_to_all as exchange
from mxtensor.recipe import (
    CustomRecipe,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.recipe.linear_recipe import TensorCasts
from tests.distributed.fsdp_cases import message
from tests.helpers.ranks import DEVICE, case, long_case

EXPERTS, IN, HIDDEN, TOKENS, TOP = 8, 64, 96, 40, 2
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "mxint8": CustomRecipe(weight="mxint8"),
    "nvfp4": NVFP4BlockScaling(),
    "float8": Float8CurrentScaling(),
}
PRECISE_WGRAD = {
    "high precision": MXFP8BlockScaling(high_precision_wgrad=True),
    "more bits": CustomRecipe(
        "mxfp8", "mxfp8", grad=TensorCasts(rowwise=mx.Cast.of("mxfp4"), columnwise=mx.Cast.of("mxfp8"))
    ),
}
"""Recipes whose wgrad takes an operand in more bits than the product whose codes would be sent."""


MOE = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts_per_tok=2,
)  # fmt: skip
"""The sizes of a mixture of transformers."""


class Experts(nn.Module):
    """Experts whose forward pass is torchtitan's: rows sorted by expert, and the number of rows of each."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, IN) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, IN, HIDDEN) / 10)

    def forward(self, x, counts):
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(x, self.up_proj.mT, offs=ends))
        return F.grouped_mm(hidden, self.down_proj.mT, offs=ends)


class TopExperts(Experts):
    """The same experts, called as those of transformers are."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        flat = top_k_index.reshape(-1)
        order = flat.argsort(stable=True)
        y = super().forward(
            hidden_states[order // top_k_index.shape[1]], flat.bincount(minlength=self.up_proj.shape[0])
        )
        y = torch.empty_like(y).index_copy(0, order, y).view(*top_k_index.shape, -1)
        return (y * top_k_weights.unsqueeze(-1)).sum(1)


class ListedExperts(Experts):
    """The same experts, called as those of JetMoe are: the numbers of rows are a list."""

    def forward(self, x, counts):
        assert type(counts) is list
        return super().forward(x, torch.tensor(counts))


class EqualExperts(nn.Module):
    """Experts as those of Llama 4 are: every expert gets all tokens, times their weights."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, IN, 2 * HIDDEN) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, IN) / 10)

    def forward(self, hidden_states):
        gate, up = torch.bmm(hidden_states.view(self.gate_up_proj.shape[0], -1, IN), self.gate_up_proj).chunk(2, -1)
        return torch.bmm(up * F.silu(gate), self.down_proj).view(-1, IN)


class LoopedExperts(Experts):
    """The same experts, one after the other, as in transformers' eager code."""

    def forward(self, x, counts):
        rows = x.split(counts.tolist())
        hidden = [F.silu(F.linear(each, self.up_proj[i])) for i, each in enumerate(rows)]
        return torch.cat([F.linear(each, self.down_proj[i]) for i, each in enumerate(hidden)])


def experts(recipe=None, kind=Experts, seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    made = kind().to(dtype)
    return made if recipe is None else mx.quantize_(made, recipe)


def batch(rank, dtype=torch.float32):
    """The tokens of a rank, their experts and the weights; the last expert gets no token of any rank."""
    generator = torch.Generator(DEVICE).manual_seed(10 + rank)
    x = torch.randn(TOKENS, IN, generator=generator) * 2.0 ** torch.randint(-3, 4, (TOKENS, 1), generator=generator)
    index = torch.rand(TOKENS, EXPERTS - 1, generator=generator).topk(TOP).indices
    weights = torch.rand(TOKENS, TOP, generator=generator)
    return x.to(dtype), index, weights.to(dtype)


def whole(t):
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return getattr(t, "high_precision", t).detach()


@contextlib.contextmanager
def counted():
    """The bytes that each all-to-all of rows sends from this rank, itself included."""
    old, sizes = exchange.all_to_all, []

    def count(out, given, *args, **kwargs):
        if given.dtype is torch.uint8:
            sizes.append(given.nbytes)
        return old(out, given, *args, **kwargs)

    exchange.all_to_all = count
    try:
        yield sizes
    finally:
        exchange.all_to_all = old


def relative(a, b):
    return ((whole(a) - whole(b)).norm() / whole(b).norm()).item()


def trained(module, x, index, weights):
    y = module(x, index, weights)
    y.square().sum().backward()
    return y.detach()


def single():
    """A mesh of this rank alone."""
    return init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]


def mesh():
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def exchanges(log):
    return [(e.kernel, e.refusals.get("codes", "")) for e in log.entries if e.spec.op == "all-to-all"]


def products(log):
    return [e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")]


def against_one_rank(name, dtype=torch.float32, active=None, **options):
    """Of experts on all ranks, and of all experts on one rank with the tokens of all: the errors of results and
    gradients; what ``explain()`` says of the exchanges; the bytes sent to experts over those of bfloat16."""
    rank, world = dist.get_rank(), dist.get_world_size()
    style = mx.parallel.ExpertParallel(**options)
    x, index, weights = batch(rank, dtype)
    x.requires_grad_(), weights.requires_grad_()
    with contextlib.ExitStack() as stack:
        if active is not None:
            stack.enter_context(mx.autocast(recipe=active))
        many = parallelize_module(experts(RECIPES.get(name), TopExperts, dtype=dtype), mesh(), style)
        with mx.explain() as log, counted() as sizes:
            y = trained(many, x, index, weights)
        one = parallelize_module(experts(RECIPES.get(name), TopExperts, dtype=dtype), single(), style)
        all_x, all_index, all_weights = map(torch.cat, zip(*(batch(r, dtype) for r in range(world)), strict=True))
        all_x.requires_grad_(), all_weights.requires_grad_()
        z = trained(one, all_x, all_index, all_weights)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    errors = {
        "y": relative(y, z[mine]),
        "dx": relative(x.grad, all_x.grad[mine]),
        "dweights": relative(weights.grad, all_weights.grad[mine]),
        "up": relative(many.up_proj.grad, one.up_proj.grad),
        "down": relative(many.down_proj.grad, one.down_proj.grad),
    }
    forward, combined, backward, returned = (size / (2 * TOKENS * TOP * IN) for size in sizes)
    sent = {"x": forward, "dy": backward, "y over dx": combined / returned}
    return errors, exchanges(log), sent, set(products(log))


@case(exact=True)
def experts_of_two_ranks(rank, folder):
    """MXFP8 experts on two ranks against one rank."""
    return against_one_rank("mxfp8")


@case(exact=True, long=True)
def experts_of_every_recipe(rank, folder):
    """(recipe, dtype) -> the same; the experts carry the recipe, or ``autocast`` has it."""
    found = {
        (name, dtype): against_one_rank(name, dtype) for name in RECIPES for dtype in (torch.float32, torch.bfloat16)
    }
    found["none", torch.float32] = against_one_rank(None)
    found["autocast", torch.float32] = against_one_rank(None, active=RECIPES["mxfp8"])
    found["both ways", torch.bfloat16] = against_one_rank("mxfp8", torch.bfloat16, quantize_combined=True)
    return found


@case(exact=True)
def without_an_exchange(rank, folder):
    """The two functions on one rank against the experts alone: whether y and dx are bitwise the same, and the relative
    error of the gradients of the stacks, whose columnwise operands are cast from rows that were cast before."""
    found = {}
    for name in ("mxfp8", "nvfp4"):
        sent, alone = experts(RECIPES[name]), experts(RECIPES[name])
        counts = torch.tensor([3, 0, 1, 33, 0, 0, 17, 2])
        a = torch.randn(int(counts.sum()), IN).requires_grad_()
        b, grad = a.detach().clone().requires_grad_(), torch.randn(len(a), IN)
        dispatched = mx.parallel.dispatch_tokens(a, counts.tolist(), single(), RECIPES[name])
        assert dispatched.counts.tolist() == counts.tolist() and dispatched.ends[-1] == len(a)
        y, z = mx.parallel.combine_tokens(sent(dispatched.tokens, dispatched.counts), dispatched), alone(b, counts)
        torch.manual_seed(7)  # NVFP4 rounds gradients stochastically
        y.backward(grad)
        torch.manual_seed(7)
        z.backward(grad)
        pairs = (sent.up_proj, alone.up_proj), (sent.down_proj, alone.down_proj)
        errors = [relative(p.grad, q.grad) for p, q in pairs]
        found[name] = torch.equal(y, z), torch.equal(a.grad, b.grad), errors
    return found


@case(exact=True)
def precise_wgrad(rank, folder):
    """Recipe -> whether tokens and gradients were sent as codes, and the errors against experts without an exchange."""
    found = {}
    for name, recipe in PRECISE_WGRAD.items():
        sent, alone = experts(recipe, ListedExperts), experts(recipe)
        parallelize_module(sent, single(), mx.parallel.ExpertParallel())
        counts = torch.tensor([3, 0, 1, 33, 0, 0, 17, 2])
        a = torch.randn(int(counts.sum()), IN).requires_grad_()
        b = a.detach().clone().requires_grad_()
        with mx.explain() as log:
            y = sent(a, counts.tolist())
            y.square().sum().backward()
        z = alone(b, counts)
        z.square().sum().backward()
        pairs = (
            (y, z),
            (a.grad, b.grad),
            (sent.up_proj.grad, alone.up_proj.grad),
            (sent.down_proj.grad, alone.down_proj.grad),
        )
        found[name] = [kernel for kernel, _ in exchanges(log)], [relative(*pair) for pair in pairs]
    return found


@case
def equal_rows_of_every_expert(rank, folder):
    """Recipe -> the errors of the result, the gradient of the rows and those of the stacks against one rank, which has
    the rows of both; the exchanges. Then the error for rows that do not divide."""
    found = {}
    for name in ("mxfp8", "mxint8"):
        many, one = (experts(RECIPES[name], EqualExperts) for _ in range(2))
        parallelize_module(many, mesh(), mx.parallel.ExpertParallel())
        torch.manual_seed(6)
        rows = [
            torch.randn(EXPERTS, tokens, IN) * 2.0 ** torch.randint(-3, 4, (EXPERTS, tokens, 1)) for tokens in (24, 40)
        ]
        x, whole = rows[rank].flatten(0, 1).requires_grad_(), torch.cat(rows, 1).flatten(0, 1).requires_grad_()
        with mx.explain() as log:
            y = many(x)
            y.square().sum().backward()
        z = one(whole)
        z.square().sum().backward()
        ends = slice(0, 24) if rank == 0 else slice(24, 64)
        pairs = [
            (t.unflatten(0, (EXPERTS, -1)), u.unflatten(0, (EXPERTS, -1))[:, ends])
            for t, u in ((y, z), (x.grad, whole.grad))
        ]
        pairs += [(p.grad, q.grad) for p, q in zip(many.parameters(), one.parameters(), strict=True)]
        found[name] = [relative(*pair) for pair in pairs], [kernel for kernel, _ in exchanges(log)], set(products(log))
    return found, message(lambda: many(torch.randn(EXPERTS + 1, IN)))


@case
def compiled_experts(rank, folder):
    """(how the experts get their recipe, kind) -> the errors of a compiled model against the eager one, for two counts
    of rows, and whether the products of both were quantized."""
    found = {}
    for given, recipe, kind in (
        ("quantize_", RECIPES["mxfp8"], Experts), ("quantize_", RECIPES["mxfp8"], LoopedExperts),
        ("autocast", None, Experts),
    ):  # fmt: skip
        torch._dynamo.reset()
        eager, other = (experts(recipe, kind) for _ in range(2))
        eager, other = (parallelize_module(each, mesh(), mx.parallel.ExpertParallel()) for each in (eager, other))
        traced, errors, kernels = torch.compile(other, backend="aot_eager"), [], []
        for shift in range(2):
            counts = torch.tensor([3, 0, 1, 33, 0, 0, 17, 2]).roll(rank + shift) + shift
            for module in (eager, traced):
                x = torch.randn(int(counts.sum()), IN, generator=torch.Generator(DEVICE).manual_seed(rank))
                on = contextlib.nullcontext() if recipe else mx.autocast(recipe=RECIPES["mxfp8"])
                with mx.explain() as log, on:
                    module(x, counts).square().sum().backward()
                kernels += products(log)
            errors += [relative(p.grad, q.grad) for p, q in zip(other.parameters(), eager.parameters(), strict=True)]
        found[given, kind.__name__] = max(errors), "high precision" in kernels, len(kernels) > 0
    return found


@case
def wrong_dispatches(rank, folder):
    """The errors of arguments that do not fit, on every rank."""
    x, group = torch.randn(4, IN), dist.group.WORLD
    recipe = (RECIPES["mxfp8"], RECIPES["mxfp4"])[rank]
    small = experts(kind=TopExperts)
    small.up_proj, small.down_proj = (nn.Parameter(p[:3]) for p in (small.up_proj, small.down_proj))
    style, kinds = mx.parallel.ExpertParallel(), [nn.Linear(IN, IN), small]
    calls = [
        lambda: mx.parallel.dispatch_tokens(x, [1, 2], group),
        lambda: mx.parallel.dispatch_tokens(x, [1, 2, 1], group),
        lambda: mx.parallel.dispatch_tokens(x, [2, 2], group, recipe),
        *(lambda kind=kind: parallelize_module(kind, mesh(), style) for kind in kinds),
    ]
    return [message(call) for call in calls]


@long_case
def experts_of_transformers(rank, folder):
    """Model -> the largest relative errors of logits and gradients against one process, and how often codes were sent:
    a mixture whose experts are split, and gpt-oss, whose experts are transposed and have biases."""
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    configs = {
        Qwen3MoeForCausalLM: Qwen3MoeConfig(num_experts=4, decoder_sparse_step=1, **MOE),
        GptOssForCausalLM: GptOssConfig(num_local_experts=4, layer_types=["full_attention"] * 2, **MOE),
    }
    found = {}
    for kind, config in configs.items():
        for way in ("eager", "grouped_mm"):
            models = []
            for _ in range(2):
                torch.manual_seed(2)
                models.append(mx.quantize_(kind(config), RECIPES["mxfp8"]))
                models[-1].set_experts_implementation(way)
            many, one = models
            parallelize_module(many, mesh(), {"model.layers.*.mlp.experts": mx.parallel.ExpertParallel()})
            ids = torch.randint(64, (dist.get_world_size(), 2, 16), generator=torch.Generator(DEVICE).manual_seed(4))
            with mx.explain() as log:
                mine = many(ids[rank]).logits
                mine.square().mean().backward()
            theirs = one(ids.flatten(0, 1)).logits
            theirs.square().mean().mul(len(ids)).backward()  # the sum of the losses of the ranks
            error = (mine - theirs.unflatten(0, ids.shape[:2])[rank]).norm() / theirs.norm()
            pairs = zip(many.named_parameters(), one.parameters(), strict=True)
            errors = {name: relative(p.grad, q.grad) for (name, p), q in pairs if "experts" in name}
            of_stacks = max(error for name, error in errors.items() if "bias" not in name)
            of_biases = max((error for name, error in errors.items() if "bias" in name), default=0)
            codes = [kernel for kernel, _ in exchanges(log)]
            sent = codes.count("codes"), len(codes)
            found[kind.__name__, way] = error.item(), of_stacks, of_biases, *sent, set(products(log))
    return found


@long_case
def experts_of_llama4(rank, folder):
    """How the weights are quantized -> of Llama 4 the errors of the logits and, if it trains, of the gradients of the
    stacks against one process, and what was sent."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {name: size for name, size in MOE.items() if name != "moe_intermediate_size"}
    config, found = Llama4TextConfig(num_local_experts=4, intermediate_size_mlp=96, **sizes), {}
    for name, way in (("mxfp8", RECIPES["mxfp8"]), ("frozen", "mxfp8"), ("weight-only", "mxfp4-weight-only")):
        models = []
        for _ in range(2):
            torch.manual_seed(2)
            models.append(Llama4ForCausalLM(config))
            for expert in (layer.feed_forward.experts for layer in models[-1].model.layers):
                nn.init.normal_(expert.gate_up_proj, std=0.1)
            mx.quantize_(models[-1], way)
        many, one = models
        parallelize_module(many, mesh(), {"model.layers.*.feed_forward.experts": mx.parallel.ExpertParallel()})
        ids = torch.randint(64, (dist.get_world_size(), 2, 16), generator=torch.Generator(DEVICE).manual_seed(4))
        with mx.explain() as log:
            mine, theirs = many(ids[rank]).logits, one(ids.flatten(0, 1)).logits
            if name == "mxfp8":
                mine.square().mean().backward()
                theirs.square().mean().mul(len(ids)).backward()  # the sum of the losses of the ranks
        pairs = zip(many.named_parameters(), one.parameters(), strict=True)
        errors = [relative(p.grad, q.grad) for (key, p), q in pairs if "experts" in key and q.grad is not None]
        sent = [kernel for kernel, _ in exchanges(log)]
        found[name] = relative(mine, theirs.unflatten(0, ids.shape[:2])[rank]), errors, sent
    return found


@long_case
def frozen_experts(rank, folder):
    """(format, implementation) -> of a mixture quantized for inference the error of the logits against one process,
    what was sent, and the type of a local stack."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config, found = Qwen3MoeConfig(num_experts=4, decoder_sparse_step=1, **MOE), {}
    for format in ("mxfp8", "nvfp4-weight-only"):
        for way in ("eager", "grouped_mm"):
            models = []
            for _ in range(2):
                torch.manual_seed(2)
                models.append(mx.quantize_(Qwen3MoeForCausalLM(config), format))
                models[-1].set_experts_implementation(way)
            many, one = models
            parallelize_module(many, mesh(), {"model.layers.*.mlp.experts": mx.parallel.ExpertParallel()})
            ids = torch.randint(64, (2, 16), generator=torch.Generator(DEVICE).manual_seed(4 + rank))
            with torch.no_grad(), mx.explain() as log:
                error = relative(many(ids).logits, one(ids).logits)
            stack = many.model.layers[0].mlp.experts.gate_up_proj.to_local()
            found[format, way] = error, [kernel for kernel, _ in exchanges(log)], type(stack).__name__
    return found


@long_case
def experts_and_fsdp(rank, folder):
    """FSDP2 over one dimension of a mesh, experts over the other: the errors of the gradients against one rank."""
    found, world = {}, dist.get_world_size()
    for shape in ((1, 2), (2, 1)) if world == 2 else ((2, 2),):
        grid = init_device_mesh(DEVICE, shape, mesh_dim_names=("shard", "experts"))
        many, one = (experts(RECIPES["mxfp8"], TopExperts) for _ in range(2))
        parallelize_module(many, grid["experts"], mx.parallel.ExpertParallel())
        fully_shard(many, mesh=grid["shard"])
        parallelize_module(one, single(), mx.parallel.ExpertParallel())
        trained(many, *batch(rank))
        for other in range(world):
            trained(one, *batch(other))
        pairs = (many.up_proj, one.up_proj), (many.down_proj, one.down_proj)
        errors = [relative(whole(p.grad) * shape[0], q.grad) for p, q in pairs]  # FSDP2 averages over its ranks
        found[shape] = errors, [tuple(p.shape) for p, _ in pairs]
    return found
