"""The cases of two ranks for ``test_pretrained.py``: models that transformers loads with tensor parallelism."""

import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist

import mxtensor as mx
from mxtensor.core.compat import local_of
from tests.distributed.parallel_cases import error
from tests.helpers.ranks import DEVICE, WORLD, long_case

FORMATS = ("mxfp8", "mxfp4-weight-only", "mxfp8[32x32]-weight-only")
REFUSED = ("nvfp4-weight-only", "float8_e4m3_row-weight-only")
IDS = torch.arange(32).view(2, 16)
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}


def models():
    """Class -> config: a dense model, and one with stacks of experts, whose gates and ups are one stack."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return {
        LlamaForCausalLM: LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2),
        Qwen3MoeForCausalLM: Qwen3MoeConfig(**SIZES, **experts, intermediate_size=64, num_key_value_heads=2),
    }


def made(kind, config):
    torch.manual_seed(0)
    return kind(config).to(DEVICE).eval()


@long_case
def loaded_with_tensor_parallelism(rank, folder):
    """(model, format, what was loaded) -> the class of a local weight and the error of the logits, or the refusal."""
    warnings.simplefilter("ignore")
    with mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD)):  # as torchrun does
        return loaded(rank, folder)


def loaded(rank, folder):
    told = {}
    for kind, config in models().items():
        high_precision = f"{folder}/{kind.__name__}"
        if rank == 0:
            made(kind, config).save_pretrained(high_precision)
        for format in (*FORMATS, *REFUSED):
            one = mx.quantize_(made(kind, config), format)
            codes = f"{high_precision}-{format}"
            if rank == 0:
                mx.checkpoints.save(one, codes)
            dist.barrier()
            quantization = {"quantization_config": mx.TransformersConfig(format)}
            for what, path, options in (("values", high_precision, quantization), ("codes", codes, {})):
                try:
                    two = kind.from_pretrained(path, tp_plan="auto", **options).eval()
                except NotImplementedError as refusal:
                    told[kind.__name__, format, what] = str(refusal)
                    continue
                with torch.no_grad():
                    difference = error(two(IDS.to(DEVICE)).logits, one(IDS.to(DEVICE)).logits)
                local = local_of(two.model.layers[0].self_attn.q_proj.weight)
                told[kind.__name__, format, what] = type(local).__name__, difference
    return told
