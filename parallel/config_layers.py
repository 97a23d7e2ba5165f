"""The layers of a config that lists mixers and MLPs as layers of their own, as Nemotron-H's does.

Here a layer has a mixer, which is attention or Mamba-2, and the MLP or the experts right after it,
if there are any. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel.config_checks import FULL, LINEAR, OLD_KINDS, quote
from parallel.errors import ConfigError

LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern")  # fields, names and letters
_MLP, _MOE = "mlp", "moe"
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}


class SplitLayers(NamedTuple):
    """Where a checkpoint has the parts of each layer: numbers of its own layers."""

    mixers: tuple[int, ...]
    mlps: tuple[int | None, ...]  # those with an MLP or experts; None for a layer without any
    sparse: frozenset[int]  # layers with experts


def has_sparse_layers(fields: Mapping[str, Any]) -> bool:
    """Return whether a config lists layers with experts."""
    return _MOE in _part_kinds(fields)


def read_split_layers(fields: Mapping[str, Any]) -> SplitLayers:
    """Return the layers of a config. Raises ConfigError if MLPs do not each follow a mixer."""
    kinds = _part_kinds(fields)
    if others := sorted(set(kinds) - set(_LETTERS.values())):
        raise ConfigError(
            f"the model's config lists layers of kind {quote(others[0])}, which is not supported."
        )
    mixers, mlps, sparse = list[int](), list[int | None](), set[int]()
    for index, kind in enumerate(kinds):
        if kind in (LINEAR, FULL):
            mixers.append(index)
            mlps.append(None)
        elif not mixers or mlps[-1] is not None:
            raise ConfigError(
                f"layer {index} of the model's config is an MLP that does not follow attention or "
                "a recurrent layer, which is not supported."
            )
        else:
            mlps[-1] = index
            sparse |= {len(mlps) - 1} if kind == _MOE else set()
    return SplitLayers(tuple(mixers), tuple(mlps), frozenset(sparse))


def with_whole_layers(fields: Mapping[str, Any], layers: SplitLayers) -> dict[str, Any]:
    """Return a config's fields with the number and the kinds of layers that have both parts."""
    kinds = _part_kinds(fields)
    types = [kinds[mixer] for mixer in layers.mixers]
    return {**without_rope(fields), "num_hidden_layers": len(types), "layer_types": types}


def without_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's fields without those of RoPE, which attention does not have there."""
    return {name: value for name, value in fields.items() if name not in _ROPE}


def _part_kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a config's mixers and MLPs, in order."""
    kinds = fields.get(LAYER_LISTS[0])
    if kinds and isinstance(kinds, list):
        return [OLD_KINDS.get(f"{kind}", f"{kind}") for kind in kinds]
    letters = fields.get(LAYER_LISTS[1])
    return [_LETTERS.get(each, each) for each in letters] if isinstance(letters, str) else []
