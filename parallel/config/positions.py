"""How many positions a model has: what its config counts, and what RoPE makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.config.rope import rope_object
from parallel.config_checks import COUNT, check_number

# positions count RoPE's factor already where so many are left without it: no model was trained on
# fewer
MIN_TRAINED = 2048


def trained_positions(given: Mapping[str, Any]) -> int | None:
    """Return the positions of the training that a config names beside RoPE's factor, if it does.

    Raises ConfigError for what is no number of them.
    """
    name = "original_max_position_embeddings"
    positions: Any = given.get(name)
    if positions is None:
        positions = rope_object(given).get(name)
    if positions is not None:
        check_number(name, positions, COUNT)
    return positions


def addressable_positions(
    rope: Mapping[str, Any], max_positions: int, trained: int | None
) -> tuple[int, bool]:
    """Return how many positions a model has with its RoPE, and whether that had to be guessed.

    Configs count the positions of the training, as Qwen2.5's with YaRN do, or those that RoPE
    stretches them to, as most do. Where `trained` is not named, `max_positions` are taken to count
    the factor of linear RoPE and YaRN if at least `MIN_TRAINED` are left without it. Dynamic RoPE
    stretches `max_positions` by definition, LongRoPE those of the training.

    Args:
        rope: the parameters that `read_rope` returns.
        max_positions: the config's.
        trained: what `trained_positions` returns.
    """
    factor = rope.get("factor") or 1.0
    if rope["rope_type"] in ("default", "llama3") or factor == 1:  # llama3's always count it
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


def dense_positions(given: Mapping[str, Any]) -> int | None:
    """Return the positions up to which dual chunk attention (Qwen2.5-1M) is plain attention.

    None where the config does not say.
    """
    chunks = given.get("dual_chunk_attention_config")
    named = "original_max_position_embeddings"
    positions: Any = chunks.get(named) if isinstance(chunks, Mapping) else None
    if positions is not None:
        check_number(f"dual_chunk_attention_config's {named}", positions, COUNT)
    return positions


def context_notes(
    rope: Mapping[str, Any], max_positions: int, trained: int | None, dense: int | None
) -> list[str]:
    """Return what is to be known of a model's positions, a sentence each.

    Takes what `addressable_positions` takes, and what `dense_positions` returns.
    """
    notes = []
    positions, is_guessed = addressable_positions(rope, max_positions, trained)
    if is_guessed:
        notes.append(
            f"RoPE type {rope['rope_type']!r} stretches positions {rope['factor']:g} times, and "
            f"max_position_embeddings = {positions:,} is taken to count that. If the model was "
            "trained on so many, say so by original_max_position_embeddings beside the factor."
        )
    if dense is not None and dense < positions:
        notes.append(
            f"Beyond {dense:,} of its {positions:,} positions the model was made for dual chunk "
            f"attention, which is not computed. The context is {dense:,} tokens unless --context "
            "says otherwise."
        )
    return notes
