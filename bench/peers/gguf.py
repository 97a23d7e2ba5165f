"""What peers load in place of a GGUF file: the same numbers, dequantised once and kept.

The folder is what transformers itself makes of the file. The file in 16 or 32 bits has the metadata
of the one it is made of.
"""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallel.formats.gguf_header import read_header
from parallel.formats.locate import is_gguf

KINDS = {"bfloat16": "BF16", "float32": "F32"}  # what GGUF calls our dtypes


def hugging_face_folder(target: Path, dtype: str, scratch: Path) -> Path:
    """Return a folder that transformers loads fast: a GGUF file is written as one, in `dtype`."""

    def make(path: Path) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        model: Any = AutoModelForCausalLM.from_pretrained(
            target.parent,
            gguf_file=target.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(path)

    return _kept(target, scratch, dtype, make) if is_gguf(target) else target


def dequantised(target: Path, dtype: str, scratch: Path) -> Path:
    """Return the same GGUF file with its matrices in `dtype`, bfloat16 or float32."""

    def make(path: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
        from gguf.quants import dequantize, quantize

        reader = GGUFReader(target)
        kind = GGMLQuantizationType[KINDS[dtype]]
        writer = GGUFWriter(path, read_header(target).metadata["general.architecture"])
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":  # the writer's own
                continue
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        for tensor in reader.tensors:
            numbers = dequantize(tensor.data, tensor.tensor_type)
            if numbers.ndim == 1:  # which llama.cpp wants in float32
                writer.add_tensor(tensor.name, numbers)
            else:
                writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return _kept(target, scratch, f"{dtype}.gguf", make)


def kernels(path: Path) -> str:
    """Return the type that most matrices of a GGUF file have, such as Q4_1."""
    from gguf import GGMLQuantizationType

    matrices = [each for each in read_header(path).tensors.values() if len(each.shape) > 1]
    return GGMLQuantizationType(Counter(each.kind for each in matrices).most_common(1)[0][0]).name


def _kept(source: Path, scratch: Path, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return what is made of a file once, and again when the file is another one."""
    identity = zlib.crc32(f"{source.resolve()} {source.stat().st_mtime}".encode())
    path = scratch / f"{source.stem}-{identity:08x}-{suffix}"
    if not path.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        make(unfinished)
        unfinished.replace(path)
    return path
