"""Results for pages, and a browser to look at the pages."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import random
import select
import shutil
import signal
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from warmprefix.plan import Placement
from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Finding, Place, SkippedRecord
from warmprefix_tools.replay.results import Misses, Point, ReplayResult

POLICIES = {
    "relevance": 0.45,
    "sorted": 0.6,
    "frequency": 0.68,
    "greedy": 0.86,
    "recency": 0.72,
    "oracle": 0.97,
    "context-index": 0.79,
    "coaccess": 1.0,
}
SIZES = {100_000: 0.55, 500_000: 0.85, None: 1.0}


def replayed(
    trace: str,
    policy: str,
    capacity_tokens: int | None,
    *,
    requests: int = 2_800,
    ratio: float = 0.4,
    k: int = 15,
    placement: Placement = "head",
) -> ReplayResult:
    """Return a result that adds up; its hit ratio rises as a cache fills and then wavers."""
    rng = random.Random(f"{trace} {policy} {capacity_tokens}")
    ends = sorted({round(requests * i / 100) for i in range(1, 101)} - {0})
    points: list[Point] = []
    for start, end in pairwise([0, *ends]):
        total = (end - start) * rng.randint(2_500, 3_000)
        warm = ratio * (1 - math.exp(-6 * end / requests)) * rng.uniform(0.8, 1.2)
        points.append(Point(end, round(total * min(warm, 1.0)), total))
    saved, total = sum(point.saved_tokens for point in points), sum(point.total_tokens for point in points)
    references = total // 9 if placement == "tail" else 0
    missed = total - saved
    new, evicted, other = round(0.4 * missed), round(0.2 * missed) * (capacity_tokens is not None), references // 4
    before = policy == "relevance" and placement == "head"
    reordered = 0 if before else round(requests * 0.63)
    return ReplayResult(
        trace=trace,
        policy=policy,
        capacity_tokens=capacity_tokens,
        k=k,
        placement=placement,
        requests=requests,
        saved_tokens=saved,
        total_tokens=total,
        gained_requests=0 if before else round(requests * min(ratio, 0.6)),
        lost_requests=0 if before else requests // 40,
        reordered_requests=reordered,
        referring_requests=requests // 5 if references else 0,
        reference_tokens=references,
        untouched_requests=requests - reordered - (requests // 5 if references else 0),
        note_tokens=reordered * k,
        today_saved_tokens=saved if before else round(total * ratio * 0.45),
        today_total_tokens=total + references,
        misses=Misses(new=new, order=missed - new - evicted - other, evicted=evicted, other=other),
        over_time=tuple(points),
        plan_us_p50=rng.uniform(3, 90),
        plan_us_p99=rng.uniform(100, 2_000),
        commit_us_p50=rng.uniform(3, 90),
        commit_us_p99=rng.uniform(100, 2_000),
    )


@pytest.fixture(scope="session")
def results() -> list[ReplayResult]:
    """Traces of many kinds: ordinary, long-named, gaining nothing, losing, tiny, multi-turn."""
    traces: list[tuple[str, float, int, Placement]] = [
        ("campus_help_desk", 0.48, 2_800, "head"),
        ("a_name_as_long_as_people_make_them_when_files_are_named_by_scripts_2026-07-01T00:00:00Z", 0.3, 1_190, "head"),
        ("no_overlap", 0.0, 1_000, "head"),
        ("many turns", 0.55, 480, "tail"),
        ("three", 0.2, 3, "head"),
    ]
    return [
        replayed(trace, policy, size, ratio=ratio * strength * share, requests=requests, placement=placement)
        for trace, ratio, requests, placement in traces
        for size, share in SIZES.items()
        for policy, strength in POLICIES.items()
    ]


def parted(lead: str, parts: tuple[str, str], rest: str, shared: int, could: int, **where: Any) -> Divergence:
    """Two requests with a text before, one in which they differ, and one after."""
    before, after = (
        Place(
            number,
            "logs/day.jsonl",
            number + 3,
            snippet=lead + part + rest,
            mark=(len(lead), len(lead + part)),
            **where,
        )
        for number, part in zip((7, 12), parts, strict=True)
    )
    return Divergence(before, after, shared, could)


@pytest.fixture(scope="session")
def report() -> DoctorReport:
    """Findings as different as they come: of characters, of invisible ones, of fields, of nothing, of no tokens."""
    system: dict[str, Any] = {"message": 0, "role": "system"}
    lead = "You are the help desk of Example University.\nToday is "
    findings = [
        ("timestamp", "A time of day stands early in the prompt", 0.341, parted(
            lead, ("2026-07-01 09:14:07", "2026-07-01 09:14:31"), ". Answer from the context.\n\n[1] Opening ho",
            11, 4_280, offset=55, **system)),
        ("tools-order", "The tools come in changing order", 0.084, parted(
            '..."tools":[{"type":"function","function":{"name":"', ("search", "calendar"), '","param...', 640, 2_900,
            path="tools[0].function.name")),
        ("unicode", "One text is written with different characters", 0.021, parted(
            "The caf", ("\u00e9", "e\u0301"), " opens at eight.", 90, 300, message=3, role="user", offset=7)),
        ("whitespace", "One text is written with different white space", 0.012, parted(
            "Rules:", ("\u00a0\t", " "), "never guess.\r\n\u200bAnd ask.", 90, 300, offset=6, **system)),
        ("trailing", "A text sometimes ends early", 0.004, parted(
            "", ("", "   "), "\u202eHello", 90, 90, message=1, role="user", offset=0)),
        ("short", "Prompts are shorter than one KV block", 0.0, None),
    ]  # fmt: skip
    return DoctorReport(
        files=("logs/day.jsonl", "logs/<b>&\u202e.jsonl"),
        requests=3_400,
        conversations=410,
        prompt_tokens=9_120_000,
        hit_tokens=1_240_000,
        repaired_hit_tokens=1_240_000 + sum(round(share * 9_120_000) for _, _, share, _ in findings),
        bound_tokens=6_000_000,
        kv_block_size=16,
        findings=tuple(
            Finding(kind, title, f"Move what changes behind what does not ({kind}).", round(share * 9_120_000), share,
                    max(round(3_000 * share), 5), divergence)
            for kind, title, share, divergence in findings
        ),
        skipped=(SkippedRecord("logs/day.jsonl", 99, "not JSON: Expecting value: line 1 column 1 (char 0)"),),
        skipped_lines=3,
        notes=("Many prompts are 2,000 characters long: it looks as if the logger had cut them off.",),
        reported_prompt_tokens=8_000_000,
        reported_cached_tokens=1_100_000,
    )  # fmt: skip


BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "msedge",
)
"""Those that speak the DevTools protocol, in the order of trying; WARMPREFIX_BROWSER names another."""

FLAGS = (
    "--headless",
    "--no-sandbox",  # the pages are our own, and a container has no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--remote-debugging-pipe",
)
PATIENCE = 60
"""Seconds without a message from the browser after which it counts as hung."""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests. Without one they are skipped, but in CI, where skipped tests go unnoticed, they fail.

    WARMPREFIX_NO_BROWSER declares that there is no browser.
    """
    if not hasattr(os, "posix_spawn"):
        pytest.skip("the browser is driven through pipes that it inherits, which needs POSIX")
    named = os.environ.get("WARMPREFIX_BROWSER")
    program = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if program is None:
        reason = f"no browser to look at pages with: {named or ', '.join(BROWSERS)}; set WARMPREFIX_BROWSER"
        if named or (os.environ.get("CI") and not os.environ.get("WARMPREFIX_NO_BROWSER")):
            pytest.fail(reason)
        pytest.skip(reason)
    driven = Browser(program, tmp_path_factory.mktemp("browser"))
    try:
        yield driven
    finally:
        driven.close()


