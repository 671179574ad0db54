"""AllGather + GEMM; see README.md."""
