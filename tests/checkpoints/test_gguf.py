"""GGUF: what is written is read by the package ``gguf`` with the values of this package, and a header is handed on."""

import struct

import numpy as np
import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import gguf as layout
from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.compare import components_of

gguf = pytest.importorskip("gguf")


def by_gguf(path):
    """Name -> (type, float32 values), by the package's reader and its code."""
    out = {}
    for t in gguf.GGUFReader(path).tensors:
        with np.errstate(over="ignore"):
            values = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
        out[t.name] = t.tensor_type.name, values.reshape(tuple(int(n) for n in reversed(t.shape)))
    return out


def every_code(format, rows, block, scales):
    """A matrix with each byte of codes in blocks of each scale."""
    columns = block * len(scales)
    size = mx.get_format(format).data_shape((rows, columns))
    codes = torch.randint(0, 256, size, dtype=torch.uint8)
    codes[:, : min(256, size[1])] = torch.arange(min(256, size[1]), dtype=torch.uint8)
    if format == "mxint8":
        codes[codes == 128] = 0  # no code of this format
    scale = torch.tensor(scales, dtype=torch.uint8).expand(rows, -1).contiguous()
    return mx.MXTensor.from_components(codes, scale, format, dtype=torch.float32)


EVERY = {
    "MXFP4": every_code("mxfp4", 3, 32, range(255)),
    "NVFP4": every_code("nvfp4_single_level", 3, 16, [*range(127), 0]),
    "Q8_0": every_code("mxint8", 3, 32, range(127 + 6 - 24, 127 + 6 + 16)),
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_scale_and_code_is_exact(kind, tmp_path):
    t = EVERY[kind]
    mx.checkpoints.save({"blk.0.weight": t}, tmp_path / "x.gguf", layout="gguf")
    (name, values), = by_gguf(tmp_path / "x.gguf").values()  # fmt: skip
    assert name == kind and torch.equal(values, t.dequantize())
    loaded = mx.checkpoints.load(tmp_path / "x.gguf")["blk.0.weight"]
    if kind == "Q8_0":
        assert torch.equal(loaded, t.dequantize())
    else:
        assert loaded.format == t.format
        assert all(torch.equal(a, b) for a, b in zip(components_of(loaded), components_of(t), strict=True))


@pytest.mark.parametrize(("count", "refused"), [(0, False), (1, False), (3, True)])
def test_one_part_of_a_model_is_refused(count, refused, tmp_path):
    """llama.cpp splits large models into files; a part was converted as if it were all."""
    path = tmp_path / "m-00002-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", count)
    writer.add_tensor("blk.0.attn_q.weight", torch.randn(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not refused:
        assert mx.checkpoints.load(path)["blk.0.attn_q.weight"].shape == (64, 64)
        return
    with pytest.raises(ValueError, match="it is part 2 of 3 of a model; join them by `llama-gguf-split --merge`"):
        mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8")


@pytest.mark.parametrize("shape", [(1, 64), (33, 192), (3, 16, 128)])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4_single_level", "mxint8"])
def test_quantized_shapes(format, shape, tmp_path):
    t = mx.quantize(torch.randn(shape), format)
    mx.checkpoints.save({"w.weight": t}, tmp_path / "x.gguf", layout="gguf")
    assert torch.equal(by_gguf(tmp_path / "x.gguf")["w.weight"][1], t.dequantize())


PLAIN = {
    "f32": torch.randn(5), "f16": torch.randn(3, 7).half(), "bf16": torch.randn(2, 3, 4).bfloat16(),
    "f64": torch.randn(2, dtype=torch.float64), "i8": torch.arange(5, dtype=torch.int8), "i32": torch.arange(3).int(),
    "i64": torch.arange(4).reshape(2, 2), "scalar": torch.tensor(2.5), "columns": torch.randn(4, 6).t(),
}  # fmt: skip


def test_ordinary_tensors_keep_their_dtype(tmp_path):
    mx.checkpoints.save(PLAIN, tmp_path / "x.gguf", layout="gguf")
    loaded = mx.checkpoints.load(tmp_path / "x.gguf")
    for name, t in PLAIN.items():
        assert loaded[name].dtype == t.dtype and torch.equal(loaded[name], t if t.dim() else t.reshape(1)), name


def source(path):
    """A GGUF file as llama.cpp's converter makes it: architecture, numbers, a tokenizer, tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list(["<s>", "a", "ü"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_bool("general.some_flag", True)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    state = {"token_embd.weight": torch.randn(3, 64), "blk.0.attn_q.weight": torch.randn(64, 64),
             "blk.0.attn_norm.weight": torch.randn(64), "output.weight": torch.randn(3, 64)}  # fmt: skip
    for name, t in state.items():
        writer.add_tensor(name, (t.half() if t.dim() > 1 else t).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields(path):
    skipped = ("GGUF.", gguf.Keys.General.FILE_TYPE)
    return {name: (field.types, field.contents()) for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith(skipped)}  # fmt: skip


def test_a_file_of_llama_cpp_is_quantized_and_keeps_its_header(tmp_path):
    path = source(tmp_path / "a.gguf")
    report = mx.checkpoints.convert(path, tmp_path / "b.gguf", layout="gguf", format="mxfp4-weight-only")
    assert list(report.errors) == ["blk.0.attn_q.weight"] and fields(tmp_path / "b.gguf") == fields(path)
    kinds = {name: kind for name, (kind, _) in by_gguf(tmp_path / "b.gguf").items()}
    assert kinds == {"token_embd.weight": "F16", "blk.0.attn_q.weight": "MXFP4", "blk.0.attn_norm.weight": "F32",
                     "output.weight": "F16"}  # fmt: skip
    before, after = by_gguf(path), by_gguf(tmp_path / "b.gguf")
    assert torch.equal(before["output.weight"][1], after["output.weight"][1])
    quantized = mx.quantize(before["blk.0.attn_q.weight"][1], "mxfp4")
    assert torch.equal(after["blk.0.attn_q.weight"][1], quantized.dequantize())
    mx.checkpoints.convert(tmp_path / "b.gguf", tmp_path / "c.gguf", layout="gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_safetensors_become_gguf_and_come_back(tmp_path):
    state = {"a.weight": torch.randn(32, 64).bfloat16(), "norm.weight": torch.randn(64)}
    path = checkpoint(tmp_path / "a", state, model_type="llama")
    mx.checkpoints.convert(path, tmp_path / "b.gguf", layout="gguf", format="mxfp4-weight-only")
    mx.checkpoints.convert(tmp_path / "b.gguf", tmp_path / "c", layout="native")
    loaded = mx.checkpoints.load(tmp_path / "c")
    assert torch.equal(loaded["a.weight"].dequantize(), mx.quantize(state["a.weight"], "mxfp4").dequantize())
    assert torch.equal(loaded["norm.weight"], state["norm.weight"])
    assert gguf.GGUFReader(tmp_path / "b.gguf").fields["general.architecture"].contents() == "llama"


def test_a_model_names_its_architecture(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    model = mx.quantize_(LlamaForCausalLM(LlamaConfig(**sizes)), "mxfp4-weight-only")
    mx.checkpoints.save(model, tmp_path / "x.gguf", layout="gguf")
    assert gguf.GGUFReader(tmp_path / "x.gguf").fields["general.architecture"].contents() == "llama"
    for name, t in mx.checkpoints.load(tmp_path / "x.gguf").items():
        values = model.state_dict()[name]
        both = [v.dequantize(torch.float32) if isinstance(v, mx.MXTensor) else v for v in (t, values)]
        assert torch.equal(*both)


@pytest.mark.parametrize(
    ("state", "path", "message"),
    [
        ({"a.weight": mx.quantize(torch.randn(32, 32), "mxfp8")}, "x.gguf", r"a\.weight is mxfp8_e4m3, and the layout"),
        ({"a.weight": mx.quantize(torch.randn(32, 33), "mxfp4")}, "x.gguf", "whole blocks of 32 values"),
        ({"a.weight": mx.quantize(torch.randn(8, 32) * 1e9, "mxint8")}, "x.gguf", "scales beyond the range of float16"),
        ({"a": torch.ones(2).bool()}, "x.gguf", "a is bool of shape"),
        ({"a": torch.ones(1, 1, 1, 1, 1)}, "x.gguf", "up to four dimensions"),
        ({"a": torch.ones(2)}, "x", r"a name that ends in \.gguf"),
    ],
)
def test_what_gguf_cannot_hold(state, path, message, tmp_path):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        mx.checkpoints.save(state, tmp_path / path, layout="gguf")
    assert list(tmp_path.iterdir()) == []


def test_the_ending_decides(tmp_path):
    with pytest.raises(ValueError, match="pass layout='gguf'"):
        mx.checkpoints.save({"a": torch.ones(2)}, tmp_path / "x.gguf")


def test_a_scale_of_nvfp4_that_gguf_reads_as_another_is_refused(tmp_path):
    t = every_code("nvfp4_single_level", 2, 16, [127, 1, 1, 1])
    with pytest.raises(NotImplementedError, match="negative or NaN"):
        mx.checkpoints.save({"a.weight": t}, tmp_path / "x.gguf", layout="gguf")


def test_a_wrong_length_in_the_header_is_not_an_endless_loop(tmp_path):
    raw = bytearray(source(tmp_path / "a.gguf").read_bytes())
    key = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    kind, inner, length = struct.unpack_from("<IIQ", raw, key)
    assert (kind, inner, length) == (int(gguf.GGUFValueType.ARRAY), int(gguf.GGUFValueType.STRING), 3)
    for wrong in (4, 1000, layout.LARGEST_ARRAY + 1, 1 << 60, (1 << 64) - 1):
        struct.pack_into("<Q", raw, key + 8, wrong)
        (tmp_path / "b.gguf").write_bytes(raw)
        with pytest.raises(ValueError, match=r"b\.gguf cannot be read as GGUF"):
            mx.checkpoints.load(tmp_path / "b.gguf")


def test_tensors_that_share_bytes_are_refused(tmp_path):
    mx.checkpoints.save({"a": torch.arange(64.0), "b": torch.arange(64.0)}, tmp_path / "a.gguf", layout="gguf")
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    second = raw.index(struct.pack("<QI", 64, 0), raw.index(struct.pack("<QI", 64, 0)) + 1) + 12
    assert struct.unpack_from("<Q", raw, second) == (256,)
    struct.pack_into("<Q", raw, second, 224)
    (tmp_path / "b.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match="the bytes of a and b overlap"):
        mx.checkpoints.load(tmp_path / "b.gguf")
