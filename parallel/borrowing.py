"""Drafts that borrow: parts of a model that its folder leaves out, and its target lends.

A draft made of a few of the target's own layers works between the target's own embedding and head,
which may be most of its weights. They are neither stored nor, where that can be, held again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallel.errors import ConfigError

if TYPE_CHECKING:
    from parallel.config import ModelConfig

EMBEDDING, HEAD, NORM = "embed_tokens", "lm_head", "norm"
PARTS = (EMBEDDING, HEAD, NORM)


def read_borrows(given: Mapping[str, Any], tied: bool) -> frozenset[str]:
    """Return the parts that a model borrows, by the fields of its config.json.

    With tied embeddings the head comes with the embedding, named or not. Raises ConfigError for
    what is not known, and for parts that cannot be borrowed by themselves.
    """
    ours = given.get("tierforce", {})
    if not isinstance(ours, Mapping) or not ours.keys() <= {"borrows"}:
        raise ConfigError(
            'the config\'s "tierforce" must be an object with "borrows" and nothing else, found '
            f"{str(ours)[:80]}."
        )
    names = ours.get("borrows", [])
    if not isinstance(names, list) or not all(name in PARTS for name in names):
        raise ConfigError(
            f'the config\'s "borrows" must be a list of {", ".join(PARTS)}, found '
            f"{str(names)[:80]}."
        )
    if names and EMBEDDING not in names:
        raise ConfigError(
            f'the config\'s "borrows" is {", ".join(names)} without {EMBEDDING}: a draft that '
            "borrows takes the target's tokens, and so their embedding."
        )
    return frozenset([*names, HEAD]) if names and tied else frozenset(names)


def refuse_borrower(config: ModelConfig, name: str) -> None:
    """Refuse a model that borrows where there is nobody to borrow from. Raises ConfigError."""
    if config.borrows:
        raise ConfigError(
            f"{name} is a draft that borrows {_listed(config)} from its target, and no model by "
            "itself: give it as `draft`, beside the target it was made for."
        )


def refuse_unlike(draft: ModelConfig, target: ModelConfig, name: str) -> None:
    """Refuse a draft that borrows from a target of other dimensions than its own.

    Raises ConfigError, which names what differs.
    """
    if not draft.borrows:
        return
    pairs = {
        "vocab_size": (draft.vocab, target.vocab),
        "hidden_size": (draft.hidden, target.hidden),
        "tie_word_embeddings": (draft.tied, target.tied),
    }
    for field, (own, lent) in pairs.items():
        if own != lent:
            raise ConfigError(
                f"{name} borrows {_listed(draft)}, but its {field} is {own} and the target's is "
                f"{lent}: it was made for another target."
            )


def _listed(config: ModelConfig) -> str:
    return ", ".join(part for part in PARTS if part in config.borrows)
