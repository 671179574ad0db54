"""More between two hosts: operators around a product, the backward pass of embeddings, a DLRM.

    python benchmarks/between_nodes_others.py --json FILE [--ranks 4]

Two GPUs of one machine are two hosts for NCCL, as in ``between_nodes.py``; four are two hosts of
two. Sizes are such that the computation takes about as long as the exchange; results are checked
before anything is timed, eager and as CUDA graphs.

    gemm_all_to_all, gemm_reduce_scatter, all_gather_gemm, gemm_all_reduce
               chunked: slices leave, or are multiplied, as they are complete; with the number of
               slices that a call takes by the measured network, and with 2, 4 and 8; unfused:
               F.linear and the collective; auto: one of the two
    product, exchange
               each of the two alone
    mixture_of_experts
               chunked, auto and the pair, with so wide products that they take as long as the
               pair's exchange; in training as well, forward and backward
    backward   row-wise Adagrad; fused: the exchange beside the sort of lookups, and beside the
               update of the first tables if a call takes slices by the measured network; unfused:
               all_to_all_single, the sort, the update; last with so many lookups that sort and
               update take as long as the exchange
    dlrm       a step of training, the same work without any peer, and the difference, which is the
               communication that no computation hides
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from between_nodes import (
    captured,
    group_alone,
    learn_network,
    lookups_that_take,
    require_equal,
    run,
    say,
    slowest,
    timed,
    timed_in_turn,
)

import interlace
from interlace.gemm import reference
from interlace.gemm.implementations import network
from interlace.nn import EmbeddingTable
from interlace.operators.embedding_all_to_all import gradients_between_nodes
from interlace_dlrm import DLRM, BatchStream, SyntheticClicks, Trainer
from interlace_dlrm.training import compute_alone

TABLES, WIDTH, ROWS, BATCH = 8, 128, 500_000, 16384
LOOKUPS = (4, 20, 64)
SLICES = (2, 4, 8)
FIRST_WIDTH = 8192
TOLERANCE = 0.02
"""Of the largest element: with fewer rows the library may take other tiles, and round otherwise."""

_LONGEST = 1 << 17  # of the dimension that balances product and exchange
_STACKS_S = 240.0
_STRIDE = 997  # between two numbers of a gradient that are compared


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator around a product, and sizes of one rank's operands.

    Attributes:
        operator: Name of the operator.
        rows, columns, inner: ``x [rows, inner]`` and ``w [columns, inner]``, at first.
        exchange: The collective alone, of the product or, with ``gathers``, of x.
        gathers: Whether the collective comes first; then ``columns`` balance the two, else
            ``inner``.
    """

    operator: str
    rows: int
    columns: int
    inner: int
    exchange: Callable[[torch.Tensor], object]
    gathers: bool = False

    def resized(self, factor: float) -> Case:
        """Return the case whose product takes ``factor`` times as long, its exchange as ever."""
        name = "columns" if self.gathers else "inner"
        size = round(getattr(self, name) * factor / 1024) * 1024
        return dataclasses.replace(self, **{name: min(_LONGEST, max(1024, size))})

    def operands(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's operands."""
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        x, w = (
            torch.randn(rows, self.inner, device=device, generator=generator, dtype=torch.bfloat16)
            for rows in (self.rows, self.columns)
        )
        return x, w


def _even(rows: torch.Tensor) -> list[int]:
    return [len(rows) // dist.get_world_size()] * dist.get_world_size()


CASES = (
    Case(
        "gemm_all_to_all", 8192, 2048, 16384,
        lambda rows: reference.exchange_rows(rows, _even(rows), _even(rows), dist.group.WORLD),
    ),
    Case(
        "gemm_reduce_scatter", 8192, 2048, 16384,
        lambda rows: reference.sum_rows(rows, _even(rows), dist.group.WORLD),
    ),
    Case(
        "all_gather_gemm", 4096, 16384, 2048,
        lambda rows: reference.gather_rows(
            rows, [len(rows)] * dist.get_world_size(), dist.group.WORLD
        ),
        gathers=True,
    ),
    Case("gemm_all_reduce", 4096, 2048, 16384, dist.all_reduce),
)  # fmt: skip


def main() -> None:
    """Measure all of them."""
    sizes = {"tables": TABLES, "width": WIDTH, "rows": ROWS, "batch": BATCH}
    run(measure, sizes)


def measure() -> dict[str, Any]:
    """On a rank: time each operator, by slices and unfused."""
    faulthandler.dump_traceback_later(_STACKS_S)
    results: dict[str, Any] = {"network": dataclasses.asdict(learn_network())}
    results |= {case.operator: time_product(case) for case in CASES}
    results |= {name: time_layer(name, make) for name, make in LAYERS.items()}
    results["dlrm"] = time_dlrm()
    results["backward"] = time_backward()
    faulthandler.cancel_dump_traceback_later()
    return results


@torch.no_grad()
def time_product(case: Case) -> dict[str, Any]:
    """Time an operator around a product, its product and its exchange, at sizes that balance."""
    device = interlace.group_of().device
    on_gpu = device.type == "cuda"
    if not on_gpu:
        case = dataclasses.replace(case, rows=64, columns=32, inner=64)
    x, w = case.operands(device)
    rows = x if not case.gathers else torch.cat([x] * dist.get_world_size())
    exchanged = x if case.gathers else torch.zeros_like(rows @ w.T)
    exchange_us = timed(lambda: case.exchange(exchanged))
    product_us = timed(lambda: rows @ w.T)
    if on_gpu:
        # All ranks take rank 0's number.
        factor = torch.tensor([exchange_us / product_us])
        dist.broadcast(factor, 0)
        case = case.resized(float(factor))
        x, w = case.operands(device)
        rows = x if not case.gathers else torch.cat([x] * dist.get_world_size())
    times = {"product": timed(lambda: rows @ w.T), "exchange": exchange_us}
    operator = getattr(interlace, case.operator)
    expected = operator(x, w, impl="unfused")
    # Twice: the second call finds what the first one has left.
    for slices in (None, None, *SLICES):
        with cut_into(slices):
            require_close(operator(x, w, impl="chunked"), expected, f"{case.operator}, {slices}")
    calls = {"unfused": lambda: operator(x, w, impl="unfused"), "auto": lambda: operator(x, w)}
    slices_of: dict[str, int | None] = dict.fromkeys(calls)
    for slices in (None, *SLICES):
        name = "chunked" if slices is None else f"chunked, {slices} slices"
        calls[name], slices_of[name] = lambda: operator(x, w, impl="chunked"), slices
    for name, call in list(calls.items()) if on_gpu else ():
        with cut_into(slices_of[name]):
            replay, result = captured(call)
        for _ in range(2):
            replay()
            torch.cuda.synchronize()
            require_close(result, expected, f"{case.operator}, {name} in a graph")
        calls[f"{name}, graph"] = replay
    measured, spread = timed_in_turn(calls, lambda name: cut_into(slices_of.get(name)))
    times |= measured
    ratio = times["chunked"] / times["unfused"]
    said = ", ".join(f"{name} {us:.0f}" for name, us in times.items())
    sizes = [case.rows, case.columns, case.inner]
    say(f"{case.operator} {sizes}, us: {said}; chunked / unfused {ratio:.3f}")
    return {
        "sizes": sizes, "us": times, "lowest and highest us": spread, "chunked / unfused": ratio,
    }  # fmt: skip


Calls = dict[str, Callable[[], torch.Tensor]]
"""Functions that make one call, by implementation; ``"product"`` and ``"exchange"`` are the two
parts of the pair's.
"""


def experts(width: int, trains: bool = False) -> Calls:
    """A layer of eight experts a rank, of which a token has two; F is the width.

    Args:
        trains: Whether a call runs the backward pass, too.
    """
    device, ranks = interlace.group_of().device, dist.get_world_size()
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens, hidden = (4096, 2048) if device.type == "cuda" else (16, 32)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)

    x = random(tokens, hidden)
    w_in, w_out = random(8, width, 2, hidden) / hidden**0.5, random(8, hidden, width) / width**0.5
    weights, chosen = random(tokens, 8 * ranks).float().softmax(-1).topk(2)
    everything = torch.cat([x] * ranks)
    call = functools.partial(interlace.mixture_of_experts, x, chosen, weights, w_in, w_out)
    grad = random(tokens, hidden)
    leaves = (x, weights, w_in, w_out)
    alone = group_alone()
    own = chosen % 8

    def product() -> torch.Tensor:
        """Multiply as many rows as a rank has, by its experts alone."""
        return interlace.mixture_of_experts(
            x, own, weights, w_in, w_out, group=alone, impl="unfused"
        )

    def exchange() -> torch.Tensor:
        splits = [tokens] * ranks
        reference.gather_rows(x, splits, dist.group.WORLD)
        return reference.sum_rows(everything, splits, dist.group.WORLD)

    def step(impl: str) -> torch.Tensor:
        """Run both passes; return some numbers of the result and of each gradient, of like size."""
        with torch.enable_grad():
            y = call(impl=impl)
        found = torch.autograd.grad(y, leaves, grad)
        some = [each.flatten()[::_STRIDE].float() for each in (y, *found)]
        return torch.cat([each / each.square().mean().sqrt() for each in some])

    parts = {"product": product, "exchange": exchange}
    if not trains:
        return _by_implementation(lambda impl: call(impl=impl)) | parts
    for leaf in leaves:
        leaf.requires_grad_()
    return _by_implementation(step) | parts


def experts_in_training(width: int) -> Calls:
    """The same layer, forward and backward."""
    return experts(width, trains=True)


def _by_implementation(call: Callable[[str], torch.Tensor]) -> Calls:
    """Return a call's implementations by name."""
    return {impl: lambda impl=impl: call(impl) for impl in ("unfused", "chunked", "auto")}


LAYERS = {
    "mixture_of_experts": experts,
    "mixture_of_experts, forward and backward": experts_in_training,
}


@torch.no_grad()
def time_layer(name: str, make: Callable[[int], Calls]) -> dict[str, Any]:
    """Time the implementations of a call whose product takes as long as the pair's exchange."""
    on_gpu = interlace.group_of().device.type == "cuda"
    width = FIRST_WIDTH if on_gpu else 32
    if on_gpu:
        calls = make(width)
        # All ranks take rank 0's number.
        factor = torch.tensor([timed(calls["exchange"]) / timed(calls["product"])])
        dist.broadcast(factor, 0)
        width = min(_LONGEST, max(1024, round(width * float(factor) / 1024) * 1024))
        del calls
    calls = make(width)
    times = {part: timed(calls.pop(part)) for part in ("product", "exchange")}
    pair = next(iter(calls))
    expected = calls[pair]()
    for _ in range(3):  # calls that come again become graphs
        for impl, call in calls.items():
            require_close(call(), expected, f"{name}, {impl}")
    ways: dict[str, Callable[[], object]] = dict(calls)
    # PyTorch's pair in training waits for the device.
    captured_ones = (pair, "chunked", "auto") if on_gpu and make is not experts_in_training else ()
    for impl in captured_ones:
        replay, result = captured(calls[impl])
        replay()
        torch.cuda.synchronize()
        require_close(result, expected, f"{name}, {impl} in a graph")
        ways[f"{impl}, graph"] = replay
    measured, spread = timed_in_turn(ways)
    times |= measured
    ratio = times["chunked"] / min(times[impl] for impl in calls if impl not in ("chunked", "auto"))
    said = ", ".join(f"{impl} {us:.0f}" for impl, us in times.items())
    say(f"{name}, width {width}, us: {said}; chunked / best pair {ratio:.3f}")
    return {
        "width": width, "us": times, "lowest and highest us": spread, "chunked / pair": ratio,
    }  # fmt: skip


def cut_into(slices: int | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which calls have so many slices; None: as many as they take."""
    if slices is None:
        return contextlib.nullcontext()
    return mock.patch.object(network, "slices_of", return_value=slices)


def require_close(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """End unless a result is close to the pair's on every rank."""
    wrong = slowest(float((result - expected).abs().max() / expected.abs().max()))
    if not wrong < TOLERANCE:
        raise AssertionError(f"{name} is wrong by {wrong:.3g}")


def time_backward() -> dict[str, Any]:
    """Time the backward pass with row-wise Adagrad for several numbers of lookups."""
    group = interlace.group_of()
    if group.backend == "cpu":
        return {2: compare_backward(2)}
    columns = TABLES * WIDTH * group.world_size
    gradients = torch.zeros(BATCH // group.world_size, columns, device=group.device)
    received = torch.empty_like(gradients)
    exchange_us = timed(lambda: dist.all_to_all_single(received, gradients))
    alone = group_alone()

    def update_us(lookups: int) -> float:
        return timed(backward_of("fused", lookups, alone)[0])

    balanced = lookups_that_take(exchange_us, update_us)
    say(f"gradients' exchange {exchange_us:.0f} us; the update takes as long with {balanced}")
    found: dict[str, Any] = {"exchange_us": exchange_us, "balanced_lookups": balanced}
    return found | {str(lookups): compare_backward(lookups) for lookups in (*LOOKUPS, balanced)}


def backward_of(
    impl: str, lookups: int, process_group: dist.ProcessGroup | None = None
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Return a function that runs the backward pass of a call, and the tables that it updates."""
    group = interlace.group_of(process_group)
    on_gpu, device = group.backend == "cuda", group.device
    count, rows, batch = (TABLES, ROWS, BATCH) if on_gpu else (2, 50, 32)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    bags = count * batch
    indices = torch.randint(
        rows, (bags * lookups,), generator=generator, device=device, dtype=torch.int32
    )
    offsets = torch.arange(bags + 1, dtype=torch.int32, device=device) * lookups
    tables = [
        torch.randn(rows, WIDTH, device=device, generator=generator).requires_grad_()
        for _ in range(count)
    ]
    states = [torch.zeros(rows, device=device) for _ in tables]
    update = interlace.optim.RowWiseAdagrad(0.1, 1e-6, states)
    y = interlace.embedding_all_to_all(
        tables, indices, offsets, name=f"backward {lookups} {impl}", group=process_group,
        impl=impl, gradient=update, check_indices=False,
    )  # fmt: skip
    grad = torch.full_like(y, 0.5)
    return lambda: y.backward(grad, retain_graph=True), tables


def compare_backward(lookups: int) -> dict[str, Any]:
    """Check the backward pass of a number of lookups against the unfused one, and time both."""
    # All calls of a group with the same tables run alike, so these choose anew in another one.
    process_group = dist.new_group()
    calls: dict[str, Callable[[], None]] = {}
    updated: dict[str, list[torch.Tensor]] = {}
    plans: list[int] = []
    run = gradients_between_nodes.run

    def noting(call: Any, *arguments: Any) -> Any:
        plans.append(call.plan.gradient_slices)
        return run(call, *arguments)

    with mock.patch.object(gradients_between_nodes, "run", noting):
        for impl in ("unfused", "fused"):
            calls[impl], updated[impl] = backward_of(impl, lookups, process_group)
            calls[impl]()
    for table, expected in zip(updated["fused"], updated["unfused"], strict=True):
        require_equal(table, expected, f"the update of {lookups} lookups")
    times, spread = timed_in_turn(calls)
    ratio = times["fused"] / times["unfused"]
    say(f"backward, {lookups} lookups, {plans[0]} slices, us: {times}; fused / unfused {ratio:.3f}")
    return {
        "us": times, "lowest and highest us": spread, "fused / unfused": ratio,
        "slices": plans[0],
    }  # fmt: skip


def time_dlrm() -> dict[str, Any]:
    """Time a step of a DLRM with 26 tables, of which eight are looked up 20 times per sample."""
    group = interlace.group_of()
    rows, width, batch = (100_000, WIDTH, 8192) if group.backend == "cuda" else (100, 16, 32)
    tables = [
        EmbeddingTable(f"C{number + 1}", rows, width, bag_length=20 if number < 8 else 1)
        for number in range(26)
    ]
    layers = (512, 256)
    model = DLRM(
        tables, bottom=layers, top=layers, gradient="rowwise_adagrad", learning_rate=0.1,
        batch=batch,
    )  # fmt: skip
    trainer = Trainer(model, torch.optim.Adagrad(model.dense.parameters(), 0.05))
    stream = BatchStream(
        SyntheticClicks(batch, cardinality=1000),
        batch,
        rows=[rows] * len(tables),
        lookups=[table.bag_length for table in tables],
        rank=group.rank,
        world_size=group.world_size,
    )
    samples = next(iter(stream)).to(group.device)

    @contextlib.contextmanager
    def running(name: str) -> Iterator[None]:
        model.embeddings.impl = name.partition(",")[0]
        yield

    calls: dict[str, Callable[[], object]] = {}
    for impl in ("unfused", "fused", "auto"):
        with running(impl):
            calls[impl] = lambda: trainer.step(samples)
            calls[f"{impl}, no peers"] = compute_alone(trainer, samples)
            for _ in range(3):
                trainer.step(samples)
    times, spread = timed_in_turn(calls, running)
    found = {
        impl: {
            "step": times[impl] / 1e3,
            "compute": times[f"{impl}, no peers"] / 1e3,
            "exposed": (times[impl] - times[f"{impl}, no peers"]) / 1e3,
        }
        for impl in ("unfused", "fused", "auto")
    }
    say(f"DLRM, ms: {found}")
    return {"ms": found, "lowest and highest us": spread}


if __name__ == "__main__":
    main()
