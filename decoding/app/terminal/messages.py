"""What is said of an engine before it works, and of a text when it is done: a line each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoding.app.options import Common, as_flags
from decoding.app.terminal.streams import say, warn
from decoding.config.settings import LEVELS
from decoding.engine.engine import Engine
from decoding.engine.stats import Stats
from decoding.planning.memory_plan import MemoryPlan
from offload.dtypes import dtype_name
from offload.errors import InsufficientMemoryError
from offload.kernels.selection import Kernels


@dataclass(frozen=True)
class Longest:
    """The document that asks most of memory."""

    name: str
    tokens: int  # of its prompt, cut to the context


def say_what_fits(
    engine: Engine, longest: Longest | None, common: Common, concurrency: int = 1
) -> None:
    """Say what runs where, and warn of what the user may not have meant; all ranks call it."""
    place = None
    if (keeper := engine.sessions.prefix_cache) is not None:
        keeper.warn = lambda line: warn(as_flags(line))
    if engine.group.device.type == "cpu" and common.gpus is not None and common.device == "auto":
        warn(
            f"--gpus {common.gpus}, but torch finds no GPU here: the processor does all the work, "
            "hundreds of times slower. Look at nvidia-smi and at the build of torch, or say "
            "--device cpu."
        )
    for line in sanity_warnings(engine, common):
        warn(line)
    if longest is not None:
        try:
            place = engine.plan(longest.tokens, common.max_new_tokens, concurrency)
        except InsufficientMemoryError as error:  # of one document: the others may fit
            warn(
                f"{longest.name}, of {longest.tokens:,} prompt tokens, will get a record that says:"
                f" {as_flags(str(error))}"
            )
    needs = engine.runtime.requirements
    # a trial of kernels takes seconds: none where all layers stay on the device
    may_slice = needs.has_split or (
        len(needs.candidate_modes) > 1 and place is not None and needs.uses_link(place)
    )
    if engine.group.device.type == "cuda":
        if may_slice:
            _warn_without("slices", engine.runtime.split_kernels, "Another --mode may be faster.")
        if needs.settings.deterministic:
            _warn_without(
                "--deterministic", engine.runtime.batch_invariant_kernels, "It is faster without."
            )
    line = startup_line(engine, longest.tokens if longest else 0, place)
    say(f"{line}; {concurrency} texts at once" if concurrency > 1 else line)


def _warn_without(purpose: str, kernels: Kernels, hint: str) -> None:
    """Warn where there are no fused kernels for a purpose."""
    used, why = kernels
    if used is None:
        warn(
            f"the kernels for {purpose} cannot be used here ({why}): plain operations do the same "
            f"and take several times as long. {hint}"
        )


def sanity_warnings(engine: Engine, common: Common) -> list[str]:
    """Return what a user may not have meant by these models, a line each."""
    lines = []
    config = engine.runtime.target.config
    if engine.runtime.settings.context is None or engine.context > config.context_limit:
        lines += [f"{common.model}: {note}" for note in config.context_notes()]
    vocab, known = config.vocab, len(engine.tokenizer)
    if 2 * known < vocab:
        lines.append(
            f"{common.model} has {vocab:,} tokens, its tokenizer {known:,}: it may be that of "
            "another model, and texts would be nonsense."
        )
    if not engine.stop_tokens:
        lines.append(
            f"{common.model} names no token that ends a text (eos_token_id): texts end only where "
            "they have as many tokens as are asked for."
        )
    if common.draft is not None and "draft" not in LEVELS[engine.runtime.mode]:
        lines.append(f"--draft {common.draft} has no part in --mode {engine.runtime.mode}.")
    return lines


def startup_line(engine: Engine, prompt: int, place: MemoryPlan | None) -> str:
    """Say what runs where: devices, dtype, mode, context, and where the layers of a prompt of so
    many tokens go.
    """
    group, models = engine.group, engine.runtime
    if group.device.type == "cuda":
        where = f"{group.size} x {torch.cuda.get_device_name(group.device)}"
    else:
        threads = torch.get_num_threads()
        where = f"{group.size} x CPU with {threads} thread{'s' if threads > 1 else ''}"
    dtype = dtype_name(models.dtype)
    layers = models.target.config.layers
    far = layers - place.resident_layers if place is not None else 0
    modes = models.requirements.candidate_modes if far else [models.mode]
    line = f"{where}; {dtype}, {' or '.join(modes)}, context {engine.context:,}"
    if place is None:
        return line
    line += f"; at {prompt:,} prompt tokens {far} of {layers} layers are on the host"
    if place.split_layers:
        line += f", {place.split_layers} of them with codes on the device"
    return line


def summary_line(stats: Stats) -> str:
    """Say what a text took."""
    before = f" ({stats.loaded_tokens} of them from disk)" if stats.loaded_tokens else ""
    parts = [
        f"{stats.prompt_tokens} tokens read in {stats.first_token_s:.1f} s{before}, "
        f"{stats.new_tokens} written"
    ]
    if stats.ms_per_token is not None:
        parts.append(f"{stats.ms_per_token:.1f} ms/token")
    if stats.tokens_per_verification is not None and stats.mode != "plain":
        parts.append(f"{stats.tokens_per_verification:.2f} tokens per verification")
    if stats.link_bytes_per_token:
        parts.append(f"{stats.link_bytes_per_token / 1e6:.1f} MB per token over the link")
    return ", ".join(parts)
