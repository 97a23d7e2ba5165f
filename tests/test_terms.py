"""Tracked files use the field's standard terms, and none of the project's old private words.

The tables below have each old word and what to write instead; docs/architecture.md has a glossary.
"""

from __future__ import annotations

import io
import keyword
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# suffixes; Makefile and .ci/run have none
KINDS = {".py", ".md", ".toml", ".html", ".css", ".js", ""}
EXCLUDED = {
    "tests/test_terms.py": "it lists the old words",
    "demo/draft": "a vocabulary",
    "demo/target": "a vocabulary",
    "LICENSE": "a standard license",
}
# in prose and code alike: a regular expression, and what to write instead
WORDS = {
    r"laws?": "distribution, probs",
    r"behind": "after",
    r"anew": "again",
    r"nobody|whoever": "no caller, the caller",
    r"told|said": "notified, passed, or the noun itself",
    r"lest": "so that ... does not",
    r"texts": "requests, sequences, documents, prompts or strings",
    r"(?<!forward )passes": "forwards, forward passes; for the verb another one",
    r"(?:a|one|the|this|that|each|every|any|another|first|last|next|short|shared) pass": "forward",
    r"sliced": "split",
    r"(?:far|near|late) (?:layers?|ones?|KV)": "offloaded, on-device, deferred",
    r"comes? late": "deferred",
    r"keepers?|outlooks?|choosers?": "prefix cache, plan report, selector",
    r"settles?|settled|settling": "set_length, roll back",
    r"steady|steadily": "batch-invariant, deterministic",
    r"lends?|lent|lending": "share, borrow",
    r"senseless|absurd": "invalid, implausible",
    r"stands?(?!-in| for)|stood": "is accepted, is in, holds",
    r"lets? go|letting go|good for nothing": "release; unusable",
    r"in front of|on (?:its|their) way": "preceding; in flight",
    r"(?:tokens|layers|rows) a head|(?:ms|seconds|bytes|tokens|times) a (?:token|second)": "per",
    r"[GM]B a second": "GB/s",
    r"trials?": "self-test",
    r"affair": "does not affect",
    r"recordings?": "captured graph, capture",
    r"--(?:keep|keep-limit|identical|texts-at-once|budget|lookup|draft-length|inner-length)": (
        "the option's name in docs/options.md"
    ),
    r"--(?:resident-layers|sliced-layers|packed|read-early)": "docs/options.md",
}
# parts of names in code, between underscores
PARTS = {
    "law": "probs, distribution",
    "laws": "probs, distributions",
    "way": "strategy, variant",
    "ways": "strategies, variants",
    "texts": "requests, sequences, documents",
    "passes": "forwards",
    "far": "offloaded",
    "late": "deferred",
    "sliced": "split",
    "refuse": "check, validate",
    "refuses": "check, validate",
    "most": "max",
    "least": "min",
    "anew": "reset, again",
    "steady": "batch_invariant",
    "steadily": "batch_invariant",
    "lent": "shared",
    "told": "notified",
    "said": "the noun itself",
    "behind": "after",
    "keeper": "prefix_cache",
    "outlook": "report",
    "settle": "set_length",
    "trial": "self_test",
    "nobody": "none",
}
# names of libraries
ALLOWED_NAMES = {"most_common": "collections.Counter", "all_inner_texts": "playwright"}
# a comment that is no sentence without the line it is on
CLAUSE = re.compile(r"#\s+(?:of|that|which|whose|whom|who|what|by|where|so|when|but|for|lest)\b")
# findings that stay: file, word, and why
EXCEPTIONS = {
    (
        "decoding/app/results/record_lines.py",
        "passes",
    ): "a field of records of version 0.1, refused",
    ("bench/drafts/acceptance.py", "texts"): "a field of rows, shown in docs/results",
    ("tests/bench/test_acceptance.py", "texts"): "a field of rows, shown in docs/results",
    ("bench/drafts/needle.py", "stands"): "a field of rows, shown in docs/results",
    ("bench/harness/tables.py", "stands"): "a field of rows, shown in docs/results",
    ("tests/bench/test_acceptance.py", "stands"): "a field of rows, shown in docs/results",
    ("bench/drafts/needle.py", "keeper"): "a word of a planted sentence",
    ("tests/system/test_deterministic_books.py", "texts"): "a field of rows, shown in docs/results",
    ("docs/formats.md", "passes"): "names of version 0.1, and what they became",
    ("docs/formats.md", "sliced"): "names of version 0.1, and what they became",
    ("docs/results/README.md", "sliced"): "the mode's name in documents of version 0.1",
}
_PATTERNS = [
    (re.compile(rf"(?<![\w-])(?:{word})(?!\w)", re.IGNORECASE), instead)
    for word, instead in WORDS.items()
]
# lines and files with none of these have nothing to find; one search each instead of one per word
_ANY_WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(WORDS)})(?!\w)".lower())
_ANY_PART = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(PARTS)})(?![a-z0-9])")
_TABLE = re.compile(r"<!-- table .*?<!-- end -->", re.DOTALL)


