"""Let programs that Inductor writes call operators past PyTorch's dispatcher.

The dispatcher's way to a kernel in Python takes the host as long as a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interlace.comm.groups.registration import FROM_INDUCTOR, entrances


def call_past_dispatcher() -> None:
    """Tell Inductor how to write calls of the operators, in all programs of this process from here
    on. Without its register of such ways, which is not public, it writes them as it always does.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import (
            CUSTOM_EXTERN_KERNEL_CODEGEN,
            CustomCodegen,
        )
    except ImportError:
        return
    for each in entrances():
        name = f"torch.ops.interlace.{each.operator.__name__}"
        CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(name, CustomCodegen(python=_write))


def _write(node: Any, write_line: Callable[[str], None]) -> None:
    """Write the call of an operator into a program.

    Args:
        node: Inductor's ``FallbackKernel``.
    """
    arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
    write_line(f"{node.get_name()} = {node.python_kernel_name}.{FROM_INDUCTOR}({arguments})")
