"""``torch.ops.interlace.mixture_of_experts`` as torch's own tools see it, and arguments that are
refused.
"""

import re

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ArgumentError, ExpertActivation, MixtureOfExpertsConfig
from interlace.comm.replay.replays import places
from tests.errors import error_of
from tests.operators.mixture_of_experts.calls import SMALL, Call, leaves_of


def _opcheck(form):
    call = Call(1, tokens=2, top_k=1, local=1, hidden=8, ffn=5, **form)
    inputs = call.inputs(0)
    experts, grad = inputs[1], inputs[5]
    leaves = [tensor.requires_grad_() for tensor in leaves_of(inputs)]
    assert interlace.mixture_of_experts is not None  # the first use of the name registers the op
    ops = torch.ops.interlace
    how = (
        1,
        2,
        dist.new_group().group_name,
        "fused",
        str(SMALL),
        str(call.activation),
    )  # its buffers are zero where no row arrives
    absent, no_scales = [] if call.biases else [None, None], [None, None]
    x, *others = leaves
    outcomes = torch.library.opcheck(
        ops.mixture_of_experts.default,
        (x, experts, *others, *absent, *no_scales, *how, True, True),
    )
    x, *others = (leaf.detach() for leaf in leaves)
    _, *saved = ops.mixture_of_experts(x, experts, *others, *absent, *no_scales, *how, True, True)
    needed = [True, False, True, call.biases]
    inputs = (grad, x, experts, *others, *absent, *saved, *how, needed)
    return outcomes, torch.library.opcheck(ops.mixture_of_experts_backward.default, inputs)


@pytest.mark.parametrize("form", [{}, {"biases": True, "along_k": False, "halves": True}])
def test_opcheck(ranks, form):
    """Schema, autograd registration, fake tensor and AOT dispatch with dynamic shapes agree with
    the kernels.
    """
    for outcome in ranks(1).run(_opcheck, form)[0]:
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def _step(x, experts, weights, w_in, w_out):
    return torch.relu(
        interlace.mixture_of_experts(x * 2, experts, weights, w_in, w_out, config=SMALL)
    ).sum(-1)


def _compiled(call):
    outcomes = []
    for function in (_step, torch.compile(_step, fullgraph=True, backend="aot_eager")):
        tensors = call.inputs(dist.get_rank())[:5]
        leaves = [tensors[i].requires_grad_() for i in (0, 2, 3, 4)]
        y = function(*tensors)
        y.sum().backward()
        outcomes.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return outcomes


def test_compiles_into_one_graph(ranks):
    """With its gradients; a graph break or an input that the op forgets to declare fails here."""
    for eager, compiled in ranks(2).run(_compiled, Call(2, tokens=3)):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def _transposed_weights(call):
    x, experts, weights, w_in, w_out, _ = call.inputs(dist.get_rank())
    transposed = weights.T.contiguous().T
    assert not transposed.is_contiguous()
    return [
        interlace.mixture_of_experts(x, experts, each, w_in, w_out, impl=impl, config=SMALL)
        for impl in ("fused", "decode")
        for each in (weights, transposed)
    ]


def test_weights_need_not_be_contiguous(ranks):
    for fused, fused_again, decoded, decoded_again in ranks(2).run(_transposed_weights, Call(2)):
        torch.testing.assert_close(fused_again, fused, rtol=0, atol=0)
        torch.testing.assert_close(decoded_again, decoded, rtol=0, atol=0)


