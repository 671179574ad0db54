"""Protocols that are broken in one place: what the explorer has to find."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton.runtime.interpreter import InterpretedFunction

_EPOCH_ARGUMENT = {
    "wait": 1,
    "get_packed": 1,
    "sum_packed": 3,
    "barrier": 1,
    "signal": 1,
    "put_packed": 2,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One protocol with one mistake.

    Attributes:
        protocol: Of ``programs.PROGRAMS``.
        where: The function that is changed, ``module:name``, below ``interlace``.
        mistake: ``"no release"``: a signal becomes relaxed; ``"no fence"``; ``"signal before
            put"``; ``"half reused"``: both halves are the same; ``"wrong epoch"``: a wait is for
            the epoch two calls before; ``"no wait"``: a wait or a barrier is left out; ``"not
            counted"``: so is the count of a slice's block; ``"not freed"``: memory that has been
            read is not set to zero.
        which: The primitive that it is made at, and the number of its call in that function.
        ranks: How many it takes.
    """

    protocol: str
    where: str
    mistake: str
    which: tuple[str, int] = ("", 0)
    ranks: int = 2

    @property
    def name(self) -> str:
        return (
            f"{self.protocol}, {self.where.split(':')[1]}: {self.mistake}, "
            f"{self.which[0]} {self.which[1]}"
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Kernels of this process have the mistake meanwhile."""
        module, name = self.where.split(":")
        function = getattr(importlib.import_module(f"interlace.{module}"), name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        _MISTAKES[self.mistake](definition, *self.which)
        changed = _compiled(
            ast.unparse(ast.fix_missing_locations(tree)), name, function.fn.__globals__
        )
        table = InterpretedFunction.rewritten_fn
        before = table.get(function.fn)
        table[function.fn] = triton.jit(changed).rewrite()
        try:
            yield
        finally:
            del table[function.fn]
            if before is not None:
                table[function.fn] = before


def _compiled(source: str, name: str, names: dict[str, Any]) -> Any:
    file = f"<mutant {name} {hash(source):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names, made)
    return made[name]


# Mistakes


def _calls(tree: ast.AST, primitive: str) -> list[ast.Call]:
    names = f"il.{primitive}", f"tl.{primitive}", primitive
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    ]
    return sorted(found, key=lambda node: node.lineno)


def _replace(tree: ast.AST, old: ast.expr, new: ast.expr) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


def _relax(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    call = _calls(tree, primitive)[number]
    assert all(keyword.arg != "ORDER" for keyword in call.keywords)
    call.keywords.append(ast.keyword("ORDER", ast.Constant("relaxed")))


def _leave_out(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    """The call becomes a condition that holds."""
    call = _calls(tree, primitive)[number]
    replacement = ast.parse("tl.program_id(0) >= 0", mode="eval").body
    _replace(tree, call, replacement)


def _wait_for_another(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    call = _calls(tree, primitive)[number]
    place = _EPOCH_ARGUMENT[primitive]
    call.args[place] = ast.BinOp(call.args[place], ast.Sub(), ast.Constant(2))


def _signal_first(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    """The call, where all its names are known, moves to the beginning of the innermost block with
    both it and a put before it.
    """
    signal = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and node.value is _calls(tree, primitive)[number]
    )
    for block in _blocks(tree):
        for i, statement in enumerate(block):
            holds = [
                each
                for each in block[:i]
                if any(_calls(each, put) for put in ("put", "put_packed"))
            ]
            if holds and any(node is signal for node in ast.walk(statement)):
                moved = statement if statement is not signal else signal
                block.remove(moved)
                block.insert(block.index(holds[-1]), copy.deepcopy(moved))
                return
    raise AssertionError(f"no put before {primitive} {number}")


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Innermost ones first."""
    found: list[list[ast.stmt]] = []
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                found.append(block)
    return found[::-1]


def _reuse_half(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    """``epoch & 1`` becomes ``epoch & 0``, at the place of that number."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.BitAnd)
        and isinstance(node.left, ast.Name)
        and node.left.id == "epoch"
    ]
    sorted(found, key=lambda node: (node.lineno, node.col_offset))[number].right = ast.Constant(0)


def _reuse_signals(tree: ast.FunctionDef, primitive: str, number: int) -> None:
    """Two sets of signals that take turns become one."""
    call = _calls(tree, "in_turn")[number]
    _replace(tree, call, call.args[0])


_MISTAKES: dict[str, Callable[[ast.FunctionDef, str, int], None]] = {
    "no release": _relax,
    "no fence": _leave_out,
    "no wait": _leave_out,
    "not counted": _leave_out,
    "not freed": _leave_out,
    "wrong epoch": _wait_for_another,
    "signal before put": _signal_first,
    "half reused": _reuse_half,
    "signals reused": _reuse_signals,
}


# The table


def _of(protocol: str, *mistakes: tuple[Any, ...]) -> list[Mutant]:
    return [Mutant(protocol, *mistake) for mistake in mistakes]


_GEMV, _SUM = "operators.gemm_all_reduce.kernels", "gemm.kernels.reduction:send_and_sum"
_GRANTS = "gemm.kernels.grants"
_PIECES = "operators.gemm_reduce_scatter.kernel:_await_pieces"
_LOSS = "operators.linear_cross_entropy.kernel:losses_of_rows"
_TOP_K = "operators.linear_top_k.kernel:choose_columns"
_COLUMNS = "operators.gemm_all_to_all_columns.kernel:gemm_all_to_all_columns"
_ROWS = "operators.all_to_all_gemm.kernel:all_to_all_gemm"
_COLUMNS_SENT = "operators.all_to_all_gemm.kernel:_send_columns"
_A2A = "operators.gemm_all_to_all.kernel:gemm_all_to_all"
_EMBEDDING, _EXPERTS = (
    "operators.embedding_all_to_all.kernels",
    "operators.mixture_of_experts.kernels",
)
_FORWARD, _BACKWARD = (
    f"{_EMBEDDING}.forward:embedding_all_to_all_forward",
    f"{_EMBEDDING}.backward:embedding_all_to_all_backward",
)
_BETWEEN, _CLOSE = (
    f"{_EMBEDDING}.between_nodes:embedding_all_to_all_{name}" for name in ("between_nodes", "close")
)
_STAGED, _MAPPED = "gemm.kernels.staged", "mapped.kernel"
# Of every operator whose ranks write into results that their owner has granted them.
_GRANTED = (
    (f"{_GRANTS}:grant_buffer", "no release", ("signal", 0)),
    (f"{_GRANTS}:grant_buffer", "signal before put", ("signal", 0)),
    (f"{_GRANTS}:granted_buffers", "no wait", ("wait", 0)),
    (f"{_GRANTS}:granted_buffers", "wrong epoch", ("wait", 0)),
    (f"{_GRANTS}:signal_end", "no release", ("signal", 0)),
)
# Of every operator whose values show by themselves that they have arrived.
_LAMPORT = (
    ("gemm.kernels.lamport:memory_of", "half reused"),
    ("language.lamport:sum_values", "not freed", ("store", 0)),
)

MUTANTS = [
    *_of(
        "gemv, one shot",
        (f"{_GEMV}.one_shot:gemv_all_reduce_one_shot", "half reused"),
        (f"{_GEMV}.one_shot:gemv_all_reduce_one_shot", "wrong epoch", ("sum_packed", 0)),
        (f"{_GEMV}.one_shot:gemv_all_reduce_one_shot", "wrong epoch", ("put_packed", 0)),
    ),
    *_of(
        "gemv, two phases",
        (f"{_GEMV}.two_phase:gemv_all_reduce_two_phase", "half reused"),
        (f"{_GEMV}.two_phase:gemv_all_reduce_two_phase", "wrong epoch", ("get_packed", 0)),
        (f"{_GEMV}.two_phase:_send_sum", "wrong epoch", ("sum_packed", 0)),
    ),
    *_of(
        "linear_cross_entropy",
        (_LOSS, "half reused"),
        (_LOSS, "wrong epoch", ("get_packed", 0)),
        (_LOSS, "wrong epoch", ("put_packed", 0)),
    ),
    *_of(
        "linear_top_k",
        (_TOP_K, "half reused"),
        (_TOP_K, "wrong epoch", ("get_packed", 0)),
        (_TOP_K, "wrong epoch", ("put_packed", 0)),
    ),
    *_of(
        "gemm_reduce_scatter, fused",
        ("gemm.kernels.reduction:_announce", "no release", ("signal", 0)),
        (_SUM, "no wait", ("wait", 0)),
        (_SUM, "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "gemm_reduce_scatter, fused, no rows",
        (f"{_GRANTS}:signal_end", "no release", ("signal", 0)),
        (f"{_GRANTS}:await_senders", "no wait", ("wait", 0)),
        (f"{_GRANTS}:await_senders", "wrong epoch", ("wait", 0)),
        (f"{_GRANTS}:turn_of", "signals reused", ("in_turn", 2)),
    ),
    *_of(
        "gemm_reduce_scatter, chunked",
        ("operators.gemm_reduce_scatter.kernel:admit_parts", "no wait", ("await_senders", 0)),
        (_PIECES, "no wait", ("wait", 0)),
        (_PIECES, "wrong epoch", ("wait", 0)),
        (f"{_GRANTS}:signal_end", "no release", ("signal", 0)),
    ),
    *_of(
        "gemm_reduce_scatter, chunked, few rows",
        (_PIECES, "no wait", ("wait", 0)),
        (_PIECES, "wrong epoch", ("wait", 0)),
        (f"{_GRANTS}:end_sending", "no wait", ("arrive_last", 0)),
    ),
    *_of("gemm_reduce_scatter, pushed", *_LAMPORT),
    *_of(
        "gemm_all_reduce, fused",
        *_GRANTED,
        (f"{_GRANTS}:await_senders", "no wait", ("wait", 0)),
    ),
    *_of("gemm_all_reduce, pushed", *_LAMPORT),
    *_of("gemm_all_reduce_norm, fused", *_LAMPORT),
    *_of("gemm_all_reduce_norm, pushed", *_LAMPORT),
    *_of(
        "gemm_all_to_all, fused",
        *_GRANTED,
        (_A2A, "signal before put", ("end_sending", 0)),
        (f"{_GRANTS}:await_senders", "no wait", ("wait", 0)),
        (f"{_GRANTS}:await_senders", "wrong epoch", ("wait", 0)),
        (f"{_GRANTS}:end_sending", "no wait", ("arrive_last", 0)),
    ),
    *_of("gemm_all_to_all, pushed", *_LAMPORT),
    *_of(
        "gemm_all_to_all_columns",
        *_GRANTED,
        (_COLUMNS, "signal before put", ("end_sending", 0)),
        (f"{_GRANTS}:await_senders", "no wait", ("wait", 0)),
    ),
    *_of(
        "all_to_all_gemm",
        *_GRANTED[:-1],
        (_COLUMNS_SENT, "no release", ("signal", 0)),
        (_ROWS, "no wait", ("wait", 0)),
        (_ROWS, "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "all_gather_gemm, fused",
        (f"{_STAGED}:stage_rows", "no wait", ("await_fetched", 0)),
        (f"{_STAGED}:stage_rows", "no release", ("signal", 1)),
        (f"{_STAGED}:stage_rows", "no wait", ("arrive_last", 0)),
        (f"{_STAGED}:await_rows", "no wait", ("wait", 0)),
        (f"{_STAGED}:await_rows", "wrong epoch", ("wait", 0)),
        (f"{_STAGED}:await_fetched", "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "all_gather_gemm, fused, in place",
        ("operators.all_gather_gemm.kernel:all_gather_gemm", "no wait", ("await_fetched", 0)),
        (f"{_STAGED}:await_fetched", "no wait", ("wait", 0)),
        (f"{_STAGED}:await_fetched", "wrong epoch", ("wait", 0)),
        (f"{_STAGED}:await_rows", "no wait", ("wait", 0)),
    ),
    *_of("all_gather_gemm, pushed", *_LAMPORT),
    *_of(
        "embedding forward, direct",
        (_FORWARD, "no release", ("signal", 0)),
        (_FORWARD, "signal before put", ("signal", 0)),
        (_FORWARD, "no wait", ("wait", 0)),
        (_FORWARD, "wrong epoch", ("wait", 0)),
        (_FORWARD, "no release", ("signal", 1)),
        (_FORWARD, "signal before put", ("signal", 1)),
        (_FORWARD, "no wait", ("wait", 1)),
        (_FORWARD, "wrong epoch", ("wait", 1)),
        (_FORWARD, "no wait", ("arrive_last", 0)),
    ),
    *_of(
        "embedding backward",
        (f"{_EMBEDDING}.gradients:push_gradients", "no release", ("signal", 0)),
        (f"{_EMBEDDING}.gradients:push_gradients", "signal before put", ("signal", 0)),
        (f"{_EMBEDDING}.gradients:push_gradients", "no wait", ("arrive_last", 0)),
        (_BACKWARD, "no wait", ("wait", 0)),
        (_BACKWARD, "wrong epoch", ("wait", 0)),
        (f"{_EMBEDDING}.gradients:await_tables", "no wait", ("wait", 0)),
        (f"{_EMBEDDING}.gradients:await_tables", "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "embedding forward, between nodes",
        (_BETWEEN, "no release", ("signal", 0), 3),
        (_BETWEEN, "signal before put", ("signal", 0), 3),
        (_BETWEEN, "no wait", ("wait", 0), 3),
        (_BETWEEN, "wrong epoch", ("wait", 0), 3),
        (_BETWEEN, "not counted", ("count", 0), 2),
        (_CLOSE, "no release", ("signal", 0), 3),
        (_CLOSE, "no wait", ("wait", 0), 3),
        (_CLOSE, "wrong epoch", ("wait", 0), 3),
    ),
    *_of("embedding backward, a rank without tables", (_BACKWARD, "signals reused")),
    *_of(
        "mixture_of_experts",
        (f"{_EXPERTS}.dispatch:_push", "no release", ("signal", 0)),
        (f"{_EXPERTS}.dispatch:_push", "signal before put", ("signal", 0)),
        (f"{_EXPERTS}.dispatch:_await_rows", "no wait", ("wait", 0)),
        (f"{_EXPERTS}.dispatch:_await_rows", "wrong epoch", ("wait", 0)),
        (f"{_EXPERTS}.combine:grouped_gemm_combine", "no release", ("signal", 0)),
        (f"{_EXPERTS}.combine:sum_results", "no wait", ("wait", 0)),
        (f"{_EXPERTS}.combine:sum_results", "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "mixture_of_experts, backward",
        (f"{_EXPERTS}.dispatch:dispatch_grouped_gemm_backward", "no wait", ("wait", 0)),
    ),
    *_of(
        "mixture_of_experts, float8",
        # The first puts are of rows, the second ones of their scales.
        (f"{_EXPERTS}.dispatch:_push", "no release", ("signal", 0)),
        (f"{_EXPERTS}.dispatch:_push", "signal before put", ("signal", 0)),
        (f"{_EXPERTS}.dispatch:_await_rows", "no wait", ("wait", 0)),
    ),
    *_of(
        "mixture_of_experts, float8, decode",
        (f"{_EXPERTS}.decode:gather_tokens", "no release", ("signal", 0)),
        (f"{_EXPERTS}.decode:gather_tokens", "no wait", ("wait", 0)),
    ),
    *_of(
        "mixture_of_experts, decode",
        (f"{_EXPERTS}.decode:gather_tokens", "no release", ("signal", 0)),
        (f"{_EXPERTS}.decode:gather_tokens", "no wait", ("wait", 0)),
        (f"{_EXPERTS}.decode:gather_tokens", "wrong epoch", ("wait", 0)),
        (f"{_EXPERTS}.decode:decode_second_gemm", "no release", ("signal", 0)),
        (f"{_EXPERTS}.decode:decode_second_gemm", "no wait", ("wait", 0)),
        (f"{_EXPERTS}.decode:decode_second_gemm", "wrong epoch", ("wait", 0)),
    ),
    *_of(
        "mapped all-to-all",
        (f"{_MAPPED}:meet", "no wait", ("barrier", 0)),
    ),
    *_of(
        "mapped all-reduce",
        (f"{_MAPPED}:collect", "no wait", ("barrier", 0)),
        (f"{_MAPPED}:collect", "no wait", ("barrier", 1)),
    ),
    *_of(
        "mapped reduce-scatter",
        ("language.primitives:barrier", "no release", ("signal", 0)),
        ("language.primitives:barrier", "no wait", ("wait", 0)),
        ("language.primitives:barrier", "wrong epoch", ("wait", 0)),
        ("language.primitives:barrier", "signals reused"),
    ),
]
