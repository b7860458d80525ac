"""Stacks of matrices in NVFP4: each matrix has its own global scale, as if it were quantized alone."""

import copy
import io
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.kernels.gemm.select import grouped_gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import decode, encode
from tests.helpers.compare import relative_error

EXPERTS, ROWS, COLUMNS = 7, 48, 64
SIZES = 10.0 ** torch.linspace(-3, 3, EXPERTS).view(-1, 1, 1)
FORMATS = ["nvfp4", "nvfp4[16x16]", "nvfp4[1x32]"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(dtype=torch.float32, columns=COLUMNS):
    return (torch.randn(EXPERTS, ROWS, columns) * SIZES).to(dtype)


def stack(dtype=torch.float32, format="nvfp4", **options):
    return mx.quantize(values(dtype), format, **options)


def same_codes(a, b):
    return all(
        torch.equal(x.view(torch.uint8) if x.itemsize == 1 else x, y.view(torch.uint8) if y.itemsize == 1 else y)
        for mine, other in zip(a.operands, b.operands, strict=True)
        for x, y in zip(mine.tensors, other.tensors, strict=True)
    )


# ---------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("columns", [COLUMNS, 40])
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_each_matrix_is_that_of_the_matrix_alone(format, dtype, orientation, columns):
    w = values(dtype, columns)
    made = mx.quantize(w, format, orientation=orientation)
    assert all(o.global_scale.shape == (EXPERTS, 1, 1) for o in made.operands)
    whole = made.dequantize()
    for e in range(EXPERTS):
        alone = mx.quantize(w[e], format, orientation=orientation)
        assert same_codes(made[e], alone)
        assert whole[e].equal(alone.dequantize()) and made[e].dequantize().equal(alone.dequantize())
        assert relative_error(whole[e].double(), w[e].double()) < 0.2
    with mx.strict():
        assert same_codes(made, torch.stack([*made])) and same_codes(made, torch.cat([made[:2], made[2:]]))


@pytest.mark.parametrize("four", [None, "mae", "mse"])
@pytest.mark.parametrize("format", FORMATS[:2])
def test_kernels_equal_the_definition(format, four):
    """Also of matrices without values that are not zero, with NaN, and in two leading dimensions."""
    w = values().view(1, EXPERTS, ROWS, COLUMNS).repeat(2, 1, 1, 1)
    w[0, 1], w[1, 2, 3, 4] = 0, float("nan")
    cast = Cast.of(format, four_over_six=four)
    expected = encode(w, cast)
    made = mx.quantize(w, cast.format) if four is None else None
    for operand in (expected, *(() if made is None else (made.rowwise,))):
        assert operand.global_scale.shape == (2, EXPERTS, 1, 1)
        for i in range(2):
            for e in range(EXPERTS):
                one = encode(w[i, e], cast)
                assert operand.data[i, e].view(torch.uint8).equal(one.data.view(torch.uint8))
                assert operand.scale[i, e].equal(one.scale)
                assert (
                    operand.global_scale[i, e]
                    .flatten()
                    .view(torch.int32)
                    .equal(one.global_scale.view(1).view(torch.int32))
                )
    found = mx.MXTensor(expected, None, mx.LinearRecipe.inference(cast), torch.float32).dequantize(torch.bfloat16)
    torch.testing.assert_close(found, decode(expected, torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_compiled_casts_and_products_are_the_eager_ones():
    w, x = values(torch.bfloat16), torch.randn(EXPERTS, 5, COLUMNS, dtype=torch.bfloat16)
    torch.compiler.reset()

    def step(w, x):
        made = mx.quantize(w, "nvfp4")
        return made.dequantize(), torch.bmm(x, made.transpose(1, 2))

    got, want = torch.compile(step, fullgraph=True, backend="aot_eager")(w, x), step(w, x)
    assert got[0].equal(want[0])
    for e in range(EXPERTS):
        assert relative_error(got[1][e].double(), want[1][e].double()) < 4e-3


# ---------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("activation", [None, "nvfp4", "mxfp8"])
def test_linear_layers_by_each_expert(activation, dtype):
    w, x = values(dtype), torch.randn(9, COLUMNS).to(dtype)
    recipe = mx.LinearRecipe.inference("nvfp4", activation)
    made = mx.MXTensor(mx.quantize(w, "nvfp4").rowwise, None, recipe, dtype)
    for e in range(EXPERTS):
        alone = mx.MXTensor(mx.quantize(w[e], "nvfp4").rowwise, None, recipe, dtype)
        with torch.no_grad(), mx.strict():
            for _ in range(2):
                assert F.linear(x, made[e]).equal(F.linear(x, alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_multiply_by_the_scale_of_the_group(dtype):
    made, ends = stack(dtype), torch.tensor([3, 3, 8, 12, 17, 19, 20], dtype=torch.int32)
    x = torch.randn(24, COLUMNS).to(dtype) / 64
    exact, starts = made.dequantize(torch.float64), [0, *ends.tolist()]
    bound = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    rows = Unquantized(x, Cast.of("nvfp4"))
    rounded = mx.quantize(x, "nvfp4").dequantize(torch.float64)
    with torch.no_grad(), mx.strict():
        results = [(grouped_gemm("experts", rows, made.rowwise, ends, GemmArgs(dtype)), rounded)]
        results.append((grouped_gemm("experts", x, made.rowwise, ends, GemmArgs(dtype)), x.double()))
        if dtype is torch.bfloat16:
            results += [(F.grouped_mm(x, made.transpose(1, 2), offs=ends), x.double()) for _ in range(2)]
    for out, left in results:
        assert out.dtype is dtype and not out[20:].any()
        for e, (start, end) in enumerate(pairwise(starts)):
            if start < end:
                assert relative_error(out[start:end].double(), left[start:end] @ exact[e].T) < bound


@pytest.mark.parametrize("kernel", ["emulated", "cpu_codes", "dequant"])
def test_kernels_of_groups(kernel):
    made, ends = stack(torch.bfloat16), torch.tensor([2, 4, 6, 8, 10, 12, 14], dtype=torch.int32)
    x = torch.randn(14, COLUMNS, dtype=torch.bfloat16)
    with torch.no_grad(), mx.kernels(kernel):
        try:
            out = F.grouped_mm(x, made.transpose(1, 2), offs=ends)
        except NotImplementedError as error:
            assert kernel == "dequant" and "the result is float32" in str(error)
            return
    exact = made.dequantize(torch.float64)
    for e in range(EXPERTS):
        assert relative_error(out[2 * e : 2 * e + 2].double(), x[2 * e : 2 * e + 2].double() @ exact[e].T) < 4e-3


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_batched_products(dtype, rows):
    made, x = stack(dtype), torch.randn(EXPERTS, rows, COLUMNS).to(dtype)
    bias = torch.randn(EXPERTS, rows, ROWS).to(dtype)
    exact, bound = made.dequantize(torch.float64), 1e-6 if dtype is torch.float32 else 4e-3
    with torch.no_grad(), mx.strict():
        right, left = torch.bmm(x, made.transpose(1, 2)), torch.bmm(made, x.transpose(1, 2))
        added = torch.baddbmm(bias, x, made.transpose(1, 2))
        picked = torch.bmm(x, made[torch.arange(EXPERTS)].transpose(1, 2))
    for e in range(EXPERTS):
        want = x[e].double() @ exact[e].T
        assert all(relative_error(out[e].double(), want) < bound for out in (right, left.transpose(1, 2), picked))
        assert relative_error(added[e].double(), want + bias[e].double()) < bound


# ---------------------------------------------------------------------------------------------- views and writes

VIEWS = {
    "one": lambda w: w[3],
    "some": lambda w: w[1:6:2],
    "rows of all": lambda w: w[:, 16:40],
    "transposed": lambda w: w.transpose(1, 2),
    "one, transposed": lambda w: w[2].t(),
    "reversed": lambda w: w.flip(0),
    "rolled": lambda w: w.roll(2, 0),
    "rows reversed": lambda w: w.flip(1),
    "by number": lambda w: w[torch.tensor([5, 0, 0])],
    "index_select": lambda w: w.index_select(0, torch.tensor([6, 1])),
    "a dimension more": lambda w: w.unsqueeze(0).expand(3, -1, -1, -1),
    "two dimensions": lambda w: w[:6].unflatten(0, (2, 3)),
    "columns in another shape": lambda w: w.view(EXPERTS, ROWS // 2, 2 * COLUMNS),
    "one alone": lambda w: w[4:5].view(ROWS, COLUMNS),
    "repeated": lambda w: w.repeat(2, 1, 1),
    "padded": lambda w: F.pad(w, (0, 0, 0, 16, 1, 2)),
    "unbound": lambda w: w.unbind(0)[6],
    "joined rows": lambda w: torch.cat([w[:, :16], w[:, 16:]], 1),
    "clone": lambda w: w.clone(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_keep_the_scales_of_their_matrices(name):
    made = stack()
    with mx.strict():
        view = VIEWS[name](made)
    assert isinstance(view, mx.MXTensor) and view.dequantize().equal(VIEWS[name](made.dequantize()))


@pytest.mark.parametrize("view", [lambda w: w.transpose(0, 1), lambda w: w[:, 3], lambda w: w.flatten(0, 1)])
def test_rows_of_several_matrices_are_values(view):
    made = stack()
    assert view(made).dequantize().equal(view(made.dequantize())) if hasattr(view(made), "dequantize") else True
    assert torch.equal(view(made) + 0, view(made.dequantize()))


def test_a_matrix_as_a_stack_has_one_scale():
    made = mx.quantize(values()[3], "nvfp4")
    shaped = made.view(3, 16, COLUMNS)
    assert shaped.rowwise.global_scale.shape == (3, 1, 1) and shaped.dequantize().equal(
        made.dequantize().view(3, 16, -1)
    )
    assert same_codes(shaped.view(ROWS, COLUMNS), made)
    shaped[1] = torch.ones(16, COLUMNS)
    assert (made.dequantize()[16:32] - 1).abs().max() < 0.2


@pytest.mark.parametrize("orientation", ["rowwise", "both"])
def test_a_write_to_one_expert_leaves_the_others(orientation):
    made = stack(orientation=orientation)
    before, new = copy.deepcopy(made), torch.randn(ROWS, COLUMNS) * 1e-5
    made[5] = new
    for e in range(EXPERTS):
        assert same_codes(made[e], mx.quantize(new, "nvfp4", orientation=orientation) if e == 5 else before[e])
    made.copy_(before)
    assert same_codes(made, before)
    made.copy_(values() * 3)
    made.mul_(0.5)
    assert all(relative_error(made.dequantize()[e], made.dequantize()[e]) == 0 for e in range(EXPERTS))


# ---------------------------------------------------------------------------------------------- files


def test_saved_and_loaded_is_the_same(tmp_path):
    made, file = stack(torch.bfloat16), io.BytesIO()
    torch.save({"w": made, "one": made[2], "view": made[1:3]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert (
        same_codes(loaded["w"], made) and same_codes(loaded["one"], made[2]) and same_codes(loaded["view"], made[1:3])
    )
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": made}
    mx.checkpoints.save(tensors, tmp_path / "native")
    assert same_codes(mx.checkpoints.load(tmp_path / "native")["model.layers.0.mlp.experts.gate_up_proj"], made)


def test_torchaos_layout_has_a_scale_for_each_expert(tmp_path):
    name, made = "mlp.experts.gate_up_proj", stack(torch.bfloat16)
    mx.checkpoints.save({name: made}, tmp_path / "ao", layout="torchao")
    found = mx.checkpoints.load(tmp_path / "ao")[name]
    for e in range(EXPERTS):
        assert relative_error(found[e].dequantize().double(), made[e].dequantize().double()) < 1e-3
    mx.checkpoints.save({name: found}, tmp_path / "again", layout="torchao")
    assert same_codes(mx.checkpoints.load(tmp_path / "again")[name], found)


def test_one_scale_from_elsewhere_serves_all_matrices():
    operand = stack().rowwise
    made = mx.MXTensor.from_components(operand.data, operand.scale, "nvfp4", global_scale=torch.tensor(0.5))
    assert made.rowwise.global_scale.shape == (EXPERTS, 1, 1) and (made.rowwise.global_scale == 0.5).all()
    each = mx.MXTensor.from_components(
        operand.data, operand.scale, "nvfp4", global_scale=torch.arange(1.0, EXPERTS + 1)
    )
    assert each[2].rowwise.global_scale == 3
    with pytest.raises(TypeError, match=r"must be one float32, or 7 for the matrices of the stack, got float32 \(3,\)"):
        mx.MXTensor.from_components(operand.data, operand.scale, "nvfp4", global_scale=torch.ones(3))


def test_quantize_gives_experts_their_scales():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16, "num_local_experts": 4}
    m = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() == 3:
                p.mul_(10.0 ** torch.linspace(-3, 0, 4).view(-1, 1, 1))
    start = copy.deepcopy(m)
    mx.quantize_(m, "nvfp4-weight-only")
    stacks = [(name, p) for name, p in m.named_parameters() if p.dim() == 3]
    assert len(stacks) == 2
    for name, p in stacks:
        plain = start.get_parameter(name).detach()
        assert all(same_codes(p[e], mx.quantize(plain[e], "nvfp4")) for e in range(4))
    with torch.no_grad():
        assert m(torch.arange(16).view(2, 8)).logits.isfinite().all()
