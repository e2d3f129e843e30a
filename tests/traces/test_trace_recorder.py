"""`TraceRecorder` writes the planner's requests, and `read_trace` returns them unchanged."""

from __future__ import annotations

import io
import json
import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.traces import RECORD_PATH_VARIABLE, RECORD_TEXT_VARIABLE, NoRecorder, RequestRecorder
from warmprefix_telemetry.trace_recorder import TraceRecorder
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import BlockId, Trace


class Request(NamedTuple):
    """The arguments of one `plan`."""

    blocks: Sequence[ContextBlock]
    conversation: str | None = None
    tenant: str | None = None
    model: str | None = None
    preamble: str | None = None

    @property
    def distinct(self) -> list[ContextBlock]:
        return list(dict.fromkeys(self.blocks))

    @property
    def scope(self) -> tuple[str | None, ...]:
        return self.tenant, self.model, self.preamble


def blocks(*names: object) -> list[ContextBlock]:
    return [ContextBlock(f"All there is about {name}.", id=f"Doc_{name}") for name in names]


def read_back(path: Path, requests: Sequence[Request], **options: Any) -> Trace:
    """Plan and record the requests, and return the trace."""
    path.unlink(missing_ok=True)
    with TraceRecorder(path, **options) as recorder:
        planner = ContextPlanner(recorder=recorder)
        for request in requests:
            planner.plan(
                request.blocks,
                conversation=request.conversation,
                tenant=request.tenant,
                model=request.model,
                preamble=request.preamble,
            )
        assert (recorder.requests, recorder.lost) == (len(requests), 0)
    return read_trace(path)


# -- the round trip ------------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet=st.sampled_from('abc\n"\\é中\ud800\u2028'), max_size=2)
IDS = st.none() | st.sampled_from(["a", "b", "a~1", "a\nb", "é", "\udc00", "", "x" * 300, 7]) | TEXTS
SCORES = st.none() | st.floats() | st.integers(-3, 3)
CONTEXT_BLOCKS = st.builds(ContextBlock, TEXTS, IDS, st.none() | st.integers(0, 10**12), SCORES)
NAMES = st.none() | st.sampled_from(["x", "y", "z\n"])
REQUESTS = st.builds(
    Request,
    st.lists(CONTEXT_BLOCKS, max_size=6),
    st.none() | st.sampled_from(["chat", "chat\n2", "\ud800"]),
    NAMES,
    NAMES,
    NAMES,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    suffix=st.sampled_from([".jsonl", ".jsonl.gz"]),
    text=st.booleans(),
)
def test_the_trace_holds_the_requests_of_the_planner(
    scratch: Path, requests: list[Request], suffix: str, text: bool
) -> None:
    trace = read_back(scratch / f"trace{suffix}", requests, text=text)
    names: dict[bytes, BlockId] = {}
    lengths: dict[bytes, int] = {}
    conversations: dict[tuple[str | None, str], tuple[BlockId | None, int]] = {}
    scopes: dict[tuple[str | None, ...], str | None] = {(None, None, None): None}
    assert [request.request for request in trace.requests] == list(range(len(requests)))
    for asked, read in zip(requests, trace.requests, strict=True):
        assert len(read.blocks) == len(asked.distinct)
        for block, name in zip(asked.distinct, read.blocks, strict=True):
            assert names.setdefault(block.fingerprint, name) == name
            assert trace.tokens[name] == lengths.setdefault(block.fingerprint, min(block.tokens, 10**9))
        scores = [block.score for block in asked.distinct]
        finite = all(score is not None and math.isfinite(score) for score in scores)
        assert list(read.scores) == (scores if finite else [])
        if asked.conversation is None:
            assert (read.conversation, read.turn) == (None, 0)
        else:
            number, turn = conversations.get((asked.tenant, asked.conversation), (read.conversation, 0))
            assert (read.conversation, read.turn) == (number, turn + 1)
            conversations[asked.tenant, asked.conversation] = number, turn + 1
        assert scopes.setdefault(asked.scope, read.scope) == read.scope
    for mapping in (names, scopes):
        assert len(set(mapping.values())) == len(mapping)
    assert len({number for number, _ in conversations.values()}) == len(conversations)
    times = [request.seconds for request in trace.requests]
    assert times[0] == 0.0
    assert times == sorted(times, key=lambda seconds: seconds or 0.0)


