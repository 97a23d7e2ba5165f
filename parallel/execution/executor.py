"""Forwards on all ranks: rank 0 decides and sends commands, which the other ranks run too.

Everything that depends on randomness, drafts included, happens on rank 0 alone. Before each forward
it sends one small message: the models and caches, each cache's length (the outcome of the previous
round), and the forward's tokens. So ranks cannot drift apart, and rank 0 may abort a sequence
between any two forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from offload.cache.base import Cache
from offload.errors import TierForceError
from offload.memory.host import trim_heap
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.layered_forward import LayeredForward
from parallel.model.pipeline import PrefillSteps, Progress
from parallel.model.prompt_logprobs import PromptScorer
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup, ints_to_device_async

_HEADER = 5  # numbers per sequence in a forward: sequence, level, cache length, rows, tokens


class _Message(IntEnum):
    """The first number of a message."""

    OTHER = 0  # another command follows
    FORWARD = 1
    BEGIN = 2  # a forward that streams, and runs layer by layer
    CONTINUE = 3  # its next layer


@dataclass(frozen=True)
class Level:
    """One level of a sequence's hierarchy on this rank: a model, and the cache it runs on."""

    name: str
    model: Transformer
    cache: Cache
    is_sharded: bool = True  # all ranks run its forwards together
    # numbers of query tokens that its forwards are captured with, as CUDA graphs
    graph_sizes: Sequence[int] = ()


class OpenSequence(Protocol):
    """A sequence that holds memory."""

    levels: list[Level]  # sharded levels come first, in the same order on all ranks
    copied: CopiedPrefix | None  # its beginning, until its prefill has copied that

    def prefill_steps(self) -> PrefillSteps:
        """Prefill its prompt, in steps."""
        ...

    def close(self) -> None:
        """Free everything that the sequence holds on this rank."""
        ...


@runtime_checkable
class DecodableSequence(OpenSequence, Protocol):
    """A sequence that can be decoded on."""

    def prefill_steps(self, scorer: PromptScorer | None = None) -> PrefillSteps:
        """Prefill its prompt, in steps; with a scorer all of it, and score its tokens."""
        ...

    def extend_steps(self, tokens: Sequence[int], cached: int) -> PrefillSteps:
        """Extend the sequence, or replace it by one with the same beginning, in steps."""
        ...

    def swap_out(self, cached: int) -> OpenSequence:
        """Return a sequence whose prefill copies this one's KV, so that this one can be closed.

        The next sequence begins with the first `cached` of its tokens.
        """
        ...


@dataclass(frozen=True)
class CopiedPrefix:
    """The first tokens of another sequence."""

    source: OpenSequence
    tokens: int
    layers: Iterator[int]  # copies a layer in each step


class Command(Protocol):
    """What rank 0 tells the other ranks to do; small, and the same on all of them."""

    def run(self, executor: TensorParallelExecutor) -> object:
        """Do it on this rank."""


@dataclass(frozen=True)
class Idle:
    """Keep waiting: a rank that hears nothing gives up after hours."""

    def run(self, executor: TensorParallelExecutor) -> None:
        pass


@dataclass(frozen=True)
class Stop(Idle):
    """End `TensorParallelExecutor.worker_loop`."""


@dataclass(frozen=True)
class Open:
    """Open a sequence, and begin to prefill it."""

    prompt: list[int]
    max_new_tokens: int
    concurrency: int  # number of sequences, this one included, that share the memory
    name: str  # display name in the prompt cache
    source: int = 0  # an open sequence with the same beginning
    shared: int = 0  # length of the beginning that is copied from it
    lengths: Sequence[int] = ()  # lengths of its sharded levels' caches
    checkpoint: int = 0  # length of the beginning that later ones share

    def run(self, executor: TensorParallelExecutor) -> None:
        assert executor.open_sequence is not None
        if self.shared:
            executor.set_lengths(self.source, self.lengths)
        with suppress(TierForceError):  # rank 0 raises the same error, and reports it
            executor.open_sequence(self)


