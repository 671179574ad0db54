"""``interlace.explain``: what ``impl="auto"`` would run, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.groups.group import known_group, known_nodes
from interlace.comm.groups.process_groups import rank_and_size
from interlace.comm.groups.reservation import CPU_GRANULARITY, GPU_GRANULARITY
from interlace.comm.groups.symmetric_memory import shortage_in_words
from interlace.environment import LIMIT_VARIABLE, byte_count
from interlace.errors import ArgumentError, BackendError, did_you_mean
from interlace.registry import Operator, operators
from interlace.units import format_memory


def explain(
    operator: str,
    *arguments: Any,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    **further: Any,
) -> str:
    """Say what ``impl="auto"`` would run for these arguments, and why. Nothing is computed or sent.

    Some implementations cannot run every call: ``remote_stores`` takes no bias, for one. So give
    here what the call is given.

    Args:
        operator: The operator's name, such as ``"gemm_reduce_scatter"``.
        arguments: The operator's tensors as it takes them: ``x, w``; or ``weights, indices,
            offsets``, of which this rank's stand for all ranks'. ``x, w`` of float8 need no scales
            here. Options may follow in their order: ``x, w, bias``.
        bias, out_dtype, splits, input_splits, output_splits, further: Options as the operator takes
            them, if it does. This rank's ``input_splits`` and ``output_splits`` stand for all
            ranks'.
        group: The process group, as the operator takes it; default: the default process group, or
            this process on its own if it is not one of several.

    Returns:
        One sentence: the implementation, the fused kernel's configuration, sizes, ranks, and the
        reason. Then, of several ranks on one node, the symmetric memory that each implementation
        needs on a rank that holds none yet. A group keeps mapped outputs of four sizes, whose
        numbers of rows 64 divides; a call of other sizes runs another implementation, which is not
        foreseen here.

    Raises:
        ArgumentError: No such operator, or arguments that it does not have or would refuse.
        BackendError: The tensors are neither on the CPU nor on a GPU.
        GroupError: There is no process group, in one of several processes.

    Example:
        >>> print(interlace.explain("gemv_all_reduce", x_shard_k, w_shard_k))
        gemm_all_reduce of x [1, 2048] and w [8192, 2048], bfloat16, on 4 ranks: gemv
        (protocol=one_shot, ...), because measured on ...
    """
    public = [
        declaration for declaration in operators().values() if declaration.has_public_function
    ]
    known = {declaration.name: declaration for declaration in public}
    known |= {
        declaration.vector_name: declaration for declaration in public if declaration.vector_name
    }
    if operator not in known:
        raise ArgumentError(
            f"explain: operator must be one of {', '.join(sorted(known))}; got {operator!r}."
            f"{did_you_mean(str(operator), known)}"
        )
    names, optional = known[operator].argument_names()
    if not len(names) <= len(arguments) <= len(names) + len(optional):
        raise ArgumentError(
            f"explain: {operator} must have {', '.join(names)}"
            + (f", and may have {', '.join(optional)}" if optional else "")
            + f"; got {len(arguments)} arguments."
        )
    options = {
        "bias": bias,
        "out_dtype": out_dtype,
        "splits": splits,
        "input_splits": input_splits,
        "output_splits": output_splits,
        **further,
    }
    # Operands that a call need not have follow the others, as in a call.
    for name, value in zip(optional, arguments[len(names) :], strict=False):
        if options.get(name) is not None:
            raise ArgumentError(f"explain: {name} of {operator} must be given once; got two.")
        options[name] = value
    arguments = arguments[: len(names)]
    # No operator has all of these options, so those that were not given must not be refused.
    call_options = {name: value for name, value in options.items() if value is not None}
    for name in call_options:
        if name not in optional:
            raise ArgumentError(
                f"explain: arguments of {operator} must be {', '.join((*names, *optional))}; got "
                f"{name}."
            )
    if operator == known[operator].vector_name:
        # A vector is one row.
        x, *others = arguments
        arguments = (x[None] if isinstance(x, torch.Tensor) and x.dim() == 1 else x, *others)
    for tensor in (tensor for argument in arguments for tensor in _tensors(argument)):
        if tensor.device.type not in ("cpu", "cuda"):
            raise BackendError(
                f"explain: tensors of {operator} must be on cuda or cpu; got {tensor.device}. "
                "Which implementation is fastest depends on the GPU."
            )
    _, world_size = rank_and_size(group)
    nodes = (known_nodes(group) if world_size > 1 else None) or 1
    needed = {}
    if world_size > 1 and nodes == 1:
        needed = _needed(known[operator], arguments, call_options, group, world_size)
    lacking = {name: words for name, (_, words) in needed.items() if words is not None}
    if lacking:
        call_options["lacking"] = lacking
    call, chosen, reason = known[operator].explain(
        *arguments, world_size=world_size, nodes=nodes, **call_options
    )
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    ranks += f" of {nodes} nodes" if nodes > 1 else ""
    text = f"{call}, on {ranks}: {chosen}, because {reason}."
    if needed:
        memory = ", ".join(f"{name} {size}" for name, (size, _) in needed.items())
        text += f" Symmetric memory per rank: {memory}."
    return text


def _needed(
    declaration: Operator,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    world_size: int,
) -> dict[str, tuple[str, str | None]]:
    """Return the symmetric memory that implementations need, in words, and why it does not fit
    under the limit, by name; None for what fits. Those of which it is not known are left out.
    """
    tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
    owner = known_group(group, tensors[0].device) if tensors else None
    usual = CPU_GRANULARITY if tensors and tensors[0].device.type == "cpu" else GPU_GRANULARITY
    granularity = usual if owner is None else owner.granularity
    reservations = declaration.reservations(
        *arguments, world_size=world_size, granularity=granularity, **options
    )
    limit, needed = byte_count(LIMIT_VARIABLE), {}
    for name, reservation in reservations.items():
        if reservation is None:
            continue
        nbytes, words = reservation.nbytes(granularity), None
        if owner is not None:
            words = owner.memory.shortage(reservation, is_asked_only=True)
        elif limit is not None and nbytes > limit:
            words = shortage_in_words(nbytes, limit)
        needed[name] = format_memory(nbytes) if nbytes else "none", words
    return needed


def _tensors(argument: Any) -> list[torch.Tensor]:
    """Return an argument that is a tensor, or those of a list of tensors."""
    items = argument if isinstance(argument, list | tuple) else [argument]
    return [item for item in items if isinstance(item, torch.Tensor)]
