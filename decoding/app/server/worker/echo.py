"""Prompts as the beginnings of answers that echo them, with log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import GenerationParams, TextDelta, TokenLogprobs
from decoding.app.server.worker.prompts import Prompts
from parallel.model.prompt_logprobs import PromptLogprobs


def echo(
    prompts: Prompts, params: GenerationParams, logprobs: PromptLogprobs | None
) -> Iterator[TextDelta]:
    """Yield a prompt in parts of `limits.ECHOED_TOKENS`; slow for a long one.

    Args:
        prompts: the model's tokenizer.
        params: the prompt's; it is echoed as the string that was sent, or as the text of its
            tokens, special ones included.
        logprobs: those of its tokens; None to yield the text alone.
    """
    tokens, text = params.prompt, params.text
    if text is None:
        text = prompts.detokenize(tokens)
    if logprobs is None:
        yield TextDelta(text)
        return
    firsts = range(0, len(tokens), limits.ECHOED_TOKENS)
    parts = [prompts.token_bytes(tokens[first : first + firsts.step]) for first in firsts]
    offsets = _offsets([name for part in parts for name in part], len(text))
    for first, names in zip(firsts, parts, strict=True):
        own = offsets[first : first + len(names) + 1]
        scored = _scored(prompts, names, first, logprobs)
        start = own[0] if first else 0
        yield TextDelta(text[start : own[-1]], list(zip(own[:-1], scored, strict=True)))


def _scored(
    prompts: Prompts, names: Sequence[bytes], first: int, logprobs: PromptLogprobs
) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens of a prompt, those from index `first` on.

    `names` has their bytes.
    """
    scored = [] if first else [TokenLogprobs(names[0])]  # nothing precedes it
    rows = slice(first + len(scored) - 1, first + len(names) - 1)
    own, top = logprobs.logprobs[rows].tolist(), logprobs.top_logprobs[rows].tolist()
    top_tokens = logprobs.top_tokens[rows].tolist()
    for name, logprob, values, ids in zip(names[len(scored) :], own, top, top_tokens, strict=True):
        best = list(zip(prompts.token_bytes(ids), values, strict=True))
        scored.append(TokenLogprobs(name, logprob, top=best))
    return scored


def _offsets(names: Sequence[bytes], length: int) -> list[int]:
    """Return the characters of a text in which each of its tokens begins, and its length.

    A character may begin in one token and end in others. Text and tokens end alike: tokens may have
    more at the beginning, such as <s> or a blank.
    """
    starts, end = list[int](), 0
    for name in names:
        is_inside = name[:1] != b"" and _continues(name[0])
        start = end - is_inside
        starts.append(max(start, starts[-1]) if starts else start)
        end += sum(not _continues(byte) for byte in name)
    return [min(max(0, start + length - end), length) for start in (*starts, end)]


def _continues(byte: int) -> bool:
    """Return whether a byte is not the first one of a character in UTF-8."""
    return byte & 0xC0 == 0x80
