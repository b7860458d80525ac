"""How kernels are compiled, cached and launched: NVRTC, Triton, native C++; and reasons why they cannot be.

A repeated product, from ``F.linear`` to the driver:

    ops/functional.py: linear            finds the Plan of this kind of call in PLANS
      |                                  (the first call: the general way, then ``_cache_launch``)
      v
    Plan.launch(x), one of
      cpu_codes.BoundProduct             the C++ op ``cpu_linear_bound``; no driver
      small_m.later_launch.Launch         allocates the result and the scratch memory
        -> packed_launches.PackedLaunches  -> a host call
      ops.repeated.RepeatedProduct       the kernel has no ``launch_for``: a recorded program (core/program.py),
        -> its steps                       whose launches are host calls, too
      |
      v
    host_calls.py, host_calls.c          write addresses to argument blocks; cuLaunchKernelEx, or cuBLASLt

A training step has the last of these for its two passes: ``training/repeated.py``, ``RepeatedLayer``.

| word | what it is | made by |
|---|---|---|
| launch of a Plan | a function of x (and ends of groups) that returns what the op returns | ``Kernel.launch_for`` |
| bound product | a product in C++, bound to the addresses of its weight, by number | ``gemm.cpu_library.bind`` |
| argument block | the bytes that the driver takes as the arguments of a kernel | ``nvrtc.pack``, ``native_launch`` |
| step | ``host_calls.Step``: a kernel with grid, attributes and argument block | ``nvrtc.Function.step`` |
| host call | ``run(stream, *addresses)``: some steps, or one product of cuBLASLt | ``host_calls``, ``gemm.cublas_lt`` |
| packed launches | a host call of NVRTC kernels whose arguments are relative to bases | ``packed_launches.py`` |
| recorded launch | ``core.recording.Launch``: a host call, or one of Triton, in a recorded program | see below |

| module | serves | in a recording |
|---|---|---|
| ``packed_launches.py`` | ``small_m``: stored in its Plan | refuses, as its kernels do |
| ``cuda_launch.py`` | other NVRTC kernels: launches at once | records the step |
| ``triton_launch.py`` | Triton kernels: launches at once | records ``native_launch.of_compiled``, or Triton's call |
| ``recorded_op.py`` | custom ops that a compiled graph calls | their repeated calls run a program |
| ``cpu_graph.py`` | compiled decoding on the CPU: a whole graph, made again in C++ | records ops of torch and kernels |
| ``host_calls.py``, ``cuda_driver.py``, ``tensor_map.py`` | all host calls | |
| ``nvrtc.py``, ``cuda_macros.py`` | CUDA sources: compiles and loads them | |
| ``native_build.py``, ``native_ops.py`` | C++ sources: compile and load them | |
| ``disk_cache.py`` | both of these | |
| ``availability.py``, ``check.py`` | reasons to refuse a call; checks of what a custom op gets | |
"""
