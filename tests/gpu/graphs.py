"""What Inductor has made of CUDA graphs in this process."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def graphs_of_inductor() -> dict[str, int]:
    """Return the functions that graphs are made of, the graphs, and how often Inductor made none.

    A function that Inductor has cut into pieces counts once for each piece.
    """
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    nodes = list(manager.get_roots()) if manager is not None else []
    recorded = 0
    while nodes:
        node = nodes.pop()
        recorded += 1
        for children in node.children.values():
            nodes.extend(children)
    return {
        "functions": 0 if manager is None else len(manager.ids_to_funcs),
        "recorded": recorded,
        "skipped": counters["inductor"]["cudagraph_skips"],
    }
