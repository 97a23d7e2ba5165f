"""Translation of a GGUF file's metadata to the fields of a config.json.

Imports neither torch nor transformers. Source of the names: github.com/ggml-org/llama.cpp,
gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from parallel.config_checks import (
    COUNT,
    COUNT_OR_NONE,
    FULL,
    LAYERS,
    MAX_EXPERTS,
    MAX_LAYERS,
    NORM_EPS,
    PREDICTORS,
    SLIDING,
    Number,
    quote,
)
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf import mamba
from parallel.formats.gguf.delta_nets import add_delta_nets, delta_net_shapes, mixer_parts
from parallel.formats.gguf.families import MULTIPLIERS, GgufFamily, family_of
from parallel.formats.gguf.gemma4 import KV_HEADS, add_gemma4
from parallel.formats.gguf.header import GgufHeader, TensorInfo
from parallel.formats.gguf.latents import (
    add_latents,
    latent_shapes,
    needed_parts,
    scale_attention,
)
from parallel.formats.gguf.prediction import has_prediction_block, prediction_tensors
from parallel.formats.gguf.tensors import TYPES, check_tensor_offsets, read_floats
from parallel.formats.plane_format import KeptType, PlaneFormat, kept_type

FIELDS = {  # metadata key without the architecture: field of a config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "vocab_size": "vocab_size",
}
_REQUIRED = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)
_EXPERT_FIELDS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)
_ROPE = {  # metadata key without the architecture: field of rope_parameters
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED = ("attention.value_length", "rope.dimension_count")
_GEMMA4_CHECKED = ("attention.value_length_swa", "rope.dimension_count_swa")
_HARMLESS = ("nextn_predict_layers", "rope.scaling.finetuned", "tensor_data_layout")
_EXPECTED: dict[str, tuple[Any, ...]] = {  # values with which a field changes nothing
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
_OPTIONAL_PARTS = {  # config field: what its layers have then
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_down.bias",
}
_PATTERN = "attention.sliding_window_pattern"  # a number, or whether each layer has a window
_BOOLEANS = ("expert_weights_norm", "rope.scaling.finetuned")
_STRINGS = ("rope.scaling.type", "tensor_data_layout")
_NON_NEGATIVE = Number(low=0, high=1e15, whole=False)
_NUMBERS = {  # ranges of known fields; all others are whole numbers of at least 1
    "attention.layer_norm_rms_epsilon": NORM_EPS,
    "attention.layer_norm_epsilon": NORM_EPS,
    "attention.q_lora_rank": COUNT_OR_NONE,
    "attention.scale": _NON_NEGATIVE,
    "attention.temperature_scale": _NON_NEGATIVE,
    "attention.sliding_window": COUNT_OR_NONE,
    "rope.freq_base_swa": _NON_NEGATIVE,
    "embedding_scale": _NON_NEGATIVE,
    "block_count": LAYERS,
    "expert_count": Number(high=MAX_EXPERTS),
    "expert_gating_func": Number(low=0, high=2),
    "expert_shared_count": COUNT_OR_NONE,
    "expert_weights_scale": _NON_NEGATIVE,
    "leading_dense_block_count": COUNT_OR_NONE,
    "final_logit_softcapping": _NON_NEGATIVE,
    "logit_scale": _NON_NEGATIVE,
    "nextn_predict_layers": Number(low=0, high=MAX_LAYERS),
    "residual_scale": _NON_NEGATIVE,
    "rope.freq_base": _NON_NEGATIVE,
    "rope.scaling.attn_factor": _NON_NEGATIVE,
    "rope.scaling.factor": _NON_NEGATIVE,
    "rope.scaling.yarn_attn_factor": _NON_NEGATIVE,
    "rope.scaling.yarn_beta_fast": _NON_NEGATIVE,
    "rope.scaling.yarn_beta_slow": _NON_NEGATIVE,
    "rope.scaling.yarn_log_multiplier": _NON_NEGATIVE,
}
_MISSING = ". Was the download interrupted? Fetch it again."
_STOP_TOKENS = ("eos", "eot", "eom")  # end of sequence, of turn, of message
TOKENS = "tokenizer.ggml.tokens"
ROPE_FACTORS = {  # divisors of the RoPE frequencies: field of rope_parameters
    "rope_freqs.weight": "frequency_factors",  # Llama 3.1's
    "rope_factors_long.weight": "long_factor",  # LongRoPE's
    "rope_factors_short.weight": "short_factor",
}


def tensor_names(
    header: GgufHeader, family: GgufFamily, fields: Mapping[str, Any]
) -> Iterator[tuple[TensorInfo, tuple[str, ...]]]:
    """Yield the tensors that are loaded, with their names as `GgufFamily.tensor_names`.

    `fields`: those that `config_fields` returns.
    """
    for info in header.model_tensors.values():
        if info.name not in ROPE_FACTORS:  # part of the config
            yield info, family.tensor_names(info.name)
    if fields.get(PREDICTORS):
        yield from prediction_tensors(header, family)


def kept_types(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, KeptType]:
    """Return how matrices can stay packed, by their Hugging Face names, with {} for all experts.

    `fields`: those that `config_fields` returns. Raises ConfigError for an unsupported
    architecture.
    """
    types: dict[str, KeptType] = {}
    for info, names in tensor_names(header, family_of(header), fields):
        stored = TYPES.get(info.kind)
        kind = None if stored is None else kept_type(stored.name)
        for name in names if kind is not None else ():
            is_stack = "{}" in name  # those of experts stay packed only in planes
            is_matrix = len(info.shape) == 2 + is_stack
            if is_matrix and kind and (isinstance(kind, PlaneFormat) or not is_stack):
                types[name] = kind
    return types


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of the config.json equivalent to a file's metadata.

    Raises ConfigError for a model that is not supported or not described completely, and
    CheckpointError if the tensors do not match the description.
    """
    family = family_of(header)
    check_tensor_offsets(header)
    values = _read_fields(header, family)
    known = {**FIELDS, **family.fields}
    fields = dict(family.constants)
    # in the order of the table: an architecture's own have precedence
    fields |= {field: values[name] for name, field in known.items() if name in values}
    metadata, tensors = header.metadata, header.tensors
    fields["model_type"] = family.model_type
    fields["num_hidden_layers"] -= header.mtp_layers
    if fields["num_hidden_layers"] < 1:
        raise ConfigError(
            f"{header.path}: its metadata has nextn_predict_layers = {header.mtp_layers} of "
            f"block_count = {values['block_count']}; others must be left."
        )
    if family.model_type == "phi3" and fields["max_position_embeddings"] == 4096:
        fields.setdefault("sliding_window", 2047)  # older files omit it
    fields["use_sliding_window"] = fields.get("sliding_window") is not None
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
    fields |= {name: f"blk.0.{part}" in tensors for name, part in _OPTIONAL_PARTS.items()}
    fields |= _norms(family, tensors)
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOP_TOKENS]
    fields["eos_token_id"] = [token for token in stops if token is not None]
    if family.stop_names:
        named = {token: index for index, token in enumerate(_tokens(header))}
        stops = [named[name] for name in family.stop_names if name in named]
        fields["eos_token_id"] = stops or fields["eos_token_id"]
    if "attention.scale" in family.fields:
        _add_scales(fields)
    if family.has_delta_nets:
        add_delta_nets(header, fields)
    elif family.has_mamba:
        mamba.add_mamba(header, fields)
    _add_heads(header, family, values, fields)
    _add_windows(header, family, fields)
    _check_tensors(header, family, fields)
    if family.has_delta_nets:
        layer = str(fields["num_hidden_layers"])
        block = _needed_parts(header, family, layer), _shapes(family, fields), fields["hidden_size"]
        fields[PREDICTORS] = int(has_prediction_block(header, family, *block))
    return fields


