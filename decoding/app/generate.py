"""One text on the terminal, as it is verified."""

from __future__ import annotations

import sys
from pathlib import Path

from decoding.app.documents import Document
from decoding.app.interrupts import Interrupts, culprit
from decoding.app.lines import describe, say_what_fits
from decoding.app.options import Common
from decoding.app.progress import Display
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
    warned = False

    def progress(done: int, total: int) -> None:
        nonlocal warned
        display.prefill(done, total)
        if engine.stats.dropped_tokens and not warned:
            warned = True
            display.warn(
                f"longer than the context of {engine.context} tokens; the first "
                f"{engine.stats.dropped_tokens} tokens were dropped"
            )

    display.begin("prompt")
    for piece in engine.stream(text, new, sampling, progress):
        display.stop()  # the text takes over the terminal
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    display.end(describe(engine.stats))
