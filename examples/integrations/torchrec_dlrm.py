"""TorchRec's DLRM with its embedding tables by Interlace: one call around the
``EmbeddingBagCollection``.

    pip install torchrec fbgemm-gpu          # fbgemm-gpu-cpu without a GPU, of PyTorch's version
    python examples/integrations/torchrec_dlrm.py          # two ranks, on GPUs or without

Tables are shared out over the ranks and updated by row-wise Adagrad in the backward pass; the dense
part is replicated. The clicks are random. It checks the losses against those of one process with
the whole batch and TorchRec's own collection and optimizer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import interlace
from interlace.integrations.torchrec import shard

FEATURES, ROWS, WIDTH, SAMPLES, STEPS, RATE = ["user", "item", "shop"], 100, 16, 32, 5, 0.05


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]
            )
            for name in FEATURES
        ]
    )


def dlrm(embeddings: torch.nn.Module) -> DLRM:
    torch.manual_seed(1)
    return DLRM(
        embeddings,
        dense_in_features=4,
        dense_arch_layer_sizes=[32, WIDTH],
        over_arch_layer_sizes=[32, 1],
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's dense features, labels, and two indices for each feature and sample."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator).float()
    return inputs, labels, torch.randint(0, ROWS, (len(FEATURES), SAMPLES, 2), generator=generator)


def features(indices: torch.Tensor) -> KeyedJaggedTensor:
    count = indices.shape[0] * indices.shape[1]
    lengths = torch.full((count,), 2, dtype=torch.int32, device=indices.device)
    return KeyedJaggedTensor(keys=FEATURES, values=indices.flatten(), lengths=lengths)


def sharded_losses(device: str) -> list[float]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = dlrm(shard(collection(), gradient="rowwise_adagrad", learning_rate=RATE)).to(device)
    dense = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(dense, RATE)
    losses = []
    for step in range(STEPS):
        inputs, labels, indices = (tensor.to(device) for tensor in batch(step, rank))
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(
            model(inputs, features(indices)).squeeze(1), labels
        )
        loss.backward()
        interlace.nn.sum_replicated_gradients(model)  # averages, as the tables' module does
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def losses_alone(device: str, ranks: int) -> list[float]:
    model = dlrm(collection()).to(device)
    tables = list(model.sparse_arch.parameters())
    dense = [weight for weight in model.parameters() if all(weight is not t for t in tables)]
    optimizers = [RowWiseAdagrad(tables, lr=RATE, eps=1e-8), torch.optim.SGD(dense, RATE)]
    losses = []
    for step in range(STEPS):
        parts = zip(*[batch(step, rank) for rank in range(ranks)], strict=True)
        inputs, labels, indices = (
            torch.cat(part, dim).to(device) for part, dim in zip(parts, (0, 0, 1), strict=True)
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(
            model(inputs, features(indices)).squeeze(1), labels
        )
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def worker() -> tuple[list[float], list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return sharded_losses(device), losses_alone(device, dist.get_world_size())


def main() -> None:
    found, expected = interlace.launch(worker, 2)[0]
    print("losses:            ", " ".join(f"{loss:.6f}" for loss in found))
    print("in a single process:", " ".join(f"{loss:.6f}" for loss in expected))
    assert all(abs(a - b) < 1e-4 for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
