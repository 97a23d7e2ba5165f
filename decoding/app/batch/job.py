"""The settings of a batch, and a digest of them, by which a later run knows which records are still
valid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.app.results.records import Finished
from decoding.grammars.grammar import Grammar
from decoding.speculation.sampling import Sampling
from decoding.text.instructions import Instructions, PromptFormat
from offload.errors import TierForceError
from offload.regular_files import read_regular
from parallel.errors import CheckpointError
from parallel.formats.gguf.header import part_files, read_part
from parallel.formats.locate import find_local, is_gguf

# bytes read at each end of a weight file to identify it: reading all of a 13B model takes minutes
_SAMPLE_BYTES = 1 << 20
_MAX_CONFIG = 1 << 28  # bytes of a config or tokenizer file


@dataclass(frozen=True)
class BatchJob:
    """Everything but the document that determines the distribution of a summary, and the models.

    `model` and `draft` are names without their folders; `weights` is a digest of the model's files.
    `instructions` are for documents without any of their own. Documents longer than the context are
    split into parts if `splits`, else truncated.
    """

    model: str
    draft: str | None
    weights: str
    instructions: Instructions
    format: PromptFormat
    max_new_tokens: int
    context: int | None
    dtype: str
    rope: str | None
    sampling: Sampling
    deterministic: bool = False  # the same tokens as plain decoding
    splits: bool = True

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of final answers; None if they are free text."""
        return None if self.format.schema is None else Grammar(self.format.schema)

    def digest(self, document: str, instructions: Instructions) -> str:
        """Return 16 hexadecimal digits that identify the distribution of a summary, or of answers.

        `document` is the document's own digest.

        The draft, the device and memory settings are left out: they change the speed, not the
        distribution. So is what only concerns documents longer than the context (`is_current`).
        """
        content: dict[str, Any] = {"text": document, "schema": self.format.schema}
        if instructions.are_questions:
            return self._digest({**content, "questions": instructions.strings})
        return self._digest({**content, "instruction": instructions.strings[0]})

    def prompt_digest(self, prompt: bytes, instructions: Instructions, is_last: bool) -> str:
        """Return the same for the answer to a prompt of token ids (T,), as bytes.

        `is_last`: for a final answer.
        """
        content: dict[str, Any] = {"text": hashlib.sha256(prompt).hexdigest()}
        if is_last:  # answers about parts are free
            content["schema"] = self.format.schema
        if not instructions.are_questions:  # the prompt has one of them, and others may change
            content["instruction"] = instructions.strings[0]
        return self._digest(content)

    def _digest(self, content: dict[str, Any]) -> str:
        content |= {
            "weights": self.weights,
            "max_new_tokens": self.max_new_tokens,
            "context": self.context,
            "dtype": self.dtype,
            "sampling": [
                self.sampling.temperature,
                self.sampling.top_k,
                self.sampling.top_p,
                self.sampling.seed,
            ],
            **self.sampling.changes(),
        }
        own = {
            "rope": self.rope,
            "deterministic": self.deterministic or None,
            "system": self.format.system,
            "template": self.format.template,
            "schema": content.pop("schema", None),
        }
        content |= {name: value for name, value in own.items() if value is not None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def is_current(self, finished: Finished, instructions: Instructions) -> bool:
        """Return whether a finished record treats a document's length as this job would."""
        if finished.part_instructions is not None:
            own = self.format.part, self.format.merge_instruction(instructions)
            return self.splits and finished.part_instructions == own
        return not (self.splits and finished.is_truncated)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of a record that describe its job."""
        return {
            "model": self.model,
            "draft": self.draft,
            "system": self.format.system,
            "template": self.format.template,
            **({} if self.format.schema is None else {"schema": json.loads(self.format.schema)}),
            "max_new_tokens": self.max_new_tokens,
            "rope": self.rope,
            **self.sampling.as_dict(),
            "deterministic": self.deterministic,
        }


def model_name(name: str) -> str:
    """Return a model's name in records: a hub name as it is, and the name of a folder or a GGUF
    file without its path.
    """
    try:
        local = find_local(name)
    except CheckpointError:  # if all documents are finished, the model may be missing
        return Path(name).name
    if local is None:
        return name
    return local.name if is_gguf(local) else local.resolve().name


def model_digest(model: Path) -> str:
    """Return a digest of the files of a model: a folder, or a GGUF file.

    It covers all of configs and tokenizer, and the size and both ends of each weight file. Raises
    TierForceError if one cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in _files(model):
            for part in _fingerprint_parts(path):
                digest.update(f"{path.name} {len(part)} ".encode(errors="surrogateescape") + part)
    except OSError as error:
        raise TierForceError(
            f"the model's files in {model} cannot be read: {error.strerror}."
        ) from error
    return digest.hexdigest()[:16]


def _files(model: Path) -> list[Path]:
    """Return the files of a model; in a folder with a config.json, GGUF files are left out."""
    if is_gguf(model):
        return part_files(model)
    return sorted(path for path in model.iterdir() if not is_gguf(path))


def _fingerprint_parts(path: Path) -> Iterator[bytes]:
    if path.suffix in (".json", ".jinja", ".model"):
        yield read_regular(path, _MAX_CONFIG)
    elif path.suffix == ".safetensors" or is_gguf(path):
        size = path.stat().st_size
        # a GGUF file begins with its config and its tokenizer
        first = read_part(path).data_start if is_gguf(path) else _SAMPLE_BYTES
        with path.open("rb") as file:
            yield str(size).encode()
            yield file.read(first)
            file.seek(max(0, size - _SAMPLE_BYTES))
            yield file.read(_SAMPLE_BYTES)