def test_ids_name_the_blocks(tmp_path: Path) -> None:
    trace = read_back(tmp_path / "t", [Request(blocks(1, 2)), Request([ContextBlock("by number", id=7), *blocks(2)])])
    assert [request.blocks for request in trace.requests] == [("Doc_1", "Doc_2"), ("7", "Doc_2")]


def test_a_fingerprint_names_a_block_without_id(tmp_path: Path) -> None:
    block = ContextBlock("nameless")
    assert read_back(tmp_path / "t", [Request([block])]).requests[0].blocks == (block.fingerprint.hex(),)


def test_the_text_identifies_a_block_not_the_id(tmp_path: Path) -> None:
    new = ContextBlock("The new text.", id="Doc_1", tokens=9)
    again = ContextBlock(blocks(1)[0].text, id="other", tokens=500)
    trace = read_back(tmp_path / "t", [Request(blocks(1)), Request([new, again]), Request([new])])
    assert [request.blocks for request in trace.requests] == [
        ("Doc_1",),
        (new.fingerprint.hex(), "Doc_1"),
        (new.fingerprint.hex(),),
    ]
    assert trace.tokens == {"Doc_1": blocks(1)[0].tokens, new.fingerprint.hex(): 9}


def test_an_id_that_looks_like_a_generated_name_is_replaced(tmp_path: Path) -> None:
    victim = ContextBlock("the victim", tokens=3)
    name = victim.fingerprint.hex()
    thieves = [ContextBlock("thief one", id=name, tokens=1), ContextBlock("thief two", id=f"{name}~3", tokens=2)]
    trace = read_back(tmp_path / "t", [Request([*thieves, victim])])
    assert len(set(trace.requests[0].blocks)) == 3
    assert [trace.tokens[block] for block in trace.requests[0].blocks] == [1, 2, 3]


def test_the_header_describes_the_file(tmp_path: Path) -> None:
    trace = read_back(tmp_path / "monday.jsonl.gz", [Request(blocks(1))])
    assert trace.name == "monday"
    assert set(trace.header) == {"name", "source", "recorded", "notes"}
    assert read_back(tmp_path / "monday.jsonl.gz", [Request(blocks(1))], name="mine\ud800").name == "mine?"


