"""A chat's prompts are what its template makes of all messages, and little is prefilled twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from decoding import GREEDY, Engine, Settings
from decoding.engine.chat import Chat
from offload.errors import InvalidRequestError, TierForceError
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = "The sun was low over the hills, and nobody spoke. " * 8
QUESTIONS = ["Who spoke?", "What was low: <|end|>?", "Why, über 東京?"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = Settings(mode="retrieval", dtype="float32", context=600, link="emulated:50")
    made = Engine.from_pretrained(DEMO / "target", settings=settings, group=TensorParallelGroup())
    made.tokenizer.chat_template = TURNS
    yield made
    made.close()


def rendered(engine: Engine, messages: list[dict[str, str]]) -> str:
    return engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("document", [None, STORY])
def test_what_is_read_is_what_the_template_renders(document: str | None, engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=document)
    with engine.conversation():
        for question in QUESTIONS:
            answer = "".join(chat.ask(question))
            assert answer == chat.messages[-1]["content"]
            asked = [dict(message) for message in chat.messages[:-1]]
            if document is not None:
                asked[0]["content"] = f"{document}\n\n{asked[0]['content']}"
            assert engine.tokenizer.decode(chat.tokens) == rendered(engine, asked) + answer
    assert [message["content"] for message in chat.messages[::2]] == QUESTIONS


def test_answers_are_those_of_the_whole_prompt(engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=STORY)
    found = []
    with engine.conversation():
        chat.prefill()
        for question in QUESTIONS:
            answer = "".join(chat.ask(question))
            asked = chat.tokens[: engine.stats.prompt_tokens]
            found.append((asked, answer))
            # all but the turn itself, and the last token before it
            assert engine.stats.reused_tokens > engine.stats.prompt_tokens - 60
    for asked, answer in found:
        assert engine.tokenizer.decode(list(engine.generate(asked, 16, GREEDY))) == answer


def test_an_answer_that_is_given_up_counts_as_far_as_it_went(engine: Engine) -> None:
    chat = Chat(engine, 40, GREEDY)
    with engine.conversation():
        answer = chat.ask(QUESTIONS[0])
        shown = "".join(islice(answer, 3))
        answer.close()
        assert chat.messages[1]["content"].startswith(shown)
        before = len(chat.tokens)
        "".join(chat.ask(QUESTIONS[1]))
        assert engine.stats.reused_tokens >= before - 1
    assert len(chat.messages) == 4


def test_what_was_said_can_be_restored_and_forgotten(engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=STORY)
    with engine.conversation():
        for question in QUESTIONS[:2]:
            "".join(chat.ask(question))
        said, tokens = list(chat.messages), list(chat.tokens)
        again = Chat(engine, 16, GREEDY, document=STORY)
        again.restore((said[at]["content"], said[at + 1]["content"]) for at in (0, 2))
        assert again.messages == said
        "".join(again.ask(QUESTIONS[2]))
        restored = again.tokens
        "".join(chat.ask(QUESTIONS[2]))
        assert chat.tokens == restored
        assert restored[: len(tokens)] == tokens
        chat.clear()
        assert not chat.messages
        "".join(chat.ask("Who?"))
        assert chat.tokens[:50] == tokens[:50]
        assert engine.stats.reused_tokens > 50


def test_a_document_leaves_room_to_talk(engine: Engine) -> None:
    chat = Chat(engine, 100, GREEDY, document=STORY * 20)
    assert chat.truncated_tokens > 1000
    with engine.conversation():
        chat.prefill()
        assert "".join(chat.ask(QUESTIONS[0]))
        while len(chat.tokens) + 50 < engine.context:
            "".join(chat.ask(QUESTIONS[1]))
        said = len(chat.messages)
        with pytest.raises(InvalidRequestError, match="begin a new one"):
            "".join(chat.ask(QUESTIONS[1] * 10))
        assert len(chat.messages) == said  # what is refused was not said
        chat.clear()
        assert "".join(chat.ask(QUESTIONS[0]))
    with pytest.raises(InvalidRequestError, match="no room left for the document"):
        Chat(engine, 400, GREEDY, document=STORY)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('not today') }}", "does not support a conversation"),
        ("{{ messages[0].content }}", "does not support a conversation"),
    ],
)
def test_templates_that_do_not_do_are_refused(
    template: str | None, reason: str, engine: Engine
) -> None:
    tokenizer: Any = engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(TierForceError, match=reason):
            Chat(engine)
    finally:
        tokenizer.chat_template = before


THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "<|assistant|>"
)
SYSTEM_LAST = (
    "{% for m in messages %}[{{ m.content }}]{% if loop.last %} Be brief.{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [THOUGHTS, SYSTEM_LAST])
def test_a_template_that_rewrites_earlier_turns_costs_a_prefill_of_what_changed(
    template: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    chat = Chat(engine, 16, GREEDY, document=STORY)
    thinking = "Hm</think>Nobody."
    with engine.conversation():
        "".join(chat.ask(QUESTIONS[0]))
        assert engine.stats.discarded_tokens == 0
        chat.messages[1]["content"] = thinking  # what the caches hold of it is another text
        "".join(chat.ask(QUESTIONS[1]))
        assert 0 < engine.stats.discarded_tokens < 40
        assert engine.stats.reused_tokens > 100
        asked = [dict(message) for message in chat.messages[:-1]]
        asked[0]["content"] = f"{STORY}\n\n{asked[0]['content']}"
        prompt = chat.tokens[: engine.stats.prompt_tokens]
        assert engine.tokenizer.decode(prompt) == rendered(engine, asked)
    answer = list(engine.generate(prompt, 16, GREEDY))
    assert chat.tokens[len(prompt) :] == answer
