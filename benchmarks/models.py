"""Unmodified models of transformers: what ``quantize_`` converts, and what works afterwards (extra ``test``).

    python -m benchmarks.models                        print a table of every model
    python -m benchmarks.models --only llama gpt2      print a table of these models
    python -m benchmarks.models --json FILE            also write the record that docs/guide/models.md shows

Every model is built from a small configuration with random weights, so nothing is downloaded. An error therefore shows
how a format interacts with the layers. It does not show how good a trained model stays.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from benchmarks.harness import Section, parser, print_table, run

FORMATS = ("mxfp8", "nvfp4", "mxfp4-weight-only")
TOKENS = 8
VOCABULARY = 128
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """The answers for one model. Every field but ``errors`` is the same on every machine."""

    model: str
    layers: int
    """Weights that ``quantize_`` converts by default."""
    candidates: int
    """Weights of all linear layers and experts, including heads and routers."""
    bits: float
    """Bits per value of the quantized weights, including the scales."""
    errors: dict[str, float]
    """Config -> relative error of the logits (Frobenius norm) against the unquantized model."""
    compiled: str
    """Whether ``torch.compile(fullgraph=True)`` gives the tokens or logits of the eager model, and the backend."""
    loaded: bool
    """Whether a new process that loads the saved weights computes bitwise identical logits."""
    lora: bool
    """Whether an AdamW step on LoRA adapters lowers the loss and does not change the quantized weights."""


@dataclass(frozen=True)
class Case:
    """How a model is built and called."""

    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    token_input: str | None = None
    """The name of the input to which generated tokens are appended; None for a model that does not generate."""
    backend: str = "aot_eager"
    """The backend of ``torch.compile``. inductor takes longer."""
    prepare: Callable[[Any], None] = lambda model: None
    """Sets the options of transformers that ``torch.compile(fullgraph=True)`` needs."""


# ---------------------------------------------------------------------------------------------- the models


def ids(length: int = 12) -> Tensor:
    """Token ids of shape (2, length), the same at every call. The first three ids are reserved for special tokens."""
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """Gaussian values, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text() -> Inputs:
    """The inputs of a model with one sequence."""
    return {"input_ids": ids()}


def translation() -> Inputs:
    """The inputs of an encoder, and of a decoder that begins with token 0."""
    return {"input_ids": ids(), "decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)}


def speech() -> Inputs:
    """The inputs of Whisper: a spectrogram, and a decoder that begins with token 1."""
    return {"input_features": noise(2, 16, 64), "decoder_input_ids": torch.ones(2, 1, dtype=torch.long)}


def images() -> Inputs:
    """Two small images."""
    return {"pixel_values": noise(2, 3, 32, 32)}


LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = LAYERS | {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

ONE_LAYER = DECODER | {"num_hidden_layers": 1}


def made(model: str, config: str, /, **options: Any) -> Callable[[], nn.Module]:
    """A function that builds the model class of transformers from its configuration class."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return build


def gather_experts(model: Any) -> None:
    """Compute the experts as one batched product: the grouped product loops over data-dependent group sizes."""
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
    """The model with its fixed random weights, quantized by ``config`` unless it is None."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CASES[name].build().eval()
    return model if config is None else mx.quantize_(model, config)


@torch.no_grad()
def logits(name: str, model: Callable[..., Any]) -> Tensor:
    """The logits of the model for the inputs of its case."""
    return model(**CASES[name].inputs()).logits  # type: ignore[no-any-return]


def weights(model: nn.Module) -> Iterator[tuple[str, mx.MXTensor]]:
    """Every quantized weight with its name. A shared weight appears once."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, mx.MXTensor):
            yield name, parameter


# ---------------------------------------------------------------------------------------------- the questions


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of ``got - expected`` divided by the norm of ``expected``."""
    return float((got - expected).norm() / expected.norm())


def generated(name: str, model: Any) -> Tensor:
    """``TOKENS`` tokens for each row from transformers' ``generate``: eager, greedy, with its cache."""
    case = CASES[name]
    assert case.token_input is not None
    inputs = case.inputs()
    model.generation_config.eos_token_id = None  # never stop early
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    out: Tensor = model.generate(**inputs, **options)
    return out[:, -TOKENS:]


@torch.no_grad()
def greedy(name: str, forward: Callable[..., Any]) -> Tensor:
    """The same tokens from a loop without a cache. The length is fixed; the causal mask hides the later positions."""
    case = CASES[name]
    assert case.token_input is not None
    inputs = case.inputs()
    first = inputs[case.token_input]
    start = first.shape[1]
    inputs[case.token_input] = tokens = torch.cat([first, torch.zeros(2, TOKENS, dtype=torch.long)], 1)
    for i in range(start, start + TOKENS):
        tokens[:, i] = forward(**inputs, use_cache=False).logits[:, i - 1].argmax(-1)
    return tokens[:, start:]


def compiled(name: str, model: nn.Module) -> str:
    """Compile the model without graph breaks, and compare its tokens or logits with those of the eager model."""
    case = CASES[name]
    torch._dynamo.reset()
    tokens = None if case.token_input is None else generated(name, model)
    case.prepare(model)
    forward = torch.compile(model, fullgraph=True, backend=case.backend)
    if tokens is None:
        close = relative_error(logits(name, forward), logits(name, model)) < 1e-5
        return f"{'same' if close else 'other'} logits, {case.backend}"
    same = torch.equal(greedy(name, forward), tokens)
    return f"{'same' if same else 'other'} {TOKENS} tokens, {case.backend}"


def loads(name: str, folder: Path) -> bool:
    """Whether a new model that loads the saved state computes the saved logits."""
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # other weights, which the saved state replaces
        model = CASES[name].build().eval()
    mx.quantize_(model, "mxfp8").load_state_dict(saved["state"])
    return torch.equal(logits(name, model), saved["logits"])


def loaded_elsewhere(names: Collection[str]) -> dict[str, bool]:
    """Save every model in mxfp8 with its logits, and call ``loads`` for all of them in one new process."""
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


def stored_bytes(model: nn.Module) -> list[Tensor]:
    """Copies of all codes and scales of the quantized weights, as bytes."""
    return [t.contiguous().view(torch.uint8).clone() for _, w in weights(model) for t in w.components]


def lora(name: str, model: nn.Module) -> bool:
    """Train LoRA adapters of every quantized layer for one AdamW step; the result is ``Row.lora``."""
    from peft import LoraConfig, get_peft_model

    inputs = CASES[name].inputs()
    labels = inputs.pop("decoder_input_ids", inputs.get("input_ids", torch.tensor([0, 1])))
    before = stored_bytes(model)
    layers = [weight.removesuffix(".weight") for weight, _ in weights(model) if weight.endswith(".weight")]
    transposed = type(model.get_submodule(layers[0])).__name__ == "Conv1D"
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=layers, fan_in_fan_out=transposed))
    adapted.eval()  # no dropout, so that both losses come from the same function
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(2):
        loss = adapted(**inputs, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, stored_bytes(model), strict=True))
    return losses[1] < losses[0] and same


