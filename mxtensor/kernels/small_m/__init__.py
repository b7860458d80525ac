"""Small-M products: ``x @ w^T`` for few activation rows M; the quantized weight is read once and decoded in registers.

With so few rows the time is that of reading the weight from memory, so 8-bit codes take half of bfloat16's time and
4-bit codes a quarter. The way of the data, for one block of threads:

    activations x (M, K)                        weight codes and scales (N, K)
    bfloat16 or float16                         bytes in global memory
         |  cast if asked, to float16                |  asynchronous copies, several stages ahead
         v                                           v
    shared memory  <- one row tile -> warps <-  shared memory (wgmma: registers)
                                        |            decoded to float16 in registers
                                        |  matrix instructions, float32 sums, block scales
                                        v
                          reduction over the warps that share K
                                        v
                          reduction over the blocks that split K: through the cluster's distributed
                          shared memory, or through global memory
                                        v
                          alpha, global scales, bias; rounded once -> y (M, N)

Three kernels do this; ``LaunchConfig.kind`` names them:

| kind | activations | weight | best for |
|---|---|---|---|
| persistent | whole in shared memory for the whole launch | each warp copies its own stages | 1 to 16 rows |
| pipelined | stage by stage, or whole | the warps of a block share the stages | any GPU, groups of rows |
| wgmma | tiles by the copy engine | from global memory to registers | 9 to 512 rows on sm_90 |

Files, in the order of a call: ``kernel.py`` (which calls the kernel takes, the custom ops), ``launch.py`` (converts
activations, launches), ``heuristics.py`` (chooses a config from the measured table ``sm90.json``, or by expected time),
``config.py`` (what a kernel is compiled with, and whether it fits).
The device code is in ``kernels/cuda/``.
"""
