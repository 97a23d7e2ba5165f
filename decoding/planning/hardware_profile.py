"""What a machine can do, in numbers with a source each.

Some profiles are shipped (`profiles.json`); files of the same form are read too.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.config_checks import Number, quote


def _bounds(name: str) -> Number:
    """Return what a machine's number may be: no time that follows overflows, or is infinite."""
    if name == "gpus":
        return Number(1, 1024, whole=False)
    if name.endswith("_s"):
        return Number(0, 1e6, whole=False)
    return Number(1, 1e30, whole=False)  # bytes, or bytes or operations a second


@dataclass(frozen=True)
class HardwareProfile:
    """The numbers of one machine: bytes, seconds, and bytes or operations a second.

    Rates are of each GPU while all are at work.
    """

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
    # what a profile may lack, None for what stands behind it
    kv_rate: float | None = None  # reading KV in attention of one row; memory_rate
    attention: float | None = None  # operations of a further row of a short pass; matmul
    # operations a second of the products of the further rows, in a pass of 3, 5 and 33; matmul
    matmul_3: float | None = None
    matmul_5: float | None = None
    matmul_33: float | None = None
    prefill_attention: float | None = None  # operations of many rows; matmul
    # bytes of KV a second that a choice of chunks looks through; twice memory_rate, for its keys
    score_rate: float | None = None
    # bytes a second of the elements that slices stand for: joined of them, and attended to by their
    # codes in a pass of one row; what memory_rate gives, and twice kv_rate, for a code is half
    reconstruct_rate: float | None = None
    high_bits_rate: float | None = None
    # bytes a second of the elements that 8 bits of a retrieval cache stand for, attended to
    # likewise; kv_rate, for half of the bytes come from memory and what is written out of them
    # stays in a processor's cache
    int8_rate: float | None = None
    # what attention of a block of rows to one of keys of a head takes beside reading and arithmetic
    # where passes go by such blocks (`--deterministic`); nothing where fused kernels take all at once
    chunk_s: float = 0.0
    forward_s: float = 0.0  # what a short pass takes beside its layers
    sample_s: float = 0.0  # the law of one row of logits
    draw_s: float = 0.0  # drawing a token from a law, and having it on the host
    # whether launches, memory and arithmetic hide behind each other, as on a GPU; else they add up
    runs_ahead: bool = True

    @property
    def int8_share(self) -> float:
        """Return the time of reading a retrieval cache in 8 bits, as a share of one in 16."""
        return (self.kv_rate or self.memory_rate) / self.int8_rate if self.int8_rate else 1.0

    @property
    def int8_retrieval(self) -> bool | None:
        """Return what an engine on this machine takes for that setting where nothing is said."""
        return None if self.int8_share <= 1 else False

    @property
    def extra_query_tokens(self) -> list[tuple[int, float]]:
        """Return of how many rows short passes were measured, and these rates; maybe none."""
        rates = {3: self.matmul_3, 5: self.matmul_5, 33: self.matmul_33}
        return [(rows, rate) for rows, rate in rates.items() if rate is not None]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            if field.name == "runs_ahead":
                if not isinstance(value, bool):
                    raise TierForceError(
                        f"hardware {self.name}: runs_ahead must be true or false, found {value!r}."
                    )
                continue
            self._check_number(field.name, value)
        if self.gpus != int(self.gpus):
            raise TierForceError(
                f"hardware {self.name}: gpus must be a whole number, found {self.gpus}."
            )

    def _check_number(self, name: str, value: Any) -> None:
        """Raise TierForceError for what is no number, or none that a machine could have."""
        bounds = _bounds(name)
        if Number(0, bounds.high, whole=False).allows(value) and value < bounds.low:
            least = f"{bounds.low:g} or more, found {value!r}" if value else "above 0"
            raise TierForceError(f"hardware {self.name}: {name} must be {least}.")
        if not bounds.allows(value):
            raise TierForceError(
                f"hardware {self.name}: {name} must be a number of 0 or more, found "
                f"{quote(value)}; at most {bounds.high:g} is taken."
            )

    @classmethod
    def from_name(cls, name: str) -> HardwareProfile:
        """Return a shipped profile, or that of a JSON file of the same form.

        A file holds numbers, or objects with `value` and `source`. Raises TierForceError for what
        is neither.
        """
        shipped = _shipped()
        if name in shipped:
            return cls._of(name, shipped[name])
        if not Path(name).is_file():
            raise TierForceError(
                f"`hardware` {name}: there is no such file, nor a machine of that name: use "
                f"{', '.join(shipped)}, or a JSON file that `tierforce probe` has made."
            )
        try:
            content = read_json(Path(name))
        except (OSError, ValueError) as error:
            raise TierForceError(f"`hardware` {name} cannot be read as JSON ({error}).") from error
        return cls._of(Path(name).stem, content)

    @classmethod
    def of_gpus(cls, gpu: str, count: int) -> HardwareProfile | None:
        """Return the shipped profile of so many GPUs that the driver calls so; None for others."""
        for name, content in _shipped().items():
            profile = cls._of(name, content)
            if profile.gpus == count and gpu in content["names"]["value"]:
                return profile
        return None

    @staticmethod
    def is_shipped(name: str) -> bool:
        """Return whether `find` takes a name for a shipped profile."""
        return name in _shipped()

    @classmethod
    def _of(cls, name: str, content: Any) -> HardwareProfile:
        """Return the profile that a file holds. Raises TierForceError for gaps."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        wanted = [
            field.name for field in fields(cls) if field.name != "name" and field.default is MISSING
        ]
        if not isinstance(content, dict) or (
            missing := [field for field in wanted if field not in content]
        ):
            lacks = (
                f"lacks {', '.join(missing)}"
                if isinstance(content, dict)
                else "is not a JSON object"
            )
            raise TierForceError(f"hardware {name} {lacks}: it needs {', '.join(wanted)}.")
        if _OLD_FIELDS & content.keys():
            raise TierForceError(
                f"hardware {name} was written by tierforce 0.1, whose fields had other names: run "
                "`tierforce probe` again."
            )
        values = {
            field: content[field].get("value")
            if isinstance(content[field], dict)
            else content[field]
            for field in known
            if field in content
        }
        return cls(name, **values)


_OLD_FIELDS = {"join_rate", "near_rate", "pass_s", "piece_s"}  # that version 0.2 renamed


def _shipped() -> dict[str, Any]:
    content = files("decoding.planning").joinpath("profiles.json").read_text()
    return dict(json.loads(content))
