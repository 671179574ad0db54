"""``interlace.nn.MoE`` is the same layer on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace import ExpertActivation
from interlace.nn import MoE, Routing

HIDDEN, FFN, EXPERTS, TOP_K = 16, 12, 4, 2


def _dense(state: dict[str, torch.Tensor], x: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Compute every expert for every token, from a state dict of all experts."""
    weights, experts = torch.softmax(x @ state["router.weight"].T, -1).topk(TOP_K)
    shares = torch.zeros(len(x), EXPERTS).scatter(
        1, experts, weights / weights.sum(-1, keepdim=True) if normalize else weights
    )
    results = []
    for e in range(EXPERTS):
        gate, up, down = (state[f"experts.{e}.{name}"] for name in ("w_gate", "w_up", "w_down"))
        results.append((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return torch.einsum("te,teh->th", shares, torch.stack(results, 1))


def _train(normalize: bool, groups: bool) -> Any:
    """Do a step of a layer on all ranks; return its first state dict, x, y, the loss and the
    gradients.
    """
    group = dist.new_group() if groups else None
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K, normalize=normalize, group=group, seed=5)
    x = torch.randn(
        3, 2, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank())
    ).requires_grad_()
    y, routing = layer(x)
    loss = routing.load_balancing_loss()
    (y.square().sum() + loss).backward()
    state = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    return (
        state,
        x.detach(),
        y.detach(),
        loss.detach(),
        x.grad,
        layer.w_in.grad,
        layer.w_out.grad,
        layer.router.weight.grad,
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_all_experts_for_all_tokens(ranks: Any, normalize: bool) -> None:
    """Output and gradients of two ranks, the router's too, are those of all experts for all tokens.
    Ranks that begin with one seed hold one layer.
    """
    outcomes = ranks(2).run(_train, normalize, not normalize)
    state = {
        name: value.requires_grad_() for saved, *_ in outcomes for name, value in saved.items()
    }
    assert len(state) == 1 + 3 * EXPERTS
    alone = MoE(HIDDEN, FFN, EXPERTS, TOP_K, seed=5)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, state[name].detach(), rtol=0, atol=0)
    for _, x, y, loss, x_grad, *_ in outcomes:
        tokens = x.flatten(0, 1).requires_grad_()
        expected = _dense(state, tokens, normalize)
        torch.testing.assert_close(y.flatten(0, 1), expected.detach())
        (expected.square().sum() + alone.route(tokens).load_balancing_loss()).backward()
        torch.testing.assert_close(loss, alone.route(tokens).load_balancing_loss().detach())
        torch.testing.assert_close(x_grad.flatten(0, 1), tokens.grad, rtol=1e-4, atol=1e-4)
    for rank, (*_, w_in, w_out, _) in enumerate(outcomes):
        for i in range(EXPERTS // 2):
            name = f"experts.{rank * EXPERTS // 2 + i}"
            for gradient, key in (
                (w_in[i, :, 0], "w_gate"),
                (w_in[i, :, 1], "w_up"),
                (w_out[i], "w_down"),
            ):
                expected_gradient = state[f"{name}.{key}"].grad
                torch.testing.assert_close(
                    gradient,
                    torch.zeros_like(gradient) if expected_gradient is None else expected_gradient,
                    rtol=1e-4,
                    atol=1e-4,
                )
    router = sum(router for *_, router in outcomes)
    alone.router.zero_grad()
    for _, x, *_ in outcomes:
        alone.route(x.flatten(0, 1)).load_balancing_loss().backward()
    torch.testing.assert_close(
        router, state["router.weight"].grad + alone.router.weight.grad, rtol=1e-4, atol=1e-4
    )


FORMS = [
    {},
    {"bias": True, "activation": ExpertActivation(alpha=1.702, limit=0.3, up_offset=1.0)},
    {"gated": False, "activation": "relu2"},
]


def _load(state: dict[str, torch.Tensor], form: dict[str, Any]) -> Any:
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K, capacity_factor=0.5, seed=9, **form)
    layer.load_state_dict(state)
    layer.impl = "unfused"
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    unfused = layer(x)[0].detach()
    layer.impl = "fused"
    return layer.state_dict(), unfused, layer(x)[0].detach()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_loads_on_any_number_of_ranks(ranks: Any, form: dict[str, Any]) -> None:
    """Each rank takes its own experts, and both implementations drop the same tokens."""
    state = MoE(HIDDEN, FFN, EXPERTS, TOP_K, seed=3, **form).state_dict()
    for world_size in (1, 2):
        outcomes = ranks(world_size).run(_load, state, form)
        merged = {name: value for saved, *_ in outcomes for name, value in saved.items()}
        assert merged.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(merged[name], value, rtol=0, atol=0)
        for _, unfused, fused in outcomes:
            torch.testing.assert_close(fused, unfused)


def test_a_state_dict_without_an_expert_is_refused() -> None:
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K)
    state = layer.state_dict()
    del state["experts.2.w_up"]
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(state)


def test_an_expert_of_another_size_is_named() -> None:
    layer = MoE(HIDDEN, FFN, EXPERTS, TOP_K)
    state = layer.state_dict()
    state["experts.2.w_up"] = state["experts.2.w_up"][:, 1:]
    with pytest.raises(RuntimeError, match=r"size mismatch for experts\.2\.w_up: ") as caught:
        layer.load_state_dict(state)
    assert "Missing" not in str(caught.value)


def test_load_balancing_loss() -> None:
    """A worked example: of three tokens, two go to expert 0 and one to expert 1; the mean
    probabilities are 0.6 and 0.4.
    """
    probabilities = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7]])
    routing = Routing(torch.tensor([[0], [0], [1]]), torch.ones(3, 1), probabilities)
    assert routing.load_balancing_loss().item() == pytest.approx(2 * (2 / 3 * 0.6 + 1 / 3 * 0.4))
    nobody = Routing(routing.experts[:0], routing.weights[:0], probabilities[:0].requires_grad_())
    loss = nobody.load_balancing_loss()
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 4), "hidden, ffn and experts must be positive; got 0, 8 and 4."),
        ((8, 8, 4, 5), "top_k must be from 1 to 4 of 4 experts; got 5."),
        ((8, 8, 32, 17), "top_k must be from 1 to 16 of 32 experts; got 17."),
    ],
)
def test_rejected_sizes(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(interlace.ArgumentError, match=message):
        MoE(*arguments)


def _uneven() -> str:
    with pytest.raises(interlace.ArgumentError) as caught:
        MoE(8, 8, 3)
    return str(caught.value)


def test_ranks_must_divide_experts(ranks: Any) -> None:
    assert set(ranks(2).run(_uneven)) == {"MoE: experts must divide evenly over 2 ranks; got 3."}


def test_other_rejected_arguments() -> None:
    with pytest.raises(
        interlace.ArgumentError,
        match="capacity_factor must be positive and finite, or None for no limit; got 0",
    ):
        MoE(8, 8, 4, capacity_factor=0)
    with pytest.raises(interlace.ArgumentError, match=r"x must be \[..., 8\]; got shape \[3, 7\]."):
        MoE(8, 8, 4)(torch.zeros(3, 7))
    assert "experts=4, top_k=2, capacity_factor=None, here=0-3, impl=auto" in repr(
        MoE(8, 8, 4, device="meta")
    )
