"""torchtitan's trainer with and without Interlace: losses, tokens per second and memory.

    python benchmarks/torchtitan_trainer.py --json FILE [--flavor 8B] [--layers 8] [--repeats 2]

A trainer is torchtitan 0.2's own ``Trainer``, with one process per visible GPU, all of them tensor
parallel with sequence parallelism (data parallelism and FSDP have degree 1, so that weights are
bfloat16 throughout), and its blocks compiled. Trainers with and without Interlace take turns, and
differ in ``compile.backend`` alone. All share one folder of compiled graphs, which the first
trainer of each way finds empty: that one has the counts of what was fused.

Data are synthetic and can be learned in part: half of a sequence's tokens are determined by the one
before them, the others are random, so that no loss comes near zero. Weights and data are the same
in all trainers. Losses differ as sums of bfloat16 products are rounded in
another order: a loss must be that of the first trainer without Interlace to within
``LOSS_TOLERANCE``. The spread between trainers of one way is among the results, to compare with.

Figures are those that torchtitan logs: tokens per second and GPU, of which the median of the steps
after ``--warm-up`` counts, and the peaks of PyTorch's allocator in GiB. Symmetric memory is not the
allocator's, so the memory in use on the GPU after the last step is measured, too.

``--cpu`` runs the debug model in float32 on two processes without a GPU, to try the script; it
stands in for the module of a GPU's functions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import torch
from engines import in_turns, spread

BACKENDS = {"without": "inductor", "with": "interlace"}
"""``compile.backend`` of each way."""

LOSS_TOLERANCE = {"bfloat16": 2**-8, "float32": 1e-4}
"""The largest relative difference of a step's loss, by the weights' dtype.

bfloat16: one unit in the last place. Products are rounded to it at the same places in both ways,
but their sums over ranks are rounded before or after; AdamW's first steps have the size of the
learning rate whatever a gradient's size, which passes on differences of tiny gradients in full.
"""

PATTERN = 256
"""Tokens that occur in the data."""

LEARNING_RATE = 1e-5
"""Small enough for a loss that falls over all steps, whatever the number of layers."""


def main() -> None:
    """Start the trainers one after another, or be a process of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="Where results go.")
    parser.add_argument("--flavor", default="8B", help="A flavor of torchtitan's Llama 3.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5, help="Steps whose times do not count.")
    parser.add_argument("--batch", type=int, default=2, help="Sequences per step.")
    parser.add_argument("--length", type=int, default=4096, help="Tokens per sequence.")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="Try the script without a GPU.")
    parser.add_argument("--trainer", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options)
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for repeat, way in in_turns(BACKENDS, options.repeats):
            found = run(way, options, compiled)
            results.append({"way": way, "repeat": repeat, **found})
            print({**results[-1], "losses": found["losses"][-1]}, flush=True)
            documents.write(
                options.json, results, model=f"llama3 {options.flavor}", layers=options.layers
            )
    check(results, LOSS_TOLERANCE["float32" if options.cpu else "bfloat16"])


def run(way: str, options: argparse.Namespace, compiled: str) -> dict[str, Any]:
    """Start a trainer, whose compiled graphs are kept in ``compiled``, and return its results."""
    ranks = 2 if options.cpu else torch.cuda.device_count()
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": compiled, "OMP_NUM_THREADS": "1",
        # Ranks wait for each other in the first step, and one may compile for longer.
        "INTERLACE_DEADLINE_S": "300",
    }  # fmt: skip
    if options.cpu:
        # Without it, no operator of Interlace runs on the CPU.
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trainer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, *sys.argv[1:]]
        command += ["--trainer", way, "--json", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-6000:] + done.stderr[-6000:])
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def train(options: argparse.Namespace) -> None:
    """Be one process of a trainer; the first one writes what was logged."""
    if options.cpu:
        stand_in_for_gpu()
    from torchtitan.train import Trainer

    import interlace

    begin = time.perf_counter()
    trainer = Trainer(job(options))
    log = Log(begin)
    trainer.metrics_processor.logger = log
    trainer.train()
    used = 0.0
    if not options.cpu:
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / 2**30
    counts = interlace.counts()["torch.compile"]
    left = {f"{collective}: {reason}": count for (collective, reason), count in counts.left.items()}
    if torch.distributed.get_rank() == 0:
        rates = [step["throughput(tps)"] for step in log.steps[options.warm_up :]]
        last = log.steps[-1]
        found = {
            "losses": [step["loss_metrics/global_avg_loss"] for step in log.steps],
            "grad_norms": [step["grad_norm"] for step in log.steps],
            "tokens_per_second_and_gpu": spread(rates, digits=1),
            "first_step_s": round(log.first_step_s, 1),
            "peak_active_gib": round(last["memory/max_active(GiB)"], 3),
            "peak_reserved_gib": round(last["memory/max_reserved(GiB)"], 3),
            "used_on_gpu_gib": round(used, 3),
            "fused": dict(counts.taken),
            "left_alone": left,
        }
        options.json.write_text(json.dumps(found))
    trainer.close()
    torch.distributed.destroy_process_group()


