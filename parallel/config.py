"""What a model is: the one place that reads Hugging Face configs and knows their quirks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from offload.errors import TierForceError, one_line
from offload.layout import KVLayout
from offload.rotary import Rotary
from parallel.hub import NotThere, from_hub

# model_type: the biases its q/k/v and o projections have where the config does not say
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "o_bias": False},
    "mistral": {"qkv_bias": False, "o_bias": False},
    "qwen2": {"qkv_bias": True, "o_bias": False},
}
# what transformers would fill in if it were missing
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class ConfigError(TierForceError):
    """The config is missing, unreadable, or describes a model that is not supported."""


def token_ids(value: int | list[int] | None) -> frozenset[int]:
    """Hugging Face's one id, list of ids or nothing."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)


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
    dtype: torch.dtype | None  # None: the config does not say; the checkpoint's tensors do
    stop_tokens: frozenset[int]  # end-of-sequence ids
    rope: Any = field(hash=False)  # the transformers config, for its RoPE functions

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "vocab",
            "max_positions",
        ):
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
        """Read config.json in `folder`. Raises ConfigError for what is missing, broken or not
        supported.
        """
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json: point --model and --draft at complete Hugging Face "
                "checkpoint folders."
            )
        return cls._read(folder / "config.json")

    @classmethod
    def find(cls, name: str) -> ModelConfig:
        """Of a folder, a config.json, or a model on the hub, of which nothing else is fetched.
        Raises ConfigError.
        """
        path = Path(name)
        if path.is_dir():
            return cls.from_pretrained(path)
        if path.is_file():
            return cls._read(path)
        try:
            return cls._read(from_hub(hf_hub_download, name, filename="config.json"))
        except NotThere as error:
            raise ConfigError(
                f"{name} is neither a folder, a config.json nor a model the hub could give "
                f"({error})."
            ) from error

    @classmethod
    def _read(cls, path: Path) -> ModelConfig:
        try:
            given = dict(json.loads(path.read_text(encoding="utf-8")))
            known = given.get("model_type") in FAMILIES
            missing = [name for name in _NEEDED if name not in given] if known else []
            hf = (
                None
                if missing
                else AutoConfig.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
            )
        except Exception as error:  # transformers raises whatever the broken field happens to break
            if "trust_remote_code" in str(error):
                raise ConfigError(
                    f"{path} would run code that came with the model (auto_map), which is never "
                    "done here."
                ) from error
            raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error
        if missing:  # transformers would put some other model's numbers in their place
            raise ConfigError(
                f"{path} lacks {', '.join(missing)}: it does not say what the model is."
            )
        return cls.from_hf(hf)

    @classmethod
    def from_hf(cls, hf: Any) -> ModelConfig:
        if hf.model_type not in FAMILIES:
            raise ConfigError(
                f"model_type {hf.model_type!r} is not supported; supported are "
                f"{', '.join(FAMILIES)}."
            )
        if hf.hidden_act != "silu":
            raise ConfigError(
                f"activation {hf.hidden_act!r} is not supported; the Llama family uses silu."
            )
        window = getattr(hf, "sliding_window", None)
        if (
            window
            and getattr(hf, "use_sliding_window", True)
            and window < hf.max_position_embeddings
        ):
            raise ConfigError(
                f"sliding-window attention (window {window}) is not supported: every layer must see"
                " the whole context."
            )
        rope = hf.rope_parameters
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            raise ConfigError(
                f"RoPE type {rope['rope_type']!r} is not supported; supported are "
                f"{', '.join(ROPE_TYPES)}."
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("partial rotary embeddings are not supported.")
        family = FAMILIES[hf.model_type]
        bias = getattr(hf, "attention_bias", None)
        return cls(
            layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            intermediate=hf.intermediate_size,
            vocab=hf.vocab_size,
            norm_eps=hf.rms_norm_eps,
            max_positions=hf.max_position_embeddings,
            tied=bool(hf.tie_word_embeddings),
            qkv_bias=family["qkv_bias"] if bias is None else bias,
            o_bias=family["o_bias"] if bias is None else bias,
            mlp_bias=getattr(hf, "mlp_bias", False),
            dtype=hf.dtype if isinstance(hf.dtype, torch.dtype) else None,
            stop_tokens=token_ids(hf.eos_token_id),
            rope=hf,
        )

    @property
    def context_limit(self) -> int:
        """Tokens the model can address: its positions, stretched where the RoPE type stretches
        beyond what the config counts.
        """
        rope = self.rope.rope_parameters
        stretch = rope.get("factor", 1.0) if rope.get("rope_type") in ("linear", "dynamic") else 1.0
        return int(self.max_positions * stretch)

    def inverse_frequencies(self, tokens: int) -> tuple[Tensor, float]:
        """(D / 2,) float32 and the factor on cos and sin, for a text of `tokens` tokens.

        Only dynamic NTK depends on the length: it is fixed at the prompt's, so that all keys of a
        text share one base.
        """
        kind = self.rope.rope_parameters.get("rope_type", "default")
        if kind == "default":
            return LlamaRotaryEmbedding.compute_default_rope_parameters(self.rope)
        return ROPE_INIT_FUNCTIONS[kind](self.rope, torch.device("cpu"), seq_len=tokens)

    def rotary(self, tokens: int, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Tables for positions up to `length`, for a prompt of `tokens` tokens."""
        return Rotary(*self.inverse_frequencies(tokens), length, dtype, device)

    def kv_layout(self, ranks: int, dtype: torch.dtype) -> KVLayout:
        """The KV geometry of one of `ranks` ranks. Raises ConfigError when heads do not divide."""
        if self.kv_heads % ranks:
            raise ConfigError(
                f"{self.kv_heads} key/value heads cannot be split over {ranks} ranks: choose a "
                "number of GPUs that divides them."
            )
        return KVLayout(self.layers, self.kv_heads // ranks, self.head_dim, dtype)
