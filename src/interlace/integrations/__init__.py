"""Adapters that put Interlace's operators into other programs; docs/integrations.md lists them.

Each module is imported on its own, and imports its program only when it is called:
``from interlace.integrations import symm_mem``. None of the programs is a dependency.
"""