def _norms(family: GgufFamily, tensors: Collection[str]) -> dict[str, bool]:
    """Return the field that says whether a GLM-4.5 has norms of queries and keys."""
    has_norms = "blk.0.attn_q_norm.weight" in tensors
    return {"use_qk_norm": has_norms} if family.model_type == "glm4_moe" else {}


def _add_scales(fields: dict[str, Any]) -> None:
    """Set Granite's multipliers that a file does not say, or says to be 0, as llama.cpp does."""
    for name in MULTIPLIERS.values():
        if fields.get(name) == 0:
            del fields[name]
    fields.setdefault("attention_multiplier", fields["head_dim"] ** -0.5)


def _add_heads(
    header: GgufHeader, family: GgufFamily, values: Mapping[str, Any], fields: dict[str, Any]
) -> None:
    """Add to a config's fields its RoPE, and heads that the metadata describes in another way.

    Raises ConfigError or CheckpointError if they are invalid.
    """
    if family.model_type == "gemma4_text":
        add_gemma4(header, values, fields)
        return
    if not family.has_latents:
        fields["rope_parameters"] = _rope(header, family, values, fields["head_dim"])
        return
    rotated = add_latents(header, values, fields)
    own = {**values, "attention.value_length": rotated}
    fields["rope_parameters"] = _rope(header, family, own, rotated)
    scale_attention(fields["rope_parameters"])


