"""Conversions of a GGUF file for peers: the same numbers, dequantised once and saved.

The Hugging Face folder is written by transformers itself. The GGUF file in 16 or 32 bits has the
metadata of its source.
"""

from __future__ import annotations

import shutil
import statistics
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallel.formats.gguf.header import read_header
from parallel.formats.locate import is_gguf

KINDS = {"bfloat16": "BF16", "float32": "F32"}  # GGUF's names of our dtypes


def hugging_face_folder(target: Path, dtype: str, scratch: Path) -> Path:
    """Return a folder that transformers loads fast; a GGUF file is converted to one in `dtype`."""

    def convert(path: Path) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        model: Any = AutoModelForCausalLM.from_pretrained(
            target.parent,
            gguf_file=target.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(path)

    return _cached(target, scratch, dtype, convert) if is_gguf(target) else target


def dequantised_file(target: Path, dtype: str, scratch: Path) -> Path:
    """Return the same GGUF file with its matrices in `dtype`, bfloat16 or float32."""

    def convert(path: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
        from gguf.quants import dequantize, quantize

        reader = GGUFReader(target)
        kind = GGMLQuantizationType[KINDS[dtype]]
        writer = GGUFWriter(path, read_header(target).metadata["general.architecture"])
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":  # written by the writer
                continue
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            if values.ndim == 1:  # llama.cpp requires vectors in float32
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return _cached(target, scratch, f"{dtype}.gguf", convert)


def kernels(path: Path) -> str:
    """Return the type of most matrices in a GGUF file, such as Q4_1."""
    from gguf import GGMLQuantizationType

    tensors = read_header(path).tensors.values()
    kind = statistics.mode(tensor.kind for tensor in tensors if len(tensor.shape) > 1)
    return GGMLQuantizationType(kind).name


def _cached(source: Path, scratch: Path, suffix: str, convert: Callable[[Path], None]) -> Path:
    """Return the conversion of a file, which is made once per version of the file."""
    identity = zlib.crc32(f"{source.resolve()} {source.stat().st_mtime}".encode())
    path = scratch / f"{source.stem}-{identity:08x}-{suffix}"
    if not path.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        convert(unfinished)
        unfinished.replace(path)
    return path
