"""Calls of ``embedding_all_to_all`` that must be refused, each with its message, and without anyone
hanging.
"""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ArgumentError, EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.validate import SeenTensors, validate
from interlace.optim import SGD, RowWiseAdagrad
from tests.errors import error_of
from tests.operators.embedding_all_to_all.calls import SMALL, Call

f32, f64, i64 = torch.float32, torch.float64, torch.int64


def _t(*shape, dtype=f32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


W, IDS, ENDS = _t(5, 4), _t(3, dtype=i64), torch.tensor([0, 1, 3])
TWICE = _t(5, 4)


@pytest.mark.parametrize(
    ("weights", "indices", "offsets", "more", "message"),
    [
        (W, IDS, ENDS, {}, "weights must be a list of tables; got one tensor. Write [weights]."),
        (None, IDS, ENDS, {}, "weights must be a list of tables; got NoneType."),
        ([W], IDS, ENDS, {"per_sample_weights": [1.0] * 3},
            "per_sample_weights must be a torch.Tensor; got list."),
        ([W], IDS, ENDS, {"gradient": RowWiseAdagrad(1.0, 1.0, states=None)},
            "RowWiseAdagrad's states must be a list of tensors; got NoneType."),
        ([W] * 4097, IDS, ENDS, {}, "a rank must have at most 4096 tables; got 4097."),
        ([W[0]], IDS, ENDS, {}, "weights[0] must be [rows, width]; got shape [4]."),
        ([_t(5, 4, dtype=f64)], IDS, ENDS, {},
            "weights[0] must be float16, bfloat16 or float32; got torch.float64."),
        ([W, _t(5, 4, dtype=torch.float16)], IDS, ENDS, {},
            "weights[1] must have the dtype of weights[0], torch.float32; got torch.float16."),
        ([W, _t(5, 4, device="meta")], IDS, ENDS, {},
            "weights[1] must be on the device of indices, cpu; got meta."),
        ([_t(5, 2049)], IDS, ENDS, {},
            "weights[0] must be between 1 and 2048 wide; got 2049. Cut a wider table by columns "
            "into several."),
        ([_t(4, 5).T], IDS, ENDS, {},
            "weights[0] must have contiguous rows; got strides [1, 5]. Call .contiguous() once."),
        ([W], _t(3, 1, dtype=i64), ENDS, {}, "indices must have one dimension; got shape [3, 1]."),
        ([W], _t(3), ENDS, {}, "indices must be int32 or int64; got torch.float32."),
        ([W], IDS, _t(3), {}, "offsets must be int32 or int64; got torch.float32."),
        ([W], IDS, _t(3, dtype=i64, device="meta"), {},
            "offsets must be on the device of indices, cpu; got meta."),
        ([W, _t(5, 4)], IDS, _t(4, dtype=i64), {},
            "offsets must be [T * B + 1] for T = 2 tables; got 4. "
            "They are table-major over the global batch: table 0's bags of all samples first."),
        ([W], IDS, ENDS, {"batch_size": 3}, "batch_size must be what offsets say, 2; got 3."),
        ([], IDS[:0], ENDS[:1], {},
            "a rank without tables must be told the global batch; got batch_size=None."),
        ([W], IDS, ENDS, {"name": 3}, "name must be a word; got 3."),
        ([W], IDS, ENDS, {"mode": "max"}, "mode must be sum or mean; got 'max'."),
        ([W], IDS, ENDS, {"per_sample_weights": _t(2)},
            "per_sample_weights must be [3], one for each index; got shape [2]."),
        ([W], IDS, ENDS, {"per_sample_weights": _t(3, dtype=i64)},
            "per_sample_weights must be float16, bfloat16 or float32; got torch.int64."),
        ([W], IDS, ENDS, {"per_sample_weights": _t(3), "mode": "mean"},
            "per_sample_weights must go with mode='sum'; got mode='mean'."),
        ([W], IDS, ENDS, {"per_sample_weights": _t(3).requires_grad_()},
            "per_sample_weights must not require a gradient, which this operator does not compute; "
            "got one that does. Detach it, or use interlace.nn.ShardedEmbeddingBags."),
        ([W], IDS, ENDS, {"output_dtype": f64},
            "output_dtype must be float16, bfloat16 or float32; got torch.float64."),
        ([W], IDS, ENDS, {"gradient": "both"},
            "gradient must be 'dense', 'sparse', interlace.optim.SGD or "
            "interlace.optim.RowWiseAdagrad; got 'both'."),
        ([TWICE, TWICE], IDS, _t(5, dtype=i64), {"gradient": SGD(0.1)},
            "a fused update must have each table once; got the same memory twice in weights."),
        ([W[:1].expand(5, -1)], IDS, ENDS, {"gradient": SGD(0.1)},
            "a fused update must have tables whose rows do not overlap; weights[0] has strides "
            "[0, 1]."),
        ([W.clone().requires_grad_() * 2], IDS, ENDS, {"gradient": SGD(0.1)},
            "a fused update must have tables that are leaves of the graph; weights[0] was "
            "computed. Pass the parameter itself."),
        ([W], IDS, ENDS, {"gradient": RowWiseAdagrad(0.1, 0.1, [])},
            "RowWiseAdagrad's states must be one for each of 1 tables; got 0."),
        ([W], IDS, ENDS, {"gradient": RowWiseAdagrad(0.1, 0.1, [_t(4)])},
            "RowWiseAdagrad's states[0] must be contiguous float32 [5]; got torch.float32 [4]."),
        ([W], IDS, ENDS, {"impl": "fast"},
            "impl must be one of auto, fused, pooled, unfused; got 'fast'."),
        ([W], IDS, ENDS, {"config": "direct"},
            "config must be of type EmbeddingAllToAllConfig; got str."),
    ],
)  # fmt: skip
def test_bad_arguments(weights, indices, offsets, more, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape('embedding_all_to_all: ' + message)}$"):
        interlace.embedding_all_to_all(weights, indices, offsets, **more)


def _cast(weights, states):
    weights[1].data = _t(5, 4, dtype=torch.float16)


def _transpose(weights, states):
    weights[1].data = _t(4, 5).T


def _share(weights, states):
    weights[1].data = weights[0].data


def _shrink(weights, states):
    states[0].resize_(4)


def _lose(weights, states):
    del states[1]


def _convert(weights, states):
    weights[1] = weights[1].to_sparse()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cast, "weights[1] must have the dtype of weights[0], torch.float32; got torch.float16."),
        (_transpose, "weights[1] must have contiguous rows; got strides [1, 5]."),
        (_share, "a fused update must have each table once; got the same memory twice"),
        (_shrink, "states[0] must be contiguous float32 [5]; got torch.float32 [4]."),
        (_lose, "states must be one for each of 2 tables; got 1."),
        (_convert, "weights[1] must be dense; got torch.sparse_coo."),
    ],
)
def test_tables_that_were_valid_are_refused_once_they_have_changed(change, message):
    """What was valid is remembered by all that was asked about it."""
    weights, states = [_t(5, 4), _t(5, 4)], [_t(5), _t(5)]
    arguments = IDS, ENDS, None, "sum", None, RowWiseAdagrad(1.0, 1.0, states)
    for _ in range(2):
        tables = validate(weights, *arguments)
        assert (tables.widths, tables.dtype) == ((4, 4), "torch.float32")
        assert not tables.trains
    weights[0].requires_grad_()
    assert validate(weights, *arguments).trains
    weights[0].requires_grad_(False)
    change(weights, states)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        validate(weights, *arguments)


