"""Training: how a linear layer runs its three products quantized, and how an unmodified model gets there.

The parameter stays in high precision. ``F.linear`` (and ``torch.mm``, ``@``, torch's attention) reaches the autograd
function of ``linear.py`` in one of two ways:

- ``mx.quantize_(model, recipe)`` makes each weight a TrainingWeight, which carries its recipe. torch calls
  ``TrainingWeight.__torch_function__`` for every function that takes such a weight, and that method looks the function
  up in WEIGHT_FUNCTIONS.
- ``mx.autocast(recipe)`` enters a TorchFunctionMode, through which torch passes every function call of the block. The
  mode looks the function up in MODE_FUNCTIONS.

``interception.py`` fills both tables with the functions that multiply by a weight. A rule reads the call as one linear
layer (input, weight, bias) and calls ``linear`` with the recipe. Modules of ``mxtensor.te`` call ``linear`` directly.
``linear`` then computes::

    fprop  y  = x.rowwise    @ w.rowwise^T
    dgrad  dx = g.rowwise    @ w.columnwise^T
    wgrad  dw = g.columnwise @ x.columnwise^T     (accumulated in float32)

and casts each operand once, both copies in one pass, from the high-precision tensor (``casts.py``).

Start with ``interception.py``, ``linear.py`` and ``passes.py``, in this order.

A stack of weights goes the same way: ``bmm``, ``F.grouped_mm`` and products of slices are read as layers, and
``linear`` runs the same passes with each matrix and each group of rows cast as if it were alone (``casts.py``,
``numerics/groups.py``).
"""
