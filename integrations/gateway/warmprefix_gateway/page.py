"""The page of a gateway: what its caches found, and where prompt tokens were lost."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from string import Template

from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.ledger import Ledger
from warmprefix_gateway.sessions import Session, TokenFates
from warmprefix_gateway.upstreams import Durations, UpstreamState, written_time

__all__ = ["overview_page", "page_policy"]

_MAX_SESSIONS = _MAX_APPLICATIONS = 50
_CAUSES = {
    "first": "first request of a session",
    "new": "new text",
    "front": "sent before, behind a system prompt or tools that changed",
    "cut": "behind a change of the history",
    "lost": "sent before, and no longer cached",
}

_UNREPORTED = (
    "<p>{:,} of {:,} answers reported no cached tokens. They are in no hit ratio. vLLM reports them with"
    " <code>--enable-prompt-tokens-details</code>, SGLang with <code>--enable-cache-report</code>.</p>"
)


def page_policy(page: str) -> bytes:
    """Return the Content-Security-Policy of a page: its own style, and nothing else."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()


def overview_page(ledger: Ledger, options: GatewayOptions, upstreams: Sequence[UpstreamState], added: Durations) -> str:
    """Return one self-contained HTML page that renews itself. It shows no text, and session ids only if allowed."""
    totals = ledger.totals
    prompt, cached, unreported = totals["prompt_tokens"], totals["cached_tokens"], totals["unreported_tokens"]
    tiles = (
        (_percent(cached, prompt - unreported), "of the prompt tokens were cached"),
        (f"{totals['requests']:,}", "requests answered"),
        (f"{totals['references']:,}", f"repeated results sent as a reference; about {totals['saved_tokens']:,} tokens"),
        (f"{sum(each.answers for each in upstreams)} of {len(upstreams)}", "upstreams answer"),
    )
    causes = [(name, _CAUSES[name], totals[name]) for name in TokenFates._fields]
    parts = [("cached", "found in a cache", cached), *causes, ("unreported", "not reported", unreported)]
    rows = [
        _row(f'<i class="{name}"></i>{label}', f"{tokens:,}", _percent(tokens, prompt)) for name, label, tokens in parts
    ]
    page = Template((resources.files("warmprefix_gateway") / "page.html").read_text("utf-8"))
    return page.substitute(
        tiles="".join([f"<li><b>{value}</b><span>{label}</span></li>" for value, label in tiles]),
        notice=_UNREPORTED.format(totals["unreported"], totals["requests"]) if totals["unreported"] else "",
        bar=_bar(parts),
        causes="".join(rows),
        chart=_chart(ledger),
        upstreams="".join(map(_upstream_row, upstreams)),
        added=_added(added),
        applications=_applications(ledger),
        sessions=_sessions(ledger, options),
    )


