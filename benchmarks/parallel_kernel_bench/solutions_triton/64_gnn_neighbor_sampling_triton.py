"""Neighbours of nodes whose edges are on several ranks: nodes go to their owners, and lists of
equal length come back.
"""

import torch
import torch.distributed as dist

from benchmarks.parallel_kernel_bench.exchange import all_gather, exchange_rows


def _lists(nodes: torch.Tensor, most: int, starts: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return each node's first edges, its neighbours there, and how many there are."""
    count = (starts[nodes + 1] - starts[nodes]).clamp(max=most)
    edges = starts[nodes][:, None] + torch.arange(most, device=nodes.device)
    return torch.cat([edges, row[edges.clamp(max=len(row) - 1)], count[:, None]], 1)


def _first(nodes: torch.Tensor) -> torch.Tensor:
    """Return different nodes in the order in which they come first."""
    _, inverse = torch.unique(nodes, return_inverse=True)
    place = torch.arange(len(nodes), device=nodes.device)
    first = torch.full_like(nodes, len(nodes)).scatter_reduce_(0, inverse, place, "amin")
    return nodes[first[first < len(nodes)].sort().values]


@torch.no_grad()
def solution(
    seed_nodes: torch.Tensor, fanouts: list[int], local_adj_row_ptr: torch.Tensor,
    local_adj_col: torch.Tensor, node_to_rank: torch.Tensor,
    group: dist.ProcessGroup | None = None, replace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    src = node = seed_nodes.long()
    found, to, edges = [src[:0]], [src[:0]], [src[:0]]
    for most in fanouts:
        owner, take = torch.sort(node_to_rank[src], stable=True)
        sent = (owner == torch.arange(ranks, device=src.device)[:, None]).sum(1)
        counts = all_gather(sent[None], 0, group).tolist()
        there, here = counts[rank], [row[rank] for row in counts]
        capacity = max(map(max, counts))
        asked = exchange_rows(src, there, here, capacity, take=take, group=group)
        lists = _lists(asked, most, local_adj_row_ptr, local_adj_col)
        lists = exchange_rows(lists, here, there, capacity, place=take, group=group)
        edge, neighbour, count = lists.split([most, most, 1], 1)
        inside = torch.arange(most, device=src.device) < count
        found.append(neighbour[inside])
        edges.append(edge[inside])
        to.append(src[:, None].expand_as(inside)[inside])
        if not len(found[-1]):
            break
        known, node = len(node), _first(torch.cat([node, found[-1]]))
        src = node[known:]
        if not len(src):
            break
    place = torch.full((int(node.max()) + 1,), -1, device=node.device)
    place[node] = torch.arange(len(node), device=node.device)
    return node, place[torch.cat(found)], place[torch.cat(to)], torch.cat(edges)
