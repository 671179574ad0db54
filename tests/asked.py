"""What ranks ask one another on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from interlace.comm.host.agreement import Agreement


@contextlib.contextmanager
def asked() -> Iterator[list[str]]:
    """The labels of all questions that this rank asks within the context, as they come."""
    ask, labels = Agreement._ask, []

    def recorded(self: Agreement, label: str, value: object) -> list[Any]:
        labels.append(label)
        return ask(self, label, value)

    with mock.patch.object(Agreement, "_ask", recorded):
        yield labels