def test_query_tokens_are_recorded(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t") as recorder:
        recorder.record(["a string", *blocks(1), "a string"], query_tokens=12)
    (request,) = read_trace(tmp_path / "t").requests
    assert (len(request.blocks), request.query_tokens) == (2, 12)


def test_candidates_are_recorded_with_the_places_and_the_name_of_their_request(tmp_path: Path) -> None:
    candidates = [ContextBlock(f"Passage {n}.", id=f"p{n}", tokens=3, score=0.5 - n) for n in range(4)]
    with TraceRecorder(tmp_path / "t") as recorder:
        recorder.record(candidates, k=2, request="answer-17")
        recorder.record(candidates[:1])
    lines = list(map(json.loads, (tmp_path / "t").read_text().splitlines()))
    assert [line for line in lines[1:] if "block" not in line] == [
        {
            "request": "answer-17",
            "conversation": None,
            "turn": 0,
            "query_tokens": 0,
            "blocks": ["p0", "p1", "p2", "p3"],
            "scores": [0.5, -0.5, -1.5, -2.5],
            "t": 0.0,
            "k": 2,
        },
        {
            "request": 1,
            "conversation": None,
            "turn": 0,
            "query_tokens": 0,
            "blocks": ["p0"],
            "scores": [0.5],
            "t": lines[-1]["t"],
        },
    ]


def test_every_field_of_the_format_is_written(tmp_path: Path) -> None:
    read_back(tmp_path / "t", [Request(blocks(1), conversation="c", tenant="acme")])
    request = json.loads((tmp_path / "t").read_text().splitlines()[-1])
    assert list(request) == ["request", "conversation", "turn", "query_tokens", "blocks", "scores", "t", "scope"]


# -- no more than that ---------------------------------------------------------------------------------------------

SECRET = st.text(alphabet="ßþðøæ", min_size=4, max_size=30)


@given(secrets=st.lists(SECRET, min_size=5, max_size=9, unique=True), text=st.booleans())
def test_the_file_holds_no_text_conversation_or_tenant(scratch: Path, secrets: list[str], text: bool) -> None:
    path = scratch / "secret.jsonl"
    path.unlink(missing_ok=True)
    who, passages = secrets[:4], secrets[4:]
    with TraceRecorder(path, text=text) as recorder:
        planner = ContextPlanner(recorder=recorder)
        context = [ContextBlock(passage, id=f"id{n}") for n, passage in enumerate(passages)]
        for request in ([ContextBlock(passages[0], id=passages[0])], context):
            planner.plan(request, conversation=who[0], tenant=who[1], model=who[2], preamble=who[3])
    file = path.read_text()
    parsed = [json.loads(line) for line in file.splitlines()]
    assert [line["text"] for line in parsed if "text" in line] == (passages if text else [])
    if not text:
        assert not set(file) & set("ßþðøæ")
    elif not any(name in passage for name in who for passage in passages):
        assert not any(name in file for name in who)


def test_the_digest_of_a_scope_cannot_be_guessed(tmp_path: Path) -> None:
    scopes = {
        read_back(tmp_path / f"{n}.jsonl", [Request(blocks(1), tenant="acme")]).requests[0].scope for n in range(3)
    }
    assert len(scopes) == 3


# -- bounded -------------------------------------------------------------------------------------------------------


@given(places=st.lists(st.integers(0, 9), max_size=60), ids=st.booleans(), varying=st.booleans())
def test_names_stay_the_same_beyond_the_bound(scratch: Path, places: list[int], ids: bool, varying: bool) -> None:
    """They stay the same however often a block was forgotten; a varying length is part of the name."""
    context = [
        ContextBlock(f"text {n}", id=f"Doc_{n}" if ids else None, tokens=n + (i % 2 if varying else 0))
        for i, n in enumerate(places)
    ]
    trace = read_back(scratch / "bounded", [Request([block]) for block in context] or [Request([])], max_blocks=3)
    names_of: dict[tuple[bytes, int], BlockId] = {}
    for block, request in zip(context, trace.requests, strict=False):
        assert (
            names_of.setdefault((block.fingerprint, trace.tokens[request.blocks[0]]), request.blocks[0])
            == request.blocks[0]
        )
    assert len(set(names_of.values())) == len(names_of)
    if ids:
        first = list(dict.fromkeys(places))[:3]
        assert {f"Doc_{n}" for n in first} <= set(trace.tokens)


def test_memory_is_bounded() -> None:
    recorder = TraceRecorder(io.StringIO(), max_blocks=10, max_conversations=5)
    for n in range(500):
        recorder.record(blocks(n), conversation=str(n))
    lines = recorder._lines
    assert len(lines._turns) == 5
    assert len(lines._names) == len(lines._owners) == len(lines._generated) == 10


def test_a_forgotten_conversation_counts_as_new(tmp_path: Path) -> None:
    names = ["a", "b", "a", "c", "a", "b"]
    trace = read_back(tmp_path / "t", [Request(blocks(1), name) for name in names], max_conversations=2)
    assert [(request.conversation, request.turn) for request in trace.requests] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (2, 1),
        (0, 3),
        (3, 1),
    ]


# -- bad arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_blocks", "message"),
    [
        ("text", "blocks must be a sequence of ContextBlock or str, got one str"),
        (None, "blocks must be a sequence"),
        ([3], r"blocks\[0\] must be a ContextBlock or a str, got int"),
    ],
)
def test_a_bad_request_is_refused_and_not_recorded(request_blocks: Any, message: str) -> None:
    recorder = TraceRecorder(io.StringIO())
    with pytest.raises(TypeError, match=message):
        recorder.record(request_blocks)
    assert (recorder.requests, recorder.lost) == (0, 0)


# -- with a planner --------------------------------------------------------------------------------------------


class Failing:
    """A recorder that never works."""

    def record(self, blocks: Sequence[ContextBlock], **request: object) -> None:
        raise OSError("no space left on the moon")


def test_a_failing_recorder_changes_only_a_count(caplog: pytest.LogCaptureFixture) -> None:
    planners = [ContextPlanner(recorder=recorder) for recorder in (NoRecorder(), Failing())]
    rng = random.Random(2)
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        for n in range(30):
            request = blocks(*rng.sample(range(8), 4))
            rendered = []
            for planner in planners:
                with planner.planning(request, conversation=str(n % 3), placement="tail") as plan:
                    rendered.append(plan.render())
            assert rendered[0] == rendered[1]
    assert [planner.stats().recorder_errors for planner in planners] == [0, 30]
    assert [record.levelname for record in caplog.records] == ["WARNING"] + 29 * ["DEBUG"]
    assert "no space left on the moon" in caplog.text


class Greedy:
    """A recorder that empties the list of blocks."""

    def record(self, blocks: Any, **request: object) -> None:
        blocks.clear()


