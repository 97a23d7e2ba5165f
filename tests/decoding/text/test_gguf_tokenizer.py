"""A tokenizer built from a GGUF file's metadata equals the one that the file was written from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
from gguf import GGUFWriter
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_REGEX

import decoding.text.gguf_tokenizer
from bench.harness.text import long_text
from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.text.detokenizer import detokenize_stream
from decoding.text.gguf_tokenizer import SPLITS, gguf_tokenizer
from decoding.text.gguf_vocabulary import MAX_MERGES, MAX_TOKENS, check_vocabulary
from decoding.text.prompt import Template
from offload.errors import TierForceError
from support.sentencepiece import kinds_of, merges_of, scores_of, tokens_of, train

SPECIALS = ["<|end|>", "<|start|>", "<unk>"]
STRINGS = (
    "",
    " ",
    "Hello, world! It's 1234567 o'clock, they'LL say.",
    "  two  spaces   12 and   tabs\t\tand\r\n\r\n\n lines \n",
    "x = {'a': [1,2,3]}  # _under_score\n\n\n    return x**2;",
    "Caf\u00e9, Cafe\u0301 \u2014 na\u00efve \u4f60\u597d, \u0422\u043e\u043b",
    "\u0661\u0662\u0663 \u00bd \U0001f600\U0001f468\u200d\U0001f469 \u2581 \ufb01",
    "a<|start|>b <unk>c",
)


def split_by(*rules: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*rules, BYTES])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# pre-tokenizers of transformers and of the models' own files
REFERENCES: dict[str, Any] = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": split_by(pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")),
    "qwen35": split_by(pre_tokenizers.Split(Regex(QWEN35_REGEX), "isolated")),
    "llama-bpe": split_by(pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")),
}


def lines() -> Iterator[str]:
    yield from long_text()[:60_000].splitlines(keepends=True)


def write(
    path: Path,
    model: str,
    tokens: list[str],
    kinds: list[int],
    architecture: str = "llama",
    **fields: Any,
) -> Path:
    """Write a GGUF file with only a tokenizer; `fields` are those of tokenizer.ggml."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for name, value in fields.items():
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def check_same_tokens(path: Path, backend: Tokenizer) -> Any:
    """Check a file's tokenizer against the one it was written from; return it."""
    tokenizer = gguf_tokenizer(path)
    assert tokenizer.get_vocab() == backend.get_vocab()
    for text in (*STRINGS, long_text()[60_000:80_000]):
        expected = backend.encode(text).ids
        assert tokenizer(text, add_special_tokens=False).input_ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == backend.decode(expected)
    return tokenizer


@pytest.mark.parametrize("pre", REFERENCES)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = REFERENCES[pre]
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines(), trainer)
    if pre in ("qwen2", "qwen35"):  # as in its tokenizer.json
        backend.normalizer = normalizers.NFC()
    tokens = tokens_of(backend)
    kinds = [3 if token in SPECIALS else 1 for token in tokens]
    fields = {"pre": pre, "merges": merges_of(backend), "eos_token_id": 0, "bos_token_id": 1}
    path = write(tmp_path / "model.gguf", "gpt2", tokens, kinds, **fields, add_bos_token=False)
    tokenizer = check_same_tokens(path, backend)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|start|>")
    assert tokenizer("").input_ids == []
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|start|>x"
    # special tokens in a document are plain text
    plain, _ = Template.plain(tokenizer).build(tokenizer, "a<|start|>b", 100)
    assert 1 not in plain
    assert tokenizer.decode(plain) == "a<|start|>b"


@pytest.mark.parametrize(
    ("first", "last", "bos", "prefix"),
    [(True, True, 1, [1]), (False, True, 1, []), (True, False, 1, [1]), (True, True, 0, [0])],
)
def test_prompts_have_a_bos_token_but_no_end_token(
    first: bool, last: bool, bos: int, prefix: list[int], tmp_path: Path
) -> None:
    """Files may request a token at the end of every text; a prompt has no end."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    kinds = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))
    fields = {"pre": "gpt-2", "merges": [], "eos_token_id": 0, "bos_token_id": bos}
    path = write(
        tmp_path / "model.gguf",
        "gpt2",
        tokens,
        kinds,
        **fields,
        add_bos_token=first,
        add_eos_token=last,
    )
    tokenizer = gguf_tokenizer(path)
    text = [tokens.index(letter) for letter in "hi"]
    template = Template.plain(tokenizer)
    assert template.build(tokenizer, "hi", 10) == ([*prefix, *text], 0)
    assert template.fit(tokenizer, "hi", 10) == [*prefix, *text]
    tokenizer.chat_template = None
    summary, _ = Template.summary(tokenizer, "Why?").build(tokenizer, "hi", 100)
    assert summary[: len(prefix) + 2] == [*prefix, *text]
    assert 0 not in summary[len(prefix) :]


def test_whole_word_tokens_need_no_merges_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    """Llama 3's whole-word tokens need no merges; dbrx's do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "whole"]
    for pre, expected in (
        ("llama-bpe", [256]),
        ("dbrx", [letters.index(each) for each in "whole"]),
    ):
        fields = {"pre": pre, "merges": ["z z"], "add_bos_token": False}
        tokens_of_pre = [*tokens, "zz"]
        path = write(tmp_path / f"{pre}.gguf", "gpt2", tokens_of_pre, [1] * 258, **fields)
        assert gguf_tokenizer(path)("whole").input_ids == expected


