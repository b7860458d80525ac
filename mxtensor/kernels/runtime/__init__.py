"""How kernels are compiled, cached and launched: NVRTC, Triton, native C++; and reasons why they cannot be.

A repeated call (``core/repeated.py``), from ``F.linear`` to the driver:

    ops/functional.py: linear, training/linear.py, or a custom op of a compiled graph
      |
      v
    core/repeated.py: repeated           finds the program of this kind of call
      |                                  (first: the general way, which ``core/recording.py`` records the second time)
      v
    core/program.py: Program             allocates; ops of torch and host calls, with the addresses of this call
      |
      v
    host_calls.py, host_calls.c          write addresses to argument blocks; cuLaunchKernelEx, or cuBLASLt

| word | what it is | made by |
|---|---|---|
| argument block | the bytes of the arguments of a kernel | ``nvrtc.pack``, ``host_calls.of_compiled`` |
| step | ``host_calls.Step``: a kernel with grid, attributes and argument block | ``nvrtc.Function.step`` |
| host call | ``run(stream, *addresses)``: some steps, or one product of cuBLASLt | ``host_calls``, ``gemm.cublas`` |
| recorded launch | ``core.recording.Launch``: a host call, or one of Triton, in a recorded program | see below |

| module | serves | in a recording |
|---|---|---|
| ``host_calls.py``: ``launch_steps`` | NVRTC kernels: launches at once | records all of them as one host call |
| ``triton_launch.py`` | Triton kernels: launches at once | records ``host_calls.of_compiled``, or Triton's call |
| ``custom_op.py`` | custom ops that a compiled graph calls: checks | |
| ``cpu_graph.py`` | compiled decoding on the CPU: a whole graph, made again in C++ | records ops of torch and kernels |
| ``host_calls.py``, ``cuda_driver.py`` | all host calls | |
| ``nvrtc.py`` | CUDA sources: compiles and loads them | |
| ``native_build.py`` | C++ sources: compiles and loads them | |
| ``disk_cache.py`` | both of these | |
"""
