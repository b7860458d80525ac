"""accelerate's offload, device maps and big-model loading of models that ``quantize_`` has converted, for inference and
for training: the same outputs to the bit, and the same parameters when the hooks are removed."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.training.training_weight import TrainingWeight

accelerate = pytest.importorskip("accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling")

INFERENCE = ["mxfp8", "mxfp4-weight-only", "nvfp4", "float8_tensor", "float8_row"]
TRAINING = [mx.recipe.MXFP8BlockScaling(), mx.recipe.NVFP4BlockScaling(), mx.recipe.DelayedScaling()]
DELAYED = TRAINING[-1]
FORMAT = "mxfp8"
IDS = torch.arange(32).view(4, 8)
MAP = {"embedding": "cpu", "head": "cpu", "first": "cpu", "second": "disk"}


class Model(nn.Module):
    """An embedding that is tied to the head, and linear layers; ``twins`` share one weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.twins = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.tie_weights()

    def tie_weights(self):
        self.head.weight, self.twins[1].weight = self.embedding.weight, self.twins[0].weight

    def forward(self, ids):
        x = self.second(self.first(self.embedding(ids)).relu())
        return self.head(self.twins[1](self.twins[0](x)))


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def trained(model):
    """A step that leaves amax histories and no gradients."""
    model(IDS).square().mean().backward()
    model.zero_grad()
    return model


def quantized(config, dtype=torch.float32):
    model = mx.quantize_(plain(dtype), config)
    return model if isinstance(config, str) else trained(trained(model))


def on_meta(config):
    """A quantized model without values, made as for a big model."""
    with accelerate.init_empty_weights():
        model = Model()
    model.tie_weights()
    with accelerate.init_empty_weights():
        mx.quantize_(model, config)
    model.tie_weights()
    return model


@torch.no_grad()
def outputs(model, ids=IDS):
    return model(ids)


def kinds(model):
    """Name -> what a parameter is quantized to, and by which recipe."""
    return {
        name: (type(p), getattr(p, "format", None), getattr(p, "linear_recipe", None), p.requires_grad, p.dtype)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def histories(model):
    return {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}


def devices(model):
    return {p.device.type for p in model.parameters()}


def cpu_offload(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offload(model, folder):
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def cpu_and_disk(model, folder):
    return accelerate.dispatch_model(model, MAP | {"twins": "disk"}, main_device="cpu", offload_dir=folder)


def one_device(model, folder):
    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def check_offloaded(model, offload, folder):
    """That a model has its outputs when it is offloaded, and its outputs and parameters after that."""
    wanted, were, had = outputs(model), kinds(model), histories(model)
    offloaded = offload(model, folder)
    where = devices(offloaded)
    for _ in range(2):
        assert torch.equal(outputs(offloaded), wanted)
        assert devices(offloaded) == where and kinds(offloaded) == were
    torch.testing.assert_close(histories(offloaded), had, rtol=0, atol=0)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    assert devices(offloaded) == {"cpu"} and kinds(offloaded) == were and torch.equal(outputs(offloaded), wanted)
    return where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", INFERENCE)
def test_a_model_for_inference_has_its_outputs_in_the_memory_of_the_cpu(config, dtype, tmp_path):
    assert check_offloaded(quantized(config, dtype), cpu_offload, tmp_path) == {"meta"}
    assert check_offloaded(quantized(config, dtype), one_device, tmp_path) == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload, cpu_and_disk, one_device])
@pytest.mark.parametrize("config", TRAINING)
def test_a_model_for_training_has_its_outputs_wherever_its_weights_are(config, offload, dtype, tmp_path):
    expected = {cpu_and_disk: {"cpu", "meta"}, one_device: {"cpu"}}
    assert check_offloaded(quantized(config, dtype), offload, tmp_path) == expected.get(offload, {"meta"})


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*INFERENCE, *TRAINING])
def test_weights_in_the_memory_of_the_cpu_are_multiplied_on_a_gpu(config):
    model, ids = quantized(config).cuda(), IDS.cuda()
    wanted, were, had = outputs(model, ids), kinds(model), histories(model)
    offloaded = accelerate.cpu_offload(model, execution_device="cuda")
    for _ in range(2):
        assert torch.equal(outputs(offloaded, ids), wanted)
        assert devices(offloaded) == {"meta"} and kinds(offloaded) == were
    torch.testing.assert_close(histories(offloaded), had, rtol=0, atol=0)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    assert devices(offloaded) == {"cuda"} and torch.equal(outputs(offloaded, ids), wanted)


