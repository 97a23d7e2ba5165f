"""Text of any length is tokenized and truncated in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.harness.text import long_text
from decoding.text.encoding import ContextLengthError, check_length, clip, plain_tokens, truncate_to
from decoding.text.prompt import Template, chat_tokens
from offload.errors import InvalidRequestError
from support.chat_templates import CHAT_MODELS
from support.commands import TARGET
from support.slow import slow_except

CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}bot:"
LIMIT = 100


class Counting:
    """A tokenizer that counts the characters of its inputs: the longest, and the total."""

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


@pytest.fixture(scope="module")
def text() -> str:
    return long_text()[:400_000]


@pytest.fixture(scope="module")
def whole(text: str) -> list[int]:
    """Return the tokens of the whole text."""
    return plain_tokens(AutoTokenizer.from_pretrained(TARGET), text)


def test_a_prompt_much_too_long_is_rejected_after_tokenizing_little_of_it(
    tokenizer: Any, text: str
) -> None:
    tokenizer.wrapped.chat_template = CHAT
    messages = [{"role": "user", "content": text}]
    for call in (
        lambda: check_length(text, LIMIT, lambda part: len(plain_tokens(tokenizer, part))),
        lambda: chat_tokens(tokenizer, messages, LIMIT),
        lambda: Template.plain(tokenizer).fit(tokenizer, text, LIMIT),
    ):
        tokenizer.total = 0
        with pytest.raises(ContextLengthError, match=r"at least .*context is 100") as caught:
            call()
        assert caught.value.tokens > LIMIT
        assert tokenizer.total < 100_000


def test_a_text_slightly_too_long_is_not_rejected(tokenizer: Any, text: str) -> None:
    tokens = plain_tokens(tokenizer, text[:300_000])
    check_length(text[:300_000], len(tokens) - 1, lambda _: len(tokens))


@pytest.mark.parametrize("chat", [None, CHAT])
@pytest.mark.parametrize("keep_end", [False, True])
def test_truncation_equals_that_of_the_whole_tokenized_text(
    chat: str | None, keep_end: bool, tokenizer: Any, text: str, whole: list[int]
) -> None:
    tokenizer.wrapped.chat_template = chat
    template = Template.summary(tokenizer)
    tokenizer.longest = 0
    tokens, dropped = template.build(tokenizer, text, LIMIT, keep_end)
    assert tokenizer.longest < 200_000
    assert LIMIT - 2 <= len(tokens) <= LIMIT
    around = len(template.around(tokenizer)[0]) + len(template.around(tokenizer)[1])
    # cutting the text into parts may change a few tokens at each cut
    assert abs(len(tokens) - around + dropped - len(whole)) <= 40
    expected = whole[-30:] if keep_end else whole[:30]
    assert any(tokens[at : at + 20] == expected[5:25] for at in range(len(tokens)))


def test_a_clipped_text_is_its_beginning_or_its_end(tokenizer: Any, text: str) -> None:
    first, dropped = clip(tokenizer, text, LIMIT, keep_end=False)
    assert text.startswith(first)
    assert len(first) < len(text)
    assert dropped > 100_000
    last, _ = clip(tokenizer, text, LIMIT, keep_end=True)
    assert text.endswith(last)
    assert clip(tokenizer, text, len(text), keep_end=False) == (text, 0)
    tokens = plain_tokens(tokenizer, first)
    cut, excess = truncate_to(tokenizer, first, len(tokens) - 5)
    assert (plain_tokens(tokenizer, cut), excess) == (tokens[:-5], 5)
    cut, excess = truncate_to(tokenizer, first, len(tokens) - 5, keep_end=True)
    assert (plain_tokens(tokenizer, cut), excess) == (tokens[5:], 5)


def test_special_tokens_of_a_template_count_as_one_token_each() -> None:
    tokenizer = CHAT_MODELS["llama-3"].tokenizer()
    messages = [{"role": ("user", "assistant")[at % 2], "content": "a"} for at in range(3001)]
    tokens = len(chat_tokens(tokenizer, messages))
    assert len(chat_tokens(tokenizer, messages, tokens)) == tokens
    with pytest.raises(ContextLengthError):
        chat_tokens(tokenizer, messages, tokens // 8)


STRINGS = {
    "letters": "The sun was low, and no one spoke.",
    "accents": "naïve é à la carte, déjà vu: œuvre",
    "characters of several tokens": "東京は夜の七時😀🏳️‍🌈 한국어",
    "special tokens": "a</s>b<|im_end|><|im_start|>[INST] c <",
    "blanks": "  a   b \n\n  c ",
}


@pytest.mark.parametrize("keep_end", [False, True])
@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS)
@pytest.mark.parametrize(
    "name", slow_except(CHAT_MODELS, 0, 1, 2)
)  # fast: one of each kind of tokenizer
def test_prompts_are_truncated_to_any_length(name: str, text: str, keep_end: bool) -> None:
    """Cuts fall also within characters of several tokens, and after a tokenizer's own space."""
    tokenizer = CHAT_MODELS[name].tokenizer()
    template = Template.chat(tokenizer)
    whole, _ = template.build(tokenizer, text, 1000)
    minimum = sum(map(len, template.around(tokenizer)))
    for limit in range(len(whole), minimum + 3, -1):
        tokens, dropped = template.build(tokenizer, text, limit, keep_end)
        assert len(tokens) <= limit
        assert dropped >= len(whole) - limit
    with pytest.raises(InvalidRequestError, match="no room left"):
        template.build(tokenizer, text, 1, keep_end)
