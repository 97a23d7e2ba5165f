"""`tierforce models`: models for long documents, and how each would do on a machine."""

# No `from __future__ import annotations`: typer reads these annotations as objects.
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from decoding.app.documents.listing import find_documents
from decoding.app.hardware.catalogue import (
    CatalogueModel,
    ModelFile,
    find_model,
    load_catalogue,
)
from decoding.app.hardware.document_times import DocumentTimes
from decoding.app.hardware.machine import Hardware, HostMemory, PlannedGpus, find_machine
from decoding.app.hardware.plan import requirements_on
from decoding.app.options import DOCUMENTS, IncludedFiles, JobOptions, as_flags, option_parameter
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted
from decoding.config.defaults import MAX_CONCURRENCY, NEW_TOKENS
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.planner import Planner, fitting_requirements
from offload.dtypes import dtype_spec
from offload.errors import InvalidRequestError, TierForceError
from offload.layout import ceil_div, shares
from parallel.config.parameter_count import min_kv_heads
from parallel.config.weight_sizes import weight_sizes

_DTYPE = "bfloat16"
_BYTES_PER_TOKEN = 4  # of UTF-8: 3.7 to 4.1 in English novels, with SmolLM2's
_INSTRUCTION_TOKENS = 100  # assumed: the chat template and the instruction
_STEPS = 8  # prompt lengths that are planned, since documents' tokens are estimates
_CONTEXT = 131_072  # tokens of the document that is planned for if none are named


@dataclass(frozen=True)
class Documents:
    """The sizes of the documents to plan for, in bytes of UTF-8; those of none are unknown."""

    sizes: Sequence[int]
    unreadable: int = 0

    @classmethod
    def read(cls, source: Path, include: Sequence[str]) -> "Documents":
        """Read the documents of an input. Raises TierForceError if there are none."""
        sizes, unreadable = [], 0
        for document in find_documents(source, include=include).documents:
            try:
                sizes.append(len(document.read().text.encode()))
            except InvalidRequestError:
                unreadable += 1
        if not sizes:
            raise TierForceError(f"--input {source}: none of its documents can be read.")
        return cls(sizes, unreadable)

    def prompts(self, context: int, new: int) -> "list[Prompts]":
        """Return each document's prompts, in a context with room for so many new tokens."""
        if not self.sizes:
            return [Prompts((min(context, _CONTEXT) - new,), ())]
        return [Prompts.of(size, context - new, new) for size in self.sizes]

    @property
    def title(self) -> str:
        """Return what is planned for, in words."""
        if not self.sizes:
            return f"a document of {_CONTEXT:,} tokens, or of the context if that is shorter"
        tokens = sum(self.sizes) // _BYTES_PER_TOKEN
        return f"{counted(len(self.sizes), 'document')} of about {tokens:,} tokens in all"


