"""TorchRec's ``EmbeddingBagCollection`` by Interlace: the same embeddings, updates and state dicts,
and a DLRM of TorchRec that trains to the same losses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from interlace.errors import ArgumentError
from interlace.integrations.torchrec import shard

try:
    import torchrec  # noqa: F401
except (ImportError, OSError):  # FBGEMM's libraries are of one version of PyTorch
    pytest.skip("make test-integrations installs it", allow_module_level=True)

SAMPLES = 6  # of each rank
ROWS, WIDTH = (20, 30, 12), 8


def _configs(**changes: Any) -> list[Any]:
    from torchrec import EmbeddingBagConfig, PoolingType

    return [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=WIDTH,
            num_embeddings=rows,
            feature_names=[feature],
            pooling=PoolingType.MEAN if changes.get("mean") and index == 1 else PoolingType.SUM,
        )
        for index, (feature, rows) in enumerate(zip("abc", ROWS, strict=True))
    ]


def _collection(weighted: bool = False, **changes: Any) -> Any:
    """An unsharded collection, the same on every rank."""
    from torchrec import EmbeddingBagCollection

    torch.manual_seed(0)
    return EmbeddingBagCollection(tables=_configs(**changes), is_weighted=weighted)


def _features(seed: int, order: str = "abc", weighted: bool = False) -> list[Any]:
    """Each rank's samples, and all of them behind one another."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(seed)
    ranks = dist.get_world_size()
    bags = {
        feature: [
            [
                torch.randint(0, rows, (int(count),), generator=generator)
                for count in torch.randint(0, 4, (SAMPLES,), generator=generator)
            ]
            for _ in range(ranks)
        ]
        for feature, rows in zip("abc", ROWS, strict=True)
    }
    batches = [[rank] for rank in range(ranks)] + [list(range(ranks))]
    features = []
    for chosen in batches:
        flat = [bag for feature in order for rank in chosen for bag in bags[feature][rank]]
        values = torch.cat(flat)
        features.append(
            KeyedJaggedTensor.from_lengths_sync(
                keys=list(order),
                values=values,
                lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
                weights=(values % 5 + 1).float() / 3 if weighted else None,
            )
        )
    return features


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _forward(order: str, weighted: bool, mean: bool) -> tuple[float, bool]:
    """The error of this rank's embeddings, and whether keys and widths are the collection's."""
    collection = _collection(weighted, mean=mean)
    sharded = shard(collection)
    *own, _ = _features(1, order, weighted)
    features = own[dist.get_rank()]
    expected, found = collection(features), sharded(features)
    same = (found.keys(), found.length_per_key()) == (expected.keys(), expected.length_per_key())
    names = [each.name for each in sharded.embedding_bag_configs()]
    assert names == [each.name for each in collection.embedding_bag_configs()]
    assert sharded.is_weighted() == weighted
    return _error(found.values(), expected.values()), same


@pytest.mark.parametrize(
    ("order", "weighted", "mean"),
    [("abc", False, False), ("cab", False, True), ("bca", True, False)],
)
def test_embeddings(ranks: Any, order: str, weighted: bool, mean: bool) -> None:
    for error, same in ranks(2).run(_forward, order, weighted, mean):
        assert error < 1e-6
        assert same


