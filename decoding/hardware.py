"""What a machine can do, in numbers with a source each: profiles that are shipped, and files of the same form."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload import TierForceError


@dataclass(frozen=True)
class Hardware:
    """One machine. Bytes, seconds, and bytes or operations a second; rates are of each GPU while all are at work."""

    name: str
    gpus: int
    device_memory: float  # of each GPU
    host_memory: float  # of the machine, for the KV of all GPUs together
    link_in: float  # pinned host memory to device
    link_out: float
    memory_rate: float  # reading device memory
    matmul: float  # 16-bit products, dense
    all_reduce_s: float  # a small all-reduce
    all_reduce_rate: float  # a large one, bytes of the tensor a second
    layer_s: float  # what a layer of a short pass takes on top of reading memory: launches

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            zero = field.name in ("all_reduce_s", "layer_s")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise TierForceError(f"hardware {self.name}: {field.name} must be a number, found {value!r}.")
            if not value and not zero:
                raise TierForceError(f"hardware {self.name}: {field.name} must be above 0.")
        if self.gpus != int(self.gpus):
            raise TierForceError(f"hardware {self.name}: gpus must be a whole number, found {self.gpus}.")

    @classmethod
    def find(cls, name: str) -> Hardware:
        """A shipped profile, or a JSON file of the same form: numbers, or objects with `value` and `source`. TierForceError."""
        shipped = json.loads(files("decoding").joinpath("hardware.json").read_text())
        if name in shipped:
            return cls._of(name, shipped[name])
        if not Path(name).is_file():
            raise TierForceError(f"--hardware {name} is not known: use {', '.join(shipped)}, or a JSON file of that form.")
        try:
            found = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise TierForceError(f"--hardware {name} cannot be read as JSON ({error}).") from error
        return cls._of(Path(name).stem, found)

    @classmethod
    def _of(cls, name: str, found: Any) -> Hardware:
        wanted = [field.name for field in fields(cls) if field.name != "name"]
        if not isinstance(found, dict) or (missing := [field for field in wanted if field not in found]):
            lacks = f"lacks {', '.join(missing)}" if isinstance(found, dict) else "is not a JSON object"
            raise TierForceError(f"hardware {name} {lacks}: it needs {', '.join(wanted)}.")
        values = {field: found[field].get("value") if isinstance(found[field], dict) else found[field] for field in wanted}
        return cls(name, **values)
