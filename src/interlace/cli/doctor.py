"""``interlace doctor``: what this machine can do, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from interlace.cli.console import make_console
from interlace.cli.doctor_cuda import check_cuda
from interlace.cli.doctor_host import ABSENT, MISSING, OK, Row, check_cpu, check_packages
from interlace.cli.outputs import Outputs

_COLOURS = {OK: "green", MISSING: "red", ABSENT: "dim"}


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
            **header,
            "usable": usable,
            "checks": [dataclasses.asdict(row) for row in rows],
        }
    )
    return 0 if usable else 1


def check_all() -> list[Row]:
    """Return all checks; the last two rows are the verdicts on the backends."""
    rows = [*check_packages(), *check_cpu()]
    cuda = check_cuda()
    # The interpreter needs shared memory and numpy, compiled kernels do not.
    cpu_needs = _missing(rows, ignored=())
    cuda_needs = _missing([*rows, *cuda], ignored=("shared memory", "numpy"))
    if not cuda_present(cuda):
        meaning = "no GPU that torch can use: kernels cannot run at their speed here"
        cuda_row = Row("backend cuda", ABSENT, meaning)
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
    """Return whether torch can use a GPU."""
    return any(row.check.startswith("GPU 0") and row.status == OK for row in rows)


def _missing(rows: list[Row], ignored: tuple[str, ...]) -> list[str]:
    return [row.check for row in rows if row.status == MISSING and row.check not in ignored]


def _verdict(check: str, needs: list[str], works: str) -> Row:
    if needs:
        meaning = f"not usable for want of: {', '.join(needs)}"
        return Row(check, MISSING, meaning, "see the rows marked missing")
    return Row(check, OK, works)


__all__ = ["ABSENT", "MISSING", "OK", "Row", "check_all", "cuda_present", "run"]
