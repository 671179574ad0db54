"""The programs that Interlace can run in: how each is switched on and off, what is then fused, and
which versions were run where.

The plug-ins, ``interlace doctor --client`` and the pages of docs read this one list.
"""

from __future__ import annotations

import dataclasses
import os

from interlace import environment

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Return whether a variable of another program is on.

    Any value counts that is no word for off: a promise is kept rather than broken.
    """
    return os.environ.get(variable, "").strip().lower() not in _OFF


@dataclasses.dataclass(frozen=True)
class VersionThatRan:
    """Where a version of a program was run with Interlace.

    Attributes:
        version: The version, or the first numbers of it: ``"5.23"`` stands for 5.23.0 as well.
        ran_on: The backend or GPUs, and what ran there.
    """

    version: str
    ran_on: str

    def is_of(self, installed: str) -> bool:
        """Return whether an installed version is this one."""
        numbers = self.version.split(".")
        return installed.split("+")[0].split(".")[: len(numbers)] == numbers


@dataclasses.dataclass(frozen=True)
class Client:
    """A program that Interlace can run in.

    Attributes:
        name: The name on the command line and of the page in docs.
        title: The program's own name.
        package: The distribution that has it.
        entry: What switches Interlace on there: the group of the entry point ``interlace``, or a
            module of Interlace that the user's program imports.
        line: The line that switches it on.
        off: What switches it off.
        fused, left: What is fused, and what is left alone.
        runs: The versions that were run, and where.
        variable: The variable of Interlace that switches a plug-in on or off; empty if the user's
            program has a line instead.
        plugins: The program's variable with the names of the plug-ins to load.
        promise: The variable by which the program promises a row's bits in every batch; then
            Interlace leaves everything alone.
        operators: The operators whose symmetric memory a layer of a transformer needs.
        limit: The limit of symmetric memory that the plug-in sets, unless the user has set one.
        budget: What the program's own budget of memory knows of Interlace's.
    """

    name: str
    title: str
    package: str
    entry: str
    line: str
    off: str
    fused: str
    left: str
    runs: tuple[VersionThatRan, ...]
    variable: str = ""
    plugins: str = ""
    promise: str = ""
    operators: tuple[str, ...] = ()
    limit: str = ""
    budget: str = "it is outside of PyTorch's allocator; the program has no budget that counts it"

    plugin = "interlace"
    """The plug-in's name, by its entry points."""

    def is_asked(self) -> bool:
        """Return whether variables switch the plug-in on; True for a program that has a line.

        Raises:
            ArgumentError: The client's variable is neither on nor off.
        """
        if not self.variable:
            return True
        names = {name.strip() for name in os.environ.get(self.plugins, "").split(",")}
        asked = environment.switch(self.variable)
        return self.plugin in names if asked is None else asked


_LIMIT = "2G"

_SUMS = ("gemm_all_reduce_norm", "gemm_all_reduce")

