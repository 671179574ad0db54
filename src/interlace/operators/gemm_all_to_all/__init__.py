"""GEMM + All-to-All; see README.md."""
