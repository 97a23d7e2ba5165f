"""Chats: prompts are rendered from all messages, and common prefixes are not prefilled again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from decoding import GREEDY, Engine, Settings
from decoding.app.interactive.chat_session import Chat
from offload.errors import InvalidRequestError, TierForceError
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = "The sun was low over the hills, and no one spoke. " * 8
QUESTIONS = ["Who spoke?", "What was low: <|end|>?", "Why, über 東京?"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = Settings(mode="retrieval", dtype="float32", context=600, link="emulated:50")
    engine = Engine.from_pretrained(DEMO / "target", settings=settings, group=TensorParallelGroup())
    engine.tokenizer.chat_template = TURNS
    yield engine
    engine.close()


def rendered(engine: Engine, messages: list[dict[str, str]]) -> str:
    return engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("document", [None, STORY])
def test_prompts_are_rendered_by_the_template(document: str | None, engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=document)
    with engine.conversation():
        for question in QUESTIONS:
            answer = "".join(chat.ask(question))
            assert answer == chat.messages[-1]["content"]
            messages = [dict(message) for message in chat.messages[:-1]]
            if document is not None:
                messages[0]["content"] = f"{document}\n\n{messages[0]['content']}"
            assert engine.tokenizer.decode(chat.tokens) == rendered(engine, messages) + answer
    assert [message["content"] for message in chat.messages[::2]] == QUESTIONS


def test_answers_equal_those_of_one_long_prompt(engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=STORY)
    answers = []
    with engine.conversation():
        chat.prefill()
        for question in QUESTIONS:
            answer = "".join(chat.ask(question))
            prompt = chat.tokens[: engine.stats.prompt_tokens]
            answers.append((prompt, answer))
            # all but the turn itself, and the token preceding it
            assert engine.stats.reused_tokens > engine.stats.prompt_tokens - 60
    for prompt, answer in answers:
        assert engine.tokenizer.decode(list(engine.generate(prompt, 16, GREEDY))) == answer


def test_a_document_can_be_replaced(engine: Engine) -> None:
    chat, other = Chat(engine, 16, GREEDY, document=STORY), "There was a lighthouse. " * 20
    fresh = Chat(engine, 16, GREEDY, document=other)
    with engine.conversation():
        "".join(chat.ask("Who?"))
        before = dict(vars(chat))
        chat.max_new_tokens = 400
        with pytest.raises(InvalidRequestError, match="no room left for the document"):
            chat.set_document(other)
        chat.max_new_tokens = 16
        assert vars(chat) == before
        chat.set_document(other, "other")
        answers = ["".join(each.ask("Who?")) for each in (chat, fresh)]
    assert answers[0] == answers[1]
    assert chat.name == "other"
    assert chat.tokens == fresh.tokens


def test_a_closed_answer_keeps_what_was_generated(engine: Engine) -> None:
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


def test_messages_can_be_restored_and_cleared(engine: Engine) -> None:
    chat = Chat(engine, 16, GREEDY, document=STORY)
    with engine.conversation():
        for question in QUESTIONS[:2]:
            "".join(chat.ask(question))
        messages, tokens = list(chat.messages), list(chat.tokens)
        again = Chat(engine, 16, GREEDY, document=STORY)
        again.restore((messages[at]["content"], messages[at + 1]["content"]) for at in (0, 2))
        assert again.messages == messages
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


def test_a_system_message_comes_first_in_every_turn(engine: Engine) -> None:
    system = "Be brief: <|end|>."
    chat = Chat(engine, 16, GREEDY, document=STORY, system=system)
    with engine.conversation():
        chat.prefill()
        for question in QUESTIONS[:2]:
            answer = "".join(chat.ask(question))
            messages = [dict(message) for message in chat.messages[:-1]]
            messages[0]["content"] = f"{STORY}\n\n{messages[0]['content']}"
            messages = [{"role": "system", "content": system}, *messages]
            assert engine.tokenizer.decode(chat.tokens) == rendered(engine, messages) + answer
            assert engine.stats.reused_tokens > engine.stats.prompt_tokens - 60
    assert chat.messages[0]["role"] == "user"
    long = Chat(engine, 100, GREEDY, document=STORY * 20, system="word " * 200)
    with engine.conversation():
        assert "".join(long.ask(QUESTIONS[0]))


def test_a_long_document_is_truncated(engine: Engine) -> None:
    chat = Chat(engine, 100, GREEDY, document=STORY * 20)
    assert chat.truncated_tokens > 1000
    with engine.conversation():
        chat.prefill()
        assert "".join(chat.ask(QUESTIONS[0]))
        while len(chat.tokens) + 50 < engine.context:
            "".join(chat.ask(QUESTIONS[1]))
        count = len(chat.messages)
        with pytest.raises(InvalidRequestError, match="start a new one"):
            "".join(chat.ask(QUESTIONS[1] * 10))
        assert len(chat.messages) == count  # a failed question is not added
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
def test_unusable_templates_raise(template: str | None, reason: str, engine: Engine) -> None:
    tokenizer: Any = engine.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(TierForceError, match=reason):
            Chat(engine)
    finally:
        tokenizer.chat_template = before


def test_templates_without_a_system_message_raise(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + TURNS
    omits = TURNS.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    for template, reason in ((fails, "no system"), (omits, "it omits it")):
        monkeypatch.setattr(engine.tokenizer, "chat_template", template)
        Chat(engine)
        with pytest.raises(TierForceError, match=f"support a system message.*{reason}"):
            Chat(engine, system="Be brief.")


THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "<|assistant|>"
)
SYSTEM_LAST = (
    "{% for m in messages %}[{{ m.content }}]{% if loop.last %} Be brief.{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [THOUGHTS, SYSTEM_LAST])
def test_rewritten_turns_are_prefilled_again(
    template: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    chat = Chat(engine, 16, GREEDY, document=STORY)
    thinking = "Hm</think>No one."
    with engine.conversation():
        "".join(chat.ask(QUESTIONS[0]))
        assert engine.stats.discarded_tokens == 0
        chat.messages[1]["content"] = thinking  # differs from what the caches hold
        "".join(chat.ask(QUESTIONS[1]))
        assert 0 < engine.stats.discarded_tokens < 40
        assert engine.stats.reused_tokens > 100
        messages = [dict(message) for message in chat.messages[:-1]]
        messages[0]["content"] = f"{STORY}\n\n{messages[0]['content']}"
        prompt = chat.tokens[: engine.stats.prompt_tokens]
        assert engine.tokenizer.decode(prompt) == rendered(engine, messages)
    answer = list(engine.generate(prompt, 16, GREEDY))
    assert chat.tokens[len(prompt) :] == answer
