"""Tools that check operators and machines.

:mod:`interlace.testing.cases` has calls of every operator with known results,
:mod:`interlace.testing.soak` makes such calls at random, and :mod:`interlace.testing.gin_check`
tries GPU-initiated puts; see ``docs/reliability.md``. Protocols are checked by the package
``interlace_explorer``.
"""
