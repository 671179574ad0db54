"""Sizes of models: a table of published ones, configurations of transformers, and lists of sizes.

The table is ``models.json``, with the sizes that the models' published configurations have. Nothing
here imports torch, and no file of a model is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from interlace.documents import read_json
from interlace.errors import ArgumentError, ConfigError, did_you_mean
from interlace.units import parse_count, shortened


class LayerProduct(NamedTuple):
    """A product of a transformer's layer, on one rank.

    Attributes:
        part: The product's place in the layer.
        is_summed: Whether ranks add up their products; each has its own columns otherwise.
        columns, inner: N and K.
    """

    part: str
    is_summed: bool
    columns: int
    inner: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a transformer.

    Attributes:
        intermediate: Columns of the feed-forward network's first product; of an expert's, if there
            are experts.
        experts, top_k: Number of experts, and of those that a token is sent to; 0 if there are
            none.
        layers: Number of layers, if all of them are built as those of Llama: attention and a
            feed-forward network with gate and up, or experts, one after the other, each followed by
            the residual and a norm. 0 if they are built in another way.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    top_k: int = 0
    layers: int = 0

    def layer_products(self, ranks: int) -> list[LayerProduct]:
        """Return the products of a layer in their order, but for those of experts.

        Raises:
            ArgumentError: The ranks do not divide what they share.
        """
        self._require_division(ranks)
        kv_heads = max(self.kv_heads // ranks, 1)
        qkv = (self.heads // ranks + 2 * kv_heads) * self.head_dim
        products = [
            LayerProduct("qkv", False, qkv, self.hidden),
            LayerProduct("output", True, self.hidden, self.heads * self.head_dim // ranks),
        ]
        if not self.experts:
            inner = self.intermediate // ranks
            products.append(LayerProduct("gate, up", False, 2 * inner, self.hidden))
            products.append(LayerProduct("down", True, self.hidden, inner))
        return products

    def _require_division(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide what they share out.

        Raises:
            ArgumentError: It does not.
        """
        shared = {"heads": self.heads}
        inner = {"inner columns": self.intermediate}
        shared |= {"experts": self.experts} if self.experts else inner
        for name, count in shared.items():
            if count % ranks:
                raise ArgumentError(
                    f"--tensor must divide the {count} {name} of {self.name}; got {ranks}."
                )
        # Ranks share a head of keys and values where there are fewer of them.
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise ArgumentError(
                f"--tensor must divide the {self.kv_heads} heads of keys and values of "
                f"{self.name}, or be a multiple of them; got {ranks}."
            )


@dataclasses.dataclass(frozen=True)
class EmbeddingModel:
    """The sizes of a recommendation model's embedding tables.

    Attributes:
        tables: Tables of all ranks.
        width: Columns of a table.
        lookups: Lookups per sample and table.
    """

    name: str
    tables: int
    width: int
    lookups: int = 1


EMBEDDING_MODELS = (EmbeddingModel("DLRM-Criteo", 26, 128),)
"""MLPerf's first DLRM on the Criteo click logs."""


