"""Parameters of which every rank of a group holds a part, and gradients that say so to torch.

``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` decide by gradients. A rank that saw
its own parts alone would scale, or skip a step, where its peers do not, and parameters that all
ranks hold would drift apart. So the ``grad`` of a part is of a class for which the functions that
these utilities call count all ranks' parts:

- ``torch.linalg.vector_norm`` is the norm of the whole gradient. Ranks exchange their parts of it
  once, when the total of all gradients is computed;
- the check for infinities finds those of every rank.

Any other operation sees a plain tensor, and returns one: ``grad.norm()`` is of this rank's part.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

from interlace.comm import default_name, rank_and_size
from interlace.errors import ArgumentError


class Sharing(NamedTuple):
    """The ranks that hold the parts of a parameter.

    Attributes:
        group: Their process group; None is the default one.
        absent: A rank that holds no part of any such parameter, and so would not take part in what
            the others exchange; None if there is no such rank.
    """

    group: dist.ProcessGroup | None
    absent: int | None = None


def mark(parameter: nn.Parameter, sharing: Sharing) -> bool:
    """Let a parameter's gradients be parts of a whole, for torch's utilities.

    The parameter stays the same object. Nothing is done to a parameter of a class that is neither
    torch's nor FSDP2's, such as a fake tensor.

    Returns:
        False if the parameter was marked already, or is of another class.
    """
    return _become(parameter, _Parameter, sharing, nn.Parameter)


def is_distributed(tensor: object) -> bool:
    """Tell if a tensor is a DTensor, without importing what takes longer than this package."""
    return hasattr(tensor, "full_tensor")


def _become(tensor: Any, kind: Any, sharing: Sharing, plain: type) -> bool:
    """Make a tensor one of ``kind`` if its class is ``plain`` or DTensor; tell if it was."""
    base: Any = type(tensor)
    is_new = base is plain or (base.__name__ == "DTensor" and is_distributed(tensor))
    if is_new:
        tensor.__class__ = _class(kind, base)
    if isinstance(tensor, kind):
        tensor.sharing = sharing
    return is_new


@functools.cache
def _class(kind: Any, base: Any) -> Any:
    """Return the class of tensors of one of the kinds below that are ``base`` otherwise."""
    metaclass: Any = _Among if kind is _Parameter else type(base)
    made: Any = metaclass(kind.__name__, (kind, base), {"__module__": __name__})
    if base is torch.Tensor and kind is _Gradient:
        # As DTensor does: utilities take the fast path for tensors whose type is in this list.
        _foreach_utils._foreach_supported_types.append(made)
    return made


class _Among(type(nn.Parameter)):  # type: ignore[misc]
    """Type of parameters' types: each is found where torch looks for the type that it is made from.

    Tracers and optimizers ask whether a parameter's type is among a few. They would refuse another
    one, or take slower loops for it.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[2]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[2])


_GRAD: Any = torch.Tensor.grad


def _mark_itself(parameter: Any) -> None:
    """Mark the gradient that autograd knows of a part."""
    _become(_GRAD.__get__(parameter), _Gradient, parameter.sharing, torch.Tensor)


