"""Whether runs fit in their planned memory, under a memory limit.

On a CPU, device memory is the process's own. Each setting runs in a process of its own: after the
models are loaded, its data segment may only grow by the planned memory of device and host, divided
by the share of free memory that a plan uses (0.9). As a control, each setting is also run with half
of that limit, which must fail.
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
from decoding.planning.request_spec import RequestSpec
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from parallel.model.loading import parameter_bytes


@dataclass(frozen=True)
class Setting:
    """The settings of one run."""

    part: float  # share of the longest context
    mode: str  # auto: hierarchical with a draft model, else retrieval
    link: str = "view"
    resident: float = 1.0  # share of the layers
    budget: int = 1024
    dtype: str = "bfloat16"
    # number of resident layers that are onloaded only after prefill, in minimum device memory
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
    """Inputs shared by all settings: names of models, and tokens of the longest prompt."""

    target: str
    draft: str | None
    rope: str | None
    context: int
    max_new_tokens: int


def as_expected(row: Row) -> bool:
    """Return whether a run finished if its limit is the plan, and failed if it is less."""
    return (row["ended"] in ("length", "stop")) == (row["share"] == 1)


def planned_bytes(plan: MemoryPlan) -> int:
    """Return the planned memory of a request, on the device and the host."""
    return plan.device_bytes + plan.host_bytes


@contextmanager
def limit_memory(plan: MemoryPlan, share: float) -> Iterator[None]:
    """Limit this process to `share` of the free memory that a plan requires."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    data = int(status.split("VmData:")[1].split()[0]) << 10  # private and writable, in bytes
    limit = data + _allowed_bytes(plan, share)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _allowed_bytes(plan: MemoryPlan, share: float) -> int:
    return int(share * planned_bytes(plan) / USABLE_SHARE)


def engine_for(setting: Setting, job: Job) -> Engine:
    """Return an engine; with deferred layers, in the minimum memory that they allow."""
    layers = int(setting.resident * ModelConfig.from_name(job.target).full_layers)
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
    prompt_length = int(setting.part * job.context)
    requirements = RequestSpec(runtime.requirements, prompt_length, job.max_new_tokens).memory
    phases = device_breakdown(requirements, layers, setting.deferred_layers)
    models = [model for model in (runtime.target, runtime.draft) if model is not None]
    memory = parameter_bytes(*models) + max(sum(phase.values()) for phase in phases)
    runtime = runtime.with_settings(replace(settings, device_memory=memory))
    return Engine(runtime, engine.tokenizer, engine.scheduler.stop_tokens)


def run_limited(setting: Setting, share: float, job: Job) -> Row:
    """Decode within `share` of the planned memory.

    Requires a process of its own, in which nothing else allocates memory meanwhile.
    """
    prepare(0)
    engine, new_tokens = engine_for(setting, job), job.max_new_tokens
    list(engine.generate([1] * 300, 20))  # starts threads and allocates their memory
    prompt = prompt_tokens(engine.tokenizer, int(setting.part * job.context))
    plan = engine.runtime.plan(len(prompt), new_tokens).memory
    tokens = 0
    try:
        with limit_memory(plan, share):
            tokens = len(list(engine.generate(prompt, new_tokens, Sampling(0.6, top_p=0.9))))
        ended = str(engine.stats.finish_reason)
    except (MemoryError, RuntimeError, TierForceError) as error:
        ended = type(error).__name__
    return asdict(replace(setting, mode=engine.runtime.mode)) | {
        "context": len(prompt),
        "share": share,
        "planned_mb": planned_bytes(plan) / 1e6,
        "device_mb": plan.device_bytes / 1e6,
        "planned_layers": plan.resident_layers,
        "planned_late_layers": plan.deferred_layers,
        "limit_mb": _allowed_bytes(plan, share) / 1e6,
        "tokens": tokens,
        "ended": ended,
    }


def run(setting: Setting, share: float, job: Job) -> Row:
    """Return the row of a run within a share of its plan, even if its process dies."""
    row, _ = call_in_process(run_limited, setting, share, job)
    return asdict(setting) | {"share": share, "ended": str(row)} if isinstance(row, Died) else row


@benchmark(
    "Decoding within the planned memory (share 1.0), and within half of it", ["part", "resident"]
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    context: opt.Longest = opt.NATIVE,
    new_tokens: opt.NewTokens = 48,
    settings: opt.First = ALL,
    output: opt.Output = Path("results/memory.json"),
) -> Measurement:
    """Decode every setting within its planned memory, and within half of it."""
    rows, job = list[Row](), Job(target, draft, rope, context, new_tokens)
    for setting in SETTINGS[:settings]:
        if setting.mode == "speculative" and draft is None:
            say("speculative is skipped: it needs a draft model, give --draft")
            continue
        for share in (1.0, 0.5):
            rows.append(run(setting, share, job))
            say(f"{setting.part:g} of the context, {setting.mode}, {share:g}: {rows[-1]['ended']}")
            # held: every run within its plan finished, and every run within half failed
            yield {"rows": rows, "held": all(map(as_expected, rows))}
