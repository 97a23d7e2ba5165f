"""Hardware profiles: measured or documented numbers of a machine, each with its source.

The numbers of some GPUs are shipped in `profiles.json`; JSON files can be loaded, too.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.config_checks import Number, quote

_MAX_GPUS = 1024
_NAME = re.compile(r"([1-9]\d{0,3})x(.+)")  # such as 2x4090


class Trust(Enum):
    """Between which strategies a profile may choose before a request has been measured.

    Split modes require measured rates of reconstruction and of attention to high bytes.
    """

    NONE = "no profile of this machine"
    UNSPLIT = "the shipped profile of the same GPUs, or measured without rates of split layers"
    ALL = "measured on this machine, or a description of it"


def _bounds(name: str) -> Number:
    """Return the bounds of a field, so that no time computed from it overflows or is infinite."""
    if name == "gpus":
        return Number(1, _MAX_GPUS, whole=False)
    if name.endswith("_s"):
        return Number(0, 1e6, whole=False)
    return Number(1, 1e30, whole=False)  # bytes, bytes/s or FLOP/s


@dataclass(frozen=True)
class HardwareProfile:
    """The numbers of one machine in bytes, seconds, bytes/s and FLOP/s.

    Rates are per GPU while all GPUs are busy.
    """

    name: str
    gpus: int
    device_memory: float  # per GPU
    host_memory: float  # shared by the KV of all GPUs
    link_in: float  # pinned host memory to device
    link_out: float
    memory_rate: float  # reading device memory
    matmul: float  # FLOP/s of dense 16-bit matmuls
    all_reduce_s: float  # a small all-reduce
    all_reduce_rate: float  # bytes/s of the tensor of a large all-reduce, by NCCL or gloo
    layer_s: float  # time per layer of a short forward beyond reading memory: small kernels
    # Optional fields follow. Each comment names the default used for None.
    kv_rate: float | None = None  # reading KV in attention of one query token; memory_rate
    attention: float | None = None  # FLOP/s per extra query token of a short forward; matmul
    # FLOP/s of the matmuls of the extra query tokens, in forwards of 3, 5 and 33; matmul
    matmul_3: float | None = None
    matmul_5: float | None = None
    matmul_33: float | None = None
    prefill_attention: float | None = None  # FLOP/s of many query tokens; matmul
    # bytes/s of the KV that a selection of chunks covers; twice memory_rate, since it reads keys
    score_rate: float | None = None
    # bytes/s of 16-bit elements reconstructed from split layers; derived from memory_rate
    reconstruct_rate: float | None = None
    # bytes/s of 16-bit elements, in attention of one query token to their high bytes; twice
    # kv_rate, since a high byte is half of an element
    high_bits_rate: float | None = None
    # bytes/s of 16-bit elements, in attention of one query token to an 8-bit retrieval cache;
    # kv_rate, although half of the bytes are read: an H200's kernel takes as long as in 16 bits
    int8_rate: float | None = None
    # packed weights that are unpacked per second: on a GPU in a product with few rows, elsewhere
    # before it; memory_rate, divided by the bytes of a weight
    packed_rate: float | None = None
    # overhead per block of rows, block of keys and head of batch-invariant attention
    # (`--deterministic`), beside reading and arithmetic; none with fused kernels
    chunk_s: float = 0.0
    # bytes/s of the tensor of a large all-reduce through memory that the ranks share; not used
    shared_all_reduce_rate: float | None = None
    multiprocessors: float | None = None  # those of a GPU; None: not known
    forward_s: float = 0.0  # time of a short forward beside its layers
    # time in which the host launches a layer of a forward that is not captured: it takes no less;
    # 0, as on a CPU
    eager_layer_s: float | None = None
    sample_s: float = 0.0  # the distribution of one row of logits
    draw_s: float = 0.0  # sampling a token and copying it to the host
    # whether memory reads and arithmetic overlap, as on a GPU; otherwise they add up
    runs_ahead: bool = True

    @property
    def int8_share(self) -> float:
        """Return the time to read an 8-bit retrieval cache, relative to a 16-bit one."""
        return (self.kv_rate or self.memory_rate) / self.int8_rate if self.int8_rate else 1.0

    @property
    def extra_query_tokens(self) -> list[tuple[int, float]]:
        """Return pairs of query tokens per measured short forward and its rate; maybe none."""
        rates = {3: self.matmul_3, 5: self.matmul_5, 33: self.matmul_33}
        return [(tokens, rate) for tokens, rate in rates.items() if rate is not None]

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
        """Raise TierForceError unless `value` is a plausible number."""
        bounds = _bounds(name)
        if Number(0, bounds.high, whole=False).allows(value) and value < bounds.low:
            minimum = f"{bounds.low:g} or more, found {value!r}" if value else "above 0"
            raise TierForceError(f"hardware {self.name}: {name} must be {minimum}.")
        if not bounds.allows(value):
            raise TierForceError(
                f"hardware {self.name}: {name} must be a number of 0 or more, found "
                f"{quote(value)}; the maximum is {bounds.high:g}."
            )

    @classmethod
    def from_name(cls, name: str) -> HardwareProfile:
        """Return the profile of some shipped GPUs, such as 2x4090, or that in a JSON file.

        A file holds numbers, or objects with `value` and `source`. Raises TierForceError for any
        other name or file.
        """
        if (shipped := _shipped_numbers(name)) is not None:
            return cls._from_content(name, shipped)
        if not Path(name).is_file():
            raise TierForceError(
                f"`hardware` {name} is neither a file nor a known machine: use a number of GPUs "
                f"and one of {', '.join(_shipped())}, such as 2x4090, or a JSON file written by "
                "`tierforce probe`."
            )
        try:
            content = read_json(Path(name))
        except (OSError, ValueError) as error:
            raise TierForceError(f"`hardware` {name} cannot be read as JSON ({error}).") from error
        return cls._from_content(Path(name).stem, content)

    @classmethod
    def of_gpus(cls, gpu: str, count: int) -> HardwareProfile | None:
        """Return the shipped profile of `count` GPUs of this name in the driver, or None."""
        for name, content in _shipped().items():
            if gpu in content["names"]["value"]:
                return cls.from_name(f"{count}x{name}")
        return None

    @classmethod
    def find(cls, name: str | None, gpu: str, ranks: int) -> tuple[HardwareProfile, Trust]:
        """Return the profile of this machine, and what it may decide.

        Args:
            name: a file of `tierforce probe` or a shipped profile's name; None: by GPU name.
            gpu: the driver's name of a rank's device; empty on a CPU.
            ranks: of this run, one per GPU.

        Raises TierForceError for an unreadable file, or one for another number of GPUs.
        """
        if name is None:
            shipped = cls.of_gpus(gpu, ranks)
            if shipped is not None:
                return shipped, Trust.UNSPLIT
            return cls._assumed(gpu, ranks), Trust.NONE
        profile = cls.from_name(name)
        if profile.gpus != ranks:
            raise TierForceError(
                f"`hardware` {name} is for {profile.gpus} GPUs, and this run has {ranks}: measure "
                f"with `tierforce probe --gpus {ranks}`, or leave it out."
            )
        return profile, profile.trust_in(name)

    def trust_in(self, name: str) -> Trust:
        """Return what this profile, which `name` gave, may decide."""
        is_measured = None not in (self.reconstruct_rate, self.high_bits_rate)
        is_shipped = shipped_gpus(name) is not None
        return Trust.ALL if is_measured and not is_shipped else Trust.UNSPLIT

    @classmethod
    def _assumed(cls, gpu: str, ranks: int) -> HardwareProfile:
        """Return the profile of an unknown machine, which measured rounds correct."""
        return replace(ASSUMED_CPU, gpus=ranks) if not gpu else cls.from_name(f"{ranks}x4090")

    @classmethod
    def _from_content(cls, name: str, content: Any) -> HardwareProfile:
        """Return the profile in a file's content. Raises TierForceError for missing fields."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        required = [
            field.name for field in fields(cls) if field.name != "name" and field.default is MISSING
        ]
        if not isinstance(content, dict) or (
            missing := [field for field in required if field not in content]
        ):
            problem = (
                f"lacks {', '.join(missing)}"
                if isinstance(content, dict)
                else "is not a JSON object"
            )
            raise TierForceError(f"hardware {name} {problem}: it needs {', '.join(required)}.")
        if _OLD_FIELDS & content.keys():
            raise TierForceError(
                f"hardware {name} has field names of tierforce 0.1: run `tierforce probe` again."
            )
        values = {
            field: content[field].get("value")
            if isinstance(content[field], dict)
            else content[field]
            for field in known
            if field in content
        }
        return cls(name, **values)


