"""`tierforce plan`: whether a model and a text fit a machine, what lives where, and how long it
would take. No weights, no GPU.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from decoding.app.plan_view import Tiers, memory_table, plan_picture, times_table
from decoding.planning.forecast import (
    ACCEPTANCE,
    INNER_ACCEPTANCE,
    INNER_LENGTH,
    accepted_with,
    forecast,
)
from decoding.planning.needs import BUDGETS, USED, Sizes, draft_ranks, weight_bytes
from decoding.planning.profile import Hardware
from decoding.settings import BUDGET, Settings, dtype_of
from offload.errors import FitError, TierForceError
from offload.memory_plan import MemoryPlan, device_tiers, plan_memory
from parallel.config import ModelConfig


def outlook(
    sizes: Sizes, hardware: Hardware, prompt: int, new: int
) -> tuple[MemoryPlan, tuple[Tiers, Tiers]]:
    """The plan of one rank, and its tiers in prefill and when decoding, weights first. Raises
    FitError.
    """
    weights = weight_bytes(sizes.target, sizes.ranks, sizes.dtype)
    if sizes.draft is not None and sizes.has_draft:
        weights += weight_bytes(sizes.draft, sizes.draft_ranks, sizes.dtype)
    if weights >= hardware.device_memory:
        raise FitError(
            f"the weights alone take {weights / 1e9:.1f} GB of each GPU of "
            f"{hardware.device_memory / 1e9:.1f} GB. It would take more GPUs, larger ones, or a "
            "smaller model."
        )
    needs = sizes.needs(prompt, new)
    free, host = (
        int(USED * (hardware.device_memory - weights)),
        int(hardware.host_memory) // sizes.ranks,
    )
    plan = plan_memory(needs, free, host, sizes.settings.resident_layers)
    prefill, decode = device_tiers(needs, plan.resident_layers, plan.late_layers)
    return plan, ({"weights": weights, **prefill}, {"weights": weights, **decode})


def spending(
    sizes: Sizes,
    hardware: Hardware,
    prompt: int,
    new: int,
    acceptance: float,
    inner_acceptance: float,
) -> Sizes:
    """With the budget that is predicted to pay best, layers taking the rest, where none is set; the
    smallest if none fits.
    """
    if sizes.settings.budget is not None or not sizes.has_retrieval:
        return sizes
    times: dict[int, float] = {}
    for budget in sizes.budgets(prompt + new):
        spent = sizes.spending(budget)
        try:
            placed, _ = outlook(spent, hardware, prompt, new)
        except FitError:
            continue
        accepted = accepted_with(acceptance, budget)
        times[budget] = forecast(
            spent, placed, hardware, prompt, new, accepted, inner_acceptance
        ).token_s
    return sizes.spending(min(times, key=times.__getitem__, default=BUDGETS[0]))


def longest(sizes: Sizes, hardware: Hardware, prompt: int, new: int) -> int:
    """Prompt tokens, at most `prompt`, that would fit; 0 if none do."""
    low, high = 0, prompt
    while low < high:
        middle = (low + high + 1) // 2
        try:
            outlook(sizes, hardware, middle, new)
            low = middle
        except FitError:
            high = middle - 1
    return low


def plan(
    model: Annotated[
        str,
        typer.Option(help="Target: a folder, a hub name, or a config.json.", show_default=False),
    ],
    draft: Annotated[str | None, typer.Option(help="Draft model, named likewise.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output; by default the model's limit.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of which are written.")] = 512,
    hardware: Annotated[
        str, typer.Option(help="2x4090, 1x4090, 2x3090, 1x5090, 1xA100-80, or a JSON file.")
    ] = "2x4090",
    host_memory: Annotated[
        float | None, typer.Option(help="Host memory for KV, in GB, in place of the profile's.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="auto, hierarchical, retrieval, speculative or plain.")
    ] = "auto",
    budget: Annotated[
        int | None,
        typer.Option(help="Retrieval budget, tokens a head; by default what is predicted to pay."),
    ] = None,
    resident_layers: Annotated[
        int | None, typer.Option(help="Target layers on the device; by default as many as fit.")
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens put before the target at once; by default what pays.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    acceptance: Annotated[
        float,
        typer.Option(
            help=(
                f"The target's acceptance rate with a budget of {BUDGET}, assumed; finished records"
                " tell it."
            )
        ),
    ] = ACCEPTANCE,
    inner_acceptance: Annotated[
        float,
        typer.Option(
            help=(
                f"The retrieval level's, for drafts of {INNER_LENGTH}; prompt lookup is not "
                "counted."
            )
        ),
    ] = INNER_ACCEPTANCE,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture to draw: memory by tier, and one round of decoding."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what lives where, whether it fits, and how long it would take: predictions, from configs
    and hardware numbers alone.
    """
    machine = Hardware.find(hardware)
    if host_memory is not None:
        machine = replace(machine, host_memory=host_memory * 1e9)
    for name, rate in (("acceptance", acceptance), ("inner-acceptance", inner_acceptance)):
        if not 0 <= rate <= 1:
            raise TierForceError(f"--{name} must be between 0 and 1, found {rate}.")
    target = ModelConfig.find(model)
    small = ModelConfig.find(draft) if draft is not None else None
    settings = Settings(
        mode=mode,
        budget=budget,
        resident_layers=resident_layers,
        draft_length=draft_length,
        context=context,
    )
    tokens = context or target.context_limit
    if tokens > target.context_limit:
        raise TierForceError(
            f"--context {tokens} is more than the model's {target.context_limit} positions."
        )
    prompt = tokens - max_new_tokens
    if prompt < 1:
        raise TierForceError(
            f"--context {tokens} leaves no room for a prompt before {max_new_tokens} new tokens."
        )
    kind, ranks = dtype_of(dtype), int(machine.gpus)
    target.kv_layout(ranks, kind)
    if resident_layers is not None and resident_layers > target.layers:
        raise TierForceError(
            f"--resident-layers {resident_layers}: the model has {target.layers} layers."
        )
    split = draft_ranks(small, ranks, kind) if small is not None else 1
    sizes = Sizes(
        target, small, settings.resolved_mode(small is not None), settings, kind, ranks, split, True
    )
    try:
        sizes = spending(sizes, machine, prompt, max_new_tokens, acceptance, inner_acceptance)
        placed, tiers = outlook(sizes, machine, prompt, max_new_tokens)
    except FitError as error:
        fits = longest(sizes, machine, prompt, max_new_tokens)
        hint = (
            f"{fits + max_new_tokens} tokens of context would fit."
            if fits
            else "No shorter context would fit either."
        )
        raise FitError(f"it does not fit {machine.name}: {error} {hint}") from error
    accepted = accepted_with(acceptance, sizes.budget) if sizes.has_retrieval else acceptance
    seen = forecast(sizes, placed, machine, prompt, max_new_tokens, accepted, inner_acceptance)
    if plot is not None:
        title = f"{model}, {prompt:,} + {max_new_tokens} tokens on {machine.name}, {sizes.mode}"
        host = machine.host_memory / ranks
        plan_picture(plot, title, tiers, machine.device_memory, placed.host_bytes, host, seen)
    job: dict[str, Any] = {
        "model": model,
        "draft": draft,
        "hardware": machine.name,
        "ranks": ranks,
        "mode": sizes.mode,
    }
    job |= {"prompt": prompt, "new": max_new_tokens, "dtype": dtype, "budget": sizes.budget}
    job |= {"acceptance": accepted, "inner_acceptance": inner_acceptance}
    if as_json:
        memory = {
            "device in prefill": tiers[0],
            "device when decoding": tiers[1],
            "host": placed.host_bytes,
        }
        document = {"job": job, "memory": memory}
        document |= {"plan": vars(placed), "forecast": seen.as_dict()}
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    console.print(memory_table(tiers, placed, machine, ranks))
    console.print(times_table(seen, sizes, placed, prompt, max_new_tokens))
