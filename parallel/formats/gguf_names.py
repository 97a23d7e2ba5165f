"""What GGUF's names mean: metadata as fields of a config.json, tensors as Hugging Face names them.

A family is a row of FAMILIES; what its metadata says that others' does not is a row of FIELDS. It
needs neither torch nor transformers. Source of the names: github.com/ggml-org/llama.cpp,
gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.config_checks import COUNT, COUNT_OR_NONE, NORM_EPS, Number, format_value, is_positive
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf_header import GgufHeader, TensorInfo
from parallel.formats.gguf_tensors import check_end, check_tensor_offsets

FIELDS = {  # behind the architecture's name: the field of a config.json
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
_NEEDED = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_ROPE = {  # likewise, the field of its rope_parameters
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED = ("attention.value_length", "rope.dimension_count")
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
_TEXTS = ("rope.scaling.type", "tensor_data_layout")
_REAL = Number(low=0, high=1e15, whole=False)
_NUMBERS = {  # of what is known; others are whole numbers of at least 1
    "attention.layer_norm_rms_epsilon": NORM_EPS,
    "attention.sliding_window": COUNT_OR_NONE,
    "rope.freq_base": _REAL,
    "rope.scaling.factor": _REAL,
    "rope.scaling.yarn_beta_fast": _REAL,
    "rope.scaling.yarn_beta_slow": _REAL,
}
_STOPS = ("eos", "eot", "eom")  # tokens that end a text, a turn, a message
TOKENS = "tokenizer.ggml.tokens"
ROPE_FACTORS = "rope_freqs.weight"  # what each frequency is divided by, as Llama 3.1 has it

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
    """What a GGUF file of one architecture holds."""

    model_type: str
    # llama.cpp's RoPE turns neighbours where Hugging Face's turns the halves of a head: the
    # converter has put the rows of Q and K in that order
    neighbours: bool = False

    def tensor_name(self, name: str) -> str | None:
        """Return what Hugging Face calls a tensor; None for what the family does not have."""
        stem, _, kind = name.rpartition(".")
        if stem in _OUTER:
            return f"{_OUTER[stem]}.{kind}"
        head, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        if head != "blk" or not index.isdecimal() or part not in _LAYER:
            return None
        return f"model.layers.{index}.{_LAYER[part]}.{kind}"


FAMILIES = {  # by general.architecture; files of Mistral say llama
    "llama": GgufFamily("llama", neighbours=True),
    "qwen2": GgufFamily("qwen2"),
}


def family_of(header: GgufHeader) -> GgufFamily:
    """Return the row of a file's architecture. Raises ConfigError where there is none."""
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise ConfigError(
            f"{header.path} holds no model but a {format_value(header.metadata['general.type'])} file."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"{header.path}: architecture {format_value(name)} is not supported in GGUF files; supported "
            f"are {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return what a config.json would say of a file's model.

    Raises ConfigError for a model that is not supported or not described, and CheckpointError where
    the tensors are not those of the model described.
    """
    family = family_of(header)
    check_tensor_offsets(header)
    said = _read_fields(header)
    fields = {ours: said[theirs] for theirs, ours in FIELDS.items() if theirs in said}
    metadata, tensors = header.metadata, header.tensors
    fields["model_type"] = family.model_type
    fields["use_sliding_window"] = "sliding_window" in fields
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(header, said)
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
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOPS]
    fields["eos_token_id"] = [token for token in stops if token is not None]
    fields["rope_parameters"] = _rope(header, said, fields["head_dim"])
    _check_tensors(header, fields)
    return fields


def _read_fields(header: GgufHeader) -> dict[str, Any]:
    """Return what the metadata says of the architecture, all of it known here.

    Raises ConfigError.
    """
    prefix = header.metadata["general.architecture"] + "."
    known = {*FIELDS, *_ROPE, *_CHECKED, *_HARMLESS}
    said = {}
    if missing := [prefix + name for name in _NEEDED if not header.metadata.get(prefix + name)]:
        raise ConfigError(
            f"{header.path}: its metadata lacks {', '.join(missing)}: it does not say what the "
            "model is."
        )
    foreign = []
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or not (value or name in known):  # nothing, as `expert_count` 0
            continue
        if name not in known:
            foreign.append(f"{key} = {str(value)[:40]!r}")
            continue
        if reason := _field_error(name, value):
            raise ConfigError(
                f"{header.path}: its metadata has {key} = {format_value(value)}; it must be {reason}."
            )
        said[name] = value
    if foreign:
        raise ConfigError(
            f"{header.path}: its metadata has {', '.join(foreign[:8])}, which means parts that are "
            "not supported."
        )
    return said


def _field_error(name: str, value: Any) -> str | None:
    """Return what a known field must be where it is not; None where it is."""
    if name in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if name == "rope.scaling.finetuned":
        return None if isinstance(value, bool) else "true or false"
    number = _NUMBERS.get(name, COUNT)
    return None if number.allows(value) else str(number)


def _head_dim(header: GgufHeader, said: Mapping[str, Any]) -> int:
    """Return the dimensions of a head where the file does not say them. Raises ConfigError."""
    hidden, heads = said["embedding_length"], said["attention.head_count"]
    if hidden % heads:
        raise ConfigError(
            f"{header.path}: its metadata has embedding_length = {hidden}, which does not divide "
            f"into attention.head_count = {heads}, and no attention.key_length."
        )
    return int(hidden // heads)


def _tokens(header: GgufHeader) -> list[str]:
    """Return the vocabulary, none where there is none. Raises ConfigError."""
    tokens = header.metadata.get(TOKENS, [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(
            f"{header.path}: its metadata has {TOKENS} = {format_value(tokens)}; it must be a list of "
            "texts."
        )
    return tokens


def _rope(header: GgufHeader, said: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return rope_parameters. Raises ConfigError, CheckpointError."""
    rope = {ours: said[theirs] for theirs, ours in _ROPE.items() if theirs in said}
    if rope.get("rope_type", "none") == "none":
        rope = {"rope_type": "default"}
    if "rope.freq_base" in said:
        rope["rope_theta"] = said["rope.freq_base"]
    turned = said.get("rope.dimension_count", head_dim)
    if turned != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    if said.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{header.path}: values of another size than keys are not supported (head dimensions "
            f"{said['attention.value_length']} and {head_dim})."
        )
    if ROPE_FACTORS in header.tensors:
        rope["frequency_factors"] = _floats(header, header.tensors[ROPE_FACTORS], turned // 2)
    return rope


def _floats(header: GgufHeader, tensor: TensorInfo, count: int) -> list[float]:
    """Return the numbers of a short tensor. Raises CheckpointError."""
    if tensor.shape != (count,) or tensor.kind:  # 0 is F32
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has shape {tensor.shape}; {count} numbers in "
            "F32 are expected."
        )
    check_end(header, tensor)  # before memory is taken for it
    try:
        with header.path.open("rb") as file:
            file.seek(tensor.start)
            numbers = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    except (OSError, struct.error) as error:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} cannot be read ({error}). Fetch the file again."
        ) from error
    if not all(map(is_positive, numbers)):
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has numbers that are not above 0, or beyond "
            "bounds. Fetch the file again."
        )
    return numbers


def _rows(header: GgufHeader, name: str) -> int:
    tensor = header.tensors.get(name)
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _check_tensors(header: GgufHeader, fields: Mapping[str, Any]) -> None:
    """Refuse sizes that the tensors contradict, before anyone takes memory for them.

    Raises CheckpointError.
    """
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layers) != fields["num_hidden_layers"]:
        raise CheckpointError(
            f"{header.path} has tensors of {len(layers)} layers, but its metadata says "
            f"{fields['num_hidden_layers']}. Was the file made whole? Fetch it again."
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
