"""Two ways to add the pass to ``torch.compile``, as a backend or as a pass of Inductor; and
``explain``, which reports what it does with a model.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from interlace import environment
from interlace.comm import default_device_type
from interlace.comm.host.identity import PACKAGE, digest_of, identity
from interlace.comm.runtime.interpreter import interpreting
from interlace.compile import foreign, in_place
from interlace.compile.choice import (
    nodes_of,
    ranks_of_a_node,
    replaced_products,
    require_common_profile,
    traced_sizes,
    uneven_groups,
)
from interlace.compile.direct import call_past_dispatcher
from interlace.compile.findings import LeftAlone, Report, recording
from interlace.compile.rewrite import fuse
from interlace.compile.summary import summary
from interlace.gemm import invariance
from interlace.registry import operators

_SLOT = "post_grad_custom_pre_pass"


class InductorPass(CustomGraphPass):
    """The pass as Inductor takes it, in the slot ``post_grad_custom_pre_pass``.

    It runs after autograd and before Inductor reuses memory.

    Attributes:
        first: Another pass for this slot, which runs before this one; or None.
        autotune, merge_products: Whether operators measure their implementations at their first
            calls, and whether products with the same input become one kernel; see
            :func:`interlace.compile.fuse`.

    Example:
        >>> torch._inductor.config.post_grad_custom_pre_pass = interlace.compile.InductorPass()
    """

    def __init__(
        self,
        first: Callable[[Graph], None] | None = None,
        *,
        autotune: bool = True,
        merge_products: bool = True,
    ) -> None:
        self.first, self.autotune, self.merge_products = first, autotune, merge_products
        self.is_on = True

    def __call__(self, graph: Graph) -> None:
        """Fuse products and collectives where it is faster; see :func:`interlace.compile.fuse`."""
        if self.first is not None:
            self.first(graph)
        if self.is_on:
            call_past_dispatcher()
            summary.count(fuse(graph, autotune=self.autotune, merge_products=self.merge_products))
            in_place.place_rows(graph)

    def uuid(self) -> Any:
        """Return the pass's part of the key by which Inductor caches compiled graphs.

        It covers the package, its libraries, the GPUs, the settings and the groups. None, which
        turns the cache off, if the first pass has no such key.
        """
        settings: Any = "off"
        if self.is_on:
            summary.expect()
            settings = (_fingerprint(), self.autotune, self.merge_products)
        if self.first is None:
            return settings
        # A first pass without a key could change its output between runs, and a cached graph would
        # then be the wrong one; so its missing key must disable caching here, too.
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if first is None else (first, settings)


def backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph by Inductor with the pass: ``torch.compile(model, backend=backend)``.

    ``mode`` and ``options`` of ``torch.compile`` mean what they mean with Inductor. Two options are
    ours: ``options={"interlace.autotune": False}`` keeps operators from measuring their
    implementations at the first calls, and ``{"interlace.merge_products": False}`` leaves products
    of up to 64 rows with the same input to a kernel each. Results are those of the uncompiled model
    within the operators' rounding; every rank of a group must compile the same program. Nothing is
    sent when compiling.
    """
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    autotune = bool(patches.pop("interlace.autotune", True))
    merge_products = bool(patches.pop("interlace.merge_products", True))
    # A pass in ``options`` replaces the one that is installed globally, as it does in Inductor.
    first = _single_pass(patches[_SLOT]) if _SLOT in patches else _installed_pass()
    patches[_SLOT] = InductorPass(first, autotune=autotune, merge_products=merge_products)
    compiled: Any = compile_fx(model, list(inputs), config_patches=patches)
    return cast(Callable[..., Any], compiled)