def _t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def _arguments(**changes):
    ids = _t(5, 2, dtype=torch.int64)
    given = {
        "x": _t(5, 8),
        "experts": ids,
        "weights": _t(5, 2),
        "w_in": _t(3, 4, 2, 8),
        "w_out": _t(3, 8, 4),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": _t(8)}, "x must be [T, hidden]; got shape [8]."),
        ({"experts": [[0, 1]]}, "experts must be a torch.Tensor; got list."),
        (
            {"b_in": _t(3, 4, 2).to_sparse()},
            "b_in must be dense; got torch.sparse_coo. Call .to_dense().",
        ),
        ({"capacity": 1.5}, "capacity must be an integer, or None for no limit; got 1.5."),
        (
            {"x": _t(5, 8, dtype=torch.float64)},
            "x must be float16, bfloat16 or float32; got torch.float64.",
        ),
        (
            {"w_in": _t(3, 8, 8)},
            "w_in must be [L, F, 2, hidden], gate and up of this rank's L experts, with hidden = "
            "8, or [L, F, 1, hidden] without a gate; got shape [3, 8, 8]. "
            "torch.stack([w_gate, w_up], dim=2) makes it of two [L, F, hidden].",
        ),
        ({"w_out": _t(3, 4, 8)}, "w_out must be [L, hidden, F] = [3, 8, 4]; got shape [3, 4, 8]."),
        (
            {"w_out": _t(3, 8, 4).half()},
            "w_out must be torch.float32 on cpu, like x; got torch.float16 on cpu.",
        ),
        (
            {"w_in": _t(0, 4, 2, 8), "w_out": _t(0, 8, 4)},
            "experts, F and hidden must be positive; got 0, 4 and 8.",
        ),
        (
            {"experts": _t(4, 2, dtype=torch.int64)},
            "experts must be [T, k] with T = 5; got shape [4, 2].",
        ),
        ({"experts": _t(5, 2)}, "experts must be int32 or int64; got torch.float32."),
        (
            {"experts": _t(5, 17, dtype=torch.int32)},
            "experts must have 1 to 16 slots for a token; got 17.",
        ),
        (
            {"weights": _t(5, 3)},
            "weights must be [5, 2], like experts, of a floating dtype; got torch.float32 [5, 3].",
        ),
        (
            {"experts": _t(5, 2, dtype=torch.int64, device="meta")},
            "experts must be on the device of x, cpu; got meta.",
        ),
        ({"b_in": _t(3, 8)}, "b_in must be [L, F, 2] = [3, 4, 2]; got shape [3, 8]."),
        ({"b_out": _t(3, 4)}, "b_out must be [L, hidden] = [3, 8]; got shape [3, 4]."),
        (
            {"b_out": _t(3, 8).half()},
            "b_out must be torch.float32 on cpu, like x; got torch.float16 on cpu.",
        ),
        (
            {"w_in": _t(3, 4, 1, 8), "activation": ExpertActivation(limit=7.0)},
            "activation must have no limit and no up_offset where experts have no gate; got "
            "kind=silu, alpha=1.0, limit=7.0, up_offset=0.0.",
        ),
        ({"capacity": [4]}, "capacity must be an integer, or None for no limit; got [4]."),
        (
            {"activation": torch.nn.functional.gelu},
            "activation must be a word or an interlace.ExpertActivation; got "
            "builtin_function_or_method.",
        ),
        ({"capacity": 0}, "capacity must be positive, or None for no limit; got 0."),
        (
            {"impl": "fast"},
            "impl must be one of auto, batch_invariant, fused, decode, chunked, unfused; got "
            "'fast'.",
        ),
        ({"config": "128"}, "config must be of type MixtureOfExpertsConfig; got str."),
    ],
)
def test_rejected_arguments(changes, message):
    with pytest.raises(ArgumentError, match=re.escape(f"mixture_of_experts: {message}")):
        interlace.mixture_of_experts(**_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"capacity": 4}, "no capacity that could drop tokens"),
        (
            {
                "x": _t(4097, 8),
                "experts": _t(4097, 1, dtype=torch.int32),
                "weights": _t(4097, 1),
            },
            "at most 4096 tokens per rank",
        ),
        ({"x": _t(5, 8).requires_grad_()}, "no tensor that requires a gradient"),
    ],
)
def test_calls_that_decoding_refuses(ranks, changes, rule):
    arguments = _arguments(**changes, impl="decode")
    (outcome,) = ranks(1).run(_refused, arguments)
    kind, message, _ = outcome
    assert (kind, message) == (
        "ArgumentError",
        f"mixture_of_experts: impl='decode' must have {rule}. Take impl='auto', 'fused' or "
        "'unfused'.",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "swish"}, "kind must be one of silu, gelu, gelu_tanh, relu, relu2; got 'swish'."),
        (
            {"kind": "gelu", "alpha": 2.0},
            "alpha must be positive and finite, and 1 for other kinds than 'silu'; got 2.0 for "
            "'gelu'.",
        ),
        ({"limit": 0.0}, "limit must be positive and finite, or None for no limit; got 0.0."),
        ({"up_offset": float("inf")}, "up_offset must be finite; got inf."),
    ],
)
def test_activations_that_are_none(fields, message):
    with pytest.raises(ArgumentError, match=re.escape(f"ExpertActivation: {message}")):
        ExpertActivation(**fields)


