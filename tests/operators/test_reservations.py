"""Every implementation allocates the symmetric memory that it says beforehand, and no more than a
limit allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import environment
from interlace.comm.groups.reservation import Reservation
from interlace.gemm.operator import GemmOperator
from interlace.operators.embedding_all_to_all.layout import Layout, SizedLookups
from interlace.operators.linear_cross_entropy.call import SizedLoss
from interlace.operators.linear_top_k.call import SizedChoice
from interlace.operators.mixture_of_experts.choice import ExpertTerms
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import operators
from interlace.testing.cases import IMPLEMENTATIONS, Case, every_case
from interlace.testing.cases.losses import LossCase
from interlace.testing.cases.sequence import SequenceCase
from tests.errors import error_of

# What stock pairs compare their rows by; no limit applies to it.
_COMPARISON = ", comparison of rows"


def _cases(world_size: int) -> list[Case]:
    """Return calls of all implementations; those of products without a backward pass, which is
    other operators'.
    """
    cases: list[Case] = []
    for case in every_case(world_size, [name for name in IMPLEMENTATIONS if name in operators()]):
        declaration = operators()[case.operator]
        if isinstance(declaration, GemmOperator) or isinstance(case, SequenceCase):
            case = dataclasses.replace(case, backward=False)
        elif isinstance(case, LossCase):
            # Rows are gathered, and gradients summed, by other operators.
            case = dataclasses.replace(case, backward=False, sharded=False)
        if case not in cases:
            cases.append(case)
    return cases


def _said(case: Any, tensors: dict[str, torch.Tensor], granularity: int) -> Reservation | None:
    """Return what an implementation says that it needs, by the sizes of a call."""
    declaration, ranks = operators()[case.operator], dist.get_world_size()
    implementation = declaration.implementation(case.impl_name)
    if case.operator == "embedding_all_to_all":
        layout = Layout(tuple(case._widths(rank) for rank in range(ranks)), case.batch)
        sized: Any = SizedLookups(layout, case.result_dtype.itemsize, case.backward)
    elif case.operator == "mixture_of_experts":
        x, top_k = tensors["x"], tensors["experts"].shape[1]
        capacity = case.capacity or max(1, len(x))
        sizes = ExpertSizes(
            len(x), top_k, ranks * case.local, case.hidden, case.ffn, ranks, capacity
        )
        sized = ExpertTerms(sizes, x.dtype, "cpu", case.backward)
    elif case.operator == "linear_top_k":
        sized = SizedChoice(case.rows, case.k, ranks)
    elif case.operator == "linear_cross_entropy":
        sized = SizedLoss(case.rows, case._options(ranks)["chunk_rows"], ranks)
    elif isinstance(case, SequenceCase):
        sized = declaration.sized(
            tensors["x"], tensors["w"], bias=tensors.get("bias"), splits=case.splits,
            world_size=ranks, **case.column_options(ranks),
        )  # fmt: skip
    elif getattr(case, "splits", None) is not None:
        return None
    else:
        return declaration.reservations(
            tensors["x"], tensors["w"], bias=tensors.get("bias"), world_size=ranks,
            granularity=granularity,
        )[case.impl_name]  # fmt: skip
    said: Reservation | None = implementation.reservation(sized)
    return said


def _compare(cases: list[Any]) -> list[tuple[str, int | None, int | None, int]]:
    """Return for each call its label, the bytes that were said by its sizes and by the call itself,
    and those that it has allocated.
    """
    asked: list[Reservation] = []
    compared = []
    with environment.changed({"INTERLACE_MAX_WORKSPACE": "64G"}):
        process_group = dist.new_group()
        group = interlace.group_of(process_group)
    shortage = group.memory.shortage

    def recorded(reservation: Reservation, **options: bool) -> str | None:
        asked.append(reservation)
        return shortage(reservation, **options)

    group.memory.shortage = recorded  # type: ignore[method-assign]
    for case in cases:
        group.release()
        asked.clear()
        tensors = case.tensors(dist.get_rank(), dist.get_world_size(), 0)
        said = _said(case, tensors, group.granularity)
        make = case.open(process_group)
        make(tensors)
        held = {
            name: nbytes
            for name, nbytes in group.workspace_bytes().items()
            if not name.endswith(_COMPARISON)
        }
        by_call = asked[0] if asked and not case.backward else None
        sizes = [
            None if each is None else each.nbytes(group.granularity) for each in (said, by_call)
        ]
        compared.append((case.label, *sizes, sum(held.values())))
    group.memory.shortage = shortage  # type: ignore[method-assign]
    return compared


@pytest.mark.parametrize("operator", [name for name in IMPLEMENTATIONS if name in operators()])
def test_allocates_what_it_says(ranks: Any, operator: str) -> None:
    """The memory that an implementation reserves, by sizes alone and in a call, is what a call of
    it allocates.
    """
    cases = [case for case in _cases(2) if case.operator == operator]
    assert {case.impl_name for case in cases} == {
        each.name
        for each in operators()[operator].implementations
        if not each.is_stock and (operator != "mixture_of_experts" or each.name != "chunked")
    }
    known = set()
    for compared in ranks(2).run(_compare, cases):
        for case, (label, said, by_call, held) in zip(cases, compared, strict=True):
            assert said in (None, held), label
            assert by_call in (None, held), label
            if said is not None:
                known.add(case.impl_name)
            assert (held == 0) == (case.impl_name in ("unfused", "pooled") and _is_bare(case)), (
                label
            )
    assert known == {case.impl_name for case in cases}


def _is_bare(case: Case) -> bool:
    """Tell if a case's implementation needs no symmetric memory."""
    return case.impl_name == "unfused" or case.operator == "embedding_all_to_all"


