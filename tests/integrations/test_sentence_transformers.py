"""sentence-transformers: ``save_pretrained`` stores the codes of modules after the transformer; loading keeps them."""

import pytest
import torch

pytest.importorskip("sentence_transformers.sentence_transformer.modules")  # since sentence-transformers 6
pytest.importorskip("tokenizers")

import tokenizers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding

import mxtensor as mx

SENTENCES = ["one two three", "two", "three one"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def model():
    words = tokenizers.models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    modules = [StaticEmbedding(tokenizer, embedding_dim=48), Dense(48, 32), Dense(32, 16), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def embeddings(model):
    return model.encode(SENTENCES, convert_to_tensor=True)


def loaded(path):
    return SentenceTransformer(str(path), device="cpu", local_files_only=True)


@pytest.mark.parametrize("config", ["mxfp8", "nvfp4-weight-only"])
def test_codes_are_saved_and_loaded(model, tmp_path, config):
    model.save_pretrained(str(tmp_path))  # its file of the plain weights must not be read again
    mx.quantize_(model, config, filter_fn=lambda module, name: name == "1.linear")
    model.save_pretrained(str(tmp_path))
    copy = loaded(tmp_path)
    weight = copy[1].linear.weight
    assert isinstance(weight, mx.MXTensor) and weight.recipe == model[1].linear.weight.recipe
    assert not weight.requires_grad and repr(copy[1].linear) == repr(model[1].linear)
    assert type(copy[2].linear.weight) is torch.nn.Parameter and copy[2].linear.weight.requires_grad
    assert torch.equal(embeddings(copy), embeddings(model))
    copy.save_pretrained(str(tmp_path / "copy"))
    assert torch.equal(embeddings(loaded(tmp_path / "copy")), embeddings(model))


def test_a_plain_model_is_saved_as_before(model, tmp_path):
    model.save_pretrained(str(tmp_path))
    assert (tmp_path / "1_Dense" / "model.safetensors").exists()
    assert torch.equal(embeddings(loaded(tmp_path)), embeddings(model))
