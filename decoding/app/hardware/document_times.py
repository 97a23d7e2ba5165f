"""The predicted time of documents, from the tokens of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.planning.plan import Plan
from decoding.planning.planner import Planner
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div


class DocumentTimes:
    """The predicted seconds of documents whose prompts share forwards."""

    def __init__(self, planner: Planner, longest: Plan, concurrency: int, steps: int = 64):
        """Plan for prompts of this many lengths, to which others are rounded up.

        `longest`: the plan of the longest prompt.
        """
        self._planner, self._longest, self._concurrency = planner, longest, concurrency
        self._step = ceil_div(longest.spec.prompt, steps)
        self._known = dict[int, tuple[float, float]]()  # prefill, and an answer

    def seconds(self, parts: Sequence[int], merges: Sequence[int], answers: int = 1) -> float:
        """Return the seconds of a document, from the tokens of its prompts.

        Each part has so many answers; each of them is merged.
        """
        merged = sum(self._prompt_s(tokens, 1) for tokens in merges)
        return sum(self._prompt_s(tokens, answers) for tokens in parts) + answers * merged

    def _prompt_s(self, tokens: int, answers: int) -> float:
        """Return the seconds of answers about one text, which is prefilled once."""
        longest, step = self._longest.spec, self._step
        rounded = min(step * ceil_div(tokens, step), longest.prompt)
        if rounded not in self._known:
            try:
                plan = self._planner.plan(rounded, longest.max_new_tokens, self._concurrency)
            except InsufficientMemoryError:  # a few tokens may be rounded up too far
                plan = self._planner.plan(rounded, longest.max_new_tokens)
            forecast = self._planner.costs.forecast(plan)
            self._known[rounded] = forecast.prefill_s, forecast.decode_s / plan.concurrency
        prefill_s, decode_s = self._known[rounded]
        prefills_again = self._planner.requirements.settings.deterministic
        return prefill_s * (answers if prefills_again else 1) + decode_s * answers
