"""Grammars that an answer must match: JSON schemas, regular expressions, and Lark grammars.

llguidance follows them token by token (github.com/guidance-ai/llguidance). It refuses what it does
not support of JSON Schema, and never ignores it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from decoding.text.channels import has_channels
from offload.errors import InvalidRequestError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 1 << 20  # the longest grammar
# between the parts of a JSON text, as printers indent it: some models go on with blanks without end
_BLANKS = r"( |\n[ \t]{0,20})?"
_CACHED = 16  # grammars
# without it, llguidance allows one of several tokens where the grammar leaves one string
_ALL_TOKENS = '%llguidance {"no_forcing": true}'
_ANSWER = "start: @answer"
CUT = (
    "the answer reached `max_new_tokens` before its JSON was complete: use more, or limit its "
    "strings and arrays in the schema (maxLength, maxItems)."
)
# an answer in gpt-oss's response format: reasoning is free, and the final channel has the answer
_IN_CHANNELS = r"""
start: reasoning* <|channel|> "final" <|message|> @answer
reasoning: <|channel|> /(analysis|commentary)[^\n]*/ <|message|> TEXT <|end|> <|start|> "assistant"
TEXT: /(.|\n)*/
"""


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
        """Return the grammar of JSON that is valid under a schema."""
        return cls(json.dumps(schema, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """Return the grammar of these strings."""
        quoted = (json.dumps(option, ensure_ascii=False) for option in options)
        return cls(f"start: {' | '.join(quoted)}", is_schema=False)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of strings that match all of a regular expression (Rust's syntax)."""
        from llguidance import regex_to_lark

        return cls(f"start: /{regex_to_lark(pattern)}/", is_schema=False)

    def check(self) -> None:
        """Raise InvalidRequestError for an invalid or unsupported grammar, without a tokenizer."""
        from llguidance import LLMatcher

        if len(self.source) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"the {self._kind} has {len(self.source):,} characters, more than "
                f"{MAX_CHARACTERS:,}: use a smaller one."
            )
        try:
            is_invalid, messages = LLMatcher.validate_grammar_with_warnings(self.compose(False))
        except (ValueError, RecursionError) as error:
            is_invalid, messages = True, [str(error)]
        if is_invalid:
            raise self._error(messages[0])

    def compose(self, in_channels: bool) -> str:
        """Return it in the format of llguidance.

        Raises ValueError or RecursionError for text that is not JSON.

        `in_channels`: for answers in gpt-oss's response format.
        """
        own: dict[str, Any] = {"lark_grammar": self.source}
        if self.is_schema:
            schema = json.loads(self.source)
            if schema is True:
                schema = {}
            if isinstance(schema, dict):  # in place of any such options of its own
                schema = {**schema, "x-guidance": {"whitespace_pattern": _BLANKS}}
            own = {"json_schema": schema}
        start = f"{_ALL_TOKENS}\n{_IN_CHANNELS if in_channels else _ANSWER}"
        grammars = [{"name": "start", "lark_grammar": start}, {"name": "answer", **own}]
        return json.dumps({"grammars": grammars})

    @property
    def _kind(self) -> str:
        return "JSON schema" if self.is_schema else "grammar"

    def _error(self, message: str) -> InvalidRequestError:
        reason = " ".join(message.split())[:300]
        return InvalidRequestError(
            f"the {self._kind} is invalid, or has what is not supported: {reason}."
        )


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
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a compiled grammar, from the latest ones if it is among them.

        Raises InvalidRequestError for one that is invalid or unsupported, and for a tokenizer that
        is.
        """
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                grammar.check()
                limits = LLParserLimits(verbose_errors=False)
                composed = grammar.compose(has_channels(self._tokenizer))
                matcher = LLMatcher(self._ll_tokenizer(), composed, log_level=0, limits=limits)
                if matcher.is_error():
                    raise grammar._error(matcher.get_error())
                vocab = self._ll_tokenizer().vocab_size
                compiled = CompiledGrammar(grammar, matcher, self._stop_tokens, vocab)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _CACHED:
                del self._compiled[next(iter(self._compiled))]
            return compiled

    def compile_optional(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """Return None for None; otherwise as `compile`."""
        return None if grammar is None else self.compile(grammar)

    def _ll_tokenizer(self) -> LLTokenizer:
        """Return llguidance's form of the tokenizer, which takes a second to make."""
        from llguidance import LLTokenizer

        if self._own is None:
            try:
                backend = copy.copy(self._tokenizer.backend_tokenizer)
                backend.no_padding()
                backend.no_truncation()
                vocab, stops = (
                    max(self._model_vocab, len(self._tokenizer)),
                    sorted(self._stop_tokens),
                )
                self._own = LLTokenizer(backend.to_str(), n_vocab=vocab, eos_token=stops)
            except (AttributeError, ValueError) as error:
                raise InvalidRequestError(
                    f"grammars do not work with this model's tokenizer ({one_line(error)})."
                ) from error
        return self._own
