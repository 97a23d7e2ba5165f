"""What a model is: the one place that reads Hugging Face configs and knows their quirks.

There are two ways in. `from_pretrained` lets transformers read the file, which refuses what is
broken; an engine loads by it. `find` reads the same numbers with neither torch nor transformers,
for a plan that has to answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import one_line
from offload.layout import KVLayout
from parallel.errors import ConfigError
from parallel.gguf_families import config_fields
from parallel.gguf_header import read_header
from parallel.hub import NotThere, fetch_config
from parallel.named import find_local, is_gguf

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload.rotary import Rotary


@dataclass(frozen=True)
class Family:
    """What a config of one model_type means where it says nothing, as transformers fills it in."""

    max_positions: int
    kv_heads: int | None = None  # None: one for each attention head
    qkv_bias: bool = False
    sliding_window: int | None = None
    uses_sliding_window: bool = True
    stop_token: int | None = None


FAMILIES = {
    "llama": Family(max_positions=2048, stop_token=2),
    "mistral": Family(max_positions=131_072, kv_heads=8, sliding_window=4096, stop_token=2),
    "qwen2": Family(
        max_positions=32_768,
        kv_heads=32,
        qkv_bias=True,
        sliding_window=4096,
        uses_sliding_window=False,
    ),
}
# transformers would put some other model's numbers in their place
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
ROPE_TYPES = {  # and the parameters without which each means nothing
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
MAX_STRETCH = 64  # times as many positions
_STRETCHED = ("yarn", "llama3")  # these also know the positions the model was trained on
_COUNTS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocab",
    "max_positions",
)
_ALIASES = {"float": "float32", "half": "float16", "double": "float64"}


def token_ids(given: Any) -> frozenset[int]:
    """Return a set for what Hugging Face writes as one id, a list of ids or nothing.

    Raises ConfigError for anything else.
    """
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(
            f"eos_token_id must be a token id or a list of them, found {json.dumps(given)[:80]}."
        )
    return frozenset(ids)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Counts are of the whole model, not of one rank."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str | None  # such as bfloat16; None: the config does not say, the tensors do
    stop_tokens: frozenset[int]  # end-of-sequence ids
    rope: dict[str, Any] = field(hash=False)  # transformers' rope_parameters

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"the model's config gives {name} = {value!r}; it must be a whole number of at "
                    "least 1."
                )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model's {self.heads} attention heads do not divide into {self.kv_heads} "
                "key/value heads."
            )

    @classmethod
    def from_pretrained(cls, folder: Path) -> ModelConfig:
        """Read config.json in `folder` through transformers, which refuses what is broken.

        `folder` may also be a GGUF file, which says the same in its metadata. Raises ConfigError
        for what is missing, broken or not supported, CheckpointError for a broken GGUF file.
        """
        if is_gguf(folder):
            return cls._read(folder)
        path = _config_file(folder)
        _given(path)
        from transformers import AutoConfig

        try:
            hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever the broken field happens to break
            if "trust_remote_code" in str(error):
                raise _foreign_code(path) from error
            raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error
        return cls.from_hf(hf)

    @classmethod
    def find(cls, name: str) -> ModelConfig:
        """Read the config of a folder, a GGUF file, a config.json, or a model on the hub.

        Needs neither torch nor transformers, and of a model on the hub fetches nothing else.
        Raises ConfigError, and CheckpointError for a broken GGUF file.
        """
        path = find_local(name) or Path(name)
        if path.is_dir():
            return cls._read(_config_file(path))
        if path.is_file():
            return cls._read(path)
        try:
            return cls._read(fetch_config(name))
        except NotThere as error:
            raise ConfigError(
                f"{name} is neither a folder, a config.json nor a model the hub could give "
                f"({error})."
            ) from error

    @classmethod
    def _read(cls, path: Path) -> ModelConfig:
        given = config_fields(read_header(path)) if is_gguf(path) else _given(path)
        if given.get("model_type") not in FAMILIES and "auto_map" in given:
            raise _foreign_code(path)
        try:
            return cls.from_fields(given)
        except ConfigError:
            raise
        except Exception as error:  # whatever the broken field happens to break
            raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error

    @classmethod
    def from_hf(cls, hf: Any) -> ModelConfig:
        """Take the numbers of a transformers config. Raises ConfigError."""
        if hf.model_type in FAMILIES:
            # a parameter beside rope_parameters counts when the frequencies are computed
            hf.standardize_rope_params()
        return cls.from_fields({**vars(hf), "model_type": hf.model_type})

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> ModelConfig:
        """Take the fields of a config.json; what is absent means what transformers would fill in.

        Raises ConfigError for a model that is not supported.
        """
        kind = given.get("model_type")
        if kind not in FAMILIES or (kind == "mistral" and "layer_types" in given):
            raise ConfigError(
                f"model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}."
            )
        family = FAMILIES[kind]
        _check_attention(given, family)
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        bias = given.get("attention_bias")
        dtype = given.get("dtype") or given.get("torch_dtype")
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return cls(
            layers=given["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=given.get("num_key_value_heads", family.kv_heads) or heads,
            head_dim=given.get("head_dim") or hidden // heads,
            intermediate=given["intermediate_size"],
            vocab=given["vocab_size"],
            norm_eps=given.get("rms_norm_eps", 1e-6),
            max_positions=given.get("max_position_embeddings", family.max_positions),
            tied=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias if bias is None else bias,
            o_bias=bool(bias),
            mlp_bias=given.get("mlp_bias", False),
            dtype=None if name is None else _ALIASES.get(name, name),
            stop_tokens=token_ids(given.get("eos_token_id", family.stop_token)),
            rope=_rope(given, family),
        )

    def stretched(self, rope: str | None) -> ModelConfig:
        """Return this model with its positions stretched, for texts longer than it was trained on.

        `yarn:4` stands for YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.4) with factor 4, as
        transformers computes it: four times as many positions. None changes nothing. Raises
        ConfigError for what is not known, and for a model that is stretched already.
        """
        if rope is None:
            return self
        kind, _, given = rope.partition(":")
        try:
            factor = float(given)
        except ValueError:
            factor = 0.0
        if kind != "yarn" or not 1 < factor <= MAX_STRETCH:
            raise ConfigError(
                f"`rope` {rope} is not known: use yarn:FACTOR, such as yarn:4, with a factor above "
                f"1 and up to {MAX_STRETCH}."
            )
        if self.rope["rope_type"] != "default":
            raise ConfigError(
                f"`rope` {rope}: the model stretches its positions itself, by RoPE type "
                f"{self.rope['rope_type']!r} in its config."
            )
        stretched = {
            **self.rope,
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": self.max_positions,
        }
        return replace(self, rope=stretched, max_positions=int(self.max_positions * factor))

    @property
    def context_limit(self) -> int:
        """Tokens the model can address: its positions, stretched where the RoPE type stretches
        beyond what the config counts.
        """
        stretches = self.rope["rope_type"] in ("linear", "dynamic")
        return int(self.max_positions * (self.rope["factor"] if stretches else 1.0))

    def inverse_frequencies(self, tokens: int) -> tuple[Tensor, float]:
        """Return (D / 2,) float32 and the factor on cos and sin, for a text of `tokens` tokens.

        Only dynamic NTK depends on the length: it is fixed at the prompt's, so that all keys of a
        text share one base.
        """
        import torch
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = dict(self.rope)
        factors = rope.pop("frequency_factors", None)  # a GGUF file's, in place of a RoPE type
        hf = LlamaConfig(
            hidden_size=self.heads * self.head_dim,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters=rope,
        )
        if self.rope["rope_type"] == "default":
            inverse, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
        else:
            compute = ROPE_INIT_FUNCTIONS[self.rope["rope_type"]]
            inverse, scale = compute(hf, torch.device("cpu"), seq_len=tokens)
        return inverse if factors is None else inverse / torch.tensor(factors), scale

    def rotary(self, tokens: int, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return the tables for positions up to `length`, for a prompt of `tokens` tokens."""
        from offload.rotary import Rotary

        return Rotary(*self.inverse_frequencies(tokens), length, dtype, device)

    def kv_layout(self, ranks: int, dtype: torch.dtype) -> KVLayout:
        """Return the KV geometry of one of `ranks` ranks.

        Raises ConfigError when heads do not divide.
        """
        if self.kv_heads % ranks:
            raise ConfigError(
                f"{self.kv_heads} key/value heads cannot be split over {ranks} ranks: choose a "
                "number of GPUs that divides them."
            )
        return KVLayout(self.layers, self.kv_heads // ranks, self.head_dim, dtype)


def _config_file(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no config.json: point `model` and `draft` at complete Hugging Face "
            "checkpoint folders, or at GGUF files."
        )
    return path


def _given(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json. Raises ConfigError where it does not say what the model
    is.
    """
    try:
        given = dict(json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # no file, no text, no JSON, no object
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error
    known = given.get("model_type") in FAMILIES
    if missing := [name for name in _NEEDED if known and name not in given]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: it does not say what the model is.")
    return given


def _foreign_code(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} would run code that came with the model (auto_map), which is never done here."
    )


def _check_attention(given: Mapping[str, Any], family: Family) -> None:
    """Raise ConfigError for layers that are not those of the Llama family."""
    act = given.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"activation {act!r} is not supported; the Llama family uses silu.")
    window = given.get("sliding_window", family.sliding_window)
    uses_window = given.get("use_sliding_window", family.uses_sliding_window)
    positions = given.get("max_position_embeddings", family.max_positions)
    if window and uses_window and window < positions:
        raise ConfigError(
            f"sliding-window attention (window {window}) is not supported: every layer must see "
            "the whole context."
        )


def _rope(given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return rope_parameters as transformers writes them today, whichever year the config is of.

    Raises ConfigError for a kind of RoPE that is not supported, and for numbers that are none.
    """
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", given.get("rope_theta", 10_000.0))
    if given.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", given["partial_rotary_factor"])
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"RoPE type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}, one for "
            "all layers."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary embeddings are not supported.")
    if kind in _STRETCHED:
        positions = given.get("max_position_embeddings", family.max_positions)
        rope.setdefault("original_max_position_embeddings", positions)
        if "original_max_position_embeddings" in given:  # beside the others, it is the one meant
            rope["original_max_position_embeddings"] = given["original_max_position_embeddings"]
    for name in ("rope_theta", *ROPE_TYPES[kind]):
        value = rope.get(name)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"RoPE type {kind!r} needs {name} above 0, found {value!r}.")
    return rope