def _plain(tensors):
    return [tensor.detach() for tensor in tensors]


def _give_memory(tensors):
    tensors[1].data = tensors[1].data.clone()


def _shorten(tensors):
    tensors[1].data = tensors[1].data[:4]


def _reinterpret(tensors):
    tensors[2].data = tensors[2].data.view(torch.int32)


def _restride(tensors):
    tensors[1].data = tensors[1].data.as_strided((5, 4), (0, 1))


def _free(tensors):
    tensors[1].untyped_storage().resize_(0)


def _negate(tensors):
    tensors[1].data = torch._neg_view(tensors[1].data)


def _freeze(tensors):
    tensors[1].requires_grad_(False)


def _train(tensors):
    tensors[2].requires_grad_()


def _replace(tensors):
    tensors[1] = torch.nn.Parameter(tensors[1].detach())


def _repeat(tensors):
    tensors[1] = tensors[0]


def _drop(tensors):
    del tensors[2]


def _name_a_list(tensors):
    tensors[2] = tensors[2].tolist()


@pytest.mark.parametrize(
    "change",
    [
        _give_memory, _shorten, _reinterpret, _restride, _free, _negate, _freeze, _train, _replace,
        _repeat, _drop, _name_a_list,
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_are_known_again_by_all_that_may_change(change, is_shared):
    """A table may stand twice in a list: one that several features share."""
    shared = _t(5, 4).requires_grad_()
    tensors = [shared, shared if is_shared else _t(5, 4).requires_grad_(), _t(5)]
    seen = SeenTensors(tensors)
    assert seen.are(tensors)
    assert not seen.are(_plain(tensors)), "they require gradients no longer"
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            assert seen.are(tensors), "by a backward pass, for instance"
    change(tensors)
    assert seen.are(tensors) == (is_shared and change is _repeat)


def test_a_configuration_is_its_text():
    config = EmbeddingAllToAllConfig(8, 2, 2, 7, 5, 3, 4, 6, 9, 8, 64, 2, 168)
    assert EmbeddingAllToAllConfig.parse(str(config)) == config
    assert str(config).startswith("block_bags=8, stages=2, ")
    for text in (
        "",
        "direct",
        " ".join(str(value) for value in dataclasses.astuple(config)),
        str(config).replace("block_bags=8", "block_bags=four"),
        str(config).replace("block_bags=8", "block_bags=3"),
        str(config).replace("push_rows=4, ", ""),
        f"{config}, more=9",
    ):
        with pytest.raises(ArgumentError, match="EmbeddingAllToAllConfig: "):
            EmbeddingAllToAllConfig.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(float("nan")), "SGD: learning_rate must be not negative and finite; got nan."),
        (
            lambda: RowWiseAdagrad(0.1, 0.0, []),
            "RowWiseAdagrad: epsilon must be positive and finite; got 0.0.",
        ),
    ],
)
def test_bad_updates(make, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        make()


def _bad_values(change):
    """Rank 1's numbers are bad; what every rank is told, and whether the next call works."""
    rank = dist.get_rank()
    table = torch.arange(20.0).reshape(5, 4)
    # Tables of 5 and 6 rows, 2 samples
    indices, offsets = torch.tensor([0, 4, 1, 5, 2]), torch.tensor([0, 2, 3, 4, 5])
    if rank == 1:
        for name, place, value in change:
            {"indices": indices, "offsets": offsets}[name][place] = value
    tables = [table, torch.zeros(6, 4)]
    error = error_of(interlace.embedding_all_to_all, tables, indices, offsets, config=SMALL)
    good = interlace.embedding_all_to_all(
        tables, torch.tensor([0]), torch.tensor([0, 1, 1, 1, 1]), config=SMALL
    )
    return error, good.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            [("indices", 2, 5)],
            "indices of table 0 must be at least 0 and below 5, its rows; got 5 at position 2.",
        ),
        (
            [("indices", 3, -1)],
            "indices of table 1 must be at least 0 and below 6, its rows; got -1 at position 3.",
        ),
        ([("offsets", 1, 4)], "offsets must not decrease; got 4 and then 3 at position 2."),
        ([("offsets", 4, 9)], "offsets must go from 0 to the number of indices, 5; got 0 to 9."),
        ([("offsets", 0, 1)], "offsets must go from 0 to the number of indices, 5; got 1 to 5."),
    ],
)
def test_bad_numbers_on_one_rank_are_told_on_every_rank(ranks, change, message):
    expected = (
        "ArgumentError",
        f"embedding_all_to_all: on rank 1, {message} Nothing was computed.",
    )
    for error, shape in ranks(2).run(_bad_values, change):
        assert error is not None
        assert error[:2] == expected
        assert shape == (1, 16)


