"""``python -m tests.helpers.leaves_group MODULE ARGUMENTS``: run a program's ``main``; it must end its process group.

A program that leaves this to Python's end aborts now and then: the threads of gloo still release tensors then.
"""

import importlib
import sys

import torch.distributed as dist

if __name__ == "__main__":
    module, *arguments = sys.argv[1:]
    importlib.import_module(module).main(arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
        raise SystemExit(f"{module} did not end its process group")
