"""`chat` and `prefill`: a conversation, optionally about a document."""

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

from rich.console import Console

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.interactive.chat_session import Chat
from decoding.app.interactive.generate import print_stream, read_file
from decoding.app.options import Common, as_flags
from decoding.app.terminal.files import check_writable, write_json
from decoding.app.terminal.loading import load_engine
from decoding.app.terminal.markdown import MarkdownWriter
from decoding.app.terminal.messages import say_what_fits, stats_line
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import DOUBLE_INTERRUPT_S, Interrupts
from decoding.app.terminal.streams import say, silence_transformers, warn, write
from decoding.engine.engine import Engine
from decoding.prefix_cache.store import MIN_TOKENS
from decoding.text.encoding import plain_tokens
from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.ranks.environment import RankLost
from parallel.ranks.launch import answer_signals
from parallel.ranks.process_group import TensorParallelGroup

HELP = """/document FILE   start over, about this document
/save FILE       write the conversation to a JSON file
/load FILE       continue a saved conversation
/raw             show the last answer with its markup
/stats           show times and counts of the last answer
/clear           start over, with the same document
/quit            quit, as does Ctrl-D
Ctrl-C ends an answer. A message of several lines starts and ends with \"\"\".
To send a message that starts with /, write //."""
QUOTES = '"""'  # around a message of several lines
_READ_ALL = "`tierforce ask` and `tierforce summarize` read all of it, in parts"


@dataclass
class Terminal:
    """A chat loop: lines from standard input are answered on standard output."""

    chat: Chat
    interrupts: Interrupts
    is_stopped: bool = False  # the current answer
    stopped_at: float = 0.0  # seconds, by time.monotonic

    def run(self) -> None:
        """Answer lines until the input ends."""
        self.interrupts.answers[signal.SIGINT] = self._on_interrupt
        answer_signals(signal.SIGINT)
        commands: dict[str, Callable[[str], None]] = {
            "/document": self._read_document,
            "/save": self._save,
            "/load": self._load,
            "/raw": self._show_raw,
            "/stats": self._stats,
            "/clear": lambda _: self.chat.clear(),
            "/help": lambda _: _print_help(),
        }
        try:
            for line in _input_lines(self.chat.engine):
                name, _, rest = line.partition(" ")
                if name == "/quit":
                    return
                if not line.startswith("/") or line.startswith("//"):
                    question = line.removeprefix("/") if line.startswith("//") else line
                    _report_errors(self._answer, question)
                elif name in commands:
                    _report_errors(commands[name], rest.strip())
                else:
                    say(f"{name} is not a command: see /help, or write //... to send a message")
        finally:
            self.interrupts.answers.clear()

    def _answer(self, question: str) -> None:
        self.is_stopped = False
        with Display(1, sys.stderr) as display:
            display.begin("answer")
            with closing(self.chat.ask(question, partial(display.prefill, "answer"))) as pieces:
                console = Console(file=sys.stdout)
                if not sys.stdout.isatty() or console.is_dumb_terminal:
                    print_stream(pieces, display, lambda: self.is_stopped)
                    return
                with closing(MarkdownWriter(console)) as writer:
                    print_stream(pieces, display, lambda: self.is_stopped, writer.write)

    def _on_interrupt(self) -> bool:
        """Stop the answer; return False, which ends the process, if that takes too long.

        Called on the thread of `Interrupts`.
        """
        if not self.chat.engine.scheduler.is_busy:
            say("")
            say("/quit or Ctrl-D quits")
            sys.stdout.write(_prompt())
            sys.stdout.flush()
            return True
        now = time.monotonic()
        if not self.is_stopped:
            self.is_stopped, self.stopped_at = True, now
        return now - self.stopped_at < DOUBLE_INTERRUPT_S

    def _read_document(self, name: str) -> None:
        if not name:
            raise TierForceError("/document needs a file name: /document FILE.")
        path, self.is_stopped = _expand_user(name), False
        with self.chat.engine.keep_workers_alive():
            text = read_file(path)
        self.chat.set_document(text, path.name)
        warn_of_truncation(self.chat)
        _prefill_document(self.chat, path.name)

    def _show_raw(self, _: str) -> None:
        if not self.chat.messages:
            raise TierForceError("there is no answer yet.")
        write(self.chat.messages[-1]["content"] + "\n")

    def _save(self, name: str) -> None:
        if not name:
            raise TierForceError("/save needs a file name: /save FILE.")
        path = _expand_user(name)
        check_writable("/save", path)
        if path.exists():
            read_conversation(path)  # raises for other files, which must not be overwritten
        write_json("/save", path, {"messages": self.chat.messages})
        say(f"saved {len(self.chat.messages)} messages to {name}")

    def _load(self, name: str) -> None:
        turns = read_conversation(_expand_user(name))
        self.chat.restore(turns)
        say(f"loaded {len(turns)} questions and answers from {name}")

    def _stats(self, _: str) -> None:
        stats = self.chat.engine.stats
        line = stats_line(stats.as_dict())
        if stats.discarded_tokens:
            line += f"; {stats.discarded_tokens} cached tokens discarded since the prompt differs"
        say(line)


def run(common: Common, document: Path | None, system: str | None, interrupts: Interrupts) -> None:
    """Chat on the terminal; all ranks call it. Raises TierForceError on failure."""
    with _open_chat(common, document, system) as chat:
        if chat is None:
            return
        if document is not None:
            _prefill_document(chat, document.name)
        say("/help lists the commands")
        Terminal(chat, interrupts).run()


