"""Other libraries that this package registers with. This file says which of the others is imported, and when:

- transformers: its registry of quantizers (start with ``transformers.py``; ``transformers_load.py`` has the tensors on
  their way), of attention (``attention.py``), what its models and its Trainer do with codes
  (``transformers_models.py``), the KV cache (``kv_cache.py``, then ``kv_storage.py`` and ``kv_tensor.py``), compiled
  steps of ``generate`` on a CPU (``decoding.py``);
- peft: adapters on quantized weights that are made, merged and saved (``peft.py``);
- accelerate: its function that puts a tensor into a module (``accelerate.py``);
- sentence-transformers: the modules that it saves (``transformers_models.py``).

Methods of these libraries are wrapped where they have no public event for what is needed; each file says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from ..core.peer_names import refuse_arguments
from ..core.when_imported import after_import


class TransformersConfig:
    """``quantization_config`` of transformers' ``from_pretrained``: weights are quantized while they are loaded.

    ``format``: what ``quantize_`` takes by name for inference, such as ``"mxfp4-weight-only"``. ``skip``: names of
    modules that stay in high precision with all that is inside them, or the ends of these names: ``"model.layers.0"``,
    ``"mlp"``. Embeddings and routers always do. ``include_head=True`` quantizes heads, and embeddings that share their
    weights, as ``quantize_`` does; otherwise heads and layers that share a weight with an embedding stay, too. The
    instance is one of transformers' ``QuantizationConfigMixin``. ``save_pretrained`` writes its fields to
    ``config.json``. Raises ValueError for an unknown format; warns if ``include_head`` finds no head.
    """

    def __new__(cls, format: str, skip: Sequence[str] = (), include_head: bool = False, **others: Any) -> Any:
        refuse_arguments("TransformersConfig", others)
        try:
            module = import_module(".transformers", __name__)
        except ImportError as error:
            raise ImportError(
                f"TransformersConfig needs transformers 5: pip install 'transformers>=5' ({error})"
            ) from error
        return module.MXQuantizationConfig(format, skip, include_head)


HOOKS = (
    ("transformers.quantizers.auto", ".transformers", None),
    ("transformers.modeling_utils", ".attention", "install"),
    ("transformers.modeling_utils", ".transformers_models", "install"),
    ("transformers.trainer", ".transformers_models", "install_trainer"),
    ("peft.utils.other", ".peft", "install_copies"),
    ("peft.tuners.tuners_utils", ".peft", "install"),
    ("peft.peft_model", ".peft", "install_saving"),
    ("accelerate.hooks", ".accelerate", "install"),
    ("sentence_transformers.base.modules.module", ".transformers_models", "install_modules"),
)
"""(module of another library, the file here that is imported after it, its function that gets the module)"""


def _import(peer: str, name: str, install: str | None) -> None:
    with suppress(ImportError):  # a transformers before version 5 works as if this package did not know it
        own = import_module(name, __name__)
        if install is not None:
            getattr(own, install)(import_module(peer))


for hook in HOOKS:
    after_import(hook[0], partial(_import, *hook))
