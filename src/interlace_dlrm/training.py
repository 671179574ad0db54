"""Training a :class:`DLRM`: one step, an evaluation, and the times of a step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import ArgumentError
from interlace_dlrm.batches import Batch
from interlace_dlrm.checkpoint import DEADLINE_S, load_checkpoint, save_checkpoint
from interlace_dlrm.dlrm import DLRM
from interlace_dlrm.metrics import area_under_roc, binary_cross_entropy, gather_rows


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Quality of a model over all ranks' valid samples.

    Attributes:
        loss: Mean binary cross entropy, nats.
        auc: Area under the ROC curve.
        samples: Number of samples.
    """

    loss: float
    auc: float
    samples: int


class Trainer:
    """A model, the optimizer of its dense part, and the number of steps done.

    Args:
        model: Model whose tables are updated by the backward pass (``gradient`` ``"sgd"`` or
            ``"rowwise_adagrad"``).
        optimizer: Optimizer of ``model.dense.parameters()``.

    Attributes:
        steps: Number of steps done.

    Raises:
        ArgumentError: the model leaves the tables' gradients to an optimizer.

    Example:
        >>> trainer = Trainer(model, torch.optim.SGD(model.dense.parameters(), 0.1))
        >>> for batch in stream:
        ...     loss = trainer.step(batch.to(device))
    """

    def __init__(self, model: DLRM, optimizer: torch.optim.Optimizer) -> None:
        if model.embeddings.gradient not in ("sgd", "rowwise_adagrad"):
            raise ArgumentError(
                "Trainer: the tables' gradient must be sgd or rowwise_adagrad; got "
                f"{model.embeddings.gradient!r}."
            )
        self.model, self.optimizer = model, optimizer
        self.steps = 0

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.embeddings.group.device

    def step(self, batch: Batch) -> torch.Tensor:
        """Do one step: forward pass, backward pass and update. Collective.

        The host waits for nothing if all bags have a fixed length.

        Args:
            batch: This rank's samples, on the model's device.

        Returns:
            This rank's mean loss, detached, on the device.
        """
        loss = binary_cross_entropy(
            self.model(batch.dense, batch.indices, batch.offsets), batch.labels
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss.detach()

    def mean_over_ranks(self, losses: list[torch.Tensor]) -> list[float]:
        """Average each of the losses over the ranks. Collective; waits for the device.

        Args:
            losses: Scalars, as many on every rank.
        """
        if not losses:
            return []
        # One all-reduce for all losses, in float64 so that the mean adds no error to them.
        values = torch.stack(losses).double()
        group = self.model.embeddings.group
        if group.world_size > 1:
            dist.all_reduce(values, group=self.model.process_group)
        group.synchronize()
        means: list[float] = (values / group.world_size).tolist()
        return means

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Compute loss and area under the ROC curve over all ranks' batches. Collective.

        Samples that only fill a batch up are left out.
        """
        # Scores stay on the device until the end, so that the host never waits for a batch.
        scores, labels = [], []
        for batch in batches:
            moved = batch.to(self.device)
            logits = self.model(moved.dense, moved.indices, moved.offsets)
            scores.append(logits[moved.valid])
            labels.append(moved.labels[moved.valid])
        if not scores:
            return Evaluation(float("nan"), float("nan"), 0)
        both = gather_rows(
            torch.stack([torch.cat(scores), torch.cat(labels)], 1), self.model.process_group
        )
        self.model.embeddings.group.synchronize()
        return Evaluation(
            float(binary_cross_entropy(*both.double().unbind(1))),
            area_under_roc(*both.unbind(1)),
            len(both),
        )

    def save(self, folder: Path, *, deadline_s: float = DEADLINE_S, **extra: Any) -> Path:
        """Save model, optimizer and steps; return the checkpoint's folder. Collective."""
        return save_checkpoint(
            folder, self.model, self.optimizer, self.steps, extra, deadline_s=deadline_s
        )

    def load(self, path: Path, *, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Load model, optimizer and steps; return the ``extra`` of :meth:`save`. Collective."""
        index = load_checkpoint(path, self.model, self.optimizer, deadline_s=deadline_s)
        self.steps = int(index["step"])
        extra: dict[str, Any] = index["extra"]
        return extra


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Times of a step: medians of the slowest rank, in milliseconds.

    Attributes:
        step_ms: Time of the complete step.
        compute_ms: Time of the same work without any peer: this rank's tables pooled and updated
            for the whole batch into its own memory, the MLPs forward and backward, the optimizer.
        meaningful: False on the CPU, where the interpreter's times say nothing about a GPU's.
    """

    step_ms: float
    compute_ms: float
    meaningful: bool

    @property
    def exposed_ms(self) -> float:
        """Time of communication that is not hidden behind computation, in ms.

        It is the difference between the step and computing alone.
        """
        return max(0.0, self.step_ms - self.compute_ms)


def measure_step(trainer: Trainer, batch: Batch, repeats: int = 10) -> StepTimes:
    """Measure steps with and without communication, and leave the model as it was. Collective.

    On CUDA, events measure the time.

    Args:
        trainer: Trainer whose model, optimizer and ``impl`` are measured.
        batch: This rank's samples, on the model's device.
        repeats: Number of measurements of each; the median counts.
    """
    with _restored(trainer):
        step = _slowest_median(trainer, lambda: trainer.step(batch), repeats)
        alone = compute_alone(trainer, batch)
        compute = _slowest_median(trainer, alone, repeats)
    return StepTimes(step, compute, meaningful=trainer.device.type == "cuda")


def compute_alone(trainer: Trainer, batch: Batch) -> Callable[[], object]:
    """Return a function that does this rank's work of a step and sends nothing. Collective."""
    model = trainer.model
    bags = model.embeddings.distribution(batch.indices, batch.offsets)
    # A group of this rank alone lets the operator run without peers.
    alone = None
    if model.embeddings.group.world_size > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")
    with torch.no_grad():
        stack = model.embeddings.look_up(bags).stacked().clone().requires_grad_()

    def step() -> None:
        # The order of a step: embeddings, MLPs forward and backward, embeddings' backward. The MLPs
        # read embeddings that were pooled before, because the peers' part of them does not come.
        outputs = model.embeddings.look_up_alone(bags, alone)
        loss = binary_cross_entropy(model.dense(batch.dense, stack), batch.labels)
        trainer.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        stack.grad = None
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        trainer.optimizer.step()

    return step


def _slowest_median(trainer: Trainer, step: Callable[[], object], repeats: int) -> float:
    """Return the median, in ms, of the slowest rank's time in each repetition. Collective."""
    # The first calls compile kernels and allocate memory.
    for _ in range(2):
        step()
    group = trainer.model.embeddings.group
    group.synchronize()
    times = []
    for _ in range(repeats):
        if group.world_size > 1:
            dist.barrier(group=trainer.model.process_group)
        times.append(_time_ms(trainer.device, step))
    group.synchronize()
    slowest = torch.tensor(times, dtype=torch.float64, device=trainer.device)
    if group.world_size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=trainer.model.process_group)
    return float(statistics.median(slowest.tolist()))


def _time_ms(device: torch.device, step: Callable[[], object]) -> float:
    """Measure one step, in ms."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    step()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


@contextlib.contextmanager
def _restored(trainer: Trainer) -> Iterator[None]:
    """Undo every change of the model that is made within.

    Tables are not copied, as they may fill the memory: they learn at a rate of 0 instead.
    """
    model, steps, rate = trainer.model, trainer.steps, trainer.model.embeddings.learning_rate
    saved = copy.deepcopy((model.dense.state_dict(), trainer.optimizer.state_dict()))
    states = [state.clone() for state in model.embeddings.buffers()]
    model.embeddings.learning_rate = 0.0
    try:
        yield
    finally:
        model.dense.load_state_dict(saved[0])
        trainer.optimizer.load_state_dict(saved[1])
        for state, before in zip(model.embeddings.buffers(), states, strict=True):
            state.copy_(before)
        model.embeddings.learning_rate, trainer.steps = rate, steps
