"""The journal of a run, and runs that go on with it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from warmprefix import BatchPlan, BatchRequest, ContextBlock, ContextPlanner, PlannedRequest, Templates
from warmprefix.errors import BatchFileError
from warmprefix_openai import BatchResult, BatchRunner
from warmprefix_openai.batch_runner.journal import _VERSION
from warmprefix_tools.emulator import EmulatorConfig

Plan = Callable[..., BatchPlan]
MakeRequests = Callable[..., list[BatchRequest]]
MODEL = EmulatorConfig().model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.journal"


async def run(batch: BatchPlan, client: Any, path: Path, **options: Any) -> list[BatchResult]:
    return [
        result async for result in BatchRunner(batch).run(client, MODEL, journal=path, **{"max_tokens": 4, **options})
    ]


def stored(path: Path) -> dict[str, Any]:
    """Return the results that a closed journal holds, by id."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT id, result FROM results ORDER BY rowid")
        return {json.loads(id): json.loads(result) for id, result in rows}


def log_of(path: Path) -> Path:
    """Return the write-ahead log of a journal in use, or of one whose process was killed."""
    return path.with_name(f"{path.name}-wal")


def plain(results: list[BatchResult]) -> list[Any]:
    return [(result.id, result.completion, result.error, result.attempts, result.ttft) for result in results]


async def test_a_second_run_sends_nothing_and_returns_the_same(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path
) -> None:
    first = await run(plan(requests(3, 4)), client, path)
    size = path.stat().st_size
    batch = plan(requests(3, 4))
    second = await run(batch, client, path)
    assert plain(first) == plain(second)
    assert set(engine.attempts.values()) == {1}
    assert path.stat().st_size == size
    assert batch.owner.commits == 0
    assert len(batch.owner.abandoned) == 12


@pytest.mark.sample(3)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("after", [0, 1, 5, 11])
async def test_a_run_that_was_left_can_be_continued(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path, ordered: bool, after: int
) -> None:
    seen = 0
    async with aclosing(
        BatchRunner(plan(requests(3, 4))).run(client, MODEL, concurrency=2, journal=path, max_tokens=4)
    ) as left:
        async for _ in left:
            seen += 1
            if seen > after:
                break
    kept = set(stored(path))
    assert len(kept) > after
    before = dict(engine.attempts)
    batch = plan(requests(3, 4))
    finished: list[int] = []
    results = await run(batch, client, path, ordered=ordered, progress=lambda stage, done, total: finished.append(done))
    assert all(result.text for result in results)
    if ordered:
        assert [result.id for result in results] == [request.id for request in requests(3, 4)]
    else:
        assert {result.id for result in results} == {request.id for request in requests(3, 4)}
        assert {result.id for result in results[: len(kept)]} == kept
    assert {id for id, count in engine.attempts.items() if count > before.get(id, 0)} == set(batch.positions) - kept
    assert finished == list(range(len(kept), 13))


async def test_failures_are_asked_for_again(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, fault: Any, path: Path
) -> None:
    engine.fault = lambda id, n: fault("status", 400) if id.endswith("m1") else None
    failed = [result.id for result in await run(plan(requests(2, 3)), client, path) if result.error is not None]
    assert failed == ["g0m1", "g1m1"]
    engine.fault = lambda id, n: None
    assert all(result.text for result in await run(plan(requests(2, 3)), client, path))
    assert {id: count for id, count in engine.attempts.items() if count > 1} == {"g0m1": 2, "g1m1": 2}
    assert len(stored(path)) == 6
    assert all(result.text for result in await run(plan(requests(2, 3)), client, path))


async def test_another_plan_of_the_same_requests_continues_it(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path
) -> None:
    asked = requests(2, 3)
    await run(plan(asked), client, path)
    batch = plan(asked[::-1])
    turned = tuple(replace(planned, order=planned.order[::-1], warmed_by=None) for planned in batch.requests[::-1])
    positions = {id: next(i for i, planned in enumerate(turned) if planned.id == id) for id in batch.positions}
    results = await run(replace(batch, requests=turned, positions=positions), client, path)
    assert [result.id for result in results] == [request.id for request in asked[::-1]]
    assert sum(engine.attempts.values()) == 6


