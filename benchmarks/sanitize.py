"""Run every implementation of every operator under NVIDIA's compute-sanitizer.

    python benchmarks/sanitize.py --json sanitize.json
    python benchmarks/sanitize.py --tool racecheck --operators gemm_all_to_all

Each rank is a process under the sanitizer; the ranks make the calls of ``interlace.testing.cases``
one after another, forward and backward, and each call's result is checked as well. The process
group is Gloo, so that no kernel of NCCL runs; a call that Gloo cannot serve on GPUs is skipped and
listed. Kernels are many times slower than usual, so waits may last 120 s. The exit code is 1 if the
sanitizer reported an error in any kernel, or a result was wrong.

Of the tools, ``memcheck`` finds accesses outside of allocations, in local, shared, global and
peers' memory; ``racecheck`` looks at shared memory only; ``synccheck`` at barriers. ``initcheck``
does not see what other processes write, so it reports memory that peers have written as
uninitialised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "none")
DEADLINE_S = 120
_PREFIX = "========="
_NO_ERRORS = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application",
    "No attachable",
)
_FOREIGN = re.compile(r"nccl", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Report:
    """One error that the sanitizer reported.

    Attributes:
        what: The first line, such as ``Invalid __global__ read of size 4 bytes``.
        kernel: The kernel's name; empty if the report names none.
        lines: All lines of the report.
    """

    what: str
    kernel: str
    lines: tuple[str, ...]


def parse(log: str) -> list[Report]:
    """The errors in a log of compute-sanitizer; those in NCCL's kernels are left out."""
    return [report for report in _reports(log) if not _FOREIGN.search(report.kernel)]


def _reports(log: str) -> Iterator[Report]:
    """A report begins at a line indented by one space; its other lines are indented further."""
    reports: list[list[str]] = []
    for line in log.splitlines():
        text = line.removeprefix(_PREFIX)
        if text == line or not text.strip():
            continue
        if text[1:2].strip():
            reports.append([])
        if reports:
            reports[-1].append(text.strip())
    for lines in reports:
        if not lines[0].startswith(_NO_ERRORS):
            yield Report(lines[0], _kernel_of(lines), tuple(lines))


def _kernel_of(lines: Sequence[str]) -> str:
    for line in lines:
        found = re.match(r"at (?:\S+:\d+:)?([\w<>:, ()*&]+?)(?:\+0x|\s+in\s|$)", line)
        if found:
            return found.group(1)
    return ""


# On a rank


def run_rank(options: argparse.Namespace) -> None:
    """Make every call; after each, append its outcome to ``results-RANK``, one JSON per line.

    The outcome includes what the sanitizer's log has gained meanwhile.
    """
    import torch
    import torch.distributed as dist

    from interlace.testing.cases import every_case

    rank, ranks, folder = options.rank, options.ranks, Path(options.folder)
    if options.backend == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    log = folder / f"log-{rank}"
    position = 0
    with (folder / f"results-{rank}").open("w", encoding="utf-8") as file:
        for case in every_case(ranks, options.operators):
            if case.impl == "unfused":  # no kernel of this package runs
                continue
            result: dict[str, Any] = {
                "operator": case.operator,
                "impl": case.impl,
                "case": case.label,
                "rank": rank,
            }
            try:
                wrong = case.prepare().check()
                result["status"] = "wrong" if any(wrong) else "right"
            except RuntimeError as error:  # such as Gloo's, on every rank alike
                result |= {
                    "status": "skipped" if "gloo" in str(error).lower() else "failed",
                    "why": str(error)[:500],
                }
            except Exception as error:
                result |= {"status": "failed", "why": f"{type(error).__name__}: {error}"[:500]}
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            result["errors"] = [dataclasses.asdict(report) for report in parse(text[position:])]
            position = len(text)
            file.write(json.dumps(result) + "\n")
            file.flush()
            if (
                result["status"] == "failed"
            ):  # the device may be unusable, and the peers wait in vain
                break
    sys.stdout.flush()
    os._exit(0)  # the sanitizer need not watch the interpreter go down


# The command


