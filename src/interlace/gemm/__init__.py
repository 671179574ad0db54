"""Shared parts of the operators around a matrix product ``x [M, K] @ w[N, K].T``: rules, splits,
configuration, reference.
"""
