"""A tokenizer built from the metadata of a GGUF file.

transformers can do this too, but takes seconds, and supports fewer pre-tokenizers than files use.
Source of their names and rules: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
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
from parallel.formats.gguf.header import read_header

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_MARKED_WORDS = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"  # SentencePiece's space


@dataclass(frozen=True)
class Splits:
    """A pre-tokenizer: the rules that split text before merges, and options that belong to it."""

    rules: tuple[str, ...]  # regular expressions, applied one after another
    whole_words: bool = False  # a word that is a token is not merged from parts (ignore_merges)
    add_bos: bool = False  # default for files without add_bos_token
    composed: bool = False  # text is normalized to NFC


_LLAMA3 = Splits((_WORDS % "{1,3}",), whole_words=True, add_bos=True)
_DIGITS = Splits((r"\p{N}", _GPT2))
_PLAIN = Splits((_GPT2,))
SPLITS = {  # keys: values of tokenizer.ggml.pre
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "a.x-4.0": _PLAIN,
    "exaone4": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "exaone": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "glm4": Splits((_WORDS % "{1,3}",), whole_words=True),
    "chatglm-bpe": Splits((_WORDS % "{1,3}",)),
    "dbrx": Splits((_WORDS % "{1,3}",)),
    "smaug-bpe": Splits((_WORDS % "{1,3}",)),
    "qwen2": Splits((_WORDS % "",), composed=True),
    "qwen35": Splits((_MARKED_WORDS,), composed=True),
    "deepseek-r1-qwen": Splits((_WORDS % "",)),
    "tekken": Splits((_CASED_WORDS % ("", "", ""),), whole_words=True, add_bos=True),
    "gpt-4o": Splits((_CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),)),
    "seed-coder": Splits((_SEED_CODER,)),
    "hunyuan-dense": Splits(_DEEPSEEK3),
    "deepseek-v3": Splits(_DEEPSEEK3),
}
# Phi-3's control tokens also stand for the white space that follows them, except for these. Source:
# its tokenizer_config.json.
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")


def gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template.

    Raises CheckpointError for a broken file, and TierForceError for one without a tokenizer or with
    an unsupported one.
    """
    header, prefix = read_header(path).metadata, "tokenizer.ggml."
    metadata = {key.removeprefix(prefix): header[key] for key in header if key.startswith(prefix)}
    metadata["chat_template"] = header.get("tokenizer.chat_template")
    return build_tokenizer(path, metadata, header.get("general.architecture") == "phi3")


def build_tokenizer(path: Path, metadata: Mapping[str, Any], is_phi3: bool = False) -> Any:
    """Return the tokenizer that metadata of a file describe, by their names in GGUF files.

    Raises TierForceError, which names the file, for an unsupported or broken one.
    """
    try:
        return _build(metadata, is_phi3)
    except TierForceError as error:
        raise TierForceError(f"{path}: {error}") from error
    except BaseException as error:  # tokenizers' panics are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TierForceError(
            f"{path}: the tokenizer cannot be built ({one_line(error)})."
        ) from None


