"""Models of transformers, unmodified: what ``quantize_`` does to each, and what works afterwards (extra ``test``).

    python -m benchmarks.models                               every model, a table
    python -m benchmarks.models llama gpt2                    of these only
    python -m benchmarks.models --json FILE      the record that docs/models.md shows

Every model is built from a small configuration with random weights, so nothing is downloaded and an error says how
formats and layers meet, not how good a trained model stays.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from benchmarks.harness import print_table, write_json

FORMATS = ("mxfp8", "nvfp4", "mxfp4-weight-only")
TOKENS = 8
VOCABULARY = 128
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """What became of one model; every field but the errors is the same on every machine."""

    model: str
    layers: int
    """Weights that ``quantize_`` took."""
    candidates: int
    """Weights of linear layers and experts, heads and routers included."""
    bits: float
    """Bits a value of the quantized weights, scales included."""
    errors: dict[str, float]
    """Config -> relative error of the logits (Frobenius norm) beside the unquantized model."""
    compiled: str
    """What the model under ``torch.compile(fullgraph=True)`` has in common with the eager one, and the backend."""
    loaded: bool
    """Whether a new process that loads the saved weights computes the same logits, bit for bit."""
    lora: bool
    """Whether an AdamW step on LoRA adapters lowers the loss and leaves the quantized weights as they are."""


@dataclass(frozen=True)
class Case:
    """How a model is made, fed and read."""

    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    grows: str | None = None
    """The input that a generated token is appended to; None for a model that generates nothing."""
    backend: str = "aot_eager"
    """Of ``torch.compile``; inductor takes longer."""
    prepare: Callable[[Any], None] = lambda model: None
    """What ``torch.compile(fullgraph=True)`` needs of the library's own switches."""


# ---------------------------------------------------------------------------------------------- the models


def ids(length: int = 12) -> Tensor:
    """Two rows of token ids, the same at every call; the first three ids are left to special tokens."""
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """The same Gaussian values at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text() -> Inputs:
    """For a model of one sequence."""
    return {"input_ids": ids()}


def translation() -> Inputs:
    """For an encoder and a decoder that begins with token 0."""
    return {"input_ids": ids(), "decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)}


def speech() -> Inputs:
    """For Whisper: a spectrogram, and a decoder that begins with token 1."""
    return {"input_features": noise(2, 16, 64), "decoder_input_ids": torch.ones(2, 1, dtype=torch.long)}


def images() -> Inputs:
    """Two small images."""
    return {"pixel_values": noise(2, 3, 32, 32)}


LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = LAYERS | {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

ONE_LAYER = DECODER | {"num_hidden_layers": 1}


def made(model: str, config: str, /, **options: Any) -> Callable[[], nn.Module]:
    """Builds a class of transformers from a class of its configurations."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return build


def gather_experts(model: Any) -> None:
    """transformers' experts as one batched product: its grouped product loops over groups whose sizes are data."""
    model.set_experts_implementation("batched_mm")


WHISPER = dict(
    vocab_size=VOCABULARY, d_model=64, num_mel_bins=16, max_source_positions=32, max_target_positions=32,
    encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=128,
    decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
T5 = dict(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0)
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2)
VIT = LAYERS | {"num_hidden_layers": 1, "image_size": 32, "patch_size": 8, "num_labels": 10}
RESNET = dict(embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_labels=10)

