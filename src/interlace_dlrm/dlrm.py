"""``DLRM``: the deep learning recommendation model of Naumov et al. (arXiv:1906.00091), with tables
sharded over ranks.
"""

# Without `from __future__ import annotations`, because DDP checks the annotations of a
# communication hook, and does not understand strings.

import datetime
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from interlace.errors import ArgumentError, PeerTimeoutError
from interlace.nn import EmbeddingTable, ShardedEmbeddingBags
from interlace.nn.gradients import scale_gradient
from interlace.nn.group_member import GroupMember


class DLRM(GroupMember, nn.Module):
    """Click prediction from dense and categorical features; data-parallel except for its tables.

    Dimensions: n samples of this rank, R ranks, F dense features, T tables of width D.

    Forward, collective::

        x [n, D]        = bottom MLP of the dense features [n, F]
        e_t [n, D]      = pooled embeddings of table t           (interlace.nn.ShardedEmbeddingBags)
        z [n, T(T+1)/2] = dot products of all pairs of x, e_1 .. e_T
        logit [n]       = top MLP of (x, z)

    Linear layers are followed by ReLU, except for the last. Each rank has the MLPs (``dense``) and
    its shards of the tables (``embeddings``).

    **Gradients.** Each rank's loss is the mean over its own samples, as with
    ``DistributedDataParallel``, and every parameter gets the gradient of the mean over all samples.
    The division by R happens once, on the n logits, rather than on every gradient; the MLPs'
    gradients are then *added* over ranks (a communication hook of DDP), and so are the gradients of
    the tables, within the embeddings' backward kernel.

    ``state_dict()`` has the same keys on every rank under ``dense.``, and this rank's shards under
    ``embeddings.``; DDP's ``module.`` is not in the keys. See
    :class:`interlace.nn.ShardedEmbeddingBags` for the state dicts that may be loaded.

    Args:
        tables: Tables of one width D.
        dense_features: F.
        bottom: Widths of the bottom MLP's hidden layers; its output has width D.
        top: Widths of the top MLP's hidden layers; its output has width 1.
        group: Process group; default: the default process group, or this process alone if it is
            not one of several.
        device: Device; default: the current CUDA device, or the CPU if there is none.
        seed: Seed of all first weights.
        options: Further arguments of :class:`ShardedEmbeddingBags`: ``gradient``,
            ``learning_rate``, ``plan`` ...

    Attributes:
        dense: The MLPs and the interaction; its parameters are for one of torch's optimizers.
        embeddings: The tables.

    Raises:
        ArgumentError: tables have different widths, or :class:`ShardedEmbeddingBags` refuses an
            argument.

    Example:
        >>> tables = [EmbeddingTable(f"C{t + 1}", 10_000, 64, bag_length=1) for t in range(26)]
        >>> model = DLRM(tables, gradient="rowwise_adagrad", learning_rate=0.02)
        >>> logits = model(batch.dense, batch.indices)
        >>> binary_cross_entropy(logits, batch.labels).backward()    # this updates the tables
    """

    _group_attributes = ("process_group",)

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        *,
        dense_features: int = 13,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        widths = {table.width for table in tables}
        if len(widths) != 1:
            raise ArgumentError(
                "DLRM: tables must all have the same width, for their dot products; got "
                f"{sorted(widths)}."
            )
        if "average_gradients" in options:
            raise ArgumentError(
                "DLRM: average_gradients must be left to the model, which averages logits' "
                "gradients instead."
            )
        self.process_group = group
        self.embeddings = ShardedEmbeddingBags(
            tables, group=group, device=device, average_gradients=False, seed=seed, **options
        )
        owner = self.embeddings.group
        on = "meta" if device is not None and torch.device(device).type == "meta" else owner.device
        order = self.embeddings.plan.stack_order()
        self.dense = _Dense(dense_features, len(tables), widths.pop(), bottom, top, order, on)
        if on != "meta":
            self.dense.draw(seed)
        self._data_parallel = _DataParallel()

    def forward(
        self,
        dense: torch.Tensor,
        features: Any,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the logits ``[n]``. Collective, on the current stream.

        Args:
            dense: Dense features ``[n, F]``.
            features, offsets, weights: Arguments of :meth:`ShardedEmbeddingBags.forward`.
        """
        return self.logits(dense, self.embeddings.pool(features, offsets, weights).stacked())

    def logits(self, dense: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Compute the logits ``[n]`` from dense features ``[n, F]`` and embeddings ``[n, T, D]``.

        It is the data-parallel part of :meth:`forward`.

        Raises:
            ArgumentError: dense features and embeddings are of different numbers of samples.
        """
        if len(dense) != len(stack):
            raise ArgumentError(
                f"DLRM: dense features must be of the bags' {len(stack)} samples; got {len(dense)}."
            )
        ranks = self.embeddings.group.world_size
        # Without gradients there is nothing to reduce, and DDP's forward pass would still cost
        # time.
        module = (
            self._data_parallel.of(self) if ranks > 1 and torch.is_grad_enabled() else self.dense
        )
        logits: torch.Tensor = module(dense, stack)
        return scale_gradient(logits, 1 / ranks) if ranks > 1 else logits


class _Dense(nn.Module):
    """The MLPs, and the dot products between them."""

    def __init__(
        self,
        features: int,
        tables: int,
        width: int,
        bottom: Sequence[int],
        top: Sequence[int],
        order: Sequence[int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.bottom = _mlp([features, *bottom, width], device)
        self.top = _mlp([width + tables * (tables + 1) // 2, *top, 1], device)
        # Not a buffer, because DDP would broadcast it in every step.
        self.pairs = _pairs(order, device)

    def forward(self, dense: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[n]`` from dense features ``[n, F]`` and embeddings ``[n, T, D]``."""
        x = self.bottom(dense)
        # Row t holds the products of e_t with x, e_1, e_2 ... Two batched products avoid a copy of
        # all embeddings that would put x beside them.
        products = torch.cat([torch.bmm(stack, x[:, :, None]), torch.bmm(stack, stack.mT)], 2)
        interactions = products.flatten(1).index_select(1, self.pairs)
        logits: torch.Tensor = self.top(torch.cat([x, interactions], 1))
        return logits.squeeze(1)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw the parameters from normal distributions, as the paper's implementation does.

        Weights have variance ``2 / (inputs + outputs)``, biases ``1 / outputs``.
        """
        device = self.pairs.device
        generator = torch.Generator(device).manual_seed(seed)
        for layer in itertools.chain(self.bottom, self.top):
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / sum(layer.weight.shape)), generator=generator)
                layer.bias.normal_(0, math.sqrt(1 / layer.out_features), generator=generator)


class _DataParallel:
    """Holder of the DDP wrapper that adds up the gradients of a model's dense part.

    It is not a submodule, so every parameter keeps one name. The first forward pass that needs the
    wrapper makes it, and a later one makes it again if parameters were frozen, thawed or moved
    since. Copies of a model start without a wrapper.
    """

    def __init__(self) -> None:
        self._module: DistributedDataParallel | None = None
        self._parameters: list[tuple[Any, ...]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_DataParallel":
        return _DataParallel()

    def __reduce__(self) -> tuple[Any, ...]:
        return _DataParallel, ()

    def of(self, model: DLRM) -> nn.Module:
        """Return the wrapper of ``model.dense``. Collective.

        If no parameter of ``model.dense`` is trained, return ``model.dense`` itself.
        """
        parameters = [
            (id(parameter), parameter.dtype, parameter.device, parameter.requires_grad)
            for parameter in model.dense.parameters()
        ]
        # DDP remembers which parameters it reduces. A wrapper that was made before some were frozen
        # would wait for gradients that never come, so it is replaced.
        if parameters != self._parameters:
            if self._module is not None:
                self._module._remove_autograd_hooks()
            self._module, self._parameters = None, parameters
            # DDP refuses a module without a parameter that is trained.
            if any(parameter.requires_grad for parameter in model.dense.parameters()):
                self._module = DistributedDataParallel(
                    model.dense, process_group=model.process_group, gradient_as_bucket_view=True
                )
                self._module.register_comm_hook(model, _add_over_ranks)
        return model.dense if self._module is None else self._module


def _mlp(widths: Sequence[int], device: torch.device | str) -> nn.Sequential:
    """Make linear layers of these widths, with a ReLU between two of them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _pairs(order: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Return the indices of all pairs' lower triangle in the flattened ``products [T, 1 + T]``.

    Args:
        order: ``order[p]`` is the table whose embeddings are at position p of the stack.
        device: Device of the result.

    Returns:
        int64 ``[T (T + 1) / 2]``, pairs in the order of the model's tables.

    Example:
        Two tables, stored in the order 1, 0. The products are ``e_1 x, e_1 e_1, e_1 e_0`` and
        ``e_0 x, e_0 e_1, e_0 e_0``. The triangle is ``e_0 x, e_1 x, e_1 e_0``, at ``[3, 0, 2]``.
    """
    positions = {table: position for position, table in enumerate(order)}
    row_length = 1 + len(order)
    indices = []
    for table in range(len(order)):
        row_start = positions[table] * row_length
        indices.append(row_start)
        indices += [row_start + 1 + positions[earlier] for earlier in range(table)]
    return torch.tensor(indices, dtype=torch.int64, device=device)


def _add_over_ranks(model: DLRM, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks: a communication hook of DDP.

    DDP itself would take the mean; the model has divided by the number of ranks already.

    Raises:
        PeerTimeoutError: on the CPU backend, a rank did not join before the deadline.
    """
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, group=model.process_group, async_op=True)
    assert work is not None
    if buffer.device.type == "cuda":
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda done: done.value()[0]
        )
        return summed
    owner = model.embeddings.group
    try:
        work.wait(datetime.timedelta(seconds=owner.deadline_s))
    except RuntimeError as error:
        raise PeerTimeoutError(
            operator="DLRM: all-reduce", rank=owner.rank, peer=-1, deadline_s=owner.deadline_s
        ) from error
    ready: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ready.set_result(buffer)
    return ready
