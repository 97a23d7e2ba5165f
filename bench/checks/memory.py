"""A plan that says that a text fits is held to it, under an imposed limit of memory.

The limit is what the text would need free.

On a CPU device memory is the process's own. Each setting runs in a process of its own: when the
models are loaded its data segment may grow by what the plan says, device and host together, over
the share of free memory that a plan uses (0.9), and no further. For contrast each is also run with
half of that, which must fail, or the limit would show nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark, prepare
from bench.harness.process import Died, call_in_process
from bench.harness.tables import say
from bench.harness.text import prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.config.defaults import USABLE_SHARE
from decoding.planning.memory_plan import MemoryPlan, device_breakdown
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from parallel.model.loading import parameter_bytes


@dataclass(frozen=True)
class Setting:
    """One text, and what it is decoded with. Shares are of the context and of the layers."""

    part: float
    mode: str  # auto: hierarchical where there is a draft model, else retrieval
    link: str = "view"
    resident: float = 1.0
    budget: int = 1024
    dtype: str = "bfloat16"
    # of the resident layers, in the least memory that has room for them behind prefill
    deferred_layers: int = 0


SETTINGS = [
    Setting(0.5, "plain"),
    Setting(1.0, "auto", "emulated:8", 0.5),
    Setting(0.75, "auto", "emulated:8", 0.0, 512, "float32"),
    Setting(1.0, "retrieval", "emulated:8", 0.2, 4096),
    Setting(0.5, "speculative", "emulated:8", 0.8, dtype="float32"),
    Setting(1.0, "auto", "emulated:8", 0.7, 2048, deferred_layers=1),
]
ALL = len(SETTINGS)


@dataclass(frozen=True)
class Job:
    """What all settings are run with: models by their names, and the longest prompt."""

    target: str
    draft: str | None
    rope: str | None
    context: int
    new: int


def held(row: Row) -> bool:
    """Whether a run ended as it should: a whole text within its plan, and not within less."""
    return (row["ended"] in ("length", "stop")) == (row["share"] == 1)


def planned_bytes(place: MemoryPlan) -> int:
    """Return the memory that a text takes by its plan, on the device and the host."""
    return place.device_bytes + place.host_bytes


@contextmanager
def limit_memory(place: MemoryPlan, share: float) -> Iterator[None]:
    """Let this process take no more memory than `share` of what a plan asks to be free."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    data = int(status.split("VmData:")[1].split()[0]) << 10  # private and writable, in bytes
    limit = data + _allowed(place, share)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _allowed(place: MemoryPlan, share: float) -> int:
    return int(share * planned_bytes(place) / USABLE_SHARE)


def engine_for(setting: Setting, job: Job) -> Engine:
    """Load the models; where layers are to be late, with no more memory than that takes."""
    layers = int(setting.resident * ModelConfig.from_name(job.target).layers)
    settings = Settings(
        mode=Settings(mode=setting.mode).resolved_mode(job.draft is not None),
        rope=job.rope,
        dtype=setting.dtype,
        link=setting.link,
        gpu_kv_layers=layers,
        retrieval_budget=setting.budget,
    )
    engine = Engine.from_pretrained(job.target, job.draft, settings, device="cpu")
    if not setting.deferred_layers:
        return engine
    runtime = engine.runtime
    needs = runtime.requirements.memory(int(setting.part * job.context), job.new)
    phases = device_breakdown(needs, layers, setting.deferred_layers)
    models = [each for each in (runtime.target, runtime.draft) if each is not None]
    memory = parameter_bytes(*models) + max(sum(phase.values()) for phase in phases)
    runtime = runtime.with_settings(replace(settings, device_memory=memory))
    return Engine(runtime, engine.tokenizer, engine.stop_tokens)


def limited(setting: Setting, share: float, job: Job) -> Row:
    """Decode under `share` of the memory that the plan asks for.

    In a process of its own: nothing else may take memory meanwhile.
    """
    prepare(0)
    engine, new = engine_for(setting, job), job.new
    list(engine.generate([1] * 300, 20))  # threads and their memory
    prompt = prompt_tokens(engine.tokenizer, int(setting.part * job.context))
    place = engine.runtime.plan(len(prompt), new)
    tokens = 0
    try:
        with limit_memory(place, share):
            tokens = len(list(engine.generate(prompt, new, Sampling(0.6, top_p=0.9))))
        ended = str(engine.stats.finish_reason)
    except (MemoryError, RuntimeError, TierForceError) as error:
        ended = type(error).__name__
    return asdict(replace(setting, mode=engine.runtime.mode)) | {
        "context": len(prompt),
        "share": share,
        "planned_mb": planned_bytes(place) / 1e6,
        "device_mb": place.device_bytes / 1e6,
        "planned_layers": place.resident_layers,
        "planned_late_layers": place.deferred_layers,
        "limit_mb": _allowed(place, share) / 1e6,
        "tokens": tokens,
        "ended": ended,
    }


def run(setting: Setting, share: float, job: Job) -> Row:
    """Decode within a share of the plan; a process that dies has a row too."""
    row, _ = call_in_process(limited, setting, share, job)
    return asdict(setting) | {"share": share, "ended": str(row)} if isinstance(row, Died) else row


@benchmark("Decoding within the memory planned for (1.0), and within half", ["part", "resident"])
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    context: opt.Longest = opt.NATIVE,
    new_tokens: opt.NewTokens = 48,
    settings: opt.First = ALL,
    output: opt.Output = Path("results/memory.json"),
) -> Measurement:
    """Decode every setting within what its plan asks for, and within half of it."""
    rows, job = list[Row](), Job(target, draft, rope, context, new_tokens)
    for setting in SETTINGS[:settings]:
        if setting.mode == "speculative" and draft is None:
            say("speculative is left out: it needs a draft model, give --draft")
            continue
        for share in (1.0, 0.5):
            rows.append(run(setting, share, job))
            say(f"{setting.part:g} of the context, {setting.mode}, {share:g}: {rows[-1]['ended']}")
            # every plan held, and every half failed
            yield {"rows": rows, "held": all(map(held, rows))}
