"""`tierforce plan`: whether a model and a text fit a machine, and how long it would take.

It needs no weights and no GPU: everything follows from configs and hardware numbers.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from decoding.app.hardware.plan_view import memory_table, plan_picture, times_table
from decoding.app.options import JobOptions, TextsAtOnce, described, refuse_sharing
from decoding.app.terminal.files import check_writable
from decoding.app.terminal.streams import printable
from decoding.config.defaults import (
    ACCEPTANCE,
    DEFAULT_BUDGET,
    INNER_ACCEPTANCE,
    INNER_DRAFT,
    MAX_TEXTS,
    NEW_TOKENS,
)
from decoding.config.settings import Settings
from decoding.planning.cost import Acceptance
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.measured_cost import ObservedCosts
from decoding.planning.memory_requirements import TextNeeds, draft_ranks
from decoding.planning.prior import Prior
from decoding.planning.strategy_selector import WayChooser
from decoding.planning.what_if import Outlook, look_ahead, otherwise, plain, together
from decoding.text.vocabulary import names_in, refuse_other_names
from offload.dtypes import DTYPES, counted_dtype
from offload.errors import FitError, TierForceError
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
    context: Annotated[int | None, described(Settings, "context")] = None,
    rope: Annotated[str | None, described(Settings, "rope")] = None,
    max_new_tokens: Annotated[int, described(JobOptions, "max_new_tokens")] = NEW_TOKENS,
    hardware: Annotated[
        str, typer.Option(help="2x4090, 1x4090, 2x3090, 1x5090, 1xA100-80, or a JSON file.")
    ] = "2x4090",
    host_memory: Annotated[
        float | None, typer.Option(help="Host memory for KV, in GB, in place of the profile's.")
    ] = None,
    mode: Annotated[str, described(Settings, "mode")] = "auto",
    budget: Annotated[int | None, described(Settings, "budget", default=PREDICTED)] = None,
    resident_layers: Annotated[int | None, described(Settings, "resident_layers")] = None,
    sliced_layers: Annotated[int | None, described(Settings, "sliced_layers")] = None,
    packed: Annotated[bool | None, described(Settings, "packed")] = None,
    draft_length: Annotated[
        int | None, described(Settings, "draft_length", default=PREDICTED)
    ] = None,
    dtype: Annotated[str, described(Settings, "dtype", "bfloat16", **FORMATS)] = "bfloat16",
    identical: Annotated[bool, described(Settings, "identical")] = False,
    acceptance: Annotated[
        float,
        typer.Option(
            help=(
                f"How often tokens of a retrieval cache of {DEFAULT_BUDGET}, or of prompt lookup, "
                "stand before the target: assumed; finished records tell it, those of texts "
                "without --identical."
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
    texts_at_once: TextsAtOnce = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture to draw: memory by tier, and one round of decoding."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
) -> None:
    """Say what lives where, whether it fits, and how long it would take.

    All of it is predicted, from configs and hardware numbers alone. With --identical drafts are
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
        budget=budget,
        resident_layers=resident_layers,
        sliced_layers=sliced_layers,
        packed=packed,
        draft_length=draft_length,
        context=context,
        rope=rope,
        dtype=dtype,
        identical=identical,
        # an engine decides by the size of its GPU's cache (`Link.l2_bytes`)
        int8_retrieval=machine.int8_retrieval,
    )
    needs = _needs(model, draft, settings, int(machine.gpus))
    _refuse_other_tokens(model, draft, needs)
    notes = needs.target.context_notes()
    prompt = _prompt_tokens(needs.target, context, max_new_tokens)
    rates = Acceptance(acceptance, inner_acceptance, is_coupled=identical)
    if identical:
        refuse_sharing(texts_at_once)
        texts_at_once = 1
    try:
        ahead = look_ahead(needs, machine, prompt, max_new_tokens, rates)
        # an engine that has seen no text yet
        prior = Prior(machine, is_measured=not HardwareProfile.is_shipped(hardware))
        new_to_it = WayChooser(ObservedCosts(None), prior)
        first = look_ahead(needs, machine, prompt, max_new_tokens, rates, new_to_it)
        shared = _one_of_several(needs, ahead, texts_at_once)
    except FitError as error:
        raise FitError(f"it does not fit {machine.name}: {error}") from error
    others = [each for each in (plain(ahead), otherwise(needs, ahead)) if each is not None]
    if plot is not None:
        plan_picture(plot, model, ahead)
    if as_json:
        job = {"model": model, "draft": draft, "dtype": dtype, "rope": rope, "identical": identical}
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
    machine = HardwareProfile.find(hardware)
    if host_memory is None:
        return machine
    if not 0 <= host_memory < float("inf"):
        raise TierForceError(f"--host-memory must be 0 or more GB, found {host_memory}.")
    return replace(machine, host_memory=host_memory * 1e9)