def _add_windows(header: GgufHeader, family: GgufFamily, fields: dict[str, Any]) -> None:
    """Add to a config's fields what its sliding window implies. Raises ConfigError."""
    window, positions = fields.get("sliding_window"), fields["max_position_embeddings"]
    if window and window < positions and not family.has_windows:
        raise ConfigError(
            f"{header.path}: sliding-window attention (sliding_window = {window}, of {positions} "
            "positions) is not supported in files of architecture "
            f"{header.metadata['general.architecture']}."
        )
    kind = family.model_type
    if kind == "gemma3_text" and not window:
        raise ConfigError(f"{header.path}: its metadata lacks gemma3.attention.sliding_window.")
    if kind in ("gemma3_text", "olmo3"):  # RoPE scaling is that of layers without a window
        rope, original = fields["rope_parameters"], "original_max_position_embeddings"
        if original in fields:
            rope[original] = fields.pop(original)
        theta = 10_000.0 if kind == "gemma3_text" else rope.get("rope_theta", 500_000.0)
        theta = fields.pop("rope_local_base_freq", theta)
        local = {"rope_type": "default", "rope_theta": theta}
        fields["rope_parameters"] = {FULL: rope, SLIDING: local}
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        fields["layer_types"] = [SLIDING if each == "L" else FULL for each in pattern]
    if kind == "gemma3_text":  # llama.cpp knows the largest model by its number of layers
        heads, is_large = fields["num_attention_heads"], fields["num_hidden_layers"] == 62
        scalar = fields["hidden_size"] // heads if is_large else fields["head_dim"]
        fields["query_pre_attn_scalar"] = scalar


