"""One case of the sweep over inference: a small Llama that generates for batches of several sizes, beside its twins.

The tokens that follow a prompt are given, so that an argmax between two close logits decides nothing: what is compared
are the logits of each step. The twins (``inference_twin.py``) get the same calls: the batch, and the prompt and each
token where the case has a cache, because a global scale of NVFP4 is one of all tokens in a call.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import mxtensor as mx
from tests.combinations.axes import ERRORS, SCHEDULES
from tests.combinations.covering import Case
from tests.combinations.inference_twin import STEPS, CastCache, bounds, check_rows, rows, twin
from tests.combinations.training_case import poison

VOCABULARY, PROMPT, LIMIT = 96, 19, 32
"""More tokens than the 16 that ``mx.KVCache`` keeps in high precision."""
FIRST = 3
"""The first token that is not the start or the end of a text."""
CACHE = "mxfp8"
"""The format of ``mx.KVCache``."""


def made(case: Case, device: str, values: nn.Module | None = None) -> nn.Module:
    """A Llama whose weights have the values of the dtype of the case, in float32: those of ``values``, or random."""
    width = int(case["width"])
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 64}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, head_dim=64, vocab_size=VOCABULARY, num_hidden_layers=2,
        max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if values is not None:
            p.copy_(values.get_parameter(name))
        elif p.ndim > 1:
            p.normal_(std=p.shape[-1] ** -0.5)
        p.copy_(p.to(getattr(torch, case["dtype"])))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.to(device)


def low(model: nn.Module, case: Case) -> nn.Module:
    """The parameters in the dtype of the case. Buffers, the frequencies of positions, stay: so transformers loads."""
    for p in model.parameters():
        p.data = p.data.to(getattr(torch, case["dtype"]))
    return model


class Given(transformers.LogitsProcessor):
    """Chooses the tokens of ``ids`` after those that are there."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def __call__(self, before: Tensor, scores: Tensor) -> Tensor:
        wanted = self.ids[:, before.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)


def cache_of(model: nn.Module, how: str, batch: int) -> dict[str, Any]:
    """The arguments of ``generate`` for a cache."""
    config = model.config
    if how == "static":
        return {"cache_implementation": "static", "max_cache_len": LIMIT}
    if how == "KVCache":
        return {"past_key_values": mx.KVCache(CACHE, config)}
    if how == "KVCache-static":
        return {"past_key_values": mx.KVCache(CACHE, config, LIMIT, static=True)}
    if how == "casts":
        return {"past_key_values": CastCache(mx.Cast.of(CACHE))}
    return {}


def generated(model: nn.Module, ids: Tensor, cache: str, **options: Any) -> Tensor:
    """The logits (batch, STEPS, vocabulary) after the prompt and each of the next tokens."""
    prompt = ids[:, :PROMPT]
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS,
        logits_processor=[Given(ids)], output_logits=True, return_dict_in_generate=True,
        **cache_of(model, cache, len(ids)), **options,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


