"""A layer of experts: several per rank."""

from benchmarks.parallel_kernel_bench.experts import experts_of_ranks as solution

__all__ = ["solution"]
