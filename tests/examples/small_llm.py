"""A made-up language model over bytes, in the place of SmolLM2."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

END = 0


class Bytes:
    """A tokenizer: the bytes of a text."""

    eos_token_id = END

    def __call__(self, text, return_tensors):
        ids = torch.tensor([list(text.encode())])
        return type("Encoded", (), {"input_ids": ids})

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(i)) if 32 <= int(i) < 127 else "." for i in ids if int(i) != END)


def small_llm():
    """(model, tokenizer) with random weights and a tied head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        num_hidden_layers=1, vocab_size=256, tie_word_embeddings=True, bos_token_id=1, eos_token_id=END,
        pad_token_id=END, max_position_embeddings=512, initializer_range=0.2, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False), Bytes()
