"""A step of Adam whose moments and gradients are sharded over the ranks."""

from benchmarks.parallel_kernel_bench.training import sharded_step as solution

__all__ = ["solution"]
