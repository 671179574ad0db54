"""Rows of gathers that Inductor's kernels write to symmetric memory: results, slots, what is left
alone, and the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
import interlace.compile
from interlace.comm import default_device_type
from interlace.gemm import fetch
from tests.compile.programs import all_gather

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="on CPUs an older Inductor loses the order of such writes"
)

WIDTH, ROWS = 32, 16


UP, DOWN, OTHER = (
    torch.arange(rows * columns).view(rows, columns).mul(0.37).sin()
    for rows, columns in ((48, WIDTH), (WIDTH, 48), (40, WIDTH))
)


def _own_part(y: torch.Tensor) -> torch.Tensor:
    return y.chunk(dist.get_world_size())[dist.get_rank()]


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two gathers after another, each behind a norm, and one beside them; the second norm's result
    is used as well.
    """
    y = all_gather(F.rms_norm(x, (WIDTH,))) @ UP.t()
    normed = F.rms_norm(_own_part(y) @ DOWN.t() + x, (WIDTH,))
    return y.sum(), normed, all_gather(normed) @ OTHER.t(), all_gather(F.gelu(x)) @ OTHER.t()


def _named(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first two gathers, as a program calls the operator itself."""
    up, down, other = (w.to(x.device) for w in (UP, DOWN, OTHER))
    y = interlace.all_gather_gemm(F.rms_norm(x, (WIDTH,)), up, impl="chunked")
    normed = F.rms_norm(_own_part(y) @ down.t() + x, (WIDTH,))
    return normed, interlace.all_gather_gemm(normed, other, impl="chunked")


def _compiled(
    name: str, rows: int = ROWS, limit: int | None = None, mode: str | None = None
) -> tuple[float, str, list[bool], int]:
    """Of a program, compiled by Inductor: the largest error of its calls, its code, whether peers
    fetched rows from where they lay, and the bytes that are held for rows.

    Args:
        rows: This rank's. What a limit leaves is remembered for calls of this size.
        limit: The most symmetric bytes that the group may hold.
        mode: Inductor's. A call more than the two is a replay where it makes CUDA graphs.
    """
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    program: Callable[..., Any] = globals()[name]
    torch.manual_seed(dist.get_rank())
    x = torch.randn(rows, WIDTH, device=default_device_type())
    expected, begin, places = program(x), fetch.begin, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        places.append(kwargs["in_place"])
        return begin(*args, **kwargs)

    torch.compiler.reset()
    group = interlace.group_of(None)
    group.release()
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        patch.setattr(group.memory, "limit_bytes", limit)
        patch.setattr(fetch, "begin", spy)
        compiled = torch.compile(
            program, backend=interlace.compile.backend, fullgraph=True, mode=mode
        )
        with torch.no_grad():
            actual, codes = run_and_get_code(compiled, x)
            results = [[y.clone() for y in actual]]
            for _ in range(1 if mode is None else 3):
                results.append([y.clone() for y in compiled(x)])
    torch.compiler.reset()
    errors = [
        float((y - of).norm() / of.norm())
        for ys in results
        for y, of in zip(ys, expected, strict=True)
    ]
    return max(errors), codes[0], places, group.memory.held_bytes().get("rows", 0)


_SLOTS = re.compile(r"memory_for_peers\.default\(.*, (\d+)\)")


def test_norms_write_where_peers_fetch(ranks: Any) -> None:
    """The second gather's rows come from what the first one brought, so they share a slot; the one
    beside them has its own. Nothing copies rows.
    """
    for error, code, places, held in ranks(2).run(_compiled, "_blocks"):
        assert error < 1e-5
        assert sorted(map(int, _SLOTS.findall(code))) == [0, 0, 1]
        assert " = torch.ops.interlace.rows_for_peers" not in code
        assert places == [True] * 6
        assert held >= 2 * ROWS * WIDTH * 4


def test_calls_of_the_operator_itself(ranks: Any) -> None:
    for error, code, places, _ in ranks(2).run(_compiled, "_named"):
        assert error < 1e-5
        assert sorted(map(int, _SLOTS.findall(code))) == [0, 0]
        assert places == [True] * 4


def test_beyond_the_limit_rows_are_ordinary(ranks: Any) -> None:
    for error, code, places, held in ranks(2).run(_compiled, "_blocks", ROWS // 2, 1):
        assert error < 1e-5
        assert len(_SLOTS.findall(code)) == 3
        assert True not in places
        assert not held


def _not_computed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows that no kernel of Inductor's writes: the program's own, and a product's."""
    y = all_gather(x) @ UP.t()
    return y, all_gather(_own_part(y) @ DOWN.t()) @ OTHER.t()


def _small(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows that are no multiple of 16 bytes, which no copy can fetch from where they lie."""
    return (all_gather(F.gelu(x[:, : WIDTH - 1])) @ UP[:, : WIDTH - 1].t(),)


def test_what_inductor_does_not_compute_is_staged(ranks: Any) -> None:
    for error, code, places, held in ranks(2).run(_compiled, "_not_computed"):
        assert error < 1e-5
        assert not _SLOTS.findall(code)
        assert places == [False] * 4
        assert not held


def test_rows_that_cannot_be_fetched_are_staged(ranks: Any) -> None:
    for error, _, places, _ in ranks(2).run(_compiled, "_small"):
        assert error < 1e-5
        assert places == [False] * 2


def _slots() -> list[Any]:
    """Of the memory of slots: whether it stays where it is, grows, and is kept when it has; and
    what the operator does where Inductor does not compile it.
    """
    group = interlace.group_of(None)
    group.release()
    memory = group.memory
    first = memory.rows_for_peers(0, (4, 4), torch.float32)
    other = memory.rows_for_peers(1, (4, 4), torch.float32)
    large = memory.rows_for_peers(0, (1 << 20, 4), torch.float32)
    again = memory.rows_for_peers(0, (2, 8), torch.float32)
    x = torch.arange(16.0).view(2, 8)
    copy = torch.ops.interlace.rows_for_peers(x, dist.group.WORLD.group_name, 0)
    places = [memory.place_of(each) for each in (first, other, large, again, copy)]
    return [str(place) for place in places] + [
        bool((copy == x).all()),
        again.tolist() == x.tolist(),
    ]


def test_slots_stay_where_they_are(ranks: Any) -> None:
    results = ranks(2).run(_slots)
    assert results[0] == results[1], "one place on all ranks"
    first, other, large, again, copy, *are_right = results[0]
    assert len({first, other, large}) == 3
    assert first == again == copy
    assert are_right == [True, True]
