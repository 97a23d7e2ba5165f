"""Grammars that an answer must match: JSON schemas, regular expressions, and Lark grammars.

llguidance follows them token by token (github.com/guidance-ai/llguidance). It refuses what it does
not support of JSON Schema, and never ignores it.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from decoding.grammars.check import error_of
from decoding.grammars.checker import MAX_ITEMS
from decoding.text.encoding import check_whole_characters
from decoding.text.tools.channels import CHANNEL, END, FINAL, MESSAGE, START, has_channels
from offload.errors import InvalidRequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 1 << 20  # the longest grammar
# between the parts of a JSON text, as printers indent it: some models go on with blanks without end
_BLANKS = r"( |\n[ \t]{0,20})?"
_CACHED = 8  # grammars
_POSITION = re.compile(r" at line \d+ column \d+")  # in what llguidance gets, not in the source
# without it, llguidance allows one of several tokens where the grammar leaves one string
ALL_TOKENS = '%llguidance {"no_forcing": true}'
_ANSWER = "start: @answer"
CUT = (
    "the answer was cut before its JSON was complete: use more `max_new_tokens`, or limit its "
    "strings and arrays in the schema (maxLength, maxItems)."
)


@dataclass(frozen=True)
class Grammar:
    """What an answer must match: a JSON schema, or a grammar in Lark's syntax.

    Args:
        source: the text of either.
        is_schema: whether it is a JSON schema.
    """

    source: str
    is_schema: bool = True

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """Return the grammar of JSON that is valid under a schema.

        Raises InvalidRequestError for one that is nested too deeply.
        """
        try:
            return cls(json.dumps(schema, ensure_ascii=False))
        except RecursionError:
            raise InvalidRequestError("the JSON schema is nested too deeply.") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """Return the grammar of these strings. Raises InvalidRequestError if there are none."""
        if not options:
            raise InvalidRequestError("a choice needs at least one string.")
        # as one terminal, which may have many more alternatives than a rule
        return cls(f"start: ANSWER\nANSWER: {' | '.join(map(quoted, options))}", is_schema=False)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of strings that match all of a regular expression (Rust's syntax)."""
        from llguidance import regex_to_lark

        return cls(f"start: /{regex_to_lark(pattern)}/", is_schema=False)

    def check(self) -> None:
        """Raise InvalidRequestError for an invalid or unsupported grammar, without a tokenizer."""
        if len(self.source) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"the {self._kind} has {len(self.source):,} characters, more than "
                f"{MAX_CHARACTERS:,}: use a smaller one."
            )
        check_whole_characters(self.source)
        try:
            composed = self.compose(in_channels=False)
        except RecursionError:
            raise self.error("it is nested too deeply") from None
        except ValueError as error:
            raise self.error(f"it is not JSON ({one_line(error)})") from error
        if reason := error_of(composed):
            raise self.error(_POSITION.sub("", reason) if self.is_schema else reason)

    def checked(self) -> Grammar:
        """Return the grammar that answers follow: this one. Raises as `check`."""
        self.check()
        return self

    def compose(self, in_channels: bool) -> str:
        """Return it in the format of llguidance.

        Raises ValueError or RecursionError for text that is not JSON.

        `in_channels`: for answers in gpt-oss's response format.
        """
        start = answer_in_channels("@answer") if in_channels else _ANSWER
        return as_llguidance(f"{ALL_TOKENS}\n{start}", {"answer": self})

    def definition(self) -> dict[str, Any]:
        """Return it as a named grammar of llguidance's. Raises as `compose`."""
        if not self.is_schema:
            return {"lark_grammar": self.source}
        schema = json.loads(self.source, parse_constant=_not_json)
        if schema is True:
            schema = {}
        if isinstance(schema, dict):  # in place of any such options of its own
            schema = {**schema, "x-guidance": {"whitespace_pattern": _BLANKS}}
        return {"json_schema": schema}

    @property
    def _kind(self) -> str:
        return "JSON schema" if self.is_schema else "grammar"

    def error(self, message: str) -> InvalidRequestError:
        """Return the error of a grammar that cannot be followed."""
        reason = " ".join(message.split())[:300]
        return InvalidRequestError(
            f"the {self._kind} is invalid, or has what is not supported: {reason}."
        )


