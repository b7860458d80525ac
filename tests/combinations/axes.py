"""The axes of training and inference, and which combinations are not cases, each with its reason.

An axis is what a user chooses. To add a value, add it here and its meaning to ``training_case.py`` or
``inference_case.py``; the arrays follow. Values that need a CUDA device are in the arrays for one only.
"""

from __future__ import annotations

from functools import cache

from tests.combinations.covering import Case, Rule, Space

DTYPES = ["float32", "bfloat16", "float16"]
RECIPES = [
    "MXFP8", "MXFP6", "MXFP4", "NVFP4", "NVFP4-nearest", "Float8Block", "Float8Current", "Delayed", "Custom",
]  # fmt: skip

TRAINING_BOLD = "dtype", "autocast", "recipe", "way", "layers"
TRAINING = {
    "recipe": RECIPES,
    "way": ["eager", "whole", "dynamic"],
    "dtype": DTYPES,
    "autocast": ["no", "bfloat16"],
    "layers": ["1", "2", "3"],
    "optimizer": ["fused", "foreach", "Muon", "FusedAdam", "FusedAdam-8bit"],
    "rows": ["same", "changing", "none"],
    "width": ["64", "80"],
    "checkpointing": ["no", "reentrant", "non-reentrant", "selective"],
    "accumulation": ["1", "2", "mx.accumulate"],
    "input": ["2d", "3d", "transposed", "columns"],
    "by": ["quantize_", "autocast"],
    "between": ["nothing", "nan"],
    "reload": ["no", "model", "both"],
    "bias": ["yes", "no"],
    "frozen": ["no", "first", "lora"],
    "tied": ["no", "yes"],
}
ON_GPU = {
    "way": ["eager", "whole", "blocks", "dynamic", "reduce-overhead"],
    "optimizer": ["fused", "foreach", "capturable", "Muon", "FusedAdam", "FusedAdam-8bit"],
    "width": ["256", "2048"],
}

TRAINING_RULES = [
    Rule(
        "DelayedScaling in a compiled graph raises an error from quantize_, and needs an eager step under autocast",
        lambda recipe, way: recipe == "Delayed" and way != "eager",
    ),
    Rule("an amax of earlier steps bounds no later batch", lambda recipe, rows: recipe == "Delayed" and rows != "same"),
    Rule("replays of CUDA graphs write their results into one place", lambda way, rows: way == "reduce-overhead" and
         rows != "same"),
    Rule("gradients of a replay are overwritten by the next one", lambda way, accumulation: way == "reduce-overhead" and
         accumulation != "1"),
    Rule("time: 1024 rows of width 2048 are for one kind of batch", lambda width, rows: width == "2048" and
         rows != "same"),
]  # fmt: skip

FEW = "MXFP8", "NVFP4"
COMPILED = "whole", "dynamic"
TRAINING_ON_CPU = [
    Rule("time: graphs see a recipe as one op", lambda way, recipe: way in COMPILED and recipe not in FEW),
    Rule("time: a graph of three layers takes 20 s", lambda way, layers: way in COMPILED and layers != "2"),
    Rule("time: batches of other sizes compile again", lambda way, rows: way == "whole" and
         rows != "same"),
    Rule("time: reentrant checkpoints cut graphs", lambda way, checkpointing: way in COMPILED and
         checkpointing in ("reentrant", "selective")),
]  # fmt: skip
"""Without a GPU compiled cases are few: torch takes 5 to 40 s for each, and their launches are the same."""


SCHEDULES = {"1,8,3,32,1": (1, 8, 3, 32, 1), "33,2,64": (33, 2, 64), "4,4,4": (4, 4, 4)}
ERRORS = {
    "mxfp8": 0.04, "mxfp8-weight-only": 0.03, "mxint8": 0.015, "mxfp6_e2m3-weight-only": 0.03,
    "mxfp4-weight-only": 0.15, "mxfp4-weight-mxint8-activation": 0.15, "nvfp4": 0.15, "nvfp4-weight-only": 0.1,
    "float8_e4m3_row": 0.04, "float8_e4m3_128x128-weight-only": 0.03,
}  # fmt: skip
"""Config -> the largest relative error of a weight of normally distributed values."""

