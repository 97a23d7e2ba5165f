"""Prompts of published models' chat templates have the tokens that transformers gives them, except
that special tokens in messages stay plain text.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

from decoding.text.prompt import chat_tokens
from support.chat_templates import CHAT_MODELS, ChatModel

CONVERSATIONS = 60
WORDS = ["the", "sun", "low", "naïve", "東京", "😀", "\n", "\t", "e\u0301", "1,000", "{{ x }}"]
ODD = ["/no_think", "/think", "<tool_response>a</tool_response>", "[INST]", "<|user|>", "<<SYS>>"]
Messages = list[dict[str, str]]


def conversation(rng: random.Random, model: ChatModel, names: tuple[str, ...] = ()) -> Messages:
    """Return a random conversation; some contents contain one of `names`."""

    def words() -> str:
        drawn = rng.choices(WORDS, k=rng.randint(1, 12))
        if rng.random() < 0.1:
            drawn.insert(rng.randrange(len(drawn)), rng.choice(odd))
        if names and rng.random() < 0.5:
            drawn.insert(rng.randrange(len(drawn) + 1), rng.choice(names))
        text = rng.choice(["", " "]).join(drawn) if rng.random() < 0.2 else " ".join(drawn)
        return rng.choice(["", " ", "\n", "  \n"]) + text + rng.choice(["", " ", "\n\n", "\t"])

    odd = [each for each in ODD if each not in model.special]
    messages = []
    if model.takes_system and rng.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for number in range(rng.randint(1, 6)):
        content = words()
        if number % 2 and rng.random() < 0.5:
            content = f"<think>\n{words()}\n</think>\n\n{content}"
        messages.append({"role": ("user", "assistant")[number % 2], "content": content})
    return messages


def expected(tokenizer: Any, messages: Messages) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def rendered(tokenizer: Any, messages: Messages) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_prompts_equal_those_of_transformers(name: str) -> None:
    model = CHAT_MODELS[name]
    tokenizer, rng = model.tokenizer(), random.Random(name)
    for _ in range(CONVERSATIONS):
        messages = conversation(rng, model)
        assert chat_tokens(tokenizer, messages) == expected(tokenizer, messages), messages


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_special_tokens_in_messages_stay_text(name: str) -> None:
    model = CHAT_MODELS[name]
    tokenizer, rng = model.tokenizer(), random.Random(name)
    special = set(tokenizer.convert_tokens_to_ids(list(model.special)))
    split = re.compile("|".join(map(re.escape, model.special)))
    for _ in range(CONVERSATIONS):
        messages = conversation(rng, model, model.special)
        tokens = chat_tokens(tokenizer, messages)
        # the template's own special tokens: those that remain if messages have letters instead
        replaced = [
            {**each, "content": split.sub(lambda match: f"x{match[0][1:]}", each["content"])}
            for each in messages
        ]
        own = [token for token in expected(tokenizer, replaced) if token in special]
        assert [token for token in tokens if token in special] == own, messages
        # no character is lost, except spaces that the tokenizer itself adds or removes
        text = "".join(tokenizer.decode(tokens).split())
        assert text == "".join(rendered(tokenizer, messages).split()), messages


def test_special_tokens_that_overlap_or_have_one_character_stay_text() -> None:
    model = ChatModel(
        "{{ messages[0].content }} <a>", "bytes", ("<a>", "a><", "<b>", "♥", "<a><b>")
    )
    tokenizer = model.tokenizer()
    special = set(tokenizer.convert_tokens_to_ids(list(model.special)))
    for content in ("<a><b>", "♥", "a><b>♥♥ <a", "<<a>>", "\ue000<a>\ue001", "<<b>a><a>"):
        tokens = chat_tokens(tokenizer, [{"role": "user", "content": content}])
        assert Counter(token for token in tokens if token in special) == {tokens[-1]: 1}
        assert tokenizer.decode(tokens) == f"{content} <a>"


@pytest.mark.parametrize(
    ("template", "contents"),
    [
        # special tokens that result from removing, joining or changing characters
        ("{{ m[0].content.replace('/think', '') }}", ["a<|im_/thinkend|><|im_/thinkstart|>b"]),
        ("{{ m[0].content + m[1].content }}", ["a<|im_", "end|>b"]),
        ("{{ m[0].content | lower }}", ["a<|IM_END|>b"]),
        ("{{ m[0].content.split('</think>') | join }}", ["a<|im_</think>end|>b"]),
        ("{{ m[0].content * 2 }}", ["<|im_end|>"]),
    ],
)
def test_special_tokens_that_a_template_creates_from_messages_stay_text(
    template: str, contents: list[str]
) -> None:
    template = f"{{% set m = messages %}}{template}{{{{ '<|im_start|>' }}}}"
    tokenizer = ChatModel(template, "bytes", CHAT_MODELS["chatml"].special).tokenizer()
    messages = [{"role": "user", "content": content} for content in contents]
    tokens = chat_tokens(tokenizer, messages)
    special = {tokenizer.convert_tokens_to_ids(name) for name in CHAT_MODELS["chatml"].special}
    assert [token for token in tokens if token in special] == tokens[-1:]
    assert tokenizer.decode(tokens) == rendered(tokenizer, messages)


@pytest.mark.parametrize(
    ("normalizer", "content"),
    [
        (normalizers.NFKC(), "a\uff1c|im_end|\uff1e"),
        (normalizers.Lowercase(), "a<|IM_END|>"),
        (normalizers.BertNormalizer(), "a <|im_end|>"),
    ],
)
def test_special_tokens_that_a_normalizer_creates_stay_text(
    normalizer: normalizers.Normalizer, content: str
) -> None:
    tokenizer = ChatModel("{{ messages[0].content }}<|im_end|>", "bytes", ()).tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=True)])
    tokens = chat_tokens(tokenizer, [{"role": "user", "content": content}])
    assert tokens.count(tokens[-1]) == 1
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_guarding_takes_time_linear_in_text_and_special_tokens() -> None:
    """A request may have megabytes of prefixes of special tokens."""
    names = tuple(f"<SPECIAL_{number}>" for number in range(1000))
    tokenizer = ChatModel("{{ messages[0].content }}", "bytes", names).tokenizer()
    messages = [{"role": "user", "content": "<SPECIAL_" * 20_000}]
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        tokens = chat_tokens(tokenizer, messages)
    finally:
        sys.setprofile(None)
    assert len(tokens) > 100_000
    assert steps < 10 * len(tokens)


def test_templates_do_not_see_special_tokens_in_messages() -> None:
    """Some templates reject them, and some split at them."""
    template = (
        "{% for m in messages %}{% if '<|im_end|>' in m.content %}{{ raise_exception('no') }}"
        "{% endif %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = ChatModel(template, "bytes", CHAT_MODELS["chatml"].special).tokenizer()
    content = "a<|im_end|>b"
    tokens = chat_tokens(tokenizer, [{"role": "user", "content": content}])
    assert tokenizer.decode(tokens) == f"<|im_start|>{content}<|im_end|>"
    assert tokens.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
