"""Other libraries that this package registers with. This file says which of the others is imported, and when:

- transformers: its registries of quantizers (``transformers.py``, ``transformers_load.py``) and of attention
  (``attention.py``), heads of another size (``resized_heads.py``), ``save_pretrained.py``, the KV cache (``kv_*.py``);
- peft: adapters that change weights when they are made (``peft_inits.py``), merged ones (``peft_merges.py``) and saved
  ones (``peft.py``);
- accelerate: its function that puts a tensor into a module (``accelerate.py``);
- sentence-transformers: the modules that it saves (``sentence_transformers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

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

    def __new__(cls, format: str, skip: Sequence[str] = (), include_head: bool = False) -> Any:
        try:
            module = import_module(".transformers", __name__)
        except ImportError as error:
            raise ImportError(
                f"TransformersConfig needs transformers 5: pip install 'transformers>=5' ({error})"
            ) from error
        return module.MXQuantizationConfig(format, skip, include_head)


def _register() -> None:
    with suppress(ImportError):  # a transformers before version 5 works as if this package did not know it
        import_module(".transformers", __name__)


def _extend_models() -> None:
    with suppress(ImportError):
        import_module(".attention", __name__).install()
    for name in (".resized_heads", ".save_pretrained"):
        with suppress(ImportError):
            import_module(name, __name__).install(import_module("transformers.modeling_utils"))


def _watch_merges() -> None:
    import_module(".peft", __name__).install(import_module("peft.tuners.tuners_utils"))


def _save_values() -> None:
    import_module(".peft", __name__).install_saving()


def _save_modules() -> None:
    name = "sentence_transformers.base.modules.module"
    import_module(".sentence_transformers", __name__).install(import_module(name))


def _keep_recipes() -> None:
    import_module(".accelerate", __name__).install()


after_import("transformers.quantizers.auto", _register)
after_import("transformers.modeling_utils", _extend_models)
after_import("peft.tuners.tuners_utils", _watch_merges)
after_import("peft.peft_model", _save_values)
after_import("accelerate.hooks", _keep_recipes)
after_import("sentence_transformers.base.modules.module", _save_modules)
