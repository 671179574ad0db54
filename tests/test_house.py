"""What keeps the house in one's head."""

from __future__ import annotations

import ast
import re

from tests.house import PACKAGE, ROOT, repeated_classes

SHARED = {
    # A kernel's launch, and the record of one in a trace. Users have each from another module.
    "Launch": ["comm/launching/kernels.py", "tracing/events.py"],
}


def test_a_class_name_means_one_thing() -> None:
    trees = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    assert repeated_classes(trees) == SHARED


_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
_DESCRIPTION = re.compile(r"^    [\w*][\w*, ]*: ([a-z]\w*)", re.MULTILINE)
_NAMES = {"bfloat16", "bool", "dtype", "float32", "int", "int32", "int64", "torch", "x"}
"""Words that descriptions may begin with, as they are names."""


def test_descriptions_of_arguments_begin_with_a_capital_letter() -> None:
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "") + "\n"
                for section in _SECTION.finditer(text):
                    small = set(_DESCRIPTION.findall(section[1])) - _NAMES
                    assert not small, f"{file.relative_to(ROOT)}: {small}"
