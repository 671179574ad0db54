"""The highest logits of a sharded vocabulary: those of all logits together."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.comm import Group
from interlace.comm.replay import replays
from interlace.comm.replay.deferred import New
from interlace.comm.replay.replays import KeptMemory
from interlace.costs import find_cost
from interlace.operators import linear_top_k
from interlace.operators.linear_top_k.call import TopKCall, known_call
from interlace.testing.cases import choices
from tests.errors import error_of
from tests.operators.traffic import check_traffic, with_traffic

ROWS, HIDDEN, COLUMNS = 4, 16, 24


def _tensors(vocabulary: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """X and the whole weight, the same on every rank."""
    source = torch.Generator().manual_seed(vocabulary)
    return torch.randn(rows, HIDDEN, generator=source), torch.randn(
        vocabulary, HIDDEN, generator=source
    )


def _own(w: torch.Tensor) -> torch.Tensor:
    return w.chunk(dist.get_world_size())[dist.get_rank()]


def _wrong() -> list[str]:
    """The cases of which a result of this rank is wrong."""
    cases = [
        choices.TopKCase(choices.OPERATOR, impl, dtype, False, *sizes)
        for impl in ("fused", "unfused")
        for *sizes, dtype in (
            (1, 8, 40, 1, False, "float32"),
            (6, 16, 60, 1, True, "bfloat16"),
            (6, 16, 60, 4, False, "float16"),
            (5, 16, 70, 64, True, "float32"),
            (3, 8, 9000, 1, False, "float32"),
        )
    ]
    return [case.label for case in cases if any(case.prepare().check())]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_form_is_topk_of_all_logits(ranks: Any, count: int) -> None:
    assert ranks(count).run(_wrong) == [[]] * count


def _of_uneven_shares() -> bool:
    x, w = _tensors(29)
    found = interlace.linear_top_k(x.view(2, 2, HIDDEN), _own(w), 2, vocabulary=29)
    wanted = F.linear(x, w).topk(2, 1)
    assert found.values.shape == (2, 2, 2)
    torch.testing.assert_close(found.values.flatten(0, 1), wanted.values)
    return found.columns.flatten(0, 1).equal(wanted.indices)


def test_the_last_rank_may_have_fewer_columns(ranks: Any) -> None:
    assert ranks(3).run(_of_uneven_shares) == [True] * 3


def _of_equal_logits() -> list[Any]:
    # More columns than the kernel compares at a time.
    x, w = torch.ones(2, 1), torch.zeros(8200, 1)
    x[1] = float("nan")
    values, columns = interlace.linear_top_k(x, w)
    return [values[:, 0].tolist(), columns[:, 0].tolist()]


def test_equal_logits_and_none(ranks: Any) -> None:
    """The lower column of equal logits; the first one where no logit is a number."""
    for values, columns in ranks(2).run(_of_equal_logits):
        assert values == [0.0, float("-inf")]
        assert columns == [0, 0]


def _compiled() -> bool:
    x, w = _tensors(2 * COLUMNS)
    call = torch.compile(
        lambda x, w: interlace.linear_top_k(2 * x, w).columns, backend="aot_eager", fullgraph=True
    )
    return bool(call(x, _own(w)).equal(interlace.linear_top_k(2 * x, _own(w)).columns))


def test_compiles_into_one_graph(ranks: Any) -> None:
    assert ranks(2).run(_compiled) == [True, True]


def _call(sizes: tuple[int, int]) -> torch.Tensor:
    rows, k = sizes
    x, w = _tensors(2 * COLUMNS, rows)
    return interlace.linear_top_k(x, _own(w), k, impl="fused").columns


def _traffic(calls: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
    return with_traffic(_call, calls)


def _check(calls: Any, answers: Any) -> None:
    for answers_of_rank in answers:
        for (rows, k), columns in zip(calls, answers_of_rank, strict=True):
            x, w = _tensors(2 * COLUMNS, rows)
            assert columns.equal(F.linear(x, w).topk(k, 1).indices)


def test_costs_are_the_counted_traffic(ranks: Any) -> None:
    calls = [(ROWS, 1), (3, 5)]

    def cost(sizes: tuple[int, int], rank: int) -> Any:
        rows, k = sizes
        formula = find_cost("linear_top_k").formula
        return formula(rows=rows, hidden=HIDDEN, columns=COLUMNS, itemsize=4, world_size=2, k=k)

    check_traffic(calls, ranks(2).run(_traffic, calls), _check, cost)


def _over_no_width() -> list[list[int]]:
    bias = torch.tensor([0.0, 3.0, 1.0, 2.0])
    return interlace.linear_top_k(torch.ones(2, 0), torch.ones(4, 0), 2, bias).columns.tolist()


def test_a_product_over_no_width_is_the_bias(ranks: Any) -> None:
    """As that of ``F.linear`` is; of equal logits the lower columns are chosen."""
    assert ranks(2).run(_over_no_width) == [[[1, 5]] * 2] * 2


# Calls that come again


def test_a_call_is_known_by_all_that_it_depends_on() -> None:
    (x, w), bias = _tensors(COLUMNS), torch.zeros(COLUMNS)
    plain = (x, w, bias, 2, COLUMNS, "auto")
    others = [
        (x.clone(), w, bias, 2, COLUMNS, "auto"),
        (x[:2], w, bias, 2, COLUMNS, "auto"),
        (x.view(torch.int32), w, bias, 2, COLUMNS, "auto"),
        (x, w.clone(), bias, 2, COLUMNS, "auto"),
        (x, w.as_strided(w.shape, (1, COLUMNS)), bias, 2, COLUMNS, "auto"),
        (x, w, bias.clone(), 2, COLUMNS, "auto"),
        (x, w, None, 2, COLUMNS, "auto"),
        (x, w, bias, 3, COLUMNS, "auto"),
        (x, w, bias, 2, COLUMNS - 1, "auto"),
        (x, w, bias, 2, COLUMNS, "fused"),
    ]
    assert known_call(*plain) == known_call(x.view_as(x), *plain[1:])
    assert len({known_call(*each) for each in (plain, *others)}) == 1 + len(others)


class _Graph:
    """What was captured, done again by each replay."""

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self.replay = enqueue


def _made_again(impl: str, k: int) -> list[Any]:
    """On a rank whose group makes graphs as on a GPU: which calls took the long way, which gave a
    wrong result, and whether the operands were kept.
    """
    group, columns = Group(None, torch.device("cpu")), 2 * COLUMNS
    x, w = _tensors(columns)
    taken = torch.empty(ROWS, k), torch.empty(ROWS, k, dtype=torch.int64)
    rows_of, calls, wrong = linear_top_k.rows_of, [], []

    def validated(*arguments: Any) -> torch.Tensor:
        calls[-1] = "long"
        return rows_of(*arguments)

    known = property(lambda call: known_call(call.x, call.w, call.bias, call.k, columns, impl))
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (linear_top_k, "rows_of", validated),
            (linear_top_k, "recalling_group", lambda *_: group),
            (TopKCall, "known", known),
            (TopKCall, "group", group),
            (New, "__call__", lambda *_: taken),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (group.replays, "is_enabled", True),
            (group.replays, "_capture", _Graph),
            (replays, "_kept_memory", lambda _: KeptMemory(1 << 20)),
            (group.streams, "continues", lambda: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for turn in range(5):
            x.copy_(_tensors(columns)[0].roll(turn, 1))
            calls.append("again")
            values, chosen = interlace.linear_top_k(x.view(2, 2, HIDDEN), w, k, impl=impl)
            wanted = F.linear(x, w).view(2, 2, columns).topk(k)
            if not (values.allclose(wanted.values) and chosen.equal(wanted.indices)):
                wrong.append(turn)
    # The graphs here are closures; a CUDA graph knows an address alone.
    for replayable in group.replays._graphs.values():
        replayable.graph = None
    gone = weakref.ref(x)
    del x
    gc.collect()
    return [calls, wrong, gone() is None]


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("impl", ["fused", "unfused"])
def test_a_call_that_comes_again_is_found(ranks: Any, impl: str, k: int) -> None:
    """By its form at first, and the kernel by its operands once it is a graph."""
    (found,) = ranks(1).run(_made_again, impl, k)
    assert found == [["long"] + ["again"] * 4, [], True]


def _results_of_two_calls() -> list[bool]:
    x, w = _tensors(2 * COLUMNS)
    w, same = _own(w), []
    for impl in ("fused", "unfused"):
        first, second = (interlace.linear_top_k(x, w, 2, impl=impl) for _ in range(2))
        same += [one.data_ptr() == two.data_ptr() for one, two in zip(first, second, strict=True)]
    return same


def test_each_result_has_memory_of_its_own(ranks: Any) -> None:
    assert ranks(2).run(_results_of_two_calls) == [[False] * 4] * 2


# Wrong use


def _errors() -> dict[str, Any]:
    x, w = _tensors(2 * COLUMNS)
    w, call = _own(w), interlace.linear_top_k
    calls: dict[str, Callable[[], Any]] = {
        "integers": lambda: call(x.long(), w),
        "width": lambda: call(x[:, :3], w),
        "dtype": lambda: call(x, w.double()),
        "bias": lambda: call(x, w, 1, torch.zeros(3)),
        "none": lambda: call(x, w, 0),
        "too many": lambda: call(x, w, 65),
        "more than a rank has": lambda: call(x, w, COLUMNS + 1),
        "explained": lambda: interlace.explain("linear_top_k", x, w, COLUMNS + 1),
        "large": lambda: call(x, w, vocabulary=1 << 25),
        "words": lambda: call(x, w, vocabulary="all"),  # type: ignore[arg-type]
        "few": lambda: call(x, w, vocabulary=3 * COLUMNS),
        "impl": lambda: call(x, w, impl="pushed"),
        "gradient": lambda: call(x.clone().requires_grad_(), w),
    }
    return {name: error_of(wrong) for name, wrong in calls.items()}


def test_wrong_arguments_are_refused_on_every_rank(ranks: Any) -> None:
    texts = {
        "integers": "x must be float16, bfloat16 or float32",
        "width": "w must be [V/R, H] with H = 3",
        "dtype": "w must be torch.float32 on cpu, like x; got torch.float64",
        "bias": "bias must be [V/R] with V/R = 24; got shape [3]",
        "none": "k must be 1 to 64; got 0",
        "too many": "k must be 1 to 64; got 65",
        "more than a rank has": "k must be at most the columns of each rank, 24; got 25",
        "explained": "k must be at most the columns of each rank, 24; got 25",
        "large": "vocabulary must be 1 to 16777216; got 33554432",
        "words": "vocabulary must be 1 to 16777216; got 'all'",
        "few": "w must have 36 rows, this rank's share of vocabulary=72",
        "impl": "impl must be one of auto, fused, unfused; got 'pushed'",
        "gradient": "this operator cannot be differentiated, as it has no gradient",
    }
    for errors in ranks(2).run(_errors):
        for name, (kind, text, _) in errors.items():
            assert kind == "ArgumentError", (name, text)
            assert text.startswith(f"linear_top_k: {texts[name]}"), (name, text)
