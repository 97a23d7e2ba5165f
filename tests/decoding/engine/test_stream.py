"""Streaming: prompts of any length without special tokens, and output in whole characters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.text.detokenizer import detokenize_stream
from offload.errors import InvalidRequestError, TruncatedPromptWarning
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO

TEXT = "Über die Straße: 東京 \U0001f642\U0001f469\u200d\U0001f680 — ¡olé!\n\n  naïve\tend"
SETTINGS = Settings(mode="plain", dtype="float32", context=100)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_pretrained(DEMO / "target", settings=SETTINGS, group=TensorParallelGroup())
    yield engine
    engine.close()


def word_piece_tokenizer() -> Any:
    """Return a tokenizer like sentencepiece's: words include spaces, unknown letters are bytes."""
    words = ["\u2581", "\u2581a", "\u2581word", "s", "\u2581end"]
    vocab = {word: at for at, word in enumerate([*words, *(f"<0x{at:02X}>" for at in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_characters_come_out_whole(kind: str, engine: Engine) -> None:
    tokenizer = engine.tokenizer if kind == "bytes" else word_piece_tokenizer()
    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(tokens) > len(TEXT.encode()) // 3
    pieces = list(detokenize_stream(tokenizer, iter(tokens)))
    assert "".join(pieces) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert "Straße" in "".join(pieces)
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) > 10


def test_an_incomplete_character_becomes_a_replacement_character(engine: Engine) -> None:
    tokens = engine.tokenizer("ends \U0001f642", add_special_tokens=False).input_ids[:-1]
    assert "".join(detokenize_stream(engine.tokenizer, tokens)) == "ends \ufffd"


def test_pieces_are_yielded_as_soon_as_they_are_whole(engine: Engine) -> None:
    tokens = iter(engine.tokenizer("one two three", add_special_tokens=False).input_ids)
    pieces = detokenize_stream(engine.tokenizer, tokens)
    first = next(pieces)
    assert "one".startswith(first)
    assert next(tokens, None) is not None  # the first piece did not wait for the other tokens


def test_the_beginning_of_a_long_prompt_is_dropped(engine: Engine) -> None:
    text = "The sun was low over the hills, and no one spoke. " * 20
    tokens = engine.tokenizer(text, add_special_tokens=False).input_ids
    dropped = len(tokens) - 80
    line = f"longer than the context of 100 tokens: its first {dropped} tokens are dropped"
    with pytest.warns(TruncatedPromptWarning, match=line) as warned:
        output = "".join(engine.stream(text, 20, Sampling(0.7, top_p=1, seed=3)))
    assert warned[0].filename == __file__
    assert engine.stats.truncated_tokens == dropped > 100
    assert engine.stats.prompt_tokens == 80
    new = list(engine.generate(tokens[-80:], 20, Sampling(0.7, top_p=1, seed=3)))
    assert output == engine.tokenizer.decode(new, skip_special_tokens=True)
    assert engine.stats.truncated_tokens == 0


def test_a_context_without_room_for_a_prompt_raises(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="no room left"):
        next(engine.stream("a text", 100, GREEDY))


def test_what_looks_like_a_special_token_is_plain_text(engine: Engine) -> None:
    text = "It ends with </s> and begins with <s> again"
    tokens = engine.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert not {0, 1} & set(tokens)
    assert list(engine.generate(text, 8, GREEDY)) == list(engine.generate(tokens, 8, GREEDY))
    assert engine.stats.prompt_tokens == len(tokens)
    assert "".join(engine.stream(text, 8, GREEDY)) == engine.tokenizer.decode(
        list(engine.generate(text, 8, GREEDY)), skip_special_tokens=True
    )


def test_chat_uses_the_chat_template(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}bot:"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    output = "".join(engine.stream("What is it?", 8, GREEDY, chat=True))
    messages = [{"role": "user", "content": "What is it?"}]
    prompt = engine.tokenizer.apply_chat_template(messages, return_dict=False)
    assert (prompt[0], prompt.count(1)) == (0, 1)  # the template's own special tokens
    assert output == engine.tokenizer.decode(
        list(engine.generate(prompt, 8, GREEDY)), skip_special_tokens=True
    )
    assert engine.stats.prompt_tokens == len(prompt)


def test_a_closed_stream_leaves_the_engine_usable(engine: Engine) -> None:
    expected = list(engine.stream("Once upon a time", 12, GREEDY))
    pieces = engine.stream("Once upon a time", 12, GREEDY)
    assert next(pieces) == expected[0]
    pieces.close()  # type: ignore[attr-defined]
    assert list(engine.stream("Once upon a time", 12, GREEDY)) == expected
