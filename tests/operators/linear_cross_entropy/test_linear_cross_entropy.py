"""The loss over a sharded vocabulary: what all ranks compute, together, is PyTorch's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.costs import find_cost
from interlace.operators.linear_cross_entropy.fused import chunk_rows
from interlace.testing.cases import losses
from tests.errors import error_of
from tests.operators.traffic import check_traffic, with_traffic

ROWS, HIDDEN, COLUMNS = 10, 16, 24


def _tensors(vocabulary: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, the whole weight and targets, the same on every rank."""
    source = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(rows, HIDDEN, generator=source)
    w = torch.randn(vocabulary, HIDDEN, generator=source)
    return x, w, torch.randint(0, vocabulary, (rows,), generator=source)


def _own(w: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the weight; ranks behind the last share have none."""
    return w.chunk(dist.get_world_size())[dist.get_rank()]


def _gradients(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, w: torch.Tensor
) -> list[torch.Tensor]:
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = loss(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves)]


# Every form


def _wrong() -> list[str]:
    """The cases of which a result of this rank is wrong."""
    found = []
    for impl in ("fused", "unfused"):
        cases = [
            losses.LossCase(losses.OPERATOR, impl, dtype, True, *sizes)
            for *sizes, dtype in (
                (6, 16, 24, False, 0.0, "mean", False, "float32"),
                (6, 16, 24, True, 0.2, "sum", True, "float32"),
                (7, 16, 24, True, 0.0, "none", False, "float32"),
                (5, 16, 33, True, 0.2, "none", True, "float32"),
                (5, 32, 300, False, 0.0, "mean", True, "bfloat16"),
                (5, 32, 40, True, 0.1, "sum", False, "float16"),
            )
        ]
        cases.append(losses.LossCase(losses.OPERATOR, impl, "float32", False, 3, 8, 5))
        found += [case.label for case in cases if any(case.prepare().check())]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_form_is_what_pytorch_computes_of_all_logits(ranks: Any, count: int) -> None:
    assert ranks(count).run(_wrong) == [[]] * count


def _of_uneven_shares(vocabulary: int, along_columns: bool) -> list[float]:
    """Distances of the loss and of both gradients from those of the whole weight.

    Args:
        along_columns: Whether the weight is the transpose of a contiguous one.
    """
    x, w, target = _tensors(vocabulary)
    if along_columns:
        w = w.T.contiguous().T
    loss, of_x, of_w = _gradients(lambda x, w: F.cross_entropy(F.linear(x, w), target), x, w)
    found = _gradients(
        lambda x, w: interlace.linear_cross_entropy(
            x, w, target, vocabulary=vocabulary, chunk_rows=4, impl="fused"
        ),
        x,
        _own(w),
    )
    pairs = zip(found, (loss, of_x, _own(of_w)), strict=True)
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("along_columns", [False, True])
def test_the_last_rank_may_have_fewer_columns(ranks: Any, along_columns: bool) -> None:
    for distances in ranks(3).run(_of_uneven_shares, 29, along_columns):
        assert max(distances) < 1e-5


# Options


def _of_each_row(vocabulary: int) -> torch.Tensor:
    x, w, target = _tensors(vocabulary)
    return interlace.linear_cross_entropy(x, _own(w), target, reduction="none")


def test_ranks_have_the_same_bits(ranks: Any) -> None:
    first, *others = ranks(3).run(_of_each_row, 3 * COLUMNS)
    assert all(other.equal(first) for other in others)


def _ignoring() -> list[Any]:
    x, w, target = _tensors(2 * COLUMNS)
    target[3:5] = 7

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return interlace.linear_cross_entropy(x, w, target, ignore_index=7)

    y, of_x, _ = _gradients(loss, x, _own(w))
    wanted = F.cross_entropy(F.linear(x, w), target, ignore_index=7)
    none = interlace.linear_cross_entropy(x, _own(w), torch.full_like(target, 7), ignore_index=7)
    return [float((y - wanted).abs()), float(of_x[3:5].abs().max()), bool(none.isnan())]


def test_ignored_rows_count_for_nothing(ranks: Any) -> None:
    """As in PyTorch, the mean over no rows is NaN."""
    for distance, gradient, is_nan in ranks(2).run(_ignoring):
        assert distance < 1e-5
        assert gradient == 0
        assert is_nan


def _beyond_the_vocabulary(impl: str) -> list[Any]:
    """Which losses are NaN, and which rows of x's gradient, of a loss for each row; and whether any
    is of a mean.
    """
    x, w, target = _tensors(2 * COLUMNS)
    target[1], target[2] = 2 * COLUMNS, -1
    w, call = _own(w), functools.partial(interlace.linear_cross_entropy, impl=impl)
    leaf = x.clone().requires_grad_()
    losses = call(leaf, w, target, reduction="none")
    (of_rows,) = torch.autograd.grad(losses, leaf, torch.ones(ROWS))
    (of_mean,) = torch.autograd.grad(call(leaf, w, target), leaf)
    return [
        losses.isnan().tolist(), of_rows.isnan().any(1).tolist(), bool(of_mean.isnan().any()),
    ]  # fmt: skip


@pytest.mark.parametrize("impl", ["fused", "unfused"])
def test_targets_that_are_no_column_make_nan(ranks: Any, impl: str) -> None:
    for of_rows, gradients, is_nan in ranks(2).run(_beyond_the_vocabulary, impl):
        assert of_rows == gradients == [row in (1, 2) for row in range(ROWS)]
        assert is_nan


def _of_no_rows() -> list[Any]:
    _, w, _ = _tensors(2 * COLUMNS)
    x, target = torch.empty(0, HIDDEN), torch.empty(0, dtype=torch.int64)
    answers: list[Any] = []
    for reduction in ("sum", "none"):
        found = _gradients(
            lambda x, w, reduction=reduction: interlace.linear_cross_entropy(  # type: ignore[misc]
                x, w, target, reduction=reduction
            ).sum(),
            x,
            _own(w),
        )
        answers.append([float(found[0]), found[1].shape, float(found[2].abs().max())])
    return answers


def test_no_rows(ranks: Any) -> None:
    assert ranks(2).run(_of_no_rows) == [[[0.0, (0, HIDDEN), 0.0]] * 2] * 2


def _in_three_dimensions() -> list[Any]:
    x, w, target = _tensors(2 * COLUMNS)
    x, target = x.view(2, 5, HIDDEN), target.view(2, 5)
    losses = interlace.linear_cross_entropy(x, _own(w), target.int(), reduction="none")
    flat = F.cross_entropy(F.linear(x, w).flatten(0, 1), target.flatten(), reduction="none")
    return [losses.shape, float((losses.flatten() - flat).abs().max())]


def test_leading_dimensions_are_kept(ranks: Any) -> None:
    for shape, distance in ranks(2).run(_in_three_dimensions):
        assert shape == (2, 5)
        assert distance < 1e-5


def _over_no_width() -> list[Any]:
    x, w = torch.ones(3, 0, requires_grad=True), torch.ones(COLUMNS, 0, requires_grad=True)
    bias, target = torch.arange(float(COLUMNS)), torch.tensor([1, 2, COLUMNS])
    loss = interlace.linear_cross_entropy(x, w, target, bias=bias)
    loss.backward()
    expected = F.cross_entropy(bias.repeat(2).expand(3, 2 * COLUMNS), target)
    assert x.grad is not None
    assert w.grad is not None
    return [float((loss - expected).abs()), x.grad.shape, w.grad.shape]


def test_a_product_over_no_width_is_the_bias(ranks: Any) -> None:
    for distance, *shapes in ranks(2).run(_over_no_width):
        assert distance < 1e-5
        assert shapes == [(3, 0), (COLUMNS, 0)]


# Gradients


def _run_twice() -> list[bool]:
    """The gradients of one graph that is run backward twice, with other gradients of the loss."""
    x, w, target = _tensors(2 * COLUMNS)
    leaves = x.requires_grad_(), _own(w).clone().requires_grad_()
    loss = interlace.linear_cross_entropy(*leaves, target)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    half = torch.autograd.grad(loss, leaves, torch.tensor(0.5), retain_graph=True)
    last = torch.autograd.grad(loss, leaves, torch.tensor(2.0))
    return [
        a.mul(0.5).equal(b) and a.mul(2).equal(c) for a, b, c in zip(once, half, last, strict=True)
    ]


def test_a_graph_may_be_run_backward_twice(ranks: Any) -> None:
    assert ranks(2).run(_run_twice) == [[True, True]] * 2


def _in_float16() -> list[float]:
    """Errors of gradients of x that are small numbers, as those of a mean over very many rows: as
    it is, and as a program scales it.
    """
    x, whole, target = _tensors(2 * COLUMNS, 128)
    x, whole = x.half().requires_grad_(), whole.half().mul_(3e-5)
    w = _own(whole)
    scale, found = 2.0**16, []
    for factor in (1.0, scale):
        loss = interlace.linear_cross_entropy(x, w, target)
        (of_x,) = torch.autograd.grad(loss, x, torch.tensor(factor))
        found.append(of_x.double() / factor)
    exact = x.detach().double().requires_grad_()
    wanted_loss = F.cross_entropy(F.linear(exact, whole.double()), target)
    (wanted,) = torch.autograd.grad(wanted_loss, exact)
    return [float((each - wanted).norm() / wanted.norm()) for each in found]


def test_gradients_in_float16_do_not_vanish_before_they_are_scaled(ranks: Any) -> None:
    for plain, scaled in ranks(2).run(_in_float16):
        assert scaled < 0.01 < plain


def _of_some() -> list[Any]:
    """Gradients of x alone, of w alone, and of nothing."""
    x, w, target = _tensors(2 * COLUMNS)
    w = _own(w).clone()
    both = _gradients(lambda x, w: interlace.linear_cross_entropy(x, w, target), x, w)
    x.requires_grad_()
    (of_x,) = torch.autograd.grad(interlace.linear_cross_entropy(x, w, target), x)
    x.requires_grad_(False)
    w.requires_grad_()
    (of_w,) = torch.autograd.grad(interlace.linear_cross_entropy(x, w, target), w)
    with torch.no_grad():
        loss = interlace.linear_cross_entropy(x, w, target)
    # No view, which a program could not divide in place.
    interlace.linear_cross_entropy(x, w, target).div_(2).backward()
    assert w.grad is not None
    assert w.grad.equal(of_w / 2)
    return [of_x.equal(both[1]), of_w.equal(both[2]), loss.equal(both[0]), loss.requires_grad]


def test_only_what_is_needed_gets_a_gradient(ranks: Any) -> None:
    assert ranks(2).run(_of_some) == [[True, True, True, False]] * 2


def _compiled() -> list[float]:
    x, w, target = _tensors(2 * COLUMNS)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return interlace.linear_cross_entropy(2 * x, w, target)

    eager = _gradients(loss, x, _own(w))
    compiled = _gradients(torch.compile(loss, backend="aot_eager", fullgraph=True), x, _own(w))
    return [float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True)]


def test_compiles_into_one_graph(ranks: Any) -> None:
    for distances in ranks(2).run(_compiled):
        assert max(distances) < 1e-6


# What travels, and what is stored


def _loss_of(rows: int) -> torch.Tensor:
    x, w, target = _tensors(2 * COLUMNS, rows)
    return interlace.linear_cross_entropy(x, _own(w), target, chunk_rows=4, impl="fused")


def _traffic(calls: list[int]) -> list[tuple[Any, ...]]:
    return with_traffic(_loss_of, calls)


def _check_losses(calls: Any, answers: Any) -> None:
    for answers_of_rank in answers:
        for rows, loss in zip(calls, answers_of_rank, strict=True):
            x, w, target = _tensors(2 * COLUMNS, rows)
            torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), target))


def test_costs_are_the_counted_traffic(ranks: Any) -> None:
    calls = [ROWS, 3]

    def cost(rows: int, rank: int) -> Any:
        return find_cost("linear_cross_entropy").formula(
            rows=rows, hidden=HIDDEN, columns=COLUMNS, itemsize=4, world_size=2, chunk_rows=4
        )

    check_traffic(calls, ranks(2).run(_traffic, calls), _check_losses, cost)


def test_costs_count_each_chunk() -> None:
    sizes = {"rows": 8, "hidden": 4, "columns": 6, "itemsize": 2, "world_size": 1}
    formula = find_cost("linear_cross_entropy").formula
    whole, halves = (formula(**sizes, chunk_rows=rows, trains=True) for rows in (8, 4))
    assert whole.flops == halves.flops == 3 * 2 * 8 * 6 * 4
    # The weight is read for two products, and its gradient read and written, once more.
    assert halves.memory_bytes - whole.memory_bytes == 4 * 6 * 4 * 2


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(8192, 64128, 2048), (8192, 16032, 8192), (100, 16032, 128), (0, 16032, 128)],
)
def test_chunks_are_few_and_about_equal(rows: int, columns: int, expected: int) -> None:
    assert chunk_rows(rows, columns, 2) == expected


# Wrong use


def _errors() -> dict[str, Any]:
    x, w, target = _tensors(2 * COLUMNS)
    w, bias = _own(w), torch.zeros(COLUMNS)
    call = interlace.linear_cross_entropy
    calls: dict[str, Callable[[], Any]] = {
        "integers": lambda: call(x.long(), w, target),
        "width": lambda: call(x[:, :3], w, target),
        "target": lambda: call(x, w, target.float()),
        "rows": lambda: call(x, w, target[:3]),
        "sharded rows": lambda: call(x, w, target, sequence_parallel=True),
        "dtype": lambda: call(x, w.double(), target),
        "bias": lambda: call(x, w, target, bias[:3]),
        "reduction": lambda: call(x, w, target, reduction="average"),
        "smoothing": lambda: call(x, w, target, label_smoothing=1.0),
        "z_loss": lambda: call(x, w, target, z_loss=-1.0),
        "chunk": lambda: call(x, w, target, chunk_rows=0),
        "whole chunk": lambda: call(x, w, target, chunk_rows=2.0),
        "factor": lambda: call(x, w, target, z_loss="1"),
        "ignored": lambda: call(x, w, target, ignore_index=None),
        "columns": lambda: call(x, w, target, vocabulary=2.0 * COLUMNS),
        "impl": lambda: call(x, w, target, impl="chunked"),
        "no impl": lambda: call(x, w, target, impl=None),  # type: ignore[arg-type]
        "too few rows of w": lambda: call(x, w, target, vocabulary=3 * COLUMNS),
        "no column for a rank": lambda: call(x, w, target, vocabulary=COLUMNS),
    }
    return {name: error_of(wrong) for name, wrong in calls.items()}


def test_wrong_arguments_are_refused_on_every_rank(ranks: Any) -> None:
    texts = {
        "integers": "x must be float16, bfloat16 or float32",
        "width": "w must be [V/R, H] with H = 3",
        "target": "target must be int32 or int64; got torch.float32",
        "rows": "target must have 10 rows, like x; got shape [3]",
        "sharded rows": "target must have 20 rows, of all ranks; got shape [10]",
        "dtype": "w must be torch.float32 on cpu, like x; got torch.float64",
        "bias": "bias must be [V/R] with V/R = 24; got shape [3]",
        "reduction": "reduction must be one of mean, sum, none; got 'average'",
        "smoothing": "label_smoothing must be at least 0 and less than 1; got 1.0",
        "z_loss": "z_loss must be at least 0; got -1.0",
        "chunk": "chunk_rows must be at least 1; got 0",
        "whole chunk": "chunk_rows must be at least 1; got 2.0",
        "factor": "z_loss must be at least 0; got '1'",
        "ignored": "ignore_index must be an integer; got None",
        "columns": "vocabulary must be at least 1; got 48.0",
        "impl": "impl must be one of auto, fused, unfused; got 'chunked'",
        "no impl": "impl must be one of auto, fused, unfused; got None",
        "too few rows of w": "w must have 36 rows, this rank's share of vocabulary=72",
        "no column for a rank": "vocabulary must have a column for each of 2 ranks",
    }
    for errors in ranks(2).run(_errors):
        for name, (kind, text, _) in errors.items():
            assert kind == "ArgumentError", (name, text)
            assert text.startswith(f"linear_cross_entropy: {texts[name]}"), (name, text)


def _differing() -> list[Any]:
    """Errors of calls that no rank has made before, as only these are compared."""
    rank, errors = dist.get_rank(), []
    for number in range(3):
        x, w, target = _tensors(2 * COLUMNS + 2 + 2 * number)
        w = _own(w)
        options = {"z_loss": float(rank)} if number == 0 else {}
        w = w[: len(w) - rank] if number == 1 else w
        x.requires_grad_(number == 2 and rank == 1)
        errors.append(error_of(interlace.linear_cross_entropy, x, w, target, **options))
    return errors


def test_ranks_that_differ_are_told_in_what(ranks: Any) -> None:
    for errors in ranks(2).run(_differing):
        texts = ("z loss must be", "vocabulary must be", "whether x needs its gradient must be")
        for (kind, text, _), wanted in zip(errors, texts, strict=True):
            assert kind == "RankMismatchError"
            assert wanted in text