def whole(run: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
    """The same logits in one pass, without a cache."""
    out = run(ids[:, : PROMPT + STEPS - 1])
    logits = out if isinstance(out, Tensor) else out.logits
    return logits[:, PROMPT - 1 :]


class Logits(nn.Module):
    """The model as a function of tokens only, without a cache."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def captured(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model as CUDA graphs, one for each batch size."""
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def run(ids: Tensor) -> Tensor:
        if len(ids) not in graphs:
            static, stream = ids.clone(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    model(static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(static)
            graphs[len(ids)] = graph, static, out
        graph, static, out = graphs[len(ids)]
        static.copy_(ids)
        graph.replay()
        return out.clone()

    return run


def runner(case: Case, model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    """Tokens to logits, in the way of the case."""
    way, cache = case["way"], case["cache"]
    if way == "eager":
        return lambda ids: generated(model, ids, cache, disable_compile=True)
    if way == "generate":  # on a GPU transformers compiles the steps of a static cache
        return lambda ids: generated(model, ids, cache)
    if way == "compile_decoding":
        mx.compile_decoding(model)
        return lambda ids: generated(model, ids, cache)
    alone = Logits(model)
    if way == "exported":
        example = torch.zeros(2, PROMPT + STEPS - 1, dtype=torch.int64, device=device)
        shapes = ({0: torch.export.Dim("batch", min=1, max=256)},)
        program = torch.export.export(alone, (example,), dynamic_shapes=shapes).module()
        return lambda ids: whole(program, ids)
    if way == "graph":
        run = captured(alone)
        return lambda ids: whole(run, ids)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(alone, backend=backend, dynamic=True if way == "dynamic" else None)
    return lambda ids: whole(compiled, ids)


def with_adapter(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval().requires_grad_(False)


def saved_and_loaded(model: nn.Module, how: str, case: Case, folder: Path, device: str) -> nn.Module:
    """The model after it was written and read."""
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    if how == "state_dict":
        torch.save(model.state_dict(), folder / "model.pt")
        other = low(made(case, device), case)
        mx.quantize_(other, case["format"])
        other.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        return other
    mx.checkpoints.save(model, folder / "model", layout=how)
    if how != "native":  # read here, and not by the library whose layout it is
        mx.checkpoints.convert(folder / "model", folder / "native", progress=False)
        folder = folder / "native"
    else:
        folder = folder / "model"
    dtype = getattr(torch, case["dtype"])
    found = type(model).from_pretrained(folder, dtype=dtype).eval().requires_grad_(False).to(device)
    return copy.deepcopy(found)  # in aligned memory, as the first: sums of MKL depend on that


def twins(case: Case, exact: nn.Module, model: nn.Module) -> dict[str, nn.Module]:
    """Name -> the twin of a quantized model; ``exact`` is the model before, in float64."""
    dtype = getattr(torch, case["dtype"])
    return {
        "right": twin(exact, model),
        "rounded": twin(exact, model, dtype=dtype),
        "unquantized": twin(exact, model, False),
    }


def of_twin(case: Case, name: str, model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a twin by the calls of the case."""
    if case["cache"] == "no":
        return whole(Logits(model), ids)
    casts = case["cache"].startswith("KVCache") and name != "unquantized"
    return generated(model, ids, "casts" if casts else "dynamic", disable_compile=True)


@torch.no_grad()
def check(case: Case, device: str, folder: Path) -> dict[str, float]:
    """Run the case and its twins, and compare. Returns the largest errors, as shares of what is allowed."""
    exact = made(case, device).double()
    model = low(made(case, device, exact), case)
    mx.quantize_(model, case["format"])
    check_weights(case, exact, model)
    batches = [
        torch.randint(FIRST, VOCABULARY, (b, PROMPT + STEPS), device=device) for b in SCHEDULES[case["schedule"]]
    ]
    models = twins(case, exact, model)
    if plain := case["way"] == "eager" and case["cache"] == "dynamic" and device == "cpu":
        models["eager"] = copy.deepcopy(model)
    if case["saved"] != "no":
        model = saved_and_loaded(model, case["saved"], case, folder, device)
    if case["lora"] == "yes":
        model, *others = map(with_adapter, (model, *models.values()))
        models = dict(zip(models, others, strict=True))
        adapter = {n: p for n, p in model.named_parameters() if "lora_" in n}
        for other in others:
            for name, p in other.named_parameters():
                if name in adapter:
                    p.copy_(adapter[name])
    if case["offload"] == "yes":
        import accelerate

        accelerate.cpu_offload(model, torch.device(device))
    found = steps(case, model, batches, device)
    worst = {"half": 0.0, "each": 0.0}
    for number, (ids, mine) in enumerate(zip(batches, found, strict=True)):
        logits = {name: of_twin(case, name, other, ids) for name, other in models.items()}
        allowed = bounds(logits["right"], logits["rounded"], logits["unquantized"], case["dtype"])
        try:
            half, each = check_rows(rows(mine, logits["right"]), allowed)
        except AssertionError as error:
            raise AssertionError(f"batch {number}, {len(ids)} sequences: {error}") from None
        worst = {"half": max(worst["half"], half), "each": max(worst["each"], each)}
        if plain:  # the same calls before it was saved, on one thread
            assert mine.equal(logits["eager"]), (
                f"batch {number}: {rows(mine, logits['eager']).max():.3g} from eager mode"
            )
    return worst


def check_weights(case: Case, exact: nn.Module, model: nn.Module) -> None:
    """The error of each quantized weight is that of its format."""
    for name, p in model.named_parameters():
        if isinstance(p, mx.MXTensor):
            off = rows(p.dequantize(torch.float64).view(1, 1, -1), exact.get_parameter(name).view(1, 1, -1)).item()
            assert off < ERRORS[case["format"]], f"{name}: {off:.3g} from the values that were quantized"


def steps(case: Case, model: nn.Module, batches: list[Tensor], device: str) -> list[Tensor]:
    """The logits of all batches, on the CPU, before any twin runs."""
    run = runner(case, model, device)

    def all_batches(_thread: int) -> list[Tensor]:
        found = []
        for ids in batches:
            with torch.no_grad():
                found.append(run(ids).to("cpu", copy=True))
            if case["between"] == "nan":
                poison(device)
        return found

    if case["threads"] == "1":
        return all_batches(0)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(all_batches, range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two threads have two results"
    return first
