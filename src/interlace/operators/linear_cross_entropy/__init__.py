"""The loss's own product, its vocabulary shared out over ranks; see README.md."""

from __future__ import annotations

import torch
import torch.distributed as dist

from interlace.comm import default_name, rank_and_size
from interlace.comm.groups.registration import entrance
from interlace.comm.groups.reservation import Reservation
from interlace.gemm.vocabulary import VocabularyOperator, columns_of_rank
from interlace.operators.linear_cross_entropy import fused, reference, schema  # noqa: F401
from interlace.operators.linear_cross_entropy.call import (
    OPERATOR,
    Options,
    SizedLoss,
    at_least_one,
    flattened,
    validated_options,
)
from interlace.registry import Implementation, operator


@operator
class LinearCrossEntropy(VocabularyOperator):
    """A product with the vocabulary's weight, and the cross entropy of its rows over all ranks."""

    name = OPERATOR
    collective = "all_reduce"
    implementations = (
        Implementation(
            "fused",
            "chunks of rows: a product, and a kernel that exchanges what ranks know of its rows",
            fused.run,
            backward=fused.backward,
            reservation=fused.reservation,
        ),
        Implementation(
            "unfused",
            "F.linear, whose logits are stored in float32, and three all-reduces",
            reference.losses,
            spans_nodes=True,
            backward=reference.gradients,
            alias="nccl",
            reservation=lambda _: Reservation(),
        ),
    )

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "w", "target"), ("bias",)

    def sized(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        world_size: int,
    ) -> SizedLoss:
        """Return the sizes of a call with chunks of the default size. They do not count the sum of
        x's gradient over ranks, which is another operator's.
        """
        rows = len(flattened(x, w, target, bias)[0])
        return SizedLoss(rows, fused.chunk_rows(rows, len(w), x.itemsize), world_size)

    def described(self, sized: SizedLoss, w: torch.Tensor) -> tuple[str, str]:
        """Return a description of a call beside its rows and columns, and why it is fused."""
        rows, (columns, width), chunk = sized.rows, w.shape, min(sized.chunk_rows, sized.rows)
        return f"{width} wide", (
            f"logits of {chunk} rows are stored at a time, {chunk * columns * w.itemsize} bytes; "
            f"the stock way stores {rows * columns * 4} bytes of them, more than once"
        )


def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocabulary: int | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Multiply by the vocabulary's weight, which is shared out over ranks, and return the cross
    entropy, without ever storing the logits of more than a chunk of rows.

    ``logits = x @ w.T + bias``, and of each row ``lse - (1 - s) * logits[target] - s * mean(logits)
    + z_loss * lse ** 2``, with ``lse = log(sum(exp(logits)))`` over the whole vocabulary and s the
    label smoothing: what ``F.cross_entropy`` computes of all logits. Of each row ranks tell one
    another four numbers, while other rows of the same kernel are still read; the same kernel puts
    the gradient in the place of the logits.

    Dimensions: M rows (tokens), H the width of x, V the vocabulary, R ranks.

    Logits are rounded to x's dtype and summed in float32; a row's loss has the same bits on every
    rank. Runs on the current stream, without synchronising the host.

    Args:
        x: ``[..., H]``: float16, bfloat16 or float32; the same on every rank, or with
            ``sequence_parallel`` this rank's rows, equally many on every rank.
        w: ``[V/R, H]``, as in ``nn.Linear``, of x's dtype: rank r's rows begin at ``r * ceil(V /
            R)``, as ``torch.chunk`` and DTensor share them out.
        target: ``[...]``, int32 or int64: the column of each row of x, of all ranks' rows; the same
            on every rank. One that is no column makes the loss NaN, as a GPU cannot raise.
        bias: ``[V/R]`` of x's dtype, or None.
        ignore_index: Rows of this target count for nothing, and get a gradient of 0.
        label_smoothing: From 0 to less than 1.
        z_loss: What the square of ``lse`` is multiplied by, which keeps logits from drifting; 0
            for none.
        reduction: ``"mean"`` over the rows that count, ``"sum"``, or ``"none"`` for a loss of each
            row, whose backward pass computes the logits again.
        vocabulary: V; default: R times the rows of w. With fewer, the last ranks have fewer rows of
            w, or rows of padding, which get a gradient of 0.
        sequence_parallel: Whether x is sharded along its rows, as in Megatron's sequence
            parallelism: x is gathered, and its gradient reduce-scattered.
        chunk_rows: Rows whose logits are stored at a time; default: as many as have 256 MiB.
        group: 1 to 8 ranks of one node, or ranks of several nodes, for which ``"unfused"`` runs;
            default: the default process group.
        impl: ``"fused"``; ``"unfused"`` or ``"nccl"``, what Megatron and PyTorch's
            ``loss_parallel`` do: all logits, and three all-reduces; or ``"auto"``.

    Returns:
        The loss, a float32 number; with ``reduction="none"`` of target's shape.

        Gradients go to x, w and bias. That of x is the sum over ranks: do not reduce it again.
        Those of w and bias are this rank's. The loss's own gradient must be the same on every rank.

    Raises:
        ArgumentError: shapes, dtypes, devices or numbers do not fit.
        RankMismatchError: ranks differ in sizes, dtype, options or impl; raised on every rank. Rows
            are compared at the first such call.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline, or with another
            number of rows. On CUDA the kernel ends, the loss is NaN, and the next call on the
            group, or :func:`interlace.synchronize`, raises.

    Example:
        >>> # x [8192, 4096], w [128256 / R, 4096], target [8192]
        >>> loss = interlace.linear_cross_entropy(x, w, target)
        >>> loss.backward()

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
    (arXiv:2411.09009), and Liger-Kernel (arXiv:2410.10989), for a loss without all logits, on one
    rank; Shoeybi et al., Megatron-LM (arXiv:1909.08053), for the three numbers that ranks exchange.
    """
    _, world_size = rank_and_size(group)
    rows, targets = flattened(x, w, target, bias, world_size if sequence_parallel else 1)
    columns = at_least_one("vocabulary", world_size * len(w) if vocabulary is None else vocabulary)
    if chunk_rows is None:
        per_rank = columns_of_rank(len(w), columns, world_size)
        chunk_rows = fused.chunk_rows(targets.numel(), per_rank, x.itemsize)
    options = validated_options(
        Options(
            columns, ignore_index, label_smoothing, z_loss, reduction, sequence_parallel, chunk_rows
        )
    )
    _DECLARATION.validate_options(impl, None)
    trains = torch.is_grad_enabled()
    needed = [tensor is not None and trains and tensor.requires_grad for tensor in (rows, w, bias)]
    losses, *_ = entrance(OPERATOR)(
        rows, w, targets, bias, *options, default_name(group), impl, needed
    )
    result: torch.Tensor = losses.reshape(target.shape) if reduction == "none" else losses
    return result


_DECLARATION = LinearCrossEntropy()
