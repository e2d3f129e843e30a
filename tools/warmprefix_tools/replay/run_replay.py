"""The command `warmprefix replay`: tables, JSON, orders and a page of results."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from warmprefix import __version__
from warmprefix.cache_profiles import CacheProfile
from warmprefix.tokens import TokenCounter
from warmprefix_openai.outputs import check_writable, standard_output, text_file
from warmprefix_tools.console import progress_bar, report_console, write_json, write_text
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.note_tokenizer import load_tokenizer
from warmprefix_tools.replay.page import replay_page
from warmprefix_tools.replay.replay_options import ReplayOptions
from warmprefix_tools.replay.results import DEFAULT_POLICY, ChoiceResult, Estimates, ReplayResult
from warmprefix_tools.replay.simulation import Observe, Replay
from warmprefix_tools.replay.text_report import print_conversations, print_results
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

__all__ = ["run_replay"]

_SHOWN_EVERY = 200  # requests per step of the progress bar


def run_replay(options: ReplayOptions) -> None:
    """Replay the traces, print the results, and write the files that the options name.

    Raises:
        MissingExtraError: The tokenizer needs an extra that is not installed.
        OutputError: A file cannot be written.
        TokenizerLoadError: The tokenizer cannot be used.
        TraceError: A file is no trace, or one without candidates and scores to choose by. All are read before the first
            is replayed.
    """
    for file in options.files:
        check_writable(file)
    traces = _read(options.traces, options.limit)
    workloads = [Workload(trace, options.k, options.choice) for trace in traces]
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    estimates = Estimates(options.prefill_rate, options.price, options.cached_price or 0.0)
    with ExitStack() as stack:
        write = None if options.orders_out is None else stack.enter_context(text_file(options.orders_out))
        results, choices = _replay(workloads, options, tokenizer, write)
    if options.html is not None:
        write_text(options.html, replay_page(results, estimates, choices))
    console = report_console(options.json_file)
    with standard_output():
        write_json(options.json_file, _as_json(results, choices, options, estimates))
        print_results(results, estimates, console, options.cache_profile, choices)
        if options.placement == "head":
            print_conversations(traces, console)


def _read(paths: Sequence[Path], limit: int | None) -> list[Trace]:
    """Return the traces; those that share a name are named by their paths."""
    traces = [read_trace(path, limit) for path in paths]
    names = Counter(trace.name for trace in traces)
    return [
        trace if names[trace.name] == 1 else replace(trace, name=str(path))
        for trace, path in zip(traces, paths, strict=True)
    ]


def _replay(
    workloads: Sequence[Workload],
    options: ReplayOptions,
    tokenizer: TokenCounter | None,
    write: Callable[[str], object] | None,
) -> tuple[list[ReplayResult], list[ChoiceResult]]:
    """Replay every trace with every cache and policy, and with the choice, and write the served orders."""
    results: list[ReplayResult] = []
    choices: list[ChoiceResult] = []
    names = options.policy_names
    chosen = () if options.choice is None else ("first", "chosen", "chance")[DEFAULT_POLICY in names :]
    runs = len(options.capacities) * len([*names, *chosen])
    announcement = f"Replaying {counted(len(workloads), 'trace')}, {counted(runs, 'run')} each ..."
    with progress_bar(announcement, name_width=44) as progress:
        task = progress.add_task("", total=runs * sum(len(workload.requests) for workload in workloads))

        def observer(workload: Workload, capacity: int | None, policy: str) -> Observe:
            labels = {"trace": workload.name, "policy": policy, "capacity_tokens": _capacity_name(capacity)}
            served = 0

            def observe(request: ReplayRequest, order: ContextOrder) -> None:
                nonlocal served
                served += 1
                if served % _SHOWN_EVERY == 1:
                    progress.update(task, description=f"{visible(workload.name)[:30]} {policy}")
                if served % _SHOWN_EVERY == 0 or served == len(workload.requests):
                    progress.advance(task, served % _SHOWN_EVERY or _SHOWN_EVERY)
                if write is not None:
                    write(_order_line(labels, request, order))

            return observe

        for workload in workloads:
            replay = Replay(
                workload,
                options.placement,
                options.answer_tokens,
                annotate=options.annotate,
                tokenizer=tokenizer,
                waiting=options.waiting,
                retention=options.retention,
                profile=options.cache_profile,
                preamble_tokens=options.preamble_tokens,
            )
            for capacity in options.capacities:
                own = {name: replay.run(name, capacity, observe=observer(workload, capacity, name)) for name in names}
                results += own.values()
                if chosen:
                    watch = partial(observer, workload, capacity)
                    choices.append(replay.run_choice(capacity, first=own.get(DEFAULT_POLICY), observe=watch))
    return results, choices


# -- for other programs; docs/replay.md is the contract --------------------------------------------------------------


def _order_line(labels: dict[str, Any], request: ReplayRequest, order: ContextOrder) -> str:
    """Return a served request as JSON, with `references` only if there are some."""
    line = {**labels, "request": request.source.request, "order": [request.ids[i] for i in order.order]}
    if order.references:
        line["references"] = [request.ids[i] for i in order.references]
    return json.dumps(line, separators=(",", ":")) + "\n"


def _as_json(
    results: Sequence[ReplayResult], choices: Sequence[ChoiceResult], options: ReplayOptions, estimates: Estimates
) -> dict[str, Any]:
    """Return all results, with the versions, options and estimates behind them."""
    return {
        "warmprefix": __version__,
        "python": platform.python_version(),
        **{name: getattr(options, name) for name in ("annotate", "tokenizer", "waiting", "retention")},
        **({} if options.profile is None else {"profile": options.profile, "preamble_tokens": options.preamble_tokens}),
        "estimates": asdict(estimates),
        "results": [_result_as_json(result, estimates, options.cache_profile) for result in results],
        **({} if options.choose is None else {"choose": options.choose, "choices": [*map(_choice_as_json, choices)]}),
    }


_RESULT_FIELDS = (
    "trace", "policy", "capacity_tokens", "k", "placement", "requests", "hit_ratio", "saved_tokens", "total_tokens",
    "prefilled_tokens", "plan_us_p50", "plan_us_p99", "commit_us_p50", "commit_us_p99", "gained_requests",
    "lost_requests", "worst_request_change", "reordered_requests", "untouched_requests", "referring_requests",
    "reference_tokens", "note_tokens", "saved_note_tokens", "touches", "touch_tokens", "today_saved_tokens",
    "today_total_tokens", "net_saved_tokens", "prefill_change", "policy_errors", "tokenizer_errors",
)  # fmt: skip


def _result_as_json(result: ReplayResult, estimates: Estimates, profile: CacheProfile | None) -> dict[str, Any]:
    fields = {name: getattr(result, name) for name in _RESULT_FIELDS}
    fields["capacity_tokens"] = _capacity_name(result.capacity_tokens)
    fields.update({name: round(value, 1) for name, value in fields.items() if "_us_" in name})
    fields["misses"] = asdict(result.misses)
    fields["over_time"] = [asdict(point) for point in result.over_time]
    if estimates.prefill_rate is not None:
        fields["ttft_seconds"] = estimates.ttft_seconds(result)
        fields["ttft_seconds_today"] = estimates.ttft_seconds_today(result)
    if estimates.price is not None:
        fields["cost"] = estimates.cost(result)
        fields["cost_today"] = estimates.cost_today(result)
    for name, use in (("profile_use", result.profile_use), ("today_profile_use", result.today_profile_use)):
        if use is not None and profile is not None:
            fields[name] = {**asdict(use), "cost": round(use.cost(profile), 1)}
    return fields


def _choice_as_json(choice: ChoiceResult) -> dict[str, Any]:
    """Return the arms of a choice, each with its prefill and its evidence."""
    result = choice.chosen
    fields: dict[str, Any] = {
        "trace": result.trace,
        "capacity_tokens": _capacity_name(result.capacity_tokens),
        "k": result.k,
        "candidates": choice.candidates,
        "requests": result.requests,
        "unchosen_requests": len(choice.errors),
    }
    for name in ("relevance", "first", "chosen", "chance"):
        arm: ReplayResult = getattr(choice, name)
        evidence = arm.evidence
        assert evidence is not None
        fields[name] = {
            "computed_tokens": arm.net_prefilled_tokens,
            "prefill_change": arm.prefill_change,
            **asdict(evidence),
            "gold_share": evidence.gold_share,
            "most_fed_share": evidence.most_fed_share,
        }
    return fields


def _capacity_name(capacity_tokens: int | None) -> int | str:
    """Return a cache size as the command takes it: a number, or `unbounded`."""
    return "unbounded" if capacity_tokens is None else capacity_tokens
