"""Features' lengths and values to the ranks that own the features, by feature and then by rank."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather, exchange_rows


@torch.no_grad()
def solution(
    lengths: torch.Tensor, values: torch.Tensor, key_splits: list[int], batch_size: int,
    pg: dist.ProcessGroup | None = None, weights: torch.Tensor | None = None,
    stride_per_key: list[int] | None = None, stagger: int = 1,
) -> dict[str, torch.Tensor]:  # fmt: skip
    if stride_per_key is not None or stagger != 1:
        raise NotImplementedError("batches must be of one size, and ranks in their own order")
    ranks, rank = dist.get_world_size(pg), dist.get_rank(pg)
    rows, device, keys = lengths.view(-1, batch_size), lengths.device, key_splits[rank]
    every = all_gather(rows.sum(1)[None], 0, pg).tolist()  # values of each rank's features
    first = sum(key_splits[:rank])

    def by_rank(row: list[int]) -> list[int]:
        return [sum(part) for part in torch.tensor(row).split(key_splits)]

    sums = [list(map(int, by_rank(row))) for row in every]
    place = torch.arange(ranks * keys, device=device).view(keys, ranks).T.flatten()
    out = {"lengths": exchange_rows(
        rows, key_splits, [keys] * ranks, max(key_splits), place=place, group=pg
    ).flatten()}  # fmt: skip
    received = [row[rank] for row in sums]
    runs = torch.tensor([row[first : first + keys] for row in every])
    starts = (runs.T.flatten().cumsum(0) - runs.T.flatten()).view(keys, ranks).T.flatten()
    shift = torch.repeat_interleave(
        starts - runs.flatten().cumsum(0) + runs.flatten(), runs.flatten()
    )
    place = (shift + torch.arange(len(shift))).to(device)
    most = 1 << max(max(row) for row in sums).bit_length()
    for name, tensor in ("values", values), ("weights", weights):
        if tensor is not None:
            out[name] = exchange_rows(tensor, sums[rank], received, most, place=place, group=pg)
    strides = torch.full((ranks,), batch_size, device=device)
    return out | {"stride": strides.sum(), "stride_per_rank": strides}