async def test_a_write_that_was_cut_off_anywhere_is_dropped(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path, tmp_path: Path
) -> None:
    whole = plain(await run(plan(requests(1, 2)), client, path))
    async with aclosing(BatchRunner(plan(requests(1, 2))).run(client, MODEL, journal=path, max_tokens=4)) as left:
        await anext(left)
    written = tmp_path / "written.journal"
    running = BatchRunner(plan(requests(1, 2))).run(client, MODEL, concurrency=1, journal=written, max_tokens=4)
    async with aclosing(running):
        await anext(running), await anext(running)
        data, log = written.read_bytes(), log_of(written).read_bytes()  # as a process that is killed leaves them
    cut = tmp_path / "cut.journal"
    kept = set()
    for length in [0, 1, 31, 32, 33, *range(40, len(log), 977), len(log) - 1, len(log)]:
        cut.write_bytes(data)
        log_of(cut).write_bytes(log[:length])
        before = sum(engine.attempts.values())
        results = await run(plan(requests(1, 2)), client, cut)
        kept.add(2 - (sum(engine.attempts.values()) - before))
        assert [(id, completion["choices"]) for id, completion, *_ in plain(results)] == [
            (id, completion["choices"]) for id, completion, *_ in whole
        ]
        assert len(stored(cut)) == 2
    assert kept == {0, 1, 2}


async def test_a_journal_of_something_else_is_refused(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path
) -> None:
    await run(plan(requests(2, 2)), client, path)
    written = path.read_bytes()
    asked = requests(2, 2)

    def with_last(blocks: Sequence[ContextBlock | str]) -> BatchPlan:
        return plan([*asked[:-1], BatchRequest("g1m1", blocks, asked[-1].question)])

    def worded(**wording: Any) -> BatchPlan:
        batch = plan(asked)
        requests = [replace(p, wording=replace(p.wording, **wording)) for p in batch]
        return replace(batch, requests=tuple(requests))

    def templated(**templates: Any) -> BatchPlan:
        writer = plan(asked).requests[0].wording.writer
        return worded(writer=replace(writer, templates=Templates(**templates)))

    others: list[tuple[BatchPlan, str, dict[str, Any], str]] = [
        (plan(requests(2, 3)), MODEL, {}, "it is of another batch: of 4 requests, not these 6"),
        (plan(asked[:-1]), MODEL, {}, "it is of another batch: of 4 requests, not these 3"),
        (plan([*asked[:-1], BatchRequest("x", asked[-1].blocks)]), MODEL, {}, "it is of another batch"),
        (plan([*asked[:-1], BatchRequest("g1m1", asked[-1].blocks, "Why?")]), MODEL, {}, "it is of another batch"),
        (plan([*asked[:-1], BatchRequest("g1m1", asked[-1].blocks[1:])]), MODEL, {}, "it is of another batch"),
        (with_last([*asked[-1].blocks[:-1], "Other."]), MODEL, {}, "it is of another batch"),
        (with_last(asked[-1].blocks[::-1]), MODEL, {}, "it is of another batch"),
        (templated(order="In the order {order}."), MODEL, {}, "it is of another batch"),
        (templated(quotes="Best first: {quotes}."), MODEL, {}, "it is of another batch"),
        (worded(preamble=None), MODEL, {}, "it is of another batch"),
        (plan(requests(2, 2, tenants=["acme"])), MODEL, {}, "it is of another batch"),
        (plan(asked, preamble="Answer at length."), MODEL, {}, "it is of another batch"),
        (plan(asked), "other", {}, f"it is of another run: of model '{MODEL}', not 'other'"),
        (plan(asked), MODEL, {"max_tokens": 5}, "it is of another run: with other request options"),
        (plan(asked), MODEL, {"seed": 1}, "it is of another run: with other request options"),
        (
            plan(asked),
            MODEL,
            {"messages": lambda planned: [{"role": "user", "content": "?"}]},
            "it is of another batch",
        ),
    ]
    for batch, model, options, message in others:
        with pytest.raises(BatchFileError, match=r"run.journal: ") as caught:
            await anext(BatchRunner(batch).run(client, model, journal=path, **{"max_tokens": 4, **options}))
        assert message in str(caught.value)
    assert path.read_bytes() == written
    assert sum(engine.attempts.values()) == 4
    for same in ({"extra_headers": {"x-request-from": "elsewhere"}}, {"messages": PlannedRequest.messages}):
        assert len(await run(plan(asked), client, path, concurrency=1, **same)) == 4
    again = with_last([*asked[-1].blocks, asked[-1].blocks[0]])  # which is in the prompt once
    assert len(await run(again, client, path)) == 4
    assert sum(engine.attempts.values()) == 4


