"""The kernels of ``gemm_all_reduce``; README.md and gemv.md explain them."""
