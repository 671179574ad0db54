"""A product, its sum over ranks, residual and norm: results, traffic, faults, and what is refused.

``interlace.testing.cases.norms`` has calls in every implementation, which other tests make.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay import replays
from interlace.costs import find_cost
from interlace.gemm import dispatch
from interlace.gemm.epilogue import Norm
from interlace.gemm.scaled import block_scale_shapes, dequantised
from interlace.operators.gemm_all_reduce import normed, normed_launch
from interlace.operators.gemm_all_reduce.config import GemmAllReduceNormConfig
from interlace.operators.gemm_all_reduce.normed import GemmAllReduceNorm
from tests.errors import error_of

IMPLS = [each.name for each in GemmAllReduceNorm.implementations]
EPS = 1e-5
FLOAT8 = torch.float8_e4m3fn


def _tensors(tokens: int, columns: int, inner: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    shared = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(tokens, inner, generator=own).to(dtype),
        "w": torch.randn(columns, inner, generator=own).to(dtype),
        "bias": torch.randn(columns, generator=shared).to(dtype),
        "residual": torch.randn(tokens, columns, generator=shared).to(dtype),
        "norm_weight": torch.randn(columns, generator=shared),
        "norm_bias": torch.randn(columns, generator=shared).to(dtype),
    }


def _exact(tensors: dict[str, torch.Tensor], norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the residual in float64, whose sum over ranks torch computes."""
    total = tensors["x"].double() @ tensors["w"].double().T
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    total += tensors["bias"].double() + tensors["residual"].double()
    # The norm is of the residual that is stored.
    h = total.to(tensors["residual"].dtype).double()
    value = h - h.mean(-1, keepdim=True) if norm == "layer" else h
    y = value * (value.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return y * tensors["norm_weight"].double() + tensors["norm_bias"].double(), total


def _errors(shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> dict[Any, float]:
    """The largest error of each call, relative to the largest element; inf if bits differ."""
    errors = {}
    for shape, norm, impl in itertools.product(shapes, ("rms", "layer"), IMPLS):
        tensors = _tensors(*shape, dtype)
        y, residual, scale = interlace.gemm_all_reduce(**tensors, norm=norm, eps=EPS, impl=impl)
        assert scale.numel() == 0
        exact = _exact(tensors, norm)
        for name, result, right in zip(("y", "h"), (y, residual), exact, strict=True):
            assert result.dtype == dtype
            error = (result.double() - right).abs().max() / right.abs().max()
            first = result.clone()
            if dist.get_world_size() > 1:
                dist.broadcast(first, 0)
            same = torch.equal(first, result)
            errors[shape, norm, impl, name] = error.item() if same else float("inf")
    return errors


_BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_FEW, _MANY = (3, 97, 17), (18, 33, 48)


@pytest.mark.parametrize(
    ("world_size", "dtype", "shapes"),
    [
        (1, torch.float32, [_FEW, _MANY]),
        (2, torch.float32, [(1, 40, 24), _FEW, _MANY]),
        (2, torch.float16, [_FEW]),
        (2, torch.bfloat16, [_FEW]),
        (3, torch.float32, [(1, 40, 24)]),
        (3, torch.float16, [(1, 40, 24)]),
        (3, torch.bfloat16, [_FEW]),
    ],
)
def test_every_implementation(
    ranks: Any, world_size: int, dtype: torch.dtype, shapes: list[tuple[int, int, int]]
) -> None:
    """One token and several, sizes that fill no tile, both norms: as in float64, within roundings;
    the same bits on every rank.
    """
    for errors in ranks(world_size).run(_errors, shapes, dtype):
        assert {call: error for call, error in errors.items() if not error < _BOUNDS[dtype]} == {}


def _quantized_in_blocks(columns: int) -> list[tuple[torch.Tensor, ...]]:
    """Each implementation's y, its scales, and the exact norm."""
    tensors = _tensors(3, columns, 32, torch.bfloat16)
    exact = _exact(tensors, "rms")[0]
    answers = []
    for impl in IMPLS:
        y, _, scales = interlace.gemm_all_reduce(
            **tensors, norm="rms", eps=EPS, impl=impl, out_dtype=FLOAT8, block_scales=True
        )
        answers.append((y.float(), scales, exact))
    return answers


@pytest.mark.parametrize("columns", [64, 384, 520])
def test_float8_with_scales_of_blocks(ranks: Any, columns: int) -> None:
    """Each block of 128 elements fills the range, the last and shorter one too, so its error is
    relative to its own largest element.
    """
    for answers in ranks(2).run(_quantized_in_blocks, columns):
        for y, scales, exact in answers:
            assert scales.shape == (3, -(-columns // 128))
            by_element = scales.repeat_interleave(128, 1)[:, :columns]
            for first in range(0, columns, 128):
                block = slice(first, first + 128)
                assert y[:, block].abs().amax(1).tolist() == pytest.approx([448] * 3, rel=0.13)
                error = (y.double() * by_element - exact)[:, block].abs()
                largest = exact[:, block].abs().amax(1, keepdim=True)
                # As above: the interpreter loses carries.
                wrong = error > 0.07 * exact[:, block].abs() + 0.01 * largest
                assert wrong.float().mean() < 0.05
                assert (error <= 0.6 * exact[:, block].abs() + 0.005 * largest).all()


def _quantized(scale: float | None) -> list[Any]:
    tensors = _tensors(4, 64, 32, torch.bfloat16)
    y = _exact(tensors, "rms")[0]
    given = None if scale is None else torch.tensor([scale])
    answers = []
    for impl in IMPLS:
        result = interlace.gemm_all_reduce(
            **tensors, norm="rms", eps=EPS, impl=impl, out_dtype=FLOAT8, scale=given
        )
        answers.append((result.y.float(), result.scale, y))
    return answers


@pytest.mark.parametrize("scale", [None, 0.25, 0.004])
def test_float8(ranks: Any, scale: float | None) -> None:
    """y times its scale is the norm, a scale per row fills the range, and what is too large for a
    scale becomes the largest number.
    """
    for answers in ranks(2).run(_quantized, scale):
        for quantized, scales, exact in answers:
            if scale is None:
                assert scales.shape == (4, 1)
                assert quantized.abs().amax(1).tolist() == pytest.approx([448.0] * 4, rel=0.13)
                found, right = quantized * scales, exact
            else:
                assert scales.numel() == 0
                found, right = quantized, (exact / scale).clamp(-448, 448)
            # Triton's interpreter loses a carry next to powers of two, which halves the number.
            wrong = (found.double() - right).abs() > 0.07 * right.abs() + 0.01 * right.abs().max()
            assert wrong.float().mean() < 0.05
            assert ((found.double() - right).abs() <= 0.6 * right.abs() + 0.02).all()


def _of_float8(kind: str) -> dict[str, tuple[float, float]]:
    """Errors of y and the residual of products of float8, by implementation."""
    tensors = _tensors(5, 150, 260, torch.bfloat16)
    own = torch.Generator().manual_seed(7 + dist.get_rank())
    x, w = (tensors[name].to(FLOAT8) for name in ("x", "w"))
    of_x, of_w = {"rows": ((5, 1), (150,)), "blocks": block_scale_shapes(x, w)}[kind]
    x_scale, w_scale = (torch.rand(shape, generator=own) + 0.5 for shape in (of_x, of_w))
    by_row = w_scale if kind == "blocks" else w_scale.reshape(-1)
    wide = {
        "x": dequantised(x, x_scale if kind == "blocks" else x_scale.reshape(-1), 1).double(),
        "w": dequantised(w, by_row, 128).double(),
    }
    exact = _exact(tensors | wide, "rms")
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    errors = {}
    for impl in (*(each for each in IMPLS if each != "fused"), "auto"):
        y, h, _ = interlace.gemm_all_reduce(
            **(tensors | {"x": x, "w": w}), **scales, norm="rms", eps=EPS, impl=impl
        )
        assert y.dtype == h.dtype == torch.bfloat16
        errors[impl] = tuple(
            float((found.double() - right).norm() / right.norm())
            for found, right in zip((y, h), exact, strict=True)
        )
    return errors


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_products_of_float8(ranks: Any, kind: str) -> None:
    for errors in ranks(2).run(_of_float8, kind):
        # Parts and sums are bfloat16, truncated by the interpreter.
        assert {impl: each for impl, each in errors.items() if not max(each) < 2e-2} == {}


def _float8_by_one_kernel() -> str:
    x, w = torch.ones(2, 16).to(FLOAT8), torch.ones(16, 16).to(FLOAT8)
    scales = {"x_scale": torch.ones(1), "w_scale": torch.ones(1)}
    kind, message = error_of(
        lambda: interlace.gemm_all_reduce(x, w, norm="rms", impl="fused", **scales)
    )[:2]
    return f"{kind}: {message}"


def test_one_kernel_multiplies_no_float8(ranks: Any) -> None:
    for message in ranks(2).run(_float8_by_one_kernel):
        assert message.startswith(
            "ArgumentError: gemm_all_reduce_norm: impl='fused' must have float16, bfloat16 or "
            "float32 operands."
        )


def _traffic(impl: str, dtype: torch.dtype) -> tuple[int, int, dict[int, int]]:
    tensors = _tensors(3, 40, 16, dtype)
    traffic = interlace.group_of().traffic
    traffic.reset()
    interlace.gemm_all_reduce(**tensors, norm="rms", eps=EPS, impl=impl)
    return traffic.message_bytes, traffic.signals, dict(traffic.bytes_to)


@pytest.mark.parametrize(("impl", "part_itemsize"), [("fused", 4), ("pushed", None)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_traffic_is_what_the_formula_says(
    ranks: Any, world_size: int, impl: str, part_itemsize: int | None
) -> None:
    cost = find_cost(GemmAllReduceNorm.name).formula(
        rows=3, columns=40, inner=16, itemsize=2, world_size=world_size,
        part_itemsize=part_itemsize,
    )  # fmt: skip
    for rank, answer in enumerate(ranks(world_size).run(_traffic, impl, torch.bfloat16)):
        sent, signals, sent_to = answer
        assert (sent, signals) == (cost.link_bytes, 0)
        assert set(sent_to) == set(range(world_size)) - {rank}


def _many_sizes(impl: str) -> list[float]:
    """Calls of changing sizes, whose values lie in the same memory one after another."""
    errors = []
    # Each half of the memory meets layouts that grow and that shrink.
    for tokens, columns in [
        (1, 64), (20, 96), (2, 33), (64, 8), (5, 200), (1, 64), (1, 64), (2, 33), (5, 200),
    ]:  # fmt: skip
        tensors = _tensors(tokens, columns, 16, torch.float32)
        # A tensor of zeros, and sums that are zero, must arrive like any other.
        tensors["x"][: tokens // 2] = 0.0
        result = interlace.gemm_all_reduce(**tensors, norm="rms", eps=EPS, impl=impl)
        exact = _exact(tensors, "rms")[0]
        errors.append(((result.y.double() - exact).abs().max() / exact.abs().max()).item())
    return errors


@pytest.mark.parametrize("impl", ["fused", "pushed"])
def test_calls_of_changing_sizes(ranks: Any, impl: str) -> None:
    """Slots are free again after every call, whatever the next one's layout is."""
    for errors in ranks(3).run(_many_sizes, impl):
        assert max(errors) < 2e-5


def _absent(impl: str) -> Any:
    """What rank 0 sees where rank 1 does not make the second call; the group is theirs alone."""
    group = dist.new_group()
    call = {**_tensors(2, 24, 16, torch.bfloat16), "norm": "rms", "impl": impl, "group": group}
    interlace.gemm_all_reduce(**call)
    interlace.set_deadline(2.0, group)
    start = time.monotonic()
    error = error_of(interlace.gemm_all_reduce, **call) if dist.get_rank() == 0 else None
    seconds = time.monotonic() - start
    dist.barrier()
    return error, seconds


@pytest.mark.parametrize("impl", ["fused", "pushed"])
def test_a_peer_that_does_not_come(ranks: Any, impl: str) -> None:
    """The others name it after the deadline."""
    ((kind, message, fields), seconds), _ = ranks(2).run(_absent, impl)
    assert kind == "PeerTimeoutError"
    assert fields["peer"] == 1
    assert message.startswith("gemm_all_reduce_norm: rank 0 waited")
    assert 2.0 <= seconds < 60


def _mismatch() -> Any:
    tensors = _tensors(2, 24, 16, torch.float32)
    eps = 1e-6 if dist.get_rank() == 0 else 1e-5
    return error_of(interlace.gemm_all_reduce, **tensors, norm="rms", eps=eps)


def test_ranks_that_differ(ranks: Any) -> None:
    """A different eps is another call: every rank says so."""
    for kind, message, _ in ranks(2).run(_mismatch):
        assert kind == "RankMismatchError"
        assert "eps" in message


def _vector() -> bool:
    tensors = _tensors(1, 24, 16, torch.float32)
    row = interlace.gemv_all_reduce(**tensors, eps=EPS)
    vector = interlace.gemv_all_reduce(
        **(tensors | {name: tensors[name][0] for name in ("x", "residual")}), eps=EPS
    )
    assert vector.y.shape == (24,)
    return torch.equal(row.y[0], vector.y) and torch.equal(row.residual[0], vector.residual)


def test_a_vector_is_one_token(ranks: Any) -> None:
    assert ranks(2).run(_vector) == [True, True]


def _empty() -> list[list[Any]]:
    outcomes = []
    for function, impl in itertools.product(
        (interlace.gemv_all_reduce, interlace.gemm_all_reduce), IMPLS
    ):
        for tokens, columns in ((0, 24), (3, 0)):
            tensors = _tensors(tokens, columns, 16, torch.bfloat16)
            results = function(**tensors, impl=impl, out_dtype=FLOAT8)
            shapes = [tuple(result.shape) for result in results]
            outcomes.append([shapes, results.scale.flatten().tolist()])
    return outcomes


def test_no_tokens_and_no_columns(ranks: Any) -> None:
    """A row without columns has the scale of a row of zeros."""
    none = [[(0, 24), (0, 24), (0, 1)], []]
    narrow = [[(3, 0), (3, 0), (3, 1)], [1.0] * 3]
    for outcomes in ranks(2).run(_empty):
        assert outcomes == [none, narrow] * (2 * len(IMPLS))


def _scales_of_small_rows(impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of zeros, of a number whose 448th is no float32, and of a larger one."""
    x = torch.tensor([[0.0], [1e-44], [448.0]]) if dist.get_rank() == 0 else torch.zeros(3, 1)
    w = torch.tensor([[1.0], [0.0]])
    y, _, scale = interlace.gemm_all_reduce(x, w, norm="rms", eps=1.0, impl=impl, out_dtype=FLOAT8)
    return y.float(), scale


@pytest.mark.parametrize("impl", IMPLS)
def test_scales_are_never_zero(ranks: Any, impl: str) -> None:
    """Nothing is divided by a scale that has become 0."""
    for y, scale in ranks(2).run(_scales_of_small_rows, impl):
        assert y.isfinite().all()
        assert (scale[:2] == 1).all()
        assert scale[2] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "batch"}, "norm must be one of rms, layer; got 'batch'"),
        (
            {"residual": torch.zeros(2, 8)},
            r"residual must be \[B, N\] = \[2, 4\] of the sum's dtype",
        ),
        ({"residual": torch.zeros(2, 4, device="meta")}, "residual must be on the device of x"),
        ({"residual": torch.zeros(2, 4).to_sparse()}, "residual must be dense"),
        ({"norm_bias": [0.0] * 4}, "norm_bias must be a torch.Tensor; got list"),
        ({"norm_weight": torch.zeros(5)}, r"norm_weight must be \[N\] with N = 4"),
        ({"norm_bias": torch.zeros(4, dtype=torch.int32)}, "norm_bias must be"),
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"eps": "1"}, "eps must be a number; got '1'"),
        ({"norm": 3}, "norm must be a word or None; got 3"),
        ({"scale": torch.ones(1)}, "scale must be given for out_dtype=torch.float8_e4m3fn only"),
        ({"scale": torch.ones(2), "out_dtype": FLOAT8}, "scale must be one float32 element"),
        (
            {"block_scales": True},
            "block_scales must come with out_dtype=torch.float8_e4m3fn and no",
        ),
        (
            {"block_scales": True, "scale": torch.ones(1), "out_dtype": FLOAT8},
            "block_scales must come with out_dtype=torch.float8_e4m3fn and no scale; got a scale",
        ),
        ({"out_dtype": torch.int8}, "out_dtype must be"),
        ({"x_scale": torch.ones(1)}, "x_scale must be given for float8 only"),
        ({"impl": "quick"}, "impl must be one of .*pushed.*; got 'quick'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.ones(2, 3), "w": torch.ones(4, 3), "norm_weight": torch.ones(4)}
    with pytest.raises(interlace.ArgumentError, match=message):
        interlace.gemm_all_reduce(**(arguments | change))


@pytest.mark.parametrize("name", ["residual", "norm_bias", "scale"])
@pytest.mark.parametrize("function", [interlace.gemm_all_reduce, interlace.gemv_all_reduce])
def test_options_of_a_norm_need_one(function: Any, name: str) -> None:
    with pytest.raises(interlace.ArgumentError, match=f"{name} must come with norm_weight or norm"):
        function(torch.ones(2, 3), torch.ones(4, 3), **{name: torch.ones(4)})


def test_gradients_are_refused() -> None:
    """The error names the functions that users call, and a parameter of a norm may be the cause."""
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(interlace.ArgumentError, match="cannot be differentiated"):
        interlace.gemm_all_reduce(x, torch.ones(4, 3), norm="rms")
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(interlace.ArgumentError) as refused:
        interlace.gemv_all_reduce(torch.ones(2, 3), torch.ones(4, 3), norm_weight=weight)
    assert str(refused.value) == (
        "gemm_all_reduce or gemv_all_reduce with a norm: this operator cannot be differentiated, "
        "as it has no gradient; got an argument that requires a gradient. Call it under "
        "torch.no_grad() or torch.inference_mode(), or give it detached arguments."
    )


def test_columns_of_a_receiving_program() -> None:
    """As few as there are processors for, a column for each thread at least, the row at most."""
    one, four = GemmAllReduceNormConfig(num_warps=1), GemmAllReduceNormConfig(num_warps=4)
    assert one.received_columns(rows=8192, tokens=1, most_programs=132) == 256
    assert four.received_columns(rows=8192, tokens=16, most_programs=132) == 1024
    assert four.received_columns(rows=8192, tokens=64, most_programs=132) == 4096
    assert four.received_columns(rows=40, tokens=1, most_programs=132) == 128
    assert GemmAllReduceNormConfig(columns=500).received_columns(
        rows=8192, tokens=1, most_programs=132
    ) == 512  # fmt: skip


def test_what_many_rows_take() -> None:
    """One kernel behind the product while few bytes arrive, and the sum and then the norm if not:
    times of many rows do not follow from those of few.
    """
    operator, device = GemmAllReduceNorm(), torch.device("cpu")
    sizes = {"columns": 64, "inner": 64, "dtype": torch.bfloat16, "world_size": 2, "device": device}
    assert operator.choose(rows=256, **sizes).impl != "gemm"
    assert operator.choose(rows=257, **sizes).candidates == ("pushed", "unfused")
    of_32_mib = (32 << 20) // (64 * 2)
    assert operator.choose(rows=of_32_mib, **sizes).impl == "pushed"
    # Each of four ranks gets the parts of three.
    assert operator.choose(rows=of_32_mib // 2, **sizes | {"world_size": 4}).impl == "gemm"
    choice = operator.choose(rows=of_32_mib + 1, **sizes)
    assert choice.candidates == ("gemm", "unfused")
    assert "up to 256 rows" in choice.reason


def _launched_again(launched: Launch) -> Any:
    """Stand for ``Launch.again``, as the interpreter compiles nothing."""

    def anew(programs: int, arguments: Mapping[str, Any]) -> None:
        Launch(launched.kernel, (programs,), arguments, launched.constants)()

    return anew


def _float8_tensors(tokens: int, kind: str) -> dict[str, torch.Tensor]:
    """Operands of float8 with scales of rows or of blocks, and what follows the sum."""
    tensors = _tensors(tokens, 24, 160, torch.bfloat16)
    own = torch.Generator().manual_seed(7 + dist.get_rank())
    x, w = tensors.pop("x").to(FLOAT8), tensors.pop("w").to(FLOAT8)
    shapes = ((tokens, 1), (1, 24)) if kind == "row" else block_scale_shapes(x, w)
    scales = [torch.rand(shape, generator=own) + 0.5 for shape in shapes]
    return {"x": x, "w": w, "bias": tensors.pop("bias"), "x_scale": scales[0],
            "w_scale": scales[1], **tensors}  # fmt: skip


def _of_one_form(kind: str, impl: str) -> tuple[list[bool], bool]:
    """Calls of other numbers of rows by what the first one has left, and by the operator: whether
    they are equal; and whether one of 513 rows is made so.
    """
    remembered: list[Any] = []

    def tensors(rows: int) -> dict[str, torch.Tensor | None]:
        if kind:
            return dict(_float8_tensors(rows, kind))
        x, w, bias, *others = _tensors(rows, 24, 16, torch.float32).items()
        return dict([x, w, bias, ("x_scale", None), ("w_scale", None), *others])

    group = interlace.group_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "again", _launched_again)
        patch.setattr(normed, "_known_call", lambda *_: (("any",), None))
        patch.setattr(group.replays, "remember_form", lambda _, again: remembered.append(again))
        _normed(tensors(260), impl=impl)
    (again,) = remembered
    are_equal = []
    for rows in (257, 300):
        given = tensors(rows)
        found = again(group, None, *given.values(), None)
        are_equal.append(all(map(torch.equal, found, _normed(given, impl=impl))))
    return are_equal, again(group, None, *tensors(513).values(), None) is not None


def _normed(tensors: dict[str, torch.Tensor | None], **options: Any) -> interlace.Normed:
    return interlace.gemm_all_reduce(**tensors, norm="rms", eps=EPS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["pushed", "gemm"])
@pytest.mark.parametrize("kind", ["", "row", "block"])
def test_calls_of_one_form(ranks: Any, kind: str, impl: str) -> None:
    """What one call has left makes calls of other operands and of any number of rows for which
    there is memory, and no others.
    """
    for are_equal, is_made in ranks(2).run(_of_one_form, kind, impl):
        assert are_equal == [True, True]
        # The kernel behind a product has memory for as many rows as a power of two.
        assert is_made == (impl == "gemm")


def _beyond_the_limit() -> int:
    """How many calls of more rows than one kernel is chosen for are remembered by their form."""
    group, remembered = interlace.group_of(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "again", _launched_again)
        patch.setattr(normed, "_known_call", lambda *_: (("any",), None))
        patch.setattr(normed_launch, "MOST_PUSHED_BYTES", 1 << 10)
        patch.setattr(group.replays, "remember_form", lambda _, again: remembered.append(again))
        _normed(dict(_tensors(260, 24, 16, torch.float32)), impl="pushed")
    return len(remembered)


def test_more_rows_than_are_chosen_for_have_no_form(ranks: Any) -> None:
    """They had what makes calls of as many rows, which took other operands."""
    assert ranks(2).run(_beyond_the_limit) == [0, 0]


class _OnGpu:
    """A tensor that says it lies on a GPU."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_forms_tell_pushed_rows_from_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of many rows have one form for each of the two ways in which they run."""
    monkeypatch.setattr(normed_launch, "MOST_PUSHED_BYTES", 400 * 24 * 4)

    def form(rows: int) -> Any:
        x, w, residual = torch.ones(rows, 16), torch.ones(24, 16), torch.ones(rows, 24)
        given: list[Any] = [_OnGpu(x), _OnGpu(w), None, _OnGpu(residual)]
        steps = [None, None, "rms", EPS, None, None, False, None, None, "", "auto", ""]
        known = normed._known_call(2, *given, *steps)
        assert known is not None
        assert known[1] is None  # wherever the operands lie
        return known[0]

    forms = {rows: form(rows) for rows in (257, 300, 400, 401, 900)}
    assert forms[257] == forms[300] == forms[400] != forms[401] == forms[900]


def _with_other_tensors(impl: str, w_along_k: bool) -> list[tuple[int, bool]]:
    """How often a call by what the first one of its rows has left goes through the implementation,
    and whether its results are those of the operator; twice with the same operands.
    """
    group, remembered = interlace.group_of(), []

    def tensors() -> dict[str, torch.Tensor]:
        given = _tensors(5, 24, 16, torch.float32)
        return given if w_along_k else given | {"w": given["w"].T.contiguous().T}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "again", _launched_again)
        patch.setattr(normed, "_known_call", lambda *_: ((impl, w_along_k), (0,)))
        patch.setattr(group.replays, "remember_form", lambda _, again: remembered.append(again))
        interlace.gemm_all_reduce(**tensors(), norm="layer", eps=EPS, impl=impl)
    _, again = remembered  # the first one is of other rows
    results = []
    for _ in range(2):
        others = {name: tensor + 1 for name, tensor in tensors().items()}
        x, w, bias, *vectors = others.values()
        ways = mock.patch.object(dispatch, "_run_decided", wraps=dispatch._run_decided)
        # The second time is as good as the eighth.
        with ways as prepared, mock.patch.object(replays, "_FIRST_TRY", 2):
            found = again(group, (impl, w_along_k, "these"), x, w, bias, None, None, *vectors, None)
        right = interlace.gemm_all_reduce(**others, norm="layer", eps=EPS, impl=impl)
        results.append((prepared.call_count, all(map(torch.equal, found, right))))
    return results


@pytest.mark.parametrize("w_along_k", [True, False])
@pytest.mark.parametrize("impl", ["fused", "pushed"])
def test_calls_of_as_many_rows(ranks: Any, impl: str, w_along_k: bool) -> None:
    """What one call has left makes calls of other tensors, at first and when they come again."""
    for results in ranks(2).run(_with_other_tensors, impl, w_along_k):
        # Weights along N are copied, and a call that comes again is made a graph.
        assert results == [(int(impl == "fused" and not w_along_k), True), (1, True)]
