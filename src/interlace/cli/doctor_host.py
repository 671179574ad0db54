"""The checks of ``interlace doctor`` that need no GPU: packages, Gloo and shared memory."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket

from interlace.errors import BackendError

OK, MISSING, ABSENT = "ok", "missing", "not here"
"""The statuses of a check: fine; needed by a backend that could work here; not part of this
machine, which is no fault.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        check: The thing that was looked at.
        status: ``OK``, ``MISSING`` or ``ABSENT``.
        meaning: The result of the check, and its meaning.
        action: The advice to the user; empty if there is nothing to do.
    """

    check: str
    status: str
    meaning: str
    action: str = ""


def needed(check: str, is_there: object, works: str, missing: str, action: str) -> Row:
    """Return the row of a thing that a backend cannot do without.

    Args:
        check: The thing.
        is_there: Whether it is there.
        works, missing: The meaning if it is there, and if it is not.
        action: The advice if it is not.
    """
    return Row(check, OK, works) if is_there else Row(check, MISSING, missing, action)


def check_packages() -> list[Row]:
    """Check the versions of Python and of the packages that kernels need."""
    from interlace.cli.machine import package_version

    rows = [
        Row(
            "Python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        )
    ]
    try:
        import torch

        build = (
            f"CUDA {torch.version.cuda}"
            if torch.version.cuda
            else f"ROCm {torch.version.hip}"
            if torch.version.hip
            else "CPU"
        )
        rows.append(Row("torch", OK, f"{torch.__version__}, {build} build"))
    # A broken installation fails in many ways.
    except Exception as error:
        rows.append(
            Row("torch", MISSING, f"cannot be imported: {first_line(error)}", "pip install torch")
        )
        return rows
    triton, numpy = package_version("triton"), package_version("numpy")
    if not triton:
        meaning = "compiles the kernels, and interprets them on the CPU"
        rows.append(Row("triton", MISSING, meaning, "pip install triton (Linux only)"))
    elif _version(triton) < (3, 6):
        meaning = f"{triton}; kernels are written for 3.6 and later"
        rows.append(Row("triton", MISSING, meaning, "pip install -U triton"))
    else:
        rows.append(Row("triton", OK, triton))
    if not numpy:
        rows.append(Row("numpy", MISSING, "the interpreter computes with it", "pip install numpy"))
    elif triton and _version(triton) < (3, 7) and _version(numpy) >= (2, 4):
        meaning = f"{numpy}; the interpreter of Triton {triton} needs a version below 2.4"
        action = "pip install 'numpy<2.4' (only the cpu backend needs it)"
        rows.append(Row("numpy", MISSING, meaning, action))
    else:
        rows.append(Row("numpy", OK, f"{numpy}, which fits Triton {triton or '(none)'}"))
    return rows


def _version(text: str) -> tuple[int, int]:
    """Parse ``"3.6.0+git"`` as ``(3, 6)``."""
    numbers = [
        "".join(c for c in part if c.isdigit()) for part in text.split("+")[0].split(".")[:2]
    ]
    major, minor = (int(number or 0) for number in [*numbers, "0"][:2])
    return major, minor


def check_cpu() -> list[Row]:
    """Check everything that ranks on the CPU need besides packages."""
    rows = []
    try:
        import torch.distributed as dist

        gloo = dist.is_available() and dist.is_gloo_available()
    except ImportError:
        gloo = False
    rows.append(
        needed(
            "Gloo",
            gloo,
            "process groups of CPU ranks",
            "torch was built without it; ranks agree on the host through it",
            "install a stock torch",
        )
    )
    try:
        _pass_memory()
        rows.append(
            Row("shared memory", OK, "memfd_create, and descriptors passed over Unix sockets")
        )
    except (OSError, AttributeError, ValueError, BackendError) as error:
        meaning = f"processes cannot share memory: {first_line(error)}"
        action = "use Linux; in a sandbox, allow memfd_create and Unix sockets"
        rows.append(Row("shared memory", MISSING, meaning, action))
    return rows


def _pass_memory() -> None:
    """Do in one process what ranks do: write shared memory, send its descriptor through a socket,
    read it there.
    """
    from interlace.comm.host.descriptors import connect, open_mailbox

    with open_mailbox() as (directory, mailbox), connect(directory, 0) as sender:
        mailbox.settimeout(5)
        fd = os.memfd_create("interlace-doctor")
        try:
            os.write(fd, b"interlace")
            socket.send_fds(sender, [b"fd"], [fd])
        finally:
            os.close(fd)
        _, (received,), _, _ = socket.recv_fds(mailbox, 2, 1)
        try:
            if os.pread(received, 9, 0) != b"interlace":
                raise OSError("memory arrived with other contents")
        finally:
            os.close(received)


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
