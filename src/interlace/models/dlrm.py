"""``DLRM``: the deep learning recommendation model of Naumov et al. (arXiv:1906.00091), its tables
shared out over ranks.
"""

# No `from __future__ import annotations` here: DDP looks at the annotations of a communication
# hook.

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
from interlace.nn.embedding_bags import scale_gradient
from interlace.nn.group_member import GroupMember


class DLRM(GroupMember, nn.Module):
    """Click prediction from dense and categorical features, data-parallel but for its tables.

    Dimensions: n samples of this rank, R ranks, F dense features, T tables of width D.

    Forward, collective::

        x [n, D]        = bottom MLP of the dense features [n, F]
        e_t [n, D]      = pooled embeddings of table t           (interlace.nn.ShardedEmbeddingBags)
        z [n, T(T+1)/2] = dot products of all pairs of x, e_1 .. e_T
        logit [n]       = top MLP of (x, z)

    Linear layers are followed by ReLU, but for the last. Each rank has the MLPs (``dense``) and its
    share of the tables (``embeddings``).

    **Gradients.** Each rank's loss is the mean over its own samples, as with
    ``DistributedDataParallel``, and every parameter gets the gradient of the mean over all samples.
    The division by R happens once, on the n logits, rather than on every gradient; the MLPs'
    gradients are then *added* over ranks (a communication hook of DDP), and so are the tables',
    within the embeddings' backward kernel.

    ``state_dict()`` has the same keys on every rank under ``dense.``, and this rank's shards under
    ``embeddings.``; no ``module.`` of DDP's. See :class:`interlace.nn.ShardedEmbeddingBags` for
    what may be loaded.

    Args:
        tables: all of one width.
        dense_features: F.
        bottom: widths of the bottom MLP's hidden layers; it ends in D.
        top: widths of the top MLP's hidden layers; it ends in 1.
        group: of the ranks; default: the default process group, or this process on its own.
        device: default: the current CUDA device, or the CPU if there is none.
        seed: of all first weights.
        options: further arguments of :class:`ShardedEmbeddingBags`: ``gradient``,
            ``learning_rate``, ``plan`` ...

    Attributes:
        dense: the MLPs and the interaction; its parameters are for an optimizer of torch's.
        embeddings: the tables.

    Raises:
        ArgumentError: tables of different widths; whatever :class:`ShardedEmbeddingBags` refuses.

    Example:
        >>> tables = [EmbeddingTable(f"C{t + 1}", 10_000, 64, bag_length=1) for t in range(26)]
        >>> model = DLRM(tables, gradient="rowwise_adagrad", learning_rate=0.02)
        >>> logits = model(batch.dense, batch.indices)
        >>> binary_cross_entropy(logits, batch.labels).backward()    # the tables are updated by then
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
        """Logits ``[n]``. Collective, on the current stream.

        Args:
            dense: ``[n, F]``.
            features, offsets, weights: as :meth:`ShardedEmbeddingBags.forward` takes them.
        """
        return self.logits(dense, self.embeddings.pool(features, offsets, weights).stacked())

    def logits(self, dense: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """The data-parallel part: from dense features ``[n, F]`` and embeddings ``[n, T, D]`` to
        logits ``[n]``.
        """
        if len(dense) != len(stack):
            raise ArgumentError(
                f"DLRM: dense features must be of the bags' {len(stack)} samples; got {len(dense)}."
            )
        ranks = self.embeddings.group.world_size
        module = (
            self._data_parallel.of(self) if ranks > 1 and torch.is_grad_enabled() else self.dense
        )
        found: torch.Tensor = module(dense, stack)
        return scale_gradient(found, 1 / ranks) if ranks > 1 else found


class _Dense(nn.Module):
    """The MLPs and the interaction."""

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
        self.pairs = _pairs(order, device)  # no buffer: DDP would broadcast it in every step

    def forward(self, dense: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """``[n, F]`` and ``[n, T, D]`` -> ``[n]``."""
        x = self.bottom(dense)
        # Row t: e_t times x, e_1, e_2 ...: nothing of the embeddings is copied to put x beside
        # them.
        products = torch.cat([torch.bmm(stack, x[:, :, None]), torch.bmm(stack, stack.mT)], 2)
        found: torch.Tensor = self.top(
            torch.cat([x, products.flatten(1).index_select(1, self.pairs)], 1)
        )
        return found.squeeze(1)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """As the reference: weights normal with variance ``2 / (inputs + outputs)``, biases with
        ``1 / outputs``.
        """
        device = self.pairs.device
        generator = torch.Generator(device).manual_seed(seed)
        for layer in itertools.chain(self.bottom, self.top):
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / sum(layer.weight.shape)), generator=generator)
                layer.bias.normal_(0, math.sqrt(1 / layer.out_features), generator=generator)


class _DataParallel:
    """The wrapper that adds up the gradients of a model's dense part; no submodule, so parameters
    keep one name each.

    It is made by the first forward pass that needs it, and again when parameters were frozen,
    thawed or moved since. Copies of a model start without one.
    """

    def __init__(self) -> None:
        self._module: DistributedDataParallel | None = None
        self._parameters: list[tuple[Any, ...]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_DataParallel":
        return _DataParallel()

    def __reduce__(self) -> tuple[Any, ...]:
        return _DataParallel, ()

    def of(self, model: DLRM) -> nn.Module:
        """The wrapper of ``model.dense``, or that itself where none of its parameters is trained.
        Collective.
        """
        parameters = [
            (id(each), each.dtype, each.device, each.requires_grad)
            for each in model.dense.parameters()
        ]
        if parameters != self._parameters:
            if self._module is not None:
                self._module._remove_autograd_hooks()
            self._module, self._parameters = None, parameters
            if any(each.requires_grad for each in model.dense.parameters()):
                self._module = DistributedDataParallel(
                    model.dense, process_group=model.process_group, gradient_as_bucket_view=True
                )  # fmt: skip
                self._module.register_comm_hook(model, _add_over_ranks)
        return model.dense if self._module is None else self._module


def _mlp(widths: Sequence[int], device: torch.device | str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _pairs(order: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Where the lower triangle of all pairs lies in ``products [T, 1 + T]``, in the order of the
    model's tables.

    Args:
        order: ``order[p]`` is the table whose embeddings are at place p of the stack.
        device: of the result.

    Example:
        Two tables, stored in the order 1, 0. Products: ``[e_1 x, e_1 e_1, e_1 e_0], [e_0 x, e_0
        e_1, e_0 e_0]``. Wanted: ``e_0 x, e_1 x, e_1 e_0``, which are at ``[3, 0, 2]``.
    """
    place = {table: p for p, table in enumerate(order)}
    row = 1 + len(order)
    found = []
    for table in range(len(order)):
        found.append(place[table] * row)
        found += [place[table] * row + 1 + place[other] for other in range(table)]
    return torch.tensor(found, dtype=torch.int64, device=device)


def _add_over_ranks(model: DLRM, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the sum over ranks, where DDP itself would take the mean."""
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
