"""Adapters that put Interlace's operators into other programs, which docs/integrations.md lists.

Each module is imported on its own, and imports its program only when it is called:
``from interlace.integrations import symm_mem``. None of the programs is a dependency.
"""
