"""`tierforce models`: models for long documents, and how each would do on a machine."""

# No `from __future__ import annotations`: typer reads these annotations as objects.
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decoding.app.hardware.catalogue import WHOLE, CatalogueModel, find_model, load_catalogue
from decoding.app.hardware.machine import MACHINE, HostMemory, PlannedGpus, find_machines
from decoding.app.options import DOCUMENTS, IncludedFiles, JobOptions, option_parameter
from decoding.app.terminal.streams import printable
from decoding.config.defaults import NEW_TOKENS
from decoding.config.settings import Settings
from offload.errors import TierForceError

if TYPE_CHECKING:
    from decoding.app.hardware.candidates import Candidate

_OF_MACHINE = ("name", "gpus", "device_memory", "host_memory")
_WIDE = 80  # columns of a terminal that shows all of the table


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models of the list, to see where their files are.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help=f"{MACHINE} Of 4x4090, fewer are planned for if that is better.",
            metavar="MACHINE",
        ),
    ] = None,
    gpus: PlannedGpus = None,
    host_memory: HostMemory = None,
    context: Annotated[
        int | None,
        option_parameter(
            Settings, "context", default="the model's, or as much of it as is needed and fits"
        ),
    ] = None,
    max_new_tokens: Annotated[int, option_parameter(JobOptions, "max_new_tokens")] = NEW_TOKENS,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Documents to plan for, as for summarize. Their tokens are estimated by size; "
            "`plan` counts them. Default: one of 131,072 tokens.",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    include: IncludedFiles = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """List models for long documents: which fit this machine, how fast, and how to fetch them.

    Everything is predicted, as by plan, from the models' configs; the files of most have never been
    run by the authors. Other models run, too: ask plan.
    """
    JobOptions("", max_new_tokens=max_new_tokens)  # validates the options
    Settings(context=context)
    if include and input is None:
        raise TierForceError("--include needs --input: name the documents to plan for.")
    from decoding.app.hardware.candidates import Documents, Wanted

    targets = [find_model(name) for name in names or ()] or load_catalogue()[0]
    targets = list({model.name: model for model in targets}.values())
    if input is None:
        documents = Documents.default(context, max_new_tokens)
    else:
        documents = Documents.read(input, include or ())
    machines = find_machines(hardware, gpus, host_memory, any_number=True)
    wanted = Wanted(machines, documents, max_new_tokens, context)
    with Console(stderr=True).status("planning"):  # nothing without a terminal
        candidates = [wanted.candidate(model, file) for model in targets for file in model.files]
    machine = machines[-1]
    notes = list(machine.notes)
    if documents.unreadable:
        notes.append(f"documents that cannot be read: {documents.unreadable}; `plan` names them.")
    if as_json:
        content = {
            "machines": [
                {name: getattr(each.profile, name) for name in _OF_MACHINE} for each in machines
            ],
            "documents": len(documents.tokens),
            "estimated_tokens": sum(documents.tokens),
            "unreadable_documents": documents.unreadable,
            "max_new_tokens": max_new_tokens,
            "notes": notes,
            "models": [each.as_dict() for each in candidates],
        }
        typer.echo(json.dumps(content, indent=2))
    else:
        title = f"On {printable(machine.profile.name)}, {documents.title}. Predicted, not measured:"
        _show(title, targets if names else [], candidates, notes)
    if names and all(each.error is not None for each in candidates):
        raise TierForceError(f"none of these can be used on {machine.profile.name}.")


def _show(
    title: str,
    described: Sequence[CatalogueModel],
    candidates: Sequence["Candidate"],
    notes: Sequence[str],
) -> None:
    """Print descriptions of models or, of none, a table of all, and notes."""
    console = Console()
    if described:
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        for model in described:
            own = [each for each in candidates if each.model is model]
            typer.echo("\n".join(["", *_description(own)]))
    else:
        console.print(models_table(title, candidates, console.width))
        notes = [*notes, "`tierforce models NAME` says where the files of a model are."]
    for note in notes:
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def models_table(title: str, candidates: Sequence["Candidate"], width: int) -> Table:
    """Return a row per candidate; in a narrow terminal without what `models NAME` says as well."""
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.pad_edge = False
    is_wide = width >= _WIDE
    table.add_column("", no_wrap=True)
    for name in ("format", *(["licence"] if is_wide else [])):
        table.add_column(name)
    has_gpus = is_wide and any((each.gpus or 1) > 1 for each in candidates)
    more = ["GB + draft", "context", "KV/token", *(["GPUs"] if has_gpus else [])]
    for name in [*(more if is_wide else []), "time"]:
        table.add_column(name, justify="right", no_wrap=is_wide)
    for each in candidates:
        cells = [each.model.name, each.file.format]
        if is_wide:
            cells += [each.model.licence, _size(each), f"{each.context:,}", _kib(each)]
        if has_gpus:
            cells.append(str(each.gpus or ""))
        table.add_row(*cells, each.time)
    return table


def _description(candidates: Sequence["Candidate"]) -> list[str]:
    """Return the lines that describe a model in its formats."""
    model = candidates[0].model
    lines = [
        f"{model.title}",
        f"    licence: {model.licence}",
        f"    context: {model.config.context_limit:,} tokens; KV: {_kib(candidates[0])} per token",
    ]
    if model.draft is not None:
        lines.append(f"    draft: {model.draft.title} (licence: {model.draft.licence})")
    elif model.config.has_predictor and model.files[0].format == WHOLE:
        lines.append("    draft: in 16 bits its own prediction block")
    for each in candidates:
        lines.append(f"  {each.file.format}, {_size(each)} GB; {_outcome(each)}")
        files = [file for file in (each.file, each.draft_file) if file is not None]
        pages = [file.licence_page for file in files if file.licence_page is not None]
        if each.error is None:
            lines += [f"    first accept the licence at {page}" for page in pages]
            lines += [f"    {command}" for command in each.commands]
    return lines


def _outcome(candidate: "Candidate") -> str:
    """Return what is predicted of a model in a format."""
    if candidate.error is not None:
        return f"{candidate.time}: {candidate.reason}"
    words = [f"predicted: {candidate.time}"]
    words += [f"{candidate.gpus} GPUs"] if (candidate.gpus or 1) > 1 else []
    words += [f"{candidate.parts:,} parts"] if (candidate.parts or 1) > 1 else []
    if candidate.context < candidate.model.config.context_limit:
        words.append(f"in a context of {candidate.context:,} tokens")
    return ", ".join(words)


def _size(candidate: "Candidate") -> str:
    """Return the GB of a model and, if it has one, of its draft."""
    sizes = (candidate.weight_bytes, candidate.draft_bytes)
    return " + ".join(f"{nbytes / 1e9:.1f}" for nbytes in sizes if nbytes)


def _kib(candidate: "Candidate") -> str:
    return f"{candidate.token_bytes / 1024:.0f} KiB"
