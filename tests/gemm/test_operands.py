"""What all operators around a product refuse, with its message; what they make of odd layouts;
their configurations.
"""

import inspect
import re

import pytest
import torch

import interlace
from interlace import ArgumentError, BackendError, GemmReduceScatterConfig
from interlace.comm.groups import process_groups
from interlace.comm.launching.kernels import describe_matrix
from interlace.gemm.choice import Choice
from interlace.gemm.implementations import remote_stores
from interlace.gemm.launch import describe_own
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands, contiguous_dimension
from interlace.gemm.splits import balanced
from interlace.registry import operator_named, operators

OPERATORS = ["all_gather_gemm", "gemm_all_reduce", "gemm_all_to_all", "gemm_reduce_scatter"]
f8, f32, f64, bf16 = torch.float8_e4m3fn, torch.float32, torch.float64, torch.bfloat16


def _t(*shape, dtype=f32, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(("rows", "ranks"), [(0, 3), (2, 3), (7, 3), (8, 4)])
def test_rows_are_shared_out_as_by_torch(rows, ranks):
    assert balanced(rows, ranks) == [len(part) for part in torch.empty(rows).tensor_split(ranks)]


ONE = {"x_scale": torch.ones(1), "w_scale": torch.ones(1)}
CAST = "Cast one of them: autocast reaches the layers of interlace.nn, and no operators."
SCALES = "must be [] or [1], or"


@pytest.mark.parametrize(
    ("x", "w", "more", "message"),
    [
        (_t(4), _t(5, 4), {}, "x must be [M, K]; got shape [4]. Flatten leading dimensions first."),
        (_t(2, 4), _t(4), {}, "w must be [N, K]; got shape [4]."),
        ([[1.0]], _t(5, 4), {}, "x must be a torch.Tensor; got list."),
        (_t(2, 4).to_sparse(), _t(5, 4), {},
            "x must be dense; got torch.sparse_coo. Call .to_dense()."),
        (torch.nested.nested_tensor([_t(2, 4)]), _t(5, 4), {},
            "x must be dense; got a nested tensor. Concatenate its parts, or pad them."),
        (_t(2, 3), _t(5, 4), {}, "x and w must have the same last dimension, K; got 3 and 4."),
        (_t(2, 4), _t(4, 5), {},
            "x and w must have the same last dimension, K; got 4 and 5. Pass w.T: w is [N, K], "
            "as in nn.Linear."),
        (_t(2, 4, dtype=f64), _t(5, 4, dtype=f64), {},
            "x must be float16, bfloat16, float32 or float8_e4m3fn; got torch.float64."),
        (_t(2, 4), _t(5, 4, dtype=bf16), {},
            f"w must have the dtype of x, torch.float32; got torch.bfloat16. {CAST}"),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=torch.float8_e5m2), ONE,
            f"w must have the dtype of x, torch.float8_e4m3fn; got torch.float8_e5m2. {CAST}"),
        (_t(2, 4), _t(5, 4, device="meta"), {}, "w must be on the device of x, cpu; got meta."),
        (_t(2, 4), _t(5, 8)[:, ::2], {},
            "w must be contiguous along K or along N; got strides [8, 2]. Keep w as nn.Linear "
            "does, "
            "[N, K], pass .T of a contiguous [K, N], or call .contiguous() once."),
        (_t(2, 4), _t(5, 4), {"out_dtype": f8},
            "out_dtype must be float16, bfloat16 or float32; got torch.float8_e4m3fn."),
        (_t(2, 4), _t(5, 4), {"bias": _t(4)}, "bias must be [N] with N = 5; got shape [4]."),
        (_t(2, 4), _t(5, 4), {"bias": [0.0] * 5}, "bias must be a torch.Tensor; got list."),
        (_t(2, 4), _t(5, 4), {"bias": _t(5).to_sparse()},
            "bias must be dense; got torch.sparse_coo. Call .to_dense()."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), ONE | {"w_scale": 1.0},
            "w_scale must be a torch.Tensor; got float."),
        (_t(2, 4), _t(5, 4), {"bias": _t(5), "out_dtype": bf16},
            "bias must be torch.bfloat16 on cpu, like the output; got torch.float32 on cpu."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), {"bias": _t(5)} | ONE,
            "bias must be torch.bfloat16 on cpu, like the output; got torch.float32 on cpu."),
        (_t(2, 4), _t(5, 4), {"x_scale": _t(1)},
            "x_scale must be given for float8 only; x is torch.float32."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), {"x_scale": _t(1)},
            "w_scale must be given, as w is float8; got none. Pass torch.ones(1) if there is "
            "none."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), ONE | {"x_scale": _t(4)},
            f"x_scale {SCALES} [M] or [2, 1] with M = 2; or both for blocks, x_scale [2, 1] and "
            "w_scale [1, 1]; got shape [4]."),
        (_t(2, 260, dtype=f8), _t(5, 260, dtype=f8), ONE | {"x_scale": _t(2, 3)},
            f"x_scale {SCALES} [M] or [2, 1] with M = 2; or both for blocks, x_scale [2, 3] and "
            "w_scale [1, 3]; got shape [2, 3]."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), ONE | {"w_scale": _t(5, 1)},
            f"w_scale {SCALES} [N] or [1, 5] with N = 5; or both for blocks, x_scale [2, 1] and "
            "w_scale [1, 1]; got shape [5, 1]."),
        (_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), ONE | {"x_scale": _t(2, dtype=bf16)},
            "x_scale must be float32 on cpu, like x; got torch.bfloat16 on cpu."),
        (_t(2, 4, dtype=f8).requires_grad_(), _t(5, 4, dtype=f8), ONE,
            "float8 operands must not require gradients; got one that "
            "does. Detach them or use torch.no_grad(); to train, multiply in bfloat16."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("operator", OPERATORS)
def test_bad_arguments(operator, x, w, more, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{operator}: {message}')}$"):
        getattr(interlace, operator)(x, w, **more)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_weight_of_one_block_has_one_scale(operator):
    x, w = _t(2, 4, dtype=f8).fill_(2), _t(16, 4, dtype=f8).fill_(1)
    scales = torch.tensor([[0.5], [4.0]]), torch.tensor([[3.0]])
    of_pair = {"x_scale": scales[0], "w_scale": scales[1], "impl": "unfused"}
    y = getattr(interlace, operator)(x, w, **of_pair)
    assert y.tolist() == [[12.0] * 16, [96.0] * 16]


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_implementation_that_does_not_exist(operator):
    words = ", ".join(operator_named(operator).words)
    with pytest.raises(
        ArgumentError, match=rf"^{operator}: impl must be one of {words}; got 'fast'\.$"
    ):
        getattr(interlace, operator)(_t(2, 4), _t(5, 4), impl="fast")


@pytest.mark.parametrize("operator", OPERATORS)
def test_stock_pairs_refuse_the_cpu_by_name(operator):
    declaration = operator_named(operator)
    stock = [
        implementation.name
        for implementation in declaration.implementations
        if implementation.is_stock
    ]
    for name in stock:
        with pytest.raises(ArgumentError, match=f"impl='{name}' must have a GPU"):
            getattr(interlace, operator)(_t(2, 4), _t(5, 4), impl=name)


@pytest.mark.parametrize("operator", OPERATORS)
def test_nccl_is_another_word_for_the_unfused_pair(operator):
    x, w, declaration = torch.ones(2, 4), torch.ones(5, 4), operator_named(operator)
    assert declaration.implementation("nccl") is declaration.implementation("unfused")
    results = (getattr(interlace, operator)(x, w, impl=impl) for impl in ("nccl", "unfused"))
    assert torch.equal(*results)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_configuration_is_another_operators(operator):
    config = interlace.EmbeddingAllToAllConfig()
    own = r"\w+Config( or GemvAllReduceConfig)?"
    refusal = rf"^{operator}: config must be of type {own}; got EmbeddingAllToAllConfig\.$"
    with pytest.raises(ArgumentError, match=refusal):
        getattr(interlace, operator)(_t(2, 4), _t(5, 4), config=config)


@pytest.mark.parametrize(
    ("impl", "config", "own"),
    [
        ("fused", interlace.GemvAllReduceConfig(), "GemmAllReduceConfig"),
        ("gemv", interlace.GemmAllReduceConfig(), "GemvAllReduceConfig"),
    ],
)
def test_a_configuration_is_another_kernels(impl, config, own):
    refusal = rf"config of impl='{impl}' must be of type {own}; got {type(config).__name__}\.$"
    for operator in (interlace.gemm_all_reduce, interlace.gemv_all_reduce):
        with pytest.raises(ArgumentError, match=refusal):
            operator(_t(2, 4), _t(5, 4), impl=impl, config=config)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            torch.tensor([2]),
            (
                "must be a list of rows, an integer for each rank; got Tensor. Call .tolist() on "
                "a tensor."
            ),
        ),
        ([2.0], "must hold integers; got 2.0."),
        ([None], "must hold integers; got None."),
        ([1, 1], "must have an entry for each of 1 ranks; got [1, 1]."),
        ([-2], "must not be negative; got [-2]."),
    ],
)
@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "all_gather_gemm"])
def test_bad_splits(operator, splits, message):
    with pytest.raises(ArgumentError) as caught:
        getattr(interlace, operator)(_t(2, 4), _t(5, 4), splits=splits)
    assert str(caught.value) == f"{operator}: splits {message}"


