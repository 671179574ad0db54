"""Complete the gradients of parameters that all ranks hold, after a backward pass."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from interlace.comm import group_of, rank_and_size
from interlace.errors import ArgumentError
from interlace.nn.embedding_bags import ShardedEmbeddingBags
from interlace.nn.embedding_shards import ShardParameters
from interlace.nn.moe import MoE
from interlace.nn.parallel_linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from interlace.nn.shard_holder import ShardHolder
from interlace.nn.sharded_parameters import is_distributed

_NAME = "sum_replicated_gradients"

# Gradients are copied side by side up to this size, and summed at once.
_BUCKET_BYTES = 32 << 20


@torch.no_grad()
def sum_replicated_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    average: bool | None = None,
    complete: Iterable[nn.Module | nn.Parameter] = (),
    partial: Iterable[nn.Module | nn.Parameter] = (),
) -> None:
    """Sum the gradients of parameters that all ranks of a group hold, and scale those of experts.

    Call it once per step, after the last backward pass and before gradients are clipped or
    unscaled: a second call would add up the sums. Collective: every rank of the group calls it. In
    the first call, ranks compare on the host which gradients they are about to sum. Sums run on the
    current stream. The host waits for the device only on a rank that lacks a gradient.

    What becomes of a gradient follows from the layers over the group:

    - Parameters of :class:`ColumnParallelLinear` and :class:`RowParallelLinear`, biases included,
      and tables of :class:`ShardedEmbeddingBags` have complete gradients, which stay as they are.
    - Gradients of the experts of :class:`MoE` are sums over all ranks' tokens. They are divided by
      the number of ranks R if gradients are averaged.
    - All other parameters (norms, embeddings, routers) have seen this rank's tokens. Their
      gradients are summed, and divided by R if gradients are averaged. With tensor-parallel layers
      without ``sequence_parallel`` every rank has all tokens, and their gradients stay as they are.
    - Parameters that ``DistributedDataParallel`` reduces over the group stay as they are; let it
      ignore experts.

    Layers over other groups, which have this rank alone in common with this one, hold the same
    shards on all ranks of this group: their gradients are summed, too. So a program with several
    dimensions of parallelism calls the function once for each of them, in any order.

    Gradients are reduced in their own dtype, in buckets of 32 MiB per dtype.

    Args:
        model: Module whose parameters' gradients are to be completed.
        group: The ranks over which gradients are incomplete; default: the default process group.
        average: Whether sums are divided by the number of ranks R. False if the losses of the ranks
            add up to the loss, as with tensor and sequence parallelism; True if each rank's loss is
            a mean over its own samples or tokens and the loss is the mean of these. None: by the
            layers, False with tensor-parallel ones, ``average_gradients`` of
            :class:`ShardedEmbeddingBags`, True with ``DistributedDataParallel``. Where none of them
            is over this group, it must be given.
        complete: Parameters, or modules with all theirs, whose gradients are complete on each rank.
        partial: Parameters, or modules with all theirs, whose gradients are to be summed, such as a
            norm of this rank's heads, between a column- and a row-parallel layer.

    Raises:
        ArgumentError: It cannot be known from the layers whether a parameter's gradient is
            complete, or how it is scaled; the message names the parameter. No gradient was changed.
        RankMismatchError: Ranks have different parameters to sum.
        PeerTimeoutError: A rank did not make the first call before the group's deadline.

    Example:
        >>> loss.backward()
        >>> interlace.nn.sum_replicated_gradients(model)  # with sequence parallelism
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    world_size = rank_and_size(group)[1]
    if world_size == 1:
        return
    survey = _Survey(model, group)
    is_averaged = survey.is_averaged(average)
    replicated, experts = survey.incomplete(_identities(complete), _identities(partial))
    if not replicated and not experts:
        return
    if is_averaged is None:
        raise ArgumentError(
            f"{_NAME}: average must be given where no layer tells how the ranks' losses make the "
            f"loss; got None, for the parameter {(replicated or experts)[0][0]!r}. Pass True if "
            "the loss is their mean, False if it is their sum."
        )
    _agree(replicated, (replicated or experts)[0][1].device, group, is_averaged)
    factor = 1 / world_size if is_averaged else 1.0
    _sum([parameter for _, parameter in replicated], group, factor)
    if is_averaged:
        for _, parameter in experts:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


_Named = list[tuple[str, nn.Parameter]]


