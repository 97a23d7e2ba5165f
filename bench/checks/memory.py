"""A plan that says that a text fits is held to it: the text is decoded under an imposed limit of
the memory it would need free.

On a CPU device memory is the process's own. Each setting runs in a process of its own: when the
models are loaded its data segment may grow by what the plan says, device and host together, over
the share of free memory that a plan uses (0.9), and no further. For contrast each is also run with
half of that, which must fail, or the limit would show nothing.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.harness.options import Output
from bench.harness.process import Died, apart
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.planning.defaults import USABLE_SHARE
from offload.errors import TierForceError
from offload.memory_plan import device_tiers
from parallel.loading import parameter_bytes


@dataclass(frozen=True)
class Setting:
    """One text. `resident` None: as many layers as there are."""

    context: int
    mode: str
    link: str = "view"
    resident: int | None = None
    budget: int = 4096
    dtype: str = "bfloat16"
    # of the resident layers, in the least memory that has room for them behind prefill
    late: int = 0


SETTINGS = [
    Setting(32_768, "plain"),
    Setting(65_536, "hierarchical", "emulated:8", 3),
    Setting(49_152, "hierarchical", "emulated:8", 0, 1024, "float32"),
    Setting(65_536, "retrieval", "emulated:8", 1, 16_384),
    Setting(32_768, "speculative", "emulated:8", 5, dtype="float32"),
    Setting(65_536, "hierarchical", "emulated:8", 4, 2048, late=1),
]


def data_bytes() -> int:
    """Of this process: private and writable memory, what RLIMIT_DATA bounds."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) << 10


def limited(setting: Setting, share: float, new: int) -> dict[str, Any]:
    """Decode under `share` of the memory that the plan asks for; in a process of its own, for the
    limit stays.
    """
    prepare(0)
    settings = Settings(
        mode=setting.mode,
        dtype=setting.dtype,
        link=setting.link,
        resident_layers=setting.resident,
        budget=setting.budget,
    )
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, device="cpu")
    if setting.late:
        needs = engine.runtime.needs.memory(setting.context, new)
        tiers = device_tiers(
            needs,
            engine.runtime.target.config.layers if setting.resident is None else setting.resident,
            setting.late,
        )
        weights = sum(
            parameter_bytes(each)
            for each in (engine.runtime.target, engine.runtime.draft)
            if each is not None
        )
        memory = weights + max(sum(phase.values()) for phase in tiers)
        engine = Engine(
            engine.runtime.with_settings(replace(settings, device_memory=memory)),
            engine.tokenizer,
            engine.stop_tokens,
        )
    list(engine.generate([1] * 300, 20))  # threads and their memory
    prompt = prompt_tokens(engine.tokenizer, setting.context)
    place = engine.runtime.plan(len(prompt), new)
    before, wanted = data_bytes(), place.device_bytes + place.host_bytes
    limit = before + int(share * wanted / USABLE_SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    row = {
        "planned MB": wanted / 1e6,
        "device MB": place.device_bytes / 1e6,
        "layers": place.resident_layers,
        "late layers": place.late_layers,
        "limit MB": (limit - before) / 1e6,
    }
    try:
        made = len(list(engine.generate(prompt, new, Sampling(0.6, top_p=0.9))))
        return {**row, "tokens": made, "ended": engine.stats.finish_reason}
    except (MemoryError, RuntimeError, TierForceError) as error:
        return {**row, "tokens": 0, "ended": type(error).__name__}


def run(setting: Setting, share: float, new: int) -> dict[str, Any]:
    answer, _ = apart(limited, setting, share, new)
    return (
        vars(setting)
        | {"share": share}
        | ({"ended": str(answer)} if isinstance(answer, Died) else answer)
    )


@benchmark
def main(
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 48,
    output: Output = Path("results/limits.json"),
) -> None:
    """Decode every setting within what its plan asks for, and within half of it."""
    progress, rows = Console(stderr=True), []
    for setting in SETTINGS:
        for share in (1.0, 0.5):
            rows.append(run(setting, share, new_tokens))
            progress.print(rows[-1])
    show("Decoding within the memory planned for (1.0), and within half", rows)
    held = all((row["ended"] in ("length", "stop")) == (row["share"] == 1) for row in rows)
    print(
        "every plan held, and every half failed"
        if held
        else "a plan did not hold, or a limit did not bind"
    )
    save(output, {"rows": rows, "held": held})