def test_a_recorder_cannot_change_the_request() -> None:
    planner = ContextPlanner(recorder=Greedy())
    assert [planned.block.id for planned in planner.plan(blocks(1, 2)).blocks] == ["Doc_1", "Doc_2"]


class Restless(io.StringIO):
    """A stream whose second write is interrupted by a signal handler."""

    def __init__(self) -> None:
        super().__init__()
        self.handler: Callable[[], object] = list
        self.writes = 0

    def write(self, lines: str) -> int:
        self.writes += 1
        if self.writes == 2:
            self.handler()
        return super().write(lines)


def test_a_signal_handler_may_record_and_close() -> None:
    """It runs in the thread that is inside `record`, so it must not wait for the lock."""
    stream = Restless()
    recorder = TraceRecorder(stream)
    stream.handler = lambda: recorder.record(blocks(9))
    for n in range(3):
        recorder.record(blocks(n))
    assert (recorder.requests, recorder.lost) == (3, 1)
    stream.writes, stream.handler = 1, recorder.close
    recorder.record(blocks(3))
    recorder.record(blocks(4))
    assert (recorder.requests, recorder.lost) == (4, 2)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["blocks"] for line in lines if "request" in line] == [[f"Doc_{n}"] for n in range(4)]


def test_a_refused_request_is_not_recorded() -> None:
    recorder = TraceRecorder(io.StringIO())
    planner = ContextPlanner(recorder=recorder)
    for arguments in ({"placement": "middle"}, {"conversation": ""}, {"history": "text"}):
        with pytest.raises((TypeError, ValueError)):
            planner.plan(blocks(1), **arguments)  # type: ignore[arg-type]
    assert recorder.requests == 0


def test_the_recorder_receives_relevance_order(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t")
    planner = ContextPlanner(recorder=recorder)
    longer = [ContextBlock(f"Passage {number}. " + "word " * 40, id=f"Doc_{number}") for number in (1, 2, 3)]
    planner.commit(planner.plan(longer))
    plan = planner.plan(longer[::-1])
    assert plan.reordered
    recorder.close()
    assert [request.blocks[0] for request in read_trace(tmp_path / "t").requests] == ["Doc_1", "Doc_3"]


async def test_async_planning_is_recorded() -> None:
    recorder = TraceRecorder(io.StringIO())
    planner = ContextPlanner(recorder=recorder)
    async with planner.planning(blocks(1)):
        assert recorder.requests == 1


def test_an_object_that_is_not_a_recorder_is_refused() -> None:
    with pytest.raises(TypeError, match="recorder must be a RequestRecorder or None, got str"):
        ContextPlanner(recorder="trace.jsonl")  # type: ignore[arg-type]
    assert isinstance(NoRecorder(), RequestRecorder)
    assert isinstance(TraceRecorder(io.StringIO()), RequestRecorder)


def test_planners_of_a_process_share_the_recorder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD_PATH_VARIABLE, str(tmp_path / "env.jsonl"))
    monkeypatch.setenv(RECORD_TEXT_VARIABLE, "1")
    for n in range(3):
        ContextPlanner().plan(blocks(n))
    ContextPlanner(recorder=NoRecorder()).plan(blocks(9))
    monkeypatch.setenv(RECORD_PATH_VARIABLE, "")
    ContextPlanner().plan(blocks(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.jsonl"]
    assert [request.blocks for request in read_trace(tmp_path / "env.jsonl").requests] == [
        ("Doc_0",),
        ("Doc_1",),
        ("Doc_2",),
    ]
    assert "All there is about 2." in (tmp_path / "env.jsonl").read_text()


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_threads_share_a_recorder(tmp_path: Path, name: str) -> None:
    recorder = TraceRecorder(tmp_path / name)
    planner = ContextPlanner(recorder=recorder)
    start = threading.Barrier(8)

    def serve(worker: int) -> None:
        start.wait()
        for n in range(50):
            planner.plan(blocks(n, f"own-{worker}"), conversation=f"chat-{worker}")

    threads = [threading.Thread(target=serve, args=[worker]) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    trace = read_trace(tmp_path / name)
    assert [request.request for request in trace.requests] == list(range(400))
    for number in range(8):
        turns = [request for request in trace.requests if request.conversation == number]
        assert [request.turn for request in turns] == list(range(1, 51))
        assert [request.blocks[0] for request in turns] == [f"Doc_{n}" for n in range(50)]
        assert len({request.blocks[1] for request in turns}) == 1
