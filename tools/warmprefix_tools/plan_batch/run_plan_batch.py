"""The command `warmprefix plan-batch`: plans a trace as one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from warmprefix import ContextPlanner
from warmprefix.annotate import has_labels
from warmprefix.batch import BatchPlan, BatchRequest, BoundKind, PlannedPrime
from warmprefix.blocks import ContextBlock, distinct_blocks
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix.plan import ContextPlan
from warmprefix.prefix import PrefixTree
from warmprefix.tokens import NoteWriter, TokenCounter
from warmprefix.traces import NoRecorder
from warmprefix_openai.outputs import check_writable, standard_output, text_file
from warmprefix_openai.shards import shards_of
from warmprefix_tools.caches import CacheUse
from warmprefix_tools.console import plain_table, progress_bar, report_console, write_json
from warmprefix_tools.plan_batch.plan_batch_options import PlanBatchOptions
from warmprefix_tools.replay.note_tokenizer import load_tokenizer
from warmprefix_tools.replay.profile_cache import ProfileCache
from warmprefix_tools.replay.workload import check_texts, first_blocks
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

try:
    from rich.console import Console
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BOUNDS", "PlanBatchError", "run_plan_batch"]

_TEXT_WIDTH = 100

BOUNDS: dict[BoundKind, str] = {
    "spanning forest": "exact maximum spanning forest",
    "best partners": "every request with its best partner",
    "sampled": "estimated from some of the requests",
    "every block once": "every block prefilled once",
}
"""Description of each kind of upper bound."""


class PlanBatchError(WarmprefixError):
    """The planner or the device cannot plan this trace."""


def run_plan_batch(options: PlanBatchOptions) -> None:
    """Plan the trace, print the plan, and write the files that the options name.

    Raises:
        MissingExtraError: The planner or the device needs an extra that is not installed.
        OutputError: A file cannot be written.
        PlanBatchError: The planner or the device cannot plan this trace, or not on this machine.
        TokenizerLoadError: The tokenizer cannot be used.
        TraceError: The file is no trace.
    """
    for file in options.files:
        check_writable(file)
    trace = read_trace(options.trace, options.limit)
    choice = options.choice
    if choice is not None and choice.twins:
        check_texts(trace)
    requests = _batch_requests(trace, options.k if choice is None else choice.k)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    saved_before = _saved_as_they_came(requests, options.capacity)
    plan = _plan(requests if choice is None else _with_candidates(trace), options, tokenizer)
    numbers = _Numbers.of(plan, requests, saved_before)
    shards = () if options.replicas == 1 else shards_of(plan, options.replicas)
    profile = options.cache_profile
    uses = None if profile is None else _profile_uses(plan, requests, profile)
    if options.orders_out is not None:
        with text_file(options.orders_out) as write:
            for number, shard in enumerate(shards or (plan,)):
                for line in _order_lines(shard, trace, {"replica": number} if shards else {}):
                    write(line)
    console = report_console(options.json_file)
    with standard_output():
        fields = _as_json(plan, numbers, trace.name)
        if choice is not None:
            fields["entered_blocks"] = numbers.entered_blocks
        if profile is not None and uses is not None:
            fields["profile"], fields["primes"] = profile.name, len(plan.primes)
            for name, use in zip(("today_profile_use", "profile_use"), uses, strict=True):
                fields[name] = {**asdict(use), "cost": round(use.cost(profile), 1)}
        if shards:
            fields["replicas"] = [
                {"requests": len(shard), "computed_tokens": shard.total_tokens - shard.saved_tokens} for shard in shards
            ]
        write_json(options.json_file, fields)
        _print_plan(plan, numbers, trace.name, console, chooses=choice is not None)
        if shards:
            _print_shards(plan, shards, console)
        if profile is not None and uses is not None:
            _print_uses(plan, uses, profile, console)


def _batch_requests(trace: Trace, k: int | None) -> list[BatchRequest]:
    """Return the trace's requests with the blocks that relevance feeds; the scope is the tenant.

    Their ids are their places in the trace, because the trace's own ids may be 1 and "1".
    """
    blocks = {id: trace.block(id) for id in trace.tokens}
    return [
        BatchRequest(place, [blocks[id] for id in first_blocks(request, k)], tenant=request.scope)
        for place, request in enumerate(trace.requests)
    ]


def _with_candidates(trace: Trace) -> list[BatchRequest]:
    """Return the same requests with all of their blocks, and the scores that the trace has."""
    blocks = {id: trace.block(id) for id in trace.tokens}
    scored: list[BatchRequest] = []
    for place, request in enumerate(trace.requests):
        scores = request.scores or [None] * len(request.blocks)
        own = [replace(blocks[id], score=score) for id, score in zip(request.blocks, scores, strict=True)]
        scored.append(BatchRequest(place, own, tenant=request.scope))
    return scored


def _saved_as_they_came(requests: Sequence[BatchRequest], capacity_tokens: int | None) -> int:
    """Return the tokens that a cache saves without any reordering."""
    cache = PrefixTree[tuple[str | None, bytes]](capacity_tokens, 2 * len(requests) + 1)
    return sum(
        cache.insert(
            [(request.tenant, block.fingerprint) for block in request.blocks],
            [block.tokens for block in request.blocks],
        ).tokens
        for request in requests
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a plan saves, gross and net of labels and notes, next to the requests as they came."""

    saved_before: int
    """Tokens that the same cache would save without the plan."""
    prefilled_before: int
    note_tokens: int
    net_saved_tokens: int
    """Tokens that need no prefill any more, less those of labels and notes; negative for a loss."""
    entered_blocks: int
    """Candidates that are fed, but would not be by relevance alone."""

    @classmethod
    def of(cls, plan: BatchPlan, requests: Sequence[BatchRequest], saved_before: int) -> Self:
        saved_note_tokens = 0
        note_tokens = 0
        for request in plan:
            planned = request.plan
            note_tokens += planned.note_tokens
            if has_labels(planned.annotation):
                saved_note_tokens += _found_label_tokens(planned, request.wording.writer)
        total_before = sum(block.tokens for request in requests for block in distinct_blocks(request.blocks)[0])
        net = total_before - saved_before - (plan.total_tokens - plan.saved_tokens) - (note_tokens - saved_note_tokens)
        entered = sum(len(request.entered or ()) for request in plan)
        return cls(saved_before, total_before - saved_before, note_tokens, net, entered)

    @property
    def prefill_change(self) -> float:
        """Change of the prefill against the requests as they came; 0 if they prefill nothing."""
        return -self.net_saved_tokens / self.prefilled_before if self.prefilled_before else 0.0