@contextlib.contextmanager
def _limited(limit: str) -> Iterator[Any]:
    """Give a new process group of all ranks with a limit."""
    with environment.changed({"INTERLACE_MAX_WORKSPACE": limit}):
        process_group = dist.new_group()
        interlace.group_of(process_group)
        yield process_group


def _held(process_group: Any) -> dict[str, int]:
    return {
        name: nbytes
        for name, nbytes in interlace.group_of(process_group).workspace_bytes().items()
        if not name.endswith(_COMPARISON)
    }


def _products() -> Any:
    """Return what products of two sizes hold, what was refused, and the explanation."""
    x, w = torch.ones(64, 32), torch.ones(128, 32)
    call, results = interlace.gemm_reduce_scatter, []
    with _limited("40K") as process_group:
        for rows in (8, 64, 8):
            y = call(x[:rows], w, group=process_group)
            results.append((y.unique().tolist(), _held(process_group)))
        refused = error_of(call, x, w, group=process_group, impl="fused")
        with interlace.batch_invariant():
            invariant = error_of(call, x, w, group=process_group)
        assert not interlace.group_of(process_group).broken
        said = interlace.explain("gemm_reduce_scatter", x, w, group=process_group)
        small = interlace.explain("gemm_reduce_scatter", x[:8], w, group=process_group)
        interlace.group_of(process_group).release()
        assert not _held(process_group)
        after = call(x[:8], w, group=process_group, impl="fused").unique().tolist()
    return results, (refused, invariant), said, small, after


def test_auto_keeps_to_the_limit(ranks: Any) -> None:
    """Beyond the limit, ``"auto"`` takes what needs less; a kernel that the caller names raises on
    every rank, and the group goes on.
    """
    for results, refused, said, small, after in ranks(2).run(_products):
        name = "gemm_reduce_scatter"
        (first, held), (second, held_later), (third, held_last) = results
        assert first == second == third == after == [64.0]
        assert list(held) == [name]
        assert held == held_later == held_last
        assert sum(held.values()) <= 40 << 10
        needs = "68 KiB of symmetric memory; INTERLACE_MAX_WORKSPACE leaves "
        for (kind, text, _), advice in zip(
            refused, ("or take impl='auto'.", "or do without batch invariance."), strict=True
        ):
            assert kind == "WorkspaceError"
            assert f"{name}: impl='fused' must fit" in text
            assert needs in text
            assert text.endswith(advice)
        assert f": unfused, because fused needs {needs}" in said
        assert f"on 2 ranks: fused ({_config()}), because" in small
        assert "Symmetric memory per rank: fused 68 KiB, pushed" in said
        assert "unfused none" in said


def _config() -> str:
    operator = operators()["gemm_reduce_scatter"]
    device = torch.device("cpu")
    sizes = {"rows": 8, "columns": 128, "inner": 32, "dtype": torch.float32, "world_size": 2}
    return str(operator.choose(**sizes, device=device).config)


