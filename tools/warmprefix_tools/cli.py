"""The `warmprefix` command: its subcommands and their options.

The fields of a dataclass are the options of a command, and declare them for the command line and for Python alike. A
command imports the modules that do its work when it runs, so that `--help` is quick and no command needs another's
dependencies.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from warmprefix import __version__
from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix.stores import Conversation
from warmprefix_tools.caches import is_hosted
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.doctor.doctor_options import DoctorOptions
from warmprefix_tools.emulator import EmulatorConfig
from warmprefix_tools.option_checks import check_range
from warmprefix_tools.plan_batch.plan_batch_options import PlanBatchOptions
from warmprefix_tools.quality.quality_options import (
    QualityCompareOptions,
    QualityJudgeOptions,
    QualityOptions,
    QualityReportOptions,
)
from warmprefix_tools.replay.replay_options import ReplayOptions
from warmprefix_tools.report.visible import visible
from warmprefix_tools.summaries import SUMMARIES

try:
    import typer
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_state = typer.Typer(no_args_is_help=True, help=SUMMARIES["state"])
_quality = typer.Typer(no_args_is_help=True, help=SUMMARIES["quality"])
_GROUPS = {"": app, "state": _state, "quality": _quality}

_ENGINE = EmulatorConfig()


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"warmprefix {__version__}")
        raise typer.Exit


@app.callback()
def warmprefix(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Arrange retrieved context so that the engine's prefix cache already holds it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character; that is no reason to stop


def _command(name: str) -> Callable[[Callable[[Any], int | None]], Callable[[Any], int | None]]:
    """Add a command, whose function takes its options and may return a status.

    Options that the dataclass refuses with a ValueError, and each error of this library, end the command with
    status 2 and one line on standard error.
    """
    group, _, subcommand = name.rpartition(" ")

    def add(run: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
        options = get_type_hints(run)["options"]
        hints = get_type_hints(options, include_extras=True)

        def command(**values: object) -> None:
            try:
                chosen = options(**values)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            try:
                status = run(chosen)
            except WarmprefixError as error:
                typer.echo(visible(str(error)), err=True)
                raise typer.Exit(2) from error
            raise typer.Exit(status or 0)

        parameters = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options)
        ]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {field.name: hints[field.name] for field in fields(options)}
        _GROUPS[group].command(subcommand, help=SUMMARIES[name])(command)
        return run

    return add


@dataclass(frozen=True, slots=True)
class EmulateOptions(EmulatorConfig):
    """One run of `warmprefix emulate`: the engine, and where it listens."""

    kv_blocks: Annotated[int, Option(help="Size of the cache in KV blocks; one of them holds nothing, as in vLLM.")] = (
        _ENGINE.kv_blocks
    )
    block_size: Annotated[int, Option(help="Tokens in a KV block.")] = _ENGINE.block_size
    prefill_rate: Annotated[float, Option(help="Uncached prompt tokens per second.")] = _ENGINE.prefill_rate
    base_ttft_ms: Annotated[float, Option("--base-ttft", help="Milliseconds of every prefill.")] = _ENGINE.base_ttft_ms
    decode_rate: Annotated[float, Option(help="Tokens per second of one answer.")] = _ENGINE.decode_rate
    model: Annotated[str, Option(help="Name that clients ask for.")] = _ENGINE.model
    max_model_len: Annotated[
        int | None, Option(help="Most tokens of prompt and answer together.", show_default="the whole cache")
    ] = None
    profile: Annotated[str, Option(help="Cache to emulate: a name such as anthropic or vllm-checkpoints(528,16).")] = (
        "full-attention"
    )
    window: Annotated[
        int | None,
        Option(help="Tokens that sliding-window layers see, with checkpoints.", show_default="recurrent layers"),
    ] = None
    script: Annotated[
        Path | None, Option(metavar="FILE", help="Answers to requests with tools, with their tool calls, as JSON.")
    ] = None
    refuses_priorities: Annotated[
        bool, Option("--refuse-priorities", help="Refuse chats that have a priority, as SGLang can.")
    ] = False
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = 8000
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"

    def __post_init__(self) -> None:
        EmulatorConfig.__post_init__(self)  # super() does not work in a class with slots
        check_range("--port", self.port, 0, 65_535)


@_command("emulate")
def _emulate(options: EmulateOptions) -> int | None:
    from warmprefix_tools.emulator.server import EmulatorServer

    try:
        server = EmulatorServer(options, host=options.host, port=options.port)
    except OSError as error:
        typer.echo(f"Cannot listen on {options.host}, port {options.port}: {error.strerror}.", err=True)
        return 1
    typer.echo(
        f"warmprefix emulator on {server.base_url} (no model runs, its answers mean nothing)\n"
        f"model {options.model}: {_described_cache(options)}, context limit {options.context_limit}\n"
        f"TTFT = wait + {options.base_ttft_ms:g} ms + uncached tokens / {options.prefill_rate:g} per second;"
        f" then {options.decode_rate:g} tokens per second\n"
        "Ctrl-C ends it."
    )
    with suppress(KeyboardInterrupt):
        server.run()
    return None


def _described_cache(options: EmulateOptions) -> str:
    profile = options.cache_profile
    if is_hosted(profile) or profile.slots is not None:
        return f"cache of {profile.name}"
    return f"cache of {profile.name}, {options.kv_blocks} KV blocks of {options.kv_block_size} tokens"


@_command("demo")
def _demo(options: DemoOptions) -> None:
    from warmprefix_tools.demo.run_demo import run_demo

    run_demo(options)


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """One run of `warmprefix record`."""

    trace: Annotated[
        Path, Argument(metavar="TRACE", help="Trace to write, gzipped if the name ends in .gz. No file is overwritten.")
    ]
    command: Annotated[
        list[str], Argument(metavar="-- COMMAND", help="Command that starts the application, with its own options.")
    ]
    text: Annotated[bool, Option("--text", help="Write the blocks' texts too, not only ids and lengths.")] = False


@_command("record")
def _record(options: RecordOptions) -> int:
    from warmprefix_tools.traces.run_recorded import run_recorded

    return run_recorded(
        options.command,
        options.trace,
        text=options.text,
        print_line=lambda line: typer.echo(visible(line), err=True),
    )


@_command("replay")
def _replay(options: ReplayOptions) -> None:
    from warmprefix_tools.replay.run_replay import run_replay

    run_replay(options)


@_command("plan-batch")
def _plan_batch(options: PlanBatchOptions) -> None:
    from warmprefix_tools.plan_batch.run_plan_batch import run_plan_batch

    run_plan_batch(options)


@_command("doctor")
def _doctor(options: DoctorOptions) -> int:
    from warmprefix_tools.doctor.run_doctor import run_doctor

    return 0 if run_doctor(options) else 1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One run of `warmprefix serve`."""

    upstream: Annotated[
        list[str],
        Option(metavar="URL", help="Base URL of an engine, as http://vllm:8000/v1; repeat for replicas."),
    ]
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = 8080
    keys: Annotated[
        Path | None, Option(metavar="FILE", help="Tenants and the SHA-256 of their keys, one pair per line.")
    ] = None
    tenant_header: Annotated[str | None, Option(help="Header in which a trusted proxy names the tenant.")] = None
    no_auth: Annotated[bool, Option("--no-auth", help="Allow another address than the loopback without keys.")] = False
    upstream_key: Annotated[
        str | None,
        Option(
            envvar="WARMPREFIX_UPSTREAM_KEY", show_default=False, help="Key to send upstream, not the clients' own."
        ),
    ] = None
    salt_key: Annotated[
        str, Option(envvar="WARMPREFIX_SALT_KEY", show_default=False, help="Secret of tenants' cache salts.")
    ] = ""
    engine: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Engine of the upstreams, which decides where tenants' salts work: vllm, sglang or llama.cpp; "
            "recognised without this.",
            show_default=False,
        ),
    ] = None
    allow_route: Annotated[
        list[str] | None,
        Option(
            metavar="ROUTE",
            help="Route to open to tenants, such as 'GET /v1/files/*'; repeat for several.",
            show_default=False,
        ),
    ] = None
    allow_field: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Field that tenants may send although it reaches beyond them, such as previous_response_id; "
            "repeat for several.",
            show_default=False,
        ),
    ] = None
    references: Annotated[
        str,
        Option(
            help="Which repeated tool results become references to the earlier call: whole ones (exact), their "
            "paragraphs, too (passages), or none (off)."
        ),
    ] = "exact"
    reorder: Annotated[
        list[str] | None,
        Option(
            metavar="FORMAT",
            help="Order contexts for the cache: tags, llamaindex, or pattern:REGEX for one block; repeat for several.",
            show_default=False,
        ),
    ] = None
    pin_first: Annotated[int, Option(metavar="N", help="First blocks of each such context that stay in front.")] = 0
    pin_last: Annotated[int, Option(metavar="N", help="Last blocks of each such context that stay at its end.")] = 0
    touches: Annotated[
        bool,
        Option(
            "--touches/--no-touches",
            help="Whether requests for one token may keep contexts cached that come again, where they pay.",
        ),
    ] = True
    echoes: Annotated[
        str,
        Option(
            help="What becomes of a reference that a model copies into a tool call: its text (restore), an error in "
            "place of the answer (refuse), or nothing else (pass)."
        ),
    ] = "restore"
    keep_tools: Annotated[str, Option(metavar="NAMES", help="Tools whose results always stay, with commas.")] = ""
    steady_tools: Annotated[
        str,
        Option(
            metavar="MODE",
            help="Keep the order in which a session's tools came (order), declare tools that are gone as well (keep), "
            "or declare new ones behind the history where the API has it (behind); or change nothing (off).",
        ),
    ] = "off"
    profile: Annotated[str, Option(help="What the caches of the upstreams can do, such as anthropic.")] = (
        "full-attention"
    )
    record: Annotated[
        Path | None, Option(metavar="FILE", help="Append each request to this file, with its texts, for the doctor.")
    ] = None
    quote: Annotated[bool, Option("--quote", help="Show session ids on the page.")] = False
    redis: Annotated[
        str | None,
        Option(
            metavar="URL",
            envvar="WARMPREFIX_REDIS_URL",
            show_default=False,
            help="Redis or Valkey server by which several gateways agree where sessions are, and share what they know "
            "of responses that upstreams keep, as redis://host:6379.",
        ),
    ] = None