def prefill(common: Common, document: Path, system: str | None) -> None:
    """Prefill a document and store it; all ranks call it. Raises TierForceError on failure."""
    with _open_chat(common, document, system) as chat:
        if chat is None:
            return
        _prefill_document(chat, document.name)
    is_short = len(chat.tokens) < MIN_TOKENS
    if is_short or not chat.engine.sessions.is_cached(chat.tokens, chat.max_new_tokens):
        reason = f": prefilling {len(chat.tokens)} tokens again is as fast" if is_short else ""
        raise TierForceError(f"{document.name} was prefilled, but not stored{reason}.")
    say(f"{document.name} is stored in {common.settings.prompt_cache}")


def _print_help() -> None:
    for line in HELP.splitlines():
        say(line)


def read_conversation(path: Path) -> list[tuple[str, str]]:
    """Return the questions and answers in a file that /save wrote. Raises TierForceError."""
    try:
        saved: Any = read_json(path, MAX_BYTES)
        roles = [message["role"] for message in saved["messages"]]
        contents = [message["content"] for message in saved["messages"]]
        for content in contents:
            content.encode()
    except OSError as error:
        raise TierForceError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TierForceError(f"{path} is not a conversation that /save wrote.") from error
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise TierForceError(f"{path} is not a conversation: user and assistant do not alternate.")
    return list(zip(contents[::2], contents[1::2], strict=True))


@contextmanager
def _open_chat(common: Common, document: Path | None, system: str | None) -> Iterator[Chat | None]:
    """Load the models; yield the chat on rank 0, and None on other ranks once rank 0 is done."""
    engine, chat, _ = load_chat(common, document, system)
    with conversation(engine, chat, common) as opened:
        yield opened


def load_chat(
    common: Common, document: Path | None, system: str | None, added: str = ""
) -> tuple[Engine, Chat | None, str]:
    """Load the models; return them, on rank 0 the chat, and the text of the document.

    `added`: the text that is added to every question.
    """
    silence_transformers()
    group = TensorParallelGroup.from_environment(common.device, warn)
    text: str | None = None
    with group.sync_errors():
        if document is not None and group.rank == 0:
            text = read_file(document)
    engine = load_engine(common, group)
    chat: Chat | None = None
    with group.sync_errors():
        if group.rank == 0:
            name = document.name if document else ""
            room = len(plain_tokens(engine.tokenizer, added))
            options = common.max_new_tokens, common.sampling
            chat = Chat(engine, *options, text, name, system, room)
    return engine, chat, text or ""


@contextmanager
def conversation(
    engine: Engine,
    chat: Chat | None,
    common: Common,
    hint: str = _READ_ALL,
) -> Iterator[Chat | None]:
    """Yield the chat on rank 0, and None on other ranks once rank 0 is done; close the engine.

    `hint` is for those whose document is truncated.
    """
    say_what_fits(engine, None, common)
    if chat is None:
        engine.run_worker()
        yield None
        return
    warn_of_truncation(chat, hint)
    with engine.conversation():
        yield chat
    engine.close()


def warn_of_truncation(chat: Chat, hint: str = _READ_ALL) -> None:
    """Warn about a document that is too long for the context."""
    if chat.truncated_tokens:
        warn(
            f"the document is too long for the context of {chat.engine.context:,} tokens: its last "
            f"{chat.truncated_tokens:,} tokens were dropped ({hint})"
        )


def _prefill_document(chat: Chat, name: str) -> None:
    """Prefill the document, with a progress bar."""
    with Display(1, sys.stderr) as display:
        display.begin(name)
        chat.prefill(partial(display.prefill, name))
        stats = chat.engine.stats
        line = f"{stats.prompt_tokens:,} tokens prefilled in {stats.first_token_s:.1f} s"
        if stats.loaded_tokens:
            line += f" ({stats.loaded_tokens:,} loaded from disk)"
        display.end(name, f"{name}: {line}")


def _input_lines(engine: Engine) -> Iterator[str]:
    """Yield the non-empty lines of standard input, stripped."""
    if sys.stdin is None:
        return
    prompt = _prompt()
    if prompt:
        with suppress(ImportError):  # optional: line editing
            import readline  # noqa: F401
    with suppress(AttributeError):  # a line that is not UTF-8 is skipped, and the chat goes on
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    while (message := _message(engine, prompt)) is not None:
        try:
            message.encode()
        except UnicodeEncodeError:
            say("that line is not UTF-8")
            continue
        if message:
            yield message


def _message(engine: Engine, prompt: str) -> str | None:
    """Return what is entered next: a line, or several in quotes; None at the end of the input."""
    lines, is_quoted = list[str](), False
    with engine.keep_workers_alive(), suppress(EOFError):
        lines.append(input(prompt).strip())
        # quotes that end within the line are a part of it
        if is_quoted := lines[0].startswith(QUOTES) and QUOTES not in lines[0][3:-3]:
            lines[0] = lines[0].removeprefix(QUOTES)
            while not lines[-1].endswith(QUOTES):
                lines.append(input(prompt and "... ").rstrip())
            lines[-1] = lines[-1].removesuffix(QUOTES)
    message = "\n".join(lines)
    message = message.strip("\n") if is_quoted else message.strip()
    if is_quoted and message.startswith("/"):
        message = f"/{message}"  # not a command
    return message if lines else None


def _expand_user(name: str) -> Path:
    """Return the path of a typed name, expanding ~ as a shell does. Raises TierForceError."""
    if "\0" in name:
        raise TierForceError("a file name has no NUL characters.")
    return Path(os.path.expanduser(name))


def _prompt() -> str:
    """Return the prompt for a line; empty if input or output is a file or a pipe."""
    return "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""


def _report_errors(action: Callable[[str], None], argument: str) -> None:
    """Run a command of the chat, and print its error unless a rank is lost."""
    try:
        action(argument)
    except RankLost:
        raise
    except TierForceError as error:
        say(as_flags(str(error)))
