"""Masks of all ranks, of which those that overlap others are suppressed."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


@replayed
@torch.no_grad()
def solution(
    low_res_masks_local: torch.Tensor, obj_scores_local: torch.Tensor, num_obj_per_gpu: list[int],
    last_occluded: torch.Tensor, iou_threshold: float = 0.7, reverse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    def gathered(rows: torch.Tensor, per_object: int) -> torch.Tensor:
        counts = [count * per_object for count in num_obj_per_gpu]
        sent, starts = [len(rows)] * len(counts), [0] * len(counts)
        return exchange_rows(rows, sent, counts, max(counts), starts=starts, group=group).float()

    height, width = low_res_masks_local.shape[1:]
    masks = gathered(low_res_masks_local.flatten(0, 1), height).view(-1, height, width)
    scores = gathered(obj_scores_local, 1)
    flat = (masks > 0).flatten(1).float()
    both, area = flat @ flat.T, flat.sum(1)
    overlap = both / (area[:, None] + area - both).clamp(min=1.0) >= iou_threshold
    overlap = overlap.fill_diagonal_(False)
    last = last_occluded.long()
    later = last[:, None] < last if reverse else last[:, None] > last
    suppressed = (overlap & later & (last > -1)).any(1)
    return masks.masked_fill(suppressed[:, None, None], -10.0), scores, suppressed
