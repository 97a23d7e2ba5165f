"""The commands: `summarize`, `show`, `generate`, `chat`, `ask`, `prefill`, `serve`, `prompt-cache`,
`plan` and `probe`.

This module holds only what typer needs to answer `--help` and mistyped options at once. Slow
imports happen inside the functions, from modules named after the commands.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from decoding.app.environment import installed_version
from decoding.app.hardware.models import models
from decoding.app.hardware.plan import plan
from decoding.app.options import (
    DOCUMENTS,
    EXIT_CODES,
    Common,
    Concurrency,
    DocumentFile,
    IncludedFiles,
    JobOptions,
    LongDocuments,
    QuestionsFile,
    ResultFormat,
    SchemaFile,
    SystemMessage,
    check_concurrency,
    option_parameter,
    with_common,
)
from decoding.app.server.options import ServeOptions, parse_origins
from decoding.app.terminal.help import HelpCommand, HelpGroup
from decoding.app.terminal.signals import Interrupts, signal_source
from decoding.app.terminal.streams import advice_after_loss, say, warn
from decoding.text.instructions import INSTRUCTION, PART_INSTRUCTION, PromptFormat
from offload.errors import TierForceError
from parallel.ranks.environment import ignored_variables, is_launched, rank_from_env

app = typer.Typer(
    cls=HelpGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"tierforce {installed_version('tierforce')}")
        raise typer.Exit


prompt_cache_app = typer.Typer(
    cls=HelpGroup,
    help="List or drop the prompts stored in a --prompt-cache folder.",
    no_args_is_help=True,
)
app.add_typer(prompt_cache_app, name="prompt-cache")
PromptCacheFolder = Annotated[str, typer.Argument(help="The folder given as --prompt-cache.")]


def _command(
    example: str, group: typer.Typer = app, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function as a command, with an example in its help."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        paragraphs = (function.__doc__ or "").split("\n\n")
        paragraphs.append(f"Example: tierforce {example}")
        help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        return group.command(name, cls=HelpCommand, help=help, epilog=EXIT_CODES)(function)

    return add


@app.callback()
def tierforce(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Exact long-context decoding with the KV cache in host memory."""


@_command("summarize --model TARGET --draft DRAFT --input books --output summaries.md")
@with_common
def summarize(
    common: Common,
    input: Annotated[
        Path,
        typer.Option(
            help="A folder or .zip of documents (text, PDF, EPUB, DOCX, HTML and others), one "
            "file, or a .jsonl with id, text, and perhaps instruction or questions."
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            help="Where results go, each as its document finishes: a .jsonl file of records, a .md "
            "or .txt file to read, or a folder (with / at the end, if it is new) with a file for "
            "each document. If they exist, the job resumes.",
            metavar="PATH",
        ),
    ],
    include: IncludedFiles = None,
    format: ResultFormat = None,
    instruction: Annotated[str, typer.Option(help="Instruction for each document.")] = INSTRUCTION,
    questions: QuestionsFile = None,
    system: SystemMessage = None,
    template: Annotated[
        Path | None,
        typer.Option(
            help="Text file with {document} and {instruction}: the user's message, or the prompt "
            "of a model without a chat template.",
            metavar="FILE",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    schema: SchemaFile = None,
    long: Annotated[str, option_parameter(LongDocuments, "long", "split")] = "split",
    part_instruction: Annotated[
        str, option_parameter(LongDocuments, "part_instruction", PART_INSTRUCTION)
    ] = PART_INSTRUCTION,
    merge_instruction: Annotated[
        str | None, option_parameter(LongDocuments, "merge_instruction")
    ] = None,
    concurrency: Concurrency = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster whose machines share the documents, each with --gpus GPUs: its "
            "address, auto for the cluster this machine belongs to, or local. Needs "
            "'tierforce\\[cluster]' on all machines.",
            metavar="ADDRESS",
            rich_help_panel="Many machines",
        ),
    ] = None,
    machines: Annotated[
        int | None,
        typer.Option(
            help="Number of machines to use. Default: all, or all with GPUs.",
            metavar="MACHINES",
            min=1,
            rich_help_panel="Many machines",
        ),
    ] = None,
) -> None:
    """Summarise documents, or answer questions about them.

    A document longer than the context is summarised in parts, and their summaries are merged. Every
    token is sampled from exactly the target model's distribution. The record of a document is on
    disk as soon as it is finished, and the answer to a question or about a part, too; after an
    interruption the same command resumes.
    """
    message = "interrupted ({name}) before the first document: run the same command to resume"
    if common.settings.deterministic:
        check_concurrency(concurrency)
    from decoding.app.batch.assignment import Assignment
    from decoding.app.results.destination import Destination

    destination = Destination.of(output, format)
    long_documents = LongDocuments(long, part_instruction, merge_instruction)
    assignment = Assignment.of(instruction, questions, system, template, schema, long_documents)
    if cluster is not None:
        if common.settings.prompt_cache is not None:
            raise TierForceError(
                "--prompt-cache works on one machine only: leave it out with --cluster."
            )
        if is_launched():
            raise TierForceError("--cluster starts its own processes: do not use torchrun.")
        interrupts = _listen(message)
    elif machines is not None:
        raise TierForceError("--machines needs --cluster: name the Ray cluster to use.")
    else:
        interrupts = _start(common, message)
    from decoding.app.batch.summarize import Source, run

    source = Source(input, include or [])
    if cluster is None:
        run(common, source, destination, assignment, concurrency, interrupts)
        return
    from decoding.app.batch.cluster import Cluster
    from decoding.app.batch.cluster import run as run_on_cluster

    options = Cluster(cluster, machines, concurrency or 1)
    run_on_cluster(common, source, destination, assignment, options, interrupts)