# Rounded from `tierforce probe --model smollm2` on two cores of an AMD EPYC. An engine measures its
# memory itself.
ASSUMED_CPU = HardwareProfile(
    name="an unknown CPU",
    gpus=1,
    device_memory=1e12,
    host_memory=1e12,
    link_in=1e10,
    link_out=1e10,
    memory_rate=1.5e10,
    matmul=2e11,
    all_reduce_s=1e-4,
    all_reduce_rate=1e9,
    layer_s=3e-4,
    kv_rate=6e9,
    attention=1e11,
    prefill_attention=1.5e11,
    score_rate=2.5e9,
    reconstruct_rate=1.3e9,
    high_bits_rate=1.7e9,
    int8_rate=4.5e9,
    packed_rate=2e9,
    forward_s=7e-3,
    sample_s=2e-3,
    draw_s=7e-3,
    runs_ahead=False,
)

_OLD_FIELDS = {"join_rate", "near_rate", "pass_s", "piece_s"}  # renamed in version 0.2


def shipped_gpus(name: str) -> tuple[int, str] | None:
    """Return the number and the kind of shipped GPUs in a name such as 2x4090; None for others."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _shipped() or int(match[1]) > _MAX_GPUS:
        return None
    return int(match[1]), match[2]


def _shipped_numbers(name: str) -> dict[str, Any] | None:
    """Return the numbers of some shipped GPUs, such as 2x4090; None if they are unknown.

    All-reduces are given for two GPUs. Of more, a ring takes 2 (n - 1) steps in place of 2, in each
    of which it transfers an n-th of the tensor (nccl-tests, PERFORMANCE.md). In shared memory each
    rank reads the tensors of the n - 1 others.
    """
    if (found := shipped_gpus(name)) is None:
        return None
    count, kind = found
    numbers = {field: each["value"] for field, each in _shipped()[kind].items()}
    if count == 1:
        del numbers["shared_all_reduce_rate"]
        numbers |= {"all_reduce_s": 0.0, "all_reduce_rate": 1e15}  # there are none
    else:
        numbers["all_reduce_s"] *= count - 1
        numbers["all_reduce_rate"] *= count / (2 * (count - 1))
        numbers["shared_all_reduce_rate"] /= count - 1
    return {**numbers, "gpus": count}


@cache
def _shipped() -> dict[str, Any]:
    """Return the numbers of the shipped GPUs, each with its source, by name."""
    content = files("decoding.planning").joinpath("profiles.json").read_text()
    return dict(json.loads(content))
