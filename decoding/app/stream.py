"""One text on the terminal, as it is verified."""

from __future__ import annotations

import sys

import torch
from transformers import TextStreamer

from decoding.app.progress import Display
from decoding.app.prompt import Template
from decoding.engine import Engine
from decoding.speculation.sampling import Sampling
from decoding.stats import Stats
from offload.memory_plan import MemoryPlan


def stream(engine: Engine, text: str, new: int, sampling: Sampling, display: Display) -> None:
    """Continue `text` on standard output; progress, warnings and what it took go to `display`."""
    prompt, dropped = Template.plain(engine.tokenizer).fill(
        engine.tokenizer, text, engine.context - new, keep_end=True
    )
    printer = TextStreamer(engine.tokenizer, skip_special_tokens=True)
    if dropped:
        display.warn(
            f"longer than the context of {engine.context} tokens; the first {dropped} tokens were "
            "dropped"
        )
    display.begin("prompt")
    for token in engine.generate(prompt, new, sampling, display.prefill):
        if engine.stats.new_tokens == 1:
            display.stop()  # the text takes over the terminal
        printer.put(torch.tensor([token]))
    printer.end()
    sys.stdout.flush()
    display.end(describe(engine.stats))


def opening(engine: Engine, prompt: int, place: MemoryPlan | None) -> str:
    """Say what runs where: devices, dtype, mode, context, and where the layers of a prompt of so
    many tokens go.
    """
    group, models = engine.group, engine.runtime
    if group.device.type == "cuda":
        where = f"{group.size} x {torch.cuda.get_device_name(group.device)}"
    else:
        where = f"{group.size} x CPU with {torch.get_num_threads()} threads"
    dtype = str(models.dtype).removeprefix("torch.")
    line = f"{where}; {dtype}, {models.mode}, context {engine.context:,}"
    if place is None:
        return line
    layers = models.target.config.layers
    return (
        f"{line}; at {prompt:,} prompt tokens {layers - place.resident_layers} of {layers} layers "
        "are on the host"
    )


def describe(stats: Stats) -> str:
    """What a text took, in one line."""
    parts = [
        f"{stats.prompt_tokens} tokens read in {stats.first_token_s:.1f} s, {stats.new_tokens} "
        "written"
    ]
    if stats.ms_per_token is not None:
        parts.append(f"{stats.ms_per_token:.1f} ms/token")
    if stats.tokens_per_verification is not None and stats.mode != "plain":
        parts.append(f"{stats.tokens_per_verification:.2f} tokens per verification")
    if stats.link_bytes_per_token:
        parts.append(f"{stats.link_bytes_per_token / 1e6:.1f} MB per token over the link")
    return ", ".join(parts)
