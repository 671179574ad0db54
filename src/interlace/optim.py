"""Updates of embedding tables that are fused into the backward pass of
:func:`interlace.embedding_all_to_all`.
"""

from interlace.operators.embedding_all_to_all.update import SGD, RowWiseAdagrad

__all__ = ["SGD", "RowWiseAdagrad"]
