"""Loading of models, tokenizer and stop tokens by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from decoding.config.defaults import NEW_TOKENS, USABLE_SHARE
from decoding.config.settings import LEVELS, Settings
from decoding.models.runtime import Runtime
from decoding.planning.forward_cost import choose_weights
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.planner import fitting_requirements
from decoding.planning.requirements import Requirements, draft_ranks
from decoding.prefix_cache.fingerprint import WeightDigests, digest_of
from decoding.prefix_cache.manager import ModelFingerprint
from decoding.prefix_cache.store import PromptCache
from decoding.text.gguf_tokenizer import gguf_tokenizer
from decoding.text.sentencepiece_file import has_sentencepiece_file, sentencepiece_tokenizer
from decoding.text.vocabulary import check_same_vocabulary
from offload.dtypes import dtype_name
from offload.errors import TierForceError, one_line
from offload.memory.link_spec import check_device, make_link
from offload.regular_files import read_json
from parallel.config.model_config import ModelConfig, predictor_config, token_ids
from parallel.config.parameter_count import min_kv_heads
from parallel.errors import CheckpointError, ConfigError
from parallel.execution.cuda_graphs import cuda_graphs_supported
from parallel.formats.locate import find_local, is_gguf
from parallel.model.loading import (
    choose_dtype,
    load_model,
    load_predictor,
    open_checkpoint,
    resolve,
)
from parallel.model.transformer import Transformer
from parallel.ranks.environment import rank_from_env
from parallel.ranks.process_group import TensorParallelGroup


def load(
    model: str | Path, draft: str | Path | None, settings: Settings, group: TensorParallelGroup
) -> tuple[Runtime, Any, frozenset[int]]:
    """Load a target, its tokenizer, and a draft if the mode uses one; all ranks call it.

    Args:
        model: the target's folder, GGUF file or hub name.
        draft: the draft's folder, GGUF file or hub name.
        settings: the settings of decoding.
        group: the tensor parallel group of the target.

    Returns:
        The runtime, the target's tokenizer, and the stop tokens.

    Raises TierForceError on all ranks if any rank fails: ConfigError, CheckpointError,
    InsufficientMemoryError.
    """
    if settings.graphs is None:
        graphs = not settings.deterministic and cuda_graphs_supported(group)
        settings = replace(settings, graphs=graphs)
    with group.sync_errors():
        _check_mode(str(model), draft is not None, settings)  # fails before a download
        check_device(settings.link, group.device.type)  # fails before weights are read
        machine = _Machine.find(settings, group)  # fails before weights are read
    machine = machine.agreed(group)
    folder = resolve(str(model), group)
    with group.sync_errors():
        config = ModelConfig.from_pretrained(folder, packed=True).with_rope_scaling(settings.rope)
        settings.check_layers(config.full_layers)
        has_draft = draft is not None or config.has_predictor
        mode = settings.resolved_mode(has_draft, config.full_layers)
    draft_folder = None
    if draft is not None and "draft" in LEVELS[mode]:
        draft_folder = resolve(str(draft), group)
    elif draft is not None:
        with group.sync_errors():
            find_local(str(draft))  # detects a wrong name, although the draft is not loaded
    with group.sync_errors():
        if config.kept_types or settings.weights == "packed":
            kind = choose_dtype(settings.dtype, config, open_checkpoint(folder), group.device)
            config = machine.choose_weights(config, settings.weights, kind)
        if settings.dtype != "auto":  # auto: known once weights are opened
            settings.check_split_dtype(mode, settings.dtype)
        tokenizer = load_tokenizer(folder)
        if draft_folder is not None:  # fails before weights are read, which may take minutes
            check_tokenizer(draft_folder, tokenizer, config)
        weights = _weights(folder, settings, group)
        target = load_model(folder, group, settings.dtype, config)
        # slow imports, at startup instead of at the first request
        target.config.inverse_frequencies(1)
        draft_model = None
        if draft_folder is not None:
            draft_model = _load_draft(draft_folder, target, settings, machine)
        elif draft is None:
            draft_model = _load_predictor(folder, target, mode, settings, machine)
            mode = settings.resolved_mode(draft_model is not None, config.full_layers)
        stop_tokens = load_stop_tokens(folder)
        _check_stop_tokens(stop_tokens, folder, target.config.vocab)
        stop_tokens = stop_tokens or target.config.stop_tokens
        identity = _identity(str(model), folder, target, weights)
        runtime = Runtime.create(target, draft_model, mode, settings, identity)
        if settings.deterministic:
            # self-tested now, while there is memory for it; requests rely on the result
            _ = runtime.batch_invariant_kernels
        return runtime, tokenizer, stop_tokens


def _check_mode(model: str, has_draft: bool, settings: Settings) -> None:
    """Raise TierForceError if the mode needs a draft, and there is none."""
    if not has_draft and "draft" in LEVELS.get(settings.mode, ()):
        settings.resolved_mode(ModelConfig.from_name(model).has_predictor)


@dataclass(frozen=True)
class _Machine:
    """What decides how weights are stored, before they are read; the same on all ranks."""

    profile: HardwareProfile
    device_memory: float  # bytes that are free for one rank
    copies: bool  # whether offloaded KV is copied over the link

    @classmethod
    def find(cls, settings: Settings, group: TensorParallelGroup) -> _Machine:
        """Return the machine of this run. Raises TierForceError for an unusable profile."""
        with closing(make_link(settings.link, group.device)) as link:
            profile, _ = HardwareProfile.find(settings.hardware, link.device_name, group.size)
            memory = link.device_available() / (group.size if group.device.type == "cpu" else 1)
            copies = link.copies
        limit = settings.device_memory
        return cls(profile, memory if limit is None else min(memory, limit), copies)

    def agreed(self, group: TensorParallelGroup) -> _Machine:
        """Return the machine with the least memory of any rank; all ranks call it."""
        return replace(self, device_memory=min(group.gather(self.device_memory)))

    def choose_weights(
        self,
        config: ModelConfig,
        setting: str,
        dtype: torch.dtype,
        target: ModelConfig | None = None,
    ) -> ModelConfig:
        """Return the config with the matrices that stay packed; `target` is given for its draft."""
        return choose_weights(config, setting, self.profile, dtype, self.device_memory, target)


def _weights(folder: Path, settings: Settings, group: TensorParallelGroup) -> WeightDigests | None:
    """Return the digests of the target's weights for the prompt cache; None without one.

    They are empty on ranks other than 0, which do not need them. Raises TierForceError.
    """
    if settings.prompt_cache is None:
        return None
    info = rank_from_env()
    if info.local_size < info.size:
        raise TierForceError(
            f"`prompt_cache` needs all ranks on one machine, and {info.size - info.local_size} of "
            f"{info.size} are on others: leave it out."
        )
    if group.rank:
        return WeightDigests({}, {})
    cache = PromptCache(Path(settings.prompt_cache))
    cache.create()
    with _check_readable(folder):
        return WeightDigests.compute(folder, cache.folder)


def _identity(
    name: str, folder: Path, target: Transformer, weights: WeightDigests | None
) -> ModelFingerprint | None:
    """Return the fingerprint that cached KV depends on; None without a prompt cache.

    Raises TierForceError.
    """
    if weights is None:
        return None
    with _check_readable(folder):
        weights.check_unchanged()
    digest = digest_of(weights, target.config, target.embed.weight.dtype, target.group)
    return ModelFingerprint(digest, Path(name).name or folder.resolve().name)


@contextmanager
def _check_readable(folder: Path) -> Iterator[None]:
    """Raise TierForceError for an OSError inside this context."""
    try:
        yield
    except OSError as error:
        raise TierForceError(f"{folder} cannot be read: {one_line(error)}.") from error


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder or a GGUF file.

    Raises TierForceError if it is missing or broken.
    """
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    try:
        if has_sentencepiece_file(folder):
            return sentencepiece_tokenizer(folder)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except TierForceError:
        raise
    except Exception as error:  # a broken file can raise anything in transformers
        if "trust_remote_code" in str(error):
            raise TierForceError(
                f"{folder}: the tokenizer needs code that came with the model (auto_map in "
                "tokenizer_config.json), which TierForce never runs: use a folder with a "
                "tokenizer.json of a known class."
            ) from error
        raise TierForceError(
            f"{folder}: the tokenizer cannot be loaded ({one_line(error)})."
        ) from error


