"""InternLM2's tokenizer is read from its files as published, without their code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken

from bench.harness.text import long_text
from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError
from support.sentencepiece import (
    sentencepiece_file,
    tokens_of,
    train,
    write_internlm2_tokenizer,
)

STRINGS = (
    "",
    " ",
    "Hello, world!  Two  spaces, \t tabs\n\n and 1234 lines\n",
    "na\u00efve \u4f60\u597d \U0001f600 \u2581 \ufb01",
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def lines() -> list[str]:
    return long_text()[:60_000].splitlines(keepends=True)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_files_as_published(has_prefix: bool, tmp_path: Path) -> None:
    backend, merges = train(lines(), has_prefix)
    content, last = sentencepiece_file(backend, merges), backend.get_vocab_size() - 1
    added = {"content": "<|im_start|>", "special": True, "normalized": False}
    write_internlm2_tokenizer(
        tmp_path, content, chat_template=TEMPLATE, added_tokens_decoder={str(last): added}
    )
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == last + 1
    unused = tokens_of(backend)[last]
    for text in (*STRINGS, long_text()[60_000:80_000].replace(unused.strip("\u2581"), "")):
        expected = backend.encode(text).ids
        assert tokenizer(text).input_ids == [1, *expected]
        assert tokenizer.decode(expected) == backend.decode(expected)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<s>",
        "</s>",
        "</s>",
    )
    ids = tokenizer.apply_chat_template([{"content": "Hi"}], return_dict=False)
    assert ids[0] == last
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == last


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    backend, merges = train(lines(), True)
    write_internlm2_tokenizer(tmp_path, sentencepiece_file(backend, merges))
    backend.add_tokens([AddedToken("of course")])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm2"}))
    assert "of course" in load_tokenizer(tmp_path).get_vocab()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda data: data[:-3], "tokenizer.model is not SentencePiece's: fetch it again"),
        (lambda data: b"\x08\xff" + data, "tokenizer.model is not SentencePiece's"),
        (lambda data: b"\x08\x01\x0c" + data, "tokenizer.model is not SentencePiece's"),
        (lambda data: b"\x0a\x02\x08\x01" + data, "tokenizer.model is not SentencePiece's"),
        (lambda data: b"", "tokenizer.model is not of the type BPE"),
    ],
)
def test_broken_files(cut: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    content = sentencepiece_file(*train(lines(), True))
    write_internlm2_tokenizer(tmp_path, cut(content))
    with pytest.raises(TierForceError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_other_broken_folders(tmp_path: Path) -> None:
    backend, merges = train(lines(), True)
    content = sentencepiece_file(backend, merges)
    count = backend.get_vocab_size()
    write_internlm2_tokenizer(tmp_path, content, added_tokens_decoder={str(count): "<x>"})
    with pytest.raises(TierForceError, match=f"its tokenizer.model has no token {count}"):
        load_tokenizer(tmp_path)
    write_internlm2_tokenizer(tmp_path, sentencepiece_file(backend, merges, model_type=1))
    with pytest.raises(TierForceError, match=r"tokenizer\.model is not of the type BPE"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(TierForceError, match=r"tokenizer cannot be loaded.*tokenizer\.model"):
        load_tokenizer(tmp_path)
