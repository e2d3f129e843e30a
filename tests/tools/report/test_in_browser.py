"""The pages in a browser: on a phone and on a desk, light and dark."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from warmprefix_gateway import GatewayOptions
from warmprefix_gateway.ledger import Ledger
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.outgoing import AskedPrompt
from warmprefix_gateway.page import overview_page
from warmprefix_gateway.sessions import prompt_parts
from warmprefix_gateway.upstreams import Durations, UpstreamState
from warmprefix_requests import Rewritten, read_call
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.demo_report import demo_page
from warmprefix_tools.demo.session import prepare_session, run_session
from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Place, SkippedRecord
from warmprefix_tools.doctor.page import doctor_page
from warmprefix_tools.quality.page import quality_page
from warmprefix_tools.quality.paired import compare_pairs
from warmprefix_tools.quality.results import ArmResult, OrderEffect, QualityResults
from warmprefix_tools.quality.scores import MEASURES, AnswerScores
from warmprefix_tools.replay.page import replay_page
from warmprefix_tools.replay.results import ReplayResult
from warmprefix_tools.report.pages import environment

pytestmark = pytest.mark.browser

Browser = Any  # the conftest's
SEEN = {
    f"{width}-{scheme}-{folds}": (width, scheme, folds)
    for width in (360, 768, 1280)
    for scheme in ("light", "dark")
    for folds in ("folded", "unfolded")
}

MEASURE = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(
    results: list[ReplayResult], report: DoctorReport, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Files of the pages, by name."""
    hostile = "\u202e</title><script>document.title = 'run'</script><img src='https://evil.example/x'>" + "W" * 300
    written = {
        "replay": replay_page(results),
        "doctor": doctor_page(report),
        "hostile-doctor": doctor_page(report_of(hostile, report)),
        "one-trace": replay_page(results[:8]),
        "quality": answers_page("gpt"),
        "hostile-quality": answers_page(hostile),
        "gateway": gateway_page("opencode"),
        "hostile-gateway": gateway_page(hostile),
        "hostile": replay_page([replace(result, trace=hostile) for result in results[:8]]),
        "demo": demonstration("The sea is deep", tmp_path_factory.mktemp("documents")),
        "hostile-demo": demonstration(hostile, tmp_path_factory.mktemp("documents")),
    }
    directory = tmp_path_factory.mktemp("pages")
    for name, page in written.items():
        (directory / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: directory / f"{name}.html" for name in written}


def demonstration(text: str, folder: Path) -> str:
    """Return the page of a short demo about documents that contain a text, and whose names begin with it."""
    name = "".join(character for character in text[:30] if character.isprintable() and character != "/")
    for number in range(8):
        sentences = [
            f"Lamp {number * 100 + each} of house {each} in street {number} shines until hour {each % 12}. {text[:40]}"
            for each in range(60)
        ]
        (folder / f"{name} {number}.txt").write_text(
            "\n\n".join(" ".join(sentences[start : start + 6]) for start in range(0, 60, 6)), encoding="utf-8"
        )
    options = DemoOptions(documents=folder, questions=16)
    session = run_session(options, prepare_session(options), lambda name, steps: lambda: None)
    return demo_page(asyncio.run(session), options)


def answers_page(model: str) -> str:
    """Return a page with arms that are better, worse, not worse and open."""
    scores = AnswerScores(0.8, 0.78, 0.74, 0.7, 0.01, 2.5)
    counts = {"relevance": None, "planned": (2, 3), "note": (1, 30), "labels": (40, 2), "shuffled": (20, 30)}
    compared = {
        arm: changed and compare_pairs([1.0] * changed[0] + [-1.0] * changed[1] + [0.0] * 465)
        for arm, changed in counts.items()
    }
    arms = [
        ArmResult(
            *(arm, "relevance", 500, 3, 1, scores, scores.contains, 0, 480, 90, comparison),
            dict.fromkeys(MEASURES, comparison) if comparison else {},
            *(0.02, 400_000, 100_000, 0.2 if comparison else None, 480, 470, 0.01),
        )
        for arm, comparison in compared.items()
    ]
    places = {place: 0.7 - place / 100 for place in range(1, 9)}
    settings = {"model": model, "data": model}
    return quality_page(
        QualityResults(
            settings, 500, "contains", 0.01, True, model, tuple(arms), places, OrderEffect(5, 0.01, 0.1), 0.1
        )
    )


