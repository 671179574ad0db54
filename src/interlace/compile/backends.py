"""Ways to let the pass into ``torch.compile``: a backend, or a pass of Inductor's."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from interlace.comm import default_device_type
from interlace.comm.identity import PACKAGE, digest_of, identity
from interlace.comm.interpreter import interpreting
from interlace.compile.choice import ranks_of_a_machine
from interlace.compile.rewrite import fuse

_SLOT = "post_grad_custom_pre_pass"


class InductorPass(CustomGraphPass):
    """The pass for Inductor's ``post_grad_custom_pre_pass``: after autograd, before Inductor reuses
    any memory.

    Args:
        first: another pass of that slot, which runs before this one.

    Example:
        >>> torch._inductor.config.post_grad_custom_pre_pass = interlace.compile.InductorPass()
    """

    def __init__(self, first: Callable[[Graph], None] | None = None) -> None:
        self._first = first

    def __call__(self, graph: Graph) -> None:
        """Fuse what is worth it; see :func:`interlace.compile.fuse`."""
        if self._first is not None:
            self._first(graph)
        fuse(graph)

    def uuid(self) -> Any:
        """What Inductor's cache of compiled graphs must tell apart: the package, its libraries, the
        GPUs, settings, groups.
        """
        if self._first is None:
            return _fingerprint()
        first = self._first.uuid() if isinstance(self._first, CustomGraphPass) else None
        return None if first is None else (first, _fingerprint())


def backend(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Inductor with the pass: ``torch.compile(model, backend=interlace.compile.backend)``.

    ``mode`` and ``options`` of ``torch.compile`` mean what they mean with Inductor. Results are
    those of the uncompiled model within the operators' rounding; every rank of a group must compile
    the same program. Nothing is sent when compiling.
    """
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    patches[_SLOT] = InductorPass(_one(patches[_SLOT]) if _SLOT in patches else _installed_pass())
    compiled: Any = compile_fx(model, list(inputs), config_patches=patches)
    return cast(Callable[..., Any], compiled)


def eager_backend(model: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The pass alone: the graphs run operator by operator. It compiles in no time; to test, or
    where Inductor does not run.

    Forward and backward graph are both seen when the forward one is compiled, whether or not a
    backward pass follows.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

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


def _fused(graph_module: GraphModule) -> GraphModule:
    fuse(graph_module.graph)
    graph_module.recompile()
    return graph_module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within it, Inductor (``torch.compile``'s own backend) fuses, too.

    Graphs are compiled at their first call, and backward graphs at the first backward pass: those
    are what it must enclose.

    Example:
        >>> with interlace.compile.installed():
        ...     torch.compile(model)(x).sum().backward()
    """
    from torch._inductor import config

    with config.patch({_SLOT: InductorPass(_installed_pass())}):
        yield


def _installed_pass() -> Any:
    from torch._inductor import config

    return _one(getattr(config, _SLOT))


def _one(passes: Any) -> Any:
    """What Inductor's slot holds as one pass, or None: since torch 2.12 it may be several."""
    if isinstance(passes, (list, tuple)):
        return _Sequence(passes) if passes else None
    return passes


class _Sequence(CustomGraphPass):
    """Several passes, one after the other."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self._passes:
            each(graph)

    def uuid(self) -> Any:
        ids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._passes]
        return None if None in ids else tuple(ids)


def _fingerprint() -> str:
    """A hash of everything that the pass's decisions depend on, beside the graph.

    Decisions are made in many modules, by tuned tables, for a GPU, and by what the environment
    says. So the whole package counts, rather than a list of modules that somebody must keep: a key
    that changes too often costs a compilation, one that does not change enough a wrong graph.
    """
    device = torch.device(default_device_type())
    devices = (
        [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if device.type == "cuda"
        else [device]
    )
    settings = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("INTERLACE_")
    }
    facts = (
        digest_of(PACKAGE),
        [identity(each) for each in devices],
        device.type,
        interpreting(),
        ranks_of_a_machine(device),
        _groups(),
        settings,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _groups() -> list[tuple[str, list[int]]]:
    """Names and ranks of this process's groups."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.distributed_c10d import _world

    return sorted(
        (group.group_name, sorted(ranks)) for group, ranks in _world.pg_group_ranks.items()
    )