@dataclass(frozen=True)
class Prompts:
    """The tokens of the prompts of a document's parts, and of those that merge the answers."""

    parts: tuple[int, ...]
    merges: tuple[int, ...]

    @classmethod
    def of(cls, size: int, room: int, new: int) -> "Prompts":
        """Return the prompts of a document of `size` bytes with at most `room` tokens each."""
        tokens = ceil_div(size, _BYTES_PER_TOKEN)
        text_room = max(1, room - _INSTRUCTION_TOKENS)
        count = ceil_div(tokens, text_room)
        parts = tuple(own + _INSTRUCTION_TOKENS for own in shares(tokens, count))
        merges: list[int] = []
        answers = max(2, text_room // new)
        while count > 1:
            groups = ceil_div(count, answers)
            merges += [
                min(room, own * new + _INSTRUCTION_TOKENS)
                for own in shares(count, groups)
                if own > 1
            ]
            count = groups
        return cls(parts, tuple(merges))


@dataclass(frozen=True)
class Candidate:
    """A model in a format, and how the documents would do with it; or why they would not fit."""

    model: CatalogueModel
    file: ModelFile
    gpus: int
    weight_bytes: int  # of the files
    token_bytes: int  # KV of a token in layers with full attention
    context: int | None = None  # that is set; None: the model's
    parts: int = 0  # of all documents
    seconds: float | None = None  # predicted, of all documents
    error: str | None = None

    @property
    def time(self) -> str:
        """Return the predicted time, in words."""
        return "does not fit" if self.seconds is None else duration(self.seconds)

    @property
    def commands(self) -> list[str]:
        """Return the commands that fetch the files and use them."""
        draft = self.model.draft_file(self.file)
        names = f"--model {shlex.quote(self.file.name)}"
        names += "" if draft is None else f" --draft {shlex.quote(draft.name)}"
        options = f" --gpus {self.gpus}" if self.gpus > 1 else ""
        options += f" --context {self.context}" if self.context is not None else ""
        fetch = [self.file.command, *([] if draft is None else [draft.command])]
        return [
            *fetch,
            f"tierforce summarize {names}{options} --input books/ --output summaries.md",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        model, draft = self.model, self.model.draft_file(self.file)
        return {
            "name": model.name,
            "title": model.title,
            "licence": model.licence,
            "format": self.file.format,
            "model": self.file.name,
            "draft": None if draft is None else draft.name,
            "context": model.config.context_limit,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.token_bytes,
            "gpus": self.gpus,
            "parts": self.parts,
            "seconds": self.seconds,
            "error": self.error,
            "commands": self.commands,
        }


@dataclass(frozen=True)
class Wanted:
    """The machine, the documents and the answers that models are tried with."""

    hardware: str | None
    gpus: int | None
    host_memory: float | None
    documents: Documents
    max_new_tokens: int
    context: int | None = None  # None: the model's

    def candidate(self, model: CatalogueModel, file: ModelFile) -> Candidate:
        """Plan for a model in a format. Raises TierForceError for unusable options."""
        target, draft_file = model.in_format(file), model.draft_file(file)
        draft = None
        if model.draft is not None and draft_file is not None:
            draft = model.draft.in_format(draft_file)
        heads = min_kv_heads(target)
        machine = find_machine(self.hardware, self.gpus, self.host_memory, heads).profile
        kind = dtype_spec(_DTYPE)
        layout = target.kv_layout(1, kind)
        sizes = weight_sizes(target, 1, kind.itemsize).nbytes
        candidate = Candidate(
            model, file, int(machine.gpus), sizes, layout.bytes(1, target.full_layers)
        )
        new, context = self.max_new_tokens, target.context_limit
        if self.context is not None:
            context = min(context, self.context)
        settings = Settings(dtype=_DTYPE, graphs=machine.runs_ahead)
        try:
            if machine.gpus > heads:
                raise TierForceError(f"the model can be divided between {heads} GPUs at most.")
            if context <= new + _INSTRUCTION_TOKENS:
                raise TierForceError(
                    f"{context} tokens of context leave no room for a prompt and {new} new tokens."
                )
            needs = requirements_on(machine, target, draft, settings)
            prompts = self.documents.prompts(context, new)
            longest = max(max((*each.parts, *each.merges)) for each in prompts)
            needs = fitting_requirements(needs, longest, new, machine.device_memory)
            seconds = _seconds(Planner(needs, CostModel(machine)), prompts, longest, new)
        except TierForceError as error:
            return replace(candidate, error=as_flags(str(error)))
        parts = sum(len(each.parts) for each in prompts)
        return replace(candidate, context=self.context, parts=parts, seconds=seconds)


def _seconds(planner: Planner, prompts: Sequence[Prompts], longest: int, new: int) -> float:
    """Return the predicted seconds of documents. Raises InsufficientMemoryError."""
    best = planner.plan(longest, new)
    count = min(MAX_CONCURRENCY, sum(len(each.parts) for each in prompts))
    concurrency = planner.max_concurrent(best, count).concurrency
    times = DocumentTimes(planner, best, concurrency, _STEPS)
    return sum(times.seconds(each.parts, each.merges) for each in prompts)


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
    targets = [find_model(name) for name in names or ()] or load_catalogue()[0]
    documents = Documents(()) if input is None else Documents.read(input, include or ())
    wanted = Wanted(hardware, gpus, host_memory, documents, max_new_tokens, context)
    candidates = [wanted.candidate(model, file) for model in targets for file in model.files]
    machine = find_machine(hardware, gpus, host_memory, min_kv_heads(targets[0].config))
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in candidates], indent=2))
        return
    console = Console()
    title = f"On {machine.profile.name}, {documents.title}. Predicted, not measured:"
    if names:
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        for model in targets:
            own = [each for each in candidates if each.model is model]
            typer.echo("\n".join(["", *_description(own)]))
    else:
        console.print(_table(title, candidates))
    notes = list(machine.notes)
    if documents.unreadable:
        notes.append(f"documents that cannot be read: {documents.unreadable}; `plan` names them.")
    if not names:
        notes.append("`tierforce models NAME` says where the files of a model are.")
    for note in notes:
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, candidates: Sequence[Candidate]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "format", "licence"):
        table.add_column(name)
    for name in ("GB", "context", "KV/token", "time"):
        table.add_column(name, justify="right")
    for each in candidates:
        table.add_row(
            each.model.name,
            each.file.format,
            each.model.licence,
            f"{each.weight_bytes / 1e9:.1f}",
            f"{each.model.config.context_limit:,}",
            _kib(each),
            each.time,
        )
    return table


def _description(candidates: Sequence[Candidate]) -> list[str]:
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
        fits = f"predicted: {each.time}" if each.error is None else f"does not fit: {each.error}"
        if each.parts > 1 and each.error is None:
            fits += f", {each.parts:,} parts"
        lines.append(f"  {each.file.format}, {each.weight_bytes / 1e9:.1f} GB; {fits}")
        lines += [f"    {command}" for command in each.commands if each.error is None]
    return lines


def _licence(model: CatalogueModel) -> str:
    if model.terms is None:
        return model.licence
    return f"{model.licence}, to be accepted at https://huggingface.co/{model.terms} before"


def _kib(candidate: Candidate) -> str:
    return f"{candidate.token_bytes / 1024:.0f} KiB"
