"""A call of an operator that every rank of a group makes, and what it must return."""

from __future__ import annotations

import abc
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from interlace.comm import group_of
from interlace.errors import InterlaceError

Tensors = dict[str, torch.Tensor]
Make = Callable[[Tensors], list[torch.Tensor]]

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}

_ROUNDINGS = 8
"""Roundings on the way of a result that is not exact: of products, of parts that travel, of steps
of their sum.
"""


@dataclasses.dataclass(frozen=True)
class Case(abc.ABC):
    """One call of one operator by one implementation, the same on every rank.

    The tensors of each rank depend on a seed.

    Inputs are small whole numbers, or multiples of a power of two, so that nearly every result is
    exact in its dtype and every order of summation gives the same bits.

    Attributes:
        operator: The operator's name.
        impl: The implementation, as the operator's ``impl`` argument takes it, or as
            ``IMPLEMENTATIONS`` lists it.
        dtype: The name of the inputs' dtype, a key of ``DTYPES``.
        backward: Whether the call includes its backward pass.
        leaf_names: The tensors that get gradients, in the order of the results; a call need not
            have all of them.
        is_replicated: True if every rank has a copy of one result, with one gradient.
        shares_bias: True if the ranks' biases are copies of one, which is added once.
        may_be_zero: The sizes for which 0 has a meaning of its own.
    """

    leaf_names: ClassVar[tuple[str, ...]] = ("x", "w", "bias")
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    operator: str
    impl: str
    dtype: str = "float32"
    backward: bool = False

    @property
    @abc.abstractmethod
    def sizes(self) -> str:
        """The shapes in words, for reports."""

    @property
    def size_names(self) -> list[str]:
        """The names of the fields that are sizes, in order."""
        common = {field.name for field in dataclasses.fields(Case)}
        names = [field.name for field in dataclasses.fields(self) if field.name not in common]
        return [name for name in names if type(getattr(self, name)) is int]

    @property
    def work(self) -> int:
        """About how many multiplications a rank makes in one call without its backward pass."""
        return math.prod(max(1, getattr(self, name)) for name in self.size_names)

    @property
    def impl_name(self) -> str:
        """The first word of ``impl``, which the operator takes."""
        return self.impl.partition(" ")[0]

    @property
    def variant(self) -> str:
        """The second word of ``impl``, such as a protocol of the fused kernel; or nothing."""
        return self.impl.partition(" ")[2]

    @property
    def is_replicated(self) -> bool:
        return False

    @property
    def shares_bias(self) -> bool:
        return False

    @property
    def label(self) -> str:
        """The call in one line."""
        direction = ", forward and backward" if self.backward else ""
        return f"{self.operator} {self.impl}: {self.sizes}, {self.dtype}{direction}"

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the operator's result."""
        return torch.bfloat16 if self.dtype == "float8" else DTYPES[self.dtype]

    def units(self, results: int) -> list[float]:
        """Return, for each result, a power of two that divides it and its summands."""
        return [1.0] * results

    @property
    def exact(self) -> bool:
        """True if the call computes sums and products only, so that whole numbers stay whole."""
        return True

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph may capture the call."""
        # Graphs must not mix collectives of several NCCL communicators.
        return self.impl != "unfused"

    @property
    def poisonable(self) -> bool:
        """True if the caller owns the results and may overwrite them before the next call."""
        return True

    @property
    def takes_layouts(self) -> bool:
        """True if operands may lie as :func:`in_another_layout` lays them."""
        return True

    @abc.abstractmethod
    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        """Return the input tensors of one rank of ``ranks``, on the CPU."""

    def outputs(self, leaves: list[Tensors], inputs: list[Tensors]) -> list[torch.Tensor]:
        """Return, for each rank, the operator's result computed from all ranks' tensors by torch.

        Args:
            leaves: The tensors of ``leaf_names``.
            inputs: All tensors.
        """
        raise NotImplementedError

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        """Return, for each rank, the results computed from all ranks' inputs in float64.

        They are the operator's result and, with the backward pass, the gradients of the leaves.
        """
        leaves = [
            {
                name: call[name].clone().requires_grad_(self.backward)
                for name in self.leaf_names
                if name in call
            }
            for call in inputs
        ]
        outputs = self.outputs(leaves, inputs)
        if not self.backward:
            return [[output] for output in outputs]
        # Copies of one result are one tensor with one gradient: rank 0's copy stands for all.
        counted = slice(0, 1) if self.is_replicated else slice(None)
        flat = [leaf for call in leaves for leaf in call.values()]
        grads = iter(gradients(outputs[counted], [call["grad"] for call in inputs[counted]], flat))
        by_rank = [{name: next(grads) for name in call} for call in leaves]
        if self.shares_bias:
            by_rank = [call | {"bias": by_rank[0]["bias"]} for call in by_rank]
        return [
            [output.detach(), *call.values()] for output, call in zip(outputs, by_rank, strict=True)
        ]

    def dtypes(self, results: int) -> list[torch.dtype]:
        """Return the dtype of each result."""
        return [self.result_dtype] * results

    @abc.abstractmethod
    def open(self, group: dist.ProcessGroup | None) -> Make:
        """Return a function that makes the call with this rank's tensors. Collective."""

    def call(
        self, operator: Callable[..., torch.Tensor], options: dict[str, Any], tensors: Tensors
    ) -> list[torch.Tensor]:
        """Call an operator with this rank's tensors by name, and with ``options``.

        Returns:
            Its result and, with the backward pass, the gradients of the leaves.
        """
        arguments = {name: tensor for name, tensor in tensors.items() if name != "grad"}
        if not self.backward:
            return [operator(**arguments, **options)]
        # Detached: the same tensors are inputs of every call, and must keep no call's graph alive.
        leaves = {
            name: arguments[name].detach().requires_grad_()
            for name in self.leaf_names
            if name in arguments
        }
        y = operator(**(arguments | leaves), **options)
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), tensors["grad"])]

    # What must come out

    def expected(self, rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, float]]:
        """Return the results of a rank, on the CPU, each with its allowed absolute error.

        The error is 0 where all arithmetic is exact.
        """
        inputs = [
            _of_floats(torch.Tensor.double, self.tensors(peer, ranks, seed))
            for peer in range(ranks)
        ]
        exact = self.results(inputs)[rank]
        # The result of absolute values bounds every intermediate sum, in any order of additions.
        bounds = self.results([_of_floats(torch.abs, tensors) for tensors in inputs])[rank]
        eps = torch.finfo(self.result_dtype).eps
        allowed = []
        for bound, unit in zip(bounds, self.units(len(bounds)), strict=True):
            largest = float(bound.abs().max()) if bound.numel() else 0.0
            exact_here = self.exact and largest / unit <= 2 / eps
            allowed.append(0.0 if exact_here else _ROUNDINGS * eps * largest)
        triples = zip(exact, self.dtypes(len(exact)), allowed, strict=True)
        return [(result.to(dtype), error) for result, dtype, error in triples]

    def prepare(
        self,
        group: dist.ProcessGroup | None = None,
        seeds: Sequence[int] = (0,),
        layouts: int | None = None,
    ) -> Prepared:
        """Put inputs and expected results on the device, a variant for each seed. Collective.

        Args:
            layouts: The seed of the inputs' layouts, the same on every rank; None for those of new
                tensors.
        """
        return Prepared(self, group, seeds, layouts)


