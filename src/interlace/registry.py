"""Operators and their implementations: one declaration each, which everything else reads.

An operator is declared once, by a class with the decorator :func:`operator`. Dispatch,
``interlace.explain``, benchmarks, tuning, the pass for ``torch.compile`` and the tests go through
the registry; none of them names an operator. The registry is open: a package of your own declares
an operator in the same way, and names the module that does it as an entry point of the group
``interlace.operators``, so that the command line finds it.

Nothing here imports torch.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from interlace.errors import ArgumentError

ENTRY_POINTS = "interlace.operators"
"""The group of entry points by which other packages make their operators known."""

BATCH_INVARIANT = "batch_invariant"
"""The value of ``impl`` that chooses among batch-invariant implementations. Ranks agree on it as on
any other.
"""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operator, which a caller asks for by ``impl=name``.

    Attributes:
        name: A word with the same meaning in every operator that has this implementation.
        alias: Another word by which callers may ask for it, or None.
        summary: What it does, in half a sentence.
        run: Runs a call that is not refused, and returns its result, or a ``DeferredCall`` that
            ``Group.perform`` runs. It returns None if it turns out to be impossible for a call that
            did not ask for it by name.
        refusal: Returns what a call must have for this implementation and has not, or None.
        schedule: How it computes its product, for predictions of its time (see
            :mod:`interlace.costs.time`): ``"whole"``, one product of the library; ``"by_rank"``,
            one after another for each rank's rows; ``"tiled"``, the tiles of its own kernel;
            ``"by_address"``, a kernel that reads the weight once, by its rows' addresses;
            ``"to_all"``, one product of the library, which an all-reduce sends to all peers; and of
            layers of experts, which rows travel.
        is_stock: Whether it is a pair of PyTorch's own operators, without a kernel of Interlace.
        spans_nodes: Whether it runs on groups of several nodes, whose ranks do not all share
            memory.
        is_batch_invariant: Whether a row's result has the same bits in every batch, if the call
            asks for that; see :mod:`interlace.gemm.invariance`.
        config_type: Its configuration, where that is another one than the operator's own kernel
            has; else None.
        is_predictable: Returns whether its predicted time holds for such a call. Where it does not,
            only a caller or a table takes the implementation.
        host_us: Microseconds that the host takes in an eager call, where they are several times
            those of the others; no time of a GPU in a choice is less (decision record 0014).
        reads_in_place: Whether peers read rows of a symmetric tensor where they lie, so that a call
            with such rows takes less than predicted by the time to stage them.
        reservation: Returns the symmetric memory that a call needs on each rank, as an
            :class:`interlace.comm.groups.reservation.Reservation`; None where it is not known. It
            is given the call's sizes: around a product, an
            :class:`interlace.gemm.call.GemmCall`, whose ranks need not exist
            (:class:`interlace.gemm.reservations.Ranks`) and whose tensors need no values.
        backward: Runs the backward pass of a call, of operators whose backward pass depends on the
            implementation; its arguments are the operator's own. None where it does not, or where
            this implementation is for calls without gradients.
    """

    name: str
    summary: str
    run: Callable[[Any], Any]
    refusal: Callable[[Any], str | None] = lambda _: None
    schedule: Literal[
        "whole", "by_rank", "by_peer", "tiled", "by_address", "by_slot", "by_token", "to_all"
    ] = "whole"
    is_stock: bool = False
    spans_nodes: bool = False
    is_batch_invariant: bool = False
    config_type: type | None = None
    is_predictable: Callable[[Any], bool] = lambda _: True
    host_us: float = 0.0
    reads_in_place: bool = False
    reservation: Callable[[Any], Any] = lambda _: None
    backward: Callable[..., Any] | None = None
    alias: str | None = None


