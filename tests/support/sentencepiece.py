"""A small tokenizer as transformers has it for SentencePiece's BPE, and files of such."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.models import BPE

SPECIALS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def train(
    lines: Iterable[str],
    has_prefix: bool,
    words: pre_tokenizers.PreTokenizer | None = None,
) -> tuple[Tokenizer, list[str]]:
    """Return a tokenizer as in Llama 2's tokenizer.json, and its merges.

    Args:
        lines: the text that its merges are from.
        has_prefix: whether a space is put before a text.
        words: splits the text that its merges are from.
    """
    backend = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = words or pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(lines, trainer)
    merges = merges_of(backend)
    model = BPE(
        vocab=backend.get_vocab(),
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prepend = [normalizers.Prepend("\u2581")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS[:3]]
    )
    return backend, merges


def merges_of(backend: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def tokens_of(backend: Tokenizer) -> list[str]:
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def scores_of(tokens: list[str], merges: list[str]) -> list[float]:
    """Return the scores of tokens: the earlier a token is merged, the higher."""
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
    return [ranks.get(token, -1e6) for token in tokens]


def kinds_of(tokens: list[str]) -> list[int]:
    """Return the types of tokens: of <unk>, control tokens, bytes, and others."""
    kinds = [6 if token in SPECIALS else 1 for token in tokens]
    kinds[:3] = [2, 3, 3]
    return kinds


def sentencepiece_file(backend: Tokenizer, merges: list[str], model_type: int = 2) -> bytes:
    """Return the content of SentencePiece's file of a tokenizer without added tokens."""
    tokens = tokens_of(backend)
    content = b""
    for token, score, kind in zip(tokens, scores_of(tokens, merges), kinds_of(tokens), strict=True):
        piece = _bytes(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)
        content += _bytes(1, piece)
    has_prefix = "Prepend" in backend.to_str()
    content += _bytes(2, _bytes(1, b"text") + _number(3, model_type))
    return content + _bytes(3, _bytes(1, b"identity") + _number(3, has_prefix))


def write_internlm2_tokenizer(folder: Path, content: bytes, **fields: Any) -> Path:
    """Write a tokenizer as InternLM2's is published; `fields` are those of its config."""
    (folder / "tokenizer.model").write_bytes(content)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "tokenizer_class": "InternLM2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        **fields,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