class Prepared:
    """A case whose inputs, in several variants, and expected results lie on this rank's device.

    The call always reads the same memory, into which :meth:`load` copies a variant: repeated calls
    with the same addresses are what the group makes CUDA graphs of.
    """

    def __init__(
        self,
        case: Case,
        group: dist.ProcessGroup | None,
        seeds: Sequence[int],
        layouts: int | None,
    ) -> None:
        self.case, self.group = case, group
        owner = group_of(group)
        rank, ranks, device = owner.rank, owner.world_size, owner.device
        self._variants = [
            {name: tensor.to(device) for name, tensor in case.tensors(rank, ranks, seed).items()}
            for seed in seeds
        ]
        self._expected: list[list[torch.Tensor]] = []
        self._allowed: list[list[float]] = []
        for seed in seeds:
            expected = case.expected(rank, ranks, seed)
            self._expected.append([result.to(device) for result, _ in expected])
            self._allowed.append([error for _, error in expected])
        self._inputs = {
            name: tensor.clone()
            if layouts is None or not case.takes_layouts
            else in_another_layout(tensor, random.Random(f"{layouts} {name}"))
            for name, tensor in self._variants[0].items()
        }
        self._make = case.open(group)

    @property
    def result_count(self) -> int:
        """The number of results per call."""
        return len(self._expected[0])

    def load(self, variant: int) -> None:
        """Copy a variant's inputs to where the call reads them, on the current stream."""
        torch._foreach_copy_(list(self._inputs.values()), list(self._variants[variant].values()))

    def run(self) -> list[torch.Tensor]:
        """Make the call, with its backward pass if the case has one. Collective."""
        return self._make(self._inputs)

    def count_wrong(
        self, results: Sequence[torch.Tensor], variant: int, wrong: torch.Tensor
    ) -> None:
        """Store the number of wrong elements of each result in ``wrong``, int64 ``[result_count]``
        on the device.

        Nothing waits for the device. NaN is wrong.

        Raises:
            InterlaceError: a result has another shape or dtype than it must have.
        """
        triples = zip(results, self._expected[variant], self._allowed[variant], strict=True)
        for i, (result, expected, allowed) in enumerate(triples):
            if result.shape != expected.shape or result.dtype != expected.dtype:
                raise InterlaceError(
                    f"{self.case.label}: result {i} must be {expected.dtype} "
                    f"{list(expected.shape)}; "
                    f"got {result.dtype} {list(result.shape)}."
                )
            # NaN compares as unequal and as not within any bound, so both forms count it as wrong.
            differs = result != expected if not allowed else ~((result - expected).abs() <= allowed)
            torch.sum(differs, dtype=torch.int64, dim=tuple(range(differs.dim())), out=wrong[i])

    def check(self, variant: int = 0) -> list[int]:
        """Make a call, wait for it, and count the wrong elements of each result. Collective."""
        self.load(variant)
        wrong = torch.zeros(
            self.result_count, dtype=torch.int64, device=group_of(self.group).device
        )
        self.count_wrong(self.run(), variant, wrong)
        group_of(self.group).synchronize()
        counts: list[int] = wrong.tolist()
        return counts


