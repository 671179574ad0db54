"""What the operators around a matrix product ``x [M, K] @ w[N, K].T`` have in common: rules,
splits, configuration, reference.
"""
