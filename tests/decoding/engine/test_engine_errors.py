"""Invalid requests and settings raise, and the engine remains usable."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest
import torch

from decoding import GREEDY, Engine, Sampling, Settings
from offload.errors import InsufficientMemoryError, InvalidRequestError, TierForceError
from parallel.model.loading import parameter_bytes
from support.engines import DEMO, MODES, Folders, Pair
from support.models import random_tokens
from support.slow import slow_except

PROMPT = random_tokens(90).tolist()
VOCAB = 101


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 5, "prompt is empty"),
        ([1] * 96, 5, "96 prompt tokens and 5 new tokens exceed the context of 100"),
        ([1], 100, "exceed the context of 100"),
        ([1, 2], 0, "0 new tokens"),
        ([5, VOCAB, 7], 5, f"{VOCAB}, outside the model's vocabulary of {VOCAB}"),
        ([5, -1, 7], 5, "-1, outside the model's vocabulary"),
    ],
)
def test_invalid_requests_raise(prompt: list[int], new: int, message: str, models: Pair) -> None:
    with models.engine("hierarchical", context=100) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            list(engine.generate(prompt, new, GREEDY))
        assert len(list(engine.generate([1] * 96, 4, GREEDY))) == 4


def test_a_context_longer_than_the_model_raises(models: Pair) -> None:
    with (
        pytest.raises(TierForceError, match="4097 is more than the model's 4096"),
        models.engine("plain", context=4097),
    ):
        pass


def with_nan_embedding(folders: Folders, token: int, role: str) -> Pair:
    """Return models, one of which has a NaN embedding for a token."""
    models = Pair(*folders)
    model = models.target if role == "target" else models.draft
    assert model is not None
    assert not model.config.tied  # else all its logits would be NaN
    with torch.inference_mode():
        model.embed.weight.values[token] = torch.nan
    return models


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
@pytest.mark.parametrize("index", [0, 50, 89], ids=["first", "middle", "last"])
def test_nan_logits_after_the_prompt_fail_one_request(
    mode: str, index: int, folders: Folders, models: Pair
) -> None:
    expected = models.generate("plain", PROMPT, 25)
    token = next(token for token in range(VOCAB) if token not in {*PROMPT, *expected})
    bad = [*PROMPT[:index], token, *PROMPT[index + 1 :]]
    # the budget holds the whole sequence, so that no draft contains the token
    with with_nan_embedding(folders, token, "target").engine(
        mode, retrieval_budget=200, gpu_kv_layers=1
    ) as engine:
        for _ in range(2):
            with pytest.raises(
                InvalidRequestError, match="NaN in the logits that the model computed"
            ):
                list(engine.generate(bad, 25, GREEDY))
            assert list(engine.generate(PROMPT, 25, GREEDY)) == expected


@pytest.mark.parametrize("mode", MODES)
def test_tokens_before_nan_logits_are_correct(mode: str, folders: Folders, models: Pair) -> None:
    expected = models.generate("plain", PROMPT, 40)
    index = next(at for at in range(3, 40) if expected[at] not in {*PROMPT, *expected[:at]})
    output: list[int] = []
    with (
        with_nan_embedding(folders, expected[index], "target").engine(mode) as engine,
        pytest.raises(InvalidRequestError, match="NaN in the logits that the model computed"),
    ):
        output.extend(engine.generate(PROMPT, 40, GREEDY))  # up to the error
    assert output == expected[: len(output)]
    assert mode != "plain" or len(output) == index + 1


def test_nan_logits_of_a_draft_raise(folders: Folders) -> None:
    with (
        with_nan_embedding(folders, PROMPT[-1], "draft").engine("speculative") as engine,
        pytest.raises(InvalidRequestError, match="NaN in the logits that a draft was sampled from"),
    ):
        list(engine.generate(PROMPT, 25, GREEDY))


@pytest.mark.parametrize("mode", MODES)
def test_too_little_device_memory_is_reported_with_both_figures(mode: str, models: Pair) -> None:
    assert models.draft is not None
    weights = parameter_bytes(models.target) + parameter_bytes(models.draft)
    with models.engine(mode, device_memory=weights + 100_000) as engine:
        with pytest.raises(
            InsufficientMemoryError,
            match=r"needs (\d\.\d+) GB of device memory .* and (\d\.\d+) GB are available",
        ) as caught:
            list(engine.generate(PROMPT * 10, 20, GREEDY))
        needed, available = (
            float(x) for x in re.findall(r"(\d\.\d+) GB (?:of device|are)", str(caught.value))
        )
        assert needed > available


def test_a_retrieval_budget_too_large_for_the_device(models: Pair) -> None:
    assert models.draft is not None
    with models.engine(
        "retrieval", retrieval_budget=80, num_draft_tokens=4, gpu_kv_layers=0
    ) as engine:
        list(engine.generate(PROMPT, 4, GREEDY))
        assert engine.stats.plan is not None
        room = (
            parameter_bytes(models.target)
            + parameter_bytes(models.draft)
            + engine.stats.plan.memory.device_bytes
        )
    with models.engine(
        "retrieval", retrieval_budget=80, num_draft_tokens=4, gpu_kv_layers=0, device_memory=room
    ) as engine:
        assert len(list(engine.generate(PROMPT, 4, GREEDY))) == 4
    larger = models.engine(
        "retrieval", retrieval_budget=81, num_draft_tokens=4, gpu_kv_layers=0, device_memory=room
    )
    with (
        larger as engine,
        pytest.raises(
            InsufficientMemoryError,
            match=r"GB of it for the retrieval cache.*smaller `retrieval_budget`",
        ),
    ):
        list(engine.generate(PROMPT, 4, GREEDY))


@pytest.mark.parametrize("mode", MODES)
def test_too_little_host_memory_is_reported(
    mode: str, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with models.engine(mode, gpu_kv_layers=0) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("decoding.models.runtime.host_available", lambda: 10_000)
            with pytest.raises(
                InsufficientMemoryError,
                match=r"needs 0\.\d+ GB of host memory per rank and 0\.\d+ GB are available",
            ):
                list(engine.generate(PROMPT, 20, GREEDY))
            with pytest.raises(InsufficientMemoryError, match="host memory"):
                engine.plan(90, 20)
        assert list(engine.generate(PROMPT, 20, GREEDY)) == models.generate("plain", PROMPT, 20)


def test_plan_and_generate_raise_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both report what is missing in the mode that lacks least."""
    settings = Settings(dtype="bfloat16", link="emulated:50", gpu_kv_layers=0)
    with closing(Engine.from_pretrained(DEMO / "target", settings=settings)) as engine:
        monkeypatch.setattr("decoding.models.runtime.host_available", lambda: 10_000)
        prompt = list(range(2, 1500))
        with pytest.raises(InsufficientMemoryError, match="host memory") as planned:
            engine.plan(len(prompt), 20)
        with pytest.raises(InsufficientMemoryError) as raised:
            list(engine.generate(prompt, 20, GREEDY))
        assert str(raised.value) == str(planned.value)


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        (None, {}, "the prompt must be a string or integer token ids, found NoneType"),
        (7, {}, "found int"),
        ([1, "two"], {}, "token ids"),
        (b"It was", {}, "token ids"),
        (memoryview(b"It was"), {}, "found memoryview"),
        (iter([1, 2]), {}, "found list_iterator"),
        ({1: 2}, {}, "found dict"),
        ({1, 2}, {}, "found set"),
        ([True, False], {}, "found list"),
        (PROMPT, {"max_new_tokens": "ten"}, "`max_new_tokens` must be a whole number, found 'ten'"),
        (PROMPT, {"max_new_tokens": True}, "found True"),
        (PROMPT, {"max_new_tokens": 2.5}, "found 2.5"),
        (PROMPT, {"max_new_tokens": 0}, "0 new tokens"),
        (PROMPT, {"sampling": 0.6}, "`sampling` must be a Sampling, found 0.6"),
        ([], {}, "the prompt is empty"),
    ],
)
def test_arguments_of_the_wrong_type_raise(
    prompt: Any, options: dict[str, Any], reason: str, models: Pair
) -> None:
    with models.engine("plain") as engine:
        with pytest.raises(InvalidRequestError, match=reason):
            list(engine.generate(prompt, **options))
        assert list(engine.generate(PROMPT, 5, GREEDY))  # the engine remains usable


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (b"hi", "bytes"),
        (bytearray(b"hi"), "bytearray"),
        (7, "int"),
        (None, "NoneType"),
        ([1, 2], "list"),
        (1.5, "float"),
        ({"role": "user"}, "dict"),
    ],
)
def test_stream_raises_for_prompts_that_are_not_strings(
    prompt: Any, kind: str, models: Pair
) -> None:
    with models.engine("plain") as engine:
        for chat in (False, True):
            with pytest.raises(
                InvalidRequestError, match=f"^the prompt must be a string, found {kind}.$"
            ):
                list(engine.stream(prompt, chat=chat))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", True),
        ("device_memory", True),
        ("gpu_kv_layers", False),
        ("prompt_cache", ""),
        ("retrieval_budget", 10.5),
        ("retrieval_budget", "1024"),
    ],
)
def test_settings_of_the_wrong_type_raise(name: str, value: Any) -> None:
    with pytest.raises(TierForceError, match=f"`{name}`"):
        Settings(**{name: value})


@pytest.mark.parametrize("values", [("hot",), (True,), (1e-40,), (0.6, 0, True)])
def test_invalid_sampling_parameters_raise(values: tuple[Any, ...]) -> None:
    with pytest.raises(TierForceError, match=r"`temperature`|`top_p`"):
        Sampling(*values)
