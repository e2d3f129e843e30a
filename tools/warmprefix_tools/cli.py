"""The `warmprefix` command: its subcommands and their options.

A subcommand imports what does its work when it runs, so that `--help` is quick and no command needs another's
dependencies.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from warmprefix import __version__
from warmprefix.batch.device import Device
from warmprefix.batch.session import BATCH_PLANNERS
from warmprefix.errors import MissingExtraError, TraceError
from warmprefix.outputs import OutputError
from warmprefix.plan import Placement
from warmprefix.stores import Conversation
from warmprefix_tools.demo.errors import DemoError
from warmprefix_tools.demo.options import KV_BLOCKS, PREFILL_RATE, DemoOptions, PlacementChoice
from warmprefix_tools.doctor.errors import DoctorError
from warmprefix_tools.doctor.options import DoctorOptions
from warmprefix_tools.emulator.config import EmulatorConfig
from warmprefix_tools.plan_batch.errors import PlanBatchError
from warmprefix_tools.plan_batch.options import PlanBatchOptions, parse_capacity
from warmprefix_tools.redis_admin.errors import StateError
from warmprefix_tools.replay.options import CAPACITIES, POLICY_NAMES, ReplayOptions, parse_capacities, parse_policies
from warmprefix_tools.replay.workload import DEFAULT_K
from warmprefix_tools.report.markup import visible

try:
    import typer
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

state_commands = typer.Typer(no_args_is_help=True)
app.add_typer(state_commands, name="state")

_ENGINE = EmulatorConfig()
_DEMO = DemoOptions()


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"warmprefix {__version__}")
        raise typer.Exit


@app.callback()
def warmprefix(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Arrange retrieved context so that the LLM engine's prefix cache already holds it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character; that is no reason to stop


@app.command()
def emulate(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    kv_blocks: Annotated[
        int, typer.Option(help="Size of the cache in KV blocks, one of which holds nothing, as in vLLM.")
    ] = _ENGINE.kv_blocks,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = _ENGINE.block_size,
    prefill_rate: Annotated[float, typer.Option(help="Uncached prompt tokens a second.")] = _ENGINE.prefill_rate,
    base_ttft: Annotated[float, typer.Option(help="Milliseconds of every prefill.")] = _ENGINE.base_ttft_ms,
    decode_rate: Annotated[float, typer.Option(help="Tokens a second of one answer.")] = _ENGINE.decode_rate,
    model: Annotated[str, typer.Option(help="Name that clients ask for.")] = _ENGINE.model,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer together.", show_default="the whole cache"),
    ] = None,
) -> None:
    """Serve an engine that has vLLM's prefix cache and no model, to develop against without a GPU."""
    from warmprefix_tools.emulator.server import EmulatorServer

    try:
        config = EmulatorConfig(
            kv_blocks=kv_blocks,
            block_size=block_size,
            prefill_rate=prefill_rate,
            base_ttft_ms=base_ttft,
            decode_rate=decode_rate,
            model=model,
            max_model_len=max_model_len,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        server = EmulatorServer(config, host=host, port=port)
    except OSError as error:
        typer.echo(f"Cannot listen on {host}, port {port}: {error.strerror}.", err=True)
        raise typer.Exit(1) from error

    typer.echo(
        f"warmprefix emulator on {server.base_url} (no model runs, its answers mean nothing)\n"
        f"model {config.model}: {kv_blocks} KV blocks of {block_size} tokens,"
        f" context limit {config.context_limit}\n"
        f"TTFT = wait + {base_ttft:g} ms + uncached tokens / {prefill_rate:g} a second;"
        f" then {decode_rate:g} tokens a second\n"
        "Ctrl-C ends it."
    )
    with suppress(KeyboardInterrupt):
        server.run()


@app.command()
def demo(
    placement: Annotated[
        PlacementChoice, typer.Option(help="Where context stands: in the system prompt, with the questions, or both.")
    ] = _DEMO.placement,
    k: Annotated[int, typer.Option("-k", help="Passages that are retrieved for a question.")] = _DEMO.k,
    questions: Annotated[int, typer.Option(help="How many questions are asked.")] = _DEMO.questions,
    seed: Annotated[int, typer.Option(help="Another seed, other questions.")] = _DEMO.seed,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = _DEMO.concurrency,
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Uncached prompt tokens a second of the emulator.", show_default=f"{PREFILL_RATE:g}"),
    ] = _DEMO.prefill_rate,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Size of the emulator's cache in KV blocks.", show_default=str(KV_BLOCKS))
    ] = _DEMO.kv_blocks,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default="an emulator",
        ),
    ] = _DEMO.endpoint,
    model: Annotated[
        str | None, typer.Option(help="The server's name for its model.", show_default="the first it lists")
    ] = _DEMO.model,
    api_key: Annotated[
        str | None, typer.Option(envvar="WARMPREFIX_DEMO_API_KEY", help="For a server that wants one.")
    ] = _DEMO.api_key,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Where to write the numbers too.")
    ] = _DEMO.json_file,
) -> None:
    """Show, on real text, how much prefill warmprefix saves. Takes about a minute."""
    from warmprefix_tools.demo.command import run_demo

    try:
        options = DemoOptions(
            placement=placement,
            k=k,
            questions=questions,
            seed=seed,
            concurrency=concurrency,
            prefill_rate=prefill_rate,
            kv_blocks=kv_blocks,
            endpoint=endpoint,
            model=model,
            api_key=api_key,
            json_file=json_file,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        run_demo(options)
    except DemoError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


@app.command()
def record(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="Where the trace goes, gzipped if the name ends in .gz. No file is overwritten."
        ),
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="What starts the application, with its own options.")
    ],
    text: Annotated[
        bool, typer.Option("--text", help="Write the blocks' texts too, not only ids and lengths.")
    ] = False,
) -> None:
    """Run an application, and write what its planners are asked to plan as a trace for `warmprefix replay`."""
    from warmprefix_tools.traces.command import run_recorded

    try:
        status = run_recorded(command, trace, text=text, say=lambda line: typer.echo(visible(line), err=True))
    except TraceError as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="JSONL files, gzipped or not.")],
    policies: Annotated[
        str, typer.Option(metavar="NAMES", help="Ordering policies, with commas between them, or all.")
    ] = POLICY_NAMES,
    capacity_tokens: Annotated[
        str, typer.Option(metavar="SIZES", help="Cache sizes in tokens, such as 100000 or 500k, or unbounded.")
    ] = CAPACITIES,
    k: Annotated[
        int | None,
        typer.Option("-k", help="Blocks of a request that count.", show_default=f"{DEFAULT_K}, or all if fewer"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="How many requests of each trace are replayed.", show_default="all")
    ] = None,
    placement: Annotated[
        Placement, typer.Option(help="Where context stands: in front of the history, or behind it.")
    ] = "head",
    answer_tokens: Annotated[int, typer.Option(help="With tail: the length of the answers in the history.")] = 0,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Uncached prompt tokens a second, for a column of times to first token.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Of a million uncached prompt tokens, for a column of costs.")
    ] = None,
    cached_price: Annotated[
        float | None, typer.Option(help="Of a million cached ones.", show_default="nothing")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output."),
    ] = None,
    orders_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write each served order, for a recount.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write a page of charts.")] = None,
) -> None:
    """Show what warmprefix would save on recorded retrieval traces, by policy and cache size."""
    from warmprefix_tools.replay.command import run_replay

    try:
        options = ReplayOptions(
            traces=tuple(traces),
            policies=parse_policies(policies),
            capacities=parse_capacities(capacity_tokens),
            k=k,
            limit=limit,
            placement=placement,
            answer_tokens=answer_tokens,
            prefill_rate=prefill_rate,
            price=price,
            cached_price=cached_price,
            json_file=json_file,
            orders_file=orders_out,
            html_file=html,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        run_replay(options)
    except (OutputError, TraceError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error


@app.command()
def plan_batch(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A JSONL file, gzipped or not.")],
    planner: Annotated[
        str, typer.Option(metavar="NAME", help=f"What arranges it: {', '.join(BATCH_PLANNERS)}.")
    ] = BATCH_PLANNERS[0],
    k: Annotated[
        int | None,
        typer.Option("-k", help="Blocks of a request that count.", show_default=f"{DEFAULT_K}, or all if fewer"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="How many requests are planned.", show_default="all")] = None,
    capacity_tokens: Annotated[
        str, typer.Option(metavar="SIZE", help="Cache size in tokens, such as 100000 or 500k, or unbounded.")
    ] = "unbounded",
    device: Annotated[
        Device, typer.Option(help="Where distances and overlaps are computed; auto: on a CUDA device if it pays.")
    ] = "auto",
    time_budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="For search after the first plan, by auto and merge; with it, no two plans need be the same.",
            show_default="a number of steps",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output."),
    ] = None,
    orders_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write each order, in execution order.")
    ] = None,
) -> None:
    """Plan a recorded trace as one batch: the order of blocks in every request, and of the requests."""
    from warmprefix_tools.plan_batch.command import run_plan_batch

    try:
        options = PlanBatchOptions(
            trace=trace,
            planner=planner,
            k=k,
            limit=limit,
            capacity_tokens=parse_capacity(capacity_tokens),
            device=device,
            time_budget=time_budget,
            json_file=json_file,
            orders_file=orders_out,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        run_plan_batch(options)
    except (OutputError, PlanBatchError, TraceError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error


@app.command()
def doctor(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="REQUESTS...", help="Captured requests: JSON, JSONL, or vLLM's own log; gzipped or not."
        ),
    ],
    kv_block_size: Annotated[int, typer.Option(help="Tokens in a KV block of your engine.")] = 16,
    capacity_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the prefix cache can hold.", show_default="no bound")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="Exit with status 1 if the findings cost more than this percentage of all tokens."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Where to write the report too; - for standard output."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it as a page.")] = None,
) -> None:
    """Say what keeps the prefix cache cold in logged chat requests, worst first, and what to do about it."""
    from warmprefix_tools.doctor.command import run_doctor

    try:
        options = DoctorOptions(
            logs=tuple(logs),
            kv_block_size=kv_block_size,
            capacity_tokens=capacity_tokens,
            fail_above=fail_above,
            json_file=json_file,
            html_file=html,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        passed = run_doctor(options)
    except (DoctorError, OutputError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error
    if not passed:
        raise typer.Exit(1)


_Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="WARMPREFIX_REDIS_URL", show_default=False, help="Of the Redis or Valkey, as planners take it."
    ),
]
_Prefix = Annotated[
    str, typer.Option("--prefix", envvar="WARMPREFIX_KEY_PREFIX", help="What the names of all keys begin with.")
]
_Conversation = Annotated[str, typer.Option("--conversation", metavar="ID", help="As planners are given it.")]
_Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Whose it is.", show_default="nobody's, which is not the same as ''")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@state_commands.callback()
def state() -> None:
    """Look into what planners share in Redis, and have a conversation forgotten."""


