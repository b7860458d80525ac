"""``include_head``: heads, and the embeddings that share their weights, are quantized once; what stays is said."""

import copy
import io

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.convert.weights import heads
from tests.helpers.compare import same_bytes

FORMATS = ("mxfp8", "mxfp4-weight-only", "nvfp4-weight-only", "mxfp6_e2m3-weight-only", "float8_e4m3_row")


class Words(nn.Module):
    """Embedding, one layer, and a head of any name; ``first`` is the module that is registered first."""

    def __init__(self, tied=True, head="lm_head", first="words", dtype=torch.float32):
        super().__init__()
        modules = {"words": nn.Embedding(300, 64), "layer": nn.Linear(64, 64), head: nn.Linear(64, 300, bias=False)}
        for name in sorted(modules, key=lambda name: name != first):
            self.add_module(name, modules[name])
        self.head_name = head
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)

    @property
    def head(self):
        return self.get_submodule(self.head_name)

    def forward(self, ids):
        return self.head(self.layer(self.words(ids)))


IDS = torch.tensor([[3, 299, 0, 3]])


@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("head", ["lm_head", "decoder"])
@pytest.mark.parametrize("first", ["words", "lm_head", "decoder"])
def test_a_tied_weight_is_quantized_once_for_both_uses(config, head, first):
    model = Words(head=head, first=first)
    values = model.words.weight.detach().clone()
    mx.quantize_(model, config, include_head=True)
    weight = model.head.weight
    assert weight is model.words.weight and isinstance(weight, mx.MXTensor) and not weight.requires_grad
    wanted = mx.quantize(values, config.removesuffix("-weight-only"))
    assert same_bytes(weight, wanted)
    assert torch.equal(model.words(IDS), wanted.dequantize()[IDS])
    # the product casts its activation as every other layer does, whichever module comes first
    assert weight.recipe.activation == model.layer.weight.recipe.activation
    x = torch.randn(3, 64)
    assert torch.equal(model.head(x), nn.functional.linear(x, weight))


@pytest.mark.parametrize("config", FORMATS)
def test_of_an_untied_model_the_head_is_quantized_and_the_embedding_is_not(config):
    model = mx.quantize_(Words(tied=False), config, include_head=True)
    assert isinstance(model.head.weight, mx.MXTensor) and not isinstance(model.words.weight, mx.MXTensor)
    model = mx.quantize_(Words(tied=False), config)
    assert not isinstance(model.head.weight, mx.MXTensor)


def test_the_head_can_be_quantized_after_the_layers():
    model = mx.quantize_(Words(), "mxfp4-weight-only")
    layer = model.layer.weight
    mx.quantize_(model, "mxfp8-weight-only", include_head=True)
    assert model.layer.weight is layer and model.head.weight is model.words.weight
    assert model.head.weight.format.name == "mxfp8_e4m3"


@pytest.mark.parametrize("accepts", [nn.Linear, nn.Embedding])
def test_a_shared_weight_stays_shared_if_a_filter_accepts_one_of_its_modules(accepts):
    model = mx.quantize_(Words(), "mxfp8-weight-only", lambda module, name: isinstance(module, accepts))
    assert model.head.weight is model.words.weight and isinstance(model.head.weight, mx.MXTensor)
    assert model(IDS).shape == (1, 4, 300)