class _Parameter:
    """A part of a parameter, as this rank holds it.

    Attributes:
        last: What ``grad`` gave last, while it is a tensor of the same memory.
    """

    sharing: Sharing
    last: _Gradient | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient. It is marked when it is read, so however it came here."""
        grad: Any = _GRAD.__get__(self)
        if grad is not None and not isinstance(grad, _Gradient):
            if type(grad) is not torch.Tensor or grad.is_sparse or grad.requires_grad:
                _become(grad, _Gradient, self.sharing, torch.Tensor)
            elif TracingContext.try_get() is not None:
                # Dynamo's guards see the gradient that autograd knows, in later steps, too.
                _mark_itself(self)
                self.register_post_accumulate_grad_hook(_mark_itself)  # type: ignore[attr-defined]
            else:
                # Marked is a tensor of the same memory. Autograd adds to the plain one, also under
                # fake tensors, which know no other class.
                if self.last is None or self.last.original is not grad:
                    last: Any = grad.detach()
                    _become(last, _Gradient, self.sharing, torch.Tensor)
                    last.original, self.last = grad, last
                grad = self.last
        result: torch.Tensor | None = grad
        return result

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.last = None
        original = value.original if isinstance(value, _Gradient) else None
        _GRAD.__set__(self, value if original is None else original)

    @grad.deleter
    def grad(self) -> None:
        self.last = None
        _GRAD.__delete__(self)

    def _unmarked(self: Any) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            # The ranks stay the same ones; a process group cannot be copied.
            copied = memo[id(self)] = copy.deepcopy(self._unmarked())
            mark(copied, self.sharing)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is saved can be loaded without this package, and by torch.load(weights_only=True).
        return self._unmarked().__reduce_ex__(protocol)


class _Exchanged:
    """Base of the tensors that stand for those of all ranks in some functions."""

    __slots__ = ()
    sharing: Sharing

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls._call(func, args, kwargs or {})

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_unmarked(self), memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _unmarked(self).__reduce_ex__(protocol)


class _Gradient(_Exchanged):
    """A gradient of a part.

    Attributes:
        original: The tensor of the same memory that autograd knows; None if it is this one.
    """

    __slots__ = ()
    original: torch.Tensor | None = None

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.linalg.vector_norm:
            return _vector_norm(*args, **kwargs)
        if func is torch._foreach_norm:
            return _foreach_norm(*args, **kwargs)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _check_and_unscale(*args, **kwargs)
        if func is torch._foreach_mul_:
            return _foreach_mul(*args, **kwargs)
        if func == _SET_DATA and args[0].original is not None:
            args[0].original.data = args[1]
        result = func(*args, **kwargs)
        if func in _SAME_GRADIENT:
            _become(result, _Gradient, args[0].sharing, torch.Tensor)
        return result


_DATA: Any = torch.Tensor.data
_SET_DATA = _DATA.__set__

_SAME_GRADIENT = {
    torch.Tensor.detach,
    _DATA.__get__,
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.coalesce,
    torch.Tensor._values,
}
"""Functions between a parameter's ``grad`` and those above. An optimizer's state comes from others,
and so stays a plain tensor.
"""


class _Norm(_Exchanged):
    """Norms, some of them of gradients of parts, before ranks exchange them.

    Attributes:
        parts: For each norm, that of this rank's tensor, and who holds the other parts if it is one
            of a part.
        order: Of all these norms.
    """

    __slots__ = ()
    parts: list[tuple[torch.Tensor, Sharing | None]]
    order: float

    @classmethod
    def _call(cls, func: Any, args: Any, kwargs: Any) -> Any:
        # First the operations by which torch computes a total norm.
        first = args[0] if args else None
        if func is torch.Tensor.to and isinstance(first, _Norm):
            parts = [(norm.to(*args[1:], **kwargs), sharing) for norm, sharing in first.parts]
            return _norm(parts, first.order, first.dim())  # type: ignore[attr-defined]
        if func is torch.stack and len(args) == 1 and not kwargs:
            orders = {norm.order for norm in args[0] if isinstance(norm, _Norm)}
            if len(orders) == 1 and all(norm.dim() == 0 for norm in args[0]):
                parts = []
                for norm in args[0]:
                    parts += norm.parts if isinstance(norm, _Norm) else [(norm, None)]
                return _norm(parts, orders.pop(), 1)
        if func is torch.linalg.vector_norm and isinstance(first, _Norm):
            order, options = _arguments(*args[1:], **kwargs)
            if order == first.order and not options.keys() - {"dtype"}:
                return _total(first.parts, order, options.get("dtype"))
        # Any other function gets the norms of whole gradients, one by one.
        args, kwargs = pytree.tree_map_only(_Norm, _whole, (args, kwargs))
        return func(*args, **kwargs)


def _norm(parts: list[tuple[torch.Tensor, Sharing | None]], order: float, dimensions: int) -> Any:
    """Make a :class:`_Norm`, a scalar or one-dimensional."""
    # Its own values are seen only by what does not ask its class.
    norms: Any = torch.stack(
        [norm.to_local() if is_distributed(norm) else norm for norm, _ in parts]  # type: ignore[attr-defined]
    )
    norms = norms if dimensions else norms[0]
    norms.__class__ = _class(_Norm, torch.Tensor)
    norms.parts, norms.order = parts, order
    return norms


def _arguments(ord: float = 2.0, *positional: Any, **options: Any) -> tuple[float, dict[str, Any]]:
    """Return a norm's order, and what else it was called with."""
    return float(ord), {**options, **({"positional": positional} if positional else {})}