def load_stop_tokens(folder: Path) -> frozenset[int]:
    """Return all end-of-sequence ids of the generation config; none if there is no such file.

    Raises TierForceError if the file exists but cannot be read, or has invalid ids.
    """
    path = folder / "generation_config.json"
    if not os.path.lexists(path):  # a dangling link counts as a broken file
        return frozenset()
    try:
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise TierForceError(
            f"{path} cannot be read ({one_line(error)}), and it has the stop tokens. Fetch it "
            "again, or remove it to use those of config.json."
        ) from error
    try:
        return token_ids(fields.get("eos_token_id"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_stop_tokens(stop_tokens: frozenset[int], folder: Path, vocab: int) -> None:
    """Raise ConfigError if there are stop tokens, but none in the model's vocabulary."""
    if stop_tokens and min(stop_tokens) >= vocab:
        raise ConfigError(
            f"{folder}: generation_config.json has stop token {min(stop_tokens)}, but the model "
            f"has {vocab} tokens, so no output would stop: correct eos_token_id there."
        )


def check_tokenizer(folder: Path, tokenizer: Any, config: ModelConfig) -> None:
    """Raise TierForceError if a draft's tokenizer has another vocabulary than the target's.

    Args:
        folder: the draft's folder or GGUF file.
        tokenizer: the target's tokenizer.
        config: the target's config.
    """
    draft_config = ModelConfig.from_pretrained(folder)
    names = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    check_same_vocabulary(folder, *names, min(draft_config.vocab, config.vocab))


def _load_draft(
    folder: Path, target: Transformer, settings: Settings, machine: _Machine
) -> Transformer | None:
    """Load the draft sharded over the ranks, or whole on rank 0, with None on the others."""
    group, shard = target.group, settings.shard_draft
    config, dtype = ModelConfig.from_pretrained(folder, packed=True), target.embed.weight.dtype
    config = machine.choose_weights(config, settings.weights, dtype, target.config)
    if shard is None:
        shard = draft_ranks(config, group.size, target.embed.weight.dtype) > 1
    if shard and (heads := min_kv_heads(config)) < group.size:
        raise TierForceError(
            f"{folder}: the draft's {heads} key/value heads cannot be sharded over "
            f"{group.size} GPUs: leave `shard_draft` out."
        )
    if group.rank and not shard:
        return None
    own_group = group if shard else TensorParallelGroup(device=group.device)
    return load_model(folder, own_group, dtype_name(dtype), config)


def _load_predictor(
    folder: Path, target: Transformer, mode: str, settings: Settings, machine: _Machine
) -> Transformer | None:
    """Load the target's multi-token-prediction block; None if it has none or the mode needs none.

    With mode `auto` it is left out where the target's context fits only without it. Raises
    CheckpointError.
    """
    config, ranks = target.config, target.group.size
    if "draft" not in LEVELS[mode] or not config.has_predictor:
        return None
    needs = Requirements(
        target=config,
        draft=predictor_config(config),
        mode=mode,
        settings=settings,
        dtype=target.embed.weight.dtype,
        ranks=ranks,
        draft_ranks=ranks,
        copies=machine.copies,
        multiprocessors=target.group.multiprocessors,
    )
    prompt = max(1, (settings.context or config.context_limit) - NEW_TOKENS)
    share = USABLE_SHARE if settings.device_memory is None else 1.0  # as in `Runtime.memory`
    fitting = fitting_requirements(needs, prompt, NEW_TOKENS, machine.device_memory, share)
    if fitting.draft is None:
        return None
    try:
        return load_predictor(folder, target)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} `mode` retrieval leaves the multi-token-prediction block out."
        ) from error