def _of_floats(function: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    """Apply a function to the tensors that are not indices."""
    return {
        name: function(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def no_value(dtype: torch.dtype) -> float:
    """Return what no call returns, and no operand has: NaN, or of integers the largest."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


_GAPS = (1, 3, 8)  # elements; 8 of two bytes keep rows where descriptors take them


def in_another_layout(tensor: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Return a copy that begins at an odd element of its memory, has gaps between its rows, or
    both, or neither. The gaps have :func:`no_value`.

    Strides stay in order, so a matrix that is contiguous along a dimension still is.
    """
    if not tensor.numel() or not tensor.dim():
        return tensor.clone()
    shift, has_gaps = int(source.random() < 0.5), source.random() < 0.5
    # Experts' weights of float8 are read where they are, and so must have no gaps.
    is_dense = tensor.dim() < 2 or (tensor.dtype == DTYPES["float8"] and tensor.dim() > 2)
    gap = source.choice(_GAPS) if has_gaps and not is_dense else 0
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    rows = tensor.permute(order)
    *outer, length = rows.shape
    memory = tensor.new_empty(shift + math.prod(outer) * (length + gap))
    memory.fill_(no_value(tensor.dtype))
    copy = memory[shift:].view(*outer, length + gap)[..., :length].copy_(rows)
    return copy.permute([order.index(dimension) for dimension in range(tensor.dim())])


# Numbers


def generator(seed: int, rank: int) -> torch.Generator:
    """Return a source of random numbers for one rank's tensors; rank -1 is for tensors that all
    ranks share.
    """
    return torch.Generator().manual_seed(1024 * seed + rank + 1)


def whole_numbers(
    source: torch.Generator, shape: Sequence[int], largest: int = 1, density: float = 1.0
) -> torch.Tensor:
    """Return whole numbers from ``-largest`` to ``largest`` in float32; all but ``density`` of them
    are 0.
    """
    values = torch.randint(-largest, largest + 1, tuple(shape), generator=source)
    return (values * (torch.rand(tuple(shape), generator=source) < density)).float()


def thin(terms: int, kept: int = 24) -> float:
    """Return the density at which a sum of ``terms`` products keeps about ``kept`` of them, so that
    it stays exact in bfloat16.
    """
    return min(1.0, kept / max(1, terms))


def gradients(
    outputs: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the gradients of ``sum <output, upstream>`` by every leaf; zeros if there is none."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, upstream, strict=True)
        if output.requires_grad
    ]
    grads = torch.autograd.grad(
        [output for output, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