class _Survey:
    """The layers of a model over a group, and what follows from them for its gradients."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model, self._ranks = model, _ranks_of(group)
        # Layers over this group, by what they say of all parameters outside of them.
        self._averaged: dict[bool, str] = {}
        self._of_same_tokens: list[str] = []
        self._of_own_tokens: list[str] = []
        # Identities of parameters.
        self._complete: set[int] = set()
        self._sharded: set[int] = set()
        self._experts: set[int] = set()
        self._unknown: dict[int, str] = {}
        for name, module in model.named_modules():
            layer = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            if isinstance(module, ShardedEmbeddingBags):
                self._read_bags(layer, module)
            elif isinstance(module, ShardHolder) and module.world_size > 1:
                self._read_shards(layer, module)
            elif isinstance(module, DistributedDataParallel):
                self._read_replicas(layer, module)
            elif _is_fully_sharded(module) and self._overlaps(module.process_group):
                self._give_up(module.parameters(), f"which {layer} reduces over ranks of the group")
        self._read_neighbours()

    def _read_bags(self, layer: str, bags: ShardedEmbeddingBags) -> None:
        if self._is_over(bags.process_group):
            self._averaged.setdefault(bags.average_gradients, layer)
            self._of_own_tokens.append(layer)
        elif bags.gradient in ("sgd", "rowwise_adagrad"):
            self._give_up(bags.parameters(), f"which {layer} has updated by this rank's samples")

    def _read_shards(self, layer: str, holder: ShardHolder) -> None:
        held = [holder._parameters.get(name) for name in holder._sharded()]
        shards = [parameter for parameter in held if parameter is not None]
        sharing_group = holder._sharing().group
        if not self._overlaps(sharing_group):
            return  # Every rank of this group has the same shard.
        if not self._is_over(sharing_group):
            self._give_up(
                shards,
                f"which {layer} shards over ranks {sorted(_ranks_of(sharing_group))}. Give these "
                "as the group first, and then the ranks that hold the same shard",
            )
        elif isinstance(holder, ParallelLinear):
            tokens = self._of_own_tokens if holder.sequence_parallel else self._of_same_tokens
            tokens.append(layer)
            self._averaged.setdefault(False, layer)
            # The bias of a row-parallel layer, too: its backward pass has the gradients of all
            # tokens.
            self._complete.update(map(id, holder.parameters()))
            self._sharded.update(map(id, shards))
        elif isinstance(holder, MoE):
            self._of_own_tokens.append(layer)
            self._experts.update(map(id, shards))
        elif isinstance(holder, ShardParameters):
            self._complete.update(map(id, shards))
        else:
            self._give_up(shards, f"of {layer}, whose rule is not known")

    def _read_replicas(self, layer: str, replicas: DistributedDataParallel) -> None:
        ignored = replicas.parameters_to_ignore
        named = replicas.module.named_parameters()
        reduced = [parameter for name, parameter in named if name not in ignored]
        if self._is_over(replicas.process_group):
            self._averaged.setdefault(True, layer)
            self._complete.update(map(id, reduced))
        elif self._overlaps(replicas.process_group):
            self._give_up(reduced, f"which {layer} reduces over some ranks of the group")

    def _read_neighbours(self) -> None:
        """Note parameters of which the layers around them leave two possibilities."""
        if self._of_same_tokens and not self._of_own_tokens:
            # A norm of tokens, before the layers, has seen all features; one of heads, between the
            # layers, this rank's alone. Where both layers are of one module, it may be either.
            for name, module in self._model.named_modules():
                kinds = (ColumnParallelLinear, RowParallelLinear)
                children = list(module.children())
                if all(any(isinstance(child, kind) for child in children) for kind in kinds):
                    self._give_up(
                        self._outside(module),
                        f"which {type(module).__name__} {name!r} holds beside a column- and a "
                        "row-parallel layer: of a norm of heads between the two it is partial",
                    )
        elif self._of_same_tokens:
            self._give_up(
                self._outside(self._model),
                f"of a model where {self._of_same_tokens[0]} takes the same tokens on every rank, "
                f"and {self._of_own_tokens[0]} each rank's own",
            )
        for name, module in self._model.named_modules() if self._of_own_tokens else ():
            if not isinstance(module, ParallelLinear):
                own_parameters = module.parameters(recurse=False)
                tied = [value for value in own_parameters if id(value) in self._sharded]
                self._give_up(tied, f"which {type(module).__name__} {name!r} holds as well")

    def _outside(self, module: nn.Module) -> list[nn.Parameter]:
        """Return a module's parameters without those of the layers."""
        known = self._complete | self._experts
        return [value for value in module.parameters() if id(value) not in known]

    def _give_up(self, parameters: Iterable[nn.Parameter], reason: str) -> None:
        for parameter in parameters:
            self._unknown.setdefault(id(parameter), reason)

    def _overlaps(self, group: dist.ProcessGroup | None) -> bool:
        """Tell if a group has more ranks than this one in common with the survey's group."""
        return len(self._ranks & _ranks_of(group)) > 1

    def _is_over(self, group: dist.ProcessGroup | None) -> bool:
        return self._ranks == _ranks_of(group)

    def is_averaged(self, average: bool | None) -> bool | None:
        """Return whether sums are divided by the number of ranks; None if nothing says so.

        Raises:
            ArgumentError: Two layers, or a layer and the argument ``average``, contradict.
        """
        says = dict(self._averaged)
        if average is not None:
            says.setdefault(average, f"average={average}")
        if len(says) > 1:
            raise ArgumentError(
                f"{_NAME}: gradients of one group must be averaged over the ranks everywhere or "
                f"nowhere; got {says[True]}, which averages them, and {says[False]}, which sums "
                "them. Call it for parts of the model one by one."
            )
        return next(iter(says), None)

    def incomplete(self, complete: set[int], partial: set[int]) -> tuple[_Named, _Named]:
        """Return the parameters whose gradients are to be summed, and those of experts.

        Args:
            complete, partial: Identities of parameters of which the caller says so.

        Raises:
            ArgumentError: Whether a gradient is complete is not known.
        """
        replicated: _Named = []
        experts: _Named = []
        for name, parameter in self._model.named_parameters():
            key = id(parameter)
            if not parameter.requires_grad or key in complete:
                continue
            reason = self._reason(parameter, key in partial)
            if reason is not None:
                raise ArgumentError(
                    f"{_NAME}: it must be known of every gradient whether it is complete; got "
                    f"the parameter {name!r}, {reason}. Give the parameter in complete if its "
                    "gradient is that of all ranks' tokens and features, and in partial if it is "
                    "to be summed."
                )
            if key in self._experts:
                experts.append((name, parameter))
            # Ranks whose layers take the same tokens compute the same between the layers, too.
            elif key in partial or not (key in self._complete or self._of_same_tokens):
                replicated.append((name, parameter))
        return replicated, experts

    def _reason(self, parameter: nn.Parameter, is_partial: bool) -> str | None:
        """Return why it is not known whether a gradient is complete; None if it is known."""
        key = id(parameter)
        if key in self._experts and key in self._complete:
            return "of experts, which DistributedDataParallel averages with other experts"
        if key in self._experts or key in self._sharded:
            return self._unknown.get(key)
        if is_distributed(parameter):
            mesh = parameter.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
            if len(self._ranks.intersection(mesh)) > 1:
                return f"a DTensor over ranks {sorted(mesh)}"
        if key in self._complete:
            return None
        if type(parameter).__name__ == "FlatParameter":
            return "of FullyShardedDataParallel without use_orig_params"
        grad: Any = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            return f"whose gradient is of layout {grad.layout}"
        return None if is_partial else self._unknown.get(key)


