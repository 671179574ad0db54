"""GEMM + AllReduce; see README.md."""
