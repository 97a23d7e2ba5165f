"""`chat` and `ask`: a conversation in the terminal, maybe about a document, and one question."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from decoding.app.batch.documents import MAX_BYTES, Document
from decoding.app.interactive.generate import generate, print_stream
from decoding.app.options import Common, as_flags
from decoding.app.terminal.files import check_writable, write_json
from decoding.app.terminal.messages import say_what_fits, summary_line
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import DOUBLE_INTERRUPT_S, Interrupts
from decoding.app.terminal.streams import say, silence_transformers, warn
from decoding.engine.chat import Chat
from decoding.engine.engine import Engine
from decoding.prefix_cache.store import MIN_TOKENS
from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.ranks.environment import RankLost
from parallel.ranks.launch import answer_signals
from parallel.ranks.process_group import TensorParallelGroup

HELP = """/save FILE   write the conversation to a JSON file
/load FILE   go on with one that was saved
/stats       what the last answer took
/clear       begin anew, with the same document
/quit        leave; Ctrl-D does, too
Ctrl-C ends an answer. What begins with // is a message that begins with /."""


@dataclass
class Terminal:
    """A conversation at the terminal: lines come in, answers go out."""

    chat: Chat
    interrupts: Interrupts
    is_stopped: bool = False  # the answer under way
    stopped_at: float = 0.0  # of the clock, where it is

    def run(self) -> None:
        """Answer line after line, until there are no more."""
        self.interrupts.answers[signal.SIGINT] = self._interrupted
        answer_signals(signal.SIGINT)
        commands: dict[str, Callable[[str], None]] = {
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/clear": lambda _: self.chat.clear(),
            "/help": lambda _: _say_help(),
        }
        try:
            for line in _lines(self.chat.engine):
                name, _, rest = line.partition(" ")
                if name == "/quit":
                    return
                if not line.startswith("/") or line.startswith("//"):
                    question = line.removeprefix("/") if line.startswith("//") else line
                    _report_errors(self._answer, question)
                elif name in commands:
                    _report_errors(commands[name], rest.strip())
                else:
                    say(f"{name} is no command: /help lists them, and //... is a message")
        finally:
            self.interrupts.answers.clear()

    def _answer(self, question: str) -> None:
        self.is_stopped = False
        with Display(1, sys.stderr) as display:
            display.begin("answer")
            with closing(self.chat.ask(question, partial(display.prefill, "answer"))) as pieces:
                print_stream(pieces, display, lambda: self.is_stopped)

    def _interrupted(self) -> bool:
        """End the answer, and where that takes too long everything; on the signals' thread."""
        if not self.chat.engine.is_busy:
            say("")
            say("/quit or Ctrl-D leaves")
            sys.stdout.write(_prompt())
            sys.stdout.flush()
            return True
        now = time.monotonic()
        if not self.is_stopped:
            self.is_stopped, self.stopped_at = True, now
        return now - self.stopped_at < DOUBLE_INTERRUPT_S

    def _save(self, name: str) -> None:
        if not name:
            raise TierForceError("/save needs the name of a file.")
        path = _path(name)
        check_writable("/save", path)
        if path.exists():
            read_conversation(path)  # nothing else is written over
        write_json("/save", path, {"messages": self.chat.messages})
        say(f"saved {len(self.chat.messages)} messages in {name}")

    def _load(self, name: str) -> None:
        turns = read_conversation(_path(name))
        self.chat.restore(turns)
        say(f"{len(turns)} questions and answers from {name}")

    def _stats(self, _: str) -> None:
        stats = self.chat.engine.stats
        before = f"{stats.reused_tokens} tokens were there before"
        if stats.discarded_tokens:
            before += f", and {stats.discarded_tokens} that this prompt has otherwise were not"
        say(f"{summary_line(stats)}; {before}")


def run(common: Common, document: Path | None, interrupts: Interrupts) -> None:
    """Talk at the terminal; all ranks call it. Raises TierForceError for what keeps it from it."""
    with _opened(common, document) as chat:
        if chat is None:
            return
        if document is not None:
            _read(chat, document.name)
        say("/help lists the commands")
        Terminal(chat, interrupts).run()


