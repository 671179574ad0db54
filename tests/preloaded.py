"""What ranks of tests on the CPU import, for the process that they are forked from; see ``tests/pool.py``."""

import importlib
import pkgutil

import torch.distributed
import torch.utils.data

import interlace.ops

for module in pkgutil.walk_packages(interlace.ops.__path__, "interlace.ops."):
    importlib.import_module(module.name)
for name in interlace.__all__:
    getattr(interlace, name)
