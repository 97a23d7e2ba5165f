"""`tierforce models`: models for long documents, and how each would do on a machine."""

# No `from __future__ import annotations`: typer reads these annotations as objects.
import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decoding.app.hardware.catalogue import CatalogueModel, find_model, load_catalogue
from decoding.app.hardware.machine import Hardware, HostMemory, PlannedGpus, find_machine
from decoding.app.options import DOCUMENTS, IncludedFiles, JobOptions, option_parameter
from decoding.app.terminal.streams import printable
from decoding.config.defaults import NEW_TOKENS
from decoding.config.settings import Settings
from offload.errors import TierForceError
from parallel.config.parameter_count import min_kv_heads

if TYPE_CHECKING:
    from decoding.app.hardware.candidates import Candidate

_WIDE = 78  # columns of a terminal that shows all of the table


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models of the list, to see where their files are.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    hardware: Hardware = None,
    gpus: PlannedGpus = None,
    host_memory: HostMemory = None,
    context: Annotated[int | None, option_parameter(Settings, "context")] = None,
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

    targets = [find_model(name) for name in dict.fromkeys(names or ())] or load_catalogue()[0]
    documents = Documents(()) if input is None else Documents.read(input, include or ())
    find = cache(partial(find_machine, hardware, gpus, host_memory))
    wanted = Wanted(find, documents, max_new_tokens, context)
    with Console(stderr=True).status("planning"):  # nothing without a terminal
        candidates = [wanted.candidate(model, file) for model in targets for file in model.files]
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in candidates], indent=2))
        return
    machine = find(min_kv_heads(targets[0].config))
    console = Console()
    title = f"On {printable(machine.profile.name)}, {documents.title}. Predicted, not measured:"
    if names:
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        for model in targets:
            own = [each for each in candidates if each.model is model]
            typer.echo("\n".join(["", *_description(own)]))
    else:
        console.print(models_table(title, candidates, console.width))
    notes = list(machine.notes)
    if documents.unreadable:
        notes.append(f"documents that cannot be read: {documents.unreadable}; `plan` names them.")
    if not names:
        notes.append("`tierforce models NAME` says where the files of a model are.")
    for note in notes:
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def models_table(title: str, candidates: Sequence["Candidate"], width: int) -> Table:
    """Return a row per candidate; in a narrow terminal without what `models NAME` says as well."""
    table = Table(title=escape(title), title_justify="left", box=None)
    is_wide = width >= _WIDE
    table.add_column("", no_wrap=True)
    for name in ("format", *(["licence"] if is_wide else [])):
        table.add_column(name)
    for name in ("GB", "context", "KV/token", "time") if is_wide else ("time",):
        table.add_column(name, justify="right")
    for each in candidates:
        size, context = f"{each.weight_bytes / 1e9:.1f}", f"{each.context:,}"
        more = [each.model.licence, size, context, _kib(each)] if is_wide else []
        table.add_row(each.model.name, each.file.format, *more, each.time)
    return table


def _description(candidates: Sequence["Candidate"]) -> list[str]:
    """Return the lines that describe a model in its formats."""
    model = candidates[0].model
    lines = [
        f"{model.title}",
        f"    licence: {_licence(model)}",
        f"    context: {model.config.context_limit:,} tokens; KV: {_kib(candidates[0])} per token",
    ]
    if model.draft is not None:
        lines.append(f"    draft: {model.draft.title} (licence: {_licence(model.draft)})")
    elif model.config.has_predictor:
        lines.append("    draft: its own prediction block, if the file has it")
    for each in candidates:
        fits = f"predicted: {each.time}" if each.error is None else f"not possible: {each.error}"
        if each.parts > 1 and each.error is None:
            fits += f", {each.parts:,} parts"
        lines.append(f"  {each.file.format}, {each.weight_bytes / 1e9:.1f} GB; {fits}")
        lines += [f"    {command}" for command in each.commands if each.error is None]
    return lines


def _licence(model: CatalogueModel) -> str:
    if model.terms is None:
        return model.licence
    return f"{model.licence}; first accept it at https://huggingface.co/{model.terms}"


def _kib(candidate: "Candidate") -> str:
    return f"{candidate.token_bytes / 1024:.0f} KiB"
