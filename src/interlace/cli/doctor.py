"""``interlace doctor``: what this machine can do, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import importlib.util
import os
import platform
import shutil
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rich.table import Table

from interlace import tuning
from interlace.cli.console import command_line, make_console, now
from interlace.cli.outputs import Outputs
from interlace.errors import BackendError

OK, MISSING, ABSENT = "ok", "missing", "not here"
"""A check's status: fine; wanted by a backend that could work here; not part of this machine, which
is no fault.
"""

_MOST_RANKS = 8  # that an operator can have
_RANK_BYTES = 2**31
"""Memory of a GPU that a small rank takes: its context, torch, and the operators' workspaces."""

_COLOURS = {OK: "green", MISSING: "red", ABSENT: "dim"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        check: what was looked at.
        status: ``OK``, ``MISSING`` or ``ABSENT``.
        meaning: what was found, and what it means.
        action: what to do; empty if nothing.
    """

    check: str
    status: str
    meaning: str
    action: str = ""


def run(outputs: Outputs) -> int:
    """Print all checks; return the exit code: 0 if at least one backend is usable."""
    console = make_console()
    with console.status("Looking at packages, devices and links"):
        rows = check_all()
        from interlace.cli import machine

        described = machine.describe()
    usable = [
        name
        for name in ("cpu", "cuda")
        if any(row.check == f"backend {name}" and row.status == OK for row in rows)
    ]
    table = Table(show_lines=False)
    for heading in ("check", "status", "what it means", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            row.check,
            f"[{_COLOURS[row.status]}]{row.status}[/]",
            row.meaning,
            row.action,
            end_section=row is rows[-3],
        )
    console.print(table)
    if usable:
        console.print(f"Usable: {' and '.join(usable)}. Try: interlace demo", style="green")
    else:
        console.print(
            "No backend is usable; the rows marked missing say what to do.", style="bold red"
        )
    outputs.write_json(
        lambda: {
            "machine": described,
            "command": command_line(),
            "date": now(),
            "usable": usable,
            "checks": [dataclasses.asdict(row) for row in rows],
        }
    )
    return 0 if usable else 1


def check_all() -> list[Row]:
    """All checks; the last two rows are the verdicts on the backends."""
    rows = [*_packages(), *_cpu()]
    cuda = _cuda()
    cpu_needs = _missing(rows, except_for=())
    cuda_needs = _missing([*rows, *cuda], except_for=("shared memory", "numpy"))
    if not cuda_present(cuda):
        cuda_row = Row(
            "backend cuda",
            ABSENT,
            "no GPU that torch can use: kernels cannot run at their speed here",
            "",
        )
    else:
        cuda_row = _verdict("backend cuda", cuda_needs, "compiled kernels over peer access")
    return [
        *rows,
        *cuda,
        _verdict(
            "backend cpu", cpu_needs, "real kernels in Triton's interpreter, any number of ranks"
        ),
        cuda_row,
    ]


def cuda_present(rows: list[Row]) -> bool:
    return any(row.check.startswith("GPU 0") and row.status == OK for row in rows)


def _missing(rows: list[Row], except_for: tuple[str, ...]) -> list[str]:
    return [row.check for row in rows if row.status == MISSING and row.check not in except_for]


def _verdict(check: str, needs: list[str], works: str) -> Row:
    if needs:
        return Row(
            check,
            MISSING,
            f"not usable for want of: {', '.join(needs)}",
            "see the rows marked missing",
        )
    return Row(check, OK, works)


# Packages


def _packages() -> list[Row]:
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
    except Exception as error:  # a broken installation fails in many ways
        rows.append(
            Row("torch", MISSING, f"cannot be imported: {_first_line(error)}", "pip install torch")
        )
        return rows
    triton, numpy = package_version("triton"), package_version("numpy")
    if not triton:
        rows.append(
            Row(
                "triton",
                MISSING,
                "compiles the kernels, and interprets them on the CPU",
                "pip install triton (Linux only)",
            )
        )
    elif _version(triton) < (3, 6):
        rows.append(
            Row(
                "triton",
                MISSING,
                f"{triton}; kernels are written for 3.6 and later",
                "pip install -U triton",
            )
        )
    else:
        rows.append(Row("triton", OK, triton))
    if not numpy:
        rows.append(Row("numpy", MISSING, "the interpreter computes with it", "pip install numpy"))
    elif triton and _version(triton) < (3, 7) and _version(numpy) >= (2, 4):
        meaning = f"{numpy}; the interpreter of Triton {triton} needs a version below 2.4"
        rows.append(
            Row(
                "numpy", MISSING, meaning, "pip install 'numpy<2.4' (only the cpu backend needs it)"
            )
        )
    else:
        rows.append(Row("numpy", OK, f"{numpy}, which fits Triton {triton or '(none)'}"))
    return rows


def _version(text: str) -> tuple[int, int]:
    """``"3.6.0+git"`` -> ``(3, 6)``."""
    numbers = [
        "".join(c for c in part if c.isdigit()) for part in text.split("+")[0].split(".")[:2]
    ]
    major, minor = (int(number or 0) for number in [*numbers, "0"][:2])
    return major, minor


# The CPU backend


def _cpu() -> list[Row]:
    rows = []
    try:
        import torch.distributed as dist

        gloo = dist.is_available() and dist.is_gloo_available()
    except ImportError:
        gloo = False
    rows.append(
        Row("Gloo", OK, "process groups of CPU ranks")
        if gloo
        else Row(
            "Gloo",
            MISSING,
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
        meaning = f"processes cannot share memory: {_first_line(error)}"
        rows.append(
            Row(
                "shared memory",
                MISSING,
                meaning,
                "use Linux; in a sandbox, allow memfd_create and Unix sockets",
            )
        )
    return rows


def _pass_memory() -> None:
    """Do in one process what ranks do: write shared memory, send its descriptor through a socket,
    read it there.
    """
    from interlace.comm.descriptors import connect, listening

    with listening() as (directory, listener):
        sender = connect(directory, 0)
        if sender is None:
            raise OSError("a socket takes no connection")
        listener.settimeout(5)
        receiver, _ = listener.accept()
        with sender, receiver:
            receiver.settimeout(5)
            fd = os.memfd_create("interlace-doctor")
            try:
                os.write(fd, b"interlace")
                socket.send_fds(sender, [b"fd"], [fd])
            finally:
                os.close(fd)
            _, (received,), _, _ = socket.recv_fds(receiver, 2, 1)
            try:
                if os.pread(received, 9, 0) != b"interlace":
                    raise OSError("memory arrived with other contents")
            finally:
                os.close(received)


# The CUDA backend


def _cuda() -> list[Row]:
    try:
        import torch
    except Exception:  # already a row of its own
        return [Row("GPUs", ABSENT, "unknown without torch")]
    from interlace.cli.machine import driver_version, nccl_version

    driver = driver_version()
    if not torch.cuda.is_available():
        if not driver:
            return [Row("GPUs", ABSENT, "no NVIDIA driver here; the cpu backend needs none")]
        action = (
            "install a CUDA build of torch"
            if not torch.version.cuda
            else "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
        return [Row("GPUs", MISSING, f"driver {driver} is here, but torch finds no GPU", action)]
    count = torch.cuda.device_count()
    rows = [Row("driver", OK, driver or "present, version unknown")]
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        meaning = f"{properties.name}, {memory}, {properties.multi_processor_count} SMs, sm_{properties.major}{properties.minor}"
        rows.append(Row(f"GPU {i}", OK, meaning))
    rows += _links(torch, count)
    rows.append(_sharing(torch, count))
    rows.append(
        Row("cuda-bindings", OK, "maps the GPUs' memory side by side")
        if _importable("cuda.bindings.driver")
        else Row(
            "cuda-bindings",
            MISSING,
            "maps the GPUs' memory side by side",
            "pip install cuda-bindings",
        )
    )
    rows.append(_triggers(torch.device("cuda", 0)))
    rows += _compiler()
    nccl = nccl_version()
    rows.append(
        Row("NCCL", OK, f"{nccl}; process groups, and what unfused calls use")
        if nccl
        else Row(
            "NCCL", MISSING, "process groups of GPU ranks", "install a stock CUDA build of torch"
        )
    )
    rows.append(Row("NVLink multicast", OK, "not used, so nothing need be configured for it"))
    rows.append(_tables(torch.cuda.get_device_name(0)))
    return rows


def _triggers(device: Any) -> Row:
    """Whether copies can wait for a kernel's counter; not looked at without cuda-bindings, which is
    a row of its own.
    """
    check = "stream memory operations"
    if not _importable("cuda.bindings.driver"):
        return Row(check, ABSENT, "not looked at: cuda-bindings is not installed")
    from interlace.comm.copies import supports_triggers

    if supports_triggers(device):
        return Row(check, OK, "copies can wait for a kernel's counters (triggered transfers)")
    return Row(
        check,
        ABSENT,
        (
            "this driver has none: no copy can wait for a kernel's counters; impl='triggered' is "
            "refused"
        ),
    )


def _links(torch: Any, count: int) -> list[Row]:
    if count == 1:
        return [Row("peer access", ABSENT, "one GPU: ranks share it")]
    reach = [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)]
        for i in range(count)
    ]
    matrix = "\n".join(
        f"{i}: " + " ".join("x" if ok else "-" for ok in line) for i, line in enumerate(reach)
    )
    if all(all(line) for line in reach):
        rows = [Row("peer access", OK, f"every GPU reaches every other's memory\n{matrix}")]
    else:
        action = "form groups of GPUs that reach each other; in a virtual machine, ask for peer-to-peer access"
        rows = [
            Row("peer access", MISSING, f"some GPUs cannot reach others' memory\n{matrix}", action)
        ]
    rows.append(_nvlink(count))
    return rows


def _sharing(torch: Any, count: int) -> Row:
    """How many ranks the GPUs can hold by time slices; each has a context and memory of its own."""
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    held = [min(max(1, each // _RANK_BYTES), _MOST_RANKS) for each in memory]
    meaning = (
        f"{' + '.join(map(str, held))} of {_MOST_RANKS} fit: ranks can share a GPU by time "
        "slices, so one GPU is enough to write "
        f"and test a fused kernel. Times mean nothing then"
    )
    return Row("ranks per GPU", OK, meaning, "interlace.launch(worker, n, backend='cuda')")


def _nvlink(count: int) -> Row:
    """Active NVLinks of each GPU, by NVML if its Python package is here."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return Row(
            "NVLink",
            ABSENT,
            "not looked at: NVML's Python package is not installed",
            "optional: pip install nvidia-ml-py",
        )
    try:
        pynvml.nvmlInit()
        active = []
        for i in range(count):
            handle, links = pynvml.nvmlDeviceGetHandleByIndex(i), 0
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    links += pynvml.nvmlDeviceGetNvLinkState(handle, link)
                except pynvml.NVMLError:
                    break
            active.append(links)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Row("NVLink", ABSENT, f"not looked at: {_first_line(error)}")
    if not any(active):
        return Row("NVLink", ABSENT, "none: peers are reached over PCIe, which works, slower")
    return Row("NVLink", OK, "active links by GPU: " + ", ".join(str(links) for links in active))


