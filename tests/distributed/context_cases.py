"""The cases of two ranks for ``test_context_parallel.py``: attention over sequences that the ranks share."""

import copy

import torch
import torch.distributed as dist

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import MXFP8BlockScaling
from tests.distributed.fsdp_cases import message
from tests.helpers.ranks import DEVICE, case, long_case

HEADS, CHANNELS = 4, 8
ROWS = [
    # format, comm type, mask, window, groups, recomputed, lengths of queries and keys
    ("sbhd", "all_gather", "causal", None, 4, False, (32, 32)),
    ("bshd", "p2p", "causal", None, 2, True, (32, 32)),
    ("sbhd", "a2a", "causal", None, 2, False, (32, 32)),
    ("bshd", "all_gather", "no_mask", None, 4, True, (32, 48)),
    ("sbhd", "all_gather", "no_mask", (5, 2), 2, False, (32, 32)),
    ("bshd", "a2a", "causal", (3, 0), 4, False, (32, 32)),
    ("sbhd", "all_gather", "causal", (3, 0), 4, False, (48, 32)),  # the last queries see no key
    ("sbhd", "all_gather", "causal_bottom_right", None, 4, False, (48, 32)),  # the first ones see none
    ("bshd", "a2a", "causal_bottom_right", None, 4, True, (32, 48)),
    ("sbhd", "p2p", "no_mask", (-1, 4), 4, False, (32, 32)),
]


def mine(t, dim, rank, ranks=2):
    """The two chunks of a rank."""
    chunks = t.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def error(a, b):
    """Relative to ``b``, or to 1 where ``b`` has gradients that are zero but for rounding."""
    return ((a.double() - b.double()).norm() / max(b.double().norm().item(), 1.0)).item()


@case
def attention_over_ranks(rank, folder):
    """Row -> the errors of the result and of the gradients of queries, keys and values against one rank."""
    found = {}
    for row in ROWS:
        form, comm, mask, window, groups, recomputed, lengths = row
        torch.manual_seed(4)
        dim = form.index("s")
        shapes = [(lengths[0], 2, HEADS, CHANNELS), *[(lengths[1], 2, groups, CHANNELS)] * 2]
        whole = [torch.randn(s if form == "sbhd" else (s[1], s[0], *s[2:])) for s in shapes]
        local = [mine(t, dim, rank).clone().requires_grad_() for t in whole]
        whole = [t.requires_grad_() for t in whole]
        options = {"qkv_format": form, "attn_mask_type": mask, "window_size": window}
        one = te.DotProductAttention(HEADS, CHANNELS, groups, **options)
        many = te.DotProductAttention(HEADS, CHANNELS, groups, **options, cp_group=dist.group.WORLD, cp_comm_type=comm)
        y, z = many(*local, checkpoint_core_attention=recomputed), one(*whole)
        grad = torch.randn(z.shape)
        y.backward(mine(grad, dim, rank)), z.backward(grad)
        pairs = [(y, mine(z, dim, rank))]
        pairs += [(p.grad, mine(w.grad, dim, rank)) for p, w in zip(local, whole, strict=True)]
        found[row] = [error(a, b) for a, b in pairs]
    return found


@case
def layers_over_ranks(rank, folder):
    """``layers`` of eager code."""
    rows = [("sbhd", "encoder", "all_gather"), ("bshd", "decoder", "p2p"), ("bshd", "encoder", "a2a")]
    return layers(rank, [(*row, False) for row in rows])


@long_case
def compiled_layers_over_ranks(rank, folder):
    """``layers`` of compiled code."""
    return layers(rank, [("sbhd", "encoder", "all_gather", True), ("bshd", "encoder", "a2a", True)])


def layers(rank, rows):
    """(format, kind, comm type, compiled) -> the errors of layers in MXFP8 with rotary positions against one rank: of
    the result, and the largest one of the gradients of parameters, summed over the ranks; whether the layer without the
    group gives the bits of one rank."""
    found, angles = {}, te.RotaryPositionEmbedding(CHANNELS)(64).to(DEVICE)
    for row in rows:
        form, kind, comm, compiled = row
        torch.manual_seed(5)
        dim = form.index("s")
        options = {"attn_input_format": form, "layer_type": kind, "hidden_dropout": 0, "attention_dropout": 0}
        one = te.TransformerLayer(64, 128, 8, num_gqa_groups=4, **options).to(DEVICE)
        many = copy.deepcopy(one)
        many.set_context_parallel_group(dist.group.WORLD, [0, 1], None, comm)
        x = torch.randn((32, 2, 64) if form == "sbhd" else (2, 32, 64))
        given = {"encoder_output": x.flip(dim)} if kind == "decoder" else {}
        local = {name: mine(t, dim, rank) for name, t in given.items()}
        call = torch.compile(many, fullgraph=True, backend="aot_eager") if compiled else many
        with mx.autocast(recipe=MXFP8BlockScaling()):
            y, z = call(mine(x, dim, rank), rotary_pos_emb=angles, **local), one(x, rotary_pos_emb=angles, **given)
        grad = torch.randn(z.shape)
        y.backward(mine(grad, dim, rank)), z.backward(grad)
        for p in many.parameters():
            dist.all_reduce(p.grad)
        errors = [error(p.grad, q.grad) for p, q in zip(many.parameters(), one.parameters(), strict=True)]
        many.set_context_parallel_group(None)
        with mx.autocast(recipe=MXFP8BlockScaling()), torch.no_grad():
            alone = many(x, rotary_pos_emb=angles, **given)
        found[row] = error(y, mine(z, dim, rank)), max(errors), torch.equal(alone, z)
    return found


@case
def wrong_context_groups(rank, folder):
    """The errors of what cannot be split."""
    group, q = dist.group.WORLD, torch.randn(32, 2, HEADS, CHANNELS)
    core = te.DotProductAttention(HEADS, CHANNELS, cp_group=group)
    mask = torch.zeros(2, 1, 1, 32, dtype=torch.bool)
    odd = te.DotProductAttention(3, CHANNELS, cp_group=group, cp_comm_type="a2a")
    three, short = torch.randn(32, 2, 3, CHANNELS), torch.randn(31, 2, HEADS, CHANNELS)
    return [
        message(lambda: core(q, q, q, mask, attn_mask_type="padding_causal")),
        message(lambda: core(short, short, short)),
        message(lambda: odd(three, three, three)),
        message(lambda: te.DotProductAttention(HEADS, CHANNELS, cp_group=[group, group], cp_comm_type="a2a+p2p")),
        message(lambda: te.DotProductAttention(HEADS, CHANNELS, cp_group=[0, 1])),
        message(lambda: te.DotProductAttention(HEADS, CHANNELS, cp_comm_type="ring")),
        message(lambda: te.MultiheadAttention(32, HEADS, cp_group=group)),
    ]
