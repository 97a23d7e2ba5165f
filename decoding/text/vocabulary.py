"""Whether a draft names its tokens as the target does: what a vocabulary is needs no library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offload.errors import TierForceError
from offload.regular_files import MIB, read_json
from parallel.formats.gguf_header import read_header
from parallel.formats.gguf_names import TOKENS
from parallel.formats.locate import is_gguf

Names = Mapping[str, int]  # ids of tokens, by how they are written


def check_same_vocabulary(folder: Path, target: Names, draft: Names, vocab: int) -> None:
    """Refuse a draft that names a token otherwise than the target does.

    Models are published with vocabularies padded to different sizes, and tokenizers add tokens
    behind the last: what counts is that the two agree on every id below the smaller vocabulary.

    Args:
        folder: the draft's folder, for the message.
        target: the target's names.
        draft: the draft's.
        vocab: the number of rows that both models have.

    Raises TierForceError, which names the first id that differs and its two tokens.
    """
    if target == draft:
        return
    # an id of two names has the same one in every process
    theirs, ours = ({at: name for name, at in sorted(each.items())} for each in (target, draft))
    for token in range(min(vocab, 1 + max(theirs), 1 + max(ours))):
        if theirs.get(token) != ours.get(token):
            raise TierForceError(
                f"{folder}: the draft's vocabulary is not the target's: token {token} is "
                f"{ours.get(token)!r} for the draft and {theirs.get(token)!r} for the target; a "
                "draft must share the target's tokenizer."
            )


def names_in(model: Path) -> Names | None:
    """Return the names in a folder's tokenizer.json, or in a GGUF file.

    None where it has none that can be read.
    """
    if is_gguf(model):
        tokens = read_header(model).metadata.get(TOKENS)
        return {token: at for at, token in enumerate(tokens)} if tokens else None
    try:
        content = read_json(model / "tokenizer.json", 64 * MIB)
        names = content["model"]["vocab"]
        if isinstance(names, list):  # a token each, with its score
            names = {name: token for token, (name, _) in enumerate(names)}
        added = {each["content"]: each["id"] for each in content.get("added_tokens", [])}
        found = {**names, **added}
        return found if found and all(type(token) is int for token in found.values()) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
