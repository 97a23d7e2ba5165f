"""The models of the list on a machine, with documents: which fit, and the predicted time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.app.documents.listing import find_documents
from decoding.app.hardware.catalogue import CatalogueModel, ModelFile
from decoding.app.hardware.document_times import DocumentTimes
from decoding.app.hardware.machine_choice import divisible, fastest_machine, requirements_on
from decoding.app.options import as_flags
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted
from decoding.config.defaults import MAX_CONCURRENCY, NEW_TOKENS
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.planner import Planner, fitting_requirements
from decoding.planning.requirements import Requirements
from decoding.planning.round_cost import Acceptance
from decoding.text.long_text import merge_sizes
from offload.dtypes import dtype_spec
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from offload.layout import ceil_div, shares
from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes

if TYPE_CHECKING:
    from decoding.probe.this_machine import PlannedMachine

_DTYPE = "bfloat16"
_BYTES_PER_TOKEN = 4  # in UTF-8; SmolLM2's tokenizer makes tokens of 3.7 to 4.1 of English novels
_INSTRUCTION_TOKENS = 100  # assumed: the chat template and the instruction
_STEPS = 8  # prompt lengths that are planned, since documents' tokens are estimates
_CONTEXT = 131_072  # tokens of the document that is planned for if none are named
# Smallest context that documents are split for, if the model's own does not fit, and its unit
_MIN_CONTEXT, _CONTEXT_UNIT = 8192, 1024


@dataclass(frozen=True)
class Documents:
    """The sizes of the documents to plan for, in bytes of UTF-8; those of none are unknown."""

    sizes: Sequence[int] = ()
    unreadable: int = 0
    options: tuple[str, ...] = ("--input", "books/")  # name them

    @classmethod
    def read(cls, source: Path, include: Sequence[str]) -> Documents:
        """Read the documents of an input. Raises TierForceError if there are none."""
        sizes, unreadable = [], 0
        for document in find_documents(source, include=include).documents:
            try:
                sizes.append(len(document.read().text.encode()))
            except InvalidRequestError:
                unreadable += 1
        if not sizes:
            raise TierForceError(f"--input {source}: none of its documents can be read.")
        patterns = [option for pattern in include for option in ("--include", pattern)]
        return cls(sizes, unreadable, ("--input", str(source), *patterns))

    def prompts(self, context: int, new: int) -> list[Prompts]:
        """Return each document's prompts, in a context with room for so many new tokens."""
        if not self.sizes:
            return [Prompts((min(context, _CONTEXT) - new,), ())]
        return [Prompts.of(size, context - new, new) for size in self.sizes]

    @property
    def title(self) -> str:
        """Return what is planned for, in words."""
        if not self.sizes:
            return f"a document of {_CONTEXT:,} tokens, or of the context if that is shorter"
        words = counted(len(self.sizes), "document")
        return f"{words} of about {self.tokens:,} tokens in all"

    @property
    def tokens(self) -> int:
        """Return the estimated tokens of all documents; 0 of none."""
        return sum(self.sizes) // _BYTES_PER_TOKEN


