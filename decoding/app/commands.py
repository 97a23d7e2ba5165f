"""What the command line can do: `summarize`, `generate`, `chat`, `ask`, `read`, `serve`, `keep`,
`plan` and `probe`.

Here is what typer needs to answer `--help` and a mistyped option at once. What takes seconds to
import stands behind these functions, in modules of the commands' names.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from decoding.app.environment import installed_version
from decoding.app.hardware.plan import plan
from decoding.app.options import (
    EXIT_CODES,
    Common,
    DocumentFile,
    JobOptions,
    TextsAtOnce,
    described,
    refuse_sharing,
    with_common,
)
from decoding.app.server.options import ServeOptions
from decoding.app.terminal.signals import Interrupts, culprit
from decoding.app.terminal.streams import advice_after_loss, say, warn
from decoding.text.prompt import INSTRUCTION
from offload.errors import TierForceError
from parallel.ranks.environment import ignored_variables, place_of, under_launcher

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierforce {installed_version('tierforce')}")
        raise typer.Exit


keep_app = typer.Typer(
    help="What --keep has kept: texts that need not be read again.", no_args_is_help=True
)
app.add_typer(keep_app, name="keep")
KeepFolder = Annotated[str, typer.Argument(help="The folder that --keep was given.")]


def _command(
    example: str, group: typer.Typer = app, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command, with an example in its help."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        paragraphs = (function.__doc__ or "").split("\n\n")
        paragraphs.append(f"Example: tierforce {example}")
        help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        return group.command(name, help=help, epilog=EXIT_CODES)(function)

    return add


@app.callback()
def tierforce(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exact long-context decoding with the KV cache in host memory."""


@_command("summarize --model TARGET --draft DRAFT --input books --output summaries.jsonl")
@with_common
def summarize(
    common: Common,
    input: Annotated[
        Path,
        typer.Option(
            help="A folder of .txt and .md files, one file, or a .jsonl with id and text."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="JSONL, one record as each document finishes. A file that exists is resumed."
        ),
    ],
    instruction: Annotated[
        str, typer.Option(help="What is asked about each document.")
    ] = INSTRUCTION,
    texts_at_once: TextsAtOnce = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster whose machines share the documents, each with --gpus GPUs: its "
            "address, auto for the one that this machine is part of, or local. Needs "
            "'tierforce\\[cluster]' on all of them.",
            metavar="ADDRESS",
            rich_help_panel="Many machines",
        ),
    ] = None,
    machines: Annotated[
        int | None,
        typer.Option(
            help="Machines that take part. By default all, or all with GPUs.",
            metavar="MACHINES",
            min=1,
            rich_help_panel="Many machines",
        ),
    ] = None,
) -> None:
    """Summarise every document.

    Every token is drawn from exactly the law of the target model alone. Each document gets a record
    that is on disk as soon as it is finished, and the same command goes on after an interruption.
    """
    words = "interrupted ({name}) before a document was begun: run the same command to go on"
    if common.settings.identical:
        refuse_sharing(texts_at_once)
    if cluster is not None:
        if common.settings.keep is not None:
            raise TierForceError("--keep is for one machine: leave it out with --cluster.")
        if under_launcher():
            raise TierForceError("--cluster starts what it needs by itself: not under torchrun.")
        interrupts = _listen(words)
        from decoding.app.batch.cluster import Cluster
        from decoding.app.batch.cluster import run as run_on

        at = Cluster(cluster, machines, texts_at_once or 1)
        run_on(common, input, output, instruction, at, interrupts)
        return
    if machines is not None:
        raise TierForceError("--machines is for --cluster: say which Ray cluster they are in.")
    interrupts = _start(common, words)
    from decoding.app.batch.summarize import run

    run(common, input, output, instruction, texts_at_once, interrupts)


@_command("generate --model TARGET --draft DRAFT --prompt-file book.txt")
@with_common
def generate(
    common: Common,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the text to continue; - is standard input. Of one too long for the "
            "context the beginning is dropped."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue itself.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Ask the text as a user's message, through the model's chat template."
        ),
    ] = False,
    stats: Annotated[
        Path | None, typer.Option(help="JSON file for times, counts and the token ids written.")
    ] = None,
) -> None:
    """Continue a text, or answer it.

    Every token is drawn from exactly the law of the target model alone. It is printed as it is
    verified.
    """
    if (prompt is None) == (prompt_file is None):
        raise TierForceError("give the text to continue with either --prompt-file or --prompt.")
    if prompt is not None and not prompt.strip():
        raise TierForceError("--prompt is empty: there is nothing to continue.")
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.generate import run

    run(common, prompt_file, prompt, chat, stats, interrupts)


@_command("chat --model TARGET --document book.txt")
@with_common
def chat(common: Common, document: DocumentFile = None) -> None:
    """Talk with a model, maybe about a document.

    The document is read once, and of what is said only what is new. /help lists what can be done
    beside asking; Ctrl-C ends an answer.
    """
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.chat import run

    run(common, document, interrupts)


