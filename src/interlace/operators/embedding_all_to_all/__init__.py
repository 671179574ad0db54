"""Pooled embedding tables and the all-to-all of their rows, one fused kernel in each direction; see
README.md.
"""
