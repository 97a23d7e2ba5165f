"""The channels of an answer in gpt-oss's response format, of which the final one is for the user.

Source: OpenAI 2025, harmony response format, github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN = "<|constrain|>"  # before the type of a call's arguments
FINAL = "final"  # other channels hold reasoning, and calls of tools
_MARKERS = (START, CHANNEL, MESSAGE, END)
# marker tokens in text that is searched for calls: halves of characters, which no other token has,
# so that text may spell a marker
PLACEHOLDERS = {each: chr(0xD800 + index) for index, each in enumerate((*_MARKERS, CONSTRAIN))}


class ChannelFilter:
    """Tells which tokens of an answer are for the user; all are, if it has no channels.

    An answer is a sequence of messages: <|start|>ROLE<|channel|>NAME<|message|>TEXT<|end|>. The
    first role is part of the prompt.
    """

    def __init__(self, tokenizer: Any, shown: Container[int] = ()):
        """Find the channels, unless markers are among the tokens `shown`, with all text."""
        self._tokenizer = tokenizer
        markers = _marker_ids(tokenizer)
        self._markers = {} if any(token in shown for token in markers) else markers
        self._header: list[int] | None = None  # tokens of the current message's role or channel
        self._is_shown = True

    def shows(self, token: int) -> bool:
        """Return whether the next token is for the user. Markers are not."""
        marker = self._markers.get(token)
        if marker is None:
            if self._header is not None:
                self._header.append(token)
                return False
            return self._is_shown
        if marker == MESSAGE:
            name = self._tokenizer.decode(self._header or []).strip()
            self._is_shown = name.startswith(FINAL)
            self._header = None
        elif marker == END:
            self._is_shown = False
        else:
            self._header = []
        return False


def has_channels(tokenizer: Any) -> bool:
    """Return whether answers have channels."""
    return bool(_marker_ids(tokenizer))


def _marker_ids(tokenizer: Any) -> dict[int, str]:
    """Return the markers by token id; none if the tokenizer lacks one."""
    ids = tokenizer.convert_tokens_to_ids(list(_MARKERS))
    is_known = tokenizer.convert_ids_to_tokens(ids) == list(_MARKERS) if all(ids) else False
    return dict(zip(ids, _MARKERS, strict=True)) if is_known else {}


def answer_text(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of an answer without special tokens, and of its channels the final one."""
    channels = ChannelFilter(tokenizer)
    shown = [token for token in tokens if channels.shows(token)]
    text: str = tokenizer.decode(
        shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