def _found_label_tokens(plan: ContextPlan, writer: NoteWriter) -> int:
    """Return the tokens of the labels in front of the blocks that the cache will hold."""
    found = tokens = 0
    for block in plan.blocks:
        found += block.block.tokens
        if found > plan.resident_tokens:
            break
        tokens += writer.tokens("labels", [block])
    return tokens


def _plan(requests: Sequence[BatchRequest], options: PlanBatchOptions, tokenizer: TokenCounter | None) -> BatchPlan:
    with progress_bar(f"Planning {counted(len(requests), 'request')} ...", name_width=12) as progress:
        task = progress.add_task("planning", total=None)
        try:
            planner = ContextPlanner(
                policy="relevance",
                recorder=NoRecorder(),
                annotate=options.annotate,
                tokenizer=tokenizer,
                profile=options.cache_profile or "auto",
            )
            return planner.plan_batch(
                requests,
                options.planner,
                capacity_tokens=options.capacity,
                time_budget=options.time_budget,
                device=options.device,
                choose=options.choice,
                progress=lambda stage, done, total: progress.update(
                    task, description=stage, completed=done, total=total
                ),
            )
        except ValueError as error:  # such as too many requests for the planner, or no such device here
            raise PlanBatchError(f"Cannot plan {options.trace}: {error}.") from error


def _profile_uses(
    plan: BatchPlan, requests: Sequence[BatchRequest], profile: CacheProfile
) -> tuple[CacheUse, CacheUse]:
    """Return what a profile's cache has of the requests as they came, and of the plan with its primes and marks."""
    tokens = sum(block.tokens for request in requests for block in request.blocks)
    size = 2 * tokens if plan.primes else tokens
    caches = [
        ProfileCache(
            profile, plan.capacity_tokens, expected_tokens=size, requests=2 * len(requests), plans_marks=plans_marks
        )
        for plans_marks in (False, True)
    ]
    for request in requests:
        caches[0].serve_pieces(_pieces(request.blocks), 1, request.tenant)
    primes: dict[object, list[PlannedPrime]] = {}
    for prime in plan.primes:
        primes.setdefault(prime.before.id, []).append(prime)
    for planned in plan:
        blocks = [planned.request.blocks[position] for position in planned.order]
        for prime in primes.get(planned.id, ()):
            caches[1].serve_pieces(_pieces(blocks[: prime.depth]), 1, planned.request.tenant)
        caches[1].serve_pieces(_pieces(blocks), max(planned.plan.note_tokens, 1), planned.request.tenant)
    return caches[0].use, caches[1].use


def _pieces(blocks: Sequence[ContextBlock]) -> list[tuple[bytes, int]]:
    return [(block.fingerprint, block.tokens) for block in blocks]


