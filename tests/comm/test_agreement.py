"""No rank decides by what it alone knows whether ranks exchange something: agreement on the host,
and its memory.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ArgumentError, BackendError
from interlace.comm.groups.group import Group
from interlace.comm.host import cache
from interlace.comm.launching.kernels import Launch
from interlace.nn import EmbeddingTable, ShardedEmbeddingBags
from tests.errors import error_of
from tests.nn.features import Features, own, weights_of
from tests.operators.embedding_all_to_all.calls import Call
from tests.operators.embedding_all_to_all.test_gradients import bound, exact, upstream

# Memory that belongs to a name


def _solo() -> Group:
    return Group(None, torch.device("cpu"))


def test_own_values_under_a_name_must_not_change() -> None:
    group = _solo()
    told = group.agreement.gather("look up", "users", {"dtype": "float32"}, {"widths": (4, 8)})
    assert told == [{"name": "users", "dtype": "float32", "widths": (4, 8)}]
    assert (
        group.agreement.gather("look up", "users", {"dtype": "float32"}, {"widths": (4, 8)}) is told
    )
    with pytest.raises(ArgumentError) as caught:
        group.agreement.gather("look up", "users", {"dtype": "float32"}, {"widths": (4, 16)})
    assert str(caught.value) == (
        "look up: calls named 'users' must always have the same widths on this rank; got (4, 16), "
        "and (4, 8) before. "
        "Give other tables another name, on every rank."
    )
    assert group.agreement.gather("look up", "users", {"dtype": "float16"}, {"widths": (4, 16)})[0][
        "widths"
    ] == (4, 16)
    group.release()
    assert group.agreement.gather("look up", "users", {"dtype": "float32"}, {"widths": (4, 16)})[0][
        "widths"
    ] == (4, 16)


def test_answers_that_are_refused_are_not_remembered() -> None:
    group, asked = _solo(), []

    def refuse(answers: list[dict[str, Any]]) -> None:
        asked.append(answers)
        raise ArgumentError("no table has any rows.")

    for _ in range(2):
        with pytest.raises(ArgumentError, match="no table"):
            group.agreement.gather("look up", "users", {}, {"rows": 0}, check=refuse)
    assert len(asked) == 2


def test_agreements_are_forgotten_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a rank has made of them: it would not agree again in a call where its peers do.
    Marks go on.
    """
    monkeypatch.setattr(cache, "_MAX_AGREED", 3)
    group = _solo()
    marks = [
        group.once((size,), lambda size=size: group.agree("op", size=size)) for size in range(5)
    ]
    assert len(set(marks)) == 5
    assert len(group.cache.agreed) == 2
    assert group.once((4,), lambda: 0) == marks[4]
    assert group.once((0,), lambda: -1) == -1, "forgotten"


def _choice_of_rank_0() -> list[Any]:
    rank, group = dist.get_rank(), interlace.group_of(dist.new_group())
    chosen = [
        group.agreement.agree("op", {"size": size}, lambda when=when: [f"of {rank}", when])
        for size, when in ((1, 0), (1, 1), (2, 2))
    ]
    return [choice for _, choice in chosen]


def test_rank_0_chooses_for_all_at_the_first_call(ranks: Any) -> None:
    """Ranks may know different times, now or later."""
    assert ranks(2).run(_choice_of_rank_0) == [[["of 0", 0], ["of 0", 0], ["of 0", 2]]] * 2


# Embedding exchanges


def _look_up(
    call: Call, name: str, *, trains: bool = False, group: Any = None, **more: Any
) -> dict[str, Any]:
    """One call on this rank: the output, and the gradients of its tables if any rank trains
    them.
    """
    rank = dist.get_rank(group)
    tables = [table.requires_grad_(trains) for table in call.tables(rank)]
    indices, offsets, _ = call.lookups(rank)
    y = interlace.embedding_all_to_all(
        tables,
        indices,
        offsets,
        batch_size=call.batch,
        output_dtype=call.out,
        name=name,
        group=group,
        config=call.config,
        **more,
    )
    if y.requires_grad:
        y.backward(upstream(call, rank))
    return {
        "y": y.detach().clone(),
        "grads": [table.grad for table in tables],
        "backward": y.requires_grad,
    }


