"""References to outputs that agents wrap: heads that differ from call to call, JSON, white space at the ends."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.requests.test_requests import ROUTES, TEXTS, Turn, body_of, results

from warmprefix_requests import RewriteRoute, restored, rewrite
from warmprefix_requests.wrappers import bare_output

SEA = TEXTS[0].strip()
BARE = '[Word for word the bare output of the earlier call read({"path":"a"}).]'
_ESCAPED = json.dumps(BARE)[1:-1]


def codex(chunk: str, text: str) -> str:
    return (
        f"Chunk ID: {chunk}\nWall time: 0.0{len(chunk)}12 seconds\nProcess exited with code 0\n"
        f"Original token count: 92\nOutput:\n{text}"
    )


def older_codex(text: str) -> str:
    return f"Exit code: 0\nWall time: 0.1 seconds\nTotal output lines: 9\nOutput:\n{text}"


def structured_codex(text: str) -> str:
    output = {"output": text, "metadata": {"exit_code": 0, "duration_seconds": 0.1}}
    return json.dumps(output, ensure_ascii=False, separators=(",", ":"))


def hermes(text: str) -> str:
    return json.dumps({"output": text, "exit_code": 0, "error": None}, ensure_ascii=False)


def hermes_code(text: str) -> str:
    output = {"status": "success", "output": text, "tool_calls_made": 2, "duration_seconds": 0.31}
    return json.dumps(output, ensure_ascii=False)


def mcp(text: str) -> str:
    return json.dumps([{"type": "text", "text": text}], ensure_ascii=False, separators=(",", ":"))


def mcp_behind_codex(text: str) -> str:
    return f"Wall time: 0.1234 seconds\nOutput:\n{mcp(text)}"


WRAPPERS: dict[str, Any] = {
    "nothing": lambda text: text,
    "final newline": lambda text: f"{text}\n",
    "white space": lambda text: f"\n  {text} \t\n",
    "Codex": lambda text: codex("7555a9", text),
    "Codex again": lambda text: codex("0c1", f"{text}\n"),
    "Codex, shell": older_codex,
    "Codex, structured shell": structured_codex,
    "Hermes": hermes,
    "Hermes, code": hermes_code,
    "MCP": mcp,
    "MCP behind Codex": mcp_behind_codex,
    "Hermes with a newline": lambda text: hermes(f"{text}\n"),
}
BODIES = [SEA, f'"{SEA}" said\n\n\tthe sailor\\: über 3 km, 深い', "\n".join([f'{n} = "x"' for n in range(80)])]


@pytest.mark.parametrize("first", WRAPPERS)
@pytest.mark.parametrize("second", WRAPPERS)
@pytest.mark.parametrize("route", ROUTES)
def test_an_output_is_found_in_each_wrapper(route: RewriteRoute, first: str, second: str) -> None:
    for text in BODIES:
        body = body_of(route, [("read", "a", WRAPPERS[first](text)), ("run", "b", WRAPPERS[second](text))])
        rewritten = rewrite(route, body)
        assert restored(route, rewritten.body) == body
        assert rewritten.references == 1
        sent = results(route, rewritten.body)
        assert sent[0] == WRAPPERS[first](text)
        reference = BARE.replace("bare output", "result") if first == second else WRAPPERS[second](BARE)
        assert sent[1] == reference


@pytest.mark.parametrize("wrapped", [codex("7555a9", f"{SEA}\n"), codex("9", SEA), hermes(SEA), f" {SEA}\n"])
def test_what_stands_around_an_output_stays(wrapped: str) -> None:
    body = body_of("chat", [("read", "a", SEA), ("exec", "b", wrapped)])
    [_, sent] = results("chat", rewrite("chat", body).body)
    written = json.dumps(SEA)[1:-1] if wrapped.startswith("{") else SEA
    assert sent == wrapped.replace(written, _ESCAPED if wrapped.startswith("{") else BARE)


def test_a_command_that_ran_again_with_another_head_is_named_so() -> None:
    runs = [("exec", "a", codex(str(n), SEA)) for n in range(3)]
    body = body_of("responses", [runs[0], ("exec", "b", "ok"), *runs[1:]])
    sent = results("responses", rewrite("responses", body).body)
    again = '[Ran again; word for word the bare output of the earlier call exec({"path":"a"}).]'
    assert sent[2:] == [codex(str(n), SEA).replace(SEA, again) for n in (1, 2)]
    assert restored("responses", rewrite("responses", body).body) == body


def test_a_call_that_gave_other_outputs_is_named_by_its_number() -> None:
    turns = [("exec", "a", codex("1", TEXTS[1])), ("exec", "a", codex("2", SEA)), ("exec", "b", codex("3", SEA))]
    sent = results("chat", rewrite("chat", body_of("chat", turns)).body)
    assert 'the bare output of the earlier call exec({"path":"a"}), number 2 of such calls.]' in sent[2]


@pytest.mark.parametrize(
    "other",
    [
        json.dumps([{"text": SEA}, {"text": TEXTS[1]}]),  # one of several passages
        json.dumps({"output": SEA, "error": "x" * 300}),
        json.dumps({"about": "x" * 300, "output": SEA}),
        f'{{"output": "{SEA}',
        f'{{"output": "{SEA}\\q"}}',
        f'{{"output":\n"\\u0054{SEA[1:]}"}}',  # written in another way: nothing could restore it
        json.dumps({"name": SEA}),
        f"Chunk: 9\nOutput:\n{SEA}",
        f"Output:\n{SEA}",
        codex("1", f"> {SEA}"),
    ],
)
def test_another_text_stays(other: str) -> None:
    body = body_of("chat", [("read", "a", SEA), ("search", "b", other)])
    assert rewrite("chat", body).body is body


NUMBERED: dict[str, Any] = {
    "Claude Code": lambda text: "\n".join([f"{n}\t{line}" for n, line in enumerate(f"{text}\n".split("\n"), 1)]),
    "Claude Code 1": lambda text: "\n".join([f"{n:6}→{line}" for n, line in enumerate(text.split("\n"), 41)]),
    "Hermes": lambda text: json.dumps({"content": NUMBERED["bars"](text), "total_lines": 80}, ensure_ascii=False),
    "bars": lambda text: "\n".join([f"{n}|{line}" for n, line in enumerate(f"{text}\n".split("\n"), 1)]),
}


@pytest.mark.parametrize("number", NUMBERED)
@pytest.mark.parametrize("route", ROUTES)
def test_an_output_may_be_that_of_numbered_lines(route: RewriteRoute, number: str) -> None:
    numbered, plain = NUMBERED[number](BODIES[2]), codex("1", f"{BODIES[2]}\n")
    body = body_of(route, [("read", "a", numbered), ("run", "b", plain), ("view", "c", f" {numbered}\n")])
    rewritten = rewrite(route, body)
    assert results(route, rewritten.body) == [numbered, codex("1", f"{BARE}\n"), f" {numbered}\n"]
    assert restored(route, rewritten.body) == body


@pytest.mark.parametrize("separator", ["\t", "|"])
@pytest.mark.parametrize("step", [7, -1, 0])
def test_the_first_column_of_a_table_is_no_line_number(separator: str, step: int) -> None:
    lines = BODIES[2].split("\n")
    table = "\n".join([f"{100 + step * at}{separator}{line}" for at, line in enumerate(lines)])
    for first in (table, json.dumps({"content": table})):
        body = body_of("chat", [("query", "a", first), ("query", "b", BODIES[2])])
        assert rewrite("chat", body).body is body


@pytest.mark.parametrize("numbered", [f"1\t{BARE}", f"1\t{BARE}\n2\t", json.dumps({"content": f"1|{BARE}\n2|"})])
def test_a_numbered_line_is_no_reference(numbered: str) -> None:
    body = body_of("chat", [("read", "a", hermes(SEA)), ("read", "b", numbered)])
    assert restored("chat", body) == body


def test_an_echo_of_a_reference_to_an_output_is_the_output() -> None:
    body = body_of("chat", [("read", "a", hermes(SEA)), ("run", "b", codex("1", f"{SEA}\n"))])
    echoes = rewrite("chat", body).echoes
    assert echoes.restored(json.dumps({"content": BARE})) == json.dumps({"content": SEA})
    assert echoes.restored({"content": f"# {BARE}\n"}) == {"content": f"# {SEA}\n"}
    assert dict(echoes.texts) == {BARE: SEA}


@pytest.mark.parametrize("wrap", [WRAPPERS["nothing"], WRAPPERS["Codex"], hermes, mcp_behind_codex])
def test_an_imitation_is_no_source_and_no_harm(wrap: Any) -> None:
    imitation = wrap(BARE)
    turns = [("read", "a", hermes(SEA)), ("web", "x", imitation), ("web", "y", imitation), ("run", "b", SEA)]
    rewritten = rewrite("chat", body_of("chat", turns))
    assert results("chat", rewritten.body) == [hermes(SEA), imitation, imitation, BARE]
    assert results("chat", restored("chat", rewritten.body))[3] == SEA


wrapped = st.builds(
    lambda wrap, text: wrap(text),
    st.sampled_from([*WRAPPERS.values(), *NUMBERED.values()]),
    st.sampled_from([*BODIES, "short", ""]),
)
turns = st.lists(st.tuples(st.sampled_from(["read", "run"]), st.sampled_from(["a", "b"]), wrapped), max_size=9)


@given(st.sampled_from(ROUTES), turns)
def test_every_wrapped_result_can_be_restored(route: RewriteRoute, given_turns: list[Turn]) -> None:
    body = body_of(route, given_turns)
    assert restored(route, rewrite(route, body).body) == body


@given(turns)
def test_every_cut_of_a_session_is_sent_as_its_beginning(given_turns: list[Turn]) -> None:
    cuts = [
        results("chat", rewrite("chat", body_of("chat", given_turns[:length])).body)
        for length in range(len(given_turns) + 1)
    ]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(cuts))


@given(
    st.text(max_size=700)
    | st.builds(codex, st.text(max_size=9), st.text(max_size=400))
    | st.builds(hermes, st.text(max_size=400))
)
def test_a_reference_has_the_same_place(text: str) -> None:
    output = bare_output(text)
    placed = bare_output(output.with_text(BARE))
    assert (placed.head, placed.text, placed.tail) == (output.head, BARE, output.tail)


@pytest.mark.parametrize("part", ["Wall time: 1\n", "[", '{"output": "', '{"output": "x", ', " ", '"'])
def test_what_never_ends_costs_its_length(part: str) -> None:
    text = part * (2_000_000 // len(part))
    output = bare_output(text)
    assert output.with_text(output.text) == text


def test_a_short_result_is_no_source_if_an_imitation_follows() -> None:
    short = "深" * 100  # in bytes it is long
    turns = [("read", "a", short), ("exec", "b", codex("7555a9", f"{short}{' ' * 200}")), ("web", "x", BARE)]
    turns += [("read", "c", SEA), ("read", "d", SEA)]
    body = body_of("chat", turns)
    sent = results("chat", rewrite("chat", body).body)
    assert sent[:4] == [text for _, _, text in turns[:4]]
    assert sent[4] == BARE.replace("bare output", "result").replace('"a"', '"c"')