def _bar(parts: Sequence[tuple[str, str, int]]) -> str:
    """Return all prompt tokens as one bar."""
    total = max(sum(tokens for _, _, tokens in parts), 1)
    drawn: list[str] = []
    done = 0.0
    for name, _, tokens in parts:
        width = 600 * tokens / total
        drawn.append(f'<rect class="{name}" x="{done:.1f}" width="{width:.1f}" height="20"/>' if tokens else "")
        done += width
    label = "; ".join([f"{text}: {_percent(tokens, total)}" for _, text, tokens in parts])
    size = 'viewBox="0 0 600 20" preserveAspectRatio="none"'
    return f'<svg class="bar" {size} role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _chart(ledger: Ledger) -> str:
    """Return the hit ratio by minute as a chart."""
    minutes = list(ledger.minutes)
    if not minutes:
        return "<p>No answer with usage yet.</p>"
    first, last = minutes[0].minute, minutes[-1].minute
    span = max(last - first, 1)
    points = [
        (600 * (each.minute - first) / span, 100 - 100 * each.cached_tokens / max(each.prompt_tokens, 1))
        for each in minutes
    ]
    line = " ".join([f"{x:.1f},{y:.1f}" for x, y in points])
    dots = "".join([f"M{x:.1f} {y:.1f}h0" for x, y in points])
    label = f"Hit ratio by minute, over the last {last - first + 1} minutes; latest {100 - points[-1][1]:.0f} %"
    times = [first, *([(first + last) // 2, last] if last - first > 1 else [last] if last > first else [])]
    return (
        f'<div class="chart"><ol>{_items(["100 %", "50 %", "0 %"])}</ol>'
        f'<svg viewBox="0 0 600 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<path d="M0 0H600M0 50H600M0 100H600"/><polyline points="{line}"/><path class="dots" d="{dots}"/></svg>'
        f"<ol>{_items([written_time(60 * each)[11:16] for each in times])}</ol></div>"
        f'<p class="dim">{label}. Times are in UTC.</p>'
    )


def _items(texts: Sequence[str]) -> str:
    return "".join([f"<li>{text}</li>" for text in texts])


def _upstream_row(state: UpstreamState) -> str:
    since = "" if state.changed_at is None else f" since {written_time(state.changed_at)}"
    answers = "answers" if state.answers else '<b class="down">does not answer</b>'
    error = "\u2013"
    if state.last_error_at is not None:
        error = f"{escape(state.last_error)}, {written_time(state.last_error_at)}"
    return _row(
        escape(state.base),
        answers + since,
        f"{state.requests:,}",
        f"{state.in_flight:,}",
        f"{state.errors:,}",
        error,
        *_percentiles(state.first_bytes),
    )


def _added(added: Durations) -> str:
    if not added:
        return ""
    half, most = _percentiles(added)
    return f'<p class="dim">The gateway itself adds {half} to the first byte (median; 95 % have {most} or less).</p>'


def _percentiles(durations: Durations) -> tuple[str, str]:
    """Return the 50th and the 95th percentile."""
    if not durations:
        return "\u2013", "\u2013"
    half, most = [1_000 * durations.percentile(share) for share in (0.5, 0.95)]
    return _milliseconds(half), _milliseconds(most)


def _milliseconds(number: float) -> str:
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def _applications(ledger: Ledger) -> str:
    found: dict[str, list[Session]] = defaultdict(list)
    for session in _answered(ledger):
        found[session.application or "unnamed"].append(session)
    rows = []
    largest_first = sorted(found.items(), key=lambda item: -sum(each.prompt_tokens for each in item[1]))
    for name, sessions in largest_first[:_MAX_APPLICATIONS]:
        merged = Session(name, None)
        for session in sessions:
            _add(merged, session)
        rows.append(_session_row(f"{escape(name)} ({len(sessions)})", merged))
    return "".join(rows)


def _answered(ledger: Ledger) -> Iterator[Session]:
    """Yield the sessions with answers of this gateway: it may know others from other gateways."""
    return (session for session in ledger.sessions if session.requests)


def _add(total: Session, session: Session) -> None:
    total.requests += session.requests
    total.references += session.references
    total.prompt_tokens += session.prompt_tokens
    total.cached_tokens += session.cached_tokens
    total.unreported_tokens += session.unreported_tokens
    total.fates = [one + other for one, other in zip(total.fates, session.fates, strict=True)]


def _sessions(ledger: Ledger, options: GatewayOptions) -> str:
    rows = []
    for number, session in enumerate(_answered(ledger), 1):
        if number > _MAX_SESSIONS:
            break
        name = escape(session.key) if options.quote else f"{number}. {escape(session.application or 'unnamed')}"
        rows.append(_session_row(name, session))
    return "".join(rows)


def _session_row(name: str, session: Session) -> str:
    reported = session.prompt_tokens - session.unreported_tokens
    return _row(
        name,
        f"{session.requests:,}",
        f"{session.prompt_tokens:,}",
        _percent(session.cached_tokens, reported),
        *[_percent(tokens, reported) for tokens in session.fates],
        f"{session.references:,}",
    )


def _row(head: str, *cells: str) -> str:
    return f'<tr><th scope="row">{head}</th>{"".join([f"<td>{cell}</td>" for cell in cells])}</tr>'


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"