CASES = {
    "llama": Case("Llama", made("LlamaForCausalLM", "LlamaConfig", **ONE_LAYER), text, "input_ids", "inductor"),
    "qwen3": Case("Qwen3", made("Qwen3ForCausalLM", "Qwen3Config", **ONE_LAYER, head_dim=16), text, "input_ids"),
    "mixtral": Case(
        "Mixtral", made("MixtralForCausalLM", "MixtralConfig", **ONE_LAYER, num_local_experts=4), text, "input_ids",
        prepare=gather_experts,
    ),
    "gpt2": Case("GPT-2", made("GPT2LMHeadModel", "GPT2Config", **GPT2), text, "input_ids"),
    "bert": Case("BERT", made("BertForMaskedLM", "BertConfig", **LAYERS, vocab_size=VOCABULARY), text),
    "t5": Case(
        "T5", made("T5ForConditionalGeneration", "T5Config", **T5), translation, "decoder_input_ids"
    ),
    "whisper": Case(
        "Whisper", made("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), speech, "decoder_input_ids"
    ),
    "vit": Case("ViT", made("ViTForImageClassification", "ViTConfig", **VIT), images, backend="inductor"),
    "resnet": Case("ResNet", made("ResNetForImageClassification", "ResNetConfig", **RESNET), images),
}  # fmt: skip


def built(name: str, config: str | None = None) -> nn.Module:
    """A model with its own fixed random weights, quantized by ``config`` if there is one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CASES[name].build().eval()
    return model if config is None else mx.quantize_(model, config)


@torch.no_grad()
def logits(name: str, model: Callable[..., Any]) -> Tensor:
    """What the model says of its case's inputs."""
    return model(**CASES[name].inputs()).logits  # type: ignore[no-any-return]


def weights(model: nn.Module) -> Iterator[tuple[str, mx.MXTensor]]:
    """Every quantized weight by its name, a shared one once."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, mx.MXTensor):
            yield name, parameter


# ---------------------------------------------------------------------------------------------- what is asked


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what was expected."""
    return float((got - expected).norm() / expected.norm())


def generated(name: str, model: Any) -> Tensor:
    """``TOKENS`` tokens for each row by transformers' own ``generate``: eager, greedy, with its cache."""
    case = CASES[name]
    assert case.grows is not None
    inputs = case.inputs()
    model.generation_config.eos_token_id = None  # never stop early
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    out: Tensor = model.generate(**inputs, **options)
    return out[:, -TOKENS:]


@torch.no_grad()
def greedy(name: str, forward: Callable[..., Any]) -> Tensor:
    """The same tokens by a plain loop over a forward without a cache, at one length: what comes later is hidden."""
    case = CASES[name]
    assert case.grows is not None
    inputs = case.inputs()
    start = inputs[case.grows].shape[1]
    inputs[case.grows] = tokens = torch.cat([inputs[case.grows], torch.zeros(2, TOKENS, dtype=torch.long)], 1)
    for i in range(start, start + TOKENS):
        tokens[:, i] = forward(**inputs, use_cache=False).logits[:, i - 1].argmax(-1)
    return tokens[:, start:]


def compiled(name: str, model: nn.Module) -> str:
    """What the compiled model, without a graph break, has in common with the eager one."""
    case = CASES[name]
    torch._dynamo.reset()
    tokens = None if case.grows is None else generated(name, model)
    case.prepare(model)
    forward = torch.compile(model, fullgraph=True, backend=case.backend)
    if tokens is None:
        close = relative_error(logits(name, forward), logits(name, model)) < 1e-5
        return f"{'same' if close else 'other'} logits, {case.backend}"
    same = torch.equal(greedy(name, forward), tokens)
    return f"{'same' if same else 'other'} {TOKENS} tokens, {case.backend}"


def load(name: str, folder: Path) -> bool:
    """Whether a fresh model with the saved state computes the saved logits."""
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # other weights, which the state replaces
        model = CASES[name].build().eval()
    mx.quantize_(model, "mxfp8").load_state_dict(saved["state"])
    return torch.equal(logits(name, model), saved["logits"])


def loaded_elsewhere(names: Collection[str]) -> dict[str, bool]:
    """Save every model in mxfp8 with its logits, and ``load`` all of them in one new process."""
    root = Path(__file__).resolve().parent.parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            model = built(name, "mxfp8")
            torch.save({"state": model.state_dict(), "logits": logits(name, model)}, Path(folder, f"{name}.pt"))
        command = [sys.executable, "-m", "benchmarks.models", "--load", folder]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"loading failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def operands(model: nn.Module) -> list[Tensor]:
    """Copies of all codes and scales, as bytes."""
    return [part.contiguous().view(torch.uint8).clone() for _, w in weights(model) for part in w.components]


def lora(name: str, model: nn.Module) -> bool:
    """One AdamW step on LoRA adapters of every quantized layer that peft knows."""
    from peft import LoraConfig, get_peft_model

    inputs = CASES[name].inputs()
    labels = inputs.pop("decoder_input_ids", inputs.get("input_ids", torch.tensor([0, 1])))
    before = operands(model)
    layers = [weight.removesuffix(".weight") for weight, _ in weights(model) if weight.endswith(".weight")]
    transposed = type(model.get_submodule(layers[0])).__name__ == "Conv1D"
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=layers, fan_in_fan_out=transposed))
    adapted.eval()  # no dropout: both losses are of the same function
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(2):
        loss = adapted(**inputs, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, operands(model), strict=True))
    return losses[1] < losses[0] and same


def row(name: str) -> Row:
    """Every question but the one that needs a new process."""
    plain, model = built(name), built(name, "mxfp8")
    taken = [w for _, w in weights(model)]
    everything = mx.quantize_(copy.deepcopy(plain), "mxfp8", lambda module, _: not isinstance(module, nn.Embedding))
    expected = logits(name, plain)
    return Row(
        model=CASES[name].title,
        layers=len(taken),
        candidates=len(list(weights(everything))),
        bits=8 * sum(w.nbytes for w in taken) / sum(w.numel() for w in taken),
        errors={config: relative_error(logits(name, built(name, config)), expected) for config in FORMATS},
        compiled=compiled(name, model),
        loaded=False,
        lora=lora(name, built(name, "mxfp8")),
    )


def rows(names: Collection[str] = ()) -> list[Row]:
    """The rows of the models named, or of all."""
    names = names or list(CASES)
    loaded = loaded_elsewhere(names)
    return [replace(row(name), loaded=loaded[name]) for name in names]


# ---------------------------------------------------------------------------------------------- the table

HEADER = ("model", "layers quantized", "bits a weight", *(f"error {f}" for f in FORMATS), "compiled", "loaded", "LoRA")
RECORD = Path(__file__).parent / "results" / "models.json"


def cells(found: Mapping[str, Any]) -> list[str]:
    """A row as text."""
    yes = {True: "yes", False: "no"}
    return [
        found["model"], f"{found['layers']} of {found['candidates']}", f"{found['bits']:.4g}",
        *(f"{found['errors'][f]:.1%}" for f in FORMATS),
        found["compiled"], yes[found["loaded"]], yes[found["lora"]],
    ]  # fmt: skip


def recorded() -> list[dict[str, Any]]:
    """The rows of the record, in the order of CASES."""
    return json.loads(RECORD.read_text())["rows"]  # type: ignore[no-any-return]


def main() -> None:
    """Ask everything of every model and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--json", type=Path, help="write raw results to this file")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.load is not None:
        print(json.dumps({path.stem: load(path.stem, args.load) for path in sorted(args.load.glob("*.pt"))}))
        return
    if unknown := set(args.models) - set(CASES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    found = rows(args.models)
    print_table(list(HEADER), [cells(asdict(r)) for r in found])
    write_json(args.json, found)


if __name__ == "__main__":
    main()