def _compiler() -> list[Row]:
    """Triton compiles a small C stub for every kernel that it launches."""
    found = shutil.which(os.environ.get("CC", "")) or next(
        filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        Row("C compiler", OK, f"{Path(found).name}, for Triton's launch stubs")
        if found
        else Row(
            "C compiler",
            MISSING,
            "Triton compiles a launch stub for every kernel",
            "install gcc or clang, or set CC",
        ),
        Row("Python headers", OK, "for Triton's launch stubs")
        if header.is_file()
        else Row(
            "Python headers",
            MISSING,
            "Triton's launch stubs include Python.h",
            f"install python{version}-dev",
        ),
    ]


def _tables(gpu: str) -> Row:
    ending = tuning.file_name("", gpu)
    folder = importlib.resources.files("interlace.tuning") / "tables"
    fitting = (
        sorted(file.name.split(".")[0] for file in folder.iterdir() if file.name.endswith(ending))
        if folder.is_dir()
        else []
    )
    if fitting:
        return Row("tuned tables", OK, f"for {gpu}: {', '.join(fitting)}")
    meaning = f"none for {gpu}: default configurations are used, and impl='auto' is always fused"
    return Row("tuned tables", ABSENT, meaning, "interlace tune OPERATOR --table FILE")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


__all__ = ["ABSENT", "MISSING", "OK", "Row", "check_all", "cuda_present", "run"]
