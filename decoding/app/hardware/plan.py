"""`tierforce plan`: whether a model and a text fit a machine, and how long it would take.

It needs no weights and no GPU: everything follows from configs and hardware numbers.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from decoding.app.hardware.plan_view import memory_table, plan_picture, times_table
from decoding.app.options import Concurrency, JobOptions, check_concurrency, option_parameter
from decoding.app.terminal.files import check_writable
from decoding.app.terminal.streams import printable
from decoding.config.defaults import (
    ACCEPTANCE,
    DEFAULT_RETRIEVAL_BUDGET,
    INNER_ACCEPTANCE,
    INNER_DRAFT,
    MAX_CONCURRENCY,
    NEW_TOKENS,
)
from decoding.config.settings import Settings
from decoding.planning.cost import Acceptance
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.measured_cost import MeasuredCosts
from decoding.planning.memory_requirements import Requirements, draft_ranks
from decoding.planning.prior import HardwarePrior
from decoding.planning.strategy_selector import StrategySelector
from decoding.planning.what_if import (
    PlanReport,
    plan_alternative,
    plan_concurrent,
    plan_plain,
    plan_request,
)
from decoding.text.vocabulary import check_same_vocabulary, names_in
from offload.dtypes import DTYPES, dtype_spec
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.config.model_config import ModelConfig
from parallel.formats.locate import find_local

PREDICTED = "what is predicted to pay"
MAX_PADDING = 1024  # tokens by which vocabularies of one tokenizer may differ
FORMATS = {"help": "Number format of weights and KV cache.", "choices": DTYPES}


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Target: a folder, a GGUF file, a hub name, or a config.json.", show_default=False
        ),
    ],
    draft: Annotated[str | None, typer.Option(help="Draft model, named likewise.")] = None,
    context: Annotated[int | None, option_parameter(Settings, "context")] = None,
    rope: Annotated[str | None, option_parameter(Settings, "rope")] = None,
    max_new_tokens: Annotated[int, option_parameter(JobOptions, "max_new_tokens")] = NEW_TOKENS,
    hardware: Annotated[
        str, typer.Option(help="2x4090, 1x4090, 2x3090, 1x5090, 1xA100-80, or a JSON file.")
    ] = "2x4090",
    host_memory: Annotated[
        float | None, typer.Option(help="Host memory for KV, in GB, in place of the profile's.")
    ] = None,
    mode: Annotated[str, option_parameter(Settings, "mode")] = "auto",
    retrieval_budget: Annotated[
        int | None, option_parameter(Settings, "retrieval_budget", default=PREDICTED)
    ] = None,
    gpu_kv_layers: Annotated[int | None, option_parameter(Settings, "gpu_kv_layers")] = None,
    split_kv_layers: Annotated[int | None, option_parameter(Settings, "split_kv_layers")] = None,
    compress_offload: Annotated[str | None, option_parameter(Settings, "compress_offload")] = None,
    num_draft_tokens: Annotated[
        int | None, option_parameter(Settings, "num_draft_tokens", default=PREDICTED)
    ] = None,
    dtype: Annotated[str, option_parameter(Settings, "dtype", "bfloat16", **FORMATS)] = "bfloat16",
    deterministic: Annotated[bool, option_parameter(Settings, "deterministic")] = False,
    acceptance: Annotated[
        float,
        typer.Option(
            help=(
                f"How often tokens of a retrieval cache of {DEFAULT_RETRIEVAL_BUDGET}, or of prompt lookup, "
                "stand before the target: assumed; finished records tell it, those of texts "
                "without --deterministic."
            )
        ),
    ] = ACCEPTANCE,
    inner_acceptance: Annotated[
        float,
        typer.Option(
            help=(
                f"Of what the draft model proposes: to a retrieval cache, {INNER_DRAFT} at a time, "
                "or in mode speculative to the target."
            )
        ),
    ] = INNER_ACCEPTANCE,
    concurrency: Concurrency = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture to draw: memory by tier, and one round of decoding."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what lives where, whether it fits, and how long it would take.

    All of it is predicted, from configs and hardware numbers alone. With --deterministic drafts are
    taken to be rejected as often as they may be, up to twice as often: greedy ones are not.
    """
    JobOptions(model, draft, max_new_tokens=max_new_tokens)  # which checks them
    if plot is not None:
        check_writable("--plot", plot)
    machine = _machine(hardware, host_memory)
    for name, rate in (("acceptance", acceptance), ("inner-acceptance", inner_acceptance)):
        if not 0 <= rate <= 1:
            raise TierForceError(f"--{name} must be between 0 and 1, found {rate}.")
    settings = Settings(
        mode=mode,
        retrieval_budget=retrieval_budget,
        gpu_kv_layers=gpu_kv_layers,
        split_kv_layers=split_kv_layers,
        compress_offload=cast(bool | None, compress_offload),
        num_draft_tokens=num_draft_tokens,
        context=context,
        rope=rope,
        dtype=dtype,
        deterministic=deterministic,
        # an engine decides by the size of its GPU's cache (`Link.l2_bytes`)
        int8_retrieval=machine.int8_retrieval,
    )
    needs = _needs(model, draft, settings, int(machine.gpus))
    _refuse_other_tokens(model, draft, needs)
    notes = needs.target.context_notes()
    prompt = _prompt_tokens(needs.target, context, max_new_tokens)
    rates = Acceptance(acceptance, inner_acceptance, is_coupled=deterministic)
    if deterministic:
        check_concurrency(concurrency)
        concurrency = 1
    try:
        ahead = plan_request(needs, machine, prompt, max_new_tokens, rates)
        # an engine that has seen no text yet
        prior = HardwarePrior(machine, is_measured=not HardwareProfile.is_shipped(hardware))
        new_to_it = StrategySelector(MeasuredCosts(None), prior)
        first = plan_request(needs, machine, prompt, max_new_tokens, rates, new_to_it)
        shared = _one_of_several(needs, ahead, concurrency)
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(f"it does not fit {machine.name}: {error}") from error
    others = [
        each for each in (plan_plain(ahead), plan_alternative(needs, ahead)) if each is not None
    ]
    if plot is not None:
        plan_picture(plot, model, ahead)
    if as_json:
        job = {
            "model": model,
            "draft": draft,
            "dtype": dtype,
            "rope": rope,
            "deterministic": deterministic,
        }
        document = _document(job, ahead, others, shared, first) | {"notes": notes}
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    console.print(times_table(ahead, others, shared, first))
    console.print(memory_table(ahead))
    for note in notes:
        console.print(f"Note: {printable(note)}", markup=False, soft_wrap=True)


