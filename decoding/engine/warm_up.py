"""A small sequence through all levels before memory is planned: what it loads stays."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from torch import Tensor

from decoding.engine.levels import SequenceSlot, graph_runner
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.plan import Plan
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import (
    Requirements,
    Strategy,
    candidate_budgets,
    noise_positions,
)
from decoding.speculation.randomness import make_randomness
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sampling import Sampling
from offload.errors import InsufficientMemoryError, is_out_of_memory
from offload.memory.host_arena import HostArena
from parallel.execution.batched_forward import ForwardRequest, run_forward
from parallel.execution.executor import Level

# tokens of the prompt: several blocks of all that is done in blocks, such as splitting
_PROMPT = 600
_CHUNKS = 8  # selected chunks of split layers
# Those that ran in this process, with their GPU: modules, workspaces and communicators stay for all
# engines.
_done = set[tuple[torch.device, Requirements]]()


def warm_up(runtime: Runtime) -> None:
    """Make a GPU load what requests need beside planned memory.

    These are modules, workspaces of libraries, and buffers of collectives, which are allocated on
    first use. It runs in each mode that requests may get; all KV is offloaded, and in split modes
    all layers are split. All ranks call it before the first request's memory is measured. On a CPU,
    or if there is no memory or no room in the model's context, it does nothing.
    """
    needs, group = runtime.requirements, runtime.target.group
    if group.device.type != "cuda":
        return
    key = group.device, needs
    if all(group.gather(key in _done)):  # the ranks may have had different drafts
        return
    specs = [spec for mode in needs.candidate_modes if (spec := _spec(needs, mode)) is not None]
    # those of the first mode have all levels that are captured
    results = [_run(runtime, spec, captures=spec is specs[0]) for spec in specs]
    if all(results):
        _done.add(key)
    group.graph_capturer.free_cached()  # small blocks, which requests' caches do not fit


def _spec(needs: Requirements, mode: str) -> RequestSpec | None:
    """Return a small request in this mode, with all KV on the host; None if no context has room."""
    offloaded = replace(needs.settings, gpu_kv_layers=0, split_kv_layers=None)
    fixed = replace(needs, settings=offloaded)
    if needs.has_choice:
        budget = candidate_budgets(needs, _PROMPT)[0]
        fixed = fixed.with_strategy(Strategy(mode, budget, _CHUNKS * offloaded.chunk_size))
    new = 2 * fixed.max_forward_tokens + 1  # those of `_run_level`
    prompt = min(_PROMPT, needs.target.context_limit - new)
    return RequestSpec(fixed, prompt, new) if prompt > 0 else None


def _run(runtime: Runtime, spec: RequestSpec, captures: bool) -> bool:
    """Prefill a sequence and run a round of forwards on it; return whether there was memory for it.

    `captures`: whether CUDA graphs are captured, if settings ask for them.
    """
    group, plan = runtime.target.group, None
    with suppress(InsufficientMemoryError):  # requests will not fit either, and say so
        plan = Plan.place(spec, runtime.memory())
    if not all(group.gather(plan is not None)):
        return False
    runner = graph_runner(runtime)
    runner.enabled &= captures
    arena = HostArena(runtime.link, runtime.dtype)
    slot = SequenceSlot(arena, runner)
    tokens = [index % spec.requirements.target.vocab for index in range(spec.prompt)]
    with ExitStack() as stack:
        stack.callback(arena.free)
        stack.callback(slot.free)
        try:
            with group.sync_errors():
                session = SequenceState(runtime, tokens, spec.max_new_tokens, plan, slot=slot)
                stack.callback(session.close)
            session.prefill()
            for level in reversed(session.levels):  # innermost first, as in a round
                _run_level(level, spec)
        except InsufficientMemoryError:  # on all ranks
            return False
        except Exception as error:
            if group.size > 1 or not is_out_of_memory(error):
                raise
            return False
    return True


@torch.inference_mode()
def _run_level(level: Level, spec: RequestSpec) -> None:
    """Run forwards of one token and of more, as drafts and verifications have them."""
    needs = spec.requirements
    longest = needs.max_forward_tokens
    counts = {"target": [1, longest, longest], "draft": [1]}
    for count in counts.get(level.name, [1, 2]):
        tokens = torch.zeros(count, dtype=torch.int64, device=level.model.embed.weight.device)
        request = ForwardRequest(level.model, level.cache, tokens, count)
        (logits,) = run_forward([request])
        if level.name == "target":
            level.cache.advance(count)
    if level.name == "target":
        _sample(torch.zeros_like(logits[:2]), needs)  # nonsense may have no finite logits


def _sample(logits: Tensor, needs: Requirements) -> None:
    """Sample a token from logits (2, V) and verify it, as rank 0 does."""
    sampling = Sampling()
    randomness = make_randomness(sampling, logits.device, noise_positions(needs))
    probs = randomness.probs(sampling, logits)
    draft = Draft(randomness.draw(probs[0], 0), probs[:1])
    randomness.rejection_sample(draft, probs, 0)
