"""Every Python block of the pages runs, on the CPU backend, and every command of theirs exists.

``make docs`` runs them, ``pytest -m documents``; ``make test`` runs those of the README.

A block is a program, or part of one: then ``PROGRAMS`` has the rest of the program, and smaller
sizes. A block that cannot run begins with a line ``# Sketch: `` and a reason; there may be few.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
import typer.main

from interlace.cli.app import app
from tests.programs import run_program

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "src/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
_MOST_SKETCHES = 2


def _blocks(page: str, language: str) -> list[str]:
    """Return a page's blocks of a language, without the indentation that all lines of one have."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


@dataclasses.dataclass(frozen=True)
class Program:
    """The rest of a program, some lines of which are a page's blocks.

    Attributes:
        text: The program; in place of a line ``# block 0`` comes the page's first block, with the
            line's indentation. A function ``worker`` is called on ``ranks`` ranks.
        ranks: Number of ranks; 0 if the program does it itself.
        smaller: Sizes of the page's blocks, and what they are replaced by.
    """

    text: str
    ranks: int = 0
    smaller: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def around(self, blocks: list[str]) -> str:
        """Return the whole program."""
        sizes = "|".join(rf"\b{size}\b" for size in self.smaller) or "$^"
        blocks = [re.sub(sizes, lambda match: self.smaller[match[0]], block) for block in blocks]
        for number in range(len(blocks)):
            place = rf"^( *)# block {number}$"
            assert re.search(place, self.text, flags=re.MULTILINE), f"block {number} has no place"
        text = re.sub(
            r"^( *)# block (\d+)$",
            lambda match: textwrap.indent(blocks[int(match[2])], match[1]),
            textwrap.dedent(self.text),
            flags=re.MULTILINE,
        )
        if self.ranks:
            text += f'\nif __name__ == "__main__":\n    interlace.launch(worker, {self.ranks})\n'
        return text


_IMPORTS = """
import torch
import torch.distributed as dist
import interlace
"""

# A page whose first block multiplies x and w on two ranks.
_PRODUCT = Program(
    _IMPORTS
    + """
def worker():
    rank = dist.get_rank()
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    # block 0
    assert (y == 32).all()
""",
    ranks=2,
)
PROGRAMS = {
    "docs/batch-invariance.md": Program(
        _IMPORTS
        + """
def worker():
    torch.manual_seed(dist.get_rank())
    batch, weight = torch.randn(48, 64).bfloat16(), torch.randn(32, 64).bfloat16()

    def model(batch):
        return interlace.gemm_all_reduce(batch, weight)

    # block 0
    with interlace.batch_invariant():
        assert torch.equal(model(batch[17:18]), logits[17:18])
    # block 1
    with interlace.batch_invariant(ranks=8):
        assert torch.equal(model(batch[17:18]), logits[17:18])
""",
        ranks=2,
    ),
    "docs/compile.md": Program(
        _IMPORTS
        + """
class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def fuse(mlp, mesh, x):
    # block 0

def worker():
    torch.manual_seed(0)
    fuse(MLP(), dist.device_mesh.init_device_mesh("cpu", (2,)), torch.randn(4, 8))
""",
        ranks=2,
    ),
    # The lines of programs that are not installed are only parsed.
    "docs/transformers.md": Program(
        "import importlib.util\n"
        + _IMPORTS
        + """
def worker():
    model = torch.nn.Linear(8, 8)
    # block 0
    if importlib.util.find_spec("transformers"):
        # block 1
        # block 2
        assert (compiled.backend, config.ep_implementation) == ("interlace", "interlace")
""",
        ranks=2,
    ),
    "docs/torchrec.md": Program(
        "import importlib.util\n"
        + _IMPORTS
        + """
def worker():
    if importlib.util.find_spec("torchrec"):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        tables = [
            EmbeddingBagConfig(
                name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"]
            )
        ]
        ebc = EmbeddingBagCollection(tables=tables)
        # block 0
        assert interlace.counts()["torchrec"].taken["embedding_all_to_all"] == 1
""",
        ranks=2,
    ),
    "docs/costs.md": Program(
        _IMPORTS
        + """
def worker():
    interlace.gemm_reduce_scatter(torch.ones(4, 8), torch.ones(8, 8))
    # block 0
    assert held.keys() == {"gemm_reduce_scatter"} and total > 0
""",
        ranks=2,
    ),
    "docs/mapped-outputs.md": Program(
        _IMPORTS
        + """
def worker():
    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    # block 0
    expected = torch.empty(64, 64, dtype=x.dtype)
    dist.all_to_all_single(expected, x @ w.T)
    torch.testing.assert_close(y.flatten(0, 1), expected)
    activations = x
    # block 1
    torch.testing.assert_close(y.flatten(0, 1), expected)
""",
        ranks=4,
        smaller={"8192": "64", "2048": "16"},
    ),
    "docs/mixture-of-experts.md": Program(
        _IMPORTS
        + """
def worker():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    criterion = torch.sum
    # block 0
    assert x.grad.isfinite().all()
""",
        ranks=4,
        smaller={"4096": "16", "14336": "32"},
    ),
    "docs/reference.md": _PRODUCT,
    "docs/tensor-parallel.md": Program(
        _IMPORTS
        + """
def worker():
    x = torch.randn(3, 32)
    # block 0
    assert y.shape == (3, 32)
    model = torch.nn.ModuleDict({"up": up, "down": down})
    dist.barrier()
    optimizer = torch.optim.SGD(model.parameters())
    loss = y.sum()
    # block 1
    # block 2
    assert y.shape == (3, 32)
    y, target = y.detach(), torch.randint(50, (3,))
    # block 3
    expected = torch.nn.functional.cross_entropy(y @ head.weight.T, target)
    torch.testing.assert_close(loss, expected)
    # block 4
    # block 5
    scaler = torch.amp.GradScaler("cpu")
    loss = down(up(x)[:, :32]).sum()
    # block 6
""",
        ranks=1,
        smaller={"4096": "32", "28672": "64", "14336": "32", "128256": "50"},
    ),
    "docs/tracing.md": _PRODUCT,
    "docs/training-dlrm.md": Program(
        '''
from pathlib import Path

def line(i):
    """Return a line of a click log: a label, 13 integers, 26 categories."""
    return "\\t".join([str(i % 2), *["1"] * 13, *[f"{i % 7:08x}"] * 26]) + "\\n"

def plan_worker():
    tables = [EmbeddingTable("C1", 100, 64, bag_length=1)]
    # block 1
    assert bags.plan

if __name__ == "__main__":
    Path("train.txt").write_text("".join(map(line, range(64))))

# block 0

if __name__ == "__main__":
    interlace.launch(plan_worker, 2)
''',
        smaller={"100_000": "100", "8192": "32", "64": "4"},
    ),
    "docs/triggered-transfers.md": Program(
        _IMPORTS
        + """
import triton
import triton.language as tl
import interlace.language as il

@triton.jit
def kernel(x, out, counters, stride, rows_each, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    value = tl.load(x + row * COLUMNS + columns)
    # block 1

def worker():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x, w = torch.randn(64, 8).bfloat16(), torch.randn(64, 8).bfloat16()
    # block 0
    expected = torch.empty(64, 64, dtype=x.dtype)
    dist.all_to_all_single(expected, x @ w.T)
    torch.testing.assert_close(y.flatten(0, 1), expected)
    rows, columns = 8, 16
    x = torch.full((rows, columns), float(rank))
    # block 2
    assert y.flatten(0, 1)[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
""",
        ranks=4,
        smaller={"8192": "64", "2048": "16"},
    ),
    "docs/writing-an-operator.md": Program(
        """
import interlace
from interlace.gemm import schema
from interlace.gemm.implementations.fused import FUSED
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operator import GemmOperator

# block 0
""",
    ),
    "docs/explorer.md": Program("# block 0", smaller={"1000": "30"}),
    "src/interlace/language/README.md": Program(
        _IMPORTS
        + """
# block 0
# block 1
# block 2

def worker():
    for turn in range(3):
        y = all_gather(torch.full((256,), float(turn + 10 * dist.get_rank())))
        assert y[:, 0].tolist() == [turn, turn + 10]
""",
        ranks=2,
    ),
}
# What a newcomer copies first. The other programs run in make docs, as they take a minute together.
_FIRST = "README.md"