@_command("show summaries.jsonl")
def show(
    results: Annotated[
        str,
        typer.Argument(
            help="A file of records, or what --output named.",
            metavar="RESULTS",
            show_default=False,
        ),
    ],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids of documents, or patterns such as '*.pdf'. Default: all.",
            metavar="ID",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(help="txt, md, or jsonl (the records).", metavar="NAME")
    ] = "txt",
) -> None:
    """Print the results of summarize, also while it runs."""
    from decoding.app.results.show import run

    run(results, documents or [], format)


@_command("generate --model TARGET --draft DRAFT --prompt-file book.txt")
@with_common
def generate(
    common: Common,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the prompt; - is standard input. One that is too long for the context "
            "is truncated at its beginning."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send the prompt as a user message through the model's chat template."
        ),
    ] = False,
    stats: Annotated[
        Path | None,
        typer.Option(help="JSON file to write times, counts and generated token ids to."),
    ] = None,
    schema: SchemaFile = None,
) -> None:
    """Continue a prompt, or answer it with --chat.

    Every token is sampled from exactly the target model's distribution, and printed as soon as it
    is verified.
    """
    if (prompt is None) == (prompt_file is None):
        raise TierForceError("give the prompt with either --prompt-file or --prompt.")
    if prompt is not None and not prompt.strip():
        raise TierForceError("--prompt is empty.")
    from decoding.app.documents.option_files import read_schema

    form = None if schema is None else read_schema(schema)
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.generate import run

    run(common, prompt_file, prompt, chat, stats, form, interrupts)


@_command("chat --model TARGET --document book.txt")
@with_common
def chat(common: Common, document: DocumentFile = None, system: SystemMessage = None) -> None:
    """Chat with a model, optionally about a document.

    The document is prefilled once, then only new messages are. /help lists the commands, such as
    /document FILE; three quotes begin and end a message of several lines; Ctrl-C ends an answer.
    """
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.chat import run

    run(common, document, system, interrupts)


@_command('ask --model TARGET --document book.txt "Who is the narrator?"')
@with_common
def ask(
    common: Common,
    question: Annotated[
        str | None, typer.Argument(help="The question, in quotes.", show_default=False)
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(
            help="Document to ask about, of any length: text, PDF, EPUB, DOCX and others."
        ),
    ] = None,
    questions: QuestionsFile = None,
    system: SystemMessage = None,
    schema: SchemaFile = None,
    long: Annotated[str, option_parameter(LongDocuments, "long", "split")] = "split",
) -> None:
    """Answer a question, or a file of questions, optionally about a document.

    The parts of a document longer than the context are asked one by one, and their answers are
    merged. Every token is sampled from exactly the target model's distribution, and printed as soon
    as it is verified.
    """
    from decoding.app.documents.option_files import read_questions, read_schema

    if (question is None) == (questions is None):
        raise TierForceError("give either a question, in quotes, or --questions.")
    if question is not None and not question.strip():
        raise TierForceError("the question is empty: ask something, in quotes.")
    asked = (question or "",) if questions is None else read_questions(questions)
    splits = LongDocuments(long).splits
    format = PromptFormat(system=system, schema=None if schema is None else read_schema(schema))
    interrupts = _start(common, "interrupted ({name})")
    from decoding.app.interactive.ask import run

    run(common, document, asked, format, splits, interrupts)


@_command("prefill --model TARGET --document book.txt --prompt-cache prompts")
@with_common
def prefill(
    common: Common,
    document: Annotated[
        Path,
        typer.Option(
            help="Document to prefill: text, PDF, EPUB, DOCX and others. One that is too long for "
            "the context is truncated at its end."
        ),
    ],
    system: SystemMessage = None,
) -> None:
    """Prefill a document and store its KV cache on disk.

    chat, ask and serve with the same --prompt-cache, and the same system message, then answer
    questions about it without prefilling it again.
    """
    if common.settings.prompt_cache is None:
        raise TierForceError("prefill needs a folder to save to: name one with --prompt-cache.")
    _start(common, "interrupted ({name})")
    from decoding.app.interactive.chat import prefill as run

    run(common, document, system)


