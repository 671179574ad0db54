"""The columns with the highest logits, of a vocabulary that is shared out over ranks; see
README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from interlace.comm import Group, default_name, rank_and_size
from interlace.comm.groups.registration import (
    OPERATOR_TAGS,
    entrance,
    past_autograd,
    recalling_group,
    register,
)
from interlace.comm.groups.reservation import Reservation
from interlace.comm.runtime import ranges
from interlace.gemm.vocabulary import VocabularyOperator, rows_of
from interlace.mapped.meeting import compare_once
from interlace.operators.linear_top_k import fused, reference
from interlace.operators.linear_top_k.call import (
    OPERATOR,
    SizedChoice,
    TopKCall,
    known_call,
    require_columns,
    validated_numbers,
)
from interlace.registry import Implementation, operator


class TopColumns(NamedTuple):
    """The highest logits of rows.

    Attributes:
        values: ``[..., k]``, float32, the highest first.
        columns: Their columns of the vocabulary, int64.
    """

    values: torch.Tensor
    columns: torch.Tensor


@operator
class LinearTopK(VocabularyOperator):
    """A product with the vocabulary's weight, and the highest of its columns over all ranks."""

    name = OPERATOR
    collective = "all_gather"
    implementations = (
        Implementation(
            "fused",
            "a product, and a kernel that exchanges each rank's candidates",
            fused.choose,
            reservation=fused.reservation,
        ),
        Implementation(
            "unfused",
            "F.linear, all_gather of the logits, and topk",
            reference.choose,
            spans_nodes=True,
            alias="nccl",
            reservation=lambda _: Reservation(),
        ),
    )

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "w"), ("k", "bias")

    def sized(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        k: int = 1,
        world_size: int,
    ) -> SizedChoice:
        """Return the sizes of a call."""
        rows = len(rows_of(OPERATOR, x, w, bias))
        k, _ = validated_numbers(k, world_size * len(w))
        require_columns(k, len(w))
        return SizedChoice(rows, k, world_size)

    def described(self, sized: SizedChoice, w: torch.Tensor) -> tuple[str, str]:
        """Return a description of a call beside its rows and columns, and why it is fused."""
        rows, k = sized.rows, sized.k
        told, gathered = 16 * k * rows, len(w) * rows * w.itemsize
        return f"k = {k}", f"a rank tells each other one {told} bytes instead of {gathered}"