PIECES = {  # strings that other rules split differently
    "gpt-4o": "Hello|World| don't| I'LL| |123|45| a|//\n/",
    "tekken": "Hello|World| don|'t| I|'LL| |1|2|3| a|//\n/",
    "qwen2": "Hello| so|!!\n\n|1|2| e|\u0301",
    "qwen35": "Hello| so|!!\n\n|1|2| e\u0301",
    "seed-coder": "Hello| so|!!|\n\n|1|2| e|\u0301",
    "hunyuan-dense": "x|_abc|\u4f60\u597d|d| |123|4| so|!!\n\n|\u30ab|a",
    "deepseek-v3": "x|_abc|\u4f60\u597d|d| |123|4|,| so|!!\n\n",
    "falcon3": "x|_abc\u4f60|!!\n\n| |123|4| don|'T",
    "lfm2": "x|_abc\u4f60\u597dd| |123|4|,| don|'T",
    "pixtral": "so|!!\n\n| |123|4",
    "exaone": "x|_|abc| |1|2| don|'t|,|\n",
    "exaone4": "x|_|abc| 12| don|'t|,|\n",
    "a.x-4.0": "x|_|abc| 12| don|'t|,|\n",
}


@pytest.mark.parametrize("pre", PIECES)
def test_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    """Equal to llama.cpp's, but for composed text and combining marks, of which it keeps less."""
    pieces = PIECES[pre].split("|")
    text = "".join(pieces)
    path = write(tmp_path / "model.gguf", "gpt2", ["a", "b"], [1, 1], pre=pre, merges=[])
    split = gguf_tokenizer(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_control_tokens_of_phi3_stand_for_the_white_space_after_them(
    tmp_path: Path, architecture: str
) -> None:
    """Its chat template has a newline there, which the model was not trained on."""
    specials = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>"]
    tokens = [*specials, "\u2581", "h", "i", "\u2581h", "\u2581hi", "\n"]
    scores = [0.0] * len(specials) + [-9.0, -9.0, -9.0, -2.0, -1.0, -9.0]
    kinds = [2, *[3] * (len(specials) - 1), *[1] * 6]
    fields = {"scores": scores, "bos_token_id": 1, "eos_token_id": 3, "unknown_token_id": 0}
    path = write(tmp_path / "model.gguf", "llama", tokens, kinds, architecture, **fields)
    ids = gguf_tokenizer(path)("<|user|>\nhi<|end|>\n<|endoftext|>\n").input_ids
    found = [tokens[index] for index in ids]
    user, end = ["<s>", "<|user|>"], ["<|end|>"]
    tail = ["<|endoftext|>", "\u2581", "\n"]
    if architecture == "phi3":
        assert found == [*user, "\u2581hi", *end, *tail]
    else:
        newline = ["\u2581", "\n"]
        assert found == [*user, *newline, "h", "i", *end, *newline, *tail]


@pytest.mark.parametrize(("kind", "prefix"), [("llama", True), ("llama", False), ("gemma4", False)])
def test_sentencepiece(tmp_path: Path, kind: str, prefix: bool) -> None:
    words = None
    if kind == "gemma4":
        lines_alone = pre_tokenizers.Split(Regex("\n+"), "isolated")  # as Gemma's merges are
        metaspace = pre_tokenizers.Metaspace(prepend_scheme="never")
        words = pre_tokenizers.Sequence([lines_alone, metaspace])
    backend, merges = train(lines(), prefix, words)
    backend.add_tokens([AddedToken("of course", special=False, normalized=False)])
    tokens = tokens_of(backend)
    scores, kinds = scores_of(tokens, merges), kinds_of(tokens)
    kinds[-1] = 4
    fields = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    fields |= {"merges": merges} if kind == "gemma4" else {"scores": scores}
    fields |= {} if prefix else {"add_space_prefix": False}
    path = write(tmp_path / "model.gguf", kind, tokens, kinds, **fields)
    tokenizer = check_same_tokens(path, backend)
    assert tokenizer("").input_ids == [1]  # a text begins with <s>
    assert tokenizer("of course", add_special_tokens=False).input_ids == [len(tokens) - 1]
    text = "na\u00efve \u4f60\u597d \U0001f600 and of course"
    ids = tokenizer(text).input_ids
    assert "".join(detokenize_stream(tokenizer, iter(ids))) == text
    # its tokens are bytes for a grammar, too: here with the blank of the first word
    grammar = GrammarCompiler(tokenizer, len(tokenizer), {2}).compile(Grammar.regex(f" ?{text}"))
    assert grammar.start.deep_copy().try_consume_tokens(ids[1:]) == len(ids) - 1


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("bert", {}, "is 'bert'; supported are gpt2"),
        ("gpt2", {"pre": "mystery"}, "is 'mystery'; supported are gpt-2"),
        ("gpt2", {}, "is None; supported are gpt-2"),
        ("gpt2", {"pre": "smollm", "merges": ["ab"]}, "its merge 'ab' does not have two tokens"),
        ("gpt2", {"pre": "smollm", "merges": ["a c"]}, "cannot be built"),
        ("gpt2", {"pre": "smollm", "eos_token_id": 9}, "refers to token 9 of 2"),
        ("llama", {}, "cannot be built"),
        ("llama", {"scores": [0.0]}, "has 2 tokens, but scores of 1"),
        ("llama", {}, "has no tokenizer.ggml.scores"),
        ("gemma4", {}, "has no tokenizer.ggml.merges"),
        ("llama", {"scores": [0.0, float("nan")]}, "nan in tokenizer.ggml.scores; it must be a"),
        ("llama", {"scores": 5}, "tokenizer.ggml.scores = 5; it must be a list of finite numbers"),
        ("llama", {"scores": ["a", "b"]}, "'a' in tokenizer.ggml.scores; it must be a list of"),
        ("gpt2", {"pre": 7}, "tokenizer.ggml.pre = 7; it must be a string"),
        ("gpt2", {"pre": "smollm", "merges": [1, 2]}, "1 in tokenizer.ggml.merges; it must be a"),
        ("gpt2", {"pre": "smollm", "add_bos_token": 1}, "add_bos_token = 1; it must be true or"),
        ("gpt2", {"pre": "smollm", "eos_token_id": "</s>"}, "refers to token '</s>' of 2"),
        ("gpt2", {"pre": "smollm", "merges": ["a " + "b" * 5000]}, "a merge of 5,002 characters"),
    ],
)
def test_invalid_tokenizers_are_rejected(
    tmp_path: Path, model: str, fields: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "model.gguf", model, ["a", "b"], [1, 1], **fields)
    with pytest.raises(TierForceError, match=message) as caught:
        gguf_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_duplicate_tokens_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "gpt2", ["a", "a"], [1, 1], pre="smollm")
    with pytest.raises(TierForceError, match="has a duplicate token"):
        gguf_tokenizer(path)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["a", "b" * 3_000_000], "has a token of 3,000,000 characters; at most 1,024"),
        (
            [f"{'c' * 1000}{at}" for at in range(6000)],
            "have 6,022,890 characters; at most 4,194,304",
        ),
    ],
    ids=["long", "much"],
)
def test_vocabularies_too_large_to_build_are_rejected(
    tmp_path: Path, model: str, tokens: list[str], message: str
) -> None:
    fields = {"scores": [0.0] * len(tokens), "pre": "smollm"}
    path = write(tmp_path / "model.gguf", model, tokens, [1] * len(tokens), **fields)
    with pytest.raises(TierForceError, match=message):
        gguf_tokenizer(path)


