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
from decoding.app.hardware.model_on_machine import divisible, requirements_on
from decoding.app.options import as_flags
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted
from decoding.config.defaults import MAX_CONCURRENCY, NEW_TOKENS
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.planner import Planner, fitting_requirements
from decoding.planning.requirements import Requirements
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
    """The documents to plan for: how many tokens each is estimated to have."""

    tokens: Sequence[int]
    title: str
    unreadable: int = 0
    options: tuple[str, ...] = ("--input", "books/")  # name them
    context: int | None = None  # the longest that is needed; None: unknown

    @classmethod
    def default(cls, context: int | None, new: int) -> Documents:
        """Return a document that fills a context, with its instruction and so many new tokens."""
        context = context or _CONTEXT
        title = f"a document of {context:,} tokens, its answer included"
        return cls([context - new - _INSTRUCTION_TOKENS], title, context=context)

    @classmethod
    def read(cls, source: Path, include: Sequence[str]) -> Documents:
        """Read the documents of an input. Raises TierForceError if there are none."""
        tokens, unreadable = [], 0
        for document in find_documents(source, include=include).documents:
            try:
                nbytes = len(document.read().text.encode())
                tokens.append(ceil_div(nbytes, _BYTES_PER_TOKEN))
            except InvalidRequestError:
                unreadable += 1
        if not tokens:
            raise TierForceError(f"--input {source}: none of its documents can be read.")
        title = f"{counted(len(tokens), 'document')} of about {sum(tokens):,} tokens in all"
        patterns = [option for pattern in include for option in ("--include", pattern)]
        return cls(tokens, title, unreadable, ("--input", str(source), *patterns))


