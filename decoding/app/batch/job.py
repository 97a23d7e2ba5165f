"""What a batch asks of every document, and a digest of it, which tells a later run what is still as
it would write it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.speculation.sampling import Sampling
from offload.errors import TierForceError
from offload.regular_files import read_regular
from parallel.errors import CheckpointError
from parallel.formats.gguf_header import read_header
from parallel.formats.locate import find_local, is_gguf

# bytes of each end of a weight file that tell it from another: reading all of a 13B model takes
# minutes
_PART = 1 << 20
_MAX_CONFIG = 1 << 28  # bytes of a config or a tokenizer


@dataclass(frozen=True)
class BatchJob:
    """All that shapes a summary beside the document's text: the law of what is written, and who it
    was asked of.

    `model` and `draft` are names, without the folders they lie in; `weights` is a digest of the
    model's files.
    """

    model: str
    draft: str | None
    weights: str
    instruction: str
    max_new_tokens: int
    context: int | None
    dtype: str
    rope: str | None
    sampling: Sampling
    deterministic: bool = False  # whether the text is that of plain decoding, token for token

    def digest(self, text: str) -> str:
        """Return 16 hexadecimal digits that change with the text and with all that shapes its
        summary.

        The draft, the device and what memory is spent on are left out: they shape how fast a
        summary comes, not its law.
        """
        shaping = {
            "text": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(),
            "weights": self.weights,
            "instruction": self.instruction,
            "max_new_tokens": self.max_new_tokens,
            "context": self.context,
            "dtype": self.dtype,
            "sampling": [
                self.sampling.temperature,
                self.sampling.top_k,
                self.sampling.top_p,
                self.sampling.seed,
            ],
        }
        if self.rope is not None:
            shaping["rope"] = self.rope
        if self.deterministic:
            shaping["deterministic"] = True
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return what a record says of its job."""
        return {
            "model": self.model,
            "draft": self.draft,
            "instruction": self.instruction,
            "max_new_tokens": self.max_new_tokens,
            "rope": self.rope,
            **vars(self.sampling),
            "deterministic": self.deterministic,
        }


def model_name(name: str) -> str:
    """Return how records call a model: a hub name as it is, of a folder or a GGUF file its own
    name and no path.
    """
    try:
        local = find_local(name)
    except CheckpointError:  # where all is finished nobody minds
        return Path(name).name
    if local is None:
        return name
    return local.name if is_gguf(local) else local.resolve().name


def model_digest(model: Path) -> str:
    """Digest the files that make a model, in a folder or in GGUF's one file.

    Configs and tokenizer are taken whole, of each weight file its size and both ends. Raises
    TierForceError where one of them cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in _files(model):
            for part in _telling_parts(path):
                digest.update(f"{path.name} {len(part)} ".encode(errors="surrogateescape") + part)
    except OSError as error:
        raise TierForceError(
            f"the model's files in {model} cannot be read: {error.strerror}."
        ) from error
    return digest.hexdigest()[:16]


def _files(model: Path) -> list[Path]:
    """Return the files of a model; a GGUF file beside a config.json is none of them."""
    if is_gguf(model):
        return [model]
    return sorted(path for path in model.iterdir() if not is_gguf(path))


def _telling_parts(path: Path) -> Iterator[bytes]:
    if path.suffix in (".json", ".jinja", ".model"):
        yield read_regular(path, _MAX_CONFIG)
    elif path.suffix == ".safetensors" or is_gguf(path):
        size = path.stat().st_size
        # a GGUF file begins with its config and its tokenizer
        first = read_header(path).data_start if is_gguf(path) else _PART
        with path.open("rb") as file:
            yield str(size).encode()
            yield file.read(first)
            file.seek(max(0, size - _PART))
            yield file.read(_PART)
