"""The randomness of a request: independent noise, or Gumbel noise coupled by position."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from decoding.speculation.rejection_sampler import Draft, rejection_sample, to_host
from decoding.speculation.sampling import Sampling, draw, exponential_race
from parallel.ranks.process_group import copy_to_device_async


class Randomness(ABC):
    """Samples tokens, and decides which draft tokens are accepted."""

    device: torch.device

    def probs(self, sampling: Sampling, logits: Tensor) -> Tensor:
        """Return the distributions (T, V) of logits (T, V)."""
        return sampling.probs(logits)

    @abstractmethod
    def draw(self, probs: Tensor, position: int) -> Tensor:
        """Sample the token (1,) at a position of the sequence from probs (V,), without a sync."""

    @abstractmethod
    def rejection_sample(
        self, draft: Draft, target_probs: Tensor, position: int
    ) -> tuple[int, int]:
        """Return the number of accepted tokens, and the recovered or bonus token.

        The first of the N draft tokens is at `position`. target_probs is (N + 1, V): row i follows
        i accepted tokens. The output follows these distributions for any draft. Raises
        InvalidRequestError when a distribution it needs is NaN.
        """

    def verify_token(self, draft: Draft, probs: Tensor, position: int) -> tuple[bool, int]:
        """Return whether the draft's one token is accepted, and it or the recovered token.

        The output follows probs (V,) for any draft. Raises as `rejection_sample`.
        """
        # the bonus token, of the second row, is dropped
        accepted, recovered = self.rejection_sample(draft, probs.expand(2, -1), position)
        return bool(accepted), int(draft.tokens) if accepted else recovered


def make_randomness(sampling: Sampling, device: torch.device, noise_positions: int) -> Randomness:
    """Return the randomness of a request, seeded by its sampling options.

    `noise_positions`: those of `GumbelCoupled`; 0: independent noise.
    """
    if noise_positions:
        return GumbelCoupled(sampling.seed, device, noise_positions)
    return IndependentNoise(torch.Generator(device).manual_seed(sampling.seed))


class IndependentNoise(Randomness):
    """Fresh noise for every sample: the highest acceptance rate possible (Leviathan et al.)."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self.device = generator.device

    def draw(self, probs: Tensor, position: int) -> Tensor:
        return draw(probs, self._generator)

    def rejection_sample(
        self, draft: Draft, target_probs: Tensor, position: int
    ) -> tuple[int, int]:
        return rejection_sample(draft, target_probs, self._generator)


class GumbelCoupled(Randomness):
    """Noise that is a function of seed and position, shared by all levels (Gumbel coupling).

    Every level samples by the exponential race on this noise, and a draft token is accepted if the
    target samples the same token. The output is therefore that of plain decoding with this seed,
    for any draft, and follows the target's distribution. A draft token is rejected at most twice as
    often as with `IndependentNoise`. Source: Daliri, Musco and Suresh, arXiv 2408.07978, Algorithm
    1, in its exponential form.
    """

    def __init__(self, seed: int, device: torch.device, positions: int):
        """Keep the noise of the last `positions` positions, at least 1.

        Noise is drawn once if these are a longest draft and the token that follows it: levels reach
        positions in order.
        """
        self._seed = seed
        self.device = device
        self._positions = positions
        self._noise: dict[int, Tensor] = {}  # (V,) by position, the latest last

    def probs(self, sampling: Sampling, logits: Tensor) -> Tensor:
        # row by row: a reduction over several rows may sum in another order than over one
        return torch.cat([sampling.probs(row[None]) for row in logits])

    def draw(self, probs: Tensor, position: int) -> Tensor:
        return exponential_race(probs, self._noise_at(position, probs))

    def rejection_sample(
        self, draft: Draft, target_probs: Tensor, position: int
    ) -> tuple[int, int]:
        target_tokens = torch.cat(
            [self.draw(probs, position + i) for i, probs in enumerate(target_probs)]
        )  # (N + 1,)
        count = len(draft.tokens)
        is_accepted = (target_tokens[:count] == draft.tokens).int()
        accepted = is_accepted.cumprod(0).sum(0, keepdim=True)
        next_token = target_tokens.index_select(0, accepted)
        # only the distributions up to the first rejection count: later ones follow rejected tokens
        used = target_probs[: count + 1].sum(1).cumsum(0).index_select(0, accepted)
        num_accepted, token = to_host(torch.cat((accepted, next_token)), used)
        return num_accepted, token

    def _noise_at(self, position: int, probs: Tensor) -> Tensor:
        """Return the noise (V,) float64 of a position, standard exponential.

        Each position has a random stream of its own, keyed by the seed (Philox, Salmon et al.
        2011), which is the same on every device.
        """
        noise = self._noise.get(position)
        if noise is None:
            stream = np.random.Generator(np.random.Philox(key=[self._seed, position]))
            samples = torch.from_numpy(stream.standard_exponential(len(probs)))
            noise = copy_to_device_async(samples, self.device)
            if len(self._noise) >= self._positions:
                self._noise.pop(next(iter(self._noise)))
            self._noise[position] = noise
        return noise