@_command("serve")
def _serve(options: ServeOptions) -> int | None:
    from warmprefix_gateway import GatewayOptions, GatewayServer

    try:
        chosen = GatewayOptions(
            tuple(options.upstream),
            host=options.host,
            port=options.port,
            keys=options.keys,
            tenant_header=options.tenant_header,
            no_auth=options.no_auth,
            upstream_key=options.upstream_key,
            salt_key=options.salt_key.encode(),
            engine=options.engine,  # type: ignore[arg-type]
            allow_routes=tuple(options.allow_route or ()),
            allow_fields=tuple(options.allow_field or ()),
            references=options.references,  # type: ignore[arg-type]
            echoes=options.echoes,  # type: ignore[arg-type]
            keep_tools=tuple(filter(None, map(str.strip, options.keep_tools.split(",")))),
            steady_tools=options.steady_tools,  # type: ignore[arg-type]
            reorder=tuple(options.reorder or ()),
            pin_first=options.pin_first,
            pin_last=options.pin_last,
            touches=options.touches,
            profile=options.profile,
            record=options.record,
            quote=options.quote,
            redis_url=options.redis,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        server = GatewayServer(chosen)
    except OSError as error:
        what = f"write {error.filename}" if error.filename else f"listen on {options.host}, port {options.port}"
        typer.echo(f"Cannot {what}: {error.strerror}.", err=True)
        return 1
    typer.echo(f"warmprefix gateway on {server.base_url}, page at {server.url}/ and metrics at {server.url}/metrics")
    server.run()
    return None


# -- warmprefix quality ----------------------------------------------------------------------------------------------

app.add_typer(_quality, name="quality")


@_command("quality run")
def _quality_run(options: QualityOptions) -> int | None:
    from warmprefix_tools.quality.run_quality import run_quality

    run_quality(options)
    return None


@_command("quality judge")
def _quality_judge(options: QualityJudgeOptions) -> int | None:
    from warmprefix_tools.quality.run_quality import run_quality_judge

    run_quality_judge(options)
    return None


@_command("quality report")
def _quality_report(options: QualityReportOptions) -> int | None:
    from warmprefix_tools.quality.run_quality import run_quality_report

    return 0 if run_quality_report(options) else 1


@_command("quality compare")
def _quality_compare(options: QualityCompareOptions) -> int | None:
    from warmprefix_tools.quality.run_quality import run_quality_compare

    run_quality_compare(options)
    return None


# -- warmprefix state ------------------------------------------------------------------------------------------------

app.add_typer(_state, name="state")

_Url = Annotated[
    str | None,
    Option(envvar="WARMPREFIX_REDIS_URL", show_default=False, help="URL of the Redis or Valkey, as for planners."),
]
_Prefix = Annotated[str, Option(envvar="WARMPREFIX_KEY_PREFIX", help="Start of the names of all keys.")]
_ConversationId = Annotated[
    str | None, Option("--conversation", metavar="ID", help="Name of the conversation, as for planners.")
]
_TurnId = Annotated[
    str | None, Option("--turn", metavar="ID", help="Id of a turn of a branch, in place of a conversation.")
]
_Tenant = Annotated[
    str | None,
    Option(help="Tenant of the conversation or turn.", show_default="no tenant, which is not the same as ''"),
]
_Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class ForgetOptions:
    """One run of `warmprefix state forget`."""

    conversation: _ConversationId = None
    turn: _TurnId = None
    tenant: _Tenant = None
    url: _Url = None
    prefix: _Prefix = "wp"

    def __post_init__(self) -> None:
        if (self.conversation is None) == (self.turn is None):
            raise ValueError("give either --conversation or --turn")

    @property
    def key(self) -> Conversation:
        """What the record belongs to."""
        id = self.conversation if self.turn is None else self.turn
        assert id is not None
        return Conversation(self.tenant, id)


@dataclass(frozen=True, slots=True)
class InspectOptions(ForgetOptions):
    """One run of `warmprefix state inspect`."""

    json: _Json = False


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """One run of `warmprefix state stats`."""

    url: _Url = None
    prefix: _Prefix = "wp"
    json: _Json = False


@_command("state inspect")
def _inspect(options: InspectOptions) -> int:
    from warmprefix_tools.redis_admin.state import run_inspect

    is_turn = options.turn is not None
    return 0 if run_inspect(options.url, options.prefix, options.key, is_turn=is_turn, as_json=options.json) else 1


@_command("state forget")
def _forget(options: ForgetOptions) -> int:
    from warmprefix_tools.redis_admin.state import run_forget

    return 0 if run_forget(options.url, options.prefix, options.key, is_turn=options.turn is not None) else 1


@_command("state stats")
def _stats(options: StatsOptions) -> None:
    from warmprefix_tools.redis_admin.state import run_stats

    run_stats(options.url, options.prefix, as_json=options.json)
