"""The number of positions of a model: what its config counts, and how RoPE scaling extends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.config.rope import rope_object
from parallel.config_checks import COUNT, FULL, check_number

# Smallest plausible number of training positions: if dividing by RoPE's factor leaves at least as
# many, max_position_embeddings is taken to include the factor.
MIN_TRAINED = 2048


def trained_positions(fields: Mapping[str, Any]) -> int | None:
    """Return the training positions that a config names beside RoPE's factor, None if it does not.

    Raises ConfigError for an invalid number.
    """
    name = "original_max_position_embeddings"
    positions: Any = fields.get(name)
    if positions is None:
        rope = rope_object(fields)
        nested = rope.get(FULL)  # present if each kind of layer has its own
        positions = (nested if isinstance(nested, Mapping) else rope).get(name)
    if positions is not None:
        check_number(name, positions, COUNT)
    return positions


def addressable_positions(
    rope: Mapping[str, Any], max_positions: int, trained: int | None
) -> tuple[int, bool]:
    """Return the number of positions of a model with its RoPE, and whether it is a guess.

    Some configs count the positions of the training, such as Qwen2.5's with YaRN, but most count
    the scaled ones. Without `trained`, `max_positions` is assumed to include the factor of linear
    RoPE and YaRN if at least `MIN_TRAINED` positions remain without it. Dynamic RoPE scales
    `max_positions` by definition, LongRoPE those of the training.

    Args:
        rope: the parameters returned by `read_rope`.
        max_positions: the config's max_position_embeddings.
        trained: the result of `trained_positions`.
    """
    factor = rope.get("factor") or 1.0
    # max_positions of llama3 always include the factor
    if rope["rope_type"] in ("default", "llama3") or factor == 1:
        return max_positions, False
    if rope["rope_type"] == "dynamic":
        return int(max_positions * factor), False
    if trained is not None:
        return max(max_positions, int(trained * factor)), False
    if rope["rope_type"] == "longrope":
        return max_positions, False
    if max_positions / factor >= MIN_TRAINED:
        return max_positions, True
    return int(max_positions * factor), False


def dense_positions(fields: Mapping[str, Any]) -> int | None:
    """Return the positions up to which dual chunk attention (Qwen2.5-1M) equals full attention.

    None if the config does not say.
    """
    chunks = fields.get("dual_chunk_attention_config")
    name = "original_max_position_embeddings"
    positions: Any = chunks.get(name) if isinstance(chunks, Mapping) else None
    if positions is not None:
        check_number(f"dual_chunk_attention_config's {name}", positions, COUNT)
    return positions


def context_notes(
    rope: Mapping[str, Any], max_positions: int, trained: int | None, dense: int | None
) -> list[str]:
    """Return notes for the user about a model's positions, one sentence each.

    Parameters as in `addressable_positions`; `dense` is the result of `dense_positions`.
    """
    notes = []
    positions, is_guessed = addressable_positions(rope, max_positions, trained)
    if is_guessed:
        notes.append(
            f"RoPE type {rope['rope_type']!r} scales positions by {rope['factor']:g}, and "
            f"max_position_embeddings = {positions:,} is assumed to include that. If the model was "
            "trained on that many, set original_max_position_embeddings beside the factor."
        )
    if dense is not None and dense < positions:
        notes.append(
            f"Beyond {dense:,} of its {positions:,} positions the model expects dual chunk "
            f"attention, which is not implemented. The context is {dense:,} tokens unless "
            "--context says otherwise."
        )
    return notes
