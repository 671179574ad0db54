"""The symmetric memory that a model's layers take in a program, beside the program's own budget."""

from __future__ import annotations

import dataclasses

import torch

from interlace.cli.gpus import choice_on, gpu_named
from interlace.cli.options import MOST_RANKS
from interlace.clients import Client
from interlace.comm.groups.reservation import GPU_GRANULARITY, MappedSize, Reservation
from interlace.costs.models import EmbeddingModel, LayerProduct, find_model
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError
from interlace.gemm.implementations.outputs import MOST_OUTPUTS
from interlace.gemm.operator import product_operator
from interlace.gemm.reservations import on_gpu
from interlace.gemm.terms import Terms
from interlace.operators.gemm_all_reduce.config import MOST_NORMED_ROWS
from interlace.operators.gemm_all_reduce.normed_launch import is_pushed
from interlace.tuning.gpu import Gpu

_NORMED = "gemm_all_reduce_norm"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of symmetric memory per rank, without a limit.

    Attributes:
        first: Bytes that the step with most tokens needs.
        most: Bytes that are held at most after steps of all smaller numbers of tokens, too.
    """

    first: int
    most: int


def memory_of(
    client: Client, model: str, tokens: int, ranks: int, gpu: str, dtype: torch.dtype
) -> Memory:
    """Return the memory that the calls of a transformer's layers take, all layers together.

    Args:
        client: The program, whose operators count.
        model: A model, as :func:`interlace.costs.models.find_model` takes it.
        tokens: Number of tokens of the largest step.
        ranks: Number of ranks of the tensor parallel group.
        gpu: A GPU whose profile is shipped.
        dtype: The dtype of the activations.

    Raises:
        ArgumentError: There is no such model or GPU, it is no transformer, or ranks do not divide
            what they share, or no operator takes so many.
    """
    described, device = find_model(model), gpu_named(gpu)
    if isinstance(described, EmbeddingModel) or not client.operators:
        raise ArgumentError(
            f"--model must be a transformer, of a client that runs those; got {model!r} for "
            f"{client.name}. docs/costs.md has formulas for tables."
        )
    if not 2 <= ranks <= MOST_RANKS:
        raise ArgumentError(f"--world-size must be from 2 to {MOST_RANKS} ranks; got {ranks}.")
    is_gathered = "all_gather_gemm" in client.operators
    products = described.layer_products(ranks, sequence_parallel=is_gathered)
    # An operator that shares rows out takes numbers that the ranks divide.
    least = 1 if _NORMED in client.operators else ranks
    steps = [tokens, *(least << i for i in range(tokens.bit_length()) if least << i < tokens)]
    calls = [
        [_reservation(client, product, step, ranks, device, dtype) for product in products]
        for step in steps
    ]
    all_calls = [call for of_step in calls for call in of_step]
    return Memory(_nbytes(calls[0], is_first=True), _nbytes(all_calls, is_first=False))


def _reservation(
    client: Client, product: LayerProduct, rows: int, ranks: int, gpu: Gpu, dtype: torch.dtype
) -> Reservation:
    """Return what a product needs by what ``impl="auto"`` takes; nothing if it is not fused."""
    for name in client.operators:
        operator = product_operator(name)
        if operator.collective_first == product.is_summed:
            continue
        if name == _NORMED and not product.is_normed:
            continue
        is_many = name == _NORMED and rows > MOST_NORMED_ROWS
        if is_many and not is_pushed(rows, product.columns, dtype, ranks):
            continue  # It takes what the operator without a norm takes.
        sizes = (rows, product.columns, product.inner)
        call = SizedCall.of_dtype(str(dtype).removeprefix("torch."), *sizes, ranks)
        choice = choice_on(gpu, operator, call, dtype)
        terms = Terms.of_sizes(rows, product.columns, dtype, "cuda", ranks)
        terms = dataclasses.replace(terms, is_even=rows % ranks == 0)
        impl = "pushed" if is_many else choice.accepted(operator, terms)[0]
        if impl != "gemm":
            return on_gpu(operator, *sizes, dtype, ranks, choice).get(impl) or Reservation()
    return Reservation()


def _nbytes(reservations: list[Reservation], *, is_first: bool) -> int:
    """Return the bytes of a group that has made some calls, the largest first.

    Args:
        is_first: Whether these are the calls of one step. The mapped outputs of many steps may all
            be about as large as the largest: numbers of tokens seldom come again.
    """
    by_name: dict[str, int] = {}
    for each in reservations:
        for size in each.workspaces:
            nbytes = size.rounded().nbytes(GPU_GRANULARITY)
            by_name[size.name] = max(nbytes, by_name.get(size.name, 0))
    buffer = max(reservation.output_bytes for reservation in reservations)
    mapped = sorted(
        {reservation.mapped for reservation in reservations if reservation.mapped},
        key=_mapped_bytes,
    )
    total = sum(by_name.values()) + Reservation(output_bytes=buffer).nbytes(GPU_GRANULARITY)
    if is_first:
        return total + sum(map(_mapped_bytes, mapped))
    return total + (MOST_OUTPUTS * _mapped_bytes(mapped[-1]) if mapped else 0)


def _mapped_bytes(mapped: tuple[MappedSize, ...]) -> int:
    return Reservation(mapped=mapped).nbytes(GPU_GRANULARITY)