@pytest.mark.parametrize("config", TRAINING)
def test_a_model_trains_as_it_would_have_after_its_hooks_are_removed(config):
    model = quantized(config)
    other = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    outputs(other)
    accelerate.hooks.remove_hook_from_module(other, recurse=True)
    other.tie_weights()  # accelerate has given each of them values of its own, also in a plain model
    for each in (model, other):
        torch.manual_seed(0)  # of stochastic rounding
        trained(each)(IDS).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    torch.testing.assert_close(histories(other), histories(model), rtol=0, atol=0)


@torch.no_grad()
def test_the_history_of_a_plain_layer_stays_with_its_weight():
    recipe = mx.recipe.DelayedScaling()

    def forward(model):
        with mx.autocast(recipe=recipe):
            return model(IDS)

    with torch.enable_grad(), mx.autocast(recipe=recipe):
        model = trained(plain())
    wanted = forward(model)
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(forward(offloaded), wanted) and torch.equal(forward(offloaded), wanted)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    assert torch.equal(forward(offloaded), wanted)


def test_codes_are_not_stored_as_values_on_the_disk(tmp_path):
    for dtype, error in ((torch.bfloat16, NotImplementedError), (torch.float32, TypeError)):
        with pytest.raises(error, match=r"accelerate (has|stores) plain values on the disk.*: use its cpu_offload"):
            outputs(disk_offload(quantized(FORMAT, dtype), tmp_path / str(dtype)))


@pytest.mark.parametrize("config", [FORMAT, "nvfp4", *TRAINING])
def test_parameters_of_a_quantized_model_fill_one_without_values(config):
    model, empty = quantized(config), on_meta(config)
    assert devices(empty) == {"meta"} and kinds(empty) == kinds(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        accelerate.utils.set_module_tensor_to_device(empty, name, "cpu", value=p)
    assert kinds(empty) == kinds(model) and torch.equal(outputs(empty), outputs(model))
    torch.testing.assert_close(histories(empty), histories(model), rtol=0, atol=0)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, MAP | {"twins": "disk"}])