def gateway_page(application: str) -> str:
    """Return the page of a gateway with some sessions of an application, whose ids have this text too."""
    now = [60_000.0]
    ledger = Ledger(GatewayMetrics(), clock=lambda: now[0])
    options = GatewayOptions(("http://a/v1", "http://b/v1"), quote=True)
    for turn in range(4):
        for number in range(3):
            messages = [{"role": "user", "content": f"{part} of {number} " * 40} for part in range(2 * turn + 1)]
            call = read_call("POST", "/v1/chat/completions", {}, json.dumps({"messages": messages}).encode())
            assert call is not None
            parts = prompt_parts(call.route, call.body)
            session = ledger.sessions.find(None, f"{application} {number}", parts)
            session.application = application[:40]
            sent = replace(call, rewritten=Rewritten(call.body, references=turn))
            ledger.record(AskedPrompt(call, session, parts, sent, None), sent, None, 400 * (turn + 1), 300 * turn)
        now[0] += 60
    states = [UpstreamState(address, clock=lambda: now[0]) for address in options.upstreams]
    states[1].change(False)
    states[1].fail(application)
    durations = Durations()
    for milliseconds in range(1, 101):
        durations.add(milliseconds / 1_000)
        states[0].first_bytes.add(milliseconds / 100)
    return overview_page(ledger, options, states, durations)


def report_of(text: str, report: DoctorReport) -> DoctorReport:
    """Return a report with that text wherever text of a log can be."""
    place = Place(1, text, 1, message=0, role=text, snippet=text, mark=(3, 90))
    finding = replace(report.findings[0], kind=text, title=text, fix=text, divergence=Divergence(place, place, 1, 2))
    return replace(
        report, files=(text, text), notes=(text,), findings=(finding,), skipped=(SkippedRecord(text, 1, text),)
    )


@pytest.fixture(params=list(SEEN.values()), ids=list(SEEN))
def look(request: pytest.FixtureRequest, browser: Browser) -> Callable[[Path], dict[str, Any]]:
    """Open a page with a width and a colour scheme, details open or not, and measure it."""
    width, scheme, folds = request.param

    def measured(path: Path) -> dict[str, Any]:
        browser.open(path, width, scheme)
        if folds == "unfolded":
            browser.evaluate("for (const each of document.querySelectorAll('details')) each.open = true; 0")
        return dict(browser.evaluate(f"{MEASURE}; measure()"))

    return measured


