"""What every compiled graph with quantized products gets, under any mode.

Products of one input become one launch. Attention of few queries becomes one op. On a GPU kernels use programmatic
dependent launch (PDL). On a CPU the generated code checks no tensor twice.

torch.compile(model)
mx.compile_passes(False)        # graphs that are compiled from now on are left as they are
"""

from __future__ import annotations

from typing import Any

from ..core.compat_compile import hook_inductor_settings
from ..core.fingerprint import COMPILATION
from ..core.when_imported import when_imported
from ..kernels.attention import (  # noqa: F401  (a graph from torch's cache may need the ops)
    cpu_attention,
    triton_attention,
)

CHECKS = "size_asserts", "alignment_asserts"
"""Python calls of a compiled graph for each of its tensors, which check again what Dynamo's guards and the ops check. A
decoded token of a small model spends a tenth of its time on a CPU in them."""


def compile_passes(enabled: bool) -> None:
    """Enable or disable the optimization of graphs with quantized products by ``torch.compile``.

    Applies to graphs that are compiled later; enabled by default. Graphs without such products are never changed.
    Options that are passed to ``torch.compile`` take precedence.
    """
    COMPILATION["passes"] = bool(enabled)


def are_passes_enabled() -> bool:
    """What ``compile_passes`` said last."""
    return COMPILATION.get("passes", True)


def _settings(gm: Any) -> dict[str, Any]:
    """The options for a graph: none without products, or where the user has a pass of their own.

    Kernels that start early take Triton's own launcher, which is slower than that of torch's compiler: only graphs that
    CUDA graphs replay have them.
    """
    if not are_passes_enabled():
        return {}
    from .graph import CPU_ONE, MERGED, ONE
    from .inference_options import Products, config, decoding

    graphs = [module.graph for module in gm.modules() if hasattr(module, "graph")]
    products = {one for one in MERGED for graph in graphs if graph.find_nodes(op="call_function", target=one)}
    if not products or config.post_grad_custom_pre_pass is not None:
        return {}
    settings: dict[str, Any] = {"post_grad_custom_pre_pass": Products()}
    if ONE in products:
        settings |= decoding(early=config.triton.cudagraphs)
    if CPU_ONE in products:
        settings |= {name: False for name in CHECKS if hasattr(config, name)}
    return settings


when_imported("torch._inductor.compile_fx", lambda: hook_inductor_settings(_settings))
