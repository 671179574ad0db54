"""Pooled embedding tables and the all-to-all of their rows, one fused kernel in each direction; see
README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm import default_name
from interlace.comm.groups.group import known_group
from interlace.comm.groups.registration import are_ordinary, entrance, past_autograd
from interlace.comm.replay.replays import places
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all.agreement import anchors, ask, recall
from interlace.operators.embedding_all_to_all.call import KnownCall
from interlace.operators.embedding_all_to_all.config import OPERATOR, EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.schema import DECLARATION
from interlace.operators.embedding_all_to_all.validate import batch_of, checks_indices, validate
from interlace.optim import Gradient, RowWiseAdagrad


def embedding_all_to_all(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    per_sample_weights: torch.Tensor | None = None,
    mode: str = "sum",
    output_dtype: torch.dtype | None = None,
    gradient: Gradient = "dense",
    batch_size: int | None = None,
    name: str = "",
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: EmbeddingAllToAllConfig | None = None,
    check_indices: bool | None = None,
) -> torch.Tensor:
    """Pool embedding rows and send each pooled vector to the rank that owns its sample, in one
    kernel.

    Each rank holds some of a model's embedding tables and pools them for the whole global batch;
    each rank goes on with its own chunk of the samples, and needs their vectors from all tables.
    While some programs still pool, others' vectors are on their way, straight to their final place
    in the owner's output. The backward pass sends gradients the other way and applies them, again
    in one kernel.

    Sums are float32, in index order, and then rounded once: the same bits in every run and for
    every configuration. Runs on the current stream, without synchronising the host; calls of one
    group on several streams are put in order.

    Args:
        weights: This rank's tables, each ``[rows_t, D_t]``, D_t at most 2048: float16, bfloat16 or
            float32, one dtype on all ranks, rows contiguous. Ranks may have different numbers of
            tables, or none. Widths that are multiples of 4 run at full speed (8 in 2-byte dtypes).
        indices: ``[number of lookups]``, int32 or int64: row numbers, bag after bag.
        offsets: ``[T * B + 1]``, int32 or int64, from 0 to the number of lookups: bag ``t * B + b``
            is table t's of sample b of the *global* batch B, and its rows are ``indices[offsets[t *
            B + b] : offsets[t * B + b + 1]]``. Table-major, as FBGEMM and TorchRec have it. An
            empty bag gives zeros.
        per_sample_weights: ``[number of lookups]``: factors of the rows; with ``mode="sum"`` only.
        mode: ``"sum"`` or ``"mean"``.
        output_dtype: Default: the tables' dtype.
        gradient: Result of the backward pass for the tables. ``"dense"``: gradients of the tables'
            shape. ``"sparse"``: COO gradients of the distinct rows, coalesced (waits for the device
            once; not in CUDA graphs). Or an update that the backward pass applies itself, and then
            no gradient at all: :class:`interlace.optim.SGD` or
            :class:`interlace.optim.RowWiseAdagrad`. All are repeatable bit by bit.
        batch_size: B; needed only on a rank without tables.
        name: Of this set of tables; the same on every rank. With a name, ranks learn each other's
            widths in the first call and remember them, so tables under one name must not change
            their number, widths or dtype, and another set of tables must have another name. Without
            one, ranks ask each other in every call, through the process group's store: this takes
            the host some tenths of a millisecond, and breaks a graph of ``torch.compile`` in two.
            Give a name. Where no rank's tables require gradients, calls outside ``torch.no_grad()``
            ask in any case, as a rank may unfreeze its tables at any time; a compiled graph settles
            it when it is made.
        group: 1 to 8 ranks of one node, or ranks of several nodes; default: the default process
            group.
        impl: ``"fused"``, ``"pooled"`` (the fused kernel without peers, ``all_to_all_single``,
            unpack; the same bits), ``"unfused"`` (``F.embedding_bag``, then the same), or
            ``"auto"``: the fused kernels, which were faster wherever both were measured; between
            nodes ``"pooled"``, unless slices are predicted to be faster. An explicit choice is
            never replaced.
        config: Configuration of the fused kernels; default: from the tuned table. It must be the
            same on every rank.
        check_indices: Look for indices and offsets out of range before anything is sent, and tell
            every rank. Default: always on the CPU; on CUDA, where it waits for the device, if
            ``INTERLACE_CHECK_INDICES=1`` is set. Without it, a row that does not
            exist is undefined behaviour. The same on every rank.

    Returns:
        ``[samples of this rank, sum of D over all tables of all ranks]``: columns are rank 0's
        tables in order, then rank 1's, and so on. Samples are cut in chunks of ``ceil(B / R)``; the
        last ranks may have fewer, or none.

        The tensor of a fused call lies in the group's symmetric memory. Two may be alive at once;
        then further calls copy their results. If another stream reads it, keep it until this one
        has waited for that; ``record_stream`` does nothing here, as the memory is not torch's.

        The backward pass is collective: if any rank's tables require gradients, every rank must run
        it.

    Raises:
        ArgumentError: shapes, dtypes, devices or numbers do not fit, or tables are not those that
            had this name before.
        RankMismatchError: ranks differ in batch, dtypes, mode, impl, config or check_indices;
            raised on every rank. The batch is compared at the first such call.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline, or with another
            batch. On CUDA the kernel ends, fills its output with NaN, and the next call on the
            group, or :func:`interlace.synchronize`, raises. Torch's all-to-all, by ``"pooled"`` and
            ``"unfused"``, has the time-out of its process group instead.

    Example:
        >>> # four ranks, two tables each, global batch 4096
        >>> y = interlace.embedding_all_to_all([users, items], indices, offsets)
        >>> y.shape  # [1024, 4 * (128 + 64)]

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "embedding + All-to-All".
    """
    tables = validate(weights, indices, offsets, per_sample_weights, mode, output_dtype, gradient)
    DECLARATION.validate_options(impl, config)
    if not isinstance(name, str):
        raise ArgumentError(f"{OPERATOR}: name must be a word; got {name!r}.")
    batch = batch_of(len(weights), offsets, batch_size)
    kind = gradient if isinstance(gradient, str) else type(gradient).__name__
    rate = 0.0 if isinstance(gradient, str) else float(gradient.learning_rate)
    epsilon = float(gradient.epsilon) if isinstance(gradient, RowWiseAdagrad) else 0.0
    checks = checks_indices(check_indices, indices.device)
    lookups = indices, offsets, per_sample_weights
    is_ordinary = tables.seen is not None and are_ordinary(lookups)
    is_recorded = torch.is_grad_enabled()
    known = None
    # Lookups that are not contiguous are copied first, to another place in each call.
    if (
        tables.seen is not None
        and is_ordinary
        and name
        and not checks
        and all(numbers is None or numbers.is_contiguous() for numbers in lookups)
    ):
        options = mode, output_dtype, kind, rate, epsilon, batch, name, impl, config, is_recorded
        known = KnownCall(tables.seen, places(*lookups), options)
    owner = None if known is None else known_group(group, indices.device)
    if known is not None and owner is not None and not is_recorded:
        with past_autograd():
            again: torch.Tensor | None = owner.recall(known)
        if again is not None:
            return again
    # A plain tuple, because tracing can evaluate no other type.
    question = (  # the fields of a Question
        default_name(group),
        str(indices.device),
        name,
        tables.widths,
        tables.dtype,
        None if output_dtype is None else str(output_dtype),
        is_recorded,
        is_recorded and tables.trains,
    )
    if owner is not None and (tables.trains or not is_recorded):
        # Ranks have asked once whether one trains its tables: this one does, or gradients do not
        # count. So to make this anew, on this rank alone, exchanges nothing.
        agreed = owner.once((OPERATOR, question), lambda: recall(question, traced=False))
    else:
        agreed = recall(question, torch.compiler.is_compiling()) if name else ask(question)
    # A rank without trainable tables takes part in the backward pass because of this.
    anchor = anchors[str(indices.device)] if agreed.trains else None
    states = list(gradient.states) if isinstance(gradient, RowWiseAdagrad) else []
    enter = entrance(OPERATOR)
    y: torch.Tensor = (enter.past_dispatcher if is_ordinary else enter)(
        list(weights),
        indices,
        offsets,
        per_sample_weights,
        anchor,
        states,
        batch,
        list(agreed.counts),
        list(agreed.widths),
        agreed.rank,
        mode,
        getattr(torch, agreed.output_dtype),
        kind,
        rate,
        epsilon,
        default_name(group),
        impl,
        "" if config is None else str(config),
        checks,
        *(() if known is None else (known,)),
    )
    return y