@pytest.mark.parametrize("config", TRAINING)
def test_a_plain_checkpoint_gives_training_weights_their_values(config, device_map, tmp_path):
    torch.save(plain().state_dict(), file := str(tmp_path / "pytorch_model.bin"))
    loaded = accelerate.load_checkpoint_and_dispatch(
        on_meta(config), file, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    model = mx.quantize_(plain(), config)
    assert kinds(loaded) == kinds(model) and torch.equal(outputs(loaded), outputs(model))


def test_a_plain_checkpoint_is_not_quantized_while_accelerate_loads_it(tmp_path):
    torch.save(plain().state_dict(), file := str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(TypeError, match=r"plain values.*call quantize_ after load_checkpoint_in_model"):
        accelerate.load_checkpoint_and_dispatch(on_meta(FORMAT), file, device_map={"": "cpu"})


def test_a_checkpoint_with_histories_is_loaded_without_a_device_map(tmp_path):
    model, other = quantized(DELAYED), mx.quantize_(plain(), DELAYED)
    torch.save(model.state_dict(), file := str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(
        NotImplementedError, match=r"first\._extra_state .* load_checkpoint_in_model\(model, checkpoint\)"
    ):
        accelerate.load_checkpoint_and_dispatch(other, file, device_map=MAP | {"twins": "cpu"}, offload_folder=tmp_path)
    modeling.load_checkpoint_in_model(other, file)
    cpu_and_disk(other, tmp_path / "offload")
    assert torch.equal(outputs(other), outputs(model))


@pytest.mark.parametrize("config", [FORMAT, *TRAINING])
def test_the_values_of_an_offloaded_model_are_gathered_in_a_state_dict(config):
    model = quantized(config)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    state = modeling.get_state_dict_offloaded_model(cpu_offload(model, None))
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(state[name]) is type(value) and torch.equal(state[name], value), name


def test_a_tensor_in_a_module_is_set_as_accelerate_does():
    """Of what is not quantized: buffers, plain parameters, names that do not exist."""
    model, usual = quantized(DELAYED), modeling.set_module_tensor_to_device
    assert usual is accelerate.hooks.set_module_tensor_to_device is accelerate.utils.set_module_tensor_to_device
    model.first.register_buffer("count", torch.zeros(1))
    usual(model, "first.count", "cpu", value=torch.ones(1))
    usual(model, "head.weight", "meta")
    assert model.first.count.item() == 1 and model.head.weight.is_meta
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named scale"):
        usual(model, "first.scale", "cpu", value=torch.ones(1))
    with pytest.raises(ValueError, match=r"Trying to set a tensor of shape torch.Size\(\[2\]\)"):
        usual(model, "first.weight", "cpu", value=torch.ones(2))
    usual(model, "first.weight", "cpu", value=quantized(FORMAT).first.weight)
    assert type(model.first.weight) is TrainingWeight
    assert torch.equal(model.first.weight.high_precision, quantized(FORMAT).first.weight.dequantize())


@pytest.mark.parametrize("config", [FORMAT, *TRAINING])
def test_a_model_goes_to_the_meta_device_and_back_without_values(config):
    model = quantized(config)
    were = kinds(model)
    assert devices(model.to("meta")) == {"meta"} and kinds(model) == were
    assert devices(model.to_empty(device="cpu")) == {"cpu"} and kinds(model) == were


def layers():
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]).bfloat16()


@pytest.mark.parametrize("config", [FORMAT, *TRAINING])
def test_accelerate_counts_the_values_of_a_model_by_their_dtype(config):
    model = mx.quantize_(layers(), config)
    sizes = modeling.compute_module_sizes(model)
    assert sizes == modeling.compute_module_sizes(layers())
    assert modeling.get_max_layer_size([*model.named_children()], sizes, []) == (2 * 64 * 64, ["0", "1", "2", "3"])
    memory = {"cpu": 3 * 64 * 64 * 2, "disk": 10**6}
    assert set(accelerate.infer_auto_device_map(model, memory).values()) == {"cpu", "disk"}


def test_special_dtypes_say_how_large_codes_are():
    model = mx.quantize_(layers(), FORMAT)
    sizes = {name: accelerate.utils.CustomDtype.FP8 for name, p in model.named_parameters()}
    codes = sum(p.rowwise.data.numel() for p in model.parameters())
    assert modeling.compute_module_sizes(model, special_dtypes=sizes)[""] == codes
    memory = {"cpu": 5 * 64 * 64, "disk": 10**6}
    assert set(accelerate.infer_auto_device_map(model, memory, special_dtypes=sizes).values()) == {"cpu"}


def test_codes_are_not_sent_where_other_ranks_wait_for_values():
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    model = quantized(FORMAT)
    with pytest.raises(
        NotImplementedError, match=r"first\.weight is an MXTensor .* set cpu_ram_efficient_loading=False"
    ):
        fsdp2_load_full_state_dict(None, model, model.state_dict())


def test_a_state_of_codes_is_saved_without_safetensors(tmp_path):
    model, expected = quantized(FORMAT), quantized(FORMAT)(IDS)
    engine = accelerate.Accelerator(cpu=True)
    prepared = engine.prepare(model)
    with pytest.raises(TypeError, match="safetensors cannot save it"):
        engine.save_state(str(tmp_path / "default"))
    engine.save_state(str(tmp_path / "state"), safe_serialization=False)
    with torch.no_grad():
        model.second.weight.zero_()
    engine.load_state(str(tmp_path / "state"))
    assert isinstance(model.second.weight, mx.MXTensor) and torch.equal(prepared(IDS), expected)