@_command("serve --model TARGET --prompt-cache prompts")
@with_common
def serve(
    common: Common,
    host: Annotated[str, option_parameter(ServeOptions, "host")] = "127.0.0.1",
    port: Annotated[int, option_parameter(ServeOptions, "port")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with API keys, one per line; clients must send one of them."),
    ] = None,
    queue: Annotated[int, option_parameter(ServeOptions, "queue")] = 64,
    max_body: Annotated[int, option_parameter(ServeOptions, "max_body")] = 16,
    concurrency: Annotated[int | None, option_parameter(ServeOptions, "concurrency")] = None,
    swap_space: Annotated[int | None, option_parameter(ServeOptions, "swap_space")] = None,
    served_model_name: Annotated[
        str | None, option_parameter(ServeOptions, "served_model_name")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may use the server, such as http://localhost:3000; "
            "* for all. Repeat it for more.",
            metavar="ORIGIN",
        ),
    ] = None,
) -> None:
    r"""Serve an OpenAI-compatible API over HTTP, and a chat page.

    Requests are answered several at once; of a prompt that shares its beginning with another one
    only the rest is prefilled.
    Temperature, top-p, top-k and --max-new-tokens are defaults for requests that do not set them.
    Needs 'tierforce\[server]'.
    """
    if common.settings.deterministic:
        check_concurrency(concurrency)
    options = ServeOptions(host, port, queue, max_body, concurrency, swap_space, served_model_name)
    origins = parse_origins(allow_origin or [])
    interrupts = _start(common, "interrupted ({name})")
    try:
        from decoding.app.server.run import run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("decoding", "parallel", "offload"):
            raise
        raise TierForceError(f"serve needs {name}: pip install 'tierforce[server]'.") from error

    run(common, options, api_key_file, origins, interrupts)


@_command("prompt-cache list prompts", prompt_cache_app, "list")
def prompt_cache_list(
    folder: PromptCacheFolder,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """List the stored prompts, most recently used first."""
    from decoding.app.interactive.prompt_cache import show

    show(folder, json)


@_command("prompt-cache drop prompts --all", prompt_cache_app, "drop")
def prompt_cache_drop(
    folder: PromptCacheFolder,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of the prompts to drop.", metavar="ID")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Drop all of them.")] = False,
) -> None:
    """Drop stored prompts."""
    from decoding.app.interactive.prompt_cache import drop

    drop(folder, ids or [], all)


_command("plan --model TARGET --draft DRAFT --input books/")(plan)
_command("models --input books/")(models)


@_command("probe --gpus 2 --output machine.json")
def probe(
    gpus: Annotated[
        int,
        option_parameter(
            JobOptions,
            "gpus",
            1,
            help="Ranks to measure with; CPU ranks on a machine without GPUs.",
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
    device: Annotated[str, option_parameter(JobOptions, "device")] = "auto",
    output: Annotated[
        Path, typer.Option(help="Hardware profile to write, for `--hardware`.")
    ] = Path("probe.json"),
) -> None:
    """Measure this machine.

    Warns about the most expensive shortcomings, and writes a hardware profile for `--hardware`.
    Takes a minute or two.
    """
    _run_on_ranks(JobOptions(model or "", gpus=gpus, device=device).gpus or 1, model)
    from decoding.app.hardware.probe import run

    run(model, dtype, device, output)


def _start(common: Common, message: str) -> Interrupts:
    """Start the requested ranks, and handle signals from now on."""
    _run_on_ranks(common.gpus or 1, common.model)
    if (ignored := ignored_variables()) is not None:
        warn(
            f"{ignored} in the environment does not describe a group of ranks and is ignored: this "
            "process runs alone."
        )
    return _listen(message)


def _listen(message: str) -> Interrupts:
    """Handle signals: print this message, and exit."""
    return Interrupts(lambda name: say(message.format(name=signal_source(name))))


def _run_on_ranks(gpus: int, model: str | None) -> None:
    """Run this command on `gpus` ranks, unless a launcher has, and exit with their exit code.

    Raises TierForceError before any rank starts if the model cannot be sharded over `gpus`, and if
    a launcher has started another number of ranks.
    """
    if gpus > 1 and is_launched():
        if (size := rank_from_env().size) != gpus:
            raise TierForceError(
                f"--gpus {gpus}, but according to the environment a launcher has started {size} "
                f"rank{'s' if size > 1 else ''}: leave --gpus out, or unset TORCHELASTIC_RUN_ID, "
                "RANK and WORLD_SIZE."
            )
    elif gpus > 1:
        if model is not None:
            from parallel.config.model_config import ModelConfig
            from parallel.config.parameter_count import min_kv_heads
            from parallel.ranks.partition import check_ranks

            check_ranks(min_kv_heads(ModelConfig.from_name(model)), gpus)
        from parallel.ranks.launch import launch

        sys.exit(launch(gpus, "decoding.cli", sys.argv[1:], advice_after_loss(sys.argv[1:])))