class Log:
    """Takes the place of torchtitan's logger of metrics, and keeps what it is given.

    Attributes:
        steps: Metrics of each step, by torchtitan's names.
        first_step_s: Seconds from ``begin`` to the end of the first step, compilation included.
    """

    def __init__(self, begin: float) -> None:
        self.steps: list[dict[str, float]] = []
        self.first_step_s = 0.0
        self._begin = begin

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Keep one step's metrics."""
        if not self.steps:
            self.first_step_s = time.perf_counter() - self._begin
        self.steps.append({name: float(value) for name, value in metrics.items()})

    def close(self) -> None:
        """Do nothing: torchtitan's loggers have this method."""


class Patterns:
    """Batches of sequences, as a data loader. They are made before the first step: it takes
    Python tens of milliseconds each, and not the same time on all ranks.
    """

    def __init__(self, steps: int, batch: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batches = [sequences(batch, length, generator) for _ in range(steps)]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return itertools.cycle(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: each trainer starts with the first batch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def sequences(
    batch: int, length: int, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs and labels ``[batch, length]``."""
    tokens = torch.randint(PATTERN, (batch, length + 1), generator=generator)
    is_determined = torch.rand(batch, length, generator=generator) < 0.5
    for i in range(length):
        tokens[:, i + 1] = torch.where(
            is_determined[:, i], (5 * tokens[:, i] + 3) % PATTERN, tokens[:, i + 1]
        )
    return {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def job(options: argparse.Namespace) -> Any:
    """Return torchtitan's configuration of a trainer, whose model and data it registers."""
    import dataclasses

    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    spec = get_train_spec()
    arguments = dataclasses.replace(spec.model_args[options.flavor], n_layers=options.layers)
    data = Patterns(options.steps, options.batch, options.length)
    register_train_spec("llama3-shorter", dataclasses.replace(
        spec, model_args={options.flavor: arguments}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda **ignored: data,
    ))  # fmt: skip
    config = JobConfig()
    config.job.dump_folder = tempfile.mkdtemp()
    config.model.name, config.model.flavor = "llama3-shorter", options.flavor
    config.metrics.log_freq = 1
    config.training.local_batch_size, config.training.seq_len = options.batch, options.length
    config.training.steps = options.steps
    config.training.dtype = "float32" if options.cpu else "bfloat16"
    config.optimizer.lr, config.lr_scheduler.warmup_steps = LEARNING_RATE, 2
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.tensor_parallel_degree = int(os.environ["WORLD_SIZE"])
    config.activation_checkpoint.mode = options.checkpointing
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable, config.compile.backend = True, BACKENDS[options.trainer]
    config.debug.seed = 0
    config.comm.trace_buf_size = 0
    if options.cpu:
        config.optimizer.implementation = "foreach"
    return config


def stand_in_for_gpu() -> None:
    """Let torchtitan take the CPU for a GPU: it asks PyTorch for the kind once, at its import."""
    properties = types.SimpleNamespace(total_memory=2**30)
    functions = {
        **vars(torch.cpu),
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: properties,
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
    }
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: types.SimpleNamespace(**functions)


def check(results: list[dict[str, Any]], tolerance: float) -> None:
    """Print the largest relative differences of losses, between ways and within one.

    Raises:
        AssertionError: They differ by more than ``tolerance`` between ways, or nothing was learned.
    """
    first = next(each for each in results if each["way"] == "without")["losses"]
    assert first[-1] < first[0], "the trainer has learned nothing"
    for way in BACKENDS:
        of_way = [each["losses"] for each in results if each["way"] == way]
        within = max(difference(each, of_way[0]) for each in of_way)
        between = max(difference(each, first) for each in of_way)
        print(f"losses {way}: {within:.1e} between its trainers, {between:.1e} from the first")
        assert between <= tolerance, f"losses {way} Interlace differ by {between}"


def difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two curves of losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()