def _training(gradient: str) -> tuple[list[float], list[float], float, float]:
    """Losses of TorchRec's DLRM: those of all ranks, and those of one process with the whole batch;
    the tables' error afterwards, and how far they have moved.
    """
    from torchrec.models.dlrm import DLRM
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    rank, ranks, rate = dist.get_rank(), dist.get_world_size(), 0.1

    def model(collection: Any) -> Any:
        torch.manual_seed(1)
        return DLRM(collection, 4, [16, WIDTH], [16, 1])

    alone = model(_collection())
    ours = model(shard(_collection(), gradient=gradient, learning_rate=rate, epsilon=1e-8))
    dense = [
        parameter
        for _, parameter in in_backward_optimizer_filter(ours.named_parameters(), include=False)
    ]
    assert len(dense) == len(list(alone.parameters())) - len(ROWS)
    tables = list(alone.sparse_arch.parameters())
    others = [each for each in alone.parameters() if all(each is not table for table in tables)]
    update: Any = torch.optim.SGD(tables, rate)
    if gradient == "rowwise_adagrad":
        update = RowWiseAdagrad(tables, lr=rate, eps=1e-8)
    optimizers = [update, torch.optim.SGD(others, rate)]
    mine, theirs = [], []
    for step in range(4):
        *own, whole = _features(step)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(ranks * SAMPLES, 4, generator=generator)
        labels = torch.randint(0, 2, (ranks * SAMPLES,), generator=generator).float()
        criterion = torch.nn.functional.binary_cross_entropy_with_logits

        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = criterion(alone(inputs, whole).squeeze(1), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        theirs.append(float(loss))

        x, y = (tensor.chunk(ranks)[rank] for tensor in (inputs, labels))
        loss = criterion(ours(x, own[rank]).squeeze(1), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mine.append(float(mean) / ranks)
        with torch.no_grad():
            for parameter in dense:
                dist.all_reduce(parameter.grad)
                parameter -= rate * parameter.grad / ranks
                parameter.grad = None
    fresh = model(_collection())
    errors, distances = [], []
    for name, table in ours.state_dict().items():
        for local in table.local_shards() if "embedding_bags" in name else ():
            errors.append((local.tensor - _columns(alone, name, local)).abs().max())
            distances.append((local.tensor - _columns(fresh, name, local)).abs().max())
    return mine, theirs, float(max(errors)), float(max(distances))


def _columns(model: Any, name: str, local: Any) -> torch.Tensor:
    """The columns of an unsharded model's table that a shard has."""
    start, width = local.metadata.shard_offsets[1], local.metadata.shard_sizes[1]
    table: torch.Tensor = model.state_dict()[name]
    return table[:, start : start + width]


@pytest.mark.parametrize("gradient", ["sgd", "rowwise_adagrad"])
def test_dlrm_trains_to_the_same_losses(ranks: Any, gradient: str) -> None:
    for mine, theirs, error, distance in ranks(2).run(_training, gradient):
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert error < 1e-5
        assert distance > 100 * error


def _state() -> tuple[list[str], list[str], float, float, list[str]]:
    """State dicts' names, ours and the unsharded collection's; errors of what was loaded; and the
    names of the optimizer's state.
    """
    from torchrec import EmbeddingBagCollection

    collection = _collection()
    options = {"gradient": "rowwise_adagrad", "learning_rate": 0.5}
    empty = EmbeddingBagCollection(tables=_configs(), device=torch.device("meta"))
    first, second = shard(empty, **options), shard(_collection(), **options)
    first.load_state_dict(collection.state_dict())  # whole tables
    *own, _ = _features(2)
    expected = collection(own[dist.get_rank()]).values()
    whole = _error(first(own[dist.get_rank()]).values(), expected)
    first(own[dist.get_rank()]).values().sum().backward()
    first.fused_optimizer.step()
    second.load_state_dict(first.state_dict())  # shards
    sharded = _error(second(own[dist.get_rank()]).values(), first(own[dist.get_rank()]).values())
    optimizer = first.fused_optimizer.state_dict()
    second.fused_optimizer.load_state_dict(optimizer)
    for key, state in second.fused_optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer["state"][key][name])
            assert value.abs().sum() > 0
    state_names = [name for state in optimizer["state"].values() for name in state]
    return (
        sorted(first.state_dict()),
        sorted(collection.state_dict()),
        whole,
        sharded,
        state_names,
    )


def test_state_dicts(ranks: Any) -> None:
    for names, theirs, whole, sharded, state_names in ranks(2).run(_state):
        assert names == theirs
        assert whole < 1e-6
        assert sharded < 1e-6
        assert state_names
        assert all(name.endswith(".momentum1") for name in state_names)


def _refusal(case: str) -> str:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    try:
        if case == "a table of two features":
            config = EmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=5, feature_names=["f", "g"]
            )
            shard(EmbeddingBagCollection(tables=[config]))
        else:
            lengths = torch.ones(4, dtype=torch.int32)
            samples = [[2], [1], [1]]
            features = KeyedJaggedTensor(
                list("abc"), torch.zeros(4).long(), None, lengths, stride_per_key_per_rank=samples
            )
            shard(_collection())(features)
    except ArgumentError as refusal:
        return str(refusal)
    return "taken"


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("a table of two features", "table 't' must have one feature"),
        ("different numbers of samples", "must have as many samples for every key"),
    ],
)
def test_what_is_refused(ranks: Any, case: str, rule: str) -> None:
    for message in ranks(2).run(_refusal, case):
        assert rule in message