INFERENCE_BOLD = "format", "cache", "schedule", "way"
INFERENCE = {
    "format": list(ERRORS),
    "way": ["eager", "whole", "dynamic", "exported", "compile_decoding"],
    "cache": ["no", "dynamic", "static", "KVCache", "KVCache-static"],
    "schedule": list(SCHEDULES),
    "dtype": DTYPES,
    "saved": ["no", "pickle", "state_dict", "native", "compressed-tensors"],
    "width": ["128"],
    "lora": ["no", "yes"],
    "offload": ["no", "yes"],
    "threads": ["1", "2"],
    "between": ["nothing", "nan"],
}
INFERENCE_ON_GPU = {"way": ["eager", "whole", "dynamic", "exported", "generate", "graph"], "width": ["256", "1024"]}
STORED = "mxfp8", "mxfp8-weight-only", "nvfp4", "nvfp4-weight-only", "mxfp4-weight-only", "float8_e4m3_row"
"""Configs that compressed-tensors has."""

INFERENCE_RULES = [
    Rule(
        "compiled whole, exported and captured models are functions of tokens; generate has the caches",
        lambda way, cache: (way in ("whole", "dynamic", "exported", "graph")) != (cache == "no"),
    ),
    Rule("compile_decoding compiles the steps of a static cache", lambda way, cache: way == "compile_decoding" and
         cache != "static"),
    Rule("transformers compiles the steps of a static cache", lambda way, cache: way == "generate" and
         cache not in ("static", "KVCache-static")),
    Rule("accelerate's hooks move weights in eager mode", lambda way, offload: way != "eager" and offload == "yes"),
    Rule("accelerate has its hooks on modules that an adapter replaces", lambda lora, offload: lora == "yes" and
         offload == "yes"),
    Rule("two threads compile, export and capture one after the other", lambda way, threads: threads == "2" and
         way not in ("eager", "compile_decoding")),
    Rule("accelerate's hooks hold the state of one forward pass", lambda offload, threads: offload == "yes" and
         threads == "2"),
    Rule("compressed-tensors has not every format", lambda saved, format: saved == "compressed-tensors" and
         format not in STORED),
]  # fmt: skip

GRAPHS = "whole", "dynamic", "exported", "compile_decoding"
INFERENCE_ON_CPU = [
    Rule("time, as in training", lambda way, format: way in GRAPHS and format not in ("mxfp8", "mxfp4-weight-only")),
    Rule("time, as in training", lambda way, schedule: way in GRAPHS and schedule != "1,8,3,32,1"),
]


def training_space(gpu: bool) -> Space:
    if gpu:
        return Space(TRAINING | ON_GPU, TRAINING_BOLD, TRAINING_RULES)
    return Space(TRAINING, TRAINING_BOLD, TRAINING_RULES + TRAINING_ON_CPU)


def inference_space(gpu: bool) -> Space:
    if gpu:
        return Space(INFERENCE | INFERENCE_ON_GPU, INFERENCE_BOLD, INFERENCE_RULES)
    return Space(INFERENCE, INFERENCE_BOLD, INFERENCE_RULES + INFERENCE_ON_CPU)


@cache
def inference(gpu: bool) -> tuple[Case, ...]:
    """The cases of inference."""
    return tuple(inference_space(gpu).cases())


@cache
def training(gpu: bool) -> tuple[Case, ...]:
    """The cases of training. On a GPU the first ones are those that once read memory that was gone."""
    space = training_space(gpu)
    wanted = [
        {"recipe": recipe, "way": way, "dtype": "float32", "autocast": "bfloat16", "layers": layers, "width": "2048",
         "between": between, "by": "quantize_", "rows": "same", "checkpointing": "no"}
        for recipe, way, layers, between in (
            ("MXFP8", "whole", "2", "nothing"), ("MXFP8", "whole", "3", "nan"), ("MXFP8", "blocks", "2", "nothing"),
            ("NVFP4", "whole", "2", "nothing"), ("Float8Current", "whole", "2", "nothing"),
        )
    ] if gpu else []  # fmt: skip
    first = [space.row(frozenset(each.items())) for each in wanted]
    return tuple(space.cases(case for case in first if case))


if __name__ == "__main__":
    for gpu in (False, True):
        for name, space, cases in (
            ("training", training_space(gpu), training(gpu)),
            ("inference", inference_space(gpu), inference(gpu)),
        ):
            covered = len(space.combinations)
            print(f"{'GPU' if gpu else 'CPU'}, {name}: {len(cases)} cases, {covered} pairs and triples covered")
