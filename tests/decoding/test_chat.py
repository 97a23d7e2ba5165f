"""A chat goes on token by token, as its template would render it, and reads nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from decoding import GREEDY, Engine, Settings
from decoding.chat import Chat, Dialogue
from offload.errors import DocumentError, TierForceError
from parallel.group import Group
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
    made = Engine.from_pretrained(DEMO / "target", settings=settings, group=Group())
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
        chat.read()
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
        assert engine.tokenizer.decode(again.tokens) == engine.tokenizer.decode(tokens)
        chat.clear()
        assert not chat.messages
        "".join(chat.ask("Who?"))
        assert chat.tokens[:50] == tokens[:50]
        assert engine.stats.reused_tokens > 50


def test_a_document_leaves_room_to_talk(engine: Engine) -> None:
    chat = Chat(engine, 100, GREEDY, document=STORY * 20)
    assert chat.dropped_tokens > 1000
    with engine.conversation():
        chat.read()
        assert "".join(chat.ask(QUESTIONS[0]))
        while len(chat.tokens) + 50 < engine.context:
            "".join(chat.ask(QUESTIONS[1]))
        said = len(chat.messages)
        with pytest.raises(DocumentError, match="begin a new one"):
            "".join(chat.ask(QUESTIONS[1] * 10))
        assert len(chat.messages) == said  # what is refused was not said
        chat.clear()
        assert "".join(chat.ask(QUESTIONS[0]))
    with pytest.raises(DocumentError, match="no room left for the document"):
        Chat(engine, 400, GREEDY, document=STORY)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('not today') }}", "cannot take a conversation"),
        ("{{ messages[0].content }}", "cannot take a conversation"),
        (
            "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}",
            "words later turns otherwise",
        ),
    ],
)
def test_templates_that_do_not_do_are_refused(
    template: str | None, reason: str, engine: Engine
) -> None:
    tokenizer: Any = engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(TierForceError, match=reason):
            Dialogue.of(tokenizer)
    finally:
        tokenizer.chat_template = before