@dataclass(frozen=True)
class Score:
    """Score the prompt of a sequence in its prefill, which has not begun."""

    index: int  # among the open ones
    top: int  # largest log-probabilities that are kept of each position
    # tokens of which logits are computed at once: no more than in a decoding forward of this
    # sequence, whose memory is planned for
    max_rows: int

    def run(self, executor: TensorParallelExecutor) -> PromptScorer:
        sequence = executor.sequences[self.index]
        assert isinstance(sequence, DecodableSequence)
        scorer = PromptScorer(self.top, self.max_rows)
        executor.prefills[sequence] = sequence.prefill_steps(scorer)
        return scorer


@dataclass(frozen=True)
class Close:
    """Close a sequence."""

    index: int  # among the open ones

    def run(self, executor: TensorParallelExecutor) -> None:
        executor.remove(executor.sequences[self.index])


@dataclass(frozen=True)
class Extend:
    """Begin to extend a sequence, or to replace it by one with the same beginning."""

    index: int  # among the open ones
    tokens: list[int]  # the whole sequence
    cached: int  # number of leading tokens that stay in the caches
    lengths: list[int]  # lengths of the sharded levels' caches

    def run(self, executor: TensorParallelExecutor) -> None:
        executor.set_lengths(self.index, self.lengths)
        sequence = executor.sequences[self.index]
        assert isinstance(sequence, DecodableSequence)
        executor.finish_copies(sequence)
        executor.prefills[sequence] = sequence.extend_steps(self.tokens, self.cached)


@dataclass(frozen=True)
class SwapOut:
    """Begin to copy a sequence's KV to host memory."""

    index: int  # among the open ones
    cached: int  # its tokens that the next sequence begins with; 0: another sequence
    lengths: list[int]  # lengths of the sharded levels' caches

    def run(self, executor: TensorParallelExecutor) -> OpenSequence:
        executor.set_lengths(self.index, self.lengths)
        sequence = executor.sequences[self.index]
        assert isinstance(sequence, DecodableSequence)
        swapped = sequence.swap_out(self.cached)
        executor.add(swapped)
        return swapped


@dataclass(frozen=True)
class Prefill:
    """Run the next step of a sequence's prefill, or all steps up to the end of a layer."""

    index: int  # among the open ones
    whole_layer: bool

    def run(self, executor: TensorParallelExecutor) -> None:
        with suppress(TierForceError):  # rank 0 raises the same error, and reports it
            executor.run_prefill(executor.sequences[self.index], self.whole_layer)


@dataclass(frozen=True)
class Forward:
    """Run requests of one model, each on another sequence's cache, as one forward.

    It is sent before every forward, so it is packed in one message of integers.
    """

    requests: Sequence[ForwardRequest]
    kind: ClassVar[_Message] = _Message.FORWARD

    def run(self, executor: TensorParallelExecutor) -> list[Tensor]:
        return executor.graphs.run(self.requests)

    def pack(self, executor: TensorParallelExecutor) -> list[int]:
        """Return the numbers of the message."""
        headers, tokens = list[int](), list[int]()
        for request in self.requests:
            location = executor.locate(request.cache)
            headers += [*location, request.cache.length, request.rows, len(request.tokens)]
            # reading them from the device waits for it
            tokens += request.tokens.tolist() if request.ids is None else request.ids
        return [self.kind, len(self.requests), *headers, *tokens]

    @classmethod
    def unpack(cls, executor: TensorParallelExecutor, numbers: list[int]) -> Forward:
        """Return the command in a message, and set the caches' lengths as on rank 0."""
        requests = list[ForwardRequest]()
        count, *numbers = numbers
        start = count * _HEADER
        for header in range(0, start, _HEADER):
            index, level_index, length, rows, size = numbers[header : header + _HEADER]
            level = executor.sequences[index].levels[level_index]
            level.cache.set_length(length)
            tokens = ints_to_device_async(numbers[start : start + size], executor.group.device)
            requests.append(ForwardRequest(level.model, level.cache, tokens, rows))
            start += size
        return cls(requests)


