"""Triton functions that the kernels around a matrix product share, and their signals' layout."""