def row(name: str) -> Row:
    """The row of one model, without ``loaded``, which needs a new process."""
    plain, model = built(name), built(name, "mxfp8")
    quantized = [w for _, w in weights(model)]
    everything = mx.quantize_(copy.deepcopy(plain), "mxfp8", lambda module, _: not isinstance(module, nn.Embedding))
    expected = logits(name, plain)
    return Row(
        model=CASES[name].title,
        layers=len(quantized),
        candidates=len(list(weights(everything))),
        bits=8 * sum(w.nbytes for w in quantized) / sum(w.numel() for w in quantized),
        errors={config: relative_error(logits(name, built(name, config)), expected) for config in FORMATS},
        compiled=compiled(name, model),
        loaded=False,
        lora=lora(name, built(name, "mxfp8")),
    )


def rows(names: Collection[str] = ()) -> list[Row]:
    """The rows of these models, or of all models if ``names`` is empty."""
    names = names or list(CASES)
    loaded = loaded_elsewhere(names)
    return [replace(row(name), loaded=loaded[name]) for name in names]


# ---------------------------------------------------------------------------------------------- the table

ERRORS = (f"error {f}" for f in FORMATS)
HEADER = ("model", "layers quantized", "bits per weight", *ERRORS, "compiled", "loaded", "LoRA")
RECORD = Path(__file__).parent / "results" / "models.json"


def cells(found: Mapping[str, Any]) -> list[str]:
    """The line of the table for one row of the record."""
    yes = {True: "yes", False: "no"}
    return [
        found["model"], f"{found['layers']} of {found['candidates']}", f"{found['bits']:.4g}",
        *(f"{found['errors'][f]:.1%}" for f in FORMATS),
        found["compiled"], yes[found["loaded"]], yes[found["lora"]],
    ]  # fmt: skip


def recorded() -> list[dict[str, Any]]:
    """The rows of the record in the repository, in the order of CASES."""
    return json.loads(RECORD.read_text())[SECTION]["rows"]  # type: ignore[no-any-return]


def measured(args: argparse.Namespace) -> list[Row]:
    """The table of the models that the command line names, or of all."""
    if unknown := set(args.only) - set(CASES):
        raise SystemExit(f"there is no model {', '.join(sorted(unknown))}; the models are {', '.join(CASES)}")
    found = rows(args.only)
    print_table(list(HEADER), [cells(asdict(r)) for r in found])
    return found


SECTION = "models"
SECTIONS = {SECTION: Section("what works in transformers' models after quantize_?", measured)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the record."""
    options = parser(__doc__ or "", SECTIONS)
    options.add_argument("--only", nargs="*", default=(), metavar="MODEL", help=f"any of {', '.join(CASES)} (all)")
    options.add_argument("--load", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    if args.load is not None:
        print(json.dumps({path.stem: loads(path.stem, args.load) for path in sorted(args.load.glob("*.pt"))}))
        return
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
