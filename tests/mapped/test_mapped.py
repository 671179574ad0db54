"""Mapped outputs: what plain torch writes here is there; orders, padding, epochs, faults."""

from __future__ import annotations

import functools
import gc
import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.language import primitives
from interlace.mapped import empty_rotating
from interlace.mapped.layout import stride_of_rows
from tests.errors import error_of


def _inputs(
    rows: int, columns: int, inner: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers: products and their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-2, 3, (rows, inner), generator=generator)
    w = torch.randint(-2, 3, (columns, inner), generator=generator)
    return x.to(dtype), w.to(dtype)


def _worked_example() -> list[list[float]]:
    """Of the documentation: two ranks, two rows each; row d of a rank's product is for rank d."""
    out = interlace.MappedOutput((2, 1), dtype=torch.float32)
    torch.mul(torch.tensor([[1.0], [2.0]]), 10.0 ** dist.get_rank(), out=out.begin())
    return out.exchange().flatten(0, 1).tolist()


def test_worked_example(ranks: Any) -> None:
    assert ranks(2).run(_worked_example) == [[[1.0], [10.0]], [[2.0], [20.0]]]


def _product(order: str, shape: tuple[int, int], inner: int, epochs: int) -> list[torch.Tensor]:
    """Unmodified ``torch.mm`` into the peers' memory, several epochs of different factors."""
    rows, columns = shape
    x, w = _inputs(rows, columns, inner, dist.get_rank())
    source = empty_rotating((rows, inner), dtype=x.dtype)
    source.natural.copy_(x)
    out = interlace.MappedOutput(shape, dtype=x.dtype, order=order)
    results = []
    for epoch in range(epochs):
        target = out.begin()
        assert target.shape == shape
        torch.mm(
            source.rotated if order == "rotated" else source.natural, (epoch + 1) * w.T, out=target
        )
        results.append(out.exchange().flatten(0, 1).clone())
    return results


# Rows a rank that need no padding, and some; 1024 floats are a page.
@pytest.mark.parametrize("order", ["natural", "rotated"])
@pytest.mark.parametrize(
    ("world_size", "shape"),
    [(1, (6, 40)), (2, (8, 256)), (4, (4, 1024)), (4, (64, 50)), (4, (8, 600))],
)
def test_a_product_goes_to_its_peers(
    ranks: Any, world_size: int, shape: tuple[int, int], order: str
) -> None:
    results = ranks(world_size).run(_product, order, shape, 8, 3)
    rows = shape[0] // world_size
    for rank, epochs in enumerate(results):
        parts = []
        for source in range(world_size):
            x, w = _inputs(*shape, 8, source)
            parts.append((x @ w.T)[rank * rows : (rank + 1) * rows])
        for epoch, y in enumerate(epochs):
            assert torch.equal(y, (epoch + 1) * torch.cat(parts))


def _batched(shape: tuple[int, int, int]) -> tuple[torch.Tensor, bool]:
    """``torch.bmm`` with padding between the ranks."""
    ranks, rows, columns = shape
    x, w = _inputs(ranks * rows, columns, 5, dist.get_rank())
    out = interlace.MappedOutput(shape, dtype=x.dtype)
    target = out.begin()
    torch.bmm(x.view(ranks, rows, 5), w.T.expand(ranks, 5, columns), out=target)
    return out.exchange().clone(), target.is_contiguous()


def test_padding_between_ranks(ranks: Any) -> None:
    results = ranks(2).run(_batched, (2, 3, 7))
    for rank, (y, contiguous) in enumerate(results):
        assert not contiguous
        for source in range(2):
            x, w = _inputs(6, 7, 5, source)
            assert torch.equal(y[source], (x @ w.T)[rank * 3 : rank * 3 + 3])


def _tutorial() -> list[torch.Tensor]:
    """A Triton kernel that knows nothing of mapped outputs; the interpreter copies its arguments'
    storages back after it.
    """
    from tests.mapped.tutorial import product

    shape, results = (16, 40), []
    x, w = _inputs(*shape, 20, dist.get_rank())
    run = interlace.fuse(product, "all_to_all", shape=shape, dtype=x.dtype)
    for epoch in range(3):
        time.sleep(0.02 * ((epoch + dist.get_rank()) % 3))
        results.append(run((epoch + 1) * x, w, block=16).clone())
    return results