class Operator(abc.ABC):
    """A computation and the collective that depends on it.

    Attributes:
        computation: The computation, such as ``"gemm"``.
        collective: The collective, such as ``"reduce_scatter"``.
        collective_first: Whether the collective feeds the computation instead of taking its result.
        pattern: The computation and the collective in their order, such as ``("gemm",
            "reduce_scatter")``: what the pass for ``torch.compile`` puts the operator in place of.
            Empty for an operator that declares a name of its own and no pattern.
        name: The operator's name, as in ``torch.ops.interlace``; by default its pattern's words.
        sizes: The names of the sizes by which entries of the tuned table are found.
        config_type: The fused kernel's configuration; None if there is nothing to configure. Other
            implementations may have one of their own.
        has_public_function: Whether users call it as ``interlace.<name>``; some operators are made
            by the pass for ``torch.compile`` only.
        sum_name: The name of its variant for a sum of several products, which adds them chunk by
            chunk; empty if there is none.
        vector_name: The name of its public function for few rows, which takes a vector, too; empty
            if there is none.
        command_module: The name of the module whose ``add_commands(operator, bench_app, tune_app)``
            adds its ``interlace bench`` and ``interlace tune``; empty if it has neither.
        choosers: The values of ``impl`` by which the operator chooses an implementation itself:
            ``"auto"``; ``"measured"`` if it can measure at the first call of a kind; and
            ``"batch_invariant"`` if it has batch-invariant implementations.
        implementations: The first one that takes any call comes first.
    """

    computation: ClassVar[str]
    collective: ClassVar[str]
    collective_first: ClassVar[bool] = False
    pattern: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]
    config_type: ClassVar[type | None] = None
    has_public_function: ClassVar[bool] = True
    sum_name: ClassVar[str] = ""
    vector_name: ClassVar[str] = ""
    command_module: ClassVar[str] = ""
    choosers: ClassVar[tuple[str, ...]] = ("auto",)
    implementations: ClassVar[tuple[Implementation, ...]]

    def __init_subclass__(cls) -> None:
        # Base classes of several operators have no collective yet.
        if hasattr(cls, "collective") and not hasattr(cls, "name"):
            steps = (cls.computation, cls.collective)
            cls.pattern = steps[::-1] if cls.collective_first else steps
            cls.name = "_".join(cls.pattern)

    @abc.abstractmethod
    def choose(self, **call: Any) -> Any:
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name.

        Raises:
            ArgumentError: The operator does not explain its choice.
        """
        raise ArgumentError(
            f"explain: operator must be one that explains its choice; got {self.name!r}, whose "
            "declaration has neither argument_names nor explain."
        )

    def explain(self, *arguments: Any, world_size: int, **options: Any) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason.

        An operator with :meth:`reservations` also takes the option ``lacking``: by the names of
        implementations that do not fit under the limit of symmetric memory, what they need.

        Raises:
            ArgumentError: The operator would refuse the arguments.
        """
        raise NotImplementedError

    def reservations(
        self, *arguments: Any, world_size: int, granularity: int, **options: Any
    ) -> Mapping[str, Any]:
        """Return the symmetric memory that each implementation needs for a call on one node, by
        name, as ``Implementation.reservation`` does; empty if the operator does not say.

        Args:
            arguments, options: Those of :meth:`explain`.
            world_size: Number of ranks.
            granularity: Bytes of which every allocation is a multiple.
        """
        sized = self.sized(*arguments, world_size=world_size, **options)
        if sized is None:
            return {}
        return {
            implementation.name: implementation.reservation(sized)
            for implementation in self.implementations
        }

    def sized(self, *arguments: Any, world_size: int, **options: Any) -> Any:
        """Return the sizes of a call on one node for ``Implementation.reservation``, once its
        arguments are validated; None if the operator has none.

        Args:
            arguments, options: Those of :meth:`explain`.
            world_size: Number of ranks.
        """
        return None

    def timed_call(self, result: Mapping[str, Any]) -> Any:
        """Return the call whose times a benchmark's result holds, for predictions of time; None if
        the operator has none, or none of such a call.

        Operators around one product need none of their own: their sizes are the product's.
        """
        return None

    def timed_tile(self, implementation: str, call: Any) -> tuple[int, int]:
        """Return the rows and columns of the tiles that an implementation's default configuration
        has for a call of :meth:`timed_call`.
        """
        raise NotImplementedError

    @property
    def config_types(self) -> tuple[type, ...]:
        """Return the types of configurations that a call may have."""
        kinds = (
            self.config_type,
            *(implementation.config_type for implementation in self.implementations),
        )
        return tuple(kind for kind in kinds if kind is not None)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the values of ``impl``."""
        return (*self.choosers, *(implementation.name for implementation in self.implementations))

    def implementation(self, name: str) -> Implementation:
        """Return the implementation of that name or alias.

        Raises:
            ArgumentError: There is none.
        """
        for implementation in self.implementations:
            # None would be the alias of one that has no alias.
            if name is not None and name in (implementation.name, implementation.alias):
                return implementation
        raise ArgumentError(
            f"{self.name}: impl must be one of {', '.join(self.words)}; got {name!r}."
        )

    def is_pair(self, name: str) -> bool:
        """Return whether an implementation is what a program without Interlace can run.

        ``"unfused"`` always is, also where an operator leaves it to the unchanged program.
        """
        return name == "unfused" or self.implementation(name).is_stock

    def pairs_among(self, names: Iterable[str]) -> set[str]:
        """Return the names of those implementations that are such pairs."""
        return {name for name in names if self.is_pair(name)}

    def preferred_among(self, names: Iterable[str]) -> set[str]:
        """Return the names of the pairs that come before what is hardly faster.

        A pair that declares a time of the host has nothing over others: an eager program pays for
        that time.
        """
        busy = {
            implementation.name for implementation in self.implementations if implementation.host_us
        }
        return self.pairs_among(names) - busy

    def eager_us(self, times_us: Mapping[str, float]) -> dict[str, float]:
        """Return times in which a GPU runs implementations, each at least the host's.

        Args:
            times_us: Microseconds on the GPU, by implementation.
        """
        host_us = {
            implementation.name: implementation.host_us for implementation in self.implementations
        }
        return {name: max(us, host_us.get(name, 0.0)) for name, us in times_us.items()}

    def refusal(self, name: str, terms: Any) -> str | None:
        """Return what a call must have for an implementation and has not, or None.

        Args:
            name: The implementation.
            terms: The properties of the call; None if no implementation refuses any.
        """
        is_taken = name == "unfused" or terms is None
        return None if is_taken else self.implementation(name).refusal(terms)

    def spans_nodes(self, name: str) -> bool:
        """Return whether an implementation runs on groups of several nodes."""
        return name == "unfused" or self.implementation(name).spans_nodes

    def advice(self, terms: Any, nodes: int) -> str:
        """Return what to take in the place of an implementation that refuses a call, as a sentence.

        Args:
            terms: The properties of the call, which nothing that is named refuses.
            nodes: Number of nodes that the ranks are on.
        """
        able = [
            implementation.name
            for implementation in self.implementations
            if (nodes == 1 or implementation.spans_nodes)
            and self.refusal(implementation.name, terms) is None
        ]
        named = [self.choosers[0], *able[:1], *(name for name in able[1:] if name == "unfused")]
        return f"Take impl={_or([repr(name) for name in named])}."

    def require_nodes(
        self, name: str, nodes: int, terms: Any = None, *, is_invariant: bool = False
    ) -> None:
        """Refuse an implementation that needs shared memory on a group of several nodes.

        Args:
            name: The implementation, or a value of ``impl`` that chooses one.
            nodes: Number of nodes that the ranks of the group are on.
            terms: The properties of the call; None if no implementation refuses any.
            is_invariant: Whether the call must be batch-invariant.

        Raises:
            ArgumentError: It cannot run there.
        """
        if nodes == 1 or name in self.choosers or self.spans_nodes(name):
            return
        if is_invariant:
            advice = "Call it outside of interlace.batch_invariant()."
            invariant = [
                implementation
                for implementation in self.implementations
                if implementation.is_batch_invariant
            ]
            able = [
                implementation.name for implementation in invariant if implementation.spans_nodes
            ]
            if able:
                advice = f"Take impl={_or([repr(name) for name in able])}."
        else:
            advice = self.advice(terms, nodes)
        raise ArgumentError(
            f"{self.name}: impl={name!r} must have ranks that share memory; they are on {nodes} "
            f"nodes. {advice}"
        )

    def validate_options(self, impl: str, config: object) -> None:
        """Refuse an ``impl`` that does not exist, and a ``config`` of another operator or kernel.

        Raises:
            ArgumentError: There is no such implementation, or ``config`` is neither None nor a
                configuration of this operator; or ``impl`` names a kernel that has another one.
        """
        named = None if impl in self.choosers else self.implementation(impl)
        if config is not None and not isinstance(config, self.config_types):
            expected = _or([kind.__name__ for kind in self.config_types] or ["None"])
            raise ArgumentError(
                f"{self.name}: config must be of type {expected}; got {type(config).__name__}."
            )
        if config is None or named is None:
            return
        is_own_kernel = named is self.implementations[0]
        kind = named.config_type or (self.config_type if is_own_kernel else None)
        if kind is not None and not isinstance(config, kind):
            raise ArgumentError(
                f"{self.name}: config of impl={impl!r} must be of type {kind.__name__}; got "
                f"{type(config).__name__}."
            )


def _or(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


AnyOperator = TypeVar("AnyOperator", bound=type[Operator])

_operators: dict[str, Operator] = {}


def operator(declaration: AnyOperator) -> AnyOperator:
    """Register the operator that a subclass of :class:`Operator` declares.

    Raises:
        ArgumentError: Another operator has that name.
    """
    existing = _operators.get(declaration.name)
    if existing is not None and type(existing).__qualname__ != declaration.__qualname__:
        raise ArgumentError(f"an operator's name must be new; got {declaration.name!r} again.")
    _operators[declaration.name] = declaration()
    return declaration


def operators() -> Mapping[str, Operator]:
    """Return all operators that have been declared, by name; Interlace's own are always there."""
    importlib.import_module("interlace.operators")
    return MappingProxyType(_operators)


