"""What keeps the house in one's head."""

from __future__ import annotations

import ast

from tests.house import PACKAGE, repeated_classes

SHARED = {
    # A kernel's launch, and the record of one in a trace; what was found in graphs, and by the
    # explorer. Users have each of them from another module.
    "Launch": ["comm/launching/kernels.py", "tracing/events.py"],
    "Report": ["compile/report.py", "testing/report.py"],
}


def test_a_class_name_means_one_thing() -> None:
    trees = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    assert repeated_classes(trees) == SHARED
