"""Plan reports for a described machine, as shown by `tierforce plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoding.config.settings import LEVELS
from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.fit import concurrency_pays, feasible_plans, max_prompt, memory_of
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan, device_breakdown
from decoding.planning.memory_requirements import Requirements
from decoding.planning.strategy_selector import StrategyChoice, StrategySelector
from offload.codec.format import split_format
from offload.errors import InsufficientMemoryError

Tiers = dict[str, int]  # bytes of one rank's device memory by tier


@dataclass(frozen=True)
class PlanReport:
    """The plan of one request on one machine: memory placement and predicted times."""

    requirements: Requirements  # with the selected mode and budget
    hardware: HardwareProfile
    prompt: int
    max_new_tokens: int
    choice: StrategyChoice
    plan: MemoryPlan
    prefill_memory: Tiers
    decode_memory: Tiers
    acceptance: Acceptance
    forecast: Forecast

    @property
    def layers_on_host(self) -> int:
        """Return the number of layers with KV on the host during decoding."""
        return self.requirements.target.layers - self.plan.resident_layers


def plan_request(
    requirements: Requirements,
    hardware: HardwareProfile,
    prompt: int,
    max_new_tokens: int,
    acceptance: Acceptance | None = None,
    selector: StrategySelector | None = None,
    concurrency: int = 1,
) -> PlanReport:
    """Plan a request with the mode and budget that are predicted to be fastest.

    It is one of `concurrency` requests, which share the memory and each batch. `selector` selects
    mode and budget, by default from the machine's own numbers. Raises InsufficientMemoryError,
    stating the longest context that would fit.
    """
    acceptance = acceptance or Acceptance()
    memory = memory_of(hardware, requirements).divided(concurrency)
    try:
        plans = feasible_plans(requirements, memory, prompt, max_new_tokens)
    except InsufficientMemoryError as error:
        longest = max_prompt(requirements, memory, prompt, max_new_tokens)
        hint = "No shorter context would fit either."
        if longest:
            hint = f"{longest + max_new_tokens} tokens of context would fit."
        raise InsufficientMemoryError(f"{error} {hint}") from error
    if selector is None:
        selector = StrategySelector(PredictedCosts(hardware, acceptance, concurrency))
    choice = selector.select(requirements, plans, prompt)
    if requirements.has_choice:
        requirements = requirements.with_strategy(choice.strategy)
    plan = plans[choice.strategy]
    prefill, decode = device_breakdown(
        requirements.memory(prompt, max_new_tokens),
        plan.resident_layers,
        plan.deferred_layers,
        plan.split_layers,
    )
    weights = {"weights": requirements.weight_bytes}
    return PlanReport(
        requirements=requirements,
        hardware=hardware,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        choice=choice,
        plan=plan,
        prefill_memory=weights | prefill,
        decode_memory=weights | decode,
        acceptance=acceptance,
        forecast=forecast(
            requirements, plan, hardware, prompt, max_new_tokens, acceptance, concurrency
        ),
    )


def with_concurrency(
    requirements: Requirements, report: PlanReport, concurrency: int
) -> PlanReport:
    """Return the plan of the same request as one of `concurrency`.

    Raises InsufficientMemoryError.
    """
    return plan_request(
        requirements,
        report.hardware,
        report.prompt,
        report.max_new_tokens,
        report.acceptance,
        concurrency=concurrency,
    )


def plan_concurrent(
    requirements: Requirements, report: PlanReport, max_concurrency: int
) -> PlanReport:
    """Return the plan with the highest concurrency, up to `max_concurrency`, at no memory cost.

    Each request keeps on the device what it keeps alone. Returns `report` itself if batching does
    not pay.
    """
    best = report
    # Short forwards are captured as CUDA graphs on a GPU.
    pays = concurrency_pays(report.requirements, uses_graphs=report.hardware.runs_ahead)
    for concurrency in range(2, max_concurrency + 1 if pays else 2):
        try:
            shared = with_concurrency(requirements, report, concurrency)
        except InsufficientMemoryError:
            break
        if shared.plan != report.plan:
            break
        best = shared
    return best


def plan_plain(report: PlanReport) -> PlanReport | None:
    """Return the plan of the same request with plain decoding, which gets all the memory.

    None if it does not fit, although it needs less of nearly everything.
    """
    requirements = replace(report.requirements, mode="plain")
    try:
        return plan_request(requirements, report.hardware, report.prompt, report.max_new_tokens)
    except InsufficientMemoryError:
        return None


def plan_alternative(requirements: Requirements, report: PlanReport) -> PlanReport | None:
    """Return the plan in the split variant of the mode, or in the unsplit mode if it is split.

    None if the configured mode is split, no layer is offloaded, the dtype cannot be split, or the
    alternative does not fit.
    """
    mode = requirements.mode if report.requirements.has_split else f"split-{requirements.mode}"
    can_split = report.layers_on_host and split_format(requirements.dtype) is not None
    if mode == report.requirements.mode or mode not in LEVELS or not can_split:
        return None
    try:
        return plan_request(
            replace(requirements, mode=mode, settings=replace(requirements.settings, mode=mode)),
            report.hardware,
            report.prompt,
            report.max_new_tokens,
            report.acceptance,
        )
    except InsufficientMemoryError:
        return None
