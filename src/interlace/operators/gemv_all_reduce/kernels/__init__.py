"""The kernels of ``gemv_all_reduce``, one module per protocol; README.md explains them."""
