"""A made-up language model over bytes, in a folder as transformers saves it, with a text that it reads."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.examples.small_llm import small_llm

TEXT = "A model reads this text, byte by byte. " * 20


def save_small_model(folder):
    """Write the model and a tokenizer whose tokens are bytes; returns the folder."""
    model, _ = small_llm()
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = alphabet[-1]  # a byte that no text here has
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return folder