def test_a_triton_kernel_as_it_is(ranks: Any) -> None:
    for rank, epochs in enumerate(ranks(4).run(_tutorial)):
        mine = slice(4 * rank, 4 * rank + 4)
        parts = torch.cat(
            [(x @ w.T)[mine] for x, w in (_inputs(16, 40, 20, source) for source in range(4))]
        )
        for epoch, y in enumerate(epochs):
            assert torch.equal(y, (epoch + 1) * parts)


def _collective(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, order: str, calls: int
) -> list[torch.Tensor]:
    rank = dist.get_rank()
    x, w = _inputs(shape[-2], shape[-1], 16, rank, dtype)
    if order == "rotated":
        x = x.roll(-(rank + 1) * (len(x) // dist.get_world_size()), 0)
    run = interlace.fuse(torch.mm, name, shape=shape, dtype=dtype, order=order, root=1)
    return [run(x * (call + 1), w.T).clone() for call in range(calls)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "order"),
    [(n, "natural") for n in interlace.mapped.COLLECTIVES] + [("all_reduce", "rotated")],
)
def test_collectives(ranks: Any, name: str, order: str, dtype: torch.dtype) -> None:
    rows, columns = 16, 40
    results = ranks(4).run(_collective, name, (rows, columns), dtype, order, 3)
    products = [
        x.float() @ w.float().T
        for x, w in (_inputs(rows, columns, 16, source) for source in range(4))
    ]
    total, own = sum(products), rows // 4
    for rank, calls in enumerate(results):
        mine = slice(rank * own, (rank + 1) * own)
        expected = {
            "all_to_all": torch.cat([product[mine] for product in products]),
            "reduce_scatter": total[mine],
            "all_reduce": total,
            "gather": torch.stack(products) if rank == 1 else total.new_empty([0, rows, columns]),
            "scatter": products[1][mine],
        }[name]
        for call, y in enumerate(calls):
            assert y.dtype == dtype
            assert torch.equal(y.float(), (call + 1) * expected)


def _many_epochs() -> int:
    """Ranks of different speed; what is read must be this epoch's on every one of them."""
    rank = dist.get_rank()
    out = interlace.MappedOutput((2, 512), dtype=torch.int32)
    wrong = 0
    for epoch in range(40):
        torch.full((2, 512), 1000 * rank + epoch, dtype=torch.int32, out=out.begin())
        if (epoch + rank) % 7 == 0:
            time.sleep(0.01)
        received = out.exchange()
        wrong += int((received.float().mean((1, 2)) != torch.tensor([epoch, 1000.0 + epoch])).sum())
    return wrong


def test_epochs_of_slow_and_fast_ranks(ranks: Any) -> None:
    assert ranks(2).run(_many_epochs) == [0, 0]


def _in_the_same_buffer(name: str, calls: int) -> list[bool]:
    """As a graph that is replayed: every call writes to the same slots. Rank 1 reads long after all
    have come.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    y = torch.empty(4 * ranks if name != "reduce_scatter" else 4, 1024)
    run = interlace.fuse(torch.mm, name, shape=(4 * ranks, 1024), dtype=y.dtype)
    run.output.captured = True
    right = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(primitives, "load_acquire", _late(primitives.load_acquire))
        for call in range(calls):
            run.output.turn = 0
            products = [
                (call + 1) * x @ w.T
                for x, w in (_inputs(4 * ranks, 1024, 6, each) for each in range(ranks))
            ]
            x, w = _inputs(4 * ranks, 1024, 6, rank)
            run.run_into(y, (call + 1) * x, w.T)
            mine = slice(4 * rank, 4 * rank + 4)
            wanted = {
                "all_to_all": torch.cat([product[mine] for product in products]),
                "reduce_scatter": sum(products)[mine], "all_reduce": sum(products),
            }[name]  # fmt: skip
            right.append(torch.equal(y, wanted))
    return right


def _late(look: Any) -> Any:
    def late(*args: Any) -> Any:
        seen = look(*args)
        time.sleep(0.05)
        return seen

    return late


@pytest.mark.parametrize("name", ["all_to_all", "reduce_scatter", "all_reduce"])
def test_slots_that_a_graph_writes_again(ranks: Any, name: str) -> None:
    assert ranks(2).run(_in_the_same_buffer, name, 5) == [[True] * 5] * 2


def _first_replay() -> bool:
    """Ordinary calls, two captures, and the second graph is replayed first, while rank 0 still
    reads what the last call got.

    No graph is needed: a capture changes what the output knows, and a replay does what the captured
    call did.
    """
    from interlace.mapped import kernel

    rank, inputs = dist.get_rank(), [torch.full((512, 16), factor) for factor in (1.0, 100.0)]
    product = interlace.fuse(torch.mm, "reduce_scatter", shape=(512, 16), dtype=torch.float32)
    group, y, z = product.output.group, torch.empty(256, 16), torch.empty(256, 16)
    for _ in range(2):
        product.run_into(y, inputs[0], torch.eye(16))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(kernel, "tile_at", _Slow(kernel.tile_at))
        dist.barrier()
        product.run_into(y, inputs[0], torch.eye(16))
        patch.setattr(group, "capture_id", lambda: 1)
        product.output.begin()
        product.output.abandon()
        product.output.advance()
        product.run_into(z, inputs[1], torch.eye(16))
    dist.barrier()
    return bool((y == 2).all()) and bool((z == 200).all())


class _Slow:
    """A device function that takes its time."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def test_the_first_replay_leaves_alone_what_the_last_call_got(ranks: Any) -> None:
    """Nobody knows which graph is replayed first, nor how many captures were thrown away."""
    assert ranks(2).run(_first_replay) == [True, True]


def _views_and_results() -> list[str]:
    views, results = (
        interlace.fuse(lambda out: out.zero_(), "all_to_all", shape=(2, 1024), dtype=torch.float32)
        for _ in range(2)
    )
    y = torch.empty(2, 1024)
    views()
    results.run_into(y)
    return [error_of(lambda: views.run_into(y))[1], error_of(results)[1]]


def test_an_all_to_all_gives_views_or_fills_results(ranks: Any) -> None:
    """What reads a view cannot be waited for by who writes to it in a graph."""
    for first, second in ranks(2).run(_views_and_results):
        assert (
            first
            == "fuse: an all_to_all that was called for views must not be run_into. Make another."
        )
        assert (
            second
            == "fuse: an all_to_all whose calls are run_into must not be called for views. Make "
            "another."
        )


def _wrong_results() -> list[Any]:
    fused = functools.partial(
        interlace.fuse, lambda out: out.fill_(1.0), shape=(4, 6), dtype=torch.float32
    )
    exchange, part, gather = (fused(each) for each in ("all_to_all", "reduce_scatter", "gather"))
    whole = torch.zeros(4, 6)
    errors = [
        error_of(exchange.run_into, whole[:2]),
        error_of(exchange.run_into, whole.double()),
        error_of(exchange.run_into, torch.zeros(6, 4).mT),
        error_of(exchange.run_into, whole.to("meta")),
        error_of(part.run_into, whole),
        error_of(gather.run_into, torch.zeros(2, 4, 6)),
        error_of(fused, "scatter", root=2),
        # In new groups, as ranks do not compare again what they have agreed on.
        error_of(fused, "scatter", root=dist.get_rank(), group=dist.new_group()),
        error_of(fused, ("gather", "all_reduce")[dist.get_rank()], group=dist.new_group()),
    ]
    part.run_into(whole[:2])
    return [*(error[:2] for error in errors), whole[:, 0].tolist()]


def test_results_that_do_not_fit_and_ranks_that_disagree(ranks: Any) -> None:
    """Nothing is written but to a result that fits."""
    for *errors, written in ranks(2).run(_wrong_results):
        assert [kind for kind, _ in errors] == ["ArgumentError"] * 7 + ["RankMismatchError"] * 2
        messages = [message for _, message in errors]
        for message in messages[:4]:
            assert message.startswith("fuse: result must be contiguous, with 24 elements of torch.")
        assert messages[4].startswith("fuse: result must be contiguous, with 12 elements of torch.")
        assert messages[5] == "fuse: a gather cannot be run_into. Call it."
        assert messages[6] == "fuse: root must be a rank of the group, 0 to 1; got 2."
        assert "root must be the same on every rank" in messages[7]
        assert "collective must be the same on every rank" in messages[8]
        assert written == [2.0, 2.0, 0.0, 0.0]


def _groups() -> list[float]:
    """Two outputs of the world and one of a subgroup, in use at the same time."""
    rank = dist.get_rank()
    pair = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    outs = [
        interlace.MappedOutput((4, 8), dtype=torch.float32),
        interlace.MappedOutput((8, 4), dtype=torch.float32),
    ]
    outs.append(interlace.MappedOutput((2, 8), dtype=torch.float32, group=pair))
    for i, out in enumerate(outs):
        out.begin().fill_(10 * i + rank)
    return [float(out.exchange().sum()) for out in outs]


def test_groups_and_several_outputs(ranks: Any) -> None:
    for rank, sums in enumerate(ranks(4).run(_groups)):
        pair = 20 * 2 + (1 if rank < 2 else 5)
        assert sums == [8.0 * 6, 8.0 * (40 + 6), 8.0 * pair]


def _mapped_bytes() -> int:
    with open("/proc/self/maps", encoding="ascii") as file:
        return sum(1 for line in file if "interlace" in line)


def _given_back() -> list[int]:
    """Mappings of this process before, during and after; a tensor keeps them."""
    counts = [_mapped_bytes()]
    out = interlace.MappedOutput((8, 4096), dtype=torch.float32)
    received = out.begin().fill_(1.0) is not None and out.exchange()
    counts.append(_mapped_bytes())
    del out
    gc.collect()
    counts.append(_mapped_bytes())
    assert float(received.sum()) == received.numel()
    del received
    gc.collect()
    counts.append(_mapped_bytes())
    dist.barrier()
    return counts


def test_memory_is_given_back(ranks: Any) -> None:
    pool = ranks(2)
    pool.run(_given_back)  # the workspace of the group stays
    for before, during, held, after in pool.run(_given_back):
        assert during > before
        assert held > before
        assert after == before


def _misuse() -> list[tuple[str, str, dict[str, object]]]:
    out = interlace.MappedOutput((4, 8), dtype=torch.float32)
    errors = [error_of(out.exchange)]
    out.begin().zero_()
    errors.append(error_of(out.begin))
    out.exchange()
    return errors


def test_epochs_must_begin_and_end(ranks: Any) -> None:
    for first, second in ranks(2).run(_misuse):
        assert first[:2] == (
            "ArgumentError",
            "MappedOutput.exchange: an epoch must have begun. Call begin() and write first.",
        )
        assert second[0] == "ArgumentError"
        assert "must end before the next begins" in second[1]


@pytest.mark.parametrize(
    ("shape", "more", "message"),
    [
        ((3, 8), {}, "MappedOutput: a shape (M, N) must have the 2 ranks divide M; got (3, 8)."),
        ((8,), {}, "MappedOutput: a shape (M, N) must have the 2 ranks divide M; got (8,)."),
        (
            (4, 2, 8),
            {},
            "MappedOutput: a shape of 3 sizes must begin with the 2 ranks; got (4, 2, 8).",
        ),
        ((4, -8), {}, "MappedOutput: shape must have sizes of 0 or more; got (4, -8)."),
        (
            (4, 8),
            {"order": "reverse"},
            "MappedOutput: order must be one of natural, rotated; got 'reverse'.",
        ),
        ((4, 8), {"root": 2}, "MappedOutput: root must be a rank of the group, 0 to 1; got 2."),
    ],
)
def test_bad_arguments(
    ranks: Any, shape: tuple[int, ...], more: dict[str, Any], message: str
) -> None:
    assert ranks(2).run(_rejected, shape, more) == [("ArgumentError", message)] * 2


def _rejected(shape: tuple[int, ...], more: dict[str, Any]) -> tuple[str, str]:
    return error_of(lambda: interlace.MappedOutput(shape, dtype=torch.float32, **more))[:2]


def _fused(producer: Any = torch.mm, shape: Any = (4, 8), dtype: Any = torch.float32) -> Any:
    return interlace.fuse(producer, "reduce_scatter", shape=shape, dtype=dtype)


def _wrongly_fused() -> list[Any]:
    errors = [error_of(_fused, **wrong)[:2] for wrong in ({"shape": 8}, {"shape": (4.0, 8)})]
    errors += [error_of(_fused, **wrong)[:2] for wrong in ({"dtype": "float32"}, {"producer": 3})]
    product = _fused(shape=(4, 6))
    x, w = torch.ones(4, 3), torch.ones(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it resizes the output
        errors.append(error_of(product, x, w)[:2])
    return [*errors, product(x, w[:, :6]).tolist()]


def test_wrong_arguments_of_fuse(ranks: Any) -> None:
    """An output of another shape is refused, and the next call of the right shape is right."""
    messages = [
        "fuse: shape must have sizes of 0 or more; got 8.",
        "fuse: shape must have sizes of 0 or more; got (4.0, 8).",
        "fuse: dtype must be a torch.dtype; got 'float32'. Say torch.float32, for example.",
        "fuse: producer must be a function that takes out=; got 3.",
        "fuse: shape must be that of the producer's output; got (4, 6) for an output (4, 8). Make "
        "another for this shape, on every rank.",
    ]
    expected = [*(("ArgumentError", message) for message in messages), [[6.0] * 6] * 2]
    assert ranks(2).run(_wrongly_fused) == [expected] * 2


@pytest.mark.parametrize(("rows", "columns", "itemsize"), [(1, 5, 4), (2, 600, 4), (6, 1000, 2)])
def test_rows_fill_whole_pieces(rows: int, columns: int, itemsize: int) -> None:
    stride = stride_of_rows(rows, columns, itemsize, 4096)
    assert stride is not None
    assert stride >= columns
    assert rows * stride * itemsize % 4096 == 0


def _too_much_padding() -> tuple[str, str]:
    return error_of(lambda: interlace.MappedOutput((6, 500), dtype=torch.float32))[:2]


def test_padding_that_would_waste_memory(ranks: Any) -> None:
    """Three rows of 500 floats fill whole pages only with rows of 1024."""
    for kind, message in ranks(2).run(_too_much_padding):
        assert kind == "ArgumentError"
        assert message.startswith(
            "MappedOutput: 3 rows of 500 elements a rank must fill pieces of 4096 bytes; more "
            "than half would be padding."
        )
        assert "(world size, 3, 500)" in message


def _different() -> tuple[str, str]:
    return error_of(lambda: interlace.MappedOutput((4, 18 + dist.get_rank()), dtype=torch.float32))[
        :2
    ]


def test_ranks_that_disagree(ranks: Any) -> None:
    for kind, message in ranks(2).run(_different):
        assert kind == "RankMismatchError"
        assert "shape must be the same on every rank" in message


def _absent() -> tuple[Any, ...] | None:
    """Rank 1 never exchanges."""
    group = dist.new_group()
    out = interlace.MappedOutput((4, 8), dtype=torch.float32, group=group)
    interlace.set_deadline(1.0, group)
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    out.begin().fill_(1.0)
    start = time.monotonic()
    first = error_of(out.exchange)
    seconds = time.monotonic() - start
    later = error_of(out.begin)
    dist.barrier()
    return first, later, seconds


def test_a_peer_that_never_exchanges(ranks: Any) -> None:
    (first, later, seconds), nothing = ranks(2).run(_absent)
    assert nothing is None
    assert first[0] == "PeerTimeoutError"
    assert first[1].startswith("mapped output: rank 0 waited 1 s for rank 1 ")
    assert later == first
    assert 1.0 <= seconds < 60


def _dies() -> None:
    group = dist.new_group()
    out = interlace.MappedOutput((4, 8), dtype=torch.float32, group=group)
    interlace.set_deadline(1.0, group)
    out.begin().fill_(1.0)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    out.exchange()


@pytest.mark.usefixtures("quick_launches")
def test_a_rank_that_dies_before_the_exchange() -> None:
    with pytest.raises(interlace.LaunchError, match=r"rank 1 ended without a result|rank 0 failed"):
        interlace.launch(_dies, 2, backend="cpu", timeout_s=120)
