"""Comparison of draft and target vocabularies, without loading a tokenizer library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offload.errors import TierForceError
from offload.regular_files import MIB, read_json
from parallel.formats.gguf.header import read_header
from parallel.formats.gguf.metadata import TOKENS
from parallel.formats.locate import is_gguf

Names = Mapping[str, int]  # token ids by token string


def check_same_vocabulary(folder: Path, target: Names, draft: Names, vocab: int) -> None:
    """Raise TierForceError if the draft's vocabulary differs from the target's.

    Models are published with vocabularies padded to different sizes, and tokenizers add tokens at
    the end: only ids below the smaller vocabulary size are compared. The error names the first id
    that differs, and both of its tokens.

    Args:
        folder: the draft's folder, for the message.
        target: the target's vocabulary.
        draft: the draft's vocabulary.
        vocab: the smaller vocabulary size of the two models.
    """
    if target == draft:
        return
    # sorted, so that an id with two names gets the same one in every process
    target_names, draft_names = (
        {token: name for name, token in sorted(each.items())} for each in (target, draft)
    )
    for token in range(min(vocab, 1 + max(target_names), 1 + max(draft_names))):
        if target_names.get(token) != draft_names.get(token):
            raise TierForceError(
                f"{folder}: the draft's vocabulary is not the target's: token {token} is "
                f"{draft_names.get(token)!r} for the draft and {target_names.get(token)!r} for the "
                "target; a draft must share the target's tokenizer."
            )


def names_in(model: Path) -> Names | None:
    """Return the vocabulary of a folder's tokenizer.json, or of a GGUF file.

    None if there is no readable one.
    """
    if is_gguf(model):
        tokens = read_header(model).metadata.get(TOKENS)
        return {token: at for at, token in enumerate(tokens)} if tokens else None
    try:
        content = read_json(model / "tokenizer.json", 64 * MIB)
        names = content["model"]["vocab"]
        if isinstance(names, list):  # pairs of token and score
            names = {name: token for token, (name, _) in enumerate(names)}
        added = {each["content"]: each["id"] for each in content.get("added_tokens", [])}
        names = {**names, **added}
        return names if names and all(type(token) is int for token in names.values()) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
