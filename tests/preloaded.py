"""What ranks of tests on the CPU import, for the process that they are forked from; see
``tests/pool.py``.
"""

import gc
import importlib
import pkgutil
import sys

import hypothesis
import pytest
import torch._inductor.compile_fx
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch.distributed.tensor.parallel
import torch.testing._internal.optests
from triton.runtime.interpreter import InterpretedFunction

import interlace.operators
import interlace_dlrm
import interlace_gin
import tests.hints
import tests.pool

__all__ = ["hypothesis", "pytest", "tests", "torch"]

for module in pkgutil.walk_packages(interlace.operators.__path__, "interlace.operators."):
    importlib.import_module(module.name)
for package in (interlace, interlace_dlrm, interlace_gin):
    for name in package.__all__:
        getattr(package, name)

# The interpreter rewrites each function of a kernel when it is first called; ranks share that here.
for module in [*sys.modules.values()]:
    for value in [*vars(module).values()]:
        if type(value) is InterpretedFunction:
            value.rewrite()

tests.hints.check()

# Triton's interpreter makes so many objects that the collector goes through all of them often. What
# has been imported stays, so the collector need not look at it, nor copy its pages in each rank.
gc.collect()
gc.freeze()