def _needs(model: str, draft: str | None, settings: Settings, ranks: int) -> TextNeeds:
    """Return what texts need of one of `ranks` ranks, by the named models' configs.

    Raises TierForceError for models or settings that do not go together.
    """
    target = ModelConfig.find(model).stretched(settings.rope)
    small = ModelConfig.find(draft) if draft is not None else None
    kind = counted_dtype(settings.dtype)
    target.kv_layout(ranks, kind)  # which refuses heads that cannot be split
    settings.refuse_missing_layers(target.layers)
    return TextNeeds(
        target=target,
        draft=small,
        mode=settings.resolved_mode(small is not None),
        settings=settings,
        dtype=kind,
        ranks=ranks,
        draft_ranks=draft_ranks(small, ranks, kind) if small is not None else 1,
        copies=True,
    )


def _refuse_other_tokens(model: str, draft: str | None, needs: TextNeeds) -> None:
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
        refuse_other_names(folders[1], theirs, ours, min(small.vocab, target.vocab))
    elif abs(small.vocab - target.vocab) > MAX_PADDING:
        raise TierForceError(
            f"{draft} has a vocabulary of {small.vocab:,} tokens, {model} one of "
            f"{target.vocab:,}: a draft must share the target's tokenizer. If it does, give both "
            "as folders or GGUF files with their tokenizers, so that these can be compared."
        )


def _one_of_several(needs: TextNeeds, ahead: Outlook, texts_at_once: int | None) -> Outlook:
    """Return the same text as one of several: of so many, or of as many as pay.

    Raises FitError.
    """
    if texts_at_once is None:
        return together(needs, ahead, MAX_TEXTS)
    return look_ahead(
        needs, ahead.hardware, ahead.prompt, ahead.new, ahead.acceptance, at_once=texts_at_once
    )


def _prompt_tokens(target: ModelConfig, context: int | None, new: int) -> int:
    """Return the tokens of the longest prompt in this context.

    Raises TierForceError where there is no room for one.
    """
    tokens = context or target.context_limit
    target.refuse_context(tokens)
    if tokens <= new:
        raise TierForceError(
            f"--context {tokens} leaves no room for a prompt before {new} new tokens."
        )
    return tokens - new


def _document(
    job: dict[str, Any], ahead: Outlook, others: list[Outlook], shared: Outlook, first: Outlook
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
            "budget": needs.budget,
            "budget_because": ahead.choice.why,
            "acceptance": ahead.acceptance.of(needs, ahead.plan),
            "inner_acceptance": ahead.acceptance.inner,
        },
        "memory": {
            "device in prefill": ahead.prefill_tiers,
            "device when decoding": ahead.decode_tiers,
            "host": ahead.plan.host_bytes,
        },
        "plan": vars(ahead.plan),
        "forecast": ahead.forecast.as_dict(),
        "first document": first.forecast.as_dict(),
        "at once": {"plan": vars(shared.plan), "forecast": shared.forecast.as_dict()},
        "plain": None,
        **{each.needs.mode: each.forecast.as_dict() for each in others},
    }