def test_tokens_with_too_many_possible_merges_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.text.gguf_tokenizer, "MAX_MERGES", 500)
    tokens = ["a" * length for length in range(1, 40)]
    fields = {"scores": [0.0] * len(tokens), "unknown_token_id": 0}
    path = write(tmp_path / "model.gguf", "llama", tokens, [1] * len(tokens), **fields)
    with pytest.raises(TierForceError, match="concatenations of one another in more than 500 ways"):
        gguf_tokenizer(path)


def test_more_tokens_than_any_model_has_are_rejected() -> None:
    with pytest.raises(TierForceError, match=r"has 1,048,577 tokens; at most 1,048,576"):
        check_vocabulary({"tokens": ["a"] * (MAX_TOKENS + 1)})
    with pytest.raises(TierForceError, match=r"has 2,097,153 merges; at most 2,097,152"):
        check_vocabulary({"merges": ["a b"] * (MAX_MERGES + 1)})


@pytest.mark.parametrize("value", [7, "a", [1, 2], [["a"]], True])
def test_vocabulary_fields_of_a_wrong_type_are_rejected(value: Any) -> None:
    with pytest.raises(
        TierForceError, match=r"tokenizer\.ggml\.tokens.*; it must be a list of strings"
    ):
        check_vocabulary({"model": "gpt2", "tokens": value})
    with pytest.raises(TierForceError, match=r"tokenizer\.chat_template.*; it must be a string"):
        check_vocabulary({"chat_template": [value]})


def test_every_pre_tokenizer_rule_is_a_valid_pattern() -> None:
    for splits in SPLITS.values():
        for rule in splits.rules:
            assert pre_tokenizers.Split(Regex(rule), "isolated").pre_tokenize_str("a 1")
