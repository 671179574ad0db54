"""Train a tiny language model whose vocabulary is sharded over four ranks, beside stock PyTorch.

``interlace.nn.LinearCrossEntropyLoss`` is the model's head and its loss. Each rank holds a quarter
of the head's weight, and the logits of a few tokens at a time; stock PyTorch stores those of all
tokens and of the whole vocabulary. Both learn the same.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import interlace

# Four ranks do not divide the vocabulary: three hold 251 columns, the last one 248 and padding.
VOCABULARY, WIDTH = 1001, 32
TOKENS, CHUNK_ROWS = 64, 32
STEPS, LEARNING_RATE = 5, 4.0


def model_with(head: nn.Module) -> nn.ModuleDict:
    """Return a model that predicts a token's successor from the token alone."""
    body = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.ModuleDict({"body": body, "head": head}).to(interlace.group_of().device)


def worker() -> tuple[list[float], list[float], int, int]:
    """Train both models; return their losses, and the bytes of logits that each stores at once."""
    # One seed for all ranks, so that every rank has the same model and the same tokens.
    torch.manual_seed(0)
    stock = model_with(nn.Linear(WIDTH, VOCABULARY, bias=False))
    sharded = model_with(
        interlace.nn.LinearCrossEntropyLoss(WIDTH, VOCABULARY, chunk_rows=CHUNK_ROWS)
    )
    # The names are the same, and each rank takes its own rows of the head's weight.
    sharded.load_state_dict(stock.state_dict())
    head = sharded["head"]
    logits_bytes = CHUNK_ROWS * len(head.weight) * head.weight.itemsize
    stock_bytes = TOKENS * VOCABULARY * head.weight.itemsize

    tokens = torch.randperm(VOCABULARY)[:TOKENS].to(head.weight.device)
    target = (7 * tokens + 3) % VOCABULARY
    losses = train(sharded, lambda: head(sharded["body"](tokens), target))
    expected = train(stock, lambda: cross_entropy(stock["head"](stock["body"](tokens)), target))

    # The weights of all ranks together, without padding, are those of the other model.
    trained = interlace.nn.unsharded_state_dict(sharded)
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5)
    return losses, expected, logits_bytes, stock_bytes


def train(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> list[float]:
    """Do some steps, and return the loss of each.

    Every rank has the body and the same gradient of it, so no gradient needs an all-reduce.
    """
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    results = interlace.launch(worker, 4)
    losses, expected, logits_bytes, stock_bytes = results[0]
    print("step    sharded    stock")
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        print(f"{step:4} {loss:10.5f} {wanted:8.5f}")
        assert abs(loss - wanted) < 1e-4 * wanted
    assert losses[-1] < losses[0] / 2
    # The loss has the same bits on every rank.
    assert all(result[0] == losses for result in results)
    print(f"logits stored at a time: {logits_bytes:,} bytes on each rank; stock: {stock_bytes:,}")


if __name__ == "__main__":
    main()
