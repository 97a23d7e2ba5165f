"""The command as users run it: documents in, records out."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offload.errors import TierForceError


def summarize(
    folder: Path,
    name: str,
    documents: Mapping[str, str],
    options: list[str],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run `tierforce summarize` with these options over the documents, anew.

    Returns its records, in order. Raises TierForceError where the command fails.
    """
    texts, output = folder / "documents", folder / f"{name}.jsonl"
    texts.mkdir(parents=True, exist_ok=True)
    for stale in texts.glob("*.txt"):
        stale.unlink()
    for number, (title, text) in enumerate(documents.items()):
        path = texts / f"{number:03}-{title.replace('/', '-')}.txt"
        path.write_text(text, encoding="utf-8")
    output.unlink(missing_ok=True)
    arguments = ["summarize", *options, "--input", str(texts), "--output", str(output)]
    say("$ " + shlex.join(["tierforce", *arguments]))
    code = subprocess.run([sys.executable, "-m", "decoding.cli", *arguments]).returncode
    if code:
        raise TierForceError(
            f"tierforce {arguments[0]} ended with exit code {code}; what it said is above."
        )
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