def test_float8_needs_a_gpu_that_has_it(monkeypatch):
    """An A100 has not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    operands = Operands(_t(2, 4, dtype=f8), _t(5, 4, dtype=f8), None, None, None, bf16)
    with pytest.raises(BackendError) as caught:
        operands.require_supported("gemm_all_reduce", takes_float8=True)
    assert str(caught.value) == (
        "gemm_all_reduce: float8_e4m3fn must run on a GPU of compute capability 8.9 or later; got "
        "NVIDIA A100 with 8.0. "
        "It supports float16, bfloat16 and float32."
    )
    narrow = Operands(_t(2, 4, dtype=bf16), _t(5, 4, dtype=bf16), None, None, None, bf16)
    narrow.require_supported("gemm_all_reduce", takes_float8=True)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("inner", [1, 7, 16])
def test_kernels_get_aligned_operands(dtype, inner):
    """Views at odd places, rows too close, columns apart: copied. What is aligned is not."""
    buffer = torch.randn(64, 64).to(dtype)
    for x in (
        buffer[:5, :inner],
        buffer[:5, 3 : 3 + inner],
        buffer[:inner, :5].T,
        buffer.flatten()[: 5 * inner].view(5, inner),
    ):
        for w in (buffer[9:12, :inner], buffer[:inner, :3].T, buffer[:inner, 5:8].T):
            operands = Operands(x, w, None, None, None, dtype).for_kernel()
            assert torch.equal(operands.x, x)
            assert torch.equal(operands.w, w)
            assert contiguous_dimension(operands.x) == 1
            for matrix, along in ((operands.x, 1), (operands.w, contiguous_dimension(w))):
                assert matrix.data_ptr() % ALIGNMENT_BYTES == 0
                assert (
                    matrix.stride(1 - along) * dtype.itemsize % ALIGNMENT_BYTES == 0
                    or matrix.shape[1 - along] == 1
                )
    operands = Operands(buffer[:5], buffer[:3], None, None, None, dtype)
    assert operands.for_kernel().x is operands.x
    assert operands.for_kernel().w is operands.w


def test_an_expanded_row_is_copied():
    """As gradients of sums are: rows that are no distance apart, which no descriptor describes."""
    row = torch.randn(16)
    operands = Operands(row.expand(5, 16), row.expand(3, 16), None, None, None, f32).for_kernel()
    for matrix in (operands.x, operands.w):
        assert matrix.stride() == (16, 1)
        assert torch.equal(matrix, row.expand(len(matrix), 16))


@pytest.mark.parametrize("shape", [(0, 16), (5, 0)])
def test_descriptors_of_matrices_without_elements_have_an_address(shape):
    empty = torch.empty(shape)
    assert empty.data_ptr() == 0
    assert describe_matrix(empty, 16, [16, 16]).base.data_ptr() != 0
    assert describe_own(torch.empty(0, 16), 16, [16, 16]).base.data_ptr() != 0


def test_a_configuration_is_its_text():
    config = GemmReduceScatterConfig(16, 32, 64, 4, 2, 7, 3, 5)
    assert GemmReduceScatterConfig.parse(str(config)) == config
    for text in ("", "block_m=16", str(config).replace("4", "four"), str(config) + ", more=1"):
        with pytest.raises(ArgumentError, match="text must be str"):
            GemmReduceScatterConfig.parse(text)


@pytest.mark.parametrize("operator", OPERATORS)
def test_explain_names_the_choice(operator):
    text = interlace.explain(operator, _t(2, 8), _t(5, 8))
    assert text.startswith(f"{operator} of x [2, 8] and w [5, 8], float32, on 1 rank: ")
    assert "because" in text
    with pytest.raises(ArgumentError, match="same last dimension"):
        interlace.explain(operator, _t(2, 7), _t(5, 8))


def test_explain_takes_what_may_follow_the_operands():
    operands = _t(2, 8), _t(5, 8), _t(5)
    by_name = interlace.explain("gemm_all_reduce", *operands[:2], bias=operands[2])
    assert interlace.explain("gemm_all_reduce", *operands) == by_name
    assert interlace.explain("gemm_all_reduce", *operands, None) == by_name
    with pytest.raises(ArgumentError, match=r"bias of gemm_all_reduce must be given once; got two"):
        interlace.explain("gemm_all_reduce", *operands, bias=operands[2])
    with pytest.raises(
        ArgumentError, match=r"must have x, w, and may have bias, out_dtype; got 1 "
    ):
        interlace.explain("gemm_all_reduce", operands[0])
    with pytest.raises(
        ArgumentError, match=r"got 'gemm_al_reduce'\. Did you mean gemm_all_reduce\?"
    ):
        interlace.explain("gemm_al_reduce", *operands)


def test_explain_takes_options_in_the_order_of_the_call():
    """What a call takes by its place, ``explain`` takes for the same, of every operator."""
    for name in operators().keys() & interlace.__all__:
        parameters = inspect.signature(getattr(interlace, name)).parameters.values()
        placed = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        needed, optional = operators()[name].argument_names()
        assert [*needed, *optional][: len(placed)] == placed


def test_explain_refuses_tensors_of_another_device():
    x, w = _t(2, 8, device="meta"), _t(5, 8, device="meta")
    with pytest.raises(BackendError, match=r"must be on cuda or cpu; got meta\."):
        interlace.explain("gemm_reduce_scatter", x, w)


EVEN = "rows that are split evenly"
SAME = "a result of the dtype that comes by default"


@pytest.mark.parametrize(
    ("operator", "rows", "options", "unmet"),
    [
        *((operator, 4, {}, "") for operator in OPERATORS),
        ("gemm_reduce_scatter", 4, {"bias": _t(5)}, ""),
        ("gemm_all_reduce", 4, {"bias": _t(5)}, "no bias"),
        ("gemm_reduce_scatter", 4, {"out_dtype": bf16}, SAME),
        ("gemm_reduce_scatter", 4, {"splits": [1, 3]}, EVEN),
        ("gemm_reduce_scatter", 4, {"splits": [2, 2]}, ""),
        ("gemm_reduce_scatter", 5, {"bias": _t(5, dtype=bf16), "out_dtype": bf16},
            f"{EVEN} and {SAME}"),
        ("gemm_all_reduce", 5, {}, ""), ("gemm_all_reduce", 4, {"out_dtype": f32}, ""),
        ("gemm_all_to_all", 4, {"input_splits": [2, 2], "output_splits": [2, 2]}, ""),
        ("gemm_all_to_all", 4, {"input_splits": [2, 2], "output_splits": [3, 1]}, EVEN),
        ("gemm_all_to_all", 4, {"input_splits": [1, 3], "output_splits": [2, 2]}, EVEN),
        ("all_gather_gemm", 4, {"splits": [4, 9]}, ""), ("all_gather_gemm", 4, {"bias": _t(5)}, ""),
        ("all_gather_gemm", 4, {"out_dtype": bf16}, SAME),
    ],
)  # fmt: skip
def test_explain_knows_what_the_choice_cannot_run(monkeypatch, operator, rows, options, unmet):
    """Two ranks, and a table that says cuBLAS with remote stores, or pushed rows."""
    declaration, asked = operator_named(operator), []
    chosen = "remote_stores" if operator == "gemm_all_reduce" else "pushed"

    def choose(self, **call):
        asked.append(call["rows"])
        return Choice(chosen, declaration.config_type(), "measured")

    monkeypatch.setattr(type(declaration), "choose", choose)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    # That there was a group is forgotten with it.
    monkeypatch.setattr(process_groups, "_ranks_before", None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    text = interlace.explain(operator, _t(rows, 8), _t(5, 8), **options)
    expected = (
        f"unfused, because {chosen} must have {unmet}; measured."
        if unmet
        else f"{chosen}, because measured."
    )
    said, _, memory = text.partition(" Symmetric memory per rank: ")
    assert said.endswith(f" on 2 ranks: {expected}")
    # The memory of lists of rows is not said: some of them differ from rank to rank.
    assert bool(memory) == (not any("splits" in name for name in options))
    assert "unfused none" in memory or not memory
    # The memory depends on the configuration, for which the choice is asked, too.
    assert asked == (2 if memory else 1) * [
        {"all_gather_gemm": sum(options.get("splits", [rows, rows]))}.get(operator, rows)
    ]


@pytest.mark.parametrize("options", [{"bias": _t(5)}, {"out_dtype": bf16}, {}])
def test_a_call_runs_what_explain_says(monkeypatch, options):
    """One rank, and a table that says cuBLAS with remote stores."""
    operator = "gemm_all_reduce"
    declaration, ran = operator_named(operator), []
    config = declaration.choose(
        rows=4, columns=5, inner=8, dtype=f32, device=torch.device("cpu"), world_size=1
    ).config
    monkeypatch.setattr(
        type(declaration), "choose", lambda *_, **__: Choice("remote_stores", config, "measured")
    )

    def record(call, output, *_, **__):
        ran.append(output.implementation)
        return _t(4, 5)

    def run_unfused(self, call):
        ran.append("unfused")
        return _t(4, 5)

    monkeypatch.setattr(remote_stores, "run_into_output", record)
    monkeypatch.setattr(type(declaration), "run_unfused", run_unfused)
    getattr(interlace, operator)(_t(4, 8), _t(5, 8), **options)
    assert f": {ran[0]}, because" in interlace.explain(operator, _t(4, 8), _t(5, 8), **options)
    assert ran == ["unfused" if options else "remote_stores"]


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        ("gemm_all_reduce", {"splits": [2]},
            "explain: arguments of gemm_all_reduce must be x, w, bias, out_dtype; got splits."),
        ("gemv_all_reduce", {"splits": [2]},
            "explain: arguments of gemv_all_reduce must be x, w, bias, out_dtype; got splits."),
        ("gemm_reduce_scatter", {"splits": [1]},
            "gemm_reduce_scatter: splits must sum to 2, the rows of x; got [1], which is 1."),
        ("gemm_reduce_scatter", {"bias": _t(4)},
            "gemm_reduce_scatter: bias must be [N] with N = 5; got shape [4]."),
        ("gemm_all_to_all", {"input_splits": [2]},
            "gemm_all_to_all: input_splits and output_splits must be given together; "
            "got input_splits only. Pass output_splits too, or neither for an even split."),
    ],
)  # fmt: skip
def test_explain_refuses_what_the_call_refuses(operator, options, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        interlace.explain(operator, _t(2, 8), _t(5, 8), **options)
