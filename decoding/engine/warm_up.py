"""A small sequence through all levels before memory is planned: what it loads stays."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace

import torch
from torch import Tensor

from decoding.engine.levels import SequenceSlot
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.plan import Plan
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import (
    Requirements,
    Strategy,
    candidate_budgets,
    candidate_split_budgets,
    noise_positions,
)
from decoding.speculation.randomness import make_randomness
from decoding.speculation.rejection_sampler import Draft
from decoding.speculation.sampling import Sampling
from offload.errors import InsufficientMemoryError, is_out_of_memory
from offload.memory.host_arena import HostArena
from parallel.execution.batched_forward import ForwardRequest, run_forward
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.executor import Level

# tokens of the prompt: several blocks of all that is done in blocks, such as splitting
_PROMPT = 600
# Those that ran in this process: modules, workspaces and communicators stay for all engines.
_done = set[Requirements]()


def warm_up(runtime: Runtime) -> None:
    """Make a GPU load what requests need beside planned memory.

    These are modules, workspaces of libraries, and buffers of collectives, which are allocated on
    first use. All KV is offloaded for it, in each mode that requests may get. All ranks call it
    before the first request's memory is measured. On a CPU, or if there is no memory for it, it
    does nothing.
    """
    needs, group = runtime.requirements, runtime.target.group
    if group.device.type != "cuda" or needs in _done:
        return
    _done.add(needs)
    for mode in needs.candidate_modes:
        budget = candidate_budgets(needs, _PROMPT)[0]
        offloaded = replace(needs.settings, gpu_kv_layers=0, split_kv_layers=None)
        fixed = replace(needs, settings=offloaded).with_strategy(Strategy(mode, budget))
        split_budget = candidate_split_budgets(fixed, _PROMPT)[-1]
        fixed = fixed.with_strategy(Strategy(mode, budget, split_budget))
        new = 3 * fixed.max_forward_tokens
        prompt = min(_PROMPT, needs.target.context_limit - new)
        if prompt > 0:
            _run(runtime, RequestSpec(fixed, prompt, new))


def _run(runtime: Runtime, spec: RequestSpec) -> None:
    """Prefill a sequence and run a round of forwards on it, if its memory is free on all ranks."""
    group, plan = runtime.target.group, None
    with suppress(InsufficientMemoryError):  # requests will not fit either, and say so
        plan = Plan.place(spec, runtime.memory())
    if not all(group.gather(plan is not None)):
        return
    arena = HostArena(runtime.link, runtime.dtype)
    graphs = GraphRunner(bool(spec.requirements.settings.graphs), group.graph_capturer)
    slot = SequenceSlot(arena, graphs)
    tokens = [index % spec.requirements.target.vocab for index in range(spec.prompt)]
    try:
        with group.sync_errors():
            session = SequenceState(runtime, tokens, spec.max_new_tokens, plan, slot=slot)
        with closing(session):
            session.prefill()
            for level in reversed(session.levels):  # innermost first, as in a round
                _run_level(level, spec)
    except InsufficientMemoryError:  # on all ranks
        pass
    except Exception as error:
        if group.size > 1 or not is_out_of_memory(error):
            raise
    finally:
        slot.free()
        arena.free()
        group.graph_capturer.free_cached()  # small blocks, which requests' caches do not fit


@torch.inference_mode()
def _run_level(level: Level, spec: RequestSpec) -> None:
    """Run forwards of one token and of more, as drafts and verifications have them."""
    needs = spec.requirements
    counts = {"target": [needs.max_forward_tokens] * 2, "draft": [1]}
    for count in counts.get(level.name, [1, 2]):
        tokens = torch.zeros(count, dtype=torch.int64, device=level.model.embed.weight.device)
        request = ForwardRequest(level.model, level.cache, tokens, count)
        (logits,) = run_forward([request])
        if level.name == "target":
            level.cache.advance(count)
            _sample(logits, needs)


def _sample(logits: Tensor, needs: Requirements) -> None:
    """Sample and verify a token, as rank 0 does."""
    sampling = Sampling()
    randomness = make_randomness(sampling, logits.device, noise_positions(needs))
    probs = randomness.probs(sampling, logits[:2])
    draft = Draft(randomness.draw(probs[0], 0), probs[:1])
    randomness.rejection_sample(draft, probs, 0)
