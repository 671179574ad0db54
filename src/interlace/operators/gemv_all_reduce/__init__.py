"""GEMV + AllReduce; see README.md."""
