"""The forwards of the running requests; while one waits for the host link, others run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.executor import TensorParallelExecutor
from parallel.execution.layered_forward import LayeredForward, streams
from parallel.ranks.environment import RankLost


class Waiting(Protocol):
    """What waits for a forward."""

    @property
    def forward(self) -> ForwardRequest:
        """Return the forward it waits for."""

    def depth_of(self, forward: ForwardRequest) -> int:
        """Return the index of the level of one of its forwards; the target is 0."""


W = TypeVar("W", bound=Waiting)
Outputs = list[tuple[W, Tensor]]  # requests, and the logits (rows, V) they waited for


class DraftAhead:
    """A request's next draft, made while it is verified (`ForwardRequest.meanwhile`)."""

    def __init__(self, request: Waiting):
        self.request = request
        self._steps = request.forward.meanwhile
        self._forward = next(self._steps, None) if self._steps is not None else None

    @property
    def is_complete(self) -> bool:
        return self._forward is None

    @property
    def forward(self) -> ForwardRequest:
        """Return the forward it waits for."""
        assert self._forward is not None
        return self._forward

    def depth_of(self, forward: ForwardRequest) -> int:
        """Return the index of the level of one of its forwards."""
        return self.request.depth_of(forward)

    def end(self) -> None:
        """Draft no more."""
        self._forward = None

    def feed(self, logits: Tensor) -> None:
        """Take the logits of the forward it waits for."""
        assert self._steps is not None
        try:
            self._forward = self._steps.send(logits)
        except StopIteration:
            self._forward = None


class _Verification(Generic[W]):
    """A forward of the target, for some requests, that streams KV from the host."""

    def __init__(self, requests: list[W], forward: LayeredForward):
        self.requests, self.forward = requests, forward
        self.drafts = [DraftAhead(request) for request in requests]


@dataclass(frozen=True)
class _Filling(Generic[W]):
    """A forward in the time that a verification waits."""

    forward: LayeredForward
    requests: Sequence[W] = ()
    drafts: Sequence[DraftAhead] = ()