def tracked() -> Iterator[Path]:
    """Yield the tracked files that are searched: not the JSON documents of past runs."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        path = ROOT / name
        if any(name == each or name.startswith(f"{each}/") for each in EXCLUDED):
            continue
        if path.suffix in KINDS and path.is_file():
            yield path


def words_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, word and replacement for every old word, but for those in generated tables."""
    text = _TABLE.sub(lambda table: "\n" * table[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        if not _ANY_WORD.search(line.lower()):
            continue
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(line):
                yield number, match[0].lower(), instead


def names_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, part and replacement for every old part of a name in Python source."""
    if not _ANY_PART.search(source.lower()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NAME or keyword.iskeyword(token.string):
            continue
        if token.string not in ALLOWED_NAMES:
            for part in token.string.strip("_").lower().split("_"):
                if part in PARTS:
                    yield token.start[0], part, f"{PARTS[part]} (in the name {token.string})"


def clauses_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, comment and advice for comments that begin as a dependent clause."""
    if not CLAUSE.search(source):
        return
    last = -1  # line of the previous comment on a line of its own, which this one may continue
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_alone = not token.line[:column].strip()
            if CLAUSE.match(token.string) and not (is_alone and line == last + 1):
                yield line, token.string, "a noun phrase or a sentence"
            last = line if is_alone else -1


def findings(path: Path) -> Iterator[str]:
    """Yield one line per old word in a file that no exception covers."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    found = list(words_in(text))
    if path.suffix == ".py":
        found += [*names_in(text), *clauses_in(text)]
    for line, word, instead in found:
        if (name, word) not in EXCEPTIONS:
            yield f"{name}:{line}: {word}: write {instead}"


def test_old_words_are_gone() -> None:
    found = [line for path in tracked() for line in findings(path)]
    assert not found, "\n".join(["old words are left:", *found[:40]])


def test_exceptions_are_needed() -> None:
    for (name, word), reason in EXCEPTIONS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert word in {found for _, found, _ in words_in(text)} | {
            found for _, found, _ in (names_in(text) if name.endswith(".py") else ())
        }, f"{name} no longer has {word} ({reason})"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("the law of the target", "law"),
        ("tokens behind the prompt", "behind"),
        ("two passes of the model", "passes"),
        ("80 ms a token", "ms a token"),
        ("tierforce chat --keep DIR", "--keep"),
        ("what stands is kept", "stands"),
    ],
)
def test_an_old_word_is_found(text: str, word: str) -> None:
    assert word in [found for _, found, _ in words_in(f"\n{text}\n")]


@pytest.mark.parametrize(
    "text",
    ["forward passes", "a stand-in for a GPU", "--keepalive", "lawful", "what it stands for"],
)
def test_a_standard_word_is_not_found(text: str) -> None:
    assert not list(words_in(text))


def test_names_and_comments_are_searched() -> None:
    source = 'x = 1  # of the layer\n# A sentence\n# which goes on.\nrefuse_all("law")\n'
    assert [(line, part) for line, part, _ in names_in(source)] == [(4, "refuse")]
    assert [(line, text) for line, text, _ in clauses_in(source)] == [(1, "# of the layer")]
