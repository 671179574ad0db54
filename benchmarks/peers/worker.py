"""One peer's cases on one rank: results are compared, then every way is timed."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import interlace
from benchmarks.peers.capabilities import cases
from benchmarks.peers.case import Call, Case, Sizes
from benchmarks.peers.driver import load
from benchmarks.program_times import SAMPLES, in_turn
from interlace.bench.timing import measure_step
from interlace.documents import to_json

_KINDS = ("host", "eager", "graph")


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _together(step: Callable[[], Any]) -> tuple[Any, str]:
    """Return a step's result, and what failed on the first rank where it did."""
    result, problem = None, ""
    try:
        result = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip()[:300]}"
    problems = [text for text in _gathered(problem) if text]
    return result, problems[0] if problems else ""


def error_of(found: Any, wanted: Any) -> float:
    """Return the largest relative error of a call's tensors, as a norm."""
    pairs = [each if isinstance(each, tuple) else (each,) for each in (found, wanted)]
    errors = [0.0]
    for result, right in zip(*pairs, strict=True):
        norm = float(right.float().norm())
        errors.append(float((result.float() - right.float()).norm()) / max(norm, 1e-30))
    return max(math.inf if math.isnan(error) else error for error in errors)


def compared(case: Case, ways: dict[str, Call]) -> tuple[dict[str, Call], dict[str, Any]]:
    """Return the ways that gave the right result on all ranks, and what is to tell of each way."""
    told: dict[str, Any] = {name: {} for name in ways}
    right: dict[str, Call] = {}
    wanted, problem = _together(functools.partial(_kept, ways[case.reference]))
    for name, call in ways.items():
        error = 0.0
        if name != case.reference:
            result, problem_here = _together(functools.partial(call, 0))
            if not problem_here and name != "alone" and not problem:
                error, problem_here = _together(functools.partial(error_of, result, wanted))
                error = max(math.inf if each is None else each for each in _gathered(error))
                told[name]["error"] = error if math.isfinite(error) else None
        else:
            problem_here = problem
        if not problem_here and not error <= case.tolerance:
            problem_here = f"wrong by {error:.1e}"
        if not problem_here and problem:
            problem_here = f"{case.reference} has failed, so nothing was compared"
        if problem_here:
            told[name]["failed"] = problem_here
        else:
            right[name] = call
    return right, told


def _kept(call: Call) -> Any:
    """Return a call's result, and as a copy where ways may have theirs in the same memory: several
    tensors are new ones, or tables that change in no other way's calls.
    """
    result = call(0)
    return result if isinstance(result, tuple) else result.clone()


def in_graph(call: Call, calls: int, capturing: Any) -> dict[str, float]:
    """Return the spread of a call's times in a CUDA graph of so many."""
    graph = torch.cuda.CUDAGraph()
    with capturing(), torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    timing = measure_step(graph.replay, samples=SAMPLES)
    return {
        f"{name}_us": round(getattr(timing, f"{name}_us") / calls, 2)
        for name in ("median", "p10", "p90")
    }


def time_case(case: Case, driver: Any, capability: str, *, is_timed: bool) -> dict[str, Any]:
    """Return the result of a case, of the same form on every rank."""
    of_peer, problem = _together(lambda: driver.WAYS[capability](case))
    right, told = compared(case, case.ways | ({} if problem else of_peer))
    result = {
        "peer": driver.NAME, "capability": capability, "sizes": case.sizes, "ways": told,
        "of_peer": sorted(of_peer) if not problem else [], "refused": problem,
    }  # fmt: skip
    if not is_timed:
        return result
    for name, times in in_turn(right, calls=case.calls, settling=case.settling).items():
        told[name] |= times
    for name, call in right.items():
        if case.is_captured:
            is_of_peer = name in result["of_peer"]
            capturing = getattr(driver, "capturing", None) if is_of_peer else None
            context = capturing or contextlib.nullcontext
            times, problem = _together(functools.partial(in_graph, call, case.calls, context))
            told[name] |= {"not captured": problem} if problem else {"graph": times}
    return result


def shown(result: dict[str, Any]) -> str:
    """Return a line of a result: medians in us of host, eager and graph, by way."""
    parts = []
    for name, told in result["ways"].items():
        medians = [f"{told[kind]['median_us']:.0f}" if kind in told else "-" for kind in _KINDS]
        parts.append(f"{name} {told.get('failed') or ' / '.join(medians)}")
    if result["refused"]:
        parts.append(f"{result['peer']}: {result['refused']}")
    return f"{result['capability']} {result['sizes']}: " + "; ".join(parts)


def worker(
    name: str, chosen: list[str], sizes: Sizes | None, file: Path, seconds: float, *rest: bool
) -> None:
    """Go through a peer's cases until its time is over; rank 0 writes the file after each."""
    (is_timed,) = rest
    began, results, left = time.perf_counter(), [], 0
    torch.manual_seed(dist.get_rank())
    driver = load(name)
    with torch.no_grad():
        for capability in driver.WAYS:
            if capability not in chosen:
                continue
            for make in cases(capability, sizes):
                if max(_gathered(time.perf_counter() - began)) > seconds:
                    left += 1
                    continue
                case, problem = _together(make)
                if problem:
                    _say(f"{capability} {make.args}: {problem}")
                    continue
                results.append(time_case(case, driver, capability, is_timed=is_timed))
                _say(shown(results[-1]))
                if dist.get_rank() == 0:
                    file.write_text(to_json(results), encoding="utf-8")
                del case
                _tidy()
    if left:
        _say(f"{driver.NAME}: no time was left for {left} cases")
    dist.barrier()
    if dist.get_rank() == 0:
        file.with_suffix(".done").touch()


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def _tidy() -> None:
    """Let go of a case's memory, and of graphs of it that the group keeps."""
    group = interlace.group_of()
    group.replays.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