def _machine(hardware: str, host_memory: float | None) -> HardwareProfile:
    """Return a machine's numbers, maybe with so many GB of host memory. Raises TierForceError."""
    machine = HardwareProfile.from_name(hardware)
    if host_memory is None:
        return machine
    if not 0 <= host_memory < float("inf"):
        raise TierForceError(f"--host-memory must be 0 or more GB, found {host_memory}.")
    return replace(machine, host_memory=host_memory * 1e9)


def _needs(model: str, draft: str | None, settings: Settings, ranks: int) -> Requirements:
    """Return what texts need of one of `ranks` ranks, by the named models' configs.

    Raises TierForceError for models or settings that do not go together.
    """
    target = ModelConfig.from_name(model).with_rope_scaling(settings.rope)
    small = ModelConfig.from_name(draft) if draft is not None else None
    kind = dtype_spec(settings.dtype)
    target.kv_layout(ranks, kind)  # which refuses heads that cannot be split
    settings.check_layers(target.layers)
    return Requirements(
        target=target,
        draft=small,
        mode=settings.resolved_mode(small is not None),
        settings=settings,
        dtype=kind,
        ranks=ranks,
        draft_ranks=draft_ranks(small, ranks, kind) if small is not None else 1,
        copies=True,
    )


def _refuse_other_tokens(model: str, draft: str | None, needs: Requirements) -> None:
    """Refuse a draft whose tokens are not the target's: where both tokenizers are here by them,
    else by the sizes of the vocabularies.

    Raises TierForceError.
    """
    small, target = needs.draft, needs.target
    if draft is None or small is None or not needs.has_draft:
        return
    folders = [Path(find_local(name) or name) for name in (model, draft)]
    theirs, ours = (names_in(folder) for folder in folders)
    if theirs is not None and ours is not None:
        check_same_vocabulary(folders[1], theirs, ours, min(small.vocab, target.vocab))
    elif abs(small.vocab - target.vocab) > MAX_PADDING:
        raise TierForceError(
            f"{draft} has a vocabulary of {small.vocab:,} tokens, {model} one of "
            f"{target.vocab:,}: a draft must share the target's tokenizer. If it does, give both "
            "as folders or GGUF files with their tokenizers, so that these can be compared."
        )


def _one_of_several(needs: Requirements, ahead: PlanReport, concurrency: int | None) -> PlanReport:
    """Return the same text as one of several: of so many, or of as many as pay.

    Raises InsufficientMemoryError.
    """
    if concurrency is None:
        return plan_concurrent(needs, ahead, MAX_CONCURRENCY)
    return plan_request(
        needs, ahead.hardware, ahead.prompt, ahead.new, ahead.acceptance, concurrency=concurrency
    )


def _prompt_tokens(target: ModelConfig, context: int | None, new: int) -> int:
    """Return the tokens of the longest prompt in this context.

    Raises TierForceError where there is no room for one.
    """
    tokens = context or target.context_limit
    target.check_context(tokens)
    if tokens <= new:
        raise TierForceError(
            f"--context {tokens} leaves no room for a prompt before {new} new tokens."
        )
    return tokens - new


def _document(
    job: dict[str, Any],
    ahead: PlanReport,
    others: list[PlanReport],
    shared: PlanReport,
    first: PlanReport,
) -> dict[str, Any]:
    """Return all that was found, for machines; other modes by name."""
    needs = ahead.needs
    return {
        "job": {
            **job,
            "hardware": ahead.hardware.name,
            "ranks": needs.ranks,
            "mode": needs.mode,
            "prompt": ahead.prompt,
            "new": ahead.new,
            "retrieval_budget": needs.budget,
            "strategy_reason": ahead.choice.why,
            "acceptance": ahead.acceptance.of(needs, ahead.plan),
            "inner_acceptance": ahead.acceptance.inner,
        },
        "memory": {
            "device in prefill": ahead.prefill_memory,
            "device when decoding": ahead.decode_memory,
            "host": ahead.plan.host_bytes,
        },
        "plan": vars(ahead.plan),
        "forecast": ahead.forecast.as_dict(),
        "first document": first.forecast.as_dict(),
        "concurrent": {"plan": vars(shared.plan), "forecast": shared.forecast.as_dict()},
        "plain": None,
        **{each.needs.mode: each.forecast.as_dict() for each in others},
    }
