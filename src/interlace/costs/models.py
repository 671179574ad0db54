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
        is_summed: Whether ranks add up their products. Otherwise each has its own columns; all
            columns, of a product that compresses keys and values.
        columns, inner: N and K.
        layers: Number of layers that have it.
        is_normed: Whether a norm follows the sum, before or after the residual.
    """

    part: str
    is_summed: bool
    columns: int
    inner: int
    layers: int
    is_normed: bool = False


@dataclasses.dataclass(frozen=True)
class Latent:
    """The sizes of attention whose cache has a compressed vector for each token, of all heads.

    Attributes:
        kv_columns: Columns of the product that compresses keys and values, and of the part of keys
            with positions, which all heads share.
        query_dim: Width of a head of queries; that of a head of values is the model's ``head_dim``.
        query_rank: Width of a compressed query; 0 if queries are not compressed.
    """

    kv_columns: int
    query_dim: int
    query_rank: int = 0


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a transformer.

    Attributes:
        intermediate: Columns of the feed-forward network's first product; of an expert's, if there
            are experts.
        experts, top_k: Number of experts, and of those that a token is sent to; 0 if there are
            none.
        layers: Number of layers, if they are built as these attributes say: attention and a
            feed-forward network, or experts, one after the other, each followed by a norm and the
            residual in any order. 0 if they are built in another way.
        is_gated: Whether the feed-forward network has gate and up, else up alone.
        norm_first: Whether the norm behind a sum comes before the residual.
        has_wide_norms: Whether queries and keys have norms over all heads, for which ranks exchange
            something.
        dense_layers: Number of layers, beside those with experts, that have a feed-forward network.
        dense_intermediate: Columns of that network's first product.
        shared: Columns of the first product of the experts that all tokens are sent to; 0 if there
            are none.
        latent: What attention with compressed keys and values has; None for any other.
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
    is_gated: bool = True
    norm_first: bool = False
    has_wide_norms: bool = False
    dense_layers: int = 0
    dense_intermediate: int = 0
    shared: int = 0
    latent: Latent | None = None

    @property
    def expert_layers(self) -> int:
        """Return the number of layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def layer_products(self, ranks: int, *, sequence_parallel: bool = False) -> list[LayerProduct]:
        """Return the products of the layers in their order, but for those of experts that only some
        tokens are sent to, and for those of the cache.

        Raises:
            ArgumentError: The ranks do not divide what they share, or activations are sharded by
                rows before products that all ranks have.
        """
        if sequence_parallel and self.latent:
            raise ArgumentError(
                "--model must have attention whose first product ranks share out, if rows are "
                f"sharded before it; got {self.name}, whose keys and values are compressed on each."
            )
        self._require_division(ranks)
        heads_inner = self.heads * self.head_dim // ranks
        products = [
            LayerProduct(part, False, columns, inner, self.layers)
            for part, columns, inner in self._attention_inputs(ranks)
        ]
        products.append(LayerProduct("output", True, self.hidden, heads_inner, self.layers, True))
        up = "gate, up" if self.is_gated else "up"
        for prefix, width, layers in self._networks():
            inner = width // ranks
            columns = 2 * inner if self.is_gated else inner
            products.append(LayerProduct(prefix + up, False, columns, self.hidden, layers))
            # What other experts return is added to that of shared ones before the norm.
            is_normed = not prefix
            down = LayerProduct(prefix + "down", True, self.hidden, inner, layers, is_normed)
            products.append(down)
        return products

    def _attention_inputs(self, ranks: int) -> list[tuple[str, int, int]]:
        """Return the products before attention: part, N and K."""
        latent, heads = self.latent, self.heads // ranks
        if not latent:
            columns = (heads + 2 * max(self.kv_heads // ranks, 1)) * self.head_dim
            return [("qkv", columns, self.hidden)]
        columns = heads * latent.query_dim
        if not latent.query_rank:
            return [("q", columns, self.hidden), ("kv down", latent.kv_columns, self.hidden)]
        both = latent.query_rank + latent.kv_columns
        return [("q, kv down", both, self.hidden), ("q up", columns, latent.query_rank)]

    def _networks(self) -> list[tuple[str, int, int]]:
        """Return the networks that all tokens go through: a prefix of parts, columns, layers."""
        if not self.experts:
            return [("", self.intermediate, self.layers)]
        networks = ("", self.dense_intermediate, self.dense_layers), (
            "shared ", self.shared, self.expert_layers,
        )  # fmt: skip
        return [each for each in networks if each[1] and each[2]]

    def _require_division(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide what they share out.

        Raises:
            ArgumentError: It does not.
        """
        shared = [("heads", self.heads)]
        shared += [("experts", self.experts)] if self.experts else []
        shared += [(prefix + "inner columns", width) for prefix, width, _ in self._networks()]
        for name, count in shared:
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
    entries = json.loads(file.read_text(encoding="utf-8"))
    for entry in entries:
        if "latent" in entry:
            entry["latent"] = Latent(**entry["latent"])
    return [Model(**entry) for entry in entries]


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
            that :class:`Model` does not.
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
    "intermediate": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("moe_k", "num_experts_per_tok"),
    "layers": ("num_hidden_layers",),
}
"""The keys of transformers' configurations for each size; of several, the first that is there."""

_STRUCTURES = (
    "first_k_dense_replace", "interleave_moe_layer_step", "kv_lora_rank", "mlp_layer_types",
    "mlp_only_layers", "moe_layer_start_index", "moe_num_shared_experts", "n_shared_experts",
    "q_lora_rank", "shared_expert_intermediate_size", "shared_intermediate_size",
    "use_parallel_residual",
)  # fmt: skip
"""Keys that say, unless they are 0 or empty, that layers are not built as those of Llama, or that
they differ.
"""

_EVERY_LAYER = ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")
"""Keys that say, if they are 1, that all layers behind the dense ones have experts."""


class _Family(NamedTuple):
    """What configurations of a ``model_type`` have, and how its layers differ from those of Llama.

    Attributes:
        required: Sizes that a configuration must have, as transformers' defaults for them are
            numbers, not as many heads of keys and values as of queries, nor no experts.
        structures: Keys of ``_STRUCTURES`` that say how its layers are built, and must be there.
        names: Keys that sizes have instead of those of ``_MODEL_KEYS``.
        defaults: Those of transformers for keys that published configurations leave out.
        shared_experts: Number of shared experts, if no key has it.
        is_gated, norm_first, has_wide_norms: As :class:`Model` has them.
    """

    required: tuple[str, ...] = ("kv_heads",)
    structures: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = {}
    defaults: Mapping[str, int] = {}
    shared_experts: int = 0
    is_gated: bool = True
    norm_first: bool = False
    has_wide_norms: bool = False


_HEADS = "kv_heads", "head_dim"
_EXPERTS = "kv_heads", "experts"
_ALL = *_HEADS, "experts"
_OF_EXPERTS = {"intermediate": ("moe_intermediate_size",)}
_DENSE_AND_SHARED = "first_k_dense_replace", "n_shared_experts"

_LIKE_DEEPSEEK = _Family(
    _ALL,
    ("kv_lora_rank", "q_lora_rank", *_DENSE_AND_SHARED),
    _OF_EXPERTS | {"head_dim": ("v_head_dim",)},
)

_FAMILIES = {
    "apertus": _Family(is_gated=False),
    "arcee": _Family(is_gated=False),
    "cwm": _Family(_HEADS),
    "deepseek_v2": _LIKE_DEEPSEEK,
    "deepseek_v3": _LIKE_DEEPSEEK,
    "dots1": _Family(_EXPERTS, _DENSE_AND_SHARED, _OF_EXPERTS),
    "ernie4_5": _Family(_HEADS),
    "ernie4_5_moe": _Family(
        _EXPERTS, ("moe_layer_start_index", "moe_num_shared_experts"), _OF_EXPERTS
    ),
    "exaone4": _Family(norm_first=True),
    "gemma": _Family(_HEADS),
    "gemma2": _Family(_HEADS, norm_first=True),
    "gemma3_text": _Family(
        _HEADS,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        norm_first=True,
    ),
    "glm": _Family(_HEADS),
    "glm4": _Family(_HEADS, norm_first=True),
    "glm4_moe": _Family(_EXPERTS, _DENSE_AND_SHARED, _OF_EXPERTS),
    "glm4_moe_lite": _LIKE_DEEPSEEK,
    "gpt_oss": _Family(_ALL),
    "granite": _Family(()),
    "granitemoe": _Family(_EXPERTS),
    "hunyuan_v1_dense": _Family(_HEADS),
    "kimi_k2": _LIKE_DEEPSEEK,
    # Also that of configurations that do not say what they are, and may have experts.
    "llama": _Family((), names={"intermediate": ("moe_intermediate_size", "intermediate_size")}),
    "llama4_text": _Family(_ALL, ("interleave_moe_layer_step",), shared_experts=1),
    "minimax_m2": _Family(_ALL, has_wide_norms=True),
    "ministral": _Family(_HEADS),
    "ministral3": _Family(_HEADS),
    "mistral": _Family(),
    "mixtral": _Family(_EXPERTS),
    "nemotron": _Family(_HEADS, is_gated=False),
    "olmo": _Family(),
    "olmo2": _Family(norm_first=True, has_wide_norms=True),
    "olmo3": _Family(norm_first=True, has_wide_norms=True),
    "olmoe": _Family(_EXPERTS, has_wide_norms=True),
    "phi3": _Family(()),
    "phimoe": _Family(_EXPERTS),
    "qwen2": _Family(),
    "qwen2_5_vl": _Family(),
    "qwen2_5_vl_text": _Family(),
    "qwen2_moe": _Family(_EXPERTS, ("shared_expert_intermediate_size",), _OF_EXPERTS),
    "qwen2_vl": _Family(),
    "qwen2_vl_text": _Family(),
    "qwen3": _Family(_HEADS),
    "qwen3_moe": _Family(_EXPERTS, names=_OF_EXPERTS),
    "qwen3_vl_moe_text": _Family(_ALL, names=_OF_EXPERTS),
    "qwen3_vl_text": _Family(_HEADS),
    "seed_oss": _Family(_HEADS),
    "smollm3": _Family(),
    "stablelm": _Family(),
    "starcoder2": _Family(is_gated=False),
}
"""Values of ``model_type`` of configurations that are taken."""

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
    sizes = ("tables", "width", "lookups") if "tables" in values else tuple(_MODEL_KEYS)
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
    kind = document.get("model_type", "llama")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if not family:
        raise ConfigError(
            f"{path}: model_type must be one of {', '.join(_FAMILIES)}, whose layers can be "
            f"described; got {_shown(kind)}. {inline}"
        )
    for key in _STRUCTURES:
        if document.get(key) and key not in family.structures:
            raise ConfigError(
                f"{path}: {key} must be absent, 0 or empty; got {_shown(document[key])}. "
                f"Such layers of {kind} cannot be described. {inline}"
            )
    for key in _EVERY_LAYER:
        if document.get(key, 1) != 1:
            raise ConfigError(
                f"{path}: {key} must be 1, experts in each layer; got "
                f"{_shown(document[key])}. {inline}"
            )
    document = {**family.defaults, **document}
    given = {key for key, value in document.items() if value not in (None, 0)}
    of_experts = set(_MODEL_KEYS["experts"])
    if not given & of_experts or not (kind == "llama" or "experts" in family.required):
        # Some configurations without experts have numbers of them all the same.
        given -= {"moe_intermediate_size", *of_experts, *_MODEL_KEYS["top_k"]}
    names = {**_MODEL_KEYS, **family.names}
    keys = {
        size: next((key for key in some if key in given), some[-1]) for size, some in names.items()
    }
    numbers = {key: document[key] for key in keys.values() if key in given}
    absent = [names[size] for size in family.required if keys[size] not in given]
    absent += [(key,) for key in family.structures if key not in document]
    if absent:
        raise ConfigError(
            f"{path}: {' or '.join(absent[0])} must be there, as {kind} has a default of its own; "
            "got none."
        )
    name = path.parent.name if path.name == "config.json" else path.stem
    model = _built(Model, name, str(path), keys, numbers)
    assert isinstance(model, Model)
    return _differing(model, family, str(path), document)


def _differing(model: Model, family: _Family, subject: str, document: Mapping[str, Any]) -> Model:
    """Return a model of known sizes with what it has beyond Llama.

    Raises:
        ConfigError: A size of this is missing, or is not what it must be.
    """

    def number(key: str, least: int = 1) -> int:
        return _whole_number(subject, key, document.get(key), least)

    def number_or_none(key: str, least: int) -> int:
        return 0 if document.get(key) is None else number(key, least)

    changes: dict[str, Any] = {
        "is_gated": family.is_gated,
        "norm_first": family.norm_first,
        "has_wide_norms": family.has_wide_norms,
    }
    if "kv_lora_rank" in family.structures:
        positions = number("qk_rope_head_dim")
        changes["latent"] = Latent(
            kv_columns=number("kv_lora_rank") + positions,
            query_dim=number("qk_nope_head_dim") + positions,
            query_rank=number_or_none("q_lora_rank", least=1),
        )
    if model.experts:
        dense_layers = _dense_layers(subject, document, family, model.layers)
        counts = {"n_shared_experts", "moe_num_shared_experts"} & set(family.structures)
        shared_experts = sum(number_or_none(key, least=0) for key in counts)
        shared = (shared_experts or family.shared_experts) * model.intermediate
        if "shared_expert_intermediate_size" in family.structures:
            shared = number("shared_expert_intermediate_size")
        changes |= {"dense_layers": dense_layers, "shared": shared}
        if dense_layers:
            is_mixed = "interleave_moe_layer_step" in family.structures
            key = "intermediate_size_mlp" if is_mixed else "intermediate_size"
            changes["dense_intermediate"] = number(key)
    return dataclasses.replace(model, **changes)


def _dense_layers(subject: str, document: Mapping[str, Any], family: _Family, layers: int) -> int:
    """Return the number of layers without experts, of a model that has some with experts.

    Raises:
        ConfigError: What says so is missing, or is not what it must be.
    """
    if "interleave_moe_layer_step" in family.structures:
        listed = document.get("moe_layers")
        if listed is None:
            key = "interleave_moe_layer_step"
            return layers - layers // _whole_number(subject, key, document[key], 1, layers)
        numbers = listed if isinstance(listed, list) else []
        if not numbers or not all(type(each) is int and 0 <= each < layers for each in numbers):
            raise ConfigError(
                f"{subject}: moe_layers must be a list of numbers from 0 to {layers - 1}; got "
                f"{_shown(listed)}."
            )
        return layers - len(set(numbers))
    end = document.get("moe_layer_end_index", -1)
    if end not in (-1, layers - 1):
        raise ConfigError(
            f"{subject}: moe_layer_end_index must be -1 or that of the last layer, {layers - 1}; "
            f"got {_shown(end)}."
        )
    keys = {"first_k_dense_replace", "moe_layer_start_index"} & set(family.structures)
    # The last layer has experts.
    return sum(_whole_number(subject, key, document[key], 0, layers - 1) for key in keys)


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
        sizes[size] = _whole_number(subject, key, value)
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


def _whole_number(subject: str, key: str, value: object, least: int = 1, most: int = _MOST) -> int:
    """Return a value that must be a whole number.

    Raises:
        ConfigError: It is missing, none, or out of bounds.
    """
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"{subject}: {key} must be a whole number from {least} to {most}; got {_shown(value)}."
        )
    return value


def _shown(value: object) -> str:
    """Return a value for a message, without what is behind 60 letters."""
    return "none" if value is None else repr(value)[:60]
