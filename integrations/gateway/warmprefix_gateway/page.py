"""The page of a gateway: what its caches found, and where prompt tokens were lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from warmprefix_gateway.gateway_options import GatewayOptions
from warmprefix_gateway.ledger import Ledger
from warmprefix_gateway.sessions import Session, TokenFates

__all__ = ["overview_page"]

_MAX_SESSIONS = _MAX_APPLICATIONS = 50
_CAUSES = {
    "first": "first request of a session",
    "new": "new text",
    "cut": "behind a change of the history",
    "lost": "sent before, and no longer cached",
}

_UNREPORTED = (
    "<p>{:,} of {:,} answers reported no cached tokens. They are in no hit ratio. vLLM reports them with"
    " <code>--enable-prompt-tokens-details</code>, SGLang with <code>--enable-cache-report</code>.</p>"
)


def overview_page(ledger: Ledger, options: GatewayOptions, upstreams: int) -> str:
    """Return one self-contained HTML page that renews itself. It shows no text, and session ids only if allowed."""
    totals = ledger.totals
    prompt, cached, unreported = totals["prompt_tokens"], totals["cached_tokens"], totals["unreported_tokens"]
    tiles = (
        (_percent(cached, prompt - unreported), "of the prompt tokens were cached"),
        (f"{totals['requests']:,}", "requests answered"),
        (f"{totals['references']:,}", f"repeated results sent as a reference; about {totals['saved_tokens']:,} tokens"),
        (f"{upstreams} of {len(options.upstreams)}", "upstreams answer"),
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
    dots = "".join([f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points])
    label = f"Hit ratio by minute, over the last {last - first + 1} minutes; latest {100 - points[-1][1]:.0f} %"
    return (
        f'<svg viewBox="-8 -6 616 112" role="img" aria-label="{label}"><path d="M0 0H600M0 50H600M0 100H600"/>'
        f'<polyline points="{line}"/>{dots}</svg><p class="dim">{label}</p>'
    )


def _applications(ledger: Ledger) -> str:
    found: dict[str, list[Session]] = defaultdict(list)
    for session in ledger.sessions:
        found[session.application or "unnamed"].append(session)
    rows = []
    largest_first = sorted(found.items(), key=lambda item: -sum(each.prompt_tokens for each in item[1]))
    for name, sessions in largest_first[:_MAX_APPLICATIONS]:
        merged = Session(name, None)
        for session in sessions:
            _add(merged, session)
        rows.append(_session_row(f"{escape(name)} ({len(sessions)})", merged))
    return "".join(rows)


def _add(total: Session, session: Session) -> None:
    total.requests += session.requests
    total.references += session.references
    total.prompt_tokens += session.prompt_tokens
    total.cached_tokens += session.cached_tokens
    total.unreported_tokens += session.unreported_tokens
    total.fates = [one + other for one, other in zip(total.fates, session.fates, strict=True)]


def _sessions(ledger: Ledger, options: GatewayOptions) -> str:
    rows = []
    for number, session in enumerate(ledger.sessions, 1):
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
