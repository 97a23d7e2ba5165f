"""Translation of GGUF names: metadata to fields of a config.json, tensors to Hugging Face names.

To add a family, add a row to FAMILIES, and one to FIELDS for each new kind of metadata. Imports
neither torch nor transformers. Source of the names: github.com/ggml-org/llama.cpp,
gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.config_checks import COUNT, COUNT_OR_NONE, NORM_EPS, Number, is_positive, quote
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf.header import GgufHeader, TensorInfo
from parallel.formats.gguf.tensors import TYPES, check_end, check_tensor_offsets
from parallel.formats.plane_format import KeptType, kept_type

FIELDS = {  # metadata key without the architecture: field of a config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_REQUIRED = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_ROPE = {  # metadata key without the architecture: field of rope_parameters
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED = ("attention.value_length", "rope.dimension_count")
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
_STRINGS = ("rope.scaling.type", "tensor_data_layout")
_NON_NEGATIVE = Number(low=0, high=1e15, whole=False)
_NUMBERS = {  # ranges of known fields; all others are whole numbers of at least 1
    "attention.layer_norm_rms_epsilon": NORM_EPS,
    "attention.sliding_window": COUNT_OR_NONE,
    "rope.freq_base": _NON_NEGATIVE,
    "rope.scaling.factor": _NON_NEGATIVE,
    "rope.scaling.yarn_beta_fast": _NON_NEGATIVE,
    "rope.scaling.yarn_beta_slow": _NON_NEGATIVE,
}
_STOP_TOKENS = ("eos", "eot", "eom")  # end of sequence, of turn, of message
TOKENS = "tokenizer.ggml.tokens"
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, as in Llama 3.1

_NON_LAYER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufFamily:
    """The properties of GGUF files of one architecture."""

    model_type: str
    # llama.cpp's RoPE rotates adjacent dimensions, Hugging Face's the halves of a head: the
    # converter has permuted the rows of Q and K accordingly
    interleaved_rope: bool = False

    def tensor_name(self, name: str) -> str | None:
        """Return a tensor's Hugging Face name; None for a tensor the family does not have."""
        stem, _, kind = name.rpartition(".")
        if stem in _NON_LAYER:
            return f"{_NON_LAYER[stem]}.{kind}"
        head, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        if head != "blk" or not index.isdecimal() or part not in _LAYER:
            return None
        return f"model.layers.{index}.{_LAYER[part]}.{kind}"


FAMILIES = {  # keyed by general.architecture; it is llama in files of Mistral
    "llama": GgufFamily("llama", interleaved_rope=True),
    "qwen2": GgufFamily("qwen2"),
}


def kept_types(header: GgufHeader) -> dict[str, KeptType]:
    """Return how matrices can stay packed, by their Hugging Face names.

    Raises ConfigError for an unsupported architecture.
    """
    family = family_of(header)
    types: dict[str, KeptType] = {}
    for info in header.tensors.values():
        stored = TYPES.get(info.kind)
        kind = None if stored is None else kept_type(stored.name)
        name = family.tensor_name(info.name)
        if kind is not None and name is not None and len(info.shape) == 2:
            types[name] = kind
    return types