def find_operator(name: str) -> Operator | None:
    """Return the operator of that name, or whose public function for few rows has it; None if there
    is none.
    """
    known = operators()
    if name in known:
        return known[name]
    return next(
        (declaration for declaration in known.values() if name == declaration.vector_name != ""),
        None,
    )


def operator_named(name: str) -> Operator:
    """Return the operator of that name, or whose public function for few rows has it.

    Raises:
        ArgumentError: There is none.
    """
    declaration = find_operator(name)
    if declaration is None:
        known = ", ".join(sorted(operators()))
        raise ArgumentError(f"operator must be one of {known}; got {name!r}.")
    return declaration


def operator_matching(*pattern: str) -> Operator:
    """Return the operator that takes the place of a computation and a collective.

    Raises:
        KeyError: There is none.
    """
    for declaration in operators().values():
        if declaration.pattern == pattern:
            return declaration
    raise KeyError(pattern)


def load_entry_points() -> None:
    """Import the modules by which installed packages declare operators of their own.

    What cannot be loaded is passed over, with a warning that names the package and the reason.
    """
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        before = dict(_operators)
        try:
            entry_point.load()
        except Exception as error:  # a module of another package raises anything
            # Some of its operators may be declared, without what follows them in its modules.
            _operators.clear()
            _operators.update(before)
            package = entry_point.dist
            name = "a package" if package is None else f"the package {package.name}"
            warnings.warn(
                f"interlace: {name} must be whole, to add operators; its entry point "
                f"{entry_point.name!r} ({entry_point.value}) raised {type(error).__name__}: "
                f"{error}. Interlace goes on without it. Reinstall or uninstall that package.",
                RuntimeWarning,
                stacklevel=2,
            )
