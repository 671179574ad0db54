"""GEMM + ReduceScatter; see README.md."""
