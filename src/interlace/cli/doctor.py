"""``interlace doctor``: what this machine can do, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import platform
import shutil
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from interlace.cli.console import make_console
from interlace.cli.options import MOST_RANKS
from interlace.cli.outputs import Outputs
from interlace.costs.known_profiles import profile_of
from interlace.environment import LIMIT_VARIABLE, byte_count
from interlace.errors import ArgumentError, BackendError
from interlace.units import format_memory

OK, MISSING, ABSENT = "ok", "missing", "not here"
"""The statuses of a check: fine; needed by a backend that could work here; not part of this
machine, which is no fault.
"""

_COLOURS = {OK: "green", MISSING: "red", ABSENT: "dim"}

_MOST_LETTERS = 60
"""Letters of a running program's command that are shown."""

_RANK_BYTES = 2**31
"""The GPU memory of a small rank: its context, torch, and the operators' workspaces."""


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


def run(outputs: Outputs) -> int:
    """Print all checks; return the exit code: 0 if at least one backend is usable."""
    console = make_console()
    with console.status("Looking at packages, devices and links"):
        rows = check_all()
        from interlace.cli import machine

        header = machine.header()
    usable = [
        name
        for name in ("cpu", "cuda")
        if any(row.check == f"backend {name}" and row.status == OK for row in rows)
    ]
    print_rows(console, rows, verdicts=2)
    if usable:
        console.print(f"Usable: {' and '.join(usable)}. Try: interlace demo", style="green")
    else:
        console.print(
            "No backend is usable; the rows marked missing say what to do.", style="bold red"
        )
    outputs.write_json(
        lambda: {**header, "usable": usable, "checks": [dataclasses.asdict(row) for row in rows]}
    )
    return 0 if usable else 1


def print_rows(console: Console, rows: list[Row], *, verdicts: int = 0) -> None:
    """Print checks as a table, whose last rows are set apart as verdicts."""
    table = Table(show_lines=False)
    for heading in ("check", "status", "what it means", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            row.check,
            Text(row.status, _COLOURS[row.status]),
            row.meaning,
            row.action,
            end_section=bool(verdicts) and row is rows[-1 - verdicts],
        )
    console.print(table)


def check_all() -> list[Row]:
    """Return all checks; the last two rows are the verdicts on the backends."""
    rows = [*check_packages(), *check_cpu(), check_limit(), *check_programs()]
    cuda = check_cuda()
    # The interpreter needs shared memory and numpy, compiled kernels do not.
    cpu_needs = _missing(rows, ignored=())
    cuda_needs = _missing([*rows, *cuda], ignored=("shared memory", "numpy"))
    has_gpu = any(row.check == "GPU 0" for row in cuda)
    return [
        *rows,
        *cuda,
        _verdict(
            "backend cpu", cpu_needs, "real kernels in Triton's interpreter, any number of ranks"
        ),
        _verdict("backend cuda", cuda_needs, "compiled kernels over peer access")
        if has_gpu
        else Row(
            "backend cuda",
            ABSENT,
            "no GPU that torch can use: kernels cannot run at their speed here",
        ),
    ]


def _missing(rows: list[Row], ignored: tuple[str, ...]) -> list[str]:
    return [row.check for row in rows if row.status == MISSING and row.check not in ignored]


def _verdict(check: str, needs: list[str], works: str) -> Row:
    if needs:
        meaning = f"not usable for want of: {', '.join(needs)}"
        return Row(check, MISSING, meaning, "see the rows marked missing")
    return Row(check, OK, works)


