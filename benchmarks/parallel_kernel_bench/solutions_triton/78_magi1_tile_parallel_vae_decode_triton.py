"""Decode tiles of a video, which are dealt out to the ranks; overlapping ones are blended."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.parallel_kernel_bench.exchange import exchange_rows, replayed


def _gathered(
    tiles: list[torch.Tensor], shapes: list[list[int]], dealt: list[list[int]],
    group: dist.ProcessGroup | None,
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Return the tiles of all ranks, of known shapes, by number."""
    counts = {i: math.prod(shapes[i]) for part in dealt for i in part}
    unit = math.gcd(*counts.values())
    rows = torch.cat([tile.flatten() for tile in tiles]).view(-1, unit)
    sizes = [sum(counts[i] for i in part) // unit for part in dealt]
    sent, starts = [len(rows)] * len(dealt), [0] * len(dealt)
    flat = exchange_rows(rows, sent, sizes, max(sizes), starts=starts, group=group).flatten()
    parts = flat.split(list(counts.values()))
    return {i: part.view(shapes[i]) for i, part in zip(counts, parts, strict=True)}


def _blend(before: torch.Tensor, tile: torch.Tensor, dim: int, most: int) -> None:
    """Let a tile begin with what the one before it ends with, less and less."""
    extent = min(before.shape[dim], tile.shape[dim], most)
    ratio = torch.arange(extent, device=tile.device) / extent if extent else tile.new_empty(0)
    ratio = ratio.view([-1 if d == dim else 1 for d in range(5)])
    old, new = before.narrow(dim, before.shape[dim] - extent, extent), tile.narrow(dim, 0, extent)
    new.copy_((old * (1 - ratio)).to(tile.dtype) + (new * ratio).to(tile.dtype))


def _decoded(tile: torch.Tensor, scale: tuple[int, ...]) -> torch.Tensor:
    """Enlarge the first three channels, or those that there are over again."""
    colours = [tile[:, i % tile.shape[1], None] for i in range(3)]
    tile = torch.cat(colours, 1).float()
    return F.interpolate(tile, scale_factor=scale, mode="trilinear").bfloat16()


@replayed
@torch.no_grad()
def solution(
    z: torch.Tensor, tile_latent_min_length: int, tile_latent_min_height: int,
    tile_latent_min_width: int, spatial_tile_overlap_factor: float,
    temporal_tile_overlap_factor: float, spatial_upsample: int, temporal_upsample: int,
    sr_ratio: int = 1, first_frame_as_image: bool = False, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    length = tile_latent_min_length + int(first_frame_as_image)
    whole = length, tile_latent_min_height, tile_latent_min_width
    overlap = temporal_tile_overlap_factor, *[spatial_tile_overlap_factor] * 2
    scale = temporal_upsample, *[spatial_upsample * sr_ratio] * 2
    strides = [int(n * (1.0 - part)) for n, part in zip(whole, overlap, strict=True)]
    blend = [int(n * s * part) for n, s, part in zip(whole, scale, overlap, strict=True)]
    keep = [n * s - b for n, s, b in zip(whole, scale, blend, strict=True)]
    grid = [-(-n // stride) for n, stride in zip(z.shape[2:], strides, strict=True)]
    places = [(t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
    latents = [
        z[:, :, t : t + whole[0], h : h + whole[1], w : w + whole[2]]
        for t, h, w in ([i * s for i, s in zip(place, strides, strict=True)] for place in places)
    ]
    order = sorted(range(len(places)), key=lambda i: -latents[i].numel())
    ranks = dist.get_world_size(group)
    dealt = [order[r::ranks] for r in range(ranks)]
    own = dealt[dist.get_rank(group)]
    shapes = [
        [z.shape[0], 3, *(n * s for n, s in zip(tile.shape[2:], scale, strict=True))]
        for tile in latents
    ]
    tiles = _gathered([_decoded(latents[i], scale) for i in own], shapes, dealt, group)
    blended = []
    for i in own:
        tile = tiles[i].clone()
        for dim in range(3):
            if places[i][dim]:
                before = i - math.prod(grid[dim + 1 :])
                _blend(tiles[before], tile, dim + 2, blend[dim])
        blended.append(tile[:, :, : keep[0], : keep[1], : keep[2]])
    shapes = [[*s[:2], *(min(n, k) for n, k in zip(s[2:], keep, strict=True))] for s in shapes]
    tiles = _gathered(blended, shapes, dealt, group)
    rows = [
        torch.cat([tiles[i + w] for w in range(grid[2])], 4) for i in range(0, len(places), grid[2])
    ]
    planes = [torch.cat(rows[i : i + grid[1]], 3) for i in range(0, len(rows), grid[1])]
    return torch.cat(planes, 2)