def _disagree(name, values):
    rank = dist.get_rank()
    call = Call(((4,), (2,)), 6)
    more = {"config": SMALL, "check_indices": False, "name": name}
    if name in ("batch", "dtype"):
        call = dataclasses.replace(call, **{name: values[rank]})
    else:
        more[name] = values[rank]
    indices, offsets, _ = call.lookups(rank)
    error = error_of(interlace.embedding_all_to_all, call.tables(rank), indices, offsets, **more)
    return error, interlace.group_of().broken


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("batch", (6, 7),
            "the global batch must be the same on every rank; got 6 on rank 0, 7 on rank 1."),
        ("dtype", ("float32", "float16"),
            "the dtype of weights must be the same on every rank; got 'torch.float32' on rank 0, "
            "'torch.float16' on rank 1."),
        ("output_dtype", (None, torch.float16),
            "output dtype must be the same on every rank; got None on rank 0, "
            "'torch.float16' on rank 1."),
        ("mode", ("sum", "mean"),
            "mode must be the same on every rank; got 'sum' on rank 0, 'mean' on rank 1."),
        ("impl", ("fused", "auto"),
            "impl must be the same on every rank; got 'fused' on rank 0, 'auto' on rank 1."),
        ("name", ("users", "items"),
            "name must be the same on every rank; got 'users' on rank 0, 'items' on rank 1."),
        ("check_indices", (True, False),
            "check indices must be the same on every rank; got True on rank 0, False on rank 1."),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told_on_every_rank(ranks, name, values, message):
    for error, broken in ranks(2).run(_disagree, name, values):
        assert error is not None
        assert error[:2] == (
            "RankMismatchError",
            f"embedding_all_to_all: {message} Nothing was computed.",
        )
        assert not broken
