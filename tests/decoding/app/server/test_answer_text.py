"""The text that the server sends for tokens, with their log-probabilities."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from decoding.app.server.worker.answering import _AnswerText
from decoding.app.server.worker.jobs import TokenLogprobs
from decoding.text.detokenizer import Detokenizer
from support.channels import MARKERS, make_tokenizer

ANSWER = (
    "<|channel|> analysis <|message|> so so <|end|> <|start|> assistant <|channel|> final "
    "<|message|> 42 ! <|return|>"
)


def test_reasoning_is_not_sent_with_log_probabilities() -> None:
    tokenizer = make_tokenizer(MARKERS)
    tokens = tokenizer(ANSWER)["input_ids"]
    text = _AnswerText(Detokenizer(tokenizer), [])
    deltas = []
    for token in tokens:
        name = tokenizer.decode([token]).encode()
        deltas.append(text.feed(token, TokenLogprobs(name, -0.5, -0.5, [])))
    sent = [each for each in [*deltas, text.rest()] if each is not None]
    assert "".join(each.text for each in sent) == "42!"
    names = [token.token for each in sent for _, token in each.logprobs]
    assert names == [b"42", b"!", b"<|return|>"]


def test_an_answer_that_ends_in_its_reasoning_is_empty() -> None:
    tokenizer = make_tokenizer(MARKERS)
    text = _AnswerText(Detokenizer(tokenizer), [])
    for token in tokenizer("<|channel|> analysis <|message|> so so")["input_ids"]:
        assert text.feed(token, TokenLogprobs(b"so", -0.5, -0.5, [])) is None
    assert text.rest() is None
