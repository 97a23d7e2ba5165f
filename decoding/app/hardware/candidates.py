"""The models of the list on a machine, with documents: which fit, and the predicted time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.app.documents.listing import find_documents
from decoding.app.hardware.catalogue import CatalogueModel, ModelFile
from decoding.app.hardware.document_times import DocumentTimes
from decoding.app.hardware.plan import requirements_on
from decoding.app.options import as_flags
from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import counted
from decoding.config.defaults import MAX_CONCURRENCY
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import Memory
from decoding.planning.planner import Planner, fitting_requirements
from decoding.planning.requirements import Requirements
from decoding.text.long_text import merge_sizes
from offload.dtypes import dtype_spec
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from offload.layout import ceil_div, shares
from parallel.config.parameter_count import min_kv_heads
from parallel.config.weight_sizes import weight_sizes

if TYPE_CHECKING:
    from decoding.probe.this_machine import ThisMachine

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

    sizes: Sequence[int]
    unreadable: int = 0

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
        return cls(sizes, unreadable)

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
        tokens = sum(self.sizes) // _BYTES_PER_TOKEN
        return f"{counted(len(self.sizes), 'document')} of about {tokens:,} tokens in all"


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
    """A model in a format, and how the documents would do with it; or why they would not fit."""

    model: CatalogueModel
    file: ModelFile
    gpus: int
    weight_bytes: int  # all that is loaded of the file
    token_bytes: int  # KV of a token in layers with full attention
    context: int  # tokens of prompt and output that are planned for
    parts: int = 0  # prompts with parts of the documents, or with whole ones
    seconds: float | None = None  # predicted for all documents
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
        if self.context < self.model.config.context_limit:
            options += f" --context {self.context}"
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
            "context": self.context,
            "context_limit": model.config.context_limit,
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

    find_machine: Callable[[int], ThisMachine]  # takes the maximum number of its GPUs
    documents: Documents
    max_new_tokens: int
    context: int | None = None  # None: the model's, or what fits of it

    def candidate(self, model: CatalogueModel, file: ModelFile) -> Candidate:
        """Plan for a model in a format. Raises TierForceError for unusable options."""
        target, draft_file = model.in_format(file), model.draft_file(file)
        draft = None
        if model.draft is not None and draft_file is not None:
            draft = model.draft.in_format(draft_file)
        heads = min_kv_heads(target)
        machine = self.find_machine(heads).profile
        kind, limit = dtype_spec(_DTYPE), target.context_limit
        candidate = Candidate(
            model,
            file,
            int(machine.gpus),
            weight_sizes(target, 1, kind.itemsize).nbytes,
            target.kv_layout(1, kind).bytes(1, target.full_layers),
            limit if self.context is None else min(limit, self.context),
        )
        settings = Settings(dtype=_DTYPE, graphs=machine.runs_ahead)
        try:
            if machine.gpus > heads:
                raise TierForceError(f"the model can be divided between {heads} GPUs at most.")
            needs = requirements_on(machine, target, draft, settings)
            try:
                return self._planned(candidate, machine, needs)
            except InsufficientMemoryError:
                context = self._fitting_context(candidate, machine, needs)
                if not self.documents.sizes or context < _MIN_CONTEXT:
                    raise
            return self._planned(replace(candidate, context=context), machine, needs)
        except TierForceError as error:
            return replace(candidate, error=as_flags(str(error)))

    def _planned(
        self, candidate: Candidate, machine: HardwareProfile, needs: Requirements
    ) -> Candidate:
        """Return a candidate with the time of the documents. Raises TierForceError."""
        context, new = candidate.context, self.max_new_tokens
        if context <= new + _INSTRUCTION_TOKENS:
            raise TierForceError(
                f"{context} tokens of context leave no room for a prompt and {new} new tokens."
            )
        prompts = self.documents.prompts(context, new)
        longest = max(max((*each.parts, *each.merges)) for each in prompts)
        needs = fitting_requirements(needs, longest, new, machine.device_memory)
        planner = Planner(needs, CostModel(machine))
        best = planner.plan(longest, new)
        parts = sum(len(each.parts) for each in prompts)
        shared = planner.max_concurrent(best, min(MAX_CONCURRENCY, parts))
        times = DocumentTimes(planner, best, shared.concurrency, _STEPS)
        seconds = sum(times.seconds(each.parts, each.merges) for each in prompts)
        return replace(candidate, parts=parts, seconds=seconds)

    def _fitting_context(
        self, candidate: Candidate, machine: HardwareProfile, needs: Requirements
    ) -> int:
        """Return the longest context that fits, in whole units.

        Raises InsufficientMemoryError if the weights do not.
        """
        new = self.max_new_tokens
        needs = fitting_requirements(needs, _MIN_CONTEXT, new, machine.device_memory)
        memory = Memory.of(machine, needs)
        longest = Planner(needs, CostModel(machine)).longest_prompt(candidate.context, new, memory)
        return (longest + new) // _CONTEXT_UNIT * _CONTEXT_UNIT