def _check_look_up(call: Call, results: list[dict[str, Any]], trainers: tuple[bool, ...]) -> None:
    call.check([result["y"] for result in results])
    for rank, result in enumerate(results):
        assert result["backward"] >= any(trainers)
        for gradient, (value, magnitude) in zip(result["grads"], exact(call, rank), strict=True):
            assert (gradient is not None) == trainers[rank]
            if gradient is not None:
                assert ((gradient.double() - value).abs() <= bound(call, value, magnitude)).all()


def _two_modules(calls: list[Call], names: list[str]) -> list[list[dict[str, Any]]]:
    return [
        [_look_up(call, name, trains=True) for call, name in zip(calls, names, strict=True)]
        for _ in range(2)
    ]


@pytest.mark.parametrize("names", [["", ""], ["A", "B"], ["", "B"]])
def test_two_modules_whose_tables_look_alike_on_one_rank(ranks: Any, names: list[str]) -> None:
    """Rank 1 holds tables of the same widths in both. It must ask again in the second call, since
    rank 0 does.
    """
    calls = [Call(((16,), (4, 4)), 4), Call(((20,), (4, 4)), 4, seed=1)]
    results = ranks(2).run(_two_modules, calls, names)
    for turn in range(2):
        for i, call in enumerate(calls):
            _check_look_up(call, [result[turn][i] for result in results], (True, True))


def _other_tables() -> Any:
    process_group = dist.new_group()
    interlace.set_deadline(1.0, process_group)
    rank, calls = dist.get_rank(), [Call(((16,), (4,)), 4), Call(((20,), (4,)), 4)]
    _look_up(calls[0], "tables", group=process_group)
    error = error_of(_look_up, calls[1], "tables", group=process_group)
    dist.barrier()
    return rank, error[:2]


def test_other_tables_under_a_name_are_refused_at_once(ranks: Any) -> None:
    """On the rank whose tables changed; nothing tells the other one, which waits for its
    deadline.
    """
    (_, (kind, message)), (_, (late, _)) = ranks(2).run(_other_tables)
    assert (kind, late) == ("ArgumentError", "PeerTimeoutError")
    assert message == (
        "embedding_all_to_all: calls named 'tables' must always have the same widths on this "
        "rank; got (20,), and (16,) before. "
        "Give other tables another name, on every rank."
    )


_FREEZING = [(True, True), (False, True), (False, False), (True, False), (False, True)]


def _freeze(call: Call, turns: list[tuple[bool, ...]]) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    return [_look_up(call, f"frozen {turns[0]}", trains=trainers[rank]) for trainers in turns]


@pytest.mark.parametrize(
    "turns",
    [_FREEZING, [(False, False), *_FREEZING], [(False, True), (False, True), (False, False)]],
)
def test_tables_are_frozen_and_unfrozen_on_one_rank(
    ranks: Any, turns: list[tuple[bool, ...]]
) -> None:
    """Whether a table requires a gradient is known on its rank only; a rank without tables sees no
    change at all.
    """
    for call in (Call(((4, 6), (8,)), 4), Call(((4, 6), (), ()), 4)):
        trainers = turns if call.widths[1] else [(first, False, False) for first, _ in turns]
        results = ranks(len(call.widths)).run(_freeze, call, trainers)
        for turn, each in enumerate(trainers):
            _check_look_up(call, [result[turn] for result in results], each)


def _evaluate_between(call: Call) -> list[Any]:
    """Training, evaluation without gradients, and training again; then the same with the evaluation
    first.
    """
    found = []
    for name in ("train first", "evaluate first"):
        for trains in (True, False, True)[name == "evaluate first" :]:
            with torch.set_grad_enabled(trains):
                found.append(_look_up(call, name, trains=True)["backward"])
    return found


def test_evaluation_between_training_steps(ranks: Any) -> None:
    assert (
        ranks(2).run(_evaluate_between, Call(((4,), ()), 4))
        == [[True, False, True, False, True]] * 2
    )