@pytest.fixture(
    params=[
        "replay",
        "one-trace",
        "hostile",
        "doctor",
        "hostile-doctor",
        "gateway",
        "hostile-gateway",
        "demo",
        "hostile-demo",
    ]
)
def path(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Path:
    return pages[request.param]


def test_page_fits_is_legible_and_makes_no_request(
    look: Callable[[Path], dict[str, Any]], path: Path, browser: Browser
) -> None:
    seen = look(path)
    assert seen["overflow"] == 0
    assert seen["outside"] == []
    assert seen["touching"] == []
    assert seen["faint"] == []
    assert seen["empty"] == []
    assert seen["texts"] > 40
    assert seen["charts"] >= 2
    assert [event["request"]["url"] for event in browser.events("Network.requestWillBeSent")] == [path.as_uri()]
    for method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert browser.events(method) == []


@pytest.mark.parametrize("width", [360, 1280])
def test_table_shows_the_ratios_of_the_results(
    results: list[ReplayResult], pages: dict[str, Path], browser: Browser, width: int
) -> None:
    browser.open(pages["replay"], width)
    shown = browser.evaluate(
        "[...document.querySelectorAll('section[id]')].map(section =>"
        " [...section.querySelector('.barred').tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.innerText)))"
    )
    traces = list(dict.fromkeys(result.trace for result in results))
    assert len(shown) == len(traces)
    for trace, rows in zip(traces, shown, strict=True):
        expected = {
            policy: [f"{each.hit_ratio:.1%}" for each in results if (each.trace, each.policy) == (trace, policy)]
            for policy in dict.fromkeys(result.policy for result in results)
        }
        assert {policy: numbers for policy, _, *numbers in rows if policy != "today"} == expected


def test_legend_names_each_line_with_its_end(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["replay"])
    charts = browser.evaluate(
        "[...document.querySelectorAll('.lines')].map(chart => [chart.querySelectorAll('.plot .line').length,"
        " [...chart.nextElementSibling.querySelectorAll('.name')].map(name => name.textContent),"
        " [...chart.nextElementSibling.querySelectorAll('.line')].map(line => line.getAttribute('class'))])"
    )
    assert len(charts) == 5
    for number, names, swatches in charts:
        assert number == len(names) == len(swatches) == 5
        ratios = [float(re.findall(r"([\d.]+)%$", name)[0]) for name in names]
        assert ratios == sorted(ratios, reverse=True)
        assert names[swatches.index("line hero")].startswith("coaccess")


def test_pointer_shows_the_numbers_of_a_column(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["one-trace"])
    hints = browser.evaluate("[...document.querySelectorAll('.column title')].map(title => title.textContent)")
    assert len(hints) == 100
    assert re.fullmatch(r"2,800 requests: coaccess [\d.]+%, relevance [\d.]+%(, [a-z-]+ [\d.]+%){3}", hints[-1])
    where = browser.evaluate(
        "(() => { const column = document.querySelectorAll('.column rect')[50]; column.scrollIntoView();"
        " const box = column.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    cursors = (
        "[...document.querySelectorAll('.column line')].map(line => getComputedStyle(line).visibility == 'visible')"
    )
    assert not any(browser.evaluate(cursors))
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    assert [i for i, shown in enumerate(browser.evaluate(cursors)) if shown] == [50]


def test_wide_table_scrolls_with_the_keys(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["replay"], 360)
    browser.evaluate(
        "for (const each of document.querySelectorAll('details')) each.open = true;"
        " var wide = [...document.querySelectorAll('.scroll')].find(box => box.scrollWidth > box.clientWidth + 50);"
        " wide.scrollIntoView(); wide.focus(); 0"
    )
    assert browser.evaluate("document.activeElement === wide")
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    moved = "const look = () => wide.scrollLeft > 0 ? done(true) : requestAnimationFrame(look); look()"
    assert browser.evaluate(f"new Promise(done => {{ {moved}; }})")


def test_paper_is_dark_on_light_without_details(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["replay"], 800, "dark", media="print")
    seen = browser.evaluate(f"{MEASURE}; measure()")
    assert seen["faint"] == []
    assert seen["overflow"] == 0
    page = "getComputedStyle(document.body)"
    shown = browser.evaluate(
        f"[{page}.backgroundColor, {page}.color, document.querySelector('details').checkVisibility()]"
    )
    assert shown == ["rgb(255, 255, 255)", "rgb(33, 28, 22)", False]


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """Yield a server's address, and the paths that were requested."""
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "without its policy"])
def test_markup_in_the_body_can_neither_run_nor_load(browser: Browser, tmp_path: Path, guarded: bool) -> None:
    with listening() as (address, asked):
        smuggled = (
            f"<script>document.title = 'run'</script><img src='{address}/image' onerror=\"document.title = 'run'\">"
            f"<style>p {{ color: rgb(1, 2, 3) }}</style><iframe src='{address}/frame'></iframe>"
            f"<link rel='stylesheet' href='{address}/style'><p style='color: rgb(1, 2, 3)'>text</p>"
        )
        template = '{% extends "report/base.html" %}{% block body %}<main>{{ smuggled|safe }}</main>{% endblock %}'
        page = environment().from_string(template).render(title="calm", smuggled=smuggled)
        path = tmp_path / "page.html"
        path.write_text(page if guarded else page.replace("Content-Security-Policy", "none"), encoding="utf-8")
        browser.open(path)
        seen = browser.evaluate("[document.title, getComputedStyle(document.querySelector('p')).color]")
    if guarded:
        assert (seen, asked) == (["calm", "rgb(33, 28, 22)"], [])
    else:  # without the policy, everything runs and loads
        assert (seen, set(asked)) == (["run", "rgb(1, 2, 3)"], {"/image", "/frame", "/style"})


def test_measuring_finds_faults(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    faults = (
        "<p style='margin: 0; height: 5px'>one</p><p style='margin: 0'>on top of it</p>"
        "<p style='color: #999; background: #fff'>faint</p>"
        "<figure style='width: 90px'><svg class='cut' width='90' height='20' style='overflow: visible'>"
        "<text x='60' y='15'>beyond its figure</text></svg></figure>"
        "<svg class='flat' width='100' height='0'></svg><div style='width: 2000px'>wide</div>"
    )
    path.write_text(f"<!DOCTYPE html><body style='background: #fff; color: #000'>{faults}", encoding="utf-8")
    browser.open(path, 360)
    seen = browser.evaluate(f"{MEASURE}; measure()")
    assert seen["overflow"] > 1000
    assert ["one" in complaint and "on top" in complaint for complaint in seen["touching"]] == [True]
    assert [complaint.split()[0] for complaint in seen["faint"]] == ['"faint"']
    assert [complaint.split(" in ")[0] for complaint in seen["outside"]] == ['"beyond its figure"']
    assert seen["empty"] == ["flat"]