CLIENTS = {
    client.name: client
    for client in (
        Client(
            name="vllm",
            title="vLLM",
            package="vllm",
            entry="vllm.general_plugins",
            line="INTERLACE_VLLM=1 vllm serve MODEL --tensor-parallel-size 2",
            off="INTERLACE_VLLM=0, or leave INTERLACE_VLLM and VLLM_PLUGINS unset",
            fused=(
                "in compiled graphs: products with vLLM's all_reduce, together with the residual "
                "and the RMSNorm that follow; products with reduce_scatter and all_gather of a "
                "fixed number of tokens"
            ),
            left=(
                "the gather of logits along the vocabulary, quantised products, experts, a model "
                "with --enforce-eager, everything under VLLM_BATCH_INVARIANT=1"
            ),
            runs=(
                VersionThatRan("0.26.0", "two H200s: its engine"),
                VersionThatRan("0.33", "CPU backend: its layers, groups and loader of plug-ins"),
            ),
            variable="INTERLACE_VLLM",
            plugins="VLLM_PLUGINS",
            promise="VLLM_BATCH_INVARIANT",
            operators=_SUMS,
            limit=_LIMIT,
            budget=(
                "gpu_memory_utilization counts what the profile run and the two largest graphs of "
                "each kind allocate; what comes later lies in the part that it leaves free"
            ),
        ),
        Client(
            name="sglang",
            title="SGLang",
            package="sglang",
            entry="sglang.srt.plugins",
            line="INTERLACE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 2",
            off="INTERLACE_SGLANG=0, or leave INTERLACE_SGLANG and SGLANG_PLUGINS unset",
            fused="RowParallelLinear.forward: product and all-reduce, where that is faster",
            left=(
                "layers that are quantised, compiled or do not reduce, norms, experts, everything "
                "under --enable-deterministic-inference"
            ),
            runs=(
                VersionThatRan("0.5.17", "2 x H200: its engine, with torch 2.11"),
                VersionThatRan("0.5.23", "CPU backend: its layer, groups and loader of plug-ins"),
            ),
            variable="INTERLACE_SGLANG",
            plugins="SGLANG_PLUGINS",
            promise="SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
            operators=("gemm_all_reduce",),
            limit=_LIMIT,
            budget="mem_fraction_static does not count it; it lies in the part that is left free",
        ),
        Client(
            name="transformers",
            title="transformers",
            package="transformers",
            entry="torch_dynamo_backends",
            line='torch.compile(model, backend="interlace")',
            off="leave the line out",
            fused=(
                "by tp_plan: products with all-reduces, in inference together with the residual "
                "and the norm that follow; experts by "
                "interlace.integrations.transformers.register() and "
                'ep_implementation="interlace"'
            ),
            left=(
                "the gather of logits along the vocabulary, the sum of embeddings whose vocabulary "
                "is sharded; experts of other forms raise an error"
            ),
            runs=(
                VersionThatRan("5.17", "CPU backend: dense models; two H200s: generate, decoding"),
                VersionThatRan("5.23", "CPU backend: dense models, generate, experts"),
                VersionThatRan(
                    "5.24",
                    "CPU backend: dense models, generate, experts; two H200s: a prompt and "
                    "training steps",
                ),
            ),
            operators=_SUMS,
        ),
        Client(
            name="torchtitan",
            title="torchtitan",
            package="torchtitan",
            entry="torch_dynamo_backends",
            line="--compile.backend interlace",
            off="leave the option out",
            fused=(
                "all collectives of a block, forward and backward, under sequence parallelism; "
                "without it all but the gradient of gate and up"
            ),
            left="models with FlexAttention, unless interlace.compile.install() is called",
            runs=(
                VersionThatRan(
                    "0.2.2", "2 x H200 and the CPU backend: its trainer with torch 2.11"
                ),
                VersionThatRan(
                    "0.3.0", "CPU backend: blocks with torch 2.13, its trainer with torch 2.14"
                ),
            ),
            operators=("all_gather_gemm", "gemm_reduce_scatter"),
        ),
        Client(
            name="torchrec",
            title="TorchRec",
            package="torchrec",
            entry="interlace.integrations.torchrec",
            line='embeddings = shard(ebc, gradient="rowwise_adagrad")',
            off="leave the line out",
            fused=(
                "lookup, pooling and exchange of all tables of an EmbeddingBagCollection, forward "
                "and backward, with the optimizer's update"
            ),
            left=(
                "DistributedModelParallel and its plans; tables with several features raise an "
                "error"
            ),
            runs=(
                VersionThatRan("1.6.1", "2 x H200 and the CPU backend: its DLRM, with torch 2.11"),
                VersionThatRan("1.8.0", "CPU backend, with torch 2.13"),
                VersionThatRan("1.9.2", "CPU backend, with torch 2.14.1"),
            ),
        ),
    )
}
"""All clients by name."""
