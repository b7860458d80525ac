"""A layer that is called ``gate`` is a router or the gate of an MLP, by what is around it."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.convert.weights import mlp_gates

H, F, E = 64, 96, 4


def holder(**modules):
    out = nn.Module()
    for name, module in modules.items():
        setattr(out, name, nn.Parameter(module) if isinstance(module, torch.Tensor) else module)
    return out


def linear(outputs=F):
    return nn.Linear(H, outputs, bias=False)


def mlp():
    return holder(gate=linear(), up=linear(), down=nn.Linear(F, H, bias=False))


def router(**more):
    return holder(gate=linear(E), noise=linear(E), **more)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = linear(), linear()


MLPS = {
    "an MLP": mlp,
    "of a dict": lambda: nn.ModuleDict({"gate": linear(), "value": linear()}),
    "with layers between": lambda: holder(gate=linear(), norm=nn.LayerNorm(H), fc=linear()),
    "in a layer of many": lambda: holder(layers=nn.ModuleList(holder(mlp=mlp()) for _ in range(3))),
    "of an expert": lambda: holder(gate=linear(E), experts=nn.ModuleList(mlp() for _ in range(E))),
    "of an expert by its class": lambda: holder(router=linear(E), experts=nn.ModuleList(Expert() for _ in range(E))),
    "beside a block with experts": lambda: holder(
        dense=mlp(), moe=router(experts=nn.ModuleList(mlp() for _ in range(E)))
    ),
}
ROUTERS = {
    "beside experts": lambda: holder(gate=linear(E), experts=nn.ModuleList(linear() for _ in range(E))),
    "with noise, beside experts": lambda: router(experts=nn.ModuleList(linear() for _ in range(E))),
    "beside a list of another name": lambda: router(ffns=nn.ModuleList(linear() for _ in range(E))),
    "beside a stack": lambda: router(experts=holder(w1=torch.zeros(E, F, H))),
    "beside parameters that are stacks": lambda: router(w1=torch.zeros(E, F, H)),
    "in a module beside experts": lambda: holder(gating=router(), ffns=nn.ModuleList(linear() for _ in range(E))),
    "in a module beside a stack": lambda: holder(gating=router(), up=torch.zeros(E, F, H)),
    "beside a shared expert": lambda: holder(gate=linear(F), shared_expert=mlp(), proj=linear(F)),
    "alone": lambda: holder(gate=linear(E)),
    "beside a layer of another shape": lambda: holder(gate=linear(E), proj=linear()),
    "of a router": lambda: holder(router=router()),
}  # fmt: skip


def left(model):
    """The names of layers called gate that ``quantize_`` leaves in high precision."""
    mx.quantize_(model, "mxfp8-weight-only")
    found = {name: module for name, module in model.named_modules() if name.split(".")[-1] == "gate"}
    return {name for name, module in found.items() if not isinstance(module.weight, mx.MXTensor)}, set(found)


@pytest.mark.parametrize("case", MLPS)
def test_the_gate_of_an_mlp_is_quantized(case):
    stays, found = left(holder(block=MLPS[case](), out=linear()))
    routers = {name for name in found if name in ("block.gate", "block.moe.gate") and "expert" in case}
    assert stays == routers and found > stays


@pytest.mark.parametrize("case", ROUTERS)
def test_a_router_stays(case):
    model = holder(block=ROUTERS[case](), out=linear())
    stays, found = left(model)
    assert stays >= {name for name in found if "shared_expert" not in name} != set()


def test_with_a_table_of_names_and_for_training():
    model = mx.quantize_(holder(block=mlp()), {"_default": "mxfp8-weight-only"})
    assert isinstance(model.block.gate.weight, mx.MXTensor)
    model = mx.quantize_(holder(block=mlp()), mx.recipe.MXFP8BlockScaling())
    assert type(model.block.gate.weight) is type(model.block.up.weight) is not nn.Parameter


def test_routers_of_transformers_are_not_gates_of_mlps():
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "jamba", "granitemoe", "gpt_oss"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=2))
        assert mlp_gates(model) == set(), kind
