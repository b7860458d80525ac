"""Talk to SmolLM2-135M-Instruct in a quantized format, with streaming:

    python -m examples.chat --format mxfp8-weight-only    # mxint8-weight-only if none is given
    python -m examples.chat --prompt "Name three colors." --max-new-tokens 40
    python -m examples.chat --compile                     # the first answer takes longer, then tokens come faster

/exit, an empty line, Ctrl-D or Ctrl-C ends the conversation.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mxtensor as mx

from . import smollm2
from .minilm import config_name
from .smollm2 import UNQUANTIZED

NAME = "SmolLM2-135M-Instruct"
FORMAT = "mxint8-weight-only"
"""The format with the smallest error at 8 bits: in a model this small several tokens are often nearly as likely."""
EXIT_INPUTS = ("/exit", "/quit", "")
"""Inputs that end the conversation."""
MAX_TOKENS = 4096
"""Tokens of a conversation; its first questions and answers are forgotten beyond it."""
COMPILED_TOKENS = 1024
"""The same with ``--compile``: a prompt reads all places of a static cache."""


def config_or_none(name: str) -> str:
    """Check the name of a format, or of none."""
    return name if name == UNQUANTIZED else config_name(name)


def prompts(given: Sequence[str] | None) -> Iterator[str]:
    """The prompts of the command line, or those that are typed."""
    if given:
        yield from given
        return
    print("Type a question and press Enter. /exit, an empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        if text in EXIT_INPUTS:
            return
        yield text


class Chat:
    """A conversation. ``answer`` streams to ``stdout`` and returns the text."""

    def __init__(
        self, model: Any, tokenizer: Any, system: str | None, temperature: float, max_new_tokens: int,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.most = model, tokenizer, MAX_TOKENS
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.first = len(self.messages)
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.options |= {"temperature": temperature, "top_p": 0.95}
        if compiled:
            mx.compile_decoding(model)
            self.most = COMPILED_TOKENS
            self.options |= {"cache_implementation": "static", "max_cache_len": self.most + max_new_tokens}

    def answer(self, text: str) -> tuple[str, int]:
        """(the answer, its number of tokens)."""
        from transformers import TextStreamer

        self.messages.append({"role": "user", "content": text})
        ids = smollm2.chat_prompt(self.tokenizer, self.messages)
        while ids.shape[1] > self.most and len(self.messages) > self.first + 2:
            del self.messages[self.first : self.first + 2]  # the first question and its answer
            ids = smollm2.chat_prompt(self.tokenizer, self.messages)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=streamer,
                pad_token_id=self.tokenizer.eos_token_id, **self.options,
            )  # fmt: skip
        new = out[0, ids.shape[1] :]
        found: str = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        self.messages.append({"role": "assistant", "content": found})
        return found, len(new)


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, quantize it, and answer."""
    parser = argparse.ArgumentParser(prog="python -m examples.chat", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--format", type=config_or_none, default=FORMAT, metavar="NAME",
        help=f"what quantize_ takes, or {UNQUANTIZED} (%(default)s)")  # fmt: skip
    add("--include-head", action="store_true", help="quantize the head and the embedding too")
    add("--prompt", action="append", metavar="TEXT", help="answer this and stop; may be given several times")
    add("--system", metavar="TEXT", help="the system prompt")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of one answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (%(default)s)")
    add("--compile", action="store_true", help="compile the decoding steps: half a minute, then faster")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (%(default)s)")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: {args.max_new_tokens} is not positive")
    if args.temperature < 0:
        parser.error(f"--temperature: {args.temperature} is negative")
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the line below says the bits
    print(f"Loading {NAME} ...", file=sys.stderr, flush=True)
    try:
        model, tokenizer = smollm2.load_model()
    except ImportError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    if args.format != UNQUANTIZED:
        mx.quantize_(model, args.format, include_head=args.include_head)
        model.set_attn_implementation("mxtensor")
    size = mx.model_size(model)
    about = f"{NAME} in {args.format}: {size.nbytes / 1e6:.0f} MB, {size.bits:.2f} bits per weight"
    print(about, file=sys.stderr, flush=True)
    torch.manual_seed(args.seed)
    chat = Chat(model, tokenizer, args.system, args.temperature, args.max_new_tokens, args.compile)
    try:
        for text in prompts(args.prompt):
            begin = time.perf_counter()
            _, tokens = chat.answer(text)
            rate = tokens / (time.perf_counter() - begin)
            print(f"({tokens} tokens, {rate:.1f} tokens per second)", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