def models() -> list[Model]:
    """Return the transformers of the table."""
    file = importlib.resources.files("interlace.costs") / "models.json"
    return [Model(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def explained_models() -> dict[str, Model | EmbeddingModel]:
    """Return the models whose calls follow from their sizes, by name."""
    known: dict[str, Model | EmbeddingModel] = {
        model.name: model for model in models() if model.layers
    }
    return known | {model.name: model for model in EMBEDDING_MODELS}


def find_model(text: str) -> Model | EmbeddingModel:
    """Return the model that a text stands for.

    Args:
        text: A name of the table, in which case, dots and hyphens do not count and words may be
            left out (``"llama3-70b"``); the path of a ``config.json`` of transformers, or of its
            folder; or a list of sizes, ``"hidden=4096,heads=32,kv_heads=8,inner=14336,layers=32"``
            (also ``head_dim``, ``experts`` and ``top_k``), or ``"tables=26,width=128,lookups=1"``.

    Raises:
        ArgumentError: It stands for none, or for several.
        ConfigError: The file has a key with another value than it must have, or describes layers
            that are not built as those of Llama.
    """
    if "=" in text:
        return _listed(text)
    path = Path(text)
    # Of a name that is too long for a file, no file system can be asked.
    with contextlib.suppress(OSError):
        if (path / "config.json").is_file():
            path /= "config.json"
    if path.suffix == ".json":
        return _configured(path)
    known = explained_models()
    words = _words(text)
    exact = [name for name in known if _words(name) == words]
    matching = exact or [name for name in known if words and _is_within(words, _words(name))]
    if len(matching) == 1:
        return known[matching[0]]
    hint = (
        " That is a part of each of these names."
        if matching
        else f"{did_you_mean(text, known)} Or give a config.json of transformers, or sizes: "
        "hidden=4096,heads=32,kv_heads=8,inner=14336,layers=32 or tables=26,width=128,lookups=1."
    )
    raise ArgumentError(
        f"--model must be one of {', '.join(matching or known)}; got {shortened(text)}.{hint}"
    )


def _words(name: str) -> list[str]:
    """Return a name's words: ``"Llama-3-70B"`` -> ``["llama", "3", "70b"]``."""
    return re.findall(r"\d+[a-z]*|[a-z]+", name.lower())


def _is_within(words: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether words are among others, in the same order."""
    remaining = iter(others)
    return all(word in remaining for word in words)


_MODEL_KEYS = {
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "layers": ("num_hidden_layers",),
}
"""The keys of transformers' configurations for each size; of several, the first that is there."""

_BUILT_LIKE_LLAMA = (
    "ernie4_5", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3",
)  # fmt: skip
"""Values of ``model_type`` of configurations whose layers are built as those of Llama."""

_OTHER_STRUCTURES = (
    "first_k_dense_replace", "kv_lora_rank", "mlp_only_layers", "n_shared_experts",
    "shared_expert_intermediate_size",
)  # fmt: skip
"""Keys that say, unless they are 0 or empty, that layers are built in another way, or that they
differ.
"""

_DEFAULTS_OF_THEIR_OWN = {
    "ernie4_5": ("kv_heads", "head_dim"),
    "mistral": ("kv_heads",),
    "mixtral": ("kv_heads", "experts"),
    "qwen2": ("kv_heads",),
    "qwen3": ("kv_heads", "head_dim"),
    "qwen3_moe": ("kv_heads", "experts"),
    "seed_oss": ("kv_heads", "head_dim"),
    "smollm3": ("kv_heads",),
}
"""Sizes that a configuration of a ``model_type`` must have, as transformers' defaults for them are
numbers, not as many heads of keys and values as of queries, nor no experts.
"""

_MOST = 2**20
"""The largest size of a model: with more, a weight has more bytes than an int64 counts."""

_OPTIONAL = ("kv_heads", "head_dim", "experts", "top_k", "lookups")


def _listed(text: str) -> Model | EmbeddingModel:
    """Return the model that a list of sizes describes."""
    parts = [part.partition("=") for part in text.split(",")]
    values = {key.strip(): value.strip() for key, _, value in parts}
    if len(values) < len(parts):
        raise ArgumentError(f"--model: a size must be given once; got {shortened(text)}.")
    kind: type[Model | EmbeddingModel] = EmbeddingModel if "tables" in values else Model
    sizes = [field.name for field in dataclasses.fields(kind)][1:]
    keys = {size: "inner" if size == "intermediate" else size for size in sizes}
    for key in values:
        if key not in keys.values():
            raise ArgumentError(
                f"--model: a size must be one of {', '.join(keys.values())}; got {key!r}."
                f"{did_you_mean(key, keys.values())}"
            )
    numbers = {key: parse_count(text) or text for key, text in values.items()}
    return _built(kind, text, "--model", keys, numbers)


def _configured(path: Path) -> Model:
    """Return the model that a configuration of transformers describes."""
    document = read_json(path, "a config.json of transformers")
    if isinstance(document, dict) and isinstance(document.get("text_config"), dict):
        document = document["text_config"]  # of a model that sees as well
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a config.json of transformers; got no JSON object.")
    inline = "Give the sizes of one that is, such as hidden=4096,heads=32,inner=14336,layers=32."
    kind = document.get("model_type", _BUILT_LIKE_LLAMA[0])
    if kind not in _BUILT_LIKE_LLAMA:
        raise ConfigError(
            f"{path}: model_type must be one of {', '.join(_BUILT_LIKE_LLAMA)}, whose layers are "
            f"built alike; got {kind!r}. {inline}"
        )
    for key in _OTHER_STRUCTURES:
        if document.get(key):
            raise ConfigError(
                f"{path}: {key} must be absent, 0 or empty; got {document[key]!r}. Its layers are "
                f"not built as those of Llama. {inline}"
            )
    if document.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{path}: decoder_sparse_step must be 1, experts in each layer; got "
            f"{document['decoder_sparse_step']!r}. {inline}"
        )
    given = {key for key, value in document.items() if value not in (None, 0)}
    if not given & set(_MODEL_KEYS["experts"]):
        # Some configurations without experts have numbers of them all the same.
        given -= {"moe_intermediate_size", "num_experts_per_tok"}
    keys = {
        size: next((key for key in names if key in given), names[-1])
        for size, names in _MODEL_KEYS.items()
    }
    numbers = {key: document.get(key) for key in keys.values() if key in given}
    for size in _DEFAULTS_OF_THEIR_OWN.get(document.get("model_type", ""), ()):
        if keys[size] not in given:
            names = " or ".join(_MODEL_KEYS[size])
            raise ConfigError(
                f"{path}: {names} must be there, as {kind} has a default of its own; got none."
            )
    name = path.parent.name if path.name == "config.json" else path.stem
    model = _built(Model, name, str(path), keys, numbers)
    assert isinstance(model, Model)
    return model


def _built(
    kind: type[Model | EmbeddingModel],
    name: str,
    subject: str,
    keys: Mapping[str, str],
    values: Mapping[str, object],
) -> Model | EmbeddingModel:
    """Return a model of checked sizes.

    Args:
        subject: What has them, for messages.
        keys: The word for each size in it.
        values: What it has, by these words.

    Raises:
        ConfigError: A size is missing, is no positive whole number, or does not fit another one.
    """
    sizes: dict[str, Any] = {}
    for size, key in keys.items():
        value = values.get(key)
        is_optional = size in _OPTIONAL and not (size == "top_k" and "experts" in sizes)
        if value is None and is_optional:
            continue
        if type(value) is not int or not 1 <= value <= _MOST:
            got = "none" if value is None else repr(value)[:60]
            raise ConfigError(
                f"{subject}: {key} must be a whole number from 1 to {_MOST}; got {got}."
            )
        sizes[size] = value
    if kind is Model:
        sizes.setdefault("kv_heads", sizes["heads"])
        if "head_dim" not in sizes and sizes["hidden"] % sizes["heads"]:
            raise ConfigError(
                f"{subject}: {keys['hidden']} must be a multiple of {keys['heads']}; got "
                f"{sizes['hidden']} and {sizes['heads']}. Or give head_dim."
            )
        sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
        if sizes["heads"] % sizes["kv_heads"]:
            raise ConfigError(
                f"{subject}: {keys['heads']} must be a multiple of {keys['kv_heads']}, whose heads "
                f"they share; got {sizes['heads']} and {sizes['kv_heads']}."
            )
        if "experts" in sizes and sizes["top_k"] > sizes["experts"]:
            raise ConfigError(
                f"{subject}: {keys['top_k']} must be at most {keys['experts']}; got "
                f"{sizes['top_k']} and {sizes['experts']}."
            )
    return kind(name, **sizes)
