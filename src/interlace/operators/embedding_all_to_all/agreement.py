"""The agreement of ranks about their tables: in every call, or once per name.

The agreement of a name is a constant of graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from interlace.comm import Group, group_named
from interlace.comm.groups.group import Answers
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError, RankMismatchError
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import MAX_RANKS

anchors: dict[str, torch.Tensor] = {}
"""A tensor per device that requires a gradient, which is zero.

Because of it the operator's output requires a gradient on every rank.

A compiled function takes it as an input, like any global tensor. Made within the function, it would
not count: on a rank whose own tables do not train, the graph would have no backward pass, and the
peers would wait for this rank in theirs.
"""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The properties of a call that all ranks know.

    Attributes:
        rank: This rank.
        counts: Number of tables of each rank.
        widths: Widths of all ranks' tables, in one list.
        output_dtype: Element type of the output, such as ``"float32"``.
        trains: Whether the backward pass takes place, on every rank.
    """

    rank: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    output_dtype: str
    trains: bool


class Question(NamedTuple):
    """The properties of a call that this rank knows before it has asked its peers.

    Attributes:
        group_name: Name of the process group; ``""`` for the default one.
        device: Device of the tensors.
        name: Name that tells calls apart whose tables differ on some ranks; ``""`` for none.
        widths: Widths of this rank's tables.
        dtype: Element type of this rank's tables; None if it has none.
        output_dtype: The caller's ``output_dtype``, or None.
        grad_enabled: Whether gradients are recorded.
        trains: Whether gradients are recorded and one of this rank's tables requires one.
    """

    group_name: str
    device: str
    name: str
    widths: tuple[int, ...]
    dtype: str | None
    output_dtype: str | None
    grad_enabled: bool
    trains: bool


def ask(fields: tuple[Any, ...]) -> Agreed:
    """Agree on a call without a name, on the host, between two compiled graphs.

    Args:
        fields: The fields of the :class:`Question`.

    Raises:
        RankMismatchError: Tables or outputs have different dtypes.
        ArgumentError: No rank has a table, and none says which dtype the output has.
    """
    frames = torch._C._dynamo.eval_frame
    # Between two graphs, Dynamo would compile the functions that are called from here.
    before = frames.set_eval_frame(None)
    try:
        question = Question(*fields)
        group = _group(question)
        answers = _answers(group, question, {"trains": question.trains})
        return _agreed(group, question, answers, any(answer["trains"] for answer in answers))
    finally:
        frames.set_eval_frame(before)


# This does the same as torch.compiler.disable, without importing the compiler, which takes seconds.
ask._torchdynamo_disable = True  # type: ignore[attr-defined]
ask._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    f"{OPERATOR} without a name asks the other ranks in every call; pass name=... to have the "
    "call in a graph"
)


def recall(fields: tuple[Any, ...], traced: bool) -> Agreed:
    """Return the agreement that ranks reached in the first call with a name.

    It is a constant of compiled graphs. The name, the output's dtype and whether gradients are
    recorded are the same on every rank, so every rank asks in the same call, or none does. This
    rank's widths and dtype are no part of that key, and must not change. Whether a rank trains its
    tables may change: once one did, every rank's backward pass takes part, also that of a rank
    which has frozen its tables since. As long as no rank does, calls that record gradients ask
    again.

    Args:
        fields: The fields of the :class:`Question`; a plain tuple, as tracing can evaluate no
            other type.
        traced: The call is traced into a graph. A graph is traced again when only this rank's
            arguments change, so nothing is asked then: the answer to the first trace is final.

    Raises:
        RankMismatchError: Tables or outputs have different dtypes; raised on every rank.
        ArgumentError: No rank has a table, and none says which dtype the output has; or this rank's
            tables are not those that had this name before.
    """
    question = Question(*fields)
    group = _group(question)
    answers = _answers(group, question, {})
    trains = question.grad_enabled and group.agreement.any_rank(
        f"{OPERATOR}: whether a rank trains tables named {question.name!r}",
        question.trains,
        final=traced,
    )
    if question.trains and not trains:
        raise ArgumentError(
            f"{OPERATOR}: tables named {question.name!r} must require gradients on some rank when "
            "a graph with them is first "
            "compiled, or never; got ones that do now. Unfreeze them before, or give the call "
            "another name on every rank."
        )
    return _agreed(group, question, answers, trains)


# This does the same as torch.compiler.assume_constant_result.
recall._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _group(question: Question) -> Group:
    group = group_named(question.group_name, torch.device(question.device))
    group.check()
    group.require_size(OPERATOR, MAX_RANKS)
    return group


def _answers(group: Group, question: Question, more: dict[str, bool]) -> Answers:
    return group.agreement.gather(
        OPERATOR,
        question.name,
        {"output_dtype": question.output_dtype, "grad_enabled": question.grad_enabled},
        {"widths": question.widths, "dtype": question.dtype, **more},
        check=_require_outputs,
    )


def _require_outputs(answers: Answers) -> None:
    """Refuse tables from which no output can be made.

    All ranks have the same answers, so all refuse.
    """
    dtypes = [answer["dtype"] for answer in answers]
    held = {dtype for dtype in dtypes if dtype is not None}
    if len(held) > 1:
        got = ", ".join(f"{dtype!r} on rank {rank}" for rank, dtype in enumerate(dtypes))
        raise RankMismatchError(
            f"{OPERATOR}: the dtype of weights must be the same on every rank; got {got}. Nothing "
            "was computed."
        )
    if not held and answers[0]["output_dtype"] is None:
        raise ArgumentError(
            f"{OPERATOR}: some rank must have a table, or output_dtype must be given; got neither."
        )


def _agreed(group: Group, question: Question, answers: Answers, trains: bool) -> Agreed:
    if trains and question.device not in anchors:
        anchors[question.device] = _anchor(question.device)
    dtypes = [question.output_dtype, *(answer["dtype"] for answer in answers)]
    return Agreed(
        rank=group.rank,
        counts=tuple(len(answer["widths"]) for answer in answers),
        widths=tuple(width for answer in answers for width in answer["widths"]),
        output_dtype=next(dtype for dtype in dtypes if dtype is not None).removeprefix("torch."),
        trains=trains,
    )


@makes_ordinary_tensors
def _anchor(device: str) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
