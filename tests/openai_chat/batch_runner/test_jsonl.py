"""Batch files for a service, and its answers."""

from __future__ import annotations

import gzip
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import BatchPlan, BatchRequest
from warmprefix.errors import BatchFileError
from warmprefix_openai import BatchRunner
from warmprefix_openai.batch_runner.jsonl import file_ends
from warmprefix_openai.outputs import OutputError
from warmprefix_tools.emulator import EmulatorConfig

Plan = Callable[..., BatchPlan]
MakeRequests = Callable[..., list[BatchRequest]]
MODEL = EmulatorConfig().model


def lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_lines_of_a_file(plan: Plan, requests: MakeRequests, tmp_path: Path) -> None:
    batch = plan(requests(2, 3, tenants=["acme", None]))
    (path,) = BatchRunner(batch).write_jsonl(tmp_path / "night.jsonl", MODEL, max_tokens=4)
    assert path == tmp_path / "night.jsonl"
    written = lines(path)
    assert [line["custom_id"] for line in written] == [planned.id for planned in batch]
    for line, planned in zip(written, batch, strict=True):
        body = {"max_tokens": 4, "model": MODEL, "messages": planned.messages()}
        if planned.request.tenant is not None:
            body["cache_salt"] = planned.cache_salt
        assert line == {"custom_id": planned.id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_own_messages_and_a_packed_file(plan: Plan, requests: MakeRequests, tmp_path: Path) -> None:
    batch = plan(requests(1, 2))
    chat = [{"role": "user", "content": "?"}]
    paths = BatchRunner(batch).write_jsonl(
        tmp_path / "night.jsonl.gz", MODEL, max_requests=1, messages=lambda _: chat, endpoint="/chat/completions"
    )
    assert [path.name for path in paths] == ["night.jsonl.gz", "night-2.jsonl.gz"]
    for path in paths:
        written = json.loads(gzip.decompress(path.read_bytes()))
        assert written["body"] == {"model": MODEL, "messages": chat}
        assert written["url"] == "/chat/completions"


def test_an_empty_batch_is_an_empty_file(plan: Plan, tmp_path: Path) -> None:
    (path,) = BatchRunner(plan([])).write_jsonl(tmp_path / "none.jsonl", MODEL, max_requests=5, max_bytes=5)
    assert path.read_text() == ""
    assert list(BatchRunner(plan([])).read_jsonl(path)) == []


def test_files_end_between_groups(plan: Plan, requests: MakeRequests, tmp_path: Path) -> None:
    batch = plan(requests(5, 4))
    whole = lines(*BatchRunner(batch).write_jsonl(tmp_path / "whole.jsonl", MODEL))
    largest = max(len(json.dumps(line)) + 1 for line in whole)
    for most, size in [(7, None), (None, 7 * largest), (7, 10**9)]:
        paths = BatchRunner(batch).write_jsonl(tmp_path / "part.jsonl", MODEL, max_requests=most, max_bytes=size)
        assert lines(*paths) == whole
        assert size is None or all(path.stat().st_size <= size for path in paths)
        for path in paths:
            groups = [line["custom_id"].partition("m")[0] for line in lines(path)]
            assert len(groups) % 4 == 0
            assert len(groups) <= 7


@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=40),
    max_requests=st.none() | st.integers(1, 12),
    max_bytes=st.none() | st.integers(20, 100),
)
def test_every_file_keeps_its_bounds_and_is_half_full(
    rows: list[tuple[int, int]], max_requests: int | None, max_bytes: int | None
) -> None:
    sizes, costs = [row[0] for row in rows], [row[1] for row in rows]
    ends = list(file_ends(sizes, costs, max_requests, max_bytes))
    assert ends[-1] == len(rows)
    start = 0
    for end in ends:
        assert max_requests is None or end - start <= max_requests
        assert max_bytes is None or sum(sizes[start:end]) <= max_bytes
        if end < len(rows):
            fits = start
            while (max_requests is None or fits < start + max_requests) and (
                max_bytes is None or sum(sizes[start : fits + 1]) <= max_bytes
            ):
                fits += 1
            assert end - start >= (fits - start) / 2
            assert costs[end] == min(costs[start + (fits - start + 1) // 2 : fits + 1])
        start = end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint must end with /chat/completions"),
        ({"max_requests": 0}, "max_requests must be 1 or more, or None, got 0"),
        ({"max_bytes": -1}, "max_bytes must be 1 or more, or None, got -1"),
        ({"stream": True}, "stream must be left out of a batch file"),
        ({"max_bytes": 100}, r"max_bytes must be \d+ or more, for request 'g0m0' alone, got 100"),
    ],
)
def test_bad_arguments(
    plan: Plan, requests: MakeRequests, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchRunner(plan(requests(1, 1))).write_jsonl(tmp_path / "x.jsonl", MODEL, **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="Cannot write"):
        BatchRunner(plan([])).write_jsonl(tmp_path / "no" / "x.jsonl", MODEL)


def run_as_a_batch(engine: Any, sources: Sequence[Path], output: Path) -> None:
    """Do the same as `vllm run-batch`, with the emulator as engine: each line on its own, not in order."""
    results = []
    for line in lines(*sources):
        request = urllib.request.Request(
            engine.base_url.removesuffix("/v1") + line["url"],
            json.dumps(line["body"]).encode(),
            {"content-type": "application/json"},
        )
        result: dict[str, Any] = {"id": f"vllm-{line['custom_id']}", "custom_id": line["custom_id"], "error": None}
        try:
            with urllib.request.urlopen(request) as answer:
                result["response"] = {"status_code": 200, "request_id": "r", "body": json.load(answer)}
        except urllib.error.HTTPError as error:
            with error:
                result["error"] = json.load(error)
            result["response"] = {"status_code": error.code, "request_id": "r", "body": None}
        results.append(json.dumps(result))
    random.Random(0).shuffle(results)
    output.write_text("\n".join(results) + "\n\n")


def test_there_and_back(plan: Plan, requests: MakeRequests, engine: Any, fault: Any, tmp_path: Path) -> None:
    asked = requests(3, 4, tenants=["acme", None])
    batch = plan(asked)
    sources = BatchRunner(batch).write_jsonl(tmp_path / "in.jsonl", MODEL, max_requests=5, max_tokens=6)
    assert len(sources) == 3
    engine.fault = lambda id, n: fault("status", 500) if id == "g1m2" else None
    run_as_a_batch(engine, sources[:2], tmp_path / "out-1.jsonl")
    run_as_a_batch(engine, sources[2:], tmp_path / "out-2.jsonl")
    results = list(BatchRunner(batch).read_jsonl(tmp_path / "out-2.jsonl", tmp_path / "out-1.jsonl"))
    assert [result.id for result in results] == [request.id for request in asked]
    for result in results:
        assert engine.bodies[result.id]["messages"] == batch[result.id].messages()
        if result.id == "g1m2":
            assert result.error == "status 500: on demand"
            assert result.completion is None
        else:
            assert result.error is None
            assert result.text
            assert result.completion_tokens == 6
            assert result.cached_tokens is not None


def test_a_request_without_a_line_is_reported(plan: Plan, requests: MakeRequests, engine: Any, tmp_path: Path) -> None:
    batch = plan(requests(1, 2))
    BatchRunner(batch).write_jsonl(tmp_path / "in.jsonl", MODEL, max_tokens=2)
    run_as_a_batch(engine, [tmp_path / "in.jsonl"], tmp_path / "out.jsonl")
    kept = [line for line in (tmp_path / "out.jsonl").read_text().splitlines() if "g0m1" not in line]
    (tmp_path / "out.jsonl").write_text("\n".join(kept))
    here, gone = BatchRunner(batch).read_jsonl(tmp_path / "out.jsonl")
    assert here.text
    assert gone.error == f"no line in {tmp_path / 'out.jsonl'}"
    assert [result.error for result in BatchRunner(batch).read_jsonl()] == ["no line in no file"] * 2


def test_a_wrong_output_file_is_refused(plan: Plan, requests: MakeRequests, tmp_path: Path) -> None:
    batch = plan(requests(1, 2))
    good, path = '{"custom_id": "g0m0", "response": null, "error": {"message": "expired"}}', tmp_path / "out.jsonl"
    for text, message in [
        (f"{good}\nno json\n", "line 2: it is no JSON"),
        ("[]\n", "line 1: it is no result of a batch: it has no custom_id"),
        ('{"custom_id": 7}\n', "line 1: it is no result of a batch: it has no custom_id"),
        ('\n{"custom_id": "x"}\n', "line 2: no request of this batch is called 'x'"),
        (f"{good}\n\n{good}\n", f"line 3: request 'g0m0' had a line before, in {path}, line 1"),
    ]:
        path.write_text(text)
        with pytest.raises(BatchFileError) as caught:
            BatchRunner(batch).read_jsonl(path)
        assert str(caught.value) == f"{path}, {message}"
    with pytest.raises(BatchFileError, match="it can't be read: No such file"):
        BatchRunner(batch).read_jsonl(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"response": None, "error": {"code": "batch_expired", "message": "too late"}}, "status None: too late"),
        (
            {"response": {"status_code": 400, "body": {"error": {"message": "too long"}}}, "error": None},
            "status 400: too long",
        ),
        ({"response": {"status_code": 400, "body": None}, "error": "bad body"}, "status 400: bad body"),
        ({"response": {"status_code": 200, "body": {}}, "error": None}, "status 200: {}"),
        ({}, "status None: None"),
    ],
)
def test_every_shape_of_a_failure_is_read(
    plan: Plan, requests: MakeRequests, tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    (tmp_path / "out.jsonl").write_text(json.dumps({"custom_id": "g0m0", **line}))
    (result,) = BatchRunner(plan(requests(1, 1))).read_jsonl(tmp_path / "out.jsonl")
    assert result.error == message