def ask(common: Common, document: Path | None, question: str, interrupts: Interrupts) -> None:
    """Answer one question on standard output; all ranks call it."""
    with _opened(common, document) as chat, Display(1, sys.stderr) as display:
        if chat is None:
            return
        interrupts.stop_first(display.stop)
        generate(chat.engine, partial(chat.ask, question), display)


def prefill(common: Common, document: Path) -> None:
    """Read a document and keep it; all ranks call it. Raises TierForceError where that fails."""
    with _opened(common, document) as chat:
        if chat is None:
            return
        _read(chat, document.name)
    is_short = len(chat.tokens) < MIN_TOKENS
    if is_short or not chat.engine.sessions.is_cached(chat.tokens, chat.max_new_tokens):
        why = f": {len(chat.tokens)} tokens are read again as soon" if is_short else ""
        raise TierForceError(f"{document.name} was read, and is not kept{why}.")
    say(f"{document.name} is kept in {common.settings.prompt_cache}")


def _say_help() -> None:
    for line in HELP.splitlines():
        say(line)


def read_conversation(path: Path) -> list[tuple[str, str]]:
    """Return questions with their answers, as /save wrote them. Raises TierForceError."""
    try:
        saved: Any = read_json(path, MAX_BYTES)
        roles = [each["role"] for each in saved["messages"]]
        words = [each["content"] for each in saved["messages"]]
        for each in words:
            each.encode()
    except OSError as error:
        raise TierForceError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TierForceError(f"{path} is no conversation that /save has written.") from error
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise TierForceError(f"{path} has messages that are not questions with their answers.")
    return list(zip(words[::2], words[1::2], strict=True))


@contextmanager
def _opened(common: Common, document: Path | None) -> Iterator[Chat | None]:
    """Load the models for a conversation; None on ranks other than 0, once rank 0 is done."""
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    text: str | None = None
    with group.sync_errors():
        if document is not None and group.rank == 0:
            text = Document(document.name, document, 0).read()
    engine = Engine.from_pretrained(common.model, common.draft, common.settings, group=group)
    chat: Chat | None = None
    with group.sync_errors():
        if group.rank == 0:
            name = document.name if document else ""
            chat = Chat(engine, common.max_new_tokens, common.sampling, text, name)
    say_what_fits(engine, None, common)
    if chat is None:
        engine.run_worker()
        yield None
        return
    if chat.truncated_tokens:
        warn(
            f"the document is longer than the context of {engine.context:,} tokens allows: its "
            f"last {chat.truncated_tokens:,} tokens were dropped"
        )
    with engine.conversation():
        yield chat
    engine.close()


def _read(chat: Chat, name: str) -> None:
    """Read the document, with its progress."""
    with Display(1, sys.stderr) as display:
        display.begin(name)
        chat.prefill(partial(display.prefill, name))
        stats = chat.engine.stats
        what = f"{stats.prompt_tokens:,} tokens read in {stats.first_token_s:.1f} s"
        if stats.loaded_tokens:
            what += f", {stats.loaded_tokens:,} of them from disk"
        display.end(name, f"{name}: {what}")


def _lines(engine: Engine) -> Iterator[str]:
    """Yield what is typed, or what stands in a file, line by line."""
    if sys.stdin is None:
        return
    prompt = _prompt()
    if prompt:
        with suppress(ImportError):  # which lets lines be edited
            import readline  # noqa: F401
    with suppress(AttributeError):  # a line that is no text is refused alone
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    while True:
        try:
            with engine.keep_workers_alive():
                line = input(prompt).strip()
        except EOFError:
            return
        try:
            line.encode()
        except UnicodeEncodeError:
            say("that line is not UTF-8")
            continue
        if line:
            yield line


def _path(name: str) -> Path:
    """Return the path of a name as it is typed, with no shell to read it."""
    return Path(os.path.expanduser(name))


def _prompt() -> str:
    """Return what asks a person for a line; nothing for a file or a pipe."""
    return "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""


def _report_errors(do: Callable[[str], None], what: str) -> None:
    """Do something; say what is wrong with it, unless it ends everything."""
    try:
        do(what)
    except RankLost:
        raise
    except TierForceError as error:
        say(as_flags(str(error)))
