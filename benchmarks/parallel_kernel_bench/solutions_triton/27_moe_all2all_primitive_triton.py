"""All-to-all of rows, as many as lists say."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows


def solution(
    local_tensor: torch.Tensor, input_split_sizes: list[int] | torch.Tensor | None = None,
    output_split_sizes: list[int] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, ranks = local_tensor.shape[0], dist.get_world_size(group)
    sent, received = (
        [rows // ranks] * ranks if sizes is None else list(map(int, sizes))
        for sizes in (input_split_sizes, output_split_sizes)
    )
    return exchange_rows(local_tensor.contiguous(), sent, received, rows, group=group)
