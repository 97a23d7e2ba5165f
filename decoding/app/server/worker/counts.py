"""Statistics of an answer, as clients receive them."""

from __future__ import annotations

from typing import Any

from decoding.engine.engine import Engine
from decoding.engine.stats import Stats


def request_counts(stats: Stats, engine: Engine, seed: int) -> dict[str, Any]:
    """Return the statistics of the current request so far. Bytes are those of one rank."""
    traffic = stats.traffic.get("target")
    return {
        "seed": seed,
        "mode": stats.mode,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "reused_tokens": stats.reused_tokens,
        "discarded_tokens": stats.discarded_tokens,
        "loaded_tokens": stats.loaded_tokens,
        "time_to_first_token_s": round(stats.first_token_s, 4),
        "ms_per_token": stats.ms_per_token,
        "tokens_per_verification": stats.tokens_per_verification,
        "acceptance": stats.acceptance,
        "link_bytes": traffic.link_in + traffic.link_out if traffic else 0,
        "link_bytes_per_token": stats.link_bytes_per_token,
        "layers": _layers(stats),
        "ranks": engine.group.size,
    }


def _layers(stats: Stats) -> dict[str, int] | None:
    """Return the number of layers by the place of their KV: device, split, or host.

    A split layer has its high bytes on the device and its low bits on the host.
    """
    if stats.plan is None:
        return None
    memory = stats.plan.memory
    return {
        "device": memory.resident_layers,
        "split": memory.split_layers,
        "host": stats.plan.layers_on_host - memory.split_layers,
    }