@dataclass(frozen=True)
class Prompts:
    """The tokens of the prompts of a document's parts, and of those that merge the answers."""

    parts: tuple[int, ...]
    merges: tuple[int, ...]

    @classmethod
    def of(cls, size: int, room: int, new: int) -> Prompts:
        """Return the prompts of a document of `size` bytes with at most `room` tokens each."""
        tokens = ceil_div(size, _BYTES_PER_TOKEN)
        text_room = max(1, room - _INSTRUCTION_TOKENS)
        count = ceil_div(tokens, text_room)
        parts = tuple(own + _INSTRUCTION_TOKENS for own in shares(tokens, count))
        sizes = merge_sizes(count, max(2, text_room // new))
        return cls(parts, tuple(min(room, own * new + _INSTRUCTION_TOKENS) for own in sizes))


@dataclass(frozen=True)
class Candidate:
    """A model in a format, and how the documents would do with it; or why they would not."""

    model: CatalogueModel
    file: ModelFile
    weight_bytes: int  # all that is loaded of the file
    draft_bytes: int  # likewise of the draft's
    token_bytes: int  # KV of a token in layers with full attention
    context: int  # tokens of prompt and output that are planned for
    gpus: int = 0
    parts: int = 0  # prompts with parts of the documents, or with whole ones
    seconds: float | None = None  # predicted for all documents
    error: str | None = None
    is_too_large: bool = False  # the machine is too small
    options: tuple[str, ...] = ()  # other options of the command

    @property
    def draft_file(self) -> ModelFile | None:
        """Return the draft's file."""
        return self.model.draft_file(self.file)

    @property
    def time(self) -> str:
        """Return the predicted time, in words."""
        if self.seconds is None:
            return "does not fit" if self.is_too_large else "not possible"
        return duration(self.seconds)

    @property
    def commands(self) -> list[str]:
        """Return the commands that fetch the files and use them."""
        draft = self.draft_file
        words = ["tierforce", "summarize", "--model", self.file.name]
        words += [] if draft is None else ["--draft", draft.name]
        words += ["--gpus", str(self.gpus)] if self.gpus > 1 else []
        if self.context < self.model.config.context_limit:
            words += ["--context", str(self.context)]
        words += [*self.options, "--output", "summaries.md"]
        fetch = [self.file.command, *([] if draft is None else [draft.command])]
        return [*fetch, shlex.join(words)]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        model, file, draft = self.model, self.draft_file, None
        if file is not None and model.draft is not None:
            draft = _file_fields(model.draft, file) | {"weight_bytes": self.draft_bytes}
        return {
            **_file_fields(model, self.file),
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.token_bytes,
            "context_limit": model.config.context_limit,
            "draft": draft,
            "context": self.context,
            "gpus": self.gpus,
            "parts": self.parts,
            "seconds": self.seconds,
            "error": self.error,
            "commands": [] if self.error is not None else self.commands,
        }


def _file_fields(model: CatalogueModel, file: ModelFile) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "licence_page": file.licence_page,
        "format": file.format,
        "model": file.name,
    }


@dataclass(frozen=True)
class Wanted:
    """The machine, the documents and the answers that models are tried with."""

    machines: Sequence[PlannedMachine]  # with each number of GPUs to choose between
    documents: Documents
    max_new_tokens: int = NEW_TOKENS
    context: int | None = None  # None: the model's, or what fits of it

    def __post_init__(self) -> None:
        """Raise TierForceError for a context that no model could use."""
        if self.context is not None:
            self._check_room(self.context)

    def candidate(self, model: CatalogueModel, file: ModelFile) -> Candidate:
        """Plan for a model in a format. Raises TierForceError for unusable options."""
        target, draft_file = model.in_format(file), model.draft_file(file)
        draft = None
        if model.draft is not None and draft_file is not None:
            draft = model.draft.in_format(draft_file)
        kind, limit = dtype_spec(_DTYPE), target.context_limit
        if not self.documents.sizes:
            limit = min(limit, _CONTEXT)
        new = self.max_new_tokens
        candidate = Candidate(
            model,
            file,
            _loaded_bytes(target),
            0 if draft is None else _loaded_bytes(draft),
            target.kv_layout(1, kind).bytes(1, target.full_layers),
            self.context or limit,
            options=(
                *(() if new == NEW_TOKENS else ("--max-new-tokens", str(new))),
                *self.documents.options,
            ),
        )
        graphs = self.machines[0].profile.runs_ahead
        settings = Settings(dtype=_DTYPE, graphs=graphs)
        needs_on = partial(requirements_on, target=target, draft=draft, settings=settings)
        try:
            target.check_context(candidate.context)
            self._check_room(candidate.context)
            return self._in_context(candidate, divisible(self.machines, target), needs_on)
        except TierForceError as error:
            is_too_large = isinstance(error, InsufficientMemoryError)
            return replace(candidate, error=as_flags(str(error)), is_too_large=is_too_large)

    def _check_room(self, context: int) -> None:
        """Raise TierForceError if a context is too short."""
        new = self.max_new_tokens
        if context <= new + _INSTRUCTION_TOKENS:
            raise TierForceError(
                f"{context} tokens of context leave no room for a prompt and {new} new tokens."
            )

    def _in_context(
        self,
        candidate: Candidate,
        machines: Sequence[PlannedMachine],
        needs_on: Callable[[HardwareProfile], Requirements],
    ) -> Candidate:
        """Return a candidate with the time of the documents, in a context that fits.

        Raises TierForceError.
        """
        rates, new = Acceptance(), self.max_new_tokens
        longest = self._longest(candidate.context)
        machine, needs = fastest_machine(machines, needs_on, rates, longest, new)
        try:
            return self._planned(candidate, machine.profile, needs)
        except InsufficientMemoryError as error:
            context = error.fitting_context // _CONTEXT_UNIT * _CONTEXT_UNIT
            if self.context is not None or context < _MIN_CONTEXT:
                raise
        needs = needs_on(machine.profile)
        return self._planned(replace(candidate, context=context), machine.profile, needs)

    def _longest(self, context: int) -> int:
        """Return the tokens of the longest prompt."""
        prompts = self.documents.prompts(context, self.max_new_tokens)
        return max(max((*each.parts, *each.merges)) for each in prompts)

    def _planned(
        self, candidate: Candidate, machine: HardwareProfile, needs: Requirements
    ) -> Candidate:
        """Return a candidate with the time of the documents. Raises TierForceError."""
        context, new = candidate.context, self.max_new_tokens
        prompts, longest = self.documents.prompts(context, new), self._longest(context)
        needs = fitting_requirements(needs, longest, new, machine.device_memory)
        planner = Planner(needs, CostModel(machine))
        best = planner.plan(longest, new)
        parts = sum(len(each.parts) for each in prompts)
        shared = planner.max_concurrent(best, min(MAX_CONCURRENCY, parts))
        times = DocumentTimes(planner, best, shared.concurrency, _STEPS)
        seconds = sum(times.seconds(each.parts, each.merges) for each in prompts)
        return replace(candidate, gpus=int(machine.gpus), parts=parts, seconds=seconds)


def _loaded_bytes(config: ModelConfig) -> int:
    """Return the bytes of a model's weights."""
    return weight_sizes(config, 1, dtype_spec(_DTYPE).itemsize).nbytes
