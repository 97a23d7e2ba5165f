"""A tokenizer made from what a GGUF file says of it.

transformers can do this too, but takes seconds for it, and splits text before merges by fewer rules
than files name. Source of the names and rules: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from decoding.text.gguf_vocabulary import MAX_MERGES, check_vocabulary
from offload.errors import TierForceError, one_line
from parallel.config_checks import quote
from parallel.formats.gguf_header import read_header

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED = 1, 2, 3, 4  # kinds of tokens
_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"  # what SentencePiece writes for a space


@dataclass(frozen=True)
class Splits:
    """How text is cut before merges, one rule after another, and what goes with it."""

    rules: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken whole, without merges
    add_bos: bool = False  # where the file does not say
    composed: bool = False  # text is brought to Unicode's composed form


_LLAMA3 = Splits((_WORDS % "{1,3}",), whole_words=True, add_bos=True)
_DIGITS = Splits((r"\p{N}", _GPT2))
_PLAIN = Splits((_GPT2,))
SPLITS = {  # by tokenizer.ggml.pre
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": Splits((_WORDS % "{1,3}",)),
    "smaug-bpe": Splits((_WORDS % "{1,3}",)),
    "qwen2": Splits((_WORDS % "",), composed=True),
    "deepseek-r1-qwen": Splits((_WORDS % "",)),
    "tekken": Splits((_TEKKEN,), whole_words=True, add_bos=True),
}


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer that a GGUF file describes, with its chat template.

    Raises CheckpointError for a broken file, and TierForceError for one without a tokenizer, or
    with one of a kind that is not known here.
    """
    metadata = read_header(path).metadata
    prefix = "tokenizer.ggml."
    said = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    said["chat_template"] = metadata.get("tokenizer.chat_template")
    try:
        return _built(said)
    except TierForceError as error:
        raise TierForceError(f"{path}: {error}") from error
    except BaseException as error:  # tokenizers' panics are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TierForceError(f"{path}: the tokenizer cannot be made ({one_line(error)}).") from None


def _built(said: Mapping[str, Any]) -> Any:
    check_vocabulary(said)
    kind, tokens = said.get("model"), said.get("tokens")
    if kind is None or not tokens:
        raise TierForceError(
            "the file has no tokenizer (tokenizer.ggml.model and .tokens): use one that was "
            "converted with its vocabulary."
        )
    if kind not in ("gpt2", "llama"):
        raise TierForceError(
            f"its tokenizer is of kind {quote(kind)}; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece)."
        )
    for name in ("scores", "token_type"):
        if len(said.get(name, tokens)) != len(tokens):
            raise TierForceError(
                f"its tokenizer has {len(tokens)} tokens, but {name} of {len(said[name])}: the "
                "file is broken."
            )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise TierForceError("its vocabulary has a token twice: the file is broken.")
    if kind == "gpt2":
        backend, add_bos = _byte_level(said, vocab)
    else:
        backend, add_bos = _sentencepiece(said, vocab), True
    _add_tokens(backend, tokens, said.get("token_type"))
    specials = {
        f"{ours}_token": _token(tokens, said.get(f"{theirs}_token_id"))
        for ours, theirs in _SPECIALS.items()
    }
    first = specials["bos_token"] if said.get("add_bos_token", add_bos) else None
    last = specials["eos_token"] if said.get("add_eos_token", False) else None
    backend.post_processor = _framed(vocab, first, last)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=said["chat_template"],
        clean_up_tokenization_spaces=False,
        **specials,
    )


def _byte_level(said: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return byte-level BPE (Radford et al. 2019), and whether it begins texts by default."""
    name = said.get("pre")
    if name not in SPLITS:
        raise TierForceError(
            f"its tokenizer splits text in the way {quote(name)} (tokenizer.ggml.pre); known are "
            f"{', '.join(SPLITS)}."
        )
    splits = SPLITS[name]
    merges = [_pair(merge) for merge in said.get("merges", ())]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=splits.whole_words))
    if splits.composed:
        backend.normalizer = normalizers.NFC()
    rules = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in splits.rules]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*rules, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend, splits.add_bos


def _pair(merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge, which a space stands between."""
    gap = merge.find(" ", 1)  # what stands first is of a token
    if gap < 0:
        raise TierForceError(f"its merge {quote(merge)} is not of two tokens: the file is broken.")
    return merge[:gap], merge[gap + 1 :]


def _sentencepiece(said: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """Return SentencePiece's BPE with bytes for what has no token (Kudo and Richardson 2018)."""
    if "scores" not in said:
        raise TierForceError(
            "the tokenizer cannot be made: the file has no tokenizer.ggml.scores, by which "
            "SentencePiece merges."
        )
    unknown = said.get("unknown_token_id", 0)
    model = BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, said["scores"]),
        unk_token=_token(list(vocab), unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if said.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a third, the one of the best score first.

    Raises TierForceError for more of them than any vocabulary has.
    """
    merges = []
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token, at))
        if len(merges) > MAX_MERGES:
            raise TierForceError(
                f"its tokens are made of one another in more than {MAX_MERGES:,} ways: the file is "
                "broken."
            )
    merges.sort()
    return [(token[:at], token[at:]) for *_, token, at in merges]


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int] | None) -> None:
    """Have control tokens and those that a user defined stay whole."""
    own: dict[bool, list[AddedToken]] = {True: [], False: []}  # by whether they are special
    for token, kind in zip(tokens, kinds or [_NORMAL] * len(tokens), strict=True):
        if kind in (_UNKNOWN, _CONTROL, _DEFINED):
            is_special = kind != _DEFINED
            own[is_special].append(AddedToken(token, normalized=False, special=is_special))
    backend.add_special_tokens(own[True])
    backend.add_tokens(own[False])


def _framed(
    vocab: Mapping[str, int], first: str | None, last: str | None
) -> processors.TemplateProcessing:
    """Return what puts a token before any text, and one behind it."""
    parts = [part for part in (first, "$A", last) if part is not None]
    tokens = [(token, vocab[token]) for token in (first, last) if token is not None]
    return processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _token(tokens: Sequence[str], index: Any) -> str | None:
    """Return a token by its id, None for none. Raises TierForceError for what is no id."""
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(tokens):
        raise TierForceError(
            f"its tokenizer names token {quote(index)} of {len(tokens)}: the file is broken."
        )
    return tokens[index]