# What needs no GPU: packages, Gloo and shared memory


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
    absent = (
        "compiles the kernels, and interprets them on the CPU",
        "pip install triton (Linux only)",
    )
    old = f"{triton}; kernels are written for 3.6 and later", "pip install -U triton"
    is_right = bool(triton) and _version(triton) >= (3, 6)
    rows.append(needed("triton", is_right, triton, *(old if triton else absent)))
    absent = "the interpreter computes with it", "pip install numpy"
    new = (
        f"{numpy}; the interpreter of Triton {triton} needs a version below 2.4",
        "pip install 'numpy<2.4' (only the cpu backend needs it)",
    )
    needs_old = bool(triton) and _version(triton) < (3, 7)
    is_right = bool(numpy) and not (needs_old and _version(numpy) >= (2, 4))
    fits = f"{numpy}, which fits Triton {triton or '(none)'}"
    rows.append(needed("numpy", is_right, fits, *(new if numpy else absent)))
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
    try:
        import torch.distributed as dist

        gloo = dist.is_available() and dist.is_gloo_available()
    except ImportError:
        gloo = False
    memory = Row("shared memory", OK, "memfd_create, and descriptors passed over Unix sockets")
    try:
        _pass_memory()
    except (OSError, AttributeError, ValueError, BackendError) as error:
        meaning = f"processes cannot share memory: {first_line(error)}"
        action = "use Linux; in a sandbox, allow memfd_create and Unix sockets"
        memory = Row("shared memory", MISSING, meaning, action)
    return [
        needed(
            "Gloo",
            gloo,
            "process groups of CPU ranks",
            "torch was built without it; ranks agree on the host through it",
            "install a stock torch",
        ),
        memory,
    ]


def check_limit() -> Row:
    """Return the limit of symmetric memory, and how to see what a program holds."""
    check, held = "limit of workspaces", "a row for each running program"
    try:
        limit = byte_count(LIMIT_VARIABLE)
    except ArgumentError as error:
        return Row(check, MISSING, str(error), f"unset {LIMIT_VARIABLE}, or correct it")
    if limit is None:
        meaning = f"none ({LIMIT_VARIABLE} is not set): operators take the memory that they need"
    else:
        meaning = f"{format_memory(limit)} of symmetric memory per rank and group, for operators"
    return Row(check, OK, f"{meaning}; {held} says what its operators hold")


def check_programs() -> list[Row]:
    """Return what each running program of this user holds of symmetric memory."""
    try:
        from interlace.comm.host.held_memory import running_programs
    except ImportError:  # without torch there is none
        return []
    return [
        Row(f"program {number}", OK, f"{command[:_MOST_LETTERS]}: {'; '.join(map(str, held))}")
        for number, command, held in running_programs()
    ]


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


# Devices, links, memory and compiler


def check_cuda() -> list[Row]:
    """Check everything that ranks on GPUs need besides packages."""
    try:
        import torch
    # A missing torch is a row of its own already.
    except Exception:
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
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl, has_bindings = nccl_version(), _importable("cuda.bindings.driver")
    duty = "maps the GPUs' memory side by side"
    # The first GPU stands for all in the checks of triggers and profiles.
    return [
        Row("driver", OK, driver or "present, version unknown"),
        *(Row(f"GPU {i}", OK, _in_words(gpu)) for i, gpu in enumerate(gpus)),
        *_links(torch, len(gpus)),
        _sharing([gpu.total_memory for gpu in gpus]),
        _queues(),
        needed("cuda-bindings", has_bindings, duty, duty, "pip install cuda-bindings"),
        _triggers(torch.device("cuda", 0)),
        *_compiler(),
        needed(
            "NCCL",
            nccl,
            f"{nccl}; process groups, and what unfused calls use",
            "process groups of GPU ranks",
            "install a stock CUDA build of torch",
        ),
        _registration(),
        Row("NVLink multicast", OK, "not used, so nothing need be configured for it"),
        _profile(gpus[0].name, gpus[0].multi_processor_count),
    ]


def _in_words(gpu: Any) -> str:
    """Return a GPU's name, memory, number of SMs and architecture."""
    memory, processors = f"{gpu.total_memory / 2**30:.0f} GiB", f"{gpu.multi_processor_count} SMs"
    return f"{gpu.name}, {memory}, {processors}, sm_{gpu.major}{gpu.minor}"


