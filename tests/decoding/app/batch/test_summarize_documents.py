"""A bad document gets an error record, the batch continues, and the command fails at the end with a
count.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from support.commands import (
    DRAFT,
    GREEDY_FP32,
    MODELS,
    TARGET,
    Finished,
    forked,
    records,
    variant,
)
from support.document_files import archive, docx, docx_paragraph, epub, odt, pdf

GOOD = "It was the best of times, it was the worst of times. "
POISON = "^"  # one token, only in documents that must give NaN
NEW = ("--max-new-tokens", "8")


def summarize(
    folder: Path, source: Path, *more: str, models: tuple[str, ...] = MODELS
) -> tuple[Finished, dict[str, Any]]:
    """Run the command; return its result and the records by id."""
    output = folder / "out.jsonl"
    result = forked(folder, *command_of(source, output, models), *more)
    return result, {record["id"]: record for record in records(output)}


def command_of(source: Path, output: Path, models: tuple[str, ...] = MODELS) -> tuple[str, ...]:
    """Return the words of the command."""
    files = ("--input", str(source), "--output", str(output))
    return ("summarize", *models, *GREEDY_FP32, *NEW, *files)


def write(folder: Path, **documents: bytes | str) -> Path:
    """Write .txt documents; return their folder."""
    folder.mkdir()
    for name, content in documents.items():
        (folder / f"{name}.txt").write_bytes(
            content.encode() if isinstance(content, str) else content
        )
    return folder


def test_documents_of_all_formats_are_summarised_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("mammoth")
    pytest.importorskip("pypdfium2")
    folder = tmp_path / "in"
    folder.mkdir()
    page = f"<p>{GOOD}</p>"
    contents: dict[str, bytes] = {
        "a.pdf": pdf([[GOOD], []]),
        "b.epub": epub({"a.xhtml": page}),
        "c.docx": docx(docx_paragraph(GOOD)),
        "d.html": page.encode(),
        "e.zip": archive({"x.odt": odt(f"<text:p>{GOOD}</text:p>"), "../y.txt": "out"}),
        "f.txt": (3 * "Le père Goriot, après avoir quitté les affaires. ").encode("latin1"),
        "g.srt": f"1\n00:00:01,000 --> 00:00:02,000\n{GOOD}\n".encode(),
        "broken.pdf": b"%PDF-1.7",
        "picture.jpg": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    result, written = summarize(tmp_path, folder)
    assert result.code == 1
    errors = {name for name, record in written.items() if "error" in record}
    assert errors == {"broken.pdf", "e.zip/../y.txt"}
    sources = {name: written[name]["source"] for name in written.keys() - errors}
    note = "pages without text, perhaps scanned: 1 of 2"
    guess = "read as cp1252, by its letters; if some are wrong, convert it"
    assert sources == {
        "a.pdf": {"format": "pdf", "pages": 2, "pages_without_text": 1, "note": note},
        "b.epub": {"format": "epub", "chapters": 1},
        "c.docx": {"format": "docx"},
        "d.html": {"format": "html", "encoding": "utf-8"},
        "e.zip/x.odt": {"format": "odt"},
        "f.txt": {"format": "text", "encoding": "cp1252", "note": guess},
        "g.srt": {"format": "subtitles", "encoding": "utf-8"},
    }
    for line in (f"a.pdf: {note}", "f.txt: read as cp1252", "that is read: picture.jpg"):
        assert line in " ".join(result.err.split())
    again, _ = summarize(tmp_path, folder)
    assert f"already finished: {len(sources)} of 9 documents" in again.err


def poisoned(folder: Path) -> tuple[str, ...]:
    """Return the options of a target whose logits are NaN after `POISON`, and of the draft."""
    (token,) = AutoTokenizer.from_pretrained(TARGET)(POISON).input_ids

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.embed_tokens.weight"][token] = torch.nan

    return *variant(folder, edit=poison, tie_word_embeddings=False), "--draft", str(DRAFT)


def test_bad_documents_of_a_folder_are_recorded_and_good_ones_summarised(
    tmp_path: Path,
) -> None:
    source = write(
        tmp_path / "in",
        a=GOOD * 3,
        binary=b"It was\0\1\2",
        empty=b"",
        latin=b"Caf\xe9 de Flore",
        nothing="\ufeff \n\n",
        overflow=GOOD + POISON,
        z=GOOD * 2,
    )
    result, found = summarize(tmp_path, source, models=poisoned(tmp_path / "model"))
    reasons = {
        "binary.txt": "NUL",
        "empty.txt": "empty",
        "latin.txt": "byte 3 is 0xe9",
        "nothing.txt": "empty",
        "overflow.txt": "NaN",
    }
    check_errors(found, reasons)
    assert all(
        found[name]["new_tokens"] == 8 and found[name]["summary"] for name in ("a.txt", "z.txt")
    )
    assert result.code == 1
    assert "2 of 7 documents finished" in result.err
    assert result.err.splitlines()[-1].startswith("tierforce: 5 of 7 documents failed")


def check_errors(found: dict[str, dict[str, Any]], reasons: dict[str, str]) -> None:
    """Fail unless exactly the records of `reasons` have errors, each with its reason."""
    errors = {name: record["error"] for name, record in found.items() if "error" in record}
    assert errors.keys() == reasons.keys()
    assert all(reason in errors[name] for name, reason in reasons.items()), errors


def test_bad_lines_of_a_jsonl_file_are_recorded(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": 1, "text": GOOD}),
        "not JSON",
        '{"id": "no text"}',
        '{"text": "no id"}',
        '["id", "text"]',
        '{"id": "half \\ud800", "text": "half of a pair: \\ud800"}',
        "[" * 100_000,
        json.dumps({"id": "last", "text": GOOD}),
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    result, found = summarize(tmp_path, source)
    reasons = {
        "line 2": "not JSON",
        "no text": '"text"',
        "line 4": '"id"',
        "line 5": '"id"',
        "half \ud800": "surrogate at index 16",
        "line 7": "not JSON",
    }
    check_errors(found, reasons)
    assert found.keys() - reasons.keys() == {"1", "last"}
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("tierforce: 6 of 8 documents failed")


def test_context_without_room_fails_every_document(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, b=GOOD)
    result, found = summarize(tmp_path, source, "--context", "12")
    assert [
        ("no room left" in record["error"], "--context" in record["error"])
        for record in found.values()
    ] == [(True, True)] * 2
    assert result.code == 1
    assert "2 of 2 documents failed" in result.err


@pytest.mark.slow
def test_two_ranks_continue_after_a_bad_document(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, b=POISON + GOOD, c=b"", d=GOOD * 2)
    result, found = summarize(tmp_path, source, "--gpus", "2", models=poisoned(tmp_path / "model"))
    assert ["error" in found[f"{name}.txt"] for name in "abcd"] == [False, True, True, False]
    assert "NaN" in found["b.txt"]["error"]
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("tierforce: 2 of 4 documents failed")
    (tmp_path / "out.jsonl").unlink()
    _, alone = summarize(tmp_path, source)
    assert [found[name]["summary"] for name in ("a.txt", "d.txt")] == [
        alone[name]["summary"] for name in ("a.txt", "d.txt")
    ]


def test_failed_documents_are_retried_and_finished_ones_skipped(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, b=b"")
    _, first = summarize(tmp_path, source)
    (source / "b.txt").write_text(GOOD)
    result, second = summarize(tmp_path, source)
    assert result.code == 0
    assert "already finished: 1 of 2 documents" in result.err
    assert second["a.txt"] == first["a.txt"]
    assert second["b.txt"]["summary"] == first["a.txt"]["summary"]
    assert len(records(tmp_path / "out.jsonl")) == 2


def test_no_model_is_loaded_if_all_documents_are_finished(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD)
    summarize(tmp_path, source)
    before = (tmp_path / "out.jsonl").read_bytes()
    result, _ = summarize(tmp_path, source, "--draft", str(tmp_path / "no such model"))
    assert result.code == 0
    assert "the document is already finished" in result.err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_record_fields(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD * 20)
    options = (
        "--temperature",
        "0.7",
        "--top-k",
        "9",
        "--top-p",
        "0.8",
        "--seed",
        "5",
        "--max-new-tokens",
        "24",
    )
    _, found = summarize(
        tmp_path,
        source,
        *options,
        "--gpu-kv-layers",
        "2",
        "--link",
        "emulated:50",
        "--retrieval-budget",
        "64",
    )
    record = found["a.txt"]
    assert record["prompt_tokens"] > 250
    assert record["new_tokens"] == 24
    assert record["finish_reason"] == "length"
    assert record["time_to_first_token_s"] > 0
    assert record["ms_per_token"] > 0
    assert 1 <= record["tokens_per_verification"] <= 23
    assert record["acceptance"].keys() == {"target", "retrieval"}
    assert all(0 < rate <= 1 for rate in record["acceptance"].values())
    # Four offloaded layers, keys and values of four heads of 64 in float32: each forward of the
    # target reads all of the prompt except a window.
    forward_bytes = 4 * 2 * 4 * 64 * 4 * (record["prompt_tokens"] - 32)
    assert record["link_bytes_per_token"] >= record["forwards"]["target"] * forward_bytes / 23
    assert record["num_draft_tokens"].keys() == {"target", "retrieval"}
    assert 0 < record["num_draft_tokens"]["target"] <= 64
    # one after the prompt, and one per verification
    assert record["retrieval_selections"] == record["forwards"]["target"] + 1
    assert (record["temperature"], record["top_k"], record["top_p"], record["seed"]) == (
        0.7,
        9,
        0.8,
        5,
    )
    assert (
        record["mode"],
        record["ranks"],
        record["gpu_kv_layers"],
        record["truncated_tokens"],
    ) == ("hierarchical", 1, 2, 0)
    assert record["versions"].keys() == {"tierforce", "torch", "transformers"}
    assert all(version[0].isdigit() for version in record["versions"].values())


def test_document_longer_than_the_context_is_truncated_with_a_warning(tmp_path: Path) -> None:
    source = write(tmp_path / "in", long=GOOD * 20, short=GOOD)
    result, found = summarize(tmp_path, source, "--context", "150", "--long", "cut")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    count = partial(lambda text: len(tokenizer(text).input_ids))
    dropped = count(GOOD * 20) + count("\n\nSummarize the text above.\n\n") - (150 - 8)
    assert found["long.txt"]["truncated_tokens"] == dropped
    assert found["long.txt"]["prompt_tokens"] == 142
    assert (
        f"warning: long.txt: longer than the context of 150 tokens: the last {dropped} tokens were "
        "dropped\n" in result.err
    )
    assert found["short.txt"]["truncated_tokens"] == 0
    assert "short.txt: longer" not in result.err


def test_full_disk_ends_the_job_with_finished_records_intact(tmp_path: Path) -> None:
    source = write(tmp_path / "in", a=GOOD, b=GOOD, c=GOOD)
    output = tmp_path / "out.jsonl"
    result = forked(tmp_path, *command_of(source, output), before=_limit_file_size)
    assert result.code == 1
    assert "tierforce: --output" in result.err
    assert "File too large. Finished records are safe." in result.err
    finished = output.read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["id"] for line in finished] == ["a.txt"]  # followed by a torn record
    result, found = summarize(tmp_path, source)
    assert result.code == 0
    assert list(found) == ["a.txt", "b.txt", "c.txt"]


def _limit_file_size() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
