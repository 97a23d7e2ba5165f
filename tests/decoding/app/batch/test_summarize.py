"""Batches withstand hostile names, too little memory, stale records and untrusted code."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.app.batch.job import model_digest, model_name
from decoding.app.terminal.streams import printable
from offload.errors import TierForceError
from parallel.model.transformer import Transformer
from parallel.ranks.environment import RankInfo, ignored_variables, rank_from_env
from support.commands import (
    DRAFT,
    GREEDY_FP32,
    MODELS,
    TARGET,
    Finished,
    forked,
    records,
    refused,
    tierforce,
    variant,
)

GOOD = "It was the best of times, it was the worst of times. "
NEW = ("--max-new-tokens", "6")
ESCAPES = "evil\x1b]0;pwned\x07\x1b[2Jx"


def summarize(
    folder: Path, source: Path, *more: str, before: Any = None
) -> tuple[Finished, list[dict[str, Any]]]:
    """Run the command; return its result and the records."""
    output = folder / "out.jsonl"
    job = (
        "summarize",
        *MODELS,
        *GREEDY_FP32,
        *NEW,
        "--input",
        str(source),
        "--output",
        str(output),
        *more,
    )
    result = forked(folder, *job, before=before)
    return result, records(output)


def write(folder: Path, **documents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in documents.items():
        (folder / f"{name}.txt").write_text(content)
    return folder


def write_jsonl(folder: Path, *ids: str) -> Path:
    source = folder / "in.jsonl"
    source.write_text("\n".join(json.dumps({"id": id, "text": GOOD}) for id in ids))
    return source


# -- terminal output -------------------------------------------------------------------------------


def _use_terminal() -> None:
    """Make standard error a terminal that is copied to the original standard error."""
    screen = os.dup(2)
    reader, terminal = pty.openpty()
    os.dup2(terminal, 2)

    def show() -> None:
        while output := os.read(reader, 1 << 16):
            os.write(screen, output)

    threading.Thread(target=show, daemon=True).start()


@pytest.mark.parametrize("before", [None, _use_terminal], ids=["log", "terminal"])
def test_document_names_are_escaped(before: Any, tmp_path: Path) -> None:
    names = ("x [/b]", "notes [draft]", ESCAPES)
    result, found = summarize(tmp_path, write_jsonl(tmp_path, *names), before=before)
    assert result.code == 0, result.err
    assert tuple(record["id"] for record in found) == names
    assert all(printable(name) in result.err for name in names)
    assert "\x1b]0;" not in result.err
    assert "\x1b[2J" not in result.err


def _close_stderr_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


def _fill_stderr() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


@pytest.mark.parametrize("before", [_close_stderr_pipe, _fill_stderr])
def test_lost_standard_error_does_not_end_the_batch(before: Any, tmp_path: Path) -> None:
    result, found = summarize(
        tmp_path, write(tmp_path / "in", a=GOOD, b=GOOD, c=GOOD), before=before
    )
    assert result.code == 0
    assert ["summary" in record for record in found] == [True] * 3


def test_startup_line_and_count_of_truncated_documents(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD * 20, b=GOOD, c=GOOD * 30)
    result, _ = summarize(
        tmp_path, source, "--context", "150", "--gpu-kv-layers", "2", "--long", "cut"
    )
    lines = result.err.splitlines()
    assert (
        lines[0]
        == "1 x CPU with 1 thread; float32, hierarchical, context 150; at 144 prompt tokens, KV of "
        "4 of 6 layers in host memory; 3 concurrent requests"
    )
    assert lines[-1].startswith("3 of 3 documents finished, in ")
    assert ", 2 of them truncated to the context of 150 tokens: " in lines[-1]
    assert f"`tierforce show {tmp_path / 'out.jsonl'}` prints" in lines[-1]


def test_missing_gpus_give_a_warning(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD)
    result, _ = summarize(tmp_path, source, "--device", "auto", "--gpus", "1")
    has_warning = "warning: --gpus 1, but torch finds no GPU here" in result.err
    assert has_warning != torch.cuda.is_available()
    (tmp_path / "out.jsonl").unlink()
    assert "warning" not in summarize(tmp_path, source, "--device", "cpu", "--gpus", "1")[0].err


# -- too little memory -----------------------------------------------------------------------------


def test_document_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, large=GOOD * 800, z=GOOD)
    result, found = summarize(
        tmp_path,
        source,
        "--device-memory",
        "0.045",
        "--gpu-kv-layers",
        "6",
        "--retrieval-budget",
        "64",
    )
    assert [record["id"] for record in found if "summary" in record] == [
        "a.txt",
        "z.txt",
    ], result.err
    (failed,) = (record for record in found if "error" in record)
    assert failed["kind"] == "InsufficientMemoryError"
    assert "warning: large.txt (" in result.err
    assert "prompt tokens) will fail: this job needs" in result.err
    assert result.code == 1
    assert "2 of 3 documents finished" in result.err


def test_prompt_that_does_not_fit_is_an_error_with_sizes(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text(GOOD * 400)
    job = (
        "generate",
        *MODELS,
        *GREEDY_FP32,
        *NEW,
        "--prompt-file",
        str(tmp_path / "large.txt"),
        "--device-memory",
        "0.03",
    )
    result = forked(tmp_path, *job)
    assert (result.code, result.out) == (1, "")
    last = result.err.splitlines()[-1]
    assert last.startswith("tierforce: this job needs ")
    assert "GB of device memory beside the weights" in last


def _limit_host_memory() -> None:
    real = Transformer.prefill_steps

    def prefill_steps(self: Transformer, tokens: torch.Tensor, *arguments: Any) -> Any:
        if len(tokens) > 500:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory"
            )
        return real(self, tokens, *arguments)

    Transformer.prefill_steps = prefill_steps


def test_host_memory_that_runs_out_fails_one_document(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, large=GOOD * 60, z=GOOD)
    result, found = summarize(tmp_path, source, before=_limit_host_memory)
    kinds = {record["id"]: record.get("kind") for record in found}
    assert kinds == {"a.txt": None, "large.txt": "InsufficientMemoryError", "z.txt": None}
    (error,) = (record["error"] for record in found if "error" in record)
    assert "out of memory: [enforce fail" in error
    assert result.code == 1
    assert "2 of 3 documents finished" in result.err


# -- finished records ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a document and its finished record."""
    folder = tmp_path_factory.mktemp("finished")
    summarize(folder, write(folder / "in", a=GOOD * 2))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        ("--temperature", "0.5"),
        ("--instruction", "What is it about?"),
        ("--max-new-tokens", "7"),
        ("--model", str(DRAFT)),
        (),
    ],
    ids=["sampling", "instruction", "length", "model", "text"],
)
def test_record_of_another_job_does_not_count_as_finished(
    change: tuple[str, ...], finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").write_bytes((finished / "out.jsonl").read_bytes())
    source = finished / "in" if change else write(tmp_path / "in", a=GOOD * 3)
    result, found = summarize(tmp_path, source, *change)
    assert result.code == 0, result.err
    assert "warning: 1 finished records" in result.err
    assert len({record["digest"] for record in found}) == 2  # the old record stays
    again, same = summarize(tmp_path, source, *change)
    assert "the document is already finished" in again.err
    assert same == found


def test_record_is_finished_under_another_mode_and_memory(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes((finished / "out.jsonl").read_bytes())
    result, found = summarize(
        tmp_path,
        finished / "in",
        "--mode",
        "plain",
        "--gpu-kv-layers",
        "1",
        "--retrieval-budget",
        "64",
    )
    assert "the document is already finished" in result.err
    (record,) = found
    names = (
        record["model"],
        record["draft"],
        record["instruction"],
        record["dtype"],
        record["device"],
    )
    assert names == ("target", "draft", "Summarize the text above.", "float32", "cpu")
    assert record["date"].startswith("20")


def test_record_without_a_digest_counts_as_finished(finished: Path, tmp_path: Path) -> None:
    (record,) = records(finished / "out.jsonl")
    del record["digest"]
    (tmp_path / "out.jsonl").write_text(json.dumps(record) + "\n")
    result, _ = summarize(tmp_path, finished / "in", "--instruction", "What is it about?")
    assert "the document is already finished" in result.err


def test_model_digest_depends_on_files_and_name_omits_folder(tmp_path: Path) -> None:
    variant(tmp_path / "same")
    variant(tmp_path / "trained", edit=lambda tensors: tensors["model.norm.weight"].add_(1))
    assert model_digest(tmp_path / "same") != model_digest(TARGET)  # its config was rewritten
    variant(tmp_path / "again")
    assert (
        model_digest(tmp_path / "same")
        == model_digest(tmp_path / "again")
        != model_digest(tmp_path / "trained")
    )
    assert model_name(str(tmp_path / "same")) == "same"
    assert model_name("someone/model") == "someone/model"
    with pytest.raises(TierForceError, match="No such file"):
        model_digest(tmp_path / "missing")


# -- untrusted code, and launcher variables --------------------------------------------------------

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Evil: pass\n"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_code_of_a_checkpoint_is_never_run(where: str, option: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    variant(model)
    (model / "evil.py").write_text(EVIL)
    config = json.loads((model / where).read_text())
    auto = (
        {"AutoTokenizer": ["evil.Evil", None]}
        if where == "tokenizer_config.json"
        else {"AutoConfig": "evil.Evil"}
    )
    named = (
        {"tokenizer_class": "Evil"} if where == "tokenizer_config.json" else {"model_type": "evil"}
    )
    (model / where).write_text(json.dumps({**config, **named, "auto_map": auto}))
    line = refused(forked(tmp_path, "generate", "--prompt", "It was", *MODELS, option, str(model)))
    assert "code that came with the model" in line
    assert "trust_remote_code" not in line
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    "left_over", [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}]
)
def test_leftover_launcher_variables_are_reported_and_ignored(
    left_over: dict[str, str], tmp_path: Path
) -> None:
    result, found = summarize(
        tmp_path, write(tmp_path / "in", a=GOOD), before=_Environment(left_over)
    )
    assert result.code == 0
    assert ["summary" in record for record in found] == [True]
    assert next(iter(left_over)) in result.err.splitlines()[0]
    assert "is ignored: this process runs alone" in result.err.splitlines()[0]


TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class _Environment:
    def __init__(self, variables: dict[str, str]):
        self.variables = variables

    def __call__(self) -> None:
        os.environ |= self.variables


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "below 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "not a valid rank"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "not a valid rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({**TWO, "MASTER_PORT": "abc"}, "MASTER_PORT=abc"),
        ({**TWO, "MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
    ],
)
def test_invalid_rank_variables_are_an_error(
    variables: dict[str, str], word: str, tmp_path: Path
) -> None:
    with pytest.raises(TierForceError, match=word):
        rank_from_env(variables)
    line = refused(
        forked(tmp_path, "generate", *MODELS, "--prompt", "It was", before=_Environment(variables))
    )
    assert word in line


def test_rank_from_launcher_variables() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert rank_from_env(variables) == RankInfo(3, 4, 3, 4)
    assert rank_from_env({**variables, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == RankInfo(
        3, 4, 1, 2
    )
    assert ignored_variables(variables) is None
    assert rank_from_env({}) == rank_from_env({"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo()
    assert ignored_variables({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and its like")
def test_full_standard_output_is_a_one_line_error(tmp_path: Path) -> None:
    result = forked(tmp_path, "generate", *MODELS, *NEW, "--prompt", "It was", before=_fill_stdout)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("tierforce: ")
    assert tierforce("--help").code == 0


def _fill_stdout() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
