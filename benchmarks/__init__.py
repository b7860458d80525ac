"""Benchmarks. ``python -m benchmarks.NAME --json FILE`` prints tables and writes the raw figures as a record.

| module | question | needs a GPU |
|---|---|---|
| ``cast`` | how near do casts come to the copy bandwidth, and to torchao? | yes |
| ``cast_tiles`` | which tiles are fastest for the CUDA cast of both copies? | yes |
| ``linear`` | how long does a quantized linear layer take beside bfloat16 and torchao? | yes |
| ``decode`` | the same at few rows of activations, beside gemlite and torchao | yes |
| ``decode_model`` | how many tokens per second does a Llama 3 8B decode in each format? | yes |
| ``one_product`` | one product at few rows, for a profiler such as ``ncu`` | yes |
| ``train_linear`` | how long do forward and backward of a linear layer take, and how much memory? | yes |
| ``train_grouped`` | the same of a stack of experts | yes |
| ``users`` | what users run: host time, layers, experts, ``generate``, training steps, the first token | yes |
| ``fsdp`` | what does FSDP2 training gain from gathering codes instead of values? | yes (``--quick``: no) |
| ``host`` | how much host time does one eager call take? | no (``--cuda``: yes) |
| ``cpu`` | how long do casts and linear layers take on a CPU, beside torchao? | no |
| ``cpu_linear`` | how long do linear layers of few rows take on a CPU, beside torchao's int8? | no |
| ``cpu_sweep`` | are products with codes on a CPU ever slower than decoding the whole weight? | no |
| ``llm_cpu`` | how many tokens per second do language models decode on a CPU, beside torchao and llama.cpp? | no |
| ``kv_cache`` | how long does a step with a long cache in codes take, and how much memory? | no |
| ``kv_quality`` | how far does a cache in codes move the predictions of a model? | no |
| ``models`` | what works in transformers' models after ``quantize_``? | no |
| ``quality`` | how much quality does a model lose at how many bits, beside llama.cpp and torchao? | no |
| ``calibration`` | how much of that loss does each method of ``mx.calibrate`` remove? | no |
| ``parity`` | does quantized training reach the loss of bfloat16, and which ingredients does it need? | yes |
| ``fp8_rows_errors`` | how far are products by ``fp8_rows`` from float64 and their bound? | no (or ``--device cuda``) |
| ``checkpoints`` | how long does ``mx.checkpoints.convert`` take, and how much memory? | no |
| ``soak`` | does memory grow over training steps and shapes? | no |
| ``estimate`` | when does computation hide the communication of FSDP2? Calculated, not measured | no |
| ``scale`` | how many bytes does a GPU of 8 to 10,000 receive and store? Calculated, not measured | no |
| ``compare`` | did our times get worse between two folders of records? Exit status 1 if so | no |
| ``plots`` | draws the records as the pictures of the documentation | no |

What they share: ``harness`` times contenders side by side, ``contenders`` has them in processes of their own, ``cuda``
has the clocks and targets of the GPU benchmarks, ``peers`` the calls of torchao and gemlite, ``llama_cpp_peer`` and
``gguf_quality`` those of llama.cpp, ``bandwidth`` readers of memory, ``llama`` a random model, and ``corpus`` a text.
Parts of one benchmark: ``users_layers``, ``users_experts``, ``users_generate``, ``users_train``, ``users_first``;
``parity_arms``, ``parity_record``, ``parity_targets``, ``parity_plot``; ``quality_plot``; ``scale_model``;
``llm_contenders``.
"""