async def test_own_messages_are_part_of_the_batch(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path
) -> None:
    def chat(planned: PlannedRequest, more: str = "") -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{planned.render()}\n{more}{planned.request.question}"}]

    await run(plan(requests(2, 3)), client, path, messages=chat)
    turned = plan(requests(2, 3)[::-1], "frequency")
    assert len(await run(turned, client, path, messages=chat)) == 6
    assert sum(engine.attempts.values()) == 6
    for other in (lambda planned: chat(planned, "In one word: "), None):
        with pytest.raises(BatchFileError, match="it is of another batch"):
            await run(plan(requests(2, 3)), client, path, messages=other)


def test_the_default_prompt_is_that_of_the_journals_version() -> None:
    """If this has to be changed, `_VERSION` has to be raised: an older journal holds answers to another prompt."""
    first, second = ContextBlock("The sky.\n[sea] Not a header.", id="sky"), ContextBlock("The sea.", id="sea")
    batch = ContextPlanner().plan_batch([BatchRequest("q", [first, second], "Why?")], preamble="Be brief.")
    chat = [replace(batch["q"], order=order).messages() for order in ((0, 1), (1, 0))]
    assert _VERSION == 1
    assert chat == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{context}\n\nWhy?"}]
        for context in (
            "The sky.\n[sea] Not a header.\n\nThe sea.",
            'The sea.\n\nThe sky.\n[sea] Not a header.\n\nMost relevant above: the passage with "Not a header".',
        )
    ]


def changed(path: Path, *statements: str) -> bytes:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path.read_bytes()


async def test_a_file_that_is_no_journal_is_refused_and_left_alone(
    plan: Plan, requests: MakeRequests, client: Any, path: Path, tmp_path: Path
) -> None:
    await run(plan(requests(1, 2)), client, path)
    good = path.read_bytes()
    stranger = json.dumps({"id": "stranger", "attempts": 1, "error": "x"})

    def journal(*statements: str) -> bytes:
        scratch = tmp_path / "scratch"
        scratch.write_bytes(good)
        return changed(scratch, *statements)

    for data, message in [
        (b"shopping list", "it is no journal of a batch"),
        (b"shopping list\n" * 1_000, "it is no journal of a batch"),
        (b'{"warmprefix_journal": 1}\n', "it is no journal of a batch"),
        (changed(tmp_path / "other", "CREATE TABLE shopping (list TEXT)"), "it is no journal of a batch"),
        (journal("PRAGMA user_version = 7"), "it is of version 7, and this warmprefix reads version 1"),
        (
            journal(f"INSERT INTO results VALUES ('\"stranger\"', '{stranger}')"),
            "no request of this batch is called 'stranger'",
        ),
        (journal("UPDATE results SET result = substr(result, 1, 20)"), "it is damaged: "),
        (journal("UPDATE results SET result = '{\"attempts\": 1}'"), "it is damaged: the result of request 'g0m0'"),
        (journal("UPDATE results SET result = '[]'"), "it is damaged: "),
        (journal("UPDATE results SET id = x'0000' WHERE rowid = 1"), "it is damaged: "),
        (journal("DROP TABLE results"), "it is damaged, or can't be read: no such table: results"),
        (journal("DELETE FROM run"), "it is damaged: "),
        (good[:5_000], "it is damaged, or can't be read: "),
    ]:
        path.write_bytes(data)
        with pytest.raises(BatchFileError) as caught:
            await run(plan(requests(1, 2)), client, path)
        assert str(caught.value).startswith(f"{path}: {message}")
        assert caught.value.path == str(path)
        assert path.read_bytes() == data


