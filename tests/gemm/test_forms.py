"""Calls that differ from an earlier one in addresses alone go past what that one found out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import Group
from interlace.comm.groups.group import known_group
from interlace.comm.host import cache
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay import replays
from interlace.comm.replay.replays import Replays
from interlace.gemm import autotune, dispatch, schema
from interlace.gemm.operands import FLOAT8
from interlace.gemm.operator import product_operator
from interlace.gemm.scaled import block_scale_shapes
from interlace.operators.gemm_all_reduce import GemmAllReduce, normed
from tests.errors import error_of

ROWS, COLUMNS, INNER = 8, 16, 32

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _anew(launched: Launch) -> Callable[[int, Mapping[str, Any]], None]:
    """What launches a kernel again. The interpreter compiles nothing that could be."""
    kernel, constants = launched.kernel, launched.constants
    return lambda programs, arguments: Launch(kernel, (programs,), arguments, constants)()


@contextlib.contextmanager
def _remembering() -> Iterator[tuple[dist.ProcessGroup, Group]]:
    """A group that remembers calls as one of GPUs does, but makes no graphs. Calls whose operands
    come a second time would become one, not an eighth.
    """
    members = dist.new_group()
    group = interlace.group_of(members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.replays, "is_enabled", True)
        patch.setattr(group.streams, "continues", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(replays, "_FIRST_TRY", 2)
        patch.setattr(Launch, "again", _anew)
        patch.setattr(Replays, "_run", lambda _, key, enqueue, nbytes: enqueue() or True)
        yield members, group


def _operands(seed: int, rows: int = ROWS) -> Operands:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x, w = (torch.randn(*shape, generator=generator) for shape in ((rows, INNER), (COLUMNS, INNER)))
    # The same on every rank, as a bias must be.
    return x, w, torch.randn(COLUMNS, generator=torch.Generator().manual_seed(seed))


def _takes_long_way(call: Callable[[], object], step: str = "effective_impl") -> bool:
    """Whether a call finds out again how it is to run, or does another step of the long way."""
    with mock.patch.object(dispatch, step, wraps=getattr(dispatch, step)) as taken:
        call()
    return bool(taken.call_count)


def _calls_elsewhere(name: str, impl: str) -> tuple[list[bool], float]:
    """Which of some calls with operands elsewhere take the long way, and the largest error."""
    operator, long_ways, error = getattr(interlace, name), [], 0.0
    with _remembering() as (members, _):
        for seed in range(4):
            operands, results = _operands(seed), []

            def call(operands: Operands = operands, results: list[torch.Tensor] = results) -> None:
                results.append(operator(*operands, impl=impl, group=members))

            long_ways.append(_takes_long_way(call))
            expected = operator(*operands, impl="unfused")
            error = max(error, float((results[0] - expected).abs().max()))
    return long_ways, error


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("gemm_all_reduce", "pushed"), ("gemm_all_reduce", "unfused"), ("gemm_all_reduce", "auto"),
        ("gemm_reduce_scatter", "fused"), ("gemm_reduce_scatter", "pushed"),
        ("all_gather_gemm", "pushed"), ("all_gather_gemm", "chunked"),
        ("gemm_all_to_all", "fused"), ("gemm_all_to_all", "pushed"),
    ],
)  # fmt: skip
def test_the_first_call_of_a_form_finds_out_for_all(ranks: Any, name: str, impl: str) -> None:
    for long_ways, error in ranks(2).run(_calls_elsewhere, name, impl):
        assert long_ways == [True, False, False, False]
        assert error < 1e-4


def _scaled_elsewhere(name: str, impl: str) -> tuple[list[bool], list[float]]:
    """Which calls of float8 take the long way: two of each kind of scales, which lie elsewhere; and
    the errors of all.
    """
    operator, long_ways, errors = getattr(interlace, name), [], []
    inner = 256  # two blocks
    with _remembering() as (members, _):
        for kind in ("matrices", "rows", "blocks", "blocks along rows"):
            for seed in range(2):
                generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
                shapes = (ROWS, inner), (COLUMNS, inner)
                x, w = (torch.randn(shape, generator=generator).to(FLOAT8) for shape in shapes)
                scale_shapes: Any = {"matrices": ((1,), (1,)), "rows": ((ROWS, 1), (COLUMNS,))}
                of_x, of_w = scale_shapes.get(kind, block_scale_shapes(x, w))
                x_scale = torch.rand(of_x, generator=generator) + 0.5
                w_scale = torch.rand(of_w, generator=generator) + 0.5
                if kind == "blocks along rows":
                    x_scale = x_scale.T.contiguous().T
                options = {"x_scale": x_scale, "w_scale": w_scale}
                results: list[torch.Tensor] = []

                def call(
                    x: torch.Tensor = x,
                    w: torch.Tensor = w,
                    options: dict[str, torch.Tensor] = options,
                    results: list[torch.Tensor] = results,
                ) -> None:
                    results.append(operator(x, w, impl=impl, group=members, **options))

                long_ways.append(_takes_long_way(call))
                expected = operator(x, w, impl="unfused", **options)
                error = (results[0] - expected).abs().max() / expected.abs().max()
                errors.append(float(error))
    return long_ways, errors


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("gemm_all_reduce", "pushed"), ("gemm_reduce_scatter", "chunked"),
        ("all_gather_gemm", "chunked"), ("gemm_all_to_all", "fused"),
    ],
)  # fmt: skip
def test_calls_with_scales_are_found_by_their_kind(ranks: Any, name: str, impl: str) -> None:
    for long_ways, errors in ranks(2).run(_scaled_elsewhere, name, impl):
        assert long_ways == [True, False] * 4
        # Sums are rounded to bfloat16 twice.
        assert max(errors) < 2**-6


def _refused_scales(impl: str) -> list[tuple[str, str]]:
    """The errors of scales that are none of float8 operands, behind calls with as many numbers."""
    inner, columns = 128, 256  # one block along K, and two of w's rows
    w, errors = torch.ones(columns, inner).to(FLOAT8), []

    def found(_: object, x: torch.Tensor, *others: torch.Tensor | None) -> Group | None:
        return known_group(members, x.device)

    with _remembering() as (members, _), mock.patch.object(schema, "recalling_group", found):

        def call(rows: int, of_x: tuple[int, ...], of_w: tuple[int, ...]) -> torch.Tensor:
            scales = {"x_scale": torch.ones(of_x), "w_scale": torch.ones(of_w)}
            x = torch.ones(rows, inner).to(FLOAT8)
            return interlace.gemm_all_reduce(x, w, impl=impl, group=members, **scales)

        for right, wrong in (
            (((ROWS, 1), (2, 1)), ((ROWS,), (2,))),  # of blocks
            (((ROWS,), (columns,)), ((ROWS // 2, 2), (2, columns // 2))),
        ):
            call(ROWS, *right)
            error = error_of(call, ROWS, *wrong)
            errors.append(("none", "") if error is None else error[:2])
        # A weight's scales lie otherwise in the same place.
        w_scale, x = torch.ones(2, 2), torch.ones(ROWS, columns).to(FLOAT8)
        call_of = functools.partial(
            dispatch.known_call, product_operator("gemm_all_reduce"), x, x.new_empty(256, columns),
            None, torch.bfloat16, False, impl, interlace.group_of(members), torch.ones(ROWS, 2),
        )  # fmt: skip
        assert call_of(w_scale) != call_of(w_scale.T)
    return errors


@pytest.mark.parametrize("impl", ["fused", "pushed"])
def test_scales_that_are_refused_are_so_behind_others(ranks: Any, impl: str) -> None:
    """Kernels would read beyond them."""
    for errors in ranks(2).run(_refused_scales, impl):
        assert [kind for kind, _ in errors] == ["ArgumentError"] * 2
        assert all("_scale must be" in message for _, message in errors)


def _preparations(name: str, impl: str) -> tuple[list[bool], float]:
    """Which calls prepare their launches, and the largest error: five calls of operands elsewhere,
    and then those of the first one twice more.
    """
    operator, prepared, error = getattr(interlace, name), [], 0.0
    kept = [_operands(seed) for seed in range(5)]
    with _remembering() as (members, _):
        for x, w, bias in (*kept, kept[0], kept[0]):
            operands = (x, w) if impl == "remote_stores" else (x, w, bias)
            results: list[torch.Tensor] = []

            def call(*operands: torch.Tensor, results: list[torch.Tensor] = results) -> None:
                results.append(operator(*operands, impl=impl, group=members))

            prepared.append(_takes_long_way(functools.partial(call, *operands), "_run_decided"))
            expected = operator(*operands, impl="unfused")
            error = max(error, float((results[0] - expected).abs().max()))
    return prepared, error


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("gemm_all_reduce", "pushed"), ("gemm_reduce_scatter", "pushed"),
        ("all_gather_gemm", "pushed"), ("gemm_all_to_all", "pushed"),
        ("gemm_all_reduce", "fused"), ("gemm_all_to_all", "fused"),
        ("gemm_all_reduce", "remote_stores"),
        ("gemm_all_reduce", "chunked"), ("gemm_all_to_all", "chunked"),
    ],
)  # fmt: skip
def test_calls_that_come_once_go_past_preparations(ranks: Any, name: str, impl: str) -> None:
    """One that comes for the second time may become a graph, and is prepared as one. That which
    goes the whole way has not been asked about.
    """
    for prepared, error in ranks(2).run(_preparations, name, impl):
        assert prepared == [True, False, False, False, False, False, True]
        assert error < 1e-4


def _ways_of_rows(name: str, impl: str, dtype: torch.dtype, are_forgotten: bool) -> Any:
    """How calls of several numbers of rows were decided, which of them take the long way, and the
    largest error relative to the largest result.
    """
    operator, run = getattr(interlace, name.removesuffix("_norm")), dispatch._run
    ways: list[Any] = []
    long_ways, error = [], 0.0

    def note(implementation: Any, call: Any, decision: Any) -> Any:
        ways.append((implementation.name, call.config, call.configs, call.rows, call.mark))
        ways.append((decision.kind, [each.name for each in decision.implementations]))
        return run(implementation, call, decision)

    with (
        _remembering() as (members, group),
        mock.patch.object(dispatch, "_run", note),
        mock.patch.object(normed, "_known_call", _known_on_cpu()),
    ):
        # The second time no memory grows, which makes a group forget its calls.
        for number, rows in enumerate(2 * (80, 8, 40, 6, 2, 12)):
            if are_forgotten or number == 6:
                group.replays.forget()
            x, w, bias = _operands(number, rows)
            x, w, bias = x.to(dtype), w.to(dtype), bias if dtype != FLOAT8 else bias.bfloat16()
            options: dict[str, Any] = {}
            if dtype == FLOAT8:
                options = {"x_scale": torch.rand(rows) + 0.5, "w_scale": torch.rand(COLUMNS) + 0.5}
            if name.endswith("_norm"):
                options = {"residual": torch.randn(rows, COLUMNS), "norm_weight": bias}
            results: list[torch.Tensor] = []

            def call(
                operands: Operands = (x, w, bias),
                options: dict[str, Any] = options,
                results: list[torch.Tensor] = results,
            ) -> None:
                y = operator(*operands, impl=impl, group=members, **options)
                results.append(y[0] if isinstance(y, tuple) else y)

            long_ways.append(_takes_long_way(call))
            expected = operator(x, w, bias, impl="unfused", **options)
            expected = expected[0] if isinstance(expected, tuple) else expected
            largest = expected.abs().max().clamp(1.0)
            error = max(error, float((results[0] - expected).abs().max() / largest))
    return ways, long_ways[6:], error


def _known_on_cpu() -> Any:
    """What finds calls with a norm, where on the CPU none is looked for."""
    source, names = inspect.getsource(normed._known_call), dict(vars(normed))
    assert "not x.is_cuda or " in source
    exec(source.replace("not x.is_cuda or ", ""), names)
    return names["_known_call"]


@pytest.mark.parametrize(
    ("name", "impl", "dtype"),
    [
        ("gemm_all_reduce", "auto", torch.float32), ("gemm_all_reduce", "pushed", FLOAT8),
        ("gemm_all_reduce", "unfused", torch.float32),
        ("gemm_reduce_scatter", "auto", torch.float32),
        ("all_gather_gemm", "chunked", torch.float32),
        ("all_gather_gemm", "batch_invariant", torch.float32),
        ("gemm_all_to_all", "auto", torch.float32),
        ("gemm_all_reduce_norm", "auto", torch.float32),
        ("gemm_all_reduce_norm", "pushed", torch.float32),
    ],
)  # fmt: skip
def test_other_rows_are_decided_as_on_the_long_way(
    ranks: Any, name: str, impl: str, dtype: torch.dtype
) -> None:
    """A call with new rows goes past what was validated and agreed on for any of them."""
    by_family = ranks(2).run(_ways_of_rows, name, impl, dtype, False)
    for (ways, long_ways, error), (expected, all_long_ways, _) in zip(
        by_family, ranks(2).run(_ways_of_rows, name, impl, dtype, True), strict=True
    ):
        assert ways == expected
        assert long_ways == [True, *[False] * 5]
        assert all(all_long_ways)
        assert error < (0.02 if dtype == FLOAT8 else 1e-4)


def _refused_rows() -> tuple[list[str], list[bool]]:
    """The errors of rows that an implementation does not take, on both ways; and whether rows that
    need care take the long way: none, and any while there is a limit of memory.
    """
    errors, long_ways = [], []
    with _remembering() as (members, group):

        def call(rows: int, impl: str = "pushed") -> torch.Tensor:
            x, w, _ = _operands(0, rows)
            return interlace.gemm_reduce_scatter(x, w, impl=impl, group=members)

        for _ in range(2):
            with pytest.raises(interlace.ArgumentError) as caught:
                call(7)
            errors.append(str(caught.value))
            call(8)
        long_ways.append(_takes_long_way(lambda: call(0)))
        with mock.patch.object(group.memory, "limit_bytes", 1 << 30):
            long_ways.append(_takes_long_way(lambda: call(12)))
        long_ways.append(_takes_long_way(lambda: call(14)))
    return errors, long_ways


def test_rows_that_are_refused_are_so_behind_others(ranks: Any) -> None:
    for (first, behind_others), long_ways in ranks(2).run(_refused_rows):
        assert first == behind_others
        assert "rows that are split evenly" in first
        assert long_ways == [True, True, False]


def _measured_rows() -> int:
    """How many calls are measured of four with other rows, where the second and the third are to
    be: no times are known of the first one's, as a table may have its very sizes.
    """
    choose = GemmAllReduce.choose

    def predicted(*given: Any, **call: Any) -> Any:
        times_us = {} if call["rows"] == 6 else {"pushed": 1.0, "unfused": 1.0}
        return dataclasses.replace(choose(*given, **call), times_us=times_us)

    with (
        _remembering() as (members, _),
        mock.patch.object(dispatch, "_measure") as measure,
        mock.patch.object(GemmAllReduce, "choose", predicted),
        mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=False),
    ):
        measure.side_effect = lambda call, decision: setattr(decision, "is_measured", True)
        for rows, impl in ((6, "measured"), (8, "measured"), (12, "measured"), (14, "auto")):
            x, w, _ = _operands(0, rows)
            interlace.gemm_all_reduce(x, w, impl=impl, group=members)
    return measure.call_count


def test_rows_that_are_to_be_measured_take_the_long_way(ranks: Any) -> None:
    assert ranks(2).run(_measured_rows) == [2, 2]


def _run_by_ranks_that_know_different_things(why: str) -> list[str]:
    """What runs calls of several numbers of rows, of which the first one has found that another
    implementation is to run than was chosen: it is faster, or there is memory for it.

    Rank 1 remembers more beside them, as one that trains tables does, and has forgotten forms.
    """
    choose, run, names = GemmAllReduce.choose, dispatch._run, []

    def chosen(*given: Any, **call: Any) -> Any:
        times_us = {"pushed": 1.0, "fused": 1.0}
        return dataclasses.replace(choose(*given, **call), impl="pushed", times_us=times_us)

    def note(implementation: Any, call: Any, decision: Any) -> Any:
        names.append(implementation.name)
        if why == "memory" and len(names) == 1:
            raise interlace.WorkspaceError("there is none")
        return run(implementation, call, decision)

    times = autotune.Measured(product_operator("gemm_all_reduce"), {"pushed": 2.0, "fused": 1.0})
    with (
        _remembering() as (members, group),
        mock.patch.object(GemmAllReduce, "choose", chosen),
        mock.patch.object(dispatch, "_run", note),
        mock.patch.object(autotune, "may_measure", return_value=True),
        mock.patch.object(autotune, "measured", return_value=times),
        mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=False),
        mock.patch.object(cache, "_MAX_COMPUTED", 3),
    ):

        def call(rows: int) -> None:
            x, w, _ = _operands(0, rows)
            interlace.gemm_all_reduce(x, w, group=members)

        for number in range(2 * dist.get_rank()):
            group.once((number,), object)
        with interlace.autotune(why == "times"):
            call(16)
        # Memory that grows would make the group forget its calls.
        call(14)
        if dist.get_rank() == 1:
            group.replays.forget()
        for rows in (12, 16, 8, 16):
            call(rows)
    return names[why == "memory" :]


@pytest.mark.parametrize("why", ["times", "memory"])
def test_ranks_forget_in_the_same_call_how_calls_run(ranks: Any, why: str) -> None:
    """What a call has found out is gone then, on all of them."""
    expected = ["fused", "pushed", "pushed", "fused", "pushed", "pushed"]
    outcomes = ranks(2).run(_run_by_ranks_that_know_different_things, why)
    assert outcomes == [expected] * 2


def _other_forms() -> tuple[list[str], list[str]]:
    """Which calls take the long way when they are made first, and which once all have been made."""
    x, w, bias = _operands(0)
    wide = torch.randn(ROWS, 2 * INNER)
    calls: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
        "first": ((x, w, bias), {}),
        "no bias": ((x, w), {}),
        "rows": ((x[:6], w, bias), {}),
        "strides of x": ((wide[:, :INNER], w, bias), {}),
        "layout of w": ((x, w.t().contiguous().t(), bias), {}),
        "alignment": ((wide.flatten()[1 : 1 + x.numel()].view_as(x), w, bias), {}),
        "dtype": ((x.half(), w.half(), bias.half()), {}),
        "out_dtype": ((x, w), {"out_dtype": torch.bfloat16}),
        "impl": ((x, w, bias), {"impl": "unfused"}),
    }
    with _remembering() as (members, group):

        def long_ways(*names: str) -> list[str]:
            found = []
            for name in names:
                operands, options = calls[name]
                call = functools.partial(
                    interlace.gemm_all_reduce, *operands, **options, group=members
                )
                found += [name] * _takes_long_way(call)
            return found

        first = long_ways(*calls)
        # Memory that has grown for one of them has made the group forget those before it.
        long_ways(*calls)
        again = long_ways(*calls)
        with interlace.batch_invariant():
            again += ["within the mode", *long_ways("first")]
        group.replays.forget()
        again += ["forgotten", *long_ways("first", "first")]
    return first, again


def test_what_a_form_tells_apart(ranks: Any) -> None:
    for first, again in ranks(2).run(_other_forms):
        assert first == [
            "first", "no bias", "strides of x", "layout of w", "alignment", "dtype",
            "out_dtype", "impl",
        ]  # fmt: skip
        assert again == ["within the mode", "first", "forgotten", "first"]


def _kept_alive(impl: str, with_norm: bool) -> list[bool]:
    """Whether a call's tensors, and then the group and its memory, live on in what is remembered of
    it.
    """
    with _remembering() as (members, group), pytest.MonkeyPatch.context() as patch:
        x, w, bias = _operands(0)
        options: dict[str, Any] = {}
        if with_norm:
            # On the CPU no call with a norm is looked for.
            patch.setattr(normed, "_known_call", lambda *_: (("a form",), (0,)))
            options = {"residual": torch.ones(ROWS, COLUMNS), "norm": "rms"}
        interlace.gemm_all_reduce(x, w, bias, **options, impl=impl, group=members)
        kept = list(group.replays._alike.values())
        of_tensors = [weakref.ref(each) for each in (x, options.get("residual", x))]
        of_group = weakref.ref(group)
        of_memory = [weakref.ref(each.epochs) for each in group.memory.workspaces.values()]
        assert kept
        assert of_memory
        del x, w, bias, options
        gc.collect()
        lives = [any(each() is not None for each in of_tensors)]
    dist.destroy_process_group(members)
    del members, group
    gc.collect()
    return [*lives, of_group() is not None, any(each() is not None for each in of_memory)]


@pytest.mark.parametrize(
    ("impl", "with_norm"),
    [
        ("pushed", False), ("gemv", False), ("fused", False), ("chunked", False),
        ("pushed", True), ("fused", True),
    ],
)  # fmt: skip
def test_what_is_remembered_keeps_nothing_alive(ranks: Any, impl: str, with_norm: bool) -> None:
    assert ranks(2).run(_kept_alive, impl, with_norm) == [[False] * 3] * 2
