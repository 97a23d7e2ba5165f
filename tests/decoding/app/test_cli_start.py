"""A job that cannot start explains it in one line on standard error, and exits with a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.commands import DRAFT, MODELS, forked, refused, variant

GENERATE = ("generate", "--prompt", "It was")
Case = Callable[[Path], tuple[str, ...]]
CASES: list[tuple[Case, tuple[str, ...]]] = []


def case(*words: str) -> Callable[[Case], Case]:
    """Register a function that returns arguments that fail, and words its error must have."""

    def register(build: Case) -> Case:
        CASES.append((build, words))
        return build

    return register


def summarize(source: Path, output: Path, *more: str) -> tuple[str, ...]:
    return "summarize", *MODELS, "--input", str(source), "--output", str(output), *more


def write_text(folder: Path, content: str = "It was the best of times.") -> Path:
    (folder / "a.txt").write_text(content)
    return folder / "a.txt"


@case("no weights", "model.safetensors")
def missing_weights(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    (folder / "model/model.safetensors").unlink()
    return *GENERATE, *model


@case("not a complete safetensors file", "Fetch it again")
def truncated_weights(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    weights = folder / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5_000_000])
    return *GENERATE, *model


@case("not a complete safetensors file", "Fetch it again")
def corrupt_weights(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    (folder / "model/model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    return *GENERATE, *model


@case("model.norm.weight", "shape (255,)", "(256,)")
def weight_of_another_shape(folder: Path) -> tuple[str, ...]:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()

    return *GENERATE, *variant(folder / "model", edit=shorten)


@case("config.json", "complete")
def missing_config(folder: Path) -> tuple[str, ...]:
    return *GENERATE, "--model", str(folder)


@case("config.json", "cannot be read")
def broken_config(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    (folder / "model/config.json").write_text('{"model_type": "llama", ')
    return *GENERATE, *model


@case("config.json", "256", "attention heads (3)")
def inconsistent_config(folder: Path) -> tuple[str, ...]:
    return *GENERATE, *variant(folder / "model", num_attention_heads=3, num_key_value_heads=3)


@case("model_type 'gpt2' is not supported", "llama")
def unsupported_architecture(folder: Path) -> tuple[str, ...]:
    return *GENERATE, *variant(folder / "model", model_type="gpt2")


@case("tokenizer cannot be loaded")
def broken_tokenizer(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    (folder / "model/tokenizer.json").write_text("{")
    return *GENERATE, *model


@case("chat template", "No documents")
def chat_template_that_raises(folder: Path) -> tuple[str, ...]:
    model = variant(folder / "model")
    (folder / "model/chat_template.jinja").write_text("{{ raise_exception('No documents') }}")
    return *summarize(write_text(folder), folder / "out.jsonl"), *model


@case("draft's vocabulary", "share the target's tokenizer")
def draft_with_another_vocabulary(folder: Path) -> tuple[str, ...]:
    variant(folder / "draft", DRAFT)
    path = folder / "draft/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    path.write_text(json.dumps(tokenizer))
    return *GENERATE, *MODELS, "--draft", str(folder / "draft")


@case("is a file", "folder")
def model_that_is_a_file(folder: Path) -> tuple[str, ...]:
    return *GENERATE, "--model", str(write_text(folder))


@case("someone/nothing", "neither a local folder nor a model found on the hub")
def unknown_hub_model(folder: Path) -> tuple[str, ...]:
    return *GENERATE, "--model", "someone/nothing"


@case("nowhere.txt", "No such file")
def missing_input(folder: Path) -> tuple[str, ...]:
    return summarize(folder / "nowhere.txt", folder / "out.jsonl")


@case("nowhere.txt", "No such file")
def missing_prompt_file(folder: Path) -> tuple[str, ...]:
    return "generate", *MODELS, "--prompt-file", str(folder / "nowhere.txt")


@case("no document", "nothing to summarise (1: not a kind of document that is read)")
def folder_without_documents(folder: Path) -> tuple[str, ...]:
    (folder / "picture.png").write_bytes(b"\0")
    return summarize(folder, folder / "out.jsonl")


@case("no line", "nothing to summarise")
def empty_jsonl(folder: Path) -> tuple[str, ...]:
    (folder / "in.jsonl").write_text("\n\n")
    return summarize(folder / "in.jsonl", folder / "out.jsonl")


@case("'7'", "more than once")
def duplicate_ids(folder: Path) -> tuple[str, ...]:
    (folder / "in.jsonl").write_text('{"id": 7, "text": "a"}\n{"id": "7", "text": "b"}\n')
    return summarize(folder / "in.jsonl", folder / "out.jsonl")


@case("--output", "has --input", "in it", "name another folder")
def output_that_is_the_folder_of_the_input(folder: Path) -> tuple[str, ...]:
    return summarize(write_text(folder), folder)


@case("--output", "a folder with other files, such as a.txt", "name a new one")
def output_that_is_a_folder_of_other_files(folder: Path) -> tuple[str, ...]:
    (folder / "notes").mkdir()
    write_text(folder / "notes")
    return summarize(write_text(folder), folder / "notes")


@case("--output", "No such file or directory")
def output_in_a_missing_folder(folder: Path) -> tuple[str, ...]:
    return summarize(write_text(folder), folder / "missing/out.jsonl")


@case("--output", "no md file that a job wrote", "choose another file")
def output_of_somebody_else(folder: Path) -> tuple[str, ...]:
    (folder / "notes.md").write_text("# Notes")
    return summarize(write_text(folder), folder / "notes.md")


@case("--output", "would replace --input", "name another")
def output_that_is_the_input(folder: Path) -> tuple[str, ...]:
    return summarize(write_text(folder), folder / "a.txt")


@case("--output", "would replace --input", "in.jsonl")
def records_in_place_of_the_input(folder: Path) -> tuple[str, ...]:
    (folder / "in.jsonl").write_text('{"id": "a", "text": "It was"}')
    return summarize(folder / "in.jsonl", folder / "in.md")


@case("--output", "name of a file of records", "out.md")
def text_in_place_of_records(folder: Path) -> tuple[str, ...]:
    return *summarize(write_text(folder), folder / "out.jsonl"), "--format", "md"


@case("--format pdf is not known", "jsonl, md, txt")
def unknown_format(folder: Path) -> tuple[str, ...]:
    return *summarize(write_text(folder), folder / "out.jsonl"), "--format", "pdf"


@case("--context 131073", "131072 positions")
def context_beyond_the_model(folder: Path) -> tuple[str, ...]:
    return *GENERATE, *MODELS, "--context", "131073"


@pytest.mark.parametrize(("build", "words"), CASES, ids=[build.__name__ for build, _ in CASES])
def test_failed_start_is_one_line(build: Case, words: tuple[str, ...], tmp_path: Path) -> None:
    line = refused(forked(tmp_path, *build(tmp_path)))
    assert [word for word in words if word not in line] == [], line
