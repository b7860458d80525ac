"""transformers and sentence-transformers: what their models and a Trainer do with weights that are codes. Imported when
they are.

transformers has no public event for any of this (5.23): ``save_pretrained``, ``_get_resized_lm_head`` and
``Trainer.train`` are wrapped.

- ``save_pretrained`` of a model that ``quantize_`` has quantized after loading stores its codes, as that of a model
  which was loaded quantized.
- ``resize_token_embeddings`` keeps a quantized head quantized. transformers writes new rows of an embedding into the
  parameter that there is. For a head that shares no weight it makes a new layer, in high precision.
- ``Trainer.train`` says so if a model's weights are codes, which do not train. transformers refuses a model that was
  loaded quantized. One that ``quantize_`` has quantized afterwards has frozen weights, and only its norms, biases and
  embeddings would train.
- sentence-transformers saves modules after the transformer, such as ``Dense``, by ``save_torch_weights``, and loads
  them by ``load_torch_weights``. safetensors has no place for an MXTensor: these modules are saved as
  ``pytorch_model.bin``, which is read without running pickled code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.compat import local_of
from ..core.compat_hooks import around, hook_method
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import with_recipe
from ..training.training_weight import TrainingWeight
from .transformers import MXQuantizationConfig, MXQuantizer
from .transformers_load import prepare

ABSENT = object()


def install(models: Any) -> None:
    """Hook ``PreTrainedModel`` of ``transformers.modeling_utils``.

    ``_get_resized_lm_head`` is the one method that all its models call; no public one has the old head and the new one.
    """
    hook_method(models.PreTrainedModel, "save_pretrained", around(_save_pretrained))
    hook_method(models.PreTrainedModel, "_get_resized_lm_head", around(_resized_lm_head))


def _save_pretrained(usual: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
    saved = self.parameters() if given is None else given.values()
    adapters_only = getattr(self, "_hf_peft_config_loaded", False)
    loaded_quantized = getattr(self, "hf_quantizer", None) is not None
    if adapters_only or loaded_quantized or not any(isinstance(value, MXTensor) for value in saved):
        return usual(self, *args, **kwargs)
    # what transformers has in a model that was loaded quantized; afterwards the model is as before
    quantizer = MXQuantizer(MXQuantizationConfig(), pre_quantized=True)
    own, config = vars(self), vars(self.config)
    places = (own, "hf_quantizer"), (config, "quantization_config"), (own, "_weight_conversions")
    before = [(attributes, name, attributes.get(name, ABSENT)) for attributes, name in places]
    try:
        self.hf_quantizer, self.config.quantization_config = quantizer, quantizer.quantization_config
        return usual(self, *args, **kwargs)
    finally:
        for attributes, name, value in before:
            attributes.pop(name, None) if value is ABSENT else attributes.update({name: value})


def _resized_lm_head(usual: Callable[..., Any], self: Any, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
    before: Any = old_lm_head.weight
    new = usual(self, old_lm_head, *args, **kwargs)
    trains = isinstance(before, TrainingWeight)
    if new is old_lm_head or not (trains or isinstance(before, MXTensor)):
        return new
    prepare(new)
    if trains:
        new.weight = with_recipe(new.weight, before)
        return new
    # the codes of before for the rows that it has, if whole blocks are in them
    before, values = before.detach(), new.weight.detach()
    made, count = quantize_as(values, before.recipe, before.orientation), before.shape[0]
    same = before[: len(values)].clone() if len(values) <= count else torch.cat([before, made[count:]])
    new.weight = nn.Parameter(same if isinstance(same, MXTensor) else made, requires_grad=False)
    return new


def install_trainer(trainers: Any) -> None:
    """Let ``Trainer`` of ``transformers.trainer`` look at its model before it trains."""
    hook_method(trainers.Trainer, "train", around(_train))


def _train(usual: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Warns if the model's weights are codes, and nobody has chosen what trains beside them: no adapter is there, and
    no other parameter is frozen."""
    model = getattr(self, "model", None)
    adapters = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    if isinstance(model, nn.Module) and not adapters:
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        codes = {name: p for name, p in frozen.items() if isinstance(local_of(p), MXTensor)}
        if codes and len(codes) == len(frozen):
            share = sum(p.numel() for p in codes.values()) / sum(p.numel() for p in model.parameters())
            warnings.warn(
                f"Trainer: {len(codes)} weights, {share:.0%} of the model's values, are codes, which do not train, "
                f"such as {next(iter(codes))}; to train them, load the model in high precision and call mx.quantize_ "
                "with a training recipe, such as mx.recipe.MXFP8BlockScaling(), or with step='prepare'; to leave them "
                "as they are, add an adapter (peft's LoRA), or freeze the other parameters that shall not train",
                UserWarning,
                stacklevel=3,
            )
    return usual(self, *args, **kwargs)


# ---------------------------------------------------------------------------------------------- sentence-transformers


def install_modules(modules: Any) -> None:
    """Let ``Module`` of ``sentence_transformers.base.modules.module`` save and load codes."""
    hook_method(modules.Module, "save_torch_weights", around(_save_weights))
    hook_method(modules.Module, "load_torch_weights", around(_load_weights))


def _save_weights(
    usual: Callable[..., Any], self: nn.Module, output_path: str, safe_serialization: bool = True
) -> None:
    quantized = any(isinstance(value, MXTensor) for value in self.state_dict().values())
    if quantized:  # an older file of that name would be read instead
        Path(output_path, "model.safetensors").unlink(missing_ok=True)
    usual(self, output_path, safe_serialization and not quantized)


def _load_weights(usual: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """While it loads, ``load_state_dict`` of the new module puts MXTensors in the place of plain weights."""
    module: Any = kwargs.get("model")
    if module is None:
        return usual(cls, *args, **kwargs)
    load = module.load_state_dict

    def load_state_dict(state: Any, *more: Any, **options: Any) -> Any:
        if any(isinstance(value, MXTensor) for value in state.values()):
            options["assign"] = True
        return load(state, *more, **options)

    vars(module)["load_state_dict"] = load_state_dict
    try:
        loaded = usual(cls, *args, **kwargs)
    finally:
        del vars(module)["load_state_dict"]
    for part in module.modules():
        for parameter in part._parameters.values():
            if isinstance(parameter, MXTensor):
                parameter.requires_grad_(False)  # as quantize_ leaves it
                prepare(part)
    return loaded
