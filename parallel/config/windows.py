"""Which layers of a model have sliding-window attention, from its config.

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.layout import CHECKPOINT_STEP, SlidingWindow
from parallel.config.families import Family
from parallel.config_checks import (
    COUNT,
    COUNT_OR_NONE,
    FULL,
    SLIDING,
    bool_field,
    check_number,
    per_layer_field,
    quote,
)
from parallel.errors import ConfigError


def sliding_window(
    fields: Mapping[str, Any], family: Family
) -> tuple[SlidingWindow | None, int | None]:
    """Return the window and its layers, and a limit of the context; None if there is none.

    A window of at least all positions has no effect on these, and limits the context that RoPE
    scaling may give. Raises ConfigError for windows that the family does not have.
    """
    window = fields.get("sliding_window", family.sliding_window)
    default = family.uses_sliding_window  # None: transformers ignores the field
    is_used = default is None or bool_field(fields, "use_sliding_window", default)
    kinds = per_layer_field(fields, "layer_types", str)
    kinds = kinds if family.has_layer_types else []
    if is_used and window not in (None, False):
        check_number("sliding_window", window, COUNT_OR_NONE)
    if not window or not is_used:
        if family.needs_window:
            kinds = kinds or layer_types(fields, family)
        if SLIDING in kinds:
            raise ConfigError(
                f"the model's config gives layer_types with {SLIDING}, but no sliding_window that "
                "is in use."
            )
        return None, None
    positions = fields.get("max_position_embeddings", family.max_positions)
    if family.window_layers is None:
        if window < positions or SLIDING in kinds:
            raise ConfigError(
                f"sliding-window attention (sliding_window = {window}, of {positions} positions) "
                f"is not supported in {fields['model_type']}: every layer must see the whole "
                "context."
            )
        return None, int(window)
    kinds = kinds or layer_types(fields, family)
    if family.ends_with_full:
        kinds = [*kinds[:-1], FULL]
    layers = [index for index, kind in enumerate(kinds) if kind == SLIDING]
    if window >= positions and not family.has_layer_kinds:
        return None, int(window) if layers else None
    if not layers:
        return None, None
    step = max(CHECKPOINT_STEP, 4 * int(window))
    return SlidingWindow(int(window), frozenset(layers), step), None


def layer_types(fields: Mapping[str, Any], family: Family) -> list[str]:
    """Return the kinds of all layers if a window is in use, and the config does not list them.

    Raises ConfigError for an invalid pattern.
    """
    layers = range(fields["num_hidden_layers"])
    rule = family.window_layers
    if rule == "all":
        return [SLIDING for _ in layers]
    if rule == "upper":
        first = fields.get("max_window_layers", family.max_window_layers)
        check_number("max_window_layers", first, COUNT_OR_NONE)
        return [SLIDING if index >= first else FULL for index in layers]
    pattern: Any = family.window_pattern
    if family.has_pattern:
        pattern = fields.get("sliding_window_pattern", pattern)
    may_be_letters = family.has_letters and isinstance(pattern, str)
    if may_be_letters and pattern and set(pattern) <= {"L", "G"}:  # local, global
        return [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in layers]
    if not COUNT.allows(pattern):
        raise ConfigError(
            f"the model's config gives sliding_window_pattern = {quote(pattern)}; it must be "
            f"{COUNT}" + (", or a string of L and G." if family.has_letters else ".")
        )
    return [SLIDING if (index + 1) % pattern else FULL for index in layers]