def eager_backend(model: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Apply the pass and run the graphs operator by operator, without Inductor.

    It compiles at once, so it suits tests and machines on which Inductor does not run. The pass
    sees the forward and the backward graph when the forward graph is compiled, even if no backward
    pass follows.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # The partitioner is the only hook that has both graphs at once, so the pass runs here for
    # training graphs and in ``infer`` for graphs without gradients.
    def partition(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = min_cut_rematerialization_partition(*args, **kwargs)
        return _fused(forward), _fused(backward)

    def infer(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return cast(Callable[..., Any], make_boxed_func(_fused(graph_module).forward))

    def run(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return cast(Callable[..., Any], make_boxed_func(graph_module.forward))

    compiler = aot_autograd(
        fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=partition
    )
    return compiler(model, inputs)


def explain(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Report:
    """List a model's collectives, what the pass does with each of them, and why.

    The model runs forward once, with the fused operators, so every rank of its groups must call
    this function. If inputs or parameters require gradients, the backward graph is analysed but
    not run. Like ``torch._dynamo.explain`` this resets ``torch.compile`` before and after: models
    that were compiled before are compiled again at their next call.

    Args:
        model: A module or function that is not compiled yet.
        inputs: The positional arguments of the model's call.
        keywords: The keyword arguments of the model's call.

    Returns:
        A :class:`Report` with a :class:`Finding` for each collective, and for products that became
        one kernel; the findings of a forward graph precede those of its backward graph.

    Example:
        >>> print(interlace.compile.explain(block, x))
        2 collectives: 1 fused, 1 left alone
        forward: all_reduce of [4096, 8192] (all_reduce in mlp.down) fused by gemm_all_reduce:
            measured on ...
        backward: all_reduce of [4096, 8192] (all_reduce_1) left alone: what goes into it is add_3,
            not a product
    """
    torch.compiler.reset()
    try:
        with recording() as findings:
            torch.compile(model, backend=eager_backend)(*inputs, **keywords)
    finally:
        torch.compiler.reset()
    return Report(tuple(findings))


def _fused(graph_module: GraphModule) -> GraphModule:
    summary.count(fuse(graph_module.graph))
    graph_module.recompile()
    return graph_module


@contextlib.contextmanager
def installed(*, autotune: bool = True) -> Iterator[None]:
    """Make Inductor, the default backend of ``torch.compile``, run the pass within this context.

    Graphs are compiled at their first call, and backward graphs at the first backward pass, so the
    context must enclose both.

    Args:
        autotune: As of :class:`InductorPass`.

    Example:
        >>> with interlace.compile.installed():
        ...     torch.compile(model)(x).sum().backward()
    """
    from torch._inductor import config

    with config.patch({_SLOT: InductorPass(_installed_pass(), autotune=autotune)}):
        yield


_permanent: InductorPass | None = None


def install(*, autotune: bool = True) -> None:
    """Make Inductor, the default backend of ``torch.compile``, run the pass in this process.

    For programs that name no backend, or refuse names that they do not know. What is in Inductor's
    slot already runs first. A second call does nothing.

    Args:
        autotune: As of :class:`InductorPass`.

    Example:
        >>> interlace.compile.install()
        >>> torch.compile(model)(x)
    """
    from torch._inductor import config

    global _permanent
    if _permanent is None:
        _permanent = InductorPass(_installed_pass(), autotune=autotune)
        setattr(config, _SLOT, _permanent)


def uninstall() -> None:
    """Undo :func:`install`; graphs that were compiled stay as they are."""
    from torch._inductor import config

    global _permanent
    if _permanent is None:
        return
    if getattr(config, _SLOT) is _permanent:
        setattr(config, _SLOT, _permanent.first)
    else:
        # Another pass has taken the slot, and may call this one.
        _permanent.is_on = False
    _permanent = None
    summary.name_program("torch.compile", "torch.compile")


def installed_key() -> str:
    """Return what the decisions of the pass of :func:`install` depend on, for programs that keep
    compiled graphs under keys of their own; empty without it, and in a process that has not used
    its GPU.
    """
    # What compiles has a GPU in use. Nothing else may start CUDA, which takes memory of the GPU.
    is_idle = torch.cuda.is_available() and not torch.cuda.is_initialized()
    if _permanent is None or is_idle:
        return ""
    return repr((_fingerprint(), _permanent.autotune, _permanent.merge_products))


def _installed_pass() -> Any:
    from torch._inductor import config

    return _single_pass(getattr(config, _SLOT))


def _single_pass(passes: Any) -> Any:
    """Return the content of Inductor's slot as a single pass, or None if the slot is empty."""
    # Since torch 2.12 the slot may hold a list of passes.
    if isinstance(passes, (list, tuple)):
        return _Sequence(passes) if passes else None
    return passes


class _Sequence(CustomGraphPass):
    """Several passes, run one after the other."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for pass_ in self._passes:
            pass_(graph)

    def uuid(self) -> Any:
        ids = [
            pass_.uuid() if isinstance(pass_, CustomGraphPass) else None for pass_ in self._passes
        ]
        return None if None in ids else tuple(ids)


def _fingerprint() -> str:
    """Return a hash of everything except the graph that the pass's decisions depend on."""
    # Decisions depend on many modules, the tuned tables, the GPU and environment variables. The
    # hash covers the whole package rather than a list of modules that somebody must maintain: a
    # key that changes too often costs a compilation, one that changes too rarely a wrong graph.
    device = torch.device(default_device_type())
    devices = (
        [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if device.type == "cuda"
        else [device]
    )
    for each in devices:
        # The profile that decides, which a graph that is found need not ask for.
        with contextlib.suppress(LeftAlone):
            require_common_profile(each)
    facts = (
        digest_of(PACKAGE),
        [identity(device) for device in devices],
        device.type,
        interpreting(),
        ranks_of_a_node(device),
        _groups(device),
        uneven_groups(),
        traced_sizes(),
        replaced_products(device.type),
        foreign.registered(),
        # Another package may add operators, and implementations to one.
        [
            (name, [implementation.name for implementation in operator.implementations])
            for name, operator in sorted(operators().items())
        ],
        environment.settings(),
        invariance.is_enabled(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _groups(device: torch.device) -> list[tuple[str, list[int], int]]:
    """Return the names and ranks of this process's groups, and on how many nodes these are."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.distributed_c10d import _world

    # A group that this rank is no member of is an integer there, GroupMember.NON_GROUP_MEMBER.
    return sorted(
        (group.group_name, sorted(ranks), nodes_of(group.group_name, device))
        for group, ranks in _world.pg_group_ranks.items()
        if not isinstance(group, int)
    )