def _identities(chosen: Iterable[nn.Module | nn.Parameter]) -> set[int]:
    """Return the identities of parameters, and of all parameters of modules."""
    return {
        id(parameter)
        for owner in chosen
        for parameter in (owner.parameters() if isinstance(owner, nn.Module) else [owner])
    }


def _ranks_of(group: dist.ProcessGroup | None) -> set[int]:
    """Return the ranks of a group, counted over all ranks of the program."""
    return set(dist.get_process_group_ranks(group))


def _is_fully_sharded(module: nn.Module) -> bool:
    """Tell if a module is FSDP1's wrapper, without importing it for programs that do not use it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _agree(
    replicated: _Named, device: torch.device, group: dist.ProcessGroup | None, is_averaged: bool
) -> None:
    """Check, in the first call, that all ranks are about to sum the same parameters."""
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in replicated]
    group_of(group, device).agree(
        _NAME,
        average=is_averaged,
        number_of_parameters=len(replicated),
        number_of_elements=sum(value.numel() for _, value in replicated),
        digest_of_names_and_shapes=hashlib.sha256(str(described).encode()).hexdigest()[:16],
    )


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, factor: float) -> None:
    """Sum the gradients of parameters over the ranks, and multiply them by ``factor``.

    A rank that has no gradient of a parameter adds zeros. No rank keeps a gradient that none had,
    because optimizers leave such a parameter alone.
    """
    if not parameters:
        return
    is_missing = [parameter.grad is None for parameter in parameters]
    count = torch.tensor(is_missing, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(count, group=group)
    for parameter, missing in zip(parameters, is_missing, strict=True):
        if missing:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [_local(parameter.grad) for parameter in parameters]
    for bucket in _buckets(gradients):
        is_alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if is_alone else torch.cat([part.reshape(-1) for part in bucket])
        dist.all_reduce(flat, group=group)
        flat.mul_(factor)
        if not is_alone:
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
    if any(is_missing):
        ranks = rank_and_size(group)[1]
        for parameter, missing in zip(parameters, count.tolist(), strict=True):
            if missing == ranks:
                parameter.grad = None


def _local(gradient: Any) -> torch.Tensor:
    """Return a plain tensor of the memory that this rank has of a gradient."""
    # Marked gradients of shards would stand for those of all ranks in some functions.
    with torch._C.DisableTorchFunctionSubclass():
        local = gradient.to_local() if is_distributed(gradient) else gradient
        plain: torch.Tensor = local.detach()
    return plain


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return gradients in lists of one dtype and device each, of limited size.

    A gradient that is as large as a bucket is a list of its own, so that it need not be copied.
    """
    full: list[list[torch.Tensor]] = []
    begun: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.nbytes >= _BUCKET_BYTES:
            full.append([gradient])
            continue
        bucket = begun.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(part.nbytes for part in bucket) >= _BUCKET_BYTES:
            full.append(begun.pop((gradient.dtype, gradient.device)))
    return [*full, *begun.values()]
