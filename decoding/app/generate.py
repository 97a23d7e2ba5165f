"""One text on the terminal, as it is verified."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import TextStreamer

from decoding.app.documents import Document
from decoding.app.interrupts import Interrupts, culprit
from decoding.app.lines import describe, say_what_fits
from decoding.app.options import Common
from decoding.app.progress import Display
from decoding.app.prompt import Template
from decoding.app.terminal import say, silence_transformers
from decoding.engine import Engine
from decoding.speculation.sampling import Sampling
from parallel.group import Group


def run(common: Common, file: Path | None, text: str | None, interrupts: Interrupts) -> None:
    """Continue the text of `file`, or the text itself; every rank calls it."""
    silence_transformers()
    group = Group.from_environment(common.device)
    with group.together():
        prompt = text or ""
        if file is not None:
            prompt = Document(file.name, file, 0).read()
    engine = Engine.from_pretrained(common.model, common.draft, common.settings, group=group)
    say_what_fits(engine, None, common)
    if group.rank:
        engine.follow()
        return
    with Display(1, sys.stderr) as display:

        def last_words(name: str) -> None:
            display.stop()
            say(f"interrupted ({culprit(name)})")

        interrupts.last_words = last_words
        sampling = Sampling(**vars(common.sampling))
        stream(engine, prompt, common.max_new_tokens, sampling, display)
    engine.close()


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
