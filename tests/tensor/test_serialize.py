"""State: copies, files, state dicts and conversions of modules preserve the bytes, or quantize again and report it."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.recipe.linear_recipe import LinearRecipe, recipe_from_row, recipe_to_row
from tests.helpers.compare import components_of, relative_error, same_bytes

FORMATS = [*mx.FORMATS, "mxfp8[32x32]", "mxfp6_e3m2[1x16]"]


def model(config="mxfp8", bias=True):
    out = nn.Sequential(nn.Linear(96, 64, bias=bias), nn.ReLU(), nn.Linear(64, 40))
    mx.quantize_(out, config)
    return out


def saved(value, weights_only=True):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def assert_same(got, expected):
    """Assert that two tensors are the same in every respect but identity."""
    assert type(got) is type(expected) is mx.MXTensor
    assert (repr(got), got.stride(), got.recipe) == (repr(expected), expected.stride(), expected.recipe)
    assert isinstance(got, nn.Parameter) == isinstance(expected, nn.Parameter)
    assert same_bytes(got, expected)


# ---------------------------------------------------------------------------------------------- copies and files


@pytest.mark.parametrize(
    "way", [saved, lambda w: pickle.loads(pickle.dumps(w)), copy.deepcopy], ids=["file", "pickle", "deepcopy"]
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_tensor_survives(format, way):
    for orientation in ("rowwise", "columnwise", "both"):
        w = mx.quantize(torch.randn(3, 40, 100, dtype=torch.bfloat16), format, scaling="floor", orientation=orientation)
        for source in (w, w.mT, w[1]):
            got = way(source)
            assert_same(got, source)
            assert not {t.data_ptr() for t in components_of(got)} & {t.data_ptr() for t in components_of(source)}


@pytest.mark.parametrize(
    "way", [saved, lambda w: pickle.loads(pickle.dumps(w)), copy.deepcopy], ids=["file", "pickle", "deepcopy"]
)
def test_a_parameter_stays_a_parameter_with_its_recipe(way):
    for requires_grad in (False, True):
        w = model(mx.LinearRecipe.inference(*[mx.Cast.of("mxfp8", "even")] * 2, "emulated"))[0].weight
        w.requires_grad_(requires_grad)
        assert_same(way(w), w)


def test_the_whole_cast_is_saved_with_the_tensor():
    w = mx.quantize(torch.randn(8, 64), "mxfp4", scaling="ceil", rounding="stochastic")
    for got in (saved(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert got.recipe == w.recipe and got.recipe.stored.rounding is mx.Rounding.STOCHASTIC
        assert same_bytes(got, w)


def test_a_seed_is_saved_in_the_row_of_a_recipe_and_rows_of_older_files_have_none():
    cast = mx.Cast.of("mxfp4", "floor", "stochastic", 2**40 + 1)
    for recipe in (
        LinearRecipe.inference(cast, mx.Cast.of("mxfp8")),
        LinearRecipe.inference(mx.Cast.of("mxfp8"), cast),
    ):
        row = recipe_to_row(recipe)
        assert all(value is None or type(value) is str for value in row.values())
        assert recipe_from_row(row) == recipe
        older = {name: value for name, value in row.items() if not name.endswith("_seed")}
        assert {recipe_from_row(older).stored.seed, recipe_from_row(older).activation.seed} == {None}
    w = mx.quantize(torch.randn(8, 64), cast)
    for got in (saved(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert got.recipe.stored.seed == 2**40 + 1


def test_sharing_survives_within_one_copy_and_one_file():
    layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    layers[1].weight = layers[0].weight
    mx.quantize_(layers, "mxfp8")
    copied = copy.deepcopy(layers)
    assert copied[0].weight is copied[1].weight and copied[0].weight is not layers[0].weight
    w = layers[0].weight
    first, second = saved([w, w])
    assert first is second


def test_a_state_dict_is_loaded_by_weights_only():
    source = model("nvfp4")
    state = saved(source.state_dict())
    assert [type(v) for v in state.values()] == [mx.MXTensor, torch.Tensor, mx.MXTensor, torch.Tensor]
    target = model("nvfp4")
    assert not same_bytes(target[0].weight, source[0].weight)
    target.load_state_dict(state)
    x = torch.randn(5, 96)
    assert same_bytes(target[0].weight, source[0].weight) and torch.equal(target(x), source(x))


def test_a_whole_model_is_a_file():
    source, x = model(), torch.randn(5, 96)
    assert torch.equal(saved(source, weights_only=False)(x), source(x))


def test_a_file_contains_the_quantized_bytes_only():
    buffer = io.BytesIO()
    torch.save(mx.quantize(torch.randn(512, 1024), "mxfp4"), buffer)
    assert buffer.tell() < 512 * 1024 * 4.25 / 8 * 1.02 + 4096


def test_memory_can_be_shared():
    source = model()
    w = source[0].weight
    assert not w.is_shared()
    before = [t.clone() for t in components_of(w)]
    source.share_memory()
    assert source[0].weight.is_shared() and isinstance(source[0].weight, nn.Parameter)
    assert all(t.is_shared() for t in components_of(source[0].weight))
    assert all(torch.equal(a, b) for a, b in zip(components_of(source[0].weight), before, strict=True))


# ---------------------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("format", FORMATS)
def test_plain_values_loaded_into_a_quantized_model_are_quantized(format):
    plain = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 40))
    target = model(f"{format}-weight-only")
    parameter, data = target[0].weight, target[0].weight.rowwise.data.data_ptr()
    target.load_state_dict(plain.state_dict())
    assert target[0].weight is parameter and parameter.rowwise.data.data_ptr() == data  # in place
    assert same_bytes(parameter, mx.quantize(plain[0].weight, format))
    assert torch.equal(target[0].bias, plain[0].bias)


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_values_loaded_into_a_plain_model_are_dequantized(format):
    source, target = model(format), nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 40))
    target.load_state_dict(source.state_dict())
    assert type(target[0].weight) is nn.Parameter
    assert torch.equal(target[0].weight, source[0].weight.dequantize())


def test_values_of_another_format_are_an_error_unless_they_are_dequantized():
    source, target = model("mxfp8"), model("mxfp4")
    before = components_of(target[0].weight)[0].clone()
    with pytest.raises(RuntimeError, match=r"0\.weight: the checkpoint holds mxfp8_e4m3, the model mxfp4_e2m1"):
        target.load_state_dict(source.state_dict())
    assert torch.equal(components_of(target[0].weight)[0], before)
    values = {k: v.dequantize() if isinstance(v, mx.MXTensor) else v for k, v in source.state_dict().items()}
    target.load_state_dict(values)
    assert same_bytes(target[0].weight, mx.quantize(source[0].weight.dequantize(), "mxfp4"))


def test_a_meta_model_is_filled_from_a_state_dict():
    source, x = model("mxfp6"), torch.randn(5, 96)
    with torch.device("meta"):
        target = model("mxfp6")
    assert target[0].weight.is_meta
    target.to_empty(device="cpu")
    assert isinstance(target[0].weight, mx.MXTensor) and isinstance(target[0].weight, nn.Parameter)
    target.load_state_dict(source.state_dict())
    assert_same(target[0].weight, source[0].weight)
    assert torch.equal(target(x), source(x))


def test_assigning_a_state_dict_of_quantized_values():
    source = model("mxfp8")
    with torch.device("meta"):
        target = model("mxfp8")
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same(target[0].weight, source[0].weight)


# ---------------------------------------------------------------------------------------------- module conversions


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
    ],
)
def test_another_dtype_of_a_module_changes_the_outer_tensor_and_no_code(convert, dtype):
    module = model("nvfp4")
    before = copy.deepcopy(module[0].weight)
    assert convert(module) is module
    w = module[0].weight
    assert isinstance(w, nn.Parameter) and isinstance(w, mx.MXTensor) and not w.requires_grad
    assert w.dtype is dtype and same_bytes(w, before) and w.recipe == before.recipe
    assert module(torch.randn(5, 96).to(dtype)).dtype is dtype
    module.float()
    assert_same(module[0].weight, before)


def test_a_shared_weight_stays_shared_in_another_dtype():
    twins = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    twins[1].weight = twins[0].weight
    mx.quantize_(twins, "mxfp8").bfloat16()
    assert twins[0].weight is twins[1].weight and twins[1].weight.dtype is torch.bfloat16


def test_moving_to_the_same_device_changes_nothing():
    module = model()
    w = module[0].weight
    module.to("cpu"), module.cpu(), module.float()
    assert_same(module[0].weight, w)
    assert w.with_dtype(torch.float32) is w and w.cpu() is w and w.to("cpu") is w


def test_another_device_moves_codes_and_scales():
    w = mx.quantize(torch.randn(8, 64), "nvfp4", orientation="both").to("meta")
    assert w.device.type == "meta" and all(t.is_meta for t in components_of(w))


@pytest.mark.gpu
def test_a_module_on_another_device_and_back():
    module, x = model("nvfp4"), torch.randn(5, 96)
    before = copy.deepcopy(module[0].weight)
    module.cuda()
    assert module[0].weight.device.type == "cuda" and all(t.is_cuda for t in components_of(module[0].weight))
    with torch.no_grad():  # torch does not move a parameter that a live graph refers to
        assert relative_error(module(x.cuda()).cpu(), module.cpu()(x)) < 1e-2
    assert_same(module[0].weight, before)


# ---------------------------------------------------------------------------------------------- copy_ and *_like


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", FORMATS)
def test_copy_quantizes_into_the_existing_buffers(format, orientation):
    w = mx.quantize(torch.randn(40, 96), format, orientation=orientation)
    view, pointers, x = w.t(), [t.data_ptr() for t in components_of(w)], torch.randn(40, 96)
    for values in (x, x.bfloat16(), x[:1]):
        assert w.copy_(values) is w
        expected = mx.quantize(values.float().expand(40, 96), format, orientation=orientation)
        assert same_bytes(w, expected) and [t.data_ptr() for t in components_of(w)] == pointers
        assert torch.equal(view.t().dequantize(), w.dequantize())  # a view sees the write


def test_copy_between_quantized_tensors_copies_the_bytes_or_quantizes_again():
    x = torch.randn(40, 96)
    same = mx.quantize(torch.randn(40, 96), "nvfp4")
    same.copy_(mx.quantize(x, "nvfp4"))
    assert same_bytes(same, mx.quantize(x, "nvfp4"))
    for other in (mx.quantize(x, "mxfp8"), mx.quantize(x, "nvfp4", orientation="columnwise")):
        target = mx.quantize(torch.randn(40, 96), "nvfp4")
        target.copy_(other)
        assert same_bytes(target, mx.quantize(other.dequantize(), "nvfp4"))


def test_copy_into_a_plain_tensor_dequantizes():
    w = mx.quantize(torch.randn(40, 96), "mxfp4")
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.empty(40, 96, dtype=dtype)
        assert plain.copy_(w) is plain and torch.equal(plain, w.dequantize(dtype))


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like])
def test_optimizer_state_of_a_parameter_is_plain(like):
    for w in (mx.quantize(torch.randn(8, 64), "mxfp4"), mx.quantize(torch.randn(64, 8).bfloat16(), "mxfp8").t()):
        got, dense = like(w), like(w.dequantize())
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape, got.stride()) == (dense.dtype, dense.shape, dense.stride())
        if like in (torch.zeros_like, torch.ones_like):
            assert torch.equal(got, dense)
        assert like(w, dtype=torch.float64).dtype is torch.float64


def test_empty_like_on_a_named_device_is_an_mxtensor_in_new_memory():
    w = mx.quantize(torch.randn(8, 64), "nvfp4", orientation="both")
    empty = torch.empty_like(w, device="cpu")
    assert repr(empty) == repr(w) and not {t.data_ptr() for t in components_of(w)} & {
        t.data_ptr() for t in components_of(empty)
    }
    assert torch.empty_like(w, device="meta", dtype=torch.half).is_meta and torch.empty_like(w).dtype is w.dtype
    assert type(torch.empty_like(w)) is torch.Tensor  # a buffer that composites compute in
    assert torch.equal(empty.copy_(w).dequantize(), w.dequantize())


def test_equal_compares_values():
    x = torch.randn(8, 64)
    w = mx.quantize(x, "mxfp8")
    assert torch.equal(w, w.clone()) and torch.equal(w, w.dequantize()) and torch.equal(w.dequantize(), w)
    assert torch.equal(w, mx.quantize(w, "mxfp8", orientation="both"))  # the same values in two copies
    assert not torch.equal(w, x) and not torch.equal(w, w[:4]) and not torch.equal(w, mx.quantize(-x, "mxfp8"))


def test_a_tensor_can_be_collected():
    w = mx.quantize(torch.randn(8, 64), "mxfp8")
    data = weakref.ref(w.rowwise.data)
    saved = w.t()
    del w
    assert data() is not None and saved.t().dequantize().shape == (8, 64)
    del saved
    assert data() is None


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_safetensors_is_told_how_to_save(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = model()
    with pytest.raises(
        TypeError, match=r"\(64, 96\) .* in mxfp8_e4m3 has .* no storage .*save_pretrained.* torch\.save"
    ):
        safetensors.save_file(layer.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=r"torch\.save"):
        safetensors.save_model(layer, str(tmp_path / "model.safetensors"))
    weight, file = layer[0].weight, tmp_path / "components.safetensors"
    operand = weight.rowwise
    safetensors.save_file({"data": operand.data.view(torch.uint8), "scale": operand.scale}, file)
    got = mx.MXTensor.from_components(**safetensors.load_file(file), format=weight.format, dtype=weight.dtype)
    assert torch.equal(got.dequantize(), weight.dequantize())
