"""What keeps the house in one's head."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house import OTHER_PACKAGES, PACKAGE, ROOT, repeated_classes

SHARED = {
    "interlace": {
        # A kernel's launch, and the record of one in a trace. Users have each from another module.
        "Launch": ["comm/launching/kernels.py", "tracing/events.py"],
    },
    "interlace_sim": {
        # The models of T3 and of ASTRA-sim have words of their own beside the simulator's.
        "Case": ["t3/reproduce.py", "validate.py"],
        "Comparison": ["between_nodes.py", "t3/measured.py"],
        "Gpu": ["machine.py", "t3/gpu.py"],
        "Group": ["collectives.py", "t3/gpu.py"],
        "Part": ["astra/algorithms.py", "t3/gpu.py"],
        "Product": ["calibrate.py", "t3/product.py"],
        "Study": ["reproduce.py", "t3/reproduce.py"],
        # What a file describes, and its state in a simulation.
        "Memory": ["t3/machine.py", "t3/memory.py"],
        "Network": ["astra/config.py", "astra/network.py"],
    },
}


@pytest.mark.parametrize("package", [PACKAGE, *OTHER_PACKAGES], ids=lambda package: package.name)
def test_a_class_name_means_one_thing(package: Path) -> None:
    """Each package is a name space of its own."""
    assert repeated_classes(package) == SHARED.get(package.name, {})


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


def test_kernels_name_no_function_of_tritons_module() -> None:
    """Programs replace some: with SGLang's ``triton.next_power_of_2`` no kernel compiles."""
    kernels, found = 0, []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if not any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                continue
            kernels += 1
            found += [
                f"{file.relative_to(ROOT)}: {ast.unparse(each)}"
                for statement in node.body
                for each in ast.walk(statement)
                if isinstance(each, ast.Attribute)
                and isinstance(each.value, ast.Name)
                and each.value.id == "triton"
            ]
    assert kernels > 100
    assert found == []