class Forwards(Generic[W]):
    """Runs the forwards that requests wait for.

    Requests that are ahead wait until all need a forward of the same level, so that the outer ones,
    which cost most, are shared by all. A verification that streams KV from the host runs layer by
    layer: while it waits for a layer's KV, others draft or, if none does, its own requests go on.
    """

    def __init__(
        self,
        executor: TensorParallelExecutor,
        own_errors: Callable[[Sequence[W]], AbstractContextManager[None]],
    ):
        """`own_errors`: a context that ends requests with an error of their own forward."""
        self._executor, self._own_errors = executor, own_errors
        self._verification: _Verification[W] | None = None
        self._filling: _Filling[W] | None = None

    def step(self, running: Sequence[W]) -> Outputs[W]:
        """Run a forward, or some layers of one; return what is complete."""
        if self._verification is not None:
            return self._continue(self._verification, running)
        if self._filling is not None:  # an error has ended the verification
            return self._finish_filling()
        outer = _innermost(each for each in running if not each.depth_of(each.forward))
        forwards = [each.forward for each in outer]
        if any(each.meanwhile for each in forwards) and any(map(streams, forwards)):
            with self._own_errors(outer):
                forward = self._executor.begin_forward(forwards)
                self._verification = _Verification(outer, forward)
            return []
        batch, logits = _innermost(running), list[Tensor]()
        with self._own_errors(batch):
            if batch:
                logits = self._executor.forward([each.forward for each in batch])
        return list(zip(batch, logits, strict=False))  # no logits after an error

    def complete(self, request: W) -> Outputs[W]:
        """Run what has begun for a request, and for those that share it, to its end."""
        outputs: Outputs[W] = []
        if (verification := self._verification) is not None and request in verification.requests:
            verification.drafts.clear()
            while self._verification is verification:
                outputs += self._continue(verification, ())
        if self._filling is not None and request in self._filling.requests:
            outputs += self._finish_filling()
        return outputs

    def forget(self, request: W) -> None:
        """Drop what has begun for a request that has ended."""
        if self._verification is not None and request in self._verification.requests:
            self._verification = None
        if (filling := self._filling) is not None and (
            request in filling.requests or any(draft.request is request for draft in filling.drafts)
        ):
            self._filling = None

    def _continue(self, verification: _Verification[W], running: Sequence[W]) -> Outputs[W]:
        """Run a layer of a verification; while it waits for its KV, run others'."""
        if not verification.forward.has_arrived:
            if self._filling is None:
                self._fill(verification, running)
            if self._filling is not None:
                return self._run_filling(verification.forward)
            if self._verification is None:  # its requests ended with an error
                return []
        requests = verification.requests
        with self._own_errors(requests):
            self._executor.continue_forward(verification.forward)
        if (logits := verification.forward.logits) is None:
            return []
        self._verification = None
        outputs = list(zip(requests, logits, strict=True))
        return outputs + self._finish_filling()

    def _fill(self, verification: _Verification[W], running: Sequence[W]) -> None:
        """Begin the innermost forward that can run during a verification, if there is one."""
        others = [
            each
            for each in running
            if each not in verification.requests and not streams(each.forward)
        ]
        drafts = [draft for draft in verification.drafts if not draft.is_complete]
        if others:
            batch = _innermost(others)
            with self._own_errors(batch):
                forward = self._executor.begin_forward([each.forward for each in batch])
                self._filling = _Filling(forward, batch)
        elif drafts:
            innermost = _innermost(drafts)
            with self._ending(innermost):
                forward = self._executor.begin_forward([each.forward for each in innermost])
                self._filling = _Filling(forward, drafts=innermost)

    def _run_filling(self, verification: LayeredForward) -> Outputs[W]:
        """Run the forward that has begun until it ends or the verification's KV has arrived."""
        filling = self._filling
        assert filling is not None
        forward = filling.forward
        with self._own_errors(filling.requests), self._ending(filling.drafts):
            while forward.logits is None and not verification.has_arrived:
                self._executor.continue_forward(forward)
        return self._finish_filling() if forward.logits is not None else []

    def _finish_filling(self) -> Outputs[W]:
        """End the forward that fills a wait; drop one of drafts ahead that is not complete."""
        filling, self._filling = self._filling, None
        if filling is None:
            return []
        forward = filling.forward
        with self._own_errors(filling.requests):
            while filling.requests and forward.logits is None:
                self._executor.continue_forward(forward)
        logits = forward.logits or []
        for draft, own in zip(filling.drafts, logits, strict=False):
            with self._ending([draft]):
                draft.feed(own)
        return list(zip(filling.requests, logits, strict=False))

    @contextmanager
    def _ending(self, drafts: Sequence[DraftAhead]) -> Iterator[None]:
        """End drafts ahead with an error of their own: nothing depends on them."""
        try:
            yield
        except Exception as error:
            if not drafts or own_error(error, self._executor.group.size) is None:
                raise
            self._filling = None
            for draft in drafts:
                draft.end()


def own_error(error: Exception, ranks: int) -> TierForceError | None:
    """Return the error of one request that this is; None if it ends all of them.

    Other ranks may be in the middle of the same forward, and cannot continue.
    """
    if isinstance(error, TierForceError):
        return None if isinstance(error, RankLost) else error
    if ranks == 1 and is_out_of_memory(error):
        return InsufficientMemoryError(f"out of memory: {one_line(error)}")
    return None


def _innermost(waiting: Iterable[W]) -> list[W]:
    """Return those that wait for a forward of the innermost level, of one model."""
    depths = [(each.depth_of(each.forward), each) for each in waiting]
    innermost = max((depth for depth, _ in depths), default=0)
    batch = [each for depth, each in depths if depth == innermost]
    return [each for each in batch if each.forward.model is batch[0].forward.model]
