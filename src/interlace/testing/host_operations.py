"""PyTorch's operators on tensors over symmetric memory, as operations of an explored program."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.testing.memory import element_addresses
from interlace.testing.ranks import RankRun

# Operators that do not read their tensor arguments.
_WITHOUT_LOADS = {
    "new_empty",
    "empty_like",
    "new_empty_strided",
    "new_zeros",
    "zeros_like",
    "new_full",
    "full_like",
    "new_ones",
    "ones_like",
    "set_",
    "resize_",
}
# Operators that overwrite their argument without reading it.
_WITHOUT_OLD_VALUE = {"copy_", "zero_", "fill_"}


class HostOperations(TorchDispatchMode):
    """Mode in which an operator's tensors over symmetric memory are loaded before it runs, and the
    tensors that it writes are stored after it.

    Args:
        run: The run that does the loads and stores.
    """

    def __init__(self, run: RankRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "interlace":
            # The operator itself calls PyTorch's operators on symmetric memory. The mode is off
            # within this method, so it is entered again for them.
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        stored: list[torch.Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(tensor, torch.Tensor) or not self._is_symmetric(tensor):
                    continue
                # A copy onto itself changes nothing, and would count as a store.
                if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
                    return args[0]
                if written:
                    stored.append(tensor)
                if name not in _WITHOUT_LOADS and not (
                    written and (argument.kwarg_only or name in _WITHOUT_OLD_VALUE)
                ):
                    self._load(tensor)
        result = func(*args, **kwargs)
        for tensor in stored:
            self._store(tensor)
        return result

    def _is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Tell if a tensor has elements, and they are in symmetric memory."""
        if not tensor.numel():
            return False
        return bool(self._run.tree.view.holds(np.array([tensor.data_ptr()], np.uint64))[0])

    def _load(self, tensor: torch.Tensor) -> None:
        """Load a tensor's elements from simulated memory into the rank's view."""
        addresses = element_addresses(tensor)
        values = self._run.load(addresses, f"u{tensor.element_size()}")
        flat = torch.from_numpy(values.copy().view(np.uint8)).view(tensor.dtype)
        tensor.detach().copy_(flat.view(tensor.shape))

    def _store(self, tensor: torch.Tensor) -> None:
        """Store a tensor's elements from the rank's view in simulated memory."""
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        values = raw.view(f"u{tensor.element_size()}")
        self._run.send(element_addresses(tensor), values.copy(), "store")
