"""`tierforce generate` streams only the generated text to standard output; `--help` lists every
option.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.commands import (
    BIN,
    GREEDY_FP32,
    MODELS,
    TARGET,
    TORCHRUN,
    Fork,
    forked,
    refused,
    tierforce,
)

PROMPT = "It was the best of times, it was the worst of times"
NEW = ("--max-new-tokens", "40")
JOB = ("generate", *MODELS, *GREEDY_FP32, *NEW, "--prompt", PROMPT)


def test_output_does_not_depend_on_ranks(tmp_path: Path) -> None:
    alone = forked(tmp_path, *JOB)
    assert alone.code == 0
    assert len(alone.out) > 80
    assert alone.err.count("\n") == 2  # the startup line and the summary
    assert "40 written" in alone.err
    two_ranks = forked(tmp_path, *JOB, "--gpus", "2")
    assert (two_ranks.code, two_ranks.out) == (0, alone.out)
    assert two_ranks.err.count("\n") == 2
    launched = Fork(tmp_path, *JOB, command=TORCHRUN).finish()
    assert (launched.code, launched.out) == (0, alone.out)
    assert "Traceback" not in launched.err


@pytest.mark.slow
def test_output_is_the_same_in_new_interpreters(tmp_path: Path) -> None:
    alone, two_ranks = forked(tmp_path, *JOB), tierforce(*JOB, "--gpus", "2")
    assert (two_ranks.code, two_ranks.out) == (0, alone.out)
    assert two_ranks.err.count("\n") == 2


def test_prompt_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("\ufeff" + PROMPT, encoding="utf-8")
    expected = forked(tmp_path, *JOB)
    from_file = forked(
        tmp_path,
        "generate",
        *MODELS,
        *GREEDY_FP32,
        *NEW,
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
    )
    assert from_file.out == expected.out != ""


def test_seed_determines_output(tmp_path: Path) -> None:
    outputs = [
        forked(tmp_path, *JOB, "--deterministic", "--temperature", "1", "--seed", seed).out
        for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_prompt_is_truncated_at_its_beginning(tmp_path: Path) -> None:
    end = " the worst of times"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompt_tokens, kept = (len(tokenizer(text).input_ids) for text in (PROMPT, end))
    short = forked(tmp_path, "generate", *MODELS, *GREEDY_FP32, *NEW, "--prompt", end)
    truncated = forked(tmp_path, *JOB, "--context", str(40 + kept))
    assert truncated.out == short.out
    assert (
        f"warning: the prompt is longer than the context of {40 + kept} tokens: its first "
        f"{prompt_tokens - kept} tokens were dropped" in truncated.err
    )


def test_stats_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stats.json"
    result = forked(tmp_path, *JOB, "--stats", str(path))
    assert result.code == 0
    stats = json.loads(path.read_text())
    assert len(stats["token_ids"]) == 40
    assert AutoTokenizer.from_pretrained(TARGET).decode(stats["token_ids"]) + "\n" == result.out
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
    assert "book.txt exists and is not a JSON object: choose another file" in line
    assert book.read_text() == PROMPT


def test_chat_needs_a_chat_template(tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *JOB, "--chat"))
    assert "the tokenizer has no chat template: use an instruct model, or leave out --chat" in line


def test_output_is_streamed_and_reader_may_close_pipe(tmp_path: Path) -> None:
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
        "--weights",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--min-p",
        "--repetition-penalty",
        "--presence-penalty",
        "--frequency-penalty",
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
        "--split-budget",
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
                "--include",
                "--output",
                "--format",
                "--instruction",
                "--questions",
                "--system",
                "--template",
                "--schema",
                "--long",
                "--part-instruction",
                "--merge-instruction",
                "--concurrency",
                "--cluster",
                "--machines",
            },
        ),
        ("generate", {"--prompt", "--prompt-file", "--chat", "--stats", "--schema"}),
    ],
)
def test_help_lists_every_option(command: str, own: set[str], tmp_path: Path) -> None:
    result = forked(tmp_path, command, "--help")
    assert result.code == 0
    words = [line.strip("│* ").split(maxsplit=1) for line in result.out.splitlines()]
    options = {line[0] for line in words if line and re.fullmatch("--[a-z0-9-]+", line[0])}
    assert options == COMMON | own | {"--help"}


def test_missing_command_is_a_usage_error(tmp_path: Path) -> None:
    result = forked(tmp_path)
    assert result.code != 0
    assert "summarize" in result.out + result.err
    assert "generate" in result.out + result.err


def test_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    result = forked(tmp_path, *JOB, "--flux", "1")
    assert result.code == 2
    assert "--flux" in result.err


def test_prompt_from_standard_input(tmp_path: Path) -> None:
    command = ("generate", *MODELS, *GREEDY_FP32, "--max-new-tokens", "4")
    from_stdin = subprocess.run(
        [str(BIN / "tierforce"), *command, "--prompt-file", "-"],
        input="It was, Müller asked".encode(),
        capture_output=True,
        check=False,
    )
    assert from_stdin.returncode == 0, from_stdin.stderr
    expected = forked(tmp_path, *command, "--prompt", "It was, Müller asked")
    assert from_stdin.stdout.decode() == expected.out
    empty = forked(tmp_path, *command, "--prompt-file", "-")  # a fork reads /dev/null
    assert empty.code == 1
    assert "tierforce: standard input is empty." in empty.err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "book.pdf"
    file.write_bytes(b"%PDF-1.4 cut")
    prompt = forked(tmp_path, "generate", *MODELS, "--prompt-file", str(file))
    asked = forked(tmp_path, "ask", *MODELS, "--document", str(file), "Who?")
    for result in (prompt, asked):
        assert result.code == 1
        assert f"tierforce: {file}: it is not a PDF, or a damaged one" in result.err