def _print_uses(plan: BatchPlan, uses: tuple[CacheUse, CacheUse], profile: CacheProfile, console: Console) -> None:
    """Print the prompts in the cache of a profile: as they came, and planned."""
    before, after = uses
    console.print(Text(f"\nIn a cache such as {profile.name}:", style="bold"))
    changes = [("to prefill", before.tokens - before.read, after.tokens - after.read)]
    if profile.marks is not None or profile.read_price:
        changes.append(("price in uncached tokens", round(before.cost(profile)), round(after.cost(profile))))
    for name, ours, planned in changes:
        change = (planned - ours) / ours if ours else 0.0
        console.print(Text(f"{name}: {ours:,} as they came -> {planned:,} planned, {change:+.1%}"))
    if profile.token_price is not None:
        prices = [f"${use.cost(profile) * profile.token_price:,.4f}" for use in uses]
        console.print(Text(f"price in dollars: {' as they came -> '.join(prices)} planned"))
    if profile.checkpoints is not None:
        console.print(Text(f"with {counted(len(plan.primes), 'prime')}, whose tokens are counted"))


def _print_plan(plan: BatchPlan, numbers: _Numbers, trace: str, console: Console, *, chooses: bool) -> None:
    """Print what the plan of a trace saves, net of notes, of the most that any plan could save."""
    bounded = plan.capacity_tokens is not None
    cache = f"a cache of {plan.capacity_tokens:,} tokens" if bounded else "a cache without bounds"
    total = max(plan.total_tokens, 1)
    before = max(numbers.saved_before + numbers.prefilled_before, 1)
    console.print(Text(f"{visible(trace)}: {counted(len(plan), 'request')}, {cache}", style="bold"))
    table = plain_table("", "", left=[""])
    for name, value in (
        ("planner", plan.planner),
        ("gross hit ratio", f"{numbers.saved_before / before:.1%} as they came -> {plan.hit_ratio:.1%} planned"),
        ("tokens saved", f"{plan.saved_tokens:,} of {plan.total_tokens:,}"),
        ("labels and notes", f"{numbers.note_tokens:,} tokens"),
        *([("entered by choice", counted(numbers.entered_blocks, "block"))] if chooses else []),
        ("net saved", _net(numbers, plan.planner)),
        ("upper bound", f"{plan.upper_bound:,} ({plan.upper_bound / total:.1%}), {BOUNDS[plan.bound]}"),
        ("planned in", f"{plan.seconds:,.2f} s on {plan.device}"),
    ):
        table.add_row(name, Text(value))
    console.print(table, crop=False)
    legend = (
        "as they came: blocks in relevance order without labels and notes, requests in the order of the trace, the same"
        " cache. net: against that, with labels and notes prefilled unless the cache holds them. upper bound: the most"
        " that any plan could save gross, with any cache."
    )
    console.print(Text(legend, style="dim"), width=min(console.width, _TEXT_WIDTH))


def _print_shards(plan: BatchPlan, shards: Sequence[BatchPlan], console: Console) -> None:
    """Print what the replicas compute together, against one replica that runs everything, and each one's share."""
    alone = plan.total_tokens - plan.saved_tokens
    computed = [shard.total_tokens - shard.saved_tokens for shard in shards]
    change = (sum(computed) - alone) / alone if alone else 0.0
    console.print(Text(f"\nOn {len(shards):,} replicas:", style="bold"))
    console.print(Text(f"to compute: {alone:,} tokens on one -> {sum(computed):,} on all together, {change:+.1%}"))
    console.print(Text(f"for each: {min(map(len, shards)):,} to {max(map(len, shards)):,} requests,"), end=" ")
    console.print(Text(f"{min(computed):,} to {max(computed):,} tokens to compute"))


def _net(numbers: _Numbers, planner: str) -> str:
    """Return the net saving; a loss comes with what avoids it."""
    net = f"{numbers.net_saved_tokens:+,} tokens, {0 - numbers.prefill_change:+.1%} of the prefill as they came"
    if numbers.net_saved_tokens >= 0:
        return net
    ways = ["--annotate none"] if numbers.note_tokens else []
    ways += ["--planner relevance"] if planner != "relevance" else []
    return f"{net}: a loss{', try ' if ways else ''}{' or '.join(ways)}"


# -- for other programs; docs/batch.md is the contract ---------------------------------------------------------------


def _as_json(plan: BatchPlan, numbers: _Numbers, trace: str) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "trace": trace,
        "requests": len(plan),
        "saved_tokens": plan.saved_tokens,
        "total_tokens": plan.total_tokens,
        "hit_ratio": plan.hit_ratio,
        "today_saved_tokens": numbers.saved_before,
        "note_tokens": numbers.note_tokens,
        "net_saved_tokens": numbers.net_saved_tokens,
        "prefill_change": numbers.prefill_change,
        "upper_bound": plan.upper_bound,
        "seconds": plan.seconds,
        "device": plan.device,
    }


def _order_lines(plan: BatchPlan, trace: Trace, more: Mapping[str, int]) -> Iterator[str]:
    """Yield every request in execution order, as JSON with the trace's own ids and `more`."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    for planned in plan:
        source = trace.requests[int(planned.id)]
        order = [source.blocks[position] for position in planned.order]
        yield encode({"request": source.request, "order": order, **more}) + "\n"
