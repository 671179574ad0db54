"""Tools that check operators and machines.

:mod:`interlace.testing.cases` has calls of every operator with known results, and
:mod:`interlace.testing.soak` makes such calls at random; see ``docs/reliability.md``. Protocols are
checked by the package ``interlace_explorer``.
"""
