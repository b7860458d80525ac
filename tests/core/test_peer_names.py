"""Names of TransformerEngine and torchao are here, or the error for them names ours; so do arguments and attributes."""

import importlib
import re

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.peer_names import ARGUMENTS, MODULE, NOT_NEEDED
from mxtensor.tensor.attributes import TorchAOAttributes

TRANSFORMER_ENGINE = """
LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding DotProductAttention DType
MultiheadAttention InferenceParams RotaryPositionEmbedding TransformerLayer moe_permute moe_permute_with_probs
moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs fp8_autocast
fp8_model_init autocast apply_recipe quantized_model_init is_fp8_available is_mxfp8_available
is_fp8_block_scaling_available is_nvfp4_available get_default_recipe QuantizerRole quantizer_factory is_bf16_available
make_graphed_callables checkpoint CudaRNGStatesTracker get_cpu_offload_context optimizers parallel_cross_entropy
QuantizedTensorStorage QuantizedTensor Quantizer prepare_for_saving restore_from_saved Float8Quantizer
Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer NVFP4Quantizer Float8TensorStorage MXFP8TensorStorage
Float8BlockwiseQTensorStorage NVFP4TensorStorage Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor
HybridQuantizer
"""
"""What ``transformer_engine.pytorch`` exports, without what nothing here is for: userbuffers, ONNX, cuDNN's version,
attention of single architectures, optimizers on several GPUs, requests of quantizers."""
TORCHAO = ("quantization", "quantization.qat", "float8", "prototype.mx_formats")
NOTHING_FOR = re.compile(
    "affine|Affine|Observer|Mapping|ZeroPoint|TorchAODType|Granularity|PerAxis|PerGroup|PerToken|Int4P|Int4T|Intx.*Tensor|"
    "Int8DynActInt4WeightLinear|int_scaled|safe_int|swap_conv2d|compute_error|fqn_matches|register_quantize|MMConfig|"
    "GemmConfig|Quantizer$|Embedding|FakeQuantizer|^from_intx|initialize_fake|ScalingType|ScalingGranularity|^_|IntX"
)
"""Names of torchao without a counterpart: integers with zero points, other quantizers, settings of its kernels."""


def is_known(name):
    return name in mx.__all__ or name in MODULE or name in NOT_NEEDED


def test_names_of_transformer_engine():
    for name in TRANSFORMER_ENGINE.split():
        if name not in te.__all__:
            with pytest.raises(AttributeError, match=r"; (use|leave it out:) "):
                getattr(te, name)


@pytest.mark.parametrize("module", TORCHAO)
def test_names_of_torchao(module):
    names = pytest.importorskip(f"torchao.{module}").__all__
    assert [name for name in names if not is_known(name) and not NOTHING_FOR.search(name)] == []


def test_the_tables_have_no_name_of_the_package():
    assert not {*MODULE, *NOT_NEEDED} & {*mx.__all__} and not {*MODULE} & {*NOT_NEEDED}
    of_door = {name for name in MODULE if MODULE[name] == f"te.{name}, with import mxtensor.te as te"}
    assert of_door == {*te.__all__} - {*mx.__all__, "QuantizerRole", "common"}
    recipes = {kind.__name__ for kind in mx.recipe.RECIPES}
    assert recipes <= {name for name in MODULE if MODULE[name] == f"mx.recipe.{name}"}


@pytest.mark.parametrize("text", sorted({*MODULE.values()}))
def test_what_an_error_names_exists(text):
    for path in re.findall(r"(?<![\w.])(?:mx|te|torch)(?:\.\w+)+", text):
        top, *names = path.split(".")
        found = {"mx": mx, "te": te, "torch": torch}[top]
        for i, name in enumerate(names):
            if top == "torch" and not hasattr(found, name):
                importlib.import_module(".".join(["torch", *names[: i + 1]]))
            found = getattr(found, name)
    for quoted in re.findall(r"'([\w-]+)'", text):
        if "-weight" in quoted or "128x" in quoted:
            mx.quantize_(torch.nn.Linear(128, 128), quoted)


def test_an_unknown_name_names_ours():
    for place, name, message in (
        (mx, "fp8_autocast", r"; use te\.fp8_autocast, with import mxtensor.te as te$"), (te, "checkpoint", "torch"),
        (mx, "Linear", r"; use te\.Linear, with import mxtensor.te as te$"), (te.optimizers, "FusedSGD", "; use mx"),
        (mx, "is_fp8_available", "; leave it out: every device"), (te, "FusedSGD", r"; use mx\.optim\.SGD$"),
        (mx, "nonsense", "has no attribute 'nonsense'$"), (te, "nonsense", "has no attribute 'nonsense'$"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=message):
            getattr(place, name)
        assert not hasattr(place, name)


def test_arguments_of_fp8_autocast():
    for name, ours in ARGUMENTS.items():
        with pytest.raises(TypeError, match=f"'{name}', .*; {f'use {ours}=' if ours else 'leave it out'}$"):
            mx.autocast(**{name: None})
    with pytest.raises(TypeError, match=r"autocast\(\) got an unexpected keyword argument 'nonsense'$"):
        mx.autocast(nonsense=1)


def test_attributes_of_torchaos_tensors():
    names = [name for name in vars(TorchAOAttributes) if not name.startswith("_")]
    w, p = (
        mx.quantize(torch.randn(32, 32), "mxfp8"),
        torch.nn.Parameter(mx.quantize(torch.randn(32, 32), "nvfp4"), False),
    )
    for name in names:
        for place in (w, p, mx.MXTensor):
            assert not hasattr(place, name)
            with pytest.raises(AttributeError, match=f"no '{name}', as torchao's tensors have; use (tensor|mx)"):
                getattr(place, name)
    p.scale = 3.0  # a library may set its own
    assert p.scale == 3.0 and not hasattr(w, "scale")


def test_a_config_of_torchao_that_has_no_counterpart_names_a_format():
    quantization = pytest.importorskip("torchao.quantization")
    with pytest.raises(TypeError, match="type Int8WeightOnlyConfig; use the format mxint8, for example '"):
        mx.quantize_(torch.nn.Linear(32, 32), quantization.Int8WeightOnlyConfig())


def test_tensors_that_another_library_has_quantized_are_refused(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    before, message = model[0].weight, r"quantized already, by torchao \(Int8Tensor\); .* or those of its dequantize"
    for config in ("mxfp8-weight-only", mx.recipe.MXFP8BlockScaling()):
        with pytest.raises(TypeError, match=f"quantize_: 0.weight is {message}"):
            mx.quantize_(model, config)
    with pytest.raises(TypeError, match=f"quantize: the tensor is {message}"):
        mx.quantize(model[0].weight, "mxfp8")
    with pytest.raises(TypeError, match=f"save: 0.weight is {message}"):
        mx.checkpoints.save(model, tmp_path / "out")
    assert model[0].weight is before and list(tmp_path.iterdir()) == []
    model[0].weight = torch.nn.Parameter(before.dequantize())
    assert isinstance(mx.quantize_(model, "mxfp8-weight-only")[0].weight, mx.MXTensor)
