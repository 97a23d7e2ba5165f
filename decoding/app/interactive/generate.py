"""One text on the terminal, as it is verified."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from decoding.app.batch.documents import MAX_BYTES, Document, decoded
from decoding.app.options import Common
from decoding.app.terminal.files import check_json_suffix, check_writable, write_json
from decoding.app.terminal.messages import say_what_fits, summary_line
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import silence_transformers, warn, without_controls
from decoding.engine.engine import Engine, Progress
from decoding.text.prompt import Template
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup

PROMPT = "prompt"  # what the one text is called
STDIN = Path("-")


def run(
    common: Common,
    file: Path | None,
    text: str | None,
    chat: bool,
    stats: Path | None,
    interrupts: Interrupts,
) -> None:
    """Continue a text, or what a file holds, or answer it with `chat`; all ranks call it.

    What it took is written to the JSON file `stats`. Raises TierForceError for what keeps it from
    it.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    with group.sync_errors():
        prompt = _read(file, group.size) if file is not None else text or ""
        if stats is not None and group.rank == 0:
            check_writable("--stats", stats)
            check_json_suffix("--stats", stats)
    engine = Engine.from_pretrained(common.model, common.draft, common.settings, group=group)
    if chat:
        with group.sync_errors():
            Template.chat(engine.tokenizer)  # which refuses before anything is said
    say_what_fits(engine, None, common)
    if group.rank:
        engine.run_worker()
        return
    with Display(1, sys.stderr) as display:
        interrupts.stop_first(display.stop)
        sampling, new = common.sampling, common.max_new_tokens
        name = file.name if file is not None else PROMPT
        generate(
            engine, partial(engine.stream, prompt, new, sampling, chat=chat, name=name), display
        )
        if stats is not None:
            content = {**engine.stats.as_dict(), "token_ids": engine.stats.token_ids}
            write_json("--stats", stats, content)
    engine.close()


def _read(file: Path, ranks: int) -> str:
    """Return the text of a file, or of standard input for `-`. Raises TierForceError."""
    if file != STDIN:
        return Document(file.name, file, 0).read()
    if sys.stdin is None:
        raise TierForceError("--prompt-file - is standard input, which is closed.")
    if ranks > 1:  # a launcher keeps it from its ranks
        raise TierForceError("--prompt-file - is standard input, which several GPUs do not get.")
    text = decoded(sys.stdin.buffer.read(MAX_BYTES + 1))
    if not text.strip():
        raise TierForceError("standard input is empty.")
    return text


def generate(engine: Engine, pieces: Callable[[Progress], Iterator[str]], display: Display) -> None:
    """Write pieces to standard output; progress, warnings and what it took go to `display`."""
    warned = False

    def progress(done: int, total: int) -> None:
        nonlocal warned
        display.prefill(PROMPT, done, total)
        if engine.stats.truncated_tokens and not warned:
            warned = True
            display.warn(
                f"longer than the context of {engine.context} tokens; the first "
                f"{engine.stats.truncated_tokens} tokens were dropped"
            )

    display.begin(PROMPT)
    print_stream(pieces(progress), display)
    display.end(PROMPT, summary_line(engine.stats))


def print_stream(
    pieces: Iterable[str], display: Display, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Write pieces to standard output as they come, and a line's end, until it `is_stopped`."""
    for piece in pieces:
        display.stop()  # the text takes over the terminal
        _write(piece)
        if is_stopped():
            break
    _write("\n")


def _write(text: str) -> None:
    """Write to standard output at once. Raises TierForceError where it cannot be.

    A terminal does not get what would steer it; a file or a pipe gets all.
    """
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