def _copies() -> list[float]:
    """Two modules of one plan, one of another plan, and one of the first plan that is frozen;
    called in turn.
    """
    plain = (EmbeddingTable("a", 9, 4), EmbeddingTable("b", 7, 4))
    other = (EmbeddingTable("a", 9, 4), EmbeddingTable("b", 7, 12))
    modules = [
        ShardedEmbeddingBags(tables, seed=i)
        for i, tables in enumerate((plain, plain, other, plain))
    ]
    modules[3].requires_grad_(dist.get_rank() == 0)
    wholes = [weights_of(module) for module in modules]
    errors = []
    for turn in range(2):
        for module, whole in zip(modules, wholes, strict=True):
            features = Features.draw(module.tables, 2 * dist.get_world_size(), seed=turn)
            indices, offsets, _ = features.of_rank(dist.get_rank(), dist.get_world_size())
            y = module(indices, offsets)
            errors.append(float((y.detach().double() - own(features.expected(whole))).abs().max()))
            if y.requires_grad:
                y.sum().backward()
    return errors


def test_sharded_modules_of_equal_and_of_other_plans(ranks: Any) -> None:
    for errors in ranks(2).run(_copies):
        assert max(errors) < 1e-5


# In torch.compile


def _compiled(call: Call, name: str, fullgraph: bool) -> list[Any]:
    """Steps of a compiled function that is traced again on rank 0 alone in the last ones."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    tables = [table.requires_grad_() for table in call.tables(rank)]
    indices, offsets, _ = call.lookups(rank)

    @torch.compile(fullgraph=fullgraph, backend="eager", dynamic=False)
    def step(factor: int) -> torch.Tensor:
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, batch_size=call.batch, name=name, config=call.config
        )
        return y * factor

    found = []
    for factor in (1, 1, 2, 3):
        here = factor if rank == 0 else 1
        y = step(here)
        y.backward(upstream(call, rank))
        found.append((y / here).detach())
    return found


@pytest.mark.parametrize(("name", "fullgraph"), [("compiled and named", True), ("", False)])
def test_a_rank_that_compiles_again_asks_nobody_alone(
    ranks: Any, name: str, fullgraph: bool
) -> None:
    """A call with a name is a constant of the graph; one without a name is between two graphs, and
    asks every time.
    """
    call = Call(((4,), (8,)), 4)
    results = ranks(2).run(_compiled, call, name, fullgraph)
    for turn in range(4):
        call.check([result[turn] for result in results])


def _unnamed_in_one_graph() -> str:
    try:
        _compiled(Call(((4,), (8,)), 4), "", True)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def test_one_graph_needs_a_name(ranks: Any) -> None:
    for message in ranks(2).run(_unnamed_in_one_graph):
        assert (
            "embedding_all_to_all without a name asks the other ranks in every call; pass name=..."
            in message
        )


def _unfrozen_after_compiling() -> Any:
    process_group = dist.new_group()
    interlace.set_deadline(1.0, process_group)
    call, rank = Call(((4,), (8,)), 4), dist.get_rank()
    tables = call.tables(rank)
    indices, offsets, _ = call.lookups(rank)

    def step() -> torch.Tensor:
        return interlace.embedding_all_to_all(
            tables,
            indices,
            offsets,
            batch_size=4,
            name="late",
            config=call.config,
            group=process_group,
            check_indices=False,
        )

    torch.compile(step, fullgraph=True, backend="eager")()
    if rank == 1:
        return None
    tables[0].requires_grad_()
    return error_of(step)[:2]


def test_what_a_graph_has_settled_cannot_change(ranks: Any) -> None:
    assert ranks(2).run(_unfrozen_after_compiling) == [
        (
            "ArgumentError",
            "embedding_all_to_all: tables named 'late' must require gradients on some rank when a "
            "graph with them is first "
            "compiled, or never; got ones that do now. Unfreeze them before, or give the call "
            "another name on every rank.",
        ),
        None,
    ]


# Sequences


@dataclasses.dataclass
class _Program:
    """Random calls, the same on every rank, whose local arguments coincide on some ranks and not on
    others.
    """

    seed: int
    world_size: int
    length: int = 12

    def steps(self) -> list[tuple[str, Any]]:
        choose = random.Random(self.seed)
        kinds = [
            "embedding",
            "embedding",
            "named",
            "named",
            "all_to_all",
            "all_gather",
            "even",
            "bags",
            "release",
        ]
        return [
            (kind, self._arguments(kind, choose)) for kind in choose.choices(kinds, k=self.length)
        ]

    def _arguments(self, kind: str, choose: random.Random) -> Any:
        ranks, second = range(self.world_size), choose.random() < 0.3
        if kind in ("embedding", "named"):
            widths = [choose.choice([(4,), (4, 4), (12,), ()]) for _ in ranks]
            widths[choose.randrange(self.world_size)] = choose.choice([(4,), (16,)])
            trainers = tuple(bool(each) and choose.random() < 0.5 for each in widths)
            return (
                Call(tuple(widths), 3 + choose.randrange(2), seed=choose.randrange(100)),
                trainers,
                second,
            )
        if kind == "bags":
            return choose.randrange(2), choose.randrange(100)
        if kind == "release":
            return second
        counts = [[choose.choice([0, 2, 3]) for _ in ranks] for _ in ranks]
        return (counts if kind == "all_to_all" else counts[0]), choose.randrange(100), second

    def run(self) -> list[Any]:
        """On a rank: what went wrong in each step, by how much."""
        groups = [dist.new_group(), dist.new_group()]
        tables = (EmbeddingTable("a", 9, 4), EmbeddingTable("b", 7, 8))
        bags = [
            ShardedEmbeddingBags(tables[:count], group=groups[0], seed=count) for count in (1, 2)
        ]
        return [self._step(kind, arguments, groups, bags) for kind, arguments in self.steps()]

    def _step(
        self, kind: str, arguments: Any, groups: list[Any], bags: list[ShardedEmbeddingBags]
    ) -> Any:
        rank = dist.get_rank()
        if kind == "release":
            interlace.group_of(groups[arguments]).release()
            return 0.0
        if kind == "bags":
            which, seed = arguments
            features = Features.draw(bags[which].tables, 2 * self.world_size, seed=seed)
            y = bags[which](*features.of_rank(rank, self.world_size)[:2]).detach()
            return float((y - own(features.expected(weights_of(bags[which])))).abs().max())
        if kind in ("embedding", "named"):
            call, trainers, second = arguments
            name = f"{call.widths}" if kind == "named" else ""
            return _look_up(call, name, trains=trainers[rank], group=groups[second])
        return self._product(kind, arguments, groups)

    def _product(self, kind: str, arguments: Any, groups: list[Any]) -> float:
        """Products of small integers are exact."""
        counts, seed, second = arguments
        rank, ranks = dist.get_rank(), range(self.world_size)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        if kind == "all_to_all":
            xs, ws = [draw(sum(each), 5) for each in counts], [draw(6, 5) for _ in ranks]
            receives = [each[rank] for each in counts]
            y = interlace.gemm_all_to_all(
                xs[rank],
                ws[rank],
                input_splits=counts[rank],
                output_splits=receives,
                group=groups[second],
                impl="fused",
            )
            parts = [(xs[source] @ ws[source].T).split(counts[source])[rank] for source in ranks]
            return float((y - torch.cat(parts)).abs().sum())
        rows = counts if kind == "all_gather" else [2] * self.world_size
        xs, ws = [draw(count, 5) for count in rows], [draw(6, 5) for _ in ranks]
        splits = rows if kind == "all_gather" else None
        y = interlace.all_gather_gemm(
            xs[rank], ws[rank], splits=splits, group=groups[second], impl="fused"
        )
        return float((y - torch.cat(xs) @ ws[rank].T).abs().sum())


@pytest.mark.parametrize(("world_size", "seed"), [(2, 0), (2, 1), (3, 3), (3, 4)])
def test_any_sequence_of_calls(ranks: Any, world_size: int, seed: int) -> None:
    program = _Program(seed, world_size)
    outcomes = ranks(world_size).run(program.run)
    for i, (kind, arguments) in enumerate(program.steps()):
        results = [outcome[i] for outcome in outcomes]
        if kind in ("embedding", "named"):
            _check_look_up(arguments[0], results, arguments[1])
        else:
            assert max(results) < 1e-5, (kind, arguments)


# What fails on one rank


def _fails_on_rank_1(action: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise error
        return action(*args, **kwargs)

    return call


def _together() -> Any:
    group = interlace.group_of(dist.new_group())

    def step() -> int:
        with group.agreement.together("mapping"):
            return _fails_on_rank_1(lambda: 5, BackendError("the driver refuses."))()

    return error_of(step)[:2], group.broken


def test_what_fails_on_one_rank_fails_on_all(ranks: Any) -> None:
    outcomes = ranks(2).run(_together)
    assert outcomes[1] == (("BackendError", "the driver refuses."), False)
    assert outcomes[0] == (
        ("BackendError", "mapping must succeed on every rank; got on rank 1: the driver refuses."),
        False,
    )


def _fails_alone() -> Any:
    """Rank 1 fails in a step in which its peer waits for it."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    interlace.set_deadline(1.0, process_group)
    error = None
    if group.rank == 1:
        try:
            with group.agreement.together("mapping"):
                raise OSError("Too many open files")
        except interlace.PeerTimeoutError as late:
            error = late.peer, str(late.__cause__)
    dist.barrier()
    return error