async def test_a_result_that_is_too_large_to_read_is_asked_for_again(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(plan(requests(1, 2)), client, path)
    monkeypatch.setattr("warmprefix_openai.batch_runner.journal._MAX_RESULT_BYTES", 10)
    assert len(await run(plan(requests(1, 2)), client, path)) == 2
    assert sum(engine.attempts.values()) == 4


async def test_a_journal_holds_no_key(plan: Plan, requests: MakeRequests, engine: Any, path: Path) -> None:
    headers = {"authorization": "Bearer sk-secret-2", "x-team": "sk-secret-3"}
    async with AsyncOpenAI(base_url=engine.base_url, api_key="sk-secret-1") as client:
        await run(plan(requests(1, 2)), client, path, extra_headers=headers)
    assert b"secret" not in path.read_bytes()
    assert b"Bearer" not in path.read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
async def test_only_its_owner_reads_a_journal(plan: Plan, requests: MakeRequests, client: Any, path: Path) -> None:
    mask = os.umask(0o022)
    try:
        async with aclosing(BatchRunner(plan(requests(1, 2))).run(client, MODEL, journal=path, max_tokens=4)) as left:
            await anext(left)
            files = list(path.parent.iterdir())
            assert {path, log_of(path)} <= set(files)
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(mask)


async def test_two_runs_can_not_share_one(plan: Plan, requests: MakeRequests, client: Any, path: Path) -> None:
    batch = plan(requests(2, 2))
    first = BatchRunner(batch).run(client, MODEL, journal=path, max_tokens=4)
    await anext(first)
    with pytest.raises(BatchFileError, match=r"run.journal: another run is using it"):
        await run(batch, client, path)
    assert len([result async for result in first]) == 3
    assert len(await run(batch, client, path)) == 4


async def test_a_journal_that_can_not_be_opened_is_reported(
    plan: Plan, requests: MakeRequests, client: Any, tmp_path: Path
) -> None:
    for place, message in [(tmp_path, "Is a directory"), (tmp_path / "no" / "where", "No such file or directory")]:
        with pytest.raises(BatchFileError, match=f"it can't be opened: {message}"):
            await run(plan(requests(1, 1)), client, place)


@pytest.mark.skipif(sys.platform == "win32", reason="has no file size limit")
async def test_a_journal_that_can_not_be_written_any_more_ends_the_run(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path
) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if done == 2:
            limit = log_of(path).stat().st_size + 40
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    import resource
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(BatchFileError, match=r"it can't be written: (disk I/O error|database or disk is full)"):
            await run(plan(requests(1, 6)), client, path, concurrency=1, progress=progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handled)
    assert len(stored(path)) == 2
    assert len(await run(plan(requests(1, 6)), client, path)) == 6


async def test_a_copy_goes_on_elsewhere(
    plan: Plan, requests: MakeRequests, engine: Any, client: Any, path: Path, tmp_path: Path
) -> None:
    await run(plan(requests(1, 3)), client, path)
    shutil.copy(path, tmp_path / "copy")
    assert len(await run(plan(requests(1, 3)), client, tmp_path / "copy")) == 3
    assert sum(engine.attempts.values()) == 3