def _read_fields(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    """Return the architecture's metadata, keyed without the architecture.

    Raises ConfigError for missing, unknown and invalid fields.
    """
    prefix = header.metadata["general.architecture"] + "."
    own = {*family.fields, *family.rope}
    others = {name: each for name, each in _EXPECTED.items() if name not in own}
    expected = {**others, **family.expected}
    known = {*FIELDS, *_ROPE, *_CHECKED, *_HARMLESS, *expected, *own}
    known |= set(_GEMMA4_CHECKED) if family.model_type == "gemma4_text" else set()
    values = {}
    required = [prefix + name for name in _required(family)]
    if missing := [name for name in required if not header.metadata.get(name)]:
        raise ConfigError(
            f"{header.path}: its metadata lacks {', '.join(missing)}: it does not say what the "
            "model is."
        )
    layers, unknown = prefix + "block_count", []
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        has_no_effect = not (value or name in known)  # such as `expert_count` 0
        if name == key or has_no_effect or name.startswith(family.ignored):
            continue
        if name not in known:
            unknown.append(f"{key} = {str(value)[:40]!r}")
            continue
        is_valid = False
        if isinstance(value, list) and len(value) == header.metadata[layers]:
            value, is_valid = _of_layers(name, value, family)
        if not is_valid and (reason := _field_error(name, value, expected)):
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


def _of_layers(name: str, value: list[Any], family: GgufFamily) -> tuple[Any, bool]:
    """Return what a list with an element for each layer says, and whether that is valid.

    A list that is not known is returned as it is.
    """
    if name == KV_HEADS and family.model_type == "gemma4_text":
        return value, True  # checked with the kinds of layers
    if name == _PATTERN and all(isinstance(each, bool) for each in value):
        return "".join("L" if each else "G" for each in value), True
    own = value
    if family.has_mamba and name in mamba.BY_LAYER:
        own = list(filter(None, value)) or value  # those of layers that have it
    return own[0] if own.count(own[0]) == len(own) else value, False


def _required(family: GgufFamily) -> list[str]:
    """Return the metadata that all files of a family have."""
    sizes = () if family.has_dense else ("feed_forward_length",)
    experts = [name for name in _EXPERT_FIELDS if name in family.fields]
    has_layer_norms = "attention.layer_norm_epsilon" in family.fields
    norms = [] if has_layer_norms else ["attention.layer_norm_rms_epsilon"]
    return [*(name for name in _REQUIRED if name not in sizes), *norms, *experts]


def _field_error(name: str, value: Any, expected: Mapping[str, tuple[Any, ...]]) -> str | None:
    """Return what a known field must be; None if its value is valid."""
    if name in _STRINGS:
        return None if isinstance(value, str) else "a string"
    if name in expected:
        return None if value in expected[name] else f"{expected[name][-1]}"
    if name in _BOOLEANS:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, list) and 0 in value and name in mamba.BY_LAYER:
        return "the same in all layers that have such a part"
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