def test_what_failed_first_is_the_cause_of_what_follows(ranks: Any) -> None:
    cause = "mapping must succeed; got OSError: Too many open files"
    assert ranks(2).run(_fails_alone) == [None, (0, cause)]


def _grow_without_memory() -> Any:
    """A workspace of which one rank cannot make its part, and the same call again once it can."""
    group = interlace.group_of(dist.new_group())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "ones", _fails_on_rank_1(torch.ones, torch.OutOfMemoryError("there is no more"))
        )
        error = error_of(group.workspace, "multiply", 1 << 14)
    return (
        error[0],
        "growing the memory of multiply" in error[1],
        group.workspace("multiply", 1 << 14).half_bytes,
        group.broken,
    )


def test_a_workspace_that_cannot_grow_on_one_rank_grows_on_none(ranks: Any) -> None:
    assert ranks(2).run(_grow_without_memory) == [("WorkspaceError", True, 1 << 14, False)] * 2


# What a broken group refuses


def _asked_again() -> Any:
    """Rank 1 does not come to a first call, and the others make another one."""
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    interlace.set_deadline(1.0, process_group)
    asked, exchange = [], group.channel.exchange

    def counted(label: str, *args: Any, **more: Any) -> Any:
        asked.append(label)
        return exchange(label, *args, **more)

    group.channel.exchange = counted  # type: ignore[method-assign]
    calls = [
        lambda: group.agree("multiply", columns=3),
        lambda: group.agree("multiply", columns=4),
        lambda: group.agreement.gather("multiply", "", {}, {"rows": 1}),
        lambda: group.agreement.any_rank_now("frozen", True),
        lambda: group.allocate(4096),
    ]
    errors = [error_of(call)[:2] for call in calls if group.rank != 1]
    dist.barrier()
    return errors, asked


