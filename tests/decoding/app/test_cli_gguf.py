"""A GGUF file works wherever a Hugging Face folder does, and generates the same text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

from decoding import GREEDY, Engine, Settings
from decoding.app.batch.job import model_digest, model_name
from support.commands import DRAFT, GREEDY_FP32, MODELS, TARGET, forked, records, refused
from support.gguf import convert

PROMPT = "It was the best of times, it was the worst of times"
NEW = ("--max-new-tokens", "24")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The built-in target and draft, as GGUF files with the same weights."""
    folder = tmp_path_factory.mktemp("gguf")
    target = convert(TARGET, folder / "target.gguf", Kind.BF16)
    (folder / "small").mkdir()
    return target, convert(DRAFT, folder / "small/draft.gguf", Kind.BF16)


def test_gguf_generates_same_text_as_folder(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = files
    job = ("generate", *GREEDY_FP32, *NEW, "--prompt", PROMPT, "--device", "cpu")
    expected = forked(tmp_path, *job, *MODELS)
    assert expected.code == 0
    # a folder with a single GGUF file is accepted in its place
    variants = ((target, draft.parent), (target, DRAFT), (TARGET, draft))
    for model, small in variants:
        result = forked(tmp_path, *job, "--model", str(model), "--draft", str(small))
        assert (result.code, result.out) == (0, expected.out), result.err
    two_ranks = forked(tmp_path, *job, "--model", str(target), "--draft", str(draft), "--gpus", "2")
    assert (two_ranks.code, two_ranks.out) == (0, expected.out), two_ranks.err


def test_engine_generates_same_text_from_gguf(files: tuple[Path, Path]) -> None:
    outputs = []
    for model, draft in (files, (TARGET, DRAFT)):
        engine = Engine.from_pretrained(model, draft, Settings(dtype="float32"), device="cpu")
        outputs.append("".join(engine.stream(PROMPT, 16, GREEDY)))
        assert engine.scheduler.stop_tokens == {1}
        engine.close()
    assert outputs[0] == outputs[1] != ""


def test_record_names_file_without_folder(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = files
    (tmp_path / "in").mkdir()
    (tmp_path / "in/book.txt").write_text(PROMPT)
    job = ("summarize", *GREEDY_FP32, *NEW, "--device", "cpu", "--input", str(tmp_path / "in"))
    pair = ("--model", str(target), "--draft", str(draft.parent))
    result = forked(tmp_path, *job, *pair, "--output", str(tmp_path / "out.jsonl"))
    assert result.code == 0, result.err
    (record,) = records(tmp_path / "out.jsonl")
    assert (record["model"], record["draft"]) == ("target.gguf", "draft.gguf")
    assert str(target.parent) not in json.dumps(record)
    folders = forked(tmp_path, *job, *MODELS, "--output", str(tmp_path / "folders.jsonl"))
    assert folders.code == 0, folders.err
    assert records(tmp_path / "folders.jsonl")[0]["summary"] == record["summary"]
    again = forked(tmp_path, *job, *pair, "--output", str(tmp_path / "out.jsonl"))
    assert "the document is already finished" in again.err


def test_digest_depends_on_content_only(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = files
    same = tmp_path / target.name
    shutil.copy(target, same)
    assert model_name(str(same)) == "target.gguf"
    assert model_digest(same) == model_digest(target)
    content = target.read_bytes()
    for offset in (content.index("\u0120 t".encode()) + 3, len(content) - 1):
        other = bytearray(content)
        other[offset] ^= 1
        same.write_bytes(other)
        assert model_digest(same) != model_digest(target)


def test_plan_equals_plan_of_folder(files: tuple[Path, Path], tmp_path: Path) -> None:
    plans = []
    for model, draft in (files, (TARGET, DRAFT)):
        pair = ("--model", str(model), "--draft", str(draft))
        result = forked(tmp_path, "plan", *pair, "--hardware", "1x4090", "--json")
        assert result.code == 0, result.err
        plans.append({**json.loads(result.out), "job": None})
    assert plans[0] == plans[1]


def test_broken_gguf_is_a_one_line_error(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(files[0].read_bytes()[:5000])
    for command in (("generate", "--prompt", "It was"), ("plan",)):
        assert "ends within its metadata" in refused(
            forked(tmp_path, *command, "--model", str(path))
        )
    path.write_bytes(files[0].read_bytes()[:-1])
    assert "ends before tensor" in refused(
        forked(tmp_path, "generate", "--prompt", "It was", "--model", str(path))
    )
    missing = forked(tmp_path, "generate", "--prompt", "It was", "--model", "nowhere.gguf")
    assert "nowhere.gguf: there is no such file" in refused(missing)