def test_for_training_the_head_learns_and_stays_shared():
    model = mx.quantize_(Words(), mx.recipe.MXFP8BlockScaling(), include_head=True)
    assert model.head.weight is model.words.weight
    with mx.explain() as log:
        model(IDS).square().mean().backward()
    # three quantized products in each of two layers
    products = [e for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")]
    assert len(products) == 6
    assert model.words.weight.grad is not None and model.words.weight.grad.abs().sum() > 0


class Codebooks(nn.Module):
    """A part of a model, with a head for each codebook, as transformers' models name them."""

    def __init__(self, one):
        super().__init__()
        self.words, self.layer = nn.Embedding(300, 64), nn.Linear(64, 64)
        self.output = nn.Linear(64, 300) if one else nn.ModuleList(nn.Linear(64, 300) for _ in range(2))

    def get_output_embeddings(self):
        return self.output


class Without(nn.Module):
    def get_output_embeddings(self):
        raise NotImplementedError


@pytest.mark.parametrize("one", [True, False])
def test_output_embeddings_of_a_part_are_heads(one):
    model = nn.Sequential(nn.Linear(64, 64), Codebooks(one), Without())
    default = mx.quantize_(copy.deepcopy(model), "mxfp8")
    assert isinstance(default[1].layer.weight, mx.MXTensor)
    assert not any(isinstance(p, mx.MXTensor) for p in default[1].output.parameters())
    assert mx.model_size(default).groups[1].use == "head"
    every = mx.quantize_(model, "mxfp8", include_head=True)
    assert all(isinstance(p, mx.MXTensor) for p in every[1].output.parameters() if p.dim() == 2)
    assert not isinstance(every[1].words.weight, mx.MXTensor)


class Declared(nn.Module):
    """As FSMT of transformers: the output embeddings are the embedding, and the class says what may be tied to it."""

    _tied_weights_keys = {  # noqa: RUF012
        "decoder.output_projection.weight": "decoder.words.weight", "side.weight": "decoder.layer.weight",
        r"decoder\.absent(?!0).weight": "decoder.words.weight",
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.decoder, self.side = nn.Module(), nn.Linear(64, 64)
        self.decoder.words, self.decoder.layer = nn.Embedding(300, 64), nn.Linear(64, 64)
        self.decoder.output_projection = nn.Linear(64, 300, bias=False)

    def get_output_embeddings(self):
        return self.decoder.words


@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_that_its_class_may_tie_to_an_embedding_is_a_head(inside):
    model = nn.Sequential(nn.Linear(64, 64), Declared()) if inside else Declared()
    prefix = "1." if inside else ""
    assert [*heads(model)] == [f"{prefix}decoder.output_projection"]
    default = mx.quantize_(copy.deepcopy(model), "mxfp8")
    part = default[1] if inside else default
    assert not isinstance(part.decoder.output_projection.weight, mx.MXTensor)
    assert isinstance(part.decoder.layer.weight, mx.MXTensor) and isinstance(part.side.weight, mx.MXTensor)
    part = mx.quantize_(model, "mxfp8", include_head=True)
    part = part[1] if inside else part
    assert isinstance(part.decoder.output_projection.weight, mx.MXTensor)
    assert not isinstance(part.decoder.words.weight, mx.MXTensor)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_fsmt(tied):
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    width = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    sizes = {"src_vocab_size": 96, "tgt_vocab_size": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = FSMTConfig(langs=["en", "de"], tie_word_embeddings=tied, **width, **sizes)
    model = FSMTForConditionalGeneration(config)
    head, words = model.model.decoder.output_projection, model.model.decoder.embed_tokens
    mx.quantize_(model, "mxfp8-weight-only")
    assert not isinstance(head.weight, mx.MXTensor) and isinstance(
        model.model.decoder.layers[0].fc1.weight, mx.MXTensor
    )
    mx.quantize_(model, "mxfp8-weight-only", include_head=True)
    assert isinstance(head.weight, mx.MXTensor) and isinstance(words.weight, mx.MXTensor) is tied


def test_a_model_without_a_head_is_named():
    with pytest.warns(UserWarning, match="include_head=True found no head in Sequential: it has no lm_head"):
        mx.quantize_(nn.Sequential(nn.Linear(64, 64)), "mxfp8", include_head=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"filter_fn": lambda module, name: True, "include_head": True}, ValueError, "filter_fn replaces it"),
        ({"include_head": "lm_head"}, TypeError, "include_head"),
    ],
)
def test_mistakes_change_nothing(options, error, message):
    model = Words()
    with pytest.raises(error, match=message):
        mx.quantize_(model, "mxfp8", **options)
    assert not any(isinstance(p, mx.MXTensor) for p in model.parameters())