def _build(metadata: Mapping[str, Any], is_phi3: bool) -> Any:
    check_vocabulary(metadata)
    kind, tokens = metadata.get("model"), metadata.get("tokens")
    if kind is None or not tokens:
        raise TierForceError(
            "the file has no tokenizer (tokenizer.ggml.model and .tokens): use one that was "
            "converted with its vocabulary."
        )
    if kind not in ("gpt2", "llama", "gemma4"):
        raise TierForceError(
            f"its tokenizer (tokenizer.ggml.model) is {quote(kind)}; supported are gpt2 "
            "(byte-level BPE), llama (SentencePiece) and gemma4 (SentencePiece with merges)."
        )
    for name in ("scores", "token_type"):
        if len(metadata.get(name, tokens)) != len(tokens):
            raise TierForceError(
                f"its tokenizer has {len(tokens)} tokens, but {name} of {len(metadata[name])}: the "
                "file is broken."
            )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise TierForceError("its vocabulary has a duplicate token: the file is broken.")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        backend = _sentencepiece(metadata, vocab, _merges_by_score(vocab, metadata))
        add_bos = True
    else:
        backend, add_bos = _gemma4(metadata, vocab), True
    rstrip = is_phi3 and kind == "llama"
    _add_tokens(backend, tokens, metadata.get("token_type"), rstrip)
    specials = {
        f"{name}_token": _token(tokens, metadata.get(f"{gguf_name}_token_id"))
        for name, gguf_name in _SPECIALS.items()
    }
    first = specials["bos_token"] if metadata.get("add_bos_token", add_bos) else None
    last = specials["eos_token"] if metadata.get("add_eos_token", False) else None
    backend.post_processor = _post_processor(vocab, first, last)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata["chat_template"],
        clean_up_tokenization_spaces=False,
        **specials,
    )


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE (Radford et al. 2019), and whether it adds BOS by default."""
    name = metadata.get("pre")
    if name not in SPLITS:
        raise TierForceError(
            f"its pre-tokenizer (tokenizer.ggml.pre) is {quote(name)}; supported are "
            f"{', '.join(SPLITS)}."
        )
    splits = SPLITS[name]
    merges = [_pair(merge) for merge in metadata.get("merges", ())]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=splits.whole_words))
    if splits.composed:
        backend.normalizer = normalizers.NFC()
    rules = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in splits.rules]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*rules, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend, splits.add_bos


def _pair(merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge, which a space separates."""
    gap = merge.find(" ", 1)  # a space at index 0 is part of the first token
    if gap < 0:
        raise TierForceError(
            f"its merge {quote(merge)} does not have two tokens: the file is broken."
        )
    return merge[:gap], merge[gap + 1 :]


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], merges: list[tuple[str, str]]
) -> Tokenizer:
    """Return a SentencePiece BPE with byte fallback (Kudo and Richardson 2018)."""
    unknown = metadata.get("unknown_token_id", 0)
    model = BPE(
        vocab=vocab,
        merges=merges,
        unk_token=_token(list(vocab), unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _gemma4(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """Return a SentencePiece BPE with the file's merges, none of which is across lines."""
    if not metadata.get("merges"):
        raise TierForceError("the file has no tokenizer.ggml.merges, which gemma4 needs.")
    merges = [_pair(merge) for merge in metadata["merges"]]
    backend = _sentencepiece(metadata, vocab, merges)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    return backend


def _merges_by_score(
    vocab: Mapping[str, int], metadata: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that concatenate to a token, the best score first.

    Raises TierForceError for more of them than any real vocabulary has, and without scores.
    """
    if "scores" not in metadata:
        raise TierForceError(
            "the tokenizer cannot be built: the file has no tokenizer.ggml.scores, which "
            "SentencePiece merges need."
        )
    merges, scores = [], metadata["scores"]
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token, at))
        if len(merges) > MAX_MERGES:
            raise TierForceError(
                f"its tokens are concatenations of one another in more than {MAX_MERGES:,} ways: "
                "the file is broken."
            )
    merges.sort()
    return [(token[:at], token[at:]) for *_, token, at in merges]


def _add_tokens(
    backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int] | None, rstrip: bool
) -> None:
    """Add control tokens and user-defined tokens, which are never split.

    `rstrip`: white space after control tokens is a part of them.
    """
    special, regular = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(tokens, kinds or [_NORMAL] * len(tokens), strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            has_rstrip = rstrip and token not in _WITHOUT_RSTRIP
            special.append(AddedToken(token, normalized=False, special=True, rstrip=has_rstrip))
        elif kind == _USER_DEFINED:
            regular.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(regular)


def _post_processor(
    vocab: Mapping[str, int], first: str | None, last: str | None
) -> processors.TemplateProcessing:
    """Return a post-processor that adds `first` before any text, and `last` after it."""
    parts = [part for part in (first, "$A", last) if part is not None]
    tokens = [(token, vocab[token]) for token in (first, last) if token is not None]
    return processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _token(tokens: Sequence[str], index: Any) -> str | None:
    """Return a token by its id, None for no id. Raises TierForceError for an invalid id."""
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(tokens):
        raise TierForceError(
            f"its tokenizer refers to token {quote(index)} of {len(tokens)}: the file is broken."
        )
    return tokens[index]
