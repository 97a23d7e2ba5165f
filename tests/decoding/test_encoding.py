"""Text becomes tokens in bounded memory, however long it is."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.harness.text import long_text
from decoding.encoding import ContextLengthError, check_length, clipped, plain_spans, plain_tokens
from decoding.prompt import Template, chat_tokens
from support.commands import TARGET

CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}bot:"
LIMIT = 100


class Counting:
    """A tokenizer that counts the characters that it is given at once, and in all."""

    def __init__(self, tokenizer: Any):
        self.wrapped = tokenizer
        self.longest = self.total = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.longest, self.total = max(self.longest, len(text)), self.total + len(text)
        return self.wrapped(text, **options)


@pytest.fixture
def tokenizer() -> Any:
    return Counting(AutoTokenizer.from_pretrained(TARGET))


@pytest.fixture
def text() -> str:
    return long_text()[:1_000_000]


def test_a_prompt_far_too_long_is_refused_after_little_of_it(tokenizer: Any, text: str) -> None:
    tokenizer.wrapped.chat_template = CHAT
    messages = [{"role": "user", "content": text}]
    for refused in (
        lambda: check_length(tokenizer, text, LIMIT),
        lambda: chat_tokens(tokenizer, messages, LIMIT),
        lambda: Template.plain(tokenizer).fit(tokenizer, text, LIMIT),
    ):
        tokenizer.total = 0
        with pytest.raises(ContextLengthError, match=r"at least .*context is 100") as found:
            refused()
        assert found.value.tokens > LIMIT
        assert tokenizer.total < 100_000


def test_one_a_little_too_long_is_tokenised(tokenizer: Any, text: str) -> None:
    tokens = plain_tokens(tokenizer, text[:300_000])
    check_length(tokenizer, text[:300_000], len(tokens) - 1)


@pytest.mark.parametrize("chat", [None, CHAT])
@pytest.mark.parametrize("keep_end", [False, True])
def test_what_does_not_fit_is_cut_as_if_all_had_been_tokenised(
    chat: str | None, keep_end: bool, tokenizer: Any, text: str
) -> None:
    whole = plain_tokens(tokenizer, text)
    tokenizer.wrapped.chat_template = chat
    template = Template.summary(tokenizer)
    tokenizer.longest = 0
    tokens, dropped = template.fill(tokenizer, text, LIMIT, keep_end)
    assert tokenizer.longest < 200_000
    assert LIMIT - 2 <= len(tokens) <= LIMIT
    around = len(template.around(tokenizer)[0]) + len(template.around(tokenizer)[1])
    # a cut between two parts may change a few tokens beside it
    assert abs(len(tokens) - around + dropped - len(whole)) <= 40
    kept = whole[-30:] if keep_end else whole[:30]
    assert any(tokens[at : at + 20] == kept[5:25] for at in range(len(tokens)))


def test_a_clipped_text_is_its_beginning_or_its_end(tokenizer: Any, text: str) -> None:
    first, dropped = clipped(tokenizer, text, LIMIT)
    assert text.startswith(first)
    assert len(first) < len(text)
    assert dropped > 100_000
    last, _ = clipped(tokenizer, text, LIMIT, keep_end=True)
    assert text.endswith(last)
    assert clipped(tokenizer, text, len(text)) == (text, 0)
    tokens = plain_spans(tokenizer, first)
    assert plain_tokens(tokenizer, tokens.cut(first, 5, keep_end=False)) == tokens.ids[:-5]
    assert plain_tokens(tokenizer, tokens.cut(first, 5, keep_end=True)) == tokens.ids[5:]