def _rope(
    header: GgufHeader, family: GgufFamily, values: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Return rope_parameters. Raises ConfigError or CheckpointError if they are invalid."""
    known = {**_ROPE, **family.rope}
    rope = {known[name]: value for name, value in values.items() if name in known}
    if "rope_factors_long.weight" in header.tensors:
        rope["rope_type"] = "longrope"
    if rope.get("rope_type", "none") == "none":
        if rope.get("llama_4_scaling_beta"):
            raise ConfigError(
                f"{header.path}: its metadata has attention.temperature_scale without a "
                "rope.scaling.type of yarn, which is not supported."
            )
        rope = {"rope_type": "default"}
    if rope.get("mscale_all_dim"):
        rope["mscale"] = 1.0  # absent from the file
    if "rope.freq_base" in values:
        rope["rope_theta"] = values["rope.freq_base"]
    rotary_dim = values.get("rope.dimension_count", head_dim)
    part = rotary_dim / head_dim
    is_exact = int(head_dim * part) == rotary_dim  # as it will be read
    rope["partial_rotary_factor"] = part if is_exact else math.nextafter(part, math.inf)
    if values.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{header.path}: keys and values of different sizes are not supported (head dimensions "
            f"{head_dim} and {values['attention.value_length']})."
        )
    if family.model_type == "gpt_oss":
        rope["truncate"] = False  # absent from the file
    for name in ROPE_FACTORS.keys() & header.tensors.keys():
        rope[ROPE_FACTORS[name]] = read_floats(header, header.tensors[name], rotary_dim // 2)
    return rope


def _rows(header: GgufHeader, name: str) -> int:
    tensor = header.tensors.get(name)
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _check_tensors(header: GgufHeader, family: GgufFamily, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError if tensors contradict the metadata, before memory is allocated."""
    tensors = header.model_tensors
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(layers) != fields["num_hidden_layers"]:
        raise CheckpointError(
            f"{header.path} has tensors of {len(layers)} layers, but its metadata says "
            f"{fields['num_hidden_layers']}. Was the file converted completely? Fetch it again."
        )
    shapes = _shapes(family, fields)
    for name, info in tensors.items():
        if name not in ROPE_FACTORS and not family.tensor_names(name):
            is_old = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", name)
            raise CheckpointError(
                f"{header.path}: tensor {name} is none of architecture "
                f"{header.metadata['general.architecture']}'s: "
                + (
                    "experts must be in one tensor. Fetch a newer file."
                    if is_old
                    else "it indicates a part that is not supported."
                )
            )
        expected = shapes.get(re.sub(r"^blk\.\d+\.", "", name), info.shape)
        if info.shape != expected:
            raise CheckpointError(
                f"{header.path}: tensor {name} has shape {info.shape}, but its metadata implies "
                f"{expected}."
            )
    needed = [
        f"blk.{layer}.{part}" for layer in layers for part in _needed_parts(header, family, layer)
    ]
    biases = list[str]()
    for group in family.biases:
        own = [f"blk.{layer}.{part}.bias" for layer in layers for part in group]
        has_one = any(name in header.tensors for name in own)
        biases += own if has_one or family.needs_biases else []
    for names, why in (
        (needed, _MISSING),
        (biases, ", and biases of other parts alone are not supported."),
    ):
        if missing := next((name for name in names if name not in header.tensors), None):
            raise CheckpointError(f"{header.path}: tensor {missing} is missing{why}")


def _needed_parts(header: GgufHeader, family: GgufFamily, layer: str) -> list[str]:
    """Return the tensors that a layer must have, without biases and the number of the layer."""
    parts = [part for part in family.tensors if part not in family.optional]
    parts += mixer_parts(header, layer) if family.has_delta_nets else []
    if family.has_mamba:
        parts += mamba.layer_parts(header, layer, family.expert_parts)
    parts += needed_parts(header, layer) if family.has_latents else []
    whole = ("ssm_a", "ssm_d")
    return [part if "." in part or part in whole else f"{part}.weight" for part in parts]


def _shapes(family: GgufFamily, fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices that a config implies, without the number of the layer."""
    hidden, intermediate = fields["hidden_size"], fields.get("intermediate_size", 0)
    head_dim = fields.get("head_dim", 0)  # absent from that of latent attention
    queries, keys = (fields[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    experts = family.expert_count(fields)
    wide = (experts, fields.get("moe_intermediate_size", intermediate), hidden)
    is_fused = family.tensors.get("ffn_up") == "mlp.gate_up_proj"
    shapes = {
        "token_embd": (fields["vocab_size"], hidden),
        "output": (fields["vocab_size"], hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate * (1 + is_fused), hidden),
        "ffn_down": (hidden, intermediate),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": wide,
        "ffn_up_exps": wide,
        "ffn_down_exps": (experts, hidden, wide[1]),
        "ffn_gate_up_exps": (experts, 2 * wide[1], hidden),
        "attn_sinks": (fields["num_attention_heads"],),
    }
    if family.model_type == "gemma4_text" or family.has_latents:  # kinds of layers differ
        shapes = {name: each for name, each in shapes.items() if not name.startswith("attn_")}
    biases = {
        f"{name}.bias": shape[:-1]
        for name, shape in shapes.items()
        if name.startswith(("attn_", "ffn_")) and name != "attn_sinks"
    }
    matrices = {f"{name}.weight": shape for name, shape in shapes.items()}
    if family.has_delta_nets:  # gates of outputs follow the queries
        matrices |= {"attn_q.weight": (2 * queries, hidden), **delta_net_shapes(fields)}
    if family.has_latents:
        matrices |= latent_shapes(fields)
    if family.has_mamba:
        matrices |= mamba.mamba_shapes(fields)
    return {**matrices, **biases}
