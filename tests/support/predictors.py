"""Checkpoints with a multi-token-prediction block, and its predictions by transformers' modules."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.cache.prediction import PredictionCache
from offload.cache.streaming_shape import StreamingCacheSpec
from parallel.model.transformer import Transformer
from support.models import edit_weights, reference_model

# arguments of `build_checkpoint` for `follow_a_permutation`: as many tokens as dimensions
CONTRIVED: dict[str, Any] = {"family": "qwen3_5_text", "vocab_size": 32, "hidden_size": 32}
LAYER = "model.layers.1."  # the one with attention, in models of `DELTA_NETS`


def predictor_tensors(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return random tensors of a block for a model with these."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: Tensor) -> Tensor:
        return 0.15 * torch.randn(like.shape, generator=generator)

    norm = tensors["model.norm.weight"]
    block = {
        f"mtp.layers.0.{name.removeprefix(LAYER)}": drawn(each)
        for name, each in tensors.items()
        if name.startswith(LAYER)
    }
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        block[f"mtp.{name}.weight"] = drawn(norm)
    block["mtp.fc.weight"] = drawn(norm.new_empty(len(norm), 2 * len(norm)))
    return block


def with_predictor(
    folder: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any] | None = None
) -> Path:
    """Write a copy of a checkpoint with a random block to `target`; `edit` changes its tensors."""

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= predictor_tensors(tensors)
        if edit is not None:
            edit(tensors)

    return edit_weights(shutil.copytree(folder, target), add)


def follow_a_permutation(tensors: dict[str, Tensor], reads: str) -> None:
    """Let each token be followed by one that depends on it alone.

    The block reads this from the token itself, or from the hidden state of the one before it.
    """
    size = CONTRIVED["hidden_size"]
    one, zero = torch.eye(size), torch.zeros(size, size)
    following = one[torch.randperm(size, generator=torch.Generator().manual_seed(2))]
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        ):
            tensor.zero_()  # layers add nothing
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = one, following
    fc = [one, zero] if reads == "token" else [zero, following]
    tensors["mtp.fc.weight"] = torch.cat(fc, dim=1)


def prediction_cache(block: Transformer, shape: StreamingCacheSpec) -> PredictionCache:
    """Return an empty cache of a block."""
    group, config = block.group, block.config
    layout = config.kv_layout(group.size, torch.float32, group.rank)
    rotary = block.rotary(shape.slots, shape.slots)
    return PredictionCache(layout, shape, rotary, group.device)


class ReferencePredictor:
    """A block of transformers' modules, on hidden states of transformers' model."""

    def __init__(self, folder: Path):
        model = reference_model(folder, torch.float32)
        self.inner, self.head = model.model, model.lm_head
        tensors = load_file(folder / "model.safetensors")

        def loaded(module: Any, prefix: str) -> Any:
            own = deepcopy(module)
            state = {
                name.removeprefix(f"mtp.{prefix}"): each
                for name, each in tensors.items()
                if name.startswith(f"mtp.{prefix}")
            }
            missing = own.load_state_dict(self._stacked(state, own), strict=True)
            assert not any(missing)
            return own

        self.layer = loaded(self.inner.layers[1], "layers.0.")
        self.norm = loaded(self.inner.norm, "norm.")
        self.embedding_norm = loaded(self.inner.norm, "pre_fc_norm_embedding.")
        self.hidden_norm = loaded(self.inner.norm, "pre_fc_norm_hidden.")
        self.fc = tensors["mtp.fc.weight"]

    @torch.inference_mode()
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the model's hidden states (T, hidden) after the final norm."""
        hidden: Tensor = self.inner(tokens[None]).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def predictions(self, tokens: Tensor, previous: Tensor) -> Tensor:
        """Return predicted hidden states (T, hidden) of tokens (T,), given those before each."""
        embedded = self.embedding_norm(self.inner.embed_tokens(tokens))
        x = torch.cat((embedded, self.hidden_norm(previous)), dim=-1) @ self.fc.T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        angles = self.inner.rotary_emb(x[None], positions)
        out = self.layer(x[None], position_embeddings=angles, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        predicted: Tensor = self.norm(out)[0]
        return predicted

    @torch.inference_mode()
    def chain(self, tokens: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the logits (V,) of a greedy draft of `count` tokens after `tokens`."""
        previous = self.hidden_states(tokens[:-1])
        tokens = tokens[1:]
        for _ in range(count):
            predicted = self.predictions(tokens, previous)
            logits: Tensor = self.head(predicted[-1])
            yield logits
            tokens = torch.cat((tokens, logits.argmax()[None]))
            previous = torch.cat((previous, predicted[-1:]))

    @staticmethod
    def _stacked(state: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
        """Return a layer's tensors with the experts as transformers stacks them."""
        names = module.state_dict().keys()
        if not (experts := [name for name in names if name.endswith("experts.down_proj")]):
            return state
        prefix = experts[0].removesuffix(".down_proj")
        if f"{prefix}.down_proj" in state:
            return state
        own = {name: each for name, each in state.items() if not name.startswith(f"{prefix}.")}
        parts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
        for part, stack in parts.items():
            index = 0
            while (name := f"{prefix}.{index}.{part}_proj.weight") in state:
                stack.append(state[name])
                index += 1
        gate, up, down = (torch.stack(stack) for stack in parts.values())
        own[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        own[f"{prefix}.down_proj"] = down
        return own
