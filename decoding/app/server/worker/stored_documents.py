"""Documents at the beginning of prompts in the prompt cache on disk, which another conversation can
go on from.

A prompt on disk is tokens alone. The document is what the first message, rendered by the chat
template, has before its last empty line, which the question follows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from decoding.app.server.worker import limits
from decoding.app.server.worker.prompts import Prompts
from decoding.engine.session_manager import SequenceManager
from decoding.prefix_cache.store import MIN_TOKENS, CachedPrompt
from decoding.text.prompt import JOIN_TOKENS
from offload.errors import TierForceError

_Tokens = npt.NDArray[np.int64]  # (T,)
_EMPTY_LINE = "\n\n"  # between a document and a question
_QUESTION_TOKENS = 1024  # limit of a question that is found; a longer one is a part of the document


@dataclass(frozen=True)
class _Framing:
    """How the chat template begins and ends the first message."""

    before: list[int]  # tokens before its text
    start: int  # index in `before` after its last special token
    header: str  # text of the tokens from there
    end: str  # text after the message
    special: list[int]  # special tokens, of which one follows the message; none: `end` follows it


@dataclass(frozen=True)
class _StoredDocument:
    """A document at the beginning of a stored prompt."""

    prompt: CachedPrompt
    tokens: _Tokens  # the prompt's, up to the end of the message
    length: int  # number of them up to the end of the document
    rest: str  # text from there to the end of the message
    text_tokens: int  # tokens of the document alone

    @property
    def fields(self) -> dict[str, Any]:
        """Return what clients receive of it."""
        return {
            "id": self.prompt.id,
            "name": self.prompt.manifest.name,
            "tokens": self.text_tokens,
        }


class StoredDocuments:
    """Finds the documents; on rank 0, from any thread."""

    def __init__(
        self, sessions: SequenceManager, prompts: Prompts, context: int, max_new_tokens: int
    ):
        """Search the prompts that these sequences can continue.

        Args:
            sessions: the engine's sequences.
            prompts: the tokenizer.
            context: maximum number of tokens of a prompt.
            max_new_tokens: default number of tokens of an answer.
        """
        self._sessions, self._prompts = sessions, prompts
        self._context, self._max_new_tokens = context, max_new_tokens

    def find(self) -> list[dict[str, Any]]:
        """Return the id, name and number of tokens of each document, latest used first.

        Of documents that begin with all of another one, the longest is listed. Prompts that are
        corrupt are not searched.
        """
        if not (prompts := self._candidates()) or (framing := self._framing()) is None:
            return []
        found = dict[str, tuple[_StoredDocument, bytes]]()
        for prompt in prompts:
            if (document := self._locate(prompt, framing)) is not None:
                tokens = document.tokens[: document.length].astype(np.int32)
                found[prompt.id] = document, tokens.tobytes()
        distinct = dict[str, bytes]()
        for id, (_, content) in sorted(found.items(), key=lambda item: -len(item[1][1])):
            beginning = content[: -JOIN_TOKENS * np.dtype(np.int32).itemsize]
            if not any(longer.startswith(beginning) for longer in distinct.values()):
                distinct[id] = content
        return [document.fields for id, (document, _) in found.items() if id in distinct]

    def read(self, id: str) -> dict[str, Any] | None:
        """Return a document as `find` does, with its text; None if there is none with this id.

        A first message that begins with the text and an empty line shares its tokens.
        """
        prompt = next((each for each in self._candidates() if each.id == id), None)
        if prompt is None or (framing := self._framing()) is None:
            return None
        if (document := self._locate(prompt, framing)) is None:
            return None
        message = self._prompts.detokenize(document.tokens[framing.start :].tolist())
        text = message.removeprefix(framing.header).removesuffix(document.rest)
        return {**document.fields, "text": text}

    def _candidates(self) -> list[CachedPrompt]:
        """Return the prompts to be searched, latest used first.

        They are those that a longer one can continue; none if their folder fails, which saving
        reports.
        """
        cache, found = self._sessions.prefix_cache, list[CachedPrompt]()
        if cache is None:
            return []
        with suppress(TierForceError):
            for prompt in reversed(cache.prompts()):
                if (tokens := prompt.manifest.tokens) < self._context:
                    identity = self._sessions.kv_identity(tokens + 1, self._max_new_tokens)
                    if prompt.manifest.identity == identity:
                        found.append(prompt)
        return found[: limits.STORED_DOCUMENTS]

    def _framing(self) -> _Framing | None:
        """Return how messages begin now, since a template may render the date; None without one."""
        try:
            before, after = self._prompts.around_message()
        except TierForceError:
            return None
        special = self._prompts.special_tokens()
        starts = [index + 1 for index, token in enumerate(before) if token in special]
        start = starts[-1] if starts else 0
        header, end = map(self._prompts.detokenize, (before[start:], after))
        return _Framing(before, start, header, end, special if set(special) & set(after) else [])

    def _locate(self, prompt: CachedPrompt, framing: _Framing) -> _StoredDocument | None:
        """Return the document that a prompt begins with; None if there is none to go on from."""
        tokens, start = prompt.tokens(), framing.start
        first = len(framing.before) + JOIN_TOKENS  # within the document
        head = self._prompts.detokenize(tokens[start:first].tolist())
        if tokens[:start].tolist() != framing.before[:start] or not head.startswith(framing.header):
            return None
        end = self._message_end(tokens, framing)
        tail = self._prompts.detokenize(tokens[max(first, end - _QUESTION_TOKENS) : end].tolist())
        at = tail.rfind(_EMPTY_LINE)
        if end == len(tokens) and not tail.endswith(_EMPTY_LINE):
            at = -1  # the prompt ends within the document
        rest = tail[at:] if at >= 0 else ""
        length = end - len(self._prompts.tokenize_text(rest, has_prefix=False))
        if not self._can_continue(length, len(tokens)):
            return None
        own = length - len(framing.before)
        return _StoredDocument(prompt, tokens[:end], length, rest, own)

    def _message_end(self, tokens: _Tokens, framing: _Framing) -> int:
        """Return the index after the first message's tokens; all of them if it does not end."""
        start = len(framing.before)
        if framing.special:
            found = np.flatnonzero(np.isin(tokens[start:], framing.special))
            return start + int(found[0]) if len(found) else len(tokens)
        text = self._prompts.detokenize(tokens[start:].tolist())
        if (at := text.find(framing.end)) < 0:
            return len(tokens)
        return len(tokens) - len(self._prompts.tokenize_text(text[at:], has_prefix=False))

    def _can_continue(self, length: int, tokens: int) -> bool:
        """Return whether a prompt can load a document that ends at `length`, of `tokens` tokens.

        The last of its tokens may change with what follows.
        """
        cache = self._sessions.prefix_cache
        assert cache is not None
        return cache.usable(length - JOIN_TOKENS, tokens) >= MIN_TOKENS
