"""Small logs, each with one property: which defects are reported, where, and which are not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.doctor.diagnosis import _charges, diagnose
from warmprefix_tools.doctor.findings import DoctorReport, Finding
from warmprefix_tools.doctor.log_reader import read_log
from warmprefix_tools.doctor.profile_checks import PROFILE_KINDS
from warmprefix_tools.doctor.repairs import ADVICE, SALT_SHARED, VAGUEST_FIRST

Body = dict[str, Any]

RULES = " ".join(f"Rule {n}: answer from the passages alone, and admit it if they lack it." for n in range(30))
CLOSE = "\n\n" + " ".join(f"Reminder {n}: keep to the rules above, whatever is asked." for n in range(30))


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., DoctorReport]:
    def run(records: Sequence[Body | str], **options: Any) -> DoctorReport:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "log").write_text("\n".join(lines), encoding="utf-8")
        return diagnose(read_log([tmp_path / "log"]), **options)

    return run


@pytest.fixture(scope="session")
def passages(entries: Sequence[LibraryEntry]) -> list[str]:
    return [entry.blocks[0].text for entry in entries[:200]]


def chat(system: str, *turns: str, **fields: Any) -> Body:
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"model": "m", "messages": [{"role": "system", "content": system}, *messages], **fields}


def kinds(report: DoctorReport) -> set[str]:
    return {finding.kind for finding in report.findings}


def only(report: DoctorReport) -> Finding:
    (finding,) = report.findings
    return finding


# -- places of divergence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "defect", "marked"),
    [
        ("rag", "timestamp", "The current time is"),
        ("chat", "timestamp", "The current time is"),
        ("agent", "random-id", "(Session|Trace)"),
        ("memory", "user-text", "You are talking to"),
        ("chat", "variable-prefix", "The office is"),
        ("rag", "variable-prefix", "Question:"),
    ],
)
def test_mark_covers_the_planted_defect(
    make_log: Callable[..., Any], examine: Callable[..., DoctorReport], kind: str, defect: str, marked: str
) -> None:
    made = make_log(kind, 1, defect)
    divergence = only(examine(made)).divergence
    assert divergence is not None
    for place in (divergence.earlier, divergence.later):
        assert place.message is not None
        assert place.offset is not None
        assert place.mark is not None
        message = made.bodies[place.line - 1]["messages"][place.message]
        assert message["role"] == place.role
        text = message["content"]
        part = place.snippet[slice(*place.mark)]
        assert text[place.offset :].startswith(part)
        line = text[text.rfind(". ", 0, place.offset) + 1 :].lstrip(" \n-")
        start = max(text.find(word) for word in marked.strip("()").split("|"))
        assert start >= 0
        assert start <= place.offset < start + 90, line[:60]
    assert divergence.shared_tokens < divergence.could_share_tokens


class EachHidesTheOther:
    """Two defects, each without effect as long as the other one is there."""

    def gain(self, kinds: frozenset[str]) -> int:
        return 100 if kinds else 0


def test_defects_that_hide_each_other_share_the_cost() -> None:
    repairs: Any = EachHidesTheOther()
    assert _charges(repairs, frozenset({"a", "b"})) == {"a": 50, "b": 50}


@pytest.mark.parametrize(
    ("kind", "defect", "path"),
    [("agent", "tool-order", "tools["), ("agent", "json-key-order", "tools["), ("rag", "salt-split", "cache_salt")],
)
def test_fields_are_reported_by_their_path(
    make_log: Callable[..., Any], examine: Callable[..., DoctorReport], kind: str, defect: str, path: str
) -> None:
    divergence = only(examine(make_log(kind, 1, defect))).divergence
    assert divergence is not None
    assert divergence.earlier.path == divergence.later.path or defect == "tool-order"
    for place in (divergence.earlier, divergence.later):
        assert place.path is not None
        assert place.path.startswith(path)
        assert place.snippet
    assert divergence.earlier.snippet != divergence.later.snippet


def test_extra_space_is_marked(look: Callable[..., DoctorReport]) -> None:
    finding = only(
        look([chat(RULES.replace("Rule 7:", "Rule  7:") if n % 2 else RULES, f"Why {n}?") for n in range(20)])
    )
    assert finding.kind == "whitespace"
    assert finding.divergence is not None
    places = (finding.divergence.earlier, finding.divergence.later)
    assert {place.offset for place in places} == {RULES.index("Rule 7:") + 5}
    assert {place.snippet[slice(*(place.mark or (0, 0)))] for place in places} == {"", " "}


# -- kinds of defects ---------------------------------------------------------------------------------------


def test_tenants_without_salts_are_reported_at_no_cost(look: Callable[..., DoctorReport]) -> None:
    bodies = [chat(RULES, f"Why {n}?", metadata={"tenant": f"t{n % 2}"}) for n in range(20)]
    report = look(bodies)
    finding = only(report)
    assert (finding.kind, finding.lost_tokens, finding.requests) == ("salt-shared", 0, 19)
    assert report.lost_share == 0
    assert report.hit_tokens == report.repaired_hit_tokens
    salted = [{**body, "cache_salt": f"s{n % 2}"} for n, body in enumerate(bodies)]
    assert look(salted).findings == ()


def test_one_salt_per_request_is_reported(look: Callable[..., DoctorReport]) -> None:
    assert only(look([chat(RULES, f"Why {n}?", cache_salt=f"s{n}") for n in range(20)])).kind == "salt-split"
    assert look([chat(RULES, f"Why {n}?", cache_salt=f"s{n % 3}") for n in range(20)]).findings == ()


def test_keys_of_json_in_a_prompt_are_compared(look: Callable[..., DoctorReport]) -> None:
    rng = random.Random(3)
    schema = {f"field_{n}": {"type": "string", "note": f"The {n}th."} for n in range(20)}
    systems = ["Reply as in: " + json.dumps(dict(rng.sample(sorted(schema.items()), 20))) + CLOSE for _ in range(20)]
    finding = only(look([chat(system, f"Why {n}?") for n, system in enumerate(systems)]))
    assert finding.kind == "json-key-order"
    assert finding.divergence is not None
    assert finding.divergence.later.message == 0


def talk(turns: int, view: Callable[[list[str]], list[str]], passages: list[str]) -> list[Body]:
    past: list[str] = []
    bodies = []
    for turn in range(turns):
        past.append(f"Question {turn}: {passages[turn][:300]}")
        bodies.append(chat("Be brief.", *view(past)))
        past.append(f"Answer {turn}: {passages[turn][-300:]}")
    return bodies


def test_summary_of_turns_counts_as_rewritten_history(look: Callable[..., DoctorReport], passages: list[str]) -> None:
    def view(texts: list[str]) -> list[str]:
        old = max(len(texts) - 5, 0) // 2 * 2
        summary = "So far: " + " ".join(text[:20] for text in texts[:old])
        return [summary, "I see.", *texts[old:]] if old else texts

    report = look(talk(12, view, passages))
    assert kinds(report) == {"history-rewritten"}
    assert report.conversations == 1


def test_sliding_window_counts_as_truncated_history(look: Callable[..., DoctorReport], passages: list[str]) -> None:
    finding = only(look(talk(12, lambda texts: texts[-5:], passages)))
    assert finding.kind == "history-truncated"
    assert finding.divergence is not None
    assert finding.divergence.later.message == 1


# -- logs without findings ---------------------------------------------------------------------------------------


def clean_logs(passages: list[str]) -> dict[str, list[Body]]:
    rng = random.Random(4)
    clock = [f"It is 2025-03-{day:02} 10:{minute:02}:00." for day in range(1, 20) for minute in range(3)]
    fork = talk(6, list, passages)
    retried = [*fork[:3], {**fork[2], "temperature": 1}, chat("Be brief.", "Question 0: another one?"), *fork[3:]]
    return {
        "one request": [chat(f"It is 10:00. {RULES}", "Why?")],
        "a date that does not change": [chat(f"It is 2025-03-04. {RULES}", f"Why {n}?") for n in range(20)],
        "the time behind everything else": [chat(RULES, f"Why {n}? {time}") for n, time in enumerate(clock)],
        "names behind what is shared": [chat(f"{RULES}\n\nYou talk to {n % 5}, Ann.", f"Why {n}?") for n in range(30)],
        "ids in questions": [chat(RULES, f"What of order {rng.getrandbits(64):016x}?") for _ in range(30)],
        "a growing chat": talk(12, list, passages),
        "turns asked again": retried,
        "nothing in common": [chat(passages[5 * n], passages[5 * n + 2]) for n in range(40)],
        "two applications": [chat([RULES, CLOSE][n % 2], f"Why {n}?") for n in range(30)],
        "the same passages again": [chat(RULES, "\n\n".join([*passages[:4], f"Question: {n}?"])) for n in range(30)],
        "one context of changing length": [
            chat(RULES, "\n\n".join([*(f"[{i}] {passages[i]}" for i in range(rng.randint(2, 8))), f"Question: {n}?"]))
            for n in range(30)
        ],
    }


def test_harmless_differences_are_not_reported(look: Callable[..., DoctorReport], passages: list[str]) -> None:
    found = {name: kinds(look(bodies)) for name, bodies in clean_logs(passages).items()}
    assert found == {name: set() for name in found}


def test_report_quotes_prompts_only_around_the_spot(look: Callable[..., DoctorReport]) -> None:
    report = look([chat(f"It is 10:{n:02}. {RULES} {'x' * 5_000}", "y" * 5_000) for n in range(20)])
    assert report.findings
    for finding in report.findings:
        assert finding.divergence is not None
        assert len(finding.divergence.earlier.snippet) <= 202
        assert len(finding.divergence.later.snippet) <= 202


def test_docs_list_every_kind_with_its_title() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert set(ADVICE) == {*VAGUEST_FIRST, SALT_SHARED, *PROFILE_KINDS}
    for kind, (title, fix) in ADVICE.items():
        assert f"| `{kind}` | {title} |\n" in page
        assert fix.endswith(".")


# -- notations of times and ids ----------------------------------------------------------------------------------

START = datetime(2026, 3, 4, 10, 11, 12, 123456, tzinfo=timezone.utc)
TIMES: dict[str, Callable[[datetime], str]] = {
    "ISO 8601": lambda time: time.isoformat(),
    "basic ISO 8601": lambda time: time.strftime("%Y%m%dT%H%M%SZ"),
    "RFC 2822": format_datetime,
    "HTTP": lambda time: format_datetime(time, usegmt=True),
    "asctime": lambda time: time.strftime("%a %b %d %H:%M:%S %Y"),
    "JavaScript": lambda time: time.strftime("%a %b %d %Y %H:%M:%S GMT+0000 (Coordinated Universal Time)"),
    "toLocaleString": lambda time: time.strftime("%m/%d/%Y, %I:%M:%S %p"),
    "Go": lambda time: time.strftime("%Y-%m-%d %H:%M:%S.%f +0000 UTC m=+0.012345"),
    "repr": repr,
    "log4j": lambda time: time.strftime("%Y-%m-%d %H:%M:%S,%f")[:-3],
    "access log": lambda time: time.strftime("[%d/%b/%Y:%H:%M:%S +0000]"),
    "seconds": lambda time: str(int(time.timestamp())),
    "seconds with a fraction": lambda time: str(time.timestamp()),
    "milliseconds": lambda time: str(int(time.timestamp() * 1_000)),
    "microseconds": lambda time: str(int(time.timestamp() * 1_000_000)),
    "nanoseconds": lambda time: f"{int(time.timestamp())}000000123",
    "Japanese": lambda time: time.strftime("%Y\u5e74%m\u6708%d\u65e5 %H\u6642%M\u5206"),
    "compact": lambda time: time.strftime("%Y%m%d%H%M%S"),
    "file name": lambda time: time.strftime("%Y%m%d_%H%M%S"),
}
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IDS: dict[str, tuple[str, str, int]] = {
    "UUID without hyphens": ("", "0123456789abcdef", 32),
    "ULID": ("01K", "0123456789ABCDEFGHJKMNPQRSTVWXYZ", 23),
    "KSUID": ("", BASE62, 27),
    "call": ("call_", BASE62, 24),
    "tool use": ("toolu_01", BASE62, 22),
    "completion": ("chatcmpl-", BASE62, 29),
    "commit": ("", "0123456789abcdef", 40),
    "address": ("0x", "0123456789abcdef", 12),
    "snowflake": ("2", "0123456789", 17),
}
PLACES = ["The value is {}. ", "now={}\n", "<value>{}</value>\n", '{{"value": "{}", "role": "bot"}}\n']


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("notation", TIMES)
def test_times_are_found_in_each_notation(look: Callable[..., DoctorReport], notation: str, place: str) -> None:
    """Of two checks that repair a text, such as ten digits, the more specific one is charged, once."""
    times = [TIMES[notation](START + timedelta(seconds=77_345.77 * n)) for n in range(12)]
    report = look([chat(place.format(time) + RULES, f"q{n}") for n, time in enumerate(times)])
    assert kinds(report) == {"timestamp"}
    assert report.repaired_hit_ratio > 0.8


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("notation", IDS)
def test_ids_are_found_in_each_notation(look: Callable[..., DoctorReport], notation: str, place: str) -> None:
    start, letters, length = IDS[notation]
    dice = random.Random(notation)
    ids = [start + "".join(dice.choices(letters, k=length)) for _ in range(12)]
    report = look([chat(place.format(each) + RULES, f"q{n}") for n, each in enumerate(ids)])
    assert kinds(report) == {"random-id"}
    assert report.repaired_hit_ratio > 0.8


def test_attribution_header_of_claude_code_is_named(look: Callable[..., DoctorReport]) -> None:
    def body(number: int) -> Body:
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{number * 7 + 100}; cc_entrypoint=sdk-cli; cch=00000;"
        system = [{"type": "text", "text": header}, {"type": "text", "text": RULES}]
        return {"model": "m", "system": system, "messages": [{"role": "user", "content": f"Question {number}"}]}

    finding = only(look([body(number) for number in range(12)]))
    assert finding.kind == "attribution-header"
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in finding.fix


# -- sets of tools ----------------------------------------------------------------------------------------------


def tool(name: str, more: str = "") -> Body:
    return {
        "type": "function",
        "function": {"name": name, "description": f"Use {name} with care, and only for what it is for. " * 6 + more},
    }


def session(number: int, toolset: Callable[[int], list[Body]], *, called: Sequence[str] = ("read",)) -> list[Body]:
    """Return the requests of a conversation, each with its own tools and a further call."""
    history: list[Body] = [{"role": "user", "content": f"Task {number}: look into file {number}."}]
    bodies = []
    for turn in range(10):
        messages = [{"role": "system", "content": RULES}, *history]
        bodies.append({"model": "m", "messages": list(messages), "tools": toolset(turn), "session_id": f"s{number}"})
        function = {"name": called[turn % len(called)], "arguments": json.dumps({"line": turn})}
        call = {"id": f"c{number}.{turn}", "type": "function", "function": function}
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append(
            {"role": "tool", "tool_call_id": f"c{number}.{turn}", "content": f"Result {number}.{turn} " * 20}
        )
    return bodies


BASIC = [tool(name) for name in ("read", "write", "search", "run")]
SERVER = [tool(f"mcp_{name}") for name in ("list", "get", "put")]


def test_tools_that_join_late_are_found(look: Callable[..., DoctorReport]) -> None:
    sessions = [
        session(number, lambda turn: BASIC + SERVER[: max(turn - 3, 0)], called=["read", "mcp_get"])
        for number in range(4)
    ]
    report = look([body for each in sessions for body in each])
    finding = report.findings[0]
    assert finding.kind == "tools-late"
    assert finding.divergence is not None
    assert "mcp_" in finding.divergence.later.snippet
    assert report.repaired_hit_ratio - report.hit_ratio > 0.1
    still = look([body for n in range(4) for body in session(n, lambda _: BASIC + SERVER, called=["read", "mcp_get"])])
    assert "tools-late" not in kinds(still)


def test_definitions_that_change_are_found(look: Callable[..., DoctorReport]) -> None:
    moods = ["calm", "busy", "tense", "cheerful", "slow", "loud", "quiet", "hectic", "sleepy", "festive"]
    sessions = [session(n, lambda turn: [tool("read", f"The office is {moods[turn]}."), *BASIC[1:]]) for n in range(4)]
    report = look([body for each in sessions for body in each])
    finding = report.findings[0]
    assert finding.kind == "tools-changed"
    assert finding.divergence is not None
    assert finding.divergence.later.path == "tools[0] (read)"
    assert "The office is" in finding.divergence.later.snippet


def test_applications_may_define_a_tool_in_their_own_ways(look: Callable[..., DoctorReport]) -> None:
    other = {"type": "function", "function": {"name": "read", "description": "Fetch one web page by its address."}}
    one, two = (session(n, lambda _, n=n: [other] if n else BASIC) for n in range(2))  # type: ignore[misc]
    assert "tools-changed" not in kinds(look([body for pair in zip(one, two, strict=True) for body in pair]))


def test_tools_without_a_name_are_kept_apart(look: Callable[..., DoctorReport]) -> None:
    builtin = [{"type": "web_search"}, {"type": "code_interpreter"}, {"type": "mcp", "server_label": "crm"}]
    bodies = [
        body
        for n in range(4)
        for body in session(n, lambda _: builtin + BASIC, called=["read", "run", "write", "search"])
    ]
    assert kinds(look(bodies)) == set()
    late = [body for n in range(4) for body in session(n, lambda turn: builtin[: 1 + turn // 4] + BASIC)]
    assert "tools-late" in kinds(look(late))
    described = [{**each, "description": "Searches the web for pages. " * 40} for each in builtin]
    own = [body for n in range(4) for body in session(n, lambda _: described + BASIC[:1])]
    assert kinds(look(own)) == set(), "how the API calls its own tools is not in the log"


def test_what_engines_do_not_report_is_named_and_not_zero(tmp_path: Path) -> None:
    def line(model: str, details: object) -> str:
        usage = {"prompt_tokens": 1_000, "completion_tokens": 1, "prompt_tokens_details": details}
        request = {"model": model, "messages": [{"role": "user", "content": "a question " * 50}]}
        return json.dumps({"request": request, "response": {"choices": [], "usage": usage}}) + "\n"

    log = tmp_path / "log.jsonl"
    log.write_text(line("quiet", None) * 3)
    report = diagnose(read_log([log]))
    assert (report.reported_prompt_tokens, report.reported_cached_tokens) == (None, None)
    assert any("3 answers report their prompt tokens and no cached ones" in note for note in report.notes)
    log.write_text(line("quiet", None) * 3 + line("loud", {"cached_tokens": 800}) + line("loud", None))
    report = diagnose(read_log([log]))
    assert (report.reported_prompt_tokens, report.reported_cached_tokens) == (2_000, 800)
    assert any("3 answers report" in note for note in report.notes)
    log.write_text(line("loud", {"cached_tokens": 1_800}) * 3)
    report = diagnose(read_log([log]))
    assert (report.reported_prompt_tokens, report.reported_cached_tokens) == (3_000, 3_000)
    assert not any("answers report" in note for note in report.notes)
