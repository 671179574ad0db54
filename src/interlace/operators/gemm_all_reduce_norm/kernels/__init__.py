"""The kernels of ``gemm_all_reduce_norm``; README.md explains them."""