@_command('ask --model TARGET --document book.txt "Who is the narrator?"')
@with_common
def ask(
    common: Common,
    question: Annotated[str, typer.Argument(help="What is asked.")],
    document: DocumentFile = None,
) -> None:
    """Answer one question, maybe about a document.

    Every token is drawn from exactly the law of the target model alone. It is printed as it is
    verified.
    """
    if not question.strip():
        raise TierForceError("the question is empty: ask something, in quotes.")
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.chat import ask as answer

    answer(common, document, question, interrupts)


@_command("read --model TARGET --document book.txt --keep kept")
@with_common
def read(
    common: Common,
    document: Annotated[
        Path,
        typer.Option(help="Text file to read. Of one too long for the context the end is dropped."),
    ],
) -> None:
    """Read a document, and keep what was read on disk.

    Questions about it that chat and ask are given with the same --keep begin at once, as often as
    you like.
    """
    if common.settings.keep is None:
        raise TierForceError("what is read has to be kept somewhere: name a folder with --keep.")
    _start(common, "interrupted ({name})")
    from decoding.app.interactive.chat import read as read_it

    read_it(common, document)


@_command("serve --model TARGET --keep kept")
@with_common
def serve(
    common: Common,
    host: Annotated[str, described(ServeOptions, "host")] = "127.0.0.1",
    port: Annotated[int, described(ServeOptions, "port")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with keys, one on each line, of which clients must send one."),
    ] = None,
    queue: Annotated[int, described(ServeOptions, "queue")] = 64,
    max_body: Annotated[int, described(ServeOptions, "max_body")] = 16,
) -> None:
    r"""Answer requests over HTTP, as OpenAI's interface has them, and show a page for people.

    One request is answered after another, and of what a conversation goes on with only what is new
    is read. Temperature, top-p, top-k and the most tokens are those of requests that do not say.
    Needs 'tierforce\[server]'.
    """
    options = ServeOptions(host, port, queue, max_body)
    interrupts = _start(common, "interrupted ({name})")
    try:
        from decoding.app.server.run import run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("decoding", "parallel", "offload"):
            raise
        raise TierForceError(f"serve needs {name}: pip install 'tierforce[server]'.") from error

    run(common, options, api_key_file, interrupts)


@_command("keep list kept", keep_app, "list")
def keep_list(
    folder: KeepFolder,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List what is kept, the most recently used first."""
    from decoding.app.interactive.prompt_cache import show

    show(folder, json)


@_command("keep drop kept --all", keep_app, "drop")
def keep_drop(
    folder: KeepFolder,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Which, by their ids.", metavar="[ID]...")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Remove what is kept."""
    from decoding.app.interactive.prompt_cache import drop

    drop(folder, ids or [], all)


_command("plan --model TARGET --draft DRAFT --hardware 2x4090")(plan)


@_command("probe --gpus 2 --output machine.json")
def probe(
    gpus: Annotated[
        int,
        described(
            JobOptions,
            "gpus",
            1,
            help="Ranks to measure with, on the CPU where there is no GPU.",
            default="",
        ),
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose dimensions kernels are measured with: a folder, a GGUF file, a "
            "hub name, or a config.json."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, described(JobOptions, "device")] = "auto",
    output: Annotated[
        Path, typer.Option(help="Hardware file to write, for `tierforce plan --hardware`.")
    ] = Path("probe.json"),
) -> None:
    """Measure this machine.

    Warns of what costs most, and writes a hardware file for `tierforce plan`. Takes a minute or
    two.
    """
    _spread(JobOptions(model or "", gpus=gpus, device=device).gpus or 1, model)
    from decoding.app.hardware.probe import run

    run(model, dtype, device, output)


def _start(common: Common, last_words: str) -> Interrupts:
    """Become as many ranks as are asked for, and listen for signals from here on."""
    _spread(common.gpus or 1, common.model)
    if (ignored := ignored_variables()) is not None:
        warn(
            f"{ignored} in the environment names no group of ranks and is ignored: this process "
            "works alone."
        )
    return _listen(last_words)


def _listen(last_words: str) -> Interrupts:
    """End on a signal, with these words."""
    return Interrupts(lambda name: say(last_words.format(name=culprit(name))))


def _spread(gpus: int, model: str | None) -> None:
    """Run this very command as that many ranks, unless a launcher has, and end with their exit
    code.

    Raises TierForceError, before any is started, for a model that cannot be split so, and where a
    launcher has started another number.
    """
    if gpus > 1 and under_launcher():
        if (size := place_of().size) != gpus:
            raise TierForceError(
                f"--gpus {gpus}, but the environment says that a launcher has started {size} "
                f"rank{'s' if size > 1 else ''}: leave --gpus out, or unset TORCHELASTIC_RUN_ID, "
                "RANK and WORLD_SIZE."
            )
    elif gpus > 1:
        if model is not None:
            from parallel.config.model_config import ModelConfig
            from parallel.ranks.partition import refuse_ranks

            refuse_ranks(ModelConfig.find(model).kv_heads, gpus)
        from parallel.ranks.launch import launch

        sys.exit(launch(gpus, "decoding.cli", sys.argv[1:], advice_after_loss(sys.argv[1:])))
