"""Check and time the solutions of ParallelKernelBench beside its references, on GPUs.

    python benchmarks/parallel_kernel_bench/run.py --harness FOLDER --json FILE [NUMBER ...]

One process per GPU goes through all problems, while the bench's own ``run_local.py`` starts them
for each call. Inputs, sizes, tolerance, and the function that measures are the bench's; the time is
the slowest rank's mean. Where 500 calls of a reference would take longer than ``--seconds``, fewer
warm it up. The file is written after every problem, and a problem that takes longer than
``--limit`` ends the run.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interlace
from benchmarks.documents import write
from benchmarks.parallel_kernel_bench.harness import (
    difference,
    first_tensor,
    inputs_of,
    lines_of,
    load,
    number_of,
    reference_of,
    solution_of,
    stems,
)

WARM_UP, MEASURED = 500, 100
_WARM_UP_S = 3.0


class _Ranks:
    """What ranks tell each other beside the calls that are measured."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, step: Callable[[], Any]) -> Any:
        """Return a step's result; raise an error on every rank if it fails on one."""
        error, result = "", None
        try:
            result = step()
            torch.cuda.synchronize()
        except Exception:
            error = traceback.format_exc(limit=-3)
        errors = {rank: text for rank, text in enumerate(self.gather(error)) if text}
        if errors:
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        return result


def _time_us(
    measure: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...],
    ranks: _Ranks, seconds: float,
) -> float:  # fmt: skip
    """Return the slowest rank's mean time of a call in us."""
    tensor, replaced = first_tensor(arguments)

    def settle() -> float:
        for _ in range(3):
            function(*arguments)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            function(*arguments)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 5

    one = max(ranks.gather(ranks.together(settle)))
    calls = [max(min(most, int(seconds / one)), 10) for most in (WARM_UP, MEASURED)]
    times = ranks.together(lambda: measure(lambda t: function(*replaced(t)), tensor, *calls))
    return 1e3 * max(ranks.gather(times["wall_time_ms"]))


def run(harness: Path, stem: str, ranks: _Ranks, trials: int, seconds: float) -> dict[str, Any]:
    """Return the result of one problem, the same on every rank."""
    result: dict[str, Any] = {
        "problem": stem, "lines": lines_of(stem), "right": False, "difference": "",
        "reference_us": None, "time_us": None, "ratio": None,
    }  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    kinds: Any = {"base_shape": (1024, 1024), "dtype": torch.bfloat16, "device": device}
    measure = load(harness / "utils" / "performance.py").measure_solution_performance
    try:
        reference, solution = ranks.together(
            lambda: (reference_of(harness, stem), solution_of(stem))
        )
        for trial in reversed(range(trials)):
            # One table takes a fifth of a GPU, so those of the last trial go first.
            of_reference = own = wanted = got = None
            of_reference, own = ranks.together(
                lambda trial=trial: [
                    inputs_of(harness, stem, ranks.ranks, ranks.rank, trial=trial, **kinds)
                    for _ in range(2)
                ]
            )
            wanted = ranks.together(lambda own=of_reference: reference(*own))
            got = ranks.together(lambda own=own: solution(*own))
            found = ranks.gather(ranks.together(lambda a=wanted, b=got: difference(a, b)))
            if any(found):
                result["difference"] = f"trial {trial}, by rank: {found}"
                break
        result["right"] = not any(found)
        result["reference_us"] = _time_us(measure, reference, of_reference, ranks, seconds)
        # The bench's warm-up is long enough for a graph of each input that takes turns.
        result["time_us"] = _time_us(measure, solution, own, ranks, max(seconds, _WARM_UP_S))
        result["ratio"] = result["reference_us"] / result["time_us"]
    except RuntimeError as error:
        result["right"], result["difference"] = False, str(error)
    return result


def worker(
    harness: Path, chosen: list[str], file: Path, trials: int, seconds: float, limit: float
) -> list[dict[str, Any]]:
    """Go through the problems on this rank; rank 0 writes the file."""
    interlace.set_deadline(20.0)
    ranks, results = _Ranks(), []
    for stem in chosen:
        faulthandler.dump_traceback_later(limit, exit=True)
        begin = time.perf_counter()
        results.append(run(harness, stem, ranks, trials, seconds))
        # Graphs of all problems together would be more than a group keeps.
        group = interlace.group_of()
        group.replays.clear()
        gc.collect()
        torch.cuda.empty_cache()
        if ranks.rank == 0:
            result = results[-1]
            numbers = [result["reference_us"], result["time_us"], result["ratio"]]
            shown = ", ".join("-" if each is None else f"{each:.2f}" for each in numbers)
            verdict = "right" if result["right"] else f"WRONG {result['difference']}"
            took = time.perf_counter() - begin
            print(f"{stem}: {shown}, {verdict} ({took:.1f} s)", flush=True)
            write(file, results, ranks=ranks.ranks)
        ranks.together(lambda: None)  # after a fault of a GPU nothing works any more
        if any(ranks.gather(group.broken)):
            interlace.recover()
    faulthandler.cancel_dump_traceback_later()
    return results


def main() -> None:
    """Run all problems, or those whose numbers are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--harness", type=Path, required=True, help="folder of a clone of the bench"
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=2, help="inputs to compare; the bench has 5")
    parser.add_argument("--seconds", type=float, default=0.4, help="to warm up, and to measure")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a problem may take"
    )
    parser.add_argument("numbers", type=int, nargs="*")
    options = parser.parse_args()
    chosen = [stem for stem in stems() if number_of(stem) in options.numbers or not options.numbers]
    results, *_ = interlace.launch(
        worker, options.ranks, options.harness, chosen, options.json, options.trials,
        options.seconds, options.limit, backend="cuda",
    )  # fmt: skip
    right = [result for result in results if result["right"]]
    faster = sum(result["ratio"] is not None and result["ratio"] >= 1 for result in right)
    print(f"{len(right)} of {len(results)} are right, {faster} of them at least as fast")


if __name__ == "__main__":
    main()