def linear_top_k(
    x: torch.Tensor,
    w: torch.Tensor,
    k: int = 1,
    bias: torch.Tensor | None = None,
    *,
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> TopColumns:
    """Multiply by the vocabulary's weight, which is shared out over ranks, and return the columns
    with the k highest logits, without a gather of the logits.

    The end of a decoding step: with k = 1 the greedy choice, else what a sampler of the k best
    needs. Each rank tells the others its own k candidates of a row, in the kernel that has found
    the best one, instead of all its logits.

    Dimensions: M rows (tokens), H the width of x, V the vocabulary, R ranks.

    Runs on the current stream, without synchronising the host; a CUDA graph can hold it.

    Args:
        x: ``[..., H]``: float16, bfloat16 or float32, the same on every rank.
        w: ``[V/R, H]``, as in ``nn.Linear``, of x's dtype: rank r's rows begin at ``r * ceil(V /
            R)``, as ``torch.chunk`` and DTensor share them out.
        k: How many columns are chosen, 1 to 64, at most as many as each rank has.
        bias: ``[V/R]`` of x's dtype, or None.
        vocabulary: V, below ``2 ** 24``; default: R times the rows of w. With fewer, the last ranks
            have fewer rows of w, or rows of padding, which are never chosen.
        group: 1 to 8 ranks of one node, or ranks of several nodes, for which ``"unfused"`` runs;
            default: the default process group.
        impl: ``"fused"``; ``"unfused"`` or ``"nccl"``: ``F.linear``, an all-gather of the logits,
            and ``torch.topk``; or ``"auto"``.

    Returns:
        A :class:`TopColumns`: logits and columns, the same on every rank, highest first. Of equal
        logits the fused kernel takes the lower column if k is 1. There are no gradients.

    Raises:
        ArgumentError: shapes, dtypes, devices or numbers do not fit.
        RankMismatchError: ranks differ in sizes, dtype, k or impl; raised on every rank. Rows are
            compared at the first such call.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline, or with another
            number of rows. On CUDA the kernel ends, values are NaN and columns -1, and the next
            call on the group, or :func:`interlace.synchronize`, raises.

    Example:
        >>> # x [8, 4096], w [128256 / R, 4096]
        >>> tokens = interlace.linear_top_k(x, w).columns[:, 0]
    """
    again = _recalled(x, w, k, bias, vocabulary, group, impl)
    if again is not None:
        return again
    _, world_size = rank_and_size(group)
    rows = rows_of(OPERATOR, x, w, bias)
    k, columns = validated_numbers(k, world_size * len(w) if vocabulary is None else vocabulary)
    _DECLARATION.validate_options(impl, None)
    result = entrance(OPERATOR)(rows, w, bias, k, columns, default_name(group), impl)
    return _shaped(result, x, k)


def _recalled(
    x: torch.Tensor,
    w: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    vocabulary: int | None,
    group: dist.ProcessGroup | None,
    impl: str,
) -> TopColumns | None:
    """Return the result of a call that has come before, with these operands or with others that
    differ in their addresses alone; None if it must take the long way: it is new, or
    :func:`recalling_group` says so.
    """
    known_to = recalling_group(group, x, w, bias)
    # True equals 1, and no rank could choose so many columns.
    if known_to is None or w is None or type(k) is not int or type(impl) is not str:
        return None
    if x.dim() != 2 and not (x.dim() > 2 and x.is_contiguous()):
        return None
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    if vocabulary is None:
        vocabulary = known_to.world_size * len(w)
    elif type(vocabulary) is not int:
        return None
    known = known_call(rows, w, bias, k, vocabulary, impl)
    with past_autograd():
        result = known_to.recall_known(known, rows, w, bias)
    if result is None:
        return None
    return _shaped(result, x, k)


def _shaped(found: Iterable[torch.Tensor], x: torch.Tensor, k: int) -> TopColumns:
    """Return values and columns, ``[M, k]``, in the shape of x: ``[..., k]``."""
    if x.dim() == 2:
        return TopColumns(*found)
    return TopColumns(*(result.reshape(*x.shape[:-1], k) for result in found))


_DECLARATION = LinearTopK()
_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    f"{OPERATOR}(Tensor x, Tensor w, Tensor? bias, int k, SymInt vocabulary, str group_name, "
    "str impl) -> (Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)


def _run(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = TopKCall(*arguments)
    group, known, tensors = call.group, call.known, (call.x, call.w, call.bias)
    result: tuple[torch.Tensor, torch.Tensor] | None = None
    if known is not None and not ranges.is_listening():
        result = group.recall_known(known, *tensors)
        if result is not None:
            return result
    family, implementation = call.agree(), call.implementation
    if implementation.name == "unfused":
        compare_once(group, family, OPERATOR, len(call.x))
    with ranges.around(OPERATOR, implementation.name, tensors[:2], lambda: None):
        result = group.perform(implementation.run(call), known)
    assert result is not None
    if known is not None:
        # What is remembered must refer to neither group nor operands.
        options = call.k, call.vocabulary, call.group_name, call.impl
        again = functools.partial(_run_again, implementation, options, call.mark)
        group.replays.remember_form(known[0], again)
    return result


def _run_again(
    implementation: Implementation,
    options: tuple[Any, ...],
    mark: int,
    group: Group,
    known: Hashable,
    *operands: Any,
) -> Any:
    """Run a call like one that has run, past all that was found out before that one's first run.

    Args:
        implementation: What ran.
        options: What a :class:`TopKCall` takes beside the operands.
        mark: The number that both calls' words carry.
        group: The group of both.
        known: By what ``Group.recall`` will find this one.
        operands: X, w and bias.
    """
    call = TopKCall(*operands, *options)
    call.mark = mark
    return group.perform(implementation.run(call), known)


def _fake(x: torch.Tensor, w: torch.Tensor, bias: Any, k: int, *_: Any) -> tuple[Any, Any]:
    shape = [x.shape[0], k]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


register(_library, OPERATOR, _run, _fake)
