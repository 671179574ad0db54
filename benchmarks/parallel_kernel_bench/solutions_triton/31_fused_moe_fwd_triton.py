"""A layer of experts: eight over all ranks."""

from benchmarks.parallel_kernel_bench.experts import experts_of_ranks as solution

__all__ = ["solution"]
