"""`tierforce plan`: whether a model and a prompt fit a machine, and the predicted times.

It needs neither weights nor a GPU: everything follows from configs and hardware numbers.
"""

# No `from __future__ import annotations`: typer reads these annotations as objects.
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from decoding.app.documents.option_files import read_questions
from decoding.app.hardware.machine import Hardware, HostMemory, PlannedGpus, find_machines
from decoding.app.hardware.model_on_machine import divisible, requirements_on
from decoding.app.hardware.plan_view import Plans, memory_table, plan_picture, times_table
from decoding.app.options import (
    DOCUMENTS,
    Concurrency,
    IncludedFiles,
    JobOptions,
    LongDocuments,
    QuestionsFile,
    check_concurrency,
    option_parameter,
)
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
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import split_tokens
from decoding.planning.planner import Planner, fitting_requirements
from decoding.planning.requirements import (
    Requirements,
    predictor_notes,
    weight_notes,
)
from decoding.planning.round_cost import Acceptance
from decoding.text.instructions import Instructions
from decoding.text.vocabulary import check_same_vocabulary, names_in
from offload.dtypes import DTYPES
from offload.errors import InsufficientMemoryError, TierForceError
from parallel.config.model_config import ModelConfig
from parallel.config.text_model import wrapper_notes
from parallel.formats.locate import find_local

if TYPE_CHECKING:
    from decoding.app.hardware.input_plan import InputPlan
    from decoding.probe.this_machine import PlannedMachine