def _is_sketch(block: str) -> bool:
    return block.startswith("# Sketch: ")


def _programs() -> list[object]:
    """Return what runs: a page's blocks together where PROGRAMS has the rest, else each alone."""
    programs = []
    for page in PAGES:
        blocks = [block for block in _blocks(page, "python") if not _is_sketch(block)]
        texts = [PROGRAMS[page].around(blocks)] if page in PROGRAMS else blocks
        marks = [] if page == _FIRST else [pytest.mark.documents]
        for number, text in enumerate(texts):
            name = f"{page}:{number}" if len(texts) > 1 else page
            programs.append(pytest.param(text, id=name, marks=marks))
    return programs


@pytest.mark.parametrize("text", _programs())
def test_block_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    ended = run_program(program, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_sketches_are_few() -> None:
    sketches = [block for page in PAGES for block in _blocks(page, "python") if _is_sketch(block)]
    assert len(sketches) <= _MOST_SKETCHES
    for block in sketches:
        ast.parse(block)


def test_every_program_has_its_page() -> None:
    assert {page for page in PAGES if _blocks(page, "python")} >= PROGRAMS.keys()


def _commands() -> list[object]:
    """Return every line of the pages' shell blocks, continued lines as one, with its page."""
    return [
        pytest.param(shlex.split(line, comments=True), id=f"{page}: {line.split('  ')[0][:60]}")
        for page in PAGES
        for block in _blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.split("#")[0].strip()
    ]


@pytest.mark.parametrize("words", _commands())
def test_command_exists(words: list[str]) -> None:
    """Commands of Interlace are parsed with their options; programs and targets exist."""
    is_launched = words[0] == "torchrun" and "-m" in words
    if words[0] == "interlace" or is_launched:
        start = words.index("-m") + 2 if is_launched else 1
        assert words[start - 1] == "interlace"
        parse(typer.main.get_command(app), words[start:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "torchrun" and "-m" in words:
        parse(typer.main.get_command(app), words[words.index("interlace") + 1 :])
    elif words[0] in ("python", "torchrun", "srun"):
        program = next(word for word in words if word.endswith(".py"))
        if "/" not in program:
            return  # the reader's own
        shared = ROOT / "examples" / "shared"
        files = [ROOT / program, *shared.glob("*.py")]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for word in words[words.index(program) :]:
            if word.startswith("--"):
                parameter = word[2:].replace("-", "_")
                assert f'"{word}"' in text or re.search(rf"\b{parameter}: ", text), word
    else:
        assert words[:2] == ["pip", "install"]


def parse(command: click.Command, words: list[str]) -> None:
    """Parse a command's words without running it, down to the command that they name.

    Raises:
        click.UsageError: there is no such command or option.
    """
    context = click.Context(command, info_name="interlace")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, words
        command, words = found, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    command.parse_args(context, list(words))
