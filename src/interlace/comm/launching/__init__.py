"""Launch kernels of a group: their arguments, their programs, and what all kernels know."""
