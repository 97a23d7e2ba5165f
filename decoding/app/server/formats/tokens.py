"""The bodies of tokenization and detokenization."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator, model_validator

from decoding.app.server.formats.body import Strict, invalid, token_ids
from decoding.app.server.formats.chat import Messages, ToolPrompt
from decoding.app.server.formats.neutral_fields import TOKENIZE_FIELDS

# fields of a tokenization that have no effect on the other kind of prompt
_OF_TEXT = ("add_special_tokens", "add_special")
_OF_MESSAGES = ("continue_final_message", "chat_template_kwargs", "reasoning_effort")


class TokenizeBody(ToolPrompt):
    """The body of a tokenization: of a text, or of messages as a chat completion reads them."""

    neutral = TOKENIZE_FIELDS

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # llama.cpp's name
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one_text(self) -> TokenizeBody:
        """Raise an error unless there is one text."""
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("send one of prompt, content and messages")
        if self.messages is not None:
            self.check_rendering(self.messages)
        for name in _OF_MESSAGES if self.messages is None else _OF_TEXT:
            if getattr(self, name):
                with_it = "without" if name in _OF_MESSAGES else "with"
                raise invalid(name, f"not supported {with_it} messages: leave it out")
        return self

    @property
    def has_prefix(self) -> bool:
        """Return whether a text follows the tokenizer's own prefix, as it does in a completion.

        llama.cpp's `content` does not, unless it is asked for.
        """
        for own in (self.add_special_tokens, self.add_special):
            if own is not None:
                return own
        return self.content is None


class DetokenizeBody(Strict):
    """The body of a detokenization."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(token_ids, json_schema_input_type=list[int])]