def _measured() -> Any:
    """Return the memory of mapped outputs under a limit, and whether one of them was refused."""
    x, w = torch.ones(16, 32), torch.ones(128, 32)
    with _limited("200K") as process_group:
        held = []
        for columns in (128, 64):
            for impl in ("chunked", "auto"):
                interlace.gemm_all_to_all(x, w[:columns], group=process_group, impl=impl)
            held.append(sum(_held(process_group).values()))
        error = error_of(
            interlace.gemm_all_to_all, torch.ones(256, 32), w, group=process_group, impl="chunked"
        )
    return held, error


def test_mapped_outputs_count(ranks: Any) -> None:
    """The memory of mapped outputs that a group keeps counts, and is refused beyond the limit."""
    for held, error in ranks(2).run(_measured):
        assert held[0] < held[1] <= 200 << 10
        assert error[0] == "WorkspaceError"
        assert "INTERLACE_MAX_WORKSPACE leaves" in error[1]


def _others(limit: str) -> Any:
    """Return results and gradients of experts and of tables, and what is held."""
    rank, outcomes = dist.get_rank(), []
    with _limited(limit) as process_group:
        layer = interlace.nn.MoE(16, 8, 4, 2, group=process_group)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        y, _ = layer(x)
        y.sum().backward()
        outcomes += [y.detach(), x.grad, layer.w_in.grad, layer.w_out.grad]
        with torch.no_grad():
            outcomes.append(layer(x)[0])
        tables = [interlace.nn.EmbeddingTable(name, 8, 16, bag_length=1) for name in "ab"]
        bags = interlace.nn.ShardedEmbeddingBags(tables, group=process_group)
        pooled = bags(torch.arange(8) % 8)
        pooled.sum().backward()
        outcomes += [pooled.detach(), next(bags.parameters()).grad]
        return outcomes, _held(process_group)


def test_experts_and_tables_keep_to_the_limit(ranks: Any) -> None:
    """With no memory at all, experts and tables run by PyTorch's collectives, forward and backward,
    with the same results.
    """
    free, limited = ranks(2).run(_others, ""), ranks(2).run(_others, "0")
    for (expected, held), (found, held_of_limited) in zip(free, limited, strict=True):
        torch.testing.assert_close(found, expected)
        assert {"mixture_of_experts", "embedding_all_to_all", "outputs"} <= held.keys()
        assert held_of_limited == {}


def _differ() -> Any:
    limit = ["1M", ""][dist.get_rank()]
    with environment.changed({"INTERLACE_MAX_WORKSPACE": limit}):
        return error_of(interlace.group_of, dist.new_group())


def test_all_ranks_need_the_same_limit(ranks: Any) -> None:
    """Ranks with different limits cannot form a group; the error names both."""
    for kind, text, _ in ranks(2).run(_differ):
        assert kind == "RankMismatchError"
        assert "INTERLACE_MAX_WORKSPACE=1048576" in text
        assert "INTERLACE_MAX_WORKSPACE=None" in text


def _allocations() -> Any:
    """Return what allocations beyond the limit raise, beside one within it and one without it."""
    with _limited("100K") as process_group:
        group = interlace.group_of(process_group)
        group.workspace("within", 4096)
        group.workspace("of a pair", 1 << 20, is_limited=False)
        errors = [
            error_of(group.workspace, "beyond", 1 << 20),
            error_of(group.outputs.landing, 1 << 20),
        ]
        return errors, group.memory.room_bytes(), group.broken


def test_allocations_beyond_the_limit(ranks: Any) -> None:
    """Memory of operators that do not say beforehand what they need is refused when it is
    allocated; signals of PyTorch's pairs do not count.
    """
    for errors, room, broken in ranks(2).run(_allocations):
        assert room == (100 - 8 - 4) << 10
        assert not broken
        for (kind, text, _), needs in zip(errors, ("2 MiB", "3 MiB"), strict=True):
            assert kind == "WorkspaceError"
            assert "under the limit INTERLACE_MAX_WORKSPACE=102400; got " in text
            assert f"{needs} of symmetric memory; INTERLACE_MAX_WORKSPACE leaves 88 KiB" in text
            assert "beside 12 KiB that the group holds" in text