def _vector_norm(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute ``torch.linalg.vector_norm`` of a gradient of a part."""
    norm = torch.linalg.vector_norm(tensor, *args, **kwargs)
    order, options = _arguments(*args, **kwargs)
    # Norms of rows or columns are of this rank's part.
    if options.keys() - {"dtype"}:
        return norm
    return _norm([(norm, tensor.sharing)], order, 0)


def _foreach_norm(tensors: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Compute ``torch._foreach_norm`` of tensors some of which are gradients of parts."""
    norms: list[Any] = [None] * len(tensors)
    for indices in _kinds(tensors):
        some = torch._foreach_norm([tensors[i] for i in indices], *args, **kwargs)
        for i, norm in zip(indices, some, strict=True):
            norms[i] = norm
    order, _ = _arguments(*args, **kwargs)
    return tuple(
        _norm([(norm, tensor.sharing)], order, 0) if isinstance(tensor, _Gradient) else norm
        for tensor, norm in zip(tensors, norms, strict=True)
    )


def _foreach_mul(tensors: Any, factor: Any) -> Any:
    """Compute ``torch._foreach_mul_``; ``factor`` may be one for all, or a list."""
    for indices in _kinds(tensors):
        factors = [factor[i] for i in indices] if isinstance(factor, list | tuple) else factor
        torch._foreach_mul_([tensors[i] for i in indices], factors)
    return tensors


def _check_and_unscale(gradients: Any, found_inf: torch.Tensor, scale: torch.Tensor) -> None:
    """Unscale gradients, and let every rank find what is not finite on any."""
    for indices in _kinds(gradients):
        some = [gradients[i] for i in indices]
        torch._amp_foreach_non_finite_check_and_unscale_(some, found_inf, scale)
    sharings = {tensor.sharing for tensor in gradients if isinstance(tensor, _Gradient)}
    for sharing in _in_order(sharings):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=sharing.group)


def _kinds(tensors: Iterable[torch.Tensor]) -> Iterable[list[int]]:
    """Return the indices of DTensors and those of others; one call of torch's takes only either."""
    return _grouped(map(is_distributed, tensors)).values()


def _total(
    parts: list[tuple[torch.Tensor, Sharing | None]], order: float, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the norm of all tensors of which these are norms. Collective."""
    # Ranks may have different numbers of gradients, as parameters are frozen on some, or tables are
    # not divided evenly. So each group exchanges one number, the norm of all that it shares.
    pieces = []
    held = _grouped(sharing for _, sharing in parts)
    for sharing in [*([None] if None in held else []), *_in_order(held.keys() - {None})]:
        norms = torch.stack(_replicated([parts[i][0] for i in held[sharing]]))
        if sharing is not None:
            norm = torch.linalg.vector_norm(norms, order, dtype=dtype)
            norms = torch.stack(gather(norm, sharing.group))
        pieces.append(norms)
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(pieces), order, dtype=dtype)
    return total


def _whole(norms: Any) -> torch.Tensor:
    """Return the norms of whole gradients, one by one. Collective."""
    held = _grouped(sharing for _, sharing in norms.parts)
    norm_of_all = _replicated([norm for norm, _ in norms.parts])
    for sharing in _in_order(held.keys() - {None}):
        local = torch.stack([norm_of_all[i] for i in held[sharing]])
        every = torch.stack(gather(local, sharing.group))
        results = torch.linalg.vector_norm(every, norms.order, dim=0).unbind()
        for i, norm in zip(held[sharing], results, strict=True):
            norm_of_all[i] = norm
    return torch.stack(norm_of_all) if norms.dim() else norm_of_all[0]


def _grouped(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the places of equal keys by key, both in the order in which they occur."""
    indices: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        indices.setdefault(key, []).append(i)
    return indices


def _in_order(sharings: Iterable[Any]) -> list[Sharing]:
    """Return sharings in the order in which all ranks use their groups.

    Raises:
        ArgumentError: A rank holds no part, and so cannot learn of this exchange.
    """
    ordered = sorted(sharings, key=lambda sharing: default_name(sharing.group))
    for sharing in ordered:
        if sharing.absent is not None:
            raise ArgumentError(
                "ShardedEmbeddingBags: every rank must hold a part of a table where all ranks' "
                f"gradients are clipped or checked at once; got none on rank {sharing.absent}. Use "
                "a plan in which every rank has one, or leave the tables' parameters out."
            )
    return ordered


def _replicated(norms: list[Any]) -> list[torch.Tensor]:
    """Return norms as plain tensors; those of DTensors of one mesh are exchanged at once."""
    plain = list(norms)
    meshes = _grouped(
        (norm.device_mesh, norm.placements) if is_distributed(norm) else None for norm in norms
    )
    meshes.pop(None, None)
    for indices in meshes.values():
        full = torch.stack([norms[i] for i in indices]).full_tensor()  # type: ignore[attr-defined]
        for i, norm in zip(indices, full.unbind(), strict=True):
            plain[i] = norm
    return plain


def _unmarked(tensor: Any) -> torch.Tensor:
    """Return a plain tensor, or DTensor, of the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = tensor.detach()
    return plain


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return every rank's tensor, all of one shape, in rank order. Collective."""
    parts = [torch.empty_like(tensor) for _ in range(rank_and_size(group)[1])]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