class Browser:
    """A headless browser, driven with the DevTools protocol through two pipes: no port, no driver, no package."""

    def __init__(self, program: str, directory: Path) -> None:
        commands, answers = _pipe(), _pipe()
        with (directory / "log").open("wb") as log:
            self._process = os.posix_spawn(
                program,
                [program, *FLAGS, f"--user-data-dir={directory / 'profile'}", "about:blank"],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    (os.POSIX_SPAWN_DUP2, commands[0], 3),
                    (os.POSIX_SPAWN_DUP2, answers[1], 4),
                ],
            )
        os.close(commands[0])
        os.close(answers[1])
        self._commands, self._answers, self._unread = commands[1], answers[0], b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = {}
        try:
            self.call("Browser.close")
        except OSError:
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, path: Path, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
        """Load a page into a window of that width, for a reader of that preference; drop earlier events."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, once it is there."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the events of that name since the page was opened."""
        self.evaluate("0")  # whatever was on its way before this is here after it
        return [event["params"] for event in self._events if event["method"] == method]

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        self._send(json.dumps(message).encode() + b"\0")
        while (received := self._receive()).get("id") != number:
            self._events.append(received)
        assert "error" not in received, f"{method}: {received['error']}"
        return dict(received["result"])

    def _send(self, message: bytes) -> None:
        while message:
            message = message[os.write(self._commands, message) :]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            piece = os.read(self._answers, 1 << 20) if ready else b""
            if not piece:
                raise OSError("the browser is gone" if ready else f"the browser sent nothing for {PATIENCE} seconds")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


def _pipe() -> tuple[int, int]:
    """Return two ends; their numbers do not collide with those that a program is started with."""
    import fcntl  # which Windows lacks

    read, write = os.pipe()
    moved = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(read)
    os.close(write)
    return moved


class Outline(HTMLParser):
    """Elements and texts of a page; refuses a page whose elements are not balanced."""

    VOID = ("link", "meta", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"never opened: {tag}"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="session")
def outline() -> type[Outline]:
    return Outline
