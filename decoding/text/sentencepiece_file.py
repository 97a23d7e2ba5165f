"""The tokenizer of InternLM2, whose folders have SentencePiece's file and code that reads it.

The code is never run: the tokenizer is built as that of a GGUF file, which holds the same. Sources:
sentencepiece_model.proto of github.com/google/sentencepiece, for the format, and
tokenization_internlm2_fast.py, which is published with the model, for the tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decoding.text.gguf_tokenizer import build_tokenizer
from decoding.text.gguf_vocabulary import MAX_TOKENS
from offload.regular_files import MIB, read_json, read_regular

_CLASSES = ("InternLM2Tokenizer", "InternLM2TokenizerFast")
_MAX_BYTES = 16 * MIB  # maximum size of a file; real ones have a few MB
_BPE = 2  # SentencePiece's model_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of pieces
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # names in GGUF files
# protocol buffers' wire types that are not numbers of variable length, and their bytes
_BYTES, _FIXED = 2, {1: 8, 5: 4}


def has_sentencepiece_file(folder: Path) -> bool:
    """Return whether a folder has InternLM2's tokenizer, and no tokenizer.json.

    Raises OSError and ValueError if that cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() or not path.is_file():
        return False
    config = read_json(path)
    return isinstance(config, dict) and config.get("tokenizer_class") in _CLASSES


def sentencepiece_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder that `has_sentencepiece_file`, with its chat template.

    Raises OSError, ValueError and TierForceError for broken files.
    """
    path = folder / "tokenizer.model"
    data, config = read_regular(path, _MAX_BYTES), read_json(folder / "tokenizer_config.json")
    try:
        metadata = _metadata(data)
    except (AttributeError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not SentencePiece's: fetch it again") from error
    _replace_tokens(metadata, config.get("added_tokens_decoder") or {})
    tokens = metadata["tokens"]
    for name, gguf_name in _IDS.items():
        token = _content(config.get(f"{name}_token"))
        if token in tokens:
            metadata[f"{gguf_name}_token_id"] = tokens.index(token)
    names = ("add_bos_token", "add_eos_token", "chat_template")
    metadata |= {name: config[name] for name in names if config.get(name) is not None}
    return build_tokenizer(path, metadata)


def _metadata(data: bytes) -> dict[str, Any]:
    """Return what a SentencePiece file holds, by the names that it has in GGUF files.

    Raises ValueError for one that is not of BPE, and errors of several types for a broken one.
    """
    tokens, scores, kinds = list[str](), list[float](), list[int]()
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode())
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, _NORMAL))
            if len(tokens) > MAX_TOKENS:
                raise ValueError(f"its tokenizer.model has more than {MAX_TOKENS} tokens")
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if trainer.get(3) != _BPE:
        raise ValueError("its tokenizer.model is not of the type BPE")
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "add_space_prefix": bool(normalizer.get(3, True)),
        "chat_template": None,
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protocol buffer: an integer, or bytes.

    Raises struct.error for data that is cut off or no protocol buffer.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = _FIXED.get(kind)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise struct.error
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of variable length at an offset, and the offset after it."""
    value = 0
    for index in range(at, min(at + 10, len(data))):
        value |= (data[index] & 127) << (7 * (index - at))
        if data[index] < 128:
            return value, index + 1
    raise struct.error


def _replace_tokens(metadata: dict[str, Any], added: Mapping[str, Any]) -> None:
    """Replace tokens by those that tokenizer_config.json has in their places.

    Raises ValueError for one without a place.
    """
    for index, token in sorted((int(index), token) for index, token in added.items()):
        if not 0 <= index < len(metadata["tokens"]):
            raise ValueError(f"its tokenizer.model has no token {index}")
        metadata["tokens"][index] = _content(token)
        is_special = isinstance(token, dict) and token.get("special", False)
        metadata["token_type"][index] = _CONTROL if is_special else _USER_DEFINED


def _content(token: Any) -> Any:
    """Return the text of a token in tokenizer_config.json, which may be in an object."""
    return token.get("content") if isinstance(token, dict) else token
