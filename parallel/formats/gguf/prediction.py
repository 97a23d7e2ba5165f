"""The multi-token-prediction block of a GGUF file, which follows the model's layers.

Imports neither torch nor transformers. Source: github.com/ggml-org/llama.cpp, conversion/qwen.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from parallel.formats.gguf.families import GgufFamily
from parallel.formats.gguf.header import GgufHeader, TensorInfo
from parallel.formats.weight_headers import PREDICTION

_BLOCK = {  # parts beside those of a layer
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def prediction_tensors(
    header: GgufHeader, family: GgufFamily
) -> Iterator[tuple[TensorInfo, tuple[str, ...]]]:
    """Yield the tensors of a block with their names in safetensors, as `tensor_names`."""
    for info in header.prediction_tensors.values():
        _, layer, part = info.name.split(".", 2)
        names = family.tensor_names(info.name)
        own = tuple(
            name.replace(f"model.layers.{layer}.", f"{PREDICTION}layers.0.") for name in names
        )
        if (name := _BLOCK.get(part.removesuffix(".weight"))) is not None:
            own = (f"{PREDICTION}{name}.weight",)
        yield info, own


def has_prediction_block(
    header: GgufHeader,
    family: GgufFamily,
    parts: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    hidden: int,
) -> bool:
    """Return whether a file holds one block, with its model's embedding and head.

    Args:
        header: the file's.
        family: its architecture's.
        parts: those that a layer with attention has.
        shapes: of the parts that a config implies.
        hidden: size of hidden states.
    """
    tensors = {
        name.split(".", 2)[2]: info.shape for name, info in header.prediction_tensors.items()
    }
    own = {f"{name}.weight": (hidden,) for name in _BLOCK} | {
        "nextn.eh_proj.weight": (hidden, 2 * hidden)
    }
    expected = {**shapes, **own}
    return (
        header.mtp_layers == 1
        and tensors.keys() >= {*own, *parts}
        and all(expected.get(name, shape) == shape for name, shape in tensors.items())
        and all(names for _, names in prediction_tensors(header, family))
    )
