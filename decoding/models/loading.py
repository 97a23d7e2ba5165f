"""From names to what texts are decoded with: models, tokenizer, and the tokens that stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from decoding.config.settings import LEVELS, Settings
from decoding.models.runtime import Runtime
from decoding.planning.memory_requirements import draft_ranks
from decoding.planning.prior import find_prior
from decoding.prefix_cache.fingerprint import WeightDigests, digest_of
from decoding.prefix_cache.manager import ModelFingerprint
from decoding.prefix_cache.store import PromptCache
from decoding.text.gguf_tokenizer import gguf_tokenizer
from decoding.text.vocabulary import check_same_vocabulary
from offload.dtypes import dtype_name
from offload.errors import TierForceError, one_line
from offload.memory.link_spec import check_device
from offload.regular_files import read_json
from parallel.config.model_config import ModelConfig, token_ids
from parallel.errors import ConfigError
from parallel.execution.cuda_graphs import cuda_graphs_supported
from parallel.formats.locate import find_local, is_gguf
from parallel.model.loading import load_model, resolve
from parallel.model.transformer import Transformer
from parallel.ranks.environment import rank_from_env
from parallel.ranks.process_group import TensorParallelGroup


def load(
    model: str | Path, draft: str | Path | None, settings: Settings, group: TensorParallelGroup
) -> tuple[Runtime, Any, frozenset[int]]:
    """Load a target, its tokenizer, and a draft where the mode has one; all ranks call it.

    Args:
        model: the target's folder, GGUF file or hub name.
        draft: the draft's, likewise.
        settings: how the models are to run.
        group: the ranks that share the target.

    Returns:
        The models at work, the target's tokenizer, and the tokens that end a text.

    Raises TierForceError on all ranks when any rank cannot: ConfigError, CheckpointError, InsufficientMemoryError.
    """
    if settings.graphs is None:
        graphs = not settings.deterministic and cuda_graphs_supported(group)
        settings = replace(settings, graphs=graphs)
    with group.sync_errors():
        mode = settings.resolved_mode(draft is not None)
        check_device(settings.link, group.device.type)  # before weights are read
        find_prior(settings.hardware, "", group.size)  # likewise
    folder = resolve(str(model), group)
    draft_folder = None
    if draft is not None and "draft" in LEVELS[mode]:
        draft_folder = resolve(str(draft), group)
    elif draft is not None:
        with group.sync_errors():
            find_local(str(draft))  # a slip in its name is told, although nothing is read of it
    with group.sync_errors():
        config = ModelConfig.from_pretrained(folder).with_rope_scaling(settings.rope)
        settings.check_layers(config.layers)
        if settings.dtype != "auto":  # else it is known once weights are opened
            settings.check_split_dtype(mode, settings.dtype)
        tokenizer = load_tokenizer(folder)
        if draft_folder is not None:  # before weights are read, which may take minutes
            check_tokenizer(draft_folder, tokenizer, config)
        weights = _weights(folder, settings, group)
        target = load_model(folder, group, settings.dtype, config)
        target.config.inverse_frequencies(1)  # no text is to wait for what this imports
        small = None
        if draft_folder is not None:
            small = _load_draft(draft_folder, target, settings.shard_draft)
        stop_tokens = load_stop_tokens(folder)
        _check_stop_tokens(stop_tokens, folder, target.config.vocab)
        stop_tokens = stop_tokens or target.config.stop_tokens
        identity = _identity(str(model), folder, target, weights)
        runtime = Runtime.create(target, small, mode, settings, identity)
        if settings.deterministic:
            _ = (
                runtime.batch_invariant_kernels
            )  # tried while there is memory for it: a text keeps to them
        return runtime, tokenizer, stop_tokens


def _weights(folder: Path, settings: Settings, group: TensorParallelGroup) -> WeightDigests | None:
    """Return the weights of a target whose texts are kept on disk; None where none are.

    On ranks other than 0 nobody asks for them. Raises TierForceError.
    """
    if settings.prompt_cache is None:
        return None
    place = rank_from_env()
    if place.local_size < place.size:
        raise TierForceError(
            f"`prompt_cache` is for ranks of one machine, and {place.size - place.local_size} of "
            f"{place.size} are on others: leave it out."
        )
    if group.rank:
        return WeightDigests({}, {})
    kept = PromptCache(Path(settings.prompt_cache))
    kept.create()
    with _readable(folder):
        return WeightDigests.compute(folder, kept.folder)


def _identity(
    name: str, folder: Path, target: Transformer, weights: WeightDigests | None
) -> ModelFingerprint | None:
    """Return what the KV of texts depends on; None where none are kept. Raises TierForceError."""
    if weights is None:
        return None
    with _readable(folder):
        weights.check_unchanged()
    digest = digest_of(weights, target.config, target.embed.weight.dtype, target.group)
    return ModelFingerprint(digest, Path(name).name or folder.resolve().name)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierForceError(f"{folder} cannot be read: {one_line(error)}.") from error


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder or a GGUF file.

    Raises TierForceError when it is missing or broken.
    """
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the broken file happens to break
        if "trust_remote_code" in str(error):
            raise TierForceError(
                f"{folder}: the tokenizer would run code that came with the model (auto_map in "
                "tokenizer_config.json), which is never done here: use a folder with a "
                "tokenizer.json of a known class."
            ) from error
        raise TierForceError(
            f"{folder}: the tokenizer cannot be loaded ({one_line(error)})."
        ) from error


def load_stop_tokens(folder: Path) -> frozenset[int]:
    """Return all end-of-sequence ids of the generation config, none where there is no such file.

    Raises TierForceError when the file is there but cannot be read, or names something else.
    """
    path = folder / "generation_config.json"
    if not os.path.lexists(path):  # a link that leads nowhere is a broken file
        return frozenset()
    try:
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise TierForceError(
            f"{path} cannot be read ({one_line(error)}): it says which tokens end a text. Fetch it "
            "again, or remove it to go by config.json."
        ) from error
    try:
        return token_ids(fields.get("eos_token_id"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_stop_tokens(stop_tokens: frozenset[int], folder: Path, vocab: int) -> None:
    """Raise ConfigError where there are tokens that end a text, and the model has none of them."""
    if stop_tokens and min(stop_tokens) >= vocab:
        raise ConfigError(
            f"{folder}: by generation_config.json texts end with token {min(stop_tokens)}, but "
            f"the model has {vocab} tokens, so none would end: correct eos_token_id there."
        )


def check_tokenizer(folder: Path, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a draft whose tokenizer names a token otherwise than the target's.

    Args:
        folder: the draft's folder or GGUF file.
        tokenizer: the target's.
        config: the target's.

    Raises TierForceError.
    """
    small = ModelConfig.from_pretrained(folder)
    names = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    check_same_vocabulary(folder, *names, min(small.vocab, config.vocab))


def _load_draft(folder: Path, target: Transformer, shard: bool | None) -> Transformer | None:
    """Load the draft split over the ranks, or whole on rank 0 and None on the others."""
    config, group = ModelConfig.from_pretrained(folder), target.group
    if shard is None:
        shard = draft_ranks(config, group.size, target.embed.weight.dtype) > 1
    if shard and config.kv_heads < group.size:
        raise TierForceError(
            f"{folder}: the draft's {config.kv_heads} key/value heads cannot be split over "
            f"{group.size} GPUs: leave `shard_draft` out."
        )
    if group.rank and not shard:
        return None
    dtype = dtype_name(target.embed.weight.dtype)
    return load_model(
        folder, group if shard else TensorParallelGroup(device=group.device), dtype, config
    )
