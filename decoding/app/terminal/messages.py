"""Messages of a command: warnings and a line at startup, and a line per request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from decoding.app.options import Common, as_flags
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted, say, warn
from decoding.config.defaults import MAX_CONCURRENCY
from decoding.config.settings import LEVELS
from decoding.engine.engine import Engine
from decoding.planning.plan import Plan
from decoding.planning.requirements import predictor_notes, weight_notes, whole_weight_bytes
from offload.attention.folding import merge_kernels
from offload.dtypes import dtype_name
from offload.errors import InsufficientMemoryError
from offload.self_test import Kernels
from parallel.config.parameter_count import recurrent_layers, windowed_layers
from parallel.config.text_model import wrapper_notes
from parallel.formats.plane_format import PlaneFormat
from parallel.weights.selection import plane_kernels


@dataclass(frozen=True)
class LongestDocument:
    """The document that needs the most memory."""

    name: str
    tokens: int  # tokens of its longest prompt, which fits the context
    prompts: int = 1  # at most; more than one for several questions, or parts


def fitting_concurrency(engine: Engine, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many requests of this size fit together at no cost to each; all ranks call it."""
    if prompt_tokens < 1:
        return 1
    try:
        return engine.max_concurrency(prompt_tokens, max_new_tokens, MAX_CONCURRENCY)
    except InsufficientMemoryError:
        return 1


def say_what_fits(
    engine: Engine, longest: LongestDocument | None, common: Common, concurrency: int = 1
) -> None:
    """Print the startup line, and warnings about probable mistakes; all ranks call it."""
    plan = None
    if (prefix_cache := engine.sessions.prefix_cache) is not None:
        prefix_cache.warn = lambda line: warn(as_flags(line))
    if engine.group.device.type == "cpu" and common.gpus is not None and common.device == "auto":
        warn(
            f"--gpus {common.gpus}, but torch finds no GPU here: the CPU is hundreds of times "
            "slower. Check nvidia-smi and the torch build, or pass --device cpu."
        )
    for line in sanity_warnings(engine, common):
        warn(line)
    if longest is not None:
        try:
            plan = engine.plan(longest.tokens, common.max_new_tokens, concurrency)
        except InsufficientMemoryError as error:  # other documents may fit
            warn(
                f"{longest.name} ({longest.tokens:,} prompt tokens) will fail: "
                f"{as_flags(str(error))}"
            )
    if engine.group.device.type == "cuda":
        _warn_without_kernels(engine, plan)
    line = startup_line(engine, longest.tokens if longest else 0, plan)
    say(f"{line}; {concurrency} concurrent requests" if concurrency > 1 else line)


def _warn_without_kernels(engine: Engine, plan: Plan | None) -> None:
    """Warn of each purpose of this engine for which fused kernels are unavailable."""
    for purpose, (kernels, reason), hint in _fused_kernels(engine, plan):
        if kernels is None:
            warn(
                f"the kernels for {purpose} cannot be used here ({reason}): plain PyTorch "
                f"operations replace them and take several times as long. {hint}"
            )


def _fused_kernels(engine: Engine, plan: Plan | None) -> Iterator[tuple[str, Kernels, str]]:
    """Yield the fused kernels of this engine: their purpose, and what to do without them."""
    runtime, needs = engine.runtime, engine.runtime.requirements
    uses_link = plan is not None and plan.uses_link
    another = "Another --mode may be faster."
    if uses_link or needs.has_split:
        dim = needs.layout.head_dim
        yield "merging attention", merge_kernels("cuda", needs.dtype, dim), "Results are the same."
    if needs.has_split or (len(needs.candidate_modes) > 1 and uses_link):
        yield "split KV", runtime.split_kernels, another
    if needs.may_retrieve and needs.dtype.itemsize == 2:
        yield "retrieval", runtime.retrieval_kernels, another
    if needs.dtype.itemsize == 2:
        for kernels in runtime.slot_kernels:
            yield "captured forwards", kernels, another
    if (recurrence := runtime.prompt_kernels) is not None:
        yield "recurrent layers in prompts", recurrence, "fla-core has them: install it."
    if needs.settings.deterministic:
        yield "--deterministic", runtime.batch_invariant_kernels, "It is faster without."
    for kind in sorted({kind for _, kind in needs.target.kept_types}, key=attrgetter("name")):
        if isinstance(kind, PlaneFormat):
            of_type = plane_kernels("cuda", needs.dtype, kind)
            yield f"{kind.name} weights", of_type, "--weights 16-bit may be faster."