def _triggers(device: Any) -> Row:
    """Check that copies can wait for a kernel's counter.

    That cannot be looked at without cuda-bindings, which is a row of its own.
    """
    check = "stream memory operations"
    # The look itself goes through the driver's bindings.
    if not _importable("cuda.bindings.driver"):
        return Row(check, ABSENT, "not looked at: cuda-bindings is not installed")
    from interlace.comm.groups.copies import supports_triggers

    if supports_triggers(device):
        return Row(check, OK, "copies can wait for a kernel's counters (triggered transfers)")
    meaning = (
        "this driver has none: no copy can wait for a kernel's counters, and triggered transfers "
        "are refused"
    )
    return Row(check, ABSENT, meaning)


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
        row = Row("peer access", OK, f"every GPU reaches every other's memory\n{matrix}")
    else:
        action = (
            "form groups of GPUs that reach each other; in a virtual machine, ask for peer-to-peer "
            "access"
        )
        meaning = f"some GPUs cannot reach others' memory\n{matrix}"
        row = Row("peer access", MISSING, meaning, action)
    return [row, _nvlink(count)]


def _sharing(memory: list[int]) -> Row:
    """Return how many ranks GPUs of so many bytes hold by time slices, each with a context."""
    held = [min(max(1, nbytes // _RANK_BYTES), MOST_RANKS) for nbytes in memory]
    meaning = (
        f"{' + '.join(map(str, held))} of {MOST_RANKS} fit: ranks can share a GPU by time "
        "slices, so one GPU is enough to write "
        f"and test a fused kernel. Times mean nothing then"
    )
    return Row("ranks per GPU", OK, meaning, "interlace.launch(worker, n, backend='cuda')")


def _queues() -> Row:
    """Say how many queues lead from a process to a GPU, and whether its SMs are limited."""
    from interlace.comm.host.members import PROCESSOR_LIMIT, limits_processors

    check, limit = "queues to a GPU", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if limits_processors():
        return Row(
            check,
            MISSING,
            f"{PROCESSOR_LIMIT} limits the SMs; cuBLAS was seen to leave parts of products out",
            f"unset {PROCESSOR_LIMIT}",
        )
    if limit == "1":
        meaning = (
            "1 by CUDA_DEVICE_MAX_CONNECTIONS: streams wait for one another, and CUDA graphs with "
            "triggered transfers or slices are refused"
        )
        return Row(check, ABSENT, meaning, "unset it, unless the program needs it")
    source = "CUDA_DEVICE_MAX_CONNECTIONS" if limit else "CUDA's default; 2 under MPS"
    return Row(check, OK, f"{limit or 8} ({source}); as many streams can wait at once")


def _registration() -> Row:
    """Say whether NCCL may register memory in CUDA graphs, which makes some of them hang."""
    check, value = "NCCL in CUDA graphs", os.environ.get("NCCL_GRAPH_REGISTER", "")
    if value not in ("", "0"):
        meaning = (
            f"NCCL_GRAPH_REGISTER={value}: a graph in which NCCL sends a result of Interlace to "
            "memory of torch's waits for ever"
        )
        return Row(check, ABSENT, meaning, "unset NCCL_GRAPH_REGISTER, or clone such results")
    return Row(check, OK, "registers no memory (NCCL_GRAPH_REGISTER=0), and may send results on")


def _nvlink(count: int) -> Row:
    """Count the active NVLinks of each GPU, by NVML if its Python package is installed."""
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
        return Row("NVLink", ABSENT, f"not looked at: {first_line(error)}")
    if not any(active):
        return Row("NVLink", ABSENT, "none: peers are reached over PCIe, which works, slower")
    return Row("NVLink", OK, "active links by GPU: " + ", ".join(str(links) for links in active))


def _compiler() -> list[Row]:
    """Triton compiles a small C stub for every kernel that it launches."""
    compiler = shutil.which(os.environ.get("CC", "")) or next(
        filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        needed(
            "C compiler",
            compiler,
            f"{Path(compiler or '').name}, for Triton's launch stubs",
            "Triton compiles a launch stub for every kernel",
            "install gcc or clang, or set CC",
        ),
        needed(
            "Python headers",
            header.is_file(),
            "for Triton's launch stubs",
            "Triton's launch stubs include Python.h",
            f"install python{version}-dev",
        ),
    ]


def _profile(gpu: str, processors: int) -> Row:
    """Say by which profile impl="auto" predicts times on a GPU."""
    profile = profile_of(gpu, processors)
    status, action = (ABSENT, "interlace tune machine") if profile.is_guess else (OK, "")
    return Row("machine profile", status, f"impl='auto' predicts times: {profile.source}", action)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
