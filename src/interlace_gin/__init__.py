"""GPU-initiated puts over the network (GIN), for kernels of users: compiled, and never run on GPUs.

:func:`open_gin` is the host's side; :mod:`interlace_gin.language` has the functions of kernels.
``README.md`` shows how to use both, and how to try them::

    from interlace_gin import open_gin
    from interlace_gin.language import gin_put, gin_wait
"""

from interlace_gin.gin import Gin, Window, open_gin

__all__ = ["Gin", "Window", "open_gin"]
