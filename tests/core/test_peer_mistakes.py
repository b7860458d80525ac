"""What users of TransformerEngine, torchao, transformers, llm-compressor and ModelOpt try first: each gets a sentence
that says what to do here, and doing that works."""

import inspect
import re

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core import names
from mxtensor.core.peer_names import ARGUMENTS_OF, MODULE, MODULES


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
MISTAKES = [
    # arguments
    ("mx.quantize_(model(), 'mxfp8', ignore=['lm_head'])", TypeError, "no argument 'ignore'; pass {'NAME': None"),
    ("mx.quantize_(model(), 'mxfp8', skip=['0'])", TypeError, "no argument 'skip'; pass {'NAME': None"),
    ("mx.quantize_(model(), 'mxfp8', modules_to_not_convert=['0'])", TypeError, "pass {'NAME': None"),
    ("mx.quantize_(model(), 'mxfp8', targets='Linear')", TypeError, "'re:PATTERN': config}"),
    ("mx.quantize_(model(), 'mxfp8', device='cuda')", TypeError, r"move the model first: quantize_\(model.to"),
    ("mx.quantize_(model(), 'mxfp8', scheme='MXFP8')", TypeError, "'scheme'; it is the second argument, config"),
    ("mx.quantize_(model(), 'mxfp8', set_inductor_config=False)", TypeError, "leave it out"),
    ("mx.quantize_(model(), 'mxfp8', nonsense=1)", TypeError, "got an unexpected keyword argument 'nonsense'"),
    ("mx.quantize(X, 'mxfp8', block_size=64)", TypeError, r"as in 'mxfp8\[1x64\]'"),
    ("mx.quantize(X, 'mxfp8', axis=0)", TypeError, "orientation='columnwise'"),
    ("mx.quantize(X, 'mxfp8', scaling_mode='floor')", TypeError, "it is scaling="),
    ("mx.quantize(X, 'mxfp8', nonsense=1)", TypeError, "got an unexpected keyword argument 'nonsense'"),
    ("mx.calibrate(model(), [X], dataset=[X])", TypeError, "it is the second argument, data"),
    ("mx.calibrate(model(), [X], scheme='NVFP4')", TypeError, "it is the third argument, format"),
    ("mx.calibrate(model(), [X], num_calibration_samples=9)", TypeError, "data has as many batches"),
    ("mx.checkpoints.convert('in', 'out', format='mxfp8', ignore=['lm_head'])", TypeError, "it is skip="),
    ("mx.checkpoints.convert('in', 'out', scheme='mxfp8')", TypeError, "it is format="),
    ("mx.checkpoints.convert('in', 'out', 'mxfp8')", ValueError, "it is a format: pass format='mxfp8' to convert"),
    ("mx.checkpoints.save(model(), 'out', layout='safetensors')", ValueError, "such as 'native'"),
    ("mx.TransformersConfig('mxfp8', modules_to_not_convert=['lm_head'])", TypeError, "it is skip="),
    ("mx.TransformersConfig('mxfp8', quant_type='mxfp8')", TypeError, "it is the first argument, format"),
    ("mx.autocast(dtype=torch.bfloat16)", TypeError, "torch.autocast has it"),
    ("mx.autocast('mxfp8')", TypeError, "the recipe as recipe="),
    ("te.Linear(64, 64, dtype=torch.bfloat16)", TypeError, "it is params_dtype here"),
    ("te.Linear(64, 64, fp8=True)", TypeError, r"inside mx.autocast\(recipe=...\)"),
    # names of formats and schemes
    ("mx.quantize_(model(), 'NVFP4A16')", ValueError, "'NVFP4A16'; quantize_ takes 'nvfp4-weight-only'"),
    ("mx.quantize_(model(), 'W4A16')", ValueError, "takes 'mxfp4-weight-only' or 'nvfp4-weight-only'"),
    ("mx.quantize_(model(), 'FP8_BLOCK')", ValueError, "takes 'float8_128x128-weight-float8_1x128-activation'"),
    ("mx.quantize_(model(), 'FP8_DYNAMIC')", ValueError, "'float8_row' has a scale for each row"),
    ("mx.quantize(X, 'Q4_K_M')", ValueError, "integers of 4 bits are not here"),
    ("mx.quantize_(model(), 'tensorwise')", ValueError, "'float8_tensor' has one scale"),
    ("mx.quantize_(model(), torch.bfloat16)", ValueError, r"it is not quantized: .* use .to\(dtype\)"),
    ("mx.FORMATS.__setitem__('my', mx.FORMATS['mxfp8'])", TypeError, "read-only, .* pass it itself"),
    # configs
    ("mx.quantize_(model(), {'0': {'weight': 'mxfp8'}})", TypeError, "config of '0': .* has a config for each name"),
    ("mx.quantize_(model(), 'Float8WeightOnlyConfig')", ValueError, r"use mx\.ao\.Float8WeightOnlyConfig"),
    ("mx.quantize_(model(), mx.TransformersConfig('mxfp8'))", TypeError, "is for from_pretrained of transformers"),
    ("mx.quantize_(model(), mx.recipe.MXFP8BlockScaling)", TypeError, r"an instance: MXFP8BlockScaling\(\)"),
    ("mx.quantize_(model(), 'mxfp8', lambda name, module: name.endswith('0'))", TypeError, "argument is a module"),
    ("mx.quantize_(model(), 'mxfp8', ['0'])", TypeError, "filter_fn is .*pass a function"),
    ("mx.quantize_('org/model', 'mxfp8')", TypeError, "takes a module, not 'org/model'"),
    ("mx.quantize(model(), 'mxfp8')", TypeError, r"for a module mx.quantize_\(model, format\)"),
    # names of functions and classes
    ("mx.oneshot", AttributeError, r"use mx.calibrate\(model, data, format\)"),
    ("mx.GPTQModifier", AttributeError, r"use mx.calibrate\(model, data, method='gptq'\)"),
    ("mx.TorchAoConfig", AttributeError, r"use mx.TransformersConfig\(format\)"),
    ("mx.NVFP4_DEFAULT_CFG", AttributeError, "use the format 'nvfp4'"),
    ("mx.save_pretrained", AttributeError, "use that of the model"),
    ("mx.load", AttributeError, "use mx.checkpoints.load"),
    # imports
    ("import mxtensor.pytorch as te", ImportError, "as in: import mxtensor.te as te"),
    ("from mxtensor.common.recipe import DelayedScaling", ImportError, "recipes are in mxtensor.recipe"),
    ("from mxtensor.quantization import quantize_", ImportError, "from mxtensor.ao import quantize_"),
    ("import mxtensor.ao.float8", ImportError, "from mxtensor.ao import quantize_"),
    ("from mxtensor.prototype.mx_formats import MXLinearConfig", ImportError, "names of torchao are in mxtensor"),
    ("from mxtensor.modifiers.quantization import QuantizationModifier", ImportError, "use mx.quantize_"),
    ("from mxtensor import fp8_autocast", ImportError, "use te.fp8_autocast, with import mxtensor.te as te"),
    ("from mxtensor.optim import AdamW", ImportError, "from mxtensor import optim"),
    ("from mxtensor.te.fp8 import fp8_autocast", ImportError, "as in: import mxtensor.te as te"),
    ("import mxtensor.te.pytorch", ImportError, "as in: import mxtensor.te as te"),
    ("from mxtensor.te import FusedSGD", ImportError, "use mx.optim.SGD"),
    ("from mxtensor import nonsense", ImportError, "cannot import name 'nonsense'"),
    ("import mxtensor.nonsense", ImportError, "No module named 'mxtensor.nonsense'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_sentence_says_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        exec(call, {"mx": mx, "te": te, "torch": torch, "model": model, "X": X})


# ---------------------------------------------------------------------------------------------- doing that works


@pytest.mark.parametrize("name", [name for name in names.OF_PEERS if "torch" not in name])
def test_the_formats_that_an_answer_names_exist(name):
    for found in re.findall(r"'([\w-]+)'", names.OF_PEERS[name]):
        mx.quantize_(nn.Sequential(nn.Linear(128, 128)), found)
    with pytest.raises(ValueError, match=re.escape(f"{name.upper()!r}; {names.OF_PEERS[name]}")):
        mx.quantize_(model(), name.upper())


def test_no_name_of_a_format_is_answered_as_another_librarys():
    assert not {*map(names.key, (*mx.FORMATS, *mx.FORMATS.aliases))} & {*names.OF_PEERS}
    assert not {f"{names.key(format)}{end}" for format in mx.FORMATS for end in names.WEIGHT_ONLY} & {*names.OF_PEERS}


def test_a_config_for_each_name_leaves_a_layer_out():
    found = mx.quantize_(model(), {"0": None, "_default": "mxfp8"})
    assert not isinstance(found[0].weight, mx.MXTensor) and isinstance(found[2].weight, mx.MXTensor)
    found = mx.quantize_(model(), {"re:.*2": "mxfp8"})
    assert not isinstance(found[0].weight, mx.MXTensor) and isinstance(found[2].weight, mx.MXTensor)


def test_a_format_without_a_row_is_passed_itself():
    format = mx.FORMATS["mxfp8_e4m3"].with_block(64)
    assert mx.quantize(X, format).format == format == mx.quantize(X, "mxfp8[1x64]").format


@pytest.mark.parametrize("method", ["gptq", ["awq", "gptq"], ["smooth", "gptq"]])
def test_methods_that_stand_for_modifiers_run(method):
    assert isinstance(mx.calibrate(model(), [X], method=method)[0].weight, mx.MXTensor)
    assert any(repr(method) in text for text in MODULE.values())


def test_both_kinds_of_autocast_may_be_open_at_once():
    with torch.autocast("cpu", torch.bfloat16), mx.autocast(recipe=mx.recipe.MXFP8BlockScaling()):
        assert model()(X).dtype is torch.bfloat16


def test_no_argument_or_module_that_exists_is_answered():
    owners = {"TransformersConfig": mx.TransformersConfig.__new__, "convert": mx.checkpoints.convert}
    for function, arguments in ARGUMENTS_OF.items():
        assert not {*inspect.signature(owners.get(function) or getattr(mx, function)).parameters} & {*arguments}
    for name in MODULES:
        with pytest.raises(ImportError, match=re.escape(MODULES[name])):
            exec(f"import mxtensor.{name}")


# ---------------------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("config", ["mxfp8", mx.recipe.MXFP8BlockScaling()], ids=["inference", "training"])
def test_a_state_dict_that_torchao_has_quantized_is_refused_and_its_values_load(config, assign):
    torchao = pytest.importorskip("torchao.quantization")
    theirs, ours = model().bfloat16(), mx.quantize_(model().bfloat16(), config)
    torchao.quantize_(theirs, torchao.Float8WeightOnlyConfig())
    before = ours[0].weight
    with pytest.raises(RuntimeError, match=r"0\.weight of the state dict is quantized already, by torchao \(Float8T"):
        ours.load_state_dict(theirs.state_dict(), assign=assign)
    assert type(ours[0].weight) is type(before)
    values = {name: t.dequantize() if "weight" in name else t for name, t in theirs.state_dict().items()}
    ours.load_state_dict(values, assign=assign)
    wanted = values["0.weight"] if config != "mxfp8" else mx.quantize(values["0.weight"], "mxfp8").dequantize()
    got = ours.state_dict()["0.weight"]
    assert torch.equal(got.dequantize() if config == "mxfp8" else got, wanted)