def test_a_broken_group_waits_for_nobody(ranks: Any) -> None:
    """Each later call raises the error of the first one, without an exchange."""
    for rank, (errors, asked) in enumerate(ranks(3).run(_asked_again)):
        if rank != 1:
            assert errors[0][0] == "PeerTimeoutError"
            assert "multiply: rank" in errors[0][1]
            assert errors == [errors[0]] * 5
            assert asked == ["multiply"]


# What is interrupted


class _Interrupted(KeyboardInterrupt):
    pass


def _raises(*_: Any, **__: Any) -> None:
    raise _Interrupted


def _interrupt(where: str) -> Any:
    """An interrupt on every rank: within an exchange, within a step that all take together, between
    two launches, or before the first one.
    """
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    call = Call(((4,), (8,)), 4)
    _look_up(call, "tables", group=process_group)
    try:
        if where == "step":
            with group.agreement.together("mapping"):
                raise _Interrupted
        elif where == "exchange":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group.channel, "_exchange", _raises)
                group.agree("multiply", columns=3)
        else:
            with group.running():
                if where == "launches":
                    _launch_nothing()
                raise _Interrupted
    except _Interrupted:
        pass
    return group.broken, error_of(_look_up, call, "tables", group=process_group)


def _launch_nothing() -> None:
    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, _: Any) -> Any:
            return lambda *arguments, **options: None

    Launch(Kernel(), (1,), {"x": None}, {})()


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("exchange", "multiply"),
        ("step", "mapping"),
        ("launches", "an operator's launches"),
    ],
)
def test_a_call_that_is_interrupted_breaks_the_group(ranks: Any, where: str, step: str) -> None:
    for broken, error in ranks(2).run(_interrupt, where):
        assert broken
        assert error[:2] == (
            "GroupError",
            "a call must not be interrupted once its kernels may run, as ranks then no longer "
            "agree; got _Interrupted in "
            f"{step}. This group is broken now. Call interlace.recover on every rank.",
        )


def test_an_interrupt_before_the_first_launch_breaks_nothing(ranks: Any) -> None:
    assert ranks(2).run(_interrupt, "before") == [(False, None)] * 2
