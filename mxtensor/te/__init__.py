"""TransformerEngine's quantizers and ``general_gemm``, by its names and arguments.

Start with ``quantizer_base.py`` (what all quantizers do) and ``general_gemm.py``. TransformerEngine's attributes of
tensors are in ``tensor/te_attributes.py``, its modules in ``nn/``, its recipes in ``recipe/``.
"""