def sanity_warnings(engine: Engine, common: Common) -> list[str]:
    """Return one line for each probable mistake in the choice of models and options."""
    lines = []
    config = engine.runtime.target.config
    if engine.runtime.settings.context is None or engine.context > config.context_limit:
        lines += [f"{common.model}: {note}" for note in config.context_notes()]
    requirements = engine.runtime.requirements
    notes = [*wrapper_notes(config.wrapper), *weight_notes(requirements)]
    if requirements.draft is None:  # a block that drafts is no mistake
        notes += predictor_notes(requirements)
    lines += [f"{common.model}: {note}" for note in notes]
    vocab, tokenizer_size = config.vocab, len(engine.tokenizer)
    if 2 * tokenizer_size < vocab:
        lines.append(
            f"{common.model} has {vocab:,} tokens, its tokenizer {tokenizer_size:,}: it may belong "
            "to another model, and the output would be nonsense. Check the model's files."
        )
    if not engine.scheduler.stop_tokens:
        lines.append(
            f"{common.model} has no end-of-sequence token (eos_token_id): generation stops only at "
            "--max-new-tokens."
        )
    return [*lines, *_unused_options(common, engine.runtime.mode)]


def _unused_options(common: Common, mode: str) -> Iterator[str]:
    """Yield a line for each option that has no effect in a mode."""
    settings, levels = common.settings, LEVELS[mode]
    unused = {
        f"--draft {common.draft}": common.draft is not None and "draft" not in levels,
        f"--retrieval-budget {settings.retrieval_budget}": (
            settings.retrieval_budget is not None and "retrieval" not in levels
        ),
        f"--num-draft-tokens {settings.num_draft_tokens}": (
            settings.num_draft_tokens is not None and not levels
        ),
    }
    for option, is_unused in unused.items():
        if is_unused:
            yield f"{option} is not used in --mode {mode}."


def startup_line(engine: Engine, prompt: int, plan: Plan | None) -> str:
    """Return the devices, dtype, mode and context, and how many layers a prompt of `prompt` tokens
    offloads.
    """
    group, models = engine.group, engine.runtime
    if group.device.type == "cuda":
        where = f"{group.size} x {torch.cuda.get_device_name(group.device)}"
    else:
        threads = torch.get_num_threads()
        where = f"{group.size} x CPU with {counted(threads, 'thread')}"
    dtype = dtype_name(models.dtype)
    config, full = models.target.config, models.target.config.full_layers
    offloaded = plan.layers_on_host if plan is not None else 0
    modes = models.requirements.candidate_modes if offloaded else [models.mode]
    line = f"{where}; {dtype}, {' or '.join(modes)}, context {engine.context:,}"
    needs = models.requirements
    if needs.draft is not None and needs.draft.is_predictor:
        line += "; the model's own multi-token-prediction block drafts"
    if needs.target.kept_types:
        packed, whole = needs.weight_bytes / 1e9, whole_weight_bytes(needs) / 1e9
        each = " per GPU" if group.size > 1 else ""
        line += f"; weights packed, {packed:.2f} GB{each} ({whole:.2f} in {dtype})"
    if plan is None:
        return line
    line += f"; at {prompt:,} prompt tokens, KV of {offloaded} of {full} layers in host memory"
    if split := plan.memory.split_layers:
        line += f", {split} of them split, with high bytes on the device"
    if windowed := windowed_layers(config):
        line += f"; {windowed} layers have a sliding window"
    if recurrent := recurrent_layers(config):
        line += f"; {recurrent} layers have a recurrent state"
    return line


def counts_line(record: Mapping[str, Any], seconds: float | None = None) -> str:
    """Return how much was read and written in which time, in words for everybody.

    `record` has the counts of a request (`Stats.as_dict`), or of a document, which took `seconds`:
    the times of requests that were processed together have no sum.
    """
    is_sum = record["concurrency"] > 1 and not {"answers", "parts"}.isdisjoint(record)
    read, written = "read", "written"
    if not is_sum:
        read += f" in {duration(record['time_to_first_token_s'])}"
        if milliseconds := record["ms_per_token"]:
            written += f" in {duration(record['decode_s'])} ({1e3 / milliseconds:.1f} per second)"
    counts = {"in the cache": record["reused_tokens"], "loaded from disk": record["loaded_tokens"]}
    counts = {what: count for what, count in counts.items() if count}
    counts[read] = record["prompt_tokens"] - sum(counts.values())
    counts[written] = record["new_tokens"]
    (first, count), *others = counts.items()
    parts = [f"{counted(count, 'token')} {first}", *(f"{own:,} {what}" for what, own in others)]
    line = ", ".join(parts)
    return f"{line}, in {duration(seconds)}" if is_sum and seconds is not None else line


def stats_line(record: Mapping[str, Any]) -> str:
    """Return the same with what explains the speed of decoding, for those who tune it."""
    parts = [counts_line(record)]
    tokens = record["tokens_per_verification"]
    if tokens is not None and record["mode"] != "plain":
        parts.append(f"{tokens:.2f} tokens per verification")
    if link_bytes := record["link_bytes_per_token"]:
        parts.append(f"{link_bytes / 1e6:.1f} MB/token over the host link")
    return ", ".join(parts)