def family_of(header: GgufHeader) -> GgufFamily:
    """Return the family of a file's architecture. Raises ConfigError if it is not supported."""
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise ConfigError(
            f"{header.path} is not a model: its general.type is "
            f"{quote(header.metadata['general.type'])}."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"{header.path}: architecture {quote(name)} is not supported in GGUF files; "
            f"supported are {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of the config.json equivalent to a file's metadata.

    Raises ConfigError for a model that is not supported or not described completely, and
    CheckpointError if the tensors do not match the description.
    """
    family = family_of(header)
    check_tensor_offsets(header)
    values = _read_fields(header)
    fields = {
        field: values[gguf_name] for gguf_name, field in FIELDS.items() if gguf_name in values
    }
    metadata, tensors = header.metadata, header.tensors
    fields["model_type"] = family.model_type
    fields["use_sliding_window"] = "sliding_window" in fields
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(header, values)
    tokens = len(_tokens(header))
    fields.setdefault("vocab_size", tokens or _rows(header, "token_embd.weight"))
    if tokens > fields["vocab_size"]:
        raise CheckpointError(
            f"{header.path} has {tokens} tokens ({TOKENS}), but a vocabulary of "
            f"{fields['vocab_size']}: the file is broken. Fetch it again."
        )
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    fields["attention_bias"] = "blk.0.attn_output.bias" in tensors or None
    fields["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOP_TOKENS]
    fields["eos_token_id"] = [token for token in stops if token is not None]
    fields["rope_parameters"] = _rope(header, values, fields["head_dim"])
    _check_tensors(header, fields)
    return fields


def _read_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the architecture's metadata, keyed without the architecture.

    Raises ConfigError for missing, unknown and invalid fields.
    """
    prefix = header.metadata["general.architecture"] + "."
    known = {*FIELDS, *_ROPE, *_CHECKED, *_HARMLESS}
    values = {}
    if missing := [prefix + name for name in _REQUIRED if not header.metadata.get(prefix + name)]:
        raise ConfigError(
            f"{header.path}: its metadata lacks {', '.join(missing)}: it does not say what the "
            "model is."
        )
    unknown = []
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or not (value or name in known):  # no effect, such as `expert_count` 0
            continue
        if name not in known:
            unknown.append(f"{key} = {str(value)[:40]!r}")
            continue
        if reason := _field_error(name, value):
            raise ConfigError(
                f"{header.path}: its metadata has {key} = {quote(value)}; it must be {reason}."
            )
        values[name] = value
    if unknown:
        raise ConfigError(
            f"{header.path}: its metadata has {', '.join(unknown[:8])}, which indicates parts that "
            "are not supported."
        )
    return values


def _field_error(name: str, value: Any) -> str | None:
    """Return what a known field must be; None if its value is valid."""
    if name in _STRINGS:
        return None if isinstance(value, str) else "a string"
    if name == "rope.scaling.finetuned":
        return None if isinstance(value, bool) else "true or false"
    number = _NUMBERS.get(name, COUNT)
    return None if number.allows(value) else str(number)


def _head_dim(header: GgufHeader, values: Mapping[str, Any]) -> int:
    """Return the default dimensions of a head. Raises ConfigError if they are not whole."""
    hidden, heads = values["embedding_length"], values["attention.head_count"]
    if hidden % heads:
        raise ConfigError(
            f"{header.path}: its metadata has embedding_length = {hidden}, which does not divide "
            f"into attention.head_count = {heads}, and no attention.key_length."
        )
    return int(hidden // heads)


def _tokens(header: GgufHeader) -> list[str]:
    """Return the vocabulary, empty if the file has none. Raises ConfigError if it is invalid."""
    tokens = header.metadata.get(TOKENS, [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(
            f"{header.path}: its metadata has {TOKENS} = {quote(tokens)}; it must be a "
            "list of strings."
        )
    return tokens


def _rope(header: GgufHeader, values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return rope_parameters. Raises ConfigError or CheckpointError if they are invalid."""
    rope = {field: values[gguf_name] for gguf_name, field in _ROPE.items() if gguf_name in values}
    if rope.get("rope_type", "none") == "none":
        rope = {"rope_type": "default"}
    if "rope.freq_base" in values:
        rope["rope_theta"] = values["rope.freq_base"]
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if values.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{header.path}: keys and values of different sizes are not supported (head dimensions "
            f"{head_dim} and {values['attention.value_length']})."
        )
    if ROPE_FACTORS in header.tensors:
        rope["frequency_factors"] = _floats(header, header.tensors[ROPE_FACTORS], rotary_dim // 2)
    return rope


def _floats(header: GgufHeader, tensor: TensorInfo, count: int) -> list[float]:
    """Return the elements of a short F32 tensor. Raises CheckpointError."""
    if tensor.shape != (count,) or tensor.kind:  # 0 is F32
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has shape {tensor.shape}; expected {count} "
            "numbers in F32."
        )
    check_end(header, tensor)  # before memory is allocated for it
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            numbers = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    except (OSError, struct.error) as error:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} cannot be read ({error}). Fetch the file again."
        ) from error
    if not all(map(is_positive, numbers)):
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has numbers that are not positive, or are "
            "out of bounds. Fetch the file again."
        )
    return numbers


def _rows(header: GgufHeader, name: str) -> int:
    tensor = header.tensors.get(name)
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _check_tensors(header: GgufHeader, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError if sizes contradict the tensors, before memory is allocated."""
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layers) != fields["num_hidden_layers"]:
        raise CheckpointError(
            f"{header.path} has tensors of {len(layers)} layers, but its metadata says "
            f"{fields['num_hidden_layers']}. Was the file converted completely? Fetch it again."
        )
    hidden, head_dim = fields["hidden_size"], fields["head_dim"]
    queries, keys = (fields[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    expected = {
        "token_embd.weight": (fields["vocab_size"], hidden),
        "blk.0.attn_q.weight": (queries, hidden),
        "blk.0.attn_k.weight": (keys, hidden),
        "blk.0.ffn_down.weight": (hidden, fields["intermediate_size"]),
    }
    for name, shape in expected.items():
        if name in header.tensors and header.tensors[name].shape != shape:
            raise CheckpointError(
                f"{header.path}: tensor {name} has shape {header.tensors[name].shape}, but its "
                f"metadata implies {shape}."
            )