def main() -> int:
    options = _options()
    if options.rank is not None:
        run_rank(options)
    sanitizer = _sanitizer(options)
    with tempfile.TemporaryDirectory(prefix="interlace-sanitize-") as folder:
        processes = [
            subprocess.Popen([*sanitizer(folder, rank), *_worker(options, folder, rank)])
            for rank in range(options.ranks)
        ]
        try:
            for process in processes:
                process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            print(
                f"The ranks did not end within {options.timeout:g} s and were ended.",
                file=sys.stderr,
            )
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = [
            json.loads(line)
            for file in sorted(Path(folder).glob("results-*"))
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
        # Errors that came after the last call was looked at, and logs of ranks that died.
        logs = "\n".join(
            file.read_text(encoding="utf-8", errors="replace")
            for file in sorted(Path(folder).glob("log-*"))
        )
    ended = all(process.returncode == 0 for process in processes)
    return _report(options, results, len(parse(logs)), ended)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tool",
        choices=TOOLS,
        default="memcheck",
        help="none: make the calls without the sanitizer",
    )
    parser.add_argument("--operators", nargs="+", default=[], help="default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--backend", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tool none only"
    )
    parser.add_argument(
        "--sanitizer", default="", help="the program; default: from PATH or CUDA_HOME"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend == "cpu" and options.tool != "none":
        parser.error("--backend cpu has no kernels to sanitize; say --tool none")
    return options


def _sanitizer(options: argparse.Namespace) -> Any:
    """A function of the folder and the rank: the words before a rank's own command."""
    if options.tool == "none":
        return lambda folder, rank: []
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    candidates = [
        options.sanitizer,
        shutil.which("compute-sanitizer") or "",
        str(home / "bin" / "compute-sanitizer"),
    ]
    program = next((name for name in candidates if name and Path(name).exists()), None)
    if program is None:
        sys.exit(
            "compute-sanitizer must be installed: it comes with the CUDA toolkit. Give its path "
            "with --sanitizer."
        )
    words = [
        program,
        "--tool",
        options.tool,
        "--target-processes",
        "application-only",
        "--print-limit",
        "1000",
    ]
    # torch asks for the attributes of host pointers and the like, which is no error of a kernel.
    words += ["--report-api-errors", "no"] if options.tool == "memcheck" else []
    return lambda folder, rank: [*words, "--log-file", f"{folder}/log-{rank}"]


def _worker(options: argparse.Namespace, folder: str, rank: int) -> list[str]:
    settings = {
        "INTERLACE_BACKEND": options.backend,
        "INTERLACE_DEADLINE_S": str(DEADLINE_S),
        "INTERLACE_REPLAY": "0",
        # Each tensor is then an allocation, whose ends the sanitizer knows.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if options.backend == "cpu":
        settings["TRITON_INTERPRET"] = "1"
    os.environ.update(settings)
    words = [
        sys.executable,
        __file__,
        "--tool",
        options.tool,
        "--backend",
        options.backend,
        "--ranks",
        str(options.ranks),
    ]
    operators = ["--operators", *options.operators] if options.operators else []
    return [*words, "--rank", str(rank), "--folder", folder, *operators]


def _report(
    options: argparse.Namespace, results: list[dict[str, Any]], reported: int, ended: bool
) -> int:
    """Print and write what was found; the exit code."""
    import documents

    counts = {
        status: sum(result["status"] == status for result in results)
        for status in ("right", "wrong", "failed", "skipped")
    }
    attributed = sum(len(result["errors"]) for result in results)
    for result in results:
        if result["status"] in ("wrong", "failed", "skipped"):
            print(
                f"rank {result['rank']}: {result['case']}: {result['status']} "
                f"{result.get('why', '')}"
            )
        for error in result["errors"]:
            print(
                f"rank {result['rank']}: {result['case']}: {error['what']} in "
                f"{error['kernel'] or 'no kernel'}"
            )
    clean = (
        ended and bool(results) and not reported and not counts["wrong"] and not counts["failed"]
    )
    numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(
        f"{options.tool}: {len(results)} calls on {options.ranks} ranks ({numbers}), {reported} "
        "errors."
    )
    if not ended:
        print("A rank ended early; its last call is the last one of its results.")
    if options.json is not None:
        documents.write(
            options.json,
            results,
            tool=options.tool,
            world_size=options.ranks,
            errors=reported,
            every_rank_ended=ended,
            errors_without_a_call=reported - attributed,
            **counts,
        )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
