"""A convolution on the sphere, with longitudes cut over one group and latitudes over another."""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_reduce, all_to_all


def _contracted(x: torch.Tensor, psi: torch.Tensor, nlon_out: int) -> torch.Tensor:
    """Multiply ``[batch, channels, latitudes, longitudes]``, turned step by step, by a sparse
    filter; return ``[batch, channels, filter, latitudes, steps]``.
    """
    (k, to, cell), (filters, nlat, _), nlon = psi.indices(), psi.shape, x.shape[3]
    steps = torch.arange(nlon_out, device=x.device) * (nlon // nlon_out)
    columns = (cell % nlon)[:, None] + steps
    terms = x.flatten(0, 1)[:, (cell // nlon)[:, None], columns % nlon] * psi.values()[:, None]
    y = terms.new_zeros(terms.shape[0], filters * nlat, nlon_out)
    return y.index_add_(1, k * nlat + to, terms).view(*x.shape[:2], filters, nlat, nlon_out)


@torch.no_grad()
def solution(
    x: torch.Tensor, psi: torch.Tensor, weight: torch.Tensor, groups: int, nlon_out: int,
    nlon_in: int, azimuth_group: dist.ProcessGroup | None = None,
    polar_group: dist.ProcessGroup | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    is_turned, polar = dist.get_world_size(azimuth_group) > 1, dist.get_world_size(polar_group)
    if is_turned:
        x = all_to_all(x, 1, 3, azimuth_group)
    y = _contracted(x, psi, nlon_out)
    if polar > 1:
        y = all_reduce(y, polar_group).chunk(polar, 3)[dist.get_rank(polar_group)].contiguous()
    if is_turned:
        y = all_to_all(y, 4, 1, azimuth_group)
    y = y.unflatten(1, (groups, -1))
    out = torch.einsum("bgckxy,gock->bgoxy", y, weight.unflatten(0, (groups, -1))).flatten(1, 2)
    return out if bias is None else out + bias[:, None, None]
