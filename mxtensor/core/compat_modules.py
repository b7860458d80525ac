"""Whether a tensor is converted with its module: ``model.half()`` keeps quantized weights, ``weight.half()`` does not.

``Module.to``, ``.half()`` and ``.cuda()`` call ``Module._apply(fn)``, and ``fn`` calls ``parameter.half()``: the
parameter sees the same call as from a user. torch offers no hook for it (``register_*_hook`` is for calls and state
dicts, ``torch.__future__`` chooses only how the result is stored), and replacing ``_apply`` for the whole process would
change modules that have nothing to do with this package. So a rule looks whether ``_apply`` is among its callers. That
holds also for a function of the user (``model._apply(fn)``), below another library's ``_apply`` that calls torch's,
with modes in between, and in each thread by itself. Libraries that fill modules with parameters have such a function
too, which gives a tensor the dtype of its place.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

FILLS_MODULES = {
    "_apply": "torch.nn.modules.module",
    "set_module_tensor_to_device": "accelerate.utils.modeling",
    "_materialize_copy": "transformers.core_model_loading",
    "load_model_dict_into_meta": "diffusers.models.model_loading_utils",
}
"""Function that puts tensors into modules -> its module. Missing (it has another name): what it puts there is plain
values, and a model that should be quantized is not."""


def filler() -> str | None:
    """The name of the function of FILLS_MODULES that is among the callers; None if there is none.

    None while Dynamo traces: graphs fill no module.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        home = FILLS_MODULES.get(name)
        if home is not None and frame.f_globals.get("__name__") == home:
            return name
        frame = frame.f_back
    return None


def level_outside(package: str) -> int:
    """The ``stacklevel`` of ``warnings.warn`` for the first caller outside of ``package``, seen from the caller.

    Python 3.12 has ``skip_file_prefixes`` for this.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


def can_be_data(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``parameter.data = value`` is possible: not from one device to the meta device, say.

    ``nn.Module._apply`` asks the same. Missing: False, and a parameter with a weak reference is not converted.
    """
    ask = getattr(torch, "_has_compatible_shallow_copy_type", None)
    return ask is not None and bool(ask(parameter, value))
