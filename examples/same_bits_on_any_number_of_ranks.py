"""The same bits on any number of ranks: a trainer's logits and an engine's, compared with ``==``.

Reinforcement learning compares the probabilities that a trainer gives to tokens with those that the
engine gave them. The two shard the model over different numbers of ranks, and so add up in
different orders, unless ``interlace.batch_invariant(ranks=True)`` fixes the order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu

import interlace
from interlace.nn import ColumnParallelLinear, RowParallelLinear

WIDTH, HIDDEN, VOCABULARY, TOKENS = 64, 256, 96, 12


class TinyModel(nn.Module):
    """An MLP and a head over the vocabulary, sharded over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        # One seed for any number of ranks, so that all of them begin with the same full layers.
        torch.manual_seed(0)
        full = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.up = ColumnParallelLinear.from_linear(full[0])
        self.down = RowParallelLinear.from_linear(full[1])
        self.head = ColumnParallelLinear.from_linear(full[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits, ``[tokens, VOCABULARY/R]``."""
        return self.head(x + self.down(silu(self.up(x))))


def logits(rows: int) -> dict[str, torch.Tensor]:
    """Return all logits of the first ``rows`` tokens, ``[rows, VOCABULARY]``, in both orders."""
    model = TinyModel()
    x = torch.randn(TOKENS, WIDTH)[:rows]
    results = {}
    for order, is_fixed in {"fastest": False, "fixed": True}.items():
        with torch.no_grad(), interlace.batch_invariant(is_fixed, ranks=is_fixed):
            shard = model(x)
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        results[order] = torch.cat(shards, 1)
    return results


def main() -> None:
    # The trainer has all tokens at once, on one rank; engines have a few of them, on several. All
    # are on the CPU here, as only GPUs of one model have the same bits.
    trainer = interlace.launch(logits, 1, TOKENS, backend="cpu")[0]
    for ranks in (2, 4):
        engine = interlace.launch(logits, ranks, 5, backend="cpu")[0]
        differing = {order: int((y != trainer[order][:5]).sum()) for order, y in engine.items()}
        print(
            f"{ranks} ranks: of {5 * VOCABULARY} logits, {differing['fastest']} differ from the "
            f"trainer's in the fastest order, and {differing['fixed']} in the fixed one"
        )
        assert differing["fixed"] == 0


if __name__ == "__main__":
    main()