def answer_in_channels(final: str, calls: str = "", marker: Callable[[str], str] = str) -> str:
    """Return the rules of an answer in gpt-oss's response format, in Lark's syntax.

    Reasoning is free. The last message is `calls`, or it has `final` and is in the final channel;
    an empty string is none of these. With calls no other message has a recipient. `marker` returns
    a marker as a token, or as a string.
    """
    start, channel, message, end = map(marker, (START, CHANNEL, MESSAGE, END))
    last = [calls] if calls else []
    if final:
        last.append(f"{channel} {quoted(FINAL)} {message} {final}")
    excluded = " & ~/.*to=.*/" if calls else ""
    rules = [
        f"start: reasoning* ({' | '.join(last)})",
        f'reasoning: {channel} HEADER {message} TEXT {end} {start} "assistant"',
        rf"HEADER: /(analysis|commentary)[^\n]*/{excluded}",
        r"TEXT: /(.|\n)*/",
    ]
    return "\n".join(rules)


def as_llguidance(start: str, grammars: Mapping[str, Grammar]) -> str:
    """Return a grammar in llguidance's format: `start` in Lark's syntax, and others that it names.

    Raises ValueError or RecursionError for a schema that is not JSON.
    """
    named = [{"name": name, **each.definition()} for name, each in grammars.items()]
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": start}, *named]})


def json_value(answer: str, finish_reason: str | None) -> Any:
    """Return the value of an answer in JSON.

    Raises InvalidRequestError for one that was cut, and for a number that Python cannot hold.
    """
    if finish_reason == "length":
        raise InvalidRequestError(CUT)
    try:
        return json.loads(answer, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the answer's JSON cannot be read ({one_line(error)})."
        ) from None


def quoted(text: str) -> str:
    """Return a string in Lark's syntax: as in JSON, but with all control characters as escapes."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(
        each if each.isprintable() or ord(each) > 0xFFFF else f"\\u{ord(each):04x}"
        for each in quoted
    )


def _not_json(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:40]} is too large")
    return number


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for a tokenizer; any number of requests use it."""

    grammar: Grammar
    start: LLMatcher  # at the beginning of an answer; copied for each request
    stop_tokens: Set[int]
    vocab: int  # tokens in the matcher's masks


class GrammarCompiler:
    """Compiles grammars for the tokenizer of a model, on any thread."""

    def __init__(self, tokenizer: Any, vocab: int, stop_tokens: Set[int]):
        """Prepare for a model with `vocab` tokens, some of which end an answer."""
        self._tokenizer, self._model_vocab, self._stop_tokens = tokenizer, vocab, stop_tokens
        self._compiled: dict[Grammar, CompiledGrammar] = {}  # the latest last
        self._own: LLTokenizer | None = None
        self._has_channels = False
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a compiled grammar, from the latest ones if it is among them.

        Raises InvalidRequestError for one that is invalid or unsupported, and for a tokenizer that
        is.
        """
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is not None:  # now the latest
                self._compiled[grammar] = compiled
                return compiled
        followed = grammar.checked()
        tokenizer = self.prepare()
        composed = followed.compose(self._has_channels)
        limits = LLParserLimits(max_items_in_row=MAX_ITEMS, verbose_errors=False)
        matcher = LLMatcher(tokenizer, composed, log_level=0, limits=limits)
        if matcher.is_error():
            raise grammar.error(matcher.get_error())
        compiled = CompiledGrammar(grammar, matcher, self._stop_tokens, tokenizer.vocab_size)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _CACHED:
                del self._compiled[next(iter(self._compiled))]
        return compiled

    def compile_optional(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """Return None for None; otherwise as `compile`."""
        return None if grammar is None else self.compile(grammar)

    def prepare(self) -> LLTokenizer:
        """Return llguidance's form of the tokenizer, which takes a second to make at first.

        Only this uses the tokenizer, which others must not use meanwhile. Raises
        InvalidRequestError for one without.
        """
        from llguidance import LLTokenizer

        with self._lock:
            if self._own is None:
                try:
                    backend = copy.copy(self._tokenizer.backend_tokenizer)
                    backend.no_padding()
                    backend.no_truncation()
                    vocab, known = self._model_vocab, len(self._tokenizer)
                    # others are allowed by `GrammarMask`
                    stops = [token for token in sorted(self._stop_tokens) if token < known]
                    self._has_channels = has_channels(self._tokenizer)
                    self._own = LLTokenizer(
                        backend.to_str(), n_vocab=max(vocab, known), eos_token=stops
                    )
                except (AttributeError, ValueError) as error:
                    raise InvalidRequestError(
                        f"grammars do not work with this model's tokenizer ({one_line(error)})."
                    ) from error
            return self._own
