"""GGUF headers written byte by byte: metadata of any type, tensors at any offset."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.formats.gguf.header import read_header

ABSENT = type("ABSENT", (), {})  # value of a metadata key to leave out


def rewrite_header(
    path: Path,
    target: Path,
    metadata: Mapping[str, Any] | None = None,
    offsets: Mapping[str, int] | None = None,
    names: Mapping[str, str] | None = None,
) -> Path:
    """Write a copy of a file with changed metadata, tensor offsets or tensor names.

    `offsets` are relative to the first tensor.
    """
    header = read_header(path)
    values = {**header.metadata, **(metadata or {})}
    values = {key: value for key, value in values.items() if value is not ABSENT}
    out = b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(values))
    for key, value in values.items():
        out += _string(key) + _typed(value)
    for name, info in header.tensors.items():
        offset = (offsets or {}).get(name, info.start - header.data_start)
        out += _string((names or {}).get(name, name)) + struct.pack("<I", len(info.shape))
        out += struct.pack(f"<{len(info.shape)}Q", *info.shape[::-1])
        out += struct.pack("<IQ", info.kind, offset)
    target.write_bytes(out + bytes(-len(out) % 32) + path.read_bytes()[header.data_start :])
    return target


def _string(string: str) -> bytes:
    encoded = string.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Any) -> bytes:
    kind, content = _value(value)
    return struct.pack("<I", kind) + content


def _value(value: Any) -> tuple[int, bytes]:
    """Return GGUF's type number of a value, and its bytes."""
    if isinstance(value, list):
        parts = [_value(element) for element in value]
        kind = parts[0][0] if parts else 4
        return 9, struct.pack("<IQ", kind, len(parts)) + b"".join(part for _, part in parts)
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
