"""`generate`: one request, printed as its tokens are verified."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from decoding.app.documents.document import Document, decode_input
from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.options import Common
from decoding.app.terminal.files import check_overwrite, check_writable, write_json
from decoding.app.terminal.loading import load_engine
from decoding.app.terminal.messages import counts_line, say_what_fits
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import silence_transformers, warn, write
from decoding.engine.engine import Engine, Progress
from decoding.grammars.grammar import CUT, Grammar
from decoding.text.prompt import Template
from offload.errors import InvalidRequestError, TierForceError, TruncatedPromptWarning
from parallel.ranks.process_group import TensorParallelGroup

PROMPT = "prompt"  # name of the request in progress and warnings
STDIN = Path("-")


def run(
    common: Common,
    file: Path | None,
    text: str | None,
    chat: bool,
    stats: Path | None,
    schema: str | None,
    interrupts: Interrupts,
) -> None:
    """Continue a prompt, `text` or the contents of `file`, or answer it with `chat`; all ranks call
    it.

    With a JSON schema the answer is JSON that is valid under it. Times and counts are written to
    the JSON file `stats`. Raises TierForceError on failure.
    """
    silence_transformers()
    warnings.simplefilter("ignore", TruncatedPromptWarning)  # `generate` has its own
    group = TensorParallelGroup.from_environment(common.device, warn)
    with group.sync_errors():
        prompt = text or ""
        if file is not None and group.rank == 0:
            prompt = _read_prompt(file, group.size)
        if stats is not None and group.rank == 0:
            check_writable("--stats", stats)
            check_overwrite("--stats", stats)
    engine = load_engine(common, group)
    grammar = None if schema is None else Grammar(schema)
    with group.sync_errors():  # raises before anything is printed
        engine.grammars.compile_optional(grammar)
        if chat:
            Template.chat(engine.tokenizer)
    say_what_fits(engine, None, common)
    if group.rank:
        engine.run_worker()
        return
    with Display(1, sys.stderr) as display:
        interrupts.stop_first(display.stop)
        sampling, max_new_tokens = common.sampling, common.max_new_tokens
        name = file.name if file is not None else PROMPT
        stream = partial(engine.stream, prompt, max_new_tokens, sampling, chat=chat, name=name)
        generate(engine, partial(stream, grammar=grammar), display)
        if stats is not None:
            content = {**engine.stats.as_dict(), "token_ids": engine.stats.token_ids}
            write_json("--stats", stats, content)
    engine.close()
    if grammar is not None:
        check_complete(engine)


def _read_prompt(file: Path, ranks: int) -> str:
    """Return the text of a file, or of standard input for `-`. Raises TierForceError."""
    if file != STDIN:
        return read_file(file)
    if sys.stdin is None:
        raise TierForceError("--prompt-file - reads standard input, but it is closed.")
    if ranks > 1:  # a launcher does not pass it to its ranks
        raise TierForceError(
            "--prompt-file - reads standard input, which several GPUs cannot: name a file instead."
        )
    text = decode_input(sys.stdin.buffer.read(MAX_BYTES + 1))
    if not text.strip():
        raise TierForceError("standard input is empty.")
    return text


def read_file(path: Path) -> str:
    """Return the text of a document, and warn about what it lacks. Raises TierForceError."""
    try:
        document = Document(path.name, path).read()
    except InvalidRequestError as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise InvalidRequestError(named) from error
    if document.warning is not None:
        warn(f"{path.name}: {document.warning}")
    return document.text


def generate(engine: Engine, pieces: Callable[[Progress], Iterator[str]], display: Display) -> None:
    """Write pieces to standard output; progress, warnings and the summary go to `display`."""
    has_warned = False

    def progress(done: int, total: int) -> None:
        nonlocal has_warned
        display.prefill(PROMPT, done, total)
        if engine.stats.truncated_tokens and not has_warned:
            has_warned = True
            display.warn(
                f"the prompt is longer than the context of {engine.context} tokens: its first "
                f"{engine.stats.truncated_tokens} tokens were dropped"
            )

    display.begin(PROMPT)
    print_stream(pieces(progress), display)
    display.end(PROMPT, counts_line(engine.stats.as_dict()))


def check_complete(engine: Engine) -> None:
    """Raise InvalidRequestError if the last answer, in JSON, was cut."""
    if engine.stats.finish_reason == "length":
        raise InvalidRequestError(CUT)


def print_stream(
    pieces: Iterable[str],
    display: Display,
    is_stopped: Callable[[], bool] = lambda: False,
    out: Callable[[str], None] = write,
) -> None:
    """Write pieces as they arrive, until `is_stopped`, and a newline; `out` takes each of them."""
    for piece in pieces:
        display.stop()  # leaves the terminal to the text
        out(piece)
        if is_stopped():
            break
    out("\n")