def test_an_activation_is_its_text():
    activation = ExpertActivation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    assert ExpertActivation.parse(str(activation)) == activation
    for text in ("silu", "kind=silu, beta=1.0", "kind=silu, limit=high"):
        with pytest.raises(ArgumentError, match=re.escape(f"of an activation; got {text!r}.")):
            ExpertActivation.parse(text)


def test_explain_takes_biases_and_the_activation():
    arguments = [*_arguments().values()]
    further = {"b_in": _t(3, 4, 2), "activation": ExpertActivation(limit=7.0)}
    text = interlace.explain("mixture_of_experts", *arguments, **further)
    assert text.startswith("mixture_of_experts of 5 tokens per rank, top 2 of 3 experts 8 x 4")
    with pytest.raises(ArgumentError, match=re.escape("b_out must be [L, hidden] = [3, 8]")):
        interlace.explain("mixture_of_experts", *arguments, b_out=_t(3, 4))


def _refused(arguments):
    return error_of(interlace.mixture_of_experts, **arguments)


def test_a_configuration_is_its_text():
    message = "MixtureOfExpertsConfig: text must be str() of a configuration; got 'a b'."
    with pytest.raises(ArgumentError, match=re.escape(message)):
        MixtureOfExpertsConfig.parse("a b")
    assert MixtureOfExpertsConfig.parse(str(SMALL)) == SMALL
    assert "block_m=" in str(SMALL)


def _found_again(capacity: int | None) -> bool:
    """Make a call, remember its result by the key that it looks for behind the dispatcher, and make
    it again: is it found at the door?
    """
    from interlace.operators import mixture_of_experts as door
    from interlace.operators.mixture_of_experts import call as behind

    call = Call(1, tokens=3, top_k=1, local=1, hidden=8, ffn=5)
    x, experts, weights, w_in, w_out, _ = call.inputs(0)
    group, remembered = interlace.comm.group_of(None, x.device), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "recalling_group", lambda *arguments: group)
        for module in (door, behind):
            # As on a GPU.
            patch.setattr(
                module,
                "recall_key",
                lambda operator, tensors, *options: (operator, *places(*tensors), *options),
            )
        patch.setattr(type(group), "recall", lambda self, key: remembered.get(key))
        perform = type(group).perform

        def remember(self, work, known):
            remembered[known] = perform(self, work, None)
            return remembered[known]

        patch.setattr(type(group), "perform", remember)
        validated = []
        validate = door.validate
        patch.setattr(door, "validate", lambda *each: validated.append(each) or validate(*each))
        results = [
            interlace.mixture_of_experts(
                x, experts, weights.float().contiguous(), w_in, w_out, capacity=capacity
            )
            for _ in range(2)
        ]
    return results[0] is results[1] and len(remembered) == len(validated) == 1


@pytest.mark.parametrize("capacity", [None, 2])
def test_a_call_that_comes_again_is_found_before_it_is_validated(ranks, capacity):
    assert ranks(1).run(_found_again, capacity) == [True]


def test_a_call_that_comes_again_is_not_found_without_its_weights(ranks):
    ((kind, message, _),) = ranks(1).run(error_of, _without_weights)
    assert kind == "ArgumentError"
    assert "weights must be" in message


def _without_weights():
    x, experts, _, w_in, w_out, _ = Call(1, tokens=3, top_k=1, local=1, hidden=8, ffn=5).inputs(0)
    with pytest.MonkeyPatch.context() as patch:
        from interlace.operators import mixture_of_experts as door

        patch.setattr(door, "recalling_group", lambda *arguments: object())
        interlace.mixture_of_experts(x, experts, None, w_in, w_out)