@dataclass(frozen=True)
class BeginForward(Forward):
    """Begin a forward; `ContinueForward` runs each of its layers."""

    kind: ClassVar[_Message] = _Message.BEGIN

    def run(self, executor: TensorParallelExecutor) -> LayeredForward:  # type: ignore[override]
        executor.forget_begun(request.cache for request in self.requests)
        forward = LayeredForward(self.requests, executor.graphs.steps(self.requests))
        if forward.logits is None:  # a replayed graph ends at once
            executor.begun.append(forward)
        return forward


@dataclass(frozen=True)
class ContinueForward:
    """Run the next layer of a forward that has begun."""

    index: int  # among these

    def run(self, executor: TensorParallelExecutor) -> None:
        forward = executor.begun.pop(self.index)
        forward.run_layer()
        if forward.logits is None:
            executor.begun.insert(self.index, forward)


class TensorParallelExecutor:
    """The open sequences, in the same order on all ranks, and the commands they run on them."""

    def __init__(self, group: TensorParallelGroup, graphs: GraphRunner, max_tokens: int):
        """Start without sequences; each forward has at most `max_tokens` of each of them."""
        self.group, self.graphs, self.max_tokens = group, graphs, max_tokens
        self.sequences: list[OpenSequence] = []
        self.prefills: dict[OpenSequence, PrefillSteps] = {}  # unfinished ones
        self.open_sequence: Callable[[Open], object] | None = None  # in `worker_loop`
        self.begun: list[LayeredForward] = []  # sharded ones, between two of their layers
        self._channel = _Channel(self)

    def add(self, sequence: OpenSequence) -> None:
        """Register a sequence, and begin to prefill it, on all ranks."""
        self.sequences.append(sequence)
        self.prefills[sequence] = sequence.prefill_steps()

    def remove(self, sequence: OpenSequence, is_lost: bool = False) -> None:
        """Remove a sequence and close it, on all ranks; if a rank `is_lost`, on this one alone."""
        if not is_lost:
            self.finish_copies(sequence)
        self.sequences.remove(sequence)
        self.forget_begun(level.cache for level in sequence.levels)
        if (steps := self.prefills.pop(sequence, None)) is not None:
            steps.close()
        sequence.close()
        trim_heap()

    def finish_copies(self, source: OpenSequence) -> None:
        """Finish all copies of a sequence that is about to change; all ranks call it."""
        for sequence in self.sequences:
            while sequence.copied is not None and sequence.copied.source is source:
                try:
                    self.run_prefill(sequence, whole_layer=True)
                except TierForceError as error:  # its own prefill raises it
                    sequence.copied = None
                    error.__context__ = None  # it and the traceback refer to the source
                    self.prefills[sequence] = _fail(error.with_traceback(None))

    def forget_begun(self, caches: Iterable[Cache]) -> None:
        """Forget forwards on these caches that have begun, but will not continue."""
        used = list(caches)
        self.begun = [forward for forward in self.begun if not forward.reads_any(used)]

    def set_lengths(self, index: int, lengths: Sequence[int]) -> None:
        """Set the lengths of a sequence's sharded caches, as on rank 0."""
        for level, length in zip(self.sequences[index].levels, lengths, strict=False):
            level.cache.set_length(length)

    def locate(self, cache: Cache) -> tuple[int, int]:
        """Return the indices of a cache's sequence, and of its level there. Raises ValueError."""
        for index, sequence in enumerate(self.sequences):
            for level_index, level in enumerate(sequence.levels):
                if level.cache is cache:
                    return index, level_index
        raise ValueError("forward on a cache that no open sequence owns")

    def run_prefill(
        self, sequence: OpenSequence, whole_layer: bool, progress: Progress | None = None
    ) -> Tensor | None:
        """Run the next step of a sequence's prefill on this rank (`prefill`)."""
        steps = self.prefills[sequence]
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                del self.prefills[sequence]
                logits: Tensor = end.value
                return logits
            if progress:
                progress(step.done, step.total)
            if step.ends_layer or not whole_layer:
                return None

    # -- rank 0 ------------------------------------------------------------------------------------

    def forward(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Run requests of one model on all its ranks, as one forward; return logits (rows, V)."""
        if _is_sharded(self, requests):
            self.send(Forward(requests))
        return self.graphs.run(requests)

    def begin_forward(self, requests: Sequence[ForwardRequest]) -> LayeredForward:
        """Begin to run requests as `forward`; `continue_forward` runs each layer of the model."""
        if not _is_sharded(self, requests):
            return LayeredForward(requests, self.graphs.steps(requests))
        command = BeginForward(requests)
        self.send(command)
        return command.run(self)

    def continue_forward(self, forward: LayeredForward) -> None:
        """Run the next layer of a forward that has begun."""
        if _is_sharded(self, forward.requests):
            self.run(ContinueForward(self.begun.index(forward)))
        else:
            forward.run_layer()

    def prefill(
        self, sequence: OpenSequence, whole_layer: bool, progress: Progress | None = None
    ) -> Tensor | None:
        """Run the next step of a sequence's prefill on all ranks, or all up to the end of a layer.

        Returns the logits (1, V) after the last step. `progress` is called after each step.
        """
        self.send(Prefill(self.sequences.index(sequence), whole_layer))
        return self.run_prefill(sequence, whole_layer, progress)

    def run(self, command: Command) -> object:
        """Run a command on all ranks; return this one's result."""
        self.send(command)
        return command.run(self)

    def send(self, command: Command) -> None:
        """Send a command to the other ranks, but do not run it on this one."""
        if self.group.size > 1:
            self._channel.send(command)

    # -- the other ranks ---------------------------------------------------------------------------

    def worker_loop(self, open_sequence: Callable[[Open], object]) -> bool:
        """Run rank 0's commands until no sequence is open any more; return False after `Stop`.

        `open_sequence` opens and prefills a sequence.
        """
        self.open_sequence = open_sequence
        try:
            while not isinstance(command := self._channel.receive(), Stop):
                command.run(self)
                if not self.sequences and not isinstance(command, Idle):
                    return True
            return False
        finally:
            self.open_sequence = None  # it may refer to this executor's owner


def _is_sharded(executor: TensorParallelExecutor, requests: Sequence[ForwardRequest]) -> bool:
    """Return whether all ranks run requests of one model."""
    index, level = executor.locate(requests[0].cache)
    return executor.sequences[index].levels[level].is_sharded


class _Channel:
    """Commands from rank 0 to the other ranks; forwards, which are frequent, are integers."""

    def __init__(self, executor: TensorParallelExecutor):
        self._executor, self._group = executor, executor.group

    def send(self, command: Command) -> None:
        numbers, size = [int(_Message.OTHER)], self._size()
        if isinstance(command, Forward):
            numbers = command.pack(self._executor)
        elif isinstance(command, ContinueForward):
            numbers = [_Message.CONTINUE, command.index]
        self._group.broadcast_ints(numbers + [0] * (size - len(numbers)), size)
        if numbers[0] == _Message.OTHER:
            self._group.broadcast(command)

    def receive(self) -> Command:
        kind, *numbers = self._group.broadcast_ints([], self._size())
        if kind == _Message.CONTINUE:
            return ContinueForward(numbers[0])
        if kind != _Message.OTHER:
            command_type = BeginForward if kind == _Message.BEGIN else Forward
            return command_type.unpack(self._executor, numbers)
        placeholder: Command | None = None
        command = self._group.broadcast(placeholder)
        assert command is not None
        return command

    def _size(self) -> int:
        """Return the numbers in a message: room for a forward of all sequences."""
        sequences, tokens = len(self._executor.sequences), self._executor.max_tokens
        return 2 + sequences * (_HEADER + tokens)


def sharded_lengths(sequence: OpenSequence) -> list[int]:
    """Return the lengths of a sequence's sharded caches: commands carry them to other ranks."""
    return [level.cache.length for level in sequence.levels if level.is_sharded]


def _fail(error: TierForceError) -> PrefillSteps:
    """Raise an error in the first step."""
    raise error
    yield