@state_commands.command("inspect")
def inspect_state(
    conversation: _Conversation,
    tenant: _Tenant = None,
    url: _Url = None,
    prefix: _Prefix = "wp",
    json: _Json = False,
) -> None:
    """Show what is known of a conversation. Exits with status 1 if nothing is."""
    from warmprefix_tools.redis_admin.command import run_inspect

    try:
        known = run_inspect(url, prefix, Conversation(tenant, conversation), as_json=json)
    except (OutputError, StateError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error
    if not known:
        raise typer.Exit(1)


@state_commands.command("forget")
def forget_state(conversation: _Conversation, tenant: _Tenant = None, url: _Url = None, prefix: _Prefix = "wp") -> None:
    """Have a conversation forgotten, so that its blocks are sent in full. Exits with status 1 if nothing is known."""
    from warmprefix_tools.redis_admin.command import run_forget

    try:
        forgot = run_forget(url, prefix, Conversation(tenant, conversation))
    except (OutputError, StateError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error
    if not forgot:
        raise typer.Exit(1)


@state_commands.command("stats")
def state_stats(url: _Url = None, prefix: _Prefix = "wp", json: _Json = False) -> None:
    """Show the servers, and how much lies there; beyond 200,000 keys, estimated."""
    from warmprefix_tools.redis_admin.command import run_stats

    try:
        run_stats(url, prefix, as_json=json)
    except (OutputError, StateError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(2) from error
