"""Where the noise of a text comes from: drawn as it goes, or bound to positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from decoding.speculation.draft_length import NOISE_POSITIONS
from decoding.speculation.rejection_sampler import Draft, rejection_sample, to_host
from decoding.speculation.sampling import Sampling, draw, exponential_race
from parallel.ranks.process_group import copy_to_device_async


class Randomness(ABC):
    """Draws tokens, and decides which proposals stand."""

    device: torch.device

    def probs(self, sampling: Sampling, logits: Tensor) -> Tensor:
        """Return the laws (T, V) that logits (T, V) stand for."""
        return sampling.probs(logits)

    @abstractmethod
    def draw(self, law: Tensor, position: int) -> Tensor:
        """Draw the token (1,) at a position of the text from a law (V,), without waiting."""

    @abstractmethod
    def rejection_sample(self, draft: Draft, laws: Tensor, position: int) -> tuple[int, int]:
        """Return how many proposals stand, from `position` on, and the token behind them.

        laws (N + 1, V): row i is the target's law after i of the N proposals. What comes out has
        that law, whatever was proposed. Raises InvalidRequestError where one is not made of numbers.
        """


def make_randomness(sampling: Sampling, device: torch.device, is_coupled: bool) -> Randomness:
    """Return where the noise of a text comes from, by its seed."""
    if is_coupled:
        return GumbelCoupled(sampling.seed, device)
    return IndependentNoise(torch.Generator(device).manual_seed(sampling.seed))


class IndependentNoise(Randomness):
    """Noise that is drawn where it is needed: as many proposals stand as can (Leviathan)."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self.device = generator.device

    def draw(self, law: Tensor, position: int) -> Tensor:
        return draw(law, self._generator)

    def rejection_sample(self, draft: Draft, laws: Tensor, position: int) -> tuple[int, int]:
        return rejection_sample(draft, laws, self._generator)


class GumbelCoupled(Randomness):
    """Noise that is a function of seed and position: every level takes the first token to ring.

    A proposal stands where it is the target's own choice. So the text is that of plain decoding
    with this seed, whatever was proposed, and its law is the target's. A proposal is rejected at
    most twice as often. Source: Gumbel coupling, in its exponential form (Daliri, Musco and Suresh,
    arXiv 2408.07978, Algorithm 1).
    """

    def __init__(self, seed: int, device: torch.device):
        self._seed = seed
        self.device = device
        self._noise: dict[int, Tensor] = {}  # (V,) by position, the latest last

    def probs(self, sampling: Sampling, logits: Tensor) -> Tensor:
        # row by row: sums of one row and of several may be split differently
        return torch.cat([sampling.probs(row[None]) for row in logits])

    def draw(self, law: Tensor, position: int) -> Tensor:
        return exponential_race(law, self._at(position, law))

    def rejection_sample(self, draft: Draft, laws: Tensor, position: int) -> tuple[int, int]:
        own = torch.cat([self.draw(law, position + row) for row, law in enumerate(laws)])  # (N + 1)
        count = len(draft.tokens)
        stands = (own[:count] == draft.tokens).int()
        accepted = stands.cumprod(0).sum(0, keepdim=True)
        following = own.index_select(0, accepted)
        # the laws that were looked at; those behind may follow what does not stand
        seen = laws[: count + 1].sum(1).cumsum(0).index_select(0, accepted)
        stood, token = to_host(torch.cat((accepted, following)), seen)
        return stood, token

    def _at(self, position: int, law: Tensor) -> Tensor:
        """Return the noise (V,) float64 of a position, standard exponential.

        It is a stream of its own, by seed and position (Philox, Salmon et al. 2011), the same on
        every device.
        """
        noise = self._noise.get(position)
        if noise is None:
            stream = np.random.Generator(np.random.Philox(key=[self._seed, position]))
            drawn = torch.from_numpy(stream.standard_exponential(len(law)))
            noise = copy_to_device_async(drawn, self.device)
            if len(self._noise) >= NOISE_POSITIONS:
                self._noise.pop(next(iter(self._noise)))
            self._noise[position] = noise
        return noise