PREDICTED = "predicted best"
MAX_PADDING = 1024  # maximum difference of vocabulary sizes with one tokenizer
FORMATS = {"help": "Number format of weights and KV cache.", "choices": DTYPES}


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Target model: a folder, a GGUF file, a hub name, or a config.json.",
            show_default=False,
        ),
    ],
    draft: Annotated[str | None, typer.Option(help="Draft model, in the same forms.")] = None,
    context: Annotated[int | None, option_parameter(Settings, "context")] = None,
    rope: Annotated[str | None, option_parameter(Settings, "rope")] = None,
    max_new_tokens: Annotated[int, option_parameter(JobOptions, "max_new_tokens")] = NEW_TOKENS,
    hardware: Hardware = None,
    gpus: PlannedGpus = None,
    host_memory: HostMemory = None,
    mode: Annotated[str, option_parameter(Settings, "mode")] = "auto",
    retrieval_budget: Annotated[
        int | None, option_parameter(Settings, "retrieval_budget", default=PREDICTED)
    ] = None,
    gpu_kv_layers: Annotated[int | None, option_parameter(Settings, "gpu_kv_layers")] = None,
    split_kv_layers: Annotated[int | None, option_parameter(Settings, "split_kv_layers")] = None,
    split_budget: Annotated[
        int | None, option_parameter(Settings, "split_budget", default=PREDICTED)
    ] = None,
    compress_offload: Annotated[str | None, option_parameter(Settings, "compress_offload")] = None,
    num_draft_tokens: Annotated[
        int | None, option_parameter(Settings, "num_draft_tokens", default=PREDICTED)
    ] = None,
    dtype: Annotated[str, option_parameter(Settings, "dtype", "bfloat16", **FORMATS)] = "bfloat16",
    weights: Annotated[str, option_parameter(Settings, "weights")] = "auto",
    deterministic: Annotated[bool, option_parameter(Settings, "deterministic")] = False,
    acceptance: Annotated[
        float,
        typer.Option(
            help=(
                "Acceptance rate at the target of tokens drafted on a retrieval cache of "
                f"{DEFAULT_RETRIEVAL_BUDGET} or by prompt lookup. The default is an assumption; "
                "records of finished requests without --deterministic contain measured rates."
            )
        ),
    ] = ACCEPTANCE,
    inner_acceptance: Annotated[
        float,
        typer.Option(
            help=(
                "Acceptance rate of the draft model's tokens: at the retrieval cache, "
                f"{INNER_DRAFT} at a time, or in mode speculative at the target."
            )
        ),
    ] = INNER_ACCEPTANCE,
    concurrency: Concurrency = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Documents to count, as for summarize: their tokens and parts, and the predicted "
            "time of all. The plan is that of the longest prompt.",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    include: IncludedFiles = None,
    questions: QuestionsFile = None,
    long: Annotated[str, option_parameter(LongDocuments, "long", "split")] = "split",
    plot: Annotated[
        Path | None,
        typer.Option(help="Image file to write: memory by tier, and one decoding round."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Predict whether a model and a prompt fit a machine, where memory goes, and how fast it is.

    Everything is predicted from configs and hardware numbers alone. With --deterministic, the
    rejection rate is taken at its upper bound, up to twice as high; greedy decoding stays below it.
    """
    JobOptions(model, draft, max_new_tokens=max_new_tokens)  # validates the options
    if plot is not None:
        check_writable("--plot", plot)
    target = ModelConfig.from_name(model, packed=True).with_rope_scaling(rope)
    machines = find_machines(hardware, gpus, host_memory)
    _check_rates({"acceptance": acceptance, "inner-acceptance": inner_acceptance})
    settings = Settings(
        mode=mode,
        retrieval_budget=retrieval_budget,
        gpu_kv_layers=gpu_kv_layers,
        split_kv_layers=split_kv_layers,
        split_budget=split_budget,
        compress_offload=cast(bool | None, compress_offload),
        num_draft_tokens=num_draft_tokens,
        context=context,
        rope=rope,
        dtype=dtype,
        weights=weights,
        deterministic=deterministic,
        # An engine decides by a self-test of its GPU (`cuda_graphs_supported`).
        graphs=machines[0].profile.runs_ahead and not deterministic,
    )
    small = None if draft is None else ModelConfig.from_name(draft, packed=True)
    needs_on = partial(requirements_on, target=target, draft=small, settings=settings)
    _check_draft_vocabulary(model, draft, needs_on(machines[0].profile))
    prompt = _prompt_tokens(target, context, max_new_tokens)
    documents = _input_plan(input, include or [], model, questions, long)
    if documents is not None:
        prompt = documents.read(prompt + max_new_tokens, max_new_tokens) or prompt
    if deterministic:
        check_concurrency(concurrency)
        concurrency = 1
    rates = Acceptance(acceptance, inner_acceptance, is_coupled=deterministic)
    described, plans, documents = _fastest(
        divisible(machines, target),
        partial(
            _plans_on,
            needs_on=needs_on,
            rates=rates,
            prompt=prompt,
            new=max_new_tokens,
            concurrency=concurrency,
        ),
        documents,
    )
    requirements = plans.best.requirements
    notes = [*_choice_notes(described, machines), *described.notes]
    notes += [*target.context_notes(), *wrapper_notes(target.wrapper)]
    notes += [*weight_notes(requirements), *predictor_notes(requirements)]
    notes += documents.notes if documents is not None else []
    if plot is not None:
        plan_picture(plot, model, plans)
    if as_json:
        job = {
            "model": model,
            "draft": draft,
            "dtype": dtype,
            "rope": rope,
            "deterministic": deterministic,
        }
        counted = {"input": documents.as_dict()} if documents is not None else {}
        document = _document(job, plans) | {"notes": notes} | counted
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(plans, documents, notes)
    if documents is not None:
        documents.check()


def _show(plans: Plans, documents: "InputPlan | None", notes: Sequence[str]) -> None:
    """Print tables of the plans and of the documents of an input, and notes."""
    console = Console()
    tables = [documents.table()] if documents is not None else []
    for table in (times_table(plans), memory_table(plans), *tables):
        console.print(table)
    for note in notes:
        console.print(f"Note: {printable(note)}", markup=False, highlight=False, soft_wrap=True)


def _plans_on(
    described: "PlannedMachine",
    needs_on: Callable[[HardwareProfile], Requirements],
    rates: Acceptance,
    prompt: int,
    new: int,
    concurrency: int | None,
) -> tuple[Planner, Plans]:
    """Return the plans of a request on a machine. Raises InsufficientMemoryError."""
    machine = described.profile
    requirements = fitting_requirements(needs_on(machine), prompt, new, machine.device_memory)
    costs = CostModel(machine, rates)
    planner = Planner(requirements, costs)
    # an engine without measured requests
    first_costs = CostModel(machine, rates, described.trust)
    try:
        best = planner.plan(prompt, new)
        first = Planner(requirements, first_costs).plan(prompt, new)
        if concurrency is None:
            shared = planner.max_concurrent(best, MAX_CONCURRENCY)
        else:
            shared = planner.plan(prompt, new, concurrency)
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(
            f"it does not fit {machine.name}: {error}", fitting_context=error.fitting_context
        ) from error
    return planner, Plans(costs, best, planner.alternatives(best), shared, first)


def _fastest(
    machines: Sequence["PlannedMachine"],
    plans_on: Callable[["PlannedMachine"], tuple[Planner, Plans]],
    documents: "InputPlan | None",
) -> tuple["PlannedMachine", Plans, "InputPlan | None"]:
    """Return the machine on which the documents, or one, are predicted to take least.

    Raises the InsufficientMemoryError of the longest context that would fit, if they fit none.
    """
    choices: list[tuple[float, PlannedMachine, Plans, InputPlan | None]] = []
    errors = list[InsufficientMemoryError]()
    for machine in machines:
        own = None
        try:
            planner, plans = plans_on(machine)
            seconds = plans.costs.forecast(plans.best).document_s
            if documents is not None:
                own = documents.predicted(planner, plans)
                seconds = own.seconds
        except InsufficientMemoryError as error:
            errors.append(error)
        else:
            choices.append((seconds, machine, plans, own))
    if not choices:
        raise max(reversed(errors), key=lambda error: error.fitting_context)
    return min(choices, key=lambda choice: choice[0])[1:]


def _choice_notes(machine: "PlannedMachine", machines: Sequence["PlannedMachine"]) -> Iterator[str]:
    """Yield notes on GPUs that were chosen, and on how to run with them."""
    count, total = int(machine.profile.gpus), int(machines[-1].profile.gpus)
    if len(machines) > 1:
        yield (
            f"of {total} GPUs the plan is for {count}, which is predicted to be fastest: run with "
            f"--gpus {count}."
        )
    if machine.environment:
        yield f"the plan is not for the GPUs that come first: run with {machine.environment}."


def _check_rates(rates: Mapping[str, float]) -> None:
    """Raise TierForceError for an acceptance rate, by its option, that is none."""
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise TierForceError(f"--{name} must be between 0 and 1, found {rate}.")


def _input_plan(
    source: Path | None, include: Sequence[str], model: str, questions: Path | None, long: str
) -> "InputPlan | None":
    """Return the documents of an input, if there is one. Raises TierForceError."""
    splits = LongDocuments(long).splits
    if source is None:
        if include or questions is not None or not splits:
            raise TierForceError(
                "--include, --questions and --long need --input: name the documents to count."
            )
        return None
    from decoding.app.hardware.input_plan import InputPlan  # imports transformers

    instructions = Instructions()
    if questions is not None:
        instructions = Instructions(read_questions(questions), are_questions=True)
    return InputPlan(source, include, model, instructions, splits)


def _check_draft_vocabulary(model: str, draft: str | None, requirements: Requirements) -> None:
    """Raise TierForceError if the draft model's vocabulary differs from the target's.

    Compares the tokenizers if both are available locally, otherwise the vocabulary sizes.
    """
    small, target = requirements.draft, requirements.target
    if draft is None or small is None or not requirements.has_draft:
        return
    folders = [Path(find_local(name) or name) for name in (model, draft)]
    target_tokens, draft_tokens = (names_in(folder) for folder in folders)
    if target_tokens is not None and draft_tokens is not None:
        check_same_vocabulary(
            folders[1], target_tokens, draft_tokens, min(small.vocab, target.vocab)
        )
    elif abs(small.vocab - target.vocab) > MAX_PADDING:
        raise TierForceError(
            f"{draft} has a vocabulary of {small.vocab:,} tokens, {model} one of "
            f"{target.vocab:,}: a draft must share the target's tokenizer. If it does, give both "
            "as folders or GGUF files that contain their tokenizers."
        )


def _prompt_tokens(target: ModelConfig, context: int | None, max_new_tokens: int) -> int:
    """Return the maximum prompt tokens in this context.

    Raises TierForceError if none are left.
    """
    tokens = context or target.context_limit
    target.check_context(tokens)
    if tokens <= max_new_tokens:
        raise TierForceError(
            f"--context {tokens} leaves no room for a prompt and {max_new_tokens} new tokens."
        )
    return tokens - max_new_tokens


def _document(job: dict[str, Any], plans: Plans) -> dict[str, Any]:
    """Return the JSON document of the plans, with the forecasts of other modes by name."""
    costs, best, shared = plans.costs, plans.best, plans.shared
    requirements = best.requirements
    prefill, decode = plans.memory_phases
    return {
        "job": {
            **job,
            "hardware": costs.hardware.name,
            "ranks": requirements.ranks,
            "mode": requirements.mode,
            "prompt": best.spec.prompt,
            "new": best.spec.max_new_tokens,
            "retrieval_budget": requirements.strategy.budget,
            "split_budget": split_tokens(best),
            "strategy_reason": best.reason,
            "acceptance": costs.acceptance.rate(best),
            "inner_acceptance": costs.acceptance.inner,
        },
        "memory": {
            "device in prefill": prefill,
            "device when decoding": decode,
            "host": best.memory.host_bytes,
        },
        "plan": vars(best.memory),
        "forecast": costs.forecast(best).as_dict(),
        "first document": costs.forecast(plans.first).as_dict(),
        "concurrent": {"plan": vars(shared.memory), "forecast": costs.forecast(shared).as_dict()},
        "plain": None,
        **{other.requirements.mode: costs.forecast(other).as_dict() for other in plans.others},
    }