@dataclass(frozen=True)
class Prompts:
    """The tokens of the prompts of a document's parts, and of those that merge the answers."""

    parts: tuple[int, ...]
    merges: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, context: int, new: int) -> Prompts:
        """Return the prompts of a document in a context with room for so many new tokens.

        Raises TierForceError if the context is too short.
        """
        room = context - new - _INSTRUCTION_TOKENS
        if room < 1:
            raise TierForceError(
                f"`context` {context} leaves no room for a prompt and {new} new tokens."
            )
        if tokens > room and room < 2 * new:
            raise TierForceError(
                f"`context` {context} leaves no room to merge answers of {new} tokens about parts."
            )
        count = ceil_div(tokens, room)
        parts = tuple(own + _INSTRUCTION_TOKENS for own in shares(tokens, count))
        sizes = merge_sizes(count, max(2, room // new))
        return cls(parts, tuple(own * new + _INSTRUCTION_TOKENS for own in sizes))


@dataclass(frozen=True)
class Candidate:
    """A model in a format, and how the documents would do with it; or why they would not."""

    model: CatalogueModel
    file: ModelFile
    weight_bytes: int  # all that is loaded of the file
    draft_bytes: int  # likewise of the draft's
    token_bytes: int  # KV of a token in layers with full attention
    context: int  # tokens of prompt and output together
    gpus: int | None = None
    parts: int | None = None  # prompts with parts of the documents, or with whole ones
    seconds: float | None = None  # predicted for all documents
    error: TierForceError | None = None
    environment: str = ""  # variable of the command that chooses GPUs
    options: tuple[str, ...] = ()  # other options of the command

    @property
    def draft_file(self) -> ModelFile | None:
        """Return the draft's file."""
        return self.model.draft_file(self.file)

    @property
    def time(self) -> str:
        """Return the predicted time, in words."""
        if self.seconds is None:
            is_too_large = isinstance(self.error, InsufficientMemoryError)
            return "does not fit" if is_too_large else "not possible"
        return duration(self.seconds)

    @property
    def reason(self) -> str | None:
        """Return why it is not possible, in the words of the command line."""
        return None if self.error is None else as_flags(str(self.error))

    @property
    def commands(self) -> list[str]:
        """Return the commands that fetch the files and use them, if that is possible."""
        if self.error is not None:
            return []
        draft = self.draft_file
        words = ["tierforce", "summarize", "--model", self.file.name]
        words += [] if draft is None else ["--draft", draft.name]
        words += ["--gpus", f"{self.gpus}"] if (self.gpus or 1) > 1 else []
        if self.context < self.model.config.context_limit:
            words += ["--context", str(self.context)]
        words += [*self.options, "--output", "summaries.md"]
        fetch = [self.file.command, *([] if draft is None else [draft.command])]
        return [*fetch, f"{self.environment} {shlex.join(words)}".lstrip()]

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
            "error": self.reason,
            "commands": self.commands,
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
        """Raise TierForceError for a context that is too short for any model."""
        if self.context is not None:
            Prompts.of(1, self.context, self.max_new_tokens)

    def candidate(self, model: CatalogueModel, file: ModelFile) -> Candidate:
        """Plan for a model in a format."""
        target, draft_file = model.in_format(file), model.draft_file(file)
        draft = None
        if model.draft is not None and draft_file is not None:
            draft = model.draft.in_format(draft_file)
        kind, new = dtype_spec(_DTYPE), self.max_new_tokens
        limit = target.context_limit
        candidate = Candidate(
            model,
            file,
            _loaded_bytes(target),
            0 if draft is None else _loaded_bytes(draft),
            target.kv_layout(1, kind).bytes(1, target.full_layers),
            self.context or min(limit, self.documents.context or limit),
            options=(
                *(() if new == NEW_TOKENS else ("--max-new-tokens", str(new))),
                *self.documents.options,
            ),
        )
        settings = Settings(dtype=_DTYPE, graphs=self.machines[0].profile.runs_ahead)
        needs_on = partial(requirements_on, target=target, draft=draft, settings=settings)
        outcomes = [
            self._outcome(
                replace(candidate, environment=machine.environment), machine.profile, needs_on
            )
            for machine in reversed(divisible(self.machines, target))
        ]
        return min(outcomes, key=_rank)

    def _outcome(
        self,
        candidate: Candidate,
        machine: HardwareProfile,
        needs_on: Callable[[HardwareProfile], Requirements],
    ) -> Candidate:
        """Return a candidate with the time of the documents on a machine, or with an error."""
        first_error: TierForceError | None = None
        context = candidate.context
        while True:  # whether a context fits is not monotonic
            try:
                candidate.model.config.check_context(context)
                return self._planned(replace(candidate, context=context), machine, needs_on)
            except InsufficientMemoryError as error:
                first_error = first_error or error
                shorter = min(error.fitting_context, context - 1)
                context = shorter // _CONTEXT_UNIT * _CONTEXT_UNIT
                if self.context is not None or context < _MIN_CONTEXT:
                    return replace(candidate, error=first_error)
            except TierForceError as error:
                return replace(candidate, error=first_error or error)

    def _planned(
        self,
        candidate: Candidate,
        machine: HardwareProfile,
        needs_on: Callable[[HardwareProfile], Requirements],
    ) -> Candidate:
        """Return a candidate with the time of the documents in its context.

        Raises TierForceError.
        """
        new = self.max_new_tokens
        prompts = [Prompts.of(each, candidate.context, new) for each in self.documents.tokens]
        longest = max(max((*each.parts, *each.merges)) for each in prompts)
        needs = needs_on(machine)
        needs = fitting_requirements(needs, longest, new, machine.device_memory)
        planner = Planner(needs, CostModel(machine))
        best = planner.plan(longest, new)
        parts = sum(len(each.parts) for each in prompts)
        shared = planner.max_concurrent(best, min(MAX_CONCURRENCY, parts))
        times = DocumentTimes(planner, best, shared.concurrency, _STEPS)
        seconds = sum(times.seconds(each.parts, each.merges) for each in prompts)
        return replace(candidate, gpus=int(machine.gpus), parts=parts, seconds=seconds)


def _rank(candidate: Candidate) -> tuple[bool, int, float]:
    """Return what is smaller for a better number of GPUs: fewer parts, then less time."""
    if candidate.seconds is None or candidate.parts is None:
        return True, -getattr(candidate.error, "fitting_context", 0), 0.0
    return False, candidate.parts, candidate.seconds


def _loaded_bytes(config: ModelConfig) -> int:
    """Return the bytes of a model's weights."""
    return weight_sizes(config, 1, dtype_spec(_DTYPE).itemsize).nbytes
