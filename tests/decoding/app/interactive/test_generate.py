"""`tierforce generate` streams the text, and nothing but the text, to standard output; and `--help`
tells of every option.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.commands import BIN, MODELS, STEADY, TARGET, TORCHRUN, Fork, forked, refused, tierforce

PROMPT = "It was the best of times, it was the worst of times"
NEW = ("--max-new-tokens", "40")
JOB = ("generate", *MODELS, *STEADY, *NEW, "--prompt", PROMPT)


def test_the_text_is_the_same_however_many_ranks_write_it(tmp_path: Path) -> None:
    alone = forked(tmp_path, *JOB)
    assert alone.code == 0
    assert len(alone.out) > 80
    assert alone.err.count("\n") == 2  # what runs where, and what it took
    assert "40 written" in alone.err
    two = forked(tmp_path, *JOB, "--gpus", "2")
    assert (two.code, two.out) == (0, alone.out)
    assert two.err.count("\n") == 2
    launched = Fork(tmp_path, *JOB, command=TORCHRUN).finish()
    assert (launched.code, launched.out) == (0, alone.out)
    assert "Traceback" not in launched.err


@pytest.mark.slow
def test_so_it_is_in_interpreters_of_their_own(tmp_path: Path) -> None:
    alone, two = forked(tmp_path, *JOB), tierforce(*JOB, "--gpus", "2")
    assert (two.code, two.out) == (0, alone.out)
    assert two.err.count("\n") == 2


def test_a_prompt_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("\ufeff" + PROMPT, encoding="utf-8")
    told = forked(tmp_path, *JOB)
    read = forked(
        tmp_path, "generate", *MODELS, *STEADY, *NEW, "--prompt-file", str(tmp_path / "prompt.txt")
    )
    assert read.out == told.out != ""


def test_a_seed_repeats_a_text_and_another_seed_does_not(tmp_path: Path) -> None:
    texts = [
        forked(tmp_path, *JOB, "--deterministic", "--temperature", "1", "--seed", seed).out
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_end_of_a_prompt_that_is_too_long_is_what_is_continued(tmp_path: Path) -> None:
    end = " the worst of times"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    whole, kept = (len(tokenizer(text).input_ids) for text in (PROMPT, end))
    short = forked(tmp_path, "generate", *MODELS, *STEADY, *NEW, "--prompt", end)
    cut = forked(tmp_path, *JOB, "--context", str(40 + kept))
    assert cut.out == short.out
    assert (
        f"warning: longer than the context of {40 + kept} tokens; the first {whole - kept} tokens "
        "were dropped" in cut.err
    )


def test_what_a_text_took_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "stats.json"
    written = forked(tmp_path, *JOB, "--stats", str(kept))
    assert written.code == 0
    stats = json.loads(kept.read_text())
    assert len(stats["token_ids"]) == 40
    assert AutoTokenizer.from_pretrained(TARGET).decode(stats["token_ids"]) + "\n" == written.out
    assert (stats["new_tokens"], stats["finish_reason"]) == (40, "length")
    assert stats["ms_per_token"] > 0
    (tmp_path / "file").write_text("")
    line = refused(forked(tmp_path, *JOB, "--stats", str(tmp_path / "file" / "stats.json")))
    assert "--stats" in line
    assert "cannot be written" in line
    os.mkfifo(tmp_path / "pipe")
    line = refused(forked(tmp_path, *JOB, "--stats", str(tmp_path / "pipe")))
    assert "is not a regular file" in line
    book = tmp_path / "book.txt"
    book.write_text(PROMPT)
    line = refused(forked(tmp_path, *JOB, "--stats", str(book)))
    assert "book.txt is there already, and is no JSON object: name another file" in line
    assert book.read_text() == PROMPT


def test_a_model_without_a_chat_template_cannot_be_asked(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *JOB, "--chat"))
    assert "the tokenizer has no chat template: use an instruct model, or leave out --chat" in line


def test_text_arrives_while_it_is_written_and_a_reader_may_leave(tmp_path: Path) -> None:
    slow = (
        "--gpu-kv-layers",
        "0",
        "--link",
        "emulated:0.01",
        "--max-new-tokens",
        "400",
        "--gpus",
        "2",
    )
    os.mkfifo(tmp_path / "pipe")
    job = Fork(tmp_path, *JOB, *slow, out=tmp_path / "pipe")
    with (tmp_path / "pipe").open("rb", buffering=0) as reader:
        assert len(reader.read(10)) > 0
        assert not job.has_ended()
    result = job.finish()
    assert result.code != 0
    assert "Error" not in result.err


COMMON = {
    *(
        "--model",
        "--draft",
        "--gpus",
        "--device",
        "--dtype",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--deterministic",
    ),
    *(
        "--mode",
        "--context",
        "--rope",
        "--chunk-size",
        "--retrieval-budget",
        "--num-draft-tokens",
        "--compress-offload",
        "--gpu-kv-layers",
        "--split-kv-layers",
    ),
    *(
        "--device-memory",
        "--hardware",
        "--link",
        "--prompt-lookup-ngram",
        "--graphs",
        "--prompt-cache",
        "--prompt-cache-limit",
    ),
}


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (
            "summarize",
            {
                "--input",
                "--output",
                "--instruction",
                "--concurrency",
                "--cluster",
                "--machines",
            },
        ),
        ("generate", {"--prompt", "--prompt-file", "--chat", "--stats"}),
    ],
)
def test_help_tells_of_every_option(command: str, own: set[str], tmp_path: Path) -> None:
    result = forked(tmp_path, command, "--help")
    assert result.code == 0
    words = [line.strip("│* ").split(maxsplit=1) for line in result.out.splitlines()]
    described = {each[0] for each in words if each and re.fullmatch("--[a-z0-9-]+", each[0])}
    assert described == COMMON | own | {"--help"}


def test_a_command_is_needed(tmp_path: Path) -> None:
    result = forked(tmp_path)
    assert result.code != 0
    assert "summarize" in result.out + result.err
    assert "generate" in result.out + result.err


def test_an_option_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = forked(tmp_path, *JOB, "--flux", "1")
    assert result.code == 2
    assert "--flux" in result.err


def test_a_text_may_come_from_standard_input(tmp_path: Path) -> None:
    command = ("generate", *MODELS, *STEADY, "--max-new-tokens", "4")
    piped = subprocess.run(
        [str(BIN / "tierforce"), *command, "--prompt-file", "-"],
        input="It was, Müller said".encode(),
        capture_output=True,
        check=False,
    )
    assert piped.returncode == 0, piped.stderr
    told = forked(tmp_path, *command, "--prompt", "It was, Müller said")
    assert piped.stdout.decode() == told.out
    empty = forked(tmp_path, *command, "--prompt-file", "-")  # a fork reads /dev/null
    assert empty.code == 1
    assert "tierforce: standard input is empty." in empty.err