@pytest.mark.parametrize("config", FORMATS)
def test_the_tie_survives_copies_and_files(config):
    model = mx.quantize_(Words(dtype=torch.bfloat16), config, include_head=True)
    wanted = model(IDS)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.words.weight and torch.equal(twin(IDS), wanted)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for assign in (False, True):
        file.seek(0)
        other = mx.quantize_(Words(dtype=torch.bfloat16), config, include_head=True)
        other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert torch.equal(other(IDS), wanted)
        codes = [other.head.weight.rowwise.data, other.words.weight.rowwise.data]
        assert codes[0].data_ptr() == codes[1].data_ptr()  # assign=True makes two parameters of one memory, as in torch
    plain = Words(dtype=torch.bfloat16)
    other.load_state_dict(plain.state_dict())
    assert same_bytes(other.words.weight, mx.quantize(plain.words.weight, config.removesuffix("-weight-only")))


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", FORMATS)
def test_both_uses_compile(config):
    model = mx.quantize_(Words(), config, include_head=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(IDS), model(IDS), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [*mx.FORMATS, "mxfp8[16x16]"])
def test_a_lookup_decodes_only_its_rows(format, dtype):
    weight = mx.quantize(torch.randn(300, 96, dtype=dtype) * torch.linspace(0.1, 9, 300, dtype=dtype)[:, None], format)
    with mx.explain() as log:
        rows = nn.functional.embedding(IDS, weight)
    assert torch.equal(rows, weight.dequantize()[IDS]) and rows.dtype is dtype
    assert [entry.spec.shapes[0][0] for entry in log.entries] == [IDS.numel()]


def test_an_index_that_is_not_a_row_raises():
    weight = mx.quantize(torch.randn(40, 64), "float8_e4m3_128x128")
    for index in (40, -1):
        with pytest.raises(IndexError):
            nn.functional.embedding(torch.tensor([index]), weight)


# ---------------------------------------------------------------------------------------------- what stays is said


def test_what_stays_is_named_with_the_bits_of_the_whole_model(logged):
    model = Words(dtype=torch.bfloat16)
    mx.quantize_(model, "mxfp4-weight-only")
    (record,) = logged.records
    size = mx.model_size(model)
    assert record.getMessage() == (
        "quantize_: 4,096 of 23,360 values (18%) have 4.25 bits now; 19,200 (82%) of words.weight = lm_head.weight "
        f"(head and embedding) stay bfloat16: {size.bits:.2f} bits over the whole model; "
        "include_head=True quantizes heads"
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Words, {"include_head": True}),
        (Words, {"filter_fn": lambda module, name: name == "layer"}),  # the user has chosen
        (lambda: nn.Sequential(nn.Linear(64, 64)), {}),
    ],
)
def test_nothing_is_said_of_other_models(logged, make, options):
    mx.quantize_(make(), "mxfp4-weight-only", **options)
    assert not logged.records


def test_the_size_of_a_model_counts_each_parameter_once():
    model = Words(dtype=torch.bfloat16)
    before = mx.model_size(model)
    assert (before.values, before.nbytes, before.bits) == (23360, 2 * 23360, 16)
    mx.quantize_(model, "mxfp4-weight-only", include_head=True)
    size = mx.model_size(model)
    assert [(p.use, p.stored, p.quantized, p.values, p.bits) for p in size.groups] == [
        ("layers", "mxfp4_e2m1", True, 4096, 4.25),
        ("head and embedding", "mxfp4_e2m1", True, 19200, 4.25),
        ("other parameters", "bfloat16", False, 64, 16),
    ]
    assert size.groups[1].names == ("words.weight = lm_head.weight",)
    assert size.nbytes == (4096 + 19200) * 17 // 32 + 128
    assert str(size).splitlines()[-1].split() == ["whole", "model", "23,360", f"{size.bits:.2f}", "0.0"]
    untied = mx.model_size(mx.quantize_(Words(tied=False), "mxfp8"))
    assert [group.use for group in untied.groups] == ["layers", "head", "embedding", "other parameters"]


def test_only_a_module_has_a_model_size():
    with pytest.raises(TypeError, match="model_size"):
        mx.model_size(torch.randn(3))
