"""Benchmarks. ``python -m benchmarks.NAME --json FILE`` prints tables and writes the raw figures as a record.

| module | question | needs a GPU |
|---|---|---|
| ``cast`` | how near do casts come to the copy bandwidth, and to torchao? | yes |
| ``linear`` | how long does a quantized linear layer take beside bfloat16 and torchao? | yes |
| ``decode`` | the same at few rows of activations, beside gemlite and torchao | yes |
| ``decode_model`` | how many tokens per second does a Llama 3 8B decode in each format? | yes |
| ``train_linear`` | how long do forward and backward of a linear layer take, and how much memory? | yes |
| ``users`` | what users run: host time, layers of public models, ``generate``, training steps, the first token | yes |
| ``fsdp`` | what does FSDP2 training gain from gathering codes instead of values? | yes (``--quick``: no) |
| ``host`` | how much host time does one eager call take? | no (``--cuda``: yes) |
| ``cpu`` | how long do casts and linear layers take on a CPU, beside torchao? | no |
| ``llm_cpu`` | how many tokens per second do language models decode on a CPU, beside torchao and llama.cpp? | no |
| ``models`` | what works in transformers' models after ``quantize_``? | no |
| ``parity`` | does quantized training reach the loss of bfloat16, and which ingredients does it need? | yes |
| ``estimate`` | when does computation hide the communication of FSDP2? Calculated, not measured | no |
| ``scale`` | how many bytes does a GPU of 8 to 10,000 receive and store? Calculated, not measured | no |
| ``one_product`` | one product at few rows, for a profiler such as ``ncu`` | yes |
| ``compare`` | did our times get worse between two folders of records? Exit status 1 if so | no |
| ``plots`` | draws the records as the pictures of the documentation | no |

``harness`` times contenders side by side, ``cuda`` has the clocks and targets of the GPU benchmarks, and ``peers`` the
calls of torchao and gemlite. ``llama_cpp_peer`` is llama.cpp for ``llm_cpu``. The commands of ``users`` are in
``users_layers``, ``users_generate``, ``users_train`` and ``users_first``.
"""
